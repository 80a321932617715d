"""Whether what is generated of the pages and pictures is what the committed records say.

    python -m tests.benchmarks.generated [--write | --list]

Makes every page and table again that can be made in seconds from what is committed, and names the
files that differ; `--write` leaves what was made in their place. `--list` says how each file of
results/tables and results/figures, and of docs/ what is made, is checked, or why it cannot be.
"""

import argparse
import json
import runpy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ssl_bench.results import ResultStore
from ssl_bench.tables.depth import depth_tables
from ssl_bench.tables.sheets import render_tables

ROOT = Path(__file__).parents[2]
LEDGER = "results/benchmarks/evidence-cpu.json"
"""What the runs of the queue of evidence reached."""
Make = Callable[[Path], str | bytes]
"""From the root of a checkout to what a file has to hold."""


def _json(root: Path, name: str) -> Any:
    return json.loads((root / "results/benchmarks" / name).read_text())


def _made(module: str, function: str, name: str, root: Path) -> str:
    """What a benchmark's own function makes of its file of figures."""
    return getattr(import_module(f"tests.benchmarks.{module}"), function)(_json(root, name))


def _by(module: str, name: str, function: str = "page") -> Make:
    return partial(_made, module, function, name)


def _evidence_figure(row: str, root: Path) -> bytes:
    from tests.benchmarks.evidence.page import draw

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "curve.svg"
        draw(row, _json(root, "evidence-cpu.json"), file)
        return file.read_bytes()


def _by_document(name: str, function: str, root: Path) -> str:
    """What a program in docs/ makes."""
    return runpy.run_path(str(root / "docs" / name))[function]()


def _records(folder: str, title: str, root: Path) -> str:
    """Return a page with all tables of a folder of records."""
    tables = render_tables(depth_tables(ResultStore(root / folder).records()), "markdown")
    return f"# {title}\n\n{tables}"


def _devices(root: Path) -> str:
    from tests.benchmarks.gpu_report import page

    return page(root / "results/devices")


WHOLE: Mapping[str, Make] = {
    "results/devices/README.md": _devices,
    "results/tables/demo_probes.md": partial(
        _records, "results/demo_probes", "Probes of the demonstration encoders"
    ),
    "results/tables/dino_photographs_probes.md": partial(
        _records, "results/dino_photographs", "Probes of four short DINO runs"
    ),
    "results/tables/evidence.md": _by("evidence.page", "evidence-cpu.json"),
    "results/tables/evidence_runs.md": _by("evidence.page", "evidence-cpu.json", "runs_page"),
    "results/tables/parameter_jacobians.md": _by(
        "parameter_jacobians", "parameter_jacobians-cpu.json"
    ),
    "results/tables/photographs.md": partial(
        _records, "results/photographs", "Probes of small encoders on photographs"
    ),
    "results/tables/real_probes.md": partial(
        _records, "results/real_probes", "Probes of a DINOv2 ViT-S/14"
    ),
    "docs/gallery.md": partial(_by_document, "_gallery.py", "page"),
    "docs/packages.svg": partial(_by_document, "_packages.py", "picture"),
}
"""Files whose every byte is made."""

# Tables whose programs stood in the repository at the commits that they name.
_FINISHED = """
attentive bfloat16 box_intervals clustering clustering_intervals conditioning correspondence
decoding device_waits first_steps geometry initialisation initialisation_readings intervals
mimetic_copying osa_guesses pixels scale segmentation_full_size waiting_threads
"""

NOT_MADE = {
    **dict.fromkeys(
        (f"results/tables/{name}.md" for name in _FINISHED.split()),
        "its program stood in the repository at the commit that it names",
    ),
    "results/tables/ap_orders.md": "the photographs are not committed",
    "results/tables/benchmarks.md": "tables of many programs at many commits, cut by hand",
    "results/tables/dino_photographs.md": "the logs of the runs are not committed",
    "results/tables/osa_mnist.md": "the logs of the runs are not committed",
    "results/figures/dino_photographs.png": "the logs of the runs are not committed",
    "results/figures/mimetic_copying.png": "PNG, whose bytes change with the library",
    "results/figures/osa_mnist.png": "the logs of the runs are not committed",
    "docs/front.png": "the weights of its encoder are not committed",
    "docs/front_demo.png": "PNG, whose bytes change with the library; a test draws it again",
    "docs/python.ipynb": "runs an encoder, half a minute; a test compares its code",
}
"""And why."""


def evidence_figures(root: Path) -> dict[str, Make]:
    """Pictures of the queue, of rows that have a finished run."""
    from tests.benchmarks.evidence.page import figure_name, figures

    rows = figures(_json(root, "evidence-cpu.json"))
    return {f"results/figures/{figure_name(row)}": partial(_evidence_figure, row) for row in rows}


def made(root: Path) -> Iterator[tuple[str, bytes]]:
    """What each file has to hold."""
    for name, make in {**WHOLE, **evidence_figures(root)}.items():
        found = make(root)
        yield name, found if isinstance(found, bytes) else found.encode()


def stale(root: Path) -> Iterator[str]:
    """Names of the files that are not what they would be if they were made now."""
    for name, wanted in made(root):
        if _content(root / name) != wanted:
            yield name


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="leave what was made in their place")
    parser.add_argument("--list", action="store_true", help="what is made, and what is not")
    options = parser.parse_args()
    if options.list:
        for name in {**WHOLE, **evidence_figures(ROOT)}:
            print(f"{name}: every byte")
        for name, why in NOT_MADE.items():
            print(f"{name}: not made again, {why}")
        return
    if options.write:
        for name, content in made(ROOT):
            (ROOT / name).write_bytes(content)
    found = list(stale(ROOT))
    if found:
        again = "`python -m tests.benchmarks.generated --write` makes them again:"
        raise SystemExit("\n".join([f"not what their records say; {again}", *found]))
    print(f"{len(WHOLE) + len(evidence_figures(ROOT))} files are what they would be")


if __name__ == "__main__":
    main()
