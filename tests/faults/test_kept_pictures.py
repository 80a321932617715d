"""Test that missing figures are drawn again."""

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
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
    expect_error,
    fork,
    make_probe_args,
    photo_folder,
    picture,
    records,
    unchecked_types,
    voc,
)

pytestmark = pytest.mark.slow

REPORT = ["report", "--out", "results"]


def probe_arguments(task: str, dataset: str = "voc2012", layers: str = "0,1") -> list[str]:
    if task == "conditioning":
        words = ["probe", "--task", task, "--dataset", "folder", "--data-root", "photos"]
        words += ["--checkpoint", "encoder.safetensors", "probe.image_size=32"]
        return [*words, "probe.num_images=2", "--layer", layers]
    root = "photos" if dataset == "folder" else "."
    return [*make_probe_args(task, dataset, Path(root)), "--layer", layers]


def read_files(folder: str | Path, pattern: str = "*") -> dict[str, bytes]:
    # Logs are left out.
    paths = (path for path in Path(folder).rglob(pattern) if path.suffix not in ("", ".jsonl"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def read_pictures() -> dict[str, bytes]:
    return read_files("results/pictures")


@pytest.fixture(scope="module", autouse=True)
def conditioning_figures_are_texts() -> Iterator[None]:
    # Drawing takes seconds.
    def write_values(scores: Any, title: str, path: Path, cka: Any) -> None:
        values = [f"{s.layer} {s.facet} {s.metric} {s.value:.2g}" for s in scores]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([title, *values, str(cka is None)]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("probes.conditioning.probe.draw_figure", write_values)
        yield


@pytest.fixture(scope="module")
def complete_results(tmp_path_factory) -> Callable[[str], Path]:
    # Tests share these results and must not change them.
    found: dict[str, Path] = {}

    def results(task: str) -> Path:
        if task not in found:
            root = tmp_path_factory.mktemp(task)
            encoder_file(root / "encoder.safetensors")
            photo_folder(root / "photos")
            voc(root)
            with contextlib.chdir(root), unchecked_types():
                assert main(probe_arguments(task)) == 0
            found[task] = root / "results"
        return found[task]

    return results


@pytest.mark.parametrize("task", ["segmentation", "conditioning", "pca", "tokencut"])
@unchecked_types()
def test_a_kill_after_the_first_record_loses_no_picture(workdir, complete_results, task):
    voc(workdir)
    complete = complete_results(task)

    def save_once_and_die() -> int:
        save = ResultStore.save

        def save_and_die(*arguments: Any) -> Any:
            save(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        ResultStore.save = save_and_die
        return main(probe_arguments(task))

    assert exit_code(fork(save_once_and_die, stderr=workdir / "stderr")) == -signal.SIGKILL
    ((path, record),) = read_files("results/records", "*.json").items()

    assert main(probe_arguments(task)) == 0

    assert read_pictures().keys() == read_files(complete / "pictures").keys()
    assert read_files("results/records", "*.json")[path] == record
    values = [{r.key(): r.value for r in records(str(out))} for out in ("results", complete)]
    assert values[0] == pytest.approx(values[1], rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("task", ["segmentation", "conditioning", "pca", "tokencut"])
@unchecked_types()
def test_deleted_pictures_are_drawn_again_and_records_stay(workdir, complete_results, capsys, task):
    voc(workdir)
    shutil.copytree(complete_results(task), "results")
    before, saved = read_pictures(), read_files("results/records")
    # Delete one figure of each kind, and then all figures.
    kinds = {(Path(name).parent, Path(name).suffix): name for name in before}
    assert len(kinds) > 1
    for names in (*([name] for name in kinds.values()), before):
        for name in names:
            (Path("results/pictures") / name).unlink()
        capsys.readouterr()

        assert main(probe_arguments(task)) == 0

        assert "drawing missing pictures again" in capsys.readouterr().err
        assert read_pictures() == before
    assert read_files("results/records") == saved
    assert main(probe_arguments(task)) == 0
    assert "layers" not in capsys.readouterr().err


@pytest.mark.parametrize("task", ["segmentation", "conditioning", "pca"])
@unchecked_types()
def test_a_picture_of_all_blocks_always_shows_all_of_them(workdir, complete_results, task):
    voc(workdir)
    assert main(probe_arguments(task, layers="1")) == 0
    assert main(probe_arguments(task)) == 0

    assert read_pictures().items() >= read_files(complete_results(task) / "pictures").items()


def test_deleted_masks_are_made_again(workdir, capsys):
    words = probe_arguments("tokencut", dataset="folder")
    assert main(words) == 0
    before = read_pictures()
    assert any("masks/" in name for name in before)
    for name in before:
        (Path("results/pictures") / name).unlink()
    capsys.readouterr()
    assert main(["sweep", *words[1:], "--dry-run"]) == 0
    assert "0 finished, 2 pending" in capsys.readouterr().out

    assert main(words) == 0

    assert read_pictures() == before


@pytest.mark.parametrize("task", ["segmentation", "retrieval", "tokencut", "knn", "classification"])
def test_deleted_per_image_values_are_made_again(workdir, task):
    dataset = "class_folders" if task in ("knn", "classification") else "voc2012"
    (class_folders if dataset == "class_folders" else voc)(workdir)
    words = probe_arguments(task, dataset)
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


@pytest.mark.parametrize("rename", range(1, 5))
def test_a_record_is_never_saved_without_its_per_image_values(workdir, monkeypatch, rename):
    replace_file, calls = Path.replace, []

    def replace_or_die(self, target):
        calls.append(target)
        if len(calls) == rename:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace_file(self, target)

    def write() -> None:
        monkeypatch.setattr(Path, "replace", replace_or_die)
        for seed in range(3):
            record = replace(RECORD, seed=seed)
            ResultStore(Path("results")).save(record, np.ones((record.num_images, 2), int))

    assert exit_code(fork(write)) == -signal.SIGKILL

    saved = sorted(Path("results").rglob("*.json"))
    assert len(saved) == (rename - 1) // 2
    assert all(path.with_suffix(".npz").is_file() for path in saved)


def image_digests(page: Path) -> set[str]:
    # Each path contains the fingerprint of a dataset.
    pattern = r'(?:src|href)="pictures/[^"/]+/[^"/]+/[^"/]+-([0-9a-f]{8})/'
    return set(re.findall(pattern, page.read_text()))


def test_a_replaced_image_has_its_pictures_beside_its_own_score(workdir, capsys):
    words = probe_arguments("pca", dataset="folder")
    assert main(words) == 0
    before, (yesterday,) = read_pictures(), {r.dataset_fingerprint for r in records()}
    picture(99).save("photos/0.jpg", quality=95)
    # `encoder` has no colours for the new images yet, so no other encoder can be aligned to them.
    encoder_file(workdir / "other.safetensors", seed=1)
    aligned = [*words, "--checkpoint", "other.safetensors", "probe.align_to=encoder"]
    assert "of the same images" in expect_error(capsys, aligned, 2)
    assert main(words) == 0

    assert main(REPORT) == 0

    assert read_pictures().items() > before.items()
    (today,) = {record.dataset_fingerprint for record in records()} - {yesterday}
    index = Path("results/report/index.html")
    assert image_digests(index) == {today[:8]}
    assert f"data {today[:6]}" in index.read_text()
    page = next(Path("results/report").glob("checkpoint-*.html"))
    assert image_digests(page) == {today[:8], yesterday[:8]}
    assert f"data {yesterday[:6]}" in page.read_text()


def test_pictures_without_a_digest_of_their_images_are_not_shown(workdir):
    words = probe_arguments("tokencut", dataset="folder")
    assert main(words) == 0
    (folder,) = Path("results/pictures/tokencut/folder").iterdir()
    folder.rename(folder.with_name(folder.name.rpartition("-")[0]))
    index = Path("results/report/index.html")

    assert main(REPORT) == 0
    assert not image_digests(index)
    assert main(words) == main(REPORT) == 0
    assert len(image_digests(index)) == 1


NAMES = [
    *("a/b.png", "a_b.png", "A/b.png", "A_b.png", "a/B.png"),
    *(f"a{separator}{'n' * 245}.png" for separator in "/_"),
]


@pytest.mark.parametrize("task", ["pca", "tokencut", "correspondence"])
def test_no_two_images_share_a_panel(workdir, task):
    for number, name in enumerate(NAMES):
        path = workdir / "named" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path)

    assert main([*make_probe_args(task, "folder", workdir / "named"), "--pictures", "9"]) == 0
    assert main(REPORT) == 0

    panels = re.compile(r"[^/]*/[^/]*/[^/]*/[^/]*/block01[^/]*/[^/]*png")
    drawn = [content for name, content in read_pictures().items() if panels.fullmatch(name)]
    assert len(drawn) == len(set(drawn)) == len(NAMES)
    page = next(Path("results/report").glob("checkpoint-*.html")).read_text()
    assert all(f">{name.replace('/', '_')[:7]}" in page for name in NAMES)


@pytest.mark.parametrize("size", [(32, 40), (64, 96)])
def test_an_image_that_is_replaced_during_a_run_is_named(workdir, capsys, monkeypatch, size):
    add = DiscoveryLog.add

    def add_and_replace(log, image_id, result):
        add(log, image_id, result)
        if image_id == "0.jpg":
            picture(99, *size).save("photos/0.jpg", quality=95)

    words = probe_arguments("tokencut", dataset="folder")
    with monkeypatch.context() as patched:
        patched.setattr(DiscoveryLog, "add", add_and_replace)
        message = expect_error(capsys, words, 3)

    assert "0.jpg of folder changed" in message
    assert main(words) == 0
