"""Batches that come in pieces: the same bits as in one, in no more memory than is said."""

import time
from contextlib import closing
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import pretrain.batches
from pretrain.batches import Batches, Share, Workers, arriving, image_bytes, plan_workers
from pretrain.checkpoints import ENCODER, load_state
from pretrain.crops.multi import MultiCrop
from pretrain.crops.plain import PlainCrop
from pretrain.crops.single import SingleCrop
from pretrain.objectives.dino import Dino
from pretrain.optimizers.recipes import AdamW
from pretrain.options import DataOptions, TrainOptions
from pretrain.train import Pretraining
from ssl_bench.data.samples import Sample
from ssl_bench.errors import DataError
from ssl_bench.models import ViTConfig
from tests.support.faults import photo_folder
from tests.support.places import one_of

CPU = torch.device("cpu")
GIB = 2**30
ALBUM = [
    Sample(str(number), picture, label=number % 3)
    for number, picture in enumerate(
        np.random.default_rng(0).integers(0, 256, (11, 20, 28, 3), dtype=np.uint8)
    )
]
MAKERS = {
    "multi": MultiCrop(num_locals=3),
    "large alone": MultiCrop(num_locals=0),
    "plain": PlainCrop(),
    "single": SingleCrop(
        color_jitter=0.3, cutout=4, erasing_probability=0.5, mixup=0.8, cutmix=1.0
    ),
}


def batches(crops, size=11, repeats=1) -> Batches:
    sizes = crops.sizes(16, 8)
    return Batches(ALBUM, partial(crops.cut, sizes=sizes), Share(size), seed=3, repeats=repeats)


def leaves(value) -> list:
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves(item)]
    if is_dataclass(value):
        return [leaf for item in fields(value) for leaf in leaves(getattr(value, item.name))]
    return [value]


def same(one, other) -> bool:
    def equal(a, b) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    return all(equal(a, b) for a, b in zip(leaves(one), leaves(other), strict=True))


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("pieces", [2, 4, 11])
@pytest.mark.parametrize("name", MAKERS)
def test_pieces_are_joined_to_the_bits_of_the_whole(name, pieces, repeats):
    crops = MAKERS[name]
    whole = batches(crops, repeats=repeats)
    cut = replace(whole, pieces=pieces)

    joined = crops.join((cut[number] for number in range(pieces)), CPU)

    assert same(joined, whole[0])
    assert same(crops.finish(joined, CPU), crops.finish(whole[0], CPU))


def test_the_second_part_has_the_pieces_after_those_of_the_first():
    crops = MAKERS["multi"]
    whole = replace(batches(crops), share=Share(10, num_parts=2))
    cut = replace(whole, pieces=3)

    assert same(crops.join([cut[number] for number in (3, 4, 5)], CPU), whole[1])


def of_dino() -> Batches:
    return Batches(ALBUM, partial(MultiCrop().cut, sizes=(224, 96)), Share(1024), seed=0)


def test_the_default_run_stays_below_two_gib():
    plan = plan_workers(of_dino(), 16, TrainOptions().shared_memory_gib)

    # Pixels of two large and eight small views, and what is drawn for each of the ten.
    image, edges = image_bytes(of_dino())
    assert image == 3 * (2 * 224**2 + 8 * 96**2) + 10 * (4 + 4 * 8 + 4 * 4 + 4)
    assert edges == 4096 * 2 * 8
    # 33 pieces of up to 114 images.
    assert (plan.count, plan.pieces, plan.shared_bytes) == (16, 9, 33 * (114 * image + edges))
    assert plan.shared_bytes < 2 * GIB < 33 * 128 * image
    assert str(plan) == ("data workers: 16, up to 1.8 GiB of shared memory, batches in 9 pieces")


