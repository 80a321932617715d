"""Test the validation scores that are measured during training."""

import json
import math
import re
import shutil
import time
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pretrain.checkpoints import ENCODER, LOG
from pretrain.crops.single import SingleCrop
from pretrain.monitor import Evaluator, Monitor, describe_recipe, rank_true_classes
from pretrain.objectives.dino import DinoLearner
from pretrain.objectives.objective import Objective
from pretrain.objectives.supervised import Supervised
from pretrain.optimizers.recipes import AdamW
from pretrain.options import DataOptions
from pretrain.plan import Pretraining
from pretrain.schedules import Timeline
from probes.knn import KNN
from ssl_bench.cli.__main__ import main
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.evaluation import ProbeContext
from ssl_bench.features import FeatureExtractor, central_square
from ssl_bench.models import load_encoder
from ssl_bench.results import ResultStore
from tests.pretrain.plans import (
    SMALL_DINO,
    TINY,
    album,
    plan_of,
    state_of,
    stopped_after_a_step,
)
from tests.support.runs import log_rows

MEASURES = ("knn_top1", "val_loss", "val_top1")
DROPPING = replace(TINY, drop_path=0.3)
SUPERVISED = Supervised(crops=SingleCrop(num_ops=1))
KNN_ONLY = Monitor(knn_epochs=1, neighbours=4, crop_share=1.0)
BOTH = replace(KNN_ONLY, accuracy_epochs=1)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return save_classes(tmp_path_factory.mktemp("album"), 13, 10, num_classes=3)


def save_classes(root, num_train, num_val, *, num_classes, noun="class"):
    folders = [f"{noun}{number}" for number in range(num_classes)]
    album(root / "train", num_train, folders=folders)
    album(root / "val", num_val, folders=folders, seed=1)
    return root


def monitored_plan(root, objective: Objective = SMALL_DINO, monitor=KNN_ONLY) -> Pretraining:
    plan = plan_of(root, model=DROPPING, objective=objective, data={"labels": True})
    return replace(plan, monitor=monitor)


@pytest.mark.parametrize(
    ("objective", "monitor", "names"),
    [(SMALL_DINO, KNN_ONLY, MEASURES[:1]), (SUPERVISED, BOTH, MEASURES)],
    ids=["dino", "supervised"],
)
def test_a_monitor_does_not_change_a_run(root, tmp_path, capsys, objective, monitor, names):
    state = torch.get_rng_state()
    plain = monitored_plan(root, objective, Monitor()).run(tmp_path / "plain", device="cpu")
    capsys.readouterr()
    path = monitored_plan(root, objective, monitor).run(tmp_path / "monitored", device="cpu")

    rows = log_rows(tmp_path / "monitored")
    without = [{k: v for k, v in row.items() if k not in MEASURES} for row in rows]
    assert without == log_rows(tmp_path / "plain")
    # An epoch has six steps. The last step is measured, too.
    measures = [(row["step"], {*MEASURES} & row.keys()) for row in rows if "knn_top1" in row]
    assert measures == [(6, {*names}), (8, {*names})]
    assert path.read_bytes() == plain.read_bytes()
    assert torch.equal(state, torch.get_rng_state())
    printed = capsys.readouterr().err
    assert "monitor took" not in printed
    line, *_ = [line for line in printed.splitlines() if "knn_top1" in line]
    assert line.startswith("step 6/8  ")
    assert f"knn_top1 {rows[5]['knn_top1']:.1f} %" in line


def test_the_time_of_the_monitor_is_not_training_time(root, tmp_path, capsys, monkeypatch):
    measure, read_clock, offsets = Evaluator.measure_if_due, time.monotonic, [0]

    def measure_for_an_hour(self, step):
        measures = measure(self, step)
        offsets.append(3600 if measures else 0)
        return measures

    monkeypatch.setattr(time, "monotonic", lambda: read_clock() + sum(offsets))
    monkeypatch.setattr(Evaluator, "measure_if_due", measure_for_an_hour)
    # The monitor measures after the steps 6 and 8.
    monitored_plan(root).run(tmp_path, device="cpu")

    found = re.findall(r"monitor took (\d+) s,\D* (\d+) s\.", capsys.readouterr().err)
    hours = [tuple(round(int(seconds) / 3600) for seconds in pair) for pair in found]
    assert hours == [(1, 0), (1, 0)]
    # A step trains on two images.
    speeds = [row["images_per_second"] for row in log_rows(tmp_path, timed=True)]
    assert min(speeds) > 2 / 1800


