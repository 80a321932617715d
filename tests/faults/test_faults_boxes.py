"""Row 82 of the catalogue of faults: boxes that are none, whatever file says them."""

from pathlib import Path

import numpy as np
import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.data.layouts.coco20k import Coco20k
from ssl_bench.data.layouts.spair71k import Spair71k
from ssl_bench.data.layouts.voc import Voc
from ssl_bench.errors import DataError
from tests.support.faults import OBJECT, coco20k, fails, probing, records, voc
from tests.support.spair import PAIRS, spair, write_annotation

STEM = "COCO_train2014_000000000001"


def boxed(place: Path, *corners: object, more: str = "") -> Path:
    """VOC with one object in the first image, which is 40 x 32; gives its annotation."""
    path = voc(place) / "Annotations/t0.xml"
    keys = ("xmin", "ymin", "xmax", "ymax")
    box = "".join(f"<{key}>{one}</{key}>" for key, one in zip(keys, corners, strict=True))
    path.write_text(
        f"<annotation>{more}<object><name>cat</name><bndbox>{box}</bndbox></object></annotation>"
    )
    return path


def coco(root: Path, text: str = "", **changed: object) -> Path:
    """One picture of 40 x 32 with one object, of which `text` is replaced in the JSON."""
    one = {"id": 7, "image_id": 1, "category_id": 1, "iscrowd": 0, "bbox": [8, 8, 16, 16]}
    image = {"id": 1, "width": changed.pop("width", 40), "height": 32}
    path = coco20k(root, [1], {"images": [image], "annotations": [one | changed]})
    path.write_text(path.read_text().replace('"BOX"', text))
    return path


@pytest.mark.parametrize(
    "corners",
    [
        ("nan", 9, 24, 24),
        (9, 9, "2_4", 24),
        (9, 9, "٢٤", 24),
        ("", 9, 24, 24),
        (24, 9, 9, 24),
        (9, 24, 24, 9),
        (9, 9, 8, 24),
        (41, 9, 60, 24),
        (9, 33, 24, 60),
        (-30, 9, 0, 24),
        (9, 9, 1e308, 1e308),
        (9, 9, 400, 24),
        (-1e9, 9, 24, 24),
    ],
    ids=str,
)
def test_fault_82_a_box_of_voc_that_is_none_is_named(tmp_path, corners):
    path = boxed(tmp_path, *corners)

    with pytest.raises(DataError, match=r"Annotations/t0\.xml.*object 1"):
        Voc(tmp_path).discovery()[0]
    other = path.read_text().partition("<object>")[2].partition("</object>")[0]
    path.write_text(f"{OBJECT.removesuffix('</annotation>')}<object>{other}</object></annotation>")
    with pytest.raises(DataError, match=r"Annotations/t0\.xml.*object 2"):
        Voc(tmp_path).discovery()[0]


def test_fault_82_a_box_that_is_none_ends_every_task_that_looks_for_objects(place, capsys):
    boxed(place, 9, 9, 8, 24)

    for task in ("tokencut", "discovery"):
        said = fails(capsys, probing(task, "voc2012", place), 3)
        assert "Annotations/t0.xml" in said
        assert "object 1" in said


@pytest.mark.parametrize(
    ("corners", "box"),
    [
        ((" 9 ", "\n9", "24.5", "24"), [8, 8, 24.5, 24]),
        ((9, 9, 9, 9), [8, 8, 9, 9]),
        (("1e1", 0, 41, 33), [9, -1, 41, 33]),
    ],
)
def test_fault_82_boxes_of_voc_that_are_some_stay(place, corners, box):
    boxed(place, *corners)

    found = Voc(place).discovery()[0].boxes

    assert found is not None
    assert found.tolist() == [box]


