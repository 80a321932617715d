"""The documentation builds, and its text, tables and pictures say what holds.

Its commands: test_page_commands.py and test_page_runs.py.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from ssl_bench import errors
from ssl_bench.cli.__main__ import main
from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import compose_config
from ssl_bench.models import ViTConfig, build_vit, save_encoder
from tests.support.faults import unchecked_types
from tests.support.page_commands import ROOT


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_without_the_network(tmp_path):
    words = ["-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}

    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    lines = [line.split("-", 1)[-1].strip() for line in (done.stdout + done.stderr).splitlines()]
    assert [line.partition(" ")[0] for line in lines] == ["Cleaning", "Building", "Documentation"]
    page = (tmp_path / "site" / "index.html").read_text()
    assert not re.findall(r'(?:src|href)="(?:https?:)?//[^"]+\.(?:js|css|woff2?)', page)
    assert (tmp_path / "site" / "results" / "log.html").is_file()
    assert "**" not in re.sub(r"<(code|pre).*?</\1>", "", page, flags=re.DOTALL)


def test_the_picture_of_the_rooms_shows_the_contracts_of_imports():
    rooms = runpy.run_path(str(ROOT / "docs/_rooms.py"))

    drawn = rooms["picture"]()

    assert (ROOT / "docs/rooms.svg").read_text() == drawn, "run: python docs/_rooms.py"
    assert [drawn.count(f">{room}</text>") for room in ("ssl_bench/cli/", "heads", "mimetic")] == [
        1, 1, 0,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def maker() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs/_notebook.py"))


def notebook() -> list[dict[str, Any]]:
    return json.loads((ROOT / "docs/python.ipynb").read_text())["cells"]


def test_the_notebook_is_its_page_with_outputs_and_a_picture(maker):
    cells = notebook()
    shown = [output for cell in cells for output in cell.get("outputs", [])]

    assert [(c["cell_type"], "".join(c["source"])) for c in cells] == maker["cells"]()
    code = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/python.md").read_text(), re.S | re.M)
    assert [c.rstrip() for c in code] == [t for kind, t in maker["cells"]() if kind == "code"]
    kinds = [output["output_type"] for output in shown]
    assert kinds.count("display_data") == 1
    assert set(kinds) == {"stream", "display_data"}
    assert (ROOT / "docs/python.ipynb").stat().st_size < 300_000
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users)/", str(said(cells)))


@pytest.mark.slow
def test_the_notebook_says_what_its_code_says(maker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with unchecked_types():
        again = maker["notebook"]()["cells"]

    assert said(notebook()) == said(again), "run: python docs/_notebook.py"


def said(cells: list[dict[str, Any]]) -> list[str]:
    """What cells print, without the commit, versions, machine and date that follow a table."""
    texts = ["".join(o["text"]) for c in cells for o in c.get("outputs", []) if "text" in o]
    return [re.sub(r"; ssl-bench [^\n]*?\d{4}-\d\d-\d\d", "", text) for text in texts]


ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
HOPS = re.findall(r"^\| \d+ \| `([\w/.]+)` \| `([\w.]+)` \|", ARCHITECTURE, re.MULTILINE)
SMALL = (
    *("--checkpoint", "skip.safetensors", "--dataset", "toy", "dataset.num_train=4"),
    *("dataset.num_val=3", "probe.training.epochs=1", "probe.image_size=32", "probe.panels=0"),
)


def test_one_call_enters_what_the_page_says_in_its_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = ViTConfig(image_size=32, patch_size=8, dim=12, depth=2, num_heads=2)
    save_encoder(tmp_path / "skip.safetensors", build_vit(config, seed=0), {})
    shown = re.search(r"^`ssl-bench (probe .*?)` enters", ARCHITECTURE, re.MULTILINE)
    assert shown
    entered: dict[tuple[str, str], None] = {}

    def enter(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{ROOT}/"):
            file = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
            entered.setdefault((file, frame.f_code.co_qualname))

    sys.setprofile(enter)
    try:
        code = main([*shown[1].split(), *SMALL])
    finally:
        sys.setprofile(None)

    assert code == 0
    assert [hop for hop in entered if hop in HOPS] == HOPS


def test_every_room_of_the_page_is_there():
    rooms = ARCHITECTURE.partition("| room |")[2].partition("\n\n")[0]
    paths = re.findall(r"^\| (.*?) \|", rooms, re.MULTILINE)
    for names in (re.findall(r"`([\w/.]+)`", row) for row in paths):
        folder = "ssl_bench/" if names and names[0].startswith("ssl_bench/") else ""
        for name in names:
            assert (ROOT / name).exists() or (ROOT / folder / name).exists(), name


PRETRAINING = (ROOT / "docs/pretraining.md").read_text()
SECTIONS = {"dino": "DINO", "mae": "MAE", "supervised": "Supervised training", "copying": "Copying"}
PLACES = ("crops", "_target_")


def section(name: str) -> str:
    found = re.search(
        rf"^## {SECTIONS[name]}\n(.*?)(?=^## )", PRETRAINING, re.DOTALL | re.MULTILINE
    )
    assert found
    return found[1]


def stated(name: str) -> dict[str, Any]:
    """Default by key, from the rows of the section's first table."""
    found = {}
    for keys, defaults in re.findall(r"^\| (`objective\.[^|]*) \| ([^|]*) \|", section(name), re.M):
        names = [key.removeprefix("objective.") for key in re.findall(r"`([^`]+)`", keys)]
        found |= dict(zip(names, yaml.safe_load(f"[{defaults}]"), strict=True))
    return found


