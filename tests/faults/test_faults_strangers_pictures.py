"""Row 66 of the catalogue of faults: links, pipes and no pictures, in results of others."""

import os
from pathlib import Path

import numpy as np
import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore
from tests.core.test_results import RECORD
from tests.support.report_cells import (
    cell,
    files_of,
    folder_of,
    save,
    save_pictures,
    skipless,
)

PICTURES = f"pictures/tokencut/toy/{folder_of(cell())}/reference"


def report_of(root: Path) -> set[str]:
    """The pictures of a report, in which no secret is."""
    assert main(["report", "--out", str(root)]) == 0
    names = files_of(root / "report")
    for name in names:
        assert b"the key of" not in (root / "report" / name).read_bytes()
    return {name for name in names if name.startswith("pictures/")}


@pytest.fixture
def root(tmp_path) -> Path:
    """Results with one picture, and a secret beside their folder."""
    store = ResultStore(tmp_path / "results")
    store.save(cell())
    save_pictures(store.root, PICTURES.removeprefix("pictures/") + "/good")
    (tmp_path / "secret").write_text("the key of the house")
    return store.root


def huge(place: Path) -> None:
    with place.open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        file.truncate(2**33)


@pytest.mark.parametrize(
    ("name", "make", "why"),
    [
        ("evil.png", lambda place: place.symlink_to(place.parents[5] / "secret"), "not followed"),
        ("evil.png", lambda place: place.symlink_to(place.with_name("good.png")), "a link"),
        ("folder", lambda place: place.symlink_to(place.parents[5]), "a link"),
        ("evil.png", os.mkfifo, "a folder, pipe or device"),
        ("evil.png", lambda place: place.write_text("the key of the house"), "not a PNG"),
        ("evil.png", huge, "8,589,934,592 bytes"),
        ("evil.svg", lambda place: place.write_text("<svg/>"), "an SVG can hold scripts"),
    ],
)
def test_fault_66_what_is_no_picture_of_this_folder_is_left_out_and_said(
    root, capsys, name, make, why
):
    place = root / PICTURES / name
    make(place)

    assert report_of(root) == {f"{PICTURES}/good.png"}

    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"1 picture cannot be shown: {place}: ")
    assert why in said
    (page,) = (root / "report").glob("checkpoint-*.html")
    assert "evil" not in page.read_text()


@pytest.mark.parametrize("level", [0, 2, 4])
def test_fault_66_no_folder_of_pictures_is_reached_through_a_link(root, capsys, level):
    place = root.joinpath(*Path(PICTURES).parts[: level + 1])
    place.rename(root.parent / "elsewhere")
    place.symlink_to(root.parent / "elsewhere")

    assert report_of(root) == set()

    assert f"picture cannot be shown: {place}: a link" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["link", "pipe", "below a link"])
@pytest.mark.parametrize("what", ["record", "contributions", "ids"])
def test_fault_66_records_and_what_lies_beside_them_are_not_read_through_links(
    tmp_path, capsys, what, kind
):
    store = ResultStore(tmp_path / "results")
    save(store, cell(layer=0), np.arange(4) < 2)
    save(store, skipless(layer=1), np.arange(4) < 2)
    store.save_image_ids(RECORD.dataset_fingerprint, ("a", "b"))
    path = {
        "record": store.path(cell(layer=0).key()),
        "contributions": store.per_image_path(cell(layer=0)),
        "ids": store.root / "images" / f"{RECORD.dataset_fingerprint[:16]}.json",
    }[what]
    moved = path.parent if kind == "below a link" else path
    moved.rename(tmp_path / "elsewhere")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        moved.symlink_to(tmp_path / "elsewhere")

    no_record = kind == "below a link" and what != "ids"
    assert main(["report", "--out", str(store.root)]) == (3 if no_record else 0)

    said = capsys.readouterr().err
    if what == "record" or no_record:
        assert "pipe or device" in said if kind == "pipe" else "links are not followed" in said
    elif what == "contributions":
        assert str(path) in said
    assert store.image_ids(RECORD.dataset_fingerprint) == (None if what == "ids" else ("a", "b"))
