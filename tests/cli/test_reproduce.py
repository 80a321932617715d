"""Test the command `ssl-bench reproduce`."""

import json
import os
import re
import shlex
import struct
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from PIL import Image

from pretrain.schedules import INITIAL_PHASES, Timeline, count_phase_steps
from ssl_bench.cli import reproduce as reproduce_command
from ssl_bench.cli.__main__ import main
from ssl_bench.cli.parser import build_parser, run_command
from ssl_bench.cli.reproduce import (
    TRAINING_GB,
    Plan,
    PlanOptions,
    find_tables,
    full_name,
    plan_table,
    read_run_state,
    run_steps,
    shell_commands,
)
from ssl_bench.composition.choices import experiments
from ssl_bench.composition.compose import compose_config, flatten_config
from ssl_bench.errors import ConfigurationError, DataError, Preempted
from ssl_bench.results import ResultStore
from ssl_bench.tables.published import PublishedTable, load_published_tables
from ssl_bench.tables.run_logs import read_run_measure
from tests.core.test_results import RECORD
from tests.support.faults import photo_folder, picture, unchecked_types, voc
from tests.support.faults import records as recorded
from tests.support.runs import log_rows
from tests.support.torchrun import set_torchrun_env
from tests.support.without_torch import stdout_without_torch

LENGTHS = [warmup.key for warmup in INITIAL_PHASES]
PLACES = {"runs": Path("runs"), "out": Path("results"), "roots": {}}


def plan_of(name: str, *overrides: str, **options) -> Plan:
    (table,) = find_tables(name)
    return plan_table(table, PlanOptions(**{**PLACES, "overrides": overrides, **options}))


def test_a_part_of_the_name_of_a_table_is_not_enough():
    assert len(find_tables("cutting_the_skip")) > 1
    for name in ("cutting", "cutting_the_skip/table"):
        with pytest.raises(ConfigurationError):
            find_tables(name)


def command_lines(plan: Plan, *, of_runs: bool) -> list[str]:
    return [" ".join(step.arguments) for step in plan.steps if step.is_training == of_runs]


def test_table_2_needs_four_runs_and_a_probe_per_cell():
    plan = plan_of("cutting_the_skip/table2", roots={"imagenet1k": "/in", "voc2012": "/voc"})

    assert [run.name for run in plan.runs] == [
        f"dino_imagenet_{arm}"
        for arm in ("skip_adamw", "skipless_adamw", "skip_soap", "skipless_soap")
    ]
    # Figure 2 needs these epochs, so that one run serves all tables.
    assert command_lines(plan, of_runs=True)[1] == (
        "pretrain experiment=dino_imagenet_skipless_adamw train.keep_epochs=[50,100,150,200,250] "
        "--out runs/dino_imagenet_skipless_adamw --resume --data-root /in"
    )
    probes = command_lines(plan, of_runs=False)
    assert len(probes) == 6 * 6
    assert probes[15] == (
        "probe --task segmentation --dataset voc2012 --checkpoint "
        "runs/dino_imagenet_skipless_adamw@200 --out results probe.protocol=cutting_the_skip "
        "probe.layers_mode=multi --data-root /voc"
    )
    assert plan.dataset_names == ("imagenet1k", "voc2012", "coco_stuff", "ade20k")


def test_overrides_reach_runs_or_probes_and_exclude_unreachable_rows():
    plan = plan_of(
        "table2", "train.max_steps=20", "probe.training.epochs=2", "data.root=/in", device="cpu"
    )

    assert {re.sub(r"\S*(skip\w*)", "*", line) for line in command_lines(plan, of_runs=True)} == {
        "pretrain * objective.freeze_last_layer_epochs=null "
        "objective.teacher_temperature_epochs=null train.warmup_epochs=null "
        "train.max_steps=20 data.root=/in --out * --resume --device cpu"
    }
    assert all(
        line.endswith("probe.training.epochs=2 --device cpu")
        for line in command_lines(plan, of_runs=False)
    )
    assert plan.unreachable_rows == ("skipless, adamw, 200 epochs", "skipless, soap, 200 epochs")
    assert len(command_lines(plan, of_runs=False)) == 4 * 6
    own = plan_of("table2", "train.max_steps=20", "train.warmup_epochs=0").steps[0].arguments
    assert "train.warmup_epochs=null" not in own
    kept = " ".join(plan_of("table2", "train.keep_epochs=[7]").steps[0].arguments)
    assert re.findall(r"train\.keep_epochs=(\S+)", kept) == ["[7]"]
    # This recipe has no warm-up and no other phase.
    assert "null" not in " ".join(plan_of("mnist", "train.max_steps=20").steps[0].arguments)
    assert plan_of("table2", "train.epochs=100").unreachable_rows == plan.unreachable_rows
    # A warm-up of ten epochs fits into eleven, but would be all of a run of ten.
    for epochs, is_removed in ((11, False), (10, True)):
        short = plan_of("table2", f"train.epochs={epochs}").steps[0].arguments
        assert ("train.warmup_epochs=null" in short) == is_removed
    assert plan_of("table2", "train.epochs=200").unreachable_rows == ()


