"""What a run measures of itself now and then, and that it is the same run without."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pretrain.checkpoints import ENCODER, LOG, load_state
from pretrain.crops.multi import MultiCrop
from pretrain.crops.single import SingleCrop
from pretrain.monitor import Monitor, class_ranks
from pretrain.objectives.dino import Dino, DinoLearner
from pretrain.objectives.supervised import Supervised
from pretrain.optimizers.recipes import AdamW
from pretrain.options import DataOptions, TrainOptions
from pretrain.train import Pretraining
from probes.knn import KNN
from ssl_bench.data.central_square import central_square
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.evaluation import ProbeContext
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import ViTConfig, load_encoder
from ssl_bench.results import ResultStore
from ssl_bench.system.progress import show_progress
from tests.support.runs import assert_goes_on_to_the_bit, log_rows

CPU = torch.device("cpu")
TIMED = ("images_per_second", "data_wait", "mfu")
MEASURES = ("knn_top1", "val_top1")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Thirteen training and ten validation pictures of three classes, hard to tell apart."""
    root = tmp_path_factory.mktemp("album")
    generator = np.random.default_rng(0)
    for split, count in (("train", 13), ("val", 10)):
        for number in range(count):
            folder = root / split / f"class{number % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(0, 256, (5, 6, 3)) // 2 + 30 * (number % 3)
            image = Image.fromarray(pixels.astype(np.uint8)).resize((24, 20))
            image.save(folder / f"{number}.png")
    return root


def plan_of(root, objective=None, monitor=None) -> Pretraining:
    return Pretraining(
        model=ViTConfig(
            image_size=16, patch_size=8, dim=24, depth=2, num_heads=2, drop_path=0.3
        ),
        objective=objective
        or Dino(out_dim=32, hidden_dim=16, bottleneck_dim=8, crops=MultiCrop(num_locals=2)),
        optimizer=AdamW(lr=0.05),
        data=DataOptions(root=str(root), labels=True),
        train=TrainOptions(batch_size=2, max_steps=8, num_workers=0, seed=3),
        monitor=monitor or Monitor(),
    )  # fmt: skip


SUPERVISED = Supervised(crops=SingleCrop(num_ops=1))
KNN_ONLY = Monitor(knn_epochs=1, neighbours=4, crop_share=1.0)
BOTH = replace(KNN_ONLY, accuracy_epochs=1)


def without(rows, names):
    return [{k: v for k, v in row.items() if k not in names} for row in rows]


@pytest.mark.parametrize(
    ("objective", "monitor"), [(None, KNN_ONLY), (SUPERVISED, BOTH)], ids=["dino", "supervised"]
)
def test_a_monitored_run_is_the_run_without_to_the_bit_and_says_what_it_found(
    root, tmp_path, capsys, objective, monitor
):
    state = torch.get_rng_state()
    plan_of(root, objective).run(tmp_path / "plain", device="cpu")
    capsys.readouterr()

    plan_of(root, objective, monitor).run(tmp_path / "seen", device="cpu")

    plain, seen = log_rows(tmp_path / "plain"), log_rows(tmp_path / "seen")
    assert without(seen, MEASURES) == plain
    # Six steps an epoch, and the last one.
    names = ["knn_top1", "val_top1"] if objective else ["knn_top1"]
    assert [r["step"] for r in seen if set(names) <= r.keys()] == [6, 8]
    assert [r["step"] for r in seen if set(MEASURES) & r.keys()] == [6, 8]
    assert (tmp_path / "plain" / ENCODER).read_bytes() == (tmp_path / "seen" / ENCODER).read_bytes()
    assert torch.equal(state, torch.get_rng_state())
    said = [line for line in capsys.readouterr().err.splitlines() if "knn_top1" in line]
    assert said[0].startswith("step 6/8  ")
    assert f"knn_top1 {seen[5]['knn_top1']:.1f} %" in said[0]


@pytest.mark.slow
def test_a_run_that_was_stopped_measures_what_an_uninterrupted_one_does(root, tmp_path):
    assert_goes_on_to_the_bit(plan_of(root, monitor=KNN_ONLY), tmp_path, parts=6, steps=6)


def test_the_monitor_finds_what_the_probe_finds_in_the_saved_encoder(root, tmp_path):
    monitor = replace(KNN_ONLY, neighbours=3, batch_size=4)
    path = plan_of(root, monitor=monitor).run(tmp_path, device="cpu")

    probe = KNN(neighbours=[3], crop_share=1.0)
    context = ProbeContext(
        encoder=load_encoder(str(path)), dataset=ClassFolders(root), layers=(1,), device=CPU,
        dtype=torch.float32, seed=0, artifacts=tmp_path, progress=show_progress,
    )  # fmt: skip
    (found,) = [score for score in probe.run(context) if score.metric == "top1_k3"]

    assert log_rows(tmp_path)[-1]["knn_top1"] == pytest.approx(found.value)


def test_validation_accuracy_is_that_of_the_saved_head_on_central_squares(root, tmp_path):
    monitor = Monitor(accuracy_epochs=5, crop_share=0.8)
    path = plan_of(root, SUPERVISED, monitor).run(tmp_path, device="cpu")

    state = load_state(tmp_path, CPU)[0]["learner"]
    extractor = FeatureExtractor(load_encoder(str(path)), layers=[1], facets=["cls_normed"])
    val = ClassFolders(root).val()
    right = 0
    for index in range(len(val)):
        pixels = central_square(val[index].image, 16, share=0.8)
        features = extractor(pixels[None].float() / 255)[1]["cls_normed"]
        logits = features @ state["student.head.weight"].T + state["student.head.bias"]
        right += int(logits.argmax() == val[index].label)
    assert log_rows(tmp_path)[-1]["val_top1"] == pytest.approx(100 * right / len(val))
    assert [row["step"] for row in log_rows(tmp_path) if "val_top1" in row] == [8]


