"""Linear classification: the heads, their choice, and the probe that asks every block."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from probes.classification.probe import LinearClassification, Momentum
from probes.features.image import ImagePass
from probes.features.split import TrainingSplit
from probes.features.tiers import FeaturesInMemory
from probes.heads.losses import LabelLoss
from probes.heads.optimizers import SGD, Schedule
from probes.heads.sgd import HeadTraining
from ssl_bench.cli.__main__ import main
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.samples import Sample
from ssl_bench.errors import CheckpointError, ConfigurationError, DataError
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model
from ssl_bench.planning import plan_probes
from tests.support.coloured_classes import coloured_classes
from tests.support.faults import class_folders, probing, records
from tests.support.heads import classification

TINY = ViTConfig(image_size=16, patch_size=8, dim=12, depth=3, num_heads=2)
QUICK: dict[str, Any] = {"crop_share": 1.0, "c_values": [1e-3, 0.1, 10.0], "num_workers": 1}
SGD_QUICK: dict[str, Any] = {"training": "sgd", "learning_rates": [0.1, 0.3], "epochs": 20}


@dataclass(frozen=True)
class Labelled:
    """Pictures of one grey each, with noise; the class says how bright, if anything does."""

    split: str
    labels: tuple[int, ...]
    class_names: tuple[str, ...] = ("dark", "middle", "bright")
    order: tuple[int, ...] | None = None
    contrast: int = 60
    name: str = "greys"

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(f"{self.split}/{index}" for index in self._order)

    @property
    def _order(self) -> Sequence[int]:
        return self.order or range(len(self.labels))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        number = self._order[index]
        seed = number + 1000 * (self.split == "val")
        noise = np.random.default_rng(seed).integers(0, 90, (16, 16, 3))
        label = self.labels[number]
        image = (noise + 20 + self.contrast * label).astype(np.uint8)
        return Sample(f"{self.split}/{number}", image, label=label)

    def fingerprint(self) -> str:
        return f"{self}"


@dataclass(frozen=True)
class Greys:
    """A dataset of two such splits."""

    train_images: Labelled
    val_images: Labelled
    name: str = "greys"
    supports: frozenset[str] = frozenset({"classification"})

    def train(self) -> Labelled:
        return self.train_images

    def val(self) -> Labelled:
        return self.val_images

    discovery = images = train


def greys(**changes: Any) -> Greys:
    train = Labelled("train", tuple(n % 3 for n in range(30)), **changes)
    return Greys(train, Labelled("val", tuple(n % 3 for n in range(9)), **changes))


def encoder(seed: int = 0):
    return encoder_from_model(build_vit(TINY, seed=seed), name="tiny")


def silent(items: Iterable, description: str, total: int | None = None) -> Iterable:
    return items


def context(dataset: Any, **changes: Any) -> ProbeContext:
    values: dict[str, Any] = {
        "encoder": encoder(),
        "dataset": dataset,
        "layers": (2, 0),
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "seed": 0,
        "artifacts": Path("nowhere"),
        "progress": silent,
    }
    return ProbeContext(**{**values, **changes})


def scores(dataset: Any, *, within: dict[str, Any] | None = None, **changes: Any):
    probe = classification(QUICK, **changes)
    found = probe.run(context(dataset, **(within or {})))
    return {(s.layer, s.facet, s.metric): s for s in found}


def values(found: dict[tuple[int, str, str], Score]) -> dict[tuple[int, str, str], float]:
    return {cell: score.value for cell, score in found.items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return coloured_classes(tmp_path_factory.mktemp("colours"))


def test_colours_are_told_apart_in_every_block_and_every_asked_cell_is_scored(root):
    probe = classification(QUICK, facet=["patch_mean", "cls", "cls_patch_mean"])
    found = list(probe.run(context(ClassFolders(root))))

    assert sorted((s.layer, s.facet, s.metric) for s in found) == sorted(probe.cells([0, 2]))
    assert all(s.value == 100 for s in found if s.metric == "top1_oracle")
    right = [s for s in found if s.value == 100]
    assert all(s.num_images == 12 and s.ci95 is not None for s in right)
    # All of 12: the twelfth root of 2.5 %.
    assert all(s.ci95 == pytest.approx((100 * 0.025 ** (1 / 12), 100)) for s in right)
    details = found[0].details
    assert (details["num_train_images"], details["num_held_out_images"]) == (30, 3)
    assert details["unconverged_heads"] == 0


def test_heads_equal_regressions_of_scikit_learn_on_the_same_features_in_float64(root):
    dataset = greys(contrast=6)
    split = TrainingSplit.draw(dataset.train(), at_most=None, holdout=0.3, seed=0)
    found = scores(dataset, holdout=0.3, facet="patch_mean")

    image_pass = ImagePass(context(dataset), ("patch_mean",), None, 1.0, 64, 1)
    train, val = (
        image_pass.run(images, range(len(images)), [0, 2])
        for images in (dataset.train(), dataset.val())
    )
    held_out = sorted(split.held_out)
    others = [i for i in range(30) if i not in split.held_out]
    for layer in (0, 2):
        x, y = train.of(layer, "patch_mean").features, train.labels
        scored = val.of(layer, "patch_mean").features
        by_hand = [
            (
                _scikit_learn(x[others], y[others], x[held_out], y[held_out], c),
                _scikit_learn(x, y, scored, val.labels, c),
            )
            for c in QUICK["c_values"]
        ]
        details = found[layer, "patch_mean", "top1_holdout"].details
        assert details["top1_by_rate_held_out"] == pytest.approx([one for one, _ in by_hand])
        assert details["top1_by_rate"] == pytest.approx([all_ for _, all_ in by_hand])
        assert len(set(details["top1_by_rate"])) > 1


def _scikit_learn(x: Tensor, y: Tensor, others: Tensor, truth: Tensor, c: float) -> float:
    """Percent that is right, after each channel was standardized over what is fitted to."""
    mean, deviation = x.double().mean(0), x.double().std(0, correction=0)
    model = LogisticRegression(C=c, tol=1e-8, max_iter=5000)
    model.fit(((x.double() - mean) / deviation).numpy(), y.numpy())
    predicted = np.asarray(model.predict(((others.double() - mean) / deviation).numpy()))
    return 100 * float(np.mean(predicted == truth.numpy()))


def test_heads_trained_side_by_side_are_those_trained_alone_in_float64():
    # More classes than a byte can number.
    classes, rates, epochs, size = 300, (0.05, 0.5), 3, 8
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(2, 20, 5, generator=generator)
    labels = torch.randint(classes, (20,), generator=generator)
    labels[0] = classes - 1
    training = HeadTraining(
        values=rates, epochs=epochs, batch_size=size, loss=LabelLoss(), optimizer=SGD(0.0),
        schedule=Schedule("cosine", 0.0), standardize=False, classes=classes, seed=4,
        device=torch.device("cpu"),
    )  # fmt: skip
    cache = FeaturesInMemory((3, 7), blocks[:, :, None, None], labels[:, None, None])
    heads = training.train(cache, [(3,), (7,)], torch.arange(20), silent)

    for source in (0, 1):
        for number, rate in enumerate(rates):
            weight, bias = _alone(blocks[source], labels, rate, epochs, size, classes)
            torch.testing.assert_close(
                heads.weight[source, number].double(), weight, atol=1e-6, rtol=1e-4
            )
            torch.testing.assert_close(
                heads.bias[source, number].double(), bias, atol=1e-6, rtol=1e-4
            )


def _alone(
    x: Tensor, y: Tensor, rate: float, epochs: int, size: int, classes: int
) -> tuple[Tensor, Tensor]:
    """One head in float64: momentum .9, and a rate that falls with the steps as a cosine."""
    start = torch.randn(classes, x.shape[1], generator=torch.Generator().manual_seed(4)) * 0.01
    parameters = [start.double().requires_grad_(), torch.zeros(classes).double().requires_grad_()]
    velocities = [torch.zeros_like(parameter) for parameter in parameters]
    order = torch.Generator().manual_seed(4)
    batches = [
        b for _ in range(epochs) for b in torch.randperm(len(x), generator=order).split(size)
    ]
    for step, some in enumerate(batches):
        weight, bias = parameters
        loss = F.cross_entropy(x[some].double() @ weight.T + bias, y[some])
        now = rate * (1 + math.cos(math.pi * step / len(batches))) / 2
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, velocity, gradient in zip(parameters, velocities, gradients, strict=True):
            velocity.mul_(0.9).add_(gradient)
            parameter.data -= now * velocity
    return parameters[0].detach(), parameters[1].detach()


def test_the_order_of_the_images_does_not_matter():
    dataset = greys(contrast=9)
    order = tuple(np.random.default_rng(1).permutation(30).tolist())
    shuffled = replace(dataset, train_images=replace(dataset.train_images, order=order))

    one, other = (scores(data, holdout=0.0) for data in (dataset, shuffled))

    assert values(one) == pytest.approx(values(other), nan_ok=True)
    assert shuffled.train()[0].image_id == f"train/{order[0]}"


@pytest.mark.parametrize("changes", [{}, SGD_QUICK, {"holdout": 0.0}, {"layers_mode": "last4"}])
def test_the_encoder_sees_every_image_once_for_all_blocks_facets_and_heads(changes):
    model, seen = encoder(), []
    model.module.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))

    scores(
        greys(),
        within={"encoder": model, "layers": (0, 1, 2)},
        facet=["cls", "patch_mean"],
        encoder_batch_size=7,
        **changes,
    )

    assert sum(seen) == 30 + 9


def test_little_memory_takes_more_passes_and_gives_the_same(monkeypatch):
    dataset = greys(contrast=9)
    whole = scores(dataset)
    passes, run = [], ImagePass.run
    monkeypatch.setattr(ImagePass, "run", lambda self, *rest: passes.append(1) or run(self, *rest))

    parts = scores(dataset, memory_gib=1e-9)

    assert len(passes) == 4
    assert values(parts) == pytest.approx(values(whole), nan_ok=True)


def test_a_head_on_the_last_four_blocks_sees_their_features_side_by_side(monkeypatch):
    dataset = greys(contrast=9)
    seen = []
    train = HeadTraining.train
    monkeypatch.setattr(
        HeadTraining, "train", lambda self, *rest: seen.append(train(self, *rest)) or seen[-1]
    )
    within = {"layers": (2, 0)}

    found = scores(dataset, within=within, layers_mode="last4", **SGD_QUICK, holdout=0.0)

    assert sorted(found) == [(2, "cls", "top1_oracle"), (2, "cls", "top5_oracle")]
    (heads,) = seen
    assert heads.sources == ((0, 1, 2),)
    features = ImagePass(context(dataset), ("cls",), None, 1.0, 64, 1).run(
        dataset.val(), range(9), [0, 1, 2]
    )
    x = torch.cat([features.of(layer, "cls").features for layer in (0, 1, 2)], 1)
    logits = x @ heads.weight[0].mT + heads.bias[0][:, None]
    right = (logits.argmax(2) == features.labels).double().mean(1)
    assert found[2, "cls", "top1_oracle"].value == pytest.approx(100 * right.max().item())


def test_the_scored_images_have_no_part_in_the_choice():
    dataset = greys(contrast=6)
    upset = replace(dataset.val_images, labels=tuple((n // 2) % 3 for n in range(9)), contrast=1)

    one, other = (
        scores(data, holdout=0.3)[0, "cls", "top1_holdout"]
        for data in (dataset, replace(dataset, val_images=upset))
    )

    for name in ("c_value", "top1_by_rate_held_out", "train_ids_sha256"):
        assert one.details[name] == other.details[name]
    assert one.value != other.value


def test_the_images_that_choose_are_not_fitted_until_they_have_chosen():
    # Classes that nothing in the images tells: a head knows only what it was fitted to.
    labels = tuple(np.random.default_rng(0).integers(0, 3, 12).tolist())
    blind = Labelled("train", labels, contrast=0)
    dataset = Greys(blind, replace(blind, split="validation"))

    found = scores(dataset, holdout=0.5, facet="cls_patch_mean", c_values=[1e6])

    details = found[2, "cls_patch_mean", "top1_holdout"].details
    assert details["top1_by_rate_held_out"][0] < 60
    # The scored ones are the same pictures, and all were fitted in the end.
    assert found[2, "cls_patch_mean", "top1_holdout"].value == 100


def test_a_rate_that_makes_a_head_diverge_is_never_right_and_never_chosen(monkeypatch):
    # No legal rate is so large that five epochs are enough.
    monkeypatch.setattr("probes.classification.probe.check_fields", lambda *_: None)
    training = Momentum(learning_rates=[0.1, 1e38], epochs=5)
    probe = replace(classification(QUICK), training=training)
    found = {(s.layer, s.facet, s.metric): s for s in probe.run(context(greys()))}

    details = found[0, "cls", "top1_holdout"].details
    assert details["learning_rate"] == 0.1
    assert details["top1_by_rate"][1] == details["top1_by_rate_held_out"][1] == 0
    assert "heads diverged: learning rate 1e+38" in details["warnings"]


def test_features_that_are_equal_are_flagged_and_those_not_finite_refused():
    model = build_vit(TINY, seed=0)
    for name, weight in (("weight", 0.0), ("bias", 1.0)):
        torch.nn.init.constant_(model.get_parameter(f"norm.{name}"), weight)
    flat = encoder_from_model(model, name="flat")

    score = scores(greys(), within={"encoder": flat})[0, "cls", "top1_holdout"]

    # All classes are equally likely, so the first one wins.
    assert score.value == pytest.approx(100 / 3)
    assert score.details["constant_features"]
    assert "degenerate: all training images have the same features" in score.details["warnings"]
    torch.nn.init.constant_(model.get_parameter("norm.bias"), torch.nan)
    with pytest.raises(CheckpointError, match="layer 0 of flat gives features that are not finite"):
        scores(greys(), within={"encoder": flat})


def test_training_images_of_one_class_are_refused_and_missing_classes_named():
    one = Labelled("train", (1,) * 9 + (0,))
    with pytest.raises(DataError, match="that heads are fitted to are all of the class middle"):
        scores(Greys(one, greys().val_images), train_images=4)
    two = Greys(Labelled("train", (1, 0) * 5), greys().val_images)

    found = scores(two)[0, "cls", "top1_holdout"]

    assert "1 of 3 classes have no training image" in found.details["warnings"]
    assert found.value <= 67


def test_an_encoder_without_a_class_token_has_its_mean_patch():
    without = replace(encoder(), num_prefix_tokens=0)
    for facet in ("cls", "cls_patch_mean"):
        with pytest.raises(ConfigurationError, match=r"no \[CLS\] token; take probe.facet=patch"):
            classification(QUICK, facet=facet).require_fitting(without)
    classification(QUICK, facet="patch_mean").require_fitting(without)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"c_values": []}, "probe.training.c_values expects one value or more"),
        ({"c_values": [0.0, 1.0]}, "probe.training.c_values expects a list .* a number in"),
        ({"training": "sgd", "learning_rates": []}, "probe.training.learning_rates expects one"),
        ({"layers_mode": "multi"}, "probe.layers_mode expects single or last4"),
        ({"facet": "token"}, "probe.facet must be among cls, patch_mean, cls_patch_mean"),
        ({"facet": []}, "probe.facet must be among"),
        ({"training": "sgd", "epochs": 0}, "probe.training.epochs expects a whole number in"),
        ({"holdout": 1.0}, "probe.holdout expects a number in"),
        ({"crop_share": 0.0}, "probe.crop_share expects a number in"),
    ],
)
def test_options_without_meaning_are_refused(options, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        classification(**options)


def test_protocols_are_files_and_what_does_not_apply_is_no_setting():
    plan = plan_probes(["classification", "pca"], ["toy", "class_folders"], [])
    assert {(p.probe.task, p.dataset.name) for p in plan} == {
        ("pca", "toy"), ("pca", "class_folders"), ("classification", "class_folders"),
    }  # fmt: skip
    probes = {
        name: plan_probes(["classification"], ["class_folders"], [f"probe.protocol={name}"])[0]
        for name in ("ssl_bench", "dino", "dinov2")
    }
    default, dino = probes["ssl_bench"].probe, probes["dino"].probe

    assert default.settings() == LinearClassification().settings()
    assert {"c_values", "max_iterations"} <= default.settings().keys()
    assert not {"epochs", "learning_rates", "batch_size"} & default.settings().keys()
    assert dino.settings()["learning_rates"] == [0.004]
    assert dino.cells([3, 11]) == [(11, "cls", f"top{top}_oracle") for top in (1, 5)]
    assert len(probes["dinov2"].probe.settings()["learning_rates"]) == 13


PROTOCOL, ATTENTIVE = ("probe.protocol=dinov2",), ("probe.pool=attentive", "probe.pool.queries=4")
CENTRAL = "central squares of the training images"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            (*PROTOCOL, "probe.training.epochs=2", "probe.training.batch_size=5"),
            [CENTRAL, "batches of 5; theirs", "over 2 epochs; theirs are 12,500", "with last4"],
        ),
        # Regressions have neither batches of theirs nor epochs.
        ((*PROTOCOL, "probe.training=lbfgs"), [CENTRAL, "with last4"]),
        (
            ("probe.protocol=dino", "probe.training.epochs=3"),
            [CENTRAL, "batches of 1,024 and rates 0.004", "over 3 epochs", "scored after 3 epochs"],
        ),
        (
            (*ATTENTIVE, "probe.pool.epochs=1", "probe.pool.batch_size=4"),
            [CENTRAL, "batches of 4 instead of 4,096", "1 epochs instead of 90", "scored after"],
        ),
    ],
)
def test_guesses_of_a_record_say_the_values_used(place, words, told):
    class_folders(place)
    asked = probing("classification", "class_folders", place)
    words = [*(word for word in asked if "c_values" not in word), *words, "probe.image_size=32"]

    assert main(words) == 0

    guesses = [record.details["guesses"] for record in records()]
    assert all(one == guesses[0] for one in guesses)
    assert [one.startswith(begin) for one, begin in zip(guesses[0], told, strict=True)] == [
        True for _ in told
    ]


def test_finished_cells_are_skipped_and_records_say_what_was_done(place, capsys):
    class_folders(place, count=6)
    words = probing("classification", "class_folders", place, "--layer", "all")
    assert main(words) == 0
    first = records()
    assert sorted({(r.layer, r.metric) for r in first}) == [
        (layer, metric)
        for layer in (0, 1)
        for metric in ("top1_holdout", "top1_oracle", "top5_holdout", "top5_oracle")
    ]
    capsys.readouterr()

    assert main(words) == 0

    assert "8 of 8 scores finished before" in "".join(capsys.readouterr())
    assert [r.created for r in records()] == [r.created for r in first]
    assert main(["table", "--task", "classification", "--format", "markdown"]) == 0
    out = capsys.readouterr().out
    assert "classification: top1_holdout (%) on class_folders val, cls, protocol ssl_bench" in out
