"""Models of timm whose blocks are found in a trial pass, against timm's own features."""

from copy import deepcopy
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from ssl_bench.errors import CheckpointError, ConfigurationError, UnfitEncoder
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import Encoder, load_encoder
from ssl_bench.models.loading.timm_encoder import timm_encoder
from ssl_bench.models.timm_blocks import UnsupportedBlocks, trace_blocks
from tests.support.foreign_weights import saved

SMALL: dict[str, Any] = {"depth": 2, "embed_dim": 32, "num_heads": 2}
HIERA: dict[str, Any] = {"embed_dim": 8, "stages": (1, 2, 2, 1), "img_size": (96, 96)}
HIERA |= {"mask_unit_size": (8, 8)}
SAM: dict[str, Any] = {**SMALL, "img_size": 48, "window_size": 2, "global_attn_indexes": [1]}
# Name in timm, arguments, native size, another size, strides, whether [CLS] exists, registers.
MODELS: list[tuple[str, dict[str, Any], tuple[int, int], bool, tuple[int, ...], int, int]] = [
    ("hiera_tiny_224", HIERA, (96, 96), False, (4, 8, 8, 16, 16, 32), 0, 0),
    (
        "hiera_small_abswin_256",
        {**HIERA, "img_size": (64, 96)},
        (64, 96),
        False,
        (4, 8, 8, 16, 16, 32),
        0,
        0,
    ),
    ("beit_base_patch16_224", {**SMALL, "img_size": (48, 80)}, (48, 80), False, (16, 16), 1, 0),
    ("beitv2_base_patch16_224", {**SMALL, "img_size": (48, 80)}, (48, 80), False, (16, 16), 1, 0),
    ("samvit_base_patch16_224", SAM, (48, 48), True, (16, 16), 0, 0),
    ("samvit_base_patch16", {**SAM, "neck_chans": 16}, (48, 48), True, (16, 16), 0, 0),
    ("naflexvit_base_patch16_gap", SMALL, (384, 384), True, (16, 16), 4, 4),
    ("naflexvit_base_patch16_parfac_gap", SMALL, (384, 384), True, (16, 16), 4, 4),
    ("naflexvit_base_patch16_siglip", SMALL, (384, 384), True, (16, 16), 0, 0),
    # timm states 176 x 176 pixels, which are no whole number of strides.
    ("resnet10t", {}, (192, 192), True, (4, 8, 16, 32), 0, 0),
    ("resnet18", {}, (224, 224), True, (4, 4, 8, 8, 16, 16, 32, 32), 0, 0),
    ("resnetv2_18", {}, (224, 224), True, (4, 4, 8, 8, 16, 16, 32, 32), 0, 0),
    ("regnetx_002", {}, (224, 224), True, (4, 8, *(16,) * 4, *(32,) * 7), 0, 0),
    ("mobilenetv3_small_050", {}, (224, 224), True, (4, 8, 8, *(16,) * 5, 32), 0, 0),
]


def random_model(name: str, **changes: Any) -> Any:
    """Create a model with a random value in every parameter."""
    torch.manual_seed(0)
    model: Any = timm.create_model(name, num_classes=0, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.eval()


def as_encoder(model: Any) -> Encoder:
    return timm_encoder(deepcopy(model), uri="memory", name="small", sha256="")


def normalise(encoder: Encoder, images: Tensor) -> Tensor:
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (encoder.mean, encoder.std))
    return (images - mean) / std


def timm_features(model: Any, images: Tensor) -> list[Tensor]:
    """Return the features that timm extracts: of all blocks if it can, else of all stages."""
    options = {"coarse": False} if hasattr(model, "reroll") else {}
    with torch.no_grad():
        return model.forward_intermediates(images, intermediates_only=True, **options)


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "native", "any_size", "strides", "prefix", "registers"),
    MODELS,
    ids=[model[0] for model in MODELS],
)
def test_features_of_every_block_are_those_of_timm(
    name, changes, native, any_size, strides, prefix, registers
):
    model = random_model(name, **changes)
    encoder = as_encoder(model)

    assert (encoder.native_size, encoder.any_size) == (native, any_size)
    assert encoder.strides == strides
    assert (encoder.num_prefix_tokens, encoder.num_registers) == (prefix, registers)
    for size in [native, (64, 96)] if any_size else [native]:
        images = torch.rand(2, 3, *size)
        features = FeatureExtractor(encoder, layers=range(encoder.depth))(images)
        expected = timm_features(model, normalise(encoder, images))
        # timm has no features of the blocks within a stage of a ConvNet.
        ends = [
            layer
            for layer in range(encoder.depth)
            if strides[layer + 1 : layer + 2] != strides[layer : layer + 1]
        ]
        layers = range(encoder.depth) if len(expected) == encoder.depth else ends
        for layer, maps in zip(layers, expected[-len(layers) :], strict=True):
            same(features[layer]["token"], maps.permute(0, 2, 3, 1))


