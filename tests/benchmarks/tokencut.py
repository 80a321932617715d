"""Compare our eigensolver with the dense eigensolver of the TokenCut authors.

    python -m tests.benchmarks.tokencut

The program prints the CPU time and peak memory of both solvers. It also prints how often both
solvers find the same bipartition. With `--tokens 196,1200,4800`, the program takes 90 seconds
longer.
"""

import os

# BLAS reads its number of threads when it is imported.
for library in ("OMP", "OPENBLAS", "MKL"):
    os.environ[f"{library}_NUM_THREADS"] = "1"

# ruff: noqa: E402
import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import scipy.linalg
import skimage.data
import torch
import torch.nn.functional as F

from probes.tokencut.eigensolver import second_eigenvector
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model
from tests.benchmarks.provenance import print_table, provenance

# For each number of tokens: rows and columns of patches, the patch size in pixels, and rounds.
SIZES = {196: (14, 14, 16, 10), 1200: (30, 40, 16, 3), 4800: (60, 80, 8, 1)}
PHOTOGRAPHS = ("coffee", "astronaut", "chelsea", "rocket")
TAU, EPS = 0.2, 1e-5


def reference(features: np.ndarray) -> np.ndarray:
    """Compute the second eigenvector with SciPy, as the authors of TokenCut do."""
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    edges = unit @ unit.T > TAU
    weights = np.where(edges.astype(float) == 0, EPS, edges)
    degrees = np.diag(weights.sum(1))
    _, vectors = scipy.linalg.eigh(degrees - weights, degrees, subset_by_index=[1, 2])
    return vectors[:, 0]  # pyrefly: ignore[bad-index]


def ours(features: np.ndarray) -> np.ndarray:
    return second_eigenvector(features, tau=TAU, eps=EPS).vector


def extract_features(num_tokens: int) -> list[np.ndarray]:
    """Extract keys and tokens of photographs with a random ViT."""
    rows, cols, patch, _ = SIZES[num_tokens]
    config = ViTConfig(image_size=14 * patch, patch_size=patch, depth=2)
    encoder = encoder_from_model(build_vit(config, seed=0), name="random ViT-S")
    extractor = FeatureExtractor(encoder, layers=[0, 1], facets=("key", "token"))
    features = []
    for name in PHOTOGRAPHS if num_tokens < 4800 else PHOTOGRAPHS[:1]:
        pixels = torch.from_numpy(getattr(skimage.data, name)()).permute(2, 0, 1)[None] / 255
        image = F.interpolate(pixels, (rows * patch, cols * patch), mode="bilinear")
        for facets in extractor(image).values():
            features += [v[0].flatten(0, 1).numpy().astype(np.float32) for v in facets.values()]
    return features


def has_equal_cuts(features: np.ndarray) -> bool:
    side, other = (v > v.mean() for v in (reference(features), ours(features)))
    return bool((side == other).all() or (side != other).all())


def milliseconds(solve: Callable[[np.ndarray], object], features: np.ndarray) -> float:
    start = time.thread_time()
    solve(features)
    return 1e3 * (time.thread_time() - start)


def peak_megabytes(solve: Callable[[np.ndarray], object], features: np.ndarray) -> float:
    # The first call imports libraries, whose memory is not counted.
    solve(features[:10])
    tracemalloc.start()
    solve(features)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1e6


def measure(size: int) -> dict[str, Any]:
    features = extract_features(size)
    # Both solve the same graph in turn, so that other load on the machine affects both.
    pairs = [
        (milliseconds(reference, one), milliseconds(ours, one))
        for _ in range(SIZES[size][-1])
        for one in features
    ]
    theirs, own = (median(column) for column in zip(*pairs, strict=True))
    ratios = sorted(one / other for one, other in pairs)
    return {
        "tokens": size,
        "reference, ms": theirs,
        "ours, ms": own,
        "ratio": median(ratios),
        "range": f"{ratios[0]:.3g} to {ratios[-1]:.3g}",
        "same bipartition": f"{sum(map(has_equal_cuts, features))} of {len(features)}",
        "reference, MB": peak_megabytes(reference, features[0]),
        "ours, MB": peak_megabytes(ours, features[0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare TokenCut's dense solver with ours.")
    parser.add_argument("--tokens", default="196,1200", help="numbers of tokens: 196, 1200, 4800")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(provenance(), flush=True)
    rows = [measure(int(size)) for size in options.tokens.split(",")]
    print_table(
        [
            {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()}
            for row in rows
        ]
    )
    if options.json:
        options.json.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
