"""What correspondence costs on a CPU beside the passes of its views through the encoder.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.correspondence PICTURES --json FILE --table FILE

ViT-Ti at 224 pixels with drawn weights, all of its blocks, pictures of a folder. `views`: both
views of each pair pass the encoder, prepared before; `pictures`: each picture is read, cut to its
central square and passes once. The rest is the probe from files to scores, without drawings. CPU
time of the process, the best of some rounds in which all have their turn; `range` is that of the
ratio to `views` in single rounds.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from probes.correspondence.pairs import warped_pair
from probes.correspondence.probe import Correspondence
from probes.features.stream import batches
from ssl_bench.data.central_square import central_square
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.limited import LimitedDataset
from ssl_bench.evaluation import ProbeContext
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import Encoder, ViTConfig, build_vit, encoder_from_model
from tests.benchmarks.provenance import provenance

MODEL = ViTConfig(image_size=224, patch_size=16, dim=192, depth=12, num_heads=3)
LAYERS = tuple(range(MODEL.depth))
PROBES: dict[str, Correspondence] = {
    "token, cell": Correspondence(panels=0, num_workers=1),
    "token, soft": Correspondence(panels=0, num_workers=1, prediction="soft"),
    "token, key, query, value, cell": Correspondence(
        panels=0, num_workers=1, facet=("token", "key", "query", "value")
    ),
    "token, cell, flip": Correspondence(panels=0, num_workers=1, warp="flip"),
}
_BATCH = 64
T = TypeVar("T")


def _unseen(items: Iterable[T], description: str, total: int | None = None) -> Iterable[T]:
    del description, total
    return items


class Works:
    """What has its turn, on the same pictures and encoder."""

    def __init__(self, encoder: Encoder, dataset: LimitedDataset) -> None:
        self._encoder, self._dataset, self._images = encoder, dataset, dataset.images()
        self._extractor = FeatureExtractor(encoder, layers=LAYERS)
        probe = PROBES["token, cell"]
        pairs = [warped_pair(self._images[n], probe, 224, 0) for n in range(len(self._images))]
        self._views = torch.stack([view for pair in pairs for view in pair.views])

    def views(self) -> None:
        for part in self._views.split(_BATCH):
            self._extractor(part.float() / 255)

    def pictures(self) -> None:
        for numbers in batches(range(len(self._images)), _BATCH):
            some = [central_square(self._images[n].image, 224, share=1.0) for n in numbers]
            self._extractor(torch.stack(some).float() / 255)

    def probed(self, probe: Correspondence) -> None:
        with tempfile.TemporaryDirectory() as folder:
            context = ProbeContext(
                encoder=self._encoder,
                dataset=self._dataset,
                layers=LAYERS,
                device=torch.device("cpu"),
                dtype=torch.float32,
                seed=0,
                artifacts=Path(folder),
                progress=_unseen,
            )
            list(probe.run(context))

    def all(self) -> dict[str, Callable[[], None]]:
        probes = {name: lambda p=probe: self.probed(p) for name, probe in PROBES.items()}
        return {"views": self.views, "pictures": self.pictures, **probes}


def measured(works: Works, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each round by work."""
    seconds: dict[str, list[float]] = {name: [] for name in works.all()}
    for _ in range(rounds):
        for name, work in works.all().items():
            before = time.process_time()
            work()
            seconds[name].append(time.process_time() - before)
    return seconds


def rows(seconds: dict[str, list[float]], images: int) -> list[dict[str, Any]]:
    found = []
    for name, own in seconds.items():
        ratios = [one / views for one, views in zip(own, seconds["views"], strict=True)]
        found.append(
            {
                "work": name,
                "ms a picture": 1000 * min(own) / images,
                "to views": min(own) / min(seconds["views"]),
                "range": f"{min(ratios):.2f} to {max(ratios):.2f}",
                "to pictures": min(own) / min(seconds["pictures"]),
            }
        )
    return found


def table(found: Sequence[dict[str, Any]], images: int, made: str) -> str:
    lines = [
        "# Correspondence, what it costs\n",
        "Made by `tests/benchmarks/correspondence.py`: ViT-Ti at 224 pixels, all twelve blocks,",
        f"{images} pictures, 256 points in each, CPU time of one core. `views` is the pass of both",
        "views of each pair alone, prepared before; `pictures` reads each picture and lets it pass",
        "once. The rest is the probe from files to scores, without drawings.\n",
        f"{made}\n",
        "| work | ms a picture | to `views` | range | to `pictures` |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['work']} | {row['ms a picture']:.1f} | {row['to views']:.2f} | {row['range']} | "
        f"{row['to pictures']:.2f} |"
        for row in found
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    # At the beginning: the commit is the one that is measured.
    made = provenance()
    dataset = LimitedDataset(ImageFolder(options.pictures), options.images)
    works = Works(encoder_from_model(build_vit(MODEL, seed=0), name="vit_tiny"), dataset)
    seconds = measured(works, options.rounds)
    found = rows(seconds, options.images)
    text = table(found, options.images, made)
    print(text)
    if options.json:
        content = {"provenance": made, "correspondence": found, "seconds": seconds}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.table:
        options.table.write_text(text)


if __name__ == "__main__":
    main()
