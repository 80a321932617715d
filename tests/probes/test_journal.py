import os

import pytest
import torch

from probes.features.journal import Journal
from ssl_bench.errors import MachineError

STATE = {
    "step": 3,
    "rate": 0.1,
    "bank": [torch.arange(6.0).view(2, 3), torch.ones(2).half(), torch.zeros(0, 4)],
    "nested": {"counts": torch.tensor([1, 2]), "seen": torch.tensor([True, False])},
}


def journal(folder, said=None, *, seed=0, minutes=0.0):
    say = print if said is None else said.append
    return Journal(folder, "work", {"seed": seed}, say=say, minutes=minutes)


def flat(value):
    if isinstance(value, dict):
        value = list(value.values())
    return [part for one in value for part in flat(one)] if isinstance(value, list) else [value]


def test_entries_come_back_with_tensors_to_the_bit(tmp_path):
    first = journal(tmp_path)
    assert first.entries == []
    first.append(STATE)
    first.append({"image": "b", "weight": torch.tensor([0.1, -0.0, float("inf")])})

    state, other = journal(tmp_path).entries

    assert state.keys() == STATE.keys()
    for one, expected in zip(flat(state), flat(STATE), strict=True):
        if isinstance(expected, torch.Tensor):
            assert (one.dtype, one.shape) == (expected.dtype, expected.shape)
            assert torch.equal(one, expected)
        else:
            assert one == expected
    assert other["image"] == "b"
    assert (
        other["weight"].numpy().tobytes()
        == torch.tensor([0.1, -0.0, float("inf")]).numpy().tobytes()
    )


def test_another_header_does_not_find_the_entries(tmp_path):
    journal(tmp_path).append({"step": 1})
    assert journal(tmp_path, seed=1).entries == []


def test_replacing_leaves_only_the_last_entry(tmp_path):
    first = journal(tmp_path)
    first.append({"step": 1})
    first.replace({"step": 2})
    assert journal(tmp_path).entries == [{"step": 2}]


def test_entries_wait_until_a_write_is_due_or_flushed(tmp_path):
    first = journal(tmp_path, minutes=10.0)
    first.append({"step": 1})
    assert not first.path.exists()
    first.flush()
    assert journal(tmp_path).entries == [{"step": 1}]


@pytest.mark.parametrize("cut", [-1, -9, -40, 14, 5])
def test_a_line_that_was_cut_off_is_removed_and_the_next_one_is_kept(tmp_path, cut):
    said, first = [], journal(tmp_path)
    first.append({"image": "a", "value": 0.25})
    whole = first.path.read_bytes()
    first.path.write_bytes(whole[:cut])
    second = journal(tmp_path)
    second.append({"image": "b"})
    second.append({"image": "c"})

    assert journal(tmp_path, said).entries == [{"image": "b"}, {"image": "c"}]
    assert not any("damaged" in line for line in said)
    assert second.path.read_bytes().startswith(whole.split(b"\n")[0])


def test_a_changed_digit_is_noticed(tmp_path):
    said, first = [], journal(tmp_path)
    first.append({"value": 0.25})
    first.path.write_bytes(first.path.read_bytes().replace(b"0.25", b"0.35"))
    assert journal(tmp_path, said).entries == []
    assert any("damaged" in line for line in said)


def test_entries_after_the_file_was_deleted_have_a_header(tmp_path):
    first = journal(tmp_path)
    first.append({"step": 1})
    first.path.unlink()
    first.append({"step": 2})
    assert journal(tmp_path).entries == [{"step": 2}]


def test_removing_forgets_what_was_not_written(tmp_path):
    first = journal(tmp_path, minutes=10.0)
    first.append({"step": 1})
    first.remove()
    first.flush()
    assert not first.path.exists()


def test_a_link_in_a_cache_is_replaced_and_its_target_is_left_alone(tmp_path):
    def cached():
        return Journal(tmp_path, "work", {}, say=print, is_cache=True)

    target = tmp_path / "elsewhere"
    target.write_text("text of somebody else")
    cached().path.symlink_to(target)
    first = cached()
    assert first.entries == []
    first.append({"step": 1})

    assert target.read_text() == "text of somebody else"
    assert cached().entries == [{"step": 1}]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_an_error_in_one_line(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(MachineError):
        journal(tmp_path / "inner").append({"step": 1})


def test_a_file_in_the_place_of_the_folder_is_an_error_in_one_line(tmp_path):
    (tmp_path / "inner").write_text("")
    with pytest.raises(MachineError):
        journal(tmp_path / "inner").append({"step": 1})
