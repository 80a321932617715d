"""The pictures that probes left below OUT/pictures/TASK/DATASET, and how pages show them."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import quote

from ssl_bench.report.model import Checkpoint
from ssl_bench.results import Record
from ssl_bench.system.escaping import safe_file_name
from ssl_bench.system.files import open_untrusted, read_untrusted
from ssl_bench.system.paths import figure_title, file_name, short_fingerprint

MOST_SHOWN = 6
"""Pictures of a checkpoint on the first page."""

_MOST_TASKS = 2
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MOST_BYTES = 64 * 2**20
# One a image without ground truth, for other programs rather than for readers.
_NOT_SHOWN = "masks"
_BLOCK = re.compile(r"block(\d+)(?:_(.+))?$")

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
_FIRST_TASKS = ("pca", "tokencut", "segmentation")
# Spectra say least to the eye.
_LAST_TASKS = ("conditioning", "geometry")


class PictureFiles:
    """The pictures in a folder of results that may come from somebody else.

    Only PNG files are shown: a page of SVG can hold scripts. No link is followed.

    Attributes:
        refused: What looks like a picture and is not shown, and why.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.refused: dict[Path, str] = {}

    def names_below(self, start: str) -> list[PurePosixPath]:
        """Pictures below a folder, both relative, in the order of their names."""
        place = self.root / start
        folders = [place, *place.parents]
        linked = [path for path in folders[: folders.index(self.root)] if path.is_symlink()]
        self.refused.update(dict.fromkeys(linked, "a link, and links are not followed"))
        if linked:
            return []
        paths = sorted(path for path in place.rglob("*") if self._is_shown(path))
        return [PurePosixPath(path.relative_to(place).as_posix()) for path in paths]

    def copy(self, name: str, target: Path) -> None:
        """Copy a picture that was shown to be one, folders included."""
        content = read_untrusted(self.root, self.root / name, _MOST_BYTES)
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)

    def _is_shown(self, path: Path) -> bool:
        if _NOT_SHOWN in path.relative_to(self.root).parts:
            return False
        if path.is_symlink() or path.suffix == ".png":
            return self._is_picture(path)
        if path.suffix == ".svg" and not path.with_suffix(".png").is_file():
            self.refused[path] = "an SVG can hold scripts; probe.grid=both makes a PNG beside it"
        return False

    def _is_picture(self, path: Path) -> bool:
        try:
            with open_untrusted(self.root, path, _MOST_BYTES) as file:
                is_png = file.read(len(_SIGNATURE)) == _SIGNATURE
        except OSError as error:
            self.refused[path] = error.strerror or str(error)
            return False
        if not is_png:
            self.refused[path] = "no PNG"
        return is_png


@dataclass(frozen=True)
class Gallery:
    """Pictures of one kind: of every image, block by block where there is one a block.

    The picture of an image at a block is `prefixes[block] + files[image]`, for all of both.

    Attributes:
        images: The `short_fingerprint` of all images of the split.
        variant: Protocol and facet, as in the names of the folders.
        prefixes: Beginnings of paths by block, or one under None for pictures of all blocks.
        files: Ends of paths by image; "" is the name where a picture shows several images.
        data: What sets the images apart, where a report has several sets of the same name.
    """

    task: str
    dataset: str
    images: str
    variant: str
    prefixes: dict[int | None, str]
    files: dict[str, str]
    data: str = ""

    @property
    def what(self) -> str:
        """Such as "pca on folder, protocol image"."""
        parts = (f"{self.task} on {self.dataset}", self.protocol, self.data)
        return ", ".join(part for part in parts if part)

    @property
    def protocol(self) -> str:
        """The variant for readers."""
        return f"protocol {self.variant}" if self.variant else ""

    @property
    def key(self) -> tuple[str, str, str, str, bool, bool]:
        """Equal for the galleries of two checkpoints that show the same."""
        where = (self.task, self.dataset, self.images)
        return (*where, self.variant, self.is_sheet, not self.layers)

    @property
    def is_sheet(self) -> bool:
        return set(self.files) == {""}

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted(layer for layer in self.prefixes if layer is not None))

    def path(self, layer: int | None, image: str) -> str:
        return self.prefixes[layer] + self.files[image]

    def paths(self) -> list[str]:
        return [prefix + file for prefix in self.prefixes.values() for file in self.files.values()]

    def address_of(self, image: str) -> str:
        """Where the picture of an image is, at the last block if there is one a block."""
        return address(self.path(self.layers[-1] if self.layers else None, image))

    def only(self, layers: Iterable[int | None], images: Iterable[str]) -> "Gallery":
        """The same with some blocks and images."""
        return replace(
            self,
            prefixes={layer: self.prefixes[layer] for layer in layers},
            files={image: self.files[image] for image in images},
        )


