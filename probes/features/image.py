"""Compute one feature vector for each image and layer, from the central square of the image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from probes.features.stream import batched, fetch_and_check, images_per_pass, read_ahead
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.evaluation import ProbeContext
from ssl_bench.features import FeatureExtractor, Features, central_square
from ssl_bench.layers import Facet
from ssl_bench.neighbours import LabelledFeatures
from ssl_bench.results import encoder_id
from ssl_bench.system.device import to_device

IMAGE_FACETS: dict[Facet, tuple[Facet, ...]] = {
    "cls": ("cls_normed",),
    "patch_mean": ("token_normed",),
    "cls_patch_mean": ("cls_normed", "token_normed"),
}
"""For each kind of feature (facet) of a whole image, the encoder outputs that it consists of.

"cls_normed" is the [CLS] token and "token_normed" are the patch tokens, both after the encoder's
final norm.
"""

# Unit vectors count as equal if all of their entries differ by less than this value.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class ImageFeatures:
    """Feature vectors of images for each layer and facet, and the class of each image.

    A facet is a kind of feature, such as the [CLS] token. The vectors are float32. All tensors are
    in CPU memory.
    """

    layers: tuple[int, ...]
    by_facet: Mapping[str, Float[Tensor, "layers images dim"]]
    labels: Int64[Tensor, " images"]

    def select(self, layer: int, facet: str) -> LabelledFeatures:
        """Return the feature vectors of one layer and facet, with the classes of the images.

        A facet is a kind of feature, such as the [CLS] token.
        """
        return LabelledFeatures(self.by_facet[facet][self.layers.index(layer)], self.labels)

    def concatenate(self, layers: Sequence[int], facet: str) -> LabelledFeatures:
        """Concatenate the feature vectors of several layers, for one facet.

        A facet is a kind of feature, such as the [CLS] token. Also return the classes of the
        images.
        """
        parts = [self.select(layer, facet).features for layer in layers]
        return LabelledFeatures(torch.cat(parts, 1), self.labels)


@dataclass(frozen=True)
class ImagePass:
    """A pass of labelled images through the encoder, which computes one vector for each image.

    Attributes:
        probe: Probe with the attributes `facets`, `resize`, `crop_share` and `num_workers`. Facets
            (kinds of features) are keys of `IMAGE_FACETS`, or outputs from inside a block, such as
            "mlp_out". `crop_share` is the side of the central square as a fraction of the shorter
            side.
        context: Inputs of the probe, such as the encoder and the device.
        batch_size: Maximum number of images in a forward pass of the encoder.
    """

    probe: Any
    context: ProbeContext
    batch_size: int

    def layers_per_pass(self, num_images: int, memory_gib: float) -> int:
        """Return for how many layers the features of `num_images` images fit into `memory_gib` GiB.

        The result is at least 1.
        """
        extractor = self._extractor(self.context.layers)
        width = sum(vector_width(extractor, facet) for facet in self.probe.facets)
        return max(1, int(memory_gib * 2**30 / (4 * width * num_images)))

    def run(self, images: ImageSet, indices: Sequence[int], layers: Sequence[int]) -> ImageFeatures:
        """Compute the feature vectors of the images with the given indices, for the given layers.

        The vectors are also stored in `context.features`, so that later probes of the same command
        can use them.

        Raises:
            CheckpointError: A feature is not finite.
        """
        shared, size, share = self.context.features, self._size, self.probe.crop_share
        encoder = encoder_id(self.context.encoder.identity())
        key = (encoder, self.context.dtype, images.fingerprint(), tuple(indices), size, share)
        known: ImageFeatures | None = shared.get(key)
        if known and {*layers} <= {*known.layers} and {*self.probe.facets} <= {*known.by_facet}:
            return known
        # Free the memory of the old features before the new features need it.
        shared.pop(key, None)
        extractor = self._extractor(layers)
        by_facet = {
            facet: torch.empty(len(layers), len(indices), vector_width(extractor, facet))
            for facet in self.probe.facets
        }
        labels = torch.empty(len(indices), dtype=torch.int64)

        def prepare(sample: Sample) -> tuple[UInt8[Tensor, "3 size size"], int]:
            assert sample.label is not None
            return central_square(sample.image, size, crop_share=share), sample.label

        squares = read_ahead(images, indices, prepare, num_workers=self.probe.num_workers)
        shown = self.context.progress(squares, f"{images.split} images", len(indices))
        start = 0
        for batch in batched(shown, images_per_pass(self.batch_size, size, self.context.device)):
            pixels = to_device(torch.stack([pixels for pixels, _ in batch]), self.context.device)
            rows = slice(start, start + len(batch))
            ids = [images.ids[index] for index in indices[rows]]
            features, sums = extractor.extract_unchecked(pixels.float() / 255)
            vectors = [image_vectors(features, facet) for facet in by_facet]
            copies = fetch_and_check(extractor, sums, ids, vectors)
            for values, copy in zip(by_facet.values(), copies, strict=True):
                values[:, rows] = copy
            labels[rows] = torch.tensor([label for _, label in batch])
            start = rows.stop
        shared[key] = ImageFeatures(tuple(layers), by_facet, labels)
        return shared[key]

    def _extractor(self, layers: Sequence[int]) -> FeatureExtractor:
        parts = dict.fromkeys(part for facet in self.probe.facets for part in facet_parts(facet))
        return self.context.extractor(layers, *parts)

    @property
    def _size(self) -> int:
        return self.probe.resize.square_side(self.context.encoder.native_size)


def facet_parts(facet: Facet) -> tuple[Facet, ...]:
    """Return the encoder outputs that are needed to compute a feature of a whole image.

    For example, the facet (kind of feature) "cls_patch_mean" is computed from "cls_normed" and
    "token_normed". These two outputs are the [CLS] token and the patch tokens after the encoder's
    final norm.
    """
    return IMAGE_FACETS.get(facet, (facet,))


def vector_width(extractor: FeatureExtractor, facet: Facet) -> int:
    """Return the number of channels of an image's feature vector, for one facet (kind of feature).

    The function `image_vectors` computes such feature vectors.
    """
    return sum(map(extractor.width, facet_parts(facet)))


def image_vectors(features: Features, facet: str) -> Float[Tensor, "layers batch dim"]:
    """Return one feature vector for each layer and image of a batch.

    `facet` is the kind of feature, such as "cls_patch_mean". Features of patches are averaged over
    the patches.
    """
    by_layer = []
    for layer in features.values():
        parts = [layer[part] for part in facet_parts(facet)]
        vectors = [x if x.ndim == 2 else x.flatten(1, 2).mean(1) for x in parts]
        by_layer.append(torch.cat(vectors, 1))
    return torch.stack(by_layer)


def is_constant(unit: Float[Tensor, "images dim"]) -> bool:
    """Return whether all images have the same unit vector, up to rounding.

    `unit` contains the L2-normalised feature vector of each image.
    """
    return bool((unit - unit[0]).abs().max() < _TOLERANCE)
