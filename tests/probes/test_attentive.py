"""Test attentive classification heads, which pool patch features with learned queries."""

import math
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from probes.classification import FixedPooling, LinearClassification
from probes.features.tiers import StoredFeatures
from probes.heads.attentive import LARS, AttentiveHeads, AttentivePooling, pool_tokens
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import Score
from ssl_bench.features import central_square
from ssl_bench.models import Encoder, build_vit, encoder_from_model
from ssl_bench.planning import plan_probes
from tests.support.coloured_classes import (
    TINY,
    build_constant_encoder,
    run_probe,
    select_train_images,
    tiny,
)
from tests.support.colours import Counter
from tests.support.photographs import silent

QUICK = AttentivePooling(queries=4, learning_rates=[1.0, 10.0], epochs=30, batch_size=10)
FACET = "patch_attentive"
pytestmark = pytest.mark.usefixtures("cache")


def scores(
    root: Path,
    *,
    pool: AttentivePooling | FixedPooling = QUICK,
    encoder: Encoder | None = None,
    **changes: Any,
) -> dict[tuple[int, str, str], Score]:
    probe = LinearClassification(pool=pool, **{"crop_share": 1.0, "num_workers": 1, **changes})
    return run_probe(probe, ClassFolders(root), encoder=encoder)


def wave(*shape: int, step: float) -> Tensor:
    # Programs in other languages can reproduce these values.
    return (torch.arange(math.prod(shape), dtype=torch.float64) * step).sin().view(shape)


def head_bank(*heads: tuple[Tensor, Tensor, Tensor, Tensor]) -> AttentiveHeads:
    parts = [torch.stack(some)[None] for some in zip(*heads, strict=True)]
    dim = parts[1].shape[-1]
    running = [torch.full((1, len(heads), dim), one, dtype=parts[0].dtype) for one in (0.0, 1.0)]
    return AttentiveHeads(*parts, *running)


def test_outputs_and_gradients_equal_those_of_the_published_module():
    # https://github.com/billpsomas/efficient-probing (b8f4fb84), float64, in training: its
    # EfficientProbing(8, num_queries=4) before a BatchNorm1d(8, affine=False, eps=1e-6) and a
    # Linear(8, 5), with cls_token, v.weight, weight and bias from waves of steps .7, 1.3, .9, 2.1.
    parts = (wave(4, 8, step=0.7), wave(8, 8, step=1.3), wave(5, 8, step=0.9), wave(5, step=2.1))
    heads, x = head_bank(parts), wave(3, 6, 8, step=0.37)

    seen = pool_tokens(x, parts[0][None], parts[1][None])
    losses, gradients = heads.loss_and_gradients(0, x, torch.tensor([4, 0, 2]))

    assert seen[0, 1, :4].tolist() == pytest.approx(
        [-0.0035877856522673057, -0.5135066354990856, 0.2578320244197871, -0.031418507703219134]
    )
    assert losses.tolist() == pytest.approx([2.0538395243343257])
    published = [
        ([0.005137863140060514, 0.005609902964010751, 0.005322668739026588], 0.42753928109782646),
        ([0.14533044351317892, 0.14138313088385895, 0.11830027474765847], 3.742090962431625),
        ([0.15566864897082, 0.5167393208584581, -0.479028121764246], 1.689286746459998),
        ([-0.20256038341441224, 0.32482725098526327, -0.2778346962637859], 0.49255783862639935),
    ]
    for gradient, (first, norm) in zip(gradients, published, strict=True):
        assert gradient.flatten()[:3].tolist() == pytest.approx(first)
        assert gradient.norm().item() == pytest.approx(norm)
    # In evaluation, the running statistics of this single batch are used.
    assert heads.logits(0, x)[0, 0].tolist() == pytest.approx(
        [-0.17486583677397827, 0.7256630496527329, -0.8640629011469548,
         0.1635011477024278, 1.025560796162116]
    )  # fmt: skip


def test_a_head_has_as_many_parameters_as_published():
    sizes = {"sources": 1, "values": 1, "queries": 32, "dim": 768, "classes": 1000}
    heads = AttentiveHeads.initialize(**sizes, seed=0)

    # The authors' log, logs/dino_vitb/ep.txt, states 1383400.
    assert sum(part.numel() for part in heads.parameters) == 1_383_400


