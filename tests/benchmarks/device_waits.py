r"""How often the host waits for a GPU, by unit of work, counted on the simulated device.

    python -m tests.benchmarks.device_waits --column before \
        --json results/benchmarks/device_waits.json --table results/tables/device_waits.md

Counts, not times: they do not depend on the machine. A column that is in the file already is
replaced, the others stay. `--places` prints the files and lines.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.provenance import provenance
from tests.support.simulated_cuda import simulation, why_not

_INTRODUCTION = """\
# Waits for the device

Counted on the simulated device of `tests/support/simulated_cuda`; no GPU was used and no time was
measured. In each field: how often the host reads something back and waits for it, and after the
stroke how often it sends something from memory that is not pinned, which waits unless it is small
and nobody asked to wait. A training step is DINO's with AdamW, four blocks that pass three times,
between refreshes of SOAP's bases or with one; a step of a run is all that `ssl-bench pretrain` does
in one, two blocks; all else is of twelve blocks, a batch of three images, heads with two learning
rates.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--column", default="now")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--places", action="store_true")
    parser.add_argument("--unit", help="part of the names that are counted")
    options = parser.parse_args(arguments)
    if (reason := why_not()) is not None:
        raise SystemExit(reason)
    torch.set_num_threads(1)
    # Before a GPU is there that the line about the machine would name.
    line = provenance()
    counts = counted(options.unit or "", places=options.places)
    kept = json.loads(options.json.read_text()) if options.json and options.json.is_file() else {}
    columns = kept | {options.column: {"provenance": line, "counts": counts}}
    if options.json:
        options.json.write_text(json.dumps(columns, indent=1) + "\n")
    if options.table:
        options.table.write_text(table(columns))
    print(table(columns))


def counted(part: str, *, places: bool) -> dict[str, Any]:
    """Waits and uploads of every unit whose name holds `part`."""
    found = {}
    with simulation(), tempfile.TemporaryDirectory() as folder:
        # They ask for the device when they are imported.
        from tests.device.units import UNITS

        for name, unit in UNITS.items():
            if part in name:
                counts = unit(Path(folder))
                found[name] = {"waits": counts.waits, "uploads": counts.uploads}
                for place, times in counts.places.items() if places else ():
                    print(f"{name}: {times:g} {place}")
    return found


def table(columns: Mapping[str, Any]) -> str:
    """Units by column, Markdown."""
    names = dict.fromkeys(name for column in columns.values() for name in column["counts"])
    lines = [_INTRODUCTION]
    lines += [f"{title}: {column['provenance']}\n" for title, column in columns.items()]
    lines += ["| unit | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for name in names:
        cells = (_cell(column["counts"].get(name)) for column in columns.values())
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(counts: Mapping[str, float] | None) -> str:
    return "-" if counts is None else f"{counts['waits']:.4g} / {counts['uploads']:.4g}"


if __name__ == "__main__":
    main()
