"""From finished runs to what they say of a claim. Pure: a ledger in, words and intervals out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

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
    rate_run,
    rate_runs,
    reported_of,
    seed_run,
)
from tests.benchmarks.ledger import Run, unpacked

Word = Literal["supported", "refuted", "undecided", "not run"]
Runs = Mapping[str, Run]


@dataclass(frozen=True)
class Found:
    """What a comparison came to.

    Attributes:
        value: In percent of the images or letters; None while nothing is there.
        over_seeds: 95 % interval of Student's t over seeds, paired by seed; None below two.
        over_images: Of the mean of the seeds, by a bootstrap of the images, paired; None where
            images were not kept.
    """

    text: str
    value: float | None
    over_seeds: Interval | None = None
    over_images: Interval | None = None


@dataclass(frozen=True)
class Verdict:
    """What may be said of a claim.

    Attributes:
        ours: Mean over seeds of every arm, by its name.
        done: Runs that are finished, of `asked`.
        hours: Of core, of the finished ones.
    """

    word: Word
    found: Sequence[Found]
    ours: Mapping[str, float]
    done: int
    asked: int
    hours: float


def verdict(claim: Claim, runs: Runs) -> Verdict:
    """What the finished runs say; undecided until all runs of the claim's arms are there."""
    if isinstance(claim.rule, Small):
        return _small(claim.rule, runs)
    names = _named(claim)
    there = [name for name in names if name in runs]
    found, word = _judged(claim, runs)
    if len(there) < len(names):
        word = "undecided" if _is_begun(claim, runs) else "not run"
    return Verdict(
        word,
        found,
        _ours(claim, runs),
        done=len(there),
        asked=len(names),
        hours=sum(runs[name]["hours"] for name in there),
    )


def seeds_done(claim: Claim, runs: Runs) -> tuple[int, int]:
    """Seeds of which every arm is finished, and those asked; of first runs alone, their one."""
    row, arms = claim.row, _arms(claim)
    seeds = ROWS[row].seeds
    if not seeds or isinstance(claim.rule, Apart):
        return int(all(name in runs for name in _named(claim))), 1
    whole = [all(seed_run(row, arm, seed) in runs for arm in arms) for seed in seeds]
    return sum(whole), len(whole)


def diverged_of(claim: Claim, runs: Runs) -> list[str]:
    """Names of the reported runs that diverged."""
    names = reported_of(claim.row, _arms(claim))
    return [name for name in names if "diverged" in runs.get(name, {})]


def _named(claim: Claim) -> list[str]:
    """What the ledger has to hold before a claim is judged: of starts, their first runs alone."""
    arms = _arms(claim)
    if isinstance(claim.rule, Apart):
        return [name for arm in arms for name in rate_runs(claim.row, arm)]
    return names_of(claim.row, arms)


def _is_begun(claim: Claim, runs: Runs) -> bool:
    """Whether a run is finished that is reported, and none that only chose a rate."""
    asked = () if isinstance(claim.rule, Apart) else reported_of(claim.row, _arms(claim))
    return any(name in runs for name in asked or _named(claim))


def _small(rule: Small, runs: Runs) -> Verdict:
    """Megabytes are ours; no run is counted, as the row's own claim counts them."""
    there = {name: runs[demo_of(name)]["bytes"] for name in NAMES if demo_of(name) in runs}
    word: Word = "undecided" if there else "not run"
    if any(size >= rule.bytes for size in there.values()):
        word = "refuted"
    elif len(there) == len(NAMES):
        word = "supported"
    ours = {f"{DEMO}:{name}": size / 1e6 for name, size in there.items()}
    return Verdict(word, [], ours, done=len(there), asked=len(NAMES), hours=0.0)


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


def seeds_of(row: str, arm: str, runs: Runs, metric: str) -> dict[int, float]:
    """The last score of every finished seed of an arm."""
    named = {seed: seed_run(row, arm, seed) for seed in ROWS[row].seeds}
    return {
        seed: runs[name][metric][-1]
        for seed, name in named.items()
        if runs.get(name, {}).get(metric)
    }


def _contrast(row: str, contrast: Contrast, runs: Runs) -> Found:
    by_arm = {arm: seeds_of(row, arm, runs, contrast.metric) for arm in contrast.weights}
    pairs = [s for s in ROWS[row].seeds if all(s in scores for scores in by_arm.values())]
    values = [
        sum(weight * by_arm[arm][seed] for arm, weight in contrast.weights.items())
        for seed in pairs
    ]
    if not values:
        return Found(contrast.text, None)
    return Found(
        contrast.text,
        fmean(values),
        over_seeds(values),
        _over_images(row, contrast, pairs, runs),
    )


def over_seeds(values: Sequence[float]) -> Interval | None:
    """95 % interval of Student's t of a mean; None of a single value, or of equal ones.

    Args:
        values: One a seed.
    """
    margin = mean_estimate(np.array(values)).margin
    return None if np.isnan(margin) else (fmean(values) - margin, fmean(values) + margin)


