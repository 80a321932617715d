"""Test the error messages for commands with wrong arguments."""

import argparse
import re
import shlex
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.cli.parser import build_parser, command_parsers
from ssl_bench.composition.choices import choices
from ssl_bench.models import ConvMixerConfig, build_encoder, save_encoder
from ssl_bench.results import ResultStore
from tests.cli.test_hints import REQUIRED
from tests.support.faults import class_folders, expect_error

PCA = "probe --task pca --checkpoint encoder.safetensors --dataset folder --data-root photos"
FEATURES = "features --checkpoint encoder.safetensors --data-root photos --out features"
TYPOS = [
    ("trian", 2, "ssl-bench pretrain"),
    ("nothing --task pca", 2, "ssl-bench --help"),
    ("probe --data_root x", 2, "--data-root"),
    ("pretrain --epochs 3", 2, "ssl-bench keys"),
    ("report photos", 2, "ssl-bench report --help"),
    ("probe --task tokencutt", 2, "--task tokencut"),
    ("probe --task pca --dataset vocc2012", 2, "--dataset voc2012"),
    ("probe --task pca --on-bad-image skp", 2, "--on-bad-image skip"),
    ("probe --task pca --checkpoint encoder.safetensor", 4, "--checkpoint encoder.safetensors"),
    ("probe --task segmentation probe.protocol=fastt", 2, "probe.protocol=fast"),
    ("probe --task pca --dataset toy corrupt=fogg:3", 2, "corrupt=fog:3"),
    ("pretrain model=vit_tiny_skp", 2, "model=vit_tiny_skip"),
    ("pretrain train.epoch=3", 2, "train.epochs=VALUE"),
    ("data list vocc2012", 2, "ssl-bench data list voc2012"),
    ("keys probe.tokencat", 2, "ssl-bench keys probe.tokencut"),
    ("keys tokencut", 2, "ssl-bench keys probe.tokencut"),
    ("keys trian", 2, "ssl-bench keys train"),
    ("reproduce cutting_the_skip/tabel2", 2, "ssl-bench reproduce cutting_the_skip/table2"),
    ("reproduce table2 --row 'skp, adamw'", 2, "--row 'skip, adamw'"),
    ("reproduce table2 --data-root imagenet1=x", 2, "--data-root imagenet1k=FOLDER"),
    (f"{FEATURES} --split vla", 2, "--split val"),
    (f"{FEATURES} --dtype float61", 2, "--dtype float16"),
]
MISSING_OR_CONFLICTING = [
    ("probe --checkpoint x", 2, "ssl-bench probe --help"),
    ("probe --task pca --dataset folder --data-root photos", 4, "--checkpoint demo:skip"),
    ("probe --task pca --data-root photos", 2, "--dataset folder --data-root FOLDER"),
    ("probe --task pca --dataset .", 2, "--dataset folder --data-root ."),
    ("probe --task pca --checkpoint org/vit", 4, "--checkpoint hf-hub:org/vit"),
    (f"{PCA.replace('probe', 'sweep', 1)} --jobs 0", 2, "--jobs 1"),
    ("pretrain --resume", 2, "--out RUN"),
    ("data download", 2, "ssl-bench data list"),
    ("data check", 2, "ssl-bench data list"),
    ("data check voc2012", 2, "--data-root FOLDER"),
    ("data download voc2012", 2, "--data-root FOLDER"),
    ("data verify", 2, "ssl-bench data verify FOLDER"),
    ("table --best-layer oracle", 2, "--pivot"),
    ("table --best-layer oracle --over-epochs", 2, "--pivot"),
    ("table --pivot --as a=b", 2, "--paper TABLE"),
    ("keys probe", 2, "ssl-bench keys probe.attention"),
    ("reproduce --run", 2, "ssl-bench reproduce"),
    ("reproduce --table", 2, "ssl-bench reproduce"),
    ("reproduce cutting_the_skip train.epochs=3", 2, "ssl-bench reproduce"),
    ("pretrain --extend", 2, "--out RUN"),
    ("reproduce table2 --run", 2, "data.root=FOLDER"),
    ("reproduce table2 --run --data-root voc2012=photos", 2, "data.root=FOLDER"),
    ("probe --task tokencut probe.neighbours=[1]", 2, "--task knn,retrieval,tracking"),
    ("probe --task tokencut probe.image_size=32", 2, "probe.longer_side=VALUE"),
    ("probe --task knn,pca --dataset folder --data-root photos", 2, "--dataset DATASET"),
    ("probe --task knn --dataset folder --data-root photos", 3, "--dataset DATASET"),
    # Options that exclude each other or have no effect: nothing is recommended.
    ("probe --task pca --seed 3 seed=4", 2, ""),
    ("pretrain --batch-size 3 train.batch_size=4", 2, ""),
    ("table seed=1", 2, ""),
    ("data list toy a=1", 2, ""),
    ("data verify photos a=1", 2, ""),
    ("data check toy --data-root photos", 2, ""),
    ("data check folder:photos --data-root photos", 2, ""),
    ("probe --task pca --limit 0", 2, ""),
    ("completion ksh", 2, ""),
    ("sweep --slurm --print", 2, ""),
    ("reproduce table2 --print --table", 2, ""),
    ("reproduce table2 --dataset voc2007", 2, "--dataset voc2012"),
    (f"{FEATURES} --image-size 33", 2, ""),
    ("--device cpu probe", 2, ""),
]


