"""Compute the features of training images, and either store them or recompute them in each epoch.

`TrainingPass.run` provides the features in one of three ways: "memory" keeps them in memory, "disk"
writes them to a file that later runs reuse, and "stream" recomputes each batch when it is read. All
three ways round the features to float16 and give equal values.

In this module, an entry is one view (crop) of one training image.
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from io import BufferedReader, BytesIO
from itertools import islice
from math import prod
from pathlib import Path
from typing import IO, Any, Literal
from zlib import crc32

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped, UInt8
from torch import Tensor

from probes.features.stream import (
    Half,
    Scales,
    batched,
    extract_float16,
    map_ahead,
    read_ahead,
    undo_scaling,
)
from probes.features.training_images import ViewTransform, resize_mask
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.errors import MachineError
from ssl_bench.evaluation import ProbeContext, Progress
from ssl_bench.features import FeatureExtractor
from ssl_bench.layers import Facet
from ssl_bench.system.device import free_gpu_memory, to_device
from ssl_bench.system.files import atomic_file, open_trusted, remove_orphans
from ssl_bench.system.output import show_progress
from ssl_bench.system.process import free_host_memory

Tier = Literal["memory", "disk", "stream"]
RequestedTier = Literal["auto", "memory", "disk", "stream"]
GIB = 2**30
VERSION = 5
"""Version of the feature files. Increase it when the stored values or the file layout change."""
_TIER_DESCRIPTIONS = {
    "memory": "stored in memory",
    "disk": "stored on disk",
    "stream": "recomputed in each epoch",
}
# Maximum number of characters of a scale (a number) in the JSON file, with a comma and a space.
_SCALE_CHARACTERS = 26
# Number of batches that are read from the file in advance.
_BATCHES_AHEAD = 2

FeatureTensor = Float[Tensor, "layers entries rows cols dim"]
# Whether each label from 0 to 255 occurs in each entry (view of a training image).
HasLabel = Bool[Tensor, "_entries 256"]
# The entries (indices of views) of each batch.
BatchEntries = Sequence[Int64[Tensor, "..."]]
# Function that stores features. Its arguments are the index of the layer, the entries (indices of
# views), the features, and their scales.
StoreBatch = Callable[[int, Sequence[int], Half, Float[Tensor, " batch"]], None]


@dataclass(frozen=True)
class FeatureBatch:
    """Features and labels of a batch of training views (crops), on the device of the heads."""

    features: Float[Tensor, "layers batch rows cols dim"]
    labels: Shaped[Tensor, "batch height width"]


# Function that takes the entries of each batch, and yields the batches in the same order.
ReadBatches = Callable[[BatchEntries], Iterator[FeatureBatch]]


@dataclass(frozen=True)
class StoredFeatures:
    """Features of training images, stored in memory or in a memory-mapped file.

    An entry is one view (crop) of one training image.

    Attributes:
        layers: Indices of the blocks whose features are in `features`.
        features: Features of all entries, divided by `scales`.
        labels: Label map of each entry.
        has_label: Whether each label from 0 to 255 occurs in each entry. Empty if each entry has a
            single label.
        scales: Factors that `features` must be multiplied by to restore the original features. None
            if all factors are 1.
        tier: Where `features` are stored: "memory" or "disk".
        passes: Number of times that this run has encoded all training images. It is 0 if an earlier
            run has stored the features.
    """

    layers: tuple[int, ...]
    features: FeatureTensor
    labels: Shaped[Tensor, "entries height width"]
    has_label: HasLabel = field(default_factory=lambda: torch.zeros(0, 256, dtype=torch.bool))
    scales: Float[Tensor, "layers entries"] | None = None
    tier: Tier = "memory"
    passes: int = 1

    def reader(self, layers: Sequence[int], device: torch.device) -> ReadBatches:
        """Return a function that reads stored features batch by batch.

        The returned function takes a list with the entries (indices of views) of each batch, and
        yields the batches in the order of this list. In each batch, the layers have the order of
        `layers`. If the features take at most half of the free GPU memory, all of them are copied
        to the GPU when `reader` is called.
        """
        indices = [self.layers.index(layer) for layer in layers]
        first, stop = min(indices), max(indices) + 1
        stored = self.features[first:stop]
        order = [index - first for index in indices]
        is_in_order = order == list(range(stop - first))
        if device.type == "cuda" and 2 * stored.nbytes <= free_gpu_memory(device):
            stored = stored.to(device)
        reads_file = self.tier == "disk" and stored.device.type == "cpu"
        scales = torch.ones(stored.shape[:2]) if self.scales is None else self.scales[indices]

        def select(entries: Int64[Tensor, " batch"]) -> Tensor:
            if reads_file:
                # Unlike `index_select`, this uses a single CPU core and leaves the others to the
                # training of heads.
                selected = torch.from_numpy(stored.numpy().take(entries.numpy(), 1))
            else:
                selected = stored.index_select(1, to_device(entries, stored.device))
            return selected if is_in_order else selected[order]

        def read(batch_entries: BatchEntries) -> Iterator[FeatureBatch]:
            selections = map(select, batch_entries)
            if reads_file:
                selections = map_ahead(
                    select, batch_entries, num_workers=1, max_ahead=_BATCHES_AHEAD
                )
            for entries, selected in zip(batch_entries, selections, strict=True):
                features = undo_scaling(to_device(selected, device), scales[:, entries])
                yield FeatureBatch(features, to_device(self.labels[entries], device))

        return read


@dataclass
class StreamedFeatures:
    """Features of training images that are computed again each time they are read.

    An entry is one view (crop) of one training image.

    Attributes:
        layers: Indices of the blocks whose features can be read.
        has_label: Whether each label from 0 to 255 occurs in each entry.
        compute: Function that yields batches of features and labels, given the layers, the entries
            of each batch, and the device.
    """

    layers: tuple[int, ...]
    has_label: HasLabel
    compute: Callable[[Sequence[int], BatchEntries, torch.device], Iterator[FeatureBatch]]
    _num_computed: int = field(default=0, init=False, repr=False)

    tier = "stream"

    @property
    def passes(self) -> int:
        """Return how many times all training views (crops) have been encoded, rounded up."""
        return -(-self._num_computed // len(self.has_label))

    def reader(self, layers: Sequence[int], device: torch.device) -> ReadBatches:
        """Return a function that computes features batch by batch.

        The returned function takes a list with the entries (indices of views) of each batch, and
        yields the batches in the order of this list. In each batch, the layers have the order of
        `layers`.
        """

        def read(batch_entries: BatchEntries) -> Iterator[FeatureBatch]:
            for batch in self.compute(layers, batch_entries, device):
                self._num_computed += len(batch.labels)
                yield batch

        return read


TrainingFeatures = StoredFeatures | StreamedFeatures
"""Features of all training images, either stored or recomputed.

