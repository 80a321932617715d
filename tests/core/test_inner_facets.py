"""Test the extraction of features inside a transformer block."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_bench.errors import ConfigurationError, UnsupportedEncoderError
from ssl_bench.features import FeatureExtractor
from ssl_bench.layers import INNER_FACETS, parse_facets, select_layers
from ssl_bench.models import (
    ConvMixerConfig,
    Encoder,
    build_encoder,
    build_vit,
    encoder_from_model,
)
from tests.core import test_features
from tests.support.faults import TINY
from tests.support.own_module import own

NEUTRAL: dict[str, Any] = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
IMAGES = torch.rand(2, 3, 16, 24, generator=torch.Generator().manual_seed(0))


def ours(**changes: Any) -> Encoder:
    encoder = encoder_from_model(build_vit(replace(TINY, **changes), seed=0), name="x")
    return replace(encoder, **NEUTRAL)


def of_timm(**changes: Any) -> Encoder:
    torch.manual_seed(0)
    return replace(test_features.of_timm(12, 2, 2, init_values=0.5, **changes), **NEUTRAL)


def extract(encoder: Encoder, *facets: str, layer: int = 1) -> Mapping[str, Tensor]:
    return FeatureExtractor(encoder, layers=[layer], facets=facets)(IMAGES)[layer]


def block_input(encoder: Encoder, layer: int) -> Tensor:
    seen: list[Tensor] = []
    block = encoder.module.get_submodule("blocks").get_submodule(str(layer))
    with block.register_forward_pre_hook(lambda _, given: seen.append(given[0])), torch.no_grad():
        encoder.module(IMAGES)
    return seen[0]


def patches(tokens: Tensor) -> Tensor:
    return tokens[:, 1:].unflatten(1, (2, 3))


@pytest.mark.parametrize("skip_attention", [True, False])
@pytest.mark.parametrize("skip_mlp", [True, False])
@torch.no_grad()
def test_inner_facets_are_the_steps_of_our_block(skip_attention, skip_mlp):
    encoder = ours(skip_attention=skip_attention, skip_mlp=skip_mlp)
    block: Any = encoder.module.get_submodule("blocks.1")
    x = block_input(encoder, 1)
    attn_out = block.attn(block.norm1(x))
    attn_skip = x + attn_out if skip_attention else attn_out
    hidden = F.gelu(block.mlp.fc1(block.norm2(attn_skip)))
    mlp_out = block.mlp.fc2(hidden)
    expected = {
        "attn_out": attn_out, "attn_skip": attn_skip, "mlp_hidden": hidden, "mlp_out": mlp_out,
        "blocks.*.mlp.fc1": block.mlp.fc1(block.norm2(attn_skip)),
        "blocks.*.norm1": block.norm1(x),
        "token": attn_skip + mlp_out if skip_mlp else mlp_out,
    }  # fmt: skip

    features = extract(encoder, *expected)

    for facet, tokens in expected.items():
        assert torch.equal(features[facet], patches(tokens)), facet


@pytest.mark.parametrize("kind", ["Block", "ResPostBlock"])
@torch.no_grad()
def test_the_skips_of_timm_add_up_the_inner_facets(kind):
    encoder = of_timm(block_fn=getattr(timm.models.vision_transformer, kind))
    if kind == "Block":
        block: Any = encoder.module.get_submodule("blocks").get_submodule("1")
        before = block.attn(block.norm1(block_input(encoder, 1)))
        features = extract(encoder, "attn_out", "blocks.*.attn")
        assert torch.equal(features["attn_out"], patches(before * block.ls1.gamma))
        assert torch.equal(features["blocks.*.attn"], patches(before))

    features = extract(encoder, "token", *INNER_FACETS)

    x = patches(block_input(encoder, 1))
    assert torch.equal(features["attn_skip"], x + features["attn_out"])
    assert torch.equal(features["token"], features["attn_skip"] + features["mlp_out"])
    assert features["attn_out"].abs().max() > 1e-3
    assert features["mlp_hidden"].shape == (2, 2, 3, 48)


class Wrapped(nn.Module):
    def __init__(self, block: nn.Module, shown: nn.Module, times: int) -> None:
        super().__init__()
        self.block, self.shown, self.times = block, shown, times

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        for _ in range(self.times):
            self.shown(x)
        return x


def encoder_calling(shown: nn.Module, times: int = 1) -> Encoder:
    encoder = ours()
    blocks: Any = encoder.module.get_submodule("blocks")
    blocks[1] = Wrapped(blocks[1], shown, times)
    return encoder


class Apply(nn.Module):
    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Any:
        return self.change(x)


class AddsInPlace(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).add_(1)


def test_a_facet_is_copied_before_a_change_in_place():
    encoder = ours()
    blocks: Any = encoder.module.get_submodule("blocks")
    blocks[1] = AddsInPlace(blocks[1], nn.Identity(), 1)

    features = extract(encoder, "token", "blocks.*.shown")

    assert torch.equal(features["blocks.*.shown"] + 1, features["token"])


@pytest.mark.parametrize("layout", ["channels first", "channels last"])
def test_maps_have_rows_and_columns_of_their_patches(layout):
    order = (0, 3, 1, 2) if layout == "channels first" else (0, 1, 2, 3)
    shown = Apply(lambda x: patches(x).permute(order))

    features = extract(encoder_calling(shown), "token", "blocks.*.shown")

    assert torch.equal(features["blocks.*.shown"], features["token"])


def test_maps_with_as_many_channels_as_rows_are_not_transposed():
    # With 12 channels and 12 x 12 patches, the shape does not show which dimension is which.
    shown = Apply(lambda x: x[:, 1:].unflatten(1, (2, 3) if x.shape[1] == 7 else (12, 12)))
    facets = ["token", "blocks.*.shown"]
    extractor = FeatureExtractor(encoder_calling(shown), layers=[1], facets=facets)
    features = extractor(torch.rand(1, 3, 96, 96))[1]

    assert torch.equal(features["blocks.*.shown"], features["token"])


@pytest.mark.parametrize(
    ("make", "facet", "named"),
    [
        (ours, "blocks.*.mlp.fc3", "use `'probe.facet=blocks.*.mlp.fc2'`"),
        (ours, "blocks.*.zzz", "blocks.1.zzz .*blocks.1: graying, norm1, attn, norm2"),
        (lambda: encoder_calling(Apply(lambda x: (x, x))), "blocks.*.shown", "tuple"),
        (lambda: encoder_calling(Apply(lambda x: x.mean(1))), "blocks.*.shown", r"\(2, 12\) for 2"),
        (lambda: encoder_calling(nn.Identity(), 2), "blocks.*.shown", "more than once"),
        (
            lambda: encoder_calling(nn.Sequential(nn.Identity()), 0),
            "blocks.*.shown blocks.*.shown.0",
            "never calls blocks.*.shown, blocks.*.shown.0 of block 1 ",
        ),
        (of_timm, "blocks.*.attn.q_norm", r"has the shape \(2, 2, 7, 6\) for 2 images"),
    ],
)
def test_a_submodule_that_cannot_be_probed_is_refused(make, facet, named):
    with pytest.raises(UnsupportedEncoderError, match=named):
        FeatureExtractor(make(), layers=[1], facets=facet.split())


@pytest.mark.parametrize("facet", INNER_FACETS)
def test_errors_for_missing_block_parts_list_the_existing_parts(facet):
    config = ConvMixerConfig(image_size=32, patch_size=8, dim=12, depth=2, kernel_size=3)
    encoder = encoder_from_model(build_encoder(config, seed=0), name="mixer")

    with pytest.raises(
        UnsupportedEncoderError, match=f"{facet} .*depthwise, norm1, pointwise"
    ) as caught:
        FeatureExtractor(encoder, layers=[0], facets=[facet])
    assert caught.value.hint[0] == "probe.facet=blocks.*.{name}"
    features = FeatureExtractor(encoder, layers=[0], facets=["token", "blocks.*.norm2"])(IMAGES)[0]
    assert torch.equal(features["token"], features["blocks.*.norm2"])


def test_an_encoder_of_one_size_has_inner_facets():
    module, images = own(), torch.rand(2, 3, 32, 32)
    encoder = Encoder.from_module(module, mean=0, std=1)
    extractor = FeatureExtractor(encoder, layers=[1], facets=["blocks.*.mlp.0"])
    outputs: list[Tensor] = []
    part = module.get_submodule("trunk.1.mlp.0")
    with part.register_forward_hook(lambda *found: outputs.append(found[-1])):
        features = extractor(images)[1]

    assert extractor.width("blocks.*.mlp.0") == 32
    expected = outputs[0][:, 1:].unflatten(1, (4, 4))
    assert torch.equal(features["blocks.*.mlp.0"], expected)


def test_blocks_of_different_widths_are_refused():
    encoder = ours()
    blocks: Any = encoder.module.get_submodule("blocks")
    blocks[1].mlp = type(blocks[1].mlp)(12, 20)

    with pytest.raises(
        UnsupportedEncoderError, match=r"mlp_hidden .* 20 channels in block 1, but 48 "
    ):
        FeatureExtractor(encoder, layers=[0, 1], facets=["mlp_hidden"])
    assert FeatureExtractor(encoder, layers=[1], facets=["mlp_hidden"]).width("mlp_hidden") == 20


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(12, 20), nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.w3(F.silu(self.w1(tokens)) * self.w2(tokens))


def test_the_hidden_layer_of_swiglu_is_the_input_of_the_last_matrix():
    encoder = ours()
    blocks: Any = encoder.module.get_submodule("blocks")
    blocks[1].mlp = SwiGLU()
    assert extract(encoder, "mlp_hidden")["mlp_hidden"].shape == (2, 2, 3, 20)


def test_facet_names_are_parsed_into_a_name_and_a_block():
    known = ("key", "token")
    for facet, names, block in [
        ("blocks.7.mlp.fc1", ("blocks.*.mlp.fc1",), 7),
        ("blocks.*.mlp.fc1", ("blocks.*.mlp.fc1",), None),
        (["blocks.0.attn", "token", "key"], ("key", "token", "blocks.*.attn"), 0),
    ]:
        parsed = parse_facets(facet, known)
        assert (parsed.names, parsed.block) == (names, block)


@pytest.mark.parametrize(
    "facet",
    [
        "keys", [], "norm.weight", "blocks.7", "blocks.07.attn", "blocks.*.attn/../x",
        ["blocks.1.attn", "blocks.2.attn"], ["blocks.1.attn", "blocks.*.attn"],
    ],
)  # fmt: skip
def test_invalid_facet_names_are_refused(facet):
    with pytest.raises(ConfigurationError, match=r"^probe\.facet"):
        parse_facets(facet, ["key"])


def test_the_block_of_a_facet_name_is_the_probed_layer():
    named = parse_facets("blocks.2.attn", ["key"])

    assert [select_layers(named, layers, 4) for layers in ("all", "2", "-2")] == [(2,)] * 3
    assert select_layers(parse_facets("blocks.*.attn", ["key"]), "all", 2) == (0, 1)
    assert select_layers(None, "all", 2) == (0, 1)
    with pytest.raises(ConfigurationError) as caught:
        select_layers(named, "0,1", 4)
    assert caught.value.hint == ("--layer", "2")
    with pytest.raises(ConfigurationError):
        select_layers(named, "all", 2)
