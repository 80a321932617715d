"""Faults 37 to 41, 47, 49 and 51: hubs, caches, output folders, data workers, devices."""

import importlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import timm  # noqa: F401 - its seconds of import are no part of any test
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from pretrain.checkpoints import load_state
from pretrain.objectives.dino import DinoLearner
from ssl_bench.cli.__main__ import main
from tests.support.faults import (
    encoder_file,
    exit_code,
    fails,
    fork,
    picture,
    pretraining,
    probing,
    records,
    voc,
)

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "uri",
    [
        "torchhub:facebookresearch/dino:dino_vits16",
        "timm:vit_tiny_patch16_224.augreg_in21k",
        "hf-hub:timm/vit_small_patch16_224.dino",
    ],
)
@pytest.mark.parametrize("line", ["refuses", pytest.param("hangs", marks=pytest.mark.slow)])
def test_fault_37_a_model_of_a_hub_fails_within_five_seconds_offline(
    place, capsys, monkeypatch, uri, line
):
    monkeypatch.setenv("TORCH_HOME", str(place / "torch"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place / "hf"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1] if line == 'hangs' else 9}"
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, address)
        words = probing("pca", "folder", place / "photos", checkpoint=uri)
        # What is promised is how long the network is waited for, not how fast a busy machine is.
        importlib.import_module("timm")
        start = time.monotonic() - time.process_time()

        said = fails(capsys, words, 4)

    assert time.monotonic() - time.process_time() - start < 5
    assert "demo:skip`" in said
    assert "local-dir:MODEL_FOLDER`" in said


def test_fault_38_stale_features_on_disk_are_computed_again(place):
    base = voc(place)

    def found(out: str, cache: str = "cache") -> set[tuple[str, float | None]]:
        small = ["probe.tier=disk", f"probe.cache={place / cache}", "--out", out]
        assert main(probing("segmentation", "voc2012", place, *small)) == 0
        return {(record.metric, record.value) for record in records(out)}

    before = found("before")
    encoder_file(place / "encoder.safetensors", seed=1)
    other = found("weights")
    assert other == found("fresh weights", "empty") != before
    picture(99).save(base / "JPEGImages/t1.jpg", quality=90)
    assert found("images") == found("fresh images", "emptier") != other


@pytest.mark.parametrize("out", ["a_file/results", "/proc/results"])
def test_fault_39_an_output_folder_is_checked_before_the_model_is_loaded(place, capsys, out):
    (place / "a_file").touch()
    # If the model were loaded first, the command would complain about this file instead.
    (place / "encoder.safetensors").unlink()

    words = probing("pca", "folder", place / "photos", "--out", out)
    assert "`--out " in fails(capsys, words, 5)
    assert out in fails(capsys, pretraining(place / "photos", out), 5)


def test_fault_39_a_closed_pipe_is_no_error(place):
    assert main(probing("pca", "folder", place / "photos", "--layer", "0,1")) == 0
    reading, writing = os.pipe()
    os.close(reading)

    def into_the_pipe() -> int:
        sys.stdout = os.fdopen(writing, "w", buffering=1)
        return main(["table", "--format", "csv"])

    child = fork(into_the_pipe, stderr=place / "said")
    os.close(writing)

    assert exit_code(child) == 0
    assert (place / "said").read_text() == ""


