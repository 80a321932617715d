"""The dense solver of TokenCut's authors against ours, on features of real photographs.

    python -m tests.benchmarks.tokencut

One process a section, because BLAS takes its number of threads when it is imported: CPU time with
one thread, reference and ours in turn on the same graph; wall time with two threads, the
reference's BLAS against two graphs at once; peak memory beyond the features; on a GPU the batch.
"""

import argparse
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from statistics import median

GRIDS = {196: (14, 14, 16), 1200: (30, 40, 16), 4800: (60, 80, 8)}
REPETITIONS = {196: 10, 1200: 3, 4800: 1}
PHOTOGRAPHS = ("coffee", "astronaut", "chelsea", "rocket")
TAU, EPS = 0.2, 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description="TokenCut's dense solver against ours")
    parser.add_argument("--tokens", default="196,1200,4800", help="which sizes, of the three")
    parser.add_argument("--sections", default="time,memory,throughput,gpu", help="which of these")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for section in options.sections.split(","):
        if options.here:
            SECTIONS[section]([int(size) for size in options.tokens.split(",")])
            continue
        threads = "2" if section == "throughput" else "1"
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        environment = {**os.environ, **dict.fromkeys(names, threads)}
        command = [sys.executable, "-m", "tests.benchmarks.tokencut", "--here"]
        arguments = ["--sections", section, "--tokens", options.tokens]
        subprocess.run([*command, *arguments], env=environment, check=True)


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
    from probes.spectral import second_eigenvector

    return second_eigenvector(features, tau=TAU, eps=EPS).vector


def graphs(num_tokens: int) -> list:
    """Keys and tokens of two blocks of a random ViT-S for several photographs."""
    import numpy as np
    import skimage.data
    import torch
    import torch.nn.functional as F

    from ssl_bench.features import FeatureExtractor
    from ssl_bench.models import ViTConfig, build_vit, encoder_from_vit

    rows, cols, patch = GRIDS[num_tokens]
    config = ViTConfig(image_size=14 * patch, patch_size=patch, depth=2)
    encoder = encoder_from_vit(build_vit(config, seed=0), name="random")
    extractor = FeatureExtractor(encoder, layers=[0, 1], facets=("key", "token"))
    found = []
    for name in PHOTOGRAPHS if num_tokens < 4800 else PHOTOGRAPHS[:1]:
        photograph = torch.from_numpy(getattr(skimage.data, name)()).permute(2, 0, 1)[None] / 255
        image = F.interpolate(photograph, (rows * patch, cols * patch), mode="bilinear")
        for facets in extractor(image).values():
            found += [v[0].flatten(0, 1).numpy().astype(np.float32) for v in facets.values()]
    return found


def same_bipartition(one, other) -> bool:
    side, other_side = one > one.mean(), other > other.mean()
    return bool((side == other_side).all() or (side != other_side).all())


def seconds_of(function: Callable, argument: object, clock: Callable[[], float]) -> float:
    start = clock()
    function(argument)
    return clock() - start


def time_section(sizes: list[int]) -> None:
    print("CPU time a graph, affinity and eigenvector, one thread (median)")
    print("| tokens | reference, ms | ours, ms | ratio | same bipartition |\n|---|---|---|---|---|")
    for size in sizes:
        features = graphs(size)
        equal = [same_bipartition(reference(f), ours(f)) for f in features]
        pairs = [
            tuple(1e3 * seconds_of(solver, f, time.thread_time) for solver in (reference, ours))
            for _ in range(REPETITIONS[size])
            for f in features
        ]
        theirs, own = (median(column) for column in zip(*pairs, strict=True))
        ratio = median(one / other for one, other in pairs)
        agree = f"{sum(equal)} of {len(equal)}"
        print(f"| {size} | {theirs:.2f} | {own:.2f} | {ratio:.1f} | {agree} |", flush=True)


def memory_section(sizes: list[int]) -> None:
    print("\nPeak memory beyond the features")
    print("| tokens | reference, MB | ours, MB | share |\n|---|---|---|---|")
    for size in sizes:
        features = graphs(size)[0]
        theirs, own = (_peak_megabytes(solver, features) for solver in (reference, ours))
        print(f"| {size} | {theirs:.1f} | {own:.1f} | 1/{theirs / own:.1f} |", flush=True)


def _peak_megabytes(solver: Callable, features) -> float:
    # What is imported at the first call is not memory of the solver.
    solver(features[:10])
    tracemalloc.start()
    solver(features)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1e6


def throughput_section(sizes: list[int]) -> None:
    from probes.spectral import GraphPool

    print("\nWall time a graph with two cores")
    print(
        "| tokens | reference, two threads, ms | ours, two graphs, ms | ratio |\n|---|---|---|---|"
    )
    with GraphPool(2) as pool:
        for size in (size for size in sizes if size <= 1200):
            features = graphs(size) * 2
            rounds = []
            for _ in range(5):
                theirs = seconds_of(lambda fs: [reference(f) for f in fs], features, time.monotonic)
                own = seconds_of(lambda fs: pool.map(ours, fs), features, time.monotonic)
                rounds.append((1e3 * theirs / len(features), 1e3 * own / len(features)))
            theirs, own = (median(column) for column in zip(*rounds, strict=True))
            ratio = median(one / other for one, other in rounds)
            print(f"| {size} | {theirs:.2f} | {own:.2f} | {ratio:.1f} |", flush=True)


def gpu_section(sizes: list[int]) -> None:
    import torch

    from probes.spectral_batched import solve_batch

    if not torch.cuda.is_available():
        print("\nno GPU here: the batched form was not timed")
        return
    print("\nWall time a graph in a batch on the GPU, vectors copied back")
    print("| tokens | CPU reference, ms | GPU batch, ms | ratio |\n|---|---|---|---|")
    for size in sizes:
        features = graphs(size)
        batch = torch.stack([torch.from_numpy(f) for f in features * (16 // len(features))]).cuda()
        seconds_of(lambda tokens: solve_batch(tokens, tau=TAU, eps=EPS), batch, time.monotonic)
        own = seconds_of(lambda b: solve_batch(b, tau=TAU, eps=EPS), batch, time.monotonic)
        theirs = seconds_of(reference, features[0], time.monotonic)
        own_one = own / len(batch)
        print(f"| {size} | {1e3 * theirs:.2f} | {1e3 * own_one:.3f} | {theirs / own_one:.0f} |")


SECTIONS: dict[str, Callable[[list[int]], None]] = {
    "time": time_section,
    "memory": memory_section,
    "throughput": throughput_section,
    "gpu": gpu_section,
}

if __name__ == "__main__":
    main()
