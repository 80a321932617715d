"""ONNX files of ViTs, DINOv2 and DeiT of transformers, as weights under their names."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssl_bench.errors import CheckpointError, MachineError
from ssl_bench.models.loading.checkpoint import check_readable, named
from ssl_bench.models.loading.layouts import Description
from ssl_bench.system.process import reraise_out_of_memory

_SCOPES = "pkg.torch.onnx.name_scopes"
_EMBEDDINGS = "embeddings.patch_embeddings.projection.weight"
_POSITIONS = "embeddings.position_embeddings"


def read_onnx(path: Path) -> tuple[dict[str, Tensor], Description]:
    """Tensors of an ONNX file under the names they had in PyTorch, and what no shape tells.

    Exports keep the names of biases and norms. Matrices of linear layers lose theirs, and are found
    by the node that multiplies with them, which lies in the scope of its layer; they are transposed
    back. Positions that were cut in two for resizing, [CLS] and patches, are joined again. Heads,
    epsilon and the MLP's activation are read off the graph.
    """
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError as error:
        raise MachineError(
            f"{path.name} needs the package onnx; pip install 'ssl-bench[onnx]'"
        ) from error
    check_readable(path)
    try:
        return _read_graph(onnx.load(str(path)).graph, numpy_helper.to_array, path)
    except CheckpointError:
        raise
    except Exception as error:  # A damaged file makes its reader, and the walk below, fail anyhow.
        reraise_out_of_memory(error)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} is cut or no ONNX file ({reason[:120]}); copy or download it again"
        ) from error


def _read_graph(
    graph: Any, to_array: Callable[[Any], np.ndarray], path: Path
) -> tuple[dict[str, Tensor], Description]:
    constants = {item.name: to_array(item) for item in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            constants[node.output[0]] = to_array(node.attribute[0].t)
    weights = _named(graph, constants)
    prefix = next((n.removesuffix(_EMBEDDINGS) for n in weights if n.endswith(_EMBEDDINGS)), None)
    if prefix is None:
        raise CheckpointError(
            f"{path} has no {_EMBEDDINGS}: expected the export of a ViT, DeiT or DINOv2 of "
            f"transformers, came {named(list(weights)) or 'no names of parameters'}; give the "
            "model's state_dict(), saved with torch.save, in its place"
        )
    if f"{prefix}{_POSITIONS}" not in weights:
        # 1 x (1 + patches) x dim, from the two halves that are resized, [CLS] and patches.
        scope, dim = f"{prefix}embeddings", len(weights[f"{prefix}{_EMBEDDINGS}"])
        halves = [
            # Row by row: 1 x patches x dim, also of a map, 1 x dim x rows x cols.
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
            came = ", ".join(str(half.shape) for half in halves) or "none"
            raise CheckpointError(
                f"{path}: expected the positions of [CLS] and of the patches among the constants "
                f"of {scope}, came {came}; export it without folding them, or give its .safetensors"
            )
        weights[f"{prefix}{_POSITIONS}"] = np.concatenate(whole, axis=1)
    described = Description(
        num_heads=_num_heads(graph, constants, path),
        norm_eps=_norm_eps(graph, constants, path),
        # transformers resizes positions to the size that is wanted.
        position_margin=0.0,
    )
    _require_gelu(graph, path)
    # Copies: onnx gives arrays that cannot be written to.
    return {name: torch.from_numpy(array.copy()) for name, array in weights.items()}, described


def _scope(node: Any) -> str:
    """The module that a node was traced in, as PyTorch names it; empty where nothing says so."""
    if node.name.startswith("/"):
        return node.name[1:].rpartition("/")[0].replace("/", ".")
    said = next((item.value for item in node.metadata_props if item.key == _SCOPES), "")
    # The text of a list of Python: ['', 'embeddings', 'embeddings.norm', 'layer_norm_1'].
    scopes = re.findall(r"""["']([^"']+)["']""", said)
    # The last is the node's own name.
    return scopes[-2] if len(scopes) > 1 else ""


def _named(graph: Any, constants: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All constants that have the name of a parameter, or get it from the node they enter."""
    initial = {item.name for item in graph.initializer}
    for node in graph.node:
        # Equal ones, such as the weights of norms that begin at one, stand in a file once.
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
        kept = any(item.name == "transB" and item.i for item in node.attribute)
        named[f"{scope}.weight"] = constants[matrix] if kept else constants[matrix].T
    return named


def _num_heads(graph: Any, constants: Mapping[str, np.ndarray], path: Path) -> int:
    """From the shape that queries take before attention: batch, tokens, heads, channels."""
    makers = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        maker = makers.get(node.input[0]) if node.op_type == "Reshape" else None
        if maker is None or not re.search(r"query|q_proj", _scope(maker)):
            continue
        shape = _numbers(node.input[1], constants, makers)
        if len(shape) == 4 and shape[2] is not None and shape[2] > 0:
            return shape[2]
    raise CheckpointError(
        f"{path} does not show into how many heads queries are cut; give its .safetensors with "
        "config.json",
        hint=("--checkpoint", "local-dir:{model_folder}"),
    )


def _numbers(
    name: str, constants: Mapping[str, np.ndarray], makers: Mapping[str, Any]
) -> Sequence[int | None]:
    """A shape, with None for what is known only when the graph runs."""
    maker = makers.get(name)
    is_joined = name not in constants and maker is not None and maker.op_type == "Concat"
    return [
        number
        for part in (maker.input if is_joined else [name])
        for number in (constants[part].reshape(-1).tolist() if part in constants else [None])
    ]


def _norm_eps(graph: Any, constants: Mapping[str, np.ndarray], path: Path) -> float:
    """Epsilon of the norms: of the operator, or what is added to a variance."""
    found: set[float] = set()
    for node in graph.node:
        if node.op_type == "LayerNormalization":
            said = [item.f for item in node.attribute if item.name == "epsilon"]
            found.add(said[0] if said else 1e-5)
        if node.op_type == "Add" and re.search(r"norm\w*$", _scope(node)):
            added = [constants[name] for name in node.input if name in constants]
            found |= {float(array) for array in added if array.size == 1}
    # A file keeps float32, which has seven digits.
    rounded = {float(f"{eps:.6g}") for eps in found}
    if len(rounded) != 1:
        came = ", ".join(f"{eps:g}" for eps in sorted(rounded)) or "none"
        raise CheckpointError(
            f"{path}: expected one epsilon for all norms of the encoder, came {came}; give its "
            ".safetensors with config.json",
            hint=("--checkpoint", "local-dir:{model_folder}"),
        )
    return rounded.pop()


def _require_gelu(graph: Any, path: Path) -> None:
    """Refuse another activation than GELU, whose exact form is an error function."""
    inside = [node for node in graph.node if re.search(r"mlp|intermediate", _scope(node))]
    exact = [
        node
        for node in inside
        if node.op_type == "Erf"
        or (
            node.op_type == "Gelu"
            and not any(item.name == "approximate" and item.s == b"tanh" for item in node.attribute)
        )
    ]
    if not exact:
        raise CheckpointError(
            f"{path} has an MLP without GELU, the ViT of this suite GELU; give its .safetensors",
            hint=("--checkpoint", "timm:{timm_name}@{file}"),
        )
