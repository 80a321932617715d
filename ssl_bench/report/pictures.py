"""Find the pictures that probes saved below OUT/pictures, and arrange them for pages."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import quote

from ssl_bench.report.panels import Checkpoint
from ssl_bench.results import Record
from ssl_bench.system.files import (
    figure_title,
    file_name,
    open_untrusted,
    read_untrusted,
    short_fingerprint,
)
from ssl_bench.system.output import safe_file_name

MAX_STRIP_PICTURES = 4
"""Largest number of pictures in a row of the overview page. A row shows one checkpoint."""
_MAX_STRIP_TASKS = 2
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MAX_BYTES = 64 * 2**20
# Masks are meant for other programs. They show less than the other pictures.
_HIDDEN_FOLDER = "masks"
_BLOCK = re.compile(r"block(\d+)(?:_(.+))?$")
_FIRST_TASKS = ("pca", "tokencut", "segmentation")
_LAST_TASKS = ("conditioning", "geometry")

_CAPTIONS = {
    "pca": "The first three principal components of the patch features are red, green and blue.",
    "tokencut": (
        "The first box is magenta, further boxes are orange, and true boxes are green. Patches "
        "outside the object are dark. The map beside it is the second eigenvector, blue below 0 "
        "and red above 0. Lambda is its eigenvalue, which is close to 0 if the two sides are "
        "almost separate. The gap is the distance to the third eigenvalue. A gap close to 0 means "
        "that rounding decides the cut."
    ),
    "correspondence": (
        "Points of the left view and their matches in the right view. Correct matches are green. "
        "Wrong matches are red, and a ring marks the true place."
    ),
    "discovery": (
        "The first box is magenta, further boxes are orange, and true boxes are green. Patches "
        "outside the objects are dark. The map beside it is the second eigenvector of the first "
        "cut, blue below 0 and red above 0."
    ),
    "segmentation": "Image, ground truth, and the prediction of a linear head on each block.",
}


class PictureFiles:
    """The picture files of a results folder, which may come from an untrusted source.

    Only PNG files are shown, because an SVG file can contain scripts. Symbolic links are not
    followed. `refused` has the reason for each path that is not shown.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.refused: dict[Path, str] = {}

    def list_below(self, folder: str) -> list[PurePosixPath]:
        """Return the sorted paths of all pictures below a folder, relative to this folder."""
        place = self.root / folder
        parents = [place, *place.parents]
        links = [path for path in parents[: parents.index(self.root)] if path.is_symlink()]
        self.refused.update(dict.fromkeys(links, "a link, and links are not followed"))
        if links:
            return []
        paths = sorted(path for path in place.rglob("*") if self._is_shown(path))
        return [PurePosixPath(path.relative_to(place).as_posix()) for path in paths]

    def copy(self, name: str, target: Path) -> None:
        """Copy the picture at the relative path `name` to the same relative path below `target`."""
        content = read_untrusted(self.root, self.root / name, _MAX_BYTES)
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def _is_shown(self, path: Path) -> bool:
        if _HIDDEN_FOLDER in path.relative_to(self.root).parts:
            return False
        if path.is_symlink() or path.suffix == ".png":
            return self._is_png(path)
        if path.suffix == ".svg" and not path.with_suffix(".png").is_file():
            self.refused[path] = "an SVG can hold scripts (probe.grid=both also writes a PNG)"
        return False

    def _is_png(self, path: Path) -> bool:
        try:
            with open_untrusted(self.root, path, _MAX_BYTES) as file:
                is_png = file.read(len(_PNG_SIGNATURE)) == _PNG_SIGNATURE
        except OSError as error:
            self.refused[path] = error.strerror or str(error)
            return False
        if not is_png:
            self.refused[path] = "not a PNG file"
        return is_png