def test_resumed_runs_may_change_the_monitor_which_equals_the_probe(root, tmp_path):
    stopped_after_a_step(monitored_plan(root, monitor=Monitor()), tmp_path)
    monitor = replace(KNN_ONLY, neighbours=13, temperature=1e-4, batch_size=4)
    path = monitored_plan(root, monitor=monitor).run(tmp_path, resume=True, device="cpu")
    assert [row["step"] for row in log_rows(tmp_path) if "knn_top1" in row] == [6, 8]
    probe = KNN(neighbours=[13], temperature=1e-4, crop_share=1.0)
    context = ProbeContext(load_encoder(str(path)), ClassFolders(root), layers=(1,))
    (value,) = [score.value for score in probe.run(context) if score.metric == "top1_k13"]
    assert log_rows(tmp_path)[-1]["knn_top1"] == pytest.approx(value)


def test_validation_accuracy_uses_the_saved_head_on_central_crops(root, tmp_path, capfd):
    monitor = Monitor(accuracy_epochs=5, crop_share=0.8)
    path = monitored_plan(root, SUPERVISED, monitor).run(tmp_path, device="cpu")
    printed = capfd.readouterr().err

    state = state_of(tmp_path)["learner"]
    extractor = FeatureExtractor(load_encoder(str(path)), layers=[1], facets=["cls_normed"])
    val = ClassFolders(root).val()
    right, losses = 0, []
    for index in range(len(val)):
        pixels = central_square(val[index].image, 16, crop_share=0.8)
        features = extractor(pixels[None].float() / 255)[1]["cls_normed"]
        logits = features @ state["student.head.weight"].T + state["student.head.bias"]
        right += int(logits.argmax() == val[index].label)
        losses.append(float(logits.logsumexp(-1) - logits.flatten()[val[index].label]))
    assert log_rows(tmp_path)[-1]["val_top1"] == pytest.approx(100 * right / len(val))
    assert log_rows(tmp_path)[-1]["val_loss"] == pytest.approx(sum(losses) / len(val), rel=1e-4)
    assert [row["step"] for row in log_rows(tmp_path) if "val_top1" in row] == [8]
    row = log_rows(tmp_path)[-1]
    assert f"val_loss {row['val_loss']:.3f}  val_top1 {row['val_top1']:.1f} %" in printed


def test_a_diverged_encoder_has_no_score(root, tmp_path, monkeypatch):
    loss = DinoLearner.loss

    def diverge(self, network, views, step):
        if step == 5:
            torch.nn.init.constant_(self.teacher.backbone.norm.bias, math.nan)
        return loss(self, network, views, step)

    monkeypatch.setattr(DinoLearner, "loss", diverge)
    plan = monitored_plan(root, monitor=KNN_ONLY)
    replace(plan, train=replace(plan.train, max_steps=6)).run(tmp_path, device="cpu")
    assert log_rows(tmp_path)[-1]["knn_top1"] is None


@pytest.mark.parametrize("split", ["train", "val"])
def test_non_finite_features_in_either_split_leave_no_score(root, monkeypatch, split):
    plan, timeline = monitored_plan(root), Timeline(8, 6)
    learner, images = plan.objective.build(plan.encoder, timeline, seed=0), plan.images()
    evaluator = plan.monitor.build_evaluator(learner, timeline, plan.data, images)
    assert evaluator is not None
    assert 0 < evaluator.measure_if_due(8)["knn_top1"] <= 100
    compute = Evaluator._compute_outputs

    def spoil(self, images, function):
        outputs = compute(self, images, function)
        if images is getattr(self, split):
            outputs.features[-1, 0] = math.inf
        return outputs

    monkeypatch.setattr(Evaluator, "_compute_outputs", spoil)
    assert math.isnan(evaluator.measure_if_due(8)["knn_top1"])


