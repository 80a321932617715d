"""Rules that judge claims by the results of finished training runs.

The rules were fixed before any run. Later commits changed only their wording.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

import numpy as np

from ssl_bench.intervals import Interval, bootstrap_estimate, mean_estimate
from ssl_bench.models.loading.addresses import DEMO, NAMES
from ssl_bench.tables.published import load_published_table
from tests.benchmarks.evidence.rows import ROWS, demo_of, names_of, probes_of, rate_runs, seed_run

Word = Literal["supported", "refuted", "undecided"]
Run = dict[str, Any]
"""The record of a finished run, as JSON values."""
Runs = Mapping[str, Run]


@dataclass(frozen=True)
class Measurement:
    """A mean or a difference of scores that supports or refutes a claim.

    Attributes:
        text: What was measured, such as "skip - skipless".
        value: Percentage of correct images or letters, or another quantity that `text` names.
        over_seeds: 95 % Student t interval over seeds, paired by seed, or None.
        over_images: Paired bootstrap interval over images for the mean over seeds, or None if the
            results of single images were not stored.
    """

    text: str
    value: float
    over_seeds: Interval | None = None
    over_images: Interval | None = None


Judgement = tuple[list[Measurement], Word]


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim, and the numbers on which it is based.

    Attributes:
        word: The verdict: "supported", "refuted" or "undecided".
        ours: Mean score of each variant over its seeds, by the name of the variant.
        seeds: Number of seeds.
        hours: Core hours that all runs of these variants took together.
    """

    word: Word
    measurements: Sequence[Measurement]
    ours: Mapping[str, float]
    seeds: int
    hours: float


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of the variants' mean scores, such as a difference. The weights sum to 0."""

    text: str
    weights: Mapping[str, float]
    metric: str = "top1"

    def measure(self, row: str, runs: Runs) -> Measurement:
        by_arm = {arm: seeds_of(row, arm, runs, self.metric) for arm in self.weights}
        values = [
            sum(weight * by_arm[arm][seed] for arm, weight in self.weights.items())
            for seed in range(len(ROWS[row].seeds))
        ]
        over_images = self._over_images(row, runs)
        return Measurement(self.text, fmean(values), over_seeds(values), over_images)

    def _over_images(self, row: str, runs: Runs) -> Interval | None:
        """Return the bootstrap interval over images for the experiment `row`.

        Return None if a run lacks per-image results.
        """
        total, seeds = 0.0, ROWS[row].seeds
        for arm, weight in self.weights.items():
            for seed in seeds:
                hits = runs[seed_run(row, arm, seed)].get("hits")
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
class Above:
    """A rule by which a claim is supported if all its contrasts are positive.

    A contrast is a difference of scores with a confidence interval. All intervals must be above 0.
    The claim is refuted if one interval is below 0.

    Attributes:
        over: "seeds" for intervals over seeds, "images" for intervals over the scored images.
        zero_refutes: Whether an interval that contains 0 also refutes the claim. If not, such an
            interval leaves it undecided.
    """

    contrasts: Sequence[Contrast]
    over: Literal["seeds", "images"] = "seeds"
    zero_refutes: bool = False

    def judge(self, row: str, runs: Runs) -> Judgement:
        measurements = [one.measure(row, runs) for one in self.contrasts]
        over_seeds = self.over == "seeds"
        intervals = [one.over_seeds if over_seeds else one.over_images for one in measurements]
        return measurements, _judge_signs(intervals, zero_refutes=self.zero_refutes)


@dataclass(frozen=True)
class Outside:
    """A rule by which a claim is supported if the variant `last` is clearly worst in each group.

    The mean of `last` must be the lowest, and below the interval over seeds of the variant `near`.
    Otherwise, the claim is refuted. It is undecided if `near` has no interval.

    Attributes:
        groups: Names of variants in each group: (others, near, last). `last` is compared with each
            of `others`. `near` is one of `others`.
    """

    groups: Sequence[tuple[Sequence[str], str, str]]

    def judge(self, row: str, runs: Runs) -> Judgement:
        measurements: list[Measurement] = []
        words: list[Word] = []
        for others, near, last in self.groups:
            measurements += [minus(one, last).measure(row, runs) for one in others]
            scores = {arm: seeds_of(row, arm, runs, "top1") for arm in (*others, last)}
            means = {arm: fmean(values) for arm, values in scores.items()}
            interval = over_seeds(scores[near])
            measurements.append(Measurement(f"mean of {near}", means[near], interval))
            if means[last] >= min(means[one] for one in others):
                words.append("refuted")
            elif interval is None:
                words.append("undecided")
            else:
                words.append("refuted" if means[last] >= interval[0] else "supported")
        if "refuted" in words:
            return measurements, "refuted"
        return measurements, "supported" if set(words) == {"supported"} else "undecided"


