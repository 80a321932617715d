"""Faults 91 and 92: signals, launchers, and states of runs without their checksum file."""

import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pretrain.checkpoints import load_state, save_state
from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore
from tests.core.test_results import RECORD
from tests.support.faults import exit_code, fails, fork, pretraining, probing, records
from tests.support.runs import log_rows

CPU = torch.device("cpu")
LONG = "train.max_steps=2000"
NO_TIME = "train.max_minutes=0.0"
STOPPING = ("SIGTERM", "SIGHUP", "SIGUSR1")


def wait_for(found: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not found() and time.monotonic() < deadline:
        time.sleep(0.01)


def has_rows() -> bool:
    log = Path("run/log.jsonl")
    return log.exists() and log.stat().st_size > 0


def test_fault_91_a_run_is_saved_when_its_terminal_is_closed(place):
    run = pretraining(place / "photos", "run", LONG)
    child, terminal = pty.fork()
    if not child:
        code = 70
        try:
            for name in STOPPING:
                signal.signal(getattr(signal, name), signal.SIG_DFL)
            # Replace pytest's streams by those of the terminal.
            for number, name in ((1, "stdout"), (2, "stderr")):
                setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))
            code = main(run)
        finally:
            (place / "code").write_text(str(code))
            os._exit(code)
    wait_for(has_rows)
    os.close(terminal)

    assert exit_code(child) == 75
    assert load_state(Path("run"), CPU)[0]["step"] == len(log_rows("run"))


def test_fault_91_a_run_under_nohup_ignores_the_closed_terminal(place):
    run = pretraining(place / "photos", "run", "train.max_steps=30")

    def under_nohup() -> int:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return main(run)

    child = fork(under_nohup, stderr=place / "said")
    wait_for(has_rows)
    os.kill(child, signal.SIGHUP)

    assert exit_code(child) == 0
    assert len(log_rows("run")) == 30


