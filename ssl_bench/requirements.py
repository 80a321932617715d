"""Which blocks and facets an encoder has: what it lacks is refused in one line."""

from collections.abc import Sequence

from ssl_bench.errors import ConfigurationError, UnfitEncoder
from ssl_bench.layers import FACETS, REGISTERS, Facet, submodule_of
from ssl_bench.models import Encoder


def check_asked(encoder: Encoder, layers: Sequence[int], facets: Sequence[Facet]) -> None:
    """Refuse what cannot be asked of an encoder before any image passes it.

    Raises:
        ConfigurationError: no layer or facet, or one that there is not.
        UnfitEncoder: a token that the encoder lacks, or a norm that does not fit a layer.
    """
    outside = [layer for layer in layers if not 0 <= layer < encoder.depth]
    if outside or not layers:
        raise ConfigurationError(
            f"layers must lie in 0..{encoder.depth - 1} for this encoder, "
            f"got {', '.join(map(str, outside)) or 'none'}"
        )
    unknown = [f for f in facets if f not in (*FACETS, REGISTERS) and submodule_of(f) is None]
    if unknown or not facets:
        raise ConfigurationError(
            f"facets must be among {', '.join(FACETS)} or blocks.*.NAME, "
            f"got {', '.join(unknown) or 'none'}"
        )
    if {"cls", "cls_normed"} & set(facets) and not encoder.has_cls:
        raise UnfitEncoder(f"{encoder.name} has no [CLS] token; ask for facet=token")
    if REGISTERS in facets and not encoder.num_registers:
        raise UnfitEncoder(f"{encoder.name} has no registers; ask for facet=token")
    last = encoder.width(encoder.depth - 1)
    narrow = [layer for layer in layers if encoder.width(layer) != last]
    if narrow and {"token_normed", "cls_normed"} & set(facets):
        fit = [str(layer) for layer in range(encoder.depth) if encoder.width(layer) == last]
        raise UnfitEncoder(
            f"layer {narrow[0]} of {encoder.name} has width {encoder.width(narrow[0])}, its final "
            f"norm {last}; ask for blocks of the last stage, {','.join(fit)}, or for a "
            "facet that no norm changes, such as token, attn_out or mlp_out"
        )
