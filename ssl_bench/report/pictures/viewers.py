"""Pictures with a choice of image and block, alone or beside those of another checkpoint."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ssl_bench.report.pictures.panels import Gallery
from ssl_bench.system.escaping import in_file_names

_CAPTIONS = {
    "pca": "The first three principal components of the patch features as red, green and blue.",
    "tokencut": (
        "Magenta: found box; orange: further ones; green: true boxes; dark: outside of the "
        "object's patches. Beside it the second eigenvector, blue below and red above zero. "
        "Lambda: its eigenvalue, near 0 where the two sides hardly touch; gap: how far the third "
        "eigenvalue is, near 0 where rounding chooses the cut."
    ),
    "correspondence": (
        "Points of the left view and where they were found in the right one: green where that is "
        "near enough, red elsewhere, with a ring at the true place."
    ),
    "discovery": (
        "Magenta: first box; orange: further ones; green: true boxes; dark: outside of the "
        "objects' patches. Beside it the first second eigenvector, blue below and red above zero."
    ),
    "segmentation": "Photograph, ground truth, and what a linear head on each block says.",
}


_FIRST_PICTURES = ("pca", "tokencut", "segmentation")
_LAST_PICTURES = ("conditioning", "geometry")


def place_of(task: str) -> int:
    """Which pictures are looked at first; spectra say least to the eye."""
    if task in _FIRST_PICTURES:
        return _FIRST_PICTURES.index(task)
    return len(_FIRST_PICTURES) + (task in _LAST_PICTURES)


@dataclass(frozen=True)
class Side:
    """One picture of a viewer as it is first shown."""

    name: str
    address: str
    alt: str


@dataclass(frozen=True)
class Viewer:
    """Pictures of one kind.

    Attributes:
        images: What can be chosen.
        start: Index of the block shown first.
        data: Addresses by side, block and image, for the script of the page.
        is_tall: The sides are wide pictures, set below each other.
    """

    title: str
    images: tuple[str, ...]
    layers: tuple[int, ...]
    start: int
    sides: tuple[Side, ...]
    data: dict[str, Any]
    is_tall: bool


@dataclass(frozen=True)
class GallerySection:
    """All viewers of a task."""

    title: str
    anchor: str
    caption: str
    viewers: tuple[Viewer, ...]


def sections_of(shown: Sequence[Sequence[tuple[str, Gallery]]]) -> tuple[GallerySection, ...]:
    """Viewers by task; each shows galleries of the same kind with their checkpoints' names."""
    by_task: dict[str, list[Viewer]] = defaultdict(list)
    # Single images before sheets of many.
    for sides in sorted(shown, key=lambda sides: (place_of(sides[0][1].task), sides[0][1].key)):
        by_task[sides[0][1].task].append(viewer(sides))
    return tuple(
        GallerySection(
            task, f"pictures-{in_file_names(task)}", _CAPTIONS.get(task, ""), tuple(all_)
        )
        for task, all_ in by_task.items()
    )


def viewer(sides: Sequence[tuple[str, Gallery]]) -> Viewer:
    """One viewer; all galleries have the same blocks and images.

    Args:
        sides: Name of a checkpoint and its gallery.
    """
    first = sides[0][1]
    layers: list[int | None] = list(first.layers) or [None]
    images = list(first.files)
    what = first.what
    start = len(layers) - 1
    at = "all blocks" if layers[start] is None else f"block {layers[start]}"
    of = f", image {images[0]}" if images[0] else ""
    return Viewer(
        title=_title(first),
        images=tuple(images),
        layers=first.layers,
        start=start,
        sides=tuple(
            Side(name, address(g.path(layers[start], images[0])), f"{name}, {what}, {at}{of}")
            for name, g in sides
        ),
        data={
            "what": what,
            "layers": list(first.layers),
            "images": [[image, address(first.files[image])] for image in images],
            "sides": [
                {"name": name, "prefixes": [address(g.prefixes[layer]) for layer in layers]}
                for name, g in sides
            ],
        },
        is_tall=first.is_sheet or not first.layers,
    )


def _title(gallery: Gallery) -> str:
    kind = "contact sheets" if gallery.is_sheet else ""
    if not kind and not gallery.layers:
        kind = "all blocks"
    parts = (gallery.dataset, gallery.variant, gallery.data, kind)
    return ", ".join(part for part in parts if part)


def address_of(gallery: Gallery, image: str) -> str:
    """Where the picture of an image is, at the last block if there is one a block."""
    layer = gallery.layers[-1] if gallery.layers else None
    return address(gallery.path(layer, image))


def address(path: str) -> str:
    """A relative path as a link; names of files may hold bytes that are no UTF-8."""
    return quote(path, errors="surrogateescape")
