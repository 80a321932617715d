"""Features of a training set: every view passes the encoder once, and the rest reads memory."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64, Integer, UInt8
from torch import Tensor

from probes.feature_file import FeatureFile
from probes.head_bank import Standardisation
from probes.image_stream import batches, read_ahead
from probes.views import Views, nearest_labels
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.errors import CheckpointError, ConfigurationError
from ssl_bench.evaluation import Progress
from ssl_bench.features import Facet, FeatureExtractor

# Count up when the same image gives other cached values.
VERSION = 1


@dataclass(frozen=True)
class TrainingFeatures:
    """Cached features and labels; entry `views * i + v` is view v of image i.

    Where an image as a whole has a class, it is one patch with one label.

    Attributes:
        blocks: Features, float16 where they are those of patches, in host memory or memory-mapped.
        tier: Where the features are.
        passes: How often each view passed the encoder: 0 if a file held the features.
    """

    layers: tuple[int, ...]
    blocks: Float[Tensor, "layers entries rows cols dim"]
    labels: Integer[Tensor, "entries height width"]
    tier: Literal["memory", "disk"]
    passes: int

    def layer_bytes(self) -> int:
        return self.blocks.element_size() * prod(self.blocks.shape[1:])

    def of_layers(self, layers: Sequence[int]) -> Float[Tensor, "chosen entries rows cols dim"]:
        """Some layers, in the order asked for, in memory; a view where that is possible."""
        indices = [self.layers.index(layer) for layer in layers]
        if self.tier == "memory" and indices == list(range(indices[0], indices[-1] + 1)):
            return self.blocks[indices[0] : indices[-1] + 1]
        return torch.stack([self.blocks[index] for index in indices])


@dataclass(frozen=True)
class PreparedImage:
    """All views of one training image."""

    image_id: str
    images: Float[Tensor, "views 3 size size"]
    labels: UInt8[Tensor, "views rows cols"]


@dataclass(frozen=True)
class TrainingPass:
    """How training images become features and labels.

    Attributes:
        indices: Of the images, within `images`.
        label_size: Height and width of the labels in training.

    Raises:
        ConfigurationError: the patch does not divide `image_size`.
    """

    extractor: FeatureExtractor
    facet: Facet
    images: ImageSet
    indices: Sequence[int]
    image_size: int
    views: Views
    label_size: int
    batch_size: int
    workers: int
    progress: Progress

    def __post_init__(self) -> None:
        patch = self.extractor.patch_size
        if self.image_size % patch:
            lower = max(1, self.image_size // patch) * patch
            raise ConfigurationError(
                f"probe.image_size must be a multiple of the patch size {patch}, got "
                f"{self.image_size}; nearest are {lower} and {lower + patch}"
            )

    def run(self, *, memory_gib: float, folder: Path) -> TrainingFeatures:
        """Compute the features, or take them from a file of an earlier run.

        Args:
            memory_gib: What the features may take in memory; beyond it they go to disk.
            folder: Where they go then.

        Raises:
            CheckpointError: a feature is not finite in float16.
            MachineError: neither memory nor disk has the room.
        """
        if 2 * prod(self._shape()) <= memory_gib * 2**30:
            blocks = torch.empty(self._shape(), dtype=torch.float16)
            labels = self._fill(blocks)
            return TrainingFeatures(self._layers, blocks, labels, "memory", 1)
        file = FeatureFile(folder, self._header(), self._shape())
        passes = int(file.load() is None)
        with file.writing() if passes else nullcontext(None) as blocks:
            labels = self._fill(blocks)
        blocks = file.load()
        assert blocks is not None
        return TrainingFeatures(self._layers, blocks, labels, "disk", passes)

    @property
    def _layers(self) -> tuple[int, ...]:
        return self.extractor.layers

    def _shape(self) -> tuple[int, ...]:
        side = self.image_size // self.extractor.patch_size
        entries = len(self.indices) * self.views.count
        return (len(self._layers), entries, side, side, self.extractor.dim)

    def _header(self) -> dict[str, Any]:
        """Everything the features depend on."""
        encoder = self.extractor.encoder
        ids = "\n".join(self.images.ids[index] for index in self.indices)
        return {
            "version": VERSION,
            "checkpoint_sha256": encoder.sha256,
            "layers": list(self._layers),
            "facet": self.facet,
            "encoder_dtype": str(self.extractor.dtype),
            "mean": list(encoder.mean),
            "std": list(encoder.std),
            "transform": f"{self.views} at {self.image_size}, bilinear with antialias",
            "dataset": f"{self.images.name} {self.images.split}",
            "dataset_fingerprint": self.images.fingerprint(),
            "ids_sha256": sha256(ids.encode(errors="surrogateescape")).hexdigest(),
        }

    def _prepare(self, sample: Sample) -> PreparedImage:
        views = [
            self.views.view(sample, number, self.image_size) for number in range(self.views.count)
        ]
        size = self.label_size
        labels = [nearest_labels(mask, size, size) for _, mask in views]
        images = torch.stack([image for image, _ in views])
        return PreparedImage(sample.image_id, images, torch.stack(labels))

    def _fill(self, blocks: Tensor | None) -> UInt8[Tensor, "entries height width"]:
        """Read all images; features are computed only where there is a tensor for them."""
        labels, first = [], 0
        images = read_ahead(self.images, self.indices, self._prepare, workers=self.workers)
        shown = self.progress(images, "training images", len(self.indices))
        for batch in batches(shown, self.batch_size):
            labels += [item.labels for item in batch]
            if blocks is not None:
                self._fill_blocks(blocks, batch, first)
            first += len(batch)
        return torch.cat(labels)

    def _fill_blocks(self, blocks: Tensor, batch: Sequence[PreparedImage], first: int) -> None:
        ids = [item.image_id for item in batch]
        for number in range(self.views.count):
            images = torch.stack([item.images[number] for item in batch])
            features = extract(self.extractor, self.facet, images, ids)
            entries = slice(first * self.views.count + number, None, self.views.count)
            for index, layer in enumerate(self._layers):
                half = features[layer].half()
                blocks[index, entries][: len(batch)] = half.cpu()
                finite = half.isfinite().flatten(1).all(1)
                if not finite.all():
                    raise CheckpointError(
                        f"layer {layer} of {self.extractor.encoder.name} gives features beyond "
                        f"float16 (65504) for image {ids[int(finite.logical_not().nonzero()[0])]}; "
                        "try probe.norm=final"
                    )


def extract(
    extractor: FeatureExtractor,
    facet: Facet,
    images: Float[Tensor, "batch 3 height width"],
    ids: Sequence[str],
) -> dict[int, Float[Tensor, "batch rows cols dim"]]:
    """Features of a batch by layer.

    Raises:
        CheckpointError: they are not finite; the message names the images.
    """
    try:
        features = extractor(images.to(extractor.device, non_blocking=True))
    except CheckpointError as error:
        raise CheckpointError(f"{error} (the batch: {', '.join(ids)})") from error
    return {layer: facets[facet] for layer, facets in features.items()}


def standardisation(
    blocks: Float[Tensor, "layers entries rows cols dim"],
    entries: Int64[Tensor, " chosen"],
    *,
    batch_size: int = 16,
) -> Standardisation:
    """Mean and deviation of each channel over all patches of the chosen entries.

    One pass over them. Images have equally many patches, so the variance is that within images
    plus that between their means.
    """
    means, variances = [], []
    for some in entries.split(batch_size):
        patches = blocks[:, some.to(blocks.device)].float().flatten(2, 3)
        variance, mean = torch.var_mean(patches, 2, correction=0)
        means.append(mean.double())
        variances.append(variance.double())
    by_image, within = torch.cat(means, 1), torch.cat(variances, 1).mean(1)
    mean = by_image.mean(1)
    deviation = (within + by_image.var(1, correction=0)).sqrt()
    # A channel that does not vary in float16 says nothing; dividing would blow up its rounding.
    varies = deviation > 1e-4 * mean.abs()
    scale = torch.where(varies, 1 / deviation.clamp(min=1e-12), 0)
    return Standardisation(mean.float(), scale.float())
