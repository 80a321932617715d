"""From a published table to its runs and probes: the plan, what is there, and all in small."""

import json
import os
import re
import shlex
import struct
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from PIL import Image
from torch.distributed.run import get_args_parser

from pretrain.schedules import INITIAL_PHASES, Timeline, count_phase_steps
from ssl_bench.cli import reproduce as reproduce_command
from ssl_bench.cli.__main__ import main
from ssl_bench.cli.parser import build_parser
from ssl_bench.cli.parser import run as run_line
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
from tests.support.faults import class_folders, photo_folder, picture, unchecked_types, voc
from tests.support.faults import records as recorded
from tests.support.places import one_of
from tests.support.runs import log_rows
from tests.support.without_torch import said_without_torch

PARSER = build_parser()
LENGTHS = [warmup.key for warmup in INITIAL_PHASES]
TWO_ARMS = ["--row", "skip, adamw", "--row", "skipless, adamw"]
SMALL = (
    "model.image_size=16", "model.patch_size=8", "model.dim=24", "model.num_heads=2",
    "model.depth=2", "objective.out_dim=32", "objective.hidden_dim=16",
    "objective.bottleneck_dim=8", "objective.crops.num_locals=2", "train.num_workers=0",
)  # fmt: skip


def plan_of(name: str, *overrides: str, **asked) -> Plan:
    (table,) = find_tables(name)
    places = {"runs": Path("runs"), "out": Path("results"), "roots": {}}
    return plan_table(table, PlanOptions(**{**places, "overrides": overrides, **asked}))


def words(plan: Plan, *, of_runs: bool) -> list[str]:
    return [" ".join(step.words) for step in plan.steps if step.is_training == of_runs]


def test_the_plan_of_table_2_is_four_runs_and_a_probe_for_each_cell():
    plan = plan_of("cutting_the_skip/table2", roots={"imagenet1k": "/in", "voc2012": "/voc"})

    assert [run.name for run in plan.runs] == [
        f"dino_imagenet_{arm}"
        for arm in ("skip_adamw", "skipless_adamw", "skip_soap", "skipless_soap")
    ]
    # Figure 2 needs these epochs, so that one run serves all tables.
    assert words(plan, of_runs=True)[1] == (
        "pretrain experiment=dino_imagenet_skipless_adamw train.keep_epochs=[50,100,150,200,250] "
        "--out runs/dino_imagenet_skipless_adamw --resume --data-root /in"
    )
    probes = words(plan, of_runs=False)
    assert len(probes) == 6 * 6
    assert probes[15] == (
        "probe --task segmentation --dataset voc2012 --checkpoint "
        "runs/dino_imagenet_skipless_adamw@200 --out results probe.protocol=cutting_the_skip "
        "probe.layers_mode=multi --data-root /voc"
    )
    assert plan.images == ("imagenet1k", "voc2012", "coco_stuff", "ade20k")


def test_overrides_reach_the_runs_or_the_probes_and_leave_out_what_they_make_impossible():
    plan = plan_of(
        "table2", "train.max_steps=20", "probe.training.epochs=2", "data.root=/in", device="cpu"
    )

    assert {re.sub(r"\S*(skip\w*)", "*", line) for line in words(plan, of_runs=True)} == {
        "pretrain * objective.freeze_last_layer_epochs=null "
        "objective.teacher_temperature_epochs=null train.warmup_epochs=null "
        "train.max_steps=20 data.root=/in --out * --resume --device cpu"
    }
    assert all(
        line.endswith("probe.training.epochs=2 --device cpu") for line in words(plan, of_runs=False)
    )
    assert plan.unreachable_rows == ("skipless, adamw, 200 epochs", "skipless, soap, 200 epochs")
    assert len(words(plan, of_runs=False)) == 4 * 6
    own = plan_of("table2", "train.max_steps=20", "train.warmup_epochs=0").steps[0].words
    assert "train.warmup_epochs=null" not in own
    # No warm-up in this recipe, and nothing to shorten.
    assert "null" not in " ".join(plan_of("mnist", "train.max_steps=20").steps[0].words)
    assert plan_of("table2", "train.epochs=100").unreachable_rows == plan.unreachable_rows
    assert plan_of("table2", "train.epochs=200").unreachable_rows == ()


