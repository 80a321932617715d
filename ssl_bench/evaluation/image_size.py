"""At which size an encoder sees the images of a probe: decided once, before anything runs."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ssl_bench.composition.presets import usual_values
from ssl_bench.errors import ConfigurationError, UnfitEncoder
from ssl_bench.models import Encoder, EncoderIdentity

SIZES = ("image_size", "longer_side", "squash")
"""Fields of probes that say it."""


def fit_size(probe: Any, encoder: Encoder | EncoderIdentity, typed: Collection[str]) -> Any:
    """A probe whose images have a size that the encoder takes.

    Its `image_size` is the side of a square that patches must fill, unless its class says
    `rounds_size`; one that nobody typed is rounded to the nearest multiple of the patch. An encoder
    of one size alone gets that one; a probe that sees photographs in their own shape then has it as
    `squash`.

    Args:
        probe: Some have no such field; they see images as they are.
        encoder: Its patch is the largest of all blocks, so that no cell hangs on what else is
            asked.
        typed: Fields whose values the user has chosen.

    Raises:
        ConfigurationError: A typed size does not fit.
        UnfitEncoder: The one size is no square.
    """
    asked = {n: v for n in SIZES if (v := getattr(probe, n, None)) is not None}
    if not encoder.any_size:
        return _with_the_only_size(probe, encoder, asked, typed)
    if hasattr(probe, "shown_to"):
        return probe.shown_to(encoder.native_size)
    size = asked.get("image_size")
    if size is None or getattr(probe, "rounds_size", False):
        return probe
    patch = max(encoder.architecture.get("strides") or [encoder.patch_size])
    if size % patch == 0:
        return probe
    if "image_size" in typed:
        lower = max(1, size // patch) * patch
        raise ConfigurationError(
            f"probe.image_size must be a multiple of the patch size {patch} of {encoder.name}, got "
            f"{size}; nearest are {lower} and {lower + patch}"
        )
    return replace(probe, image_size=max(1, round(size / patch)) * patch)


def _with_the_only_size(
    probe: Any,
    encoder: Encoder | EncoderIdentity,
    asked: dict[str, int],
    typed: Collection[str],
) -> Any:
    height, width = encoder.native_size
    if height != width:
        raise UnfitEncoder(
            f"{probe.task} shows encoders that take one size alone squares, {encoder.name} takes "
            f"{height} x {width}; let its forward resize its positions"
        )
    for name, size in asked.items():
        if name in typed and size != height:
            raise ConfigurationError(
                f"{encoder.name} takes images of {height} x {width} pixels alone, got probe.{name}="
                f"{size}; leave it out, or let its forward resize its positions"
            )
    has_side = "image_size" in asked or hasattr(probe, "shown_to")
    changes: dict[str, int | None] = {"image_size": height} if has_side else {}
    if has_side and not hasattr(probe, "shown_to") and "image_size" in typed:
        # The only size is no other question than none.
        usual = (usual_values(probe) or {}).get("image_size", height)
        changes = {"image_size": None if usual is None else height}
    if hasattr(probe, "squash"):
        changes["squash"] = height
    return replace(probe, **changes) if changes else probe


def earlier_settings(probe: Any, encoder: Encoder | EncoderIdentity) -> dict[str, Any]:
    """Settings by which records of earlier versions have the same question.

    They tell the only size of an encoder, where somebody typed it, from none.
    """
    is_same = not encoder.any_size and getattr(probe, "image_size", 0) is None
    return {"image_size": encoder.native_size[0]} if is_same else {}


def said_size(asked: Any, fitted: Any) -> str | None:
    """What is said of a size that nobody typed and that is not the preset's."""
    if (side := getattr(fitted, "squash", None)) != getattr(asked, "squash", None):
        return f"images are squashed to {side} x {side} pixels, the only size the encoder takes"
    before, after = (getattr(one, "image_size", None) for one in (asked, fitted))
    if before in (None, after):
        return None
    return f"images of {after} x {after} pixels instead of {before}, as the encoder takes them"
