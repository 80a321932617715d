"""Test journals, which store the intermediate results of long computations."""

import pytest
import torch

from probes.features.journal import Journal
from ssl_bench.errors import MachineError

STATE = {
    "step": 3,
    "rate": 0.1,
    "bank": [torch.arange(6.0).view(2, 3), torch.ones(2).half(), torch.zeros(0, 4)],
    "nested": {"counts": torch.tensor([1, 2]), "seen": torch.tensor([True, False])},
    "limits": torch.tensor([-0.0, float("inf")]),
}


def journal(folder, messages=None, *, seed=0, minutes=0.0, is_cache=False):
    say = print if messages is None else messages.append
    return Journal(folder, "work", {"seed": seed}, say=say, minutes=minutes, is_cache=is_cache)


def test_only_the_same_header_finds_the_bitwise_equal_entries(tmp_path):
    first = journal(tmp_path)
    assert first.entries == []
    first.append(STATE)
    first.append({"image": "b"})

    state, other = journal(tmp_path).entries

    torch.testing.assert_close(state, STATE, rtol=0, atol=0)
    assert state["limits"].signbit().tolist() == [True, False]
    assert other == {"image": "b"}
    assert journal(tmp_path, seed=1).entries == []


def test_replacing_leaves_only_the_last_entry(tmp_path):
    first = journal(tmp_path)
    first.append({"step": 1})
    first.replace({"step": 2})
    assert journal(tmp_path).entries == [{"step": 2}]


def test_entries_wait_for_a_flush_and_a_removal_forgets_them(tmp_path):
    first = journal(tmp_path, minutes=10.0)
    first.append({"step": 1})
    assert not first.path.exists()
    first.flush()
    assert journal(tmp_path).entries == [{"step": 1}]

    first.append({"step": 2})
    first.remove()
    first.flush()
    assert not first.path.exists()


@pytest.mark.parametrize("cut", [-1, -40, 5])
def test_an_incomplete_line_is_replaced_by_the_next_entry(tmp_path, cut):
    messages, first = [], journal(tmp_path)
    first.append({"image": "a", "value": 0.25})
    content = first.path.read_bytes()
    first.path.write_bytes(content[:cut])
    second = journal(tmp_path)
    second.append({"image": "b"})
    second.append({"image": "c"})

    assert journal(tmp_path, messages).entries == [{"image": "b"}, {"image": "c"}]
    assert not any("damaged" in line for line in messages)
    assert second.path.read_bytes().startswith(content.split(b"\n")[0])


def test_an_entry_with_a_changed_digit_is_ignored(tmp_path):
    messages, first = [], journal(tmp_path)
    first.append({"value": 0.25})
    first.path.write_bytes(first.path.read_bytes().replace(b"0.25", b"0.35"))
    assert journal(tmp_path, messages).entries == []
    assert any("damaged" in line for line in messages)


def test_a_deleted_journal_begins_with_a_header_again(tmp_path):
    first = journal(tmp_path)
    first.append({"step": 1})
    first.path.unlink()
    first.append({"step": 2})
    assert journal(tmp_path).entries == [{"step": 2}]


def test_links_in_a_cache_are_replaced_without_changing_their_targets(tmp_path):
    target = tmp_path / "elsewhere"
    target.write_text("text of somebody else")
    first = journal(tmp_path, is_cache=True)
    first.path.symlink_to(target)
    assert first.entries == []
    first.append({"step": 1})

    assert target.read_text() == "text of somebody else"
    assert journal(tmp_path, is_cache=True).entries == [{"step": 1}]


def test_files_in_place_of_folders_are_machine_errors(tmp_path):
    (tmp_path / "inner").write_text("")
    messages = []
    assert journal(tmp_path / "inner", messages).entries == messages == []
    with pytest.raises(MachineError):
        journal(tmp_path / "inner").append({"step": 1})