@pytest.mark.slow
@pytest.mark.parametrize("override", ["train.max_steps=2", "train.epochs=1"])
def test_phases_of_recipes_fit_a_short_run(override):
    lengths = set()
    for run in {run.recipe: run for run in experiments().values()}.values():
        # An epoch has as many steps as with ImageNet. The run takes two steps or a full epoch.
        timeline = Timeline(2 if "max_steps" in override else 1251, 1251)
        table = PublishedTable(
            paper="own", name="own", title="", setup="", unknown="", source="", rows=("row",),
            columns=(), values={}, runs={"row": run.name},
        )  # fmt: skip
        steps = plan_table(table, PlanOptions(**PLACES, overrides=(override,))).steps
        (step,) = [step for step in steps if step.trained_run == run.name]
        own = [word for word in step.arguments if word.endswith("_epochs=null")]

        whole, short = (
            compose_config("pretraining", [f"experiment={run.name}", *words]) for words in ([], own)
        )

        count_phase_steps(short, timeline)
        long = {key for key in LENGTHS if (flatten_config(whole).get(key) or 0) > 0}
        if "train.max_steps" in override:
            assert {word.partition("=")[0] for word in own} == long, run.name
        lengths |= long
    # The recipes have every kind of phase. Periods, such as the epochs between two evaluations, may
    # exceed a run.
    assert lengths == set(LENGTHS)


def test_printed_lines_train_on_all_gpus_and_distribute_probes():
    plan = plan_of("figure3", gpus=3, datasets=("voc2012", "coco20k"))

    lines = list(shell_commands(plan))

    assert len(lines) == len(plan.steps)
    assert lines[0] == (
        "torchrun --nproc-per-node=3 -m ssl_bench pretrain experiment=dino_imagenet_skip_adamw "
        "'train.keep_epochs=[50,100,150,200,250]' --out runs/dino_imagenet_skip_adamw --resume"
    )
    devices = [line.rpartition(" --device ")[2] for line in lines if " probe " in line]
    assert devices == [f"cuda:{number % 3}" for number in range(12)]
    assert lines[4].startswith("ssl-bench probe --task tokencut ")


def test_gpus_need_print_and_several_processes_are_refused(monkeypatch, capsys):
    def hint_for(*words) -> list[str]:
        with pytest.raises(ConfigurationError) as refused:
            run_command(["reproduce", "table1", *words])
        return [word.format(number=2) for word in refused.value.hint[1:]]

    single = [["--gpus", "2"], ["--run", "--gpus", "2"]]
    single += [["--print", "--gpus", "2", "--device", "cpu"]]
    hints = [hint_for(*words) for words in single]
    with monkeypatch.context() as patch:
        set_torchrun_env(patch, 2, LOCAL_RANK="0")
        hints.append(hint_for("--run", "data.root=images"))

    for words in hints:
        assert run_command([*words, "--data-root", "imagenet1k=~/images"]) == 0
        printed = capsys.readouterr().out
        assert printed.count("torchrun --nproc-per-node=2 -m ssl_bench pretrain") == 6
        assert f"--data-root {Path.home()}/images" in printed
    assert main(["reproduce", "table1", "--print", "--gpus", "0"]) == 2


