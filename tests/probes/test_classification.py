"""Test the linear classification probe."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from probes.classification import (
    FixedPooling,
    LinearClassification,
    Momentum,
    TrainingDraw,
    TrainingDraws,
    score_selected_heads,
)
from probes.features.image import ImagePass
from probes.features.tiers import StoredFeatures
from probes.features.training_images import TrainingSplit
from probes.heads.attentive import AttentivePooling
from probes.heads.losses import LabelLoss
from probes.heads.sgd import HeadSpec
from ssl_bench.cli.__main__ import main
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.evaluation import Score
from ssl_bench.neighbours import class_rank
from ssl_bench.planning import plan_probes
from tests.support.coloured_classes import (
    build_constant_encoder,
    class_context,
    coloured_classes,
    run_probe,
    select_train_images,
    tiny,
)
from tests.support.faults import class_folders, make_probe_args, records
from tests.support.heads import classification
from tests.support.photographs import silent

QUICK: dict[str, Any] = {"crop_share": 1.0, "c_values": [1e-3, 0.1, 10.0], "num_workers": 1}


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    return coloured_classes(tmp_path_factory.mktemp("noisy"), noise=250)


def scores(dataset: Any, *, within: dict[str, Any] | None = None, **changes: Any):
    return run_probe(classification(QUICK, **changes), dataset, **(within or {}))


def test_every_facet_of_every_block_separates_colours(root):
    facets = {"patch_mean", "cls", "cls_patch_mean"}
    found = scores(ClassFolders(root), facet=sorted(facets))

    assert {cell[1] for cell in found} == facets
    assert all(s.value == 100 for s in found.values() if s.metric == "top1_oracle")
    perfect = [s for s in found.values() if s.value == 100]
    # If all of 12 images are correct, the lower end is the twelfth root of 2.5 %.
    assert all(s.ci95 == pytest.approx((100 * 0.025 ** (1 / 12), 100)) for s in perfect)
    details = found[0, "cls", "top1_holdout"].details
    assert (details["num_train_images"], details["num_held_out_images"]) == (30, 3)
    assert details["unconverged_heads"] == 0


@pytest.mark.parametrize("mode", ["single", "last4"])
def test_heads_equal_float64_regressions_of_scikit_learn(mode, noisy):
    dataset, layers = ClassFolders(noisy), [0, 1, 2]
    split = TrainingSplit.draw(dataset.train(), max_images=None, holdout=0.3, seed=0)
    probe = classification(QUICK, holdout=0.3, facet="patch_mean", layers_mode=mode)
    found = run_probe(probe, dataset)

    image_pass = ImagePass(probe, class_context(dataset), 64)
    train, val = (
        image_pass.run(images, range(len(images)), layers)
        for images in (dataset.train(), dataset.val())
    )
    held_out = sorted(split.held_out)
    others = [i for i in range(30) if i not in split.held_out]
    for source in [(0,), (2,)] if mode == "single" else [(0, 1, 2)]:
        x, y = train.concatenate(source, "patch_mean").features, train.labels
        scored_features = val.concatenate(source, "patch_mean").features
        details = found[source[-1], "patch_mean", "top1_holdout"].details
        assert details["layers"] == list(source)
        for number, c in enumerate(QUICK["c_values"]):
            expected = sklearn_accuracy(x[others], y[others], x[held_out], y[held_out], c)
            assert details["top1_by_rate_held_out"][number] == pytest.approx(expected)
            expected = sklearn_accuracy(x, y, scored_features, val.labels, c)
            assert details["top1_by_rate"][number] == pytest.approx(expected)
        assert len(set(details["top1_by_rate"])) > 1


def sklearn_accuracy(x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor, c: float) -> float:
    """Return the test accuracy (%) of logistic regression on standardised features."""
    mean, deviation = x.double().mean(0), x.double().std(0, correction=0)
    model = LogisticRegression(C=c, tol=1e-8, max_iter=5000)
    model.fit(((x.double() - mean) / deviation).numpy(), y.numpy())
    predicted = np.asarray(model.predict(((test_x.double() - mean) / deviation).numpy()))
    return 100 * float(np.mean(predicted == test_y.numpy()))


def test_parallel_heads_equal_single_heads_in_float64():
    # These labels do not fit into one byte.
    classes, rates, epochs, size = 300, (0.05, 0.5), 3, 8
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(2, 20, 5, generator=generator)
    labels = torch.randint(classes, (20,), generator=generator)
    labels[0] = classes - 1
    spec = HeadSpec(LabelLoss(), False, classes, 4, torch.device("cpu"))
    features = StoredFeatures((3, 7), blocks[:, :, None, None], labels[:, None, None])
    training = Momentum(rates, epochs, size)
    heads = training.train(spec, features, [(3,), (7,)], torch.arange(20), silent)

    for source in (0, 1):
        for number, rate in enumerate(rates):
            found = heads.weight[source, number].double(), heads.bias[source, number].double()
            expected = train_one_head(blocks[source], labels, rate, epochs, size, classes)
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def train_one_head(
    x: Tensor, y: Tensor, rate: float, epochs: int, batch_size: int, classes: int
) -> tuple[Tensor, Tensor]:
    """Train one linear head in float64 with SGD, momentum 0.9 and a cosine schedule."""
    start = torch.randn(classes, x.shape[1], generator=torch.Generator().manual_seed(4)) * 0.01
    parameters = [start.double().requires_grad_(), torch.zeros(classes).double().requires_grad_()]
    velocities = [torch.zeros_like(parameter) for parameter in parameters]
    order = torch.Generator().manual_seed(4)
    batches = [
        b for _ in range(epochs) for b in torch.randperm(len(x), generator=order).split(batch_size)
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


def test_constant_features_are_flagged(root):
    score = scores(ClassFolders(root), within={"encoder": build_constant_encoder()})[
        0, "cls", "top1_holdout"
    ]

    # All images get the same prediction.
    assert score.value == pytest.approx(100 / 6)
    assert score.details["constant_features"]


@pytest.mark.slow
def test_one_training_class_is_refused_and_missing_classes_are_counted(root):
    for pool in (FixedPooling(), AttentivePooling(queries=4)):
        with pytest.raises(DataError, match="class1") as error:
            scores(select_train_images(root, [5, 6, 7, 8, 9]), pool=pool)
        assert error.value.hint == ("probe.train_images={larger}",)
    # Classes of held-out images do not count, and no draw may have a single class.
    whole = TrainingDraw(torch.tensor([0, 2]), None, None)
    part = TrainingDraw(torch.tensor([0, 1]), torch.tensor([2, 3]), torch.arange(4))
    draws = TrainingDraws(ClassFolders(root).train(), (0, 1, 2, 3), {1: [whole], 2: [whole, part]})
    with pytest.raises(DataError, match="class4"):
        draws.require_two_classes(torch.tensor([4, 4, 0, 2]))
    draws.require_two_classes(torch.tensor([4, 5, 0, 2]))

    found = scores(select_train_images(root, range(25)))[0, "cls", "top1_holdout"]

    assert "1 of 6 classes have no training image" in found.details["warnings"]
    assert found.value <= 84
    # Of one image of each class, one is held out. The scored heads are also trained on this one.
    found = scores(select_train_images(root, range(0, 30, 5)))[0, "cls", "top1_holdout"]
    assert (found.details["num_train_images"], found.details["num_held_out_images"]) == (6, 1)
    assert not any("no training image" in line for line in found.details["warnings"])


def test_concatenated_cls_and_patches_need_a_cls_token():
    with pytest.raises(ConfigurationError, match=r"probe\.facet=patch"):
        classification(facet="cls_patch_mean").check_encoder(replace(tiny(), num_prefix_tokens=0))


def test_each_protocol_has_the_settings_of_its_training():
    default, dino, dinov2 = (
        plan_probes(["classification"], ["class_folders"], [f"probe.protocol={name}"])[0].probe
        for name in ("ssl_bench", "dino", "dinov2")
    )

    assert default.settings() == LinearClassification().settings()
    assert {"c_values", "max_iterations"} <= default.settings().keys()
    assert not {"epochs", "learning_rates", "batch_size"} & default.settings().keys()
    assert dino.settings()["learning_rates"] == [0.004]
    assert dino.list_score_keys([3, 11]) == [(11, "cls", f"top{top}_oracle") for top in (1, 5)]
    assert len(dinov2.settings()["learning_rates"]) == 13


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ("protocol=dinov2", "training.epochs=2", "training.batch_size=5"),
            ["central squares", "batches of 5; theirs", "over 2 epochs", "last4"],
        ),
        # Logistic regressions have neither batches nor epochs.
        (("protocol=dinov2", "training=lbfgs"), ["central squares", "last4"]),
        (
            ("pool=attentive", "pool.queries=4", "pool.epochs=1", "pool.batch_size=4"),
            ["central squares", "batches of 4 instead", "1 epochs instead", "scored after"],
        ),
    ],
)
def test_the_guesses_of_a_record_contain_the_values_used(workdir, words, parts):
    class_folders(workdir)
    command = make_probe_args("classification", "class_folders", workdir, "probe.image_size=32")
    command = [word for word in command if "c_values" not in word]

    assert main([*command, *(f"probe.{word}" for word in words)]) == 0

    for record in records():
        for guess, part in zip(record.details["guesses"], parts, strict=True):
            assert part in guess


def score_three_heads(**changes: Any) -> list[Score]:
    values: dict[str, Any] = {
        "hyperparameter": "c_value", "values": (0.1, 1.0, 10.0),
        "num_classes": 7,
        # Correct scored and held-out images: 1 and 2 for head 0, 2 and 1 for head 1, 2 and 0 for
        # head 2.
        "ranks": torch.tensor([[0, 4, 5, 6], [0, 0, 5, 4], [0, 0, 2, 1]]),
        "held_out_ranks": torch.tensor([[0, 0], [0, 3], [1, 1]]),
        "constant_share": 0.25, "missing_classes": 0, "details": {"more": 1},
    }  # fmt: skip
    arguments = {**values, **changes}
    # Three of four images have the same class.
    labels = torch.arange(arguments["ranks"].shape[1]) // 3
    return list(score_selected_heads(4, "cls", **arguments, labels=labels))


def test_held_out_images_select_holdout_heads_and_scored_ones_oracles():
    found = {score.metric: score for score in score_three_heads()}

    values = {metric: (score.value, score.details["c_value"]) for metric, score in found.items()}
    assert [s.details["baseline"]["value"] for s in found.values()] == [75.0, 100.0] * 2
    # The oracle is the first of equally good heads. Only top-1 accuracy selects heads.
    assert values == {
        "top1_holdout": (25.0, 0.1), "top5_holdout": (50.0, 0.1),
        "top1_oracle": (50.0, 1.0), "top5_oracle": (75.0, 1.0),
    }  # fmt: skip
    assert found["top5_holdout"].per_image is not None
    assert found["top5_holdout"].per_image.tolist() == [True, True, False, False]
    details = found["top1_oracle"].details
    assert details["top1_by_rate"] == [25.0, 50.0, 50.0]
    assert details["top1_by_rate_held_out"] == [100.0, 50.0, 0.0]
    assert (details["constant_channels_percent"], details["more"]) == (25.0, 1)
    assert [s.metric for s in score_three_heads(held_out_ranks=None)] == [
        "top1_oracle",
        "top5_oracle",
    ]


def test_warnings_name_grid_edges_diverged_heads_and_degenerate_features():
    first, *_, last = score_three_heads()
    assert "c value 0.1 is at the edge" in first.details["warnings"][0]
    assert last.details["warnings"] == []
    last = score_three_heads(held_out_ranks=torch.tensor([[1], [1], [0]]))[0]
    assert "c value 10 is at the edge" in last.details["warnings"][0]
    ranks = torch.zeros(1, 4, dtype=torch.int64)
    (alone, _) = score_three_heads(values=(0.1,), ranks=ranks, held_out_ranks=None)
    assert alone.details["warnings"] == []

    changes = {"missing_classes": 2, "constant_share": 1.0, "hyperparameter": "learning_rate"}
    ranks = torch.tensor([[0, 1], [0, 0], [7, 1]])
    diverged = score_three_heads(ranks=ranks, held_out_ranks=None, **changes)[0]
    parts = ("diverged: learning rate 10", "2 of 7 classes", "degenerate")
    for warning, part in zip(diverged.details["warnings"], parts, strict=True):
        assert part in warning


def test_ties_go_to_lower_classes_and_nonfinite_logits_are_wrong():
    logits = torch.tensor([[3.0, 1.0, 3.0], [3.0, 1.0, 3.0], [1.0, 2.0, 3.0], [math.nan, 2.0, 3.0],
                           [math.inf, 0.0, 0.0]])  # fmt: skip

    ranks = class_rank(torch.stack([logits, -logits]), torch.tensor([0, 2, 0, 2, 0]))

    assert ranks.tolist() == [[0, 1, 2, 3, 3], [1, 2, 0, 3, 3]]
