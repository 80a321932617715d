"""Supervised training of the same encoders: [CLS] or mean patch -> linear head -> loss."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from pretrain.crops.single import SingleCrop
from pretrain.objectives.objective import Learner, Objective, Views, part_seed
from pretrain.schedules import Timeline
from ssl_bench.composition.fields import Count, FractionBelowOne, check_fields
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import EncoderConfig, build_encoder


@dataclass(frozen=True)
class Supervised(Objective):
    """Cross-entropy with the class of each image.

    Attributes:
        num_classes: Where it is given, the training images must have as many.
        label_smoothing: Share of the target that is spread over all classes, in [0, 1).

    Source: head and smoothing as in DeiT, https://arxiv.org/abs/2012.12877.
    """

    num_classes: Count | None = None
    label_smoothing: FractionBelowOne = 0.1
    crops: SingleCrop = field(default_factory=SingleCrop)

    def __post_init__(self) -> None:
        check_fields(self, "objective")

    def build(
        self,
        model: EncoderConfig,
        timeline: Timeline,
        *,
        seed: int,
        class_names: Sequence[str] = (),
    ) -> "SupervisedLearner":
        """An encoder with a head for `class_names`.

        Raises:
            ConfigurationError: the images have no classes, or another number than was said.
        """
        del timeline
        if len(class_names) < 2:
            raise ConfigurationError(
                "objective=supervised needs training images of two classes or more, got "
                f"{len(class_names)}; name a folder that holds train/CLASS/PICTURE",
                hint=("data.labels=true", "data.root={folder}"),
            )
        if self.num_classes not in (None, len(class_names)):
            raise ConfigurationError(
                f"objective.num_classes is {self.num_classes} but the training images have "
                f"{len(class_names)} classes; leave it out or take the other images"
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(part_seed(seed, "head"))
            head = nn.Linear(model.dim, len(class_names))
            nn.init.trunc_normal_(head.weight, std=0.02)
            nn.init.zeros_(head.bias)
        encoder = build_encoder(model, seed=seed)
        parts = OrderedDict[str, nn.Module](backbone=encoder, head=head)
        return SupervisedLearner(self, nn.Sequential(parts))


class SupervisedLearner(Learner):
    """Encoder and head, and their loss."""

    options: Supervised

    def loss(
        self, network: Callable[..., Any], views: Views, step: int
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Loss of a part of a batch, and `train_top1` in percent.

        `views` holds images, their classes, and the share that each has in its mixture with the
        image at the same place from the end. The other one's class has the rest: of the loss, and
        of an image that counts as right.
        """
        del step
        images, labels, own_share = views
        logits = network(images).float()
        loss = right = torch.zeros_like(own_share)
        for wanted, share in ((labels, own_share), (labels.flip(0), 1 - own_share)):
            losses = F.cross_entropy(
                logits, wanted, reduction="none", label_smoothing=self.options.label_smoothing
            )
            loss = loss + share * losses.mean()
            right = right + share * (logits.argmax(1) == wanted).float().mean()
        return loss, {"train_top1": 100 * right}

    def classify(
        self, images: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch classes"]:
        """Logits of normalised images; not compiled, so that any batch will do."""
        return self.student.head(self.student.backbone.forward(images))