def test_blocks_of_a_resnet_are_its_residual_blocks():
    model = random_model("resnet18")
    encoder = as_encoder(model)
    images = torch.rand(1, 3, 64, 96)
    outputs: list[Tensor] = []
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        for block in stage:
            block.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    with torch.no_grad():
        model(normalise(encoder, images))

    features = FeatureExtractor(encoder, layers=range(8))(images)

    for layer, output in enumerate(outputs):
        assert torch.equal(features[layer]["token"], output.permute(0, 2, 3, 1))
    assert (encoder.depth, encoder.num_heads, encoder.dim) == (8, 0, 512)
    assert encoder.position_rule is None


def attention_input(model: Any, layer: int, images: Tensor) -> Tensor:
    inputs: list[Tensor] = []
    handle = model.blocks[layer].attn.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    with torch.no_grad():
        model(images)
    handle.remove()
    return inputs[0]


@pytest.mark.parametrize("layer", [0, 1])
def test_keys_of_beit_include_the_biases_beside_qkv(layer):
    model = random_model("beit_base_patch16_224", **SMALL, img_size=32)
    encoder = as_encoder(model)
    images = torch.rand(2, 3, 32, 32)
    x = attention_input(model, layer, normalise(encoder, images)).double()
    attention = model.blocks[layer].attn
    biases = (attention.q_bias, attention.k_bias, attention.v_bias)

    features = FeatureExtractor(encoder, layers=[layer], facets=["query", "key", "value"])(images)

    for facet, weight, bias in zip(
        ["query", "key", "value"], attention.qkv.weight.chunk(3), biases, strict=True
    ):
        expected = (x @ weight.double().T + bias.double()).float()[:, 1:]
        same(features[layer][facet].flatten(1, 2), expected)


def test_everything_inside_a_block_of_hiera_is_arranged_row_by_row():
    model = random_model("hiera_tiny_224", **HIERA)
    encoder = as_encoder(model)
    images = torch.rand(2, 3, 96, 96)
    layer = 2
    x = attention_input(model, layer, normalise(encoder, images)).double()
    attention = model.blocks[layer].attn
    keys = x @ attention.qkv.weight.chunk(3)[1].double().T + attention.qkv.bias.chunk(3)[1].double()
    facets = ["key", "attn_skip", "mlp_out", "token", "blocks.*.norm1"]

    features = FeatureExtractor(encoder, layers=[layer], facets=facets)(images)[layer]

    same(features["key"], model.reroll(keys.float(), layer))
    same(features["blocks.*.norm1"], model.reroll(x.float(), layer))
    same(features["attn_skip"] + features["mlp_out"], features["token"])


@pytest.mark.parametrize(
    ("name", "changes", "layer", "facet"),
    [
        # The block pools its queries, so it has more keys than tokens.
        ("hiera_tiny_224", HIERA, 1, "key"),
        ("samvit_base_patch16_224", SAM, 0, "key"),
        ("resnet10t", {}, 0, "key"),
        ("resnet10t", {}, 0, "cls"),
        ("naflexvit_base_patch16_gap", SMALL, 0, "cls"),
    ],
)
def test_facets_that_a_block_does_not_have_are_refused(name, changes, layer, facet):
    encoder = as_encoder(random_model(name, **changes))
    with pytest.raises(UnfitEncoder) as raised:
        FeatureExtractor(encoder, layers=[layer], facets=[facet])(
            torch.rand(1, 3, *encoder.native_size)
        )
    assert raised.value.hint == ("probe.facet=token", "or", "--facet", "token")


