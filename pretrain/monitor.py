"""How good the encoder is by now: measured on labelled images every few epochs of a run.

And the accuracy of a finished supervised run as a record, beside those of the probes.
"""

import math
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from pretrain.crops.augmentation import Images, normalise
from pretrain.fine_tuning import SHA256
from pretrain.objectives.objective import Learner, Measuring
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
from ssl_bench.data.files.fingerprints import extend_fingerprint
from ssl_bench.data.files.readable import count_shared_files, select_images, summarize_left_out
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.layouts.webdataset import WebDataset, is_webdataset
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.features import central_square
from ssl_bench.intervals import Share
from ssl_bench.models import identify_encoder
from ssl_bench.models.encoder import Normalization
from ssl_bench.neighbours import LabelledFeatures, knn_ranks
from ssl_bench.results import SUPERVISED, TRAINED_ON, ResultKey, ResultStore, TrainingImages
from ssl_bench.system.device import describe_device, evaluation_mode, to_float64
from ssl_bench.system.files import expand_path, resolve_links
from ssl_bench.system.process import count_usable_cores, provenance_fields

KNN = "knn_top1"
_MOST_THREADS = 16
# Parts of a description that only say where files lie.
_PLACES = frozenset({"data", "monitor", "init_from"})


@dataclass(frozen=True)
class Monitor:
    """What is measured, how often and on which images. Nothing by default.

    Attributes:
        root: Folder of `train/CLASS/PICTURE` and `val/CLASS/PICTURE`, of `CLASS/PICTURE`, or of
            `train/*.tar` and `val/*.tar`. The default is `data.root`.
        train_split: Without it `train`.
        val_split: Without it `val`, else `test`.
        known_only: Leave out validation images of classes that the training split lacks, where
            they are an error otherwise.
        knn_epochs: Every so many epochs, and after the last step, the images of the validation
            split take the class that the nearest training images vote for: `knn_top1`, percent.
        accuracy_epochs: Every so many epochs, and after the last step, the head of a supervised run
            names the class of the validation images: `val_top1`, percent, and of six classes or
            more how often it is among the five likeliest: `val_top5`.
        results: Folder of results in which the finished run leaves the last of them as records.
        neighbours: How many training images vote.
        temperature: A neighbour's vote is exp(cosine similarity / temperature).
        train_images: At most so many vote, drawn once.
        val_images: At most so many are asked about, drawn once.
        crop_share: Side of the central square that is looked at, relative to the shorter side.
        batch_size: Images that pass the encoder together.
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
                "records go to monitor.results only where accuracy is measured",
                hint=("monitor.accuracy_epochs={number}",),
            )

    def open(
        self, learner: Learner, timeline: Timeline, data: DataOptions, images: ImageSet
    ) -> "Observer | None":
        """Find the images; none is decoded, and nothing happens where nothing is measured.

        Args:
            learner: What will be looked at.
            timeline: Of the run.
            data: Of the run: its root is that of the monitor unless `root` says so.
            images: That the run learns from.

        Raises:
            ConfigurationError: there is no folder of images, the learner has no head to validate,
                its classes are others, or more neighbours are asked for than there are images.
            DataError: the images are not there, or are files that something is fitted to.
        """
        if self.knn_epochs is None and self.accuracy_epochs is None:
            return None
        root = self.root or data.root
        if root is None:
            raise ConfigurationError(
                "expected a folder with train/CLASS/PICTURE in it", hint=("monitor.root={folder}",)
            )
        layout = WebDataset if is_webdataset(root) else ClassFolders
        dataset = layout(root, self.train_split, self.val_split, self.known_only)
        try:
            observer = Observer(self, dataset, learner, timeline, data.normalization)
        except DataError as error:
            # Its keys are the dataset's, under another name.
            raise DataError(
                str(error).replace("dataset.", "monitor."),
                hint=[word.replace("dataset.", "monitor.") for word in error.hint],
            ) from error
        # No image that is scored may be a file that something is fitted to.
        fitted = [images] if data.labels else []
        if self.knn_epochs is not None:
            fitted.append(observer.train)
        observer.fitted_and_scored = max(
            (count_shared_files(own, observer.val, allowed=data.allow_overlap) for own in fitted),
            default=0,
        )
        if self.accuracy_epochs is None:
            return observer
        if not isinstance(learner, SupervisedLearner):
            raise ConfigurationError(
                "monitor.accuracy_epochs needs a head that names classes",
                hint=("objective=supervised", "or", "monitor.knn_epochs={number}"),
            )
        if images.class_names != observer.val.class_names:
            raise ConfigurationError(
                f"monitor.accuracy_epochs expects the {len(images.class_names)} classes of the run "
                f"in monitor.root, which has {len(observer.val.class_names)} or others"
            )
        return observer


class Observer(Measuring):
    """A monitor with its images and the learner it looks at.

    It draws no random number and leaves the learner as it was, so that a run is the same with it
    and without.
    """

    costs_by = "monitor.train_images, .val_images and its epochs"

    def __init__(
        self,
        options: Monitor,
        dataset: ClassFolders | WebDataset,
        learner: Learner,
        timeline: Timeline,
        colours: Normalization,
    ) -> None:
        self.options, self.learner, self.timeline = options, learner, timeline
        self.colours, self.all_val = colours, dataset.val()
        self.root = expand_path(dataset.root or Path()).absolute()
        self.val = drawn(self.all_val, options.val_images)
        self.train = drawn(dataset.train(), options.train_images)
        self.fitted_and_scored = 0
        most = len(self.train)
        if options.knn_epochs is not None and options.neighbours > most:
            raise ConfigurationError(
                f"monitor.neighbours must be at most the {most} training images, got "
                f"{options.neighbours}",
                hint=(f"monitor.neighbours={most}",),
            )

    def measures(self, step: int) -> dict[str, float]:
        """What is due after the step of this number, counted from 1; in percent, NaN if diverged.

        Raises:
            DataError: an image cannot be read.
        """
        options, timeline, found = self.options, self.timeline, {}
        if timeline.is_due(options.accuracy_epochs, step):
            for most, right in self.hits().items():
                found[f"val_top{most}"] = math.nan if right is None else percent(right)
        if timeline.is_due(options.knn_epochs, step):
            # Not called as a module: a compiled one would be compiled anew for these shapes.
            features = self.learner.encoder.forward
            bank, queries = (self._outputs(images, features) for images in (self.train, self.val))
            found[KNN] = math.nan
            if bank.features.isfinite().all() and queries.features.isfinite().all():
                (ranks,) = knn_ranks(
                    queries,
                    bank,
                    num_classes=len(self.val.class_names),
                    neighbours=[options.neighbours],
                    temperature=options.temperature,
                )
                found[KNN] = percent(ranks == 0)
        return found

    def hits(self) -> dict[int, Bool[Tensor, " images"] | None]:
        """Which images of `val` have their class first, and among the first five of six or more.

        By how many classes count; None for a head that diverged.
        """
        assert isinstance(self.learner, SupervisedLearner)
        found = self._outputs(self.val, self.learner.classify)
        is_finite, ranks = found.features.isfinite(), class_ranks(found.features, found.labels)
        # The class is among the five likeliest of five whatever the head says.
        tops = (1, 5) if len(self.val.class_names) > 5 else (1,)
        return {most: ranks < most if is_finite.all() else None for most in tops}

    def record(
        self,
        results: Path,
        weights: Path,
        description: Mapping[str, Any],
        trained_on: TrainingImages,
        left_out: list[str],
    ) -> list[Path]:
        """Measure how often the head is right, and write it down with the images it was on.

        The dataset has the name of its folder, so that of a paper's needs a folder of that name.

        Args:
            results: Folder of a `ResultStore`, where several runs may stand.
            weights: File of the encoder below the head.
            description: Of the run, as in its state.
            trained_on: What it has learned from.
            left_out: Ids of the images that it could not read.

        Returns:
            Files of the records, that of top-1 first; none for a head that diverged.

        Raises:
            DataError: an image cannot be read.
            MachineError: the folder cannot be written.
        """
        start = time.monotonic()
        store, files = ResultStore(results), []
        found = {most: right for most, right in self.hits().items() if right is not None}
        if not found:
            return []
        encoder, count = identify_encoder(str(weights)), self.fitted_and_scored
        fingerprint = self.all_val.fingerprint()
        if len(self.val) < len(self.all_val):
            fingerprint = extend_fingerprint(fingerprint, self.val.ids)
        gone = {trained_on.split: left_out}
        for most, right in found.items():
            hits = right.cpu().numpy()
            key = ResultKey(
                task=SUPERVISED,
                dataset=re.sub(r"\W+", "_", resolve_links(self.root).name).lower() or "images",
                split=self.val.split,
                layer=encoder.depth - 1,
                facet="head",
                protocol="central_square",
                metric=f"top{most}",
                **encoder.identity(),
                dataset_fingerprint=fingerprint,
                seed=description["train"]["seed"],
                settings={
                    "image_size": self.learner.encoder.config.image_size,
                    "crop_share": self.options.crop_share,
                    TRAINED_ON: asdict(trained_on),
                    **({"fitted_and_scored": count} if count else {}),
                },
            )
            seconds = time.monotonic() - start
            record = key.record(
                depth=encoder.depth,
                value=Share(hits).value,
                ci95=Share(hits).ci95(),
                num_images=len(hits),
                model=encoder.name,
                per_image_kind="hits",
                details={
                    "training": recipe_of(description, self.timeline),
                    "configuration": {k: v for k, v in description.items() if k not in _PLACES},
                    **({"left_out": summarize_left_out(gone)} if left_out else {}),
                },
                **provenance_fields(
                    describe_device(next(self.learner.parameters()).device), seconds
                ),
            )
            store.save_image_ids(record.dataset_fingerprint, self.val.ids)
            files.append(store.save(record, hits))
        return files

    @torch.no_grad()
    def _outputs(self, images: ImageSet, compute: Callable[[Images], Tensor]) -> LabelledFeatures:
        """What a network gives for each image, and the classes."""
        device = next(self.learner.parameters()).device
        size, share = self.learner.encoder.config.image_size, self.options.crop_share

        def view(index: int) -> tuple[UInt8[Tensor, "3 _ _"], int]:
            sample = images[index]
            assert sample.label is not None
            return central_square(sample.image, size, share=share), sample.label

        outputs, labels = [], []
        with (
            evaluation_mode(self.learner),
            ThreadPoolExecutor(min(_MOST_THREADS, count_usable_cores())) as pool,
        ):
            for start in range(0, len(images), self.options.batch_size):
                end = min(start + self.options.batch_size, len(images))
                views = list(pool.map(view, range(start, end)))
                pixels = torch.stack([pixels for pixels, _ in views]).to(device)
                outputs.append(compute(normalise(pixels.float() / 255, self.colours)).float())
                labels += [label for _, label in views]
        return LabelledFeatures(torch.cat(outputs), torch.tensor(labels, device=device))


def drawn(images: ImageSet, at_most: int) -> ImageSet:
    """Some images of a set, the same in every run."""
    order = np.random.default_rng(0).permutation(len(images))
    return select_images(images, images.name, sorted(order[:at_most].tolist()))


def class_ranks(
    logits: Float[Tensor, "images classes"], labels: Int64[Tensor, " images"]
) -> Int64[Tensor, " images"]:
    """How many classes are likelier than that of the image; of equal ones the first counts."""
    order = logits.argsort(dim=1, descending=True, stable=True)
    return (order == labels[:, None]).int().argmax(1)


def percent(right: Bool[Tensor, " images"]) -> float:
    """Share of those that are true."""
    return 100 * to_float64(right).mean().item()


def recipe_of(description: Mapping[str, Any], timeline: Timeline) -> str:
    """How the encoder was trained, in words that compare with a paper's."""
    train, optimizer = description["train"], description["optimizer"]
    epochs = timeline.total_steps / timeline.steps_per_epoch
    # Rates hold for a batch of 256, see pretrain/step.py.
    rate = optimizer["lr"] * train["batch_size"] / 256
    kind = optimizer["_target_"].rpartition(".")[2]
    start = f", from weights {description[SHA256][:8]}" if SHA256 in description else ""
    return f"{epochs:g} epochs, batch {train['batch_size']}, {kind} at {rate:g}{start}"
