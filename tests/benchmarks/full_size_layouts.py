"""Datasets with as many images as published, made of a few photographs with masks."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from ssl_bench.data.layouts.ade20k import NUM_CLASSES, Ade20k
from ssl_bench.data.layouts.coco_stuff import CocoStuff, read_classes
from ssl_bench.data.layouts.voc import Voc
from ssl_bench.data.samples import IGNORED, Dataset, Sample

_QUALITY = 92
# Of one file; ext4 allows 65,000 links.
_MOST_LINKS = 5000


@dataclass(frozen=True)
class Part:
    """One split on disk.

    Attributes:
        images: Folder, relative to that of the data.
        masks: As `images`.
        names: Of image `number`, without the suffix.
        listed: File with all names, where the layout has one.
    """

    count: int
    images: str
    masks: str
    names: Callable[[int], str]
    listed: str | None = None


@dataclass(frozen=True)
class Layout:
    """A dataset of full size.

    Attributes:
        size: Width and height of its images in pixels.
        numbers: What masks hold for the classes of VOC, 0 to 20, and for what is ignored.
        open: Reads it from its folder.
        choice: Words by which the command line is asked for it.
    """

    parts: tuple[Part, ...]
    size: tuple[int, int]
    numbers: Mapping[int, int]
    open: Callable[[Path], Dataset]
    choice: tuple[str, ...]


def _voc(train: int, split: Literal["train", "trainaug"]) -> Layout:
    root = "VOCdevkit/VOC2012"
    folder = "SegmentationClassAug" if split == "trainaug" else "SegmentationClass"
    lists = f"{root}/ImageSets/Segmentation"
    images = f"{root}/JPEGImages"
    return Layout(
        parts=(
            Part(train, images, f"{root}/{folder}", "2008_{:06}".format, f"{lists}/{split}.txt"),
            Part(
                1449, images, f"{root}/SegmentationClass", "2012_{:06}".format, f"{lists}/val.txt"
            ),
        ),
        size=(500, 375),
        numbers={**{number: number for number in range(21)}, IGNORED: IGNORED},
        open=lambda folder: Voc(root=str(folder), train_split=split),
        choice=("voc2012", f"dataset.train_split={split}"),
    )


def _ade20k() -> Layout:
    root = "ADEChallengeData2016"
    parts = {"training": (20_210, "ADE_train_{:08}"), "validation": (2000, "ADE_val_{:08}")}
    return Layout(
        parts=tuple(
            Part(number, f"{root}/images/{name}", f"{root}/annotations/{name}", ids.format)
            for name, (number, ids) in parts.items()
        ),
        size=(683, 512),
        # Spread over all classes, of which 0 is none.
        numbers={**{n: 1 + n * (NUM_CLASSES - 1) // 20 for n in range(21)}, IGNORED: 0},
        open=lambda folder: Ade20k(root=str(folder)),
        choice=("ade20k",),
    )


def _coco_stuff() -> Layout:
    raw = list(read_classes())
    parts = {"train2017": 118_287, "val2017": 5000}
    return Layout(
        parts=tuple(
            Part(number, f"images/{name}", f"stuffthingmaps/{name}", "{:012}".format)
            for name, number in parts.items()
        ),
        size=(640, 480),
        numbers={**{n: raw[n * (len(raw) - 1) // 20] for n in range(21)}, IGNORED: IGNORED},
        open=lambda folder: CocoStuff(root=str(folder)),
        choice=("coco_stuff",),
    )


LAYOUTS: Mapping[str, Layout] = {
    "voc_train": _voc(1464, "train"),
    "voc_trainaug": _voc(10_582, "trainaug"),
    "ade20k": _ade20k(),
    "coco_stuff": _coco_stuff(),
}
"""By what `--counts` calls them; the counts are those of `ssl_bench.data.sources`."""


def photographs(folder: Path) -> Iterator[Sample]:
    """All images with masks of a VOCdevkit, whichever of its lists names them."""
    for split in ("train", "val"):
        images = getattr(Voc(root=str(folder)), split)()
        yield from (images[index] for index in range(len(images)))


def build(folder: Path, layout: Layout, samples: Sequence[Sample]) -> None:
    """Write a dataset; most of its files are links to those of a pool, of which each is two.

    A name is of another photograph than the next one, mirrored or not. A photograph has as many
    files as its links need.
    """
    files = max(2 * len(samples), -(-sum(p.count for p in layout.parts) // _MOST_LINKS))
    pool = [_encoded(folder / "pool", layout, samples, number) for number in range(files)]
    turn = count()
    for part in layout.parts:
        names = [part.names(number) for number in range(part.count)]
        images, masks = folder / part.images, folder / part.masks
        for place in (images, masks):
            place.mkdir(parents=True, exist_ok=True)
        for name, number in zip(names, turn, strict=False):
            image, mask = pool[number % files]
            os.link(image, images / f"{name}.jpg")
            os.link(mask, masks / f"{name}.png")
        if part.listed is not None:
            listed = folder / part.listed
            listed.parent.mkdir(parents=True, exist_ok=True)
            listed.write_text("".join(f"{name}\n" for name in names))


def _encoded(
    pool: Path, layout: Layout, samples: Sequence[Sample], number: int
) -> tuple[Path, Path]:
    """One photograph with its mask at the size of the dataset, in its numbers of classes."""
    pool.mkdir(parents=True, exist_ok=True)
    repeat, index = divmod(number, len(samples))
    sample = samples[index]
    assert sample.mask is not None
    numbers = np.zeros(256, np.uint8)
    numbers[list(layout.numbers)] = list(layout.numbers.values())
    image = Image.fromarray(sample.image).resize(layout.size, Image.Resampling.BICUBIC)
    mask = Image.fromarray(numbers[sample.mask]).resize(layout.size, Image.Resampling.NEAREST)
    if repeat % 2:
        image, mask = (one.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for one in (image, mask))
    paths = pool / f"{number:05}.jpg", pool / f"{number:05}.png"
    image.save(paths[0], quality=_QUALITY)
    mask.save(paths[1])
    return paths
