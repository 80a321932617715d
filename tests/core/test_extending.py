"""Test the example files in docs/extending.md."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extending.md").read_text()
FILES = dict(re.findall(r"^`([\w/.]+)`:\n```\w+\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
# A program that runs the commands of the page in the current folder. Then it tests the dataset of
# the page in a copy of the suite, to which the files of the page were added.
RUN = """
import json, os, sys
suite, commands = sys.argv[1:]
sys.path.insert(0, suite)
import pytest
from ssl_bench.cli.__main__ import main
codes = [main(words) for words in json.loads(commands)]
os.chdir(suite)
contract = ["-q", "-p", "no:cacheprovider", "tests/data/test_configs.py", "-k", "listed"]
sys.exit(max(*codes, pytest.main(contract)))
"""


def commands() -> list[list[str]]:
    # The command with `toyvit:` needs an installed package: test_loader_contract.py runs it.
    lines = PAGE.replace("\\\n", " ").splitlines()
    shown = [line for line in lines if line.startswith("ssl-bench ") and "toyvit:" not in line]
    return [shlex.split(line)[1:] for line in shown]


def save_images(folder: Path) -> None:
    (folder / "a").mkdir(parents=True)
    random = np.random.default_rng(0)
    rows = [f"a/{number}.png class{number % 2}\n" for number in range(8)]
    for row in rows:
        noise = random.integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / row.split()[0])
    (folder / "train.txt").write_text("".join(rows[:6]))
    (folder / "val.txt").write_text("".join(rows[6:]))


def run_python(folder: Path, *command: str) -> str:
    ran = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_the_files_of_the_page_pass_the_linter_and_run(tmp_path):
    suite, place = tmp_path / "suite", tmp_path / "place"
    folders = ("ssl_bench", "probes", "pretrain", "configs", "tests", "docs", "results/demo")
    for name in folders:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, suite / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", suite)
    for path, text in FILES.items():
        assert not (suite / path).exists()
        (suite / path).parent.mkdir(exist_ok=True)
        (suite / path).write_text(text)
    save_images(place / "photos")
    python = sorted(path for path in FILES if path.endswith(".py"))

    run_python(suite, "-m", "ruff", "format", "--check", "--no-cache", *python)
    run_python(suite, "-m", "ruff", "check", "--no-cache", *python)
    printed = run_python(place, "-c", RUN, str(suite), json.dumps(commands()))

    assert "class_means: accuracy (%) on toy_objects val" in printed
    records = list((place / "out/records").rglob("*.json"))
    assert {path.parent.parent.name for path in records} == {"class_means", "reconstruction", "knn"}
