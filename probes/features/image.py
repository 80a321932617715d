"""One vector for each image and block, from the central squares of labelled images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from probes.features.stream import batches, fetch_finite, images_per_pass, read_ahead
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.evaluation import ProbeContext
from ssl_bench.features import FeatureExtractor, Features, central_square
from ssl_bench.layers import Facet
from ssl_bench.metrics import LabelledFeatures
from ssl_bench.results import encoder_id
from ssl_bench.system.device import to_device

IMAGE_FACETS: dict[Facet, tuple[Facet, ...]] = {
    "cls": ("cls_normed",),
    "patch_mean": ("token_normed",),
    "cls_patch_mean": ("cls_normed", "token_normed"),
}
"""What stands for an image: [CLS], the mean patch, or both concatenated, after the final norm."""

# Unit vectors closer than this to each other tell nothing apart.
_CONSTANT = 1e-6


@dataclass(frozen=True)
class ImageFeatures:
    """Features of images by facet, float32 in host memory, and the class of each image."""

    layers: tuple[int, ...]
    by_facet: Mapping[str, Float[Tensor, "layers images dim"]]
    labels: Int64[Tensor, " images"]

    def select(self, layer: int, facet: str) -> LabelledFeatures:
        return LabelledFeatures(self.by_facet[facet][self.layers.index(layer)], self.labels)

    def concatenate(self, layers: Sequence[int], facet: str) -> LabelledFeatures:
        """The features of several layers, concatenated."""
        parts = [self.select(layer, facet).features for layer in layers]
        return LabelledFeatures(torch.cat(parts, 1), self.labels)


@dataclass(frozen=True)
class ImagePass:
    """How images become vectors.

    Attributes:
        probe: Says the facets, of `IMAGE_FACETS` or from inside of blocks, `image_size`, a side in
            pixels or None for the encoder's own, `crop_share`, the side of the central square that
            is looked at, relative to the shorter side, and `num_workers`.
    """

    probe: Any
    context: ProbeContext
    batch_size: int

    def layers_per_pass(self, num_images: int, memory_gib: float) -> int:
        """How many layers of so many images fit into memory, at least one."""
        extractor = self._extractor(self.context.layers)
        width = sum(vector_width(extractor, facet) for facet in self.probe.facets)
        return max(1, int(memory_gib * 2**30 / (4 * width * num_images)))

    def run(self, images: ImageSet, indices: Sequence[int], layers: Sequence[int]) -> ImageFeatures:
        """Features of the images of these indices; each image passes the encoder once.

        Not even that where they passed for the probe before.

        Raises:
            CheckpointError: features are not finite.
        """
        features, encoder = self.context.features, encoder_id(self.context.encoder.identity())
        seen = (images.fingerprint(), tuple(indices), self._size, self.probe.crop_share)
        key = (encoder, self.context.dtype, *seen)
        known: ImageFeatures | None = features.get(key)
        if known and {*layers} <= {*known.layers} and {*self.probe.facets} <= {*known.by_facet}:
            return known
        # Before others take their room.
        features.pop(key, None)
        extractor = self._extractor(layers)
        found = {
            facet: torch.empty(len(layers), len(indices), vector_width(extractor, facet))
            for facet in self.probe.facets
        }
        labels = torch.empty(len(indices), dtype=torch.int64)
        first, size, share = 0, self._size, self.probe.crop_share

        def prepared(sample: Sample) -> tuple[UInt8[Tensor, "3 size size"], int]:
            assert sample.label is not None
            return central_square(sample.image, size, share=share), sample.label

        squares = read_ahead(images, indices, prepared, workers=self.probe.num_workers)
        shown = self.context.progress(squares, f"{images.split} images", len(indices))
        for batch in batches(shown, images_per_pass(self.batch_size, size, self.context.device)):
            pixels = to_device(torch.stack([pixels for pixels, _ in batch]), self.context.device)
            rows = slice(first, first + len(batch))
            ids = [images.ids[index] for index in indices[rows]]
            by_layer, sums = extractor.extract_unchecked(pixels.float() / 255)
            vectors = [image_vectors(by_layer, facet) for facet in found]
            parts = fetch_finite(extractor, sums, ids, vectors)
            for values, part in zip(found.values(), parts, strict=True):
                values[:, rows] = part
            labels[rows] = torch.tensor([label for _, label in batch])
            first = rows.stop
        features[key] = ImageFeatures(tuple(layers), found, labels)
        return features[key]

    def _extractor(self, layers: Sequence[int]) -> FeatureExtractor:
        parts = dict.fromkeys(part for facet in self.probe.facets for part in facet_parts(facet))
        return self.context.extractor(layers, *parts)

    @property
    def _size(self) -> int:
        return self.probe.resize.square_side(self.context.encoder.native_size)


def facet_parts(facet: Facet) -> tuple[Facet, ...]:
    """What is taken of a block for an image: of facets from inside of it the mean patch."""
    return IMAGE_FACETS.get(facet, (facet,))


def is_constant(unit: Float[Tensor, "images dim"]) -> bool:
    """Whether all images, vectors of length 1, look the same to the block."""
    return bool((unit - unit[0]).abs().max() < _CONSTANT)


def vector_width(extractor: FeatureExtractor, facet: Facet) -> int:
    """Of what stands for an image."""
    return sum(map(extractor.width, facet_parts(facet)))


def image_vectors(features: Features, facet: str) -> Float[Tensor, "layers batch dim"]:
    """What stands for each image of a batch, of all layers."""
    found = []
    for of_layer in features.values():
        parts = [of_layer[part] for part in facet_parts(facet)]
        vectors = [x if x.ndim == 2 else x.flatten(1, 2).mean(1) for x in parts]
        found.append(torch.cat(vectors, 1))
    return torch.stack(found)