def _over_images(row: str, contrast: Contrast, seeds: Sequence[int], runs: Runs) -> Interval | None:
    """Each image brings what it does to the contrast, summed over the seeds."""
    total = 0.0
    for arm, weight in contrast.weights.items():
        for seed in seeds:
            hits = runs[seed_run(row, arm, seed)].get("hits")
            if hits is None or contrast.metric != "top1":
                return None
            total = total + weight * unpacked(hits)
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
        scores = {arm: list(seeds_of(row, arm, runs, "top1").values()) for arm in (*others, last)}
        if not all(scores.values()):
            words.append("undecided")
            continue
        means = {arm: fmean(values) for arm, values in scores.items()}
        interval = over_seeds(scores[near])
        found.append(Found(f"{near} itself", means[near], interval))
        if means[last] >= min(means[one] for one in others):
            words.append("refuted")
        elif interval is None:
            words.append("undecided")
        else:
            words.append("refuted" if means[last] >= interval[0] else "supported")
    return found, _together(words)


def _together(words: Sequence[Word]) -> Word:
    if "refuted" in words:
        return "refuted"
    return "supported" if set(words) == {"supported"} else "undecided"


def best_of_rates(row: str, arm: str, runs: Runs) -> float | None:
    """The highest held-out score of an arm over the rates; None until all are finished."""
    names = rate_runs(row, arm)
    if not all(name in runs for name in names):
        return None
    return max(runs[name][ROWS[row].kind.chosen_by][-1] for name in names)


def _same_best(row: str, rule: SameBest, runs: Runs) -> tuple[list[Found], Word]:
    found, winners = [], []
    for group in rule.groups:
        scores = {name: best_of_rates(row, arm, runs) for name, arm in group.items()}
        known = {name: score for name, score in scores.items() if score is not None}
        if len(known) < len(group):
            return found, "undecided"
        first, second = sorted(known, key=lambda name: -known[name])[:2]
        text = f"{group[first]} - {group[second]}"
        found.append(Found(text, known[first] - known[second]))
        winners.append(first)
    return found, "supported" if len(set(winners)) == 1 else "undecided"


def _above_random(row: str, rule: AboveRandom, runs: Runs) -> tuple[list[Found], Word]:
    found = [
        Found(f"{arm}, block {one['layer']}", one["difference"], over_images=one["ci95"])
        for arm in ROWS[row].arms
        for seed in ROWS[row].seeds
        for one in runs.get(probes_of(seed_run(row, arm, seed)), {}).get("above_random", ())
        if one["layer"] >= rule.first
    ]
    if not found:
        return found, "undecided"
    worst = min(found, key=lambda one: one.over_images[0] if one.over_images else -np.inf)
    worst = replace(worst, text=f"lowest of all: {worst.text}")
    return [worst], _signs([one.over_images for one in found], zero_refutes=False)


def first_run(row: str, arm: str, runs: Runs) -> Run:
    """The only run that chooses the rate of an arm; empty where it is not finished."""
    (rate,) = ROWS[row].kind.rates
    return runs.get(rate_run(row, arm, rate), {})


def most_apart(row: str, plain: str, runs: Runs) -> str | None:
    """The arm that is trained whole, see `Apart`; None until all first runs are finished."""
    able = _able(row, plain, runs)
    return min(able, key=lambda arm: fmean(able[arm]["cosine"]), default=None)


def _able(row: str, plain: str, runs: Runs) -> dict[str, Run]:
    """First runs whose loss is not above that of `plain`; none until all are finished."""
    first = {arm: first_run(row, arm, runs) for arm in ROWS[row].arms}
    if not all("cosine" in run for run in first.values()):
        return {}
    bound = first[plain]["loss"][-1]
    return {arm: run for arm, run in first.items() if run["loss"][-1] <= bound}


def _apart(row: str, rule: Apart, runs: Runs) -> tuple[list[Found], Word]:
    able, best = _able(row, rule.plain, runs), most_apart(row, rule.plain, runs)
    if best is None:
        return [], "undecided"
    lost = able[best]["loss"][-1] - able[rule.plain]["loss"][-1]
    found = [
        Found(f"{best}, one token, % in the worst block", max(able[best]["merged"])),
        Found(f"{best} - {rule.plain}, loss", lost),
    ]
    kept = any(max(run["merged"]) < rule.merged for run in able.values())
    return found, "supported" if kept else "refuted"


def _ours(claim: Claim, runs: Runs) -> dict[str, float]:
    """Means over the seeds of every arm of the row that the claim speaks of."""
    found: dict[str, float] = {}
    if isinstance(claim.rule, Apart):
        first = {arm: first_run(claim.row, arm, runs) for arm in _arms(claim)}
        return {arm: fmean(run["cosine"]) for arm, run in first.items() if run}
    for arm in _arms(claim):
        for metric in _metrics(claim):
            scores = seeds_of(claim.row, arm, runs, metric)
            if scores:
                found[arm if metric == "top1" else f"{arm}, {metric}"] = fmean(scores.values())
        best = best_of_rates(claim.row, arm, runs) if not ROWS[claim.row].seeds else None
        if best is not None:
            found[arm] = best
    return found


def _arms(claim: Claim) -> list[str]:
    """Those that the claim speaks of, in the order of the row."""
    arms = list(ROWS[claim.row].arms)
    if not isinstance(claim.rule, Above):
        return arms
    named = {*claim.beside, *(arm for one in claim.rule.contrasts for arm in one.weights)}
    return [arm for arm in arms if arm in named]


def _metrics(claim: Claim) -> list[str]:
    if isinstance(claim.rule, Above):
        return list(dict.fromkeys(one.metric for one in claim.rule.contrasts))
    return ["top1", "loss"]
