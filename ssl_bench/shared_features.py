"""Share the features of whole images between consecutive probes of one command."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ssl_bench.features import FeatureExtractor, Features
from ssl_bench.layers import Facet
from ssl_bench.system.process import free_host_memory

_MAX_SHARE_OF_MEMORY = 0.25


@dataclass
class SharedFeatures:
    """Features of images in host memory, for probes that encode the same images.

    Attributes:
        num_images: Number of different images that a probe encodes.
        keeps_new: Whether features of further images are kept. False if no later probe needs them.
        by_image: Features of each layer and facet (kind of feature), by the digest of the image's
            pixels.
    """

    num_images: int
    keeps_new: bool = True
    by_image: dict[bytes, dict[tuple[int, Facet], Tensor]] = field(default_factory=dict)
    _free_bytes: int = field(
        default_factory=lambda: int(_MAX_SHARE_OF_MEMORY * free_host_memory()), init=False
    )

    def add(self, images: Sequence[bytes], features: Features) -> None:
        """Keep the features of a batch, unless those of all images would need too much memory."""
        tensors = [tensor for by_facet in features.values() for tensor in by_facet.values()]
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        needed = num_bytes * max(1, (self.num_images - len(self.by_image)) / len(images))
        if not self.keeps_new or needed > self._free_bytes:
            return
        self._free_bytes -= num_bytes
        for number, digest in enumerate(images):
            self.by_image.setdefault(digest, {}).update(
                ((layer, facet), tensor[number])
                for layer, by_facet in features.items()
                for facet, tensor in by_facet.items()
            )


class SharedExtractor(FeatureExtractor):
    """Feature extractor on the CPU that does not encode images whose features are already known.

    On a CPU, the features of an image do not depend on the other images in its batch. Shared
    features therefore equal recomputed features.

    Args:
        shared: Features that earlier probes have computed. Further features are added to it.
        arguments: Arguments of `FeatureExtractor`.
    """

    def __init__(self, shared: SharedFeatures, *arguments: Any, **options: Any) -> None:
        self._shared = shared
        super().__init__(*arguments, **options)

    @torch.no_grad()
    def extract_unchecked(
        self, images: Float[Tensor, "batch 3 height width"]
    ) -> tuple[Features, Float[Tensor, "features batch"]]:
        """Extract features like `FeatureExtractor.extract_unchecked`, encoding only new images."""
        digests = [self._digest(image) for image in images]
        wanted = set(product(self.layers, self.facets))
        known = self._shared.by_image
        new = [n for n, one in enumerate(digests) if not wanted <= known.get(one, {}).keys()]
        if len(new) == len(images):
            features, sums = super().extract_unchecked(images)
            self._shared.add(digests, features)
            return features, sums
        encoded = dict[int, Any]()
        if new:
            features, _ = super().extract_unchecked(images[new])
            self._shared.add([digests[n] for n in new], features)
            encoded = {n: (features, position) for position, n in enumerate(new)}

        def select(number: int, layer: int, facet: Facet) -> Tensor:
            if number in encoded:
                features, position = encoded[number]
                return features[layer][facet][position]
            return known[digests[number]][layer, facet]

        joined: Features = {
            layer: {
                facet: torch.stack([select(n, layer, facet) for n in range(len(images))])
                for facet in self.facets
            }
            for layer in self.layers
        }
        sums = [value.flatten(1).sum(1) for item in joined.values() for value in item.values()]
        return joined, torch.stack(sums)

    def _digest(self, image: Float[Tensor, "3 height width"]) -> bytes:
        content = hashlib.blake2b(image.contiguous().numpy().data, digest_size=16)
        content.update(f"{image.dtype} {tuple(image.shape)} {self.dtype}".encode())
        return content.digest()
