"""DINO: a student that predicts, from crops, what its own moving average says of other crops.

Its loss over all pairs of views is one pass, with its gradient written down.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pretrain.crops.multi import MultiCrop
from pretrain.objectives.objective import Learner, Objective, Views, part_seed, require_vit
from pretrain.schedules import LAST_LAYER_FREEZE, TEMPERATURE_RISE, Cosine, Linear, Timeline
from ssl_bench.composition.fields import Fraction, PositiveOrZero, Temperature, Width, check_fields
from ssl_bench.errors import ConfigurationError, join_alternatives
from ssl_bench.models import EncoderConfig, VisionTransformer, build_vit
from ssl_bench.system.device import disable_autocast

# Of the largest possible entropy.
_COLLAPSE_MARGIN = 0.005
# Prototypes whose logits are held at a time: few enough for the caches of a processor, enough to
# hide the launches on a GPU.
_CHUNK = {"cpu": 2_048, "cuda": 8_192}


@dataclass(frozen=True)
class Dino(Objective):
    """Hyperparameters of DINO; the defaults are the official ones for ImageNet.

    Attributes:
        out_dim: Prototypes; 8,192 or fewer suit small data.
        norm_last_layer: Keep the last layer's weights at norm 1; steadier, a little less accurate.
        freeze_last_layer_epochs: The last layer waits so long, at most the whole run. Without a
            number 1, but at most a tenth of the run.
        teacher_temperature_epochs: Length of the rise, at most the whole run. Without a number 30,
            but at most three tenths of the run.
        momentum: Of the teacher at the start; ends at 1. Small batches and short runs differ:
            .9995 for batch 256 on ImageNet, .99 or less for a few thousand steps.

    Source: https://github.com/facebookresearch/dino/blob/7c446df5b9f45747937fb0d72314eb9f7b66930a/main_dino.py
    """

    out_dim: Width = 65_536
    hidden_dim: Width = 2_048
    bottleneck_dim: Width = 256
    norm_last_layer: bool = True
    freeze_last_layer_epochs: PositiveOrZero | None = None
    student_temperature: Temperature = 0.1
    teacher_temperature_start: Temperature = 0.04
    teacher_temperature: Temperature = 0.07
    teacher_temperature_epochs: PositiveOrZero | None = None
    momentum: Fraction = 0.996
    center_momentum: Fraction = 0.9
    crops: MultiCrop = field(default_factory=MultiCrop)

    def __post_init__(self) -> None:
        check_fields(self, "objective")

    def build(
        self,
        model: EncoderConfig,
        timeline: Timeline,
        *,
        seed: int,
        class_names: Sequence[str] = (),
    ) -> "DinoLearner":
        """A student, and a teacher that equals it; classes are of no interest.

        Raises:
            ConfigurationError: the model is no Vision Transformer.
        """
        del class_names
        model = require_vit(model, "dino", "its teacher does not follow batch statistics")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(part_seed(seed, "head"))
            head = DinoHead(model.dim, self)
        return DinoLearner(self, DinoNetwork(build_vit(model, seed=seed), head), timeline)


class Prototypes(nn.Module):
    """A linear map whose rows have direction `weight_v` and length `weight_g`."""

    def __init__(self, in_dim: int, out_dim: int, *, trained_length: bool) -> None:
        super().__init__()
        self.weight_v = nn.Parameter(nn.Linear(in_dim, out_dim, bias=False).weight.detach())
        self.weight_g = nn.Parameter(torch.ones(out_dim, 1), requires_grad=trained_length)

    def forward(self, embeddings: Float[Tensor, "images dim"]) -> Float[Tensor, "images out"]:
        """In float32 at least; without a copy of the weights in another length."""
        logits = logits_of(embeddings, self.weight_v)
        return logits * (self.weight_g / self.weight_v.norm(dim=1, keepdim=True)).T


class DinoHead(nn.Module):
    """Three-layer perceptron, then onto the unit sphere, where the prototypes lie."""

    def __init__(self, in_dim: int, options: Dino) -> None:
        super().__init__()
        hidden, bottleneck = options.hidden_dim, options.bottleneck_dim
        self.mlp = nn.Sequential(
            nn.Linear(in_dim, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, bottleneck),
        )
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        self.last_layer = Prototypes(
            bottleneck, options.out_dim, trained_length=not options.norm_last_layer
        )

    def forward(self, features: Float[Tensor, "images dim"]) -> Float[Tensor, "images bottleneck"]:
        return F.normalize(self.mlp(features), dim=1)


class DinoNetwork(nn.Module):
    """Encoder and head."""

    def __init__(self, backbone: VisionTransformer, head: DinoHead) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(
        self, views: Views
    ) -> tuple[
        Float[Tensor, "images bottleneck"], Float[Tensor, "out bottleneck"], Float[Tensor, "out 1"]
    ]:
        """Embeddings of all views, and directions and lengths of the prototypes.

        One pass through the encoder for each size of views.
        """
        features = torch.cat([self.backbone(group) for group in views])
        last_layer = self.head.last_layer
        return self.head(features), last_layer.weight_v, last_layer.weight_g


class DinoLearner(Learner):
    """Student, teacher and center."""

    options: Dino
    student: DinoNetwork
    center: Tensor

    def __init__(self, options: Dino, student: DinoNetwork, timeline: Timeline) -> None:
        super().__init__(options, student)
        self.teacher = copy.deepcopy(student).requires_grad_(False).eval()
        self.register_buffer("center", torch.zeros(options.out_dim))
        self.momentum = Cosine(options.momentum, 1.0, timeline.total_steps)
        self.teacher_temperature = Linear(
            options.teacher_temperature_start,
            options.teacher_temperature,
            TEMPERATURE_RISE.count_steps(options.teacher_temperature_epochs, timeline),
        )
        self.frozen_steps = LAST_LAYER_FREEZE.count_steps(
            options.freeze_last_layer_epochs, timeline
        )
        self._teacher_means: list[Tensor] = []

    @property
    def encoder(self) -> VisionTransformer:
        return self.teacher.backbone

    @property
    def encoders(self) -> Sequence[VisionTransformer]:
        return self.student.backbone, self.teacher.backbone

    def compilable(self) -> Iterable[nn.Module]:
        return self.student.backbone, self.teacher.backbone

    def loss(
        self, network: Callable[..., Any], views: Views, step: int
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Loss of a part of a batch; `views` holds the large crops, then the small ones."""
        targets, entropy = self._targets(views[0], self.teacher_temperature(step))
        embeddings, directions, lengths = network(views)
        loss = cross_view_loss(
            embeddings.float().unflatten(0, (-1, len(views[0]) // 2)),
            directions,
            lengths,
            targets,
            temperature=self.options.student_temperature,
        )
        report = {
            "teacher_entropy": entropy,
            "kl": loss.detach() - entropy,
            "center_norm": self.center.norm(),
        }
        return loss, report

    def freeze_gradients(self, step: int) -> None:
        if step < self.frozen_steps:
            for parameter in self.student.head.last_layer.parameters():
                parameter.grad = None

    @torch.no_grad()
    def update_teacher(self, step: int, lost: Bool[Tensor, ""]) -> None:
        """Move the center towards the teacher's mean output, and the teacher towards the student.

        The center changes after all parts of a batch, so that accumulation changes nothing. A lost
        step leaves it; the teacher follows a student that did not move.
        """
        mean = torch.stack(self._teacher_means).mean(dim=0)
        self._teacher_means.clear()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        lost = lost | ~mean.isfinite().all()
        moved = self.center.lerp(mean, 1 - self.options.center_momentum)
        self.center.copy_(torch.where(lost, self.center, moved))
        teacher: list[Tensor] = list(self.teacher.parameters())
        student: list[Tensor] = list(self.student.parameters())
        torch._foreach_lerp_(teacher, student, 1 - self.momentum(step))

    def values(self, step: int) -> dict[str, float]:
        return {
            "momentum": self.momentum(step),
            "teacher_temperature": self.teacher_temperature(step),
        }

    def diagnose(self, row: Mapping[str, Any]) -> ConfigurationError | None:
        """Collapse: the teacher names all prototypes, or always the same one, for every image."""
        ceiling = math.log(self.options.out_dim)
        loss, entropy = row["loss"] / ceiling, row["teacher_entropy"] / ceiling
        if min(loss, entropy) < 1 - _COLLAPSE_MARGIN and max(loss, entropy) > _COLLAPSE_MARGIN:
            return None
        where = f"ln(out_dim) = {ceiling:.2f}" if loss > 0.5 else "0"
        return ConfigurationError(
            f"the loss sits at {where}, the teacher gives the same output for every image",
            hint=join_alternatives(
                ("optimizer.lr={lower_rate}",),
                ("objective.momentum=0.99",),
                ("objective.out_dim={smaller}",),
                ("objective.teacher_temperature=0.04",),
            ),
        )

    @torch.no_grad()
    def _targets(
        self, views: Float[Tensor, "images 3 height width"], temperature: float
    ) -> tuple[Float[Tensor, "2 batch out"], Float[Tensor, ""]]:
        """Centered and sharpened output of the teacher, and its mean entropy in nats."""
        head = self.teacher.head
        output = head.last_layer(head(self.teacher.backbone(views)))
        self._teacher_means.append(output.mean(dim=0))
        logits = output.sub_(self.center).div_(temperature)
        targets = logits.softmax(dim=-1)
        normaliser = logits.logsumexp(dim=-1)
        entropy = (normaliser - torch.linalg.vecdot(targets, logits)).mean()
        return targets.unflatten(0, (2, -1)), entropy


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
    with disable_autocast(tokens.device):
        flat = torch.mm(tokens.flatten(0, -2), weights.T, out_dtype=torch.float32)
    return flat.unflatten(0, tokens.shape[:-1])


def _product_dtype(like: Tensor) -> torch.dtype:
    """What autocast would compute matrix products in."""
    device = like.device.type
    # Tensors without values, on which work is counted, know no autocast.
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else like.dtype