def galleries_of(
    files: PictureFiles, records: Sequence[Record], checkpoint: Checkpoint
) -> list[Gallery]:
    """What there is to see of a checkpoint for the tasks and datasets of some records.

    Returns:
        Galleries whose paths are relative to the folder of results, with / between folders.
    """
    variants: dict[tuple[str, str, str, str], set[tuple[str, str]]] = defaultdict(set)
    datasets: dict[tuple[str, str, str, str], str] = {}
    for record in records:
        if record.encoder_id == checkpoint.encoder_id:
            for folder in checkpoint.folders:
                images = short_fingerprint(record.dataset_fingerprint)
                place = (record.task, file_name(record.dataset), folder, images)
                variants[place].add((record.protocol, record.facet))
                datasets[place] = record.dataset
    found = []
    for place, dataset in sorted(datasets.items()):
        task, name, folder, images = place
        of = Gallery(task, dataset, images, "", {}, {})
        start = f"pictures/{task}/{name}/{folder}-{images}"
        names = files.names_below(start)
        found += _by_block(of, f"{start}/", names)
        found += _of_all_blocks(of, f"{start}/", names, variants[place])
    return found


def of_layers(galleries: Sequence[Gallery], layers: Set[int] | None, depth: int) -> list[Gallery]:
    """Without pictures of other blocks; below 0 they count from the last one on."""
    if layers is None:
        return list(galleries)
    found = []
    for gallery in galleries:
        kept = [n for n in gallery.prefixes if n is None or n in layers or n - depth in layers]
        if kept:
            found.append(gallery.only(kept, gallery.files))
    return found


def _by_block(of: Gallery, start: str, names: Sequence[PurePosixPath]) -> list[Gallery]:
    """Galleries of files in folders of blocks, and of sheets named after blocks."""
    images: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    sheets: dict[str, list[int]] = defaultdict(list)
    folders: dict[tuple[str, int], str] = {}
    for name in names:
        if found := _BLOCK.match(name.parent.name):
            variant, layer = _variant(name.parent.parent, found[2]), int(found[1])
            images[variant][layer].append(name.name)
            folders[variant, layer] = f"{start}{name.parent}/"
        elif found := _BLOCK.match(name.stem):
            variant, layer = _variant(name.parent, found[2]), int(found[1])
            sheets[variant].append(layer)
            folders[variant, layer] = start + str(name.parent / name.stem) + "/"
    galleries = []
    for variant, by_layer in images.items():
        # Only images that are drawn at every block: a path needs both.
        everywhere = set.intersection(*map(set, by_layer.values()))
        files = _titled({PurePosixPath(file).stem: file for file in sorted(everywhere)})
        prefixes: dict[int | None, str] = {n: folders[variant, n] for n in sorted(by_layer)}
        if files:
            galleries.append(replace(of, variant=variant, prefixes=prefixes, files=files))
    for variant, layers in sheets.items():
        prefixes = {n: folders[variant, n].rstrip("/") for n in sorted(layers)}
        galleries.append(replace(of, variant=variant, prefixes=prefixes, files={"": ".png"}))
    return galleries


