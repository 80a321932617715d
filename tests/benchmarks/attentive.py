"""What attentive heads of all blocks and rates cost beside one head of one block and one rate.

    python -m tests.benchmarks.attentive --json FILE --table FILE

Each case is a command of its own, from start to records: a ViT-S of random weights at 128 pixels,
labelled toy objects, the probe as it is by default. Processors' seconds, so that neighbours on the
machine count little.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from ssl_bench.models import ViTConfig, build_vit, save_encoder
from tests.benchmarks.apart import rounded, usage_of
from tests.benchmarks.provenance import provenance

ENCODER = ViTConfig(image_size=128, patch_size=16, dim=384, depth=12, num_heads=6)
CASES = {
    "one block, one rate": ("--layer", "11", "probe.pool.learning_rates=[1.0]"),
    "one block, 8 rates": ("--layer", "11"),
    "12 blocks, 8 rates": ("--layer", "all"),
}
MOST = 8.0


def measured(name: str, folder: Path) -> dict[str, Any]:
    out = str(folder / name.replace(" ", "_"))
    arguments = [
        *("probe", "--task", "classification", "--dataset", "toy_objects"),
        *("--checkpoint", str(folder / "encoder.safetensors"), "--out", out),
        *("probe.pool=attentive", *CASES[name]),
    ]
    usage, _ = usage_of("ssl_bench", arguments, environment={"XDG_CACHE_HOME": str(folder)})
    paths = sorted(Path(out).rglob("*.json"))
    details = next(
        one["details"]
        for one in (json.loads(path.read_text()) for path in paths)
        if isinstance(one, dict) and "details" in one
    )
    heads = {"head_seconds": details["train_seconds"], "images": details["num_train_images"]}
    return {"case": name, **rounded(usage), **heads}


def page(record: dict[str, Any]) -> str:
    rows = record["rows"]
    first = rows[0]["cpu_seconds"]
    lines = [
        "# Attentive heads",
        "",
        "Made by `tests/benchmarks/attentive.py`: ViT-S of random weights, 64 patches an image,",
        f"{rows[0]['images']} training images and 20 epochs, each case a command from start to",
        f"records. All blocks and rates are promised for at most {MOST:g} times one of each.",
        "",
        record["provenance"],
        "",
        "| heads | CPU seconds | times the first | of these heads, wall seconds | peak MiB |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['case']} | {row['cpu_seconds']:.0f} | {row['cpu_seconds'] / first:.2f} | "
        f"{row['head_seconds']:.1f} | {row['peak_mebibytes']:.0f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_encoder(folder / "encoder.safetensors", build_vit(ENCODER, seed=0), {})
        rows = [measured(case, folder) for case in CASES]
    record = {"provenance": provenance(), "rows": rows}
    options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.table:
        options.table.write_text(page(record))
    print(page(record))


if __name__ == "__main__":
    main()
