"""Evaluate the encoder of a run on labelled images every few epochs.

The accuracy of a finished supervised run can also be stored in JSON files (result records).
"""

import math
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor
from torch.nn.functional import cross_entropy

from pretrain.crops.augmentation import Images, normalise
from pretrain.fine_tuning import INIT_FROM_SHA256
from pretrain.objectives.objective import Learner, PeriodicEvaluation
from pretrain.objectives.supervised import SupervisedLearner
from pretrain.options import DataOptions
from pretrain.schedules import Timeline
from ssl_bench.composition.fields import (
    Count,
    FilePath,
    PositiveFraction,
    Temperature,
    check_fields,
)
from ssl_bench.data.files.fingerprints import (
    ReadOptions,
    dataset_with_read_options,
    extend_fingerprint,
)
from ssl_bench.data.files.readable import count_shared_files, select_images, summarize_left_out
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.layouts.webdataset import WebDataset, is_webdataset
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.features import central_square
from ssl_bench.intervals import Proportion
from ssl_bench.models import identify_encoder
from ssl_bench.models.encoder import Normalization
from ssl_bench.neighbours import LabelledFeatures, knn_ranks
from ssl_bench.results import (
    SUPERVISED,
    TRAINING_IMAGES_KEY,
    ResultKey,
    ResultStore,
    TrainingImages,
)
from ssl_bench.system.device import describe_device, evaluation_mode, to_float64
from ssl_bench.system.files import expand_path, resolve_links
from ssl_bench.system.process import count_usable_cores, provenance_fields

KNN = "knn_top1"
_MAX_THREADS = 16
# Settings that a result record does not contain, because they are paths on this machine.
_LOCATIONS = frozenset({"data", "monitor", "init_from"})


