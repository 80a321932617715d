"""Test that `ssl-bench reproduce --run` fills in a published table.

Training for all tables would take years of GPU time. The test saves made-up scores instead.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.distributed.run import get_args_parser

from pretrain.checkpoints import CONFIG, ENCODER, LOG
from ssl_bench.cli import reproduce as reproduce_command
from ssl_bench.cli.__main__ import main
from ssl_bench.cli.parser import build_parser
from ssl_bench.cli.reproduce import PlanOptions, full_name, is_run, plan_table, shell_commands
from ssl_bench.composition.choices import experiments
from ssl_bench.composition.compose import build
from ssl_bench.data.samples import Dataset
from ssl_bench.data.splits import apply_shared_values, read_shared_values
from ssl_bench.evaluation import Probe
from ssl_bench.layers import select_layers
from ssl_bench.models import ViTConfig, build_encoder, identify_encoder
from ssl_bench.models.loading import checkpoint
from ssl_bench.request import probing_config
from ssl_bench.results import ResultKey, ResultStore
from ssl_bench.results.per_image import ImageCurve
from ssl_bench.tables.published import DIFFERENCE, SUPERVISED, PublishedTable, load_published_tables
from tests.core.test_results import RECORD

PARSER, LAUNCH_PARSER = build_parser(), get_args_parser()
DEPTH, STEPS = 2, 2
PUBLISHED_WEIGHTS = {name: getattr(RECORD, name) for name in ("architecture", "mean", "std")}


@cache
def compose(
    task: str, dataset: str, overrides: tuple[str, ...]
) -> tuple[Probe, Dataset, dict[str, Any]]:
    config = probing_config(task, dataset, overrides, "/nowhere")
    values = read_shared_values(config)
    return build(config, "probe"), apply_shared_values(build(config, "dataset"), values), values


class StandIn:
    def __init__(self) -> None:
        self.model = build_encoder(
            ViTConfig(image_size=16, patch_size=8, dim=12, depth=DEPTH, num_heads=2), seed=0
        )

    def __call__(self, words: Sequence[str]) -> int:
        options, overrides = PARSER.parse_known_args(list(words))
        if options.command == "pretrain":
            self._train(
                Path(options.out), options.data_root, dict(w.split("=", 1) for w in overrides)
            )
        else:
            self._probe(options, tuple(overrides))
        return 0

    def _train(self, folder: Path, images: str | None, settings: dict[str, str]) -> None:
        folder.mkdir(parents=True)
        metadata = {"step": str(STEPS), "epoch": "300.0"}
        kept = yaml.safe_load(settings.get("train.keep_epochs", "[]"))
        for name in (ENCODER, *(f"epoch{epoch:04}.safetensors" for epoch in kept)):
            checkpoint.save_encoder(folder / name, self.model, metadata)
            with torch.no_grad():
                # Each run and epoch has another encoder.
                next(self.model.parameters()).add_(1.0)
        run = experiments()[settings["experiment"]]
        objective = {"length": run.changes.get("objective.length", 16)}
        train = {"epochs": 300, "max_steps": STEPS, "batch_size": 4}
        (folder / CONFIG).write_text(yaml.safe_dump({"train": train, "objective": objective}))
        # The fields of pretrain/logging.py. A copying run is tested at its end.
        rows: list[dict[str, Any]] = [
            {"step": n + 1, "loss": 2.5, "images_per_second": 8.0, "val_loss": 3.5}
            for n in range(STEPS)
        ]
        if run.images == "copying":
            rows[-1] |= {f"letters_{objective['length']}": 4.5, "strings_16": 0.0}
        (folder / LOG).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        if "monitor.results" in settings:
            assert images is not None
            cells = [(DEPTH - 1, "head", metric) for metric in ("top1", "top5")]
            save_records(
                Path(settings["monitor.results"]), folder, SUPERVISED, Path(images).name, cells
            )

    def _probe(self, options: Any, overrides: tuple[str, ...]) -> None:
        probe, dataset, values = compose(options.task, options.dataset, overrides)
        layers = select_layers(probe.facet_spec, options.layer, DEPTH)
        save_records(
            Path(options.out),
            options.checkpoint[0],
            probe.task,
            dataset.name,
            probe.list_score_keys(layers),
            protocol=probe.protocol,
            settings={**probe.settings(), "dtype": values["dtype"]},
        )


def save_records(
    out: Path, address: str | Path, task: str, dataset: str, cells: Sequence[tuple[int, str, str]],
    **more: Any,
) -> None:  # fmt: skip
    store = ResultStore(out)
    identity = identify(str(address)).identity()
    for layer, facet, metric in cells:
        per_image = None
        if metric.startswith("miou"):
            per_image = np.full((10, 3, 2), 10 + layer, np.int64)
        elif metric.startswith(("top", "corloc")):
            per_image = np.arange(10) < 2 + layer % 5
        value = 3.5 if per_image is None else ImageCurve(metric, {}).value(per_image)
        key = ResultKey(
            task=task, dataset=dataset, split="val", layer=layer, facet=facet, metric=metric,
            **identity, **{"protocol": "own", "settings": {}, **more},
            dataset_fingerprint="b" * 64, seed=0,
        )  # fmt: skip
        measured = {
            name: getattr(RECORD, name)
            for name in ("model", "version", "git_commit", "torch", "device", "seconds", "created")
        }
        one = key.record(
            depth=DEPTH, value=value, ci95=None, num_images=10, **measured,
            unit="%" if per_image is not None or metric == "explained_variance" else "",
        )  # fmt: skip
        store.save(one, per_image)


def identify(address: str) -> Any:
    # Published weights are not on disk, so their checksum is made up.
    if is_run(address):
        return identify_encoder(address)
    return SimpleNamespace(identity=lambda: {"checkpoint_sha256": "c" * 64, **PUBLISHED_WEIGHTS})


def reproduce(table: PublishedTable, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> list[Any]:
    monkeypatch.setattr(reproduce_command, "run_command", StandIn())
    monkeypatch.setattr("ssl_bench.models.identify_encoder", identify)
    monkeypatch.setattr(reproduce_command, "default_format", lambda: "json")
    roots = {run.images for run in reproduce_command.list_runs(table)} - {"copying"}
    roots |= {column.dataset for column in table.columns if column.is_probed}
    words = ["--data-root", ",".join(f"{name}=/data/{name}" for name in roots)] if roots else []
    assert main(["reproduce", full_name(table), "--run", *words, f"model.depth={DEPTH}"]) == 0
    (printed,) = json.loads(capsys.readouterr().out)
    return printed["cells"]


def expected_cells(table: PublishedTable) -> Iterator[tuple[str, str]]:
    runs = experiments()
    for row, address in table.runs.items():
        for column in table.columns:
            images = runs[address.partition("@")[0]].images if is_run(address) else None
            if column.task not in (SUPERVISED, DIFFERENCE) or column.dataset == images:
                yield row, column.name


def tables_with_slow_marks() -> Iterator[Any]:
    seen = set[tuple[str, str]]()
    for table in load_published_tables():
        measures = {(column.task, column.metric) for column in table.columns}
        marks = [pytest.mark.slow] if measures <= seen else []
        yield pytest.param(table, id=full_name(table), marks=marks)
        seen |= measures


@pytest.mark.parametrize("table", tables_with_slow_marks())
def test_commands_that_parse_fill_every_row_with_a_run(table, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plan = plan_table(table, PlanOptions(runs=Path("r"), out=Path("o"), roots={}, gpus=8))
    for step, line in zip(plan.steps, shell_commands(plan), strict=True):
        program, *words = shlex.split(line)
        assert (program == "torchrun") == step.is_training
        if step.is_training:
            options = LAUNCH_PARSER.parse_args(words)
            assert (options.nproc_per_node, options.module) == ("8", True)
            found = (options.training_script, tuple(options.training_script_args))
            assert found == ("ssl_bench", step.arguments)
    assert set(plan.checkpoints) | set(plan.rows_without_run) == set(table.rows)
    if not table.runs:
        # These train language models, and ConvMixers without a known recipe.
        assert table.name in ("mimetic_language", "convmixer_sizes")
        return

    cells = reproduce(table, monkeypatch, capsys)

    assert all(column.task for column in table.columns)
    ours = {(cell["row"], cell["column"]): cell["ours"] for cell in cells}
    expected = {*expected_cells(table)}
    assert {cell for cell in ours if ours[cell] is not None} == expected
    assert all(ours[cell] for cell in expected)
    # Each published value of a row with a run has a cell of ours.
    assert {place for place in table.values if place[0] in table.runs} <= expected

    assert main(["reproduce", full_name(table), f"model.depth={DEPTH}"]) == 0
    rows = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
    counts = {tuple(row[:2]): int(row[2]) for row in rows if row[1:2] and row[1][:5] == "runs/"}
    steps = [step for step in plan.steps if step.needed_run and not step.is_training]
    assert len(counts) == len(steps)
    assert all(counts.values())

    first = next(iter(table.runs.values())).partition("@")[0]
    shutil.rmtree(Path("runs", first), ignore_errors=True)
    assert main(["reproduce", full_name(table), "--table", f"model.depth={DEPTH}"]) == 0
    measured = [column.name for column in table.columns if column.task != DIFFERENCE]
    others = [row for row in table.runs if table.runs[row].partition("@")[0] != first]
    (printed,) = json.loads(capsys.readouterr().out)
    left = {(cell["row"], cell["column"]): cell["ours"] for cell in printed["cells"]}
    assert all(left[cell] == ours[cell] for cell in product(others, measured) if cell in ours)
