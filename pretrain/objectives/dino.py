"""DINO: a student predicts the output of a teacher for other crops of the same image.

The teacher is the exponential moving average of the student. The loss compares the outputs of
student and teacher for all pairs of different crops (views). To save memory, hand-written code
computes the gradient of the loss already in the forward pass.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pretrain.crops.multi import MultiCrop
from pretrain.objectives.objective import Learner, Objective, Views, derive_seed, require_vit
from pretrain.schedules import (
    LAST_LAYER_FREEZE,
    TEMPERATURE_RISE,
    CosineSchedule,
    LinearSchedule,
    Timeline,
)
from ssl_bench.composition.fields import Fraction, PositiveOrZero, Temperature, Width, check_fields
from ssl_bench.errors import ConfigurationError, join_alternatives
from ssl_bench.models import EncoderConfig, VisionTransformer, build_vit
from ssl_bench.system.device import disable_autocast

# The teacher has collapsed if loss and entropy are both within this distance of 0, or both within
# this distance of ln(out_dim). The unit is ln(out_dim).
_COLLAPSE_MARGIN = 0.005
# Number of prototypes whose logits are computed at once. On a CPU, these logits fit into the
# caches. On a GPU, a few large kernels take less time to launch than many small ones. For 256
# images with ten crops, the logits and their gradient need 1 GB, and all activations 30 GB.
_CHUNK = {"cpu": 2_048, "cuda": 65_536}


@dataclass(frozen=True)
class Dino(Objective):
    """Hyperparameters of DINO. The defaults are the official values for ImageNet.

    Attributes:
        out_dim: Number of prototypes, which is also the number of outputs of the head. Small
            datasets need only 8,192 or fewer prototypes.
        norm_last_layer: Whether all prototypes are kept L2-normalised. Normalised prototypes make
            training more stable, but make the encoder slightly less accurate.
        freeze_last_layer_epochs: Number of epochs at the start of the run in which the last layer
            of the head is not trained. The default is 1 epoch, but at most a tenth of the run.
        teacher_temperature_epochs: Number of epochs during which the temperature of the teacher
            rises. The default is 30 epochs, but at most three tenths of the run.
        momentum: Momentum of the teacher at the first step. The momentum rises to 1 during the run.
            Use 0.9995 for ImageNet with a batch size of 256, and 0.99 or less for runs of a few
            thousand steps.

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
        """Build a learner whose teacher starts as a copy of its student. `class_names` is unused.

        Raises:
            ConfigurationError: The model is not a Vision Transformer. Other encoders may have batch
                statistics, which the teacher would not copy from the student.
        """
        del class_names
        model = require_vit(model, "dino", "the teacher does not follow batch statistics")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "head"))
            head = DinoHead(model.dim, self)
        return DinoLearner(self, DinoNetwork(build_vit(model, seed=seed), head), timeline)