@dataclass(frozen=True)
class Monitor:
    """Options for evaluating the encoder during training. By default, the encoder is not evaluated.

    Attributes:
        root: Folder of labelled images: `train/CLASS/IMAGE` and `val/CLASS/IMAGE`, or
            `CLASS/IMAGE`, or `train/*.tar` and `val/*.tar`. The default is `data.root`.
        train_split: Name of the split with the training images. The default is `train`.
        val_split: Name of the split with the validation images. The default is `val`, or `test` if
            there is no `val`.
        known_only: Whether to leave out validation images whose class does not occur in the
            training split. By default, images of unknown classes raise an error.
        knn_epochs: Number of epochs between two k-NN evaluations, whose accuracy is logged as
            `knn_top1` in percent. The nearest training images of a validation image vote for its
            class. The encoder is also evaluated after the last step.
        accuracy_epochs: Number of epochs between two evaluations of a supervised run's head, whose
            accuracy is logged as `val_top1` in percent. For six or more classes, the top-5 accuracy
            is also logged as `val_top5`. The cross-entropy without label smoothing is logged as
            `val_loss`. The head is also evaluated after the last step.
        results: Folder where the final `val_top1` and `val_top5` are stored in JSON files (result
            records), from which tables are made.
        neighbours: Number of training images that vote for the class of a validation image.
        temperature: A neighbour votes with the weight exp(cosine similarity / temperature).
        train_images: Maximum number of training images from which neighbours are chosen. All
            evaluations use the same random subset of images.
        val_images: Maximum number of validation images. All evaluations use the same random subset
            of images.
        crop_share: Side length of the central square crop, as a fraction of the image's shorter
            side.
        batch_size: Number of images in a forward pass of the encoder.
    """

    root: FilePath | None = None
    train_split: str | None = None
    val_split: str | None = None
    known_only: bool = False
    knn_epochs: Count | None = None
    accuracy_epochs: Count | None = None
    results: FilePath | None = None
    neighbours: Count = 20
    temperature: Temperature = 0.07
    train_images: Count = 10_000
    val_images: Count = 5_000
    crop_share: PositiveFraction = 0.875
    batch_size: Count = 128

    def __post_init__(self) -> None:
        check_fields(self, "monitor")
        if self.results is not None and self.accuracy_epochs is None:
            raise ConfigurationError(
                "monitor.results needs monitor.accuracy_epochs, because it stores the accuracy of "
                "the classification head",
                hint=("monitor.accuracy_epochs={number}",),
            )

    def build_evaluator(
        self, learner: Learner, timeline: Timeline, data: DataOptions, images: ImageSet
    ) -> "Evaluator | None":
        """Find the labelled images, and return an object that evaluates the encoder during a run.

        No image is decoded. Return None if both `knn_epochs` and `accuracy_epochs` are None.

        Args:
            learner: Learner of the run.
            timeline: Planned length of the run.
            data: Data options of the run. The options `fingerprint` (identification of files) and
                `bits` (for 16-bit images) also apply to the labelled images.
            images: Images that the run trains on.

        Raises:
            ConfigurationError: There is no folder of images, the learner has no classification
                head, the images have other classes than the run, or there are fewer training images
                than neighbours.
            DataError: Images are missing, or validation images are also training images of a
                supervised run or of the k-NN classifier.
        """
        if self.knn_epochs is None and self.accuracy_epochs is None:
            return None
        root = self.root or data.root
        if root is None:
            raise ConfigurationError(
                "the monitor evaluates the encoder during training, and expects a folder of "
                "labelled images such as train/CLASS/IMAGE",
                hint=("monitor.root={folder}",),
            )
        layout = WebDataset if is_webdataset(root) else ClassFolders
        dataset = dataset_with_read_options(
            layout(root, self.train_split, self.val_split, self.known_only),
            ReadOptions(data.fingerprint, data.bits),
        )
        try:
            all_val, all_train = dataset.val(), dataset.train()
        except DataError as error:
            # The error recommends keys such as `dataset.train_split`. The monitor has keys with the
            # same names.
            raise DataError(
                str(error).replace("dataset.", "monitor."),
                hint=[word.replace("dataset.", "monitor.") for word in error.hint],
            ) from error
        train = _draw_subset(all_train, self.train_images)
        val = _draw_subset(all_val, self.val_images)
        if self.knn_epochs is not None and self.neighbours > len(train):
            raise ConfigurationError(
                f"monitor.neighbours must be at most {len(train)}, the number of the monitor's "
                f"training images, got {self.neighbours}",
                hint=(f"monitor.neighbours={len(train)}",),
            )
        fitted = [images] if data.labels else []
        if self.knn_epochs is not None:
            fitted.append(train)
        num_shared = [count_shared_files(some, val, allowed=data.allow_overlap) for some in fitted]
        if self.accuracy_epochs is not None:
            if not isinstance(learner, SupervisedLearner):
                raise ConfigurationError(
                    "monitor.accuracy_epochs evaluates a classification head, but this objective "
                    "trains none",
                    hint=(
                        "objective=supervised",
                        "or",
                        "monitor.accuracy_epochs=null",
                        "monitor.knn_epochs={number}",
                    ),
                )
            if images.class_names != val.class_names:
                raise ConfigurationError(
                    "the accuracy cannot be computed, because the images in monitor.root have "
                    f"other class names ({len(val.class_names)} classes) than the training images "
                    f"({len(images.class_names)} classes). Choose another monitor.root, or set "
                    "monitor.accuracy_epochs=null"
                )
        return Evaluator(
            self,
            learner,
            timeline,
            data.normalization,
            train=train,
            val=val,
            all_val=all_val,
            root=expand_path(root).absolute(),
            num_shared_files=max(num_shared, default=0),
        )