@dataclass(frozen=True)
class SameBest:
    """A rule by which a claim is supported if the same option has the highest score in every group.

    For example, the groups are optimizers and the options are initialisations. If different options
    are best, the claim is undecided.

    Attributes:
        groups: For each group, the name of the variant with each option, by the option's name.
    """

    groups: Sequence[Mapping[str, str]]

    def judge(self, row: str, runs: Runs) -> Judgement:
        measurements, winners = [], []
        for group in self.groups:
            scores = {name: best_of_rates(row, arm, runs) for name, arm in group.items()}
            first, second = sorted(scores, key=lambda name: -scores[name])[:2]
            text = f"{group[first]} - {group[second]}"
            measurements.append(Measurement(text, scores[first] - scores[second]))
            winners.append(first)
        return measurements, "supported" if len(set(winners)) == 1 else "undecided"


@dataclass(frozen=True)
class AboveRandom:
    """A rule by which a claim is supported if training improves every block from `first` on.

    The difference is the k-NN accuracy of a block minus its k-NN accuracy with random weights.
    All its intervals over images must be above 0. The claim is refuted if one of them is below 0.
    """

    first: int

    def judge(self, row: str, runs: Runs) -> Judgement:
        measurements = [
            Measurement(f"{arm}, block {one['layer']}", one["difference"], over_images=one["ci95"])
            for arm in ROWS[row].arms
            for seed in ROWS[row].seeds
            for one in runs[probes_of(seed_run(row, arm, seed))]["above_random"]
            if one["layer"] >= self.first
        ]
        worst = min(
            measurements, key=lambda one: one.over_images[0] if one.over_images else -np.inf
        )
        worst = replace(worst, text=f"lowest difference from random weights: {worst.text}")
        return [worst], _judge_signs([one.over_images for one in measurements], zero_refutes=False)


@dataclass(frozen=True)
class Small:
    """A rule by which a claim is supported if the file of every demo encoder is small enough.

    Each file must have fewer than `limit` bytes.
    """

    limit: int

    def judge(self, _: str, runs: Runs) -> Judgement:
        return [], "supported" if max(self.sizes(runs).values()) < self.limit else "refuted"

    def sizes(self, runs: Runs) -> dict[str, int]:
        return {f"{DEMO}:{name}": runs[demo_of(name)]["bytes"] for name in NAMES}


@dataclass(frozen=True)
class Apart:
    """A rule: the claim is supported if the patches of an image stay different in some variant.

    The final loss of this variant must also not exceed that of the variant `plain`. If no variant
    fulfils both conditions, the claim is refuted.

    Attributes:
        plain: Name of the variant whose last loss is the limit.
        merged: Limit in percent. In every block, fewer patches than this must be nearly equal to
            the mean patch of their image.
    """

    plain: str
    merged: float

    def judge(self, row: str, runs: Runs) -> Judgement:
        able = able_starts(row, self.plain, runs)
        best = next(iter(able))
        lost = able[best]["loss"][-1] - able[self.plain]["loss"][-1]
        text = f"{best}, nearly equal patches in the worst block, %"
        measurements = [
            Measurement(text, max(able[best]["merged"])),
            Measurement(f"{best} - {self.plain}, loss", lost),
        ]
        is_kept = any(max(run["merged"]) < self.merged for run in able.values())
        return measurements, "supported" if is_kept else "refuted"


Rule = Above | Outside | SameBest | AboveRandom | Small | Apart


@dataclass(frozen=True)
class Claim:
    """A claim that one experiment ("row" of runs) tests, and the corresponding published values.

    Attributes:
        name: Name of the claim. It ends in a letter if an experiment tests several claims.
        row: Name of the experiment.
        comparison: What is compared, as a phrase.
        published: Table, row and column of each published value, if there are any.
        statement: The claim, as a clause.
        refutation: The outcome that would refute the claim, as a sentence.
        rule: The rule that computes the verdict.
        published_statement: What was published, if it is not a value in a table.
        limits: Differences from the paper and unresolved questions, as a phrase, or "".
        also_shown: Variants that the page shows, although they are not compared.
    """

    name: str
    row: str
    comparison: str
    published: Sequence[tuple[str, str, str]]
    statement: str
    refutation: str
    rule: Rule
    published_statement: str = ""
    limits: str = ""
    also_shown: Sequence[str] = ()

    def published_text(self) -> str:
        """Return, as text, the values that papers published for the claim, and their sources.

        If there are no values, return the paper's statement.
        """
        tables = {name: load_published_table(name) for name, _, _ in self.published}
        values = (f"{tables[name].values[row, column]:g}" for name, row, column in self.published)
        sources = dict.fromkeys(
            f"{one.paper.replace('_', ' ')}, {one.where}" for one in tables.values()
        )
        return (
            f"{' / '.join(values)} ({'; '.join(sources)})" if tables else self.published_statement
        )

    def arms(self) -> list[str]:
        """Return the variants that the page of results shows for this claim.

        They are in the order of the experiment.
        """
        arms = list(ROWS[self.row].arms)
        if not isinstance(self.rule, Above):
            return arms
        named = {*self.also_shown, *(arm for one in self.rule.contrasts for arm in one.weights)}
        return [arm for arm in arms if arm in named]


