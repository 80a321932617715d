"""Features of a training set: computed once and kept, or computed whenever they are asked for.

They are in the first of three tiers that has the room: memory, a file, or nowhere ("stream"). From
each come the same numbers, rounded to float16. In this order: what they may take, files of features
and labels, how a batch becomes features, the three tiers, and the pass over the training images.
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import IO, Any, Literal
from zlib import crc32

import numpy as np
import torch
from jaxtyping import Bool, Float, Float16, Int64, Integer, UInt8
from torch import Tensor

from probes.features.stream import batches, extract, fetch_finite, map_ahead, read_ahead
from probes.features.views import TrainingViews, resize_mask
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.errors import MachineError
from ssl_bench.evaluation import ProbeContext
from ssl_bench.features import FeatureExtractor
from ssl_bench.layers import Facet
from ssl_bench.system.device import free_gpu_memory, power_of_two, to_device
from ssl_bench.system.files import atomic_file, open_trusted, remove_orphans
from ssl_bench.system.process import free_host_memory

Tier = Literal["memory", "disk", "stream"]
RequestedTier = Literal["auto", "memory", "disk", "stream"]
GIB = 2**30
# Largest entries of an image that float16 holds as they are, with ten bits for those 2^8 below.
_SMALLEST, _LARGEST = 2.0**-6, 65504.0
# The largest entry of other images, in [1, 2) times a power of two, is brought to this binade.
_BINADE = 2.0**14
_CHECKSUM = np.dtype("<u4")
# What the tail of a file holds for each entry of each layer.
_ENTRY = np.dtype([("checksum", _CHECKSUM), ("scale", "<f4")])
# Batches that are read from a disk before they are asked for.
_AHEAD = 2
# Count up when the same image gives other cached values, or they lie in another order.
VERSION = 4

Half = Float16[Tensor, "batch rows cols dim"]
# Powers of two that bring float16 values back to the size that the encoder gave them.
Scales = Float[Tensor, "layers some"]
# Which values occur in the labels of each entry, 255 among them.
Present = Bool[Tensor, "_entries 256"]
# Entries of batches that follow each other.
Chosen = Sequence[Int64[Tensor, "..."]]
# Takes the labels of some entries.
PutLabels = Callable[[Sequence[int], Tensor], None]


@dataclass(frozen=True)
class StorageLimits:
    """What features may take.

    Attributes:
        tier: "auto": memory if they fit there, else disk if they fit there, else stream.
        memory_gib: Without it half of what is free.
        disk_gib: Likewise.
        folder: On that disk.
    """

    tier: RequestedTier
    memory_gib: float | None
    disk_gib: float | None
    folder: Path

    def choose(self, features: int, labels: int, is_kept: Callable[[], bool]) -> Tier:
        """The tier for so many bytes; features that a file holds already take no more room."""
        if self.tier != "auto":
            return self.tier
        if features + labels <= self.memory:
            return "memory"
        return "disk" if features + labels <= self.disk or is_kept() else "stream"

    @property
    def memory(self) -> float:
        return free_host_memory() / 2 if self.memory_gib is None else self.memory_gib * GIB

    @property
    def disk(self) -> float:
        if self.disk_gib is not None:
            return self.disk_gib * GIB
        there = self.folder.absolute()
        while not there.is_dir() and there != there.parent:
            there = there.parent
        return shutil.disk_usage(there).free / 2

    def said(self, tier: Tier, features: int) -> str:
        """What is told before anything is computed."""
        memory, disk = (f"{room / GIB:.1f} GiB" for room in (self.memory, self.disk))
        return (
            f"features: {features / GIB:.1f} GiB, tier {tier} (may take {memory} of memory, "
            f"{disk} of {self.folder})"
        )


class DamagedFeatures(MachineError):
    """A file does not hold the bytes that were written to it."""


@dataclass(frozen=True)
class FeatureFile:
    """Features by layer and entry on disk, found again only by a run whose header is the same.

    Values in float16 come first, then the CRC-32 and the scale of each entry of each layer, the
    header, and a CRC-32 of these two. That is one file, so that whoever of several writers comes
    last leaves all of his.

    Attributes:
        folder: Where it lies; safe to delete at any time.
        header: Everything the values depend on, as plain JSON types.
        shape: Layers, entries, rows, columns, width.
    """

    folder: Path
    header: Mapping[str, Any]
    shape: tuple[int, ...]

    def open(self) -> "OpenFeatures | None":
        """The features if they were written completely, else None.

        Raises:
            DamagedFeatures: the file has another size, header or checksums than were written, or
                somebody else could have written it.
        """
        expected = len(self._tail(np.zeros(self.shape[:2], _ENTRY)))
        try:
            file = open_trusted(self.path)
            file.seek(self._data_bytes())
            tail = file.read(expected + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise DamagedFeatures(f"{self.path} cannot be read ({error.strerror})") from error
        entries = np.frombuffer(tail, _ENTRY, min(prod(self.shape[:2]), len(tail) // 8))
        if len(tail) != expected or tail != self._tail(entries):
            raise DamagedFeatures(f"{self.path} is not as it was written")
        return OpenFeatures(self, file, entries.reshape(self.shape[:2]))

    @contextmanager
    def writing(self) -> Generator["OpenFeatures"]:
        """Takes features; the file has its name once the block ends without an error.

        Raises:
            MachineError: the disk lacks the room.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_orphans(self.folder)
            with atomic_file(self.path) as file:
                writer = OpenFeatures(self, file, np.zeros(self.shape[:2], _ENTRY))
                _allocate(file, self._data_bytes() + len(self._tail(writer.entries)))
                yield writer
                file.seek(self._data_bytes())
                file.write(self._tail(writer.entries))
        except MachineError:
            raise
        except OSError as error:
            raise MachineError(
                f"cannot keep {self._data_bytes() / 2**30:.1f} GiB of features in {self.folder} "
                f"({error.strerror or error}); choose another folder, or keep none",
                hint=("probe.cache={folder}", "or", "probe.tier=stream"),
            ) from error

    @property
    def path(self) -> Path:
        return self.folder / f"{hashlib.sha256(self._header_bytes()).hexdigest()[:16]}.features"

    def place(self, layer: int, entry: int) -> int:
        """Of the first byte of a layer of an entry; all layers of one lie side by side."""
        return 2 * prod(self.shape[2:]) * (entry * self.shape[0] + layer)

    def _tail(self, entries: np.ndarray) -> bytes:
        content = entries.tobytes() + self._header_bytes()
        return content + np.array(crc32(content), _CHECKSUM).tobytes()

    def _header_bytes(self) -> bytes:
        return json.dumps({**self.header, "shape": self.shape}, indent=1, sort_keys=True).encode()

    def _data_bytes(self) -> int:
        return 2 * prod(self.shape)


