"""Options of a pretraining run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from pretrain.schedules import LR_WARMUP, Cosine, Schedule, Timeline, Triangle
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
from ssl_bench.system.output import say_once
from ssl_bench.system.process import count_usable_cores, local_world_size

_MOST_WORKERS = 16
# Images of a set that is looked through before the first step; a larger one takes too long.
_FEW = 2_000
_MINUTES_A_WEEK = 10_080
Epochs = Annotated[Sequence[Count], ListLength(0, 10_000)]


@dataclass(frozen=True)
class DataOptions:
    """The images to learn from.

    Attributes:
        root: Folder of images, or tar files of WebDataset such as `shards/{000..099}.tar`. Images
            in subfolders are included. The tar files are one file, a folder of them, or a pattern.
            Without a root, the images are the toy scenes.
        image_size: Side of the large crops in pixels, and size the encoder is built for; without
            it that of the model.
        in_memory: Decode all images once and keep them, for sets that fit.
        on_bad_image: "skip" takes for an image that cannot be read the next one that can, and says
            which were left out.
        labels: Whether images have classes. A folder then holds `train/CLASS/PICTURE` or
            `CLASS/PICTURE`, and tar files hold class numbers in `KEY.cls`. The default depends on
            the objective.
        fingerprint: How the images are known again when the run is resumed: "content" reads every
            file once, "stat" trusts sizes and times.
        bits: Those that pictures of 16 bits use, where a file does not say it.
        allow_overlap: The monitor may score images that it, or a supervised run, is fitted to.
        limit: Learn from so many images at most, spread evenly over all of them.
        mean: Subtracted from the images, RGB in [0, 1]; `std` divides them then. With zeros and
            ones they stay in [0, 1]. What RandAugment fills with is ImageNet's mean always.
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
        # YAML gives lists; equal options shall be equal.
        for name, three in zip(("mean", "std"), self.colours, strict=True):
            object.__setattr__(self, name, three)

    @property
    def colours(self) -> Normalization:
        """`mean` and `std`."""
        (a, b, c), (d, e, f) = (map(float, three) for three in (self.mean, self.std))
        return (a, b, c), (d, e, f)

    def open(self) -> ImageSet:
        """All images.

        Raises:
            DataError: there are none.
            ConfigurationError: they cannot be labelled as asked.
        """
        if self.labels and self.root is None:
            raise ConfigurationError(
                "data.labels=true, as objective=supervised has it, needs images with classes",
                hint=("data.root={folder}",),
            )
        if self.root is not None and is_webdataset(self.root):
            shards = WebDataset(self.root)
            images = shards.pretraining_images() if self.labels else shards.images()
            say_once(
                f"found {len(images):,} images in tar files, which are read in place; --resume "
                "continues with the next batch"
            )
        elif self.labels:
            images = ClassFolders(self.root).pretraining_images()
        else:
            images = (Toy() if self.root is None else ImageFolder(self.root)).images()
        images = with_read_options(images, ReadOptions(self.fingerprint, self.bits))
        return limit_images(images, self.limit) if self.limit else images

    def unreadable(self, images: ImageSet) -> str:
        """Which images of a small set a run will not learn from, in a line; empty for none."""
        if self.root is None or len(images) > _FEW:
            return ""
        faults = find_read_errors(images, {})
        broken = describe_unreadable(images, faults)
        if not broken:
            return ""
        outcome = "others come in their place"
        if self.on_bad_image == "fail":
            outcome = (
                "the run ends where it meets one; --on-bad-image skip takes others in their "
                "place, `ssl-bench data check` says why"
            )
        return f"of {len(images)} images {'; '.join(broken)}; {outcome}"


