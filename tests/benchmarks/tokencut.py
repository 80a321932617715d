"""The dense solver of TokenCut's authors against ours, on features of real photographs.

    python -m tests.benchmarks.tokencut

One process a section, because BLAS takes its number of threads when it is imported. `time`: CPU
time with one thread, reference and ours in turn on the same graph. `memory`: peak beyond the
features. `throughput`: wall time with two cores, the reference's BLAS against two graphs at once.
`blocks`: CPU time of the whole probe with one thread, twelve blocks against one. `agreement`: on
how many graphs both give the same, for random weights and every --checkpoint.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

GRIDS = {196: (14, 14, 16), 1200: (30, 40, 16), 4800: (60, 80, 8)}
REPETITIONS = {196: 10, 1200: 3, 4800: 1}
PHOTOGRAPHS = ("coffee", "astronaut", "chelsea", "rocket")
TAU, EPS = 0.2, 1e-5
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Options:
    """What a section is asked for."""

    sizes: tuple[int, ...]
    repetitions: int | None
    checkpoints: tuple[str, ...]

    def rounds(self, size: int) -> int:
        return self.repetitions or REPETITIONS[size]


def main() -> None:
    parser = argparse.ArgumentParser(description="TokenCut's dense solver against ours")
    parser.add_argument("--tokens", default="196,1200,4800", help="which sizes, of the three")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="which of these")
    parser.add_argument("--repetitions", type=int, help="rounds; by default more of small graphs")
    parser.add_argument("--checkpoint", action="append", default=[], help="for agreement, blocks")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = tuple(int(size) for size in options.tokens.split(","))
    asked = Options(sizes, options.repetitions, tuple(options.checkpoint))
    if options.here:
        title, rows = SECTIONS[options.sections](asked)
        print_table(title, rows)
        options.json.write_text(json.dumps({"title": title, "rows": list(rows)}))
        return
    from tests.benchmarks.provenance import provenance

    print(provenance(), flush=True)
    found = {name: run_alone(name, sys.argv[1:]) for name in options.sections.split(",")}
    if options.json:
        options.json.write_text(json.dumps({"provenance": provenance(), **found}, indent=1))


def run_alone(section: str, arguments: Sequence[str]) -> Any:
    """A section in a process of its own; returns its title and rows."""
    threads = "2" if section == "throughput" else "1"
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {**os.environ, **dict.fromkeys(names, threads)}
    command = [sys.executable, "-m", "tests.benchmarks.tokencut", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        last = ["--here", "--sections", section, "--json", str(figures)]
        subprocess.run([*command, *last], env=environment, check=True)
        return json.loads(figures.read_text())


def print_table(title: str, rows: Sequence[Row]) -> None:
    print(f"\n{title}")
    for number, row in enumerate(rows):
        if number == 0:
            print("| " + " | ".join(row) + " |\n" + "|---" * len(row) + "|")
        cells = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()]
        print("| " + " | ".join(cells) + " |", flush=True)


def reference(features):
    """The authors' computation, restated: dense matrices in float64, LAPACK's generalised eigh."""
    import numpy as np
    import scipy.linalg

    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    linked = unit @ unit.T > TAU
    weights = np.where(linked.astype(float) == 0, EPS, linked)
    degrees = np.diag(weights.sum(1))
    _, vectors = scipy.linalg.eigh(degrees - weights, degrees, subset_by_index=[1, 2])
    return vectors[:, 0]


def ours(features):
    from probes.tokencut.eigensolver import second_eigenvector

    return second_eigenvector(features, tau=TAU, eps=EPS).vector


def photograph(name: str, height: int, width: int):
    """A photograph of scikit-image at this size, RGB in [0, 1], with a batch axis."""
    import skimage.data
    import torch
    import torch.nn.functional as F

    pixels = torch.from_numpy(getattr(skimage.data, name)()).permute(2, 0, 1)[None] / 255
    return F.interpolate(pixels, (height, width), mode="bilinear")


def random_encoder(patch: int, depth: int):
    from ssl_bench.models import ViTConfig, build_vit, encoder_from_model

    config = ViTConfig(image_size=14 * patch, patch_size=patch, depth=depth)
    return encoder_from_model(build_vit(config, seed=0), name="random ViT-S")


def graphs(num_tokens: int) -> list:
    """Keys and tokens of two blocks of a random ViT-S for several photographs."""
    import numpy as np

    from ssl_bench.features import FeatureExtractor

    rows, cols, patch = GRIDS[num_tokens]
    extractor = FeatureExtractor(
        random_encoder(patch, depth=2), layers=[0, 1], facets=("key", "token")
    )
    found = []
    for name in PHOTOGRAPHS if num_tokens < 4800 else PHOTOGRAPHS[:1]:
        for facets in extractor(photograph(name, rows * patch, cols * patch)).values():
            found += [v[0].flatten(0, 1).numpy().astype(np.float32) for v in facets.values()]
    return found


def same_bipartition(one, other) -> bool:
    side, other_side = one > one.mean(), other > other.mean()
    return bool((side == other_side).all() or (side != other_side).all())


def seconds_of(function: Callable, argument: object, clock: Callable[[], float]) -> float:
    start = clock()
    function(argument)
    return clock() - start


def paired(pairs: Sequence[tuple[float, float]], first: str, second: str, ratio: str) -> Row:
    """Medians of both sides in milliseconds, and the median of the ratios with its range."""
    theirs, own = (1e3 * median(column) for column in zip(*pairs, strict=True))
    ratios = sorted(one / other for one, other in pairs)
    spread = f"{ratios[0]:.3g} to {ratios[-1]:.3g}"
    return {first: theirs, second: own, ratio: median(ratios), "range": spread}


def time_section(options: Options) -> tuple[str, list[Row]]:
    rows = []
    for size in options.sizes:
        features = graphs(size)
        equal = [same_bipartition(reference(f), ours(f)) for f in features]
        pairs = [
            (seconds_of(reference, f, time.thread_time), seconds_of(ours, f, time.thread_time))
            for _ in range(options.rounds(size))
            for f in features
        ]
        figures = paired(pairs, "reference, ms", "ours, ms", "ratio")
        agree = f"{sum(equal)} of {len(equal)}"
        rows.append({"tokens": size, **figures, "same bipartition": agree})
    return "CPU time a graph, affinity and eigenvector, one thread (medians)", rows


def memory_section(options: Options) -> tuple[str, list[Row]]:
    rows = []
    for size in options.sizes:
        features = graphs(size)[0]
        theirs, own = (_peak_megabytes(solver, features) for solver in (reference, ours))
        share = f"1/{theirs / own:.1f}"
        rows.append({"tokens": size, "reference, MB": theirs, "ours, MB": own, "share": share})
    return "Peak memory beyond the features", rows


def _peak_megabytes(solver: Callable, features) -> float:
    # What is imported at the first call is not memory of the solver.
    solver(features[:10])
    tracemalloc.start()
    solver(features)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1e6


def throughput_section(options: Options) -> tuple[str, list[Row]]:
    from probes.tokencut.eigensolver import map_graphs

    def two_at_once(some: Sequence[Any]) -> None:
        map_graphs(ours, some, num_threads=2)

    rows = []
    for size in (size for size in options.sizes if size <= 1200):
        features, rounds = graphs(size) * 2, []
        for _ in range(options.repetitions or 5):
            theirs = seconds_of(lambda fs: [reference(f) for f in fs], features, time.monotonic)
            own = seconds_of(two_at_once, features, time.monotonic)
            rounds.append((theirs / len(features), own / len(features)))
        figures = paired(rounds, "reference, two threads, ms", "ours, two graphs, ms", "ratio")
        rows.append({"tokens": size, **figures})
    return "Wall time a graph with two cores", rows


def blocks_section(options: Options) -> tuple[str, list[Row]]:
    from ssl_bench.models import load_encoder

    encoders = [random_encoder(16, depth=12), *map(load_encoder, options.checkpoints)]
    rows = []
    for size in (size for size in options.sizes if size <= 1200):
        for encoder in encoders:
            images = _Photographs(size)
            last, every = (encoder.depth - 1,), tuple(range(encoder.depth))
            _probe_seconds(encoder, images, last)
            pairs = []
            for _ in range(options.repetitions or 5):
                all_blocks, one = (_probe_seconds(encoder, images, b) for b in (every, last))
                pairs.append((all_blocks / len(images), one / len(images)))
            first = "all blocks, ms an image"
            figures = paired(pairs, first, "last block, ms an image", "ratio")
            rows.append({"tokens": size, "encoder": encoder.name, **figures})
    title = "CPU time of the whole probe, one thread, every block against the last alone, keys"
    return title, rows


class _Photographs:
    """The photographs in memory, with one box, as a dataset."""

    name, split, class_names, supports = "photographs", "all", (), frozenset({"discovery"})
    ids = PHOTOGRAPHS

    def __init__(self, num_tokens: int) -> None:
        import numpy as np

        from ssl_bench.data.samples import Sample

        rows, cols, _ = GRIDS[num_tokens]
        self._samples = []
        for name in self.ids:
            pixels = (255 * photograph(name, 16 * rows, 16 * cols)[0]).byte()
            image, boxes = pixels.permute(1, 2, 0).numpy(), np.array([[0.0, 0.0, 90.0, 90.0]])
            self._samples.append(Sample(name, image, boxes=boxes))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int):
        return self._samples[index]

    def fingerprint(self) -> str:
        return ""

    def discovery(self) -> "_Photographs":
        return self

    train = val = images = discovery


def _probe_seconds(encoder, images: _Photographs, layers: tuple[int, ...]) -> float:
    import torch

    from probes.tokencut.probe import TokenCut
    from ssl_bench.evaluation import ProbeContext
    from ssl_bench.system.progress import show_progress

    with tempfile.TemporaryDirectory() as folder:
        context = ProbeContext(
            encoder=encoder,
            dataset=images,
            layers=layers,
            device=torch.device("cpu"),
            dtype=torch.float32,
            seed=0,
            artifacts=Path(folder),
            progress=show_progress,
            say=lambda _: None,
        )
        # CPU time: with one thread it is the wall time of a machine that does nothing else.
        return seconds_of(lambda c: list(TokenCut(panels=0).run(c)), context, time.process_time)


def agreement_section(options: Options) -> tuple[str, list[Row]]:
    import skimage.data

    from ssl_bench.features import FeatureExtractor
    from ssl_bench.models import load_encoder
    from tests.support.agreement import compare, photograph_features, tally

    encoders = [random_encoder(16, depth=12), *map(load_encoder, options.checkpoints)]
    rows = []
    for encoder in encoders:
        extractor = FeatureExtractor(
            encoder, layers=range(encoder.depth), facets=("key", "token"), pad=True
        )
        side = 640 if max(options.sizes) > 196 else 224
        found = []
        for name in PHOTOGRAPHS:
            image = getattr(skimage.data, name)()
            features, grid = photograph_features(extractor, image, side, side)
            found += [compare(f, grid) for f in features]
        counts = {k: f"{kept} of {of}" for k, (kept, of) in tally(found).items()}
        rows.append({"encoder": encoder.name, "graphs": len(found), **counts})
    return "Graphs that keep what is promised; bipartition and box where the gap exceeds 1e-3", rows


SECTIONS: dict[str, Callable[[Options], tuple[str, list[Row]]]] = {
    "time": time_section,
    "memory": memory_section,
    "throughput": throughput_section,
    "blocks": blocks_section,
    "agreement": agreement_section,
}

if __name__ == "__main__":
    main()