@dataclass(frozen=True)
class OpenFeatures:
    """A file that is written or read.

    Checksums are of what is given, not of what the disk made of it. What is compared with them is a
    copy in memory: mapped pages could be other ones when they are used.

    Attributes:
        entries: Checksum and scale of each entry of each layer (layers x entries).
    """

    format: FeatureFile
    file: Any
    entries: np.ndarray

    @property
    def scales(self) -> Float[Tensor, "layers entries"]:
        return torch.from_numpy(self.entries["scale"].astype(np.float32))

    def put(
        self,
        layer: int,
        entries: Sequence[int],
        features: Float16[Tensor, "some rows cols dim"],
        scales: Float[Tensor, " some"],
    ) -> None:
        """Keep some entries of the layer of that index.

        Raises:
            OSError: the disk is full.
        """
        for entry, values in zip(entries, features.contiguous().numpy(), strict=True):
            self.entries["checksum"][layer, entry] = crc32(values)
            self.file.seek(self.format.place(layer, entry))
            self.file.write(values)
        self.entries["scale"][layer, list(entries)] = scales.numpy()

    def read(self, layer: int, entry: int, into: Float16[np.ndarray, "rows cols dim"]) -> None:
        """Fill an array with an entry of the layer of that index.

        Raises:
            DamagedFeatures: the file gives other bytes than were written.
        """
        path = self.format.path
        try:
            self.file.seek(self.format.place(layer, entry))
            count = self.file.readinto(into.data)
        except OSError as error:
            raise DamagedFeatures(f"{path} cannot be read ({error.strerror})") from error
        if count != into.nbytes or crc32(into.data) != self.entries["checksum"][layer, entry]:
            raise DamagedFeatures(f"{path} gives other features than were written")


