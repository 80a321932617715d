"""Options of a pretraining run: the config keys `data.*` and `train.*`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch

from pretrain.schedules import LR_WARMUP, CosineSchedule, Schedule, Timeline, TriangularSchedule
from ssl_bench.composition.fields import (
    Bits,
    Bounds,
    Count,
    FilePath,
    Fraction,
    ListLength,
    Pixels,
    Positive,
    PositiveFraction,
    PositiveOrZero,
    RateOrZero,
    Seed,
    Workers,
    check_fields,
)
from ssl_bench.data.files.fingerprints import FingerprintKind, ReadOptions, with_read_options
from ssl_bench.data.files.readable import describe_unreadable, find_read_errors
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.layouts.toy import Toy
from ssl_bench.data.layouts.webdataset import WebDataset, is_webdataset
from ssl_bench.data.samples import ImageSet
from ssl_bench.data.splits import limit_images
from ssl_bench.errors import ConfigurationError
from ssl_bench.models.encoder import IMAGENET_MEAN, IMAGENET_STD, Normalization
from ssl_bench.system.output import print_message_once
from ssl_bench.system.process import count_usable_cores, local_world_size

_MAX_WORKERS = 16
_DEFAULT_BATCH, _MIN_STEPS_PER_EPOCH = 64, 4
# Only sets of at most this size are searched for unreadable images before the first step, because
# the search takes long.
_MAX_CHECKED_IMAGES = 2_000
_MINUTES_PER_WEEK = 10_080
Epochs = Annotated[Sequence[Count], ListLength(0, 10_000)]


@dataclass(frozen=True)
class DataOptions:
    """Options for the images that a run trains on.

    Attributes:
        root: Folder of images, including its subfolders, or WebDataset tar files such as
            `shards/{000..099}.tar`. Tar files can be given as one file, a folder, or a pattern. By
            default, the run generates toy scenes (images of textured objects).
        image_size: Side length in pixels of the encoder's input images (for DINO, of the global
            crops). The encoder is built for this image size. The default is the image size of the
            model.
        in_memory: Decode all images once and keep them in memory.
        on_bad_image: How to handle an unreadable image: "fail" stops the run, and "skip" uses the
            next readable image instead. When the next checkpoint is saved, a message lists the
            skipped images.
        labels: Whether images have class labels. A labelled folder contains `train/CLASS/IMAGE` or
            `CLASS/IMAGE`, and labelled tar files contain class numbers in `KEY.cls`. The default
            depends on the objective.
        fingerprint: How a resumed run checks that its images are unchanged. With "content", every
            file is read once, and its content is compared. With "stat", only file sizes and
            modification times are compared.
        bits: Number of significant bits of 16-bit images, such as 12, for files that do not state
            this number.
        allow_overlap: Whether the monitor (evaluation during training) may use validation images
            that are also training images of its k-NN classifier or of the supervised run.
        limit: Maximum number of images. From a larger set, images at even intervals are selected.
        mean: RGB mean in [0, 1] that is subtracted from images before they are divided by `std`.
            With a mean of 0 and a standard deviation of 1, pixel values stay in [0, 1]. RandAugment
            always fills empty areas with the mean colour of ImageNet.
        std: RGB standard deviation in (0, 1].
    """

    root: FilePath | None = None
    image_size: Pixels | None = None
    in_memory: bool = False
    on_bad_image: Literal["fail", "skip"] = "fail"
    labels: bool | None = None
    fingerprint: FingerprintKind = "content"
    bits: Bits = None
    allow_overlap: bool = False
    limit: Count | None = None
    mean: Annotated[Sequence[Fraction], ListLength(3, 3)] = IMAGENET_MEAN
    std: Annotated[Sequence[PositiveFraction], ListLength(3, 3)] = IMAGENET_STD

    def __post_init__(self) -> None:
        check_fields(self, "data")
        # YAML files give lists. Tuples make equal options compare as equal.
        mean, std = self.normalization
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "std", std)

    @property
    def normalization(self) -> Normalization:
        """Return the pair of `mean` and `std`, with three floats each."""
        (a, b, c), (d, e, f) = (map(float, values) for values in (self.mean, self.std))
        return (a, b, c), (d, e, f)

    def find_images(self) -> ImageSet:
        """Find all training images, without reading their content.

        Raises:
            DataError: There are no images.
            ConfigurationError: Labels are required, but `root` is not set, and generated toy scenes
                have no labels.
        """
        if self.labels and self.root is None:
            raise ConfigurationError(
                "data.labels=true (the default of objective=supervised) expects images with "
                "classes, but without data.root the run uses generated toy scenes, which have none",
                hint=("data.root={folder}",),
            )
        if self.root is not None and is_webdataset(self.root):
            shards = WebDataset(self.root)
            images = shards.pretraining_images() if self.labels else shards.images()
            print_message_once(
                f"found {len(images):,} images in tar files, which are read in place. --resume "
                "continues with the next batch"
            )
        elif self.labels:
            images = ClassFolders(self.root).pretraining_images()
        else:
            images = (Toy() if self.root is None else ImageFolder(self.root)).images()
        images = with_read_options(images, ReadOptions(self.fingerprint, self.bits))
        return limit_images(images, self.limit) if self.limit else images

    def describe_unreadable_images(self, images: ImageSet) -> str:
        """Return a message about training images that cannot be read, or an empty string.

        The check reads all images, which takes long. For more than 2,000 images, and for generated
        toy scenes, nothing is checked and the message is empty.
        """
        if self.root is None or len(images) > _MAX_CHECKED_IMAGES:
            return ""
        unreadable = describe_unreadable(images, find_read_errors(images, {}))
        if not unreadable:
            return ""
        outcome = "Each is replaced by the next readable image"
        if self.on_bad_image == "fail":
            outcome = (
                "The run stops when it reaches one. To leave them out, add --on-bad-image skip. To "
                "see what is wrong with them, run `ssl-bench data check`"
            )
        return f"of {len(images)} images, {'; '.join(unreadable)}. {outcome}"


@dataclass(frozen=True)
class TrainOptions:
    """Length, speed and numerics of a training run. The defaults are DINO's values for 300 epochs.

    Attributes:
        epochs: Length of the run in epochs.
        max_steps: Maximum length of the run in optimizer steps. All schedules end at the last step.
        max_minutes: Time in minutes, from the start of the command, after which the run is saved
            and stopped. The time limit does not affect the schedules, and `--resume` continues the
            run.
        batch_size: Number of images in an optimizer step, over all processes and micro-batches. The
            default is 64 or, for small datasets, the largest power of two with at least four steps
            per epoch.
        accumulation: Number of micro-batches into which each process divides its images of a batch
            to save memory. The gradients of the micro-batches are averaged.
        repeats: Number of times that an image occurs in an epoch, each time with another crop
            (repeated augmentation). Repeats do not change the number of steps in an epoch, so an
            epoch contains fewer different images. The crops of an image are consecutive in the
            batch. DeiT uses 3 repeats.
        num_workers: Number of data workers that read and crop images for each training process.
            With 0, the training process reads and crops images itself. On a GPU, the default is the
            number of usable CPU cores per training process of the machine, but at most 16. On a
            CPU, the default is 0.
        shared_memory_gib: Maximum shared memory (/dev/shm) in GiB that all data workers of a
            machine use. At most half of the free shared memory is used. Data workers split a
            micro-batch that does not fit into shared memory.
        seed: Seed of the initial weights, the order of images, the crops and all other random
            numbers.
        warmup_epochs: Length of the learning rate's warm-up in epochs, which cannot exceed the run.
            The default is 10 epochs, but at most a tenth of the run.
        schedule: Schedule of the learning rate: "cosine" (a warm-up, then a cosine down to
            `final_lr`), or "triangular" (a linear rise during the first two fifths of the run, then
            a linear fall to 0).
        final_lr: Learning rate at the end of the cosine schedule.
        layer_decay: Factor in (0, 1] by which the learning rate decreases from each layer to the
            preceding layer. The head has the full learning rate. Common values for fine-tuning are
            0.65 to 0.75. A factor of 1 gives all layers the same learning rate.
        weight_decay: Weight decay at the first step, from which a cosine schedule leads to
            `final_weight_decay`.
        final_weight_decay: Weight decay at the end of the run.
        decay_tokens: Whether class token, registers, mask token and position embedding have weight
            decay. The official DINO applies weight decay to these parameters, but DeiT and timm do
            not. Biases and parameters with one axis never have weight decay.
        max_grad_norm: Maximum norm to which gradients are clipped, separately for each parameter
            tensor. With None, gradients are not clipped.
        global_norm: Whether to clip all gradients together, instead of each tensor separately.
        precision: Data type of matrix products: "auto" is bfloat16 on CUDA and float32 otherwise.
        compile: Use torch.compile for the trained modules and, on CUDA, for the colour jitter. The
            default is true on CUDA and false on other devices.
        deterministic: Use only operations with bitwise reproducible results, which are slower. With
            such operations, a resumed run on a GPU is bitwise identical to an uninterrupted run. On
            a CPU, resumed runs are always bitwise identical.
        checkpoint_minutes: Time in minutes between two checkpoints.
        checkpoint_epochs: Also save a checkpoint every `checkpoint_epochs` epochs.
        keep_epochs: Epochs after which the encoder is kept in its own file, such as
            `epoch0100.safetensors`. For `ssl-bench probe`, the address of this file is `RUN@100`.
        keep_every: Also keep the encoder in its own file every `keep_every` epochs.
        timeout_minutes: Time in minutes that processes wait for each other within a step before the
            run fails. The timeout must exceed the duration of an evaluation, for which all other
            processes wait.
        non_finite_patience: Stop after this number of consecutive steps whose loss or gradient is
            not finite.
        collapse_patience: Stop after this number of consecutive steps whose metrics show that the
            run does not learn, for example because of a collapsed teacher. Steps of the warm-up and
            steps with a loss or gradient that is not finite are ignored.
        tensorboard: Also write the log for TensorBoard (needs the extra `track` of ssl-bench).
        wandb: Weights & Biases project that also receives the log (needs the package `wandb`).
    """

    epochs: Count = 300
    max_steps: Count | None = None
    max_minutes: PositiveOrZero | None = None
    batch_size: Count | None = None
    accumulation: Count = 1
    repeats: Count = 1
    num_workers: Workers | None = None
    shared_memory_gib: Positive = 2.0
    seed: Seed = 0
    warmup_epochs: PositiveOrZero | None = None
    schedule: Literal["cosine", "triangular"] = "cosine"
    final_lr: RateOrZero = 1e-6
    layer_decay: PositiveFraction = 1.0
    weight_decay: PositiveOrZero = 0.04
    final_weight_decay: PositiveOrZero = 0.4
    decay_tokens: bool = True
    max_grad_norm: Positive | None = 3.0
    global_norm: bool = False
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: bool | None = None
    deterministic: bool = False
    checkpoint_minutes: PositiveOrZero = 10.0
    checkpoint_epochs: Count | None = None
    keep_epochs: Epochs | None = None
    keep_every: Count | None = None
    timeout_minutes: Annotated[float, Bounds(0, _MINUTES_PER_WEEK, allow_low=False)] = 60.0
    non_finite_patience: Count = 10
    collapse_patience: Count = 500
    tensorboard: bool = False
    wandb: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "train")
        if self.schedule == "triangular" and self.warmup_epochs is not None:
            raise ConfigurationError(
                f"train.warmup_epochs={self.warmup_epochs:g} cannot be combined with "
                "train.schedule=triangular, whose learning rate already rises during the first two "
                "fifths of the run",
                hint=("train.warmup_epochs=null",),
            )
        late = [epoch for epoch in self.keep_epochs or () if epoch > self.epochs]
        if late:
            raise ConfigurationError(
                f"train.keep_epochs contains {', '.join(map(str, late))}, but the run has only "
                f"{self.epochs} epochs",
                hint=(f"train.epochs={max(late)}",),
            )

    def should_keep(self, epoch: int) -> bool:
        """Return whether to save the encoder to a separate file after this epoch."""
        return epoch in (self.keep_epochs or ()) or (
            self.keep_every is not None and epoch % self.keep_every == 0
        )

    def resolve_batch_size(self, num_images: int) -> "TrainOptions":
        """Return a copy of these options, with a default batch size if none has been set.

        The default batch size depends only on the number of images, so that a command gives the
        same results on every machine.

        Args:
            num_images: Number of training images.
        """
        if self.batch_size is not None:
            return self
        batch = _DEFAULT_BATCH
        while batch > 1 and num_images // batch < _MIN_STEPS_PER_EPOCH:
            batch //= 2
        return replace(self, batch_size=batch)

    @property
    def resolved_batch_size(self) -> int:
        """Return the batch size. Call `resolve_batch_size` first if the batch size may be None."""
        assert self.batch_size is not None, "call resolve_batch_size first"
        return self.batch_size

    def timeline(self, num_images: int) -> Timeline:
        """Return the planned length of a run that trains on `num_images` images.

        Raises:
            ConfigurationError: There are fewer images than the batch size.
        """
        if num_images < self.resolved_batch_size:
            raise ConfigurationError(
                f"train.batch_size={self.batch_size} is larger than the number of images, "
                f"{num_images}",
                hint=("train.batch_size=null", "or", "--data-root", "{folder}"),
            )
        steps_per_epoch = num_images // self.resolved_batch_size
        total = self.epochs * steps_per_epoch
        return Timeline(min(total, self.max_steps or total), steps_per_epoch)

    def warmup_steps(self, timeline: Timeline) -> int:
        """Return the length of the learning rate's warm-up in steps."""
        return LR_WARMUP.count_steps(self.warmup_epochs, timeline)

    def lr_schedule(self, top: float, timeline: Timeline) -> Schedule:
        """Return the schedule of the learning rate, whose maximum is `top`."""
        if self.schedule == "triangular":
            return TriangularSchedule(top, timeline.total_steps)
        return CosineSchedule(top, self.final_lr, timeline.total_steps, self.warmup_steps(timeline))

    def count_workers(self, device: torch.device) -> int:
        """Return the number of data workers that each training process starts."""
        if self.num_workers is not None:
            return self.num_workers
        if device.type == "cpu":
            return 0
        return min(_MAX_WORKERS, max(1, count_usable_cores() // local_world_size()))

    def uses_bfloat16(self, device: torch.device) -> bool:
        """Return whether matrix products are computed in bfloat16."""
        return self.precision == "bfloat16" or (self.precision == "auto" and device.type == "cuda")

    def uses_compile(self, device: torch.device) -> bool:
        """Return whether torch.compile is used, which is the default only on CUDA."""
        return device.type == "cuda" if self.compile is None else self.compile
