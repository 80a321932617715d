"""Test that checkpoints from other projects are loaded correctly.

The weights are random, but have the parameter names of the published checkpoints.
"""

import re
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torchvision

from ssl_bench.errors import CheckpointError
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import identify_encoder, load_encoder
from ssl_bench.models.loading import load
from ssl_bench.models.loading.layouts import dinov3_architecture
from ssl_bench.models.loading.load import load_and_log
from ssl_bench.system.files import file_sha256
from tests.support.foreign_weights import (
    Weights,
    assert_same_weights,
    dinov2_weights,
    get_load_error,
    normalise,
    rename_weights,
    same_features,
    save_checkpoint,
    save_hf_folder,
    timm_model,
)

# A model, the content of its checkpoint, and the names that are ignored.
Case = tuple[Any, dict[str, Any], set[str]]


def zeros(*names: str, size: int = 2) -> Weights:
    return {name: torch.zeros(size) for name in names}


def behind(prefix: str, weights: Weights) -> Weights:
    return {prefix + name: value for name, value in weights.items()}


def dinov2_in_training() -> Case:
    # Blocks are saved in chunks: the second number is the index of the block in the whole encoder.
    model, weights = dinov2_weights(0)
    half = {name: value.half() for name, value in weights.items()}
    model.load_state_dict({n: v.float() for n, v in half.items() if n != "mask_token"})
    teacher = rename_weights(
        half, {r"^blocks\.(\d)": r"backbone.blocks.\1.\1", r"^(?!back)": "backbone."}
    )
    heads = zeros("dino_head.mlp.0.weight", "ibot_head.last_layer.w")
    return model, {"teacher": teacher | heads}, {"mask_token", *heads}


# MAE: https://github.com/facebookresearch/mae/blob/be47fef7, models_mae.py (pretraining, with a
# decoder) and models_vit.py (fine-tuned, with `fc_norm` in place of `norm` for global pooling).
def mae() -> Case:
    # A ViT-H has heads of 80 channels.
    model = timm_model(patch=4, dim=1280, heads=16, mlp_ratio=0.1)
    decoder = zeros(
        "mask_token", "decoder_pos_embed", "decoder_embed.weight", "decoder_embed.bias",
        "decoder_blocks.0.norm1.weight", "decoder_blocks.0.attn.qkv.weight", "decoder_norm.weight",
        "decoder_pred.weight", "decoder_pred.bias",
    )  # fmt: skip
    return model, {"model": model.state_dict() | decoder}, {*decoder}


def fine_tuned_mae() -> Case:
    model, head = timm_model(), zeros("head.weight", "head.bias", size=10)
    weights = rename_weights(model.state_dict(), {r"^norm\.": "fc_norm."}) | head
    return model, {"model": weights, "epoch": 99}, {*head}


# iBOT: https://github.com/bytedance/ibot/blob/c24f870d, models/vision_transformer.py (`gamma_1`,
# `masked_embed`) and main_ibot.py (the dictionary that is saved).
def ibot() -> Case:
    model = timm_model(init_values=0.3)
    weights = rename_weights(model.state_dict(), {r"\.ls(\d)\.gamma": r".gamma_\1"})
    teacher = behind("backbone.", weights) | zeros("head.last_layer.weight")
    student = {f"module.{n}": torch.zeros_like(v) for n, v in teacher.items()}
    content = {
        "student": {**student, "module.backbone.masked_embed": torch.zeros(1, 128)},
        "teacher": teacher, "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}},
        "fp16_scaler": {"scale": torch.ones(1)}, "ibot_loss": {"center": torch.zeros(1, 2)},
        "epoch": 3,
    }  # fmt: skip
    return model, content, {*content, "head.last_layer.weight"} - {"teacher", "epoch"}


def student_of_ibot() -> Case:
    model = timm_model()
    weights = {**model.state_dict(), "masked_embed": torch.randn(1, 128)}
    return model, {"state_dict": weights}, {"masked_embed"}


