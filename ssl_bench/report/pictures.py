"""Pictures that probes wrote below OUT/pictures/TASK/DATASET, and how pages show them."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import quote

from ssl_bench.report.panels import Checkpoint
from ssl_bench.results import Record
from ssl_bench.system.escaping import safe_file_name
from ssl_bench.system.files import open_untrusted, read_untrusted
from ssl_bench.system.paths import figure_title, file_name, short_fingerprint

MAX_STRIP_PICTURES = 4
"""Pictures of a checkpoint in a row of the overview."""

_MAX_STRIP_TASKS = 2
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MAX_BYTES = 64 * 2**20
# Masks are for other programs and show less than the panels.
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
    """Pictures in a results folder, which may come from an untrusted source.

    Only PNG files are shown, because an SVG file can contain scripts. Links are not followed.

    Attributes:
        root: The results folder.
        refused: Reasons by path why pictures are not shown.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.refused: dict[Path, str] = {}

    def list_below(self, folder: str) -> list[PurePosixPath]:
        """Return the sorted pictures below a folder, relative to it."""
        place = self.root / folder
        parents = [place, *place.parents]
        links = [path for path in parents[: parents.index(self.root)] if path.is_symlink()]
        self.refused.update(dict.fromkeys(links, "a link, and links are not followed"))
        if links:
            return []
        paths = sorted(path for path in place.rglob("*") if self._is_shown(path))
        return [PurePosixPath(path.relative_to(place).as_posix()) for path in paths]

    def copy(self, name: str, target: Path) -> None:
        """Copy a listed picture and its folders into another folder."""
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
            self.refused[path] = "an SVG can hold scripts (probe.grid=both writes a PNG beside it)"
        return False

    def _is_png(self, path: Path) -> bool:
        try:
            with open_untrusted(self.root, path, _MAX_BYTES) as file:
                is_png = file.read(len(_PNG_SIGNATURE)) == _PNG_SIGNATURE
        except OSError as error:
            self.refused[path] = error.strerror or str(error)
            return False
        if not is_png:
            self.refused[path] = "no PNG"
        return is_png