def _allocate(file: IO[bytes], size: int) -> None:
    """Take the room on the disk now, so that a full one is not found after hours."""
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        # Where the file system cannot do so, writing itself tells.
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise


def label_file(folder: Path, shape: tuple[int, int, int]) -> UInt8[Tensor, "entries height width"]:
    """Labels of all entries, in a file without a name, gone when nobody has them any more.

    Raises:
        MachineError: the folder takes no file, or its disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            # Room that is missing later, behind mapped memory, would end the process.
            _allocate(file, prod(shape))
            return torch.from_numpy(np.memmap(file, np.uint8, "w+", shape=shape))
    except OSError as error:
        raise MachineError(
            f"cannot keep labels in {folder} ({error.strerror or error}); choose another folder",
            hint=("probe.cache={folder}",),
        ) from error


def extract_float16(
    extractor: FeatureExtractor,
    images: Float[Tensor, "batch 3 height width"],
    ids: Sequence[str],
    *,
    fetch: bool = False,
) -> tuple[list[Half], Scales]:
    """Return the features of all layers in float16, and what `undo_scaling` multiplies them by.

    Args:
        extractor: Of one facet.
        images: RGB in [0, 1].
        ids: Of the images, for messages.
        fetch: Bring the features into host memory; the scales are there anyhow.

    Raises:
        CheckpointError: A feature is not finite.
    """
    features, sums = extract(extractor, images, ids)
    pairs = [to_float16(features[layer]) for layer in extractor.layers]
    halves, scales = [half for half, _ in pairs], torch.stack([scale for _, scale in pairs])
    scales, *host = fetch_finite(extractor, sums, ids, [scales, *(halves if fetch else [])])
    return host if fetch else halves, scales


def to_float16(
    features: Float[Tensor, "batch rows cols dim"],
) -> tuple[Half, Float[Tensor, " batch"]]:
    """Round features to float16, those of each image times a power of two where it is needed.

    Float16 has ten bits of precision between 2^-14 and 65504 only. An image whose largest entry is
    below 2^-6 or above 65504 is scaled, which is exact, so that this entry lies near 2^14; others
    stay as they are. The scale depends on nothing but the image, so that it is the same whatever
    the batch, the other blocks and the place where features are kept.

    Returns:
        The rounded features, and the power of two that each image was divided by.
    """
    largest = features.abs().amax((1, 2, 3))
    fits = (largest >= _SMALLEST) & (largest <= _LARGEST) | (largest == 0)
    scales = torch.where(fits, 1.0, power_of_two(largest) / _BINADE)
    return (features / scales[:, None, None, None]).half(), scales


def undo_scaling(
    halves: Float[Tensor, "layers some rows cols dim"], scales: Scales
) -> Float[Tensor, "layers some rows cols dim"]:
    """Undo the scaling of `to_float16`, in float32; return features as they are if none was scaled.

    Args:
        halves: Float16, on any device.
        scales: In host memory.
    """
    if bool((scales == 1).all()):
        return halves
    return halves.float() * to_device(scales, halves.device)[:, :, None, None, None]


@dataclass(frozen=True)
class FeatureBatch:
    """Features and labels of some entries, on the device of the heads."""

    features: Float[Tensor, "layers some rows cols dim"]
    labels: Integer[Tensor, "some height width"]


# Gives the batches of these entries in this order.
Read = Callable[[Chosen], Iterator[FeatureBatch]]


@dataclass(frozen=True)
class StoredFeatures:
    """Features that were computed for this run and are held by it."""

    layers: tuple[int, ...]
    blocks: Float[Tensor, "layers entries rows cols dim"]
    labels: Integer[Tensor, "entries height width"]
    present: Present = field(default_factory=lambda: torch.zeros(0, 256, dtype=torch.bool))
    scales: Float[Tensor, "layers entries"] | None = None

    tier = "memory"
    passes = 1

    def reader(self, layers: Sequence[int], device: torch.device) -> Read:
        """As every tier; a GPU keeps them if they take half of what is free there or less."""
        indices = [self.layers.index(layer) for layer in layers]
        if indices == list(range(indices[0], indices[-1] + 1)):
            # A view where the layers follow each other.
            blocks = self.blocks[indices[0] : indices[-1] + 1]
        else:
            blocks = torch.stack([self.blocks[index] for index in indices])
        if device.type == "cuda" and 2 * blocks.nbytes <= free_gpu_memory(device):
            blocks = blocks.to(device)
        scales = torch.ones(blocks.shape[:2]) if self.scales is None else self.scales[indices]

        def read(chosen: Chosen) -> Iterator[FeatureBatch]:
            for some in chosen:
                halves = to_device(blocks.index_select(1, to_device(some, blocks.device)), device)
                features = undo_scaling(halves, scales[:, some])
                yield FeatureBatch(features, to_device(self.labels[some], device))

        return read


@dataclass
class FeaturesOnDisk:
    """Features in a file, compared with their checksums whenever they are read.

    Damaged ones are said, and all are computed again: nobody knows what else the disk lost.

    Attributes:
        compute: Writes the file anew.
        say: Gets the line about it.
    """

    layers: tuple[int, ...]
    present: Present
    labels: UInt8[Tensor, "entries height width"]
    file: FeatureFile
    compute: Callable[[], object]
    say: Callable[[str], None]
    passes: int
    _reader: OpenFeatures | None = field(default=None, init=False, repr=False)

    tier = "disk"

    def reader(self, layers: Sequence[int], device: torch.device) -> Read:
        """As every tier; an image's layers lie side by side, so that most of it is one reading."""
        indices = [self.layers.index(layer) for layer in layers]

        def read(chosen: Chosen) -> Iterator[FeatureBatch]:
            done = 0
            while done < len(chosen):
                try:
                    found = map_ahead(
                        lambda some: self._read(indices, some),
                        islice(chosen, done, None),
                        workers=1,
                        most=_AHEAD,
                    )
                    for halves, scales in found:
                        labels = to_device(self.labels[chosen[done]], device)
                        done += 1
                        yield FeatureBatch(undo_scaling(to_device(halves, device), scales), labels)
                except DamagedFeatures as error:
                    self._compute_again(error, indices, chosen[done])

        return read

    def _read(
        self, indices: Sequence[int], some: Int64[Tensor, " some"]
    ) -> tuple[Float16[Tensor, "layers some rows cols dim"], Scales]:
        if self._reader is None:
            self._reader = self.file.open()
        # Somebody deleted it.
        if self._reader is None:
            raise DamagedFeatures(f"{self.file.path} is gone")
        found = torch.empty(len(indices), len(some), *self.file.shape[2:], dtype=torch.float16)
        for number, entry in enumerate(some.tolist()):
            for place, index in enumerate(indices):
                self._reader.read(index, entry, found[place, number].numpy())
        return found, self._reader.scales[indices][:, some]

    def _compute_again(
        self, error: DamagedFeatures, indices: Sequence[int], some: Int64[Tensor, " some"]
    ) -> None:
        self.say(f"{error}; computing them again")
        self.compute()
        self.passes += 1
        self._reader = None
        try:
            self._read(indices, some)
        except DamagedFeatures as again:
            raise MachineError(
                f"{again}, right after they were written; choose another folder",
                hint=("probe.cache={folder}",),
            ) from again