def test_the_plan_probes_the_block_that_the_paper_shows():
    def layers(name, *overrides):
        lines = command_lines(plan_of(name, *overrides), of_runs=False)
        return {found for line in lines for found in re.findall(r"--layer (\S+)", line)}

    assert layers("figure4") == {"11"}
    assert layers("figure4", "model.depth=2") == {"1"}
    assert layers("tokencut") == layers("dino/dino_imagenet") == {"-1"}
    assert layers("figure3") == layers("table2") == set()


def test_a_difference_needs_the_row_that_is_subtracted():
    plan = plan_of("one_skip", rows=("no skip around attention",))

    assert [step.trained_run for step in plan.steps] == [
        "one_skip_cifar10_both",
        "one_skip_cifar10_no_attention",
    ]
    assert set(plan.checkpoints) == {"both skips", "no skip around attention"}
    assert len(plan_of("mnist", rows=("ViT",)).steps) == 1
    without = plan_of("convnext_atto").rows_without_run
    assert plan_of("convnext_atto", rows=without[1:]).rows_without_run == without[1:] != ()


def test_a_run_is_fine_tuned_after_its_pretraining():
    plan = plan_of("always_skip_attention/mae", out=Path("my results"))

    assert [(step.trained_run, step.needed_run) for step in plan.steps] == [
        ("mae_imagenet", None),
        ("mae_imagenet_finetune", "mae_imagenet"),
        ("mae_imagenet_dct", None),
        ("mae_imagenet_finetune_dct", "mae_imagenet_dct"),
    ]
    assert plan.steps[0].arguments == (
        *("pretrain", "experiment=mae_imagenet", "--out", "runs/mae_imagenet", "--resume"),
    )
    assert plan.steps[1].arguments[2:4] == (
        "monitor.results='my results'",
        "init_from=runs/mae_imagenet",
    )
    out = Path("it's mine, and yours")
    settings = plan_of("always_skip_attention/mae", out=out, runs=out).steps[1].arguments[1:4]
    config = compose_config("pretraining", settings)
    assert config["monitor"]["results"] == str(out)
    assert config["init_from"] == f"{out}/mae_imagenet"


def test_a_plan_names_the_records_that_it_cannot_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    store = ResultStore.create(Path("results"))
    store.save(RECORD)
    (store.path(RECORD.key()).parent / "damaged.json").write_text("{")

    assert main(["reproduce", "cutting_the_skip/table2"]) == 0

    assert "1 of 2 records cannot be shown" in capsys.readouterr().err


def test_figure_plans_end_with_the_command_that_draws_them(capsys):
    for name, parts in {
        "orthogonal_self_attention/figure1": ["--over-steps", "--metric loss,val_loss"],
        "cutting_the_skip/figure2": ["--over-epochs", "--metric miou_oracle"],
        "cutting_the_skip/table2": [],
    }.items():
        assert main(["reproduce", name]) == 0
        lines = capsys.readouterr().out.splitlines()
        drawing = [line.partition(": ")[2] for line in lines if " curves " in line]
        assert len(drawing) == bool(parts)
        for line in drawing:
            assert all(part in line for part in parts)
            assert build_parser().parse_args(shlex.split(line)[1:]).figure == "curves.png"


def test_curves_are_drawn_from_the_runs_that_have_a_log(tmp_path, capsys):
    name = "orthogonal_self_attention/figure1"
    first, second, *_ = [tmp_path / run.name for run in plan_of(name).runs]

    def drawn(*words: str) -> list[str]:
        assert main(["reproduce", *words, "--runs", str(tmp_path)]) == 0
        line = next(one for one in capsys.readouterr().out.splitlines() if " curves " in one)
        return shlex.split(line.partition(": ")[2])

    assert {str(first), str(second)} < set(drawn(name))
    second.mkdir()
    (second / "log.jsonl").touch()
    words = drawn(name)
    assert words[words.index("--over-steps") + 1 : words.index("--metric")] == [str(second)]
    words = drawn("cutting_the_skip/figure2", "--out", "elsewhere")
    assert words[words.index("--out") + 1] == "elsewhere"


