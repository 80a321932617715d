"""Supervised training: a linear head on [CLS], or on the mean patch token, predicts the class."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from pretrain.crops.single import SingleCrop
from pretrain.objectives.objective import Learner, Objective, Views, derive_seed
from pretrain.schedules import Timeline
from ssl_bench.composition.fields import Count, FractionBelowOne, check_fields
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import EncoderConfig, build_encoder


@dataclass(frozen=True)
class Supervised(Objective):
    """Objective of supervised training: the cross-entropy between predicted and true classes.

    Attributes:
        num_classes: Expected number of classes. If the training images have another number of
            classes, the run ends with an error.
        label_smoothing: Fraction of the target probability that is spread evenly over all classes.

    Source of the head and the label smoothing: DeiT, https://arxiv.org/abs/2012.12877.
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
        """Build a learner with an encoder and a linear head, which has one output for each class.

        Raises:
            ConfigurationError: The images have fewer than two classes, or another number than
                `num_classes`.
        """
        del timeline
        if len(class_names) < 2:
            raise ConfigurationError(
                "objective=supervised needs training images of two classes or more, got "
                f"{len(class_names)}. Use a folder with the layout train/CLASS/IMAGE",
                hint=("data.labels=true", "data.root={folder}"),
            )
        count = len(class_names)
        if self.num_classes not in (None, count):
            raise ConfigurationError(
                f"objective.num_classes is {self.num_classes}, but the training images have "
                f"{count} classes",
                hint=(f"objective.num_classes={count}",),
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "head"))
            head = nn.Linear(model.dim, len(class_names))
            nn.init.trunc_normal_(head.weight, std=0.02)
            nn.init.zeros_(head.bias)
        encoder = build_encoder(model, seed=seed)
        parts = OrderedDict[str, nn.Module](backbone=encoder, head=head)
        return SupervisedLearner(self, nn.Sequential(parts))


class SupervisedLearner(Learner):
    """An encoder with a linear head, and its classification loss."""

    options: Supervised

    def loss(
        self, network: Callable[..., Any], views: Views, step: int
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Compute the cross-entropy for images that mixup or CutMix may have mixed in pairs.

        In a batch of n images, image i (counted from 0) is mixed with image n - 1 - i. The loss and
        the accuracy are weighted means over the classes of the two mixed images.

        Args:
            network: The student network, possibly wrapped for training on several devices.
            views: Images [batch, 3, height, width], their classes [batch], and a scalar in [0, 1],
                which is the weight of each image's own class.
            step: Ignored.

        Returns:
            The loss, and the top-1 accuracy on the batch in percent, which is logged as
            `train_top1`.
        """
        del step
        images, labels, lam = views
        logits = network(images).float()
        loss = accuracy = torch.zeros_like(lam)
        for targets, share in ((labels, lam), (labels.flip(0), 1 - lam)):
            losses = F.cross_entropy(
                logits, targets, reduction="none", label_smoothing=self.options.label_smoothing
            )
            loss = loss + share * losses.mean()
            accuracy = accuracy + share * (logits.argmax(1) == targets).float().mean()
        return loss, {"train_top1": 100 * accuracy}

    def classify(
        self, images: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch classes"]:
        """Return the logits of normalised images, for any batch size.

        The encoder runs without `torch.compile`, which would recompile it for each batch size.
        """
        return self.student.head(self.student.backbone.forward(images))
