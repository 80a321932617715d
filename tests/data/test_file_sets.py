"""The checks and guarantees of every image set that reads files."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from ssl_bench.data.files.file_sets import FileImageSet, Files, LabelMap, Masks
from ssl_bench.data.layouts.image_mask_folders import ImageMaskFolders
from ssl_bench.errors import DataError
from tests.support.faults import paired_folders


@pytest.fixture
def images(tmp_path: Path) -> FileImageSet:
    """Return an image set of images a, b and c."""
    paired_folders(tmp_path, {"train": "abc", "val": "d"})
    return ImageMaskFolders(tmp_path, class_names=[str(n) for n in range(9)]).train()


def test_an_image_that_is_named_twice_is_refused(images):
    with pytest.raises(DataError):
        replace(images, ids=("a", "b", "a")).validate()


def test_the_fingerprint_follows_ids_contents_and_the_meaning_of_labels(images):
    assert images.masks is not None
    # Nothing is decoded.
    for path in images.images.folder.glob("*"):
        path.write_bytes(b"no picture")
    first, masks = images.fingerprint(), images.masks.files
    changed = [
        replace(images, ids=("a", "b")),
        replace(images, masks=None),
        replace(images, class_names=images.class_names[::-1]),
        replace(images, masks=Masks(masks, LabelMap({0: 0, 8: 1}, hint="-"))),
    ]
    assert len({first, *(other.fingerprint() for other in changed)}) == 5
    assert replace(images, name="other", split="part").fingerprint() == first
    copy = pickle.loads(pickle.dumps(images))
    assert (copy.fingerprint(), copy.ids) == (first, images.ids)

    with masks.path("a").open("ab") as file:
        file.write(b"x")
    assert images.fingerprint() == first, "computed once"
    assert replace(images).fingerprint() != first


def test_missing_files_are_found_by_listing_their_folders(images, monkeypatch):
    files, folder = Files(images.images.folder, ".jpg"), images.images.folder
    (folder / "deeper").mkdir()
    (folder / "deeper/d.jpg").symlink_to(folder / "a.jpg")
    (folder / "gone.jpg").symlink_to(folder / "nowhere.jpg")
    (folder / "folder.jpg").mkdir()

    absent = ["gone", "folder", "deeper/e", "no/f"]
    names = ["gone.jpg", "folder.jpg", "e.jpg", "f.jpg"]
    assert files.missing(["a", "b", "deeper/d", *absent]) == names
    # Some file systems ignore upper and lower case.
    monkeypatch.setattr(Path, "is_file", lambda path: path.name.lower() == "a.jpg")
    assert files.missing(["A"]) == []