def kill_worker_before(usual: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that kills a data worker and then calls this one."""

    def fatal(*arguments: Any, **named: Any) -> Any:
        for worker in active_children()[:1]:
            worker.kill()
        # Let the signal handler run. Waiting for the worker itself would hide its death from torch.
        time.sleep(0.2)
        return usual(*arguments, **named)

    return fatal


# torch only destroys a part of the loader and warns about the rest.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_fault_40_a_data_worker_that_dies_at_the_start_ends_the_run(place, capsys, monkeypatch):
    usual = _MultiProcessingDataLoaderIter._reset
    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_reset", kill_worker_before(usual))

    said = fails(capsys, pretraining(place / "photos", "run", "train.num_workers=2"), 5)

    assert "`train.num_workers=0`" in said
    # A remaining worker ignores SIGTERM, so the process would wait for it at its end.
    assert not active_children()


def test_fault_40_a_step_during_which_a_data_worker_dies_is_saved(place, capsys, monkeypatch):
    run = pretraining(place / "photos", "run", "train.num_workers=2", "train.max_steps=3000")
    fatal = kill_worker_before(DinoLearner.update_teacher)
    monkeypatch.setattr(DinoLearner, "update_teacher", fatal)

    said = fails(capsys, run, 5)

    assert "`train.num_workers=0`" in said
    rows = (place / "run/log.jsonl").read_text().splitlines()
    assert load_state(place / "run", torch.device("cpu"))[0]["step"] == len(rows) >= 1


@pytest.mark.parametrize("name", ["/etc/passwd", "../encoder.safetensors", "a/../../secret"])
def test_fault_47_listed_files_outside_the_folder_count_as_missing(place, capsys, name):
    assert main(["data", "verify", "photos"]) == 0
    listing = place / "photos/SHA256SUMS"
    listing.write_text(f"{listing.read_text()}{'0' * 64}  {name}\n")

    said = fails(capsys, ["data", "verify", "photos"], 3)

    assert name in said


@pytest.mark.parametrize("mark", ["  ./", " *", " *./"])
def test_fault_47_lists_of_find_and_of_binary_mode_are_read(place, capsys, mark):
    assert main(["data", "verify", "photos"]) == 0
    listing = place / "photos/SHA256SUMS"
    listing.write_text(listing.read_text().replace("  ", mark))

    assert main(["data", "verify", "photos"]) == 0
    picture(9).save(place / "photos/2.jpg")
    assert "2.jpg" in fails(capsys, ["data", "verify", "photos"], 3)


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_fault_49_an_image_that_is_a_broken_link_is_named(place, capsys, policy):
    (place / "photos/2.jpg").unlink()
    (place / "photos/2.jpg").symlink_to(place / "not there.jpg")

    words = probing("pca", "folder", place / "photos", "--on-bad-image", policy)
    assert "photos/2.jpg" in fails(capsys, words, 3)
    assert "photos/2.jpg" in fails(capsys, pretraining(place / "photos", "run"), 3)


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [("/dev/full", 5, "No space left on device"), ("ascii.txt", 0, ""), (None, 0, "")],
)
def test_fault_51_stdout_may_be_full_closed_or_ascii(place, output, code, said):
    assert main(probing("pca", "folder", place / "photos")) == 0

    def into_it(command: list[str]) -> int:
        sys.stdout = None if output is None else open(output, "w", encoding="ascii")  # noqa: PTH123, SIM115
        return main(command)

    for command in (["table", "--format", "csv"], ["table"]):
        came = exit_code(fork(lambda typed=command: into_it(typed), stderr=place / "said"))

        lines = (place / "said").read_text().splitlines()
        assert came == code
        assert len(lines) == bool(said)
        assert said in "".join(lines)
    if output == "ascii.txt":
        assert "\\xb1" in (place / output).read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:3", "mps"])
def test_fault_41_a_missing_device_is_named_with_an_alternative(place, capsys, device):
    said = fails(capsys, probing("pca", "folder", place / "photos", "--device", device), 5)

    assert f"{device} " in said
    assert "`--device cpu`" in said


@pytest.mark.slow
def test_fault_41_everything_runs_without_gpu_and_display(place):
    bare = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND")}
    environment = bare | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}

    voc(place)
    commands = [["doctor"], probing("retrieval", "voc2012", place)]
    commands += [["table", "--figure", "curves.png"]]
    typed = f"from ssl_bench.cli.__main__ import main; print(*map(main, {commands}))"

    run = subprocess.run(
        [sys.executable, "-c", typed], env=environment, capture_output=True, text=True, check=True
    )

    assert run.stdout.splitlines()[-1] == "0 0 0"
    assert re.search(r"^gpu +none", run.stdout, re.MULTILINE)
    assert (place / "curves.png").stat().st_size > 1000