# mmpretrain: https://github.com/open-mmlab/mmpretrain/blob/00030e3f/mmpretrain/models/backbones/
# vision_transformer.py. LayerScale is in `attn.gamma1` and `ffn.gamma2`, and MAE has a `neck`.
MM_NAMES = {
    r"patch_embed\.proj": "patch_embed.projection",
    r"blocks\.(\d+)\.norm([12])": r"layers.\1.ln\2",
    r"blocks\.(\d+)\.attn": r"layers.\1.attn",
    r"blocks\.(\d+)\.mlp\.fc1": r"layers.\1.ffn.layers.0.0",
    r"blocks\.(\d+)\.mlp\.fc2": r"layers.\1.ffn.layers.1",
    r"blocks\.(\d+)\.ls1\.gamma": r"layers.\1.attn.gamma1.weight",
    r"blocks\.(\d+)\.ls2\.gamma": r"layers.\1.ffn.gamma2.weight",
    r"^norm\.": "ln1.",
}


def mmpretrain() -> Case:
    model, others = timm_model(init_values=0.5), zeros("head.layers.head.weight", "neck.mask")
    weights = behind("backbone.", rename_weights(model.state_dict(), MM_NAMES))
    return model, {"meta": {"epoch": 300}, "state_dict": others | weights}, {*others}


# MoCo-v3: https://github.com/facebookresearch/moco-v3/blob/1c6b717e, vits.py (12 heads in a ViT-S)
# and main_lincls.py, which evaluates `module.base_encoder`.
def moco_v3() -> Case:
    model = timm_model(patch=4, dim=384, heads=12, mlp_ratio=0.25)
    base = model.state_dict() | zeros("head.0.weight")
    others = zeros("predictor.0.weight") | {"momentum_encoder.cls_token": torch.zeros(1, 1, 384)}
    weights = behind("module.", behind("base_encoder.", base) | others)
    content = {"state_dict": weights, "optimizer": {}, "scaler": {}, "arch": "vit_small"}
    return model, content, {"head.0.weight", *others}


LAYOUTS = {
    dinov2_in_training: "DINOv2", mae: "MAE", fine_tuned_mae: None, ibot: "iBOT",
    student_of_ibot: "iBOT", mmpretrain: "mmpretrain", moco_v3: "MoCo-v3",
}  # fmt: skip


@pytest.mark.parametrize("make", LAYOUTS)
def test_a_checkpoint_gives_the_features_of_its_model(tmp_path, make):
    model, content, ignored = make()
    encoder = same_features(
        save_checkpoint(tmp_path / "w.pth", content), model, extra=("token_normed", "cls_normed")
    )
    assert encoder.num_heads == model.blocks[0].attn.num_heads
    assert LAYOUTS[make] in (None, encoder.weights_info.layout)
    assert encoder.weights_info.ignored.keys() == ignored


@pytest.mark.parametrize("registers", [0, 4])
def test_published_weights_of_dinov2_give_the_same_features(tmp_path, registers):
    model, weights = dinov2_weights(registers)
    path = save_checkpoint(tmp_path / "w.pth", weights)
    encoder = same_features(path, model, extra=("token_normed", "cls_normed"))
    assert (encoder.num_prefix_tokens, encoder.num_registers) == (1 + registers, registers)
    assert (encoder.patch_size, encoder.weights_info.layout) == (14, "DINOv2")
    assert encoder.weights_info.ignored.keys() == {"mask_token"}
    assert (encoder.loaded_keys, encoder.total_keys) == (len(weights) - 1, len(weights))
    assert encoder.sha256 == file_sha256(path)


def test_dino_and_deit_need_no_renaming(tmp_path):
    model = timm_model()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "w.safetensors")
    encoder = same_features(tmp_path / "w.safetensors", model, extra=("token_normed",))
    assert (encoder.weights_info.layout, encoder.weights_info.ignored) == ("DINO, timm", {})
    assert identify_encoder(encoder.uri).identity() == encoder.identity()