class DinoLearner(Learner):
    """The student and teacher networks of DINO, and the centre (moving mean) of teacher outputs."""

    options: Dino
    student: "DinoNetwork"
    center: Tensor

    def __init__(self, options: Dino, student: "DinoNetwork", timeline: Timeline) -> None:
        super().__init__(options, student)
        self.teacher = copy.deepcopy(student).requires_grad_(False).eval()
        self.register_buffer("center", torch.zeros(options.out_dim))
        self.momentum = CosineSchedule(options.momentum, 1.0, timeline.total_steps)
        self.teacher_temperature = LinearSchedule(
            options.teacher_temperature_start,
            options.teacher_temperature,
            TEMPERATURE_RISE.count_steps(options.teacher_temperature_epochs, timeline),
        )
        self.frozen_steps = LAST_LAYER_FREEZE.count_steps(
            options.freeze_last_layer_epochs, timeline
        )
        # Mean output of the teacher for each micro-batch of the current batch.
        self._teacher_means: list[Tensor] = []

    @property
    def encoder(self) -> VisionTransformer:
        return self.teacher.backbone

    @property
    def encoders(self) -> Sequence[VisionTransformer]:
        return self.student.backbone, self.teacher.backbone

    def loss(
        self, network: Callable[..., Any], views: Views, step: int
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Compute the cross-entropy between student and teacher over all pairs of views.

        Args:
            network: The student network, possibly wrapped for training on several devices.
            views: The global crops [2 * batch, 3, H, W], then the local crops if there are any.
                Each tensor contains the first crops of all images, then the second crops of all
                images, and so on.
            step: Number of the optimizer step, from 0.

        Returns:
            The loss in nats, and values for the log: the entropy of the teacher in nats, the KL
            divergence between teacher and student in nats, and the norm of the centre.
        """
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

    @torch.no_grad()
    def _targets(
        self, views: Float[Tensor, "images 3 height width"], temperature: float
    ) -> tuple[Float[Tensor, "2 batch out"], Float[Tensor, ""]]:
        """Return the teacher's probabilities for the global crops, and their mean entropy in nats.

        The centre is subtracted from the teacher's logits before the softmax.
        """
        head = self.teacher.head
        output = head.last_layer(head(self.teacher.backbone(views)))
        self._teacher_means.append(output.mean(dim=0))
        logits = output.sub_(self.center).div_(temperature)
        targets = logits.softmax(dim=-1)
        normaliser = logits.logsumexp(dim=-1)
        entropy = (normaliser - torch.linalg.vecdot(targets, logits)).mean()
        return targets.unflatten(0, (2, -1)), entropy

    def freeze_gradients(self, step: int) -> None:
        """Remove the gradients of the head's last layer during the first steps of the run."""
        if step < self.frozen_steps:
            for parameter in self.student.head.last_layer.parameters():
                parameter.grad = None

    @torch.no_grad()
    def update_teacher(self, step: int, found_inf: Bool[Tensor, ""]) -> None:
        """Update the centre and the weights of the teacher.

        The weights of the teacher move towards the weights of the student. The centre moves towards
        the mean output of the teacher in this batch, unless this output or a gradient is not
        finite. The centre is updated once per batch, regardless of the number of micro-batches.

        Args:
            step: Number of the optimizer step, from 0.
            found_inf: Whether a gradient of this step was not finite.
        """
        mean = torch.stack(self._teacher_means).mean(dim=0)
        self._teacher_means.clear()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        found_inf = found_inf | ~mean.isfinite().all()
        new_center = self.center.lerp(mean, 1 - self.options.center_momentum)
        self.center.copy_(torch.where(found_inf, self.center, new_center))
        teacher: list[Tensor] = list(self.teacher.parameters())
        student: list[Tensor] = list(self.student.parameters())
        torch._foreach_lerp_(teacher, student, 1 - self.momentum(step))

    def scheduled_values(self, step: int) -> dict[str, float]:
        return {
            "momentum": self.momentum(step),
            "teacher_temperature": self.teacher_temperature(step),
        }

    def diagnose(self, row: Mapping[str, Any]) -> ConfigurationError | None:
        """Return an error if this row of the log shows that the teacher has collapsed.

        A collapsed teacher gives every image the same output: equal probabilities for all
        prototypes, or all probability on one prototype.
        """
        ceiling = math.log(self.options.out_dim)
        loss, entropy = row["loss"] / ceiling, row["teacher_entropy"] / ceiling
        are_low = max(loss, entropy) <= _COLLAPSE_MARGIN
        are_high = min(loss, entropy) >= 1 - _COLLAPSE_MARGIN
        if not (are_low or are_high):
            return None
        value = f"ln(out_dim) = {ceiling:.2f}" if loss > 0.5 else "0"
        return ConfigurationError(
            f"the loss stays at {value} because the teacher gives the same output for every image",
            hint=join_alternatives(
                ("optimizer.lr={lower_rate}",),
                ("objective.momentum=0.99",),
                ("objective.out_dim={smaller}",),
                ("objective.teacher_temperature=0.04",),
            ),
        )


class DinoNetwork(nn.Module):
    """The network of a student or teacher: an encoder with a projection head."""

    def __init__(self, backbone: VisionTransformer, head: "DinoHead") -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(
        self, views: Views
    ) -> tuple[
        Float[Tensor, "images bottleneck"], Float[Tensor, "out bottleneck"], Float[Tensor, "out 1"]
    ]:
        """Return the embeddings of all views, and the directions and lengths of the prototypes.

        The encoder processes all views of the same size in one batch.
        """
        features = torch.cat([self.backbone(group) for group in views])
        last_layer = self.head.last_layer
        return self.head(features), last_layer.weight_v, last_layer.weight_g


class DinoHead(nn.Module):
    """DINO's projection head: a three-layer perceptron, L2 normalisation, and linear prototypes."""

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
        """Return L2-normalised embeddings, without applying `last_layer`.

        The loss applies `last_layer` to the embeddings, one chunk of prototypes at a time.
        """
        return F.normalize(self.mlp(features), dim=1)


class Prototypes(nn.Module):
    """A linear layer with weight normalisation.

    Row i of the weight matrix has the direction of row i of `weight_v` and the length
    `weight_g[i]`.
    """

    def __init__(self, in_dim: int, out_dim: int, *, trained_length: bool) -> None:
        super().__init__()
        self.weight_v = nn.Parameter(nn.Linear(in_dim, out_dim, bias=False).weight.detach())
        self.weight_g = nn.Parameter(torch.ones(out_dim, 1), requires_grad=trained_length)

    def forward(self, embeddings: Float[Tensor, "images dim"]) -> Float[Tensor, "images out"]:
        """Return the logits of the prototypes, in float32 or float64.

        To save memory, the logits are multiplied by the lengths of the prototypes, instead of the
        weight matrix.
        """
        logits = compute_logits(embeddings, self.weight_v)
        return logits * (self.weight_g / self.weight_v.norm(dim=1, keepdim=True)).T


def cross_view_loss(
    embeddings: Float[Tensor, "views batch dim"],
    directions: Float[Tensor, "out dim"],
    lengths: Float[Tensor, "out 1"],
    targets: Float[Tensor, "2 batch out"],
    *,
    temperature: float,
) -> Float[Tensor, ""]:
    """Compute the DINO loss: the mean cross-entropy over all pairs of student and teacher views.

    A view is not compared with itself. Let m be the number of teacher views that differ from a
    student view, which is 1 if the teacher also sees the student view, and 2 otherwise. Let z be
    the logits of the student view, and q the mean of the teacher's probabilities over the m teacher
    views. The loss terms of a student view with logits z sum to m (logsumexp(z) - <q, z>), and
    their gradient with respect to z is m (softmax(z) - q).

    To save memory, the student's logits are computed for one chunk of prototypes at a time. The
    student's logits are computed twice: for the normaliser of the softmax, and for the gradient.
    Matrix products are computed in the dtype of autocast.

    Args:
        embeddings: Outputs of the student's head. The teacher also sees the first two views.
        directions: Directions of the prototypes, as vectors of any non-zero length.
        lengths: Lengths of the prototypes. The logits are embeddings @ (lengths * unit).T /
            temperature, where `unit` contains the L2-normalised directions.
        targets: Probabilities that the teacher gives to the prototypes.
        temperature: Temperature of the student.

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
        # For each view, m divided by the number of all pairs.
        mass = torch.full((views, 1, 1), 2 * share, device=embeddings.device, dtype=targets.dtype)
        mass[:2] = share
        student = embeddings.to(_product_dtype(embeddings))
        size = _CHUNK.get(student.device.type, max(_CHUNK.values()))
        chunks = [slice(start, start + size) for start in range(0, len(directions), size)]

        def normalise_directions(chunk: slice) -> tuple[Tensor, Tensor]:
            norm = torch.linalg.vector_norm(directions[chunk], dim=1, keepdim=True)
            inverse_norm = norm.clamp_min(1e-12).reciprocal()
            return directions[chunk] * inverse_norm, inverse_norm

        def compare(unit: Tensor, chunk: slice) -> tuple[Tensor, Tensor, Tensor]:
            """Return weights, logits of all student views, and targets for a chunk of prototypes.

            `unit` contains the normalised directions of the prototypes in the chunk. The returned
            weights are the prototypes divided by the temperature. The target of each global view is
            the output of the teacher for the other global view.
            """
            weights = (unit * (lengths[chunk] / temperature)).to(student.dtype)
            logits = compute_logits(student, weights).to(targets.dtype)
            return weights, logits, targets[:, :, chunk].flip(0)

        normalisers, agreement = [], torch.zeros_like(mass[0, 0, 0])
        for chunk in chunks:
            _, logits, global_targets = compare(normalise_directions(chunk)[0], chunk)
            global_logits, local_logits = logits[:2], logits[2:].sum(dim=0)
            agreement += mass[0, 0, 0] * torch.sum(global_targets * global_logits)
            agreement += 2 * mass[0, 0, 0] * torch.sum(global_targets.mean(dim=0) * local_logits)
            normalisers.append(logits.logsumexp(dim=-1, keepdim=True))
        normaliser = torch.cat(normalisers, dim=-1).logsumexp(dim=-1, keepdim=True)
        loss = torch.sum(mass * normaliser) - agreement

        to_embeddings = torch.zeros_like(student, dtype=normaliser.dtype)
        to_directions, to_lengths = torch.empty_like(directions), torch.empty_like(lengths)
        weighted_student = (mass * student).to(student.dtype).flatten(0, 1)
        for chunk in chunks:
            unit, inverse_norm = normalise_directions(chunk)
            weights, logits, global_targets = compare(unit, chunk)
            gradient = logits.sub_(normaliser).exp_()
            gradient[:2] -= global_targets
            gradient[2:] -= global_targets.mean(dim=0)
            gradient = gradient.to(student.dtype)
            to_embeddings += gradient @ weights
            to_weights = (gradient.flatten(0, 1).T @ weighted_student).to(directions.dtype)
            radial = torch.sum(to_weights * unit, dim=1, keepdim=True)
            tangential = to_weights.addcmul_(unit, radial, value=-1)
            to_directions[chunk] = tangential * (lengths[chunk] / temperature * inverse_norm)
            to_lengths[chunk] = radial / temperature
        ctx.save_for_backward(to_embeddings.mul_(mass), to_directions, to_lengths)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # In place, because the gradient of the prototypes is the largest tensor of the loss.
        return *(saved.mul_(gradients[0]) for saved in ctx.saved_tensors), None, None


def compute_logits(
    embeddings: Float[Tensor, "*images dim"], weights: Float[Tensor, "out dim"]
) -> Float[Tensor, "*images out"]:
    """Compute the logits embeddings @ weights.T, and return them in float32.

    Embeddings and weights are first converted to the dtype that autocast would use for the
    embeddings. If the product is computed in float64, the logits are float64, too.

    On a GPU, the product of bfloat16 matrices is not rounded to bfloat16. Rounding to bfloat16
    could change a cosine divided by a temperature of 0.04 by up to 0.06. Gradients of this function
    are not available on a GPU in bfloat16, because PyTorch cannot differentiate a bfloat16 product
    with a float32 result.
    """
    dtype = _product_dtype(embeddings)
    embeddings, weights = embeddings.to(dtype), weights.to(dtype)
    if not embeddings.is_cuda or dtype.itemsize > 2:
        return (embeddings @ weights.T).to(torch.promote_types(dtype, torch.float32))
    with disable_autocast(embeddings.device):
        flat = torch.mm(embeddings.flatten(0, -2), weights.T, out_dtype=torch.float32)
    return flat.unflatten(0, embeddings.shape[:-1])


def _product_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype that autocast would use for a matrix product with this tensor."""
    device = tensor.device.type
    # Tensors on the device "meta", which are used to count operations, have no autocast.
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else tensor.dtype
