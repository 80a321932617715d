"""Images of many sizes in batches of one shape, for encoders that see them at native size."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ssl_bench.data.samples import Sample
from ssl_bench.errors import SslBenchError

_WAITING_PIXELS = 64_000_000
"""Decoded images that wait for others of their shape, together: 192 MB."""


def same_shape(
    samples: Iterable[Sample],
    shape: Callable[[Sample], Hashable],
    size: Callable[[Sample], int],
    *,
    waiting_pixels: int = _WAITING_PIXELS,
) -> Iterator[list[Sample]]:
    """Batches of samples of the same shape, each as soon as it is full.

    When too many pixels wait, the shape that holds most of them goes first. Every sample comes
    once, those of one shape in their order; also those that came before one that cannot be read.

    Args:
        samples: Of any shapes.
        shape: Samples with equal values go together.
        size: How many samples of this one's shape make a batch, at least 1.
        waiting_pixels: Bound on the decoded pixels that are held back.
    """
    waiting: dict[Hashable, list[Sample]] = defaultdict(list)
    try:
        for sample in samples:
            group = waiting[shape(sample)]
            group.append(sample)
            if len(group) >= size(sample):
                yield waiting.pop(shape(sample))
            elif sum(map(_pixels, waiting.values())) > waiting_pixels:
                yield waiting.pop(max(waiting, key=lambda key: _pixels(waiting[key])))
    except SslBenchError:
        yield from waiting.values()
        raise
    yield from waiting.values()


def padded_batch(
    samples: Sequence[Sample], shape: tuple[int, int], colour: tuple[float, float, float]
) -> Float[Tensor, "batch 3 height width"]:
    """RGB in [0, 1], filled up right and below with a colour, such as an encoder's mean.

    An image that is filled up with the mean is, after normalisation, filled up with exact zeros.

    Args:
        samples: With images of at most that shape.
        shape: Height and width of the batch in pixels.
        colour: RGB in [0, 1].
    """
    batch = torch.tensor(colour)[:, None, None].repeat(len(samples), 1, *shape)
    for image, sample in zip(batch, samples, strict=True):
        height, width = sample.image.shape[:2]
        # A copy, because torch warns of arrays that nobody may write to.
        pixels = torch.from_numpy(sample.image.copy()).permute(2, 0, 1)
        image[:, :height, :width] = pixels.float() / 255
    return batch


def _pixels(samples: Sequence[Sample]) -> int:
    return sum(sample.image.shape[0] * sample.image.shape[1] for sample in samples)