def gallery_pairs(
    first: Sequence[Gallery], second: Sequence[Gallery]
) -> list[tuple[Gallery, Gallery]]:
    """The galleries that both have, cut down to the blocks and images that both have."""
    others = {gallery.key: gallery for gallery in second}
    pairs = []
    for one in first:
        other = others.get(one.key)
        layers = [n for n in one.prefixes if other and n in other.prefixes]
        images = [image for image in one.files if other and image in other.files]
        if other and layers and images:
            pairs.append((one.only(layers, images), other.only(layers, images)))
    return pairs


def told_apart(galleries: Mapping[str, Sequence[Gallery]]) -> dict[str, list[Gallery]]:
    """The same, with `data` where pictures of a task and dataset are of several sets of images.

    So are those from before and after one image was replaced.
    """
    sets: dict[tuple[str, str], set[str]] = defaultdict(set)
    for gallery in (one for those in galleries.values() for one in those):
        sets[gallery.task, gallery.dataset].add(gallery.images)
    return {
        encoder: [
            replace(one, data=f"data {one.images[:6]}")
            if len(sets[one.task, one.dataset]) > 1
            else one
            for one in those
        ]
        for encoder, those in galleries.items()
    }


def _titled(files: Mapping[str, str]) -> dict[str, str]:
    """By what readers may call the images, where that tells them apart."""
    titles = {figure_title(name): file for name, file in files.items()}
    return titles if len(titles) == len(files) else dict(files)


def _of_all_blocks(
    of: Gallery,
    start: str,
    names: Sequence[PurePosixPath],
    variants: Iterable[tuple[str, str]],
) -> list[Gallery]:
    """Pictures that show all blocks at once.

    PROTOCOL-FACET-IMAGE.png of a recorded protocol and facet, or FOLDER/NAME.png.
    """
    starts = {f"{protocol}-{facet}-": f"{protocol} {facet}" for protocol, facet in variants}
    # The longest first, because one may begin with another.
    by_length = sorted(starts, key=len, reverse=True)
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        if _BLOCK.match(name.parent.name) or _BLOCK.match(name.stem):
            continue
        own = "" if name.parent.name else next(filter(name.name.startswith, by_length), "")
        variant = starts[own] if own else _variant(name.parent, None)
        groups[variant][name.stem.removeprefix(own)] = str(name)
    return [
        replace(of, variant=v, prefixes={None: start}, files=_titled(files))
        for v, files in groups.items()
    ]


def _variant(folder: PurePosixPath, facet: str | None) -> str:
    return " ".join(part for part in (*folder.parts, facet or "") if part)


class Strip(NamedTuple):
    """A few pictures of a checkpoint over its blocks.

    Attributes:
        pictures: Block, such as "block 3" or "all blocks", address, and what is seen, in words.
    """

    checkpoint: Checkpoint
    what: str
    pictures: Sequence[tuple[str, str, str]]


def strips_of(
    checkpoints: Sequence[Checkpoint],
    galleries: Mapping[str, Sequence[Gallery]],
    scored: Iterable[Record],
) -> list[Strip]:
    """Strips of each checkpoint that has pictures, a task each, of what most of them have.

    Args:
        checkpoints: In the order in which they are shown.
        galleries: By id of an encoder.
        scored: One record of each set of images whose scores are shown beside the strips: of its
            task and dataset no other images are shown.
    """
    of_scores: dict[tuple[str, str], set[str]] = defaultdict(set)
    for record in scored:
        images = short_fingerprint(record.dataset_fingerprint)
        of_scores[record.task, record.dataset].add(images)
    shown = {
        one.encoder_id: [
            gallery
            for gallery in galleries[one.encoder_id]
            if gallery.images in of_scores.get((gallery.task, gallery.dataset), {gallery.images})
        ]
        for one in checkpoints
    }
    every = [gallery for those in shown.values() for gallery in those]
    uses = Counter(gallery.key for gallery in every)
    image_uses = Counter((gallery.key, image) for gallery in every for image in gallery.files)

    def task_place(task: str) -> tuple[bool, int, str]:
        """Those with a picture a block before others, the first ones before the rest."""
        by_block = any(gallery.layers for gallery in every if gallery.task == task)
        return not by_block, _place_of(task), task

    def place(gallery: Gallery) -> tuple[bool, bool, int, int]:
        """A picture a block before one of all, what many have before what few, many blocks."""
        return (
            not gallery.layers, gallery.is_sheet, -uses[gallery.key], -len(gallery.layers)
        )  # fmt: skip

    strips = []
    for task in sorted({gallery.task for gallery in every}, key=task_place)[:_MOST_TASKS]:
        for checkpoint in checkpoints:
            own = [one for one in shown[checkpoint.encoder_id] if one.task == task]
            if own:
                best = min(own, key=place)
                image = max(best.files, key=lambda image, best=best: image_uses[best.key, image])
                strips.append(_strip(checkpoint, best, image))
    return strips