def at(config: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        config = config[part]
    return config


@pytest.mark.parametrize("name", SECTIONS)
def test_a_table_has_every_key_of_its_objective_with_the_default(name):
    config = compose_config("pretraining", [f"objective={name}"])["objective"]

    table = stated(name)

    assert set(choices("objective")) == set(SECTIONS)
    assert f"objective={name}" in section(name)
    assert {key for key in table if "." not in key} == {k for k in config if k not in PLACES}
    assert table == {key: at(config, key) for key in table}


RELIABILITY = ROOT / "docs/reliability.md"
CODES = {0, errors.INTERRUPTED} | {
    kind.exit_code
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.SslBenchError) and kind.exit_code > 1
}


def catalogue() -> dict[int, dict[str, str]]:
    return yaml.safe_load((ROOT / "docs/_faults.yaml").read_text())


def test_the_table_of_faults_is_the_one_that_holds():
    faults = runpy.run_path(str(ROOT / "docs/_faults.py"))
    assert list(catalogue()) == list(range(1, len(catalogue()) + 1))
    assert RELIABILITY.read_text() == faults["page"](), "run: python docs/_faults.py"


def test_the_exit_codes_of_the_page_are_those_of_the_errors():
    listed = re.search(r"Exit codes: (.*?)\. `--debug`", RELIABILITY.read_text(), re.DOTALL)
    assert listed
    assert {int(code) for code in re.findall(r"\b\d+\b", listed[1])} == CODES
    first = [re.match(r"(\d+)( |$)", row["outcome"]) for row in catalogue().values()]
    assert {int(found[1]) for found in first if found} <= CODES


@pytest.fixture(scope="module")
def gallery() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs/_gallery.py"))


def test_the_gallery_is_of_the_records_that_there_are(gallery):
    assert (ROOT / "docs/gallery.md").read_text() == gallery["page"](), (
        "run: python docs/_gallery.py"
    )


@pytest.mark.slow
def test_the_pictures_of_the_gallery_are_drawn_from_these_records(gallery, tmp_path):
    gallery["draw"](tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in gallery["PICTURES"].iterdir()}
    for name in names:
        assert _differ_by(tmp_path / name, gallery["PICTURES"] / name) < 2, (
            "run: python docs/_gallery.py"
        )


@pytest.mark.slow
def test_a_photograph_over_the_blocks_of_an_encoder_that_comes_along(tmp_path, monkeypatch):
    front = runpy.run_path(str(ROOT / "docs/_front.py"))
    drawn = tmp_path / "front.png"
    monkeypatch.setattr("sys.argv", ["_front.py", "--out", str(drawn)])
    front["main"]()
    assert _differ_by(drawn, front["PICTURE"]) < 2, "run: python docs/_front.py"


def _differ_by(*files: Path) -> float:
    """Of a pixel on average; fonts are drawn a little otherwise elsewhere."""
    new, there = (np.asarray(Image.open(file).convert("RGB"), dtype=float) for file in files)
    assert new.shape == there.shape
    return np.abs(new - there).mean()
