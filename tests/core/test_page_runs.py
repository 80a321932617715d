"""Every command in the documentation succeeds, with small images and encoders."""

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
from ssl_bench.data.layouts.toy import Painter, Scene
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

# test_page_commands.py composes these as well; they need the network, published weights or
# datasets, stand for any command, or train.
NOT_RUN = (
    *("ssl-bench data download", "hf-hub:", "--dataset hf:", "data check hf:"),
    *("torchhub:", "dinov2_vits14_reg4_pretrain.pth", "vit_s_focus.onnx", "{000..099}.tar"),
    *(
        "ade20k",
        "coco20k",
        "ecssd",
        "spair71k",
        "davis2016",
        "davis2017",
        "pf_willow",
        "holidays",
        "frames:my_videos",
    ),
    "data check paired_folders",
    *("data.root=...", "experiment=NAME", "probe.protocol=NAME"),
    *("pretrain ", "reproduce ", "data verify DIR"),
)
RUN = [
    one
    for one in COMMANDS
    if one.suite
    and not one.is_name
    # The commands of the second page read what its own runs have trained.
    and one.page not in ("docs/extending.md", "docs/papers.md")
    and "--help" not in one.suite
    and not any(part in one.text for part in NOT_RUN)
]
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
    """Replace the toy scenes by the first eight, repeated and drawn once."""
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
    """Return the folder in which the commands run, with the records of two encoders."""
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
    """Run a command; return its error messages, or "" on success."""
    words = cut_down(shown.suite, place)
    prepare(words)
    # Files, because a table may be bytes.
    with (
        Path("said").open("w") as said,
        Path("printed").open("w") as printed,
        redirect_stderr(said),
        redirect_stdout(printed),
    ):
        code = main(words)
    return f"{words}: {code}: {Path('said').read_text()[-600:]}" if code else ""


def prepare(words: list[str]) -> None:
    """Copy records to the output folder if it has none."""
    out = Path(words[words.index("--out") + 1] if "--out" in words else "results")
    if words[0] in ("table", "compare", "report") and not (out / "records").exists():
        committed = ROOT / out / "records.parquet"
        source = committed.parent if committed.is_file() else Path("results")
        shutil.copytree(source, out, dirs_exist_ok=True)


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
# test_quickstart.py runs the demonstration encoders.
HERE |= {"demo:skip": "runs/skip", "demo:skipless": "runs/skipless"}
RUNS = {"RUN": "runs/skip", "OTHER": "runs/skipless"}
PUBLISHED = re.compile(r"timm:vit_small_patch16_224\.dino$")
LAYERS = {"11": "2", "0,5,-1": "0,1,-1", "3,7,11": "0,1,2", "2,5,8,11": "0,1,2"}


def cut_down(words: Sequence[str], place: Path) -> list[str]:
    """Return the command with few steps, small sizes, and the inputs that `furnish` created."""
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
    if found[:2] == ["data", "check"] and "--subset" not in found and "DIR" not in found:
        return [*found, "--subset"]
    return found


def _without_slurm(words: Sequence[str]) -> list[str]:
    """Replace `--slurm` by `--print` and drop its flags, which have one value each."""
    if "--slurm" not in words:
        return list(words)
    dropped = {n + more for n, w in enumerate(words) for more in (0, 1) if w.startswith("--slurm-")}
    kept = [word for number, word in enumerate(words) if number not in dropped]
    return ["--print" if word == "--slurm" else word for word in kept]


def _probing(words: Sequence[str]) -> list[dict[str, Any]]:
    flags = dict(itertools.pairwise(words))
    tasks = flags.get("--task", "all")
    names = choices("probe") if tasks == "all" else tasks.split(",")
    dataset = flags.get("--dataset", "toy").split(",")[0]
    given = tuple(word for word in words if word.startswith("probe."))
    return [_composed((f"probe={name}", f"dataset={dataset}"), given) for name in names]


@cache
def _composed(choice: tuple[str, ...], given: tuple[str, ...]) -> dict[str, Any]:
    """Compose a probe with the command's settings, or without them if it rejects them."""
    try:
        return compose_config("probing", [*choice, *given])
    except ConfigurationError:
        return compose_config("probing", choice)


def _changes(
    words: Sequence[str], sizes: Mapping[str, object], configs: Sequence[dict[str, Any]]
) -> Iterator[tuple[str, object]]:
    """Yield the sizes whose keys exist; image sizes only if the command sets none."""
    probes = [config["probe"]["_target_"].split(".")[1] for config in configs if "probe" in config]
    takers = {
        *("segmentation", "retrieval", "clustering", "pca", "conditioning", "correspondence"),
        *("attention", "depth", "tracking"),
    }
    if takers.intersection(probes) and not any("image_size" in word for word in words):
        yield "probe.image_size", 32
    if probes == ["knn"]:
        yield "probe.neighbours", "[1,20]"
        # The objects of four scenes are fewer than 20 neighbours.
        sizes = {**sizes, "dataset.num_train": 24}
    for key, value in sizes.items():
        if any(has_key(config, key) for config in configs):
            yield key, value


ENCODER = ViTConfig(image_size=32, patch_size=8, dim=12, depth=3, num_heads=2)
MIXER = ConvMixerConfig(image_size=32, patch_size=8, dim=12, depth=2, kernel_size=3)
KEPT = ("runs/skip", "runs/skipless", "runs/skipless_soap", "runs/dct", "runs/vit", "RUN")


def furnish(place: Path) -> None:
    """Create the encoders and small datasets that the pages name."""
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
    for root in ("data", "part"):
        voc(place / root)
    objects = encoded("PNG", Image.fromarray(mask() // 8 % 2))
    paired_folders(place / "my_masks", {"train": "01", "val": "23"}, content=objects)
    for root, number in product(("data/imagenet", "photos"), range(4)):
        kind = place / root / ("train", "val")[number % 2] / f"class{number // 2}"
        kind.mkdir(parents=True)
        for image in range(11):
            picture(1000 * number + image).save(kind / f"{image}.jpg", quality=95)
    for name in ("my_photos", "coco/val2017", "coco/first_40"):
        (place / name).parent.mkdir(exist_ok=True)
        photo_folder(place / name)
