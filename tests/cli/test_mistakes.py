"""Typing mistakes: one line with the nearest name, and nothing is computed or written."""

import argparse
import re
import shlex

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.cli.parser import build_parser
from ssl_bench.composition.choices import choices
from ssl_bench.models import ConvMixerConfig, build_encoder, save_encoder
from ssl_bench.results import ResultStore
from tests.support.faults import class_folders, fails

PCA = "probe --task pca --checkpoint encoder.safetensors --dataset folder --data-root photos"
(COMMANDS,) = (
    action.choices
    for action in build_parser()._actions
    if isinstance(action, argparse._SubParsersAction)
)
TYPOS = [
    ("trian", 2, "ssl-bench pretrain"),
    ("nothing --task pca", 2, "ssl-bench --help"),
    ("probe --tasks pca", 2, "--task"),
    ("probe --data_root x", 2, "--data-root"),
    ("probe --output x", 2, "--out"),
    ("probe --dryrun", 2, "--dry-run"),
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
    ("reproduce cutting_the_skip/tabel2", 2, "ssl-bench reproduce cutting_the_skip/table2"),
    ("reproduce table2 --row 'skp, adamw'", 2, "--row 'skip, adamw'"),
    ("reproduce table2 --data-root imagenet1=x", 2, "--data-root imagenet1k=FOLDER"),
]
MISSING_OR_CONFLICTING = [
    ("probe --checkpoint x", 2, "ssl-bench probe --help"),
    ("probe --task pca --data-root photos", 2, "--dataset folder --data-root FOLDER"),
    ("probe --task pca --dataset .", 2, "--dataset folder --data-root ."),
    (
        "probe --task pca --checkpoint facebook/dinov2-small",
        4,
        "--checkpoint hf-hub:facebook/dinov2-small",
    ),
    (f"{PCA.replace('probe', 'sweep', 1)} --jobs 0", 2, "--jobs 1"),
    ("pretrain --resume", 2, "--out RUN"),
    ("data download", 2, "ssl-bench data list"),
    ("data check voc2012", 2, "--data-root FOLDER"),
    ("data verify", 2, "ssl-bench data verify FOLDER"),
    ("table --best-layer oracle", 2, "--pivot"),
    ("keys probe", 2, "ssl-bench keys probe.classification"),
    ("reproduce --run", 2, "ssl-bench reproduce"),
    ("reproduce table2 --run", 2, "data.root=FOLDER"),
]


@pytest.mark.parametrize(("words", "code", "recommended"), [*TYPOS, *MISSING_OR_CONFLICTING])
def test_a_mistake_is_answered_in_one_line(place, capsys, words, code, recommended):
    assert main(shlex.split(words)) == code

    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert (out, line.partition(": ")[0]) == ("", "ssl-bench")
    assert recommended in re.findall(r"`(.*?)`", line)
    assert not list(place.rglob("*.json"))


@pytest.mark.parametrize(
    "words",
    [
        "probe --task pca --seed 3 seed=4",
        "pretrain --batch-size 3 train.batch_size=4",
        "table seed=1",
        "data check toy --data-root photos",
        "probe --task pca --limit 0",
        "probe --task pca --seed x",
        "completion ksh",
        "sweep --slurm --print",
        "--device cpu probe",
    ],
)
def test_options_that_exclude_each_other_or_have_no_effect_are_refused(place, capsys, words):
    fails(capsys, shlex.split(words), 2)


FLAGS_WITH_VALUES = [
    (name, action.option_strings[0])
    for name, command in COMMANDS.items()
    for action in command._actions
    if action.option_strings and action.nargs is None
]


@pytest.mark.parametrize(("command", "flag"), FLAGS_WITH_VALUES)
def test_a_value_of_two_hyphens_is_refused(place, capsys, command, flag):
    assert flag in fails(capsys, [command, f"{flag}=--"], 2)
    assert not (place / "results").exists()


def test_a_refused_probe_leaves_no_folder_behind(place, capsys):
    for words in ([], ["--checkpoint", "nowhere.pth"], ["--checkpoint", "demo:skip@9"]):
        fails(capsys, ["probe", "--task", "tokencut", "--layer", "11", *words], 4)
        assert not (place / "results").exists()


@pytest.fixture
def mixer(place) -> list[str]:
    """Words of a probe of an encoder without attention."""
    config = ConvMixerConfig(image_size=32, patch_size=8, dim=12, depth=2, kernel_size=3)
    save_encoder(place / "mixer.safetensors", build_encoder(config, seed=0), {})
    return ["probe", "--checkpoint", "mixer.safetensors", "--layer", "0", "--dataset"]


def test_a_plan_leaves_out_what_a_run_leaves_out_before_it_begins(place, capsys, mixer):
    for number in (1, 2, 3):
        (place / f"photos/{number}.jpg").unlink()
    words = [*mixer, "folder", "--data-root", "photos", "--task"]

    for more in (["--dry-run"], []):
        assert main([*words, "all", *more]) == 0
        said = capsys.readouterr().err
        (line,) = [one for one in said.splitlines() if "left out: conditioning on folder" in one]
        assert "`--task pca,correspondence`" in line
        assert "conditioning on folder all" not in said
        assert "folder has no class labels for classification and clustering and knn" in said
        assert "folder has no masks for retrieval and segmentation" in said

    for more in (["--dry-run"], []):
        assert main([*words, "conditioning", *more]) == 2
        assert "`--task pca,correspondence`" in capsys.readouterr().err


POST_NORM = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 8, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3))

    def forward(self, images):
        tokens = self.embed(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            tokens = block(tokens)
        return tokens
"""  # noqa: E501


def test_a_module_that_cannot_be_taken_apart_leaves_nothing_pending(place, capsys):
    (place / "odd.py").write_text(POST_NORM)
    words = ["probe", "--task", "conditioning", "--checkpoint", "odd.py:Model", "--dataset"]
    words += ["folder", "--data-root", "photos", "probe.num_images=1", "probe.image_size=32"]
    words += ["--layer", "1"]
    assert main(words) == 0
    assert "no number for attention_matrix" in capsys.readouterr().err

    assert main([*words, "--dry-run"]) == 0

    assert "15 finished, 0 pending" in capsys.readouterr().out


def test_all_goes_on_where_a_task_does_not_fit_and_an_asked_one_ends_the_command(
    place, capsys, mixer
):
    class_folders(place / "classes")
    words = [*mixer, "class_folders", "--data-root", "classes", "--limit", "2", "--task"]

    assert main([*words, "all"]) == 0
    said = capsys.readouterr().err
    assert main([*words, "knn"]) == 2
    assert "use `probe.facet=patch_mean`" in capsys.readouterr().err

    left = " ".join(line for line in said.splitlines() if "left out: " in line)
    assert "class_folders-limit2 has no masks for retrieval and segmentation" in left
    scored = {record.task for record in ResultStore(place / "results").records()}
    assert scored >= {"correspondence", "pca"}
    # Each of the others is named.
    assert [task for task in choices("probe") if task not in left and task not in scored] == []
