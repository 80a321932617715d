"""Test that every command in the documentation runs without an error."""

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

import pytest
from PIL import Image

from ssl_bench.cli.__main__ import main
from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import compose_config, has_key
from ssl_bench.data.layouts.toy import Painter
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import ConvMixerConfig, ViTConfig, build_encoder, build_vit, save_encoder
from tests.support.faults import (
    encoded,
    mask,
    paired_folders,
    photo_folder,
    picture,
    unchecked_types,
    voc,
)
from tests.support.page_commands import COMMANDS, ROOT, PageCommand

# These need the network, published weights or datasets, or training, or are templates.
# test_page_commands.py composes them, too.
NOT_RUN = (
    "ssl-bench data download", "hf-hub:", "--dataset hf:", "data check hf:", "torchhub:",
    "dinov2_vits14_reg4_pretrain.pth", "vit_s_focus.onnx", "{000..099}.tar", "ade20k", "coco20k",
    "ecssd", "spair71k", "davis2016", "davis2017", "pf_willow", "holidays", "frames:my_videos",
    "data check paired_folders", "data.root=...", "experiment=NAME", "probe.protocol=NAME",
    "pretrain ", "reproduce ", "data verify DIR",
)  # fmt: skip
SHOWN = [
    one
    for one in COMMANDS
    if one.suite
    and not one.is_name
    # test_extending.py runs the commands of the first page. The commands of the second page need
    # trained runs.
    and one.page not in ("docs/extending.md", "docs/papers.md")
    and "--help" not in one.suite
    and not any(part in one.text for part in NOT_RUN)
]
# A command that several pages show is run for the first of them.
RUN = list({one.suite: one for one in reversed(SHOWN)}.values())[::-1]
FIRST = [
    *("probe", "--out", "results", "dataset.num_train=4", "dataset.num_val=3"),
    *("--checkpoint", "runs/skip", "--checkpoint", "runs/skipless"),
]
# Tables over time need two epochs. Conditioning has so many metrics that one epoch is enough.
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
    paint = cache(Painter.paint_scene)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Painter, "paint_scene", lambda painter, index: paint(painter, index % 8))
        yield


@pytest.fixture(scope="module")
def prepared(few_scenes, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    create_inputs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        with unchecked_types():
            assert main(FIRST_OF_EPOCHS) == main(FIRST_CONDITIONING) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({one.page for one in RUN}))
def test_the_commands_of_a_page_run_in_order(page, prepared, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    # Hard links suffice, because commands replace files and never write into them.
    shutil.copytree(prepared, folder, copy_function=os.link)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))

    with unchecked_types():
        errors = [run_command(one, folder) for one in RUN if one.page == page]

    assert [error for error in errors if error] == []


def run_command(shown: PageCommand, folder: Path) -> str:
    words = shorten(shown.suite, folder)
    copy_records(words)
    # The streams are files, because a table may be bytes.
    with (
        Path("stderr").open("w") as stderr,
        Path("stdout").open("w") as stdout,
        redirect_stderr(stderr),
        redirect_stdout(stdout),
    ):
        code = main(words)
    return f"{words}: {code}: {Path('stderr').read_text()[-600:]}" if code else ""


def copy_records(words: list[str]) -> None:
    out = Path(words[words.index("--out") + 1] if "--out" in words else "results")
    if words[0] in ("table", "compare", "report") and not (out / "records").exists():
        committed = ROOT / out / "records.parquet"
        source = committed.parent if committed.is_file() else Path("results")
        shutil.copytree(source, out, dirs_exist_ok=True)


SIZES: Mapping[str, object] = {
    "probe.training.epochs": 1, "probe.image_size": 32, "probe.longer_side": 64,
    "probe.num_images": 2, "probe.panels": 2, "probe.num_points": 16, "probe.view_images": 2,
    "probe.pool.queries": 4, "probe.pool.epochs": 1, "dataset.num_train": 4, "dataset.num_val": 3,
}  # fmt: skip
# test_quickstart.py runs the demonstration encoders.
ENCODERS = {
    **{"FILE": "FILE.safetensors", "FILE_OR_URI": "FILE.safetensors", "runs/mixer": "mixer"},
    **{"demo:skip": "runs/skip", "demo:skipless": "runs/skipless"},
}
RUNS = {"RUN": "runs/skip", "OTHER": "runs/skipless"}
PUBLISHED = re.compile(r"timm:vit_small_patch16_224\.dino$")
LAYERS = {"11": "1", "0,5,-1": "0,-1", "3,7,11": "0,1", "2,5,8,11": "0,1"}