def test_keys_of_global_blocks_of_sam_are_those_of_its_linear_layer():
    model = random_model("samvit_base_patch16_224", **SAM)
    encoder = as_encoder(model)
    images = torch.rand(2, 3, 48, 48)
    x = attention_input(model, 1, normalise(encoder, images))
    qkv = model.blocks[1].attn.qkv

    features = FeatureExtractor(encoder, layers=[1], facets=["key"])(images)

    same(features[1]["key"], (x @ qkv.weight.chunk(3)[1].T + qkv.bias.chunk(3)[1]).detach())


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "vit_relpos_small_patch16_224"])
def test_a_model_of_one_size_refuses_other_sizes(name):
    encoder = as_encoder(random_model(name, **SMALL, img_size=32))
    assert FeatureExtractor(encoder, layers=[1])(torch.rand(1, 3, 32, 32))
    with pytest.raises(ConfigurationError, match="32 x 32"):
        FeatureExtractor(encoder, layers=[1])(torch.rand(1, 3, 32, 48))


@pytest.mark.parametrize(
    ("name", "changes", "width"),
    [
        ("hiera_tiny_224", HIERA, 64),
        ("samvit_base_patch16_224", {**SAM, "neck_chans": None}, 32),
        (
            "swinv2_tiny_window8_256",
            {"embed_dim": 8, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1)},
            64,
        ),
    ],
)
def test_the_final_norm_is_applied_to_tokens(name, changes, width):
    model = random_model(name, **changes)
    encoder = as_encoder(model)
    norm: Any = next(
        part
        for part in (
            getattr(model, "norm", None),
            getattr(model.head, "norm", None),
            getattr(model, "neck", None),
        )
        if isinstance(part, nn.LayerNorm)
    )
    last = encoder.depth - 1
    images = torch.rand(1, 3, *encoder.native_size)

    features = FeatureExtractor(encoder, layers=[last], facets=["token", "token_normed"])(images)

    expected = nn.functional.layer_norm(
        features[last]["token"], (width,), norm.weight, norm.bias, norm.eps
    )
    same(features[last]["token_normed"], expected)


def test_without_a_final_norm_normed_tokens_of_every_width_are_the_tokens():
    encoder = as_encoder(random_model("resnet18"))
    extractor = FeatureExtractor(encoder, layers=[0, 7], facets=["token", "token_normed"])
    for features in extractor(torch.rand(1, 3, 64, 64)).values():
        assert torch.equal(features["token_normed"], features["token"])


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet10t", 64),
        ("hiera_tiny_224", 224),
        ("samvit_base_patch16_224", 64),
        ("naflexvit_base_patch16_gap", 64),
    ],
)
def test_a_file_gives_its_very_weights_without_the_head(tmp_path, name, size):
    torch.manual_seed(0)
    model: Any = timm.create_model(name, num_classes=5).eval()
    path = saved(tmp_path / "weights.pth", model.state_dict())

    encoder = load_encoder(f"timm:{name}@{path}")

    images = torch.rand(1, 3, size, size)
    last = encoder.depth - 1
    features = FeatureExtractor(encoder, layers=[last])(images)[last]["token"]
    expected = timm_features(model, normalise(encoder, images))[-1]
    assert torch.equal(features, expected.permute(0, 2, 3, 1))
    assert len(encoder.contents.ignored) == 2
    assert encoder.loaded_keys == encoder.total_keys - 2


def test_a_resnet_of_torchvision_is_read_by_its_name_in_timm(tmp_path):
    torch.manual_seed(0)
    model = torchvision.models.resnet18().eval()
    path = saved(tmp_path / "weights.pth", model.state_dict())
    with pytest.raises(CheckpointError) as raised:
        load_encoder(str(path))
    assert raised.value.hint == ("--checkpoint", "timm:{timm_name}@{file}")

    encoder = load_encoder(f"timm:resnet18@{path}")

    images = torch.rand(1, 3, 64, 96)
    model.avgpool = model.fc = nn.Identity()
    with torch.no_grad():
        expected = model(normalise(encoder, images)).unflatten(1, (512, 2, 3))
    features = FeatureExtractor(encoder, layers=[7])(images)[7]["token"]
    assert torch.equal(features, expected.permute(0, 2, 3, 1))


