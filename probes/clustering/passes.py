"""What passes the encoder: images of the patches that are clustered, and those that are scored."""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float16, Int64, Integer
from torch import Tensor

from probes.clustering.kmeans import Centres
from probes.clustering.patch_labels import PatchLabels
from probes.clustering.probe import Clustering
from probes.features.stream import batches, read_ahead
from probes.features.views import resized, tensors
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.evaluation import ProbeContext
from ssl_bench.features import FeatureExtractor, Features
from ssl_bench.system.transfers import fetched, sent

Cell = tuple[int, str]


@dataclass(frozen=True)
class PatchPasses:
    """Patches of squashed images, at unit length, of some layers."""

    probe: Clustering
    context: ProbeContext
    layers: Sequence[int]

    @property
    def size(self) -> int:
        """Side of the squares in pixels."""
        return self.probe.image_size or min(self.context.encoder.native_size)

    @property
    def side(self) -> int:
        """In patches."""
        return self.size // self.context.encoder.patch_size

    @property
    def cells(self) -> list[Cell]:
        return list(itertools.product(self.layers, self.probe.facets))

    def chosen(self, images: ImageSet) -> Int64[Tensor, " chosen"]:
        """Patches that are clustered, drawn with the seed; counted over all images, ascending."""
        total = len(images) * self.side**2
        some = random.Random(self.context.seed).sample(
            range(total), min(total, self.probe.fit_patches)
        )
        return torch.tensor(sorted(some))

    def layers_at_once(self, patches: int) -> int:
        """How many layers of so many patches fit into memory, at least one."""
        extractor = self._extractor()
        width = sum(map(extractor.width, self.probe.facets))
        return max(1, int(self.probe.memory_gib * 2**30 / (2 * width * patches)))

    def vectors(
        self, images: ImageSet, chosen: Int64[Tensor, " chosen"]
    ) -> dict[Cell, Float16[Tensor, "chosen _dim"]]:
        """Those of chosen patches, in host memory; only images that have one are encoded."""
        extractor, patches = self._extractor(), self.side**2
        found = {
            (layer, facet): torch.empty(len(chosen), extractor.width(facet), dtype=torch.float16)
            for layer, facet in self.cells
        }
        indices, counts = (chosen // patches).unique_consecutive(return_counts=True)
        within = (chosen % patches).split(counts.tolist())
        pixels = read_ahead(images, indices.tolist(), self._pixels, workers=self.probe.num_workers)
        shown = self.context.progress(pixels, "clustered images", len(indices))
        first = 0
        for batch in batches(enumerate(shown), self.probe.batch_size):
            features, sums = self._features(extractor, [pixels for _, pixels in batch])
            numbers = [number for number, _ in batch]
            places = [within[number] + patches * n for n, number in enumerate(numbers)]
            where = sent(torch.cat(places), self.context.device)
            parts = [unit_vectors(features, cell)[where].half() for cell in found]
            # Together, because the host waits for each fetching.
            sums, *parts = fetched([sums, *parts])
            extractor.check(sums, [images.ids[indices[number]] for number in numbers])
            for values, part in zip(found.values(), parts, strict=True):
                values[first : first + len(part)] = part
            first += len(where)
        return found

    def clusters(
        self, images: ImageSet, centres: Mapping[Cell, Centres]
    ) -> tuple[PatchLabels, dict[Cell, Integer[np.ndarray, "kmeans images patches"]]]:
        """Labels of all images, and the nearest of the centres for each of their patches."""
        extractor, labels = self._extractor(), list[PatchLabels]()
        found: dict[Cell, list[Tensor]] = {cell: [] for cell in centres}
        items = read_ahead(
            images, range(len(images)), self._labelled, workers=self.probe.num_workers
        )
        shown = self.context.progress(items, "scored images", len(images))
        for batch in batches(shown, self.probe.batch_size):
            features, sums = self._features(extractor, [pixels for pixels, _ in batch])
            parts = [
                some.nearest(unit_vectors(features, cell)).int() for cell, some in centres.items()
            ]
            sums, *parts = fetched([sums, *parts])
            ids = images.ids[len(labels) : len(labels) + len(batch)]
            extractor.check(sums, ids)
            labels += [of_patches for _, of_patches in batch]
            for nearest, part in zip(found.values(), parts, strict=True):
                nearest.append(part.unflatten(1, (len(batch), -1)))
        return PatchLabels.joined(labels, self.side**2), {
            cell: torch.cat(nearest, 1).numpy() for cell, nearest in found.items()
        }

    def _extractor(self) -> FeatureExtractor:
        return FeatureExtractor(
            self.context.encoder,
            layers=self.layers,
            facets=self.probe.facets,
            device=self.context.device,
            dtype=self.context.dtype,
        )

    def _features(
        self, extractor: FeatureExtractor, images: Sequence[Float[Tensor, "3 side side"]]
    ) -> tuple[Features, Float[Tensor, "features batch"]]:
        return extractor.unchecked(sent(torch.stack(list(images)), self.context.device))

    def _pixels(self, sample: Sample) -> Float[Tensor, "3 side side"]:
        image, _ = tensors(sample)
        return resized(image, self.size, self.size)

    def _labelled(self, sample: Sample) -> tuple[Float[Tensor, "3 side side"], PatchLabels]:
        _, mask = tensors(sample)
        return self._pixels(sample), PatchLabels.of_mask(mask.numpy(), self.side, self.side)


def unit_vectors(features: Features, cell: Cell) -> Float[Tensor, "patches dim"]:
    """Patches of a batch, row by row, as one block and facet has them, of length 1."""
    layer, facet = cell
    return F.normalize(features[layer][facet].flatten(0, 2), dim=1)
