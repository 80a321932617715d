"""Parse the user's selection of blocks and facets (kinds of features)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ssl_bench.errors import ConfigurationError

Facet = str
"""Name of a facet, which is a kind of feature of a block.

Every facet is an item of `FACETS`, the facet `REGISTERS`, or a submodule such as
"blocks.*.mlp.fc1".
"""

INNER_FACETS: tuple[Facet, ...] = ("attn_out", "attn_skip", "mlp_hidden", "mlp_out")
"""Facets (kinds of features) inside a block, such as the outputs of its sublayers."""
FACETS: tuple[Facet, ...] = (
    *("token", "token_normed", "cls", "cls_normed", "key", "query", "value"),
    *INNER_FACETS,
)
"""Facets (kinds of features) except submodules and registers. `FeatureExtractor` explains them."""
REGISTERS: Facet = "registers"
"""Facet for register tokens. `FACETS` lacks this facet, because few encoders have such tokens."""

_SUBMODULE = re.compile(r"blocks\.(\*|0|[1-9][0-9]{0,5})\.(\w+(?:\.\w+)*)")
_EVERY_BLOCK = "blocks.*."
_RANGE = re.compile(r"(-?\d{1,4})(?:\.\.(-?\d{1,4})|-(\d{1,4}))")


@dataclass(frozen=True)
class FacetSpec:
    """The facets (kinds of features) that a probe scores.

    Attributes:
        names: Facet names as stored in records. Names of submodules have * instead of the block
            index, as in "blocks.*.mlp.fc1", because records have a separate field for the block.
        block: Block index in the name of a submodule, such as 7 in "blocks.7.mlp.fc1", or None if
            the user stated no block index.
    """

    names: tuple[Facet, ...]
    block: int | None


def parse_facets(
    facet: str | Sequence[str], known: Sequence[Facet], key: str = "probe.facet"
) -> FacetSpec:
    """Parse one or several names of facets (kinds of features).

    A name can also be a submodule, whose output is the feature. "blocks.7.mlp.fc1" is a submodule
    of block 7, and "blocks.*.mlp.fc1" is this submodule in every block. The names of several
    submodules must all contain the same block index, or all must contain *.

    Args:
        facet: One or several names from the user.
        known: Facets that the probe accepts, in addition to submodules.
        key: Config key for error messages.

    Returns:
        The facets in the order of `known`, followed by the submodules.

    Raises:
        ConfigurationError: A name is unknown, or submodules have different block indices.
    """
    requested = [facet] if isinstance(facet, str) else list(facet)
    matches = {name: _SUBMODULE.fullmatch(name) for name in requested}
    unknown = [name for name, match in matches.items() if match is None and name not in known]
    if not requested or unknown:
        raise ConfigurationError(
            f"{key} must be one of {', '.join(known)}, or a submodule such as blocks.7.mlp.fc1 "
            f"(one block) or blocks.*.mlp.fc1 (every block), got {', '.join(unknown) or 'none'}"
        )
    submodules = [match for match in matches.values() if match]
    blocks = sorted({match[1] for match in submodules})
    if len(blocks) > 1:
        raise ConfigurationError(
            f"{key} must have the same block index, or * for every block, in all submodules, "
            f"got {', '.join(blocks)}"
        )
    names = [name for name in known if name in requested]
    names += dict.fromkeys(_EVERY_BLOCK + match[2] for match in submodules)
    return FacetSpec(tuple(names), None if blocks in ([], ["*"]) else int(blocks[0]))


def submodule_name(facet: Facet) -> str | None:
    """Return the submodule in the name of a facet: "mlp.fc1" for "blocks.*.mlp.fc1".

    A facet is a kind of feature. Return None for a facet that is not a submodule, such as "token".
    """
    return facet.removeprefix(_EVERY_BLOCK) if facet.startswith(_EVERY_BLOCK) else None


def select_layers(
    spec: FacetSpec | None, layers: str | int | Sequence[int], depth: int
) -> tuple[int, ...]:
    """Return the 0-based indices of the blocks to score.

    If the name of a facet (kind of feature) contains a block index, as in "blocks.7.mlp.fc1", only
    this block is scored.

    Args:
        spec: Facets of the probe, or None for a probe without facets.
        layers: Blocks that the user selected, such as "all", "0,5,11" or -1.
        depth: Number of blocks of the encoder.

    Raises:
        ConfigurationError: The facet's name and `layers` select different blocks.
    """
    requested = resolve_layers(layers, depth)
    block = spec.block if spec else None
    if block is None:
        return requested
    from_facet = resolve_layers(block, depth)
    if layers != "all" and requested != from_facet:
        raise ConfigurationError(
            f"the facet's name states block {block}, but the requested layers are "
            f"{', '.join(map(str, requested))}",
            hint=("--layer", str(block)),
        )
    return from_facet


def resolve_layers(layers: str | int | Sequence[int], depth: int) -> tuple[int, ...]:
    """Return the 0-based indices of the blocks that a user selects.

    Args:
        layers: "all", one index ("11"), a list ("0,5,11"), an inclusive range ("0-3"), an integer,
            or a sequence of integers. Negative indices count from the last block.
        depth: Number of blocks of the encoder.

    Returns:
        The indices in the given order, without duplicates.
    """
    if layers == "all":
        return tuple(range(depth))
    numbers = parse_layer_numbers(layers, depth)
    outside = [layer for layer in numbers if not -depth <= layer < depth]
    if outside or not numbers:
        raise ConfigurationError(
            f"layers must lie in 0..{depth - 1} for this encoder, or in -{depth}..-1 to count from "
            f"the last block, got {', '.join(map(str, outside)) or 'none'}"
        )
    return tuple(dict.fromkeys(layer % depth for layer in numbers))


def parse_layer_numbers(layers: str | int | Sequence[int], depth: int = 0) -> list[int]:
    """Return the numbers in a selection of layers, without checking that these layers exist.

    Args:
        layers: A selection such as "0,5,11", "0-3", 11 or [0, 11], but not "all".
        depth: Number of blocks of the encoder. This number is only used for ranges with one
            negative end, such as 4..-1 (block 4 to the last block).
    """
    if isinstance(layers, int):
        return [layers]
    numbers: list[int] = []
    for part in layers.split(",") if isinstance(layers, str) else layers:
        match = _RANGE.fullmatch(str(part).strip())
        try:
            ends = [int(match[1]), int(match[2] or match[3])] if match else [int(part)]
        except ValueError as error:
            raise ConfigurationError(
                f"layers must be all, an index, a range such as 0-3, or a list such as 0,5,11, "
                f"got {layers!r}"
            ) from error
        if (ends[0] < 0) != (ends[-1] < 0):
            ends = [end + depth if end < 0 else end for end in ends]
        if ends[-1] < ends[0]:
            raise ConfigurationError(
                f"layers must be given as ascending ranges, such as 0-3, got {part}"
            )
        numbers += range(ends[0], ends[-1] + 1)
    return numbers
