"""What it costs that threads spin while they wait for each other, and what, that they sleep.

    python -m tests.benchmarks.waiting_threads --json FILE --table FILE

A ViT of 12 narrow blocks is pretrained for a few steps, alone and beside a process that keeps one
core busy; threads wait as OpenMP does by default, and asleep as `ssl-bench` asks for.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.benchmarks.apart import rounded, usage_of
from tests.benchmarks.provenance import provenance

# Another runtime's name for its default, so that the command leaves the policy alone.
POLICIES = {"spinning": {"KMP_BLOCKTIME": "200"}, "asleep": {"OMP_WAIT_POLICY": "PASSIVE"}}
RUN = (
    "pretrain", "model=vit_tiny_skip", "model.image_size=64", "model.patch_size=8",
    "objective.out_dim=1024", "objective.hidden_dim=512", "objective.crops.num_locals=4",
    "train.batch_size=16", "train.max_steps=12",
)  # fmt: skip


@contextmanager
def busy(cores: int) -> Iterator[None]:
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def measured(policy: str, neighbours: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, busy(neighbours):
        arguments = [*RUN, "--out", str(Path(folder) / "run")]
        usage, _ = usage_of("ssl_bench", arguments, environment=POLICIES[policy])
    return {"threads": policy, "busy_processes_beside": neighbours, **rounded(usage)}


def page(record: dict[str, Any]) -> str:
    lines = [
        "# Threads that wait",
        "",
        "Made by `tests/benchmarks/waiting_threads.py`: 12 steps of DINO, ViT-Ti at 64 pixels,",
        "in the order of the rows.",
        "",
        record["provenance"],
        "",
        "| threads wait | busy processes beside | seconds | CPU seconds |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row['threads']} | {row['busy_processes_beside']} | {row['seconds']:.1f} | "
        f"{row['cpu_seconds']:.1f} |"
        for row in record["rows"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    cases = [(policy, beside) for beside in (0, 1) for policy in POLICIES]
    rows = [measured(policy, beside) for policy, beside in 2 * cases]
    record = {"provenance": provenance(), "rows": rows}
    options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.table:
        options.table.write_text(page(record))
    print(page(record))


if __name__ == "__main__":
    main()
