"""Fixtures and hooks of all tests.

If SSL_BENCH_CHECK_SHAPES=1, the shapes of tensors are checked at each call of a function. That
takes a quarter more time, so only `make test-all`, `make coverage` and `make mutants` do it.
"""

import gc
import os
import re
import shutil
from collections.abc import Iterator
from itertools import chain
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import install_import_hook

from tests.support import checked

# On a GPU, code is compiled together with its checks. They break torch 2.11 and cause 33 graphs
# instead of 3 in torch 2.15.
if (
    os.environ.get("SSL_BENCH_CHECK_SHAPES") == "1"
    and torch.__version__ >= "2.15"
    and not torch.cuda.is_available()
):
    root = Path(__file__).parents[1]
    files = chain.from_iterable(
        (root / n).rglob("*.py") for n in ("ssl_bench", "pretrain", "probes")
    )
    # Files without shapes are checked by pyrefly alone, which saves a fifth of the time.
    shapes = re.compile("jaxtyping|PerImage")
    with_shapes = [path.relative_to(root) for path in files if shapes.search(path.read_text())]
    names = [".".join(path.with_suffix("").parts) for path in with_shapes]
    install_import_hook(names, f"{checked.__name__}.checked")

from ssl_bench.data.files import fingerprints
from tests.support.faults import encoder_file, photo_folder
from tests.support.remembered import remember_needs
from tests.support.runs import pretrain_two
from tests.support.web import WebServer

remember_needs()
torch.set_num_threads(1)
# Nothing of a test outlives a power cut; to wait for the disk took a tenth of the time.
os.fsync = lambda _: None
# The heap of torch and its kind stays; looking it through again took a tenth of the time.
gc.set_threshold(20_000, 20, 20)


# A backward pass of tensors without values starts threads of autograd, whatever their device, and
# a process that was forked after that can train nothing.
LAST = "test_graphs.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name == LAST)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    # What is still frozen at the end of Python is called a leak.
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """What a test leaves running would hold up the end of all tests for ever."""
    yield
    left = active_children()
    for one in left:
        one.kill()
        one.join()
    assert not left


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data: photos/ in the layouts of VOC, COCO and ADE20K, mnist/, cifar10/."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("SSL_BENCH_TEST_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no real data in {folder}; set SSL_BENCH_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def photos(shared_data: Path) -> Path:
    return shared_data / "photos"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """A web server of this machine."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with WebServer() as server:
        yield server
        server.shutdown()


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """The working folder, with an encoder and a few photographs."""
    monkeypatch.chdir(tmp_path)
    encoder_file(tmp_path / "encoder.safetensors")
    photo_folder(tmp_path / "photos")
    return tmp_path


@pytest.fixture(scope="session")
def pretrained_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two short runs, which tests may only read."""
    return pretrain_two(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, which trusts files as soon as the clock of the files has moved on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprints, "RACY_NS", 0)
    return tmp_path / "cache/ssl-bench/digests"


@pytest.fixture
def files_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is read, in place of what is remembered."""
    names: list[str] = []
    whole = fingerprints._read

    def read(part: fingerprints.FilePart) -> bytes:
        names.append(part.file.name)
        return whole(part)

    monkeypatch.setattr(fingerprints, "_read", read)
    return names


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window; skipped where there is none."""
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
