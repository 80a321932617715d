"""Plant the faults of tests/mutants.yaml one at a time and check that a test notices each.

    python -m tests.mutants [NAME ...] [--jobs N]

Each fault is planted in a temporary copy of the checkout, which stays untouched: run it in the
background and stop it whenever you like. It prints a line for each fault and exits with 1 if
any fault is not caught.
"""

import argparse
import compileall
import importlib
import multiprocessing as mp
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import cache_from_source
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
# Importing these takes longer than most tests, so the parent imports them once for all faults.
HEAVY = (
    "torch", "torchvision", "torch._dynamo", "timm", "sklearn.cluster", "sklearn.metrics",
    "scipy.stats", "scipy.sparse.linalg", "skimage.measure", "pandas", "pyarrow.parquet", "cv2",
    "faiss", "hydra", "omegaconf", "matplotlib.pyplot", "jinja2", "jaxtyping", "beartype.door",
    "hypothesis", "tqdm", "safetensors.torch",
)  # fmt: skip
SELECTED = "not gpu and not browser"
LIMIT_SECONDS = 900
FORK = mp.get_context("fork")


@dataclass(frozen=True)
class Fault:
    """A planted fault: the first `old` in `file` becomes `new`, and one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def plant(self, tree: Path) -> bool:
        """Write the file anew, as it may be a hard link; return whether it contains `old`."""
        path = tree / self.file
        text = path.read_text()
        path.unlink()
        path.write_text(text.replace(self.old, self.new, 1))
        Path(cache_from_source(str(path))).unlink(missing_ok=True)
        return self.old in text


def load_faults(path: Path) -> list[Fault]:
    return [Fault(**fields) for fields in yaml.safe_load(path.read_text())]


@dataclass(eq=False)
class FirstFailure:
    """A plugin of pytest that stores the name of the first test that failed."""

    test: str = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.test = self.test or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.test = self.test or report.nodeid


def run_pytest(tree: Path, tests: Sequence[str], answer: Connection) -> None:
    """Run in a forked process; send pytest's exit code and the first test that failed."""
    os.setsid()
    os.chdir(tree)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A program in the background ignores this one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    elsewhere = [p for p in sys.path if Path(p).resolve() != ROOT.resolve()]
    sys.path[:] = [str(tree), *elsewhere]
    os.environ["PYTHONPATH"] = str(tree)
    for name in [n for n in sys.modules if n.split(".")[0] == "tests"]:
        del sys.modules[name]
    first = FirstFailure()
    words = [
        "-x",
        "-m",
        SELECTED,
        f"--basetemp={tree}-tmp-{os.getpid()}",
        "--hypothesis-seed=0",
        *tests,
    ]
    answer.send((int(pytest.main(words, plugins=[first])), first.test))


def first_failure(tree: Path, tests: Sequence[str]) -> str:
    """Run tests in a tree; return the first that fails, or nothing if all pass."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=run_pytest, args=(tree, tests, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(LIMIT_SECONDS):
            return f"tests that do not end within {LIMIT_SECONDS} s"
        code, test = receiver.recv()
    except EOFError:
        return "tests that end the process"
    finally:
        # The tests' own processes are in the same group.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
        process.join()
        shutil.rmtree(f"{tree}-tmp-{process.pid}", ignore_errors=True)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        raise SystemExit(f"error: pytest ended with {code} for {' '.join(tests)}")
    return test


def check_fault(fault: Fault, original: Path, passing: set[str]) -> str:
    """Return the result for a fault. `passing` lists tests that pass without any fault."""
    tree = original.with_name(fault.name)
    shutil.copytree(original, tree, symlinks=True, copy_function=os.link)
    try:
        if not fault.plant(tree):
            return "OLD TEXT NOT FOUND"
        test = first_failure(tree, fault.tests)
    finally:
        shutil.rmtree(tree)
    if not test:
        return "SURVIVED"
    if "::" in test and test not in passing:
        if first_failure(original, [test]):
            return f"{test} FAILS WITHOUT THE FAULT"
        passing.add(test)
    return f"caught by {test}"


def check_faults(faults: Sequence[Fault], original: Path) -> None:
    """Print a line for each fault; exit with 1 if any is not caught."""
    passing: set[str] = set()
    fates = []
    for fault in faults:
        start = time.monotonic()
        fates.append(check_fault(fault, original, passing))
        print(f"{fault.name}: {fates[-1]} ({time.monotonic() - start:.0f} s)", flush=True)
    sys.exit(any(not fate.startswith("caught") for fate in fates))


def copy_checkout(folder: Path) -> None:
    """Copy the files that git does not ignore, with their bytecode."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(words, cwd=ROOT, text=True).split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    compileall.compile_dir(folder, quiet=2)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="faults to plant (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time (default: 1)")
    options = parser.parse_args(words)
    known = load_faults(ROOT / "tests/mutants.yaml")
    if unknown := {*options.names} - {fault.name for fault in known}:
        parser.error(f"not in tests/mutants.yaml: {', '.join(sorted(unknown))}")
    faults = [fault for fault in known if fault.name in options.names or not options.names]

    # A signal ends the program in order, so that nothing of it stays behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ |= {"OMP_NUM_THREADS": "1", "SSL_BENCH_CHECK_SHAPES": "1"}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("SSL_BENCH_TEST_DATA", str(ROOT.resolve().parent / "shared/data"))
    for name in HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        original = Path(folder).resolve() / "original"
        copy_checkout(original)
        parts = [faults[i :: options.jobs] for i in range(options.jobs)]
        workers = [FORK.Process(target=check_faults, args=(part, original)) for part in parts]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.join()
    sys.exit(any(worker.exitcode for worker in workers))


if __name__ == "__main__":
    main()
