"""ONNX files of ViTs and DINOv2, exported here under the names that transformers gives."""

import shutil
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


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lambda1 = nn.Parameter(torch.rand(DIM) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.lambda1


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.view(y.shape[0], -1, HEADS, DIM // HEADS).transpose(1, 2)

        queries, keys, values = (heads(part(x)) for part in (self.query, self.key, self.value))
        weights = (queries @ keys.transpose(-1, -2) * (DIM // HEADS) ** -0.5).softmax(-1)
        return (weights @ values).transpose(1, 2).reshape(x.shape[0], -1, DIM)


class Dense(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x)


class Intermediate(Dense):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__(DIM, 2 * DIM)
        self.intermediate_act_fn = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.output = SelfAttention(), Dense(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.attention(x))


class Mlp(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.fc1, self.activation, self.fc2 = (
            nn.Linear(DIM, 2 * DIM), activation, nn.Linear(2 * DIM, DIM),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class ViTLayer(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.layernorm_before = nn.LayerNorm(DIM, eps=1e-5)
        self.layernorm_after = nn.LayerNorm(DIM, eps=1e-5)
        self.attention = Attention()
        self.intermediate, self.output = Intermediate(activation), Dense(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.layernorm_before(x))
        return x + self.output(self.intermediate(self.layernorm_after(x)))


class Dinov2Layer(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM, eps=1e-6), nn.LayerNorm(DIM, eps=1e-6)
        self.attention, self.mlp = Attention(), Mlp(activation)
        self.layer_scale1, self.layer_scale2 = Scale(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer_scale1(self.attention(self.norm1(x)))
        return x + self.layer_scale2(self.mlp(self.norm2(x)))


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, DIM, PATCH, PATCH)

    def forward(self, images: Tensor) -> Tensor:
        return self.projection(images).flatten(2).transpose(1, 2)


class Embeddings(nn.Module):
    def __init__(self, resized: bool) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, DIM))
        self.position_embeddings = nn.Parameter(torch.randn(1, 1 + GRID**2, DIM))
        self.patch_embeddings, self.resized = Projection(), resized

    def forward(self, images: Tensor) -> Tensor:
        x = torch.cat(
            [self.cls_token.expand(images.shape[0], -1, -1), self.patch_embeddings(images)], 1
        )
        if not self.resized:
            return x + self.position_embeddings
        first, patches = self.position_embeddings[:, :1], self.position_embeddings[:, 1:]
        patches = patches.reshape(1, GRID, GRID, DIM).permute(0, 3, 1, 2)
        size = (images.shape[2] // PATCH, images.shape[3] // PATCH)
        patches = F.interpolate(patches, size=size, mode="bicubic").permute(0, 2, 3, 1)
        return x + torch.cat([first, patches.reshape(1, -1, DIM)], 1)


class Encoder(nn.Module):
    def __init__(self, kind: type[nn.Module], activation: nn.Module) -> None:
        super().__init__()
        self.layer = nn.ModuleList(kind(activation) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x)
        return x


class Transformers(nn.Module):
    """Embeddings, encoder and layernorm, as ViTModel and Dinov2Model have them."""

    def __init__(self, kind: type[nn.Module], activation: nn.Module | None = None) -> None:
        super().__init__()
        self.embeddings = Embeddings(resized=kind is Dinov2Layer)
        self.encoder = Encoder(kind, activation or nn.GELU())
        self.layernorm = nn.LayerNorm(DIM, eps=1e-5 if kind is ViTLayer else 1e-6)

    def forward(self, images: Tensor) -> Tensor:
        return self.layernorm(self.encoder(self.embeddings(images)))


class Wrapped(nn.Module):
    """A backbone with a head behind it, of another shape."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.classifier = nn.Linear(DIM, 5)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.backbone(images)
        return tokens, self.classifier(tokens[:, 0])


def export(model: nn.Module, path, *, side: int = GRID * PATCH, opset: int = 14) -> None:
    torch.onnx.export(
        model.eval(), (torch.zeros(1, 3, side, side),), path, dynamo=False, opset_version=opset,
        input_names=["images"], dynamic_axes={"images": {0: "batch", 2: "height", 3: "width"}},
    )  # fmt: skip


@pytest.mark.parametrize("opset", [14, 17])
@pytest.mark.parametrize("kind", [ViTLayer, Dinov2Layer])
@pytest.mark.parametrize("side", [24, 16])
def test_an_export_gives_what_onnxruntime_gives(tmp_path, kind, opset, side):
    if kind is ViTLayer and side != 24:
        pytest.skip("its positions are not resized")
    torch.manual_seed(1)
    export(Wrapped(Transformers(kind)), tmp_path / "m.onnx", opset=opset)
    images = torch.randn(2, 3, side, side)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    expected = session.run(None, {"images": images.numpy()})[0]

    encoder = load_encoder(str(tmp_path / "m.onnx"))

    assert (encoder.num_heads, encoder.patch_size, encoder.depth) == (HEADS, PATCH, DEPTH)
    assert encoder.native_size == (24, 24)
    assert encoder.architecture["position_margin"] == 0
    assert encoder.architecture.get("norm_eps", 1e-6) == (1e-5 if kind is ViTLayer else 1e-6)
    with torch.no_grad():
        found = cast(Any, encoder.module).forward_features(images)
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-5)
    assert "classifier.weight" in encoder.contents.ignored


def test_a_file_that_is_no_such_export_is_one_line(tmp_path, capsys):
    path = tmp_path / "m.onnx"
    torch.manual_seed(1)
    export(Transformers(Dinov2Layer, nn.ReLU()), path)
    with pytest.raises(CheckpointError, match="an MLP without GELU"):
        load_encoder(str(path))
    export(nn.Conv2d(3, 4, 3), path)
    with pytest.raises(CheckpointError, match="has no embeddings"):
        load_encoder(str(path))
    export(Transformers(Dinov2Layer), path)
    shutil.copy(path, tmp_path / "cut.onnx")
    (tmp_path / "cut.onnx").write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for name in ("cut.onnx", "absent.onnx"):
        assert main(["models", str(tmp_path / name)]) == 4
    assert main(["models", str(path)]) == 0
    said = capsys.readouterr()
    assert "cut or no ONNX file" in said.err
    assert "transformers" in said.out
