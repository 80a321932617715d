"""Test that each training step uses the correct image crops."""

import os
import signal
import time
from contextlib import closing, suppress
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import product
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pretrain.batches
from pretrain.batches import (
    BatchChunks,
    WorkerPlan,
    derive_step_seed,
    draw_epoch_order,
    load_chunks,
    make_sample_generator,
    plan_workers,
)
from pretrain.crops.multi import MultiCrop
from pretrain.options import TrainOptions
from ssl_bench.data.samples import Sample
from ssl_bench.errors import DataError
from tests.pretrain.plans import CPU, plan_of, state_of
from tests.support.faults import photo_folder
from tests.support.torchrun import set_torchrun_env

GIB = 2**30
ALBUM = [
    Sample(str(number), picture, label=number % 3)
    for number, picture in enumerate(
        np.random.default_rng(0).integers(0, 256, (11, 20, 28, 3), dtype=np.uint8)
    )
]
MULTI = MultiCrop(num_locals=3)


def make_batches(images, size=4, crops=MULTI, **more) -> BatchChunks:
    return BatchChunks(images, partial(crops.cut, sizes=crops.sizes(16, 8)), size, seed=3, **more)


def list_leaves(value) -> list:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in list_leaves(item)]
    if is_dataclass(value):
        return [leaf for item in fields(value) for leaf in list_leaves(getattr(value, item.name))]
    return [value]


def are_equal(one, other) -> bool:
    def equal(a, b) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    return all(equal(a, b) for a, b in zip(list_leaves(one), list_leaves(other), strict=True))


def test_views_are_grouped_by_size_and_ordered_by_view():
    grey = [np.full((20, 20, 3), value, np.uint8) for value in (10, 20, 30, 40)]
    images = [Sample(str(number), image) for number, image in enumerate(grey)]
    large, small = make_batches(images)[0]
    order = [
        images[index].image[0, 0, 0] for _, index, _ in make_batches(images).list_sample_keys(0)
    ]
    assert large.pixels[:, 0, 0, 0].tolist() == order * 2
    assert small.pixels[:, 0, 0, 0].tolist() == order * 3


def test_crops_depend_on_the_epoch_but_not_on_the_batch():
    whole, halves = make_batches(ALBUM[:4]), make_batches(ALBUM[:4], num_ranks=2, rank=1)
    large, _ = whole[0]
    second_half, _ = halves[0]
    for view in (0, 1):
        ours, theirs = slice(4 * view + 2, 4 * view + 4), slice(2 * view, 2 * view + 2)
        assert torch.equal(large.pixels[ours], second_half.pixels[theirs])
        assert torch.equal(large.params.factors[ours], second_half.params.factors[theirs])
    # Every epoch contains each image once, in another order and with other crops.
    first, second = draw_epoch_order(50, 0, 0), draw_epoch_order(50, 0, 1)
    assert sorted(first) == list(range(50))
    assert not np.array_equal(first, second)
    assert make_sample_generator(3, 0, 1).random() != make_sample_generator(3, 1, 1).random()


def test_random_numbers_depend_on_seed_step_and_process():
    seeds = {derive_step_seed(*numbers) for numbers in product((0, 1), repeat=3)}
    assert len(seeds) == 8


@pytest.mark.parametrize("repeats", [1, 3])
def test_micro_batches_and_ranks_divide_a_batch(repeats):
    whole = make_batches(ALBUM[:8], 8, repeats=repeats).list_sample_keys(1)
    shared = [
        key
        for part in (2, 3)
        for rank in (0, 1)
        for key in make_batches(
            ALBUM[:8], 8, repeats=repeats, num_micro_batches=2, num_ranks=2, rank=rank
        ).list_sample_keys(part)
    ]
    assert shared == whole


