"""Experiment C2: what each reading of the initialisation does to the tokens, before any training.

    python -m tests.benchmarks.initialisation --data PHOTOS [--json FILE]

ViT-S/16 of 12 blocks; mean over photographs and seeds after some of the blocks.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import cv2
import torch
from torchvision.transforms.v2.functional import normalize

from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.models import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    VisionTransformer,
    ViTConfig,
    build_vit,
)
from ssl_bench.system.progress import show_progress
from tests.benchmarks.provenance import provenance
from tests.support.token_statistics import block_statistics

SKIP = ViTConfig()
BARE = replace(SKIP, skip_attention=False, skip_mlp=False)
PROPOSED = replace(BARE, init="skipless")
VARIANTS = {
    "skip, default": SKIP,
    "skipless, default": BARE,
    "skipless, proposed": PROPOSED,
    "no 1/sqrt(d_h)": replace(PROPOSED, init_options={"cancel_logit_scale": True}),
    "no SUO gain": replace(PROPOSED, init_options={"suo_gain": False}),
    "neither": replace(PROPOSED, init_options={"cancel_logit_scale": True, "suo_gain": False}),
    "uniform Z": replace(PROPOSED, init_options={"noise": "uniform"}),
    "sinusoidal positions": replace(PROPOSED, position_embedding="sinusoidal"),
    "no 1/sqrt(d_h), sinusoidal": replace(
        PROPOSED, position_embedding="sinusoidal", init_options={"cancel_logit_scale": True}
    ),
    "alpha 2, beta .6": replace(PROPOSED, init_options={"alpha": 2.0, "beta": 0.6}),
}
LAYERS = (0, 3, 7, 11)
STATISTICS = {
    "effective_rank": "effective rank of the centered tokens",
    "mean_cosine": "mean cosine between tokens",
    "condition_number": "condition number of the tokens",
}
Row = dict[str, Any]


def photographs(folder: str, count: int) -> list[torch.Tensor]:
    """Evenly spaced pictures of a folder, 224 x 224, normalised."""
    images = ImageFolder(folder).images()
    chosen = [images[number * len(images) // count].image for number in range(count)]
    size = (SKIP.image_size, SKIP.image_size)
    squares = [cv2.resize(image, size, interpolation=cv2.INTER_AREA) for image in chosen]
    pixels = [torch.from_numpy(square).permute(2, 0, 1).float() / 255 for square in squares]
    return [normalize(image, list(IMAGENET_MEAN), list(IMAGENET_STD)) for image in pixels]


def measure(images: list[torch.Tensor], num_seeds: int) -> list[Row]:
    """Means over the images, one row a variant, seed and block."""
    return [
        {"variant": name, "seed": seed, "layer": layer} | means
        for name, config in show_progress(VARIANTS.items(), "initialisations")
        for seed in range(num_seeds)
        for layer, means in enumerate(_means_by_layer(build_vit(config, seed=seed).eval(), images))
    ]


def _means_by_layer(model: VisionTransformer, images: list[torch.Tensor]) -> list[dict[str, float]]:
    by_image = [block_statistics(model, image) for image in images]
    return [
        {name: fmean(getattr(one, name) for one in blocks) for name in STATISTICS}
        for blocks in zip(*by_image, strict=True)
    ]


def print_table(rows: list[Row], statistic: str) -> None:
    """Mean over seeds and images, and the standard deviation between seeds."""
    print(f"\n{STATISTICS[statistic]}, mean (sd over seeds) after block\n")
    print("| initialisation | " + " | ".join(map(str, LAYERS)) + " |")
    print("|---|" + "---|" * len(LAYERS))
    for name in VARIANTS:
        cells = [_cell(rows, name, layer, statistic) for layer in LAYERS]
        print(f"| {name} | " + " | ".join(cells) + " |")


def _cell(rows: list[Row], name: str, layer: int, statistic: str) -> str:
    means = [row[statistic] for row in rows if (row["variant"], row["layer"]) == (name, layer)]
    spread = stdev(means) if len(means) > 1 else 0.0
    return f"{fmean(means):.3g} ({spread:.1g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder of photographs")
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", help="write the values of every seed and block there")
    options = parser.parse_args()
    rows = measure(photographs(options.data, options.images), options.seeds)
    print(provenance())
    print("\nViT-S/16 at 224 pixels, float32; condition numbers above 1e7 are those of rounding")
    for statistic in STATISTICS:
        print_table(rows, statistic)
    if options.json:
        Path(options.json).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
