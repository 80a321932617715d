"""Rows 60 and 87 of the catalogue of faults.

What belongs to a cell and is missing is made again; a picture is of one image, and says which.
"""

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes.tokencut.log import DiscoveryLog
from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore
from tests.core.test_results import RECORD
from tests.support.faults import (
    class_folders,
    encoder_file,
    exit_code,
    fails,
    fork,
    photo_folder,
    picture,
    probing,
    records,
    unchecked_types,
    voc,
)

CONDITIONING = ["probe.image_size=32", "probe.num_images=2"]


def asking(
    task: str, place: Path, out: str = "results", layers: str = "0,1", *, dataset: str = "voc2012"
) -> list[str]:
    if task == "conditioning":
        words = ["probe", "--task", task, "--dataset", "folder", "--data-root", f"{place}/photos"]
        words += ["--checkpoint", "encoder.safetensors", *CONDITIONING]
    else:
        words = probing(task, dataset, place if dataset == "voc2012" else Path("photos"))
    return [*words, "--layer", layers, "--out", out]


def contents(folder: str, pattern: str) -> dict[str, bytes]:
    """Files by path, the logs of what was found aside."""
    paths = (path for path in Path(folder).rglob(pattern) if path.suffix not in ("", ".jsonl"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def pictures(out: str) -> dict[str, bytes]:
    return contents(f"{out}/pictures", "*")


@pytest.fixture(scope="module")
def wholly_probed(tmp_path_factory) -> Callable[[str], Path]:
    """Results of both blocks for a task, which are to be copied."""
    found: dict[str, Path] = {}

    def results(task: str) -> Path:
        if task not in found:
            root = tmp_path_factory.mktemp(task)
            encoder_file(root / "encoder.safetensors")
            photo_folder(root / "photos")
            voc(root)
            with contextlib.chdir(root), unchecked_types():
                assert main(asking(task, root)) == 0
            found[task] = root / "results"
        return found[task]

    return results


def die_after_saving() -> None:
    save = ResultStore.save

    def save_and_die(*arguments: Any) -> Any:
        save(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    ResultStore.save = save_and_die


@pytest.mark.slow
@pytest.mark.parametrize("task", ["segmentation", "conditioning", "pca", "tokencut"])
@unchecked_types()
def test_fault_60_a_kill_after_the_first_record_loses_no_picture(place, wholly_probed, task):
    voc(place)
    whole = str(wholly_probed(task))
    killed = fork(lambda: die_after_saving() or main(asking(task, place)), stderr=place / "said")
    assert exit_code(killed) == -signal.SIGKILL
    ((path, record),) = contents("results/records", "*.json").items()

    assert main(asking(task, place)) == 0

    assert pictures("results").keys() == pictures(whole).keys()
    assert contents("results/records", "*.json")[path] == record
    values = [{r.key(): r.value for r in records(out)} for out in ("results", whole)]
    assert values[0] == pytest.approx(values[1], rel=1e-4, nan_ok=True)


_CONDITIONING, _PCA = (
    pytest.param(task, marks=pytest.mark.slow) for task in ("conditioning", "pca")
)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["segmentation", _CONDITIONING, _PCA, "tokencut"])
@unchecked_types()
def test_fault_60_pictures_that_were_deleted_are_drawn_again_and_records_stay(
    place, wholly_probed, capsys, task
):
    voc(place)
    shutil.copytree(wholly_probed(task), "results")
    before, saved = pictures("results"), contents("results/records", "*")
    # One of each kind, and then all of them.
    kinds = {(Path(name).parent, Path(name).suffix): name for name in before}
    assert len(kinds) > 1
    for names in (*([name] for name in kinds.values()), before):
        for name in names:
            (Path("results/pictures") / name).unlink()
        capsys.readouterr()

        assert main(asking(task, place)) == 0

        assert "drawing missing pictures again" in capsys.readouterr().err
        assert pictures("results") == before
    assert contents("results/records", "*") == saved
    assert main(asking(task, place)) == 0
    assert "layers" not in capsys.readouterr().err


@pytest.mark.parametrize("task", ["segmentation", _CONDITIONING, "pca"])
@unchecked_types()
def test_fault_60_a_picture_of_all_blocks_is_never_left_with_some_of_them(
    place, wholly_probed, task
):
    voc(place)
    assert main(asking(task, place, layers="1")) == 0
    assert main(asking(task, place)) == 0

    assert pictures("results").items() >= pictures(str(wholly_probed(task))).items()


def test_fault_60_masks_that_were_deleted_are_made_again(place):
    words = asking("tokencut", place, dataset="folder")
    assert main(words) == 0
    before = pictures("results")
    for name in before:
        (Path("results/pictures") / name).unlink()

    assert main(words) == 0

    assert pictures("results") == before
    assert any("masks/" in name for name in before)


@pytest.mark.parametrize("task", ["segmentation", "retrieval", "tokencut", "knn", "classification"])
def test_fault_60_contributions_of_images_that_were_deleted_are_made_again(place, task):
    words = asking(task, place)
    voc(place)
    if task in ("knn", "classification"):
        class_folders(place / "classes")
        words = [*words, "--dataset", "class_folders", "--data-root", "classes"]
    assert main(words) == 0
    before = {record.key(): record.value for record in records()}
    patterns = ["results/records/**/*.npz"]
    if task == "tokencut":
        patterns += ["results/images/*.json"]
    for pattern in patterns:
        paths = sorted(Path().glob(pattern))
        whole = paths[0].read_bytes()
        paths[0].unlink()

        assert main(words) == 0

        assert sorted(Path().glob(pattern)) == paths
        assert paths[0].read_bytes() == whole
    assert {record.key(): record.value for record in records()} == before


def test_fault_60_a_sweep_counts_cells_whose_pictures_are_missing(place, capsys):
    words = asking("pca", place, dataset="folder")
    assert main(words) == 0
    next(Path("results").rglob("block01/0.jpg.png")).unlink()
    capsys.readouterr()

    assert main(["sweep", *words[1:], "--dry-run"]) == 0

    assert "2 scores: 0 finished, 2 pending" in capsys.readouterr().out


@pytest.mark.parametrize("rename", range(1, 5))
def test_fault_60_a_record_never_stands_without_its_arrays(place, monkeypatch, rename):
    replace_, calls = Path.replace, []

    def replace_or_die(self, target):
        calls.append(target)
        if len(calls) == rename:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace_(self, target)

    def write() -> None:
        monkeypatch.setattr(Path, "replace", replace_or_die)
        for seed in range(3):
            record = replace(RECORD, seed=seed)
            ResultStore(Path("results")).save(record, np.ones((record.num_images, 2), int))

    assert exit_code(fork(write)) == -signal.SIGKILL

    saved = sorted(Path("results").rglob("*.json"))
    assert len(saved) == (rename - 1) // 2
    assert all(path.with_suffix(".npz").is_file() for path in saved)


def shown_digits(page: str) -> set[str]:
    """Of the images whose pictures a page shows, as the names of folders have them."""
    return set(re.findall(r'src="pictures/[^"/]+/[^"/]+/[^"/]+-([0-9a-f]{8})/', page))


def test_fault_87_a_replaced_photograph_has_pictures_beside_its_own_score(place, capsys):
    words = asking("pca", place, dataset="folder")
    assert main(words) == 0
    before, (yesterday,) = pictures("results"), {r.dataset_fingerprint for r in records()}
    picture(99).save("photos/0.jpg", quality=95)
    # Nor are there colours of the same images to align with.
    encoder_file(place / "other.safetensors", seed=1)
    aligned = [*words, "--checkpoint", "other.safetensors", "probe.align_to=encoder"]
    assert "of the same images" in fails(capsys, aligned, 2)
    assert main(words) == 0

    assert main(["report", "--out", "results"]) == 0

    assert pictures("results").items() > before.items()
    (today,) = {record.dataset_fingerprint for record in records()} - {yesterday}
    index = Path("results/report/index.html").read_text()
    assert shown_digits(index) == {today[:8]}
    assert f"data {today[:6]}" in index
    page = next(Path("results/report").glob("checkpoint-*.html")).read_text()
    assert shown_digits(page) == {today[:8], yesterday[:8]}
    assert f"data {yesterday[:6]}" in page


def test_fault_87_pictures_of_images_that_nothing_names_are_not_shown(place):
    words = asking("tokencut", place, dataset="folder")
    assert main(words) == 0
    (folder,) = Path("results/pictures/tokencut/folder").iterdir()
    folder.rename(folder.with_name(folder.name.rpartition("-")[0]))
    index = Path("results/report/index.html")

    assert main(["report", "--out", "results"]) == 0
    assert not shown_digits(index.read_text())
    assert main(words) == 0
    assert main(["report", "--out", "results"]) == 0
    assert len(shown_digits(index.read_text())) == 1


NAMES = [
    *("a/b.png", "a_b.png", "A/b.png", "A_b.png", "a/B.png"),
    *(f"a{separator}{'n' * 245}.png" for separator in "/_"),
]


@pytest.mark.parametrize("task", ["pca", "tokencut", "correspondence"])
def test_fault_87_no_two_images_share_a_panel(place, task):
    for number, name in enumerate(NAMES):
        path = place / "named" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path)

    assert main([*probing(task, "folder", place / "named"), "--pictures", "9"]) == 0
    assert main(["report", "--out", "results"]) == 0

    panels = re.compile(r"[^/]*/[^/]*/[^/]*/[^/]*/block01[^/]*/[^/]*png")
    drawn = [content for name, content in pictures("results").items() if panels.fullmatch(name)]
    assert len(drawn) == len(set(drawn)) == len(NAMES)
    page = next(Path("results/report").glob("checkpoint-*.html")).read_text()
    assert all(f">{name.replace('/', '_')[:7]}" in page for name in NAMES)


@pytest.mark.parametrize("size", [(32, 40), (64, 96), (16, 16)])
def test_fault_87_a_photograph_replaced_during_a_run_is_one_line(place, capsys, monkeypatch, size):
    add = DiscoveryLog.add

    def add_and_replace(log, image_id, result):
        add(log, image_id, result)
        if image_id == "0.jpg":
            picture(99, *size).save("photos/0.jpg", quality=95)

    words = asking("tokencut", place, dataset="folder")
    with monkeypatch.context() as patched:
        patched.setattr(DiscoveryLog, "add", add_and_replace)
        said = fails(capsys, words, 3)

    assert "0.jpg of folder changed" in said
    assert main(words) == 0