# CLIP: https://github.com/openai/CLIP/blob/d05afc43, clip/model.py.
CLIP_NAMES = {
    r"patch_embed\.proj": "conv1",
    r"norm_pre": "ln_pre",
    r"^blocks\.(\d+)\.norm": r"transformer.resblocks.\1.ln_",
    r"^blocks": "transformer.resblocks",
    r"qkv\.": "in_proj_",
    r"attn\.proj": "attn.out_proj",
    r"mlp\.fc1": "mlp.c_fc",
    r"mlp\.fc2": "mlp.c_proj",
    r"^norm\.": "ln_post.",
    r"cls_token": "class_embedding",
    r"pos_embed": "positional_embedding",
}


@pytest.mark.parametrize(
    ("prefix", "squeezes"), [("", True), ("", False), ("module.visual.", True)]
)
def test_clip_image_encoders_are_loaded_with_a_timm_name(tmp_path, prefix, squeezes):
    name, arguments = "vit_xsmall_patch16_clip_224", {"depth": 2}
    model = timm.create_model(name, num_classes=0, **arguments)
    weights = rename_weights(model.state_dict(), CLIP_NAMES) | {"proj": torch.zeros(512, 384)}
    content = {
        prefix + name: value.squeeze() if "embedding" in name and squeezes else value
        for name, value in weights.items()
    }
    if prefix:
        text = prefix.removesuffix("visual.")
        content |= {f"{text}logit_scale": torch.ones(()), f"{text}text_projection": torch.ones(4)}
        content[f"{text}transformer.resblocks.0.ln_1.weight"] = torch.ones(4)
    config = {"architecture": name, "model_args": arguments}
    encoder = load_encoder(save_hf_folder(tmp_path / "clip", content, config))

    assert "proj" in encoder.weights_info.ignored
    assert_same_weights(encoder.module.get_submodule("model"), model.state_dict())
    assert "as CLIP has" in get_load_error(tmp_path / "clip/model.safetensors")


@pytest.mark.parametrize("unknown", ["patches by a linear layer", "names"])
def test_weights_unknown_to_timm_need_a_python_file(tmp_path, unknown):
    weights = timm_model().state_dict()
    if unknown == "names":
        weights = {re.sub("blocks", "trunk", name): value for name, value in weights.items()}
    else:
        weights["patch_embed.proj.weight"] = weights["patch_embed.proj.weight"].flatten(1)
    with pytest.raises(CheckpointError) as raised:
        load_encoder(str(save_checkpoint(tmp_path / "w.pth", weights)))
    assert raised.value.hint == ("--checkpoint", "{file}.py:{name}")


@pytest.mark.parametrize(
    ("part", "stated"), [(np.s_[:, :1], "1 channels"), (np.s_[..., 2:], "x 6")]
)
def test_patches_that_are_not_square_rgb_images_are_refused(tmp_path, part, stated):
    weights = timm_model().state_dict()
    weights["patch_embed.proj.weight"] = weights["patch_embed.proj.weight"][part].clone()
    assert stated in get_load_error(save_checkpoint(tmp_path / "w.pth", weights))


# Older files of torchvision use other names for the layers of the MLP.
@pytest.mark.parametrize("names", [{}, {r"mlp\.0": "mlp.linear_1", r"mlp\.3": "mlp.linear_2"}])
def test_a_torchvision_vit_gives_its_own_features(tmp_path, names):
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(32, 8, 2, 2, 128, 512).eval()
    torch.nn.init.normal_(model.class_token)
    encoder = load_encoder(
        str(save_checkpoint(tmp_path / "vit.pth", rename_weights(model.state_dict(), names)))
    )

    image = torch.rand(1, 3, 32, 32)
    features = FeatureExtractor(encoder, layers=[1], facets=["token_normed", "cls_normed"])(image)[
        1
    ]
    patches = model._process_input(normalise(encoder, image))
    with torch.no_grad():
        expected = model.encoder(torch.cat([model.class_token, patches], 1))
    tokens = torch.cat([features["cls_normed"][:, None], features["token_normed"].flatten(1, 2)], 1)
    torch.testing.assert_close(tokens, expected, rtol=0, atol=1e-5)
    assert encoder.weights_info.ignored.keys() == {"heads.head.weight", "heads.head.bias"}


