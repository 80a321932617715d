"""Test the joint training of many linear heads."""

import pytest
import torch
import torch.nn.functional as F

from probes.features.training_images import group_layers
from probes.heads.losses import PIECE_BYTES, HistogramLoss, UpsampledLoss
from probes.heads.sgd import (
    SGD,
    HeadAdamW,
    LinearHeads,
    RunningStatistics,
    Schedule,
    Standardization,
    concatenate_layers,
    update_heads,
)
from tests.benchmarks.memory import LiveBytes

SOURCES, BATCH, ROWS, COLS, DIM, CLASSES = 2, 3, 4, 3, 6, 5
GRID = (ROWS, COLS)
RATES = (1e-3, 1e-2, 1e-1)
SIDE = 4
# This weight decay is large, so that the tests fail without it.
DECAY = 0.1


def make_batches(count):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        features = torch.randn(SOURCES, BATCH, ROWS, COLS, DIM, generator=generator) * 3 + 2
        size = (BATCH, ROWS * SIDE, COLS * SIDE)
        labels = torch.randint(0, CLASSES, size, generator=generator).to(torch.uint8)
        labels[:, :2] = 255
        yield features, labels


def make_standardization():
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(SOURCES, DIM, generator=generator)
    return Standardization(mean, torch.rand(SOURCES, DIM, generator=generator) + 0.5)


def make_heads(standardization):
    return LinearHeads.initialize(standardization, num_values=len(RATES), classes=CLASSES, seed=3)


def train_separately(block, rate, mode, batches, standardization, start, **options):
    """Train a single linear head with autograd and a torch optimizer."""
    weight, bias = (torch.nn.Parameter(value.clone()) for value in start)
    build = torch.optim.SGD if options else torch.optim.AdamW
    optimizer = build([weight, bias], lr=rate, weight_decay=DECAY, **options)
    for step, (features, labels) in enumerate(batches):
        optimizer.param_groups[0]["lr"] = rate / (step + 1)
        x = (features[block] - standardization.mean[block]) * standardization.scale[block]
        logits = F.interpolate((x @ weight.T + bias).movedim(-1, 1), labels.shape[1:], mode=mode)
        optimizer.zero_grad()
        F.cross_entropy(logits, labels.long(), ignore_index=255).backward()
        optimizer.step()
    return weight.detach(), bias.detach()


@pytest.mark.parametrize(
    ("loss", "mode", "piece_bytes", "momentum"),
    [
        (HistogramLoss(), "nearest", 1, {}),
        (HistogramLoss(), "nearest", 2**10, {}),
        (UpsampledLoss(SIDE), "bilinear", 2**10, {}),
        (UpsampledLoss(SIDE), "bilinear", 2**20, {}),
        (HistogramLoss(), "nearest", 2**20, {"momentum": 0.9}),
    ],
)
def test_training_heads_together_equals_training_them_separately(
    monkeypatch, loss, mode, piece_bytes, momentum
):
    monkeypatch.setitem(PIECE_BYTES, "cpu", piece_bytes)
    standardization = make_standardization()
    heads, states = make_heads(standardization), [{}, {}]
    optimizer = SGD(weight_decay=DECAY) if momentum else HeadAdamW(DECAY)
    start = (heads.weight[0, 0].clone(), heads.bias[0, 0].clone())
    for step, (features, labels) in enumerate(make_batches(3)):
        targets = loss.targets(labels, CLASSES, GRID)
        _, gradients = heads.loss_and_gradients(features, loss, targets)
        rates = torch.tensor(RATES) / (step + 1)
        update_heads(optimizer, heads.parameters, gradients, states, rates, step + 1)
    for source in range(SOURCES):
        for index, rate in enumerate(RATES):
            found = heads.weight[source, index], heads.bias[source, index]
            expected = train_separately(
                source, rate, mode, make_batches(3), standardization, start, **momentum
            )
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_upsampled_logits_of_all_heads_are_never_in_memory_together():
    zeros = torch.zeros(6, DIM)
    scale = Standardization(zeros, zeros + 1)
    heads = LinearHeads.initialize(scale, num_values=16, classes=21, seed=0)
    labels, loss = torch.randint(0, 21, (1, 64, 64)).to(torch.uint8), UpsampledLoss(16)
    targets = loss.targets(labels, 21, (4, 4))
    with LiveBytes() as memory:
        heads.loss_and_gradients(torch.randn(6, 1, 4, 4, DIM), loss, targets)
    upsampled_bytes = 6 * 16 * 21 * labels.numel() * 4
    assert memory.peak < upsampled_bytes / 4


@pytest.mark.parametrize("loss", [HistogramLoss(), UpsampledLoss(SIDE)])
def test_a_batch_without_labels_has_zero_loss_and_gradient(loss):
    heads = make_heads(make_standardization())
    features, labels = next(make_batches(1))
    targets = loss.targets(torch.full_like(labels, 255), CLASSES, GRID)
    losses, (weight, bias) = heads.loss_and_gradients(features, loss, targets)
    assert torch.equal(losses, torch.zeros(SOURCES, len(RATES)))
    assert not weight.any()
    assert not bias.any()


@pytest.mark.parametrize("size", [1, 3])
def test_statistics_do_not_depend_on_the_batch_size(size):
    blocks = torch.randn(2, 5, 3, 4, 6, generator=torch.Generator().manual_seed(0)) * 3 + 7
    blocks[:, :, :, :, 2] = 11.0
    # One patch differs from the others by 2**-10 in two channels, whose deviations are 0.7e-4 and
    # 1.4e-4 of their mean. Only the second deviation exceeds the rounding of float16.
    blocks[:, :, :, :, 3], blocks[:, :, :, :, 4] = -1.9, 1.0
    blocks[:, 1, 0, 0, 3:5] += 2**-10
    blocks[:, 4] = 1000.0
    statistics = RunningStatistics.start(torch.device("cpu"))
    for batch in blocks.half()[:, :4].split(size, 1):
        statistics.add(batch)
    found = statistics.standardization(2, torch.device("cpu"))
    vectors = blocks.half().double()[:, :4].flatten(1, 3)
    torch.testing.assert_close(found.mean.double(), vectors.mean(1), rtol=1e-6, atol=1e-6)
    expected = 1 / vectors.std(1, correction=0)
    expected[:, 2:4] = 0
    torch.testing.assert_close(found.scale.double(), expected, rtol=1e-4, atol=0)
    assert found.constant_channels() == (2, 2)


@pytest.mark.parametrize(
    ("layers", "mode", "groups"),
    [
        ([2, 0], "single", [(0,), (2,)]),
        ([11, 3], "multi", [(2, 5, 8, 11)]),
        ([1], "multi", [(0, 1)]),
        ([5, 2], "last4", [(2, 3, 4, 5)]),
        ([2], "last4", [(0, 1, 2)]),
    ],
)
def test_heads_receive_their_own_layer_or_a_group_of_layers(layers, mode, groups):
    assert group_layers(layers, mode) == groups


def test_the_channels_of_adjacent_layers_are_concatenated():
    blocks = torch.arange(4.0).view(4, 1, 1, 1, 1).expand(4, 3, 2, 5, 2)
    expected = torch.tensor([[0.0, 0, 1, 1], [2, 2, 3, 3]]).view(2, 1, 1, 1, 4)
    assert torch.equal(concatenate_layers(blocks, 2), expected.expand(2, 3, 2, 5, 4))


def test_learning_rate_schedules_equal_values_computed_by_hand():
    factors = [Schedule().factor(step, 200) for step in range(200)]
    assert factors[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert factors[10] == 1
    assert factors[105] == pytest.approx(0.5)
    assert 0 < factors[-1] < 1e-3
    assert Schedule().factor(0, 1) > 0
    assert Schedule("linear", 0.0).factor(50, 200) == pytest.approx(0.75)
    assert Schedule("constant", 0.0).factor(199, 200) == 1


@pytest.mark.parametrize(("epochs", "milestone", "per_epoch"), [(25, 20, 7), (5, 4, 1)])
def test_drop_equals_multi_step_lr_with_a_step_per_epoch(epochs, milestone, per_epoch):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [milestone], gamma=0.1)
    schedule = Schedule("drop", warmup=0.0)
    for epoch in range(epochs):
        for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            optimizer.step()
            found = schedule.factor(step, epochs * per_epoch)
            assert found == pytest.approx(optimizer.param_groups[0]["lr"])
        scheduler.step()
