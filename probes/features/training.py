"""Features and labels of a training set, in memory or on disk, for whatever is fitted to them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float16, Int64, Integer
from torch import Tensor

from probes.features.file import DamagedFeatures, FeatureFile, FeatureReader
from ssl_bench.errors import MachineError


@runtime_checkable
class TrainingFeatures(Protocol):
    """Features by layer and entry; entry `views * i + v` is view v of image i.

    Where an image as a whole has a class, it is one patch with one label.

    Attributes:
        tier: Where the features are, "memory" or "disk".
        passes: How often each view passed the encoder: 0 if a file held the features.
    """

    @property
    def layers(self) -> tuple[int, ...]: ...

    @property
    def labels(self) -> Integer[Tensor, "entries height width"]: ...

    @property
    def tier(self) -> str: ...

    @property
    def passes(self) -> int: ...

    def layer_bytes(self) -> int: ...

    def of_layers(self, layers: Sequence[int]) -> Float[Tensor, "chosen entries rows cols dim"]:
        """Some layers, in the order asked for, in memory."""
        ...

    def of_entry(self, entry: int) -> Float[Tensor, "layers rows cols dim"]:
        """All layers of one entry."""
        ...

    def of_patches(
        self, layer: int, chosen: Int64[Tensor, " chosen"]
    ) -> Float[Tensor, "chosen dim"]:
        """Some patches of a layer, counted over all entries and ascending."""
        ...


@dataclass(frozen=True)
class FeaturesInMemory:
    """Features that were computed for this run and are held by it."""

    layers: tuple[int, ...]
    blocks: Float[Tensor, "layers entries rows cols dim"]
    labels: Integer[Tensor, "entries height width"]

    tier = "memory"
    passes = 1

    def layer_bytes(self) -> int:
        return self.blocks.element_size() * prod(self.blocks.shape[1:])

    def of_layers(self, layers: Sequence[int]) -> Float[Tensor, "chosen entries rows cols dim"]:
        """A view where the layers follow each other."""
        indices = [self.layers.index(layer) for layer in layers]
        if indices == list(range(indices[0], indices[-1] + 1)):
            return self.blocks[indices[0] : indices[-1] + 1]
        return torch.stack([self.blocks[index] for index in indices])

    def of_entry(self, entry: int) -> Float[Tensor, "layers rows cols dim"]:
        return self.blocks[:, entry]

    def of_patches(
        self, layer: int, chosen: Int64[Tensor, " chosen"]
    ) -> Float[Tensor, "chosen dim"]:
        return self.blocks[self.layers.index(layer)].flatten(0, 2)[chosen]


@dataclass
class FeaturesOnDisk:
    """Features in a file, compared with their checksums whenever they are read.

    Damaged ones are said, and all are computed again: nobody knows what else the disk lost.

    Attributes:
        compute: Writes the file anew.
        say: Gets the line about it.
    """

    layers: tuple[int, ...]
    labels: Integer[Tensor, "entries height width"]
    file: FeatureFile
    compute: Callable[[], object]
    say: Callable[[str], None]
    passes: int
    _reader: FeatureReader | None = field(default=None, init=False, repr=False)

    tier = "disk"

    def layer_bytes(self) -> int:
        return 2 * prod(self.file.shape[1:])

    def of_layers(self, layers: Sequence[int]) -> Float16[Tensor, "chosen entries rows cols dim"]:
        found = torch.empty(len(layers), *self.file.shape[1:], dtype=torch.float16)
        for number, layer in enumerate(layers):
            for entry in range(self.file.shape[1]):
                self._read(self.layers.index(layer), entry, found[number, entry])
        return found

    def of_entry(self, entry: int) -> Float16[Tensor, "layers rows cols dim"]:
        found = torch.empty(len(self.layers), *self.file.entry_shape, dtype=torch.float16)
        for index in range(len(self.layers)):
            self._read(index, entry, found[index])
        return found

    def of_patches(
        self, layer: int, chosen: Int64[Tensor, " chosen"]
    ) -> Float16[Tensor, "chosen dim"]:
        patches = prod(self.file.entry_shape[:2])
        whole = torch.empty(self.file.entry_shape, dtype=torch.float16)
        entries, counts = (chosen // patches).unique_consecutive(return_counts=True)
        found = []
        for entry, some in zip(entries.tolist(), chosen.split(counts.tolist()), strict=True):
            self._read(self.layers.index(layer), entry, whole)
            found.append(whole.flatten(0, 1)[some - entry * patches])
        return torch.cat(found)

    def _read(self, index: int, entry: int, into: Float16[Tensor, "rows cols dim"]) -> None:
        try:
            self._opened().read(index, entry, into.numpy())
        except DamagedFeatures as error:
            self.say(f"{error}; computing them again")
            self.compute()
            self.passes += 1
            self._reader = None
            self._read_anew(index, entry, into)

    def _read_anew(self, index: int, entry: int, into: Float16[Tensor, "rows cols dim"]) -> None:
        try:
            self._opened().read(index, entry, into.numpy())
        except DamagedFeatures as error:
            raise MachineError(
                f"{error}, right after they were written; choose another folder with "
                "probe.cache=DIR"
            ) from error

    def _opened(self) -> FeatureReader:
        if self._reader is None:
            self._reader = self.file.open()
        # Somebody deleted it.
        if self._reader is None:
            raise DamagedFeatures(f"{self.file.path} is gone")
        return self._reader
