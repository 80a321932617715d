"""What people mistype, and the line that tells them how it is done."""

import argparse
import shlex

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.cli.parser import build_parser
from ssl_bench.composition.choices import choices
from ssl_bench.models import ConvMixerConfig, build_encoder, save_encoder
from ssl_bench.results import ResultStore
from tests.support.faults import class_folders, fails

PCA = "probe --task pca --checkpoint encoder.safetensors --dataset folder --data-root photos"
SWEEP = PCA.replace("probe", "sweep", 1)
UNKNOWN = "probe --task pca --checkpoint "
(COMMANDS,) = (
    action.choices
    for action in build_parser()._actions
    if isinstance(action, argparse._SubParsersAction)
)
MISTAKES = [
    ("trian", "`ssl-bench pretrain`"),
    ("nothing --task pca", "commands: probe, features, sweep"),
    ("probe --nothing 0.3", "`ssl-bench keys`"),
    (f"{PCA} --facet token", "`probe.facet=VALUE`"),
    (f"{SWEEP} --image-size=64", "`probe.image_size=VALUE`"),
    ("probe --task segmentation --epochs 3", "`probe.training.epochs=VALUE`"),
    ("pretrain --epochs 3", "`train.epochs=VALUE`"),
    ("features --epochs 3 --out x", "`ssl-bench keys`"),
    ("probe --checkpoint x", "required: --task"),
    ("pretain", "`ssl-bench pretrain`"),
    ("--device cpu probe", "the command comes first"),
    ("probe --tasks pca", "`--task`"),
    ("probe --layers 3", "`--layer`"),
    ("probe --data_root x", "`--data-root`"),
    ("probe --task pca --data x", "could match --dataset, --data-root"),
    ("probe --output x", "`--out`"),
    ("probe --task pca --seed x", "invalid int value"),
    ("probe --dryrun", "`--dry-run`"),
    ("keys tokencut", "`ssl-bench keys probe.tokencut`"),
    ("pretrain --batch-size 1024", "`train.batch_size=null`"),
    ("probe --task pca --data-root photos", "`--dataset folder --data-root FOLDER`"),
    ("probe --task pca --data-root voc2012=a,b", "got 'voc2012=a,b'"),
    ("data check toy --data-root photos", "takes no --data-root"),
    ("data download cityscapes --data-root x", "register at https://www.cityscapes"),
    ("data download paired_folders --data-root x", "classes.txt has a name a line"),
    ("data download voc2012", "`--data-root FOLDER`"),
    ("data download", "name a dataset: "),
    ("data check ade20k", "`--data-root FOLDER`"),
    ("data verify", "data verify needs the folder"),
    ("data fetch", "invalid choice: 'fetch'"),
    ("data list voc2012 dataset.year=2007", "data list` takes no 'dataset.year=2007'"),
    ("data check folder --data-root x dataset.x=1", "unknown key 'dataset.x'"),
    ("probe --task segmentation --batch-size 3", "probe.training.batch_size=3"),
    ("pretrain model=vit_smal_skip", "vit_small_skip"),
    ("pretrain train.epoch=3", "train.epochs"),
    ("pretrain train.epochs=-3", "train.epochs expects a whole number"),
    ("pretrain --data-root absent", "absent is not a folder"),
    (f"{PCA} probe.epochs=3", "unknown key 'probe.epochs'"),
    ("probe --task segmentation probe.epochs=3", "probe.training.epochs"),
    ("probe --task segmentation probe.lr=3", "unknown key"),
    ("probe --task pca --checkpoint facebook/dinov2-small", "hf-hub:facebook/dinov2-small"),
    ("probe --task pca --checkpoint dino_vits16", "torchhub:facebookresearch/dino:dino_vits16"),
    ("probe --task pca --checkpoint vit_small_patch16_224", "timm:vit_small_patch16_224.TAG`"),
    ("probe --task pca --checkpoint vit_small_patch16_224.dino", "vit_small_patch16_224.dino`"),
    ("probe --task pca --checkpoint nowhere.pth", "give a run folder"),
    ("probe --task pca --layer 11", "no checkpoint below runs/"),
    (f"{PCA} --layer 11", "layers must lie in 0..1"),
    ("probe --task tokencut,knn --dataset toy", "toy has no class labels for knn"),
    ("probe --task pca --checkpoint encoder.safetensor", "encoder.safetensors`"),
    ("report photos", "unknown argument 'photos', which is a folder; use `--out photos`"),
    ("table --task pca", "no records"),
    ("table --format xml", "unknown format 'xml'"),
    ("table seed=1", "takes no 'seed=1'"),
    ("table --best-layer oracle", "`--pivot` or `--paper TABLE`"),
    ("table --pivot --best-layer best", "unknown --best-layer 'best'"),
    ("table --pivot --paper table2", "got --pivot and --paper"),
    ("table --as 'skip, soap=skip'", "`--paper TABLE`"),
    ("pretrain --resume", "`--out RUN`"),
    ("probe --task pca --seed 3 seed=4", "leave it or seed=4 out"),
    ("pretrain --batch-size 3 train.batch_size=4", "leave it or train.batch_size=4 out"),
    ("probe --task pca --limit 0", "data.limit expects a whole number in [1, "),
    ("probe --task pca --dataset voc2012 --data-root absent", "absent"),
    ("probe --task tokencut --dataset ade20k", "ade20k has no boxes"),
    (f"{PCA} --checkpoint 'oth*'", "no checkpoint matches 'oth*'"),
    (f"{SWEEP} --jobs 0", "`--jobs 1`"),
    (f"{SWEEP} --slurm-gpus 2", "--slurm-gpus"),
    (f"{SWEEP} --slurm --print", "not allowed with"),
    *((f"{SWEEP} --device gpu {way}", "`--device cpu`")
      for way in ("--dry-run", "--print", "--slurm")),
    ("completion ksh", "choose from"),
    ("keys probe", "name one: probe.classification, "),
    ("keys trian", "`ssl-bench keys train`"),
    ("keys experiment.mnits", "use `ssl-bench keys experiment."),
    ("keys probe.tokencat", "`ssl-bench keys probe.tokencut`"),
    ("keys probe.knn probe.nothing=1", "unknown key 'probe.nothing'"),
    ("keys train.epoch", "`ssl-bench keys train.epochs`"),
    ("reproduce cutting_the_skip/tabel2", "`ssl-bench reproduce cutting_the_skip/table2`"),
    ("reproduce 'nothing like it'", "valid: always_skip_attention"),
    ("reproduce cutting_the_skip --run", "expected one PAPER/TABLE, got cutting_the_skip"),
    ("reproduce --run", "expected one PAPER/TABLE, got none"),
    ("reproduce table2 --row 'skp, adamw'", "`--row 'skip, adamw'`"),
    ("reproduce table2 --dataset voc", "unknown dataset 'voc'"),
    ("probe --task pca --dataset .", "`--dataset folder --data-root .`"),
    ("data check .", "--data-root .`"),
    ("reproduce table2 --data-root /data", "`--data-root DATASET=FOLDER`"),
    ("reproduce table2 --data-root imagenet=/data", "`--data-root imagenet1k=FOLDER`"),
    ("reproduce table2 --run", "`data.root=FOLDER` or `--data-root imagenet1k=FOLDER`"),
    ("reproduce table2 --run --print", "not allowed with argument"),
]  # fmt: skip


