"""Test text files that list the images of a dataset."""

from pathlib import Path
from unicodedata import normalize

import pytest

from ssl_bench.data.files.file_sets import Files
from ssl_bench.data.splits import find_image_ids, read_lines, read_list
from ssl_bench.errors import DataError


@pytest.fixture
def find(tmp_path: Path):
    def find(lines: list[str], *names: str, suffix: str = ".jpg") -> list[str]:
        for name in names:
            path = tmp_path / "images" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return find_image_ids(lines, Files(tmp_path / "images", suffix))

    return find


@pytest.mark.parametrize(
    "line",
    [
        *("a", "a.jpg", "a.JPEG", "a.png", "./a.jpg", "../set/a", "/home/me/images/a.jpg"),
        *("a 1", "a  -1", "a 1 1 37", "a 0.5", "a.jpg cat", "a /masks/a.png"),
        *("a.jpg b.png", "/images/a.jpg /masks/b.png", "images/a.jpg\tmasks/b.png"),
    ],
)
def test_lines_are_ids_or_paths_with_or_without_columns(find, line):
    assert find([line], "a.jpg", "b.jpg") == ["a"]


@pytest.mark.parametrize(
    "name", ["pet0 (2)", "IMG 0001", "shot0.left", "a.png", "pet0 1", "tail  two", "masks of b/c d"]
)
@pytest.mark.parametrize("form", ["{}", "{}.jpg", "{}.jpg {}.png", "{}  1"])
def test_names_may_contain_blanks_and_dots(find, name, form):
    others = ("pet0.jpg", "IMG.jpg", "shot0.jpg", "a.jpg", "tail.jpg", "b.jpg", "d.jpg")

    assert find([form.format(name, name)], f"{name}.jpg", *others) == [name]


@pytest.mark.parametrize("suffix", ["", ".jpg", "_mask.png"])
def test_missing_images_are_not_replaced_by_images_with_shorter_names(find, suffix):
    lines = ["pet0 (2)", "pet0 (2) 1", "IMG 0001", "shot0.left", "pet0 b", "/", ".", "x y/z"]
    others = [f"{name}{suffix}" for name in ("pet0", "IMG", "shot0", "b")]

    assert find(lines, *others, suffix=suffix) == lines
    assert find([f"pet0 (2){suffix}"], suffix=suffix) == ["pet0 (2)"]


def test_folders_of_a_line_count_as_far_as_they_exist(find):
    names = ("aachen/a.jpg", "bochum/a.jpg", "a.jpg")

    lines = ["set/aachen/a.jpg", "bochum/a 1", "bonn/a", "/a.jpg"]
    assert find(lines, *names) == ["aachen/a", "bochum/a", "a", "a"]


def test_a_line_may_end_within_the_suffix(find):
    lines = ["x/a_left", "a_left.png", "a"]

    assert find(lines, "a_left.png", suffix="_left.png") == ["a", "a", "a"]


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_names_match_in_any_unicode_form(find, forms):
    listed, stored = (normalize(form, "Zürich/café") for form in forms)

    assert find([f"{listed} 1", "dog"], f"{stored}.jpg", "dog.jpg") == [stored, "dog"]


@pytest.mark.parametrize(
    ("mark", "encoding"),
    [("", "utf-8"), *(("\ufeff", encoding) for encoding in ("utf-8", "utf-16-le", "utf-16-be"))],
)
def test_a_byte_order_mark_is_removed_from_the_first_line(tmp_path, mark, encoding):
    path = tmp_path / "list.txt"
    path.write_bytes(f"{mark}café\r\n\r\nb \r\n".encode(encoding))

    assert read_list(path) == ["café", "b"]


@pytest.mark.parametrize("content", [None, b"\xff\xfea", b"\xe9", b"a\0b"])
def test_missing_lists_and_other_encodings_are_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "list.txt").write_bytes(content)

    with pytest.raises(DataError, match=r"list\.txt"):
        read_lines(tmp_path / "list.txt")


def test_a_missing_split_names_the_shortest_other_lists(tmp_path):
    for name in ("bird_val", "boat_val", "cat_val", "cow_val", "dog_train", "train", "val"):
        (tmp_path / f"{name}.txt").touch()

    with pytest.raises(DataError, match=r"test.* val, train, ") as caught:
        read_list(tmp_path / "test.txt")

    assert caught.value.hint[0] == "dataset.train_split=train:0-75%"
