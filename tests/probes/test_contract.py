"""What every probe must do: those of this repository, and those of an installed package.

A new probe needs no entry here. Its data follows from what it requires of a dataset, and its
settings are reduced by the keys in `REDUCED`, as far as it has them.
"""

import ast
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import TARGET, component_class, has_key
from ssl_bench.data.samples import ROLE_ANNOTATIONS, datasets_with
from ssl_bench.errors import DataError
from ssl_bench.evaluation import Probe
from ssl_bench.models import load_encoder
from ssl_bench.planning import PlannedProbe, plan_probes
from ssl_bench.request import probing_config
from ssl_bench.results import Record, ResultStore
from ssl_bench.results.per_image import load_matching_values
from tests.support.faults import TINY, encoder_file, fails, paired_folders
from tests.support.spair import spair

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extending.md").read_text()
PLUGINS = dict(
    re.findall(r"^`probes/(\w+)\.py`:\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
)
TASKS = [*choices("probe"), *PLUGINS]
REDUCED = (
    "probe.image_size=32", "probe.training.epochs=2", "probe.training.max_iterations=3",
    "probe.num_points=16", "probe.num_images=2", "probe.num_restarts=1", "probe.view_images=2",
    "probe.fit_patches=60", "probe.memory_patches=60", "probe.panels=1",
)  # fmt: skip
# How a run went, which is no part of a result.
OF_THE_RUN = ("created", "seconds")


def install_plugins(folder: Path) -> None:
    """Install the probes of the documentation as a package of somebody else would be."""
    information = folder / "pages-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: pages\nVersion: 1.0\n")
    points = ["[ssl_bench.probe]"]
    for task, source in PLUGINS.items():
        (folder / f"pages_{task}.py").write_text(source)
        (name,) = re.findall(r"^class (\w+)\(Probe\)", source, re.MULTILINE)
        points.append(f"{task} = pages_{task}:{name}")
    (information / "entry_points.txt").write_text("\n".join(points))


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory) -> Iterator[Path]:
    """A folder with an encoder of three blocks, an installed plugin, and data for every role."""
    folder, before = tmp_path_factory.mktemp("contract"), Path.cwd()
    encoder_file(folder / "encoder.safetensors", config=replace(TINY, depth=3))
    install_plugins(folder / "installed")
    spair(folder / "spair71k")
    names = {"train": ["a", "b", "c", "d"], "val": ["e", "f", "g"]}
    paired_folders(folder / "paired_folders", names)
    os.chdir(folder)
    sys.path.insert(0, str(folder / "installed"))
    yield folder
    sys.path.remove(str(folder / "installed"))
    os.chdir(before)
    reduced_plan.cache_clear()


def data_for(role: str) -> list[str]:
    """Return the words for a small dataset that supports a role."""
    if role == "saliency":
        one_object = "dataset.one_object=true"
        return ["--dataset", "paired_folders", "--data-root", "paired_folders", one_object]
    if role == "correspondence":
        return ["--dataset", "spair71k", "--data-root", "spair71k"]
    dataset = next(name for name in ("toy", "toy_objects") if name in datasets_with(role))
    return ["--dataset", dataset, "dataset.num_train=8", "dataset.num_val=4"]


@cache
def reduced_plan(task: str) -> tuple[Any, PlannedProbe, tuple[str, ...]]:
    """Return the probe of a small run, its plan, and the words that select it."""
    kind = component_class(probing_config(task, "toy", ())["probe"][TARGET], "probe")
    words = data_for(default_role(kind))
    config = probing_config(task, words[1], ())
    words += [word for word in REDUCED if has_key(config, word.partition("=")[0])]
    overrides = [word for word in words[2:] if "=" in word]
    roots = {words[1]: words[3]} if words[2] == "--data-root" else {}
    (planned,) = plan_probes([task], [words[1]], overrides, roots)
    probe = planned.fit_to(load_encoder("encoder.safetensors"))
    return probe, planned, ("--task", task, "--checkpoint", "encoder.safetensors", *words)


def default_role(kind: type[Probe]) -> str:
    built: Any = kind
    return built().role