@pytest.mark.parametrize("asked", ["train.max_steps=2", "train.epochs=1"])
def test_whatever_recipes_count_in_epochs_fits_a_short_run(asked):
    recipes = {run.recipe: run for run in experiments().values()}
    lengths = set()
    for name, run in recipes.items():
        # As many steps an epoch as with ImageNet, of which the run takes two or all.
        timeline = Timeline(2 if "max_steps" in asked else 1251, 1251)
        table = PublishedTable(
            paper="own", name="own", title="", setup="", unknown="", source="", rows=("row",),
            columns=(), values={}, runs={"row": run.name},
        )  # fmt: skip
        places = {"runs": Path("runs"), "out": Path("results"), "roots": {}}
        (step,) = [
            step
            for step in plan_table(table, PlanOptions(**places, overrides=(asked,))).steps
            if step.trained_run == run.name
        ]
        own = [word for word in step.words if word.endswith("_epochs=null")]

        whole, short = (
            compose_config("pretraining", [f"experiment={run.name}", *words]) for words in ([], own)
        )

        count_phase_steps(short, timeline)
        long = {key for key in LENGTHS if (flatten_config(whole).get(key) or 0) > 0}
        if "train.max_steps" in asked:
            assert {word.partition("=")[0] for word in own} == long, name
        lengths |= long
    # The recipes have all lengths that there are; tests of periods, such as of the monitor, come
    # after the last step too.
    assert lengths == set(LENGTHS)


def test_lines_for_several_gpus_share_trainings_and_spread_probes():
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


@pytest.mark.parametrize("table", load_published_tables(), ids=full_name)
def test_torchrun_takes_every_printed_training_as_it_is(table):
    plan = plan_of(full_name(table), "train.max_steps=20", gpus=8, roots={"imagenet1k": "/my in"})

    for step, line in zip(plan.steps, shell_commands(plan), strict=True):
        program, *words = shlex.split(line)
        assert (program == "torchrun") == step.is_training
        if step.is_training:
            typed = get_args_parser().parse_args(words)
            assert (typed.nproc_per_node, typed.module) == ("8", True)
            assert (typed.training_script, typed.training_script_args) == (
                "ssl_bench",
                list(step.words),
            )


@pytest.mark.parametrize(
    "words",
    [["--gpus", "2"], ["--run", "--gpus", "2"], ["--print", "--gpus", "2", "--device", "cpu"]],
)
def test_gpus_are_for_printed_lines_alone(words, capsys):
    with pytest.raises(ConfigurationError) as refused:
        run_line(["reproduce", "table1", *words])

    hint = [word.format(number=2) for word in refused.value.hint]
    assert hint[:3] == ["ssl-bench", "reproduce", "table1"]
    assert run_line(hint[1:]) == 0
    assert capsys.readouterr().out.count("torchrun --nproc-per-node=2 -m ssl_bench pretrain") == 6
    assert main(["reproduce", "table1", "--print", "--gpus", "0"]) == 2


def test_one_of_several_processes_is_told_what_to_type_instead(monkeypatch, capsys):
    one_of(monkeypatch, 2, LOCAL_RANK="0")
    with pytest.raises(ConfigurationError) as refused:
        run_line(["reproduce", "table1", "--run", "data.root=images"])
    monkeypatch.undo()

    assert run_line(refused.value.hint[1:]) == 0
    assert "torchrun --nproc-per-node=2 " in capsys.readouterr().out


