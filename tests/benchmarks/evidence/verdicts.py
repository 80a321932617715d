"""Define rules that decide whether training results support a claim.

The rules were written before any training run. Only their wording was changed later.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

import numpy as np

from ssl_bench.intervals import Interval, bootstrap_estimate, mean_estimate
from ssl_bench.models.loading.addresses import DEMO, DEMO_NAMES
from ssl_bench.tables.published import load_published_table
from tests.benchmarks.evidence.rows import (
    EXPERIMENTS,
    demo_of,
    names_of,
    probes_of,
    rate_runs,
    seed_run,
)

Outcome = Literal["supported", "refuted", "undecided"]
Run = dict[str, Any]
"""The record of a finished run, as JSON values."""
Runs = Mapping[str, Run]


@dataclass(frozen=True)
class Measurement:
    """A score, or the difference of two scores, with its 95 % confidence intervals."""

    text: str
    value: float  # A percentage, unless `text` names another quantity.
    over_seeds: Interval | None = None
    over_images: Interval | None = None


Judgement = tuple[list[Measurement], Outcome]


@dataclass(frozen=True)
class Verdict:
    """The result of testing a claim."""

    outcome: Outcome
    measurements: Sequence[Measurement]
    ours: Mapping[str, float]  # Mean score over seeds, by training variant.
    seeds: int  # Number of seeds.
    hours: float  # Core hours of all runs together.


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of scores, such as the difference between two training variants."""

    text: str
    weights: Mapping[str, float]
    metric: str = "top1"

    def measure(self, experiment: str, runs: Runs) -> Measurement:
        by_variant = {
            variant: seeds_of(experiment, variant, runs, self.metric) for variant in self.weights
        }
        values = [
            sum(weight * by_variant[variant][seed] for variant, weight in self.weights.items())
            for seed in range(len(EXPERIMENTS[experiment].seeds))
        ]
        over_images = self._over_images(experiment, runs)
        return Measurement(self.text, fmean(values), compute_seed_interval(values), over_images)

    def _over_images(self, experiment: str, runs: Runs) -> Interval | None:
        """Return the 95 % bootstrap confidence interval over images, or None if it is undefined."""
        total, seeds = 0.0, EXPERIMENTS[experiment].seeds
        for variant, weight in self.weights.items():
            for seed in seeds:
                hits = runs[seed_run(experiment, variant, seed)].get("hits")
                if hits is None or self.metric != "top1":
                    return None
                bits = np.frombuffer(base64.b64decode(hits["bits"]), np.uint8)
                total = total + weight * np.unpackbits(bits, count=hits["images"])
        per_image = np.asarray(total)
        scale = 100 / (len(seeds) * len(per_image))
        # The estimate needs integers, and all weights are multiples of a half.
        doubled = np.rint(2 * per_image).astype(np.int64)
        scores = bootstrap_estimate(doubled, lambda sums: sums * (scale / 2)).sample_scores
        if not np.ptp(scores) > 1e-9:
            return None
        low, high = np.quantile(scores, [0.025, 0.975])
        return float(low), float(high)


@dataclass(frozen=True)
class PositiveDifferences:
    """A check that the confidence interval of every score difference is above 0."""

    contrasts: Sequence[Contrast]
    over: Literal["seeds", "images"] = "seeds"
    zero_refutes: bool = False  # Whether an interval that contains 0 refutes the claim.

    def judge(self, experiment: str, runs: Runs) -> Judgement:
        measurements = [one.measure(experiment, runs) for one in self.contrasts]
        over_seeds = self.over == "seeds"
        intervals = [one.over_seeds if over_seeds else one.over_images for one in measurements]
        return measurements, _judge_signs(intervals, zero_refutes=self.zero_refutes)


@dataclass(frozen=True)
class LowestScore:
    """A check that one training variant has the lowest score."""

    # For each group: the other variants, the one whose interval `last` must be below, and `last`.
    groups: Sequence[tuple[Sequence[str], str, str]]

    def judge(self, experiment: str, runs: Runs) -> Judgement:
        measurements: list[Measurement] = []
        outcomes: list[Outcome] = []
        for others, near, last in self.groups:
            measurements += [minus(one, last).measure(experiment, runs) for one in others]
            scores = {
                variant: seeds_of(experiment, variant, runs, "top1") for variant in (*others, last)
            }
            means = {variant: fmean(values) for variant, values in scores.items()}
            interval = compute_seed_interval(scores[near])
            measurements.append(Measurement(f"mean of {near}", means[near], interval))
            if means[last] >= min(means[one] for one in others):
                outcomes.append("refuted")
            elif interval is None:
                outcomes.append("undecided")
            else:
                outcomes.append("refuted" if means[last] >= interval[0] else "supported")
        if "refuted" in outcomes:
            return measurements, "refuted"
        return measurements, "supported" if set(outcomes) == {"supported"} else "undecided"