def test_a_broken_validation_image_is_reported_after_steps_are_saved(root, tmp_path):
    album = shutil.copytree(root, tmp_path / "album")
    (album / "val/class0/0.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match=r"class0/0\.png"):
        monitored_plan(album).run(tmp_path / "out", device="cpu")
    assert state_of(tmp_path / "out")["step"] == len(log_rows(tmp_path / "out")) == 6


@pytest.mark.parametrize(
    ("monitor", "hint"),
    [
        (Monitor(accuracy_epochs=1), "objective=supervised"),
        (Monitor(knn_epochs=1, neighbours=14), "monitor.neighbours=13"),
        (Monitor(knn_epochs=1, train_images=5), "monitor.neighbours=5"),
        (None, "monitor.root={folder}"),
    ],
)
def test_an_impossible_monitor_is_refused_before_training(root, tmp_path, monitor, hint):
    plan = monitored_plan(root, monitor=monitor or KNN_ONLY)
    if monitor is None:
        plan = replace(plan, data=DataOptions())
    with pytest.raises(ConfigurationError) as caught:
        plan.run(tmp_path, device="cpu")
    assert caught.value.hint[0] == hint
    assert not (tmp_path / LOG).exists()


@pytest.mark.parametrize(("num_classes", "noun"), [(2, "class"), (3, "kind")])
def test_other_validation_classes_are_refused(root, tmp_path, num_classes, noun):
    other = save_classes(tmp_path / "other", 3, 3, num_classes=num_classes, noun=noun)
    monitor = Monitor(accuracy_epochs=1, root=str(other))
    with pytest.raises(ConfigurationError, match=r"training images \(3 classes\)"):
        monitored_plan(root, SUPERVISED, monitor).run(tmp_path / "out", device="cpu")


@pytest.mark.parametrize("fingerprint", ["content", "stat"])
def test_an_image_in_both_splits_is_refused_unless_allowed(root, tmp_path, fingerprint):
    shutil.copytree(root, tmp_path / "album")
    copy = tmp_path / "album/val/class0/copy.png"
    shutil.copy2(root / "train/class0/0.png", copy)
    data = {"labels": True, "fingerprint": fingerprint}
    # The classifier and the nearest neighbours use the same training images.
    monitor = replace(BOTH, results=str(tmp_path / "results"))
    plan = plan_of(
        tmp_path / "album", objective=SUPERVISED, data=data, monitor=monitor, max_steps=1
    )
    with pytest.raises(DataError) as caught:
        plan.run(tmp_path / "run", device="cpu")
    assert copy.name in str(caught.value)
    assert caught.value.hint == ("data.allow_overlap=true",)

    allowed = replace(plan, data=replace(plan.data, allow_overlap=True))
    allowed.run(tmp_path / "run", device="cpu")
    assert load_record(tmp_path / "results").settings["fitted_and_scored"] == 1


def test_the_monitor_reads_16_bit_images(tmp_path):
    generator = np.random.default_rng(0)
    for split, name in product(("train", "val"), ("a", "b")):
        folder = tmp_path / "album" / split / name
        folder.mkdir(parents=True)
        for number in range(3):
            pixels = generator.integers(0, 4096, (20, 20)).astype(np.uint16)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    data, monitor = {"labels": True, "bits": 12}, replace(BOTH, neighbours=2)
    plan = plan_of(tmp_path / "album", objective=SUPERVISED, data=data, monitor=monitor)
    plan.run(tmp_path / "run", device="cpu")
    assert set(MEASURES) <= log_rows(tmp_path / "run")[-1].keys()


def test_class_ranks_count_larger_and_earlier_equal_logits():
    logits = torch.tensor([[0.0, 3, 1, 2], [5, 5, 5, 5], [5, 5, 5, 5], [1, 0, 0, 9]])
    labels = torch.tensor([0, 0, 2, 3])
    ranks = rank_true_classes(logits, labels)
    assert ranks.tolist() == [3, 0, 2, 0]
    assert torch.equal(ranks == 0, logits.argmax(1) == labels)


@pytest.mark.parametrize(("num_classes", "names"), [(5, {"top1"}), (6, {"top1", "top5"})])
def test_more_than_five_classes_have_a_top_5(tmp_path, num_classes, names):
    root = save_classes(tmp_path / "album", 12, 12, num_classes=num_classes)
    monitor = Monitor(accuracy_epochs=9, crop_share=1.0, results=str(tmp_path / "results"))
    monitored_plan(root, SUPERVISED, monitor).run(tmp_path / "run", device="cpu")
    last, records = log_rows(tmp_path / "run")[-1], ResultStore(tmp_path / "results").records()
    values = {record.metric: record.value for record in records}
    assert values == pytest.approx({name: last[f"val_{name}"] for name in names})
    assert ("val_top5" in last) == (num_classes > 5)
    assert num_classes == 5 or last["val_top1"] < last["val_top5"] < 100


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    # One red test image is in the wrong folder.
    root = tmp_path_factory.mktemp("data") / "MNIST"
    generator = np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 5)):
        for number in range(count):
            is_red = number % 2 == 0
            name = "red" if is_red != ((split, number) == ("test", 0)) else "blue"
            folder = root / split / name
            folder.mkdir(parents=True, exist_ok=True)
            colour = np.array((230, 10, 10) if is_red else (10, 10, 230))
            pixels = colour + generator.integers(-9, 10, (16, 16, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return root


def recorded_plan(root, **monitor) -> Pretraining:
    objective = Supervised(label_smoothing=0.0, crops=SingleCrop(num_ops=0))
    train: dict[str, Any] = {"epochs": 5, "max_steps": None, "batch_size": 4, "max_grad_norm": None}
    plan = plan_of(root, objective=objective, optimizer=AdamW(lr=0.5), **train)
    return replace(plan, monitor=Monitor(accuracy_epochs=1, crop_share=1.0, **monitor))


def load_record(folder):
    (record,) = ResultStore(folder).records()
    return record


@pytest.fixture(scope="module")
def finished(mnist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    recorded_plan(mnist, results=str(folder / "results")).run(folder / "run", device="cpu")
    return folder


def test_the_record_contains_the_logged_accuracy_and_the_correct_images(mnist, finished):
    store, record = ResultStore(finished / "results"), load_record(finished / "results")
    last = json.loads((finished / "run" / LOG).read_text().splitlines()[-1])
    assert record.value == last["val_top1"] == 80.0
    # The classes differ in colour, so only the misplaced image is classified incorrectly.
    ids = store.image_ids(record.dataset_fingerprint)
    hits = store.load_per_image(record)
    assert ids is not None
    assert hits is not None
    assert [name for name, hit in zip(ids, hits, strict=True) if not hit] == ["blue/0.png"]
    assert (record.task, record.dataset, record.split) == ("supervised", "mnist", "test")
    assert (record.metric, record.num_images, record.seed) == ("top1", 5, 3)
    assert (record.layer, record.depth) == (1, 2)
    assert record.checkpoint_sha256 == load_encoder(str(finished / "run")).sha256
    assert record.ci95 is not None
    assert record.ci95[0] < 80 < record.ci95[1] <= 100
    assert record.details["training"] == "5 epochs, batch 4, AdamW at 0.0078125"
    assert record.details["configuration"]["model"]["depth"] == 2
    assert str(mnist) not in json.dumps(record.as_json())


def test_a_finished_run_can_be_recorded_later(mnist, tmp_path):
    plan = recorded_plan(mnist, results=str(tmp_path / "all"))
    stopped_after_a_step(plan, tmp_path / "run")
    assert not (tmp_path / "all").exists()
    recorded_plan(mnist).run(tmp_path / "run", resume=True, device="cpu")
    weights = (tmp_path / "run" / ENCODER).read_bytes()
    assert not (tmp_path / "all").exists()
    plan.run(tmp_path / "run", resume=True, device="cpu")
    few = recorded_plan(mnist, results=str(tmp_path / "few"), val_images=3)
    few.run(tmp_path / "run", resume=True, device="cpu")

    assert (tmp_path / "run" / ENCODER).read_bytes() == weights
    whole, part = load_record(tmp_path / "all"), load_record(tmp_path / "few")
    assert (whole.value, part.num_images) == (80.0, 3)
    assert part.dataset_fingerprint != whole.dataset_fingerprint
    ids = ResultStore(tmp_path / "few").image_ids(part.dataset_fingerprint)
    assert ids is not None
    assert len(ids) == 3
    fewer = recorded_plan(mnist, results=str(tmp_path / "fewer"), val_images=2)
    fewer.run(tmp_path / "run", resume=True, device="cpu")
    assert load_record(tmp_path / "fewer").dataset_fingerprint != part.dataset_fingerprint


def test_the_recipe_describes_the_length_of_the_run():
    plan = {
        "train": {"epochs": 100, "max_steps": 3, "batch_size": 512},
        "optimizer": {"_target_": "pretrain.optimizers.recipes.Soap", "lr": 0.005},
    }
    assert describe_recipe(plan, Timeline(3, 4)) == "0.75 epochs, batch 512, Soap at 0.01"
    tuned = describe_recipe(plan | {"init_from_sha256": "0123456789abcdef"}, Timeline(400, 4))
    assert tuned == "100 epochs, batch 512, Soap at 0.01, from weights 01234567"


def test_the_record_appears_with_published_values_and_in_reports(finished, tmp_path, capsys):
    out = ["--out", str(finished / "results")]
    mapped = f"ViT, no skip={finished / 'run'}"
    assert main(["table", *out, "--paper", "mnist", "--as", mapped, "--format", "markdown"]) == 0
    output = capsys.readouterr().out
    assert r"| ViT, no skip | 94.6 \| 80.0" in output
    assert "its own head after 5 epochs, batch 4, AdamW at 0.0078125, 16 px" in output
    assert main(["table", *out, "--task", "supervised"]) == 0
    assert "supervised: top1 (%) on mnist test" in capsys.readouterr().out
    assert main(["report", *out, "--into", str(tmp_path / "report")]) == 0
