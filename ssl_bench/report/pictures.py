"""Find the pictures that probes saved in a results folder, and arrange them on pages."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
from PIL import Image

from ssl_bench.report.pairs import load_per_image_scores
from ssl_bench.report.panels import Checkpoint, ScorePanel
from ssl_bench.results import Record, ResultStore
from ssl_bench.system.files import (
    TILES,
    figure_file_name,
    figure_title,
    file_name,
    open_untrusted,
    read_untrusted,
    short_fingerprint,
)
from ssl_bench.system.output import safe_file_name
from ssl_bench.tables.tasks import task_texts

_MAX_STRIP_TASKS = 2
_MAX_BYTES = 64 * 2**20
# Masks are not shown, because they are meant for other programs.
_HIDDEN_FOLDER = "masks"
_BLOCK = re.compile(r"block(\d+)(?:_(.+))?$")


class PictureSize(NamedTuple):
    """Size of a picture, and the positions of its tiles, in pixels.

    A picture consists of images that are called tiles. The position of a tile is its (left, top,
    width, height).
    """

    width: int
    height: int
    tiles: Sequence[tuple[int, int, int, int]] = ()


class PictureFiles:
    """The picture files of a results folder, which may come from an untrusted source.

    Only PNG files are shown, because an SVG file can contain scripts. Symbolic links are not
    followed. The attribute `rejected_paths` maps each path that is not shown to the reason.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rejected_paths: dict[Path, str] = {}
        self._sizes: dict[Path, PictureSize] = {}

    def list_below(self, folder: str) -> list[PurePosixPath]:
        """Return the paths of all pictures below `folder`, sorted and relative to this folder.

        The path `folder` is relative to the results folder.
        """
        place = self.root / folder
        parents = [place, *place.parents]
        links = [path for path in parents[: parents.index(self.root)] if path.is_symlink()]
        self.rejected_paths.update(dict.fromkeys(links, "a link, and links are not followed"))
        if links:
            return []
        paths = sorted(path for path in place.rglob("*") if self._is_shown(path))
        return [PurePosixPath(path.relative_to(place).as_posix()) for path in paths]

    def copy(self, name: str, target: Path) -> None:
        """Copy a picture into the folder `target`, where it gets the same relative path.

        `name` is the path of the picture relative to the results folder.
        """
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
            self.rejected_paths[path] = (
                "an SVG can hold scripts (probe.grid=both also writes a PNG)"
            )
        return False

    def _is_png(self, path: Path) -> bool:
        try:
            self._sizes[path] = self._read_size(path)
        except OSError as error:
            self.rejected_paths[path] = error.strerror or "not a PNG file"
        return path in self._sizes

    def picture_size(self, name: str) -> PictureSize:
        """Return the size of the picture at the path `name`, relative to the results folder.

        Call `list_below` first, because it reads the sizes.
        """
        return self._sizes[self.root / name]

    def _read_size(self, path: Path) -> PictureSize:
        with open_untrusted(self.root, path, _MAX_BYTES) as file:
            try:
                # Only the header of the file is read.
                image = Image.open(file, formats=["PNG"])
                tiles = json.loads(image.info.get(TILES, "[]"))
                inside = [
                    (left, top, width, height)
                    for left, top, width, height in tiles
                    if 0 <= left < left + width <= image.width
                    if 0 <= top < top + height <= image.height
                ]
            # The file may have any content.
            except (ValueError, TypeError, SyntaxError, Image.DecompressionBombError) as error:
                raise OSError from error
        return PictureSize(image.width, image.height, inside)


