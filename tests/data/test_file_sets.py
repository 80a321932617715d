"""What every image set over files checks and promises."""

import pickle
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ssl_bench.data.files.file_sets import FileImageSet, Files, Masks
from ssl_bench.data.labels import LabelMap
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import DataError

LABELS = LabelMap({0: 0, 1: 1, 255: 255}, hint="-")


@pytest.fixture
def images(tmp_path: Path) -> FileImageSet:
    """Three scenes of 4 rows and 6 columns; the last has class 1 in its lower half."""
    for folder in ("photos", "masks"):
        (tmp_path / folder).mkdir()
    for number, name in enumerate("abc"):
        Image.new("RGB", (6, 4), (number, 0, 0)).save(tmp_path / "photos" / f"{name}.png")
        mask = np.zeros((4, 6), np.uint8)
        mask[2:] = number == 2
        Image.fromarray(mask).save(tmp_path / "masks" / f"{name}_label.png")
    return FileImageSet(
        name="three",
        split="all",
        source=tmp_path / "photos",
        ids=("a", "b", "c"),
        images=Files(tmp_path / "photos", ".png"),
        class_names=("ground", "thing"),
        masks=Masks(Files(tmp_path / "masks", "_label.png"), LABELS),
    )


def test_a_sample_holds_the_image_and_its_own_mask(images):
    sample = images.checked()[2]

    assert [one.image_id for one in islice(images, 9)] == ["a", "b", "c"]
    assert isinstance(images, ImageSet)
    assert (len(images), sample.image_id, sample.boxes) == (3, "c", None)
    assert sample.image[0, 0].tolist() == [2, 0, 0]
    assert sample.mask is not None
    assert sample.mask[:, 0].tolist() == [0, 0, 1, 1]


def test_an_image_that_is_named_twice_is_refused(images):
    with pytest.raises(DataError, match="names an image twice"):
        replace(images, ids=("a", "b", "a")).checked()


def test_the_fingerprint_follows_ids_contents_and_the_meaning_of_labels(images, tmp_path):
    first = images.fingerprint()
    relabelled = LabelMap({0: 0, 1: 0, 255: 255}, hint="-")
    changed = [
        replace(images, ids=("a", "b")),
        replace(images, masks=None),
        replace(images, class_names=("thing", "ground")),
        replace(images, masks=Masks(Files(tmp_path / "masks", "_label.png"), relabelled)),
    ]
    assert len({first, *(other.fingerprint() for other in changed)}) == 5
    assert replace(images, name="other", split="part").fingerprint() == first

    with (tmp_path / "masks/a_label.png").open("ab") as file:
        file.write(b"x")
    assert images.fingerprint() == first, "computed once"
    assert replace(images).fingerprint() != first


def test_the_fingerprint_decodes_no_picture_and_goes_to_another_process(images, tmp_path):
    for path in tmp_path.glob("*/*.png"):
        path.write_bytes(b"no picture")
    assert len(images.fingerprint()) == 64

    other = pickle.loads(pickle.dumps(images))

    assert (other.fingerprint(), other.ids) == (images.fingerprint(), images.ids)


def test_ids_of_a_folder_leave_out_hidden_and_other_files(tmp_path):
    for name in ("2.png", "1.png", "._1.png", "1_labelTrainIds.png", "readme.txt"):
        (tmp_path / name).touch()

    assert Files(tmp_path, ".png", other_suffix="_labelTrainIds.png").ids() == ["1", "2"]
    assert Files(tmp_path, "_labelTrainIds.png").ids() == ["1"]


def test_files_that_are_there_are_found_by_listing_their_folders(images, tmp_path, monkeypatch):
    files = Files(tmp_path / "photos", ".png")
    (tmp_path / "photos/deeper").mkdir()
    (tmp_path / "photos/deeper/d.png").symlink_to(tmp_path / "photos/a.png")
    (tmp_path / "photos/gone.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "photos/folder.png").mkdir()
    asked = []
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: asked.append(path.name) or is_file(path))

    assert files.missing(["a", "b", "deeper/d"]) == []
    assert asked == []
    absent = ["gone", "folder", "deeper/e", "no/f"]
    assert files.missing(["a", *absent]) == ["gone.png", "folder.png", "e.png", "f.png"]
    # Where names are found whatever their letters, though listed as they were written.
    monkeypatch.setattr(Path, "is_file", lambda path: path.name.lower() == "a.png")
    assert files.missing(["A"]) == []