@dataclass(frozen=True, eq=False)
class Evaluator(PeriodicEvaluation):
    """A periodic evaluation of the encoder and its classification head during training.

    A run gives the same weights with and without this evaluation, which draws no random numbers and
    does not change the learner.

    Attributes:
        options: Options that determine which images are evaluated and after which epochs.
        normalization: Mean and standard deviation that the run uses to normalise its images.
        train: Training images of the k-NN classifier.
        val: Validation images on which the accuracy is computed.
        all_val: All images of the validation split. `val` is a random subset of these images.
        root: Folder of the labelled images.
        num_shared_files: Number of validation images that are also training images.
    """

    cost_options: ClassVar[str] = "monitor.train_images, .val_images, .knn_epochs, .accuracy_epochs"

    options: Monitor
    learner: Learner
    timeline: Timeline
    normalization: Normalization
    train: ImageSet
    val: ImageSet
    all_val: ImageSet
    root: Path
    num_shared_files: int

    def measure_if_due(self, step: int) -> dict[str, float]:
        """Compute the metrics that are due after a step. Accuracies are in percent.

        A metric is NaN if the encoder or the head outputs values that are not finite.

        Args:
            step: Number of steps that the run has completed.

        Raises:
            DataError: An image cannot be read.
        """
        metrics = {}
        if self.timeline.is_due(self.options.accuracy_epochs, step):
            logits = self._compute_logits()
            metrics["val_loss"] = cross_entropy(logits.features, logits.labels).item()
            for k, is_correct in self._classify(logits).items():
                metrics[f"val_top{k}"] = _compute_percentage(is_correct)
        if self.timeline.is_due(self.options.knn_epochs, step):
            metrics[KNN] = self._compute_knn_accuracy()
        return metrics

    def save_records(
        self,
        results: Path,
        weights: Path,
        description: Mapping[str, Any],
        trained_on: TrainingImages,
        left_out: list[str],
    ) -> list[Path]:
        """Evaluate the head of a supervised run, and store its accuracy as result records.

        A result record is a JSON file with one score. The dataset name in the records is the name
        of the image folder. A table shows this accuracy next to the scores of a probe only if all
        records contain the same dataset name.

        Args:
            results: Folder for the records. Several runs may use the same folder.
            weights: File with the weights of the encoder.
            description: Settings of the run, from its saved state.
            trained_on: Images that the run was trained on.
            left_out: Ids of the training images that could not be read.

        Returns:
            Paths of the records with the top-1 and top-5 accuracy. The list is empty if the head
            outputs values that are not finite.

        Raises:
            DataError: An image cannot be read.
            MachineError: The folder cannot be written.
        """
        start = time.monotonic()
        store, paths = ResultStore(results), []
        encoder = identify_encoder(str(weights))
        fingerprint = self.all_val.fingerprint()
        if len(self.val) < len(self.all_val):
            fingerprint = extend_fingerprint(fingerprint, self.val.ids)
        for k, is_correct in self._classify(self._compute_logits()).items():
            if is_correct is None:
                continue
            hits, num_shared = is_correct.cpu().numpy(), self.num_shared_files
            key = ResultKey(
                task=SUPERVISED,
                dataset=re.sub(r"\W+", "_", resolve_links(self.root).name).lower() or "images",
                split=self.val.split,
                layer=encoder.depth - 1,
                facet="head",
                protocol="central_square",
                metric=f"top{k}",
                **encoder.identity(),
                dataset_fingerprint=fingerprint,
                seed=description["train"]["seed"],
                settings={
                    "image_size": self.learner.encoder.config.image_size,
                    "crop_share": self.options.crop_share,
                    TRAINING_IMAGES_KEY: asdict(trained_on),
                    **({"fitted_and_scored": num_shared} if num_shared else {}),
                },
            )
            unreadable = summarize_left_out({trained_on.split: left_out}) if left_out else None
            device = describe_device(next(self.learner.parameters()).device)
            record = key.record(
                depth=encoder.depth,
                value=Proportion(hits).value,
                ci95=Proportion(hits).ci95(),
                num_images=len(hits),
                model=encoder.name,
                per_image_kind="hits",
                details={
                    "training": describe_recipe(description, self.timeline),
                    "configuration": {
                        name: value for name, value in description.items() if name not in _LOCATIONS
                    },
                    **({"left_out": unreadable} if unreadable else {}),
                },
                **provenance_fields(device, time.monotonic() - start),
            )
            store.save_image_ids(record.dataset_fingerprint, self.val.ids)
            paths.append(store.save(record, hits))
        return paths

    def _compute_logits(self) -> LabelledFeatures:
        """Return the logits of the classification head for the validation images."""
        assert isinstance(self.learner, SupervisedLearner)
        return self._compute_outputs(self.val, self.learner.classify)

    def _classify(self, logits: LabelledFeatures) -> dict[int, Bool[Tensor, " images"] | None]:
        """Classify the validation images by their logits.

        Returns:
            A dictionary with the key 1 and, for six or more classes, the key 5. The value of a key
            k states for each image whether the true class is among the k most likely classes. All
            values of the dictionary are None if a logit is not finite.
        """
        is_finite = bool(logits.features.isfinite().all())
        ranks = rank_true_classes(logits.features, logits.labels)
        # With five classes or fewer, top-5 accuracy is always 100 %.
        top_k = (1, 5) if len(self.val.class_names) > 5 else (1,)
        return {k: ranks < k if is_finite else None for k in top_k}

    def _compute_knn_accuracy(self) -> float:
        """Return the top-1 accuracy of k-NN in percent, or NaN if a feature is not finite."""
        # `forward` is called directly. Otherwise torch.compile would compile the module again for
        # the shapes of these images.
        compute = self.learner.encoder.forward
        train, val = (self._compute_outputs(images, compute) for images in (self.train, self.val))
        if not (train.features.isfinite().all() and val.features.isfinite().all()):
            return math.nan
        (ranks,) = knn_ranks(
            val,
            train,
            num_classes=len(self.val.class_names),
            neighbours=[self.options.neighbours],
            temperature=self.options.temperature,
        )
        return _compute_percentage(ranks == 0)

    @torch.no_grad()
    def _compute_outputs(
        self, images: ImageSet, compute: Callable[[Images], Tensor]
    ) -> LabelledFeatures:
        """Apply a network to the central crop of each image. Return the outputs and the labels.

        `compute` receives a batch of normalised crops and returns one vector for each crop.
        """
        device = next(self.learner.parameters()).device
        size, crop_share = self.learner.encoder.config.image_size, self.options.crop_share

        def crop(index: int) -> tuple[UInt8[Tensor, "3 _ _"], int]:
            sample = images[index]
            assert sample.label is not None
            return central_square(sample.image, size, crop_share=crop_share), sample.label

        outputs, labels = [], []
        with (
            evaluation_mode(self.learner),
            ThreadPoolExecutor(min(_MAX_THREADS, count_usable_cores())) as pool,
        ):
            for start in range(0, len(images), self.options.batch_size):
                end = min(start + self.options.batch_size, len(images))
                crops = list(pool.map(crop, range(start, end)))
                pixels = torch.stack([pixels for pixels, _ in crops]).to(device)
                normalized = normalise(pixels.float() / 255, self.normalization)
                outputs.append(compute(normalized).float())
                labels += [label for _, label in crops]
        return LabelledFeatures(torch.cat(outputs), torch.tensor(labels, device=device))


