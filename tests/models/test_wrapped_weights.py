"""Test that encoder weights are found in training checkpoints of many tools."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from torch import Tensor

from ssl_bench.cli.__main__ import main
from ssl_bench.models import build_vit, load_encoder, save_encoder
from ssl_bench.system.files import file_sha256
from tests.support.faults import DINO_LIKE
from tests.support.foreign_weights import (
    Weights,
    assert_same_weights,
    get_load_error,
    save_checkpoint,
    save_hf_folder,
    timm_model,
)

# The formats follow the source code of Lightning, torch.optim.swa_utils, timm's train.py, Composer,
# VISSL, I-JEPA, and the reference scripts of torchvision and torch.
QKV = "blocks.0.attn.qkv.weight"


@pytest.mark.parametrize(
    "spoil",
    [lambda v: (127 * v).to(torch.int8), lambda v: v.to_sparse(), lambda v: v.to("meta")],
    ids=["int8", "sparse", "meta"],
)
def test_tensors_that_are_not_dense_floats_are_refused_by_name(tmp_path, capsys, spoil):
    weights = build_vit(DINO_LIKE, seed=0).state_dict()
    path = save_checkpoint(tmp_path / "w.pth", {"model": weights | {QKV: spoil(weights[QKV])}})
    assert main(["models", str(path)]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: {QKV} is " in line


def save_own_checkpoint(root: Path) -> str:
    path = root / "last.safetensors"
    save_encoder(path, build_vit(DINO_LIKE, seed=0), {})
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    weights = safetensors.torch.load_file(path)
    weights[QKV] = weights[QKV].to(torch.int8)
    safetensors.torch.save_file(weights, path, metadata)
    (root / "last.safetensors.sha256").write_text(f"{file_sha256(path)}  last.safetensors\n")
    return str(path)


def save_for_timm(root: Path) -> str:
    weights = build_vit(DINO_LIKE, seed=0).state_dict()
    weights[QKV] = weights[QKV].to(torch.int8)
    return f"timm:vit_tiny_patch16_224@{save_checkpoint(root / 'w.pth', weights)}"


@pytest.mark.parametrize("save", [save_own_checkpoint, save_for_timm])
def test_tensors_of_own_and_timm_files_are_checked_equally(tmp_path, save):
    assert f"{QKV} is int8, strided, on cpu" in get_load_error(save(tmp_path))


def test_all_floats_and_int64_indices_are_accepted(tmp_path):
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        weights = {name: value.to(dtype) for name, value in timm_model().state_dict().items()}
        encoder = load_encoder(str(save_checkpoint(tmp_path / "w.pth", weights)))
        assert torch.equal(encoder.module.state_dict()[QKV], weights[QKV].float())
    name = "swin_tiny_patch4_window7_224"
    small = {"embed_dim": 8, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1)}
    swin = timm.create_model(name, num_classes=0, **small).state_dict()
    index = {"layers.0.blocks.0.attn.relative_position_index": torch.zeros(49, 49).long()}
    config = {"architecture": name, "model_args": small}
    load_encoder(save_hf_folder(tmp_path / "swin", {**swin, **index}, config))


def test_an_index_that_is_not_int64_is_refused_by_name(tmp_path):
    index = {"blocks.0.attn.relative_position_index": torch.zeros(4, 4, dtype=torch.int32)}
    weights = build_vit(DINO_LIKE, seed=0).state_dict() | index
    message = get_load_error(save_checkpoint(tmp_path / "w.pth", {"model": weights}))
    assert "relative_position_index is int32" in message


@pytest.mark.parametrize(("name", "wrapped"), [(5, True), (("a", 1), False)])
def test_a_name_that_is_not_a_string_is_refused(tmp_path, name, wrapped):
    weights: dict[Any, Tensor] = {**timm_model().state_dict(), name: torch.zeros(3)}
    path = save_checkpoint(tmp_path / "w.pth", {"model": weights} if wrapped else weights)
    assert f"{path}: the key [{name!r}]" in get_load_error(path)


ADAM = {
    "state": {i: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3, 2)} for i in range(99)},
    "param_groups": [{"lr": 0.1, "params": list(range(99))}],
}
CALLBACKS = {
    "ModelCheckpoint{'monitor': None}": {"best_k_models": {"/a/b.ckpt": torch.tensor(0.1)}},
    "EarlyStopping": {"best_score": torch.tensor(1.0), "wait_count": 0},
}


def add_prefix(prefix: str, weights: Weights) -> Weights:
    return {prefix + name: value for name, value in weights.items()}


def wrap_modules(wrapper: str, weights: Weights) -> Weights:
    return {
        n.replace("blocks.1.", f"blocks.1.{wrapper}.").replace("embed.p", f"embed.{wrapper}.p"): v
        for n, v in weights.items()
    }


def average_model(weights: Weights, times: int) -> Weights:
    return {**add_prefix("module.", weights), "n_averaged": torch.tensor(times)}


# Files in which only one entry, `w`, can be the weights of an encoder.
ALONE: dict[str, Callable[[Weights], dict[str, Any]]] = {
    "torch's example": lambda w: {
        "epoch": 3, "arch": "vit", "state_dict": add_prefix("module.", w), "scheduler": {},
        "best_acc1": torch.tensor([71.2]), "optimizer": ADAM,
    },
    "Lightning": lambda w: {
        "state_dict": add_prefix("model._orig_mod.", w), "callbacks": CALLBACKS, "loops": {},
        "optimizer_states": [ADAM], "lr_schedulers": [{}], "hyper_parameters": {"lr": 1},
    },
    "Composer": lambda w: {
        "state": {"model": add_prefix("model.", w), "optimizers": {"AdamW": ADAM}},
        "rng": [{"torch": torch.get_rng_state()}],
    },
    "VISSL": lambda w: {"classy": {"base_model": {"model": {"trunk": w, "heads": {"w.w": ADAM}}}}},
    "AveragedModel, compiled": lambda w: add_prefix("_orig_mod.", average_model(w, 3)),
    "DINO's student alone": lambda w: {"student": add_prefix("module.backbone.", w), "epoch": 1},
    "a list": lambda w: {"models": [w]},
    "beside an optimizer": lambda w: {**add_prefix("net.", w), "optimizer": ADAM},
    "with numbers": lambda w: {**w, "epoch": torch.tensor(3), "best_acc": torch.tensor(0.7)},
    "with other tensors": lambda w: {"network": {"net": w}, "class_weights": torch.ones(10)},
    "two wrappers": lambda w: wrap_modules("_fsdp_wrapped_module._checkpoint_wrapped_module", w),
    "data-parallel blocks": lambda w: add_prefix("module.", wrap_modules("module", w)),
    "a teacher of another kind": lambda w: {"student": w, "teacher": {"conv1.weight": ADAM}},
}  # fmt: skip


@pytest.mark.parametrize("wrap", ALONE.values(), ids=ALONE)
def test_the_wrappers_around_a_model_are_removed(tmp_path, wrap):
    weights = timm_model().state_dict()
    encoder = load_encoder(str(save_checkpoint(tmp_path / "w.ckpt", wrap(weights))))
    assert encoder.loaded_keys == len(weights) <= encoder.total_keys <= len(weights) + 2
    assert "is used, not" not in encoder.weights_info.note
    assert_same_weights(encoder.module, weights)


# Files with two encoders. The first one, `w`, is used, and the other one, `o`, is ignored.
TWO: dict[str, Callable[[Weights, Weights], dict[str, Any]]] = {
    "timm": lambda w, o: {"state_dict": o, "state_dict_ema": w, "optimizer": ADAM},
    "DINO, flat": lambda w, o: add_prefix("student.", o) | add_prefix("teacher.", w),
    "capital letters": lambda w, o: {"net": o, "modelEMA": w},
    "in one dictionary": lambda w, o: add_prefix("net.", o) | add_prefix("ema.module.", w),
    "a prefix in the other": lambda w, o: o | add_prefix("ema.", w),
    "EMA of a student": lambda w, o: {"student": o, "student_ema": w},
    "BYOL": lambda w, o: add_prefix("online.net.", o) | add_prefix("target.net.", w) | {
        "online_predictor.0.weight": torch.ones(2, 2),
    },
    "AveragedModel, not yet": lambda w, o: {"model": w, "swa_model": average_model(o, 0)},
    "EMA as an attribute": lambda w, o: {
        "state_dict": add_prefix("net.", o) | add_prefix("ema.", average_model(w, 3)),
    },
    "Lightning": lambda w, o: {
        "state_dict": add_prefix("m.", w), "current_model_state": add_prefix("m.", o),
        "averaging_state": {"n_averaged": torch.tensor(3)},
    },
    "Lightning, not yet": lambda w, o: {
        "state_dict": add_prefix("m.", o), "current_model_state": add_prefix("m.", w),
        "averaging_state": {"n_averaged": torch.tensor(0)},
    },
    "Lightning's SWA": lambda w, o: {
        "state_dict": add_prefix("m.", o),
        "callbacks": {"SWA{'lrs': 0.1}": {"n_averaged": 3, "average_model_state": w}},
    },
    "Lightning's SWA, not yet": lambda w, o: {
        "state_dict": add_prefix("m.", w),
        "callbacks": {"SWA": {"n_averaged": 0, "average_model_state": o}},
    },
}  # fmt: skip


@pytest.mark.parametrize("wrap", TWO.values(), ids=TWO)
def test_the_averaged_encoder_of_two_is_used_and_reported(tmp_path, wrap):
    weights = timm_model().state_dict()
    other = {name: value + 1 for name, value in weights.items()}
    encoder = load_encoder(str(save_checkpoint(tmp_path / "w.ckpt", wrap(weights, other))))
    assert_same_weights(encoder.module, weights)
    used, _, rest = encoder.weights_info.note.partition(" is used, not ")
    unused = rest.partition(";")[0]
    assert unused not in ("", used)
    assert "," not in unused
    assert encoder.weights_info.ignored


RESNET = {"conv1.weight": torch.zeros(4, 3, 7, 7), "layer1.0.conv1.weight": torch.zeros(4, 4, 3, 3)}
WHOLE = dict(timm_model().state_dict())
TORN = {name: value for name, value in WHOLE.items() if name != "norm.bias"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"net": add_prefix("module.", RESNET), "x": {"y": [torch.ones(2)]}}, "a ResNet"),
        ({**add_prefix("module.", RESNET), "n_averaged": torch.tensor(3)}, "a ResNet"),
        ({"net": WHOLE, "ema": TORN}, "29/30 keys fit"),
        ({"optimizer": ADAM}, "got optimizer/"),
        ({"best_acc1": torch.tensor(0.5)}, "got best_acc1"),
        ({"a": WHOLE, "b": TORN}, "contains 2 encoders (a, b)"),
        (
            WHOLE | add_prefix("module.", WHOLE),
            "contains 2 encoders (the encoder without a prefix, ",
        ),
        (add_prefix("net.", WHOLE) | {"a.b": torch.ones(1)}, "contains a.b, "),
        ({"model": WHOLE, "ema": [torch.ones(3)]}, "contains ema, "),
        (WHOLE | {"norm._orig_mod.bias": WHOLE["norm.bias"]}, "contains norm.bias twice"),
        (WHOLE | {"fc_norm.weight": WHOLE["norm.weight"]}, "contains norm.weight twice"),
    ],
)
def test_a_refusal_states_its_reason(tmp_path, content, problem):
    assert problem in get_load_error(save_checkpoint(tmp_path / "w.pth", content))
