"""Features and labels of a training set, wherever they are, for whatever is fitted to them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float16, Int64, Integer
from torch import Tensor

from probes.features.labels import LabelFacts, LabelFile
from probes.features.stream import ahead
from probes.features.tiers.file import DamagedFeatures, FeatureFile, FeatureReader
from ssl_bench.errors import MachineError
from ssl_bench.system.device import free_memory
from ssl_bench.system.transfers import sent

# Batches that are read from a disk before they are asked for.
_AHEAD = 2


@dataclass(frozen=True)
class FeatureBatch:
    """Features and labels of some entries, on the device of the heads."""

    features: Float[Tensor, "layers some rows cols dim"]
    labels: Integer[Tensor, "some height width"]


# Entries of batches that follow each other.
Chosen = Sequence[Int64[Tensor, "..."]]
# Gives the batches of these entries in this order.
Read = Callable[[Chosen], Iterator[FeatureBatch]]


@runtime_checkable
class TrainingFeatures(Protocol):
    """Features by layer and entry; entry `views * i + v` is view v of image i.

    Where an image as a whole has a class, it is one patch with one label.

    Attributes:
        facts: Which classes the labels of each entry hold; nothing where each has one.
        tier: Where the features are: "memory", "disk", or nowhere but in the "stream".
        passes: How often the views passed the encoder, rounded up: 0 if a file held the features.
    """

    @property
    def layers(self) -> tuple[int, ...]: ...

    @property
    def facts(self) -> LabelFacts: ...

    @property
    def tier(self) -> str: ...

    @property
    def passes(self) -> int: ...

    def of_layers(self, layers: Sequence[int], device: torch.device) -> Read:
        """What reads some layers, in the order asked for."""
        ...


@dataclass(frozen=True)
class FeaturesInMemory:
    """Features that were computed for this run and are held by it."""

    layers: tuple[int, ...]
    blocks: Float[Tensor, "layers entries rows cols dim"]
    labels: Integer[Tensor, "entries height width"]
    facts: LabelFacts = field(default_factory=lambda: LabelFacts.unknown(0))

    tier = "memory"
    passes = 1

    def of_layers(self, layers: Sequence[int], device: torch.device) -> Read:
        """As every tier; a GPU keeps them if they take half of what is free there or less."""
        blocks = self._blocks(layers)
        if device.type == "cuda" and 2 * blocks.nbytes <= free_memory(device):
            blocks = blocks.to(device)

        def read(chosen: Chosen) -> Iterator[FeatureBatch]:
            for some in chosen:
                features = blocks.index_select(1, sent(some, blocks.device))
                yield FeatureBatch(sent(features, device), sent(self.labels[some], device))

        return read

    def _blocks(self, layers: Sequence[int]) -> Float[Tensor, "chosen entries rows cols dim"]:
        """A view where the layers follow each other."""
        indices = [self.layers.index(layer) for layer in layers]
        if indices == list(range(indices[0], indices[-1] + 1)):
            return self.blocks[indices[0] : indices[-1] + 1]
        return torch.stack([self.blocks[index] for index in indices])


@dataclass
class FeaturesOnDisk:
    """Features in a file, compared with their checksums whenever they are read.

    Damaged ones are said, and all are computed again: nobody knows what else the disk lost.

    Attributes:
        compute: Writes the file anew.
        say: Gets the line about it.
    """

    layers: tuple[int, ...]
    facts: LabelFacts
    labels: LabelFile
    file: FeatureFile
    compute: Callable[[], object]
    say: Callable[[str], None]
    passes: int
    _reader: FeatureReader | None = field(default=None, init=False, repr=False)

    tier = "disk"

    def of_layers(self, layers: Sequence[int], device: torch.device) -> Read:
        """As every tier; an image's layers lie side by side, so that most of it is one reading."""
        indices = [self.layers.index(layer) for layer in layers]

        def read(chosen: Chosen) -> Iterator[FeatureBatch]:
            done = 0
            while done < len(chosen):
                try:
                    found = ahead(
                        lambda some: self._read(indices, some),
                        islice(chosen, done, None),
                        workers=1,
                        most=_AHEAD,
                    )
                    for features in found:
                        labels = sent(self.labels.of(chosen[done]), device)
                        done += 1
                        yield FeatureBatch(sent(features, device), labels)
                except DamagedFeatures as error:
                    self._compute_again(error, indices, chosen[done])

        return read

    def _read(
        self, indices: Sequence[int], some: Int64[Tensor, " some"]
    ) -> Float16[Tensor, "layers some rows cols dim"]:
        reader = self._opened()
        found = torch.empty(len(indices), len(some), *self.file.entry_shape, dtype=torch.float16)
        for number, entry in enumerate(some.tolist()):
            for place, index in enumerate(indices):
                reader.read(index, entry, found[place, number].numpy())
        return found

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
                f"{again}, right after they were written; choose another folder with "
                "probe.cache=DIR"
            ) from again

    def _opened(self) -> FeatureReader:
        if self._reader is None:
            self._reader = self.file.open()
        # Somebody deleted it.
        if self._reader is None:
            raise DamagedFeatures(f"{self.file.path} is gone")
        return self._reader


@dataclass
class StreamedFeatures:
    """Features that are computed whenever they are asked for, and kept nowhere.

    Attributes:
        compute: Gives the batches of these entries of these layers, on a device.
    """

    layers: tuple[int, ...]
    facts: LabelFacts
    compute: Callable[[Sequence[int], Chosen, torch.device], Iterator[FeatureBatch]]
    _computed: int = field(default=0, init=False, repr=False)

    tier = "stream"

    @property
    def passes(self) -> int:
        return -(-self._computed // len(self.facts.present))

    def of_layers(self, layers: Sequence[int], device: torch.device) -> Read:
        def read(chosen: Chosen) -> Iterator[FeatureBatch]:
            for batch in self.compute(layers, chosen, device):
                self._computed += len(batch.labels)
                yield batch

        return read


def feature_bytes(shape: Sequence[int]) -> int:
    """Of float16 features."""
    return 2 * prod(shape)
