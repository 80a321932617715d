"""Decode images in threads, and extract the features of batches."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import torch
from jaxtyping import Float, Float16
from torch import Tensor

from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.features import FeatureExtractor
from ssl_bench.system.device import floor_to_power_of_two, to_device, to_host

K = TypeVar("K")
T = TypeVar("T")
Half = Float16[Tensor, "batch rows cols dim"]
Scales = Float[Tensor, "layers batch"]
"""For each layer and image, the factor that undoes the scaling before rounding to float16."""

_MAX_CPU_PIXELS = 2**19
# Features of an image are not scaled if their largest absolute value is in this range. Values down
# to 2^-8 times the largest value then have float16's full precision of ten bits.
_SMALLEST, _LARGEST = 2.0**-6, 65504.0
# Otherwise, features are scaled so that their largest absolute value lies between this number and
# twice this number.
_SCALED_LARGEST = 2.0**14


def read_ahead(
    images: ImageSet, indices: Sequence[int], prepare: Callable[[Sample], T], *, num_workers: int
) -> Iterator[T]:
    """Read images in threads, and yield the results of `prepare` in the order of `indices`.

    Args:
        images: The dataset.
        indices: Indices of the images to read.
        prepare: Function that is called with each image and its annotations.
        num_workers: Number of threads.
    """
    return map_ahead(
        lambda index: prepare(images[index]),
        indices,
        num_workers=num_workers,
        max_ahead=4 * num_workers,
    )


def map_ahead(
    function: Callable[[K], T], items: Iterable[K], *, num_workers: int, max_ahead: int
) -> Iterator[T]:
    """Call a function in threads, and yield its results in the order of the items.

    Args:
        function: Function to call for each item.
        items: Arguments of the function, one for each call. An item is read when its call is
            submitted to the threads.
        num_workers: Number of threads.
        max_ahead: Maximum number of calls that are started ahead of the one whose result is yielded
            next.
    """
    pool = ThreadPoolExecutor(num_workers)
    try:
        pending: deque[Future[T]] = deque()
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > max_ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Divide items into lists of `size` items. The last list may be shorter."""
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch


def images_per_pass(batch_size: int, image_size: int, device: torch.device) -> int:
    """Return how many square images the encoder should process in one forward pass.

    On a GPU, the result is `batch_size`. On a CPU, a batch also has at most half a million pixels,
    because larger batches are not faster and the progress bar would move too rarely. `image_size`
    is the side of an image in pixels.
    """
    if device.type != "cpu":
        return batch_size
    return min(batch_size, max(1, _MAX_CPU_PIXELS // image_size**2))


def extract(
    extractor: FeatureExtractor, images: Float[Tensor, "batch 3 height width"], ids: Sequence[str]
) -> tuple[dict[int, Float[Tensor, "batch rows cols dim"]], Float[Tensor, "layers batch"]]:
    """Compute the features of each layer for a batch, and sums that show whether they are finite.

    On a CUDA GPU, this function does not check the sums. Pass the sums to `fetch_and_check` later,
    so that the CPU waits for the GPU only once. On any other device, this function checks the sums.

    Args:
        extractor: Extractor of one facet (kind of feature).
        images: RGB in [0, 1].
        ids: Image ids for error messages.

    Returns:
        Features by layer, and the sum of the features of each image in each layer. A sum is NaN or
        infinite if one of its features is.

    Raises:
        CheckpointError: A feature is not finite. On a CUDA GPU, `fetch_and_check` raises it.
    """
    features, sums = extractor.extract_unchecked(images)
    if not sums.is_cuda:
        extractor.require_finite(sums, ids)
    (facet,) = extractor.facets
    return {layer: facets[facet] for layer, facets in features.items()}, sums


def fetch_and_check(
    extractor: FeatureExtractor,
    sums: Float[Tensor, "features batch"],
    ids: Sequence[str],
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    """Copy tensors to CPU memory, and check that they were computed from finite features.

    Tensors and sums are copied together, so that the CPU waits for the GPU only once.

    Args:
        extractor: Extractor of the features.
        sums: Sums of the features, from `extract` or `extract_unchecked`. They show whether all
            features are finite.
        ids: Image ids for error messages.
        tensors: Tensors that were computed from the features.

    Raises:
        CheckpointError: A feature is not finite.
    """
    sums, *copies = to_host([sums, *tensors])
    extractor.require_finite(sums, ids)
    return copies


def extract_float16(
    extractor: FeatureExtractor,
    images: Float[Tensor, "batch 3 height width"],
    ids: Sequence[str],
    *,
    fetch: bool = False,
) -> tuple[list[Half], Scales]:
    """Compute the features of all layers for a batch, and round them to float16.

    If the features of an image are too large or too small for float16, they are scaled first.

    Args:
        extractor: Extractor of one facet (kind of feature).
        images: RGB in [0, 1].
        ids: Image ids for error messages.
        fetch: Whether to copy the features to CPU memory. The scales are always copied.

    Returns:
        Features of each layer, and the factors that undo the scaling.

    Raises:
        CheckpointError: A feature is not finite.
    """
    features, sums = extract(extractor, images, ids)
    pairs = [to_float16(features[layer]) for layer in extractor.layers]
    halves, scales = [half for half, _ in pairs], torch.stack([scale for _, scale in pairs])
    scales, *host = fetch_and_check(extractor, sums, ids, [scales, *(halves if fetch else [])])
    return host if fetch else halves, scales


def to_float16(
    features: Float[Tensor, "batch rows cols dim"],
) -> tuple[Half, Float[Tensor, " batch"]]:
    """Round features to float16, after scaling images whose features are too small or too large.

    Float16 has ten bits of precision only between 2^-14 and 65504. If the largest absolute feature
    of an image is below 2^-6 or above 65504, all of its features are divided by a power of two. The
    division is exact. After the division, the largest feature is between 2^14 and 2^15. The power
    of two depends only on the features of this image in this layer, not on other images of the
    batch.

    Returns:
        The rounded features, and the divisor of each image, which is a power of two.
    """
    largest = features.abs().amax((1, 2, 3))
    fits = (largest >= _SMALLEST) & (largest <= _LARGEST) | (largest == 0)
    scales = torch.where(fits, 1.0, floor_to_power_of_two(largest) / _SCALED_LARGEST)
    return (features / scales[:, None, None, None]).half(), scales


def undo_scaling(
    halves: Float[Tensor, "layers batch rows cols dim"], scales: Scales
) -> Float[Tensor, "layers batch rows cols dim"]:
    """Multiply float16 features by their scales, and return them in float32.

    If all scales are 1, the float16 features are returned unchanged.

    Args:
        halves: Features from `to_float16`, on any device.
        scales: Scales from `to_float16`, in CPU memory.
    """
    if bool((scales == 1).all()):
        return halves
    return halves.float() * to_device(scales, halves.device)[:, :, None, None, None]