def test_only_as_many_images_are_looked_at_as_one_says(root, tmp_path, monkeypatch):
    monitor = replace(KNN_ONLY, knn_epochs=9, train_images=5, val_images=3)
    looked_at = []

    def counted(image, size, *, share):
        looked_at.append(1)
        return central_square(image, size, share=share)

    monkeypatch.setattr("pretrain.monitor.central_square", counted)

    plan_of(root, monitor=monitor).run(tmp_path, device="cpu")

    assert len(looked_at) == 5 + 3


def test_an_encoder_that_diverged_measures_nothing(root, tmp_path, monkeypatch):
    loss = DinoLearner.loss

    def diverging(self, network, views, step):
        if step == 5:
            torch.nn.init.constant_(self.teacher.backbone.norm.bias, math.nan)
        return loss(self, network, views, step)

    monkeypatch.setattr(DinoLearner, "loss", diverging)
    plan = plan_of(root, monitor=KNN_ONLY)
    replace(plan, train=replace(plan.train, max_steps=6)).run(tmp_path, device="cpu")

    assert log_rows(tmp_path)[-1]["knn_top1"] is None


def test_a_broken_validation_image_is_named_and_the_steps_before_it_are_kept(root, tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for folder in sorted((root / split).iterdir()):
            (tmp_path / split / folder.name).symlink_to(folder)
    (tmp_path / "val" / "class0").unlink()
    (tmp_path / "val" / "class0").mkdir()
    (tmp_path / "val" / "class0" / "broken.png").write_bytes(b"\x89PNG")
    plan = plan_of(root, monitor=replace(KNN_ONLY, root=str(tmp_path)))

    with pytest.raises(DataError, match=r"broken\.png"):
        plan.run(tmp_path / "out", device="cpu")

    assert load_state(tmp_path / "out", CPU)[0]["step"] == len(log_rows(tmp_path / "out")) == 6


@pytest.mark.parametrize(
    ("monitor", "complaint"),
    [
        (Monitor(accuracy_epochs=1), "needs a head that names classes, objective=supervised"),
        (Monitor(knn_epochs=1, neighbours=14), "at most the 13 training images, got 14"),
        (Monitor(knn_epochs=1, train_images=5), "at most the 5 training images, got 20"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_training(root, tmp_path, monitor, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        plan_of(root, monitor=monitor).run(tmp_path, device="cpu")
    assert not (tmp_path / LOG).exists()


def test_a_head_for_other_classes_is_not_validated(root, tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for number in range(2):
            source = root / split / f"class{number}"
            (tmp_path / split / f"class{number}").symlink_to(source)
    monitor = Monitor(accuracy_epochs=1, root=str(tmp_path))

    with pytest.raises(ConfigurationError, match=r"the 3 classes of the run in monitor\.root"):
        plan_of(root, SUPERVISED, monitor).run(tmp_path / "out", device="cpu")


def test_options_without_meaning_and_a_missing_folder_are_refused(tmp_path):
    refused: list[tuple[dict[str, Any], str]] = [
        ({"knn_epochs": 0}, "monitor.knn_epochs expects a whole number"),
        ({"temperature": 0.0}, "monitor.temperature"),
        ({"crop_share": 0.0}, "monitor.crop_share"),
    ]
    for options, complaint in refused:
        with pytest.raises(ConfigurationError, match=complaint):
            Monitor(**options)
    plan = replace(plan_of(tmp_path, monitor=KNN_ONLY), data=DataOptions())
    with pytest.raises(ConfigurationError, match=r"monitor\.root=DIR is needed"):
        plan.run(tmp_path / "out", device="cpu")


def test_what_is_monitored_may_change_when_a_run_goes_on(root, tmp_path):
    plan = plan_of(root)
    replace(plan, train=replace(plan.train, max_minutes=0.0)).run(tmp_path, device="cpu")

    replace(plan, monitor=KNN_ONLY).run(tmp_path, resume=True, device="cpu")

    assert [row["step"] for row in log_rows(tmp_path) if "knn_top1" in row] == [6, 8]


def test_a_class_has_the_rank_of_those_that_are_likelier_and_the_first_of_equals_wins():
    logits = torch.tensor([[0.0, 3, 1, 2], [5, 5, 5, 5], [5, 5, 5, 5], [1, 0, 0, 9]])
    labels = torch.tensor([0, 0, 2, 3])

    ranks = class_ranks(logits, labels)

    assert ranks.tolist() == [3, 0, 2, 0]
    assert torch.equal(ranks == 0, logits.argmax(1) == labels)


def test_six_classes_have_a_top_5_in_log_and_records(tmp_path):
    generator = np.random.default_rng(0)
    for split, number in ((s, n) for s in ("train", "val") for n in range(12)):
        folder = tmp_path / "album" / split / f"class{number % 6}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    monitor = Monitor(accuracy_epochs=9, crop_share=1.0, results=str(tmp_path / "results"))

    plan_of(tmp_path / "album", SUPERVISED, monitor).run(tmp_path / "run", device="cpu")

    last, records = log_rows(tmp_path / "run")[-1], ResultStore(tmp_path / "results").records()
    assert {record.metric: record.value for record in records} == pytest.approx(
        {"top1": last["val_top1"], "top5": last["val_top5"]}
    )
    assert last["val_top1"] < last["val_top5"] < 100
