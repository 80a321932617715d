"""Share the features of whole images between consecutive probes of one command."""

import hashlib
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ssl_bench.features import FeatureExtractor, Features
from ssl_bench.layers import Facet
from ssl_bench.system.process import free_host_memory

_MAX_MEMORY_FRACTION = 0.25

SingleImageFeatures = dict[tuple[int, Facet], Tensor]
"""Features of one image by layer (block index) and facet (kind of feature)."""


@dataclass
class SharedFeatures:
    """Features of images in host memory, for probes that encode the same images.

    Attributes:
        num_images: Number of images that a probe encodes, including training images.
        keeps_new: Whether the method `add` stores features, because a later probe needs them.
        by_image: Features of each image, by the digest of its pixels.
    """

    num_images: int
    keeps_new: bool = True
    by_image: dict[bytes, SingleImageFeatures] = field(default_factory=dict)
    _free_bytes: int = field(
        default_factory=lambda: int(_MAX_MEMORY_FRACTION * free_host_memory()), init=False
    )

    def has_memory(self, features: SingleImageFeatures) -> bool:
        """Return whether the features of all images fit into memory.

        Args:
            features: Features of one image. The features of all other images are assumed to need
                the same memory.
        """
        return self.num_images * _num_bytes(features) <= self._free_bytes

    def add(self, digest: bytes, features: SingleImageFeatures) -> None:
        """Store a copy of the features of an image, if they fit into memory.

        Args:
            digest: Digest of the image's pixels.
            features: Features of the image by layer and facet (kind of feature).
        """
        if self.keeps_new and _num_bytes(features) <= self._free_bytes:
            self._free_bytes -= _num_bytes(features)
            copies = {name: tensor.clone() for name, tensor in features.items()}
            self.by_image[digest] = self.by_image.get(digest, {}) | copies


class SharedExtractor(FeatureExtractor):
    """Feature extractor on the CPU that reuses known features instead of encoding an image again.

    Stored features equal recomputed features up to rounding errors. On a CPU, other images in a
    batch do not change the features of a ViT, and change the features of a ConvNet only by rounding
    errors.

    Args:
        shared: Features of earlier probes, to which new features are added.
        arguments, options: Positional and keyword arguments of `FeatureExtractor`.
    """

    def __init__(self, shared: SharedFeatures, *arguments: Any, **options: Any) -> None:
        self._shared = shared
        # None until the features of the first image show how much memory is needed.
        self._has_memory: bool | None = None
        super().__init__(*arguments, **options)

    @torch.no_grad()
    def extract_unchecked(
        self, images: Float[Tensor, "batch 3 height width"]
    ) -> tuple[Features, Float[Tensor, "features batch"]]:
        """Extract features and their sums, but encode only images that lack stored features.

        The sums show whether features are finite: see `FeatureExtractor.extract_unchecked`.
        """
        digests = [self._digest(image) for image in images]
        wanted, known = set(product(self.layers, self.facets)), self._shared.by_image
        by_image = [known.get(digest, {}) for digest in digests]
        if new := [n for n, stored in enumerate(by_image) if not wanted <= stored.keys()]:
            features, sums = super().extract_unchecked(images[new])
            for position, n in enumerate(new):
                by_image[n] = {
                    (layer, facet): features[layer][facet][position] for layer, facet in wanted
                }
                if self._has_memory is None:
                    self._has_memory = self._shared.has_memory(by_image[n])
                if self._has_memory:
                    self._shared.add(digests[n], by_image[n])
            if len(new) == len(images):
                return features, sums
        joined: Features = {
            layer: {facet: torch.stack([stored[layer, facet] for stored in by_image])
                    for facet in self.facets}
            for layer in self.layers
        }  # fmt: skip
        sums = [value.flatten(1).sum(1) for item in joined.values() for value in item.values()]
        return joined, torch.stack(sums)

    def _digest(self, image: Float[Tensor, "3 height width"]) -> bytes:
        content = hashlib.blake2b(image.contiguous().numpy().data, digest_size=16)
        content.update(f"{image.dtype} {tuple(image.shape)} {self.dtype}".encode())
        return content.digest()


def _num_bytes(features: SingleImageFeatures) -> int:
    return sum(tensor.nbytes for tensor in features.values())