def test_an_epoch_with_repeats_has_fewer_images():
    source = make_batches(ALBUM[:9], repeats=3)
    keys = [key for part in range(3) for key in source.list_sample_keys(part)]
    # An epoch has two batches of four. The third image occurs only twice.
    first, second = (draw_epoch_order(9, 3, epoch).tolist() for epoch in (0, 1))
    ends = [(0, first[2], 0), (0, first[2], 1)]
    whole = [(0, first[image], repeat) for image in (0, 1) for repeat in range(3)]
    assert keys[:8] == whole + ends
    assert keys[8:] == [(1, second[0], 0), (1, second[0], 1), (1, second[0], 2), (1, second[1], 0)]


@pytest.mark.parametrize("repeats", [1, 3])
def test_the_used_images_are_those_of_all_batches(repeats):
    source = make_batches(ALBUM[:9], repeats=repeats)
    for steps in range(6):
        expected = {index for step in range(steps) for _, index, _ in source.list_sample_keys(step)}
        assert {*np.flatnonzero(source.mark_used_images(steps))} == expected


def test_first_repeats_have_the_usual_crops_and_others_new_ones():
    (once, _), (thrice, _) = make_batches(ALBUM[:4])[0], make_batches(ALBUM[:4], repeats=3)[0]
    first, second, third, of_next_image = thrice.pixels[:4]
    assert torch.equal(first, once.pixels[0])
    assert torch.equal(of_next_image, once.pixels[1])
    cuts = {tuple(pixels.flatten().tolist()) for pixels in (first, second, third)}
    assert len(cuts) == 3
    # Runs of older versions, which had no repeats, continue with the same crops.
    older = np.random.default_rng((1, 3, 5, 2)).random()
    assert make_sample_generator(3, 5, 2, 0).random() == older


@pytest.mark.parametrize("chunks", [3, 5])
@pytest.mark.parametrize("crops", [MULTI, MultiCrop(num_locals=0)], ids=["locals", "no locals"])
def test_joined_chunks_equal_the_micro_batch(crops, chunks):
    whole = make_batches(ALBUM, 10, crops, repeats=3, num_micro_batches=2)
    # A resumed run starts with a later micro-batch.
    joined = crops.collate(load_chunks(whole, WorkerPlan(num_chunks=chunks), range(1, 2), CPU), CPU)
    assert are_equal(joined, whole[1])


def make_dino_batches(**more) -> BatchChunks:
    return BatchChunks(ALBUM, partial(MultiCrop().cut, sizes=(224, 96)), 1024, seed=0, **more)


def test_the_default_run_needs_less_than_two_gib():
    plan = plan_workers(make_dino_batches(), 16, TrainOptions().shared_memory_gib)
    # Two large and eight small views, and the parameters of all ten.
    image = 3 * (2 * 224**2 + 8 * 96**2) + 10 * (4 + 4 * 8 + 4 * 4 + 4)
    # There are 33 chunks of up to 114 images, with eight tensors for each of the two sizes.
    shared = 33 * (114 * image + 4096 * 2 * 8)
    assert (plan.num_workers, plan.num_chunks, plan.shared_bytes) == (16, 9, shared)
    assert plan.shared_bytes < 2 * GIB < 33 * 128 * image
    assert str(plan) == "data workers: 16, up to 1.8 GiB of shared memory, batches in 9 chunks"