@pytest.mark.parametrize(("width", "code"), [(40, 0), (0, 0), (80, 3)])
def test_fault_82_boxes_are_of_the_size_of_their_image(place, capsys, width, code):
    size = f"<size><width>{width}</width><height>{32 if width else 0}</height></size>"
    boxed(place, 9, 9, 24, 24, more=size)

    assert main(probing("tokencut", "voc2012", place)) == code

    if code:
        assert (
            "states an image of 80 x 32 pixels, but the image has 40 x 32"
            in capsys.readouterr().err
        )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(("<width>40", f"<width>{width}") for width in ("1e400", "40.7", "-40", "")),
        ("bndbox>", "box>"),
        ("</annotation>", ""),
        ("annotation>", "html>"),
        ("<annotation>", "<annotation xmlns='http://host/voc'>"),
        *(("<bndbox>", f"<difficult>{value}</difficult><bndbox>") for value in ("yes", "2", "")),
    ],
)
def test_fault_82_other_xml_and_other_words_are_no_annotation(tmp_path, old, new):
    size = "<size><width>40</width><height>32</height></size>"
    path = boxed(tmp_path, 9, 9, 24, 24, more=size)
    text = path.read_text()
    assert old in text

    path.write_text(text.replace(old, new))

    with pytest.raises(DataError, match=r"t0\.xml"):
        Voc(tmp_path, exclude_difficult=True).discovery()[0]
    path.write_text(text.replace("<bndbox>", "<difficult> 1 </difficult><bndbox>"))
    assert "t0" not in Voc(tmp_path, exclude_difficult=True).discovery().ids


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("[NaN, 8, 16, 16]", {"bbox": "BOX"}),
        ("[8, 8, 1e300, 16]", {"bbox": "BOX"}),
        ("", {"bbox": ["8", "8", "16", "16"]}),
        ("", {"bbox": [8, 8, True, 16]}),
        ("", {"bbox": [8, 8, 16]}),
        ("", {"bbox": {"x": 8, "y": 8, "w": 16, "h": 16}}),
        ("", {"bbox": [8, 8, -4, 16]}),
        ("", {"bbox": [8, 8, 16, -4]}),
        ("", {"bbox": [41, 8, 16, 16]}),
        ("", {"bbox": [8, -40, 16, 16]}),
        ("", {"bbox": [8, 8, 400, 16]}),
        ("", {"iscrowd": "0"}),
        ("", {"iscrowd": False}),
        ("", {"iscrowd": 2}),
        ("", {"image_id": 1.6}),
        ("", {"image_id": "1"}),
        ("", {"image_id": True}),
        ("", {"id": True}),
        ("", {"width": 80}),
        ("", {"width": "40"}),
    ],
    ids=str,
)
def test_fault_82_instances_of_coco_that_are_none_are_named(tmp_path, text, changed):
    coco(tmp_path / "COCO", text, **changed)

    with pytest.raises(DataError, match=r"instances_train2014\.json") as raised:
        Coco20k(tmp_path / "COCO").discovery()[0]

    if changed.keys() & {"iscrowd", "image_id"}:
        assert "object 7: expected" in str(raised.value)
    if changed == {"bbox": [41, 8, 16, 16]}:
        box = "[41.0, 8.0, 57.0, 24.0]"
        assert f"object 7 of {STEM}: the box {box} is not in its image" in str(raised.value)


@pytest.mark.parametrize("bbox", [[8, 8, 16, 0], [8, 8, 0.3, 16], [40, 8, 0, 0], [39.6, 8, 0.4, 9]])
def test_fault_82_flat_boxes_of_coco_stay_as_in_lost(place, bbox):
    coco(place / "COCO", bbox=bbox)

    if bbox == [8, 8, 16, 0]:
        assert main(probing("tokencut", "coco20k", place / "COCO")) == 0
        (record,) = records()
        assert (record.num_images, record.value) == (1, 0.0)
    boxes = Coco20k(place / "COCO").discovery()[0].boxes
    assert boxes is not None
    assert np.ptp(boxes.reshape(2, 2), axis=0).min() == 0


def test_fault_82_a_list_of_other_names_is_no_list_of_coco(tmp_path):
    coco(tmp_path)
    folder = tmp_path / "images/train2014"
    (folder / f"{STEM}.jpg").rename(folder / "cat.jpg")
    (tmp_path / "coco_20k_filenames.txt").write_text("train2014/cat.jpg\n")

    with pytest.raises(DataError, match="cat is not an image of COCO"):
        Coco20k(tmp_path).discovery()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        *(
            ({"trg_bndbox": box}, "trg_bndbox: expected 4 numbers")
            for box in ([5, 8, "30", 58], [9, 9], None)
        ),
        ({"trg_bndbox": [30, 8, 5, 58]}, "begins at x = 30 and ends at 5"),
        ({"trg_bndbox": [5, 8, 30, 8]}, "begins at y = 8 and ends at 8"),
        ({"trg_bndbox": [400, 8, 430, 58]}, "is not in its image"),
        ({"src_kps": [["12", 8], [24, 16], [36, 24]]}, "src_kps is not a list of points"),
        ({"trg_kps": [[True, 8], [24, 16], [36, 24]]}, "trg_kps is not a list of points"),
        ({"trg_kps": [[1, 2], [3, 4], [float("nan"), 5]]}, "trg_kps is not a list of points"),
        ({"src_kps": []}, "src_kps is not a list of points"),
        ({"src_kps": [[1, 2, 3]]}, "src_kps is not a list of points"),
        ({"trg_kps": [[1, 2]]}, "3 src_kps and 1 trg_kps"),
        ({"trg_kps": [[1, 2], [3, 4], [41, 5]]}, "outside the 40 x 60 image"),
        ({"category": "dog"}, "it is not of the category cat"),
    ],
    ids=str,
)
def test_fault_82_boxes_and_points_of_pairs_pass_the_same_gate(tmp_path, changed, said):
    path = write_annotation(spair(tmp_path), PAIRS[0], **changed)

    with pytest.raises(DataError) as raised:
        Spair71k(tmp_path).val()[0]

    assert path.name in str(raised.value)
    assert said in str(raised.value)