def _strip(checkpoint: Checkpoint, gallery: Gallery, image: str) -> Strip:
    of = f", image {image}" if image else ""
    layers: list[int | None] = list(gallery.layers) or [None]
    if len(layers) > MOST_SHOWN:
        # From the first to the last one in even steps.
        steps = (round((len(layers) - 1) * n / (MOST_SHOWN - 1)) for n in range(MOST_SHOWN))
        layers = [layers[step] for step in steps]
    pictures = []
    for layer in layers:
        block = "all blocks" if layer is None else f"block {layer}"
        alt = f"{checkpoint.name}, {gallery.what}, {block}{of}"
        pictures.append((block, address(gallery.path(layer, image)), alt))
    return Strip(checkpoint, gallery.what + of, pictures)


def sections_of(shown: Sequence[Sequence[tuple[str, Gallery]]]) -> list[dict[str, Any]]:
    """Pictures with a choice of image and block, by task, ready for the templates.

    Args:
        shown: Side by side, with the names of their checkpoints: galleries of the same kind, all
            with the same blocks and images.
    """
    by_task: dict[str, list[dict[str, Any]]] = defaultdict(list)
    # Single images before sheets of many.
    for sides in sorted(shown, key=lambda sides: (_place_of(sides[0][1].task), sides[0][1].key)):
        by_task[sides[0][1].task].append(_viewer(sides))
    return [
        {
            "title": task,
            "anchor": f"pictures-{safe_file_name(task)}",
            "caption": _CAPTIONS.get(task, ""),
            "viewers": viewers,
        }
        for task, viewers in by_task.items()
    ]


def _viewer(sides: Sequence[tuple[str, Gallery]]) -> dict[str, Any]:
    """What is first shown, and under `data` the addresses that the script of the page chooses."""
    first = sides[0][1]
    layers: list[int | None] = list(first.layers) or [None]
    images, start = list(first.files), len(layers) - 1
    at = "all blocks" if layers[start] is None else f"block {layers[start]}"
    of = f", image {images[0]}" if images[0] else ""
    kind = "contact sheets" if first.is_sheet else "" if first.layers else "all blocks"
    parts = (first.dataset, first.protocol, first.data, kind)
    return {
        "title": ", ".join(part for part in parts if part),
        "images": images,
        "layers": first.layers,
        "start": start,
        "sides": [
            {
                "name": name,
                "address": address(g.path(layers[start], images[0])),
                "alt": f"{name}, {first.what}, {at}{of}",
            }
            for name, g in sides
        ],
        "data": {
            "what": first.what,
            "layers": list(first.layers),
            "images": [[image, address(first.files[image])] for image in images],
            "sides": [
                {"name": name, "prefixes": [address(g.prefixes[layer]) for layer in layers]}
                for name, g in sides
            ],
        },
        # Wide pictures stand below each other.
        "is_tall": first.is_sheet or not first.layers,
    }


def _place_of(task: str) -> int:
    """Which pictures are looked at first."""
    if task in _FIRST_TASKS:
        return _FIRST_TASKS.index(task)
    return len(_FIRST_TASKS) + (task in _LAST_TASKS)


def address(path: str) -> str:
    """A relative path as a link; names of files may hold bytes that are no UTF-8."""
    return quote(path, errors="surrogateescape")
