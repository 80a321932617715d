"""Test every probe on a small dataset."""

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from probes.features.training_images import TrainingSplit
from ssl_bench.cli.__main__ import main
from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import build, has_key, list_protocols
from ssl_bench.data.samples import ROLE_ANNOTATIONS, find_datasets
from ssl_bench.errors import DataError
from ssl_bench.models import load_encoder
from ssl_bench.planning import PlannedProbe, plan_probes
from ssl_bench.request import probing_config
from ssl_bench.results import Record, ResultStore
from ssl_bench.results.per_image import load_matching_values
from tests.support.faults import TINY, encoder_file, expect_error, paired_folders
from tests.support.spair import spair

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()
PLUGINS = dict(
    re.findall(r"^`probes/(\w+)\.py`:\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
)
TASKS = [*choices("probe"), *PLUGINS]
# Small values keep the tests fast.
REDUCED = (
    "probe.image_size=32", "probe.epochs=2", "probe.training.epochs=2",
    "probe.training.max_iterations=3",
    "probe.num_points=16", "probe.num_images=2", "probe.num_restarts=1", "probe.view_images=2",
    "probe.fit_patches=60", "probe.memory_patches=60", "probe.panels=1",
)  # fmt: skip
# Settings with which a probe processes the blocks of a run in another way.
VARIANTS = {
    "conditioning mean_log": ["probe.protocol=mean_log"],
    "correspondence spair": ["probe.protocol=spair"],
    "segmentation lbfgs": ["probe.training=lbfgs"],
}
# Number of scored images of a probe or a metric that does not score all images.
SCORED = {
    "conditioning": 2, "instances": 4, "pca": 1, "geometry alignment": 2, "geometry lidar": 2,
}  # fmt: skip
# Methods that read settings, but do not compute results with them.
CHECKS = {"settings", "__post_init__", "__eq__", "__hash__", "__repr__"}
# Fields of a record that describe the run and not the result.
RUN_FIELDS = ("created", "seconds", "peak_memory")
supporting_datasets = cache(find_datasets)


def install_plugins(folder: Path) -> None:
    """Install the example probes from docs/extending.md as a separate package."""
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
def workdir(tmp_path_factory) -> Iterator[Path]:
    """Create small datasets and an encoder in a new working directory."""
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
    if role == "saliency":
        one_object = "dataset.one_object=true"
        return ["--dataset", "paired_folders", "--data-root", "paired_folders", one_object]
    if role == "correspondence":
        return ["--dataset", "spair71k", "--data-root", "spair71k"]
    dataset = next(name for name in supporting_datasets(role) if name.startswith("toy"))
    return ["--dataset", dataset, "dataset.num_train=8", "dataset.num_val=4"]


@cache
def reduced_plan(case: str) -> tuple[Any, PlannedProbe, tuple[str, ...]]:
    task, options = case.partition(" ")[0], VARIANTS.get(case, [])
    words = data_for(build(probing_config(task, "toy", options), "probe").role) + options
    config = probing_config(task, words[1], options)
    words += [word for word in REDUCED if has_key(config, word.partition("=")[0])]
    overrides = [word for word in words[2:] if "=" in word]
    roots = {words[1]: words[3]} if words[2] == "--data-root" else {}
    (planned,) = plan_probes([task], [words[1]], overrides, roots)
    probe = planned.adapt_to(load_encoder("encoder.safetensors"))
    return probe, planned, ("--task", task, "--checkpoint", "encoder.safetensors", *words)


def package_names(kinds: Iterable[type]) -> set[str]:
    modules = [kind.__module__.split(".") for kind in kinds]
    return {parts[1] for parts in modules if parts[0] == "probes"}


def run(task: str, out: str, *more: str) -> int:
    return main(["probe", *reduced_plan(task)[2], "--out", out, *more])


@pytest.mark.parametrize(
    "task",
    [
        task
        for task in choices("probe")
        if has_key(probing_config(task, "toy", ()), "probe.train_images")
    ],
)
def test_the_seed_selects_the_training_images(task, tmp_path, monkeypatch):
    seeds, draw = set(), TrainingSplit.draw

    def remember(*arguments: Any, seed: int, **options: Any) -> TrainingSplit:
        seeds.add(seed)
        return draw(*arguments, seed=seed, **options)

    monkeypatch.setattr(TrainingSplit, "draw", remember)

    assert run(task, str(tmp_path), "--layer", "0", "probe.train_images=4", "seed=7") == 0

    assert seeds == {7}


@cache
def all_blocks(task: str, place: Path) -> Path:
    """Run a probe on all blocks and return the folder with the results."""
    with pytest.MonkeyPatch.context() as patched:
        kind, read = type(reduced_plan(task)[0]), read_settings(task, place)

        def watch(probe: Any, name: str) -> Any:
            code = sys._getframe(1).f_code
            if name in code.co_names and code.co_name not in CHECKS:
                read.add(name)
            return object.__getattribute__(probe, name)

        patched.setattr(kind, "__getattribute__", watch, raising=False)
        assert run(task, f"{task}/all") == 0
    return Path(f"{task}/all").resolve()


@cache
def read_settings(task: str, place: Path) -> set[str]:
    # `all_blocks` fills this set with the names of attributes that a probe reads.
    del task, place
    return set()


def results_of(folder: Path | str, layers: Sequence[int] = (0, 1, 2)) -> dict[tuple, tuple]:
    """Return all stored results except run times."""
    store, found = ResultStore(Path(folder)), {}
    for record in store.records():
        if record.layer in layers:
            content = {n: v for n, v in record.as_json().items() if n not in RUN_FIELDS}
            details = content["details"]
            content["details"] = {n: v for n, v in details.items() if n != "train_seconds"}
            values = store.load_per_image(record)
            per_image = None if values is None else np.asarray(values).tolist()
            found[record.layer, record.facet, record.metric] = content, per_image
    return found


def records(task: str, place: Path) -> list[Record]:
    return ResultStore(all_blocks(task, place)).records()


@pytest.mark.parametrize("task", TASKS)
def test_runs_save_one_record_per_result_and_every_figure(task, workdir):
    probe, planned, _ = reduced_plan(task)
    folder, cells = all_blocks(task, workdir), probe.list_score_keys((0, 1, 2))

    assert len(set(cells)) == len(cells)
    assert {*results_of(folder)} == {*cells}
    settings = json.loads(json.dumps(probe.settings()))
    for record in records(task, workdir):
        assert record.task == task
        assert "$" not in "".join(record.details.get("guesses", ())), "a name is not replaced"
        assert settings.items() <= json.loads(json.dumps(dict(record.settings))).items()
    figures = list((folder / "pictures").rglob("*"))
    for name in probe.list_figures((0, 1, 2), probe.scored_images(planned.dataset), seed=0):
        assert any(figure.as_posix().endswith(f"/{name}") for figure in figures)


@pytest.mark.parametrize("task", TASKS)
def test_every_setting_that_identifies_a_result_is_used(task, workdir):
    all_blocks(task, workdir)
    probe = reduced_plan(task)[0]
    settings = probe.settings().keys() & {field.name for field in fields(probe)}
    # No image of this test has a degenerate graph, and MaskCut has no seed that can be unstable.
    unused = {"protocol", "refuse_degenerate", *["stable_seed"] * (task == "discovery")}
    assert settings - read_settings(task, workdir) <= unused


@pytest.mark.parametrize("task", TASKS)
def test_values_follow_from_per_image_values_and_have_a_baseline(task, workdir):
    store = ResultStore(all_blocks(task, workdir))
    probe, planned, _ = reduced_plan(task)
    count = SCORED.get(task, len(probe.scored_images(planned.dataset)))
    has_truth = probe.has_per_image_values and ROLE_ANNOTATIONS[probe.role] != "images"
    for record in store.records():
        assert record.num_images == SCORED.get(f"{task} {record.metric}", count)
        if record.ci95 is not None:
            assert record.ci95[0] <= record.value <= record.ci95[1]
        if math.isnan(record.value):
            assert record.details["undefined"]
        elif has_truth and record.unit == "%":
            assert 0 <= record.details["baseline"]["value"] <= 100
        has_values = probe.has_per_image_values and record.metric not in probe.metrics_of_sets
        if has_values and record.unit == "%":
            per_image = load_matching_values(store, record)
            assert per_image is not None
            assert len(per_image) == record.num_images
    stored = [load_matching_values(store, record) is not None for record in store.records()]
    assert any(stored) == probe.has_per_image_values
    assert not store.damaged_files


@pytest.mark.parametrize("task", TASKS)
def test_finished_results_are_reused_except_for_another_seed(task, workdir, monkeypatch, capsys):
    folder, probe = all_blocks(task, workdir), reduced_plan(task)[0]
    before = results_of(folder)
    monkeypatch.setattr(type(probe), "run", None)

    def pending(*more: str) -> int:
        capsys.readouterr()
        words = ["sweep", *reduced_plan(task)[2], "--out", str(folder), *more]
        assert main([*words, "--dry-run", "--json"]) == 0
        return sum(job["pending"] for job in json.loads(capsys.readouterr().out)["jobs"])

    assert run(task, str(folder)) == 0
    assert results_of(folder) == before
    # The number of threads does not change results.
    assert pending(*["probe.num_workers=1"] * hasattr(probe, "num_workers")) == 0
    assert pending("seed=7") == len(probe.list_score_keys((0, 1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*TASKS, *VARIANTS])
def test_interrupted_runs_of_some_blocks_complete_the_results_of_all(case, workdir, monkeypatch):
    expected = results_of(all_blocks(case, workdir), layers=(1, 2))
    save, saved = ResultStore.save, list[Record]()

    def save_once(store: ResultStore, record: Record, per_image: Any = None) -> Path:
        if saved:
            raise KeyboardInterrupt
        saved.append(record)
        return save(store, record, per_image)

    # The first run draws the figures. Drawing takes most of the time.
    monkeypatch.setattr(Figure, "savefig", lambda _, file, **__: file.write(b"figure"))
    command = case, f"{case}/interrupted", "--layer", "1,2"
    with monkeypatch.context() as patched:
        patched.setattr(ResultStore, "save", save_once)
        assert run(*command) == 130
    assert len(results_of(f"{case}/interrupted")) == 1

    assert run(*command) == 0

    assert results_of(f"{case}/interrupted") == expected


@pytest.mark.parametrize("task", TASKS)
def test_wrong_datasets_and_blocks_are_refused_before_a_result(task, capsys):
    words, refused = ["probe", *reduced_plan(task)[2]], f"{task}/refused"
    expect_error(capsys, [*words, "--layer", "3", "--out", refused], 2)
    for name in ("toy", "toy_objects"):
        try:
            plan_probes([task], [name])
        except DataError:
            command = ["probe", "--task", task, "--checkpoint", "encoder.safetensors"]
            line = expect_error(capsys, [*command, "--dataset", name, "--out", refused], 3)
            role = reduced_plan(task)[0].role
            assert all(other in line for other in supporting_datasets(role))
    assert not list(Path(refused).rglob("*.json"))


@pytest.mark.parametrize("task", TASKS)
def test_every_protocol_can_use_the_only_size_of_an_encoder(task):
    base = build(probing_config(task, "toy", ()), "probe")
    for name in list_protocols(task, type(base)) or [None]:
        options = [] if name is None else [f"probe.protocol={name}"]
        probe = build(probing_config(task, "toy", options), "probe")
        adapted = probe.with_squares(48)
        assert not adapted.resize.keep_aspect_ratio
        assert adapted.resize.square_side((48, 48)) == 48
        # Squares of the native size need no setting.
        has_native_size = probe.resize.side is None and not probe.resize.keep_aspect_ratio
        assert (adapted == probe) == has_native_size


@pytest.mark.parametrize("task", TASKS)
def test_a_probe_imports_no_other_probe(task):
    kind = type(reduced_plan(task)[0])
    kinds = [type(reduced_plan(other)[0]) for other in TASKS]
    others = package_names(kinds) - package_names(kind.__mro__)
    source = Path(sys.modules[kind.__module__].__file__ or "").read_text()
    assert not {*re.findall(r"^ *from probes\.(\w+)", source, re.MULTILINE)} & others
