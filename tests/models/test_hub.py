import hashlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import huggingface_hub
import pytest
import timm  # noqa: F401 - its seconds of import are no part of any test
import torch

from ssl_bench.errors import CheckpointError
from ssl_bench.models import ViTConfig, build_vit, load_encoder
from ssl_bench.models.loading import hub
from tests.support.faults import fails


@pytest.fixture
def empty_caches(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    return tmp_path / "hub" / "checkpoints"


@pytest.fixture
def weights(server, monkeypatch, tmp_path) -> Callable[[str], bytes]:
    """Let the server have weights of DINO, under the name that is asked for; their bytes."""
    config = ViTConfig(image_size=32, patch_size=8, dim=128, depth=2, num_heads=2)
    torch.save(build_vit(config, seed=0).state_dict(), tmp_path / "weights.pth")

    def publish(name: str) -> bytes:
        server.content = (tmp_path / "weights.pth").read_bytes()
        address = {"dino_vits16": server.url.replace("file.bin", name)}
        monkeypatch.setattr(hub, "HUB_WEIGHTS", {"facebookresearch/dino": address})
        return server.content

    return publish


DINO = "torchhub:facebookresearch/dino:dino_vits16"


def refuses() -> str:
    with pytest.raises(CheckpointError) as raised:
        load_encoder(DINO)
    assert "demo:skip" in raised.value.hint
    return str(raised.value)


@pytest.mark.parametrize(
    ("variable", "uri"),
    [
        ("HF_HUB_OFFLINE", DINO), ("TRANSFORMERS_OFFLINE", "hf-hub:org/name"),
        ("HF_HUB_OFFLINE", "timm:vit_small_patch16_224.dino"),
    ],
)  # fmt: skip
def test_offline_no_socket_is_opened_and_no_name_resolved(
    uri, variable, empty_caches, monkeypatch, capsys
):
    def refuse(*_: object) -> NoReturn:
        pytest.fail("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv(variable, "1")
    line = fails(capsys, ["models", uri], 4)
    assert variable in line
    assert "local-dir:" in line


@pytest.mark.parametrize("kind", ["text/html", "application/octet-stream"])
def test_a_page_in_place_of_weights_is_refused(kind, empty_caches, server, weights):
    weights("small.pth")
    server.content = b"<html>Please log in</html>"
    server.headers = {"Content-Type": kind}
    said = {"text/html": "a web page"}.get(kind, "was not written by torch.save")
    assert said in refuses()
    assert not (empty_caches / "small.pth").exists()


def test_fault_61_the_digest_in_the_name_of_weights_is_held_against_them(
    empty_caches, server, weights
):
    content = weights("small-0123abcd.pth")
    assert "its name states 0123abcd" in refuses()
    digest = hashlib.sha256(content).hexdigest()
    name = f"small-{digest[:8]}.pth"
    weights(name)
    assert load_encoder(DINO).sha256 == digest

    kept = empty_caches / name
    kept.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert f"its name states {digest[:8]}" in refuses()