@dataclass
class StreamedFeatures:
    """Features that are computed whenever they are asked for, and kept nowhere.

    Attributes:
        compute: Gives the batches of these entries of these layers, on a device.
    """

    layers: tuple[int, ...]
    present: Present
    compute: Callable[[Sequence[int], Chosen, torch.device], Iterator[FeatureBatch]]
    _computed: int = field(default=0, init=False, repr=False)

    tier = "stream"

    @property
    def passes(self) -> int:
        return -(-self._computed // len(self.present))

    def reader(self, layers: Sequence[int], device: torch.device) -> Read:
        def read(chosen: Chosen) -> Iterator[FeatureBatch]:
            for batch in self.compute(layers, chosen, device):
                self._computed += len(batch.labels)
                yield batch

        return read


TrainingFeatures = StoredFeatures | FeaturesOnDisk | StreamedFeatures
"""Features by layer and entry; entry `views * i + v` is view v of image i.

Where an image as a whole has a class, it is one patch with one label. `reader` gives what reads
some layers in the order asked for; `present` says which values occur in the labels of each entry,
255 among them (nothing where each has one); `passes` is how often the views passed the encoder,
rounded up: 0 if a file held the features.
"""


@dataclass(frozen=True)
class TrainingPass:
    """How training images become features and labels.

    Attributes:
        extractor: Of one facet.
        indices: Of the images, within `images`.
        label_size: Height and width of the labels in training.
    """

    context: ProbeContext
    extractor: FeatureExtractor
    images: ImageSet
    indices: Sequence[int]
    image_size: int
    views: TrainingViews
    label_size: int
    batch_size: int
    workers: int

    @property
    def facet(self) -> Facet:
        return self.extractor.facets[0]

    def run(self, room: StorageLimits) -> TrainingFeatures:
        """Compute the features, take them from a file of an earlier run, or get ready to stream.

        All labels are read in any case, so that a file that cannot be is found now.

        Raises:
            CheckpointError: a feature is not finite.
            MachineError: neither memory nor disk has the room.
        """
        side, layers = self.image_size // self.extractor.patch_size, self.extractor.layers
        entries, size = len(self.indices) * self.views.count, self.label_size
        shape = (len(layers), entries, side, side, self.extractor.width(self.facet))
        file = FeatureFile(room.folder, self.header(), shape)
        num_bytes = 2 * prod(shape)
        tier = room.choose(num_bytes, entries * size**2, lambda: self._is_kept(file))
        self.context.say(room.said(tier, num_bytes))
        present = torch.zeros(entries, 256, dtype=torch.bool)

        def put_present(some: Sequence[int], values: UInt8[Tensor, "some rows cols"]) -> None:
            for entry, of_entry in zip(some, values, strict=True):
                present[entry, of_entry.unique().long()] = True

        if tier == "stream":
            self.fill(put_present)
            return StreamedFeatures(layers, present, self.stream)
        if tier == "memory":
            labels = torch.empty(entries, size, size, dtype=torch.uint8)
        else:
            labels = label_file(room.folder, (entries, size, size))

        def put_labels(some: Sequence[int], values: UInt8[Tensor, "some rows cols"]) -> None:
            put_present(some, values)
            labels[list(some)] = values

        if tier == "memory":
            blocks, scales = torch.empty(shape, dtype=torch.float16), torch.empty(shape[:2])

            def put(
                index: int, some: Sequence[int], halves: Half, own: Float[Tensor, " batch"]
            ) -> None:
                blocks[index, list(some)], scales[index, list(some)] = halves, own

            self.fill(put_labels, put)
            return StoredFeatures(layers, blocks, labels, present, scales)

        def write() -> None:
            with file.writing() as writer:
                self.fill(put_labels, writer.put)

        is_kept = self._is_kept(file)
        if is_kept:
            self.fill(put_labels)
        else:
            write()
        say, passes = self.context.say, int(not is_kept)
        return FeaturesOnDisk(layers, present, labels, file, write, say, passes)

    def _is_kept(self, file: FeatureFile) -> bool:
        """Whether an earlier run left its features; those that are read are looked at then."""
        try:
            return file.open() is not None
        except DamagedFeatures as error:
            self.context.say(f"{error}; computing the features again")
            return False

    def stream(
        self,
        layers: Sequence[int],
        chosen: Chosen,
        device: torch.device,
        *,
        allow_scaled: bool = False,
    ) -> Iterator[FeatureBatch]:
        """Decode and encode the batches of these entries, in this order; nothing is kept.

        Rounded to float16, as what is kept is. An image has the same features whatever images pass
        the encoder beside it as far as the library's matrix products see to that, and those of
        torch on a CPU do.

        Args:
            layers: Some of the extractor's.
            chosen: The entries of each batch.
            device: Where the batches are wanted.
            allow_scaled: Give float16 in any case, times a power of two that may differ by
                image: enough where vectors are then brought to length 1.

        Raises:
            CheckpointError: A feature is not finite.
        """
        indices = [self.extractor.layers.index(layer) for layer in layers]

        def prepared(entry: int) -> list[_View]:
            position, view = divmod(entry, self.views.count)
            return self._prepared([view], self.images[self.indices[position]])

        entries = (entry for some in chosen for entry in some.tolist())
        found = map_ahead(prepared, entries, workers=self.workers, most=4 * self.workers)
        for some in chosen:
            ids, images, labels = _stacked(one for (one,) in islice(found, len(some)))
            halves, scales = extract_float16(self.extractor, images, ids)
            features = to_device(torch.stack([halves[index] for index in indices]), device)
            if not allow_scaled:
                features = undo_scaling(features, scales[indices])
            yield FeatureBatch(features, to_device(labels, device))

    def fill(
        self,
        put_labels: PutLabels,
        put: Callable[[int, Sequence[int], Half, Float[Tensor, " batch"]], None] | None = None,
    ) -> None:
        """Read all images, and give labels and features of a batch's views one after the other.

        Features, by the index of their layer and with their scales, are computed only where
        somebody takes them.
        """
        views, start = self.views.count, 0
        prepare = partial(self._prepared, range(views))
        images = read_ahead(self.images, self.indices, prepare, workers=self.workers)
        shown = self.context.progress(images, "training images", len(self.indices))
        for batch in batches(shown, self.batch_size):
            for number in range(views):
                entries = range(start * views + number, (start + len(batch)) * views, views)
                ids, pixels, labels = _stacked(one[number] for one in batch)
                put_labels(entries, labels)
                if put is not None:
                    halves, scales = extract_float16(self.extractor, pixels, ids, fetch=True)
                    for index, (half, own) in enumerate(zip(halves, scales, strict=True)):
                        put(index, entries, half, own)
            start += len(batch)

    def _prepared(self, views: Sequence[int], sample: Sample) -> "list[_View]":
        size = self.label_size
        seen = [self.views.view(sample, number, self.image_size) for number in views]
        return [(sample.image_id, image, resize_mask(mask, size, size)) for image, mask in seen]

    def header(self) -> dict[str, Any]:
        """Everything the features depend on."""
        ids = "\n".join(self.images.ids[index] for index in self.indices)
        return {
            "version": VERSION,
            **self.extractor.encoder.identity(),
            "layers": self.extractor.layers,
            "facet": self.facet,
            "encoder_dtype": str(self.extractor.dtype),
            "transform": f"{self.views} at {self.image_size}, bilinear with antialias",
            "dataset": f"{self.images.name} {self.images.split}",
            "dataset_fingerprint": self.images.fingerprint(),
            "ids_sha256": hashlib.sha256(ids.encode(errors="surrogateescape")).hexdigest(),
        }


# Id, pixels and labels of a view of a training image.
_View = tuple[str, Float[Tensor, "3 size size"], UInt8[Tensor, "label_rows label_cols"]]


def _stacked(
    views: Iterable[_View],
) -> tuple[
    list[str], Float[Tensor, "batch 3 size size"], UInt8[Tensor, "batch label_rows label_cols"]
]:
    ids, images, labels = zip(*views, strict=True)
    return list(ids), torch.stack(images), torch.stack(labels)
