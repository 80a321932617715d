"""PASCAL VOC: indices of a palette, boxes of XML, lists of ids."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ssl_bench.data.layouts.voc import CLASS_NAMES, Voc
from ssl_bench.data.samples import Dataset, Sample
from ssl_bench.errors import ConfigurationError, DataError

# Rim, background, aeroplane and the last class, tvmonitor.
MASK = [[255, 255, 0, 0], [255, 1, 0, 0], [1, 1, 20, 0], [1, 20, 20, 20]]

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


def write_mask(path: Path, indices: list[list[int]], *, palette: bool = True) -> None:
    image = Image.fromarray(np.array(indices, np.uint8))
    if palette:
        # Colours that have nothing to do with the indices.
        image.putpalette([value for index in range(256) for value in (255 - index, 3, 9)])
    path.parent.mkdir(exist_ok=True)
    image.save(path)


@pytest.fixture
def devkit(tmp_path: Path) -> Path:
    """VOC2012 with images a (train), b (val) and c (aug only), 4 x 4 pixels."""
    voc = tmp_path / "VOCdevkit/VOC2012"
    objects = {"a": person(), "b": person(difficult=1) + person(truncated=1), "c": ""}
    for folder in ("JPEGImages", "Annotations", "ImageSets/Segmentation", "ImageSets/Main"):
        (voc / folder).mkdir(parents=True)
    for name, xml in objects.items():
        Image.new("RGB", (4, 4)).save(voc / f"JPEGImages/{name}.jpg")
        write_mask(voc / f"SegmentationClass/{name}.png", MASK)
        (voc / f"Annotations/{name}.xml").write_text(f"<annotation>{xml}</annotation>")
    for name, ids in (("train", "a"), ("val", "b"), ("trainaug", "a\nc"), ("trainval", "a\nb\nc")):
        for lists in ("Segmentation", "Main"):
            (voc / f"ImageSets/{lists}/{name}.txt").write_text(f"{ids}\n")
    return tmp_path


def test_a_palette_mask_is_read_as_indices(devkit):
    assert mask_of(Voc(devkit).train()[0]).tolist() == MASK
    assert CLASS_NAMES[20] == "tvmonitor"
    assert len(CLASS_NAMES) == 21


def test_a_mask_saved_as_colour_is_refused(devkit):
    path = devkit / "VOCdevkit/VOC2012/SegmentationClass/a.png"
    Image.open(path).convert("RGB").save(path)

    with pytest.raises(DataError, match=r"a\.png holds colours \(RGB\)"):
        Voc(devkit).train()[0]


def test_a_class_number_beyond_twenty_is_refused(devkit):
    write_mask(devkit / "VOCdevkit/VOC2012/SegmentationClass/a.png", [[21] * 4] * 4)

    with pytest.raises(DataError, match=r"a\.png holds label 21, expected 0-20, 255"):
        Voc(devkit).train()[0]


def test_boxes_become_half_open_and_parts_of_a_person_are_none(devkit):
    boxes = boxes_of(Voc(devkit).discovery()[0])

    # By hand: (1, 2, 4, 3), 1-based and inclusive, covers columns 0-3 and rows 1-2.
    assert boxes.tolist() == [[0.0, 1.0, 4.0, 3.0]]


def test_fractions_of_a_pixel_are_kept(devkit):
    xml = devkit / "VOCdevkit/VOC2012/Annotations/a.xml"
    xml.write_text(f"<annotation>{person(1.25)}</annotation>")

    assert boxes_of(Voc(devkit).discovery()[0])[0, 0] == 0.25


def test_difficult_and_truncated_boxes_count_unless_asked_otherwise(devkit):
    counts = [len(boxes_of(sample)) for sample in Voc(devkit).discovery()]
    easy = Voc(devkit, exclude_difficult=True).discovery()

    assert counts == [1, 2, 0]
    assert easy.ids == ("a",), "images with hard objects only are left out too"
    assert easy.fingerprint() != Voc(devkit, discovery_split="train").discovery().fingerprint()


def test_an_image_without_objects_has_no_boxes(devkit):
    assert boxes_of(Voc(devkit).discovery()[2]).shape == (0, 4)


@pytest.mark.parametrize(
    "xml",
    ["", "<annotation><object></object></annotation>", f"<annotation>{person('x')}</annotation>"],
    ids=["empty", "no box", "no number"],
)
def test_an_annotation_that_cannot_be_read_is_named(devkit, xml):
    (devkit / "VOCdevkit/VOC2012/Annotations/a.xml").write_text(xml)

    with pytest.raises(DataError, match=r"a\.xml is not an annotation of VOC"):
        Voc(devkit).discovery()[0]


def test_trainaug_takes_the_other_masks_and_val_keeps_the_original_ones(devkit):
    voc = devkit / "VOCdevkit/VOC2012"
    for name in "abc":
        write_mask(voc / f"SegmentationClassAug/{name}.png", [[2] * 4] * 4, palette=False)
    dataset = Voc(devkit, train_split="trainaug")

    assert dataset.train().ids == ("a", "c")
    assert (dataset.train()[0].mask == 2).all()
    assert mask_of(dataset.val()[0]).tolist() == MASK


def test_a_share_of_trainaug_takes_the_other_masks_too(devkit):
    write_mask(devkit / "VOCdevkit/VOC2012/SegmentationClassAug/a.png", [[2] * 4] * 4)

    assert (Voc(devkit, train_split="trainaug:0-50%").train()[0].mask == 2).all()


@pytest.mark.parametrize("below", ["", "VOCdevkit", "VOCdevkit/VOC2012"])
def test_the_root_may_be_any_of_three_folders(devkit, below):
    dataset = Voc(str(devkit / below))

    assert isinstance(dataset, Dataset)
    assert dataset.val().ids == ("b",)


def test_another_year_is_another_dataset(devkit):
    (devkit / "VOCdevkit/VOC2012").rename(devkit / "VOCdevkit/VOC2007")

    images = Voc(devkit, year=2007).discovery()
    assert images.name == "voc2007-3"
    with pytest.raises(DataError, match="does not hold voc2012: expected VOCdevkit/VOC2012/"):
        Voc(devkit).discovery()
    with pytest.raises(DataError, match="is not voc2012; type --dataset voc2007"):
        Voc(devkit / "VOCdevkit/VOC2007").discovery()


@pytest.mark.parametrize(("root", "came"), [(None, "--data-root"), ("/nowhere", "/nowhere")])
def test_a_wrong_root_shows_the_expected_tree_and_only_when_it_is_used(root, came):
    dataset = Voc(root)

    with pytest.raises(DataError, match=came) as caught:
        dataset.train()
    assert "VOCdevkit/VOC2012/{JPEGImages,SegmentationClass," in str(caught.value)


def test_listed_files_that_are_absent_are_found_at_once(devkit):
    voc = devkit / "VOCdevkit/VOC2012"
    (voc / "SegmentationClass/a.png").unlink()
    (voc / "JPEGImages/b.jpg").unlink()
    (voc / "Annotations/c.xml").unlink()

    with pytest.raises(DataError, match=r"1 of 1 masks .* SegmentationClass: a\.png|: a\.png;"):
        Voc(devkit).train()
    with pytest.raises(DataError, match=r"1 of 1 images .*: b\.jpg;"):
        Voc(devkit).val()
    with pytest.raises(DataError, match=r"1 of 1 annotations .*: c\.xml;"):
        Voc(devkit, discovery_split="trainval:67-100%").discovery()


def test_splits_that_share_images_are_refused_before_any_file_is_opened():
    with pytest.raises(ConfigurationError, match="share images"):
        Voc("/nowhere", train_split="trainval", val_split="trainval:0-10%")


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