def test_tables_are_listed_and_planned_without_torch(tmp_path, capsys):
    commands = [
        ["reproduce"],
        ["reproduce", "cutting_the_skip/table2", "train.max_steps=20"],
        ["reproduce", "table1", "--print"],
    ]

    said = stdout_without_torch(tmp_path, commands)

    assert "(6 rows, all reproduced by 4 runs)" in said
    assert "4 runs, 4 not finished" in said
    assert "voc2012 2 GB" in said
    (sizes,) = [line for line in said.splitlines() if line.startswith("datasets: ")]
    *parts, total = map(float, re.findall(r"([\d.]+) GB", sizes))
    assert sum(parts) == pytest.approx(total, abs=2)
    assert "rows skipped, because the runs end before their epoch: 'skipless, adamw, 200" in said
    assert "ssl-bench pretrain experiment=supervised_imagenet_skip_adamw monitor.results=" in said
    assert not list(tmp_path.iterdir())

    assert main(["reproduce"]) == 0
    every = capsys.readouterr().out.splitlines()
    named = [line.split()[0] for line in every if line.startswith("  ")]
    assert sorted(named) == sorted(map(full_name, load_published_tables()))
    assert main(["reproduce", "always_skip_attention"]) == 0
    title, *own = capsys.readouterr().out.splitlines()
    assert title in every
    assert {line.split("/")[0].strip() for line in own} == {"always_skip_attention"}
    # Every training dataset has a size, except a user's own and generated images.
    images = {run.images for run in experiments().values()}
    assert images == {*TRAINING_GB, "photographs", "copying"}


