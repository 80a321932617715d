"""The features that are cut: patches of one image, and the grid that they lie on."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from probes.tokencut.cuts import PatchGrid
from probes.tokencut.scores import cell_name
from probes.tokencut.shape_batches import padded_batch
from ssl_bench.data.samples import Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.features import FeatureExtractor

BatchFeatures = dict[str, Float[Tensor, "batch rows cols dim"]]


def extract(
    extractor: FeatureExtractor, samples: Sequence[Sample], grid: PatchGrid
) -> BatchFeatures:
    """Features by cell of images whose patches fill the same grid, each at its native size.

    Padding is right and below, zero after normalisation.

    Raises:
        CheckpointError: they are not finite.
    """
    height, width = (extractor.patch_size * side for side in grid.shape)
    images = padded_batch(samples, (height, width), extractor.encoder.mean)
    features = extractor(images, [sample.image_id for sample in samples])
    return {
        cell_name(layer, facet): values
        for layer, facets in features.items()
        for facet, values in facets.items()
    }


def grid_of(sample: Sample, patch_size: int) -> PatchGrid:
    height, width = sample.image.shape[:2]
    return PatchGrid(height, width, patch_size)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigurationError(f"probe.{message}")
