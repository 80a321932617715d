"""What can be asked of an encoder: which of its blocks, and what of them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ssl_bench.errors import ConfigurationError

Facet = str
"""One of `FACETS`, or a submodule of every block: "blocks.*.mlp.fc1"."""

INNER_FACETS: tuple[Facet, ...] = ("attn_out", "attn_skip", "mlp_hidden", "mlp_out")
"""From inside of a block, before and after its skip connections."""
FACETS: tuple[Facet, ...] = (
    *("token", "token_normed", "cls", "cls_normed", "key", "query", "value"),
    *INNER_FACETS,
)
"""See `ssl_bench.features.FeatureExtractor`."""
REGISTERS: Facet = "registers"
"""Tokens before the patches that are no [CLS]; few encoders have them."""

_SUBMODULE = re.compile(r"blocks\.(\*|0|[1-9][0-9]{0,5})\.(\w+(?:\.\w+)*)")
_EVERY = "blocks.*."
_SPAN = re.compile(r"(-?\d{1,4})(?:\.\.(-?\d{1,4})|-(\d{1,4}))")


@dataclass(frozen=True)
class AskedFacets:
    """What a probe looks at.

    Attributes:
        names: As records have them, where the layer says the block: "blocks.*.mlp.fc1".
        block: The only one that is asked, where a name says it.
    """

    names: tuple[Facet, ...]
    block: int | None


def asked_facets(
    facet: str | Sequence[str], known: Sequence[Facet], key: str = "probe.facet"
) -> AskedFacets:
    """From one name or several to what is asked: names of `known`, in its order, then submodules.

    "blocks.7.mlp.fc1" is the output of a submodule of block 7, "blocks.*.mlp.fc1" that of each
    block.

    Raises:
        ConfigurationError: none, one that is not known, or submodules of several blocks.
    """
    asked = [facet] if isinstance(facet, str) else list(facet)
    matches = {name: _SUBMODULE.fullmatch(name) for name in asked}
    unknown = [name for name, match in matches.items() if match is None and name not in known]
    if not asked or unknown:
        raise ConfigurationError(
            f"{key} must be among {', '.join(known)}, or a submodule as in blocks.7.mlp.fc1 or, of "
            f"every block, blocks.*.mlp.fc1, got {', '.join(unknown) or 'none'}"
        )
    submodules = [match for match in matches.values() if match]
    blocks = sorted({match[1] for match in submodules})
    if len(blocks) > 1:
        raise ConfigurationError(
            f"{key} must name one block, or every one with *, got {', '.join(blocks)}; "
            "ask for other blocks in a call of their own"
        )
    names = [name for name in known if name in asked]
    names += dict.fromkeys(_EVERY + match[2] for match in submodules)
    return AskedFacets(tuple(names), None if blocks in ([], ["*"]) else int(blocks[0]))


def submodule_of(facet: Facet) -> str | None:
    """Its name within a block; None for one of `FACETS`."""
    return facet.removeprefix(_EVERY) if facet.startswith(_EVERY) else None


def layers_of(
    facets: AskedFacets | None, layers: str | int | Sequence[int], depth: int
) -> tuple[int, ...]:
    """As `resolve_layers`; "all" is the one block that a facet names, where it does.

    Raises:
        ConfigurationError: the facet names another block than those that are asked.
    """
    asked = resolve_layers(layers, depth)
    block = facets.block if facets else None
    if block is None:
        return asked
    named = resolve_layers(block, depth)
    if layers != "all" and asked != named:
        raise ConfigurationError(
            f"the facet names block {block}, got {', '.join(map(str, asked))}; put * for the "
            "block, or ask for that one",
            hint=("--layer", str(block)),
        )
    return named


def resolve_layers(layers: str | int | Sequence[int], depth: int) -> tuple[int, ...]:
    """Block indices from what people type: "11", "-1", "0,5,11", "0-3", "all", or numbers.

    Negative ones count from the end. The order is kept, what comes twice is dropped.

    Raises:
        ConfigurationError: Not numbers, or outside the encoder.
    """
    if layers == "all":
        return tuple(range(depth))
    wanted = numbered_layers(layers, depth)
    outside = [layer for layer in wanted if not -depth <= layer < depth]
    if outside or not wanted:
        raise ConfigurationError(
            f"layers must lie in 0..{depth - 1} for this encoder, or -{depth}..-1 from its end, "
            f"got {', '.join(str(layer) for layer in outside) or 'none'}"
        )
    return tuple(dict.fromkeys(layer % depth for layer in wanted))


def numbered_layers(layers: str | int | Sequence[int], depth: int = 0) -> list[int]:
    """Numbers from what people type, but for "all"; 0-3 and 0..3 hold both of their ends.

    Args:
        layers: As of `resolve_layers`.
        depth: Of the encoder, where it is known: 4..-1 ends with its last block.

    Raises:
        ConfigurationError: Not numbers, or a range whose last block comes before its first.
    """
    if isinstance(layers, int):
        return [layers]
    found: list[int] = []
    for part in layers.split(",") if isinstance(layers, str) else layers:
        span = _SPAN.fullmatch(str(part).strip())
        try:
            ends = [int(span[1]), int(span[2] or span[3])] if span else [int(part)]
        except ValueError as error:
            raise ConfigurationError(
                f"layers must be all, an index, a range like 0-3, or a list like 0,5,11, got "
                f"{layers!r}"
            ) from error
        if (ends[0] < 0) != (ends[-1] < 0):
            ends = [end + depth if end < 0 else end for end in ends]
        if ends[-1] < ends[0]:
            raise ConfigurationError(
                f"layers must go from the first block of a range to its last, got {part}"
            )
        found += range(ends[0], ends[-1] + 1)
    return found