def train_heads(features: StoredFeatures, *rates: float, batch_size: int) -> AttentiveHeads:
    """Train one attentive head for each learning rate."""
    pool = AttentivePooling(queries=3, epochs=3, batch_size=batch_size, learning_rates=rates)
    steps = []

    def progress(items: Any, description: str, total: int | None = None) -> Any:
        steps.append(total)
        return items

    labels, entries, cpu = torch.arange(10) % 4, torch.arange(10), torch.device("cpu")
    found = pool.train(features, labels, entries, classes=4, seed=5, device=cpu, progress=progress)
    # Incomplete batches are left out, unless there are too few images for one batch.
    assert steps == [3 * max(1, 10 // batch_size)]
    return found.heads


def test_training_and_scored_images_are_cropped_alike(root, monkeypatch):
    shares, crop = [], central_square

    def remember(*given: Any, crop_share: float) -> Tensor:
        shares.append(crop_share)
        return crop(*given, crop_share=crop_share)

    for module in ("probes.classification", "probes.features.training_images"):
        monkeypatch.setattr(f"{module}.central_square", remember)
    scores(root, pool=AttentivePooling(queries=4, epochs=1, batch_size=10), crop_share=0.5)
    assert shares == [0.5] * (30 + 12)


@pytest.mark.parametrize("batch_size", [4, 64])
def test_parallel_heads_equal_separately_trained_heads(batch_size):
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(2, 10, 2, 3, 6, generator=generator).half()
    masks = torch.zeros(10, 1, 1, dtype=torch.uint8)

    both = train_heads(StoredFeatures((1, 4), blocks, masks), 1.0, 30.0, batch_size=batch_size)

    for (index, layer), (number, rate) in product(enumerate((1, 4)), enumerate((1.0, 30.0))):
        features = StoredFeatures((layer,), blocks[[index]], masks)
        single = train_heads(features, rate, batch_size=batch_size)
        for item in fields(AttentiveHeads):
            one, other = getattr(both, item.name), getattr(single, item.name)
            torch.testing.assert_close(one[index, number], other[0, 0], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(both.query[0, 0], both.query[0, 1])


def test_the_rate_rises_in_one_ninth_and_follows_a_cosine(monkeypatch):
    found = []

    def record(optimizer, parameters, gradients, states, rates, step):
        found.append((step, rates.tolist()))

    monkeypatch.setattr("probes.heads.attentive.update_heads", record)
    pool = AttentivePooling(queries=2, epochs=18, batch_size=10, learning_rates=[2.0, 8.0])
    masks = torch.zeros(10, 1, 1, dtype=torch.uint8)
    features = StoredFeatures((0,), torch.ones(1, 10, 1, 1, 4).half(), masks)
    labels, entries, cpu = torch.arange(10) % 2, torch.arange(10), torch.device("cpu")
    pool.train(features, labels, entries, classes=2, seed=0, device=cpu, progress=silent)

    cosine = 0.5 * (1 + np.cos(np.pi * np.arange(16) / 16))
    factors = [1 / 3, 2 / 3, *cosine]
    assert [step for step, _ in found] == list(range(1, 19))
    for number, peak in enumerate((2.0, 8.0)):
        assert [rates[number] for _, rates in found] == pytest.approx(
            [peak * one for one in factors], rel=1e-5
        )


def test_lars_scales_the_update_to_the_norm_of_each_head():
    # The weights have norms 5 and 10, the gradients 2 and 4. LARS multiplies the learning rates
    # 0.1 and 1 by 0.001 times the ratio of these norms.
    parameter = torch.tensor([[[[3.0, 4.0]], [[6.0, 8.0]]]])
    gradient = torch.tensor([[[[2.0, 0.0]], [[0.0, 4.0]]]])
    bias, state, rates = torch.ones(1, 2, 1), {}, torch.tensor([0.1, 1.0])
    for step in (1, 2):
        LARS().update(parameter, gradient, state, rates[:, None, None], step)
    LARS().update(bias, torch.full((1, 2, 1), 7.0), {}, rates[:, None], 1)

    first, second = parameter[0, :, 0].double().tolist()
    # The first step counts once, and the second 1.9 times because of the momentum.
    assert first == pytest.approx([3 - 0.1 * 0.005 * 2.9, 4], abs=1e-5)
    assert second == pytest.approx([6, 8 - 0.01 * 2.9], abs=1e-4)
    assert bias.flatten().tolist() == pytest.approx([1 - 0.7, 1 - 7.0])


def test_features_in_memory_and_on_disk_give_the_same_scores(root, cache):
    encoder = tiny()
    counter = Counter(encoder)

    in_memory = scores(root, encoder=encoder, encoder_batch_size=7)
    on_disk = scores(root, memory_gib=0.0)

    assert counter.images == 30 + 12
    assert list((cache.parent / "features").iterdir())
    for cell, score in in_memory.items():
        other, details = on_disk[cell], score.details
        assert details["feature_tier"] == "memory"
        assert other.details["feature_tier"] == "disk"
        assert other.value == pytest.approx(score.value, nan_ok=True)
        assert other.details["top1_by_rate"] == details["top1_by_rate"]
        assert (details["num_train_images"], details["num_held_out_images"]) == (27, 3)
        assert cell[2] != "top1_holdout" or score.value >= 90


def test_attentive_heads_can_be_trained_on_shots(root):
    score = scores(root, shots=[1], draws=2)[2, FACET, "top1_holdout_1shot"]
    details = score.details

    # Heads that are trained with the labels of other images have a score of about 25.
    assert score.value > 75
    assert (details["num_train_images"], details["num_held_out_images"]) == (6, 6)
    assert len(details["value_by_draw"]) == len(set(details["train_ids_sha256_by_draw"])) == 2


def test_patches_without_content_are_flagged(root):
    score = scores(root, encoder=build_constant_encoder())[0, FACET, "top1_oracle"]

    assert score.details["constant_features"]
    assert score.value < 50


@pytest.mark.parametrize(("pool", "facet"), [(QUICK, FACET), (FixedPooling(), "cls")])
def test_each_block_has_its_own_held_out_accuracy_and_flags(root, pool, facet):
    model = build_vit(replace(TINY, skip_mlp=False), seed=0)
    torch.nn.init.zeros_(model.get_parameter("blocks.2.mlp.fc2.weight"))
    encoder = encoder_from_model(model, name="flat end")

    found = scores(root, pool=pool, encoder=encoder, holdout=0.3)

    first, last = (found[layer, facet, "top1_holdout"].details for layer in (0, 2))
    assert (first["constant_features"], last["constant_features"]) == (False, True)
    assert max(first["top1_by_rate_held_out"]) > 80 > max(last["top1_by_rate_held_out"])


def test_classes_of_held_out_images_have_no_training_image(root):
    probe = LinearClassification(pool=QUICK, crop_share=1.0, num_workers=1)
    found = run_probe(probe, select_train_images(root, range(0, 30, 5)))
    warnings = found[0, FACET, "top1_holdout"].details["warnings"]
    assert "1 of 6 classes have no training image" in warnings


def test_queries_that_do_not_divide_the_channels_are_refused(root):
    with pytest.raises(ConfigurationError) as caught:
        scores(root, pool=AttentivePooling())
    assert caught.value.hint == ("probe.pool.queries=12",)


@pytest.mark.parametrize(
    "word", ["probe.facet=patch_mean", "probe.layers_mode=last4", "probe.pool.learning_rates=[]"]
)
def test_options_that_do_not_fit_the_pool_are_refused(word):
    with pytest.raises(ConfigurationError, match=r"probe\.(facet|layers_mode|pool)"):
        plan_probes(["classification"], ["class_folders"], ["probe.pool=attentive", word])


def test_the_command_line_selects_the_pool_by_name():
    words = ["probe.pool=attentive", "probe.pool.queries=8", "probe.training.c_values=[1.0]"]
    (planned,) = plan_probes(["classification"], ["class_folders"], words)

    assert planned.probe.settings() == {
        "pool": "attentive", "queries": 8, "optimizer": "lars", "epochs": 20, "batch_size": 256,
        "learning_rates": [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0],
        "holdout": 0.1, "train_images": None, "image_size": None, "crop_share": 0.875,
    }  # fmt: skip
    assert planned.probe.list_score_keys([3])[0] == (3, FACET, "top1_holdout")
