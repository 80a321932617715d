"""Which layers a head sees, and what stands for an image: known before there are features."""

from collections.abc import Sequence

from ssl_bench.errors import ConfigurationError
from ssl_bench.layers import Facet

# The layers whose features, concatenated, one head sees.
LayerGroup = tuple[int, ...]

IMAGE_FACETS: dict[str, tuple[Facet, ...]] = {
    "cls": ("cls_normed",),
    "patch_mean": ("token_normed",),
    "cls_patch_mean": ("cls_normed", "token_normed"),
}
"""What stands for an image: [CLS], the mean patch, or both concatenated, after the final norm."""


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


def asked_facets(facet: str | Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """One name or several, in the order in which they are known.

    Raises:
        ConfigurationError: none, or one that is not known.
    """
    asked = [facet] if isinstance(facet, str) else list(facet)
    if not asked or set(asked).difference(known):
        raise ConfigurationError(f"probe.facet must be among {', '.join(known)}, got {facet}")
    return tuple(name for name in known if name in asked)
