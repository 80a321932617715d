"""The sha256 beside a file: which line of it speaks of which file."""

import pytest
import torch

from ssl_bench.errors import CheckpointError
from ssl_bench.models import build_vit, identify_encoder, load_encoder, save_encoder
from ssl_bench.system.files import file_sha256, read_digests
from tests.support.faults import TINY, encoder_file

OTHER = "0" * 64
CPU = torch.device("cpu")


def test_weights_load_whichever_line_is_theirs(tmp_path):
    path = encoder_file(tmp_path / "last.safetensors")
    digest = file_sha256(path)
    own, other = f"{digest}  {path.name}", f"{OTHER}  {path.name}"
    binary = own.replace("  ", " *").replace(digest, digest.upper())
    for lines in ([own, other], [other, own], [binary + "\r"], [digest]):
        path.with_name("last.safetensors.sha256").write_text("\n".join(lines))
        assert load_encoder(str(path)).sha256 == identify_encoder(str(path)).sha256 == digest


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (OTHER + "  other.safetensors\n", "has sha256"),
        (OTHER + "\n", "has sha256"),
        *((text, "states nothing") for text in ("", "\n", "a web page\n", "\udcff\udcfe")),
        *((f"{text}  last.safetensors\n", "states nothing") for text in (OTHER[1:], OTHER + "0")),
        (f"g{OTHER[1:]}  last.safetensors\n", "states nothing"),
    ],
)
def test_a_sidecar_that_speaks_of_other_weights_or_of_none_is_refused(tmp_path, content, said):
    path = encoder_file(tmp_path / "last.safetensors")
    path.with_name("last.safetensors.sha256").write_bytes(content.encode(errors="surrogateescape"))

    for read in (identify_encoder, load_encoder):
        with pytest.raises(CheckpointError, match=said):
            read(str(path))


def test_while_weights_are_replaced_both_are_stated(tmp_path, monkeypatch):
    path = encoder_file(tmp_path / "last.safetensors")
    before = file_sha256(path)
    path.with_name("last.safetensors.sha256").write_bytes(b"\xff\n" + f"{before}  x".encode())

    def killed(path, write):
        raise KeyboardInterrupt

    monkeypatch.setattr("ssl_bench.models.loading.checkpoint.write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        save_encoder(path, build_vit(TINY, seed=1), {})

    assert len(read_digests(path.with_name("last.safetensors.sha256"))) == 2
    assert load_encoder(str(path)).sha256 == before