# 2 where a word of the command is wrong, 3 where data or records are missing, 4 a checkpoint.
CODES = {
    **{words: 4 for words, _ in MISTAKES if words.startswith(UNKNOWN) and PCA not in words},
    "probe --task pca --layer 11": 4,
    f"{PCA} --checkpoint 'oth*'": 4,
    "table --task pca": 3,
    "pretrain --data-root absent": 3,
    "probe --task pca --dataset voc2012 --data-root absent": 3,
    "probe --task tokencut --dataset ade20k": 3,
}


@pytest.mark.parametrize(("words", "mend"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_typical_mistake_gets_one_line_with_its_mend(place, capsys, words, mend):
    assert main(shlex.split(words)) == CODES.get(words, 2)

    out, err = capsys.readouterr()
    *before, line = err.splitlines()
    assert not before or not words.startswith("pretrain")
    assert (out, line.partition(": ")[0]) == ("", "ssl-bench")
    assert mend in line
    assert "[" not in line.partition(mend)[0], "no Python lists"
    assert not list(place.rglob("*.json"))


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
        assert "conditioning expects blocks of attention" in capsys.readouterr().err


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
    assert scored == {"correspondence", "pca"}
    # Each of the others is named.
    assert [task for task in choices("probe") if task not in left and task not in scored] == []