@pytest.mark.parametrize(
    ("free", "count", "free_bytes"),
    [(None, 16, None), (4 * GIB, 16, None), (GIB, 16, GIB), (10 * 2**20, 3, 10 * 2**20)],
)
def test_no_more_than_half_of_what_is_free_is_taken(monkeypatch, free, count, free_bytes):
    monkeypatch.setattr(pretrain.batches, "free_shared_memory", lambda: free)

    plan = plan_workers(of_dino(), 16, 2.0)

    assert (plan.count, plan.free_bytes) == (count, free_bytes)
    assert 0 < plan.shared_bytes <= min(2 * GIB, (free or 4 * GIB) // 2)
    assert ("/dev/shm has" in str(plan)) == (free_bytes is not None)


def test_where_nothing_can_be_shared_the_process_reads_itself(monkeypatch):
    monkeypatch.setattr(pretrain.batches, "free_shared_memory", lambda: 2**20)

    assert plan_workers(of_dino(), 16, 2.0) == Workers(asked=16, free_bytes=2**20)
    assert plan_workers(of_dino(), 0, 2.0) == Workers()


def test_processes_of_a_machine_share_what_there_is(monkeypatch):
    one_of(monkeypatch, 8, LOCAL_WORLD_SIZE="8")

    plan = plan_workers(replace(of_dino(), share=Share(1024, 1, 0, 8)), 16, 2.0)

    assert plan.shared_bytes < 2 * GIB
    assert str(plan).startswith("data workers: 16 for each of 8 processes, up to ")


def shared_bytes_here() -> int:
    """What this process and its children hold of files in shared memory, each counted once."""
    me = str(Path("/proc/self").resolve().name)
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


def test_workers_hold_no_more_than_is_said_and_nearly_that():
    crops = MultiCrop(num_locals=2)
    source = Batches(
        ALBUM * 12, partial(crops.cut, sizes=(112, 48)), Share(len(ALBUM) * 12), seed=0
    )
    plan = plan_workers(source, 2, 0.01)
    assert plan.pieces > 1
    assert plan.shared_bytes < 0.01 * GIB

    most, pieces = 0, []
    with closing(arriving(source, plan, range(3), CPU)) as coming:
        for number, piece in enumerate(coming):
            pieces = [piece]
            end = time.monotonic() + 20 * (number in (0, plan.pieces))
            time.sleep(0.4 * (number in (0, plan.pieces)))
            most = max(most, shared_bytes_here())
            # A worker of a busy machine takes its time.
            while most <= 0.8 * plan.shared_bytes and time.monotonic() < end:
                time.sleep(0.1)
                most = max(most, shared_bytes_here())

    assert pieces
    assert 0.8 * plan.shared_bytes < most <= plan.shared_bytes


def plan_of(root: Path, **train) -> Pretraining:
    options = {"batch_size": 4, "max_steps": 3, "num_workers": 0, "seed": 3, **train}
    return Pretraining(
        model=ViTConfig(image_size=16, patch_size=8, dim=24, depth=1, num_heads=2),
        objective=Dino(out_dim=32, hidden_dim=16, bottleneck_dim=8, crops=MultiCrop(num_locals=2)),
        optimizer=AdamW(lr=0.05),
        data=DataOptions(root=str(root)),
        train=TrainOptions(**options),
    )


# Two workers have five pieces, each of which begins 16 pages.
FEW = {"num_workers": 2, "shared_memory_gib": 5 * (16 * 4096 + 8000) / GIB}


def test_a_run_in_pieces_is_the_run_without_workers_and_says_what_it_takes(tmp_path, capsys):
    root = photo_folder(tmp_path / "photos", 5)
    plan_of(root).run(tmp_path / "alone", device="cpu")
    assert "data workers" not in capsys.readouterr().err

    plan_of(root, **FEW).run(tmp_path / "helped", device="cpu")

    alone, helped = ((tmp_path / name / ENCODER).read_bytes() for name in ("alone", "helped"))
    assert alone == helped
    said = capsys.readouterr().err.splitlines()[1]
    assert said.startswith("data workers: 2, up to 0.0003")
    assert said.endswith("GiB of shared memory, batches in 2 pieces")


def test_a_picture_that_breaks_a_later_piece_is_named_and_all_is_saved(tmp_path):
    root = photo_folder(tmp_path / "photos", 5)
    # The last of its epoch's first batch, which two workers cut in two pieces.
    (_, index, _) = Batches(ALBUM[:5], lambda *_: None, Share(4), seed=3).keys(0)[-1]
    path = root / f"{index}.jpg"
    path.write_bytes(path.read_bytes()[:200])

    with pytest.raises(DataError, match=path.name):
        plan_of(root, **FEW).run(tmp_path / "run", device="cpu")

    assert load_state(tmp_path / "run", CPU)[0]["step"] == 0