def test_a_file_of_sam_is_read_by_its_name_in_timm(tmp_path):
    torch.manual_seed(0)
    model: Any = timm.create_model("samvit_base_patch16_224", num_classes=0).eval()
    weights = {
        f"image_encoder.{name}".replace("mlp.fc", "mlp.lin"): value
        for name, value in model.state_dict().items()
    }
    weights |= {
        "prompt_encoder.pe_layer.positional_encoding_gaussian_matrix": torch.zeros(2, 8),
        "mask_decoder.iou_token.weight": torch.zeros(1, 8),
    }

    encoder = load_encoder(f"timm:samvit_base_patch16_224@{saved(tmp_path / 'sam.pth', weights)}")

    loaded = encoder.module.get_submodule("model").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
    assert {name.partition(".")[0] for name in encoder.contents.ignored} == {
        *("prompt_encoder", "mask_decoder")
    }


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "names of another library"])
def test_a_file_that_differs_from_the_architecture_is_refused(tmp_path, fault):
    model: Any = timm.create_model("resnet10t", num_classes=0)
    weights = model.state_dict()
    if fault == "missing":
        del weights["layer2.0.bn1.bias"]
    elif fault == "unknown":
        weights["layer5.weight"] = torch.zeros(3)
    elif fault == "shape":
        weights["layer2.0.bn1.bias"] = torch.zeros(3)
    else:
        weights = {f"backbone_{name}": value for name, value in weights.items()}

    with pytest.raises(CheckpointError) as raised:
        load_encoder(f"timm:resnet10t@{saved(tmp_path / 'weights.pth', weights)}")

    has_timm_names = fault != "names of another library"
    assert ("timm:{timm_name}@{file}" in raised.value.hint) is has_timm_names


class Blocks(nn.Module):
    """A model with the attributes of timm's models, of two 1 x 1 convolutions."""

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


def test_a_stage_of_equal_blocks_is_divided():
    assert trace_blocks(Blocks(Block(), Block())).blocks == ("layer.0", "layer.1")
    # Blocks of two classes, and a block without submodules.
    assert trace_blocks(Blocks(Block(), nn.Sequential(Block()))).blocks == ("layer",)
    assert trace_blocks(Blocks(nn.ReLU())).blocks == ("layer",)
    # The second block modifies the output of the first.
    assert trace_blocks(Blocks(Block(), Block(inplace=True))).blocks == ("layer",)


def test_features_that_differ_from_those_of_timm_are_refused():
    with pytest.raises(UnsupportedBlocks):
        trace_blocks(Blocks(Block(), stride=2))


def test_a_trial_pass_changes_neither_random_state_nor_mode():
    model = Blocks(Block(), Block()).train()
    state = torch.get_rng_state()
    trace_blocks(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert model.layer[0].training


def test_a_model_whose_blocks_count_their_tokens_differently_is_refused():
    # [CLS] enters before the last block.
    model = random_model("convit_tiny", depth=3, local_up_to_layer=2)
    with pytest.raises(CheckpointError) as raised:
        as_encoder(model)
    assert raised.value.hint == ("--checkpoint", "{file}.py:{name}")


class MapThenTokens(Blocks):
    """A stage that returns maps, then a stage that returns the same positions after [CLS]."""

    def __init__(self) -> None:
        super().__init__(Block())
        self.last = WithClassToken()
        self.feature_info = [*self.feature_info, self.feature_info[0] | {"module": "last"}]

    def forward(self, images: Tensor) -> Tensor:
        return self.last(super().forward(images))

    def forward_intermediates(self, images: Tensor, intermediates_only: bool) -> list[Tensor]:
        assert intermediates_only
        return [super().forward(images)] * 2


class WithClassToken(nn.Module):
    def forward(self, maps: Tensor) -> Tensor:
        tokens = maps.flatten(2).transpose(1, 2)
        return torch.cat([tokens[:, :1], tokens], dim=1)


def test_blocks_that_return_maps_before_blocks_with_cls_are_refused():
    with pytest.raises(UnsupportedBlocks):
        trace_blocks(MapThenTokens())
