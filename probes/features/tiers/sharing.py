"""Several processes that encode a training set together, each for the layers that are its own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Float16, Int64, UInt8
from torch import Tensor

from ssl_bench.system.ranks import ALONE, Ranks

# Entries of batches that follow each other.
Chosen = Sequence[Int64[Tensor, "..."]]
Halves = Sequence[Float16[Tensor, "_some rows cols dim"]]


@dataclass(frozen=True)
class Sharing:
    """Every process computes a part of each batch, and gets the whole batch of its own layers.

    What is fitted to a layer is so fitted in one process, to the same numbers in the same order as
    if there were no other.

    Attributes:
        layers: All that are computed.
        by_rank: Those of them that each process gets; a layer may be of several processes.
    """

    ranks: Ranks
    layers: tuple[int, ...]
    by_rank: tuple[tuple[int, ...], ...]

    @classmethod
    def alone(cls, layers: Sequence[int]) -> "Sharing":
        return cls(ALONE, tuple(layers), (tuple(layers),))

    @property
    def own(self) -> tuple[int, ...]:
        """Layers of this process, in the order of all."""
        return self.by_rank[self.ranks.rank]

    @property
    def is_alone(self) -> bool:
        return self.ranks.count == 1

    def part(self, items: int) -> slice:
        """What this process computes of a batch of so many."""
        share = self.ranks.share(items)
        return slice(share.start, share.stop)

    def exchanged(
        self, halves: Halves, labels: UInt8[Tensor, "own height width"], entries: int
    ) -> tuple[Halves, UInt8[Tensor, "{entries} height width"]]:
        """Give away a part of a batch of so many entries, and get the whole of it.

        Args:
            halves: Of this part, by layer; none where labels alone are asked for.
            labels: Of this part, on the same device.
            entries: In the whole batch.

        Returns:
            Features by own layer, and labels, of all entries.
        """
        if self.is_alone:
            return halves, labels
        messages = [
            torch.cat([_bytes(values) for values in (*self._of(halves, layers), labels)])
            for layers in self.by_rank
        ]
        own = self._of(halves, self.own)
        counts = [len(share) for share in self.ranks.shares(entries)]
        an_entry = sum(2 * prod(half.shape[1:]) for half in own) + prod(labels.shape[1:])
        got = self.ranks.exchanged(messages, [count * an_entry for count in counts])
        parts = [
            _unpacked(message, count, (*own, labels))
            for message, count in zip(got, counts, strict=True)
        ]
        *whole, masks = (torch.cat(some) for some in zip(*parts, strict=True))
        return whole, masks

    def agreed(self, chosen: Chosen | None) -> tuple[Chosen, int] | None:
        """What is computed next for the process that asks for most, and how much of it is skipped.

        All processes ask at the same time. What one asks for is the end of what another does,
        which may have got less far before both were killed; None is for one that asks no more, and
        given where none does.
        """
        if self.is_alone:
            return None if chosen is None else (chosen, 0)
        lengths = self.ranks.gathered(None if chosen is None else len(chosen))
        known = [length for length in lengths if length is not None]
        if not known:
            return None
        if known.count(max(known)) < self.ranks.count:
            longest = lengths.index(max(known))
            told = None
            if self.ranks.rank == longest and chosen is not None:
                told = [some.tolist() for some in chosen]
            heard = self.ranks.gathered(told)[longest]
            assert heard is not None
            batches = [torch.tensor(some, dtype=torch.int64) for some in heard]
            return batches, len(batches) - (0 if chosen is None else len(chosen))
        assert chosen is not None
        return chosen, 0

    def _of(self, halves: Halves, layers: Sequence[int]) -> Halves:
        return [halves[self.layers.index(layer)] for layer in layers] if halves else []


def _bytes(values: Tensor) -> UInt8[Tensor, " bytes"]:
    return values.contiguous().view(torch.uint8).flatten()


def _unpacked(
    message: UInt8[Tensor, " bytes"], count: int, like: Sequence[Tensor]
) -> Iterator[Tensor]:
    """Entries of several tensors that follow each other, each as one of `like`, but so many."""
    start = 0
    for one in like:
        size = count * prod(one.shape[1:]) * one.element_size()
        # A copy, which begins where several bytes may be one number.
        part = message[start : start + size].clone().view(one.dtype)
        yield part.view(count, *one.shape[1:])
        start += size
