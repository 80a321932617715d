"""A few pictures of each checkpoint over its blocks, the same kind and image for all."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ssl_bench.report.checkpoints import Checkpoint
from ssl_bench.report.pictures.panels import Gallery
from ssl_bench.report.pictures.viewers import address, place_of
from ssl_bench.results import Record
from ssl_bench.system.naming import image_digits

MOST_SHOWN = 6
MOST_TASKS = 2


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
    checkpoints: Sequence[Checkpoint],
    galleries: Mapping[str, Sequence[Gallery]],
    scored: Iterable[Record],
) -> tuple[Strip, ...]:
    """Strips of each checkpoint that has pictures, a task each, of what most of them have.

    Args:
        checkpoints: In the order in which they are shown.
        galleries: By id of an encoder.
        scored: One record of each set of images whose scores are shown beside the strips: of its
            task and dataset no other images are shown.
    """
    shown_images: dict[tuple[str, str], set[str]] = defaultdict(set)
    for record in scored:
        images = image_digits(record.dataset_fingerprint)
        shown_images[record.task, record.dataset].add(images)
    galleries = {
        encoder: [
            one
            for one in those
            if one.images in shown_images.get((one.task, one.dataset), {one.images})
        ]
        for encoder, those in galleries.items()
    }
    shown = Counter(g.key for c in checkpoints for g in galleries[c.encoder_id])
    images = Counter(
        (g.key, image) for c in checkpoints for g in galleries[c.encoder_id] for image in g.files
    )
    strips = []
    for task in _shown_tasks([g for c in checkpoints for g in galleries[c.encoder_id]]):
        for checkpoint in checkpoints:
            own = [g for g in galleries[checkpoint.encoder_id] if g.task == task]
            if own:
                best = min(own, key=lambda gallery: _place(gallery, shown[gallery.key]))
                image = max(best.files, key=lambda image: images[best.key, image])
                strips.append(_strip(checkpoint, best, image))
    return tuple(strips)


def _shown_tasks(galleries: Sequence[Gallery]) -> list[str]:
    """Those with a picture a block before others, the first ones before the rest."""

    def place(task: str) -> tuple[bool, int, str]:
        own = [gallery for gallery in galleries if gallery.task == task]
        return not any(gallery.layers for gallery in own), place_of(task), task

    return sorted({gallery.task for gallery in galleries}, key=place)[:MOST_TASKS]


def _place(gallery: Gallery, uses: int) -> tuple[bool, bool, int, int]:
    """One picture a block before pictures of all, what many have before what few, many blocks."""
    return not gallery.layers, gallery.is_sheet, -uses, -len(gallery.layers)


def _strip(checkpoint: Checkpoint, gallery: Gallery, image: str) -> Strip:
    what = gallery.what
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
