"""Test the PASCAL VOC dataset."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ssl_bench.data.files.images import voc_colours
from ssl_bench.data.layouts.voc import CLASS_NAMES, Voc
from ssl_bench.data.samples import Sample
from ssl_bench.errors import DataError
from tests.support.faults import OBJECT, save_mask

# The border, background, aeroplane, and tvmonitor, which is the last class.
MASK = [[255, 255, 0, 0], [255, 1, 0, 0], [1, 1, 20, 0], [1, 20, 20, 20]]
BOX = [[0.0, 1.0, 4.0, 3.0]]

PERSON = """
<object><name>person</name><truncated>{truncated}</truncated><difficult>{difficult}</difficult>
  <bndbox><xmin>{xmin}</xmin><ymin>2</ymin><xmax>4</xmax><ymax>3</ymax></bndbox>
  <part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part>
</object>"""


def person(xmin: float | str = 1, *, truncated: int = 0, difficult: int = 0) -> str:
    return PERSON.format(xmin=xmin, truncated=truncated, difficult=difficult)


def boxes_of(sample: Sample) -> np.ndarray:
    assert sample.boxes is not None
    return sample.boxes


def mask_of(sample: Sample) -> np.ndarray:
    assert sample.mask is not None
    return sample.mask


@pytest.fixture
def devkit(tmp_path: Path) -> Path:
    """Create a miniature VOC2012 with three images of 4 x 4 pixels."""
    voc = tmp_path / "VOCdevkit/VOC2012"
    objects = {"a": person(), "b": person(difficult=1) + person(truncated=1), "c": ""}
    for folder in ("JPEGImages", "Annotations", "ImageSets/Segmentation", "ImageSets/Main"):
        (voc / folder).mkdir(parents=True)
    (voc / "SegmentationClass").mkdir()
    for name, xml in objects.items():
        Image.new("RGB", (4, 4)).save(voc / f"JPEGImages/{name}.jpg")
        save_mask(voc / f"SegmentationClass/{name}.png", np.array(MASK, np.uint8))
        (voc / f"Annotations/{name}.xml").write_text(f"<annotation>{xml}</annotation>")
    for name, ids in (("train", "a"), ("val", "b"), ("trainaug", "a\nc"), ("trainval", "a\nb\nc")):
        for lists in ("Segmentation", "Main"):
            (voc / f"ImageSets/{lists}/{name}.txt").write_text(f"{ids}\n")
    return tmp_path


def test_boxes_become_half_open_and_skip_parts_of_a_person(devkit):
    images = Voc(devkit).discovery()

    # By hand: the 1-based, inclusive box (1, 2, 4, 3) covers columns 0-3 and rows 1-2.
    assert boxes_of(images[0]).tolist() == BOX
    assert boxes_of(images[2]).shape == (0, 4), "an image without objects"
    xml = devkit / "VOCdevkit/VOC2012/Annotations/a.xml"
    xml.write_text(f"<annotation>{person(1.25)}</annotation>")
    assert boxes_of(images[0])[0, 0] == 0.25


@pytest.mark.parametrize("stored", ["gb2312", "utf-16", "windows-1252"])
@pytest.mark.parametrize("declares", [True, False])
def test_annotations_are_read_in_any_encoding(devkit, stored, declares):
    declaration = f'<?xml version="1.0" encoding="{stored}"?>' if declares else ""
    folder = "é" if stored == "windows-1252" else "山上"
    xml = devkit / "VOCdevkit/VOC2012/Annotations/a.xml"
    text = f"{declaration}<annotation><folder>{folder}</folder>{person()}</annotation>"
    xml.write_bytes(text.encode(stored))

    assert boxes_of(Voc(devkit).discovery()[0]).tolist() == BOX


@pytest.mark.parametrize("encoding", ["nonsense", "hex"])
def test_an_annotation_in_an_unknown_encoding_is_refused(devkit, encoding):
    xml = devkit / "VOCdevkit/VOC2012/Annotations/a.xml"
    xml.write_text(f'<?xml version="1.0" encoding="{encoding}"?><annotation/>')

    with pytest.raises(DataError, match=r"a\.xml"):
        Voc(devkit).discovery()[0]


def test_difficult_and_truncated_boxes_count_unless_excluded(devkit):
    counts = [len(boxes_of(sample)) for sample in Voc(devkit).discovery()]
    easy = Voc(devkit, exclude_difficult=True).discovery()

    assert counts == [1, 2, 0]
    assert easy.ids == ("a",), "images with hard objects only are left out too"
    assert easy.fingerprint() != Voc(devkit, discovery_split="train").discovery().fingerprint()
    # Errors count all objects of the file.
    bad = OBJECT.replace("<annotation>", "").replace("<xmax>24", "<xmax>2")
    hard = "<annotation><object><name>cat</name><difficult>1</difficult></object>"
    (devkit / "VOCdevkit/VOC2012/Annotations/a.xml").write_text(hard + bad)
    with pytest.raises(DataError, match="object 2"):
        Voc(devkit, exclude_difficult=True).discovery()[0]


def test_trainaug_has_its_own_masks_and_val_the_original_ones(devkit):
    voc = devkit / "VOCdevkit/VOC2012"
    (voc / "SegmentationClassAug").mkdir()
    for name in "abc":
        Image.new("L", (4, 4), 2).save(voc / f"SegmentationClassAug/{name}.png")
    dataset, half = (Voc(devkit, train_split=f"trainaug{share}") for share in ("", ":0-50%"))

    assert (dataset.train().ids, half.train().ids) == (("a", "c"), ("a",))
    assert (dataset.train().split, half.train().split) == ("trainaug", "trainaug:0-50%")
    for images in (dataset.train(), half.train()):
        assert (mask_of(images[0]) == 2).all()
    assert mask_of(dataset.val()[0]).tolist() == MASK


def test_a_list_of_a_class_leaves_out_images_without_it(devkit):
    lists = devkit / "VOCdevkit/VOC2012/ImageSets/Main"
    (lists / "person_trainval.txt").write_text("a  1\nb  0\nc -1\n")

    images = Voc(devkit, discovery_split="person_trainval").discovery()

    assert (images.ids, images.name) == (("a", "b"), "voc2012-3")


def test_the_palette_is_that_of_voc():
    # The published colours of aeroplane, tvmonitor and the border.
    assert voc_colours()[[1, 20, 255]].tolist() == [[128, 0, 0], [0, 64, 128], [224, 224, 192]]


def test_the_root_may_be_any_of_three_folders(devkit):
    for below in ("", "VOCdevkit", "VOCdevkit/VOC2012"):
        assert Voc(str(devkit / below)).val().ids == ("b",)
    (devkit / "VOCdevkit/VOC2012").rename(devkit / "VOCdevkit/VOC2007")

    assert Voc(devkit, year=2007).discovery().name == "voc2007-3"
    with pytest.raises(DataError):
        Voc(devkit).discovery()
    with pytest.raises(DataError) as caught:
        Voc(devkit / "VOCdevkit/VOC2007").discovery()
    assert caught.value.hint == ("--dataset", "voc2007")


@pytest.mark.data
def test_the_real_photographs_have_masks_and_boxes_that_agree(photos):
    dataset = Voc(photos)
    sizes = [len(images) for images in (dataset.train(), dataset.val(), dataset.discovery())]
    sample = dataset.val()[0]

    assert sizes == [36, 26, 62]
    assert sample.image_id == "2011_000003"
    assert set(np.unique(mask_of(sample))) <= {*range(21), 255}
    boxes = boxes_of(dataset.discovery()[0])
    assert boxes.tolist() == [[190, 106, 313, 329], [364, 82, 500, 333]]
    x0, y0, x1, y1 = boxes[0].astype(int)
    assert (mask_of(sample)[y0:y1, x0:x1] == CLASS_NAMES.index("person")).mean() > 0.4