def run_folder(folder: Path, *, step: int, epoch: float, train: str) -> Path:
    folder.mkdir(parents=True)
    header = json.dumps({"__metadata__": {"step": str(step), "epoch": f"{epoch:.2f}"}}).encode()
    (folder / "last.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (folder / "config.yaml").write_text(f"train: {train}\n")
    return folder


def test_a_run_is_finished_after_its_epochs_or_its_steps(tmp_path):
    cases = {"epochs: 3, max_steps: null": False, "epochs: 2, max_steps: null": True}
    cases |= {"epochs: 3, max_steps: 20": True, "epochs: 3, max_steps: 21": False}
    for number, (train, is_finished) in enumerate(cases.items()):
        folder = run_folder(tmp_path / str(number), step=20, epoch=2.0, train=f"{{{train}}}")
        assert read_run_state(folder) == (20, is_finished), train
        rows = [{"step": step, "epoch": 0, "loss": 2.0} for step in range(1, 21)]
        (folder / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        assert read_run_measure("loss_100", folder) == (2.0 if is_finished else None)


@pytest.mark.parametrize("train", ["{}", "[", "{epochs: many, max_steps: 1}"])
def test_the_state_of_a_damaged_run_is_unknown(tmp_path, train):
    folder = run_folder(tmp_path / "run", step=20, epoch=2.0, train=train)

    assert read_run_state(folder) is None
    (folder / "last.safetensors").write_bytes(b"\xff" * 20)
    assert read_run_state(folder) is None
    assert read_run_state(tmp_path / "no run") is None


def simulate_steps(plan: Plan, errors_of_unfinished_runs) -> dict[str, tuple[str, int]]:
    def execute(line) -> int:
        name = Path(line[line.index("--out") + 1]).name
        if line[0] == "pretrain":
            if error := errors_of_unfinished_runs.get(name):
                raise error
            steps = 1 if name in errors_of_unfinished_runs else 2
            folder = plan.options.runs / name
            run_folder(folder, step=steps, epoch=0.0, train="{epochs: 9, max_steps: 2}")
        return 0

    return {
        step.title: (outcome.state, outcome.exit_code)
        for step, outcome in run_steps(plan, execute, debug=False)
    }


def test_a_failed_run_stops_only_the_steps_that_need_it(tmp_path):
    plan = plan_of("figure3", runs=tmp_path, datasets=("voc2012",))
    skip, skipless = "dino_imagenet_skip_adamw", "dino_imagenet_skipless_adamw"

    outcomes = simulate_steps(plan, {skip: DataError("no images"), skipless: None})

    assert outcomes[f"pretrain {skip}"] == ("failed", 3)
    assert outcomes[f"tokencut on voc2012, {skip}"] == ("failed", 1)
    # Its time limit was reached, so it ended without an error but is not finished.
    assert outcomes[f"pretrain {skipless}"] == ("failed", 1)
    assert outcomes[f"tokencut on voc2012, {skipless}@200"] == ("failed", 1)
    assert [state for state, _ in outcomes.values()].count("finished") == 5


def test_a_failed_step_sets_the_exit_code_until_all_steps_are_finished(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    outs = list[Path]()

    def run(line) -> int:
        outs.append(Path(line[line.index("--out") + 1]))
        if len(outs) == 1:
            raise DataError("no images")
        if not outs[-1].exists():
            run_folder(outs[-1], step=2, epoch=0.0, train="{epochs: 9, max_steps: 2}")
        return 0

    monkeypatch.setattr(reproduce_command, "run_command", run)
    words = ["reproduce", "one_skip", "--row", "no skip around attention", "--run", "data.root=x"]
    for code, counts in ((3, "1 steps finished, 1 failed"), (0, "2 steps finished, 0 failed")):
        assert main(words) == code
        said = capsys.readouterr().err
        assert counts in said
        assert ("run the same command again" in said) == bool(code)


@pytest.mark.parametrize(("error", "code"), [(Preempted("saved"), 75), (KeyboardInterrupt(), 130)])
def test_a_request_to_stop_stops_all_steps(tmp_path, monkeypatch, capsys, error, code):
    monkeypatch.chdir(tmp_path)
    started = []

    def run(line) -> int:
        started.append(line)
        raise error

    monkeypatch.setattr(reproduce_command, "run_command", run)

    assert main(["reproduce", "table1", "--run", "data.root=images"]) == code
    assert len(started) == 1
    assert capsys.readouterr().out == ""


TINY = (
    "model.image_size=32", "model.patch_size=16", "model.dim=24", "model.num_heads=2",
    "model.depth=2", "train.num_workers=0", "train.batch_size=4", "train.max_steps=2",
    "--device", "cpu",
)  # fmt: skip
DINO = (
    "objective.out_dim=32", "objective.hidden_dim=16", "objective.bottleneck_dim=8",
    "objective.crops.num_locals=2",
)  # fmt: skip
TINY_COPYING = (
    "train.max_steps=2", "train.batch_size=4", "model.dim=16", "model.depth=1",
    "model.num_states=8", "model.head_width=8", "objective.test_strings=4",
)  # fmt: skip


@pytest.fixture
def reproduced(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(name: str, *words: str, rows: Sequence[str] = ()) -> dict[str, list[str]]:
        flags = [word for row in rows for word in ("--row", row)]
        with unchecked_types():
            assert main(["reproduce", name, *flags, "--run", *words]) == 0
        printed = capsys.readouterr().out.rpartition("published | ours")[2].splitlines()
        cells: dict[str, list[str]] = {}
        # Columns that do not fit are in a second block below the first.
        for line in printed:
            row, *shown = re.split(r"  +", line)
            if shown and (ours := re.findall(r"\| (\S+)", " ".join(shown))):
                cells.setdefault(row, []).extend(ours)
        return {row: cells[row] for row in rows or cells}

    return run


def six_classes(name: str) -> str:
    # Top-5 accuracy needs more than five classes.
    for number, (split, kind, image) in enumerate(product(("train", "val"), "abcdef", "12")):
        path = Path(name, split, kind, f"{image}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path)
    return f"data.root={name}"


@pytest.mark.slow
def test_a_training_by_two_processes_is_continued_by_run(reproduced, capsys):
    words = [six_classes("mnist"), "data.image_size=32", "objective.num_classes=null", *TINY[:-2]]
    line = ["reproduce", "mnist", "--row", "ViT", *words]
    assert main([*line, "--print", "--gpus", "2"]) == 0
    (printed,) = capsys.readouterr().out.splitlines()

    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(printed, shell=True, check=True, env=environment, capture_output=True)

    before = set(Path("results").rglob("*.json"))
    (ours,) = reproduced("mnist", *words, rows=["ViT"])["ViT"]
    assert set(Path("results").rglob("*.json")) == before
    assert len(log_rows("runs/osa_mnist_vit")) == 2
    assert main([*line, "--table"]) == 0
    assert f"97.2 | {ours}" in capsys.readouterr().out
    assert main(line) == 0
    assert capsys.readouterr().out.count("finished, 2 steps") == 1


@pytest.mark.slow
def test_a_table_of_probes_is_reproduced_and_continued(reproduced, capsys):
    photo_folder(Path("photos"))
    voc(Path("voc"))
    words = ["--dataset", "voc2012", "--data-root", "imagenet1k=photos,voc2012=voc", *TINY, *DINO]

    ours = reproduced("cutting_the_skip/figure3", *words, rows=["skip, adamw"])

    assert float(ours["skip, adamw"][0]) >= 0
    assert {record.task for record in recorded()} == {"tokencut"}
    times = {record.created for record in recorded()}
    line = ["reproduce", "cutting_the_skip/figure3", "--row", "skip, adamw", *words]
    assert main([*line, "--run"]) == 0
    assert {record.created for record in recorded()} == times
    capsys.readouterr()
    assert main(line) == 0
    assert re.search(r"runs/dino_imagenet_skip_adamw +2$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.slow
def test_condition_numbers_are_means_over_all_blocks(reproduced):
    images = ("--data-root", f"folder={photo_folder(Path('photos'))}", "probe.image_size=32")
    words = (six_classes("imagenet1k"), *images, *TINY)

    (cells,) = reproduced("graying_exponent", *words, rows=["no token graying"]).values()

    last = {r.facet: r.value for r in recorded() if r.task == "conditioning" and r.layer == 1}
    assert len(cells) == 3
    assert cells[1:] == [f"{last[facet]:.2f}" for facet in ("before", "after")]


@pytest.mark.slow
def test_letter_accuracy_and_training_days_come_from_the_log(reproduced):
    letters, graying = "Mamba 2, default", "ViT-B, DCT token graying"

    copied = reproduced("copying", *TINY_COPYING, rows=[letters])
    days = reproduced("training_time", six_classes("imagenet1k"), *TINY, rows=[graying])

    rows = log_rows("runs/mimetic_copying_default")
    assert copied == {letters: [f"{rows[-1]['letters_16']:.1f}"]}
    timed = log_rows("runs/graying_imagenet_vit_b_dct", timed=True)
    seconds = sum(4 / row["images_per_second"] for row in timed)
    assert days == {graying: [f"{seconds / 86_400:.3g}"]}


@pytest.mark.slow
def test_the_difference_column_subtracts_the_accuracy_of_another_row(reproduced):
    rows = ["both skips", "no skip around attention"]

    cells = reproduced("one_skip", six_classes("cifar10"), *TINY, rows=rows)

    both, without = (float(cells[row][0]) for row in rows)
    assert cells[rows[0]][1] == "0.0"
    assert float(cells[rows[1]][1]) == pytest.approx(both - without, abs=0.11)


@pytest.mark.slow
def test_figure_4_shows_the_first_images_of_the_validation_set(reproduced):
    for split, count in (("train2017", 2), ("val2017", 42)):
        Path("coco/stuffthingmaps", split).mkdir(parents=True)
        Path("coco/images", split).mkdir(parents=True)
        for number in range(count):
            name = f"coco/images/{split}/{number:012d}.jpg"
            Image.new("RGB", (40, 30), (number, 6 * number, 90)).save(name)
    place = f"imagenet1k={photo_folder(Path('photos'))},coco_stuff=coco"
    words = ("--data-root", place, *TINY, *DINO, "probe.image_size=32")

    reproduced("figure4", *words, rows=["skip, adamw"])

    (record,) = recorded()
    assert (record.layer, record.split, record.num_images) == (1, "val2017", 40)
    shown = ResultStore(Path("results")).image_ids(record.dataset_fingerprint)
    assert shown == tuple(f"{number:012d}" for number in range(40))


@pytest.mark.slow
def test_the_dino_table_has_two_accuracies_of_the_last_block(reproduced):
    six_classes("imagenet")
    words = ("--data-root", "imagenet1k=imagenet", *TINY, *DINO, "probe.image_size=32")

    cells = reproduced("dino/dino_imagenet", *words, rows=["100 epochs"])

    assert len(cells["100 epochs"]) == 2
    assert {(r.task, r.dataset, r.layer) for r in recorded()} == {
        ("knn", "imagenet1k", 1), ("classification", "imagenet1k", 1),
    }  # fmt: skip