def shorten(words: Sequence[str], folder: Path) -> list[str]:
    """Change the arguments of a command so that it finishes quickly."""
    short = [re.sub(r"(^|=|,)/(?=data|photos|classes|shared)", rf"\1{folder}/", w) for w in words]
    names = ENCODERS | (RUNS if short[0] == "compare" else {})
    short = [PUBLISHED.sub("timm:test_vit", names.get(word, word)) for word in short]
    if "--layer" in short:
        layers = short.index("--layer") + 1
        short[layers] = LAYERS.get(short[layers], short[layers])
    short = [re.sub(r"^(corrupt=.*):1-5$", r"\1:5", word) for word in short]
    if "--pictures" in short:
        pictures = short.index("--pictures")
        short = [*short[:pictures], *short[pictures + 2 :]]
    if short[0] in ("probe", "sweep"):
        # test_sweep.py runs jobs in processes of their own.
        plan = ["--dry-run"] if "--jobs" in short else []
        return [*without_slurm(with_sizes(short)), *plan]
    if short[:2] == ["data", "check"] and "--subset" not in short and "DIR" not in short:
        return [*short, "--subset"]
    return short


def without_slurm(words: Sequence[str]) -> list[str]:
    if "--slurm" not in words:
        return list(words)
    dropped = {n + more for n, w in enumerate(words) for more in (0, 1) if w.startswith("--slurm-")}
    kept = [word for number, word in enumerate(words) if number not in dropped]
    return ["--print" if word == "--slurm" else word for word in kept]


def with_sizes(words: Sequence[str]) -> list[str]:
    flags = dict(itertools.pairwise(words))
    tasks = flags.get("--task", "all")
    names = choices("probe") if tasks == "all" else tasks.split(",")
    dataset = flags.get("--dataset", "toy").split(",")[0]
    given = tuple(word for word in words if word.startswith("probe."))
    configs = [compose((f"probe={name}", f"dataset={dataset}"), given) for name in names]
    # The objects of four scenes are fewer than 20 neighbours.
    knn = {"probe.neighbours": [1, 20], "dataset.num_train": 24} if names == ["knn"] else {}
    sizes = {
        key: value
        for key, value in {**SIZES, **knn}.items()
        if any(has_key(config, key) for config in configs)
    }
    kept = [word for word in words if word.partition("=")[0] not in sizes]
    return [*kept, *(f"{key}={value}" for key, value in sizes.items())]


@cache
def compose(choice: tuple[str, ...], given: tuple[str, ...]) -> dict[str, Any]:
    try:
        return compose_config("probing", [*choice, *given])
    except ConfigurationError:
        return compose_config("probing", choice)


ENCODER = ViTConfig(image_size=32, patch_size=8, dim=12, depth=2, num_heads=2)
MIXER = ConvMixerConfig(image_size=32, patch_size=8, dim=12, depth=2, kernel_size=3)
RUN_FOLDERS = ("runs/skip", "runs/skipless", "runs/skipless_soap", "runs/dct", "runs/vit", "RUN")


def create_inputs(folder: Path) -> None:
    for seed, run in enumerate(RUN_FOLDERS):
        for name, epoch in (("epoch0001", 1), ("epoch0002", 2), ("last", 3)):
            metadata = {"step": str(2 * epoch), "epoch": f"{epoch}.00"}
            model = build_vit(ENCODER, seed=10 * seed + epoch)
            save_encoder(folder / run / f"{name}.safetensors", model, metadata)
        rows = [{"step": step, "loss": 1.0 / step, "lr": 1e-3} for step in range(1, 7)]
        (folder / run / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, epoch in (("epoch0100", "100.00"), ("epoch0200", "200.00")):
        model = build_vit(ENCODER, seed=int(name[-3:]))
        save_encoder(folder / f"RUN/{name}.safetensors", model, {"step": "9", "epoch": epoch})
    save_encoder(folder / "mixer/last.safetensors", build_encoder(MIXER, seed=0), {})
    save_encoder(folder / "FILE.safetensors", build_vit(ENCODER, seed=99), {})
    for root in ("data", "part"):
        voc(folder / root)
    objects = encoded("PNG", Image.fromarray(mask() // 8 % 2))
    paired_folders(folder / "my_masks", {"train": "01", "val": "23"}, content=objects)
    for root, number in product(("data/imagenet", "photos"), range(4)):
        kind = folder / root / ("train", "val")[number % 2] / f"class{number // 2}"
        kind.mkdir(parents=True)
        for image in range(11):
            picture(1000 * number + image).save(kind / f"{image}.jpg", quality=95)
    for name in ("my_photos", "coco/val2017", "coco/first_40"):
        (folder / name).parent.mkdir(exist_ok=True)
        photo_folder(folder / name)
