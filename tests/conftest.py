"""Load the fixtures that all tests share.

Tensor shapes are checked if the environment variable SSL_BENCH_CHECK_SHAPES is 1.
"""

import os
import re
import tempfile
from pathlib import Path

import jaxtyping
import pytest

from tests.support import type_checks

# Tests neither read nor change the caches of the user. The workers of xdist inherit this folder.
caches, main_process = None, os.getpid()
if "PYTEST_XDIST_WORKER" not in os.environ:
    caches = tempfile.TemporaryDirectory(prefix="ssl-bench-caches-", ignore_cleanup_errors=True)
    # Listing the fonts takes seconds, so matplotlib keeps its own cache.
    os.environ.setdefault("MPLCONFIGDIR", str(Path.home() / ".cache/matplotlib"))
    os.environ["XDG_CACHE_HOME"] = caches.name

if os.environ.get("SSL_BENCH_CHECK_SHAPES") == "1":
    root = Path(__file__).parents[1]
    # The types of all other files are checked by pyrefly alone.
    # Triton reads the source of its kernels, which a decorator would hide.
    shapes, kernels = re.compile("jaxtyping|PerImage"), re.compile("@triton.jit")
    with_shapes = [
        path.relative_to(root).with_suffix("")
        for package in ("ssl_bench", "pretrain", "probes")
        for path in (root / package).rglob("*.py")
        if shapes.search(text := path.read_text()) and not kernels.search(text)
    ]
    modules = [".".join(path.parts) for path in with_shapes]
    jaxtyping.jaxtyped = type_checks.check_first_calls
    jaxtyping.install_import_hook(modules, "beartype.beartype")


def pytest_runtest_setup() -> None:
    type_checks.calls.clear()


def pytest_configure(config: pytest.Config) -> None:
    # A process that a test forks may run pytest, too. It must leave the folder.
    if caches is not None and os.getpid() == main_process:
        config.add_cleanup(caches.cleanup)
    # The process that hands tests to the workers of xdist runs none. Its workers start sooner if
    # it does not import what the tests need. Coverage of imports is measured in this process.
    runs_tests = not config.getoption("numprocesses", None) or hasattr(config, "workerinput")
    if runs_tests or config.pluginmanager.hasplugin("_cov"):
        config.pluginmanager.import_plugin("tests.fixtures")
