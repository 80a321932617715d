"""Check that the generated pages and figures match the committed measurements.

    python -m tests.benchmarks.generated [--write | --list]

The command generates each file again and lists the outdated files. With `--write`, the command
replaces outdated files. `--list` shows which files are checked and why others are not checked.
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
EVIDENCE_FILE = "results/benchmarks/evidence-cpu.json"
"""File with the results of the experiments."""
Generator = Callable[[Path], str | bytes]
"""A function that returns the content of a file, given the root of a checkout."""


def _json(root: Path, name: str) -> Any:
    return json.loads((root / "results/benchmarks" / name).read_text())


def _by(module: str, name: str, function: str = "page") -> Generator:
    """Return a function that generates a page from a JSON file."""
    return lambda root: getattr(import_module(f"tests.benchmarks.{module}"), function)(
        _json(root, name)
    )


def _evidence_figure(experiment: str, root: Path) -> bytes:
    from tests.benchmarks.evidence.page import draw

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "curve.svg"
        draw(experiment, _json(root, "evidence-cpu.json"), file)
        return file.read_bytes()


def _by_document(name: str, function: str) -> Generator:
    """Return a function that generates a file by running a script in docs."""
    return lambda root: runpy.run_path(str(root / "docs" / name))[function]()


def _records(folder: str, title: str) -> Generator:
    """Return a function that generates a page with all scores in results/FOLDER."""

    def generate_page(root: Path) -> str:
        records = ResultStore(root / "results" / folder).records()
        return f"# {title}\n\n{render_tables(depth_tables(records), 'markdown')}"

    return generate_page


def _devices(root: Path) -> str:
    from tests.benchmarks.gpu_report import page

    return page(root / "results/devices")


WHOLE: Mapping[str, Generator] = {
    "results/devices/README.md": _devices,
    **{
        f"results/tables/{name}.md": _records(folder, title)
        for name, folder, title in (
            ("demo_probes", "demo_probes", "Probes of the demonstration encoders"),
            ("dino_photographs_probes", "dino_photographs", "Probes of four short DINO runs"),
            ("photographs", "photographs", "Probes of small encoders on photographs"),
            ("real_probes", "real_probes", "Probes of a DINOv2 ViT-S/14"),
        )
    },
    "results/tables/evidence.md": _by("evidence.page", "evidence-cpu.json"),
    "results/tables/evidence_runs.md": _by("evidence.page", "evidence-cpu.json", "runs_page"),
    "results/tables/half_precision.md": _by("half_precision", "half_precision-cpu.json"),
    "results/tables/parameter_jacobians.md": _by(
        "parameter_jacobians", "parameter_jacobians-cpu.json"
    ),
    "docs/gallery.md": _by_document("_gallery.py", "page"),
    "docs/packages.svg": _by_document("_packages.py", "picture"),
}
"""The generators of files that are generated completely."""

# Tables whose programs are in the repository at the commits that the tables name.
_FINISHED = """
attentive box_intervals clustering clustering_intervals conditioning correspondence
decoding device_waits first_steps geometry initialisation initialisation_readings intervals
mimetic_copying osa_guesses pixels scale segmentation_full_size waiting_threads
"""

NOT_GENERATED = {
    **dict.fromkeys(
        (f"results/tables/{name}.md" for name in _FINISHED.split()),
        "its program is in the repository at the commit that it names",
    ),
    "results/tables/ap_orders.md": "the photographs are not committed",
    "results/tables/benchmarks.md": "tables of many programs at many commits, shortened by hand",
    "results/tables/dino_photographs.md": "the logs of the runs are not committed",
    "results/tables/osa_mnist.md": "the logs of the runs are not committed",
    "results/figures/dino_photographs.png": "the logs of the runs are not committed",
    "results/figures/mimetic_copying.png": "a PNG, whose bytes depend on the version of a library",
    "results/figures/osa_mnist.png": "the logs of the runs are not committed",
    "docs/front.png": "the weights of its encoder are not committed",
    "docs/front_demo.png": "a PNG, whose bytes depend on the version of a library; a test draws it",
    "docs/python.ipynb": "runs an encoder for half a minute; a test compares its code",
}
"""The reason why a file is not generated again."""


def evidence_figures(root: Path) -> dict[str, Generator]:
    """Return a mapping from the path of each figure to the function that draws it."""
    from tests.benchmarks.evidence.page import figure_name, figures

    names = figures(_json(root, "evidence-cpu.json"))
    return {f"results/figures/{figure_name(n)}": partial(_evidence_figure, n) for n in names}


def probe_pages(root: Path) -> dict[str, Generator]:
    """Return a mapping from the path of each page to the function that generates it."""
    from tests.benchmarks.cost import overview, probe_page, read_measurements

    tasks = read_measurements()["tasks"]
    pages = {f"docs/probes/{task}.md": partial(probe_page, task=task) for task in tasks}
    return {**pages, "docs/how_to/estimate.md": overview}


def generators(root: Path) -> dict[str, Generator]:
    """Return a mapping from the path of each checked file to the function that generates it."""
    return {**WHOLE, **evidence_figures(root), **probe_pages(root)}


def generate(root: Path) -> Iterator[tuple[str, bytes]]:
    for name, generator in generators(root).items():
        content = generator(root)
        yield name, content if isinstance(content, bytes) else content.encode()


def outdated(root: Path) -> Iterator[str]:
    for name, content in generate(root):
        if not (root / name).is_file() or (root / name).read_bytes() != content:
            yield name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the files that differ")
    parser.add_argument("--list", action="store_true", help="show which files are checked")
    options = parser.parse_args()
    if options.list:
        for name in generators(ROOT):
            print(f"{name}: checked")
        for name, reason in NOT_GENERATED.items():
            print(f"{name}: not generated again: {reason}")
        return
    if options.write:
        for name, content in generate(ROOT):
            (ROOT / name).write_bytes(content)
    if names := list(outdated(ROOT)):
        command = "`python -m tests.benchmarks.generated --write` replaces them:"
        raise SystemExit("\n".join([f"files that differ from their records; {command}", *names]))
    print(f"{len(generators(ROOT))} files agree with their records")


if __name__ == "__main__":
    main()
