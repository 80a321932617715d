"""The training state survives kills, full disks and cut files."""

import errno
import pickle

import pytest
import torch

from pretrain import checkpoints
from pretrain.checkpoints import PREVIOUS, STATE, has_state, load_state, remove_states, save_state
from ssl_bench.errors import CheckpointError, MachineError
from ssl_bench.system.files import sha256_of

CPU = torch.device("cpu")


def state_of(step):
    return {"step": step, "learner": {"weight": torch.full((100,), float(step))}}


def test_a_state_comes_back_as_it_was(tmp_path):
    state = {
        "step": 3,
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3}]},
        "configuration": {"betas": [0.9, 0.999], "root": None, "name": "x"},
    }

    save_state(tmp_path, state)
    loaded, path = load_state(tmp_path, CPU)

    assert path == tmp_path / STATE
    assert {key: loaded[key] for key in state} == state


def test_sha256sum_agrees_with_the_file_beside_the_states(tmp_path):
    for step in (1, 2):
        save_state(tmp_path, state_of(step))

    lines = (tmp_path / f"{STATE}.sha256").read_text().splitlines()

    assert lines == [f"{sha256_of(tmp_path / name)}  {name}" for name in (STATE, PREVIOUS)]


def test_a_flipped_bit_is_noticed_and_without_a_whole_file_nothing_is_loaded(tmp_path):
    save_state(tmp_path, state_of(1))
    content = bytearray((tmp_path / STATE).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / STATE).write_bytes(content)

    with pytest.raises(CheckpointError, match=r"state\.pt is cut or changed.*--overwrite"):
        load_state(tmp_path, CPU)


@pytest.mark.parametrize("renames", [0, 1])
def test_a_kill_between_the_renames_loses_nothing(tmp_path, monkeypatch, renames):
    for step in (1, 2):
        save_state(tmp_path, state_of(step))
    whole = type(tmp_path).replace
    done = []

    def killed(self, target):
        if self.name.startswith("state."):
            if len(done) == renames:
                raise KeyboardInterrupt
            done.append(target)
        return whole(self, target)

    monkeypatch.setattr(type(tmp_path), "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_state(tmp_path, state_of(3))

    assert load_state(tmp_path, CPU)[0]["step"] == 3


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_failure_half_way_leaves_the_old_state(tmp_path, monkeypatch, failure):
    save_state(tmp_path, state_of(1))

    def half(state, file):
        del state
        file.write(b"half of it")
        raise failure

    monkeypatch.setattr(checkpoints.torch, "save", half)
    expected = MachineError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        save_state(tmp_path, state_of(2))

    monkeypatch.undo()
    assert load_state(tmp_path, CPU)[0]["step"] == 1
    assert not list(tmp_path.glob("*.tmp"))


class Payload:
    def __reduce__(self):
        return (exec, ("raise SystemExit('the payload ran')",))


@pytest.mark.parametrize("content", ["pickle", "other"])
def test_a_file_that_is_no_state_is_refused_and_no_pickle_runs(tmp_path, content):
    path = tmp_path / STATE
    if content == "pickle":
        path.write_bytes(pickle.dumps(Payload(), protocol=2))
    else:
        torch.save({"format": "another program's"}, path)
    (tmp_path / f"{STATE}.sha256").write_text(f"{sha256_of(path)}  {STATE}\n")

    with pytest.raises(CheckpointError, match="is not a training state"):
        load_state(tmp_path, CPU)


def test_a_forgotten_run_leaves_no_state(tmp_path):
    for step in (1, 2):
        save_state(tmp_path, state_of(step))
    assert has_state(tmp_path)

    remove_states(tmp_path)

    assert not has_state(tmp_path)
    assert not list(tmp_path.iterdir())
