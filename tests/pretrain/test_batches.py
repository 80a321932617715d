"""The images of each step, and the transfer of crops from data workers in limited shared memory."""

import time
from contextlib import closing
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pretrain.batches
from pretrain.batches import (
    BatchChunks,
    derive_step_seed,
    draw_epoch_order,
    load_chunks,
    make_sample_generator,
    plan_workers,
)
from pretrain.checkpoints import ENCODER
from pretrain.crops.multi import MultiCrop
from pretrain.options import TrainOptions
from ssl_bench.data.samples import Sample
from ssl_bench.errors import DataError
from tests.pretrain.plans import CPU, plan_of, state_of
from tests.support.faults import photo_folder
from tests.support.places import one_of

GIB = 2**30
ALBUM = [
    Sample(str(number), picture, label=number % 3)
    for number, picture in enumerate(
        np.random.default_rng(0).integers(0, 256, (11, 20, 28, 3), dtype=np.uint8)
    )
]
MULTI = MultiCrop(num_locals=3)


def batches(images, size=4, crops=MULTI, **more) -> BatchChunks:
    return BatchChunks(images, partial(crops.cut, sizes=crops.sizes(16, 8)), size, seed=3, **more)


def leaves(value) -> list:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    if is_dataclass(value):
        return [leaf for item in fields(value) for leaf in leaves(getattr(value, item.name))]
    return [value]


def same(one, other) -> bool:
    def equal(a, b) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    return all(equal(a, b) for a, b in zip(leaves(one), leaves(other), strict=True))


def test_views_are_grouped_by_size_and_ordered_view_by_view():
    grey = [np.full((20, 20, 3), value, np.uint8) for value in (10, 20, 30, 40)]
    images = [Sample(str(number), image) for number, image in enumerate(grey)]

    large, small = batches(images)[0]

    order = [images[index].image[0, 0, 0] for _, index, _ in batches(images).list_sample_keys(0)]
    assert large.pixels[:, 0, 0, 0].tolist() == order * 2
    assert small.pixels[:, 0, 0, 0].tolist() == order * 3


def test_crops_of_an_image_depend_on_the_epoch_and_not_on_the_batch():
    whole, halves = batches(ALBUM[:4]), batches(ALBUM[:4], num_ranks=2, rank=1)

    large, _ = whole[0]
    second_half, _ = halves[0]

    for view in (0, 1):
        ours, theirs = slice(4 * view + 2, 4 * view + 4), slice(2 * view, 2 * view + 2)
        assert torch.equal(large.pixels[ours], second_half.pixels[theirs])
        assert torch.equal(large.params.factors[ours], second_half.params.factors[theirs])
    # An epoch shows every image once, in another order and other crops.
    first, second = draw_epoch_order(50, 0, 0), draw_epoch_order(50, 0, 1)
    assert sorted(first) == list(range(50))
    assert not np.array_equal(first, second)
    assert make_sample_generator(3, 0, 1).random() != make_sample_generator(3, 1, 1).random()


def test_every_seed_step_and_process_has_its_own_random_numbers():
    places = list(product((0, 1), repeat=3))
    assert len({derive_step_seed(seed, step, rank) for seed, step, rank in places}) == len(places)


@pytest.mark.parametrize("repeats", [1, 3])
def test_parts_and_ranks_divide_a_batch_without_overlap(repeats):
    whole = batches(ALBUM[:8], 8, repeats=repeats).list_sample_keys(1)

    shared = [
        key
        for part in (2, 3)
        for rank in (0, 1)
        for key in batches(
            ALBUM[:8], 8, repeats=repeats, num_micro_batches=2, num_ranks=2, rank=rank
        ).list_sample_keys(part)
    ]

    assert shared == whole


def test_an_epoch_with_repeats_has_the_same_length_and_fewer_images():
    source = batches(ALBUM[:9], repeats=3)

    keys = [key for part in range(3) for key in source.list_sample_keys(part)]

    # An epoch has two batches of four: three images, the last of them only twice.
    first, second = (draw_epoch_order(9, 3, epoch).tolist() for epoch in (0, 1))
    ends = [(0, first[2], 0), (0, first[2], 1)]
    whole = [(0, first[image], repeat) for image in (0, 1) for repeat in range(3)]
    assert keys[:8] == whole + ends
    assert keys[8:] == [(1, second[0], 0), (1, second[0], 1), (1, second[0], 2), (1, second[1], 0)]


@pytest.mark.parametrize("repeats", [1, 3])
def test_used_images_are_those_of_the_batches(repeats):
    source = batches(ALBUM[:9], repeats=repeats)

    for steps in range(6):
        expected = {index for step in range(steps) for _, index, _ in source.list_sample_keys(step)}
        assert {*np.flatnonzero(source.mark_used_images(steps))} == expected


def test_each_repeat_has_new_crops_and_the_first_those_without_repeats():
    (once, _), (thrice, _) = batches(ALBUM[:4])[0], batches(ALBUM[:4], repeats=3)[0]

    first, second, third, of_another = thrice.pixels[:4]

    assert torch.equal(first, once.pixels[0])
    assert torch.equal(of_another, once.pixels[1])
    cuts = {tuple(pixels.flatten().tolist()) for pixels in (first, second, third)}
    assert len(cuts) == 3
    # The crops of runs that older versions started without repeats.
    of_then = np.random.default_rng((1, 3, 5, 2)).random()
    assert make_sample_generator(3, 5, 2, 0).random() == of_then


@pytest.mark.parametrize("chunks", [3, 5])
@pytest.mark.parametrize("crops", [MULTI, MultiCrop(num_locals=0)], ids=["locals", "no locals"])
def test_chunks_are_joined_to_the_bits_of_the_micro_batch(crops, chunks):
    whole = batches(ALBUM, 10, crops, repeats=3, num_micro_batches=2)
    cut = replace(whole, num_chunks=chunks)

    joined = crops.join((cut[number] for number in range(chunks, 2 * chunks)), CPU)

    assert same(joined, whole[1])