@pytest.mark.parametrize(
    ("extra", "dim", "name"),
    [
        ("dist_token", 192, "deit_tiny_distilled_patch16_224"),
        ("blocks.0.mlp.w12.weight", 128, "vit_giant_patch14_dinov2"),
        ("rope_embed.periods", 128, "TIMM_NAME"),
        ("norm_pre.weight", 768, "vit_base_patch16_clip_224"),
        ("blocks.0.attn.q_norm.weight", 128, "TIMM_NAME"),
        ("reg_token", 384, "vit_small_patch14_reg4_dinov2"),
    ],
)
def test_the_error_for_another_architecture_names_it_in_timm(tmp_path, extra, dim, name):
    model = timm_model(dim=dim, mlp_ratio=1)
    weights = {**model.state_dict(), extra: torch.zeros(1, 1, dim)}
    message = get_load_error(save_checkpoint(tmp_path / "w.pth", weights))
    assert f"({extra})" in message
    assert f"`--checkpoint timm:{name}@" in message


@pytest.mark.parametrize("qkv_bias", ["_qkvb", ""])
def test_a_dinov3_saved_by_timm_is_recognised_by_its_width(tmp_path, qkv_bias):
    name = f"vit_small_patch16_dinov3{qkv_bias}"
    path = save_checkpoint(tmp_path / "w.pth", timm.create_model(name, depth=1).state_dict())
    assert f"`--checkpoint timm:{name}@{path}" in get_load_error(path)


@pytest.mark.parametrize("name", timm.list_models("vit_*dinov3*"))
def test_every_dinov3_of_timm_is_recognised_by_its_tensors(name):
    with torch.device("meta"):
        weights = timm.create_model(name, depth=1, num_classes=0).state_dict()

    assert dinov3_architecture(weights) == name


def test_torch_hub_weights_of_dinov2_give_the_same_features(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    model, weights = dinov2_weights(4)
    save_checkpoint(tmp_path / "checkpoints/dinov2_vits14_reg4_pretrain.pth", weights)
    for branch in ("", "main:"):
        encoder = same_features(
            f"torchhub:facebookresearch/dinov2:{branch}dinov2_vits14_reg", model
        )
        assert encoder.name == "dinov2_vits14_reg"


def test_tensors_of_other_shapes_are_refused_in_one_line(tmp_path):
    _, weights = dinov2_weights(4)
    del weights["mask_token"]
    shapes = cycle([(), (3, 5, 7), (0, 128)])
    for name in weights:
        if ".1." not in name:
            changed = {**weights, name: torch.zeros(next(shapes))}
            get_load_error(save_checkpoint(tmp_path / "w.pth", changed))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"depth": 2}, "mean=0.5,std=0.5:"),
        # timm has no ViT-Ti with patches of 8 pixels.
        ({"patch_size": 8}, "mean=0.5,std=0.5:"),
        ({}, "timm:vit_tiny_patch16_224@"),
    ],
)
def test_a_file_that_timm_may_have_written_is_announced(tmp_path, capsys, arguments, name):
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, **arguments)
    torch.save(model.state_dict(), tmp_path / "mine.pth")
    load_and_log(str(tmp_path / "mine.pth"))
    assert f"`--checkpoint {name}{tmp_path / 'mine.pth'}`" in capsys.readouterr().err
    for size in load._SIZES_IN_TIMM.values():
        for side in load._SIDES_IN_TIMM:
            assert timm.is_model(f"vit_{size}_patch{load._PATCH_IN_TIMM}_{side}")


@pytest.mark.parametrize("file", ["dinov2_vits14.pth", "DINO.pth", "mine.pth"])
def test_a_dinov2_file_is_not_mistaken_for_one_of_timm(tmp_path, capsys, file):
    weights = dinov2_weights(0)[1] if file == "mine.pth" else timm_model().state_dict()
    save_checkpoint(tmp_path / file, weights)
    load_and_log(str(tmp_path / file))
    output = capsys.readouterr().err
    assert "encoder " in output
    assert "timm" not in output
