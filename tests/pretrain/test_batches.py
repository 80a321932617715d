"""Which images a step sees: shared without rest, repeated where asked, free of worker state."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from pretrain.batches import Batches, Share, epoch_order, in_memory, sample_generator
from pretrain.crops.multi import MultiCrop
from ssl_bench.data.samples import Sample
from ssl_bench.errors import DataError


def pictures(count, seed=0):
    shape = (count, 20, 28, 3)
    return list(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def batches(images, seed=3, batch_size=4, repeats=1, **share):
    crops = MultiCrop(num_locals=3)

    def cut(samples, generators):
        return crops.cut(samples, generators, (16, 8))

    return Batches(images, cut, Share(batch_size, **share), seed, repeats)


def samples_of(images):
    return [Sample(str(number), image) for number, image in enumerate(images)]


def same(one, other):
    return all(
        torch.equal(a.pixels, b.pixels) and torch.equal(a.looks.factors, b.looks.factors)
        for a, b in zip(one, other, strict=True)
    )


def test_views_are_grouped_by_size_and_ordered_view_by_view():
    images = samples_of([np.full((20, 20, 3), value, np.uint8) for value in (10, 20, 30, 40)])

    large, small = batches(images)[0]

    order = [images[index].image[0, 0, 0] for _, index, _ in batches(images).keys(0)]
    assert large.pixels[:, 0, 0, 0].tolist() == order * 2
    assert small.pixels[:, 0, 0, 0].tolist() == order * 3


def test_batches_do_not_depend_on_the_number_of_workers():
    source = batches(samples_of(pictures(9)))

    alone, helped = (
        list(DataLoader(source, batch_size=None, sampler=range(1, 4), num_workers=workers))
        for workers in (0, 2)
    )

    assert all(same(a, b) for a, b in zip(alone, helped, strict=True))
    assert not same(alone[0], alone[2])


def test_an_image_is_cut_alike_in_any_batch_and_differently_in_every_epoch():
    images = samples_of(pictures(4))
    whole, halves = batches(images), batches(images, num_ranks=2, rank=1)

    large, _ = whole[0]
    second_half, _ = halves[0]

    for view in (0, 1):
        ours, theirs = slice(4 * view + 2, 4 * view + 4), slice(2 * view, 2 * view + 2)
        assert torch.equal(large.pixels[ours], second_half.pixels[theirs])
        assert torch.equal(large.looks.factors[ours], second_half.looks.factors[theirs])
    assert sample_generator(3, 0, 1).random() != sample_generator(3, 1, 1).random()


@pytest.mark.parametrize("repeats", [1, 3])
def test_parts_and_ranks_share_a_batch_without_rest_or_overlap(repeats):
    images = samples_of(pictures(8))
    whole = batches(images, batch_size=8, repeats=repeats).keys(1)

    shared = [
        key
        for part in (2, 3)
        for rank in (0, 1)
        for key in batches(
            images, batch_size=8, repeats=repeats, num_parts=2, num_ranks=2, rank=rank
        ).keys(part)
    ]

    assert shared == whole


def test_an_epoch_of_repeats_is_as_long_and_has_fewer_images():
    source = batches(samples_of(pictures(9)), repeats=3)

    keys = [key for part in range(3) for key in source.keys(part)]

    # Two batches of four an epoch: three images, of the last of which there is no third.
    first, second = (epoch_order(9, 3, epoch).tolist() for epoch in (0, 1))
    ends = [(0, first[2], 0), (0, first[2], 1)]
    whole = [(0, first[image], repeat) for image in (0, 1) for repeat in range(3)]
    assert keys[:8] == whole + ends
    assert keys[8:] == [(1, second[0], 0), (1, second[0], 1), (1, second[0], 2), (1, second[1], 0)]


def test_every_repeat_is_cut_anew_and_the_first_as_without_repeats():
    images = samples_of(pictures(4))
    (once, _), (thrice, _) = batches(images)[0], batches(images, repeats=3)[0]

    first, second, third, of_another = thrice.pixels[:4]

    assert torch.equal(first, once.pixels[0])
    assert torch.equal(of_another, once.pixels[1])
    cuts = {tuple(pixels.flatten().tolist()) for pixels in (first, second, third)}
    assert len(cuts) == 3


def test_a_first_repeat_is_drawn_as_in_runs_before_there_were_others():
    of_then = np.random.default_rng((1, 3, 5, 2)).random()

    assert sample_generator(3, 5, 2, 0).random() == of_then
    assert sample_generator(3, 5, 2, 1).random() != of_then


def test_an_image_that_is_repeated_is_opened_once_a_part():
    opened = []

    class Counted(list):
        def __getitem__(self, index):
            opened.append(index)
            return super().__getitem__(index)

    source = batches(Counted(samples_of(pictures(8))), batch_size=8, repeats=3)
    large, _ = source[0]

    order = epoch_order(8, 3, 0)
    assert sorted(opened) == sorted(order[:3])
    assert large.pixels.shape[0] == 16


def test_an_epoch_shows_every_image_once_in_another_order():
    first, second = epoch_order(50, 0, 0), epoch_order(50, 0, 1)

    assert sorted(first) == list(range(50))
    assert not np.array_equal(first, second)


class Album:
    """An image set whose third picture is broken."""

    name, split, class_names, ids = "album", "train", (), ("a", "b", "c")

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 2:
            raise DataError("c.jpg is cut short; replace it")
        return Sample(self.ids[index], pictures(1, seed=index)[0])

    def fingerprint(self):
        return "0"


def test_images_in_memory_are_those_on_disk_and_a_broken_one_is_named():
    album = Album()

    with pytest.raises(DataError, match=r"c\.jpg"):
        in_memory(album)
    assert isinstance(batches(album, batch_size=3)[0], DataError)
    (_, kept) = in_memory(samples_of(pictures(2)))
    assert np.array_equal(kept.image, pictures(2)[1])