@pytest.mark.parametrize(
    ("free", "count", "free_bytes"),
    [(None, 16, None), (GIB, 16, GIB), (10 * 2**20, 3, 10 * 2**20), (2**20, 0, 2**20)],
)
def test_at_most_half_of_the_free_memory_is_used(monkeypatch, free, count, free_bytes):
    monkeypatch.setattr(pretrain.batches, "free_shared_memory", lambda: free)
    plan = plan_workers(make_dino_batches(), 16, 2.0)
    assert (plan.num_workers, plan.free_bytes) == (count, free_bytes)
    assert (plan.shared_bytes > 0) == (count > 0)
    assert plan.shared_bytes <= min(2 * GIB, (free or 4 * GIB) // 2)
    assert ("/dev/shm has" in str(plan)) == (free_bytes is not None)


def test_processes_on_one_machine_share_the_limit(monkeypatch):
    set_torchrun_env(monkeypatch, 8, LOCAL_WORLD_SIZE="8")
    plan = plan_workers(make_dino_batches(num_ranks=8), 16, 2.0)
    assert plan.shared_bytes < 2 * GIB
    assert str(plan).startswith("data workers: 16 for each of 8 processes, up to ")


def count_shared_bytes() -> int:
    own_id, sizes = str(os.getpid()), dict[int, int]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            files = (process / "fd").iterdir() if own_id in (process.name, parent) else ()
            for file in files:
                if "/torch_" in str(file.readlink()):
                    sizes[file.stat().st_ino] = 512 * file.stat().st_blocks
    return sum(sizes.values())


def test_workers_use_the_announced_shared_memory():
    crops = MultiCrop(num_locals=2)
    source = BatchChunks(ALBUM * 12, partial(crops.cut, sizes=(112, 48)), len(ALBUM) * 12, seed=0)
    plan = plan_workers(source, 2, 0.01)
    assert plan.num_chunks > 1
    assert plan.shared_bytes < 0.01 * GIB
    most = 0
    with closing(load_chunks(source, plan, range(2), CPU)) as chunks:
        for number, _ in enumerate(chunks):
            # Workers are slow on a busy machine.
            end = time.monotonic() + 20 * (number in (0, plan.num_chunks))
            while most <= 0.8 * plan.shared_bytes and time.monotonic() < end:
                time.sleep(0.05)
                most = max(most, count_shared_bytes())
            most = max(most, count_shared_bytes())

    assert 0.8 * plan.shared_bytes < most <= plan.shared_bytes


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_to_the_process_group_leaves_data_workers_alive(name):
    source, others = make_batches(ALBUM), active_children()
    plan = plan_workers(source, 1, 0.01)
    with closing(load_chunks(source, plan, range(8), CPU)) as chunks:
        first = next(chunks)
        (worker,) = (child for child in active_children() if child not in others)
        os.kill(worker.pid, getattr(signal, name))

        rest = list(chunks)

    assert len([first, *rest]) == 8 * plan.num_chunks
    assert not any(isinstance(chunk, Exception) for chunk in rest)


# Two workers hold five chunks, each of which has 16 tensors on separate pages.
THREE: dict[str, Any] = {"batch_size": 4, "max_steps": 3}
FEW: dict[str, Any] = {"num_workers": 2, "shared_memory_gib": 5 * (16 * 4096 + 8000) / GIB}


def test_a_run_in_chunks_equals_one_without_workers(tmp_path, capsys):
    root = photo_folder(tmp_path / "photos", 5)
    paths = [plan_of(root, **THREE).run(tmp_path / "without", device="cpu")]
    assert "data workers" not in capsys.readouterr().err
    paths.append(plan_of(root, **THREE, **FEW).run(tmp_path / "with", device="cpu"))
    assert paths[0].read_bytes() == paths[1].read_bytes()
    line = capsys.readouterr().err.splitlines()[2]
    assert line.startswith("data workers: 2, up to 0.0003")
    assert line.endswith("GiB of shared memory, batches in 2 chunks")


@pytest.mark.parametrize("workers", [FEW, {}], ids=["two workers", "none"])
def test_broken_images_in_later_chunks_are_reported_or_left_out(tmp_path, workers):
    root = photo_folder(tmp_path / "photos", 5)
    # It is the last image of the first batch, which two workers read in two chunks.
    (_, index, _) = make_batches(ALBUM[:5]).list_sample_keys(0)[-1]
    path = root / f"{index}.jpg"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match=path.name):
        plan_of(root, **THREE, **workers).run(tmp_path / "run", device="cpu")
    assert state_of(tmp_path / "run")["step"] == 0
    skipping = plan_of(root, data={"on_bad_image": "skip"}, **THREE, **workers)
    skipping.run(tmp_path / "skipping", device="cpu")
    assert state_of(tmp_path / "skipping")["left_out"] == [index]
