"""Test that encoders are loaded from ONNX files."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_bench.cli.__main__ import main
from ssl_bench.errors import CheckpointError
from ssl_bench.models import load_encoder

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

DIM, HEADS, PATCH, GRID, DEPTH = 24, 3, 4, 6, 2


class Part(nn.Module):
    def __init__(self, does: Callable[[Any, Tensor], Any], **parts: nn.Module | nn.Parameter):
        super().__init__()
        self.does = does
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.does(self, x)


def dense(inputs: int, outputs: int) -> Part:
    return Part(lambda m, x: m.dense(x), dense=nn.Linear(inputs, outputs))


def scale() -> Part:
    return Part(lambda m, x: x * m.lambda1, lambda1=nn.Parameter(torch.rand(DIM) + 0.5))


def attend(m: Any, x: Tensor) -> Tensor:
    def heads(y: Tensor) -> Tensor:
        return y.view(y.shape[0], -1, HEADS, DIM // HEADS).transpose(1, 2)

    queries, keys, values = (heads(part(x)) for part in (m.query, m.key, m.value))
    weights = (queries @ keys.transpose(-1, -2) * (DIM // HEADS) ** -0.5).softmax(-1)
    return (weights @ values).transpose(1, 2).reshape(x.shape[0], -1, DIM)


def attention() -> Part:
    inner = Part(attend, **{n: nn.Linear(DIM, DIM) for n in ("query", "key", "value")})
    return Part(lambda m, x: m.output(m.attention(x)), attention=inner, output=dense(DIM, DIM))


def vit_layer(activation: nn.Module) -> Part:
    def does(m: Any, x: Tensor) -> Tensor:
        x = x + m.attention(m.layernorm_before(x))
        return x + m.output(m.intermediate(m.layernorm_after(x)))

    return Part(
        does,
        layernorm_before=nn.LayerNorm(DIM, eps=1e-5),
        layernorm_after=nn.LayerNorm(DIM, eps=1e-5),
        attention=attention(),
        intermediate=Part(
            lambda m, x: m.intermediate_act_fn(m.dense(x)),
            dense=nn.Linear(DIM, 2 * DIM),
            intermediate_act_fn=activation,
        ),
        output=dense(2 * DIM, DIM),
    )


def dinov2_layer(activation: nn.Module) -> Part:
    def does(m: Any, x: Tensor) -> Tensor:
        x = x + m.layer_scale1(m.attention(m.norm1(x)))
        return x + m.layer_scale2(m.mlp(m.norm2(x)))

    mlp = Part(
        lambda m, x: m.fc2(m.activation(m.fc1(x))),
        fc1=nn.Linear(DIM, 2 * DIM),
        activation=activation,
        fc2=nn.Linear(2 * DIM, DIM),
    )
    norms = {name: nn.LayerNorm(DIM, eps=1e-6) for name in ("norm1", "norm2")}
    return Part(
        does, **norms, attention=attention(), mlp=mlp, layer_scale1=scale(), layer_scale2=scale()
    )


def embed(m: Any, images: Tensor, *, resized: bool) -> Tensor:
    x = torch.cat([m.cls_token.expand(images.shape[0], -1, -1), m.patch_embeddings(images)], 1)
    if not resized:
        return x + m.position_embeddings
    first, patches = m.position_embeddings[:, :1], m.position_embeddings[:, 1:]
    patches = patches.reshape(1, GRID, GRID, DIM).permute(0, 3, 1, 2)
    size = (images.shape[2] // PATCH, images.shape[3] // PATCH)
    patches = F.interpolate(patches, size=size, mode="bicubic").permute(0, 2, 3, 1)
    return x + torch.cat([first, patches.reshape(1, -1, DIM)], 1)


def transformers(
    make_layer: Callable[[nn.Module], Part], activation: nn.Module | None = None, depth: int = DEPTH
) -> Part:
    """Return a random model with the structure of ViTModel or Dinov2Model."""

    def layers(m: Any, x: Tensor) -> Tensor:
        for layer in m.layer:
            x = layer(x)
        return x

    embeddings = Part(
        lambda m, x: embed(m, x, resized=make_layer is dinov2_layer),
        cls_token=nn.Parameter(torch.randn(1, 1, DIM)),
        position_embeddings=nn.Parameter(torch.randn(1, 1 + GRID**2, DIM)),
        patch_embeddings=Part(
            lambda m, x: m.projection(x).flatten(2).transpose(1, 2),
            projection=nn.Conv2d(3, DIM, PATCH, PATCH),
        ),
    )
    stack = nn.ModuleList(make_layer(activation or nn.GELU()) for _ in range(depth))
    return Part(
        lambda m, x: m.layernorm(m.encoder(m.embeddings(x))),
        embeddings=embeddings,
        encoder=Part(layers, layer=stack),
        layernorm=nn.LayerNorm(DIM, eps=1e-5 if make_layer is vit_layer else 1e-6),
    )


def add_head(backbone: nn.Module) -> Part:
    def does(m: Any, images: Tensor) -> tuple[Tensor, Tensor]:
        tokens = m.backbone(images)
        return tokens, m.classifier(tokens[:, 0])

    return Part(does, backbone=backbone, classifier=nn.Linear(DIM, 5))


def export(model: nn.Module, path, *, side: int = GRID * PATCH, opset: int = 14) -> None:
    torch.onnx.export(
        model.eval(), (torch.zeros(1, 3, side, side),), path, dynamo=False, opset_version=opset,
        input_names=["images"], dynamic_axes={"images": {0: "batch", 2: "height", 3: "width"}},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "opset", "side"),
    [(vit_layer, 14, 24), (vit_layer, 17, 24), (dinov2_layer, 17, 24), (dinov2_layer, 14, 16)],
)
def test_an_export_gives_the_tokens_of_onnxruntime(tmp_path, kind, opset, side):
    torch.manual_seed(1)
    export(add_head(transformers(kind)), tmp_path / "m.onnx", opset=opset)
    images = torch.randn(2, 3, side, side)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    expected = session.run(None, {"images": images.numpy()})[0]
    encoder = load_encoder(str(tmp_path / "m.onnx"))

    assert (encoder.num_heads, encoder.patch_size, encoder.depth) == (HEADS, PATCH, DEPTH)
    assert encoder.native_size == (24, 24)
    assert encoder.architecture["position_margin"] == 0
    assert encoder.architecture.get("norm_eps", 1e-6) == (1e-5 if kind is vit_layer else 1e-6)
    with torch.no_grad():
        tokens = cast(Any, encoder.module).forward_features(images)
    np.testing.assert_allclose(tokens.numpy(), expected, atol=2e-5)
    assert "classifier.weight" in encoder.weights_info.ignored
    random = load_encoder(f"random:{tmp_path / 'm.onnx'}")
    assert random.architecture == encoder.architecture


def test_other_onnx_files_are_refused_in_one_line(tmp_path, capsys):
    path = tmp_path / "m.onnx"
    torch.manual_seed(1)
    export(transformers(dinov2_layer, nn.ReLU(), 1), path)
    with pytest.raises(CheckpointError) as raised:
        load_encoder(str(path))
    assert raised.value.hint == ("--checkpoint", "timm:{timm_name}@{file}")
    (tmp_path / "cut.onnx").write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    export(nn.Conv2d(3, 4, 3), path)
    for name in ("cut.onnx", "m.onnx", "absent.onnx"):
        assert main(["models", str(tmp_path / name)]) == 4
    lines = capsys.readouterr().err.splitlines()
    assert ["damaged" in line for line in lines] == [True, False, False]


def _change_scope(node: Any) -> None:
    node.name = ""
    entry = node.metadata_props.add()
    entry.key, entry.value = "pkg.torch.onnx.name_scopes", "['', 3]"


@pytest.mark.slow
def test_a_damaged_graph_loads_or_is_a_checkpoint_error(tmp_path):
    damages = {
        "no input": lambda node: node.ClearField("input"),
        "no output": lambda node: node.ClearField("output"),
        "an input of itself": lambda node: node.input.extend(node.output),
        "another scope": _change_scope,
    }
    torch.manual_seed(1)
    export(transformers(vit_layer, depth=1), tmp_path / "whole.onnx")
    whole = onnx.load(tmp_path / "whole.onnx")
    path, refused = tmp_path / "damaged.onnx", set()
    for name, damage in damages.items():
        for index in range(0, len(whole.graph.node), 3):
            damaged = onnx.ModelProto()
            damaged.CopyFrom(whole)
            damage(damaged.graph.node[index])
            onnx.save(damaged, path)
            try:
                load_encoder(str(path))
            except CheckpointError:
                refused.add(name)
    assert refused == damages.keys()