@dataclass(frozen=True)
class SameBest:
    """A check that the same option is the best in every group of training runs."""

    # For each group, such as an optimizer: the training variant with each option.
    groups: Sequence[Mapping[str, str]]

    def judge(self, experiment: str, runs: Runs) -> Judgement:
        measurements, winners = [], []
        for group in self.groups:
            scores = {
                name: best_of_rates(experiment, variant, runs) for name, variant in group.items()
            }
            first, second = sorted(scores, key=lambda name: -scores[name])[:2]
            text = f"{group[first]} - {group[second]}"
            measurements.append(Measurement(text, scores[first] - scores[second]))
            winners.append(first)
        return measurements, "supported" if len(set(winners)) == 1 else "undecided"


@dataclass(frozen=True)
class AboveRandom:
    """A check that training improves the k-NN accuracy of the later blocks."""

    first: int

    def judge(self, experiment: str, runs: Runs) -> Judgement:
        measurements = [
            Measurement(
                f"{variant}, block {one['layer']}", one["difference"], over_images=one["ci95"]
            )
            for variant in EXPERIMENTS[experiment].variants
            for seed in EXPERIMENTS[experiment].seeds
            for one in runs[probes_of(seed_run(experiment, variant, seed))]["above_random"]
            if one["layer"] >= self.first
        ]
        worst = min(
            measurements, key=lambda one: one.over_images[0] if one.over_images else -np.inf
        )
        worst = replace(worst, text=f"lowest difference from random weights: {worst.text}")
        return [worst], _judge_signs([one.over_images for one in measurements], zero_refutes=False)


@dataclass(frozen=True)
class MaxFileSize:
    """A check that every demo encoder is smaller than `limit` bytes."""

    limit: int

    def judge(self, _: str, runs: Runs) -> Judgement:
        return [], "supported" if max(self.sizes(runs).values()) < self.limit else "refuted"

    def sizes(self, runs: Runs) -> dict[str, int]:
        return {f"{DEMO}:{name}": runs[demo_of(name)]["bytes"] for name in DEMO_NAMES}


@dataclass(frozen=True)
class DistinctPatches:
    """A check that the patch tokens of an image do not become nearly equal."""

    plain: str  # The variant whose last loss must not be exceeded.
    merged: float  # Limit for the percentage of patches that nearly equal the mean patch.

    def judge(self, experiment: str, runs: Runs) -> Judgement:
        trainable = find_trainable_runs(experiment, self.plain, runs)
        best = next(iter(trainable))
        lost = trainable[best]["loss"][-1] - trainable[self.plain]["loss"][-1]
        text = f"{best}, nearly equal patches in the worst block, %"
        measurements = [
            Measurement(text, max(trainable[best]["merged"])),
            Measurement(f"{best} - {self.plain}, loss", lost),
        ]
        is_kept = any(max(run["merged"]) < self.merged for run in trainable.values())
        return measurements, "supported" if is_kept else "refuted"


Rule = PositiveDifferences | LowestScore | SameBest | AboveRandom | MaxFileSize | DistinctPatches


@dataclass(frozen=True)
class Claim:
    """A claim about training that is tested by one experiment."""

    name: str
    experiment: str
    comparison: str
    published: Sequence[tuple[str, str, str]]  # Table, row and column of each value.
    statement: str
    refutation: str  # The outcome that would refute the claim.
    rule: Rule
    published_statement: str = ""  # What a paper says, if it gives no value in a table.
    limits: str = ""  # Differences from the paper and unresolved questions.
    also_shown: Sequence[str] = ()  # Variants on the page that the claim does not compare.

    def published_text(self) -> str:
        """Return a text with the published values for the claim."""
        tables = {name: load_published_table(name) for name, _, _ in self.published}
        values = (f"{tables[name].values[row, column]:g}" for name, row, column in self.published)
        sources = dict.fromkeys(
            f"{one.paper.replace('_', ' ')}, {one.where}" for one in tables.values()
        )
        return (
            f"{' / '.join(values)} ({'; '.join(sources)})" if tables else self.published_statement
        )

    def variants(self) -> list[str]:
        """Return the training variants that the page shows for a claim."""
        variants = list(EXPERIMENTS[self.experiment].variants)
        if not isinstance(self.rule, PositiveDifferences):
            return variants
        named = {
            *self.also_shown,
            *(variant for one in self.rule.contrasts for variant in one.weights),
        }
        return [variant for variant in variants if variant in named]


