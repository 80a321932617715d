"""The sha256 beside a file: which line of it speaks of which file."""

import pytest
import torch

from pretrain.checkpoints import PREVIOUS, STATE, load_state, save_state
from ssl_bench.errors import CheckpointError
from ssl_bench.models import build_vit, identify_encoder, load_encoder, save_encoder
from ssl_bench.system.files import read_digests, sha256_of
from tests.support.faults import TINY, encoder_file

OTHER = "0" * 64
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (f"{OTHER}  a.pth\n".encode(), [(OTHER, "a.pth")]),
        (f"{OTHER} *a.pth\n\n".encode(), [(OTHER, "a.pth")]),
        (f"{'AB' * 32}  a b.pth\r\n{OTHER}".encode(), [("ab" * 32, "a b.pth"), (OTHER, "")]),
        (b"", []),
        (b"\xff\xfe", []),
        (f"{OTHER[1:]}  a.pth\n".encode(), []),
        (f"g{OTHER[1:]}  a.pth\n".encode(), []),
        (f"{OTHER}0  a.pth\n".encode(), []),
    ],
)
def test_lines_of_sha256sum_are_read_and_no_others(tmp_path, content, found):
    (tmp_path / "x.sha256").write_bytes(content)

    assert read_digests(tmp_path / "x.sha256") == found


def test_where_nothing_can_be_read_nothing_is_stated(tmp_path):
    assert read_digests(tmp_path / "none.sha256") == []
    assert read_digests(tmp_path) == []


@pytest.mark.parametrize("first", [True, False], ids=["first line", "second line"])
def test_weights_load_whichever_line_is_theirs(tmp_path, first):
    path = encoder_file(tmp_path / "last.safetensors")
    lines = [f"{sha256_of(path)}  {path.name}", f"{OTHER}  {path.name}"]
    path.with_name("last.safetensors.sha256").write_text("\n".join(lines[:: 1 if first else -1]))

    assert load_encoder(str(path)).sha256 == identify_encoder(str(path)).sha256 == sha256_of(path)


@pytest.mark.parametrize(
    "content",
    [OTHER + "  other.safetensors\n", OTHER + "\n", "{upper}  last.safetensors\n"],
    ids=["another file", "no name", "upper case"],
)
def test_an_encoder_is_identified_by_a_line_that_names_its_file_alone(tmp_path, content):
    path = encoder_file(tmp_path / "last.safetensors")
    digest = sha256_of(path)
    sidecar = path.with_name("last.safetensors.sha256")
    sidecar.write_text(content.format(upper=digest.upper()))

    if "upper" in content:
        assert identify_encoder(str(path)).sha256 == load_encoder(str(path)).sha256 == digest
    else:
        for read in (identify_encoder, load_encoder):
            with pytest.raises(CheckpointError, match="has sha256"):
                read(str(path))


@pytest.mark.parametrize("content", ["", "\n", "a web page\n"])
def test_a_sidecar_that_says_nothing_is_named(tmp_path, content):
    path = encoder_file(tmp_path / "last.safetensors")
    path.with_name("last.safetensors.sha256").write_text(content)

    for read in (identify_encoder, load_encoder):
        with pytest.raises(CheckpointError, match="says nothing"):
            read(str(path))


def test_while_weights_are_replaced_both_are_stated(tmp_path, monkeypatch):
    path = encoder_file(tmp_path / "last.safetensors")
    before = sha256_of(path)
    path.with_name("last.safetensors.sha256").write_bytes(b"\xff\n" + f"{before}  x".encode())

    def killed(path, write):
        raise KeyboardInterrupt

    monkeypatch.setattr("ssl_bench.models.loading.checkpoint.write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        save_encoder(path, build_vit(TINY, seed=1), {})

    assert len(read_digests(path.with_name("last.safetensors.sha256"))) == 2
    assert load_encoder(str(path)).sha256 == before


def test_the_state_before_is_known_by_its_own_line(tmp_path):
    for step in (1, 2):
        save_state(tmp_path, {"step": step, "learner": {}})
    (tmp_path / STATE).write_bytes(b"cut")

    state, path = load_state(tmp_path, CPU)

    assert (state["step"], path.name) == (1, PREVIOUS)


@pytest.mark.parametrize("content", [b"", b"\xff", b"1\n"])
def test_states_without_a_sha256_are_taken_by_their_checksums(tmp_path, content, capsys):
    save_state(tmp_path, {"step": 1, "learner": {}})
    (tmp_path / f"{STATE}.sha256").write_bytes(content)

    state, path = load_state(tmp_path, CPU)

    assert (state["step"], path.name) == (1, STATE)
    assert "is taken by its checksums" in capsys.readouterr().err
