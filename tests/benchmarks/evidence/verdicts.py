"""Compute the verdict on each claim from the records of finished runs, without file access."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

import numpy as np

from ssl_bench.intervals import Interval, bootstrap_estimate, mean_estimate
from ssl_bench.models.loading.addresses import DEMO, NAMES
from tests.benchmarks.evidence.claims import (
    Above,
    AboveRandom,
    Apart,
    Claim,
    Contrast,
    Outside,
    SameBest,
    Small,
)
from tests.benchmarks.evidence.rows import (
    ROWS,
    demo_of,
    names_of,
    probes_of,
    rate_runs,
    seed_run,
)

Word = Literal["supported", "refuted", "undecided"]
Run = dict[str, Any]
"""The record of a finished run, as JSON values."""
Runs = Mapping[str, Run]


@dataclass(frozen=True)
class Found:
    """A mean or a difference that supports or refutes a claim.

    Attributes:
        value: Percentage of correct images or letters, or the loss if `text` says so.
        over_seeds: 95 % Student t interval over seeds, paired by seed, if there is one.
        over_images: Paired bootstrap interval of the mean over seeds, if images were kept.
    """

    text: str
    value: float
    over_seeds: Interval | None = None
    over_images: Interval | None = None


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim and the numbers behind it.

    Attributes:
        ours: Mean score over seeds of each variant, by its name.
        seeds: Number of seeds.
        hours: Core hours of all runs of these variants.
    """

    word: Word
    found: Sequence[Found]
    ours: Mapping[str, float]
    seeds: int
    hours: float


def verdict(claim: Claim, runs: Runs) -> Verdict:
    """Return the verdict on a claim. All runs of its row must be finished."""
    row, arms = claim.row, _arms(claim)
    if isinstance(claim.rule, Small):
        # Scores are megabytes. Another claim of the row counts the runs and their hours.
        sizes = {f"{DEMO}:{name}": runs[demo_of(name)]["bytes"] for name in NAMES}
        word: Word = "supported" if max(sizes.values()) < claim.rule.bytes else "refuted"
        return Verdict(word, [], {name: size / 1e6 for name, size in sizes.items()}, 1, 0.0)
    if isinstance(claim.rule, Apart):
        # These variants are compared by their first runs only.
        names = [name for arm in arms for name in rate_runs(row, arm)]
        ours = {arm: fmean(first_run(row, arm, runs)["cosine"]) for arm in arms}
        seeds = 1
    else:
        names, seeds = names_of(row, arms), len(ROWS[row].seeds) or 1
        ours = _ours(claim, runs)
    found, word = _judged(claim, runs)
    return Verdict(word, found, ours, seeds, hours=sum(runs[name]["hours"] for name in names))


def _judged(claim: Claim, runs: Runs) -> tuple[list[Found], Word]:
    row = claim.row
    match claim.rule:
        case Small():
            raise AssertionError("its files are not runs")
        case Above() as rule:
            found = [_contrast(row, one, runs) for one in rule.contrasts]
            intervals = [
                one.over_seeds if rule.over == "seeds" else one.over_images for one in found
            ]
            return found, _signs(intervals, zero_refutes=rule.zero_refutes)
        case Outside() as rule:
            return _outside(row, rule, runs)
        case SameBest() as rule:
            return _same_best(row, rule, runs)
        case AboveRandom() as rule:
            return _above_random(row, rule, runs)
        case Apart() as rule:
            return _apart(row, rule, runs)


def seeds_of(row: str, arm: str, runs: Runs, metric: str) -> list[float]:
    """Return the last measured score of an arm for each seed."""
    reported = [runs[seed_run(row, arm, seed)] for seed in ROWS[row].seeds]
    return [run[metric][-1] for run in reported if metric in run]


def _contrast(row: str, contrast: Contrast, runs: Runs) -> Found:
    by_arm = {arm: seeds_of(row, arm, runs, contrast.metric) for arm in contrast.weights}
    values = [
        sum(weight * by_arm[arm][seed] for arm, weight in contrast.weights.items())
        for seed in range(len(ROWS[row].seeds))
    ]
    over_images = _over_images(row, contrast, runs)
    return Found(contrast.text, fmean(values), over_seeds(values), over_images)


def over_seeds(values: Sequence[float]) -> Interval | None:
    """Return the 95 % Student t interval of a mean, or None without variance.

    Args:
        values: One value per seed.
    """
    margin = mean_estimate(np.array(values)).margin
    return None if np.isnan(margin) else (fmean(values) - margin, fmean(values) + margin)


def _over_images(row: str, contrast: Contrast, runs: Runs) -> Interval | None:
    """Return the bootstrap interval of a contrast over images, if there is one."""
    total, seeds = 0.0, ROWS[row].seeds
    for arm, weight in contrast.weights.items():
        for seed in seeds:
            hits = runs[seed_run(row, arm, seed)].get("hits")
            if hits is None or contrast.metric != "top1":
                return None
            bits = np.frombuffer(base64.b64decode(hits["bits"]), np.uint8)
            total = total + weight * np.unpackbits(bits, count=hits["images"])
    per_image = np.asarray(total)
    scale = 100 / (len(seeds) * len(per_image))
    # The estimate counts whole numbers; weights are multiples of a half.
    doubled = np.rint(2 * per_image).astype(np.int64)
    drawn = bootstrap_estimate(doubled, lambda sums: sums * (scale / 2)).drawn
    if not np.ptp(drawn) > 1e-9:
        return None
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def _signs(intervals: Sequence[Interval | None], *, zero_refutes: bool) -> Word:
    known = [one for one in intervals if one is not None]
    if any(high < 0 or (zero_refutes and low <= 0) for low, high in known):
        return "refuted"
    whole = len(known) == len(intervals) and all(low > 0 for low, _ in known)
    return "supported" if whole else "undecided"


