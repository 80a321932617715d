"""Table 3 of "Always Skip Attention": logarithms of condition numbers, their mean over blocks."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from probes.conditioning.decomposition import BlockPass, decompose_block
from probes.conditioning.probe import Conditioning
from probes.conditioning.scores import MEAN_LOG, log_condition_numbers, mean_log_scores
from ssl_bench.models import build_vit
from ssl_bench.models.graying import TokenGraying
from tests.probes.test_conditioning import (  # noqa: F401 - photographs is a fixture
    TINY,
    found,
    photographs,
    probe,
    tiny,
)
from tests.support.matrices import condition

DEEP = replace(TINY, depth=3)
TOKENS = torch.tensor([[3.0, 0.0], [0.0, 1.0]], dtype=torch.float64)


class Block(nn.Module):
    """A block of no norms whose attention multiplies channels, and whose MLP gives nothing."""

    skip_attention = skip_mlp = True

    def __init__(self, gains=(0.0, 0.0), exponent=1.0) -> None:
        super().__init__()
        self.graying = TokenGraying("svd", exponent)
        self.norm1 = self.norm2 = nn.Identity()
        self.attn, self.mlp = (nn.Linear(2, 2, bias=False).double() for _ in range(2))
        self.attn.weight.data = torch.diag(torch.tensor(gains, dtype=torch.float64))
        self.mlp.weight.data.zero_()

    def forward(self, x):
        x = self.graying(x)
        return x + self.attn(x)


def passed(block, tokens=TOKENS):
    left = block(tokens[None])[0]
    return BlockPass(block, tokens, left, decompose_block(block, tokens, left, num_heads=1))


@pytest.mark.parametrize(
    ("block", "before", "after"),
    [
        (Block(), 3, 3),
        # 3 and 1 become 3 and 4.
        (Block(gains=(0.0, 3.0)), 3, 4 / 3),
        # 3 (1 / 3)^.5 is the root of 3: what attention is given is grayed.
        (Block(exponent=0.5), 3**0.5, 3**0.5),
    ],
)
def test_logarithms_of_counted_condition_numbers(block, before, after):
    assert log_condition_numbers(passed(block)) == pytest.approx(
        (math.log(before), math.log(after))
    )


def test_a_mean_is_over_the_blocks_up_to_the_asked_one():
    passes = {layer: [passed(Block(gains=(0.0, g)))] for layer, g in enumerate((0.0, 2.0, 8.0))}

    after = {s.layer: s.value for s in mean_log_scores([0, 2], passes) if s.facet == "after"}

    # 3 : 1, 3 : 3 and 3 : 9.
    assert after == pytest.approx({0: math.log(3), 2: (math.log(3) + 0 + math.log(3)) / 3})


def test_a_mean_with_a_block_that_cannot_be_taken_apart_is_left_out():
    passes = {0: [passed(Block())], 1: [replace(passed(Block()), parts=None)]}

    assert {score.layer for score in mean_log_scores([0, 1], passes)} == {0}


def test_scores_are_those_of_the_tokens_of_the_encoder_itself(photographs, tmp_path):  # noqa: F811
    encoder = tiny(DEEP)

    records = probe(
        photographs, tmp_path / "out", encoder, layers=(2,), protocol="mean_log", num_images=1
    )

    image = Image.open(tmp_path / "photos" / "a.png").resize((16, 16), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(c).view(3, 1, 1) for c in (encoder.mean, encoder.std))
    model = build_vit(DEEP, seed=0).double().requires_grad_(False)
    x = model.embed(((pixels - mean) / std)[None].double())
    logs = []
    for block in model.blocks:
        middle = x + block.get_submodule("attn")(block.get_submodule("norm1")(x))
        logs.append([math.log(condition(tokens[0])) for tokens in (x, middle)])
        x = block(x)
    assert {(r.layer, r.metric, r.unit) for r in records} == {(2, MEAN_LOG, "")}
    for column, facet in enumerate(("before", "after")):
        expected = sum(pair[column] for pair in logs) / 3
        assert found(records, 2, facet, MEAN_LOG).value == pytest.approx(expected, rel=1e-5)
    # A picture that is promised and not drawn would leave the cells pending for ever.
    assert not list((tmp_path / "out" / "pictures").rglob("*.png"))
    assert not Conditioning(protocol="mean_log").pictures((2,), photographs.images(), 0)


def test_an_exponent_of_one_gives_the_numbers_of_a_plain_encoder(photographs, tmp_path):  # noqa: F811
    values = {}
    for name, more in (
        ("plain", {}),
        ("one", {"graying": "svd", "graying_exponent": 1.0}),
        ("half", {"graying": "svd", "graying_exponent": 0.5}),
    ):
        encoder = tiny(replace(DEEP, **more), name=name)
        records = probe(photographs, tmp_path, encoder, layers=(2,), protocol="mean_log")
        values[name] = [record.value for record in records]

    assert values["one"] == pytest.approx(values["plain"], rel=1e-6)
    assert max(values["half"]) < min(values["plain"])
