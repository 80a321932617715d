"""DINO's loss over all pairs of views in one pass, with its gradient written down."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ssl_bench.models.graying import without_autocast

# Prototypes whose logits are held at a time: few enough for the caches of a processor, enough to
# hide the launches on a GPU.
_CHUNK = {"cpu": 2_048, "cuda": 8_192}


def cross_view_loss(
    embeddings: Float[Tensor, "views batch dim"],
    directions: Float[Tensor, "out dim"],
    lengths: Float[Tensor, "out 1"],
    targets: Float[Tensor, "2 batch out"],
    *,
    temperature: float,
) -> Float[Tensor, ""]:
    """Mean cross-entropy of every student view against every other teacher view.

    The targets of one student view sum to m q, m = 1 for the two views the teacher sees and 2 for
    the others, so its terms are m (lse(z) - <q, z>), and their gradient is m (softmax(z) - q).
    Only the logits of some prototypes are ever held; they are computed twice, once for the
    normalisers and once for the gradient. Autocast applies to the products.

    Args:
        embeddings: Of the student; the first two views are those of the teacher.
        directions: Of the prototypes, of any length but 0.
        lengths: Of the prototypes; logits are embeddings @ (lengths * unit directions).T.
        targets: Probabilities that the teacher gives.
        temperature: Of the student.

    Source: `DINOLoss` of
    https://github.com/facebookresearch/dino/blob/7c446df5b9f45747937fb0d72314eb9f7b66930a/main_dino.py
    """
    loss = _CrossView.apply(embeddings, directions, lengths, targets, temperature)
    assert isinstance(loss, Tensor)
    return loss


class _CrossView(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        directions: Tensor,
        lengths: Tensor,
        targets: Tensor,
        temperature: float,
    ) -> Tensor:
        views, batch, _ = embeddings.shape
        share = 1 / ((2 * views - 2) * batch)
        mass = torch.full((views, 1, 1), 2 * share, device=embeddings.device, dtype=targets.dtype)
        mass[:2] = share
        tokens = embeddings.to(_product_dtype(embeddings))
        size = _CHUNK.get(tokens.device.type, max(_CHUNK.values()))
        parts = [slice(start, start + size) for start in range(0, len(directions), size)]

        def unit_directions(part: slice) -> tuple[Tensor, Tensor]:
            norm = torch.linalg.vector_norm(directions[part], dim=1, keepdim=True)
            inverse_norm = norm.clamp_min(1e-12).reciprocal()
            return directions[part] * inverse_norm, inverse_norm

        def seen(unit: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
            """What they weigh, logits of all student views, and what the first two should say.

            The mean of these both is for the others.
            """
            weights = (unit * (lengths[part] / temperature)).to(tokens.dtype)
            logits = logits_of(tokens, weights).to(targets.dtype)
            return weights, logits, targets[:, :, part].flip(0)

        normalisers, agreement = [], torch.zeros_like(mass[0, 0, 0])
        for part in parts:
            _, logits, opposite = seen(unit_directions(part)[0], part)
            large, small = logits[:2], logits[2:].sum(dim=0)
            agreement += mass[0, 0, 0] * torch.sum(opposite * large)
            agreement += 2 * mass[0, 0, 0] * torch.sum(opposite.mean(dim=0) * small)
            normalisers.append(logits.logsumexp(dim=-1, keepdim=True))
        # Logarithms of what the exponentials of the logits sum to.
        normaliser = torch.cat(normalisers, dim=-1).logsumexp(dim=-1, keepdim=True)
        loss = torch.sum(mass * normaliser) - agreement

        to_embeddings = torch.zeros_like(tokens, dtype=normaliser.dtype)
        to_directions, to_lengths = torch.empty_like(directions), torch.empty_like(lengths)
        weighted = (mass * tokens).to(tokens.dtype).flatten(0, 1)
        for part in parts:
            unit, inverse_norm = unit_directions(part)
            weights, logits, opposite = seen(unit, part)
            gradient = logits.sub_(normaliser).exp_()
            gradient[:2] -= opposite
            gradient[2:] -= opposite.mean(dim=0)
            gradient = gradient.to(tokens.dtype)
            to_embeddings += gradient @ weights
            to_weights = (gradient.flatten(0, 1).T @ weighted).to(directions.dtype)
            radial = torch.sum(to_weights * unit, dim=1, keepdim=True)
            tangential = to_weights.addcmul_(unit, radial, value=-1)
            to_directions[part] = tangential * (lengths[part] / temperature * inverse_norm)
            to_lengths[part] = radial / temperature
        ctx.save_for_backward(to_embeddings.mul_(mass), to_directions, to_lengths)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a copy of the prototypes' gradient would be the largest tensor of the loss.
        return *(saved.mul_(gradients[0]) for saved in ctx.saved_tensors), None, None


def logits_of(
    tokens: Float[Tensor, "*images dim"], weights: Float[Tensor, "out dim"]
) -> Float[Tensor, "*images out"]:
    """Products with the prototypes, in float32 at least; autocast applies to the factors.

    A GPU sums products of bfloat16 in float32 and is asked to leave it at that: a cosine rounded to
    eight bits and divided by a temperature of .04 is off by up to .05. No gradients on CUDA.
    """
    dtype = _product_dtype(tokens)
    tokens, weights = tokens.to(dtype), weights.to(dtype)
    if not tokens.is_cuda or dtype.itemsize > 2:
        return (tokens @ weights.T).to(torch.promote_types(dtype, torch.float32))
    with without_autocast(tokens.device):
        flat = torch.mm(tokens.flatten(0, -2), weights.T, out_dtype=torch.float32)
    return flat.unflatten(0, tokens.shape[:-1])


def _product_dtype(like: Tensor) -> torch.dtype:
    """What autocast would compute matrix products in."""
    device = like.device.type
    # Tensors without values, on which work is counted, know no autocast.
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else like.dtype
