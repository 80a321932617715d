"""Test that scores do not depend on the scale of the features."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ssl_bench
from probes.features.stream import to_float16, undo_scaling
from probes.tokencut.eigensolver import cosine_similarities
from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import build, has_key
from ssl_bench.data.samples import find_datasets
from ssl_bench.errors import UnsupportedEncoderError
from ssl_bench.neighbours import unit_vectors, zero_vectors_warning
from ssl_bench.request import probing_config

# With -80, values are below the range of float16 and the eps of torch's normalize. With 64, squares
# are beyond the range of float32.
POWERS = (-80, 64)
SMALL: dict[str, Any] = {
    "dataset.num_train": 8, "dataset.num_val": 4, "probe.image_size": 32, "probe.epochs": 2,
    "probe.training.epochs": 2, "probe.training.max_iterations": 5, "probe.num_images": 2,
    "probe.panels": 1,
}  # fmt: skip


supporting_datasets = cache(find_datasets)


class Block(nn.Module):
    def __init__(self, power: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(24, 24, generator=generator) / 5)
        self.power = power

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.tanh(x @ self.weight + x.mean(1, keepdim=True) / 2)
        return (x + mixed) * 2.0**self.power


class Scaled(nn.Module):
    """A ViT whose second block multiplies the tokens by a power of two."""

    def __init__(self, power: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.patch_embed = nn.Conv2d(3, 24, 8, 8, bias=False)
        self.patch_embed.weight.data = torch.randn(24, 3, 8, 8, generator=generator) / 9
        self.cls_token = nn.Parameter(torch.randn(1, 1, 24, generator=generator) / 3)
        self.blocks = nn.ModuleList([Block(0), Block(power)])
        self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def scores(task: str, power: int, folder: str) -> dict[tuple[str, str], float]:
    encoder = ssl_bench.Encoder.from_module(
        Scaled(power).eval(), patch_size=8, blocks="blocks", norm="norm", image_size=32,
        mean=0.5, std=0.5,
    )  # fmt: skip
    role = build(probing_config(task, "toy", ()), "probe").role
    dataset = next(name for name in supporting_datasets(role) if name.startswith("toy"))
    config = probing_config(task, dataset, ())
    small: dict[str, Any] = {key: SMALL[key] for key in SMALL if has_key(config, key)}
    try:
        records = ssl_bench.probe(encoder, task=task, dataset=dataset, layer=1, out=folder, **small)
    except UnsupportedEncoderError as error:
        pytest.skip(str(error))
    return {(record.facet, record.metric): record.value for record in records}


@pytest.fixture(scope="module")
def plain_scores(tmp_path_factory) -> Callable[[str], dict[tuple[str, str], float]]:
    return cache(lambda task: scores(task, 0, str(tmp_path_factory.mktemp(task))))


@pytest.mark.slow
@pytest.mark.parametrize("task", choices("probe"))
@pytest.mark.parametrize("power", POWERS)
def test_tokens_times_a_power_of_two_give_the_same_scores(task, power, tmp_path, plain_scores):
    plain = plain_scores(task)
    scaled = scores(task, power, str(tmp_path))
    # A norm is proportional to the features, and LiDAR adds a constant to its eigenvalues.
    plain = {key: plain[key] for key in plain if key[1] not in ("lidar", "spectral_norm")}
    assert plain
    assert {key: scaled[key] for key in plain} == pytest.approx(plain, nan_ok=True)


@pytest.mark.parametrize("power", [-26, 0, 90])
def test_float16_features_keep_their_precision_and_are_rarely_scaled(power):
    features = torch.randn(3, 2, 2, 8, generator=torch.Generator().manual_seed(0))
    # The largest value is just below a power of two. Half of it would fit into float16 unscaled.
    features[1, 0, 0, 0] = 3.9999
    features[1] *= 2.0**power
    features[2] = 0
    halves, scales = to_float16(features)
    back = undo_scaling(halves[None], scales[None])[0].float()
    assert torch.equal(halves[0], features[0].half())
    assert scales[0] == 1
    assert torch.equal(back[1], (features[1] / 2.0**power).half().float() * 2.0**power)
    assert not back[2].any()
    assert halves.isfinite().all()


def test_unit_vectors_equal_those_of_float64_for_any_length():
    for power in (-140, 0, 120):
        vectors = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)) * 2.0**power
        expected = vectors.double() / vectors.double().norm(dim=1, keepdim=True)
        assert torch.allclose(unit_vectors(vectors).double(), expected, atol=1e-6)
    assert not unit_vectors(torch.zeros(1, 3)).any()
    # For ordinary lengths, our unit vectors are bitwise equal to torch's.
    vectors = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * 3
    assert torch.equal(unit_vectors(vectors), functional.normalize(vectors, dim=1))


def test_tokencut_cosines_do_not_depend_on_token_lengths():
    tokens = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    for power in POWERS:
        scaled = cosine_similarities(tokens * np.float32(2.0**power))
        assert np.array_equal(scaled, cosine_similarities(tokens))


def test_zero_vectors_are_reported():
    unit = unit_vectors(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    assert [bool(zero_vectors_warning(some)) for some in (unit, unit[1:])] == [True, False]
