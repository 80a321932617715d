"""Record the attention weights of each block during a forward pass.

Fused attention functions do not return the attention weights. `AttentionRecorder` therefore
intercepts the calls of these functions, and computes the weights from their arguments. The
arguments include the scale, the bias, and the queries and keys after norms and rotary positions.
"""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ssl_bench.errors import UnsupportedEncoderError
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import Encoder
from ssl_bench.system.device import disable_autocast, to_host

CLS = slice(0, 1)
"""Slice of the queries that contains only the [CLS] token."""
OTHER_TASK = ("--task", "pca")

Weights = Float[Tensor, "batch heads queries tokens"]
_SOFTMAX = (torch.softmax, Tensor.softmax, F.softmax)


def attention_weights(
    query: Tensor,
    key: Tensor,
    queries: slice = CLS,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Weights:
    """Return the attention weights softmax(q k^T scale + bias), in float32 or higher precision.

    Apart from `queries`, the arguments are the same as those of
    `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query: Queries of all tokens, batch x heads x tokens x width.
        key: Keys of all tokens.
        queries: Slice of the tokens whose attention weights are returned. By default [CLS].
        attn_mask: Bias of the logits, or a boolean mask of the keys that a query attends to.
        is_causal: Whether a token attends only to itself and to earlier tokens.
        scale: Factor of the logits. By default 1 / sqrt(width).
        enable_gqa: Whether several heads of queries share one head of keys.
    """
    q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key))
    if enable_gqa:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    tokens = q.shape[2]
    with disable_autocast(q.device):
        factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        logits = q[:, :, queries] @ k.mT * factor
        if is_causal:
            attn_mask = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
        if attn_mask is not None:
            mask = attn_mask if attn_mask.shape[-2] == 1 else attn_mask[..., queries, :]
            is_bias = mask.dtype != torch.bool
            logits = logits + mask if is_bias else logits.masked_fill(~mask, -math.inf)
        return logits.softmax(-1)


class AttentionRecorder:
    """A callable that runs an encoder and returns the attention weights of its blocks.

    Each block must compute attention between all tokens of an image exactly once. The following
    calls are recognised as attention: `scaled_dot_product_attention`,
    `multi_head_attention_forward` (as in `torch.nn.MultiheadAttention`), and a softmax of a tokens
    x tokens matrix for each head.

    Args:
        extractor: Feature extractor of the requested blocks. The kind of feature that it extracts
            does not matter.
        queries: Slice of the tokens whose attention weights are returned. By default [CLS].
    """

    def __init__(self, extractor: FeatureExtractor, queries: slice = CLS) -> None:
        self._extractor, self._queries = extractor, queries

    def __call__(
        self, images: Float[Tensor, "batch 3 height width"], ids: Sequence[str] = ()
    ) -> dict[int, Weights]:
        """Run the encoder, and return the attention weights of each requested layer.

        `ids` are image ids for error messages.

        Raises:
            UnsupportedEncoderError: A block has no softmax attention between all tokens of an
                image.
            CheckpointError: Features are not finite.
        """
        extractor = self._extractor
        stride = extractor.patch_size
        patches = (images.shape[-2] // stride) * (images.shape[-1] // stride)
        calls = _Calls(extractor.encoder.num_prefix_tokens + patches, self._queries)
        with _track_running_block(extractor, calls), calls:
            # There must be no second pass in float32, because its weights would be stored, too.
            _, sums = extractor.extract_in_one_precision(images)
        hint = ("dtype=float32",) if extractor.dtype == torch.float16 else ()
        extractor.require_finite(to_host([sums])[0], ids, hint=hint)
        return {layer: calls.get_weights(layer, extractor.encoder) for layer in extractor.layers}


@contextmanager
def _track_running_block(extractor: FeatureExtractor, calls: "_Calls") -> Generator[None]:
    """In a `with` statement, set `calls.layer` to the index of the block that is running."""
    blocks = extractor.encoder.module.get_submodule("blocks")
    handles = []

    def enter(layer: int, *_: Any) -> None:
        calls.layer = layer

    def leave(*_: Any) -> None:
        calls.layer = None

    try:
        for layer in extractor.layers:
            block: nn.Module = blocks.get_submodule(str(layer))
            handles.append(block.register_forward_pre_hook(partial(enter, layer)))
            handles.append(block.register_forward_hook(leave))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Calls(TorchFunctionMode):
    """A `TorchFunctionMode` that intercepts PyTorch functions and stores attention weights.

    Attributes:
        layer: Index of the running block. It is None while no requested block runs.
    """

    def __init__(self, num_tokens: int, queries: slice) -> None:
        super().__init__()
        self.layer: int | None = None
        self._num_tokens, self._queries = num_tokens, queries
        self._weights: dict[int, list[Weights]] = {}
        # For each layer, the numbers of queries and keys of a call that does not include all
        # tokens.
        self._other_tokens: dict[int, tuple[int, int]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if self.layer is None:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._store_fused_weights(*args, **kwargs)
        output = func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            kwargs = {**kwargs, "need_weights": True, "average_attn_weights": False}
            weights: Any = func(*args, **kwargs)[1]
            self._store_weights(weights)
        elif func in _SOFTMAX and output.ndim == 4 and output.shape[2] == output.shape[3]:
            self._store_weights(output)
        return output

    def _store_fused_weights(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> None:
        del value, dropout_p
        if self._includes_all_tokens(query.shape[-2], key.shape[-2]):
            self._append(
                attention_weights(
                    *(query, key, self._queries),
                    attn_mask=attn_mask,
                    is_causal=is_causal,
                    **options,
                )
            )

    def _store_weights(self, weights: Weights) -> None:
        if self._includes_all_tokens(*weights.shape[2:]):
            self._append(weights[:, :, self._queries].float())

    def _includes_all_tokens(self, num_queries: int, num_keys: int) -> bool:
        """Return whether a call of an attention function includes all tokens of an image.

        If some tokens are missing, store the numbers of queries and keys for an error message.
        """
        if num_queries == num_keys == self._num_tokens:
            return True
        if self.layer is not None:
            self._other_tokens[self.layer] = (num_queries, num_keys)
        return False

    def _append(self, weights: Weights) -> None:
        if self.layer is not None:
            self._weights.setdefault(self.layer, []).append(weights.detach())

    def get_weights(self, layer: int, encoder: Encoder) -> Weights:
        """Return the stored attention weights of a layer. `encoder` is used in error messages.

        Raises:
            UnsupportedEncoderError: The layer has computed no softmax attention between all tokens,
                or has computed it several times.
        """
        weights = self._weights.get(layer, [])
        if len(weights) == 1:
            return weights[0]
        if weights:
            problem = f"computes attention {len(weights)} times"
        elif layer in self._other_tokens:
            num_queries, num_keys = self._other_tokens[layer]
            problem = f"computes attention from {num_queries} to {num_keys} tokens"
        else:
            problem = "computes no softmax attention with functions of PyTorch"
        raise UnsupportedEncoderError(
            f"block {layer} of {encoder.name} {problem}, expected softmax attention between all "
            f"{self._num_tokens} tokens of an image",
            hint=OTHER_TASK,
        )