@dataclass(frozen=True)
class Gallery:
    """Pictures of the same kind: every image at every block, or every image for all blocks.

    The path of a picture is `prefixes[layer] + files[image]`.

    Attributes:
        task: Task of the probe.
        dataset: Name of the dataset.
        images: Digits of the dataset's fingerprint (`short_fingerprint`).
        variant: Protocol and facet, as in the folder names.
        prefixes: Beginnings of the paths by block. The key None means all blocks.
        files: Ends of the paths by image.
        data: Label that distinguishes image sets of the same dataset, or an empty string.
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
        """The variant as readers see it."""
        return f"protocol {self.variant}" if self.variant else ""

    @property
    def kind(self) -> tuple[str, str, str, str, bool]:
        """A key that is equal for galleries of two checkpoints that show the same things."""
        return self.task, self.dataset, self.images, self.variant, not self.layers

    @property
    def layers(self) -> tuple[int, ...]:
        """Block indices, 0-based. Empty if each picture shows all blocks."""
        return tuple(sorted(layer for layer in self.prefixes if layer is not None))

    def path(self, layer: int | None, image: str) -> str:
        """Return the path of a picture, relative to the results folder."""
        return self.prefixes[layer] + self.files[image]

    def paths(self) -> list[str]:
        """Return the paths of all pictures."""
        return [prefix + file for prefix in self.prefixes.values() for file in self.files.values()]

    def select(self, layers: Iterable[int | None], images: Iterable[str]) -> "Gallery":
        """Return a copy with some of the blocks and images."""
        return replace(
            self,
            prefixes={layer: self.prefixes[layer] for layer in layers},
            files={image: self.files[image] for image in images},
        )


def find_galleries(
    files: PictureFiles, records: Sequence[Record], checkpoint: Checkpoint
) -> list[Gallery]:
    """Return the pictures of a checkpoint that belong to the tasks and images of the records."""
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
    """Return galleries of pictures in folders that are named after blocks."""
    images: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    prefixes: dict[tuple[str, int], str] = {}
    for name in names:
        if match := _BLOCK.match(name.parent.name):
            variant, layer = _name_variant(name.parent.parent, match[2]), int(match[1])
            images[variant][layer].append(name.name)
            prefixes[variant, layer] = f"{start}{name.parent}/"
    galleries = []
    for variant, by_layer in images.items():
        # A path needs an image that was drawn at every block.
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
    """Return galleries of pictures that show all blocks at once.

    They are called PROTOCOL-FACET-IMAGE.png, of a recorded protocol and facet, or FOLDER/NAME.png.
    Contact sheets of a block, blockNN_FACET.png, are left out.
    """
    starts = {f"{protocol}-{facet}-": f"{protocol} {facet}" for protocol, facet in variants}
    # The longest start comes first, because one may begin with another.
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
    """Return files by the titles of their images, or by their names if titles are not unique."""
    titles = {figure_title(name): file for name, file in files.items()}
    return titles if len(titles) == len(files) else dict(files)


def keep_layers(galleries: Sequence[Gallery], layers: Set[int] | None, depth: int) -> list[Gallery]:
    """Remove pictures of other blocks.

    Args:
        galleries: Galleries of one checkpoint.
        layers: Block indices to keep. Negative ones count from the last block. None keeps all.
        depth: Number of blocks of the encoder.
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
    """Return the galleries that both have, reduced to the blocks and images of both."""
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
    """Set `data` if a report has pictures of several image sets of one task and dataset.

    This happens, for example, after one image of a dataset was replaced.
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
    """A row of pictures of one checkpoint over its blocks.

    Attributes:
        checkpoint: The encoder.
        title: Task, dataset, protocol and image.
        pictures: Block, such as "block 3" or "all blocks", link, and alternative text.
    """

    checkpoint: Checkpoint
    title: str
    pictures: Sequence[tuple[str, str, str]]


def select_strips(
    checkpoints: Sequence[Checkpoint],
    galleries: Mapping[str, Sequence[Gallery]],
    scored: Iterable[Record],
) -> list[Strip]:
    """Choose one image per task and checkpoint, preferably one that all checkpoints have.

    Args:
        checkpoints: Encoders in the order of the page.
        galleries: Galleries by encoder id.
        scored: One record per set of images whose scores stand on the same page. If there are
            several sets of a task and dataset, only these are shown.
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
        return not has_blocks, _rank_task(task), task

    def rank_gallery(gallery: Gallery) -> tuple[bool, int, int]:
        """Prefer one picture per block, then kinds that many checkpoints have, then many blocks."""
        return not gallery.layers, -uses[gallery.kind], -len(gallery.layers)

    strips = []
    tasks = sorted({gallery.task for gallery in every}, key=rank_task)
    for task in tasks[:_MAX_STRIP_TASKS]:
        for checkpoint in checkpoints:
            own = [gallery for gallery in shown[checkpoint] if gallery.task == task]
            if own:
                best = min(own, key=rank_gallery)
                image = max(best.files, key=lambda image, best=best: image_uses[best.kind, image])
                strips.append(_make_strip(checkpoint, best, image))
    return strips


def _make_strip(checkpoint: Checkpoint, gallery: Gallery, image: str) -> Strip:
    suffix = f", image {image}"
    layers: list[int | None] = list(gallery.layers) or [None]
    if len(layers) > MAX_STRIP_PICTURES:
        # Take even steps from the first block to the last one.
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
    """Return pictures with a choice of image and block, one section per task.

    Args:
        shown: Galleries that stand side by side, with the names of their checkpoints. They must
            be of the same kind and have the same blocks and images.
    """
    by_task: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def rank(sides: Sequence[tuple[str, Gallery]]) -> tuple[int, str, bool, tuple[object, ...]]:
        """Put pictures of single blocks before pictures of all blocks."""
        gallery = sides[0][1]
        return _rank_task(gallery.task), gallery.task, not gallery.layers, gallery.kind

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
    """Return the picture that is shown first, and under `data` all links for the script."""
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
        # Wide pictures stand below each other.
        "is_tall": not first.layers,
    }


def _name_block(layer: int | None) -> str:
    return "all blocks" if layer is None else f"block {layer}"


def _rank_task(task: str) -> int:
    """Return the position of a task's pictures on a page."""
    if task in _FIRST_TASKS:
        return _FIRST_TASKS.index(task)
    return len(_FIRST_TASKS) + (task in _LAST_TASKS)


def make_link(path: str) -> str:
    """Return a relative path as a link. File names may contain bytes that are not UTF-8."""
    return quote(path, errors="surrogateescape")
