"""What the geometry of a data set costs beside the plain pass of its images through the encoder.

    python -m tests.benchmarks.geometry --data PHOTOS --json FILE --table FILE

A ViT-Ti/16 before any training, all of its blocks. The plain pass reads the same images, cuts the
same squares and takes [CLS] and patches of every block after the final norm; nothing is kept.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from probes.features.stream import batches, read_ahead
from probes.geometry.probe import Geometry
from ssl_bench.data.central_square import central_square
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.limited import LimitedDataset
from ssl_bench.evaluation import ProbeContext
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import Encoder, ViTConfig, build_vit, encoder_from_model
from ssl_bench.system.progress import show_progress
from tests.benchmarks.provenance import provenance

MODEL = ViTConfig(dim=192, num_heads=3)


def plain_pass(context: ProbeContext, probe: Geometry, size: int) -> int:
    """All images through the encoder; gives back how many."""
    images = probe.split(context.dataset)
    extractor = FeatureExtractor(
        context.encoder, layers=context.layers, facets=("cls_normed", "token_normed")
    )
    squares = read_ahead(
        images,
        range(len(images)),
        lambda sample: central_square(sample.image, size, share=probe.crop_share),
        workers=probe.num_workers,
    )
    shown = context.progress(squares, "plain pass", len(images))
    for batch in batches(shown, probe.batch_size):
        extractor(torch.stack(batch).float() / 255)
    return len(images)


def measured(name: str, work: Callable[[], int]) -> dict[str, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    count = work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"work": name, "images": count, "seconds": round(wall, 1), "cpu_seconds": round(cpu, 1)}


def rows_of(options: argparse.Namespace, encoder: Encoder) -> Iterable[dict[str, Any]]:
    probe = Geometry(image_size=options.size)
    context = ProbeContext(
        encoder=encoder,
        dataset=LimitedDataset(ImageFolder(options.data), options.limit),
        layers=tuple(range(encoder.depth)),
        device=torch.device("cpu"),
        dtype=torch.float32,
        seed=0,
        artifacts=Path(),
        progress=show_progress,
    )

    def scored() -> int:
        list(probe.run(context))
        return len(probe.split(context.dataset))

    for _ in range(options.rounds):
        yield measured("plain pass", lambda: plain_pass(context, probe, options.size))
        yield measured("geometry", scored)


def page(record: dict[str, Any]) -> str:
    rows = record["rows"]
    plain, whole = (
        sum(row["cpu_seconds"] for row in rows if (row["work"] == "plain pass") == is_plain)
        for is_plain in (True, False)
    )
    lines = [
        "# Geometry beside the plain pass",
        "",
        "Made by `tests/benchmarks/geometry.py`: photographs through all 12 blocks of a ViT-Ti/16",
        f"at {record['size']} pixels, in the order of the rows. Other work ran on the machine, so",
        "that processor seconds compare and seconds do not.",
        "",
        record["provenance"],
        "",
        "| work | images | seconds | processor seconds |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row['work']} | {row['images']} | {row['seconds']:.1f} | {row['cpu_seconds']:.1f} |"
        for row in rows
    ]
    share = f"The probe takes {whole / plain:.2f} times the processor seconds of the plain pass."
    return "\n".join([*lines, "", share]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--limit", type=int, default=2000)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    encoder = encoder_from_model(build_vit(MODEL, seed=0), name="vit_tiny")
    rows = list(rows_of(options, encoder))
    record = {"provenance": provenance(), "size": options.size, "rows": rows}
    options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.table:
        options.table.write_text(page(record))
    print(page(record))


if __name__ == "__main__":
    main()
