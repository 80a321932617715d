"""Find a value of `train.accumulation` that needs less memory if a step runs out of memory."""

from collections.abc import Callable

import numpy as np
from torch.utils.data import default_convert

from pretrain.objectives.objective import GeneratingObjective, Views
from pretrain.plan import Pretraining
from pretrain.step import Trainer
from ssl_bench.data.samples import Sample
from ssl_bench.errors import MachineError

_MAX_REASON = 200


class OutOfMemory(MachineError):
    """Error for a training step that ran out of memory, with a hint on how to save memory."""


def out_of_memory_error(
    reason: str, step: int, plan: Pretraining, trainer: Trainer, *, has_state: bool
) -> OutOfMemory:
    """Return an out-of-memory error that recommends settings which need less memory.

    The function takes training steps on smaller and smaller micro-batches of blank images, until a
    step fits into memory. This search changes the weights, so the run must not be saved afterwards.

    Args:
        reason: Error message of torch.
        step: Number of the step that ran out of memory, from 0.
        plan: The configuration of the run.
        trainer: The trainer of the run.
        has_state: Whether the run folder contains a saved state, which must not be overwritten.
    """
    crops, options, ranks = plan.objective.crops, plan.train, trainer.ranks
    sizes = crops.sizes(plan.encoder.image_size, plan.encoder.patch_size)

    def create_views(count: int) -> Views:
        blank = Sample("blank", np.zeros((8, 8, 3), np.uint8), label=0)
        generators = [np.random.default_rng(number) for number in range(count)]
        cut = default_convert(crops.cut([blank] * count, generators, sizes))
        return crops.augment_on_device(cut, ranks.device, plan.data.normalization)

    def fits(count: int) -> bool:
        return trainer.fits_in_memory(step, lambda: create_views(count))

    images, noun = options.resolved_batch_size // ranks.world_size, plan.objective.noun
    accumulation = find_accumulation(images, options.accumulation, fits)
    message = (
        f"out of memory in step {step + 1} with {images // options.accumulation} {noun} at once "
        f"({reason[:_MAX_REASON]})"
    )
    if accumulation is not None:
        # A saved run cannot be resumed with another accumulation, so it needs another folder.
        out = ("--out", "{folder}") if has_state else ("--overwrite",)
        return OutOfMemory(
            f"{message}, but {images // accumulation} would fit",
            hint=(f"train.accumulation={accumulation}", *out),
        )
    if isinstance(plan.objective, GeneratingObjective):
        return OutOfMemory(f"{message}, and fewer do not fit", hint=("model.dim={smaller}",))
    return OutOfMemory(
        f"{message}, and fewer do not fit",
        hint=("model=vit_tiny_skip", "or", "data.image_size={smaller}"),
    )


def find_accumulation(images: int, accumulation: int, fits: Callable[[int], bool]) -> int | None:
    """Find a larger value of `train.accumulation` with which each micro-batch fits into memory.

    Each tried value is at least twice the previous value. Only divisors of `images` are tried, so
    that all micro-batches have the same size.

    Args:
        images: Number of images that one process computes in a step.
        accumulation: Current number of micro-batches, with which a step needs too much memory.
            `images` must be a multiple of this number.
        fits: Function that returns whether a micro-batch of a given size fits into memory.

    Returns:
        The found value, or None if not even a micro-batch of a single image fits into memory.
    """
    while accumulation < images:
        least = min(2 * accumulation, images)
        accumulation = next(n for n in range(least, images + 1) if images % n == 0)
        if fits(images // accumulation):
            return accumulation
    return None
