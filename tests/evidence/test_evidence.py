"""Test the rules that decide whether training results support a claim."""

import base64
from itertools import cycle

import numpy as np
import pytest

from tests.benchmarks.evidence.claims import CLAIMS
from tests.benchmarks.evidence.rows import EXPERIMENTS, names_of, probes_of, rate_run, seed_run
from tests.benchmarks.evidence.verdicts import compute_seed_interval, find_trainable_runs, verdict

CLAIM = {claim.name: claim for claim in CLAIMS}


def make_run(score, hits=None, metric="top1"):
    run = {metric: [score], "hours": 0.5}
    if hits is None:
        return run
    bits = base64.b64encode(np.packbits(hits).tobytes()).decode()
    return {**run, "hits": {"images": len(hits), "bits": bits}}


def make_runs(experiment, scores):
    """Return training runs with made-up scores."""
    runs = {name: make_run(0.0) for name in names_of(experiment, EXPERIMENTS[experiment].variants)}
    for variant, values in scores.items():
        for seed, value in zip(EXPERIMENTS[experiment].seeds, cycle(values)):
            runs[seed_run(experiment, variant, seed)] = make_run(value)
    return runs


POSITIONS = {"default": (50.0, 50.2), "sinusoidal": (49.0, 49.25)}
SKIPLESS = {
    f"{kind}_{optimizer}": values
    for optimizer in ("adamw", "soap")
    for kind, values in (
        ("skip", (60.0, 60.1)), ("skipless", (54.3, 55.8)), ("skipless_default", (10.0, 10.1))
    )
}  # fmt: skip


@pytest.mark.parametrize(
    ("claim", "scores", "outcome"),
    [
        # Differences of 1 and 9 have the interval 5 +- 51. It refutes V1 and leaves V2 undecided.
        ("V1", {**POSITIONS, "mimetic": (60.0, 60.3)}, "supported"),
        ("V1", {**POSITIONS, "mimetic": (51.0, 59.2)}, "refuted"),
        ("V2", {"uniform": (50.0, 50.2), "covariance": (60.0, 60.3)}, "supported"),
        ("V2", {"uniform": (50.0, 50.2), "covariance": (51.0, 59.2)}, "undecided"),
        ("V2", {"uniform": (50.0, 50.2), "covariance": (40.0, 40.3)}, "refuted"),
        # The interval of the proposed initialisation is 55.05 +- 9.5.
        ("V4a", SKIPLESS, "supported"),
        ("V4a", {**SKIPLESS, "skipless_default_soap": (50.0, 50.1)}, "refuted"),
        ("V4a", {**SKIPLESS, "skipless_default_soap": (70.0, 70.1)}, "refuted"),
    ],
)
def test_scores_over_seeds_decide_a_claim(claim, scores, outcome):
    assert verdict(CLAIM[claim], make_runs(CLAIM[claim].experiment, scores)).outcome == outcome


def test_weighted_contrasts_and_hours_equal_a_count_by_hand():
    scores = {"both": (80.0, 80.5), "no_attention_skip": (58.0, 58.4), "no_mlp_skip": (78.0, 78.6)}
    result = verdict(CLAIM["V5"], make_runs("one_skip", scores))
    # Without the skip of attention, 22 and 22.1 points are lost. Without the skip of the MLP, 2
    # and 1.9 points are lost.
    assert [one.value for one in result.measurements] == pytest.approx([20.1, 18.15])
    # Nine first runs and six runs with seeds took half an hour each.
    assert (result.outcome, result.seeds, result.hours) == ("supported", 2, 7.5)


@pytest.mark.parametrize(
    ("layer", "interval", "outcome"),
    [
        (5, (-1.0, 3.0), "undecided"),
        (5, (-3.0, -1.0), "refuted"),
        (2, (-3.0, -1.0), "supported"),
    ],
)
def test_blocks_from_three_on_must_be_above_random_weights(layer, interval, outcome):
    runs = {
        name: make_run(2.0, metric="loss")
        for name in names_of("dino", EXPERIMENTS["dino"].variants)
    }
    for variant in EXPERIMENTS["dino"].variants:
        blocks = dict.fromkeys(range(12), (1.0, 3.0))
        if variant == "skipless_soap":
            blocks[layer] = interval
        above = [{"layer": n, "difference": sum(ci) / 2, "ci95": ci} for n, ci in blocks.items()]
        runs[probes_of(seed_run("dino", variant, 0))] |= {"above_random": above}
    assert verdict(CLAIM["V6"], runs).outcome == outcome


@pytest.mark.parametrize(
    ("loss", "best", "outcome"), [(6.9, "graying", "supported"), (7.1, "published", "refuted")]
)
def test_variants_for_the_longer_run_must_reach_the_published_loss(loss, best, outcome):
    # `graying` keeps patches most different, so it is chosen unless its loss is too high.
    runs = {}
    for variant in EXPERIMENTS["apart"].variants:
        merged = (10.0, 30.0) if variant == "graying" else (90.0, 90.0)
        run = make_run({"published": 7.0, "graying": loss}.get(variant, 8.0), metric="loss")
        patches = {"merged": merged, "cosine": [one / 100 for one in merged]}
        runs[rate_run("apart", variant, 1e-3)] = run | patches
    assert next(iter(find_trainable_runs("apart", "published", runs))) == best
    assert verdict(CLAIM["V13"], runs).outcome == outcome


def test_the_interval_over_two_seeds_equals_students_interval():
    # The standard error is 1, and the 0.975 quantile of one degree of freedom is 12.706.
    assert compute_seed_interval([1.0, 3.0]) == pytest.approx((2 - 12.706, 2 + 12.706), abs=1e-3)
    assert compute_seed_interval([1.0]) is None


def test_the_interval_over_images_is_paired():
    worse = np.random.default_rng(0).random(2000) < 0.5
    # 100 more images are correct.
    better = worse | (np.cumsum(~worse) <= 100)
    hits = {"skip_soap": better, "skipless_soap": better, "skipless_default_soap": worse}
    runs = make_runs("skipless_deep", {})
    for variant, values in hits.items():
        runs[seed_run("skipless_deep", variant, 0)] = make_run(100 * values.mean(), values)
    result = verdict(CLAIM["V4c"], runs)
    low, high = result.measurements[0].over_images or (0, 0)
    # Without pairing, the standard error of the difference would be 1.6 points.
    assert result.measurements[0].value == pytest.approx(5.0)
    assert 3.9 < low < 5 < high < 6.1
    assert result.outcome == "supported"
