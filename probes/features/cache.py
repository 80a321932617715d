"""Features of a training set: every view passes the encoder once, and the rest reads memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float16, Int64, UInt8
from torch import Tensor

from probes.features.file import DamagedFeatures, FeatureFile
from probes.features.standardization import Standardization
from probes.features.stream import batches, read_ahead
from probes.features.training import FeaturesInMemory, FeaturesOnDisk, TrainingFeatures
from probes.features.views import TrainingViews, nearest_labels
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.errors import CheckpointError, ConfigurationError
from ssl_bench.evaluation import Progress
from ssl_bench.features import FeatureExtractor
from ssl_bench.layers import Facet
from ssl_bench.system.transfers import fetched

# Takes the features of some entries of the layer of an index.
Put = Callable[[int, Sequence[int], Tensor], None]
# Count up when the same image gives other cached values.
VERSION = 2


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
        say: Gets a line where features of an earlier run are damaged.

    Raises:
        ConfigurationError: the patch does not divide `image_size`.
    """

    extractor: FeatureExtractor
    facet: Facet
    images: ImageSet
    indices: Sequence[int]
    image_size: int
    views: TrainingViews
    label_size: int
    batch_size: int
    workers: int
    progress: Progress
    say: Callable[[str], None]

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
            labels = self._fill(partial(_put, blocks))
            return FeaturesInMemory(self._layers, blocks, labels)
        file = FeatureFile(folder, self._header(), self._shape())
        is_kept = self._is_kept(file)
        labels = self._fill(None) if is_kept else self._write(file)
        again = partial(self._write, file)
        return FeaturesOnDisk(self._layers, labels, file, again, self.say, int(not is_kept))

    def _is_kept(self, file: FeatureFile) -> bool:
        """Whether an earlier run left its features; those that are read are looked at then."""
        try:
            return file.open() is not None
        except DamagedFeatures as error:
            self.say(f"{error}; computing the features again")
            return False

    def _write(self, file: FeatureFile) -> UInt8[Tensor, "entries height width"]:
        with file.writing() as writer:
            return self._fill(writer.put)

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
            **encoder.identity(),
            "layers": self._layers,
            "facet": self.facet,
            "encoder_dtype": str(self.extractor.dtype),
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

    def _fill(self, put: Put | None) -> UInt8[Tensor, "entries height width"]:
        """Read all images; features are computed only where somebody takes them."""
        labels, first = [], 0
        images = read_ahead(self.images, self.indices, self._prepare, workers=self.workers)
        shown = self.progress(images, "training images", len(self.indices))
        for batch in batches(shown, self.batch_size):
            labels += [item.labels for item in batch]
            if put is not None:
                self._compute(put, batch, first)
            first += len(batch)
        return torch.cat(labels)

    def _compute(self, put: Put, batch: Sequence[PreparedImage], first: int) -> None:
        ids, views = [item.image_id for item in batch], self.views.count
        for number in range(views):
            images = torch.stack([item.images[number] for item in batch])
            entries = range(first * views + number, (first + len(batch)) * views, views)
            for index, half in enumerate(self._halves(images, ids)):
                put(index, entries, half)

    def _halves(
        self, images: Float[Tensor, "batch 3 height width"], ids: Sequence[str]
    ) -> list[Float16[Tensor, "batch rows cols dim"]]:
        """Features of a batch by layer in host memory, which waits for them once."""
        features, sums = extract(self.extractor, self.facet, images, ids)
        halves = [features[layer].half() for layer in self._layers]
        finite = torch.stack([half.isfinite().flatten(1).all(1) for half in halves])
        sums, finite, *halves = fetched([sums, finite, *halves])
        check(self.extractor, sums, ids)
        for index, image in finite.logical_not().nonzero().tolist():
            raise CheckpointError(
                f"layer {self._layers[index]} of {self.extractor.encoder.name} gives features "
                f"beyond float16 (65504) for image {ids[image]}; try probe.norm=final"
            )
        return halves


def _put(
    blocks: Float16[Tensor, "layers entries rows cols dim"],
    index: int,
    entries: Sequence[int],
    features: Float16[Tensor, "some rows cols dim"],
) -> None:
    blocks[index, list(entries)] = features


def extract(
    extractor: FeatureExtractor,
    facet: Facet,
    images: Float[Tensor, "batch 3 height width"],
    ids: Sequence[str],
) -> tuple[dict[int, Float[Tensor, "batch rows cols dim"]], Float[Tensor, "layers batch"]]:
    """Features of a batch by layer, and what `check` wants to know of them.

    Raises:
        CheckpointError: they are not finite, where the host need not wait to know.
    """
    features, sums = extractor.unchecked(images)
    if not sums.is_cuda:
        check(extractor, sums, ids)
    return {layer: facets[facet] for layer, facets in features.items()}, sums


def check(
    extractor: FeatureExtractor, sums: Float[Tensor, "layers batch"], ids: Sequence[str]
) -> None:
    """Raise a CheckpointError that names the images if features are not finite."""
    try:
        extractor.check(sums)
    except CheckpointError as error:
        raise CheckpointError(f"{error} (the batch: {', '.join(ids)})") from error


def standardization(
    blocks: Float[Tensor, "layers entries rows cols dim"],
    entries: Int64[Tensor, " chosen"],
    *,
    batch_size: int = 16,
) -> Standardization:
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
    return Standardization(mean.float(), scale.float())
