"""The training state survives kills, full disks and cut files."""

import errno

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


def test_a_changed_or_another_programs_file_is_refused_and_a_forgotten_run_leaves_none(tmp_path):
    for step in (1, 2):
        save_state(tmp_path, state_of(step))
    lines = (tmp_path / f"{STATE}.sha256").read_text().splitlines()
    assert lines == [f"{sha256_of(tmp_path / name)}  {name}" for name in (STATE, PREVIOUS)]
    remove_states(tmp_path)
    assert not has_state(tmp_path)
    assert not list(tmp_path.iterdir())

    path = tmp_path / STATE
    torch.save({"format": "another program's"}, path)
    path.with_name(f"{STATE}.sha256").write_text(f"{sha256_of(path)}  {STATE}\n")
    with pytest.raises(CheckpointError, match="is not a training state"):
        load_state(tmp_path, CPU)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state\.pt is cut or changed.*--overwrite"):
        load_state(tmp_path, CPU)
