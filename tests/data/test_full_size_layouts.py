"""What the measurements of datasets of full size read is what the suite reads."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ssl_bench.data.samples import IGNORED, Sample
from ssl_bench.data.sources import SOURCES
from tests.benchmarks.full_size_layouts import LAYOUTS, build

# Classes of VOC in four columns, of which the last is ignored.
_COLUMNS = [0, 12, 20, IGNORED]


def scene(seed: int) -> Sample:
    image = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    return Sample(f"{seed}", image, np.repeat([_COLUMNS], 2, 1).repeat(6, 0).astype(np.uint8))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_adapter_reads_every_image_with_its_mask(tmp_path: Path, name: str):
    layout = LAYOUTS[name]
    train, val = (replace(p, count=n) for p, n in zip(layout.parts, (5, 3), strict=True))

    build(tmp_path, replace(layout, parts=(train, val)), [scene(0), scene(1)])

    dataset = layout.open(tmp_path)
    sets = dataset.train(), dataset.val()
    assert [len(images) for images in sets] == [5, 3]
    masks = [s.mask for images in sets for s in (images[i] for i in range(len(images)))]
    assert all(mask is not None and mask.shape[::-1] == layout.size for mask in masks)
    found = {tuple(dict.fromkeys(mask[0].tolist())) for mask in masks if mask is not None}
    # As it is, and mirrored.
    assert len(found) == 2
    assert {row[::-1] for row in found} == found
    assert all(len(set(row)) == 4 and IGNORED in row for row in found) or name == "ade20k"


def test_the_numbers_of_images_are_those_published():
    counts = {name: tuple(part.count for part in layout.parts) for name, layout in LAYOUTS.items()}
    published = {
        n: (SOURCES[n].counts["train"], SOURCES[n].counts["val"])
        for n in SOURCES
        if SOURCES[n].counts.keys() >= {"train", "val"}
    }

    assert counts["voc_train"] == published["voc2012"]
    assert counts["ade20k"] == published["ade20k"]
    assert counts["coco_stuff"] == published["coco_stuff"]
    assert counts["voc_trainaug"] == (10_582, 1449)


def test_files_are_links_to_a_few(tmp_path: Path):
    layout = LAYOUTS["voc_train"]
    train, val = (replace(part, count=10) for part in layout.parts)

    build(tmp_path, replace(layout, parts=(train, val)), [scene(0)])

    paths = list((tmp_path / train.images).glob("*.jpg"))
    assert len(paths) == 20
    assert len({path.stat().st_ino for path in paths}) == 2
