"""Families of timm's Vision Transformers, made tiny, against timm's own account of their blocks."""

from copy import deepcopy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from ssl_bench.errors import CheckpointError
from ssl_bench.features import FeatureExtractor
from ssl_bench.layers import Facet
from ssl_bench.models import Encoder
from ssl_bench.models.loading.timm_encoder import timm_encoder

TINY = {"depth": 2, "embed_dim": 64, "num_heads": 2}
# Name in timm, what sets it apart, prefix tokens, registers among them.
FAMILIES = [
    ("vit_tiny_patch16_224", "plain", 1, 0),
    ("vit_small_patch8_224", "patch 8", 1, 0),
    ("vit_small_patch14_dinov2", "patch 14, LayerScale", 1, 0),
    ("vit_small_patch14_reg4_dinov2", "registers without positions", 5, 4),
    ("vit_base_patch16_224_miil", "no bias of q, k, v", 1, 0),
    ("deit_tiny_distilled_patch16_224", "two class tokens", 2, 0),
    ("deit3_small_patch16_224", "[CLS] without a position", 1, 0),
    ("vit_base_patch16_siglip_224", "no [CLS], attention pooling", 0, 0),
    ("vit_base_patch16_siglip_gap_224", "no [CLS], mean pooling", 0, 0),
    ("vit_base_patch16_reg4_gap_256", "registers, no [CLS]", 4, 4),
    ("vit_base_patch16_clip_quickgelu_224", "a norm before the blocks", 1, 0),
    ("vit_base_patch16_rpn_224", "norms after the layers", 0, 0),
    ("flexivit_small", "FlexiViT", 1, 0),
    ("aimv2_large_patch14_224", "RMSNorm, SwiGLU", 0, 0),
    ("beit3_base_patch16_224", "a norm inside of attention", 1, 0),
    ("vit_base_patch16_radio_v3", "seven registers", 8, 7),
    ("vit_dwee_patch16_reg1_gap_256", "differential attention", 1, 1),
    ("eva_giant_patch14_224", "biases beside qkv", 1, 0),
    ("eva02_tiny_patch14_224", "rotary positions", 1, 0),
    ("eva02_base_patch14_224", "three layers in place of qkv", 1, 0),
    ("eva02_enormous_patch14_clip_224", "norms after the layers", 1, 0),
    ("vit_small_patch16_dinov3", "DINOv3", 5, 4),
    ("vit_small_patch16_dinov3_qkvb", "DINOv3 with a bias", 5, 4),
    ("vit_base_patch16_rope_mixed_ape_224", "rotary positions by block", 1, 0),
    ("vit_pe_core_tiny_patch16_384", "Perception Encoder", 1, 0),
    ("vit_medium_patch16_rope_reg1_gap_256", "rotary, a register, no [CLS]", 1, 1),
]
WITHOUT_KEYS = [
    ("vit_pwee_patch16_reg1_gap_256", "q, k, v and the MLP in one layer"),
    ("vit_small_patch16_18x2_224", "two attention layers a block"),
    ("vit_base_patch16_sapiens2", "fewer keys than queries"),
]


def tiny(name: str, **changes: Any) -> Any:
    """A model whose every parameter is random, for images of 3 x 5 patches."""
    torch.manual_seed(0)
    patch = 14 if "patch14" in name else 8 if "patch8" in name else 16
    model = timm.create_model(
        name, **{**TINY, "num_classes": 0, "dynamic_img_size": True, **changes},
        img_size=(3 * patch, 5 * patch),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.eval()


def as_encoder(model: Any) -> Encoder:
    return timm_encoder(model, uri="memory", name="tiny", sha256="")


def images_of(encoder: Encoder, batch: int = 2) -> Tensor:
    return torch.rand(batch, 3, *encoder.native_size)


def normalised(encoder: Encoder, images: Tensor) -> Tensor:
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (encoder.mean, encoder.std))
    return (images - mean) / std


