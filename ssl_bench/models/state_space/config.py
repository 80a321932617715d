"""The frozen description of a state space model, as its checkpoint stores it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import gcd
from typing import Annotated, Any, Literal, get_args

from ssl_bench.composition.fields import Count, CountOrZero, Depth, Items, Width, check_fields
from ssl_bench.errors import CheckpointError, ConfigurationError
from ssl_bench.models.fields import from_dict

Version = Literal["mamba1", "mamba2"]
Piece = Literal["decay", "step", "correlation", "convolution"]
StateDecay = Literal["power", "constant"]
# Width of a mixer over that of the model.
_EXPANSION = 2


@dataclass(frozen=True)
class StateSpaceConfig:
    """Architecture and initialisation of a Mamba, which reads tokens and names the next one.

    Args:
        version: "mamba1" has a state and a step a channel, "mamba2" a step and a decay a head.
        num_states: Numbers that a channel keeps of the past. Mamba 1 takes 32 in the thesis.
        head_width: Channels of a head of Mamba 2; Mamba 1 has no heads.
        num_tokens: Different ones, those that are no letters included.
        mimetic: Pieces of mimetic initialisation, see
            `ssl_bench.models.state_space.initialisation`; none is the architecture's own start.
        mimetic_layers: That have them, from 0; None stands for all.
        state_decay: What piece "decay" starts from: "power" raises the drawn decay to the power
            -8, which leaves a decay of 1 as it is; "constant" is exp(-8) everywhere.

    Source: chapter 3.3 of Trockman's thesis (2025); sizes there in section 3.3.4.
    """

    version: Version = "mamba2"
    dim: Width = 1024
    depth: Depth = 2
    num_states: Count = 128
    head_width: Width = 64
    num_tokens: Count = 28
    mimetic: Annotated[Sequence[Piece], Items(0, 4)] = ()
    mimetic_layers: Sequence[CountOrZero] | None = None
    state_decay: StateDecay = "power"

    # There are no images.
    image_size = 0
    patch_size = 0
    num_heads = 0
    num_prefix_tokens = 0
    num_registers = 0

    def __post_init__(self) -> None:
        check_fields(self, "model")
        # YAML and JSON give lists; equal configurations shall be equal, in whatever order.
        pieces = tuple(piece for piece in get_args(Piece) if piece in self.mimetic)
        object.__setattr__(self, "mimetic", pieces)
        if self.version == "mamba2" and self.inner_dim % self.head_width:
            raise ConfigurationError(
                f"model.head_width expects a divisor of 2 x model.dim = {self.inner_dim}, got "
                f"{self.head_width}; take {gcd(self.inner_dim, self.head_width)}"
            )
        self._check_layers()

    @property
    def inner_dim(self) -> int:
        """Channels of a mixer."""
        return _EXPANSION * self.dim

    @property
    def pieces(self) -> Sequence[frozenset[str]]:
        """Which pieces of mimetic initialisation each layer has."""
        chosen = self.mimetic_layers
        return [
            frozenset(self.mimetic if chosen is None or layer in chosen else ())
            for layer in range(self.depth)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "StateSpaceConfig":
        """Read what `to_dict` wrote.

        Raises:
            ConfigurationError: A key that no version of this class knows, or a wrong value.
        """
        return from_dict(cls, values)

    def _check_layers(self) -> None:
        if self.mimetic_layers is None:
            return
        object.__setattr__(self, "mimetic_layers", tuple(self.mimetic_layers))
        outside = [layer for layer in self.mimetic_layers if layer not in range(self.depth)]
        if outside or not self.mimetic_layers:
            raise ConfigurationError(
                f"model.mimetic_layers must lie in 0..{self.depth - 1}, got "
                f"{', '.join(map(str, outside)) or 'none'}; model.mimetic=[] changes no layer, "
                "null stands for all"
            )


def require_images(config: object, address: str) -> None:
    """Refuse a model that no probe can look at.

    Raises:
        CheckpointError: it reads tokens.
    """
    if isinstance(config, StateSpaceConfig):
        raise CheckpointError(
            f"expected an encoder of images, got {address}, a {config.version} that reads tokens; "
            "what it can is in the log of its run"
        )