@pytest.mark.parametrize(("words", "code", "recommended"), [*TYPOS, *MISSING_OR_CONFLICTING])
def test_the_error_for_a_mistake_is_one_line(workdir, capsys, words, code, recommended):
    files = set(workdir.iterdir())

    line = expect_error(capsys, shlex.split(words), code)

    assert not recommended or recommended in re.findall(r"`(.*?)`", line)
    assert set(workdir.iterdir()) == files


def test_no_flag_takes_two_hyphens_as_its_value(workdir, capsys):
    (commands,) = (
        action.choices
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    for name, command in commands.items():
        for action in command._actions:
            if action.option_strings and action.nargs is None:
                flag = action.option_strings[0]
                assert flag in expect_error(capsys, [name, f"{flag}=--"], 2)


NUMBERS = [
    *("probe --pictures", "probe --limit", "probe --seed", "probe --batch-size"),
    *("features --image-size", "features --limit", "features --batch-size"),
    *("sweep --jobs", "sweep --slurm-minutes", "sweep --slurm-cpus", "sweep --seed"),
    *("pretrain --seed", "pretrain --limit", "pretrain --batch-size"),
    *("reproduce --gpus", "data shrink --side"),
]


@pytest.mark.parametrize("words", NUMBERS)
def test_a_flag_that_expects_a_number_refuses_a_text(workdir, capsys, words):
    flag, required = words.split()[-1], ["--task", "pca"] if words.startswith("probe") else []

    line = expect_error(capsys, [*words.split(), "1e3", *required], 2)

    assert f"argument {flag}: " in line
    assert re.findall(r"`(.*?)`", line) == [f"ssl-bench {words.split()[0]} --help"]


QUICK = REQUIRED | {"sweep": ("--task", "pca")}


@pytest.fixture
def parsed(monkeypatch) -> list[Any]:
    """Record the inputs of each command instead of running the command."""
    started: list[Any] = []
    command = SimpleNamespace(command=lambda *inputs: started.append(inputs) or 0)
    monkeypatch.setattr("ssl_bench.cli.parser.import_module", lambda _: command)
    return started


def test_a_flag_sets_the_key_that_its_help_names(parsed):
    keys = set[str]()
    for name, command in command_parsers(build_parser()).items():
        for action in command._actions:
            for key in re.findall(r"short for ([\w.]+)", action.help or ""):
                flag, value = action.option_strings[0], "0" if action.type is int else "skip"
                assert main([name, *QUICK.get(name, ()), flag, value]) == 0
                inputs = parsed[-1][1]
                assert f"{key}={value}" in getattr(inputs, "overrides", inputs), (name, flag)
                keys.add(key)
    assert {"seed", "train.seed", "data.limit", "probe.panels", "train.batch_size"} < keys


def test_a_tilde_in_a_folder_or_file_stands_for_the_home_folder(parsed):
    for name, command in command_parsers(build_parser()).items():
        for action in command._actions:
            if action.metavar in ("DIR", "FILE") and action.dest != "data_root":
                assert main([name, *QUICK.get(name, ()), action.option_strings[0], "~/x"]) == 0
                assert getattr(parsed[-1][0], action.dest) == str(Path.home() / "x"), action


def test_every_command_has_a_help_and_a_debug_flag():
    parser = build_parser()
    commands = command_parsers(parser)
    assert {"probe", "table", "report", "data"} < set(commands)
    for name, command in commands.items():
        assert not parser.parse_args([name, *REQUIRED.get(name, ())]).debug
        assert parser.parse_args([name, *REQUIRED.get(name, ()), "--debug"]).debug
        text = command.format_help()
        assert "{}" not in text
        assert ("KEY=VALUE (e.g. " in text) == (name in ("probe", "sweep", "pretrain"))
        for action in command._actions:
            if action.default is not None and (
                stated := re.findall(r"default: (\S+?)\)", action.help or "")
            ):
                assert stated == [str(action.default)], action.option_strings
    assert "probe.tau=0.3 or probe.neighbours=[10,20]" in commands["sweep"].format_help()


def test_flags_keep_all_values_that_their_help_allows():
    parser, repeated = build_parser(), set()
    for name, command in command_parsers(parser).items():
        for action in command._actions:
            if "May be repeated" in (action.help or ""):
                words = [action.option_strings[0], *("ab" if action.nargs == 2 else "a")]
                options = parser.parse_args([name, *REQUIRED.get(name, ()), *words, *words])
                assert len(getattr(options, action.dest)) == 2, words
                repeated.add(words[0])
    assert repeated == {"--checkpoint", "--row", "--as", "--pair"}
    assert parser.parse_args(["table", "--over-steps", "a", "b"]).over_steps == ["a", "b"]
    assert parser.parse_args(["report", "--runs", "a", "b"]).run_folders == ["a", "b"]


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])

    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ssl-bench {version('ssl-bench')}\n"


