"""How often do 95 % intervals hold the truth? Simulated, with the intervals that were not taken.

    python -m tests.benchmarks.interval_coverage [--json FILE] > results/tables/intervals.md

A population is 10,000 images; samples are drawn from it with replacement, so that the truth, its
mean IoU, is known exactly. Classes are as frequent as in published data sets, an image shows few of
them, areas within an image differ by orders of magnitude, whole images fail, what is missed of a
class becomes classes that are beside it or one of three that are not in the image.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import expit

from ssl_bench.intervals import mean_iou_estimate, pixel_accuracy_estimate
from ssl_bench.system.progress import show_progress
from tests.benchmarks.interval_candidates import CANDIDATES, Array, Draws, Ends, Sample
from tests.benchmarks.interval_others import other_rows
from tests.benchmarks.provenance import provenance

Row = dict[str, Any]

CLASSES = (21, 60, 150, 171)
REPLICATIONS = {15: 1000, 30: 1000, 60: 1000, 200: 1000, 1500: 200}
"""By number of images."""
# Logit of the mean recall of a class.
ENCODERS = {"weak": -2.0, "middle": 0.0, "strong": 2.5}
PIXELS = 10_000

NOTE = """Populations of 10,000 simulated images; 1,000 samples a cell, 200 of 1,500 images, half as
many for differences, a tenth for "double". Where .95 hold the truth its standard error is .007, of
1,500 images .015; for differences .010 and .022, for "double" .022 and .05. Bootstraps draw 400
times.