def keys_by_hand(model: Any, images: Tensor, layer: int) -> Tensor:
    """Keys in float64 from the layers as timm made them, and the input of the attention."""
    attention = model.blocks[layer].attn
    seen: list[Tensor] = []
    handle = attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model.forward_intermediates(images)
    handle.remove()
    if attention.qkv is None:
        weight, bias = attention.k_proj.weight, attention.k_proj.bias
    else:
        weight = attention.qkv.weight.chunk(3)[1]
        bias = getattr(attention, "k_bias", None)
        if bias is None and attention.qkv.bias is not None:
            bias = attention.qkv.bias.chunk(3)[1]
    keys = seen[0].double() @ weight.double().T
    return keys if bias is None else keys + bias.double()


@pytest.mark.parametrize(("name", "what", "prefix", "registers"), FAMILIES)
def test_tokens_keys_and_cls_of_every_block_are_those_of_timm(name, what, prefix, registers):
    original = tiny(name)
    encoder = as_encoder(deepcopy(original))
    has_cls = prefix > registers
    assert (encoder.num_prefix_tokens, encoder.num_registers) == (prefix, registers), what
    assert encoder.has_cls is has_cls
    images = images_of(encoder)
    facets: list[Facet] = ["token", "token_normed", "key"]
    if has_cls:
        facets.append("cls")
    found = FeatureExtractor(encoder, layers=[0, 1], facets=facets)(images)
    with torch.no_grad():
        blocks = original.forward_intermediates(
            normalised(encoder, images), intermediates_only=True,
            return_prefix_tokens=prefix > 0, output_fmt="NLC",
        )  # fmt: skip
        for layer, tokens in enumerate(blocks):
            patches, front = tokens if prefix else (tokens, tokens)
            same(found[layer]["token"].flatten(1, 2), patches)
            same(found[layer]["token_normed"].flatten(1, 2), original.norm(patches))
            if has_cls:
                same(found[layer]["cls"], front[:, 0])
            keys = keys_by_hand(original, normalised(encoder, images), layer)
            same(found[layer]["key"].flatten(1, 2), keys[:, prefix:].float())
    patch = encoder.patch_size
    found = FeatureExtractor(encoder, layers=[1], facets=["token", "key"], pad=True)(
        torch.rand(1, 3, 4 * patch - 3, 2 * patch)
    )[1]
    assert found["token"].shape[:3] == found["key"].shape[:3] == (1, 4, 2)


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "patch_size"),
    [("vit_tiny_r_s16_p8_224", 32), ("vit_small_r26_s32_224", 32), ("vitamin_small_224", 16)],
)
def test_patches_behind_convolutions_are_as_large_as_all_their_strides_together(name, patch_size):
    size = (64, 128)
    torch.manual_seed(0)
    original: Any = timm.create_model(
        name, depth=2, num_classes=0, img_size=size, dynamic_img_size=True
    ).eval()
    encoder = as_encoder(deepcopy(original))
    assert encoder.patch_size == patch_size
    images = torch.rand(1, 3, *size)
    found = FeatureExtractor(encoder, layers=[1], facets=["token", "key"])(images)[1]
    assert found["key"].shape[1:3] == (64 // patch_size, 128 // patch_size)
    with torch.no_grad():
        patches = original.forward_intermediates(
            normalised(encoder, images), intermediates_only=True, output_fmt="NLC"
        )[1]
    same(found["token"].flatten(1, 2), patches)


@pytest.mark.parametrize(("name", "what"), WITHOUT_KEYS)
def test_blocks_without_thirds_of_keys_give_tokens_and_say_so(name, what):
    changes = {"num_kv_heads": (2, 1), "num_heads": 2} if "sapiens" in name else {}
    encoder = as_encoder(tiny(name, **changes))
    images = images_of(encoder)
    assert FeatureExtractor(encoder, layers=[1])(images)[1]["token"].shape == (2, 3, 5, 64)
    with pytest.raises(CheckpointError, match=r"block 1 .*key.* use `probe.facet=token`"):
        FeatureExtractor(encoder, layers=[1], facets=["key"])(images)