Entry n * views + v is view (crop) v of the training image number n. If the features are one vector
per image, each entry has one patch and one label.
"""


@dataclass(frozen=True)
class TrainingPass:
    """A pass of training images through the encoder, to compute the features that train heads.

    Attributes:
        context: Inputs of the probe, such as the device.
        extractor: Feature extractor of one facet (kind of feature).
        images: The training set.
        indices: Indices of the training images that are used.
        image_size: Side of the encoder's square input in pixels.
        views: Method that makes the views of an image, such as crops or mirror images.
        label_size: Side of the label maps in pixels.
        batch_size: Number of views in a forward pass of the encoder.
        num_workers: Number of threads that decode images.
    """

    context: ProbeContext
    extractor: FeatureExtractor
    images: ImageSet
    indices: Sequence[int]
    image_size: int
    views: ViewTransform
    label_size: int
    batch_size: int
    num_workers: int

    @property
    def facet(self) -> Facet:
        return self.extractor.facets[0]

    def run(
        self,
        folder: Path,
        tier: RequestedTier = "auto",
        memory_gib: float | None = None,
        disk_gib: float | None = None,
    ) -> TrainingFeatures:
        """Return the features of the training images, either stored or recomputed for each batch.

        This call reads all images to get their labels, so an unreadable image is found before the
        training.

        Args:
            folder: Folder of the feature files.
            tier: Storage of the features. "memory" computes them in this call and keeps them in
                memory. "disk" writes them to a file in this call, unless an earlier run has done
                so. "stream" recomputes them each time they are read. "auto" selects the first of
                these that fits its limit. Features that an earlier run has stored on the disk
                always fit there.
            memory_gib: For "auto", the maximum size of features and labels in memory in GiB. None
                for half of the free memory.
            disk_gib: For "auto", the maximum size of features and labels on the disk in GiB. None
                for half of the free space.

        Raises:
            CheckpointError: A feature is not finite.
            MachineError: The disk is full, or the folder cannot be written.
        """
        side, layers = self.image_size // self.extractor.patch_size, self.extractor.layers
        entries, size = len(self.indices) * self.views.count, self.label_size
        shape = (len(layers), entries, side, side, self.extractor.width(self.facet))
        label_shape = (entries, size, size)
        file = FeatureFile(folder, self.header(), shape)
        load = cache(lambda: file.load(self.context.say, self.context.progress))
        memory = free_host_memory() / 2 if memory_gib is None else memory_gib * GIB
        disk = _free_disk_space(folder) / 2 if disk_gib is None else disk_gib * GIB
        if tier == "auto":
            needed = 2 * prod(shape) + prod(label_shape)
            if needed <= memory:
                tier = "memory"
            else:
                tier = "disk" if needed <= disk or load() is not None else "stream"
        self.context.say(
            f"features: {2 * prod(shape) / GIB:.1f} GiB, {_TIER_DESCRIPTIONS[tier]} (limits: "
            f"{memory / GIB:.1f} GiB of memory, {disk / GIB:.1f} GiB in {folder})"
        )
        has_label = torch.zeros(entries, 256, dtype=torch.bool)
        if tier == "stream":
            self._fill(has_label)
            return StreamedFeatures(layers, has_label, self.stream)
        if tier == "memory":
            labels = torch.empty(label_shape, dtype=torch.uint8)
            features, scales = torch.empty(shape, dtype=torch.float16), torch.empty(shape[:2])

            def store_batch(
                index: int, some: Sequence[int], halves: Half, own: Float[Tensor, " batch"]
            ) -> None:
                features[index, list(some)], scales[index, list(some)] = halves, own

            self._fill(has_label, labels, store_batch)
            return StoredFeatures(layers, features, labels, has_label, scales)
        labels, stored = create_array_file(folder, label_shape, np.uint8), load()
        if stored is None:
            features, scales = file.write(
                lambda store_batch: self._fill(has_label, labels, store_batch)
            )
            return StoredFeatures(layers, features, labels, has_label, scales, "disk")
        self._fill(has_label, labels)
        return StoredFeatures(layers, stored[0], labels, has_label, stored[1], "disk", passes=0)

    def _fill(
        self,
        has_label: HasLabel,
        labels: UInt8[Tensor, "entries size size"] | None = None,
        store_batch: StoreBatch | None = None,
    ) -> None:
        """Read all views of the training images, and write their labels into tensors.

        Args:
            has_label: Tensor with one entry for each view and label. It is set to true if the label
                occurs.
            labels: Tensor for the label map of each view.
            store_batch: Function that stores the features of a batch. Without it, no features are
                computed.
        """
        for entries, batch_labels, halves, scales in self.read_views(
            encode=store_batch is not None
        ):
            for entry, values in zip(entries, batch_labels, strict=True):
                has_label[entry, values.unique().long()] = True
            if labels is not None:
                labels[entries] = batch_labels
            if store_batch is not None:
                for index, (half, own) in enumerate(zip(halves, scales, strict=True)):
                    store_batch(index, entries, half, own)

    def read_views(
        self, *, encode: bool = False
    ) -> Iterator[tuple[list[int], UInt8[Tensor, "batch size size"], list[Half], Scales]]:
        """Yield batches of views (crops) of the training images.

        Images are read in batches. For each batch of images, the first views of all images are
        yielded as one batch, then the second views of all images, and so on. Each yielded batch
        contains the entries (indices of views), the label maps, the features of each layer, and
        factors to multiply the features by.

        Args:
            encode: Whether to compute the features. If false, features and factors are empty.

        Raises:
            CheckpointError: A feature is not finite.
        """
        views, start = self.views.count, 0
        load = partial(self._load_views, range(views))
        images = read_ahead(self.images, self.indices, load, num_workers=self.num_workers)
        shown = self.context.progress(images, "training images", len(self.indices))
        for batch in batched(shown, self.batch_size):
            for number in range(views):
                entries = [*range(start * views + number, (start + len(batch)) * views, views)]
                ids, pixels, labels = _stack_views(image[number] for image in batch)
                halves, scales = list[Half](), torch.empty(0, len(batch))
                if encode:
                    halves, scales = extract_float16(self.extractor, pixels, ids, fetch=True)
                yield entries, labels, halves, scales
            start += len(batch)

    def stream(
        self,
        layers: Sequence[int],
        batch_entries: BatchEntries,
        device: torch.device,
        *,
        allow_scaled: bool = False,
    ) -> Iterator[FeatureBatch]:
        """Decode training images and compute their features batch by batch, without storing them.

        The features are rounded to float16, like stored features. On a CPU, the features of an
        image do not depend on the other images in the batch. On a GPU, the other images may change
        the rounding of matrix products.

        Args:
            layers: Layers whose features are returned. They must be layers of the extractor.
            batch_entries: The entries (indices of views) of each batch.
            device: Device of the batches.
            allow_scaled: Whether features may be returned in float16, scaled by a constant for each
                image. This is sufficient if all vectors are L2-normalised later.

        Raises:
            CheckpointError: A feature is not finite.
        """
        indices = [self.extractor.layers.index(layer) for layer in layers]

        def load(entry: int) -> _View:
            position, number = divmod(entry, self.views.count)
            (view,) = self._load_views([number], self.images[self.indices[position]])
            return view

        entries = (entry for batch in batch_entries for entry in batch.tolist())
        loaded = map_ahead(
            load, entries, num_workers=self.num_workers, max_ahead=4 * self.num_workers
        )
        for batch in batch_entries:
            ids, images, labels = _stack_views(islice(loaded, len(batch)))
            halves, scales = extract_float16(self.extractor, images, ids)
            features = to_device(torch.stack([halves[index] for index in indices]), device)
            if not allow_scaled:
                features = undo_scaling(features, scales[indices])
            yield FeatureBatch(features, to_device(labels, device))

    def _load_views(self, numbers: Sequence[int], sample: Sample) -> "list[_View]":
        size = self.label_size
        views = [self.views.make_view(sample, number, self.image_size) for number in numbers]
        return [(sample.image_id, image, resize_mask(mask, size, size)) for image, mask in views]

    def header(self) -> dict[str, Any]:
        """Return the settings that the features depend on, such as the encoder and the image ids.

        All settings are JSON types.
        """
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


# Image id, pixels and label map of one view of a training image.
_View = tuple[str, Float[Tensor, "3 size size"], UInt8[Tensor, "label_rows label_cols"]]


def _stack_views(
    views: Iterable[_View],
) -> tuple[
    list[str], Float[Tensor, "batch 3 size size"], UInt8[Tensor, "batch label_rows label_cols"]
]:
    ids, images, labels = zip(*views, strict=True)
    return list(ids), torch.stack(images), torch.stack(labels)


class FeatureFile:
    """A `.npy` file with the features of all training images in all layers, and a `.json` file.

    The array is float16 with the dimensions layer, entry (view of an image), row, column and
    channel. The JSON file contains the scales of the features, one checksum of features and scales,
    and a header. The header lists all settings that the features depend on, such as the encoder and
    the image ids. Both file names contain a digest of the header, so runs with other encoders or
    images use other files. The files may be deleted at any time.

    A run verifies the checksum when it opens the files, and then memory-maps the array. If another
    process deletes or replaces the files, the run keeps the old array. Later changes inside the
    array file are not detected. The operating system stops the process with SIGBUS if the array
    file is truncated, if the disk cannot be read, or if another host deletes the file on a network
    file system.

    If several processes write the same features, each process continues with its own array. Later
    runs find the files of the process that finished last. The array and the JSON file may come from
    two different processes. If the arrays of the two processes are not bitwise identical, the
    checksum is wrong, and the next run computes the features again.

    Args:
        folder: Folder of the files.
        header: All settings that the features depend on, as JSON types.
        shape: Shape of the array.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any], shape: tuple[int, ...]) -> None:
        self.folder, self.shape = folder, shape
        self._header = json.dumps({**header, "shape": shape}, sort_keys=True)
        digest = hashlib.sha256(self._header.encode()).hexdigest()[:16]
        self.path, self.sidecar = folder / f"{digest}.npy", folder / f"{digest}.json"
        array_header, fields = BytesIO(), {"descr": "<f2", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(array_header, fields)
        self._array_header = array_header.getvalue()
        self._num_bytes = len(self._array_header) + 2 * prod(shape)

    def load(
        self, say: Callable[[str], None], progress: Progress = show_progress
    ) -> tuple[FeatureTensor, Float[Tensor, "layers entries"]] | None:
        """Verify the checksum of stored features, and memory-map them.

        Args:
            say: Function that prints a message if the files exist but are not used.
            progress: Function that shows the progress of reading the features.

        Returns:
            Features, and factors to multiply them by. None if the files are missing or damaged, or
            if another user could have written them.
        """
        try:
            with open_trusted(self.sidecar) as file:
                text = file.read()
            with open_trusted(self.path) as file:
                scales = np.array(json.loads(text)["scales"], np.float32).reshape(self.shape[:2])
                checksums = self._read_checksums(file, progress)
                if text == self._describe(scales, checksums):
                    return self._map(file), torch.from_numpy(scales)
                reason = "damaged"
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            reason = error.strerror or str(error)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            reason = "damaged"
        say(f"{self.path} is not used ({reason}). Computing the features again")
        return None

    def write(
        self, fill: Callable[[StoreBatch], None]
    ) -> tuple[FeatureTensor, Float[Tensor, "layers entries"]]:
        """Write features to the array file and the JSON file, and memory-map them.

        Args:
            fill: Function that computes all features. It receives a function `store_batch`, and
                must call store_batch(layer index, entries, features, scales) for each layer and
                batch. Entries are indices of views.

        Raises:
            MachineError: The disk is full or the folder cannot be written. If the disk is already
                full, `fill` is not called.
        """
        scales, checksums = np.zeros(self.shape[:2], np.float32), np.zeros(self.shape[:2], "<u4")
        try:
            remove_orphans(self.folder)
            # The array file is renamed to its final name before the JSON file.
            with atomic_file(self.sidecar) as sidecar, atomic_file(self.path) as file:
                _allocate(file, self._num_bytes)
                _allocate(sidecar, len(self._header) + 100 + _SCALE_CHARACTERS * scales.size)
                file.write(self._array_header)

                def store_batch(
                    index: int, entries: Sequence[int], halves: Half, own: Float[Tensor, " batch"]
                ) -> None:
                    for entry, values in zip(entries, halves.contiguous().numpy(), strict=True):
                        checksums[index, entry] = crc32(values)
                        row = index * self.shape[1] + entry
                        file.seek(len(self._array_header) + row * values.nbytes)
                        file.write(values)
                    scales[index, list(entries)] = own.numpy()

                fill(store_batch)
                file.flush()
                features = self._map(file)
                sidecar.write(self._describe(scales, checksums))
                sidecar.truncate()
        except OSError as error:
            raise MachineError(
                f"cannot write {self._num_bytes / GIB:.1f} GiB of features to {self.folder}: "
                f"{error.strerror or error}. Store the features in another folder, or "
                "recompute the features in each epoch",
                hint=("probe.cache={folder}", "or", "probe.tier=stream"),
            ) from error
        return features, torch.from_numpy(scales)

    def _describe(self, scales: np.ndarray, checksums: np.ndarray) -> bytes:
        """Return the content of the JSON file that belongs to the array file.

        The JSON file contains the header, one checksum of all features and scales, and the scales.
        """
        checksum = crc32(scales.tobytes(), crc32(checksums.tobytes()))
        values = f'"checksum": {checksum}, "scales": {json.dumps(scales.tolist())}'
        return f'{{"header": {self._header}, {values}}}\n'.encode()

    def _read_checksums(self, file: BufferedReader, progress: Progress) -> np.ndarray:
        """Read the array file once, and return a checksum (CRC-32) for each layer and entry.

        An entry is a view of a training image.

        Raises:
            ValueError: The size or the array header of the file is not the expected one.
        """
        has_size = os.fstat(file.fileno()).st_size == self._num_bytes
        if not has_size or file.read(len(self._array_header)) != self._array_header:
            raise ValueError
        checksums, values = np.zeros(self.shape[:2], "<u4"), np.empty(self.shape[2:], np.float16)
        for index in progress(range(self.shape[0]), "checksums of stored features", self.shape[0]):
            for entry in range(self.shape[1]):
                file.readinto(values.data)
                checksums[index, entry] = crc32(values.data)
        return checksums

    def _map(self, file: IO[bytes]) -> FeatureTensor:
        array = np.memmap(file, np.float16, "r", len(self._array_header), self.shape)
        with warnings.catch_warnings():
            # torch warns that the array is read-only. Nothing writes to it.
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(array)


def create_array_file(
    folder: Path, shape: tuple[int, ...], dtype: type[np.generic]
) -> Shaped[Tensor, "..."]:
    """Create a memory-mapped array in a temporary file, which is deleted after its last use.

    Raises:
        MachineError: The folder cannot be written, or its disk is full.
    """
    num_bytes = prod(shape) * np.dtype(dtype).itemsize
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            # If space were not reserved, the operating system would stop the process when the disk
            # becomes full while mapped memory is written.
            _allocate(file, num_bytes)
            return torch.from_numpy(np.memmap(file, dtype, "w+", shape=shape))
    except OSError as error:
        raise MachineError(
            f"cannot write a temporary file of {num_bytes / GIB:.1f} GiB to {folder}: "
            f"{error.strerror or error}. Choose another folder",
            hint=("probe.cache={folder}",),
        ) from error


def _allocate(file: IO[bytes], size: int) -> None:
    """Reserve `size` bytes for a file, so that a full disk raises an error at once."""
    # macOS lacks `posix_fallocate`. There, a full disk is noticed when the features are written.
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            # Some file systems cannot reserve space either.
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise


def _free_disk_space(folder: Path) -> int:
    """Return the number of free bytes on the disk of a folder, which need not exist yet."""
    existing = folder.absolute()
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    return shutil.disk_usage(existing).free
