"""Verdicts on the papers' claims, compared with hand counts; test_generated checks the pages."""

import base64
from itertools import cycle

import numpy as np
import pytest

from tests.benchmarks.evidence.claims import CLAIMS
from tests.benchmarks.evidence.rows import ROWS, names_of, probes_of, rate_run, seed_run
from tests.benchmarks.evidence.verdicts import able_starts, over_seeds, verdict

OF = {claim.name: claim for claim in CLAIMS}


def run_of(score, hits=None, metric="top1"):
    found = {metric: [score], "hours": 0.5}
    if hits is None:
        return found
    bits = base64.b64encode(np.packbits(hits).tobytes()).decode()
    return {**found, "hits": {"images": len(hits), "bits": bits}}


def whole(row, scores, metric="top1"):
    """Return records of all runs of a row; each variant's scores are repeated over its seeds."""
    runs = {name: run_of(0.0) for name in names_of(row, ROWS[row].arms)}
    for arm, values in scores.items():
        for seed, value in zip(ROWS[row].seeds, cycle(values)):
            runs[seed_run(row, arm, seed)] = run_of(value, metric=metric)
    return runs


PLAIN = {"default": (50.0, 50.2), "sinusoidal": (49.0, 49.25)}
LAST = {
    f"{kind}_{optimizer}": values
    for optimizer in ("adamw", "soap")
    for kind, values in (
        ("skip", (60.0, 60.1)), ("skipless", (54.3, 55.8)), ("skipless_default", (10.0, 10.1))
    )
}  # fmt: skip


@pytest.mark.parametrize(
    ("claim", "scores", "word"),
    [
        # Differences of 1 and 9 have the interval 5 +- 51: it refutes V1, and leaves V2.
        ("V1", {**PLAIN, "mimetic": (60.0, 60.3)}, "supported"),
        ("V1", {**PLAIN, "mimetic": (51.0, 59.2)}, "refuted"),
        ("V2", {"uniform": (50.0, 50.2), "covariance": (60.0, 60.3)}, "supported"),
        ("V2", {"uniform": (50.0, 50.2), "covariance": (51.0, 59.2)}, "undecided"),
        ("V2", {"uniform": (50.0, 50.2), "covariance": (40.0, 40.3)}, "refuted"),
        # 55.05 +- 9.5 is the interval of the proposed arm.
        ("V4a", LAST, "supported"),
        ("V4a", {**LAST, "skipless_default_soap": (50.0, 50.1)}, "refuted"),
        ("V4a", {**LAST, "skipless_default_soap": (70.0, 70.1)}, "refuted"),
    ],
)
def test_what_scores_over_seeds_say_of_a_claim(claim, scores, word):
    assert verdict(OF[claim], whole(OF[claim].row, scores)).word == word


def test_far_worse_is_more_than_twice_the_loss_by_hand():
    scores = {
        "both": (80.0, 80.5),
        "no_attention_skip": (58.0, 58.4),
        "no_mlp_skip": (78.0, 78.6),
    }
    found = verdict(OF["V5"], whole("one_skip", scores))
    # 22 and 22.1 points against twice 2 and twice 1.9.
    assert [one.value for one in found.found] == pytest.approx([20.1, 18.15])
    assert found.word == "supported"
    # Nine first runs and six with seeds, half an hour each.
    assert (found.seeds, found.hours) == (2, 7.5)


@pytest.mark.parametrize(
    ("layer", "interval", "word"),
    [
        (5, (-1.0, 3.0), "undecided"),
        (5, (-3.0, -1.0), "refuted"),
        (2, (-3.0, -1.0), "supported"),
    ],
)
def test_blocks_from_three_on_have_to_be_above_random_weights(layer, interval, word):
    runs = {name: run_of(2.0, metric="loss") for name in names_of("dino", ROWS["dino"].arms)}
    for arm in ROWS["dino"].arms:
        blocks = dict.fromkeys(range(12), (1.0, 3.0))
        if arm == "skipless_soap":
            blocks[layer] = interval
        above = [{"layer": n, "difference": sum(ci) / 2, "ci95": ci} for n, ci in blocks.items()]
        runs[probes_of(seed_run("dino", arm, 0))] |= {"above_random": above}
    assert verdict(OF["V6"], runs).word == word


@pytest.mark.parametrize(
    ("losses", "merged", "arm", "word"),
    [
        ({"graying": 6.9}, {"graying": (10.0, 30.0)}, "graying", "supported"),
        # Apart, but it learned less than the published start.
        ({"graying": 7.1}, {"graying": (10.0, 30.0)}, "published", "refuted"),
    ],
)
def test_the_start_that_is_trained_whole_is_chosen_by_rule(losses, merged, arm, word):
    losses = {"published": 7.0, **losses}
    runs = {}
    for start in ROWS["apart"].arms:
        blocks = merged.get(start, (90.0, 90.0))
        patches = {"merged": blocks, "cosine": [one / 100 for one in blocks]}
        loss = run_of(losses.get(start, 8.0), metric="loss")
        runs[rate_run("apart", start, 1e-3)] = loss | patches
    assert next(iter(able_starts("apart", "published", runs))) == arm
    assert verdict(OF["V13"], runs).word == word


def test_the_interval_over_two_seeds_is_students_by_hand():
    # Deviation of the mean 1, and the .975 quantile of one degree of freedom.
    assert over_seeds([1.0, 3.0]) == pytest.approx((2 - 12.706, 2 + 12.706), abs=1e-3)
    assert over_seeds([1.0]) is None


def test_images_are_paired_in_the_interval_over_images():
    generator = np.random.default_rng(0)
    hard = generator.random(2000) < 0.5
    # Right where the other is, and in 100 images more.
    better = hard | (np.cumsum(~hard) <= 100)
    runs = whole("skipless_deep", {})
    for arm, hits in {
        "skip_soap": better,
        "skipless_soap": better,
        "skipless_default_soap": hard,
    }.items():
        runs[seed_run("skipless_deep", arm, 0)] = run_of(100 * hits.mean(), hits)
    found = verdict(OF["V4c"], runs)
    low, high = found.found[0].over_images or (0, 0)
    # Unpaired, the deviation of a difference of such shares is 1.6 points.
    assert found.found[0].value == pytest.approx(5.0)
    assert 3.9 < low < 5 < high < 6.1
    assert found.word == "supported"
