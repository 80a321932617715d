"""A plain reimplementation of the official DINO training step, used as a baseline for speed.

The training step is not compiled. Attention is computed with explicit matrix products. Each pair of
views has a separate loss term. Gradient clipping, the teacher update and AdamW process a single
tensor at a time. The CPU waits for the loss and for each gradient norm. On a GPU, the training step
uses float16 with a gradient scaler.

Source: main_dino.py, utils.py and vision_transformer.py of
https://github.com/facebookresearch/dino/tree/7c446df5b9f45747937fb0d72314eb9f7b66930a
"""

import copy
import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from pretrain.objectives.dino import Dino, DinoLearner, DinoNetwork
from pretrain.optimizers.recipes import parameter_groups
from ssl_bench.models.vit import Attention, Block


class PlainDino:
    """A DINO training loop like the official code, with the initial weights of a `DinoLearner`."""

    def __init__(self, learner: DinoLearner, device: torch.device, *, fused_attention: bool):
        self.options: Dino = learner.options
        self.student = PlainNetwork(learner.student, fused_attention=fused_attention).to(device)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.center = torch.zeros(self.options.out_dim, device=device)
        groups = parameter_groups(self.student.named_parameters())
        self.optimizer = torch.optim.AdamW(groups, foreach=False, fused=False)
        self.scaler = torch.amp.GradScaler() if device.type == "cuda" else None
        self.device = device

    def step(self, crops: Sequence[Tensor], rates: dict[str, float], clip: float) -> float:
        """Take a training step and return the loss."""
        # The first crops are the large ones.
        for group in self.optimizer.param_groups:
            group["lr"] = rates["lr"]
        self.optimizer.param_groups[0]["weight_decay"] = rates["weight_decay"]
        images = [crop.to(self.device, non_blocking=True) for crop in crops]
        with torch.autocast("cuda", torch.float16) if self.scaler else nullcontext():
            loss = self.loss(images, rates["teacher_temperature"])
        if not math.isfinite(loss.item()):
            raise RuntimeError("the loss is not finite")
        self.optimizer.zero_grad()
        if self.scaler:
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            clip_separately(self.student.parameters(), clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            clip_separately(self.student.parameters(), clip)
            self.optimizer.step()
        with torch.no_grad():
            pairs = zip(self.student.parameters(), self.teacher.parameters(), strict=True)
            for new, old in pairs:
                old.data.mul_(rates["momentum"]).add_((1 - rates["momentum"]) * new.detach().data)
        return loss.item()

    def loss(self, images: Sequence[Tensor], temperature: float) -> Tensor:
        with torch.no_grad():
            output = self.teacher(images[:2])
        student = (self.student(images) / self.options.student_temperature).chunk(len(images))
        teacher = ((output - self.center) / temperature).softmax(dim=-1).detach().chunk(2)
        total, terms = torch.zeros((), device=self.device), 0
        for teacher_view, target in enumerate(teacher):
            for view, logits in enumerate(student):
                if view != teacher_view:
                    total = total + torch.sum(-target * F.log_softmax(logits, -1), dim=-1).mean()
                    terms += 1
        mean = torch.sum(output, dim=0, keepdim=True)[0] / len(output)
        keep = self.options.center_momentum
        self.center = self.center * keep + mean.float() * (1 - keep)
        return total / terms


def clip_separately(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            norm = parameter.grad.norm(2)
            # Like the official code, wait for each norm.
            norm.item()
            coefficient = max_norm / (norm + 1e-6)
            if coefficient < 1:
                parameter.grad.mul_(coefficient)


class PlainNetwork(nn.Module):
    """An encoder with a projection head."""

    def __init__(self, network: DinoNetwork, *, fused_attention: bool) -> None:
        super().__init__()
        self.backbone = copy.deepcopy(network.backbone)
        if not fused_attention:
            for block in self.backbone.modules():
                if isinstance(block, Block):
                    block.attn = ExplicitAttention(block.attn)
        self.mlp, last = copy.deepcopy(network.head.mlp), network.head.last_layer
        out_dim, dim = last.weight_v.shape
        self.last_layer = weight_norm(nn.Linear(dim, out_dim, bias=False))
        parts = dict(self.last_layer.named_parameters())
        length, direction = (parts[f"parametrizations.weight.original{i}"] for i in range(2))
        length.data.copy_(last.weight_g)
        length.requires_grad_(last.weight_g.requires_grad)
        direction.data.copy_(last.weight_v)

    def forward(self, crops: Sequence[Tensor]) -> Tensor:
        # Consecutive crops of the same size share a forward pass.
        features = [
            self.backbone(torch.cat(list(run)))
            for _, run in groupby(crops, key=lambda crop: crop.shape[-1])
        ]
        return self.last_layer(F.normalize(self.mlp(torch.cat(features)), dim=-1, p=2))


class ExplicitAttention(nn.Module):
    """Self-attention that computes the attention matrix explicitly, without a fused kernel."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.qkv, self.proj = attention.qkv, attention.proj
        self.num_heads = attention.num_heads

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, dim // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attention = (q @ k.transpose(-2, -1)) * (dim // self.num_heads) ** -0.5
        heads = attention.softmax(dim=-1) @ v
        return self.proj(heads.transpose(1, 2).reshape(batch, tokens, dim))
