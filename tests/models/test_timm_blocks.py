"""Test the features that are extracted from timm models."""

from copy import deepcopy
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from ssl_bench.errors import CheckpointError, ConfigurationError, UnsupportedEncoderError
from ssl_bench.features import FeatureExtractor
from ssl_bench.layers import Facet
from ssl_bench.models import Encoder, load_encoder
from ssl_bench.models.loading.timm_encoder import timm_encoder
from ssl_bench.models.timm_blocks import UnsupportedBlocks, trace_blocks
from tests.support.foreign_weights import (
    assert_same_weights,
    normalise,
    save_checkpoint,
    save_hf_folder,
)

SMALL: dict[str, Any] = {"depth": 2, "embed_dim": 32, "num_heads": 2}
HIERA: dict[str, Any] = {"embed_dim": 8, "stages": (1, 2, 3, 1), "img_size": (64, 96)}
HIERA |= {"mask_unit_size": (8, 8)}
SAM: dict[str, Any] = {**SMALL, "img_size": 48, "window_size": 2, "global_attn_indexes": [1]}
# Architecture, its special feature, patch size, number of prefix tokens, and of registers.
VITS = [
    ("vit_tiny_patch16_224", "plain", 16, 1, 0),
    ("vit_small_patch14_reg4_dinov2", "registers without positions, LayerScale", 14, 5, 4),
    ("vit_base_patch16_224_miil", "no bias of q, k, v", 16, 1, 0),
    ("deit_tiny_distilled_patch16_224", "two class tokens", 16, 2, 0),
    ("deit3_small_patch16_224", "[CLS] without a position", 16, 1, 0),
    ("vit_base_patch16_siglip_gap_224", "no [CLS]", 16, 0, 0),
    ("vit_base_patch16_reg4_gap_256", "registers, no [CLS]", 16, 4, 4),
    ("vit_base_patch16_clip_quickgelu_224", "a norm before the blocks", 16, 1, 0),
    ("eva_giant_patch14_224", "biases beside qkv", 14, 1, 0),
    ("eva02_base_patch14_224", "rotary positions, three layers in place of qkv", 14, 1, 0),
    ("vit_small_patch16_dinov3", "DINOv3", 16, 5, 4),
    ("vit_base_patch16_rope_mixed_ape_224", "rotary positions of each block", 16, 1, 0),
    ("vit_tiny_r_s16_p8_224", "patches behind convolutions", 32, 1, 0),
]
# Architecture, arguments, native size, whether other sizes are accepted, strides, prefix tokens,
# and registers.
TRACED: list[tuple[str, dict[str, Any], tuple[int, int], bool, tuple[int, ...], int, int]] = [
    ("hiera_tiny_224", HIERA, (64, 96), False, (4, 8, 8, 16, 16, 16, 32), 0, 0),
    ("beit_base_patch16_224", {**SMALL, "img_size": (48, 80)}, (48, 80), False, (16, 16), 1, 0),
    ("samvit_base_patch16_224", SAM, (48, 48), True, (16, 16), 0, 0),
    ("naflexvit_base_patch16_gap", SMALL, (384, 384), True, (16, 16), 4, 4),
    # timm states 176 x 176 pixels, which is not a multiple of the largest stride.
    ("resnet10t", {}, (192, 192), True, (4, 8, 16, 32), 0, 0),
    ("resnetv2_18", {}, (224, 224), True, (4, 4, 8, 8, 16, 16, 32, 32), 0, 0),
    ("mobilenetv3_small_050", {}, (224, 224), True, (4, 8, 8, *(16,) * 5, 32), 0, 0),
]