def slow_after_the_first(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    usual = getattr(ResultStore, name)

    def slow(*arguments, **named):
        found = usual(*arguments, **named)
        Path("begun").touch()
        time.sleep(60)
        return found

    monkeypatch.setattr(ResultStore, name, slow)


@pytest.mark.parametrize(
    ("command", "name"), [("probe", "SIGHUP"), ("probe", "SIGUSR1"), ("sweep", "SIGTERM")]
)
def test_fault_91_a_stopped_probe_keeps_its_results_and_continues(
    place, monkeypatch, command, name
):
    words = [command, *probing("pca", "folder", place / "photos", "--layer", "0,1")[1:]]
    with monkeypatch.context() as patch:
        slow_after_the_first(patch, "save")
        child = fork(lambda: main(words), stderr=place / "said")
        wait_for(Path("begun").exists)
        os.kill(child, getattr(signal, name))
        assert exit_code(child) == 75

    said = (place / "said").read_text()
    assert name in said.splitlines()[-1]
    assert "Traceback" not in said
    assert len(records()) == 1
    assert not list(place.rglob("*.tmp"))
    assert main(words) == 0
    assert len(records()) == 2


def test_fault_91_other_commands_report_the_signal_that_stopped_them(place, monkeypatch):
    ResultStore(Path("results")).save(RECORD)
    slow_after_the_first(monkeypatch, "records")
    for words in (["table"], ["report"]):
        child = fork(lambda typed=words: main(typed), stderr=place / "said")
        wait_for(Path("begun").exists)
        os.kill(child, signal.SIGTERM)

        assert exit_code(child) == 75, words
        assert (place / "said").read_text().startswith("ssl-bench: stopped by SIGTERM")
        Path("begun").unlink()


ALONE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
# A variable with a wrong value, or None to unset it, and what the error names.
LAUNCHERS = {
    "no address": ("MASTER_ADDR", None, "MASTER_ADDR is not set"),
    "no port": ("MASTER_PORT", "", "MASTER_PORT is not set"),
    "a port that is no number": ("MASTER_PORT", "http", "MASTER_PORT is http"),
    "a port that is too large": ("MASTER_PORT", "70000", "MASTER_PORT is 70000"),
    "no rank": ("RANK", None, "RANK is not set, expected a number from 0 to 1"),
    "a rank that is no number": ("RANK", "one", "RANK is one"),
    "a rank that is too large": ("RANK", "2", "RANK is 2, expected a number from 0 to 1"),
    "a negative rank": ("RANK", "-1", "RANK is -1"),
    "no world size": ("WORLD_SIZE", None, "RANK is 1, expected 0"),
    "a world size of 0": ("WORLD_SIZE", "0", "WORLD_SIZE is 0, expected a number from 1 to"),
    "a world size that is no number": ("WORLD_SIZE", "2.0", "WORLD_SIZE is 2.0"),
    "a local rank that is no number": ("LOCAL_RANK", "gpu0", "LOCAL_RANK is gpu0"),
    "too many local processes": ("LOCAL_WORLD_SIZE", "3", "LOCAL_WORLD_SIZE is 3"),
}


def launched(monkeypatch: pytest.MonkeyPatch, **values: str | None) -> None:
    for name in ALONE:
        monkeypatch.delenv(name, raising=False)
        if value := values.get(name):
            monkeypatch.setenv(name, value)


def test_an_interruption_is_reported_although_the_launcher_is_wrong(capsys, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    launched(monkeypatch, WORLD_SIZE="2", RANK="none")
    monkeypatch.setattr("ssl_bench.cli.parser.run", interrupted)

    assert main(["probe"]) == 130
    assert capsys.readouterr().err.startswith("ssl-bench: interrupted")


@pytest.mark.parametrize(("name", "value", "named"), LAUNCHERS.values(), ids=LAUNCHERS)
def test_fault_92_a_wrong_variable_of_a_launcher_is_named(
    place, capsys, monkeypatch, name, value, named
):
    launched(monkeypatch, **(WHOLE | {name: value}))

    assert named in fails(capsys, pretraining(place / "photos", "run"), 2)
    assert named in fails(capsys, probing("pca", "folder", place / "photos"), 2)


@pytest.mark.parametrize(
    "values",
    [
        {"RANK": "0"},
        {"MASTER_ADDR": "somewhere", "MASTER_PORT": "none"},
        {"LOCAL_RANK": "3"},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
    ],
    ids=str,
)
def test_fault_92_variables_of_a_single_process_are_accepted(place, monkeypatch, values):
    launched(monkeypatch, **values)

    assert main(probing("pca", "folder", place / "photos")) == 0
    assert main(pretraining(place / "photos", "run", NO_TIME)) == 0


def test_fault_92_processes_that_cannot_connect_name_the_address(place, capsys, monkeypatch):
    launched(monkeypatch, **(WHOLE | {"RANK": "0", "MASTER_PORT": "1"}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))

        said = fails(capsys, pretraining(place / "photos", "run"), 5)

    assert "MASTER_ADDR=127.0.0.1" in said


@pytest.mark.parametrize("content", [None, "", "not a digest\n"])
def test_fault_92_a_run_continues_without_the_digest_of_its_state(capsys, begun, content):
    sidecar = Path("run/state.pt.sha256")
    sidecar.unlink()
    if content is not None:
        sidecar.write_text(content)

    assert main([*begun, "--resume"]) == 0

    assert "state.pt" in capsys.readouterr().err
    assert len(log_rows("run")) == 2
    assert sidecar.read_text()


@pytest.mark.parametrize("harm", ["cut", "a bit"])
def test_fault_92_a_damaged_state_without_digest_is_not_used(capsys, begun, harm):
    resumed = [*begun, "--resume"]
    assert main(resumed) == 0
    state = Path("run/state.pt")
    Path("run/state.pt.sha256").unlink()
    spoilt = bytearray(state.read_bytes())
    spoilt[len(spoilt) // 2] ^= 4
    state.write_bytes(spoilt[:-100] if harm == "cut" else spoilt)
    capsys.readouterr()

    assert main(resumed) == 0
    assert "after step 1 of 6" in capsys.readouterr().err
    state.write_bytes(b"")
    Path("run/state.previous.pt").unlink()

    assert "state.pt" in fails(capsys, resumed, 4)


@pytest.mark.parametrize(
    ("within", "key"),
    [
        ((), "configuration"),
        ((), "left_out"),
        ((), "optimizer"),
        (("learner",), "center"),
        (("optimizer",), "state"),
    ],
)
def test_fault_92_a_missing_part_of_a_state_is_named(capsys, begun, within, key):
    state = Path("run/state.pt")
    whole = part = torch.load(state, weights_only=True)
    for name in within:
        part = part[name]
    del part[key]
    torch.save(whole, state)
    Path("run/state.pt.sha256").unlink()

    said = fails(capsys, [*begun, "--resume"], 4)

    assert "run/state.pt" in said
    assert key in said


@pytest.mark.parametrize("step", [-3, "7", None, 1000])
def test_fault_92_an_impossible_step_of_a_state_is_refused(capsys, begun, step):
    state = load_state(Path("run"), torch.device("cpu"))[0]
    save_state(Path("run"), {**state, "step": step})

    said = fails(capsys, [*begun, "--resume"], 4)

    assert f"run/state.pt has step {step!r}" in said
    assert "`--overwrite` or `--out FOLDER`" in said
    assert main([*begun, "--overwrite"]) == 0


def test_fault_92_the_advice_for_lost_states_and_digests_works(place, capsys, begun):
    Path("run").rename("a run")
    run = [*begun, "--out", "a run"]
    Path("a run/last.safetensors.sha256").unlink()
    words = probing("pca", "folder", place / "photos", "--checkpoint", "a run")
    said = fails(capsys, words, 4)
    assert subprocess.run(["sh", "-c", said.partition("run: ")[2]], check=False).returncode == 0
    assert main(words) == 0

    Path("a run/state.pt").write_bytes(b"")
    assert "`--overwrite`" in fails(capsys, [*run, "--resume"], 4)
    assert main([*run, "--overwrite"]) == 0
