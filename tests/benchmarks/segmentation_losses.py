"""How far the default loss is from the full one: mean IoU of every block under both.

    python -m tests.benchmarks.segmentation_losses --checkpoint runs/NAME --data-root DIR

The same features, seeds, steps and rates; only the size of the training labels differs. Scores are
those of the best rate on the scored images, so that noise in the choice of one does not enter.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr

from ssl_bench.composition.compose import build, compose_config
from ssl_bench.data.samples import Dataset
from ssl_bench.evaluation import ProbeContext
from ssl_bench.models import Encoder, load_encoder
from ssl_bench.system.progress import show_progress
from tests.benchmarks.provenance import provenance
from tests.support.heads import segmentation

RATES = (1e-3, 3e-3, 1e-2, 3e-2)


def block_scores(
    encoder: Encoder, dataset: Dataset, loss: str, options: argparse.Namespace
) -> list[float]:
    """Mean IoU of every block."""
    probe = segmentation(
        loss=loss,
        learning_rates=RATES,
        epochs=options.epochs,
        image_size=options.image_size,
        holdout=0.0,
        panels=0,
        num_workers=1,
    )
    with tempfile.TemporaryDirectory() as folder:
        context = ProbeContext(
            encoder=encoder,
            dataset=dataset,
            layers=tuple(range(encoder.depth)),
            device=torch.device(options.device),
            dtype=torch.float32,
            seed=0,
            artifacts=Path(folder),
            progress=show_progress,
        )
        return [score.value for score in probe.run(context) if score.metric == "miou_oracle"]


def report(encoder: Encoder, sizes: str, scores: dict[str, list[float]]) -> None:
    print(f"{provenance()}\n{encoder.name}, {sizes}\n")
    losses = list(scores)
    print(f"| block | {' | '.join(losses)} |\n|---|{'---|' * len(losses)}")
    for block, row in enumerate(zip(*scores.values(), strict=True)):
        print(f"| {block} | {' | '.join(f'{value:.2f}' for value in row)} |")
    full = np.array(scores["full_resolution"])
    for loss in losses[1:]:
        gap = np.abs(np.array(scores[loss]) - full)
        rank = spearmanr(scores[loss], full)[0]
        print(
            f"\n{loss} against full: mean |difference| {gap.mean():.2f}, largest {gap.max():.2f} "
            f"mIoU; Spearman over blocks {rank:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", default="timm:vit_tiny_patch16_224")
    parser.add_argument("--dataset", default="voc2012")
    parser.add_argument("--data-root")
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    overrides = [
        "probe=segmentation",
        f"dataset={options.dataset}",
        f"data.root={options.data_root}",
    ]
    dataset = build(compose_config("probing", overrides).dataset)
    encoder = load_encoder(options.checkpoint)
    losses = ("full_resolution", "upsample4", "histogram")
    scores = {loss: block_scores(encoder, dataset, loss, options) for loss in losses}
    sizes = (
        f"{dataset.val().name}, {len(dataset.train())} training and {len(dataset.val())} scored "
        f"images, {options.image_size} px, {options.epochs} epochs"
    )
    report(encoder, sizes, scores)
    if options.json:
        figures = {"provenance": provenance(), "sizes": sizes, "miou_by_block": scores}
        Path(options.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
