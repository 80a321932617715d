"""Rows 77 and 78 of the catalogue of faults: which tensors are weights, and what is around them.

How training tools write a checkpoint is restated from their sources: Lightning's ModelCheckpoint,
WeightAveraging and StochasticWeightAveraging, torch.optim.swa_utils, timm's train.py, Composer,
VISSL, I-JEPA, torchvision's and torch's reference scripts.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from torch import Tensor

from ssl_bench.cli.__main__ import main
from ssl_bench.models import ViTConfig, build_vit, load_encoder, save_encoder
from ssl_bench.models.loading.load import load_and_log
from ssl_bench.system.files import file_sha256
from tests.support.faults import DINO_LIKE
from tests.support.foreign_weights import Weights, message_of, saved, timm_model

QKV = "blocks.0.attn.qkv.weight"


def quantised(value: Tensor) -> Tensor:
    return torch.quantize_per_tensor(value, 0.1, 0, torch.qint8)


SPOILT: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "int8": (lambda v: (127 * v).to(torch.int8), "int8"),
    "complex": (lambda v: v * (1 + 1j), "complex64"),
    "float8": (lambda v: v.to(torch.float8_e4m3fn), "float8_e4m3fn"),
    "quantised": (quantised, "qint8"),
    "sparse": (lambda v: v.to_sparse(), "sparse_coo"),
    "meta": (lambda v: v.to("meta"), "on meta"),
}


@pytest.mark.parametrize(("spoil", "said"), SPOILT.values(), ids=SPOILT)
@pytest.mark.filterwarnings("ignore")
def test_fault_77_a_tensor_that_is_no_dense_float_is_named(tmp_path, capsys, spoil, said):
    weights = build_vit(DINO_LIKE, seed=0).state_dict()
    path = saved(tmp_path / "w.pth", {"model": weights | {QKV: spoil(weights[QKV])}})

    assert main(["models", str(path)]) == 4

    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: {QKV} is " in line
    assert said in line
    assert "expected dense floating-point numbers" in line


def in_bytes(weights: Mapping[str, Tensor]) -> Weights:
    return {n: (100 * v).to(torch.int8) if n.endswith("weight") else v for n, v in weights.items()}


def of_ours(root: Path) -> str:
    path = root / "last.safetensors"
    save_encoder(path, build_vit(DINO_LIKE, seed=0), {})
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    (root / "last.safetensors.sha256").unlink()
    safetensors.torch.save_file(in_bytes(safetensors.torch.load_file(path)), path, metadata)
    (root / "last.safetensors.sha256").write_text(f"{file_sha256(path)}  last.safetensors\n")
    return str(path)


def of_timm(root: Path) -> str:
    model = build_vit(ViTConfig(dim=192, num_heads=3, depth=12), seed=0)
    return f"timm:vit_tiny_patch16_224@{saved(root / 'w.pth', in_bytes(model.state_dict()))}"


@pytest.mark.parametrize("source", [of_ours, of_timm])
def test_fault_77_weights_of_our_own_and_through_timm_pass_the_same_gate(tmp_path, source):
    said = message_of(source(tmp_path))

    assert ".weight is int8, strided, on cpu, expected dense floating-point numbers" in said


def test_fault_77_floats_of_any_width_and_counts_are_taken(tmp_path):
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        weights = {name: value.to(dtype) for name, value in timm_model().state_dict().items()}
        encoder = load_encoder(str(saved(tmp_path / "w.pth", weights)))
        assert torch.equal(encoder.module.state_dict()[QKV], weights[QKV].float())
    swin = timm.create_model("swin_tiny_patch4_window7_224").state_dict()
    index = {"layers.0.blocks.0.attn.relative_position_index": torch.zeros(49, 49).long()}
    path = saved(tmp_path / "swin.pth", {"model": swin | index})
    load_encoder(f"timm:swin_tiny_patch4_window7_224@{path}")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_an_index_of_another_type_than_int64_is_named(tmp_path, dtype):
    index = {"blocks.0.attn.relative_position_index": torch.zeros(4, 4, dtype=dtype)}
    weights = build_vit(DINO_LIKE, seed=0).state_dict() | index

    said = message_of(saved(tmp_path / "w.pth", {"model": weights}))

    assert f"relative_position_index is {str(dtype).removeprefix('torch.')}" in said


@pytest.mark.parametrize("name", [5, None, b"norm.bias", ("a", 1)], ids=str)
@pytest.mark.parametrize("wrapped", [True, False])
def test_fault_77_a_name_that_is_no_text_is_refused(tmp_path, name, wrapped):
    weights: dict[Any, Tensor] = {**timm_model().state_dict(), name: torch.zeros(3)}
    said = message_of(saved(tmp_path / "w.pth", {"model": weights} if wrapped else weights))
    assert f"{tmp_path / 'w.pth'}: the name [{name!r}] is no string" in said


ADAM = {
    "state": {i: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3, 2)} for i in range(99)},
    "param_groups": [{"lr": 0.1, "params": list(range(99))}],
}
CALLBACKS = {
    "ModelCheckpoint{'monitor': None}": {"best_k_models": {"/a/b.ckpt": torch.tensor(0.1)}},
    "EarlyStopping": {"best_score": torch.tensor(1.0), "wait_count": 0},
}


def behind(prefix: str, weights: Weights) -> Weights:
    return {prefix + name: value for name, value in weights.items()}


def inside(wrapper: str, weights: Weights) -> Weights:
    """As a wrapper around a block and around the patches has it."""
    return {
        n.replace("blocks.1.", f"blocks.1.{wrapper}.").replace("embed.p", f"embed.{wrapper}.p"): v
        for n, v in weights.items()
    }


def averaged(weights: Weights, times: int) -> Weights:
    return {**behind("module.", weights), "n_averaged": torch.tensor(times)}


# What a file holds of an encoder (`w`) that nothing else of the file can be.
ALONE: dict[str, Callable[[Weights], dict[str, Any]]] = {
    "torch's example": lambda w: {
        "epoch": 3, "arch": "vit", "state_dict": behind("module.", w), "scheduler": {},
        "best_acc1": torch.tensor([71.2]), "optimizer": ADAM,
    },
    "Lightning": lambda w: {
        "state_dict": behind("model._orig_mod.", w), "callbacks": CALLBACKS, "loops": {},
        "optimizer_states": [ADAM], "lr_schedulers": [{}], "hyper_parameters": {"lr": 1},
    },
    "Composer": lambda w: {
        "state": {"model": behind("model.", w), "optimizers": {"AdamW": ADAM}},
        "rng": [{"torch": torch.get_rng_state()}],
    },
    "VISSL": lambda w: {"classy": {"base_model": {"model": {"trunk": w, "heads": {"w.w": ADAM}}}}},
    "AveragedModel, compiled": lambda w: behind("_orig_mod.", averaged(w, 3)),
    "DINO's student alone": lambda w: {"student": behind("module.backbone.", w), "epoch": 1},
    "a list": lambda w: {"models": [w]},
    "numbers beside": lambda w: {**w, "epoch": torch.tensor(3), "best_acc": torch.tensor(0.7)},
    "tensors beside": lambda w: {"network": {"net": w}, "class_weights": torch.ones(10)},
    "checkpointing": lambda w: behind("vit.", inside("_checkpoint_wrapped_module", w)),
    "both": lambda w: inside("_fsdp_wrapped_module._checkpoint_wrapped_module", w),
    "compiled blocks": lambda w: inside("_orig_mod", w),
    "data-parallel blocks": lambda w: behind("module.", inside("module", w)),
    "a teacher that is none": lambda w: {"student": w, "teacher": {"conv1.weight": ADAM}},
}  # fmt: skip


@pytest.mark.parametrize("wrap", ALONE.values(), ids=ALONE)
def test_fault_78_whatever_is_written_around_a_model_is_taken_off(tmp_path, wrap):
    weights = timm_model().state_dict()

    encoder = load_encoder(str(saved(tmp_path / "w.ckpt", wrap(weights))))

    assert encoder.loaded_keys == len(weights)
    assert "is used, not" not in encoder.contents.note
    assert all(torch.equal(encoder.module.state_dict()[n], v) for n, v in weights.items())


# With two encoders: the one to take, another, and what is said to be taken.
TWO: dict[str, tuple[Callable[[Weights, Weights], dict[str, Any]], str]] = {
    "timm": (lambda w, o: {"state_dict": o, "state_dict_ema": w, "optimizer": ADAM}, "e_dict_ema"),
    "DINO, flat": (lambda w, o: behind("student.", o) | behind("teacher.", w), "teacher"),
    "in capitals": (lambda w, o: {"net": o, "modelEMA": w}, "modelEMA"),
    "in one dictionary": (lambda w, o: behind("net.", o) | behind("ema.module.", w), "ema.module"),
    "within the other": (lambda w, o: o | behind("ema.", w), "ema"),
    "a student's own": (lambda w, o: {"student": o, "student_ema": w}, "student_ema"),
    "BYOL": (
        lambda w, o: behind("online.net.", o) | behind("target.net.", w) | {
            "online_predictor.0.weight": torch.ones(2, 2),
        },
        "target.net",
    ),
    "AveragedModel, not yet": (lambda w, o: {"model": w, "swa_model": averaged(o, 0)}, "model"),
    "as an attribute": (
        lambda w, o: {"state_dict": behind("net.", o) | behind("ema.", averaged(w, 3))},
        "state_dict/ema.module",
    ),
    "Lightning": (
        lambda w, o: {
            "state_dict": behind("m.", w), "current_model_state": behind("m.", o),
            "averaging_state": {"n_averaged": torch.tensor(3)},
        },
        "state_dict/m",
    ),
    "Lightning, not yet": (
        lambda w, o: {
            "state_dict": behind("m.", o), "current_model_state": behind("m.", w),
            "averaging_state": {"n_averaged": torch.tensor(0)},
        },
        "current_model_state/m",
    ),
    "Lightning's SWA": (
        lambda w, o: {
            "state_dict": behind("m.", o),
            "callbacks": {"SWA{'lrs': 0.1}": {"n_averaged": 3, "average_model_state": w}},
        },
        "average_model_state",
    ),
    "Lightning's SWA, not yet": (
        lambda w, o: {
            "state_dict": behind("m.", w),
            "callbacks": {"SWA": {"n_averaged": 0, "average_model_state": o}},
        },
        "state_dict/m",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("wrap", "said"), TWO.values(), ids=TWO)
def test_fault_78_of_two_encoders_the_averaged_one_is_announced(tmp_path, capsys, wrap, said):
    weights = timm_model().state_dict()
    other = {name: value + 1 for name, value in weights.items()}

    encoder = load_and_log(str(saved(tmp_path / "w.ckpt", wrap(weights, other))))

    assert all(torch.equal(encoder.module.state_dict()[n], v) for n, v in weights.items())
    assert f"{said} is used, not " in capsys.readouterr().err
    assert encoder.contents.ignored


RESNET = {"conv1.weight": torch.zeros(4, 3, 7, 7), "layer1.0.conv1.weight": torch.zeros(4, 4, 3, 3)}
WHOLE = dict(timm_model().state_dict())
TORN = {name: value for name, value in WHOLE.items() if name != "norm.bias"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"net": RESNET, "best_acc1": torch.tensor(0.5)}, "contains a ResNet"),
        ({"net": behind("module.", RESNET), "x": {"y": [torch.ones(2)]}}, "contains a ResNet"),
        ({**behind("module.", RESNET), "n_averaged": torch.tensor(3)}, "contains a ResNet"),
        ({"net": WHOLE, "ema": TORN}, "29/30 keys fit; norm.bias missing"),
        ({"optimizer": ADAM}, "expected tensors with names of weights, got optimizer/"),
        ({"best_acc1": torch.tensor(0.5)}, "got best_acc1"),
        ({"a": WHOLE, "b": TORN}, "contains 2 encoders (a, b)"),
        (
            WHOLE | behind("module.", WHOLE),
            "contains 2 encoders (the encoder without a prefix, module)",
        ),
        (behind("net.", WHOLE) | {"a.b": torch.ones(1)}, "contains a.b, "),
        ({"model": WHOLE, "ema": [torch.ones(3)]}, "contains ema, "),
        (WHOLE | {"norm._orig_mod.bias": torch.ones(3)}, "contains norm.bias twice"),
    ],
)
def test_fault_78_a_refusal_says_the_true_reason(tmp_path, content, said):
    assert said in message_of(saved(tmp_path / "w.pth", content))
