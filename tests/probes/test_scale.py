"""Scores do not depend on a power of two by which an encoder multiplies its tokens."""

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
from ssl_bench.composition.compose import has_key
from ssl_bench.errors import DataError, UnfitEncoder
from ssl_bench.neighbours import unit_vectors, zero_vectors_warning
from ssl_bench.request import probing_config

# Numbers below float16 and the eps of torch's normalize, and squares beyond float32.
POWERS = (-80, 64)
SMALL: dict[str, Any] = {
    "dataset.num_train": 12, "dataset.num_val": 6, "probe.image_size": 64,
}  # fmt: skip


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
    """A transformer of two blocks, the second of which gives tokens times a power of two."""

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
    """Scores on the first generated dataset that has what the task needs."""
    encoder = ssl_bench.Encoder.from_module(
        Scaled(power).eval(), patch_size=8, blocks="blocks", norm="norm", image_size=64,
        mean=0.5, std=0.5,
    )  # fmt: skip
    for dataset in (name for name in choices("dataset") if name.startswith("toy")):
        config = probing_config(task, dataset, ())
        small: dict[str, Any] = {key: SMALL[key] for key in SMALL if has_key(config, key)}
        try:
            records = ssl_bench.probe(
                encoder, task=task, dataset=dataset, layer=1, out=folder, **small
            )
        except DataError:
            continue
        except UnfitEncoder as error:
            pytest.skip(str(error))
        return {(record.facet, record.metric): record.value for record in records}
    raise AssertionError(f"no generated dataset fits {task}")


@pytest.fixture(scope="module")
def plain_scores(tmp_path_factory) -> Callable[[str], dict[tuple[str, str], float]]:
    return cache(lambda task: scores(task, 0, str(tmp_path_factory.mktemp(task))))


@pytest.mark.slow
@pytest.mark.parametrize("task", choices("probe"))
@pytest.mark.parametrize("power", POWERS)
def test_tokens_times_a_power_of_two_give_the_same_scores(task, power, tmp_path, plain_scores):
    plain = plain_scores(task)
    scaled = scores(task, power, str(tmp_path))
    # A norm is proportional to the features; LiDAR adds a constant to its eigenvalues.
    kept = {key: plain[key] for key in plain if key[1] not in ("lidar", "spectral_norm")}
    assert kept
    assert {key: scaled[key] for key in kept} == pytest.approx(kept, nan_ok=True)


@pytest.mark.parametrize("power", [-26, 0, 90])
def test_narrowed_features_keep_their_precision_and_ordinary_ones_their_bits(power):
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


@pytest.mark.parametrize("power", [-140, 0, 120])
def test_unit_vectors_are_those_of_float64_whatever_their_length(power):
    vectors = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)) * 2.0**power
    expected = vectors.double() / vectors.double().norm(dim=1, keepdim=True)
    assert torch.allclose(unit_vectors(vectors).double(), expected, atol=1e-6)
    assert not unit_vectors(torch.zeros(1, 3)).any()


def test_ordinary_unit_vectors_are_bit_for_bit_those_of_torch():
    vectors = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * 3
    assert torch.equal(unit_vectors(vectors), functional.normalize(vectors, dim=1))


@pytest.mark.parametrize("power", [-80, 64])
def test_cosines_of_tokencut_do_not_depend_on_length(power):
    tokens = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    assert np.array_equal(
        cosine_similarities(tokens * np.float32(2.0**power)), cosine_similarities(tokens)
    )


def test_zero_vectors_are_reported():
    unit = unit_vectors(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    assert [bool(zero_vectors_warning(some)) for some in (unit, unit[1:])] == [True, False]