@dataclass(frozen=True)
class Gallery:
    """Pictures of one checkpoint with the same task, image set, protocol and kind of feature.

    A protocol is a preset of a probe's settings. A gallery has either one picture per image and
    block, or one picture per image that shows all blocks. `prefixes[layer] + files[image]` is the
    path of a picture.

    Attributes:
        image_set_id: Eight digits that identify the image set, from the digest of its images.
        variant: Protocol and facet (kind of feature), such as "reference key".
        prefixes: First part of each path, by block index. If each picture shows all blocks, the
            only key is None.
        files: Last part of each path, by the title of the image.
        image_set_label: Label of the image set. Empty unless the dataset has several image sets.
    """

    task: str
    dataset: str
    image_set_id: str
    variant: str
    prefixes: dict[int | None, str]
    files: dict[str, str]
    image_set_label: str = ""

    @property
    def title(self) -> str:
        """Task, dataset and protocol (preset), such as "pca on folder, protocol image"."""
        parts = (f"{self.task} on {self.dataset}", self.protocol, self.image_set_label)
        return ", ".join(part for part in parts if part)

    @property
    def protocol(self) -> str:
        return f"protocol {self.variant}" if self.variant else ""

    @property
    def match_key(self) -> tuple[str, str, str, str, bool]:
        """Key that galleries of different checkpoints share if they can be shown side by side.

        The key contains the task, the dataset, the image set, the protocol with the kind of
        feature, and whether each picture shows all blocks.
        """
        return self.task, self.dataset, self.image_set_id, self.variant, not self.layers

    @property
    def layers(self) -> tuple[int, ...]:
        """Sorted indices of the blocks, or () if each picture shows all blocks."""
        return tuple(sorted(layer for layer in self.prefixes if layer is not None))

    def path(self, layer: int | None, image: str) -> str:
        """Return the path of a picture relative to the results folder.

        `image` is the title of the image. `layer` is None if each picture shows all blocks.
        """
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
    """Return the picture galleries of a checkpoint, one or more for each task and image set.

    `records` contains the stored scores, which state the tasks and image sets. `files` lists the
    pictures of the results folder.
    """
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
    """Return the galleries with one picture per image and block.

    Only images with a picture at every block are kept.

    Args:
        template: A gallery without pictures, which states the task, dataset and image set.
        start: Path of the picture folder, relative to the results folder.
        names: Paths of the pictures, relative to `start`. Pictures of block NN are in a folder
            blockNN or blockNN_FACET.
    """
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
        common_files = set.intersection(*map(set, by_layer.values()))
        files = _title_images({PurePosixPath(file).stem: file for file in sorted(common_files)})
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
    """Return the galleries in which each picture shows one image at all blocks.

    A picture of all blocks has the name PROTOCOL-FACET-IMAGE.png, or is in a subfolder whose name
    becomes the variant of the gallery. Files blockNN_FACET.png are left out, because they show many
    images at one block.

    Args:
        template: A gallery without pictures, which states the task, dataset and image set.
        start: Path of the picture folder, relative to the results folder.
        names: Paths of the pictures, relative to `start`.
        variants: The known pairs of PROTOCOL (preset of settings) and FACET (kind of feature).
    """
    starts = {f"{protocol}-{facet}-": f"{protocol} {facet}" for protocol, facet in variants}
    # Try longer prefixes first, because one prefix may be the start of another.
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
    """Replace the keys of `files`, which are file names without suffix, by titles of pictures.

    A title is a file name without the digest at the end. If two titles are equal, file names are
    kept as keys.
    """
    titles = {figure_title(name): file for name, file in files.items()}
    return titles if len(titles) == len(files) else dict(files)