def _draw_subset(images: ImageSet, max_images: int) -> ImageSet:
    """Return a random subset of at most `max_images` images, which is the same in every run."""
    order = np.random.default_rng(0).permutation(len(images))
    return select_images(images, images.name, sorted(order[:max_images].tolist()))


def rank_true_classes(
    logits: Float[Tensor, "images classes"], labels: Int64[Tensor, " images"]
) -> Int64[Tensor, " images"]:
    """Return for each image the number of classes that rank above the true class.

    If classes have equal logits, the class with the lower index ranks higher.
    """
    order = logits.argsort(dim=1, descending=True, stable=True)
    return (order == labels[:, None]).int().argmax(1)


def _compute_percentage(is_correct: Bool[Tensor, " images"] | None) -> float:
    """Return the percentage of correctly classified images, or NaN if `is_correct` is None."""
    return math.nan if is_correct is None else 100 * to_float64(is_correct).mean().item()


def describe_recipe(description: Mapping[str, Any], timeline: Timeline) -> str:
    """Summarise in one line how a run was trained, for comparison with the training in a paper.

    For example, the summary of a run is "100 epochs, batch 512, AdamW at 0.001".

    Args:
        description: Settings of the run, from its saved state.
        timeline: Planned length of the run.
    """
    train, optimizer = description["train"], description["optimizer"]
    epochs = timeline.total_steps / timeline.steps_per_epoch
    # `optimizer.lr` is the learning rate for a batch of 256 images. See pretrain/step.py.
    rate = optimizer["lr"] * train["batch_size"] / 256
    kind = optimizer["_target_"].rpartition(".")[2]
    start = ""
    if INIT_FROM_SHA256 in description:
        start = f", from weights {description[INIT_FROM_SHA256][:8]}"
    return f"{epochs:g} epochs, batch {train['batch_size']}, {kind} at {rate:g}{start}"