@pytest.fixture
def mixer(workdir) -> list[str]:
    config = ConvMixerConfig(image_size=32, patch_size=8, dim=12, depth=2, kernel_size=3)
    save_encoder(workdir / "mixer.safetensors", build_encoder(config, seed=0), {})
    return ["probe", "--checkpoint", "mixer.safetensors", "--layer", "0", "--dataset"]


@pytest.mark.slow
def test_a_plan_and_a_run_skip_the_same_tasks(workdir, capsys, mixer):
    for number in (1, 2, 3):
        (workdir / f"photos/{number}.jpg").unlink()
    words = [*mixer, "folder", "--data-root", "photos", "--task"]

    for more in (["--dry-run"], []):
        assert main([*words, "all", *more]) == 0
        said = capsys.readouterr().err
        (line,) = [one for one in said.splitlines() if "left out: conditioning on folder" in one]
        assert "`--task pca,correspondence`" in line
        assert "folder has no class labels for classification and clustering and knn" in said
        assert "folder has no masks for retrieval and segmentation" in said
        assert "`--task pca,correspondence`" in expect_error(
            capsys, [*words, "conditioning", *more], 2
        )


POST_NORM = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 8, 8)
        layers = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)]
        self.blocks = nn.ModuleList(layers)

    def forward(self, images):
        tokens = self.embed(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            tokens = block(tokens)
        return tokens
"""


def test_missing_numbers_of_a_post_norm_module_are_not_pending(workdir, capsys):
    (workdir / "odd.py").write_text(POST_NORM)
    words = ["probe", "--task", "conditioning", "--checkpoint", "odd.py:Model", "--dataset"]
    words += ["folder", "--data-root", "photos", "probe.num_images=1", "probe.image_size=32"]
    words += ["--layer", "1"]
    assert main(words) == 0
    assert "no score for attention_matrix" in capsys.readouterr().err

    assert main([*words, "--dry-run"]) == 0

    assert "15 finished, 0 pending" in capsys.readouterr().out


@pytest.mark.slow
def test_task_all_reports_each_task_that_it_skips(workdir, capsys, mixer):
    class_folders(workdir / "classes")
    words = [*mixer, "class_folders", "--data-root", "classes", "--limit", "2", "--task"]

    assert main([*words, "all"]) == 0
    said = capsys.readouterr().err
    assert "`probe.facet=patch_mean`" in expect_error(capsys, [*words, "knn"], 2)
    assert "unknown task 'all'" in expect_error(capsys, [*words, "knn,all"], 2)
    two = [word.replace("class_folders", "toy,all") for word in words]
    assert "unknown dataset 'all'" in expect_error(capsys, [*two, "pca"], 2)

    left = " ".join(line for line in said.splitlines() if "left out: " in line)
    assert "class_folders-limit2 has no masks for retrieval and segmentation" in left
    scored = {record.task for record in ResultStore(workdir / "results").records()}
    assert scored >= {"correspondence", "pca"}
    assert [task for task in choices("probe") if task not in left and task not in scored] == []