def package_names(kinds: Iterable[type]) -> set[str]:
    """Return the modules or packages of `probes` that define classes."""
    modules = [kind.__module__.split(".") for kind in kinds]
    return {parts[1] for parts in modules if parts[0] == "probes"}


def run(task: str, out: str, *more: str) -> int:
    return main(["probe", *reduced_plan(task)[2], "--out", out, *more])


@cache
def all_blocks(task: str, place: Path) -> Path:
    """Return the results of all blocks."""
    del place
    assert run(task, f"{task}/all") == 0
    return Path(f"{task}/all").resolve()


def results_of(folder: Path | str, layer: int | None = None) -> dict[tuple, tuple]:
    """Return the content of records with their per-image values, by layer, facet and metric."""
    store, found = ResultStore(Path(folder)), {}
    for record in store.records():
        if layer in (None, record.layer):
            content = {n: v for n, v in record.as_json().items() if n not in OF_THE_RUN}
            details = content["details"]
            content["details"] = {n: v for n, v in details.items() if n != "train_seconds"}
            values = store.per_image(record)
            per_image = None if values is None else np.asarray(values).tolist()
            found[record.layer, record.facet, record.metric] = content, per_image
    return found


def records(task: str, place: Path) -> list[Record]:
    return ResultStore(all_blocks(task, place)).records()


@pytest.mark.parametrize("task", TASKS)
def test_a_run_leaves_one_record_for_each_cell_and_every_figure(task, place):
    probe, planned, _ = reduced_plan(task)
    folder = all_blocks(task, place)
    images = probe.split(planned.dataset)

    cells = probe.cells((0, 1, 2))
    assert len(set(cells)) == len(cells)
    assert {*results_of(folder)} == {*cells}
    assert {record.task for record in records(task, place)} == {task}
    figures = list((folder / "pictures").rglob("*"))
    for name in probe.pictures((0, 1, 2), images, seed=0):
        assert any(figure.as_posix().endswith(f"/{name}") for figure in figures)


@pytest.mark.parametrize("task", TASKS)
def test_finished_results_are_not_computed_again(task, place, monkeypatch):
    folder, kind = all_blocks(task, place), type(reduced_plan(task)[0])
    before = results_of(folder)
    monkeypatch.setattr(kind, "run", None)

    assert run(task, str(folder)) == 0

    assert results_of(folder) == before


@pytest.mark.parametrize("task", TASKS)
def test_records_hold_the_settings_of_the_probe_as_json(task, place):
    settings = reduced_plan(task)[0].settings()

    expected = json.loads(json.dumps(settings))
    for record in records(task, place):
        assert expected.items() <= json.loads(json.dumps(dict(record.settings))).items()


@pytest.mark.parametrize("task", TASKS)
def test_other_threads_find_the_finished_results_and_another_seed_does_not(task, place, capsys):
    folder, probe = all_blocks(task, place), reduced_plan(task)[0]
    threads = ["probe.num_workers=1"] * hasattr(probe, "num_workers")

    def pending(*more: str) -> int:
        capsys.readouterr()
        words = ["sweep", *reduced_plan(task)[2], "--out", str(folder), *more]
        assert main([*words, "--dry-run", "--json"]) == 0
        return sum(job["pending"] for job in json.loads(capsys.readouterr().out)["jobs"])

    assert pending(*threads) == 0
    assert pending("seed=7") == len(probe.cells((0, 1, 2)))


@pytest.mark.parametrize("task", TASKS)
def test_a_record_is_the_same_whichever_other_blocks_are_requested(task, place):
    assert run(task, f"{task}/alone", "--layer", "1") == 0

    alone = results_of(f"{task}/alone")
    assert alone
    assert alone == results_of(all_blocks(task, place), layer=1)