@dataclass(frozen=True)
class TrainOptions:
    """How long, how fast and with what care to train; the recipe is DINO's for 300 epochs.

    Attributes:
        max_steps: Plan this many steps at most; all schedules fit into them.
        max_minutes: Stop after so long, wherever the schedules are; `resume` goes on.
        batch_size: Images in an optimizer step, over all devices and accumulations. Without a
            number as many as fit the data, the memory and the machine, 1,024 at most.
        accumulation: Parts a batch is computed in, to fit into memory.
        repeats: Times that each image of an epoch comes, one after the other, each time in another
            crop. The epoch keeps its length, with as many times fewer images. DeiT takes 3.
        num_workers: Processes that read and crop images; 0 for none. Without a number: one for
            each CPU core the process may use beside a GPU, none beside a CPU that computes.
        shared_memory_gib: What the workers of all processes of a machine take of /dev/shm at most.
            Less than half of it is free: that half. Batches come in smaller pieces then.
        warmup_epochs: Of the learning rate, at most the whole run. Without a number 10, but at most
            a tenth of the run.
        schedule: Of the learning rate: a warm-up and a cosine down to `final_lr`, or the triangle
            of `pretrain.schedules.Triangle`, which has neither a warm-up nor a `final_lr`.
        layer_decay: Factor of the learning rate from each layer to the one below, in (0, 1]; the
            head has the full rate. For fine-tuning, .65 to .75; 1 makes no difference.
        decay_tokens: Whether class token, registers, mask token and position embedding are decayed,
            as official DINO does; DeiT and timm exempt them. Biases and vectors always are exempt.
        max_grad_norm: Largest norm of the gradient of each single tensor; none for no clipping.
        global_norm: It is that of the gradient of all tensors together.
        precision: "auto" is bfloat16 on CUDA and float32 elsewhere.
        compile: With torch.compile; on CUDA if not said.
        deterministic: Take only operations that give the same bits every time, at some cost, so
            that a resumed run equals an uninterrupted one on a GPU too. A CPU always does.
        checkpoint_epochs: Save after every so many epochs, beside the minutes.
        keep_epochs: After these epochs the encoder is kept for good, as `epoch0100.safetensors`,
            which `ssl-bench probe` finds as `RUN@100`.
        keep_every: The encoder is also kept for good after every so many epochs.
        timeout_minutes: How long processes wait for one of them within a step, for the first with
            its monitor above all, before they give up.
        non_finite_patience: Steps in a row without a finite gradient before the run stops.
        collapse_patience: Steps in a row with a collapsed teacher before the run stops.
        tensorboard: Write the rows of the log for TensorBoard too (extra `track`).
        wandb: Send them to this project of Weights & Biases too (package `wandb`).
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
    timeout_minutes: Annotated[float, Bounds(0, _MINUTES_A_WEEK, allow_low=False)] = 60.0
    non_finite_patience: Count = 10
    collapse_patience: Count = 500
    tensorboard: bool = False
    wandb: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "train")
        if self.schedule == "triangular" and self.warmup_epochs is not None:
            raise ConfigurationError(
                "train.schedule=triangular rises for two fifths of the run and has no warm-up, "
                f"got {self.warmup_epochs:g} epochs of it",
                hint=("train.warmup_epochs=null",),
            )

        late = [epoch for epoch in self.keep_epochs or () if epoch > self.epochs]
        if late:
            raise ConfigurationError(
                f"train.keep_epochs expects epochs up to {self.epochs}, the last, got "
                f"{', '.join(map(str, late))}",
                hint=(f"train.epochs={max(late)}",),
            )

    def keeps(self, epoch: int) -> bool:
        """Whether the encoder is kept as it is after so many epochs."""
        return epoch in (self.keep_epochs or ()) or (
            self.keep_every is not None and epoch % self.keep_every == 0
        )

    @property
    def batch(self) -> int:
        """`batch_size`, once it is known; see `pretrain.train.Pretraining.with_batch`."""
        assert self.batch_size is not None, "a batch that nobody typed is fitted first"
        return self.batch_size

    def timeline(self, num_images: int) -> Timeline:
        """The planned length of a run over so many images."""
        if num_images < self.batch:
            raise ConfigurationError(
                f"train.batch_size={self.batch} is more than the {num_images} images; fit it to "
                "them, or give more",
                hint=("train.batch_size=null", "or", "--data-root", "{folder}"),
            )
        steps_per_epoch = num_images // self.batch
        total = self.epochs * steps_per_epoch
        return Timeline(min(total, self.max_steps or total), steps_per_epoch)

    def warmup_steps(self, timeline: Timeline) -> int:
        return LR_WARMUP.count_steps(self.warmup_epochs, timeline)

    def rate(self, top: float, timeline: Timeline) -> Schedule:
        """The learning rate of every step, which is `top` at its highest."""
        if self.schedule == "triangular":
            return Triangle(top, timeline.total_steps)
        return Cosine(top, self.final_lr, timeline.total_steps, self.warmup_steps(timeline))

    def workers(self, device: torch.device) -> int:
        """Data workers of each process."""
        if self.num_workers is not None:
            return self.num_workers
        if device.type == "cpu":
            return 0
        return min(_MOST_WORKERS, max(1, count_usable_cores() // local_world_size()))

    def autocasts(self, device: torch.device) -> bool:
        """Whether products are computed in bfloat16."""
        return self.precision == "bfloat16" or (self.precision == "auto" and device.type == "cuda")

    def compiles(self, device: torch.device) -> bool:
        return device.type == "cuda" if self.compile is None else self.compile
