"""Processes that work together: who has what, without any other process."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from probes.features.tiers.sharing import Sharing
from probes.heads.image_counts import ImageCounts
from ssl_bench.errors import MachineError
from ssl_bench.system.progress import say, show_progress
from ssl_bench.system.ranks import ALONE, Ranks
from tests.support.places import one_of


def test_shares_follow_each_other_and_the_first_has_most():
    assert Ranks(1, 3).shares(7) == [range(3), range(3, 5), range(5, 7)]
    assert Ranks(1, 3).share(7) == range(3, 5)
    assert Ranks(0, 4).shares(2) == [range(1), range(1, 1), range(1, 2), range(2, 2)]
    assert ALONE.share(5) == range(5)


def test_one_process_alone_asks_nobody():
    with ALONE.together():
        assert ALONE.from_first(lambda: 3) == ALONE.after_first(lambda: 3) == 3
        assert ALONE.gathered("word") == ["word"]
        assert ALONE.completed(torch.ones(2), 0, [range(2)]).tolist() == [1, 1]
    with pytest.raises(MachineError, match="mine"), ALONE.together():
        raise MachineError("mine")


def test_a_process_that_is_not_the_first_says_nothing(capsys, monkeypatch):
    one_of(monkeypatch, 2, RANK="1")
    items = [1, 2]

    say("a line")

    assert show_progress(items, "images") is items
    assert capsys.readouterr() == ("", "")


@dataclass(frozen=True)
class Posted(Ranks):
    """One of two processes; messages of the other one are put in its hands, or are zeros."""

    posted: list[Tensor] = field(default_factory=list)
    coming: dict[int, Tensor] = field(default_factory=dict)

    def exchanged(self, messages: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        self.posted.extend(messages)
        came = [self.coming.get(rank, torch.zeros(size).byte()) for rank, size in enumerate(sizes)]
        came[self.rank] = messages[self.rank]
        # Whoever sends an odd number of bytes, what follows begins at an odd one.
        return list(torch.cat([torch.zeros(1).byte(), *came])[1:].split([*sizes]))


@pytest.mark.parametrize("width", [3, 1])
def test_each_process_gets_the_whole_batch_of_its_own_layers(width):
    here, there = Posted(0, 2), Posted(1, 2)
    # Layers 4, 5 and 6 of three images: two are computed here, one there.
    whole = torch.arange(3 * 3 * 2.0).view(3, 3, 1, 1, 2).half()
    one, other = (Sharing(ranks, (4, 5, 6), ((4, 5), (6,))) for ranks in (here, there))
    masks = torch.tensor([0, 0, 7]).byte().view(3, 1, 1).expand(3, 1, width)
    other.exchanged(list(whole[:, 2:]), masks[2:], 3)
    here.coming[1] = there.posted[0]

    halves, labels = one.exchanged(list(whole[:, :2]), masks[:2], 3)

    assert torch.equal(torch.stack([*halves]), whole[:2])
    assert torch.equal(labels, masks)
    assert (one.own, one.part(3), other.own, other.part(3)) == (
        (4, 5),
        slice(0, 2),
        (6,),
        slice(2, 3),
    )


@dataclass(frozen=True)
class Asked(Ranks):
    """One of two processes, of which the other one still wants two batches."""

    calls: list[Any] = field(default_factory=list)

    def gathered(self, value: Any) -> list[Any]:
        self.calls.append(value)
        return [value, 2] if len(self.calls) == 1 else [value, [[3, 1], [2]]]


def test_what_one_process_asks_for_last_is_skipped_by_one_that_has_it():
    chosen = [torch.tensor([3, 1]), torch.tensor([2])]

    asked = Sharing(Asked(0, 2), (0,), ((0,), (0,))).agreed(chosen[1:])

    assert asked is not None
    batches, skipped = asked
    assert [some.tolist() for some in batches] == [[3, 1], [2]]
    assert skipped == 1


def test_counts_of_several_processes_follow_each_other():
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 3, (5, 2, 2, 3, 4), generator=generator)
    # What is true is the same under all heads.
    counts[:, :, :, 2] = counts[:, :1, :1, 2]
    whole, parts = ImageCounts(2, 2, 4), [ImageCounts(2, 2, 4) for _ in range(2)]
    whole.add(counts)
    parts[0].add(counts[:3])
    parts[1].add(counts[3:])

    joined = ImageCounts(2, 2, 4)
    for part in parts:
        joined.extend(part.state())

    assert (joined.total == whole.total).all()
    for source in range(2):
        for value in range(2):
            assert (joined.of(source, value) == whole.of(source, value)).all()
