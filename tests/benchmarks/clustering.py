"""What clustering of patches costs beside the plain pass of its images through the encoder.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.clustering --json FILE --table FILE

A ViT-Ti/16 with drawn weights, all of its blocks, toy scenes, half of them to be clustered and half
to be scored. The plain pass reads and squashes the same images and takes the patches of every
block; nothing is kept. Rows beside it are the probe from files to scores. Processor seconds of the
process; works take turns.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from probes.clustering.probe import Clustering
from probes.features.stream import batches, read_ahead
from probes.features.views import resized, tensors
from ssl_bench.data.layouts.toy import Toy
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.evaluation import ProbeContext
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model
from ssl_bench.system.progress import show_progress
from tests.benchmarks.provenance import provenance

MODEL = ViTConfig(dim=192, num_heads=3)
# Toy scenes have seven classes; three clusters for each are as many as VOC's classes.
NUMBERS = {"21 clusters": (3,), "7, 14 and 35 clusters": (1, 2, 5)}
PLAIN = "plain pass"


@dataclass(frozen=True)
class Works:
    """What has its turn, on the same images and encoder."""

    context: ProbeContext
    size: int

    def plain(self) -> None:
        extractor = FeatureExtractor(self.context.encoder, layers=self.context.layers)
        for images in (self.context.dataset.train(), self.context.dataset.val()):
            for batch in batches(self._squashed(images), self._probe((1,)).batch_size):
                extractor(torch.stack(batch))

    def clustered(self, numbers: tuple[int, ...]) -> None:
        list(self._probe(numbers).run(self.context))

    def all(self) -> dict[str, Callable[[], None]]:
        probes = {name: lambda n=numbers: self.clustered(n) for name, numbers in NUMBERS.items()}
        return {PLAIN: self.plain, **probes}

    def _probe(self, numbers: tuple[int, ...]) -> Clustering:
        return Clustering(
            protocol="patches",
            facet="token",
            clusters_per_class=numbers,
            image_size=self.size,
            batch_size=16,
            num_workers=1,
        )

    def _squashed(self, images: ImageSet) -> Iterator[torch.Tensor]:
        def prepare(sample: Sample) -> torch.Tensor:
            return resized(tensors(sample)[0], self.size, self.size)

        return read_ahead(images, range(len(images)), prepare, workers=1)


def measured(works: Works, rounds: int) -> Iterator[dict[str, Any]]:
    for _ in range(rounds):
        for name, work in works.all().items():
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            yield {"work": name, "seconds": round(wall, 1), "cpu_seconds": round(cpu, 1)}


def page(record: dict[str, Any]) -> str:
    best = {
        name: min(row["cpu_seconds"] for row in record["rows"] if row["work"] == name)
        for name in dict.fromkeys(row["work"] for row in record["rows"])
    }
    lines = [
        "# Clustering of patches beside the plain pass",
        "",
        f"Made by `tests/benchmarks/clustering.py`: {record['images']:,} toy scenes, half to "
        "cluster",
        "patches of and half to score, through all 12 blocks of a ViT-Ti/16 at",
        f"{record['size']} pixels. Of at most {record['fit_patches']:,} patches",
        f"{record['num_restarts']} beginnings of k-means for each number of clusters. Other work",
        "ran on the machine, so that processor seconds compare and seconds do not.",
        "",
        record["provenance"],
        "",
        "| work | seconds | processor seconds |",
        "|---|---:|---:|",
    ]
    lines += [
        f"| {row['work']} | {row['seconds']:.1f} | {row['cpu_seconds']:.1f} |"
        for row in record["rows"]
    ]
    ratios = [f"{best[name] / best[PLAIN]:.2f} ({name})" for name in best if name != PLAIN]
    told = f"Processor seconds to those of the plain pass: {', '.join(ratios)}."
    return "\n".join([*lines, "", told]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # At the beginning: the commit is the one that is measured.
    made = provenance()
    half = options.images // 2
    context = ProbeContext(
        encoder=encoder_from_model(build_vit(MODEL, seed=0), name="vit_tiny"),
        dataset=Toy(num_train=half, num_val=half),
        layers=tuple(range(MODEL.depth)),
        device=torch.device("cpu"),
        dtype=torch.float32,
        seed=0,
        artifacts=Path(),
        progress=show_progress,
    )
    context.dataset.train()
    usual = Clustering(protocol="patches", facet="token")
    rows = list(measured(Works(context, options.size), options.rounds))
    record = {"provenance": made, "size": options.size, "images": 2 * half, "rows": rows}
    record |= {name: getattr(usual, name) for name in ("fit_patches", "num_restarts")}
    options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.table:
        options.table.write_text(page(record))
    print(page(record))


if __name__ == "__main__":
    main()
