"""Read ONNX files of the transformers library's ViT, DeiT and DINOv2."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssl_bench.errors import CheckpointError, MachineError
from ssl_bench.models.loading.checkpoint import TIMM_HINT, list_names
from ssl_bench.models.loading.layouts import ModelSpec
from ssl_bench.system.process import reraise_out_of_memory

_SCOPES = "pkg.torch.onnx.name_scopes"
_EMBEDDINGS = "embeddings.patch_embeddings.projection.weight"
_POSITIONS = "embeddings.position_embeddings"


def read_onnx(path: Path) -> tuple[dict[str, Tensor], ModelSpec]:
    """Return the tensors of an ONNX file by their PyTorch names, and a description of the ViT.

    An exported file contains the names of biases and norms, but not the names of linear layers'
    weight matrices. Each weight matrix therefore gets the name of the module that multiplies by
    this matrix. Matrices are transposed if necessary. If the position embeddings of [CLS] and of
    the patches are stored separately, they are joined. The number of heads and the epsilon of the
    norms are read from the graph.

    Raises:
        CheckpointError: The file is damaged, or is not an export of a supported model.
        MachineError: The package onnx is not installed.
    """
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError as error:
        raise MachineError(
            f"{path.name} needs the package onnx. Run: pip install 'ssl-bench[onnx]'"
        ) from error
    try:
        return _read_graph(onnx.load(str(path)).graph, numpy_helper.to_array, path)
    except CheckpointError:
        raise
    except Exception as error:  # A damaged file can cause any exception.
        reraise_out_of_memory(error)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} is truncated, damaged or not an ONNX file ({reason[:120]}). Copy or download "
            "it again"
        ) from error


def _read_graph(
    graph: Any, to_array: Callable[[Any], np.ndarray], path: Path
) -> tuple[dict[str, Tensor], ModelSpec]:
    constants = {item.name: to_array(item) for item in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            constants[node.output[0]] = to_array(node.attribute[0].t)
    weights = _name_constants(graph, constants)
    prefix = next((n.removesuffix(_EMBEDDINGS) for n in weights if n.endswith(_EMBEDDINGS)), None)
    if prefix is None:
        raise CheckpointError(
            f"{path} has no {_EMBEDDINGS}: expected an export of the transformers library's ViT, "
            f"DeiT or DINOv2, found {list_names(list(weights)) or 'no names of parameters'}. Save "
            "the model's state_dict() with torch.save, and load that file"
        )
    if f"{prefix}{_POSITIONS}" not in weights:
        # Join the positions of [CLS] and of the patches to 1 x (1 + patches) x dim.
        scope, dim = f"{prefix}embeddings", len(weights[f"{prefix}{_EMBEDDINGS}"])
        halves = [
            # A map of positions (1 x dim x rows x cols) becomes 1 x patches x dim.
            array if array.ndim == 3 else array.reshape(*array.shape[:2], -1).transpose(0, 2, 1)
            for node in graph.node
            if _scope(node) == scope and node.op_type in ("Concat", "Reshape", "Add", "Resize")
            for name in node.input
            if name in constants and name not in weights
            if (array := constants[name]).ndim in (3, 4)
        ]
        halves = [half for half in halves if half.shape[0] == 1 and half.shape[2] == dim]
        whole = sorted(halves, key=lambda half: half.shape[1])
        if not (len(whole) == 1 or (len(whole) == 2 and whole[0].shape[1] == 1)):
            shapes = ", ".join(str(half.shape) for half in halves) or "none"
            raise CheckpointError(
                f"{path}: expected the position embeddings of [CLS] and of the patches as "
                f"constants of {scope}, found constants of the shapes {shapes}. Export "
                "the model without constant folding, or load its .safetensors"
            )
        weights[f"{prefix}{_POSITIONS}"] = np.concatenate(whole, axis=1)
    model_spec = ModelSpec(
        num_heads=_num_heads(graph, constants, path),
        norm_eps=_norm_eps(graph, constants, path),
        # The transformers library resizes positions without the margin that DINO adds to the size.
        position_margin=0.0,
    )
    _require_gelu(graph, path)
    # Copy the arrays, because onnx returns read-only arrays.
    return {name: torch.from_numpy(array.copy()) for name, array in weights.items()}, model_spec


def _scope(node: Any) -> str:
    """Return the name of the PyTorch module that contains an ONNX node, or "" if unknown."""
    if node.name.startswith("/"):
        return node.name[1:].rpartition("/")[0].replace("/", ".")
    text = next((item.value for item in node.metadata_props if item.key == _SCOPES), "")
    # The text is a Python list such as ['', 'embeddings', 'embeddings.norm', 'layer_norm_1'].
    scopes = re.findall(r"""["']([^"']+)["']""", text)
    # The last item is the name of the node itself.
    return scopes[-2] if len(scopes) > 1 else ""


def _name_constants(graph: Any, constants: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the parameters of an ONNX graph by their PyTorch names.

    A matrix without a name gets the name of the module that multiplies by this matrix.
    """
    initial = {item.name for item in graph.initializer}
    for node in graph.node:
        # Equal tensors, such as the initial weights of norms, are stored only once.
        if node.op_type == "Identity" and node.input[0] in initial:
            constants[node.output[0]] = constants[node.input[0]]
            initial.add(node.output[0])
    named = {
        name: constants[name] for name in initial if re.fullmatch(r"[A-Za-z_][\w.]*\.\w+", name)
    }
    for node in graph.node:
        scope = _scope(node)
        if node.op_type not in ("MatMul", "Gemm") or not scope or len(node.input) < 2:
            continue
        matrix = node.input[1]
        if matrix not in initial or matrix in named or constants[matrix].ndim != 2:
            continue
        is_transposed = any(item.name == "transB" and item.i for item in node.attribute)
        named[f"{scope}.weight"] = constants[matrix] if is_transposed else constants[matrix].T
    return named


