"""Pictures that probes left below OUT/pictures/TASK/DATASET/CHECKPOINT, found by their names."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from ssl_bench.report.checkpoints import Checkpoint
from ssl_bench.report.pictures.files import PictureFiles, Place
from ssl_bench.results import Record
from ssl_bench.system.naming import file_name, image_digits, image_title

_BLOCK = re.compile(r"block(\d+)(?:_(.+))?$")


@dataclass(frozen=True)
class Gallery:
    """Pictures of one kind: of every image, block by block where there is one a block.

    The picture of an image at a block is `prefixes[block] + files[image]`, for all of both.

    Attributes:
        images: The `image_digits` of all images of the split.
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
        """Such as "pca on folder, image"."""
        parts = (f"{self.task} on {self.dataset}", self.variant, self.data)
        return ", ".join(part for part in parts if part)

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

    def only(self, layers: Iterable[int | None], images: Iterable[str]) -> "Gallery":
        """The same with some blocks and images."""
        return replace(
            self,
            prefixes={layer: self.prefixes[layer] for layer in layers},
            files={image: self.files[image] for image in images},
        )


def galleries_of(
    files: PictureFiles,
    records: Sequence[Record],
    checkpoint: Checkpoint,
) -> list[Gallery]:
    """What there is to see of a checkpoint.

    Args:
        files: Those of the folder of results.
        records: Those of the report; their tasks and datasets are looked at.
        checkpoint: Whose pictures.

    Returns:
        Galleries whose paths are relative to that folder, with / between folders.
    """
    variants: dict[Place, set[tuple[str, str]]] = defaultdict(set)
    datasets: dict[Place, str] = {}
    for record in records:
        if record.encoder_id == checkpoint.encoder_id:
            for folder in checkpoint.folders:
                images = image_digits(record.dataset_fingerprint)
                place = Place(record.task, file_name(record.dataset), folder, images)
                variants[place].add((record.protocol, record.facet))
                datasets[place] = record.dataset
    found = []
    for place, dataset in sorted(datasets.items()):
        of = Gallery(place.task, dataset, place.images, "", {}, {})
        start, names = f"{place.path}/", files.names_below(place.path)
        found += _by_block(of, start, names)
        found += _panels(of, start, names, variants[place])
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
    titles = {image_title(name): file for name, file in files.items()}
    return titles if len(titles) == len(files) else dict(files)


def _panels(
    of: Gallery,
    start: str,
    names: Sequence[PurePosixPath],
    variants: Iterable[tuple[str, str]],
) -> list[Gallery]:
    """Galleries of pictures that show all blocks at once."""
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        if _BLOCK.match(name.parent.name) or _BLOCK.match(name.stem):
            continue
        variant, image = _split_panel_name(name, variants)
        groups[variant][image] = str(name)
    return [
        replace(of, variant=v, prefixes={None: start}, files=_titled(files))
        for v, files in groups.items()
    ]


def _split_panel_name(name: PurePosixPath, variants: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """PROTOCOL-FACET-IMAGE.png of a recorded protocol and facet, or FOLDER/NAME.png."""
    starts = {f"{protocol}-{facet}-": f"{protocol} {facet}" for protocol, facet in variants}
    # The longest, because one may begin with another.
    for start in sorted(starts, key=len, reverse=True):
        if name.name.startswith(start) and not name.parent.name:
            return starts[start], name.stem.removeprefix(start)
    return _variant(name.parent, None), name.stem


def _variant(folder: PurePosixPath, facet: str | None) -> str:
    return " ".join(part for part in (*folder.parts, facet or "") if part)
