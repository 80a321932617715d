"""Test that parallel processes do not lose results."""

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore
from tests.core.test_results import RECORD
from tests.support.faults import exit_code, fork, make_probe_args

WRITERS = 4


def assert_complete(root: Path, cells: int) -> None:
    store = ResultStore(root)
    found = store.records()
    assert store.unreadable == {}
    assert len(found) == len({record.key() for record in found}) == cells
    assert not list(root.rglob("*.tmp"))


def test_parallel_writers_lose_no_result(workdir):
    def write_thirty(writer: int) -> None:
        for layer in range(30):
            record = replace(RECORD, layer=layer, depth=30, seed=writer % 2)
            ResultStore(Path("results")).save(record, np.full((record.num_images, 3), layer))

    writers = [fork(lambda w=w: write_thirty(w)) for w in range(WRITERS)]

    assert [exit_code(child) for child in writers] == [0] * WRITERS
    assert_complete(Path("results"), 60)
    store = ResultStore(Path("results"))
    for record in store.records():
        kept = store.load_per_image(record)
        assert kept is not None
        assert (kept == record.layer).all()


@pytest.mark.slow
def test_parallel_commands_write_every_result_once(workdir):
    def sweep(layers: str) -> int:
        return main(make_probe_args("pca", "folder", workdir / "photos", "--layer", layers))

    sweeps = [
        fork(lambda n=n: sweep(n), stderr=workdir / f"said{n}") for n in ("0", "1", "0,1", "1,0")
    ]

    assert [exit_code(child) for child in sweeps] == [0] * WRITERS
    assert_complete(Path("results"), 2)


@pytest.mark.slow
def test_killed_writers_leave_no_incomplete_record(workdir):
    def write_for_ever(writer: int) -> None:
        for number in range(10**9):
            record = replace(RECORD, layer=number % 40, depth=40, seed=writer % 2)
            ResultStore(Path("results")).save(record)

    chance = random.Random(0)
    for _ in range(5):
        writers = [fork(lambda w=w: write_for_ever(w)) for w in range(WRITERS)]
        for child in writers:
            time.sleep(0.03 * chance.random())
            os.kill(child, signal.SIGKILL)
        assert [exit_code(child) for child in writers] == [-signal.SIGKILL] * WRITERS

        store = ResultStore(Path("results"))
        found = store.records()
        assert store.unreadable == {}
        assert all(store.load(record.key()) == record for record in found)
