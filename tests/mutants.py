"""Check that the tests find bugs that are added to the code on purpose (mutation testing).

    python -m tests.mutants [NAME ...] [--jobs N]

The file tests/mutants.yaml lists the bugs ("mutants"). The program adds one bug at a time to a
temporary copy of the repository. The program prints a line for each bug and exits with 1 if the
tests miss a bug.
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
# Importing these takes longer than most tests, so the parent process imports them once.
HEAVY = (
    "torch", "torchvision", "torch._dynamo", "timm", "sklearn.cluster", "sklearn.metrics",
    "scipy.stats", "scipy.sparse.linalg", "skimage.measure", "pandas", "pyarrow.parquet", "cv2",
    "faiss", "hydra", "omegaconf", "matplotlib.pyplot", "jinja2", "jaxtyping", "beartype.door",
    "hypothesis", "tqdm", "safetensors.torch",
)  # fmt: skip
MARKERS = "not gpu and not browser"
LIMIT_SECONDS = 180
FORK = mp.get_context("fork")


@dataclass(frozen=True)
class Mutant:
    """A bug that at least one of `tests` must find."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def plant(self, tree: Path) -> bool:
        """Replace the text `old` in a file. Return whether the file contained this text."""
        path = tree / self.file
        # The file is a hard link, so writing to it would change the other copies.
        text = path.read_text()
        path.unlink()
        path.write_text(text.replace(self.old, self.new, 1))
        Path(cache_from_source(str(path))).unlink(missing_ok=True)
        return self.old in text


def load_mutants(path: Path) -> list[Mutant]:
    return [Mutant(**fields) for fields in yaml.safe_load(path.read_text())]


@dataclass(eq=False)
class FirstFailure:
    """A pytest plugin that stores the name of the first failed test."""

    test: str = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.test = self.test or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.test = self.test or report.nodeid


def run_pytest(tree: Path, tests: Sequence[str], connection: Connection) -> None:
    """Run tests. Send the exit code and the name of the first failed test through a pipe."""
    os.setsid()
    os.chdir(tree)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Python ignores this signal in a program that the shell started in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    sys.path[:] = [str(tree), *(p for p in sys.path if Path(p).resolve() != ROOT.resolve())]
    os.environ["PYTHONPATH"] = str(tree)
    for name in [n for n in sys.modules if n.split(".")[0] == "tests"]:
        del sys.modules[name]
    first = FirstFailure()
    words = ["-x", "-m", MARKERS, f"--basetemp={tree}-tmp-{os.getpid()}", "--hypothesis-seed=0"]
    connection.send((int(pytest.main([*words, *tests], plugins=[first])), first.test))


def find_failure(tree: Path, tests: Sequence[str]) -> str:
    """Run tests in a new process. Return the first failed test, or "" if all tests pass."""
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
        # Processes that the tests started are in the same process group.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
        process.join()
        shutil.rmtree(f"{tree}-tmp-{process.pid}", ignore_errors=True)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        raise SystemExit(f"error: pytest ended with {code}; run pytest on {' '.join(tests)}")
    return test


def check_mutant(mutant: Mutant, original: Path, passing: set[str]) -> str:
    """Return a text that names the test that detected the mutant, or says that none did."""
    tree = original.with_name(mutant.name)
    shutil.copytree(original, tree, symlinks=True, copy_function=os.link)
    try:
        if not mutant.plant(tree):
            return "OLD TEXT NOT FOUND"
        test = find_failure(tree, mutant.tests)
    finally:
        shutil.rmtree(tree)
    if not test:
        return "SURVIVED"
    # If a test file cannot be imported, only its name is known.
    if ".py" in test and test not in passing:
        if find_failure(original, [test]):
            return f"{test} FAILS WITHOUT THE MUTANT"
        passing.add(test)
    return f"caught by {test}"


def check_mutants(mutants: Sequence[Mutant], original: Path) -> None:
    """Add each bug in turn and run the tests. Exit with 1 if the tests miss a bug."""
    passing: set[str] = set()
    results = []
    for mutant in mutants:
        start = time.monotonic()
        results.append(check_mutant(mutant, original, passing))
        print(f"{mutant.name}: {results[-1]} ({time.monotonic() - start:.0f} s)", flush=True)
    sys.exit(any(not result.startswith("caught") for result in results))


def copy_checkout(folder: Path) -> None:
    """Copy all files that git does not ignore, and compile the Python files."""
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
    parser.add_argument("names", metavar="NAME", nargs="*", help="mutants to plant (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default: 1)")
    options = parser.parse_args(words)
    known = load_mutants(ROOT / "tests/mutants.yaml")
    if unknown := {*options.names} - {mutant.name for mutant in known}:
        parser.error(f"not in tests/mutants.yaml: {', '.join(sorted(unknown))}")
    mutants = [mutant for mutant in known if mutant.name in options.names or not options.names]

    # After a signal, the `finally` blocks still remove all files and processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ |= {"OMP_NUM_THREADS": "1", "SSL_BENCH_CHECK_SHAPES": "1"}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("SSL_BENCH_TEST_DATA", str(ROOT.resolve().parent / "shared/data"))
    for name in HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        original = Path(folder).resolve() / "original"
        copy_checkout(original)
        parts = [mutants[i :: options.jobs] for i in range(options.jobs)]
        workers = [FORK.Process(target=check_mutants, args=(part, original)) for part in parts]
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