def of_dino(**more) -> BatchChunks:
    return BatchChunks(ALBUM, partial(MultiCrop().cut, sizes=(224, 96)), 1024, seed=0, **more)


def test_the_default_run_stays_below_two_gib():
    plan = plan_workers(of_dino(), 16, TrainOptions().shared_memory_gib)

    # Pixels of two large and eight small views, and what is drawn for each of the ten.
    image = 3 * (2 * 224**2 + 8 * 96**2) + 10 * (4 + 4 * 8 + 4 * 4 + 4)
    # 33 pieces of up to 114 images, with eight tensors for each of the two sizes.
    shared = 33 * (114 * image + 4096 * 2 * 8)
    assert (plan.num_workers, plan.num_chunks, plan.shared_bytes) == (16, 9, shared)
    assert plan.shared_bytes < 2 * GIB < 33 * 128 * image
    assert str(plan) == "data workers: 16, up to 1.8 GiB of shared memory, batches in 9 chunks"


@pytest.mark.parametrize(
    ("free", "count", "free_bytes"),
    [(None, 16, None), (GIB, 16, GIB), (10 * 2**20, 3, 10 * 2**20), (2**20, 0, 2**20)],
)
def test_at_most_half_of_the_free_shared_memory_is_used(monkeypatch, free, count, free_bytes):
    monkeypatch.setattr(pretrain.batches, "free_shared_memory", lambda: free)

    plan = plan_workers(of_dino(), 16, 2.0)

    assert (plan.num_workers, plan.free_bytes) == (count, free_bytes)
    assert (plan.shared_bytes > 0) == (count > 0)
    assert plan.shared_bytes <= min(2 * GIB, (free or 4 * GIB) // 2)
    assert ("/dev/shm has" in str(plan)) == (free_bytes is not None)


def test_processes_of_a_machine_share_the_limit(monkeypatch):
    one_of(monkeypatch, 8, LOCAL_WORLD_SIZE="8")

    plan = plan_workers(of_dino(num_ranks=8), 16, 2.0)

    assert plan.shared_bytes < 2 * GIB
    assert str(plan).startswith("data workers: 16 for each of 8 processes, up to ")


def shared_bytes_here() -> int:
    """Return the bytes of shared-memory files that this process and its children have open."""
    me = Path("/proc/self").resolve().name
    found: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = (place / "stat").read_text().rpartition(")")[2].split()[1]
            if me not in (place.name, parent):
                continue
            for opened in (place / "fd").iterdir():
                if "/torch_" in str(opened.readlink()):
                    status = opened.stat()
                    found[status.st_ino] = 512 * status.st_blocks
        except OSError:
            continue
    return sum(found.values())


def test_workers_use_nearly_the_announced_shared_memory_and_no_more():
    crops = MultiCrop(num_locals=2)
    source = BatchChunks(ALBUM * 12, partial(crops.cut, sizes=(112, 48)), len(ALBUM) * 12, seed=0)
    plan = plan_workers(source, 2, 0.01)
    assert plan.num_chunks > 1
    assert plan.shared_bytes < 0.01 * GIB

    most = 0
    with closing(load_chunks(source, plan, range(2), CPU)) as coming:
        for number, _ in enumerate(coming):
            # Workers may be slow on a busy machine.
            end = time.monotonic() + 20 * (number in (0, plan.num_chunks))
            while most <= 0.8 * plan.shared_bytes and time.monotonic() < end:
                time.sleep(0.05)
                most = max(most, shared_bytes_here())
            most = max(most, shared_bytes_here())

    assert 0.8 * plan.shared_bytes < most <= plan.shared_bytes


# Two workers have five pieces, each of which begins 16 pages.
THREE: dict[str, Any] = {"batch_size": 4, "max_steps": 3}
FEW: dict[str, Any] = {"num_workers": 2, "shared_memory_gib": 5 * (16 * 4096 + 8000) / GIB}


def test_a_run_in_chunks_equals_the_run_without_workers(tmp_path, capsys):
    root = photo_folder(tmp_path / "photos", 5)
    plan_of(root, **THREE).run(tmp_path / "alone", device="cpu")
    assert "data workers" not in capsys.readouterr().err

    plan_of(root, **THREE, **FEW).run(tmp_path / "helped", device="cpu")

    alone, helped = ((tmp_path / name / ENCODER).read_bytes() for name in ("alone", "helped"))
    assert alone == helped
    said = capsys.readouterr().err.splitlines()[2]
    assert said.startswith("data workers: 2, up to 0.0003")
    assert said.endswith("GiB of shared memory, batches in 2 chunks")


@pytest.mark.parametrize("workers", [FEW, {}], ids=["two workers", "none"])
def test_a_broken_image_in_a_later_chunk_is_named_or_left_out(tmp_path, workers):
    root = photo_folder(tmp_path / "photos", 5)
    # The last of its epoch's first batch, which two workers cut in two pieces.
    (_, index, _) = batches(ALBUM[:5]).list_sample_keys(0)[-1]
    path = root / f"{index}.jpg"
    path.write_bytes(path.read_bytes()[:200])

    with pytest.raises(DataError, match=path.name):
        plan_of(root, **THREE, **workers).run(tmp_path / "run", device="cpu")

    assert state_of(tmp_path / "run")["step"] == 0
    skipping = plan_of(root, data={"on_bad_image": "skip"}, **THREE, **workers)
    skipping.run(tmp_path / "skipping", device="cpu")
    assert state_of(tmp_path / "skipping")["left_out"] == [index]
