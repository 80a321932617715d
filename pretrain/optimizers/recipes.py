"""Recipes that build an optimizer, the weight-decay groups, and clipping."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pretrain.optimizers.soap import SOAP
from ssl_bench.composition.fields import (
    Count,
    FractionBelowOne,
    ListLength,
    PositiveFraction,
    RateOrZero,
    check_fields,
)
from ssl_bench.errors import ConfigurationError

_Betas = Annotated[Sequence[FractionBelowOne], ListLength(2, 2)]
# [CLS], positions, Swin's too, registers and what stands for a hidden patch.
_TOKENS = ("cls_token", "pos_embed", "relative_position_bias_table", "reg_token", "mask_token")
_BLOCK = re.compile(r"backbone\.blocks\.(\d+)\.")


class OptimizerRecipe:
    """Hyperparameters from which the trainer builds an optimizer, as a frozen dataclass.

    Attributes:
        lr: Learning rate at batch 256; the trainer scales it by batch / 256.
    """

    lr: RateOrZero

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        raise NotImplementedError


@dataclass(frozen=True)
class AdamW(OptimizerRecipe):
    """AdamW of the DINO recipe, one fused kernel per step."""

    lr: RateOrZero = 5e-4
    betas: _Betas = (0.9, 0.999)
    eps: PositiveFraction = 1e-8

    def __post_init__(self) -> None:
        check_fields(self, "optimizer")

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.AdamW:
        beta1, beta2 = self.betas
        return torch.optim.AdamW(groups, lr=self.lr, betas=(beta1, beta2), eps=self.eps, fused=True)


@dataclass(frozen=True)
class Soap(OptimizerRecipe):
    """SOAP with its published betas and frequency; see `SOAP` for the fields.

    Args:
        lr: Learning rate at batch 256. No rate is published for DINO: AdamW's is the starting point
            of a sweep over 0.25 to 2 times its value. The optimizer's own default, 3e-3, is for
            language models.
        shampoo_beta: Decay of the statistics; `betas[1]` if None.
        precondition_frequency: Steps between two refreshes of a basis.
        max_precond_dim: A longer axis keeps its own coordinates.
        stagger: Spread the refreshes over the period; not if not said. Steps are alike then, and
            slower on average: a GPU does a stack of matrices in little more than the time of one.
        shard_refreshes: Share the decompositions out over the processes of a run.
    """

    lr: RateOrZero = 5e-4
    betas: _Betas = (0.95, 0.95)
    shampoo_beta: FractionBelowOne | None = None
    eps: PositiveFraction = 1e-8
    precondition_frequency: Count = 10
    max_precond_dim: Count = 10_000
    stagger: bool | None = None
    shard_refreshes: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "optimizer")

    def build(self, groups: list[dict[str, Any]]) -> SOAP:
        return SOAP(groups, **vars(replace(self, stagger=bool(self.stagger))))


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    layer_decay: float = 1.0,
    decay_tokens: bool = True,
) -> list[dict[str, Any]]:
    """The decayed parameters, then those exempt from weight decay; frozen ones are left out.

    Exempt are biases and vectors, and without `decay_tokens` class token, registers, mask token and
    position embedding, as in timm and DeiT; official DINO decays them.

    A `layer_decay` other than 1 gives such a pair for each layer, the embedding's first, then the
    blocks', that of final norm and head last; `lr_scale` is layer_decay to the number of layers
    above.

    Raises:
        ConfigurationError: a `layer_decay` without a row of blocks.

    Source: `get_params_groups` of
    https://github.com/facebookresearch/dino/blob/7c446df5b9f45747937fb0d72314eb9f7b66930a/utils.py
    for the tokens `no_weight_decay` of
    https://github.com/facebookresearch/deit/blob/7e160fe43f0252d17191b71cbb5826254114ea5b/models_v2.py
    and, for the layers, BEiT, https://arxiv.org/abs/2106.08254, as in `param_groups_lrd` of
    https://github.com/facebookresearch/mae/blob/be47fef7a727943547afb0c670cf1b26034c3c89/util/lr_decay.py
    """
    named = [(name, value) for name, value in named_parameters if value.requires_grad]
    if layer_decay == 1.0:
        return _decayed_and_exempt(named, decay_tokens=decay_tokens)
    layers = {name: int(block[1]) + 1 for name, _ in named if (block := _BLOCK.match(name))}
    if not layers:
        raise ConfigurationError(
            "train.layer_decay needs blocks in one row, as encoders of this suite have them, got "
            "none",
            hint=("train.layer_decay=1",),
        )
    last = max(layers.values()) + 1
    members: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(last + 1)]
    for name, value in named:
        is_embedding = name.startswith("backbone.") and not name.startswith("backbone.norm.")
        members[layers.get(name, 0 if is_embedding else last)].append((name, value))
    return [
        {**group, "lr_scale": layer_decay ** (last - layer)}
        for layer, those in enumerate(members)
        for group in _decayed_and_exempt(those, decay_tokens=decay_tokens)
    ]


def _decayed_and_exempt(
    named: Iterable[tuple[str, nn.Parameter]], *, decay_tokens: bool
) -> list[dict[str, Any]]:
    decayed, exempt = [], []
    for name, parameter in named:
        is_token = name.rpartition(".")[2] in _TOKENS
        is_exempt = name.endswith(".bias") or parameter.ndim == 1 or (is_token and not decay_tokens)
        (exempt if is_exempt else decayed).append(parameter)
    return [{"params": decayed}, {"params": exempt, "weight_decay": 0.0}]


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, *, whole: bool = False
) -> Float[Tensor, " parameters"]:
    """Scale each gradient to a norm of at most `max_norm`, in place.

    On its own, or as a part of the `whole`, whose norm is limited then.

    Returns:
        The norms before clipping, of the parameters that have a gradient. Nothing waits for them.

    Source: `clip_gradients` of
    https://github.com/facebookresearch/dino/blob/7c446df5b9f45747937fb0d72314eb9f7b66930a/utils.py,
    and of the whole as `torch.nn.utils.clip_grad_norm_`.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch.stack(torch._foreach_norm(gradients))
    limited = norms.norm().expand_as(norms) if whole else norms
    coefficients = (max_norm / (limited + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, coefficients.unbind())
    return norms