"Normal", "infinitesimal" and "value ± t" lie around the value, with the standard error of a
bootstrap, of the infinitesimal jackknife, of the jackknife. "Less bias" and "jackknife" lie around
the value less its bias by the bootstrap and the jackknife. "m of n" draws n^.8 images. "Double" is
a percentile interval calibrated by 50 x 50 draws. "Taken" is `ssl_bench.intervals`."""

# Share of the 20,210 training images of ADE20K that show its classes, by rank, from
# https://github.com/CSAILVision/sceneparsing/blob/4ce20bd9115d415d545b26eaa0387a0740838ba5/objectInfo150.txt
_RANKS = (1, 2, 5, 10, 20, 40, 60, 80, 100, 120, 140, 150)
_SHARES = (0.577, 0.462, 0.330, 0.211, 0.124, 0.055, 0.0282, 0.0203, 0.0142, 0.0084, 0.0035, 0.0021)


def presence(classes: int) -> Array:
    """Share of the images that show each class.

    21 are those of VOC 2012: background, people, then objects in 4 to 9 % of the images. 60 are the
    most frequent ones of ADE20K, 171 have its tail.
    """
    if classes == 21:
        return np.array([1.0, 0.31, *np.linspace(0.09, 0.04, 19)])
    ranks = np.arange(1, classes + 1.0)
    if classes > 150:
        ranks = 1 + (ranks - 1) * 149 / (classes - 1)
    return np.exp(np.interp(np.log(ranks), np.log(_RANKS), np.log(_SHARES)))


# Many samples are drawn from one before the next is made.
@lru_cache(maxsize=1)
def population(
    classes: int, level: float, images: int = 10_000
) -> Float[np.ndarray, "2 images 3 classes"]:
    """`class_counts` of all images under two encoders, the second a little better."""
    random = np.random.default_rng(classes)
    share, shape = presence(classes), (images, classes)
    busy = random.gamma(4, 0.25, (images, 1)) if classes > 21 else 1.0
    shown = random.random(shape) < share * busy
    shown[:, 0] |= ~shown.any(1)
    area = shown * np.exp(0.8 * random.normal(size=classes) + 1.5 * random.normal(size=shape))
    area[:, 0] *= 6 if classes == 21 else 1
    area /= area.sum(1, keepdims=True)
    # Rare classes are known less well.
    skill = level + random.normal(size=classes) + 0.25 * np.log(share / np.median(share))
    image, spot = random.normal(size=(images, 1)), random.normal(size=shape)
    appeal = np.sqrt(share) / np.sqrt(share).sum()
    confused = [random.choice(classes, 3, p=appeal) for _ in range(classes)]
    found = []
    for encoder in range(2):
        fails = 1.3 * (0.8 * image + 0.6 * random.normal(size=image.shape))
        noise = 0.8 * 0.7 * (spot + random.normal(size=shape)) + 0.3 * random.normal(size=classes)
        right = area * expit(skill + 0.3 * encoder + fails + noise)
        false = _mistaken_for(area - right, area, np.array(confused), random)
        found.append(np.rint(PIXELS * np.stack([right, right + false, area], axis=1)))
    return np.stack(found).astype(np.float32)


def _mistaken_for(
    missed: Array, area: Array, confused: Array, random: np.random.Generator
) -> Array:
    """Area that each class gets from others: three fifths goes to classes beside it."""
    border = np.sqrt(area)
    others = border.sum(1, keepdims=True) - border
    beside = np.where(others > 0, 0.6 * missed / np.where(others > 0, others, 1), 0)
    gained = border * (beside.sum(1, keepdims=True) - beside)
    far, chosen = missed - beside * others, random.integers(3, size=missed.shape)
    for number in range(3):
        to = np.eye(missed.shape[1])[confused[:, number]]
        gained += (far * (chosen == number)) @ to
    return gained


def samples(
    classes: int, images: int, level: float, share: float = 1
) -> Iterator[Float[np.ndarray, "2 images 3 classes"]]:
    """Drawn with replacement from the population, for both encoders alike."""
    whole, random = population(classes, level), np.random.default_rng(images)
    for _ in range(round(share * REPLICATIONS[images])):
        yield whole[:, random.integers(whole.shape[1], size=images)]


def truth(classes: int, level: float) -> Float[np.ndarray, "2 2"]:
    """Mean IoU and pixel accuracy of the population under both encoders."""
    totals = population(classes, level).sum(1, dtype=np.float64)
    right, predicted, true = totals[:, 0], totals[:, 1], totals[:, 2]
    miou = (right / (predicted + true - right)).mean(1)
    return 100 * np.stack([miou, right.sum(1) / true.sum(1)])


def miou_rows(encoder: str, classes: int, images: int, names: Sequence[str]) -> list[Row]:
    """How often intervals hold the mean IoU of the population, and the mean one of such samples."""
    level, draws = ENCODERS[encoder], Draws.of(images)
    ends: dict[str, list[Ends]] = {name: [] for name in names}
    values = []
    for number, counts in enumerate(samples(classes, images, level)):
        sample = Sample(counts[0], draws)
        values.append(sample.value)
        for name in names:
            # Fifty times as dear as the others.
            if name != "double" or number < REPLICATIONS[images] // 10:
                ends[name].append(CANDIDATES[name](sample))
    true = float(truth(classes, level)[0, 0])
    where = {"encoder": encoder, "classes": classes, "images": images}
    where |= {"truth": true, "mean_value": float(np.mean(values))}
    return [
        where
        | {"interval": name, **covered(ends[name], true)}
        | {"covers_mean_value": covered(ends[name], where["mean_value"])["covers"]}
        for name in names
    ]


def pair_rows(encoder: str, classes: int, images: int) -> list[Row]:
    """Coverage of the difference between two encoders, and of the pixel accuracy of one."""
    level, draws = ENCODERS[encoder], Draws.of(images)
    ends: dict[str, list[Ends]] = {name: [] for name in ("percentile", "taken", "pixel accuracy")}
    for counts in samples(classes, images, level, share=0.5):
        one, other = (Sample(some, draws).resampled for some in counts)
        low, high = np.quantile(other - one, [0.025, 0.975])
        ends["percentile"].append((float(low), float(high)))
        first, second = (mean_iou_estimate(some) for some in counts)
        ends["taken"].append(second.difference_ci95(first) or (np.nan, np.nan))
        accuracy = pixel_accuracy_estimate(counts[0])
        ends["pixel accuracy"].append(accuracy.ci95() or (np.nan, np.nan))
    (one, other), (accuracy, _) = truth(classes, level)
    true = {"percentile": other - one, "taken": other - one, "pixel accuracy": accuracy}
    where = {"encoder": encoder, "classes": classes, "images": images}
    return [
        where | {"interval": name, "truth": float(true[name]), **covered(found, true[name])}
        for name, found in ends.items()
    ]


def covered(ends: Sequence[Ends], true: float) -> Row:
    """Share of the intervals that hold a number; those that are none do not."""
    low, high = np.array(ends).T
    held = (low <= true) & (true <= high)
    return {
        "covers": float(held.mean()),
        "width": float(np.nanmean(high - low)),
        "replications": len(ends),
    }


def cost_rows() -> list[Row]:
    """Time for 12 blocks with 8 heads each, 1,500 images and 171 classes; 400 draws."""
    counts = next(samples(171, 1500, ENCODERS["middle"]))
    draws, rows = Draws.of(1500), []
    for name, interval in CANDIDATES.items():
        start = time.process_time()
        for _ in range(4):
            interval(Sample(counts[0], draws))
        seconds = 12 * 8 * (time.process_time() - start) / 4
        rows.append({"interval": name, "seconds": round(seconds, 2)})
    return rows


def measure() -> dict[str, list[Row]]:
    """All figures, by table; on all cores, because only the costs are timed."""
    grid = [(encoder, classes) for encoder in ENCODERS for classes in CLASSES]
    figures: dict[str, list[Row]] = {"miou": [], "pairs": []}
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        others = pool.submit(other_rows)
        for miou, pairs in show_progress(
            pool.map(population_rows, *zip(*grid, strict=True)), "populations"
        ):
            figures["miou"] += miou
            figures["pairs"] += pairs
        return figures | {"others": others.result(), "cost": cost_rows()}


def population_rows(encoder: str, classes: int) -> tuple[list[Row], list[Row]]:
    """All intervals of samples from one population, and what differs in pairs of them."""
    is_middle = encoder == "middle"
    names = list(CANDIDATES) if is_middle else ["percentile", "jackknife", "taken"]
    miou, pairs = [], []
    for images in REPLICATIONS:
        miou += miou_rows(encoder, classes, images, names)
        pairs += pair_rows(encoder, classes, images) if is_middle else []
    return miou, pairs


def print_table(title: str, rows: Sequence[Row], across: Callable[[Row], str], show: str) -> None:
    """One row for each kind of sample, one column for each value of `across`."""
    heads = list(dict.fromkeys(map(across, rows)))
    print(f"\n## {title}\n\n| | {' | '.join(heads)} |\n|---|{'---:|' * len(heads)}")
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        cells.setdefault(_kind(row), {})[across(row)] = show.format(**row)
    for kind, found in cells.items():
        print(f"| {kind} | {' | '.join(found.get(head, '') for head in heads)} |")


def _kind(row: Row) -> str:
    if "case" in row:
        return f"{row['case']}, {row['images']} images"
    return f"{row['encoder']}, {row['classes']} classes, {row['images']} images"


def report(figures: Mapping[str, list[Row]]) -> None:
    """Markdown."""

    def interval(row: Row) -> str:
        return row["interval"]

    whole = [row for row in figures["miou"] if row["encoder"] == "middle"]
    few = [
        row for row in figures["miou"] if row["interval"] in ("percentile", "jackknife", "taken")
    ]
    both = "{covers:.3f}, {covers_mean_value:.3f} ({width:.1f})"
    print_table("Mean IoU of the population: share that holds it", whole, interval, "{covers:.3f}")
    print_table("Mean widths, points", whole, interval, "{width:.1f}")
    print_table(
        "Encoders: the population's, the mean value of such samples (width)", few, interval, both
    )
    print_table(
        "Differences of two encoders", figures["pairs"], interval, "{covers:.3f} ({width:.1f})"
    )
    print_table("Other scores", figures["others"], interval, "{covers:.3f} ({width:.3g})")
    print("\n## CPU seconds for 12 blocks x 8 heads, 1,500 images, 171 classes\n")
    print("| " + " | ".join(row["interval"] for row in figures["cost"]) + " |")
    print("|" + "---:|" * len(figures["cost"]))
    print("| " + " | ".join(f"{row['seconds']:.2f}" for row in figures["cost"]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure()
    print(f"# Intervals: how often they hold the truth\n\n{provenance()}\n\n{NOTE}")
    report(figures)
    if options.json:
        found = {"provenance": provenance(), **figures}
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
