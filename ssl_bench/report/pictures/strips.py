"""A few pictures of each checkpoint over its blocks, the same kind and image for all."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ssl_bench.report.checkpoints import Checkpoint
from ssl_bench.report.pictures.panels import Gallery
from ssl_bench.report.pictures.viewers import address

MOST_SHOWN = 6
_FIRST_TASKS = ("pca", "tokencut", "segmentation")


@dataclass(frozen=True)
class StripPicture:
    """One picture; `block` is such as "block 3", or "all blocks"."""

    block: str
    address: str
    alt: str


@dataclass(frozen=True)
class Strip:
    """Pictures of a checkpoint."""

    checkpoint: Checkpoint
    what: str
    pictures: tuple[StripPicture, ...]


def strips_of(
    checkpoints: Sequence[Checkpoint], galleries: Mapping[str, Sequence[Gallery]]
) -> tuple[Strip, ...]:
    """One strip a checkpoint that has pictures, of what most of them have.

    Args:
        checkpoints: In the order in which they are shown.
        galleries: By id of an encoder.
    """
    shown = Counter(g.key for c in checkpoints for g in galleries[c.encoder_id])
    images = Counter(
        (g.key, image) for c in checkpoints for g in galleries[c.encoder_id] for image in g.files
    )
    strips = []
    for checkpoint in checkpoints:
        own = galleries[checkpoint.encoder_id]
        if own:
            best = min(own, key=lambda gallery: _place(gallery, shown[gallery.key]))
            image = max(best.files, key=lambda image: images[best.key, image])
            strips.append(_strip(checkpoint, best, image))
    return tuple(strips)


def _place(gallery: Gallery, uses: int) -> tuple[bool, bool, int, int]:
    """One picture a block before pictures of all, what many have before what few have."""
    tasks = _FIRST_TASKS
    task = tasks.index(gallery.task) if gallery.task in tasks else len(tasks)
    return not gallery.layers, gallery.is_sheet, -uses, task


def _strip(checkpoint: Checkpoint, gallery: Gallery, image: str) -> Strip:
    what = f"{gallery.task} on {gallery.dataset}, {gallery.variant}".rstrip(", ")
    of = f", image {image}" if image else ""
    layers: list[int | None] = [*_some(gallery.layers)] or [None]
    blocks = ["all blocks" if layer is None else f"block {layer}" for layer in layers]
    return Strip(
        checkpoint,
        what + of,
        tuple(
            StripPicture(
                block,
                address(gallery.path(layer, image)),
                f"{checkpoint.name}, {what}, {block}{of}",
            )
            for layer, block in zip(layers, blocks, strict=True)
        ),
    )


def _some(layers: Sequence[int]) -> list[int]:
    """At most `MOST_SHOWN`, from the first to the last one in even steps."""
    if len(layers) <= MOST_SHOWN:
        return list(layers)
    last = len(layers) - 1
    return [layers[round(last * number / (MOST_SHOWN - 1))] for number in range(MOST_SHOWN)]