def test_a_block_is_asked_for_where_the_paper_shows_one():
    def asked(name, *overrides):
        lines = words(plan_of(name, *overrides), of_runs=False)
        return {found for line in lines for found in re.findall(r"--layer (\S+)", line)}

    assert asked("figure4") == {"11"}
    assert asked("figure4", "model.depth=2") == {"1"}
    assert asked("tokencut") == asked("dino/dino_imagenet") == {"-1"}
    assert asked("figure3") == asked("table2") == set()


def test_a_difference_brings_the_row_that_it_is_taken_from():
    plan = plan_of("one_skip", rows=("no skip around attention",))

    assert [step.trained_run for step in plan.steps] == [
        "one_skip_cifar10_both",
        "one_skip_cifar10_no_attention",
    ]
    assert set(plan.checkpoints) == {"both skips", "no skip around attention"}
    assert len(plan_of("mnist", rows=("ViT",)).steps) == 1


def test_a_run_that_begins_with_weights_of_another_comes_behind_it():
    plan = plan_of("always_skip_attention/mae", out=Path("my results"))

    assert [(step.trained_run, step.needed_run) for step in plan.steps] == [
        ("mae_imagenet", None),
        ("mae_imagenet_finetune", "mae_imagenet"),
        ("mae_imagenet_dct", None),
        ("mae_imagenet_finetune_dct", "mae_imagenet_dct"),
    ]
    assert plan.steps[0].words == (
        *("pretrain", "experiment=mae_imagenet", "--out", "runs/mae_imagenet", "--resume"),
    )
    assert plan.steps[1].words[2:4] == (
        "monitor.results='my results'",
        "init_from=runs/mae_imagenet",
    )


@pytest.mark.parametrize("table", load_published_tables(), ids=full_name)
def test_every_command_of_every_table_is_one_that_the_parser_takes(table):
    plan = plan_of(full_name(table))

    for step in plan.steps:
        options, overrides = PARSER.parse_known_args(list(step.words))
        assert options.command in ("pretrain", "probe")
        assert all("=" in word for word in overrides)
    assert set(plan.checkpoints) | set(plan.rows_without_run) == set(table.rows)


def test_what_runs_train_on_has_a_size_unless_it_is_ones_own_or_generated():
    assert {run.images for run in experiments().values()} == {
        *TRAINING_GB,
        "photographs",
        "copying",
    }


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("orthogonal_self_attention/figure1", ["--over-steps", "--metric loss,val_loss"]),
        ("cutting_the_skip/figure2", ["--over-epochs", "--metric miou_oracle"]),
        ("cutting_the_skip/table2", []),
    ],
)
def test_the_plan_of_a_figure_ends_with_the_command_that_draws_it(name, command, capsys):
    assert main(["reproduce", name]) == 0

    lines = capsys.readouterr().out.splitlines()
    drawing = [line.partition(": ")[2] for line in lines if " curves " in line]
    assert len(drawing) == bool(command)
    for line in drawing:
        assert all(words in line for words in command)
        assert PARSER.parse_args(shlex.split(line)[1:]).figure == "curves.png"


def test_looking_takes_no_torch_and_shows_what_it_needs(tmp_path):
    commands = [
        ["reproduce"],
        ["reproduce", "cutting_the_skip/table2", "train.max_steps=20"],
        ["reproduce", "table1", "--print"],
    ]

    said = said_without_torch(tmp_path, commands)

    listed = "linear segmentation with DINO encoders (6 rows, all reproduced by 4 runs)"
    assert f"cutting_the_skip/table2   table 2: {listed}" in said
    assert "4 runs, 4 not finished" in said
    assert "voc2012 2 GB" in said
    assert "rows skipped, because the runs end before their epoch: 'skipless, adamw, 200" in said
    assert "ssl-bench pretrain experiment=supervised_imagenet_skip_adamw monitor.results=" in said
    assert not list(tmp_path.iterdir())