@pytest.mark.parametrize("task", TASKS)
def test_an_interrupted_run_continues_with_the_same_results(task, place, monkeypatch):
    save, saved = ResultStore.save, list[Record]()

    def save_once(store: ResultStore, record: Record, per_image: Any = None) -> Path:
        if saved:
            raise KeyboardInterrupt
        saved.append(record)
        return save(store, record, per_image)

    with monkeypatch.context() as patched:
        patched.setattr(ResultStore, "save", save_once)
        assert run(task, f"{task}/interrupted") == 130
    assert len(results_of(f"{task}/interrupted")) == 1

    assert run(task, f"{task}/interrupted") == 0

    assert results_of(f"{task}/interrupted") == results_of(all_blocks(task, place))


KILLED = """
import json, os, signal, sys
from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore

save, saved = ResultStore.save, []

def save_once(*arguments):
    if saved:
        os.kill(os.getpid(), signal.SIGKILL)
    saved.append(arguments)
    return save(*arguments)

ResultStore.save = save_once
sys.exit(main(json.loads(sys.argv[1])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_killed_run_continues_with_the_same_results(task, place):
    words = json.dumps(["probe", *reduced_plan(task)[2], "--out", f"{task}/killed"])
    path = os.pathsep.join([str(place / "installed"), str(ROOT)])
    command = [sys.executable, "-c", KILLED, words]
    killed = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert len(results_of(f"{task}/killed")) == 1

    assert run(task, f"{task}/killed") == 0

    assert results_of(f"{task}/killed") == results_of(all_blocks(task, place))


@pytest.mark.parametrize("task", TASKS)
def test_values_follow_from_per_image_values_and_lie_in_their_intervals(task, place):
    store = ResultStore(all_blocks(task, place))
    probe = reduced_plan(task)[0]
    for record in store.records():
        assert record.num_images > 0
        if record.ci95 is not None:
            assert record.ci95[0] <= record.value <= record.ci95[1]
        if math.isnan(record.value):
            assert record.details["undefined"]
        is_percentage = record.unit == "%"
        if probe.keeps_images and is_percentage and record.metric not in probe.metrics_of_sets:
            per_image = load_matching_values(store, record)
            assert per_image is not None
            assert len(per_image) == record.num_images
    assert not store.damaged


@pytest.mark.parametrize("task", TASKS)
def test_scores_against_a_ground_truth_come_with_a_baseline(task, place):
    probe = reduced_plan(task)[0]
    if not probe.keeps_images or ROLE_ANNOTATIONS[probe.role] == "images":
        pytest.skip("the probe compares with no ground truth")
    for record in records(task, place):
        if record.unit == "%" and not math.isnan(record.value):
            baseline = record.details["baseline"]
            assert 0 <= baseline["value"] <= 100


@pytest.mark.parametrize("task", TASKS)
def test_a_dataset_without_the_role_is_refused_with_those_that_have_it(task, capsys):
    role, lacking = reduced_plan(task)[0].role, None
    for name in ("toy", "toy_objects"):
        try:
            plan_probes([task], [name])
        except DataError:
            lacking = name
    if lacking is None:
        pytest.skip("the probe takes every dataset, or adapts itself to it")
    words = ["probe", "--task", task, "--checkpoint", "encoder.safetensors"]

    line = fails(capsys, [*words, "--dataset", lacking, "--out", f"{task}/refused"], 3)

    assert all(name in line for name in datasets_with(role))
    assert not list(Path(f"{task}/refused").rglob("*.json"))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("more", [["--layer", "3"], ["probe.no_such_key=1"]])
def test_wrong_blocks_and_keys_are_refused_before_anything_is_computed(task, more, capsys):
    words = ["probe", *reduced_plan(task)[2], *more, "--out", f"{task}/refused"]

    fails(capsys, words, 2)

    assert not list(Path(f"{task}/refused").rglob("*.json"))


@pytest.mark.parametrize("task", TASKS)
def test_a_probe_imports_no_other_probe(task):
    kind = type(reduced_plan(task)[0])
    kinds = [type(reduced_plan(other)[0]) for other in TASKS]
    others = package_names(kinds) - package_names(kind.__mro__)
    source = Path(sys.modules[kind.__module__].__file__ or "").read_text()
    imported = {
        (node.module or "").split(".")[1]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("probes.")
    }
    assert not imported & others
