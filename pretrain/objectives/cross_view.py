"""DINO's loss over all pairs of views in one pass, with its gradient written down."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def cross_view_loss(
    embeddings: Float[Tensor, "views batch dim"],
    prototypes: Float[Tensor, "out dim"],
    targets: Float[Tensor, "2 batch out"],
    *,
    temperature: float,
) -> Float[Tensor, ""]:
    """Mean cross-entropy of every student view against every other teacher view.

    The targets of one student view sum to m q, m = 1 for the two views the teacher sees and 2 for
    the others, so its terms are m lse(z) - <m q, z>, and their gradient is m softmax(z) - m q:
    logits of one view at a time are all that is ever held.

    Args:
        embeddings: Of the student; the first two views are those of the teacher.
        prototypes: Weight of the last layer; logits are embeddings @ prototypes.T.
        targets: Probabilities that the teacher gives.
        temperature: Of the student.

    Source: `DINOLoss` of
    https://github.com/facebookresearch/dino/blob/7c446df5b9f45747937fb0d72314eb9f7b66930a/main_dino.py
    """
    loss = _CrossView.apply(embeddings, prototypes, targets, temperature)
    assert isinstance(loss, Tensor)
    return loss


class _CrossView(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, embeddings: Tensor, prototypes: Tensor, targets: Tensor, temperature: float
    ) -> Tensor:
        views, batch, _ = embeddings.shape
        share = 1 / ((2 * views - 2) * batch)
        low = _product_dtype(embeddings)
        weights = prototypes.to(low)
        both = targets.sum(dim=0)
        loss = torch.zeros((), dtype=targets.dtype, device=targets.device)
        to_embeddings = torch.empty_like(embeddings)
        to_prototypes = torch.zeros_like(prototypes)
        with torch.autocast(embeddings.device.type, enabled=False):
            for view in range(views):
                mass, target = (1, targets[1 - view]) if view < 2 else (2, both)
                tokens = embeddings[view].to(low)
                logits = (tokens @ weights.T).to(targets.dtype).div_(temperature)
                normaliser = logits.logsumexp(dim=-1, keepdim=True)
                loss += mass * normaliser.sum() - torch.dot(target.flatten(), logits.flatten())
                gradient = logits.sub_(normaliser).exp_().mul_(mass).sub_(target)
                gradient = gradient.mul_(share / temperature).to(low)
                to_embeddings[view] = gradient @ weights
                to_prototypes += gradient.T @ tokens
        ctx.save_for_backward(to_embeddings, to_prototypes)
        return loss * share

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        to_embeddings, to_prototypes = ctx.saved_tensors
        return gradients[0] * to_embeddings, gradients[0] * to_prototypes, None, None


def _product_dtype(like: Tensor) -> torch.dtype:
    """What autocast would compute matrix products in."""
    device = like.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype
