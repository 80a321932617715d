"""What can be asked of an encoder: which of its blocks, and what of them."""

from collections.abc import Sequence
from typing import Literal, get_args

from ssl_bench.errors import ConfigurationError

Facet = Literal["token", "token_normed", "cls", "cls_normed", "key", "query", "value"]
"""See `ssl_bench.features.FeatureExtractor`."""

FACETS: tuple[Facet, ...] = get_args(Facet)


def resolve_layers(layers: str | int | Sequence[int], depth: int) -> tuple[int, ...]:
    """Block indices from what people type: "11", "-1", "0,5,11", "all", or numbers.

    Negative ones count from the end. The order is kept, what comes twice is dropped.

    Raises:
        ConfigurationError: Not numbers, or outside the encoder.
    """
    if layers == "all":
        return tuple(range(depth))
    wanted = _numbers(layers)
    outside = [layer for layer in wanted if not -depth <= layer < depth]
    if outside or not wanted:
        raise ConfigurationError(
            f"layers must lie in 0..{depth - 1} for this encoder, or -{depth}..-1 from its end, "
            f"got {', '.join(str(layer) for layer in outside) or 'none'}"
        )
    return tuple(dict.fromkeys(layer % depth for layer in wanted))


def _numbers(layers: str | int | Sequence[int]) -> list[int]:
    if isinstance(layers, int):
        return [layers]
    parts = layers.split(",") if isinstance(layers, str) else layers
    try:
        return [int(part) for part in parts]
    except ValueError as error:
        raise ConfigurationError(
            f"layers must be all, an index, or a list like 0,5,11, got {layers!r}"
        ) from error
