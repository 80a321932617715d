"""The frozen description of a state space model, as its checkpoint stores it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Annotated, Literal, get_args

from ssl_bench.composition.fields import Count, CountOrZero, Depth, Items, Width
from ssl_bench.errors import ConfigurationError
from ssl_bench.models.config import EncoderConfig, check_layers

Version = Literal["mamba1", "mamba2"]
Piece = Literal["decay", "step", "correlation", "convolution"]
StateDecay = Literal["power", "constant"]
# Width of a mixer over that of the model.
_EXPANSION = 2


@dataclass(frozen=True)
class StateSpaceConfig(EncoderConfig):
    """Architecture and initialisation of a Mamba, which reads tokens and names the next one.

    Args:
        version: "mamba1" has a state and a step a channel, "mamba2" a step and a decay a head.
        num_states: Numbers that a channel keeps of the past. Mamba 1 takes 32 in the thesis.
        head_width: Channels of a head of Mamba 2; Mamba 1 has no heads.
        num_tokens: Different ones, those that are no letters included.
        mimetic: Pieces of mimetic initialisation, see `ssl_bench.models.state_space.model`; none is
            the architecture's own start.
        mimetic_layers: That have them, from 0; None stands for all.
        state_decay: What piece "decay" starts from: "power" raises the drawn decay to the power
            -8, which leaves a decay of 1 as it is; "constant" is exp(-8) everywhere.

    Source: chapter 3.3 of Trockman's thesis (2025); sizes there in section 3.3.4.
    """

    kind = "state_space"

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

    def __post_init__(self) -> None:
        super().__post_init__()
        # In whatever order they are given, equal configurations shall be equal.
        pieces = tuple(piece for piece in get_args(Piece) if piece in self.mimetic)
        object.__setattr__(self, "mimetic", pieces)
        if self.version == "mamba2" and self.inner_dim % self.head_width:
            raise ConfigurationError(
                f"model.head_width expects a divisor of 2 x model.dim = {self.inner_dim}, got "
                f"{self.head_width}; take {gcd(self.inner_dim, self.head_width)}"
            )
        check_layers("mimetic_layers", self.mimetic_layers, self.depth)

    @property
    def inner_dim(self) -> int:
        """Channels of a mixer."""
        return _EXPANSION * self.dim
