"""A batch that nobody typed, fitted to the images, the memory and the speed of a machine."""

from dataclasses import dataclass

import torch

from ssl_bench.system.device import free_memory
from ssl_bench.system.launch import processes_here
from ssl_bench.system.memory import free_host_memory
from ssl_bench.system.progress import in_words

_GIB = 2**30
# Of DINO's recipe.
_MOST = 1024
_STEPS_AN_EPOCH = 4
_SECONDS_A_STEP = 10.0
# FLOP/s that a step of a small ViT reaches on a core: 23 to 29e9 measured. Not measured here, since
# the same command on the same machine shall learn the same.
_CORE_RATE = 20e9
# Of the memory that is free: on the host other programs, images and copies of the state want some.
_SHARE = {"cuda": 0.8}
_HOST_SHARE = 0.5


@dataclass(frozen=True)
class Needs:
    """What a step needs.

    Attributes:
        flops: For each image.
        image_bytes: For each image that is computed at once, kept for the backward pass.
        fixed_bytes: Weights, gradients, moments, a teacher, and the copy that is saved.
    """

    flops: float
    image_bytes: int
    fixed_bytes: int

    def gib(self, images: int) -> float:
        """Memory for so many images at once."""
        return (self.fixed_bytes + images * self.image_bytes) / _GIB


def fitted_batch(
    num_images: int, needs: Needs, device: torch.device, *, ranks: int = 1, parts: int = 1
) -> tuple[int, str]:
    """The largest batch, of those doubled from the smallest possible one, that fits; and why.

    It leaves at least four steps an epoch, is at most DINO's, takes half of the free memory (of a
    GPU .8), and on a CPU its step takes some ten seconds at most.

    Args:
        num_images: Of an epoch.
        needs: Of a step.
        device: Of this process.
        ranks: Processes that share a batch.
        parts: That each process computes its share in.
    """
    on_host = device.type != "cuda"
    free = (free_host_memory() / processes_here() if on_host else free_memory(device)) / _GIB

    def objection(batch: int) -> str | None:
        memory = needs.gib(batch // (ranks * parts))
        seconds = needs.flops * batch / (ranks * torch.get_num_threads() * _CORE_RATE)
        if num_images // batch < _STEPS_AN_EPOCH:
            return f"{batch} would leave fewer than {_STEPS_AN_EPOCH} steps an epoch"
        if memory > free * _SHARE.get(device.type, _HOST_SHARE):
            return f"{batch} would take {memory:.1f} of {free:.1f} GiB that are free"
        if device.type == "cpu" and seconds > _SECONDS_A_STEP:
            return f"a step of {batch} would take about {in_words(seconds)} on this CPU"
        return f"{_MOST:,} is the most that is taken unasked" if batch > _MOST else None

    batch = ranks * parts
    while (reason := objection(2 * batch)) is None:
        batch *= 2
    return batch, reason