def random_model(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    model: Any = timm.create_model(name, **{"num_classes": 0, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.eval()


def as_encoder(model: Any) -> Encoder:
    return timm_encoder(deepcopy(model), uri="memory", name="small", sha256="")


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


def compute_keys(model: Any, images: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Compute the keys of an attention layer in float64."""
    attention = model.blocks[layer].attn
    recorded: list[Tensor] = []
    handle = attention.register_forward_pre_hook(lambda _, inputs: recorded.append(inputs[0]))
    with torch.no_grad():
        model(images)
    handle.remove()
    if attention.qkv is None:
        weight, bias = attention.k_proj.weight, attention.k_proj.bias
    else:
        weight = attention.qkv.weight.chunk(3)[1]
        bias = getattr(attention, "k_bias", None)
        if bias is None and attention.qkv.bias is not None:
            bias = attention.qkv.bias.chunk(3)[1]
    keys = recorded[0].double() @ weight.double().T
    return recorded[0], (keys if bias is None else keys + bias.double()).float()


@torch.no_grad()
@pytest.mark.parametrize(("name", "what", "patch", "prefix", "registers"), VITS)
def test_features_of_vits_equal_timm(name, what, patch, prefix, registers):
    size = (3 * patch, 5 * patch)
    model = random_model(
        name, depth=2, embed_dim=64, num_heads=2, dynamic_img_size=True, img_size=size
    )
    encoder, has_cls = as_encoder(model), prefix > registers
    assert (encoder.patch_size, encoder.native_size) == (patch, size)
    assert (encoder.num_prefix_tokens, encoder.num_registers) == (prefix, registers), what
    assert encoder.has_cls is has_cls
    images = torch.rand(2, 3, *size)
    facets: list[Facet] = ["token", "token_normed", "key", *(["cls"] if has_cls else [])]

    features = FeatureExtractor(encoder, layers=[0, 1], facets=facets)(images)

    blocks = model.forward_intermediates(
        normalise(encoder, images), intermediates_only=True,
        return_prefix_tokens=prefix > 0, output_fmt="NLC",
    )  # fmt: skip
    for layer, tokens in enumerate(blocks):
        patches, front = tokens if prefix else (tokens, tokens)
        assert_close(features[layer]["token"].flatten(1, 2), patches)
        assert_close(features[layer]["token_normed"].flatten(1, 2), model.norm(patches))
        if has_cls:
            assert_close(features[layer]["cls"], front[:, 0])
        _, keys = compute_keys(model, normalise(encoder, images), layer)
        assert_close(features[layer]["key"].flatten(1, 2), keys[:, prefix:])
    images = torch.rand(1, 3, 4 * patch - 3, 2 * patch)
    padded = FeatureExtractor(encoder, layers=[1], facets=["token", "key"], pad=True)(images)[1]
    assert padded["token"].shape[:3] == padded["key"].shape[:3] == (1, 4, 2)


@pytest.mark.parametrize(
    ("name", "changes", "native", "dynamic_image_size", "strides", "prefix", "registers"),
    TRACED,
    ids=[row[0] for row in TRACED],
)
def test_features_of_traced_blocks_equal_timm(
    name, changes, native, dynamic_image_size, strides, prefix, registers
):
    model = random_model(name, **changes)
    encoder = as_encoder(model)

    assert (encoder.native_size, encoder.dynamic_image_size) == (native, dynamic_image_size)
    assert encoder.strides == strides
    assert (encoder.num_prefix_tokens, encoder.num_registers) == (prefix, registers)
    layers = range(encoder.depth)
    images = torch.rand(2, 3, *((64, 96) if dynamic_image_size else native))
    features = FeatureExtractor(encoder, layers=layers)(images)
    options = {"coarse": False} if hasattr(model, "reroll") else {}
    with torch.no_grad():
        expected = model.forward_intermediates(
            normalise(encoder, images), intermediates_only=True, **options
        )
    # timm has no features of the blocks within a stage of a ConvNet.
    ends = [i for i in layers if strides[i + 1 : i + 2] != strides[i : i + 1]]
    compared = layers if len(expected) == encoder.depth else ends
    for layer, maps in zip(compared, expected[-len(compared) :], strict=True):
        assert_close(features[layer]["token"], maps.permute(0, 2, 3, 1))
    if not dynamic_image_size:
        with pytest.raises(ConfigurationError, match=f"{native[0]} x {native[1]}"):
            FeatureExtractor(encoder, layers=[1])(torch.rand(1, 3, 32, 32))


def test_a_torchvision_resnet_gives_its_residual_blocks(tmp_path):
    torch.manual_seed(0)
    model = torchvision.models.resnet18().eval()
    path = save_checkpoint(tmp_path / "weights.pth", model.state_dict())
    with pytest.raises(CheckpointError) as raised:
        load_encoder(str(path))
    assert raised.value.hint == ("--checkpoint", "timm:{timm_name}@{file}")
    outputs: list[Tensor] = []
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        for block in stage.children():
            block.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    encoder = load_encoder(f"timm:resnet18@{path}")

    assert (encoder.depth, encoder.num_heads, encoder.dim) == (8, 0, 512)
    assert encoder.position_rule is None
    assert (len(encoder.weights_info.ignored), encoder.loaded_keys) == (2, encoder.total_keys - 2)
    images = torch.rand(1, 3, 64, 96)
    with torch.no_grad():
        model(normalise(encoder, images))
    facets: list[Facet] = ["token", "token_normed"]
    features = FeatureExtractor(encoder, layers=range(8), facets=facets)(images)
    for layer, output in enumerate(outputs):
        assert torch.equal(features[layer]["token"], output.permute(0, 2, 3, 1))
        # There is no final norm.
        assert torch.equal(features[layer]["token_normed"], features[layer]["token"])


@pytest.mark.parametrize(
    ("name", "changes", "layer"),
    [("hiera_tiny_224", HIERA, 2), ("samvit_base_patch16_224", SAM, 1)],
)
def test_inner_facets_are_ordered_row_by_row(name, changes, layer):
    model = random_model(name, **changes)
    encoder = as_encoder(model)
    images = torch.rand(2, 3, *encoder.native_size)
    x, keys = compute_keys(model, normalise(encoder, images), layer)
    facets = ["key", "attn_skip", "mlp_out", "token", "blocks.*.norm1"]
    features = FeatureExtractor(encoder, layers=[layer], facets=facets)(images)[layer]
    if name.startswith("hiera"):
        x, keys = model.reroll(x, layer), model.reroll(keys, layer)
    assert_close(features["blocks.*.norm1"], x)
    assert_close(features["key"], keys)
    assert_close(features["attn_skip"] + features["mlp_out"], features["token"])


@pytest.mark.parametrize(
    ("name", "changes", "layer", "facet"),
    [
        # The block pools its queries, so it has more keys than tokens.
        ("hiera_tiny_224", HIERA, 1, "key"),
        # The block attends within windows.
        ("samvit_base_patch16_224", SAM, 0, "key"),
        # One layer computes queries, keys, values and the MLP.
        ("vit_pwee_patch16_reg1_gap_256", {**SMALL, "img_size": 32}, 1, "key"),
        # There are fewer keys than queries.
        ("vit_base_patch16_sapiens2", {**SMALL, "num_kv_heads": (2, 1), "img_size": 32}, 1, "key"),
        ("naflexvit_base_patch16_gap", {**SMALL, "img_size": 32}, 0, "cls"),
    ],
)
def test_facets_that_a_block_lacks_are_refused(name, changes, layer, facet):
    encoder = as_encoder(random_model(name, **changes))
    images = torch.rand(1, 3, *encoder.native_size)
    with pytest.raises(UnsupportedEncoderError) as raised:
        FeatureExtractor(encoder, layers=[layer], facets=[facet])(images)
    assert raised.value.hint == ("probe.facet=token", "or", "--facet", "token")
    tokens = FeatureExtractor(encoder, layers=[layer])(images)[layer]["token"]
    assert tokens.shape[1] == encoder.native_size[0] // encoder.stride(layer)


@pytest.mark.parametrize(
    ("name", "changes", "norm"),
    [
        ("hiera_tiny_224", HIERA, "head.norm"),
        ("samvit_base_patch16_224", {**SAM, "neck_chans": None}, "neck"),
        (
            "swinv2_tiny_window8_256",
            {"embed_dim": 8, "depths": (1,) * 4, "num_heads": (1,) * 4, "img_size": 64},
            "norm",
        ),
    ],
)
def test_the_final_norm_is_applied_to_tokens(name, changes, norm):
    model = random_model(name, **changes)
    encoder, part = as_encoder(model), model.get_submodule(norm)
    last, facets = encoder.depth - 1, ["token", "token_normed"]
    images = torch.rand(1, 3, *encoder.native_size)
    features = FeatureExtractor(encoder, layers=[last], facets=facets)(images)[last]
    normed = nn.functional.layer_norm(
        features["token"], part.normalized_shape, part.weight, part.bias, part.eps
    )
    assert_close(features["token_normed"], normed)


def test_weights_of_sam_with_its_own_names_are_loaded(tmp_path):
    model = random_model("samvit_base_patch16_224", **SAM)
    weights = {
        f"image_encoder.{name}".replace("mlp.fc", "mlp.lin"): value
        for name, value in model.state_dict().items()
    }
    others = {"prompt_encoder.x": torch.zeros(2, 8), "mask_decoder.y": torch.zeros(1, 8)}
    config = {"architecture": "samvit_base_patch16_224", "model_args": SAM}
    encoder = load_encoder(save_hf_folder(tmp_path / "sam", weights | others, config))
    assert_same_weights(encoder.module.get_submodule("model"), model.state_dict())
    assert encoder.weights_info.ignored.keys() == others.keys()


@pytest.mark.parametrize("has_timm_names", [True, False])
def test_a_file_without_an_expected_tensor_is_refused(tmp_path, has_timm_names):
    weights = timm.create_model("resnet10t", num_classes=0).state_dict()
    if has_timm_names:
        del weights["layer2.0.bn1.bias"]
    else:
        weights = {f"backbone_{name}": value for name, value in weights.items()}
    with pytest.raises(CheckpointError) as raised:
        load_encoder(f"timm:resnet10t@{save_checkpoint(tmp_path / 'weights.pth', weights)}")
    assert ("timm:{timm_name}@{file}" in raised.value.hint) is has_timm_names


class Blocks(nn.Module):
    """A minimal model with the interface of a timm model."""

    def __init__(self, *blocks: nn.Module, stride: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 8, stride=8)
        self.layer = nn.Sequential(*blocks)
        self.stride = stride
        self.feature_info = [{"module": "layer", "reduction": 8, "num_chs": 4}]
        self.pretrained_cfg = {"input_size": (3, 32, 32)}

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(self.stem(images))

    def forward_intermediates(self, images: Tensor, intermediates_only: bool) -> list[Tensor]:
        assert intermediates_only
        return [self(images)[:, :, :: self.stride]]


class Block(nn.Module):
    def __init__(self, *, inplace: bool = False) -> None:
        super().__init__()
        self.conv, self.inplace = nn.Conv2d(4, 4, 1), inplace

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.relu_() if self.inplace else x.relu())


class WithClassToken(nn.Module):
    def forward(self, maps: Tensor) -> Tensor:
        tokens = maps.flatten(2).transpose(1, 2)
        return torch.cat([tokens[:, :1], tokens], dim=1)


class MapThenTokens(Blocks):
    def __init__(self) -> None:
        super().__init__(Block())
        self.last = WithClassToken()
        self.feature_info = [*self.feature_info, self.feature_info[0] | {"module": "last"}]

    def forward(self, images: Tensor) -> Tensor:
        return self.last(super().forward(images))

    def forward_intermediates(self, images: Tensor, intermediates_only: bool) -> list[Tensor]:
        assert intermediates_only
        return [super().forward(images)] * 2


class RepeatedStage(Blocks):
    def forward(self, images: Tensor) -> Tensor:
        return self.layer(super().forward(images))

    def forward_intermediates(self, images: Tensor, intermediates_only: bool) -> list[Tensor]:
        assert intermediates_only
        return [super().forward(images)]


def test_only_a_stage_of_equal_blocks_is_divided():
    model, state = Blocks(Block(), Block()).train(), torch.get_rng_state()
    assert trace_blocks(model).blocks == ("layer.0", "layer.1")
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert model.layer[0].training
    # The blocks have two classes, or no submodules.
    assert trace_blocks(Blocks(Block(), nn.Sequential(Block()))).blocks == ("layer",)
    assert trace_blocks(Blocks(nn.ReLU())).blocks == ("layer",)
    # The second block modifies the output of the first.
    assert trace_blocks(Blocks(Block(), Block(inplace=True))).blocks == ("layer",)


@pytest.mark.parametrize(
    "model", [Blocks(Block(), stride=2), MapThenTokens(), RepeatedStage(Block())]
)
def test_stages_with_unsupported_outputs_are_refused(model):
    with pytest.raises(UnsupportedBlocks):
        trace_blocks(model)


def test_blocks_with_different_numbers_of_tokens_are_refused():
    # [CLS] is added before the last block.
    model = random_model("convit_tiny", depth=3, local_up_to_layer=2)
    with pytest.raises(CheckpointError) as raised:
        as_encoder(model)
    assert raised.value.hint == ("--checkpoint", "{file}.py:{name}")
