"""Features of a training set: computed once and kept, or computed whenever they are asked for."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float, Float16, UInt8
from torch import Tensor

from probes.features.labels import LabelFacts, LabelFile
from probes.features.stream import ahead, batches, read_ahead
from probes.features.tiers.file import DamagedFeatures, FeatureFile
from probes.features.tiers.halves import HalfFeatures
from probes.features.tiers.room import Room
from probes.features.tiers.training import (
    Chosen,
    FeatureBatch,
    FeaturesInMemory,
    FeaturesOnDisk,
    StreamedFeatures,
    TrainingFeatures,
    feature_bytes,
)
from probes.features.views import TrainingViews, nearest_labels
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.evaluation import Progress
from ssl_bench.features import FeatureExtractor
from ssl_bench.layers import Facet
from ssl_bench.system.transfers import sent

# Takes the features of some entries of the layer of an index.
Put = Callable[[int, Sequence[int], Tensor], None]
# Takes the labels of some entries.
PutLabels = Callable[[Sequence[int], Tensor], None]
# Count up when the same image gives other cached values, or they lie in another order.
VERSION = 3


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
        say: Gets a line on where features are, and where those of an earlier run are damaged.
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

    def run(self, room: Room) -> TrainingFeatures:
        """Compute the features, take them from a file of an earlier run, or get ready to stream.

        All labels are read in any case, so that a file that cannot be is found now.

        Raises:
            CheckpointError: a feature is not finite in float16.
            MachineError: neither memory nor disk has the room.
        """
        shape, size = self._shape(), self.label_size
        entries, features = shape[1], feature_bytes(shape)
        labels = entries * size**2
        tier = room.choose(features, labels, lambda: self._is_kept(self._file(room)))
        self.say(room.said(tier, features))
        facts = LabelFacts.unknown(entries)
        if tier == "memory":
            blocks = torch.empty(shape, dtype=torch.float16)
            labels = torch.empty(entries, size, size, dtype=torch.uint8)
            self._fill(partial(_put, blocks), partial(_put_labels, labels, facts))
            return FeaturesInMemory(self.extractor.layers, blocks, labels, facts)
        if tier == "stream":
            self._fill(None, facts.put)
            return StreamedFeatures(self.extractor.layers, facts, self.stream)
        return self._on_disk(self._file(room), LabelFile(room.folder, (entries, size, size)), facts)

    def stream(
        self, layers: Sequence[int], chosen: Chosen, device: torch.device
    ) -> Iterator[FeatureBatch]:
        """Decode and encode the batches of these entries, in this order; nothing is kept.

        Rounded to float16, as what is kept is. An image has the same features whatever images pass
        the encoder beside it as far as the library's matrix products see to that, and those of
        torch on a CPU do.

        Args:
            layers: Of those of the extractor.
            chosen: Their entries.
            device: Where the batches go.

        Raises:
            CheckpointError: a feature is not finite in float16.
        """
        entries = (entry for some in chosen for entry in some.tolist())
        prepared = ahead(self._entry, entries, workers=self.workers, most=4 * self.workers)
        for some in chosen:
            items = list(islice(prepared, len(some)))
            halves = self._encoder.left(*_view(items, 0))
            features = torch.stack([halves[self.extractor.layers.index(one)] for one in layers])
            yield FeatureBatch(sent(features, device), sent(_labels(items, 0), device))

    def read_labels(self, put: PutLabels) -> None:
        """Give the labels of all entries, those of a batch's views one after the other."""
        self._fill(None, put)

    def _is_kept(self, file: FeatureFile) -> bool:
        """Whether an earlier run left its features; those that are read are looked at then."""
        try:
            return file.open() is not None
        except DamagedFeatures as error:
            self.say(f"{error}; computing the features again")
            return False

    def _file(self, room: Room) -> FeatureFile:
        return FeatureFile(room.folder, self.header(), self._shape())

    def _on_disk(self, file: FeatureFile, labels: LabelFile, facts: LabelFacts) -> FeaturesOnDisk:
        put_labels = partial(_put_labels, labels, facts)

        def write() -> None:
            with file.writing() as writer:
                self._fill(writer.put, put_labels)

        is_kept = self._is_kept(file)
        if is_kept:
            self._fill(None, put_labels)
        else:
            write()
        passes, layers = int(not is_kept), self.extractor.layers
        return FeaturesOnDisk(layers, facts, labels, file, write, self.say, passes)

    @property
    def _encoder(self) -> HalfFeatures:
        return HalfFeatures(self.extractor, self.facet)

    def _shape(self) -> tuple[int, ...]:
        side = self.image_size // self.extractor.patch_size
        entries = len(self.indices) * self.views.count
        layers = len(self.extractor.layers)
        return (layers, entries, side, side, self.extractor.width(self.facet))

    def header(self) -> dict[str, Any]:
        """Everything the features depend on."""
        encoder = self.extractor.encoder
        ids = "\n".join(self.images.ids[index] for index in self.indices)
        return {
            "version": VERSION,
            **encoder.identity(),
            "layers": self.extractor.layers,
            "facet": self.facet,
            "encoder_dtype": str(self.extractor.dtype),
            "transform": f"{self.views} at {self.image_size}, bilinear with antialias",
            "dataset": f"{self.images.name} {self.images.split}",
            "dataset_fingerprint": self.images.fingerprint(),
            "ids_sha256": sha256(ids.encode(errors="surrogateescape")).hexdigest(),
        }

    def _prepare(self, sample: Sample, views: Iterable[int] | None = None) -> PreparedImage:
        wanted = range(self.views.count) if views is None else views
        seen = [self.views.view(sample, number, self.image_size) for number in wanted]
        size = self.label_size
        labels = [nearest_labels(mask, size, size) for _, mask in seen]
        images = torch.stack([image for image, _ in seen])
        return PreparedImage(sample.image_id, images, torch.stack(labels))

    def _entry(self, entry: int) -> PreparedImage:
        """One view of one image."""
        position, view = divmod(entry, self.views.count)
        return self._prepare(self.images[self.indices[position]], [view])

    def _fill(self, put: Put | None, put_labels: PutLabels) -> None:
        """Read all images; features are computed only where somebody takes them."""
        images = read_ahead(self.images, self.indices, self._prepare, workers=self.workers)
        shown = self.progress(images, "training images", len(self.indices))
        views, start = self.views.count, 0
        for batch in batches(shown, self.batch_size):
            for number in range(views):
                entries = range(start * views + number, (start + len(batch)) * views, views)
                put_labels(entries, _labels(batch, number))
                if put is not None:
                    for index, half in enumerate(self._encoder.fetched(*_view(batch, number))):
                        put(index, entries, half)
            start += len(batch)


def _view(
    batch: Sequence[PreparedImage], number: int
) -> tuple[Float[Tensor, "batch 3 size size"], list[str]]:
    """One view of images, and their ids."""
    return torch.stack([item.images[number] for item in batch]), [item.image_id for item in batch]


def _labels(batch: Sequence[PreparedImage], number: int) -> UInt8[Tensor, "batch rows cols"]:
    return torch.stack([item.labels[number] for item in batch])


def _put(
    blocks: Float16[Tensor, "layers entries rows cols dim"],
    index: int,
    entries: Sequence[int],
    features: Float16[Tensor, "some rows cols dim"],
) -> None:
    blocks[index, list(entries)] = features


def _put_labels(
    kept: UInt8[Tensor, "entries height width"] | LabelFile,
    facts: LabelFacts,
    entries: Sequence[int],
    labels: UInt8[Tensor, "some height width"],
) -> None:
    facts.put(entries, labels)
    if isinstance(kept, LabelFile):
        kept.put(entries, labels)
    else:
        kept[list(entries)] = labels
