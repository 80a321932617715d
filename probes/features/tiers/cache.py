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
from probes.features.stream import ahead, read_ahead
from probes.features.tiers.file import DamagedFeatures, FeatureFile
from probes.features.tiers.halves import HalfFeatures
from probes.features.tiers.room import Room, Tier
from probes.features.tiers.sharing import Chosen, Halves, Sharing
from probes.features.tiers.training import (
    FeatureBatch,
    FeaturesInMemory,
    FeaturesOnDisk,
    StreamedFeatures,
    TrainingFeatures,
    feature_bytes,
)
from probes.features.views import TrainingViews, nearest_labels
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.errors import MachineError
from ssl_bench.evaluation import Progress
from ssl_bench.features import FeatureExtractor
from ssl_bench.layers import Facet
from ssl_bench.system.ranks import Ranks, processes_here
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
        sharing: Which processes do it together.
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
    sharing: Sharing

    def run(self, room: Room) -> TrainingFeatures:
        """Compute the features, take them from a file of an earlier run, or get ready to stream.

        All labels are read in any case, so that a file that cannot be is found now.

        Raises:
            CheckpointError: a feature is not finite in float16.
            MachineError: neither memory nor disk has the room.
        """
        shape, size = self._shape(), self.label_size
        entries = shape[1]
        # Those of all processes, whose memory and disk may be of one machine.
        features = feature_bytes((len(self._layers), *shape[1:]))
        masks = entries * size**2 * processes_here()

        def choose() -> Tier:
            return room.choose(features, masks, lambda: self._is_kept(self._file(room)))

        tier = self._ranks.from_first(choose)
        self.say(room.said(tier, features))
        facts = LabelFacts.unknown(entries)
        if tier == "memory":
            blocks = torch.empty(shape, dtype=torch.float16)
            labels = torch.empty(entries, size, size, dtype=torch.uint8)
            self._fill(partial(_put, blocks), partial(_put_labels, labels, facts))
            return FeaturesInMemory(self.sharing.own, blocks, labels, facts)
        if tier == "stream":
            self._fill(None, facts.put)
            return StreamedFeatures(self.sharing, facts, self.stream)
        return self._on_disk(self._file(room), LabelFile(room.folder, (entries, size, size)), facts)

    def stream(
        self, layers: Sequence[int], chosen: Chosen, device: torch.device
    ) -> Iterator[FeatureBatch]:
        """Decode and encode the batches of these entries, in this order; nothing is kept.

        Rounded to float16, as what is kept is. An image has the same features whatever images pass
        the encoder beside it as far as the library's matrix products see to that, and those of
        torch on a CPU do.

        Args:
            layers: Of those that are this process's own.
            chosen: The same in all processes.
            device: Where the batches go.

        Raises:
            CheckpointError: a feature is not finite in float16.
        """
        own = [some[self.sharing.part(len(some))] for some in chosen]
        entries = (entry for some in own for entry in some.tolist())
        prepared = ahead(self._entry, entries, workers=self.workers, most=4 * self.workers)
        for some, part in zip(chosen, own, strict=True):
            items = list(islice(prepared, len(part)))
            ids = [item.image_id for item in items]
            halves: Halves = self._encoder.left(self._images_of(items, 0), ids)
            labels = sent(self._labels_of(items, 0), self.extractor.device)
            halves, labels = self.sharing.exchanged(halves, labels, len(some))
            asked = [halves[self.sharing.own.index(layer)] for layer in layers]
            features = torch.stack(asked) if asked else labels.new_empty(0, *labels.shape, 0).half()
            yield FeatureBatch(sent(features, device), sent(labels, device))

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

        def write_again() -> None:
            if not self.sharing.is_alone:
                file.path.unlink(missing_ok=True)
                raise MachineError(f"{file.path} was damaged and is deleted now; start again")
            write()

        is_kept = all(self._ranks.gathered(self._is_kept(file)))
        if is_kept:
            self._fill(None, put_labels)
        else:
            write()
        passes = int(not is_kept)
        return FeaturesOnDisk(self.sharing.own, facts, labels, file, write_again, self.say, passes)

    @property
    def _encoder(self) -> HalfFeatures:
        return HalfFeatures(self.extractor, self.facet)

    @property
    def _ranks(self) -> Ranks:
        return self.sharing.ranks

    @property
    def _layers(self) -> tuple[int, ...]:
        return self.extractor.layers

    def _shape(self) -> tuple[int, ...]:
        side = self.image_size // self.extractor.patch_size
        entries = len(self.indices) * self.views.count
        return (len(self.sharing.own), entries, side, side, self.extractor.width(self.facet))

    def header(self) -> dict[str, Any]:
        """Everything the features of own layers depend on."""
        encoder = self.extractor.encoder
        ids = "\n".join(self.images.ids[index] for index in self.indices)
        return {
            "version": VERSION,
            **encoder.identity(),
            "layers": self.sharing.own,
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
        count, at_once = len(self.indices), self.batch_size * self._ranks.count
        groups = [range(count)[first : first + at_once] for first in range(0, count, at_once)]
        parts = [group[self.sharing.part(len(group))] for group in groups]
        indices = [self.indices[position] for part in parts for position in part]
        images = read_ahead(self.images, indices, self._prepare, workers=self.workers)
        shown = iter(self.progress(images, "training images", len(indices)))
        for group, part in zip(groups, parts, strict=True):
            batch = list(islice(shown, len(part)))
            for number in range(self.views.count):
                self._pass(batch, number, group, put, put_labels)

    def _pass(
        self,
        batch: Sequence[PreparedImage],
        number: int,
        group: range,
        put: Put | None,
        put_labels: PutLabels,
    ) -> None:
        """One view of a batch, of which this process has a part."""
        halves: Halves = []
        if put is not None:
            ids = [item.image_id for item in batch]
            halves = self._encoder.fetched(self._images_of(batch, number), ids)
        labels = self._labels_of(batch, number)
        halves, labels = self.sharing.exchanged(halves, labels, len(group))
        views = self.views.count
        entries = range(group.start * views + number, group.stop * views, views)
        put_labels(entries, labels)
        if put is not None:
            for index, half in enumerate(halves):
                put(index, entries, half)

    def _images_of(
        self, batch: Sequence[PreparedImage], number: int
    ) -> Float[Tensor, "batch 3 size size"]:
        """One view of images, of which there may be none."""
        none = torch.empty(0, 3, self.image_size, self.image_size)
        return torch.stack([item.images[number] for item in batch]) if batch else none

    def _labels_of(
        self, batch: Sequence[PreparedImage], number: int
    ) -> UInt8[Tensor, "batch rows cols"]:
        none = torch.empty(0, self.label_size, self.label_size, dtype=torch.uint8)
        return torch.stack([item.labels[number] for item in batch]) if batch else none


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
