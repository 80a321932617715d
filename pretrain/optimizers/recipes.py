"""Configurations of AdamW and SOAP, parameter groups for weight decay, and gradient clipping."""

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
# Parameters that are tokens or are added to tokens: [CLS], registers, mask tokens and position
# embeddings, including those of Swin.
_TOKENS = ("cls_token", "pos_embed", "relative_position_bias_table", "reg_token", "mask_token")
_BLOCK = re.compile(r"backbone\.blocks\.(\d+)\.")


class OptimizerRecipe:
    """Base class for the hyperparameters of an optimizer. A subclass is a frozen dataclass.

    Attributes:
        lr: Learning rate for batch size 256, which the trainer multiplies by batch size / 256.
    """

    lr: RateOrZero

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Build the optimizer for the parameter groups that `parameter_groups` returns.

        The optimizer must not reorder its groups, because the trainer sets their keys `lr` and
        `weight_decay` before each step. If a gradient is not finite, the trainer sets the
        optimizer's attribute `found_inf` to 1, and `step` must change nothing.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class AdamW(OptimizerRecipe):
    """Hyperparameters of AdamW. The default values are those of DINO.

    The optimizer is torch's fused AdamW, which updates many parameters with one kernel, and changes
    nothing if `found_inf` is 1.
    """

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
    """Hyperparameters of SOAP, with the published decay rates and refresh frequency.

    Args:
        lr: Learning rate for batch size 256. No learning rate of SOAP has been published for DINO,
            so AdamW's learning rate is the default. Higher values were better in short runs, so try
            0.25 to 16 times the default. The class `SOAP` has another default, 3e-3, which is meant
            for language models.
        shampoo_beta: Decay rate of Shampoo's statistics, the moving averages of g @ g.T for the
            gradient g. The default is `betas[1]`.
        precondition_frequency: Number of steps between two refreshes of an eigenbasis, which
            consists of the eigenvectors of Shampoo's statistics.
        max_precond_dim: Maximum length of a parameter's axis for which an eigenbasis is computed.
        stagger: Whether different eigenbases are refreshed at different steps. Staggered refreshes
            make all steps equally long, but increase the mean time of a step, because a GPU
            decomposes many matrices in little more time than one.
        shard_refreshes: Whether the processes of a run share the computation of eigenbases.
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
    """Divide parameters into groups with and without weight decay. Frozen parameters are left out.

    Biases and parameters with one axis have no weight decay. With `decay_tokens=False`, tokens and
    position embeddings also have no weight decay, as in timm and DeiT.

    Args:
        named_parameters: Names and parameters of the student network.
        layer_decay: Factor in (0, 1] by which the learning rate decreases from each layer to the
            preceding layer.
        decay_tokens: Whether tokens and position embeddings have weight decay.

    Returns:
        A group with weight decay and a group without weight decay, in this order. If `layer_decay`
        is not 1, each layer has a group with and a group without weight decay. The first layer is
        the embedding, and each module of `blocks` is a further layer. The last layer consists of
        `norm` and all modules outside the encoder, such as the head. With layer decay, each group
        has the key `lr_scale`, by which the trainer multiplies the learning rate. The value of
        `lr_scale` is `layer_decay` to the power of the number of subsequent layers.

    Raises:
        ConfigurationError: `layer_decay` is not 1, and the encoder has no sequence of blocks.

    Source:
        groups: `get_params_groups` of
            https://github.com/facebookresearch/dino/blob/7c446df5b9f45747937fb0d72314eb9f7b66930a/utils.py
        tokens: `no_weight_decay` of
            https://github.com/facebookresearch/deit/blob/7e160fe43f0252d17191b71cbb5826254114ea5b/models_v2.py
        layers: BEiT, https://arxiv.org/abs/2106.08254, in the implementation `param_groups_lrd` of
            https://github.com/facebookresearch/mae/blob/be47fef7a727943547afb0c670cf1b26034c3c89/util/lr_decay.py
    """
    named = [(name, value) for name, value in named_parameters if value.requires_grad]
    if layer_decay == 1.0:
        return _split_by_decay(named, decay_tokens=decay_tokens)
    layers = {name: int(block[1]) + 1 for name, _ in named if (block := _BLOCK.match(name))}
    if not layers:
        raise ConfigurationError(
            "train.layer_decay needs an encoder whose blocks form a single sequence, such as the "
            "ViTs of this suite",
            hint=("train.layer_decay=1",),
        )
    last = max(layers.values()) + 1
    members: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(last + 1)]
    for name, value in named:
        is_embedding = name.startswith("backbone.") and not name.startswith("backbone.norm.")
        members[layers.get(name, 0 if is_embedding else last)].append((name, value))
    return [
        {**group, "lr_scale": layer_decay ** (last - layer)}
        for layer, layer_members in enumerate(members)
        for group in _split_by_decay(layer_members, decay_tokens=decay_tokens)
    ]


def _split_by_decay(
    named: Iterable[tuple[str, nn.Parameter]], *, decay_tokens: bool
) -> list[dict[str, Any]]:
    """Return a group with weight decay and a group without weight decay, in this order."""
    decayed, exempt = [], []
    for name, parameter in named:
        is_token = name.rpartition(".")[2] in _TOKENS
        is_exempt = name.endswith(".bias") or parameter.ndim == 1 or (is_token and not decay_tokens)
        (exempt if is_exempt else decayed).append(parameter)
    return [{"params": decayed}, {"params": exempt, "weight_decay": 0.0}]


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, *, global_norm: bool = False
) -> Float[Tensor, " parameters"]:
    """Clip the norm of each gradient tensor, or of all gradients together, in place.

    Args:
        parameters: Parameters, some of which may have no gradient.
        max_norm: Largest allowed Euclidean norm.
        global_norm: Whether `max_norm` limits the norm of all gradients together, not of each
            gradient.

    Returns:
        The norm of each gradient before clipping, as a tensor on the device. The norms are not
        copied to CPU memory, so the CPU does not wait for the device.

    Source: `torch.nn.utils.clip_grad_norm_` if `global_norm` is true, and otherwise
    `clip_gradients` in
    https://github.com/facebookresearch/dino/blob/7c446df5b9f45747937fb0d72314eb9f7b66930a/utils.py
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch.stack(torch._foreach_norm(gradients))
    limited = norms.norm().expand_as(norms) if global_norm else norms
    coefficients = (max_norm / (limited + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, coefficients.unbind())
    return norms
