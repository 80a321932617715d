"""Test that logistic regression gives the results of scikit-learn."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from probes.features.tiers import StoredFeatures
from probes.heads import logistic
from probes.heads.logistic import LogisticRegression as Regression
from probes.heads.logistic import make_preconditioner, minimise
from probes.heads.losses import HistogramLoss
from probes.heads.sgd import HeadSpec
from tests.support.photographs import silent

C_VALUES = (1e-4, 1e-2, 1.0)
NUM_IMAGES, SIDE, CLASSES = 12, 4, 10


def digit_features():
    """Return patch features made from images of handwritten digits."""
    digits: Any = load_digits(return_X_y=True)
    images, labels = digits
    count = NUM_IMAGES * SIDE**2
    mixing = np.random.default_rng(0).standard_normal((64, 64)) / 8
    layers = np.stack([images[:count], images[:count] @ mixing]).astype(np.float16)
    masks = labels[:count].astype(np.uint8).reshape(NUM_IMAGES, SIDE, SIDE)
    masks[:, 0, 0] = 255
    features = torch.from_numpy(layers).view(2, NUM_IMAGES, SIDE, SIDE, 64)
    return StoredFeatures((0, 1), features, torch.from_numpy(masks))


def train_heads(entries, sources=((0,), (1,)), features=None, classes=CLASSES, **changes):
    regression = Regression(**{"c_values": C_VALUES, "batch_size": 7, **changes})
    spec = HeadSpec(HistogramLoss(), True, classes, 0, torch.device("cpu"))
    return regression.train(spec, features or digit_features(), sources, entries, silent)


def fit_scikit_learn(x, y, c):
    # As in our implementation, constant channels become 0.
    deviation = x.std(0)
    scale = np.where(deviation > 0, 1 / np.maximum(deviation, 1e-12), 0)
    model = LogisticRegression(C=c, tol=1e-8, max_iter=5000)
    model.fit(((x - x.mean(0)) * scale)[y < 255], y[y < 255])
    return model, lambda other: (other - x.mean(0)) * scale


@pytest.mark.slow
def test_all_heads_equal_regressions_of_scikit_learn():
    entries, digits = torch.arange(2, NUM_IMAGES), digit_features()
    heads = train_heads(entries)
    # No head reached the limit of iterations. They stopped at the precision of float32.
    assert heads.unconverged == heads.stalled
    for layer in (0, 1):
        x = digits.features[layer].double()
        fitted, labels = x[entries].flatten(0, 2).numpy(), digits.labels[entries].flatten().numpy()
        for index, c in enumerate(C_VALUES):
            weight, bias = heads.weight[layer, index].double(), heads.bias[layer, index].double()
            shares = (x.flatten(0, 2) @ weight.T + bias).softmax(1).numpy()
            model, scaled = fit_scikit_learn(fitted, labels, c)
            expected = model.predict_proba(scaled(x.flatten(0, 2).numpy()))
            assert np.abs(shares - expected).max() < 5e-3
            assert (shares.argmax(1) == expected.argmax(1)).mean() > 0.97


@pytest.mark.parametrize("c", [1e-4, 1e-2])
def test_heads_of_two_classes_equal_the_regression_of_scikit_learn(monkeypatch, c):
    monkeypatch.setattr(Regression, "gradient_tolerance", 1e-5)
    features, entries = digit_features(), torch.arange(NUM_IMAGES)
    is_labelled = torch.isin(features.labels, torch.tensor([1, 7], dtype=torch.uint8))
    labels = torch.where(is_labelled, (features.labels == 7).byte(), 255).byte()
    x, y = features.features[0].double().reshape(-1, 64).numpy(), labels.reshape(-1).numpy()
    model, scaled = fit_scikit_learn(x, y, c)
    expected = np.asarray(model.decision_function(scaled(x)))

    heads = train_heads(entries, ((0,),), replace(features, labels=labels), classes=2, c_values=[c])

    weight, bias = heads.weight[0, 0].double(), heads.bias[0, 0].double()
    found = torch.from_numpy(x) @ (weight[1] - weight[0]) + bias[1] - bias[0]
    assert np.abs(found.numpy() - expected).max() < 5e-3 * np.abs(expected).max()


def test_heads_that_reach_the_limit_of_iterations_are_counted():
    features = digit_features()
    # With equal features, the frequencies of the classes are the best prediction from the start.
    features.features[1].zero_()
    heads = train_heads(torch.arange(NUM_IMAGES), features=features, max_iterations=2)
    assert heads.constant_channels[1] == 64
    counts = [heads.convergence(source) for source in (0, 1)]
    assert [count["unconverged_heads"] for count in counts] == [len(C_VALUES), 0]
    assert [count["stalled_heads"] for count in counts] == [0, 0]


def test_each_convex_problem_stops_separately():
    scales = torch.tensor([1e-3, 1e4, 1.0], dtype=torch.float64)
    centers = torch.tensor([[3.0, -1.0], [1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    curvature = torch.tensor([1.0, 30.0], dtype=torch.float64)
    computed: list[list[int]] = []

    def objective(problems, values):
        # 0 to 2 are quadratic, 2 starts at its minimum, 3 is constant with a wrong gradient.
        computed.append(problems.tolist())
        distance = values - torch.cat([centers, torch.zeros(1, 2)])[problems]
        factors = torch.cat([scales, torch.zeros(1)])[problems]
        loss = factors * (curvature * distance**2).sum(1) / 2
        gradient = factors[:, None] * curvature * distance
        is_wrong = problems == 3
        return torch.where(is_wrong, 1000.0, loss), gradient + 1e-3 * is_wrong[:, None]

    start = torch.zeros(4, 2, dtype=torch.float64)
    found = minimise(
        objective,
        start,
        precondition=lambda gradient: gradient.clone(),
        iterations=range(60),
        gradient_tolerance=1e-6,
    )

    assert found.converged.tolist() == [True, True, True, False]
    assert found.stalled.tolist() == [False, False, False, True]
    torch.testing.assert_close(found.values[:2], centers[:2], rtol=0, atol=2e-3)
    assert torch.equal(found.values[2], start[2])
    assert 5 < found.iterations < 50
    # Problems that have stopped are not computed again.
    assert computed[0] == [0, 1, 2, 3]
    assert all(2 not in problems for problems in computed[1:])
    assert [3] in computed
    assert sum(map(len, computed)) < 4 * found.iterations


def test_the_gradient_is_divided_by_the_curvature_of_each_class(monkeypatch):
    monkeypatch.setattr(logistic, "_ADDED_VARIANCE", 0.0)
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randn(50, 3, generator=generator).double()
        @ torch.tensor([[1.0, 0.5, 0.0], [0.0, 2.0, 0.3], [0.0, 0.0, 0.1]]).double()
    )
    x -= x.mean(0)
    scale, penalty = torch.tensor([2.0, 0.5, 1.0]).double(), torch.tensor([0.01, 3.0]).double()
    frequencies = torch.tensor([0.7, 0.2, 0.1]).double()
    gradient = torch.randn(2, 12, generator=generator).double()

    product = make_preconditioner((x.T @ x / 50)[None], scale[None], penalty, frequencies)(gradient)

    def loss(parameters, head):
        weights, bias = parameters[:9].view(3, 3), parameters[9:]
        logits = (x * scale) @ weights.T + bias
        return logits.logsumexp(1).mean() + penalty[head] * weights.square().sum() / 2

    # The Hessian is taken at zero weights and the best biases. Each class has a separate block.
    at = torch.cat([torch.zeros(9).double(), frequencies.log()])
    for head in range(2):
        hessian = torch.autograd.functional.hessian(lambda p, h=head: loss(p, h), at)
        for number in range(3):
            own = [*range(3 * number, 3 * number + 3), 9 + number]
            block = hessian[own][:, own]
            torch.testing.assert_close(block @ product[head, own], gradient[head, own])
