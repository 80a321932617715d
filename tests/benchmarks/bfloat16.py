r"""What bfloat16 changes in every metric of every probe, block by block, on a CPU.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bfloat16 \
        --encoder skip=RUN --encoder skipless=RUN --photos PHOTOS --classes CLASS_FOLDERS \
        --json results/benchmarks/bfloat16.json --table results/tables/bfloat16.md

Each probe runs twice on the same images with the same seed, with `dtype=float32` and with
`dtype=bfloat16`, which is autocast around the encoder; what follows the encoder is float32 in both.
Photographs of few classes and few pixels: the changes are of interest, not the scores. Encoders
that are in the file already and are not asked for stay.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ssl_bench.evaluation import Evaluation
from ssl_bench.features import FeatureExtractor
from ssl_bench.layers import Facet
from ssl_bench.models import Encoder, load_encoder
from ssl_bench.planning import plan_probes
from ssl_bench.results import Record, ResultStore
from ssl_bench.system.progress import say
from tests.benchmarks.provenance import provenance

Row = dict[str, Any]
DTYPES = (torch.float32, torch.bfloat16)
FACETS: tuple[Facet, ...] = ("token", "key")
TOY = ("dataset.num_train=24", "dataset.num_val=16")
_HEADS = ("probe.training.epochs=3", "probe.training.learning_rates=[1e-3,1e-2]")
SMALL = ("probe.image_size=128",)
_INTRODUCTION = """\
# float32 and bfloat16

