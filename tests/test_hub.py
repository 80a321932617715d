import threading
import time
import urllib.request
from pathlib import Path

import huggingface_hub
import pytest
import timm  # noqa: F401 - its seconds of import are no part of any test
import torch

from ssl_bench.errors import CheckpointError
from ssl_bench.files import sha256_of
from ssl_bench.models import ViTConfig, build_vit, hub, load_encoder


@pytest.fixture
def empty_caches(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    return tmp_path / "hub" / "checkpoints"


@pytest.mark.parametrize(
    "uri", ["timm:vit_tiny_patch16_224.augreg_in21k", "torchhub:facebookresearch/dino:dino_vits16"]
)
@pytest.mark.parametrize("network", ["refuses", "hangs"])
def test_a_machine_without_network_is_told_quickly(uri, network, empty_caches, monkeypatch):
    assert hub.REACH_SECONDS <= 3
    monkeypatch.setattr(hub, "REACH_SECONDS", 0.1)

    ended = threading.Event()

    def without_network(*_: object, **__: object) -> None:
        if network == "hangs":
            ended.wait(8)
        raise OSError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", without_network)
    start = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        load_encoder(uri)
    seconds = time.monotonic() - start
    ended.set()
    assert "timm:NAME@FILE" in str(raised.value)
    assert "cannot be reached" in str(raised.value)
    assert seconds < 5
    assert not empty_caches.exists()


def test_a_cached_download_of_dino_needs_no_network(empty_caches):
    empty_caches.mkdir(parents=True)
    config = ViTConfig(image_size=32, patch_size=8, dim=128, depth=2, num_heads=2)
    model = build_vit(config, seed=0)
    torch.save(model.state_dict(), empty_caches / "dino_deitsmall16_pretrain.pth")
    encoder = load_encoder("torchhub:facebookresearch/dino:dino_vits16")
    assert encoder.sha256 == sha256_of(empty_caches / "dino_deitsmall16_pretrain.pth")
    assert encoder.name == "dino_vits16"


class Response:
    """A server that promises more bytes than it sends."""

    def __init__(self, promised: int) -> None:
        self.headers = {"Content-Length": str(promised)}
        self.content = [b"abc", b""]

    def __enter__(self) -> "Response":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, _size: int) -> bytes:
        return self.content.pop(0)

    def close(self) -> None:
        pass


def test_a_download_that_breaks_off_is_not_kept(empty_caches, monkeypatch):
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: Response(promised=10))
    with pytest.raises(CheckpointError, match="broke off after 3 of 10 bytes"):
        load_encoder("torchhub:facebookresearch/dino:dino_vits16")
    assert list(empty_caches.iterdir()) == []