def _outside(row: str, rule: Outside, runs: Runs) -> tuple[list[Found], Word]:
    found: list[Found] = []
    words: list[Word] = []
    for others, near, last in rule.groups:
        found += [
            _contrast(row, Contrast(f"{one} - {last}", {one: 1.0, last: -1.0}), runs)
            for one in others
        ]
        scores = {arm: seeds_of(row, arm, runs, "top1") for arm in (*others, last)}
        means = {arm: fmean(values) for arm, values in scores.items()}
        interval = over_seeds(scores[near])
        found.append(Found(f"mean of {near}", means[near], interval))
        if means[last] >= min(means[one] for one in others):
            words.append("refuted")
        elif interval is None:
            words.append("undecided")
        else:
            words.append("refuted" if means[last] >= interval[0] else "supported")
    if "refuted" in words:
        return found, "refuted"
    return found, "supported" if set(words) == {"supported"} else "undecided"


def best_of_rates(row: str, arm: str, runs: Runs) -> float:
    """Return the highest held-out score of a variant over the rates."""
    return max(runs[name][ROWS[row].chosen_by][-1] for name in rate_runs(row, arm))


def _same_best(row: str, rule: SameBest, runs: Runs) -> tuple[list[Found], Word]:
    found, winners = [], []
    for group in rule.groups:
        scores = {name: best_of_rates(row, arm, runs) for name, arm in group.items()}
        first, second = sorted(scores, key=lambda name: -scores[name])[:2]
        text = f"{group[first]} - {group[second]}"
        found.append(Found(text, scores[first] - scores[second]))
        winners.append(first)
    return found, "supported" if len(set(winners)) == 1 else "undecided"


def _above_random(row: str, rule: AboveRandom, runs: Runs) -> tuple[list[Found], Word]:
    found = [
        Found(f"{arm}, block {one['layer']}", one["difference"], over_images=one["ci95"])
        for arm in ROWS[row].arms
        for seed in ROWS[row].seeds
        for one in runs[probes_of(seed_run(row, arm, seed))]["above_random"]
        if one["layer"] >= rule.first
    ]
    worst = min(found, key=lambda one: one.over_images[0] if one.over_images else -np.inf)
    worst = replace(worst, text=f"lowest difference from random weights: {worst.text}")
    return [worst], _signs([one.over_images for one in found], zero_refutes=False)


def first_run(row: str, arm: str, runs: Runs) -> Run:
    """Return the only run that chose the rate of a variant."""
    (name,) = rate_runs(row, arm)
    return runs[name]


def able_starts(row: str, plain: str, runs: Runs) -> dict[str, Run]:
    """Return first runs with at most the loss of `plain`, by rising cosine; see `Apart`."""
    first = {arm: first_run(row, arm, runs) for arm in ROWS[row].arms}
    bound = first[plain]["loss"][-1]
    able = {arm: run for arm, run in first.items() if run["loss"][-1] <= bound}
    return dict(sorted(able.items(), key=lambda one: fmean(one[1]["cosine"])))


def _apart(row: str, rule: Apart, runs: Runs) -> tuple[list[Found], Word]:
    able = able_starts(row, rule.plain, runs)
    best = next(iter(able))
    lost = able[best]["loss"][-1] - able[rule.plain]["loss"][-1]
    found = [
        Found(f"{best}, nearly equal patches in the worst block, %", max(able[best]["merged"])),
        Found(f"{best} - {rule.plain}, loss", lost),
    ]
    kept = any(max(run["merged"]) < rule.merged for run in able.values())
    return found, "supported" if kept else "refuted"


def _ours(claim: Claim, runs: Runs) -> dict[str, float]:
    """Return the mean score over seeds of each variant of a claim."""
    if not ROWS[claim.row].seeds:
        return {arm: best_of_rates(claim.row, arm, runs) for arm in _arms(claim)}
    metrics = ["top1", "loss"]
    if isinstance(claim.rule, Above):
        metrics = list(dict.fromkeys(one.metric for one in claim.rule.contrasts))
    return {
        arm if metric == "top1" else f"{arm}, {metric}": fmean(scores)
        for arm in _arms(claim)
        for metric in metrics
        if (scores := seeds_of(claim.row, arm, runs, metric))
    }


def _arms(claim: Claim) -> list[str]:
    """Return the variants of a claim in the order of its row."""
    arms = list(ROWS[claim.row].arms)
    if not isinstance(claim.rule, Above):
        return arms
    named = {*claim.beside, *(arm for one in claim.rule.contrasts for arm in one.weights)}
    return [arm for arm in arms if arm in named]