@dataclass(frozen=True)
class Gallery:
    """Pictures of one checkpoint with the same task, images, protocol and facet.

    There is either one picture per image and block, or one picture per image that shows all blocks.
    The path of a picture is `prefixes[layer] + files[image]`.

    Attributes:
        images: First digits of the fingerprint of the dataset, see `short_fingerprint`.
        variant: Protocol and facet, as they are written in folder names.
        prefixes: First part of the path for each block. The key is None if a picture shows all
            blocks.
        files: Last part of the path for each image, by image title.
        data: Label of the image set. It is empty unless a dataset has several image sets.
    """

    task: str
    dataset: str
    images: str
    variant: str
    prefixes: dict[int | None, str]
    files: dict[str, str]
    data: str = ""

    @property
    def title(self) -> str:
        """Task, dataset and protocol, such as "pca on folder, protocol image"."""
        parts = (f"{self.task} on {self.dataset}", self.protocol, self.data)
        return ", ".join(part for part in parts if part)

    @property
    def protocol(self) -> str:
        return f"protocol {self.variant}" if self.variant else ""

    @property
    def kind(self) -> tuple[str, str, str, str, bool]:
        """Key that corresponding galleries of two checkpoints share."""
        return self.task, self.dataset, self.images, self.variant, not self.layers

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the blocks, sorted, or () if each picture shows all blocks."""
        return tuple(sorted(layer for layer in self.prefixes if layer is not None))

    def path(self, layer: int | None, image: str) -> str:
        """Return the path of a picture, relative to the results folder."""
        return self.prefixes[layer] + self.files[image]

    def paths(self) -> list[str]:
        return [prefix + file for prefix in self.prefixes.values() for file in self.files.values()]

    def select(self, layers: Iterable[int | None], images: Iterable[str]) -> "Gallery":
        """Return a copy that contains only the given blocks and images."""
        return replace(
            self,
            prefixes={layer: self.prefixes[layer] for layer in layers},
            files={image: self.files[image] for image in images},
        )


def find_galleries(
    files: PictureFiles, records: Sequence[Record], checkpoint: Checkpoint
) -> list[Gallery]:
    """Return the galleries of a checkpoint with the task and images of at least one record."""
    variants: dict[tuple[str, str, str, str], set[tuple[str, str]]] = defaultdict(set)
    datasets: dict[tuple[str, str, str, str], str] = {}
    for record in records:
        if record.encoder_id == checkpoint.encoder_id:
            for folder in checkpoint.picture_folders:
                images = short_fingerprint(record.dataset_fingerprint)
                place = (record.task, file_name(record.dataset), folder, images)
                variants[place].add((record.protocol, record.facet))
                datasets[place] = record.dataset
    galleries = []
    for place, dataset in sorted(datasets.items()):
        task, name, folder, images = place
        template = Gallery(task, dataset, images, "", {}, {})
        start = f"pictures/{task}/{name}/{folder}-{images}/"
        names = files.list_below(start)
        galleries += _find_block_galleries(template, start, names)
        galleries += _find_overview_galleries(template, start, names, variants[place])
    return galleries


def _find_block_galleries(
    template: Gallery, start: str, names: Sequence[PurePosixPath]
) -> list[Gallery]:
    """Return the galleries with one picture per image and block, in a folder per block."""
    images: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    prefixes: dict[tuple[str, int], str] = {}
    for name in names:
        if match := _BLOCK.match(name.parent.name):
            variant, layer = _name_variant(name.parent.parent, match[2]), int(match[1])
            images[variant][layer].append(name.name)
            prefixes[variant, layer] = f"{start}{name.parent}/"
    galleries = []
    for variant, by_layer in images.items():
        # Keep only images that were drawn at every block, so that every path exists.
        everywhere = set.intersection(*map(set, by_layer.values()))
        files = _title_images({PurePosixPath(file).stem: file for file in sorted(everywhere)})
        own: dict[int | None, str] = {n: prefixes[variant, n] for n in sorted(by_layer)}
        if files:
            galleries.append(replace(template, variant=variant, prefixes=own, files=files))
    return galleries


def _find_overview_galleries(
    template: Gallery,
    start: str,
    names: Sequence[PurePosixPath],
    variants: Iterable[tuple[str, str]],
) -> list[Gallery]:
    """Return the galleries whose pictures show all blocks at once.

    Such a picture is named PROTOCOL-FACET-IMAGE.png or FOLDER/NAME.png. A protocol and facet are
    recognised if a record has them. Files named blockNN_FACET.png show many images at one block,
    and are left out.
    """
    starts = {f"{protocol}-{facet}-": f"{protocol} {facet}" for protocol, facet in variants}
    # Try longer beginnings first, because one beginning may be a part of another.
    longest_first = sorted(starts, key=len, reverse=True)
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        if _BLOCK.match(name.parent.name) or _BLOCK.match(name.stem):
            continue
        own = "" if name.parent.name else next(filter(name.name.startswith, longest_first), "")
        variant = starts[own] if own else _name_variant(name.parent, None)
        groups[variant][name.stem.removeprefix(own)] = str(name)
    return [
        replace(template, variant=v, prefixes={None: start}, files=_title_images(files))
        for v, files in groups.items()
    ]


def _name_variant(folder: PurePosixPath, facet: str | None) -> str:
    return " ".join(part for part in (*folder.parts, facet or "") if part)


def _title_images(files: Mapping[str, str]) -> dict[str, str]:
    """Return the files by image title, or by their names if two images have the same title."""
    titles = {figure_title(name): file for name, file in files.items()}
    return titles if len(titles) == len(files) else dict(files)


def keep_layers(galleries: Sequence[Gallery], layers: Set[int] | None, depth: int) -> list[Gallery]:
    """Return the galleries of an encoder with the pictures of the requested blocks only.

    Negative `layers` count from the last block, and None keeps all blocks. Pictures that show all
    blocks at once are always kept.
    """
    if layers is None:
        return list(galleries)
    selected = []
    for gallery in galleries:
        kept = [n for n in gallery.prefixes if n is None or n in layers or n - depth in layers]
        if kept:
            selected.append(gallery.select(kept, gallery.files))
    return selected


def pair_galleries(
    first: Sequence[Gallery], second: Sequence[Gallery]
) -> list[tuple[Gallery, Gallery]]:
    """Return pairs of corresponding galleries, with the blocks and images that both have."""
    others = {gallery.kind: gallery for gallery in second}
    pairs = []
    for gallery in first:
        other = others.get(gallery.kind)
        layers = [n for n in gallery.prefixes if other and n in other.prefixes]
        images = [image for image in gallery.files if other and image in other.files]
        if other and layers and images:
            pairs.append((gallery.select(layers, images), other.select(layers, images)))
    return pairs


def label_image_sets(galleries: Mapping[str, Sequence[Gallery]]) -> dict[str, list[Gallery]]:
    """Set `Gallery.data` if a task and dataset have pictures of several image sets.

    For example, replacing one image of a dataset creates another image set.
    """
    sets: dict[tuple[str, str], set[str]] = defaultdict(set)
    for of_encoder in galleries.values():
        for gallery in of_encoder:
            sets[gallery.task, gallery.dataset].add(gallery.images)
    return {
        encoder: [
            replace(gallery, data=f"data {gallery.images[:6]}")
            if len(sets[gallery.task, gallery.dataset]) > 1
            else gallery
            for gallery in of_encoder
        ]
        for encoder, of_encoder in galleries.items()
    }


class Strip(NamedTuple):
    """A row of pictures that show one image at several blocks of one checkpoint.

    Each picture has three texts: its block, such as "block 3" or "all blocks", its link, and its
    alternative text.
    """

    checkpoint: Checkpoint
    title: str
    pictures: Sequence[tuple[str, str, str]]


def select_strips(
    checkpoints: Sequence[Checkpoint],
    galleries: Mapping[str, Sequence[Gallery]],
    scored: Iterable[Record],
) -> list[Strip]:
    """Return rows of pictures for the overview page.

    There is one row per task and checkpoint. It shows one image, preferably an image that all
    checkpoints have. If a task and dataset have several image sets, only those of the records
    `scored` are shown.
    """
    scored_images: dict[tuple[str, str], set[str]] = defaultdict(set)
    for record in scored:
        images = short_fingerprint(record.dataset_fingerprint)
        scored_images[record.task, record.dataset].add(images)
    shown = {
        checkpoint: [
            gallery
            for gallery in galleries[checkpoint.encoder_id]
            if gallery.images
            in scored_images.get((gallery.task, gallery.dataset), {gallery.images})
        ]
        for checkpoint in checkpoints
    }
    every = [gallery for of_checkpoint in shown.values() for gallery in of_checkpoint]
    uses = Counter(gallery.kind for gallery in every)
    image_uses = Counter((gallery.kind, image) for gallery in every for image in gallery.files)

    def rank_task(task: str) -> tuple[bool, int, str]:
        has_blocks = any(gallery.layers for gallery in every if gallery.task == task)
        return not has_blocks, _task_order(task), task

    strips = []
    tasks = sorted({gallery.task for gallery in every}, key=rank_task)
    for task in tasks[:_MAX_STRIP_TASKS]:
        for checkpoint in checkpoints:
            own = [gallery for gallery in shown[checkpoint] if gallery.task == task]
            if own:
                best = min(own, key=lambda g: (not g.layers, -uses[g.kind], -len(g.layers)))
                image = max(best.files, key=lambda image, best=best: image_uses[best.kind, image])
                strips.append(_make_strip(checkpoint, best, image))
    return strips


def _make_strip(checkpoint: Checkpoint, gallery: Gallery, image: str) -> Strip:
    suffix = f", image {image}"
    layers: list[int | None] = list(gallery.layers) or [None]
    if len(layers) > MAX_STRIP_PICTURES:
        # Choose evenly spaced blocks, including the first and the last block.
        last = MAX_STRIP_PICTURES - 1
        layers = [layers[round((len(layers) - 1) * n / last)] for n in range(MAX_STRIP_PICTURES)]
    pictures = []
    for layer in layers:
        block = _name_block(layer)
        alt = f"{checkpoint.name}, {gallery.title}, {block}{suffix}"
        pictures.append((block, make_link(gallery.path(layer, image)), alt))
    return Strip(checkpoint, gallery.title + suffix, pictures)


def build_picture_sections(
    shown: Sequence[Sequence[tuple[str, Gallery]]],
) -> list[dict[str, Any]]:
    """Return one section per task with viewers, in which readers choose an image and a block.

    `shown` has, for each viewer, the galleries that it shows side by side with the names of their
    checkpoints. They must have the same `Gallery.kind`, blocks and images.
    """
    by_task: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def rank(sides: Sequence[tuple[str, Gallery]]) -> tuple[int, str, bool, tuple[object, ...]]:
        gallery = sides[0][1]
        return _task_order(gallery.task), gallery.task, not gallery.layers, gallery.kind

    for sides in sorted(shown, key=rank):
        by_task[sides[0][1].task].append(_build_viewer(sides))
    return [
        {
            "title": task,
            "anchor": f"pictures-{safe_file_name(task)}",
            "caption": _CAPTIONS.get(task, ""),
            "viewers": viewers,
        }
        for task, viewers in by_task.items()
    ]


def _build_viewer(sides: Sequence[tuple[str, Gallery]]) -> dict[str, Any]:
    first = sides[0][1]
    layers: list[int | None] = list(first.layers) or [None]
    images, start = list(first.files), len(layers) - 1
    block = _name_block(layers[start])
    parts = (first.dataset, first.protocol, first.data, "" if first.layers else "all blocks")
    return {
        "title": ", ".join(part for part in parts if part),
        "images": images,
        "layers": first.layers,
        "start": start,
        "sides": [
            {
                "name": name,
                "address": make_link(gallery.path(layers[start], images[0])),
                "alt": f"{name}, {first.title}, {block}, image {images[0]}",
            }
            for name, gallery in sides
        ],
        "data": {
            "what": first.title,
            "layers": list(first.layers),
            "images": [[image, make_link(first.files[image])] for image in images],
            "sides": [
                {"name": name, "prefixes": [make_link(gallery.prefixes[n]) for n in layers]}
                for name, gallery in sides
            ],
        },
        # Pictures of all blocks are wide, so the page puts them below each other.
        "is_tall": not first.layers,
    }


def _name_block(layer: int | None) -> str:
    return "all blocks" if layer is None else f"block {layer}"


def _task_order(task: str) -> int:
    if task in _FIRST_TASKS:
        return _FIRST_TASKS.index(task)
    return len(_FIRST_TASKS) + (task in _LAST_TASKS)


def make_link(path: str) -> str:
    """Return a relative path as a percent-encoded link. Bytes that are not UTF-8 are allowed."""
    return quote(path, errors="surrogateescape")