def test_every_table_is_listed_once_below_its_paper_and_those_of_one_alone(capsys):
    assert main(["reproduce"]) == 0
    every = capsys.readouterr().out.splitlines()

    named = [line.split()[0] for line in every if line.startswith("  ")]
    assert sorted(named) == sorted(map(full_name, load_published_tables()))
    assert main(["reproduce", "always_skip_attention"]) == 0
    title, *own = capsys.readouterr().out.splitlines()
    assert title in every
    assert {line.split("/")[0].strip() for line in own} == {"always_skip_attention"}


def run_folder(folder: Path, *, step: int, epoch: float, train: str) -> Path:
    """What `read_run_state` reads of a run."""
    folder.mkdir(parents=True)
    header = json.dumps({"__metadata__": {"step": str(step), "epoch": f"{epoch:.2f}"}}).encode()
    (folder / "last.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (folder / "config.yaml").write_text(f"train: {train}\n")
    return folder


@pytest.mark.parametrize(
    ("train", "is_finished"),
    [
        ("{epochs: 3, max_steps: null}", False),
        ("{epochs: 2, max_steps: null}", True),
        ("{epochs: 3, max_steps: 20}", True),
        ("{epochs: 3, max_steps: 21}", False),
    ],
)
def test_a_run_is_finished_after_its_epochs_or_its_steps(tmp_path, train, is_finished):
    folder = run_folder(tmp_path / "run", step=20, epoch=2.0, train=train)

    assert read_run_state(folder) == (20, is_finished)


@pytest.mark.parametrize("train", ["{}", "[", "{epochs: many, max_steps: 1}"])
def test_of_a_damaged_run_nothing_is_known(tmp_path, train):
    folder = run_folder(tmp_path / "run", step=20, epoch=2.0, train=train)

    assert read_run_state(folder) is None
    (folder / "last.safetensors").write_bytes(b"\xff" * 20)
    assert read_run_state(folder) is None
    assert read_run_state(tmp_path / "no run") is None


def carried(plan: Plan, endings) -> dict[str, tuple[str, int]]:
    """Outcomes by title, where runs leave folders of finished runs and `endings` says otherwise."""

    def execute(line) -> int:
        name = Path(line[line.index("--out") + 1]).name
        if line[0] == "pretrain":
            if error := endings.get(name):
                raise error
            steps = 1 if name in endings else 2
            folder = plan.options.runs / name
            run_folder(folder, step=steps, epoch=0.0, train="{epochs: 9, max_steps: 2}")
        return 0

    return {
        step.title: (outcome.state, outcome.exit_code)
        for step, outcome in run_steps(plan, execute, debug=False)
    }


def test_what_fails_stops_only_what_needs_it(tmp_path):
    plan = plan_of("figure3", runs=tmp_path, datasets=("voc2012",))
    skip, skipless = "dino_imagenet_skip_adamw", "dino_imagenet_skipless_adamw"

    outcomes = carried(plan, {skip: DataError("no images"), skipless: None})

    assert outcomes[f"pretrain {skip}"] == ("failed", 3)
    assert outcomes[f"tokencut on voc2012, {skip}"] == ("failed", 1)
    # Its time was up: it ended well, and is not finished.
    assert outcomes[f"pretrain {skipless}"] == ("failed", 1)
    assert outcomes[f"tokencut on voc2012, {skipless}@200"] == ("failed", 1)
    assert [state for state, _ in outcomes.values()].count("finished") == 5


@pytest.mark.parametrize(("error", "code"), [(Preempted("saved"), 75), (KeyboardInterrupt(), 130)])
def test_who_asks_to_stop_stops_all(tmp_path, monkeypatch, capsys, error, code):
    monkeypatch.chdir(tmp_path)
    asked = []

    def run(line) -> int:
        asked.append(line)
        raise error

    monkeypatch.setattr(reproduce_command, "run_command", run)

    assert main(["reproduce", "table1", "--run", "data.root=images"]) == code
    assert len(asked) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_supervised_table_in_small_from_nothing_to_ours_beside_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    class_folders(tmp_path / "mnist", 8)
    (tmp_path / "mnist/val").rename(tmp_path / "mnist/test")
    line = ["reproduce", "orthogonal_self_attention/mnist", "train.max_steps=4", "data.root=mnist"]
    line += ["train.batch_size=4", "train.num_workers=0", "objective.num_classes=null"]
    line += ["model.depth=2"]

    with unchecked_types():
        assert main([*line, "--run"]) == 0

    printed = capsys.readouterr().out
    assert len(re.findall(r"(97.2|96.9|94.6|79.6) \| \d+\.\d ", printed)) == 5
    assert {len(log_rows(f"runs/{run.name}")) for run in plan_of("mnist").runs} == {4}
    before = {path: path.stat().st_mtime_ns for path in Path("results").rglob("*.json")}
    assert main([*line, "--run"]) == 0
    assert capsys.readouterr().out == printed
    assert {p: p.stat().st_size for p in Path("results").rglob("*.json")}.keys() == before.keys()
    assert main([*line, "--table"]) == 0
    assert capsys.readouterr().out == printed
    assert main(line) == 0
    assert capsys.readouterr().out.count("finished, 4 steps") == 5


@pytest.mark.slow
def test_a_table_of_probes_in_small(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    photo_folder(tmp_path / "photos")
    voc(tmp_path / "voc")
    line = ["reproduce", "cutting_the_skip/figure3", *TWO_ARMS, "--dataset", "voc2012"]
    line += ["--data-root", "imagenet1k=photos,voc2012=voc", *SMALL, "train.batch_size=2"]
    line += ["train.max_steps=2", "--device", "cpu"]

    with unchecked_types():
        assert main([*line, "--run"]) == 0

    printed = capsys.readouterr().out
    assert len(re.findall(r"(32.3|53.5) \| \d+\.\d ", printed)) == 2
    assert {record.task for record in recorded()} == {"tokencut"}
    times = {record.created for record in recorded()}
    assert main([*line, "--run"]) == 0
    assert {record.created for record in recorded()} == times
    assert main(line) == 0
    assert re.search(r"runs/dino_imagenet_skip_adamw +2$", capsys.readouterr().out, re.MULTILINE)


TINY = (
    "model.image_size=32", "model.patch_size=16", "model.dim=24", "model.num_heads=2",
    "model.depth=2", "train.num_workers=0", "train.batch_size=4", "train.max_steps=2",
    "--device", "cpu",
)  # fmt: skip
TINY_COPYING = (
    "train.max_steps=2", "train.batch_size=4", "model.dim=16", "model.depth=1",
    "model.num_states=8", "model.head_width=8", "objective.test_strings=4",
)  # fmt: skip


def reproduced(capsys, name: str, *words: str, row: str | None = None) -> dict[str, list[str]]:
    """What `reproduce --run` shows of a table: ours, by row and column."""
    rows = ["--row", row] if row else []
    with unchecked_types():
        assert main(["reproduce", name, *rows, "--run", *words]) == 0
    printed = capsys.readouterr().out.rpartition("published | ours")[2].splitlines()
    cells: dict[str, list[str]] = {}
    # Columns that find no room stand in a second block below the first.
    for line in printed:
        name, *shown = re.split(r"  +", line)
        if shown and (ours := re.findall(r"\| (\S+)", " ".join(shown))):
            cells.setdefault(name, []).extend(ours)
    return {row: cells[row]} if row else cells


def six_classes(root: Path) -> str:
    """Images of six classes, so that there is a top-5."""
    for number, (split, kind, name) in enumerate(product(("train", "val"), "abcdef", "12")):
        path = root / split / kind / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path)
    return f"data.root={root}"


@pytest.mark.slow
def test_condition_numbers_are_means_over_all_blocks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    place = six_classes(tmp_path / "imagenet1k")
    images = ("--data-root", f"folder={photo_folder(tmp_path / 'photos')}")

    (cells,) = reproduced(
        capsys, "graying_exponent", place, *images, *TINY, "probe.image_size=32",
        row="no token graying",
    ).values()  # fmt: skip

    last = {r.facet: r.value for r in recorded() if r.task == "conditioning" and r.layer == 1}
    assert len(cells) == 3
    assert cells[1:] == [f"{last[facet]:.2f}" for facet in ("before", "after")]


@pytest.mark.slow
def test_letters_and_days_come_from_the_log_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    copied = reproduced(capsys, "copying", *TINY_COPYING, row="Mamba 2, default")
    days = reproduced(capsys, "training_time", six_classes(tmp_path / "imagenet1k"), *TINY)

    rows = log_rows("runs/mimetic_copying_default")
    assert copied == {"Mamba 2, default": [f"{rows[-1]['letters_16']:.1f}"]}
    seconds = [
        4 / row["images_per_second"]
        for row in log_rows("runs/graying_imagenet_vit_b_dct", timed=True)
    ]
    assert days["ViT-B, DCT token graying"] == [f"{sum(seconds) / 86_400:.3g}"]
    assert {len(cells) for cells in days.values()} == {1}


@pytest.mark.slow
def test_points_lost_are_those_of_the_same_images(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    cells = reproduced(capsys, "one_skip", six_classes(tmp_path / "cifar10"), *TINY)

    top1 = {row: float(own[0]) for row, own in cells.items()}
    assert {row: float(own[1]) for row, own in cells.items()} == {
        row: pytest.approx(top1["both skips"] - value, abs=0.11) for row, value in top1.items()
    }
    assert cells["both skips"][1] == "0.0"


@pytest.mark.slow
def test_figure_4_is_of_the_first_images_of_the_validation_set(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    place = f"imagenet1k={photo_folder(tmp_path / 'photos')},coco_stuff={tmp_path / 'coco'}"
    for split, count in (("train2017", 2), ("val2017", 42)):
        (tmp_path / "coco/stuffthingmaps" / split).mkdir(parents=True)
        (tmp_path / "coco/images" / split).mkdir(parents=True)
        for number in range(count):
            name = f"coco/images/{split}/{number:012d}.jpg"
            Image.new("RGB", (40, 30), (number, 6 * number, 90)).save(tmp_path / name)

    reproduced(
        capsys, "figure4", "--data-root", place, *SMALL, *TINY, "probe.image_size=32",
        row="skip, adamw",
    )  # fmt: skip

    (record,) = recorded()
    assert (record.layer, record.split, record.num_images) == (1, "val2017", 40)
    shown = ResultStore(Path("results")).image_ids(record.dataset_fingerprint)
    assert shown == tuple(f"{number:012d}" for number in range(40))


@pytest.mark.slow
def test_neighbours_and_heads_of_the_last_block_stand_in_the_table_of_dino(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    six_classes(tmp_path / "imagenet")

    cells = reproduced(
        capsys, "dino/dino_imagenet", "--data-root", f"imagenet1k={tmp_path / 'imagenet'}", *SMALL,
        *TINY, "probe.image_size=32", row="100 epochs",
    )  # fmt: skip

    assert len(cells["100 epochs"]) == 2
    assert {(r.task, r.dataset, r.layer) for r in recorded()} == {
        ("knn", "imagenet1k", 1), ("classification", "imagenet1k", 1),
    }  # fmt: skip


@pytest.mark.slow
def test_a_printed_training_runs_on_several_processes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    place = six_classes(tmp_path / "mnist")
    line = ["reproduce", "mnist", "--row", "ViT", "objective.num_classes=null", place, *TINY[:-2]]
    line += ["data.image_size=32"]
    assert main([*line, "--print", "--gpus", "2"]) == 0
    (printed,) = capsys.readouterr().out.splitlines()

    scripts = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    subprocess.run(printed, shell=True, check=True, env=environment, capture_output=True)

    assert main([*line, "--table"]) == 0
    assert re.search(r"^ViT +97.2 \| \d", capsys.readouterr().out, re.MULTILINE)