def keep_layers(galleries: Sequence[Gallery], layers: Set[int] | None, depth: int) -> list[Gallery]:
    """Return the galleries of an encoder with only the pictures of the requested blocks.

    Pictures that show all blocks at once are always kept.

    Args:
        galleries: The galleries of the encoder.
        layers: The requested block indices. Negative indices count from the last block. None for
            all blocks.
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
    """Return pairs of galleries that can be shown side by side, one gallery of each checkpoint.

    The galleries of a pair have the same `Gallery.match_key`. Blocks and images that only one
    gallery of a pair has are left out.
    """
    others = {gallery.match_key: gallery for gallery in second}
    pairs = []
    for gallery in first:
        other = others.get(gallery.match_key)
        layers = [n for n in gallery.prefixes if other and n in other.prefixes]
        images = [image for image in gallery.files if other and image in other.files]
        if other and layers and images:
            pairs.append((gallery.select(layers, images), other.select(layers, images)))
    return pairs


def label_image_sets(galleries: Mapping[str, Sequence[Gallery]]) -> dict[str, list[Gallery]]:
    """Label the image set of each gallery if its task and dataset have several image sets.

    For example, replacing an image of a dataset creates a new image set. The label is stored in
    `Gallery.image_set_label`. The keys of `galleries` are encoder ids.
    """
    sets: dict[tuple[str, str], set[str]] = defaultdict(set)
    for of_encoder in galleries.values():
        for gallery in of_encoder:
            sets[gallery.task, gallery.dataset].add(gallery.image_set_id)
    return {
        encoder: [
            replace(gallery, image_set_label=f"data {gallery.image_set_id[:6]}")
            if len(sets[gallery.task, gallery.dataset]) > 1
            else gallery
            for gallery in of_encoder
        ]
        for encoder, of_encoder in galleries.items()
    }


class StripPicture(NamedTuple):
    """A picture in a strip, which is a row of pictures that show the same image.

    Attributes:
        block: Caption of the picture, such as "block 3", "all blocks" or "photograph".
        note: Reason why the picture comes first, such as "best", or "".
        address: Link to the picture file.
        alt: Description of the picture for readers who cannot see it.
        view: The (left, top, width, height) of the part that is shown. None for the whole picture.
    """

    block: str
    note: str
    address: str
    alt: str
    size: PictureSize
    view: tuple[int, int, int, int] | None


class Strip(NamedTuple):
    """A row of pictures that show one image at every block, with the best block first."""

    checkpoint: Checkpoint
    title: str
    pictures: Sequence[StripPicture]


def select_strips(
    files: PictureFiles,
    checkpoints: Sequence[Checkpoint],
    galleries: Mapping[str, Sequence[Gallery]],
    panels: Sequence[ScorePanel],
    hits: Mapping[str, float],
) -> list[Strip]:
    """Choose strips for the overview page: one for each checkpoint and task, for a few tasks.

    A strip is a row of pictures that show one image at every block. The strips show the image of
    which the most checkpoints have pictures. If several images tie, the image in which the most
    encoders find the object is chosen.

    Args:
        files: The picture files of the results folder.
        checkpoints: The checkpoints, in the order of the strips.
        galleries: The galleries of pictures, by encoder id.
        panels: Groups of comparable scores. If a task and dataset have scores, only pictures of the
            scored images are used.
        hits: Number of encoders that find the object in an image, by the file name of the picture.
    """
    scored = {(p.task, p.dataset, short_fingerprint(p.record.dataset_fingerprint)) for p in panels}
    places = {place[:2] for place in scored}
    shown = {
        checkpoint: [
            gallery
            for gallery in galleries[checkpoint.encoder_id]
            if (gallery.task, gallery.dataset, gallery.image_set_id) in scored
            or (gallery.task, gallery.dataset) not in places
        ]
        for checkpoint in checkpoints
    }
    every = [gallery for of_checkpoint in shown.values() for gallery in of_checkpoint]
    uses = Counter(gallery.match_key for gallery in every)
    image_uses = Counter((gallery.match_key, image) for gallery in every for image in gallery.files)

    def rank_task(task: str) -> tuple[bool, int, str]:
        has_blocks = any(gallery.layers for gallery in every if gallery.task == task)
        return not has_blocks, task_texts(task).rank, task

    def rank_image(gallery: Gallery, image: str) -> tuple[int, float]:
        return image_uses[gallery.match_key, image], hits.get(gallery.files[image], 0.0)

    strips = []
    tasks = sorted({gallery.task for gallery in every}, key=rank_task)
    for task in tasks[:_MAX_STRIP_TASKS]:
        for checkpoint in checkpoints:
            own = [gallery for gallery in shown[checkpoint] if gallery.task == task]
            if own:
                chosen = min(own, key=lambda g: (not g.layers, -uses[g.match_key], -len(g.layers)))
                image = max(chosen.files, key=partial(rank_image, chosen))
                best = _find_best_layer(panels, checkpoint, chosen)
                strips.append(_make_strip(files, checkpoint, chosen, image, *best))
    return strips


def count_hits(store: ResultStore, panels: Sequence[ScorePanel]) -> dict[str, float]:
    """Count the encoders that find the object at their best block, for each image.

    Only tasks that search for an object are considered, and the counts of several tasks are added.
    If an encoder has percentages instead of hits, each percentage is divided by the encoder's
    highest percentage. `panels` contains the groups of comparable scores.

    Returns:
        Dictionary that maps the file name of each picture to the count.
    """
    hits: dict[str, float] = defaultdict(float)
    for panel in panels:
        if not task_texts(panel.task).finds_objects:
            continue
        for line in panel.lines:
            best, side = line.best_entry, load_per_image_scores(store, panel, line.checkpoint)
            values = side.curve.per_image.get(best.layer) if best and side else None
            if side is None or values is None or values.ndim != 1:
                continue
            found = np.nan_to_num(values.astype(float))
            for name, hit in zip(side.image_names, found / max(found.max(), 1), strict=True):
                hits[figure_file_name(name)] += hit
    return hits


def _find_best_layer(
    panels: Sequence[ScorePanel], checkpoint: Checkpoint, gallery: Gallery
) -> tuple[int | None, str]:
    """Return the block that comes first in a row of pictures, and a note such as "best".

    The best block for the gallery's task comes first, or else the best block for another task on
    the same dataset. Return (None, "") if no best block is known.
    """
    of_dataset = [panel for panel in panels if panel.dataset == gallery.dataset]
    for panel in sorted(of_dataset, key=lambda panel: panel.task != gallery.task):
        line = panel.find_line(checkpoint)
        if line and line.best_entry:
            name = "" if panel.task == gallery.task else f" for {panel.task}"
            return line.best_entry.layer, f"best{name}"
    return None, ""


def _make_strip(
    files: PictureFiles,
    checkpoint: Checkpoint,
    gallery: Gallery,
    image: str,
    best: int | None,
    note: str,
) -> Strip:
    title = f"{gallery.title}, image {image}"
    layers: list[int | None] = list(gallery.layers) or [None]
    pictures = []
    for layer in sorted(layers, key=lambda layer: layer != best):
        path, block = gallery.path(layer, image), _name_block(layer)
        size, tile = files.picture_size(path), task_texts(gallery.task).strip_tile
        is_cut = layer is not None and tile is not None and len(size.tiles) > 0
        view = size.tiles[tile] if is_cut else None
        alt = f"{checkpoint.name}, {gallery.title}, {block}, image {image}"
        if tile and is_cut and not pictures:
            # Begin with the photograph, because the map does not show it.
            address, photograph = make_link(path), size.tiles[0]
            pictures.append(StripPicture("photograph", "", address, image, size, photograph))
        shown_note = note if layer is not None and layer == best else ""
        pictures.append(StripPicture(block, shown_note, make_link(path), alt, size, view))
    return Strip(checkpoint, title, pictures)


def build_picture_sections(
    files: PictureFiles,
    shown: Sequence[Sequence[tuple[str, Gallery]]],
) -> list[dict[str, Any]]:
    """Return one section per task, in which readers choose the image and the block to view.

    Each element of `shown` lists the galleries that are shown side by side, as pairs (name of the
    checkpoint, gallery). Galleries of one element must share `Gallery.match_key`, blocks and
    images.
    """
    by_task: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def rank(sides: Sequence[tuple[str, Gallery]]) -> tuple[int, str, bool, tuple[object, ...]]:
        gallery = sides[0][1]
        return task_texts(gallery.task).rank, gallery.task, not gallery.layers, gallery.match_key

    for sides in sorted(shown, key=rank):
        by_task[sides[0][1].task].append(_build_viewer(files, sides))
    return [
        {
            "title": task,
            "anchor": f"pictures-{safe_file_name(task)}",
            "caption": task_texts(task).caption,
            "viewers": viewers,
        }
        for task, viewers in by_task.items()
    ]


def _build_viewer(files: PictureFiles, sides: Sequence[tuple[str, Gallery]]) -> dict[str, Any]:
    first = sides[0][1]
    layers: list[int | None] = list(first.layers) or [None]
    images, start = list(first.files), len(layers) - 1
    block = _name_block(layers[start])
    parts = [first.dataset, first.protocol, first.image_set_label]
    parts += [] if first.layers else ["all blocks"]
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
                "size": files.picture_size(gallery.path(layers[start], images[0])),
            }
            for name, gallery in sides
        ],
        "data": {
            "what": first.title,
            "layers": list(first.layers),
            "images": [
                [image, make_link(first.files[image]), *files.picture_size(path)[:2]]
                for image in images
                for path in [first.path(layers[start], image)]
            ],
            "sides": [
                {"name": name, "prefixes": [make_link(gallery.prefixes[n]) for n in layers]}
                for name, gallery in sides
            ],
        },
        # Pictures of all blocks are wide, so the page puts one below the other.
        "is_tall": not first.layers,
    }


def _name_block(layer: int | None) -> str:
    return "all blocks" if layer is None else f"block {layer}"


def make_link(path: str) -> str:
    """Return a relative path as a percent-encoded link. The path need not be valid UTF-8."""
    return quote(path, errors="surrogateescape")
