"""Processes that torchrun starts probe together: the same records, and they end together."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ssl_bench.models import ViTConfig
from ssl_bench.results import Record, ResultStore
from tests.support.faults import class_folders, encoder_file, spoil, voc
from tests.support.two_probing import CASES

REPOSITORY = Path(__file__).parents[2]
BLOCKS = ViTConfig(image_size=32, patch_size=8, dim=12, depth=3, num_heads=2)
FAULTY = {"unreadable", "resumed", "late"}
# A run that went on computed less in its second process.
OF_COST = {"train_seconds": 0, "encoder_passes": 0}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Where all cases ran, and how; they are imported for once, in a process of their own."""
    place = tmp_path_factory.mktemp("two")
    voc(place / "voc")
    class_folders(place / "classes", 3)
    encoder_file(place / "encoder.safetensors", config=BLOCKS)
    shutil.copytree(place / "voc", place / "broken")
    spoil(place / "broken/VOCdevkit/VOC2012/JPEGImages/v2.jpg", "half")
    words = [f"{count}:{case}" for case in CASES for count in (1, 2) if case not in FAULTY]
    words += ["2:resumed:killed", "2:resumed:dies", "2:resumed", "1:resumed", "2:unreadable"]
    words += ["2:late:late"]
    command = [sys.executable, "-m", "tests.support.two_probing", str(place), *words]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-3000:]
    return place, json.loads(run.stdout.splitlines()[-1])


def records(folder: Path) -> dict[tuple[str, int, str, str], Record]:
    found = ResultStore(folder).records()
    return {(one.task, one.layer, one.facet, one.metric): one for one in found}


def lines(end: dict[str, Any]) -> list[str]:
    return [line for text in end["said"] for line in text.splitlines() if "ssl-bench: " in line]


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("unreadable", "late")])
def test_two_processes_leave_the_records_that_one_does(ends, case):
    place, found = ends
    assert [found[f"{count}:{case}"]["codes"] for count in (1, 2)] == [[0], [0, 0]], found
    one, two = (records(place / f"{count}-{case}") for count in (1, 2))

    assert set(one) == set(two)
    assert one
    for key, record in one.items():
        other = two[key]
        assert (record.value, record.ci95) == (other.value, other.ci95), key
        assert {**record.details, **OF_COST} == {**other.details, **OF_COST}, key
    kept = [sorted(p.name for p in place.glob(f"{n}-{case}/pictures/**/*.*")) for n in (1, 2)]
    assert kept[0] == kept[1]


@pytest.mark.slow
def test_what_the_slower_one_finds_is_waited_for(ends):
    place, found = ends

    assert found["2:late:late"]["codes"] == [0, 0]
    assert {record.num_images for record in records(place / "2-late").values()} == {7}


@pytest.mark.slow
def test_one_of_them_speaks_for_both(ends):
    _, found = ends
    first, second = found["2:stream"]["said"]
    assert "tier stream" in first
    assert first.count('"metric"') == 9
    assert second == ""


@pytest.mark.slow
def test_what_does_not_fit_is_left_out_by_both(ends):
    _, found = ends
    for count in (1, 2):
        said = found[f"{count}:left_out"]["said"][0]
        assert "left out: knn on class_folders: probe.neighbours must be at most the 6" in said


@pytest.mark.slow
def test_both_end_with_what_one_meets_in_one_line(ends):
    _, found = ends
    for case, code, said in (
        ("2:unreadable", 3, "v2.jpg"),
        ("2:resumed:dies", 5, "switched off"),
    ):
        assert found[case]["codes"] == [code, code], found[case]
        assert [said in line for line in lines(found[case])] == [True], found[case]


@pytest.mark.slow
def test_who_is_left_alone_says_so(ends):
    _, found = ends
    assert found["2:resumed:killed"]["codes"] == [5, -9]
    assert "another process of this command has ended" in lines(found["2:resumed:killed"])[0]


@pytest.mark.slow
def test_heads_go_on_from_where_each_process_had_kept_them(ends):
    _, found = ends
    assert "going on from" in found["2:resumed"]["said"][0]