def _num_heads(graph: Any, constants: Mapping[str, np.ndarray], path: Path) -> int:
    """Read the number of attention heads from an ONNX graph.

    Queries are reshaped to batch x tokens x heads x channels, which states the number of heads.
    """
    makers = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        maker = makers.get(node.input[0]) if node.op_type == "Reshape" else None
        if maker is None or not re.search(r"query|q_proj", _scope(maker)):
            continue
        shape = _shape_sizes(node.input[1], constants, makers)
        if len(shape) == 4 and shape[2] is not None and shape[2] > 0:
            return shape[2]
    raise CheckpointError(
        f"{path} does not state the number of attention heads. Load the model from a folder with "
        "its config.json and .safetensors file",
        hint=("--checkpoint", "local-dir:{model_folder}"),
    )


def _shape_sizes(
    name: str, constants: Mapping[str, np.ndarray], makers: Mapping[str, Any]
) -> Sequence[int | None]:
    """Return the sizes in a shape tensor of an ONNX graph, such as the target shape of a Reshape.

    The tensor is a constant or the output of a Concat node. A size that is not constant is None.

    Args:
        name: Name of the tensor.
        constants: Constants of the graph by name.
        makers: The node that computes each tensor, by the name of the tensor.
    """
    maker = makers.get(name)
    joined = [] if name in constants or maker is None or maker.op_type != "Concat" else maker.input
    return [
        number
        for part in joined or [name]
        for number in (constants[part].reshape(-1).tolist() if part in constants else [None])
    ]


def _norm_eps(graph: Any, constants: Mapping[str, np.ndarray], path: Path) -> float:
    """Read the epsilon of all norms from an ONNX graph.

    The epsilon is an attribute of a LayerNormalization node, or a constant that an Add node adds to
    the variance.
    """
    values: set[float] = set()
    for node in graph.node:
        if node.op_type == "LayerNormalization":
            stated = [item.f for item in node.attribute if item.name == "epsilon"]
            values.add(stated[0] if stated else 1e-5)
        if node.op_type == "Add" and re.search(r"norm\w*$", _scope(node)):
            added = [constants[name] for name in node.input if name in constants]
            values |= {float(array) for array in added if array.size == 1}
    # The file stores epsilons in float32, which has seven significant digits.
    rounded = {float(f"{eps:.6g}") for eps in values}
    if len(rounded) != 1:
        listed = ", ".join(f"{eps:g}" for eps in sorted(rounded)) or "none"
        raise CheckpointError(
            f"{path}: expected one epsilon for all norms of the encoder, found {listed}. Load the "
            "model from a folder with its config.json and .safetensors file",
            hint=("--checkpoint", "local-dir:{model_folder}"),
        )
    return rounded.pop()


def _require_gelu(graph: Any, path: Path) -> None:
    """Raise CheckpointError unless an MLP of the ONNX graph uses the exact GELU.

    The exact GELU is a Gelu node without the tanh approximation, or contains the error function
    erf.
    """
    for node in graph.node:
        if re.search(r"mlp|intermediate", _scope(node)):
            is_tanh = any(a.name == "approximate" and a.s == b"tanh" for a in node.attribute)
            if node.op_type == "Erf" or (node.op_type == "Gelu" and not is_tanh):
                return
    raise CheckpointError(
        f"{path} has an MLP without GELU, but the ViT of ssl-bench needs GELU", hint=TIMM_HINT
    )
