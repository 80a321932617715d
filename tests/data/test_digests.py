"""Test that a weights file is compared with its stored SHA-256 digest."""

from unittest.mock import Mock

import pytest

from ssl_bench.errors import CheckpointError
from ssl_bench.models import build_vit, identify_encoder, load_encoder, save_encoder
from ssl_bench.system.files import file_sha256, read_digests
from tests.support.faults import TINY, encoder_file

OTHER = "0" * 64
SIDECAR = "last.safetensors.sha256"


def test_weights_load_if_any_line_has_their_digest(tmp_path):
    path = encoder_file(tmp_path / "last.safetensors")
    digest = file_sha256(path)
    own, other = f"{digest}  {path.name}", f"{OTHER}  {path.name}"
    binary = own.replace("  ", " *").replace(digest, digest.upper())
    for lines in ([own, other], [other, own], [binary + "\r"], [digest]):
        path.with_name(SIDECAR).write_text("\n".join(lines))
        assert load_encoder(str(path)).sha256 == identify_encoder(str(path)).sha256 == digest


def test_a_sidecar_without_the_digest_of_the_weights_is_refused(tmp_path):
    path = encoder_file(tmp_path / "last.safetensors")
    for content in (
        *(f"{OTHER}  other.safetensors\n", f"{OTHER}\n", "", "\udcff\udcfe"),
        *(f"{text}  last.safetensors\n" for text in (OTHER[1:], OTHER + "0", f"g{OTHER[1:]}")),
    ):
        path.with_name(SIDECAR).write_bytes(content.encode(errors="surrogateescape"))
        for read in (identify_encoder, load_encoder):
            with pytest.raises(CheckpointError):
                read(str(path))


def test_while_weights_are_replaced_both_digests_are_listed(tmp_path, monkeypatch):
    path = encoder_file(tmp_path / "last.safetensors")
    before = file_sha256(path)
    path.with_name(SIDECAR).write_bytes(b"\xff\n" + f"{before}  x".encode())

    writer = "ssl_bench.models.loading.checkpoint.write_atomically"
    monkeypatch.setattr(writer, Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_encoder(path, build_vit(TINY, seed=1), {})

    assert len(read_digests(path.with_name(SIDECAR))) == 2
    assert load_encoder(str(path)).sha256 == before
