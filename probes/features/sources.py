"""Which layers a head sees, and what stands for an image: known before there are features."""

from collections.abc import Sequence

from ssl_bench.errors import ConfigurationError
from ssl_bench.layers import INNER_FACETS, AskedFacets, Facet, asked_facets

# The layers whose features, concatenated, one head sees.
LayerGroup = tuple[int, ...]

IMAGE_FACETS: dict[Facet, tuple[Facet, ...]] = {
    "cls": ("cls_normed",),
    "patch_mean": ("token_normed",),
    "cls_patch_mean": ("cls_normed", "token_normed"),
}
"""What stands for an image: [CLS], the mean patch, or both concatenated, after the final norm."""

_PATCHES: tuple[Facet, ...] = ("token", "key", "query", "value", *INNER_FACETS)


def sources_of(layers: Sequence[int], layers_mode: str) -> list[LayerGroup]:
    """What each head sees: every layer alone ("single"), or several up to the last asked one.

    "multi" are the layers at 1/4, 1/2, 3/4 and all of the depth up to it, "last4" the last four.
    """
    last = max(layers)
    if layers_mode == "multi":
        return [tuple(sorted({max(0, (last + 1) * q // 4 - 1) for q in (1, 2, 3, 4)}))]
    if layers_mode == "last4":
        return [tuple(range(max(0, last - 3), last + 1))]
    return [(layer,) for layer in sorted(layers)]


def parts_of(facet: Facet) -> tuple[Facet, ...]:
    """What is taken of a block for an image: of facets from inside of it the mean patch."""
    return IMAGE_FACETS.get(facet, (facet,))


def asked_patches(facet: str, norm: str) -> AskedFacets:
    """What a head or a memory sees of patches, where a block's output may pass the final norm.

    Raises:
        ConfigurationError: not known, or not what a block gives although it is to be normed.
    """
    asked = asked_facets(facet, _PATCHES)
    if norm != "final":
        return asked
    if asked.names != ("token",):
        raise ConfigurationError(
            f"probe.facet must be token for probe.norm=final, got {facet}; that norm is the "
            "encoder's last, of what blocks give"
        )
    return AskedFacets(("token_normed",), None)


def require_one_block_a_head(asked: AskedFacets | None, layers_mode: str) -> None:
    """Refuse a block by name where heads see several.

    Raises:
        ConfigurationError: one is named.
    """
    if asked and asked.block is not None and layers_mode != "single":
        raise ConfigurationError(
            f"probe.facet must name every block with * for probe.layers_mode={layers_mode}, got "
            f"block {asked.block}"
        )
