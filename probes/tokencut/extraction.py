"""The features that are cut: patches of one image, and the grid that they lie on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from probes.tokencut.files import cell_name
from probes.tokencut.options import PatchGrid
from probes.tokencut.shape_batches import padded_batch
from ssl_bench.data.samples import Sample
from ssl_bench.errors import DataError
from ssl_bench.features import FeatureExtractor
from ssl_bench.system.transfers import on_its_way

BatchFeatures = dict[str, Float[Tensor, "batch rows cols dim"]]


@contextmanager
def extracted(
    extractor: FeatureExtractor, samples: Sequence[Sample], grid: PatchGrid
) -> Iterator[BatchFeatures]:
    """Features by cell of images whose patches fill the same grid, each at the size it has.

    Padding is right and below, zero after normalisation.

    Raises:
        CheckpointError: they are not finite. Of a device it is known when the block ends, which
            must have waited for it in between.
    """
    height, width = (extractor.patch_size * side for side in grid.shape)
    images = padded_batch(samples, (height, width), extractor.encoder.mean)
    features, sums = extractor.unchecked(images)
    ids, sums = [sample.image_id for sample in samples], on_its_way(sums)
    if extractor.device.type == "cpu":
        extractor.check(sums, ids)
    try:
        yield {
            cell_name(layer, facet): values
            for layer, facets in features.items()
            for facet, values in facets.items()
        }
    except DataError:
        # What is wrong with the graphs may be wrong with the features already.
        extractor.check(sums, ids)
        raise
    extractor.check(sums, ids)


def grid_of(sample: Sample, patch_size: int) -> PatchGrid:
    height, width = sample.image.shape[:2]
    return PatchGrid(height, width, patch_size)


def resized(sample: Sample, size: tuple[int, int]) -> Sample:
    """An image at another height and width, bicubic; its boxes, not rounded, and mask with it.

    A box in the same part of the image overlaps its true ones as much as before. Of the mask each
    pixel is the nearest one of before.
    """
    height, width = sample.image.shape[:2]
    image = Image.fromarray(sample.image).resize((size[1], size[0]), Image.Resampling.BICUBIC)
    scale = np.tile([size[1] / width, size[0] / height], 2)
    boxes = None if sample.boxes is None else sample.boxes * scale
    mask = sample.mask
    if mask is not None:
        mask = np.asarray(
            Image.fromarray(mask).resize((size[1], size[0]), Image.Resampling.NEAREST)
        )
    return replace(sample, image=np.asarray(image), boxes=boxes, mask=mask)