Each probe ran twice on the same images with the same seed, with `dtype=float32` and with
`dtype=bfloat16`: autocast around the encoder, on a CPU; all that follows the encoder is float32 in
both. The encoders are runs of `experiment=dino_photographs` that were ended after four minutes of
one shared core: the changes are of interest here, not the scores. The interval is half of that of
95 % over the images of the float32 score, the widest of all blocks. Conditioning is float64
whatever `dtype` says.
"""


@dataclass(frozen=True)
class Question:
    """A probe on a dataset."""

    task: str
    dataset: str
    overrides: Sequence[str] = ()


QUESTIONS = (
    *(
        Question(task, dataset, (*more, *(TOY if dataset == "toy" else ())))
        for dataset in ("toy", "voc2012")
        for task, more in {
            "segmentation": (*SMALL, "probe.panels=0", *_HEADS),
            "retrieval": SMALL,
            "pca": (*SMALL, "probe.panels=8"),
        }.items()
    ),
    Question("tokencut", "toy", ("probe.panels=0", *TOY)),
    Question("tokencut", "coco20k", ("probe.panels=0",)),
    Question("conditioning", "voc2012", ("probe.image_size=64", "probe.num_images=2")),
    Question("knn", "class_folders", ("probe.facet=[cls,patch_mean]", "probe.neighbours=[20]")),
    Question("classification", "class_folders"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoder", action="append", required=True, help="NAME=RUN")
    parser.add_argument("--photos", required=True, help="a folder with VOCdevkit and COCO")
    parser.add_argument("--classes", required=True, help="a folder of class folders")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--table", type=Path, required=True)
    options = parser.parse_args(arguments)
    photos, classes = options.photos, options.classes
    roots = {"voc2012": photos, "coco20k": f"{photos}/COCO", "class_folders": classes}
    line = provenance()
    for name, uri in (named.split("=", 1) for named in options.encoder):
        found = {
            "provenance": line,
            "encoder": _described(load_encoder(uri)),
            "features": list(feature_errors(name, uri, roots)),
            "rows": list(rows(name, uri, roots)),
        }
        kept = json.loads(options.json.read_text()) if options.json.is_file() else {}
        every = dict(sorted((kept | {name: found}).items()))
        options.json.write_text(json.dumps(every, indent=1) + "\n")
        options.table.write_text(page(every))


def _described(encoder: Encoder) -> str:
    epoch = encoder.contents.epoch
    length = "of unknown training" if epoch is None else f"{epoch:.2g} epochs"
    return f"ViT of width {encoder.dim} and {encoder.depth} blocks, {length}"


def rows(name: str, uri: str, roots: Mapping[str, str]) -> Iterator[Row]:
    """A metric of a facet in both types, by block."""
    for question in QUESTIONS:
        say(f"{name}: {question.task} on {question.dataset}")
        plain, low = (
            {
                cell: list(records)
                for cell, records in groupby(_records(uri, question, roots, dtype), key=_cell)
            }
            for dtype in DTYPES
        )
        for (facet, metric), records in plain.items():
            yield {
                "encoder": name,
                "task": question.task,
                "dataset": records[0].dataset,
                "facet": facet,
                "metric": metric,
                "unit": records[0].unit,
                "images": records[0].num_images,
                "blocks": [record.layer for record in records],
                "float32": [record.value for record in records],
                "bfloat16": [record.value for record in low[facet, metric]],
                "half_width": [_half_width(record) for record in records],
            }


def _cell(record: Record) -> tuple[str, str]:
    return record.facet, record.metric


def _records(
    uri: str, question: Question, roots: Mapping[str, str], dtype: torch.dtype
) -> list[Record]:
    """Sorted by metric and block."""
    encoder = load_encoder(uri)
    (plan,) = plan_probes([question.task], [question.dataset], question.overrides, roots)
    layers = range(encoder.depth)
    with tempfile.TemporaryDirectory() as folder:
        evaluation = Evaluation(
            encoder, plan.dataset, plan.probe, tuple(layers), 0, torch.device("cpu"), dtype
        )
        found = evaluation.run(ResultStore(Path(folder)), say=lambda _: None)
    return sorted(found, key=lambda record: (*_cell(record), record.layer))


def _half_width(record: Record) -> float | None:
    return None if record.ci95 is None else (record.ci95[1] - record.ci95[0]) / 2


def feature_errors(name: str, uri: str, roots: Mapping[str, str]) -> Iterator[Row]:
    """Norm of the difference over the norm, all patches of four photographs, in percent."""
    (plan,) = plan_probes(["pca"], ["voc2012"], ["probe.panels=4"], roots)
    pictures: Any = plan.dataset
    images = torch.stack([_square(pictures.images()[index].image) for index in range(4)])
    encoder = load_encoder(uri)
    layers = range(encoder.depth)
    plain, low = (
        FeatureExtractor(encoder, layers=layers, facets=FACETS, dtype=dtype)(images)
        for dtype in DTYPES
    )
    for facet in FACETS:
        errors = [
            100 * ((low[i][facet] - plain[i][facet]).norm() / plain[i][facet].norm()).item()
            for i in layers
        ]
        yield {"encoder": name, "facet": facet, "percent": errors}


def _square(pixels: Any) -> torch.Tensor:
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
    return torch.nn.functional.interpolate(image, (128, 128), mode="bilinear", antialias=True)[0]


def page(found: Mapping[str, Any]) -> str:
    """Markdown: what changes most, the features themselves, every block."""
    every = [row for one in found.values() for row in one["rows"]]
    rows = [row for row in every if row["task"] != "conditioning"]
    lines = [_INTRODUCTION]
    lines += [f"{name}: {one['encoder']}; {one['provenance']}\n" for name, one in found.items()]
    lines += ["## The largest change of any block", "", *_largest(rows), ""]
    lines += [*_unchanged(every), ""]
    lines += ["## Features", "", "Norm of the change over the norm, %.", ""]
    lines += [
        *_features([row for one in found.values() for row in one["features"]]),
        "",
        "## Every block",
        "",
    ]
    lines += ["float32, and what bfloat16 adds to it.", "", *_blocks(rows)]
    return "\n".join(lines) + "\n"


def _largest(found: Sequence[Row]) -> Iterator[str]:
    names = list(dict.fromkeys(row["encoder"] for row in found))
    yield "| probe | " + " | ".join(f"{name} | interval" for name in names) + " |"
    yield "|---|" + "---:|---:|" * len(names)
    by_metric: dict[str, dict[str, Row]] = {}
    for row in found:
        by_metric.setdefault(_title(row), {})[row["encoder"]] = row
    for title, rows_of in by_metric.items():
        cells = [_extreme(rows_of[name]) for name in names]
        yield f"| {title} | " + " | ".join(cells) + " |"


def _unchanged(found: Sequence[Row]) -> Iterator[str]:
    changes = [one for row in found if row["task"] == "conditioning" for one in _changes(row)]
    different = sum(change != 0 for change in changes)
    yield f"Conditioning: {different} of {len(changes)} numbers differ."


def _extreme(row: Row) -> str:
    largest = max(_changes(row), key=abs)
    widths = [width for width in row["half_width"] if width is not None]
    return f"{_signed(largest)} | {f'{max(widths):.2g}' if widths else '-'}"


def _features(found: Sequence[Row]) -> Iterator[str]:
    blocks = range(len(found[0]["percent"]))
    yield "| encoder, facet | " + " | ".join(map(str, blocks)) + " |"
    yield "|---|" + "---:|" * len(blocks)
    for row in found:
        cells = " | ".join(f"{value:.2g}" for value in row["percent"])
        yield f"| {row['encoder']}, {row['facet']} | {cells} |"


def _blocks(found: Sequence[Row]) -> Iterator[str]:
    blocks = found[0]["blocks"]
    yield "| encoder, probe | " + " | ".join(map(str, blocks)) + " |"
    yield "|---|" + "---:|" * len(blocks)
    for row in found:
        cells = (
            f"{value:.4g} {_signed(change)}"
            for value, change in zip(row["float32"], _changes(row), strict=True)
        )
        yield f"| {row['encoder']}, {_title(row)} | " + " | ".join(cells) + " |"


def _title(row: Row) -> str:
    unit = f" ({row['unit']})" if row["unit"] else ""
    name = f"{row['task']}, {row['dataset']}, {row['facet']} {row['metric']}{unit}"
    return f"{name}, {row['images']} images"


def _changes(row: Row) -> list[float]:
    """Infinite values that stay have not changed."""
    return [
        0.0 if low == plain else low - plain
        for plain, low in zip(row["float32"], row["bfloat16"], strict=True)
    ]


def _signed(change: float) -> str:
    return "0" if change == 0 else f"{change:+.2g}" if math.isfinite(change) else str(change)


if __name__ == "__main__":
    main()