def minus(one: str, other: str, metric: str = "top1") -> Contrast:
    """Return the contrast that subtracts the score of `other` from the score of `one`."""
    text = f"{one} - {other}" + ("" if metric == "top1" else f", {metric}")
    return Contrast(text, {one: 1.0, other: -1.0}, metric)


def verdict(claim: Claim, runs: Runs) -> Verdict:
    """Compute the verdict on a claim. All runs of its experiment must be finished."""
    row, arms, rule = claim.row, claim.arms(), claim.rule
    measurements, word = rule.judge(row, runs)
    if isinstance(rule, Small):
        # The sizes are in megabytes. Another claim of the row counts the runs and their hours.
        return Verdict(
            word, measurements, {n: size / 1e6 for n, size in rule.sizes(runs).items()}, 1, 0.0
        )
    names, seeds = names_of(row, arms), len(ROWS[row].seeds) or 1
    if isinstance(rule, Apart):
        # Only the first runs of these variants are compared.
        names, seeds = [name for arm in arms for name in rate_runs(row, arm)], 1
        ours = {arm: fmean(first_run(row, arm, runs)["cosine"]) for arm in arms}
    elif not ROWS[row].seeds:
        ours = {arm: best_of_rates(row, arm, runs) for arm in arms}
    else:
        metrics = ["top1", "loss"]
        if isinstance(rule, Above):
            metrics = list(dict.fromkeys(one.metric for one in rule.contrasts))
        ours = {
            arm if metric == "top1" else f"{arm}, {metric}": fmean(scores)
            for arm in arms
            for metric in metrics
            if (scores := seeds_of(row, arm, runs, metric))
        }
    return Verdict(
        word, measurements, ours, seeds, hours=sum(runs[name]["hours"] for name in names)
    )


def seeds_of(row: str, arm: str, runs: Runs, metric: str) -> list[float]:
    """Return the final score of the variant `arm` of the experiment `row` for each seed.

    Runs without this metric are left out.
    """
    reported = [runs[seed_run(row, arm, seed)] for seed in ROWS[row].seeds]
    return [run[metric][-1] for run in reported if metric in run]


def over_seeds(values: Sequence[float]) -> Interval | None:
    """Return the 95 % Student t interval for the mean of one score per seed.

    For a single seed, return None.
    """
    margin = mean_estimate(np.array(values)).margin
    return None if np.isnan(margin) else (fmean(values) - margin, fmean(values) + margin)


def _judge_signs(intervals: Sequence[Interval | None], *, zero_refutes: bool) -> Word:
    known = [one for one in intervals if one is not None]
    if any(high < 0 or (zero_refutes and low <= 0) for low, high in known):
        return "refuted"
    are_above = len(known) == len(intervals) and all(low > 0 for low, _ in known)
    return "supported" if are_above else "undecided"


def best_of_rates(row: str, arm: str, runs: Runs) -> float:
    """Return the highest held-out score over all learning rates of a variant.

    Args:
        row: Name of the experiment.
        arm: Name of the variant.
        runs: Finished runs by name.
    """
    return max(runs[name][ROWS[row].chosen_by][-1] for name in rate_runs(row, arm))


def first_run(row: str, arm: str, runs: Runs) -> Run:
    """Return the only run that tries a learning rate for a variant.

    Args:
        row: Name of the experiment.
        arm: Name of the variant, for which exactly one learning rate is tried.
        runs: Finished runs by name.
    """
    (name,) = rate_runs(row, arm)
    return runs[name]


def able_starts(row: str, plain: str, runs: Runs) -> dict[str, Run]:
    """Return the runs of an experiment that train at least as well as the variant `plain`.

    The last loss of such a run does not exceed the last loss of `plain`. Each variant of the
    experiment `row` has one run with one learning rate (see `first_run`). The runs are sorted by
    the mean cosine between a patch and the mean patch of its image, lowest first.
    """
    first = {arm: first_run(row, arm, runs) for arm in ROWS[row].arms}
    bound = first[plain]["loss"][-1]
    able = {arm: run for arm, run in first.items() if run["loss"][-1] <= bound}
    return dict(sorted(able.items(), key=lambda one: fmean(one[1]["cosine"])))