def minus(one: str, other: str, metric: str = "top1") -> Contrast:
    text = f"{one} - {other}" + ("" if metric == "top1" else f", {metric}")
    return Contrast(text, {one: 1.0, other: -1.0}, metric)


def verdict(claim: Claim, runs: Runs) -> Verdict:
    """Decide whether finished training runs support a claim."""
    experiment, variants, rule = claim.experiment, claim.variants(), claim.rule
    measurements, outcome = rule.judge(experiment, runs)
    if isinstance(rule, MaxFileSize):
        # The sizes are in megabytes. Another claim of the experiment counts runs and their hours.
        return Verdict(
            outcome, measurements, {n: size / 1e6 for n, size in rule.sizes(runs).items()}, 1, 0.0
        )
    names, seeds = names_of(experiment, variants), len(EXPERIMENTS[experiment].seeds) or 1
    if isinstance(rule, DistinctPatches):
        # Only the first runs of these variants are compared.
        names, seeds = [name for variant in variants for name in rate_runs(experiment, variant)], 1
        ours = {
            variant: fmean(first_run(experiment, variant, runs)["cosine"]) for variant in variants
        }
    elif not EXPERIMENTS[experiment].seeds:
        ours = {variant: best_of_rates(experiment, variant, runs) for variant in variants}
    else:
        metrics = ["top1", "loss"]
        if isinstance(rule, PositiveDifferences):
            metrics = list(dict.fromkeys(one.metric for one in rule.contrasts))
        ours = {
            variant if metric == "top1" else f"{variant}, {metric}": fmean(scores)
            for variant in variants
            for metric in metrics
            if (scores := seeds_of(experiment, variant, runs, metric))
        }
    return Verdict(
        outcome, measurements, ours, seeds, hours=sum(runs[name]["hours"] for name in names)
    )


def seeds_of(experiment: str, variant: str, runs: Runs, metric: str) -> list[float]:
    """Return the final value of `metric` in each run of a training variant."""
    reported = [runs[seed_run(experiment, variant, seed)] for seed in EXPERIMENTS[experiment].seeds]
    return [run[metric][-1] for run in reported if metric in run]


def compute_seed_interval(values: Sequence[float]) -> Interval | None:
    """Return the 95 % Student t interval of the mean over seeds, or None for a single seed."""
    margin = mean_estimate(np.array(values)).margin
    return None if np.isnan(margin) else (fmean(values) - margin, fmean(values) + margin)


def _judge_signs(intervals: Sequence[Interval | None], *, zero_refutes: bool) -> Outcome:
    known = [one for one in intervals if one is not None]
    if any(high < 0 or (zero_refutes and low <= 0) for low, high in known):
        return "refuted"
    are_above = len(known) == len(intervals) and all(low > 0 for low, _ in known)
    return "supported" if are_above else "undecided"


def best_of_rates(experiment: str, variant: str, runs: Runs) -> float:
    """Return the highest score of a training variant over all learning rates."""
    return max(
        runs[name][EXPERIMENTS[experiment].chosen_by][-1] for name in rate_runs(experiment, variant)
    )


def first_run(experiment: str, variant: str, runs: Runs) -> Run:
    """Return the only run of a training variant."""
    (name,) = rate_runs(experiment, variant)
    return runs[name]


def find_trainable_runs(experiment: str, plain: str, runs: Runs) -> dict[str, Run]:
    """Return the runs whose final loss is at most the final loss of the variant `plain`."""
    first = {
        variant: first_run(experiment, variant, runs)
        for variant in EXPERIMENTS[experiment].variants
    }
    bound = first[plain]["loss"][-1]
    trainable = {variant: run for variant, run in first.items() if run["loss"][-1] <= bound}
    return dict(sorted(trainable.items(), key=lambda one: fmean(one[1]["cosine"])))
