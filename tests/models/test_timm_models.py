"""Test encoders that are built from timm layers."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from probes.conditioning.probe import Conditioning
from probes.pca import PCA
from ssl_bench.data.layouts.toy import Toy
from ssl_bench.errors import CheckpointError, ConfigurationError, UnsupportedEncoderError
from ssl_bench.evaluation import Evaluation
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import (
    ConvMixerConfig,
    ConvNeXtConfig,
    EncoderConfig,
    TimmConfig,
    build_encoder,
    encoder_from_model,
    identify_encoder,
    load_encoder,
    save_encoder,
)
from ssl_bench.models.graying import TokenGraying, gray_by_dct, gray_by_svd
from ssl_bench.models.loading.timm_encoder import timm_encoder
from ssl_bench.models.timm_model import gray_windows, gray_with_class
from ssl_bench.results import ResultStore

SWIN = TimmConfig(
    image_size=32, patch_size=2, window_size=4, widths=(8, 16, 32, 64), depths=(1, 1, 2, 1),
    heads=(1, 2, 2, 2),
)  # fmt: skip
CAIT = TimmConfig(
    name="cait_s24_224", image_size=32, patch_size=8, widths=(12,), depths=(2,), heads=(3,)
)
PVT = TimmConfig(
    name="pvt_v2_b3", image_size=32, widths=(4, 8, 12, 16), depths=(1, 1, 1, 1), heads=(1, 1, 1, 1)
)
ATTO = TimmConfig(
    name="convnext_atto", image_size=32, patch_size=1, widths=(8, 8, 16, 16), depths=(1, 1, 2, 1),
    init="uniform",
)  # fmt: skip
VIT = TimmConfig(
    name="vit_tiny_patch16_224", image_size=32, patch_size=8, widths=(12,), depths=(2,), heads=(3,)
)
ISOTROPIC = ConvNeXtConfig(image_size=32, patch_size=8, dim=12, depth=2)
MIXER = ConvMixerConfig(
    image_size=32, patch_size=8, dim=12, depth=2, kernel_size=3, skip=False,
    init="covariance", init_options={"sigma_0": 0.2},
)  # fmt: skip
KINDS: dict[str, EncoderConfig] = {
    "swin": SWIN, "cait": CAIT, "pvt": PVT, "atto": ATTO, "isotropic": ISOTROPIC, "mixer": MIXER,
}  # fmt: skip
COLOURLESS = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def images(count: int = 2, height: int = 32, width: int = 64) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("kind", "strides", "widths"),
    [
        ("swin", (2, 4, 8, 8, 16), (8, 16, 32, 32, 64)),
        ("cait", (8, 8), (12, 12)),
        ("pvt", (4, 8, 16, 32), (4, 8, 12, 16)),
        ("atto", (1, 2, 4, 4, 8), (8, 8, 16, 16, 16)),
    ],
)
def test_a_checkpoint_has_features_of_every_block_on_its_grid(kind, strides, widths, tmp_path):
    model = build_encoder(KINDS[kind], seed=3).eval()
    encoder = encoder_from_model(model, name="x", normalization=COLOURLESS)
    last = encoder.depth - 1

    features = FeatureExtractor(encoder, layers=range(encoder.depth))(images())
    normed = FeatureExtractor(encoder, layers=(last,), facets=("token_normed",))(images())

    assert (encoder.strides, encoder.has_cls) == (strides, False)
    assert [tuple(features[layer]["token"].shape[1:]) for layer in features] == [
        (32 // stride, 64 // stride, width) for stride, width in zip(strides, widths, strict=True)
    ]
    pooled = normed[last]["token_normed"].mean((1, 2))
    if kind == "atto":  # timm normalises the mean token.
        norm: Any = model.get_submodule("model.head.norm")
        pooled = torch.nn.functional.layer_norm(
            features[last]["token"].mean((1, 2)), (16,), norm.weight, norm.bias, norm.eps
        )
    if kind != "cait":  # The output of CaiT is [CLS], which is in no block of patches.
        torch.testing.assert_close(pooled, model(images()), rtol=1e-4, atol=1e-5)
    theirs = timm_encoder(model.get_submodule("model"), uri="memory", name="x", sha256="0")
    assert (theirs.depth, theirs.dim, theirs.strides) == (encoder.depth, widths[-1], strides)
    assert torch.equal(theirs.module(images()), model(images()))
    save_encoder(tmp_path / "last.safetensors", model, {})
    loaded, identity = load_encoder(str(tmp_path)), identify_encoder(str(tmp_path))
    assert getattr(loaded.module, "config", None) == KINDS[kind]
    assert torch.equal(loaded.module(images()), model(images()))
    assert identity.identity() == loaded.identity()
    for name in ("depth", "patch_size", "num_prefix_tokens", "num_registers", "strides"):
        assert getattr(identity, name) == getattr(loaded, name), name
    assert identity.is_staged is loaded.is_staged is (kind != "cait")
    random = load_encoder(f"random:{tmp_path}").module
    assert torch.equal(random(images()), build_encoder(KINDS[kind], seed=0).eval()(images()))


def test_drop_path_rises_to_the_given_rate_in_the_last_block():
    blocks: Any = build_encoder(replace(VIT, drop_path=0.3), seed=0).get_submodule("blocks")
    assert blocks[-1].drop_path1.drop_prob == pytest.approx(0.3)
    assert blocks[0].mlp.drop1.p == 0


@pytest.mark.parametrize(
    ("kind", "size", "places"), [("atto", 8, (2, 3, 1)), ("swin", 16, (1, 2, 3))]
)
def test_cubic_feature_maps_keep_their_axes(kind, size, places):
    encoder = encoder_from_model(build_encoder(KINDS[kind], seed=0), name="x")
    outputs = []
    block = encoder.module.get_submodule("blocks.0")
    block.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    found = FeatureExtractor(encoder, layers=(0,))(images()[..., :size, :size])
    assert outputs[0].shape[1:] == (8, 8, 8)
    assert torch.equal(found[0]["token"], outputs[0].permute(0, *places))


@pytest.mark.parametrize(
    ("kind", "layer", "facet"),
    [
        ("swin", 0, "key"), ("pvt", 0, "query"), ("atto", 3, "value"), ("swin", 1, "token_normed"),
        ("cait", 0, "attn_out"), ("cait", 0, "cls"),
    ],
)  # fmt: skip
def test_facets_that_a_block_lacks_are_refused(kind, layer, facet):
    encoder = encoder_from_model(build_encoder(KINDS[kind], seed=0), name="x")
    with pytest.raises((CheckpointError, ConfigurationError)) as raised:
        FeatureExtractor(encoder, layers=(layer,), facets=(facet,))(images())
    assert "\n" not in str(raised.value)
    assert ("query" in str(raised.value)) == (facet == "query")
    # Only the last block of this Swin has the width of the final norm.
    assert facet != "token_normed" or raised.value.hint[:3] == ("--layer", "4", "or")


@pytest.mark.parametrize(
    ("config", "changes", "hint"),
    [
        (SWIN, {"name": "resnet50"}, "model.name=swin_small_patch4_window7_224"),
        (SWIN, {"name": "swin_small_patch4_window7_224.ms_in1k"}, "model.name=swin_small_patch4_w"),
        (SWIN, {"widths": (8, 16, 32)}, ""),
        (SWIN, {"widths": (8, 16, 32, 65)}, "model.widths=[8,16,32,64]"),
        (SWIN, {"init": "osa"}, ""),
        (SWIN, {"frozen_filters": True}, "model.frozen_filters=false"),
        (SWIN, {"graying_class_blocks": True}, "model.graying_class_blocks=false"),
        (CAIT, {"graying_scope": "window"}, "model.graying_scope=map"),
        (CAIT, {"window_size": 4}, ""),
        (PVT, {"patch_size": 2}, ""),
        (PVT, {"init": "mimetic"}, ""),
        (ATTO, {"graying": "dct"}, "model.graying=none"),
        (ATTO, {"heads": (1, 1, 1, 1)}, ""),
        # These errors are found when the model is built.
        (SWIN, {"graying": "svd", "graying_layers": (5,)}, "model.graying_layers=null"),
        (SWIN, {"name": "swin_huge"}, ""),
        (SWIN, {"image_size": 24}, "model.image_size=32"),
        (ATTO, {"name": "convnext_atto_ols"}, "model.name=convnext_atto"),
        (VIT, {"name": "vit_small_patch16_rope_224"}, ""),
        (VIT, {"heads": (5,)}, ""),
    ],
)
def test_unsupported_options_of_a_family_are_refused_in_one_line(config, changes, hint):
    with pytest.raises(ConfigurationError) as raised:
        build_encoder(replace(config, **changes), seed=0)
    assert " ".join(raised.value.hint).startswith(hint)
    assert bool(raised.value.hint) is bool(hint)
    assert "\n" not in str(raised.value)


def test_default_sizes_come_from_the_architecture():
    swin, vit = TimmConfig(), TimmConfig(name="vit_small_patch16_224")
    assert (swin.patch_size, swin.window_size, vit.patch_size) == (4, 7, 16)
    assert (swin.depth, swin.dim, swin.block_info.strides[::8]) == (24, 768, (4, 16, 16))
    assert TimmConfig.from_dict(json.loads(json.dumps(swin.to_dict()))) == swin
    for name, size in (("swin_base_patch4_window12_384", 12), ("swin_s3_tiny_224", 7)):
        assert TimmConfig(name=name).window_size == size
    atto = TimmConfig(name="convnext_atto", image_size=32, patch_size=2)
    assert atto.block_info.strides[::4] == (4, 16, 16)


@pytest.mark.parametrize("config", [SWIN, CAIT, VIT])
def test_mimetic_value_times_projection_is_minus_the_identity(config):
    options = {"alpha2": 0.0, "beta2": 1.0}
    model = build_encoder(replace(config, init="mimetic", init_options=options), seed=0)
    block = model.blocks[-1]
    dim = config.dim
    value = block.get_parameter("attn.qkv.weight")[2 * dim :]
    product = block.get_parameter("attn.proj.weight") @ value
    torch.testing.assert_close(product, -torch.eye(dim), rtol=0, atol=1e-5)


def block_inputs(config: TimmConfig) -> list[Tensor]:
    model, entering = build_encoder(config, seed=0).eval(), []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, __: entering.append(inputs[0]))
    model(images(height=32, width=32))
    return entering


@pytest.mark.parametrize(
    ("config", "layer", "scope"),
    [(SWIN, 0, "map"), (SWIN, 4, "map"), (SWIN, 0, "window"), (PVT, 1, "map")],
)
def test_only_the_chosen_blocks_of_all_stages_are_grayed(config, layer, scope):
    gray = replace(config, graying="svd", graying_layers=(layer,), graying_scope=scope)
    before, after = block_inputs(config), block_inputs(gray)
    assert all(torch.equal(a, b) for a, b in zip(before[:layer], after[:layer], strict=True))
    x, found = before[layer], after[layer]
    if scope == "window":
        x, found = (y.unflatten(1, (4, 4)).unflatten(3, (4, 4))[:, 1, :, 2] for y in (x, found))
    shape = x.shape
    expected = gray_by_svd(x.reshape(len(x), -1, shape[-1]), 0.95).view(shape)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def swin_block(shift: int) -> torch.nn.Module:
    block: Any = torch.nn.Identity()
    block.window_size, block.shift_size = (3, 3), (shift, shift)
    return block


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # The first two blocks of CaiT are for patches, the others for [CLS].
        ({}, [True, True, False, False]),
        ({"graying_class_blocks": True}, [True, True, True, True]),
        ({"graying_layers": (1,)}, [False, True, False, False]),
    ],
)
def test_class_blocks_are_grayed_only_on_request(changes, expected):
    built: Any = build_encoder(replace(CAIT, graying="svd", **changes), seed=0).eval()
    model = built.model
    blocks = [*model.blocks, *model.blocks_token_only]
    before: list[Tensor] = []
    after: list[Tensor] = []
    for block in blocks:
        block.register_forward_pre_hook(lambda _, x: before.append(torch.cat(x, 1)), prepend=True)
        block.register_forward_hook(lambda _, x, __: after.append(torch.cat(x, 1)))
    model(images(height=32, width=32))
    pairs = zip(before, after, strict=True)
    assert [not torch.equal(one, other) for one, other in pairs] == expected


@pytest.mark.parametrize("shift", [0, 1])
def test_each_shifted_window_is_grayed_separately(shift):
    x = torch.randn(2, 6, 6, 4, dtype=torch.float64)
    (gray,) = gray_windows(TokenGraying("dct", 0.5), swin_block(shift), (x,))
    rows = (torch.arange(3) + 3 + shift) % 6
    tokens = x[:, rows][:, :, rows].flatten(1, 2)
    expected = gray_by_dct(tokens, 0.5).unflatten(1, (3, 3))
    torch.testing.assert_close(gray[:, rows][:, :, rows], expected)


def test_incomplete_windows_are_padded_with_zeros():
    x, graying = torch.randn(1, 4, 5, 4), TokenGraying("svd", 0.5)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 1, 0, 2))
    (gray,), (whole,) = (gray_windows(graying, swin_block(0), (y,)) for y in (x, padded))
    torch.testing.assert_close(gray, whole[:, :4, :5])


def test_class_blocks_gray_cls_and_patches_together():
    x, cls_token = torch.randn(2, 5, 4), torch.randn(2, 1, 4)
    patches, first = gray_with_class(TokenGraying("dct", 0.5), swin_block(0), (x, cls_token))
    expected = gray_by_dct(torch.cat([cls_token, x], 1), 0.5)
    torch.testing.assert_close(torch.cat([first, patches], 1), expected)


@pytest.mark.parametrize("kind", ["atto", "isotropic", "mixer"])
def test_covariance_differs_from_uniform_only_in_the_filters(kind):
    config: Any = replace(KINDS[kind], init_options={}, frozen_filters=True)
    uniform, covariance = (
        build_encoder(replace(config, init=init), seed=0) for init in ("uniform", "covariance")
    )

    theirs, filters = covariance.state_dict(), set()
    for name, value in uniform.state_dict().items():
        if value.ndim > 1:
            bound = value[0].numel() ** -0.5
            assert 0.8 * bound < value.abs().max().item() <= bound, name
        if name.endswith("gamma"):  # LayerScale
            assert value.eq(1e-6).all()
        if not torch.equal(value, theirs[name]):
            filters.add(name)
    assert all(name.endswith(("conv_dw.weight", "depthwise.weight")) for name in filters)
    assert len(filters) == config.depth
    parameters = uniform.named_parameters()
    assert filters == {name for name, value in parameters if not value.requires_grad}


def test_timm_addresses_with_a_file_give_its_weights_and_stages(tmp_path):
    encoder = load_encoder("timm:convnext_atto")
    path = tmp_path / "atto.pth"
    torch.save(encoder.module.get_submodule("model").state_dict(), path)
    of_file = load_encoder(f"timm:convnext_atto@{path}")
    assert of_file.strides == encoder.strides == (4, 4, 8, 8, *(16,) * 6, 32, 32)
    assert encoder.architecture["strides"] == list(encoder.strides)
    assert torch.equal(of_file.module(images()), encoder.module(images()))
    assert load_encoder("random:timm:convnext_atto").sha256 == encoder.sha256


def test_stages_are_encoders_with_a_single_grid_and_width():
    encoder = encoder_from_model(build_encoder(SWIN, seed=0), name="x")
    stages = encoder.group_by_shape((0, 3, 2, 4))
    assert [layers for _, layers in stages] == [(0,), (3, 2), (4,)]
    assert [(one.patch_size, one.dim) for one, _ in stages] == [(2, 8), (8, 32), (16, 64)]
    assert all(one.identity() == encoder.identity() for one, _ in stages)


def test_a_probe_evaluates_the_blocks_of_every_stage(tmp_path):
    messages: list[str] = []
    evaluation = Evaluation(
        encoder=encoder_from_model(build_encoder(SWIN, seed=0), name="swin"),
        dataset=Toy(num_train=2, num_val=2), probe=PCA(panels=1, image_size=32),
        layers=(0, 2, 4), seed=0, device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    store = ResultStore(tmp_path)
    found = evaluation.run(store, say=messages.append, overwrite=False)

    assert {record.layer: record.stride for record in found} == {0: 2, 2: 8, 4: 16}
    # Messages about all stages are printed once.
    assert len([line for line in messages if "pca: only 1 of" in line]) == 1
    sheets = {path: path.read_bytes() for path in (tmp_path / "pictures").rglob("*.png")}
    for path in sheets:
        path.unlink()
    evaluation.run(store, say=messages.append, overwrite=False)
    assert {path: path.read_bytes() for path in (tmp_path / "pictures").rglob("*.png")} == sheets
    names = {path.name for path in sheets if path.name.startswith("blocks")}
    assert names == {"blocks-0.png", "blocks-2.png", "blocks-4.png"}
    with pytest.raises(UnsupportedEncoderError):
        replace(evaluation, probe=Conditioning(num_images=1, image_size=32)).run(
            store, say=messages.append, overwrite=False
        )
