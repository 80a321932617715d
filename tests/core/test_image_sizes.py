"""Test which image size a probe uses."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import ssl_bench
from probes.pca import PCA
from probes.retrieval import Retrieval
from ssl_bench.cli.__main__ import main
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import adapt_image_size
from ssl_bench.features import Resize
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model
from tests.cli.test_sweep import planned
from tests.support import own_module
from tests.support.faults import encoder_file, expect_error, records

FILE = str(Path(__file__).parents[1] / "support/own_module.py")
TOY = ["--dataset", "toy", "--layer", "-1", "dataset.num_train=2", "dataset.num_val=2"]
SQUARES = {"segmentation": 504, "retrieval": 504, "clustering": 504, "conditioning": 216}
QUICK = ["probe.training.epochs=1", "probe.memory_patches=60", "probe.panels=2"]
QUICK += ["probe.fit_patches=60", "probe.num_restarts=1", "probe.panels=0", "probe.holdout=0.0"]


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    # The image size of no preset is a multiple of the patch size, 72 pixels.
    monkeypatch.chdir(tmp_path)
    encoder_file(tmp_path / "a.safetensors", config=ViTConfig(144, 72, 12, 2, 2))
    return tmp_path


def probe_words(task: str, *more: str, checkpoint: str = "a.safetensors") -> list[str]:
    return ["probe", "--task", task, "--checkpoint", checkpoint, *TOY, *more]


def planned_jobs(capsys, words: list[str]) -> list[dict]:
    return planned(capsys, *words[1:])["jobs"]


@pytest.mark.slow
def test_sizes_of_presets_become_multiples_of_the_patch(workdir, capsys):
    words = probe_words(",".join(SQUARES), *QUICK)
    assert all(job["pending"] for job in planned_jobs(capsys, words))

    assert main(words) == 0

    assert capsys.readouterr().err.count(" uses image_size=504 to fit") == 3
    assert {r.task: r.settings["image_size"] for r in records()} == SQUARES
    assert all("image_size" not in record.changed for record in records())
    assert not any(job["pending"] for job in planned_jobs(capsys, words))


def test_the_nearest_multiple_of_the_patch_is_used():
    encoder = encoder_from_model(build_vit(ViTConfig(28, 14, 12, 2, 2), seed=0), name="patch 14")

    assert adapt_image_size(Retrieval(image_size=512), encoder, ()).image_size == 37 * 14


@pytest.mark.parametrize(
    ("task", "more"),
    [
        ("pca,retrieval", ["probe.image_size=100"]),
        # The size fits the second encoder, but not the first one.
        ("pca,conditioning", ["probe.image_size=32", "--checkpoint", "b.safetensors"]),
    ],
)
def test_sizes_of_the_user_that_do_not_fit_are_refused(workdir, capsys, task, more):
    encoder_file(workdir / "b.safetensors")

    for words in (probe_words(task, *more), ["sweep", *probe_words(task, *more)[1:], "--dry-run"]):
        sizes = "`probe.image_size=72` or `probe.image_size=144`"
        assert sizes in expect_error(capsys, words, 2)
    assert not list(Path("results").rglob("*.json"))


def test_maps_have_the_encoder_size_but_at_least_224_pixels(workdir, capsys):
    encoder_file(workdir / "b.safetensors", config=ViTConfig(288, 72, 12, 2, 2))
    for name in ("a", "b"):
        assert main(probe_words("pca", "probe.panels=1", checkpoint=f"{name}.safetensors")) == 0

    assert {r.model: r.settings["image_size"] for r in records()} == {"a": 224, "b": 288}
    assert all(list(record.changed) == ["panels"] for record in records())
    assert not any("squash" in record.settings for record in records())
    jobs = planned_jobs(capsys, probe_words("pca", "probe.panels=1", checkpoint="b.safetensors"))
    assert [job["pending"] for job in jobs] == [0]


def test_an_encoder_of_one_size_is_probed_at_that_size(workdir, capsys):
    tasks = "tokencut,discovery,pca,retrieval"
    words = probe_words(tasks, *QUICK[1:3], checkpoint=f"{FILE}:own")

    assert main(words) == 0

    assert capsys.readouterr().err.count(" uses facet=token, squash=32 to fit") == 2
    found = {r.task: r for r in records()}
    assert set(found) == set(tasks.split(","))
    assert [found[t].settings["squash"] for t in ("tokencut", "discovery", "pca")] == [32] * 3
    assert [found[t].settings["image_size"] for t in ("retrieval", "pca")] == [32, 32]
    # The reference sees images at their own size.
    assert found["tokencut"].protocol_label == "reference, squash=32"
    jobs = planned_jobs(capsys, words)
    assert not any(job["pending"] for job in jobs if job["task"] != "discovery")


@pytest.mark.parametrize(
    ("task", "settings"),
    [("geometry", {"image_size": 48}), ("tokencut", {"longer_side": 48}), ("pca", {"squash": 48})],
)
def test_another_size_than_the_only_one_is_refused(workdir, task, settings):
    with pytest.raises(ConfigurationError, match="32 x 32"):
        ssl_bench.probe(own_module.own(), task=task, out="results", **settings)
    assert not list(Path("results").rglob("*.json"))


@pytest.mark.parametrize(
    ("resize", "image", "patch_size", "expected"),
    [
        (Resize(225, round_to_patch=True), (100, 150), 16, (224, 224)),
        (Resize(None, keep_aspect_ratio=True), (100, 150), 16, (100, 150)),
        (Resize(96, keep_aspect_ratio=True, round_to_patch=True), (100, 150), 8, (64, 96)),
        (Resize(60, keep_aspect_ratio=True), (100, 150), 8, (40, 60)),
        (Resize(300, keep_aspect_ratio=True, max_side=90), (100, 150), 8, (200, 300)),
        (Resize(None, keep_aspect_ratio=True, max_side=90), (100, 150), 8, (60, 90)),
        (Resize(None, keep_aspect_ratio=True, max_side=90), (60, 40), 8, (60, 40)),
        (Resize(10, keep_aspect_ratio=True), (1, 900), 8, (1, 10)),
        (Resize(16, keep_aspect_ratio=True, round_to_patch=True), (10, 900), 16, (16, 16)),
    ],
)
def test_images_are_resized_to_the_expected_height_and_width(resize, image, patch_size, expected):
    assert resize.output_size(*image, patch_size) == expected
    # Squares without a size have the shorter native side.
    assert [Resize(None).square_side(size) for size in ((224, 240), (240, 224))] == [224, 224]
    assert Resize(100, round_to_patch=True).square_side((224, 240), 14) == 98


def test_records_state_the_size_that_an_encoder_was_given(workdir):
    tasks = "geometry,correspondence"
    few = ["probe.views=2", "probe.num_points=4", "probe.panels=0"]

    assert main(probe_words(tasks, *few, checkpoint=f"{FILE}:own")) == 0

    assert {(r.task, r.settings["image_size"], r.details["image_size"]) for r in records()} == {
        ("geometry", None, 32),
        ("correspondence", None, 32),
    }


def test_boxes_on_the_padding_of_a_thumbnail_are_no_objects(workdir, capsys):
    pixels = np.full((30, 40, 3), 255, np.uint8)
    # The third row of patches is 14 pixels high, but the image has only two of its rows.
    pixels[28:] = 0
    Path("thumbs").mkdir()
    Image.fromarray(pixels).save("thumbs/small.png")
    words = ["probe", "--task", "tokencut", "--dataset", "folder", "--data-root", "thumbs"]
    words += ["--checkpoint", "colours:14", "--layer", "0", "--device", "cpu", "probe.facet=token"]

    assert main([*words, "--out", "results", "probe.protocol=adaptive"]) == 0

    assert "small.png lies in the padding" in capsys.readouterr().err
    assert [record.value for record in records()] == [100.0]


def test_squash_does_not_change_the_default_image_size():
    encoder = encoder_from_model(build_vit(ViTConfig(144, 72, 12, 2, 2), seed=0), name="a")

    fitted = adapt_image_size(PCA(squash=144), encoder, {"squash"})

    assert fitted.image_size == 224
    assert fitted.figure_folder == "image"
