"""The queue of evidence: what its rows ask, what may be said of finished runs, and the page."""

import json
import tarfile
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch

from ssl_bench.composition.compose import build, compose_config
from ssl_bench.errors import DataError, SslBenchError
from tests.benchmarks.evidence import running
from tests.benchmarks.evidence.claims import CLAIMS
from tests.benchmarks.evidence.data import unpack
from tests.benchmarks.evidence.page import LEDGER, page
from tests.benchmarks.evidence.rows import (
    ROWS,
    demo_of,
    known_names,
    names_of,
    patches_of,
    probes_of,
    rate_run,
    seed_run,
)
from tests.benchmarks.evidence.running import Place, best_rate, diverged, finished, run_row
from tests.benchmarks.evidence.runs_page import runs_page
from tests.benchmarks.evidence.verdicts import most_apart, over_seeds, seeds_done, verdict
from tests.benchmarks.ledger import Ledger, packed, unpacked
from tests.benchmarks.patches import closeness_of
from tests.benchmarks.processes import said_in
from tests.support.faults import unchecked_types

OF = {claim.name: claim for claim in CLAIMS}
ARMS = [(row, arm) for row in ROWS for arm in ROWS[row].arms]


def run_of(score, hits=None, metric="top1"):
    found = {metric: [score], "hours": 0.5, "provenance": "a machine, a commit"}
    return found | ({} if hits is None else {"hits": packed(np.array(hits, bool))})


def whole(row, scores, metric="top1"):
    """A ledger with every run of a row; seeds of an arm have the scores of its list, in turns."""
    runs = {name: run_of(0.0) for name in names_of(row)}
    for arm, values in scores.items():
        for seed, value in zip(ROWS[row].seeds, cycle(values)):
            runs[seed_run(row, arm, seed)] = run_of(value, metric=metric)
    return runs


def said_of(name, runs):
    return verdict(OF[name], runs).word


# Of every row the last arm; the others take half of the time of this file.
@pytest.mark.parametrize(
    ("row", "arm"),
    [
        pytest.param(row, arm, marks=[] if arm == [*ROWS[row].arms][-1] else pytest.mark.slow)
        for row, arm in ARMS
    ],
)
def test_every_arm_composes(row, arm):
    asked = ROWS[row]
    options = [*asked.arms[arm], *asked.kind.options, *asked.options, *asked.kind.choosing]
    plan = build(compose_config("pretraining", options))
    assert plan.train.batch_size == asked.kind.batch


def test_what_was_finished_before_still_counts():
    assert len(Ledger(LEDGER).runs) >= 4
    assert known_names() >= Ledger(LEDGER).runs.keys()


@pytest.mark.parametrize(
    ("mimetic", "word"),
    [
        ((60.0, 60.3), "supported"),
        # The differences are 1 and 9, so that the interval is 5 +- 51.
        ((51.0, 59.2), "refuted"),
        ((40.0, 40.2), "refuted"),
    ],
)
def test_an_interval_that_holds_zero_refutes_the_mimetic_claim(mimetic, word):
    scores = {"default": (50.0, 50.2), "sinusoidal": (49.0, 49.25), "mimetic": mimetic}
    assert said_of("V1", whole("mimetic", scores)) == word


def test_zero_leaves_other_claims_undecided_and_below_refutes():
    base = {"uniform": (50.0, 50.2)}
    words = [
        said_of("V2", whole("covariance", {**base, "covariance": values}))
        for values in [(60.0, 60.3), (51.0, 59.2), (40.0, 40.3)]
    ]
    assert words == ["supported", "undecided", "refuted"]


def test_a_row_is_undecided_until_its_last_run_and_not_run_before_its_first():
    runs = whole("covariance", {"uniform": (50.0, 50.2), "covariance": (60.0, 60.3)})
    last = seed_run("covariance", "covariance", 1)
    assert said_of("V2", {name: run for name, run in runs.items() if name != last}) == "undecided"
    rates = {name: run for name, run in runs.items() if "rate" in name}
    found = verdict(OF["V2"], rates)
    assert (found.word, found.done, found.asked) == ("not run", len(rates), len(runs))
    assert found.hours == pytest.approx(0.5 * len(rates))


@pytest.mark.parametrize(
    ("default", "word"),
    [
        ((40.0, 40.1), "supported"),
        # 55.05 +- 9.5 is the interval of the proposed arm.
        ((50.0, 50.1), "refuted"),
        ((70.0, 70.1), "refuted"),
    ],
)
def test_a_default_within_the_interval_of_the_proposed_refutes(default, word):
    scores = {}
    for optimizer, last in (("adamw", (10.0, 10.1)), ("soap", default)):
        scores |= {
            f"skip_{optimizer}": (60.0, 60.1),
            f"skipless_{optimizer}": (54.3, 55.8),
            f"skipless_default_{optimizer}": last,
        }
    assert said_of("V4a", whole("skipless", scores)) == word


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
    scores["no_mlp_skip"] = (60.0, 60.6)
    assert said_of("V5", whole("one_skip", scores)) == "refuted"


def test_a_claim_of_two_lengths_needs_both():
    runs = {}
    for arm, letters in {"mimetic": (90.0, 40.0), "default": (50.0, 40.0)}.items():
        for seed in ROWS["copying"].seeds:
            spread = (0.1 * seed - 0.2) * (arm == "mimetic")
            one = run_of(letters[0] + spread, metric="letters_16")
            runs[seed_run("copying", arm, seed)] = one | {"letters_32": [letters[1] + spread]}
    assert said_of("V10", runs) == "undecided"
    for seed in ROWS["copying"].seeds:
        runs[seed_run("copying", "default", seed)]["letters_32"] = [30.0]
    assert said_of("V10", runs) == "supported"


def test_one_reading_has_to_be_the_best_under_both_optimizers():
    runs = {name: run_of(20.0) for name in names_of("readings")}
    for optimizer in ("adamw", "soap"):
        runs[rate_run("readings", f"uniform_{optimizer}", 1e-3)] = run_of(30.0)
    assert said_of("V11", runs) == "supported"
    runs[rate_run("readings", "no_gain_soap", 4e-3)] = run_of(31.0)
    assert said_of("V11", runs) == "undecided"


@pytest.mark.parametrize(
    ("layer", "interval", "word"),
    [
        (5, (1.0, 3.0), "supported"),
        (5, (-1.0, 3.0), "undecided"),
        (5, (-3.0, -1.0), "refuted"),
        (2, (-3.0, -1.0), "supported"),
    ],
)
def test_blocks_from_three_on_have_to_be_above_random_weights(layer, interval, word):
    runs = {name: run_of(2.0, metric="loss") for name in names_of("dino")}
    for arm in ROWS["dino"].arms:
        blocks = dict.fromkeys(range(12), (1.0, 3.0))
        if arm == "skipless_soap":
            blocks[layer] = interval
        above = [{"layer": n, "difference": sum(ci) / 2, "ci95": ci} for n, ci in blocks.items()]
        runs[probes_of(seed_run("dino", arm, 0))] |= {"above_random": above}
    assert said_of("V6", runs) == word


def starts(losses, merged):
    """First runs of the row `apart`; a start's cosine is a hundredth of its merged patches."""
    return {
        rate_run("apart", arm, 1e-3): {
            **run_of(losses.get(arm, 8.0), metric="loss"),
            "knn": [3.0],
            "merged": merged.get(arm, (90.0, 90.0)),
            "cosine": [one / 100 for one in merged.get(arm, (90.0, 90.0))],
        }
        for arm in ROWS["apart"].arms
    }


@pytest.mark.parametrize(
    ("losses", "merged", "arm", "word"),
    [
        ({"graying": 6.9}, {"graying": (10.0, 30.0)}, "graying", "supported"),
        # Apart, but it learned less than the published start.
        ({"graying": 7.1}, {"graying": (10.0, 30.0)}, "published", "refuted"),
        # One block in which half are one token.
        ({"graying": 6.9}, {"graying": (10.0, 50.0)}, "graying", "refuted"),
        # The one of the lowest mean cosine is trained whole; another keeps them apart everywhere.
        (
            {"graying": 6.9, "neither": 6.0},
            {"graying": (0.0, 60.0), "neither": (40.0, 40.0)},
            "graying",
            "supported",
        ),
    ],
)
def test_the_start_that_is_trained_whole_is_chosen_by_rule(losses, merged, arm, word):
    runs = starts({"published": 7.0, **losses}, merged)
    assert most_apart("apart", "published", runs) == arm
    found = verdict(OF["V13"], runs)
    assert (found.word, found.done, found.asked) == (word, 7, 7)
    assert seeds_done(OF["V13"], runs) == (1, 1)


def test_the_start_that_is_trained_whole_is_the_one_of_the_ledger():
    best = most_apart("apart", "published", Ledger(LEDGER).runs)
    assert ROWS["apart"].whole == (best,)


def test_starts_are_compared_when_all_are_there_and_stand_in_a_table():
    runs = starts({"published": 7.0, "no_gain": 6.5}, {"no_gain": (12.0, 34.0)})
    part = {name: run for name, run in runs.items() if "neither" not in name}
    assert most_apart("apart", "published", part) is None
    assert said_of("V13", part) == "undecided"
    assert said_of("V13", {}) == "not run"
    assert seeds_done(OF["V13"], part) == (0, 1)
    lines = runs_page(runs).splitlines()
    options = "model.init_options.noise=uniform model.init_options.suo_gain=false"
    assert f"| no_gain | {options} | 6.50 | 3.0 | 0.23 | 12 | 34 |" in lines
    assert "Starts that were tried" not in runs_page({})


def test_patches_are_one_token_where_they_point_where_the_mean_does():
    two = closeness_of(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    assert (two.cosine, two.merged) == (pytest.approx(0.5**0.5), 0.0)
    # Three of four are 4 degrees from the mean (13, 1) / 4, the last is 41.
    some = closeness_of(torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [1.0, 1.0]]))
    mean = 170**0.5
    assert some.cosine == pytest.approx((3 * 13 + 14 / 2**0.5) / 4 / mean)
    assert some.merged == 75.0


@pytest.mark.parametrize(
    ("sizes", "word"),
    [
        ({}, "not run"),
        ({"skip": 4.9}, "undecided"),
        ({"skip": 4.9, "skipless": 5.0}, "supported"),
        ({"skip": 4.9, "skipless": 6.0}, "refuted"),
        ({"skip": 6.1}, "refuted"),
    ],
)
def test_demonstration_encoders_are_there_when_both_are_below_six_megabytes(sizes, word):
    files = {"hours": 0.0, "provenance": "a machine, a commit"}
    runs = {demo_of(name): {**files, "bytes": int(size * 1e6)} for name, size in sizes.items()}
    found = verdict(OF["V12"], runs)
    assert found.word == word
    assert found.ours == {f"demo:{name}": size for name, size in sizes.items()}
    assert found.hours == 0


def test_a_claim_waits_for_its_own_arms_alone_and_shows_no_others():
    scores = {"vit": (96.0, 96.1), "vit_cosine": (97.0, 97.1)}
    scores |= {"qr": (94.0, 94.1), "qr_cosine": (96.0, 96.1)}
    runs = {
        seed_run("osa", arm, seed): run_of(values[seed])
        for arm, values in scores.items()
        for seed in (0, 1)
    }
    # Differences that are equal in both seeds have no interval.
    runs[seed_run("osa", "qr", 1)] = run_of(94.15)
    runs[seed_run("osa", "vit", 1)] = run_of(96.15)
    found = verdict(OF["V9b"], runs)
    assert (found.word, found.done, found.asked, found.hours) == ("supported", 8, 8, 4.0)
    assert verdict(OF["V9"], runs).word == "undecided"
    shown = {name: set(verdict(OF[name], runs).ours) for name in ("V9", "V9b")}
    assert shown == {"V9": {"qr", "vit"}, "V9b": set(scores)}
    assert seeds_done(OF["V9b"], runs) == (2, 2)
    assert seeds_done(OF["V9"], runs) == (0, 2)


def test_the_interval_over_two_seeds_is_students_by_hand():
    # Deviation of the mean 1, and the .975 quantile of one degree of freedom.
    assert over_seeds([1.0, 3.0]) == pytest.approx((2 - 12.706, 2 + 12.706), abs=1e-3)
    assert over_seeds([1.0]) is None


def test_images_are_paired_in_the_interval_over_images():
    generator = np.random.default_rng(0)
    hard = generator.random(2000) < 0.5
    # Right where the other is, and in 100 images more.
    better = hard | (np.cumsum(~hard) <= 100)
    runs = whole("skipless_deep", {"skip_soap": (60.0,)})
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


def test_hits_come_back_from_their_bits():
    hits = np.random.default_rng(0).random(1003) < 0.3
    assert (unpacked(json.loads(json.dumps(packed(hits)))) == hits).all()


def test_every_claim_has_a_line_and_refuted_ones_stand_like_others():
    scores = {"uniform": (50.0, 50.2), "covariance": (40.0, 40.3)}
    lines = page(whole("covariance", scores)).splitlines()
    by_claim = {c.name: next(x for x in lines if x.startswith(f"| {c.name} |")) for c in CLAIMS}
    assert "| no |" in by_claim["V2"]
    assert "covariance - uniform: -9.96 [-10.03, -9.89] seeds" in by_claim["V2"]
    assert by_claim["V2"].endswith("| 8.0 | 5 of 5 |")
    assert all("| not run |" in line for name, line in by_claim.items() if name != "V2")
    assert "72.96 / 81.13" in by_claim["V2"]
    # A line a claim, and nothing behind them.
    assert list(by_claim.values()) == lines[-len(CLAIMS) :]


def test_the_page_of_runs_says_where_the_best_rate_lies_at_an_edge_of_the_grid():
    runs = whole("covariance", {"uniform": (50.0, 50.2), "covariance": (60.0, 60.3)})
    for rate, score in ((2.5e-4, 11.0), (1e-3, 13.0), (4e-3, 12.0)):
        runs[rate_run("covariance", "uniform", rate)] = run_of(score)
        runs[rate_run("covariance", "covariance", rate)] = run_of(-score * rate)
    lines = runs_page(runs).splitlines()
    assert "| covariance | uniform | 0.00025: 11.00 / **0.001: 13.00** / 0.004: 12.00 |  |" in lines
    (line,) = (one for one in lines if one.startswith("| covariance | covariance |"))
    assert line.endswith("| lowest |")
    del runs[rate_run("covariance", "uniform", 1e-3)]
    assert "| covariance | uniform |" not in runs_page(runs)
    assert "## Rates" not in runs_page({})


def test_no_page_takes_a_run_that_was_cut_short():
    cut = whole("covariance", {"uniform": (50.0, 50.2), "covariance": (60.0, 60.3)})
    place = Place(Path(), Path(), steps=3)
    named = {place.named(name): run for name, run in cut.items()}
    for made in (page, runs_page):
        assert made(named) == made({})
        assert made(cut) != made({})


def written_log(folder, epochs):
    rows = [
        {"epoch": n // 2, "loss": 4.0 - n, "images_per_second": 64.0} for n in range(2 * epochs)
    ]
    for row in rows[1::2]:
        row["val_top1"] = 10.0 * (row["epoch"] + 1)
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_finished_run_is_its_scores_after_every_epoch_and_its_hours(tmp_path):
    found = finished(written_log(tmp_path / "run", 3), ROWS["osa"], 3)
    assert found["top1"] == [10.0, 20.0, 30.0]
    assert found["loss"] == [3.5, 1.5, -0.5]
    # Six steps of 128 images at 64 a second.
    assert found["hours"] == round(12 / 3600, 3)


def test_a_run_that_was_stopped_or_tested_less_often_is_not_finished(tmp_path):
    log = written_log(tmp_path / "run", 2) / "log.jsonl"
    with pytest.raises(SslBenchError, match="2 of 3 epochs"):
        finished(log.parent, ROWS["osa"], 3)
    log.write_text("\n".join(log.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(SslBenchError, match="1 of 2 epochs"):
        finished(log.parent, ROWS["osa"], 2)


def test_a_run_that_diverges_is_a_result_and_another_end_is_not(tmp_path):
    folder = written_log(tmp_path / "run", 2)
    reason = "ssl-bench: loss or gradient was not finite for 20 steps up to step 3"
    found = diverged(folder, ROWS["osa"], reason)
    assert found["top1"] == [10.0, 20.0, 0.0]
    assert diverged(tmp_path / "nothing", ROWS["osa"], reason)["top1"] == [0.0]
    with pytest.raises(SslBenchError, match="disk is full"):
        diverged(folder, ROWS["osa"], "ssl-bench: the disk is full")
    runs = {seed_run("osa", "qr", 0): found}
    assert "osa-qr-seed0 diverged" in page(runs)


def test_a_score_that_is_not_finite_is_none_right(tmp_path):
    folder = written_log(tmp_path / "run", 1)
    log = folder / "log.jsonl"
    log.write_text(log.read_text().replace('"val_top1": 10.0', '"val_top1": null'))
    assert finished(folder, ROWS["osa"], 1)["top1"] == [0.0]


def test_the_rate_is_the_best_on_held_out_images_and_nothing_is_run_again(tmp_path, monkeypatch):
    asked = []

    def trained(place, row, arm, run, options, epochs):
        asked.append((run, [one for one in options if "root=" in one]))
        return run_of({"0.00025": 1.0, "0.001": 3.0, "0.004": 2.0}[run.partition("rate")[2]])

    monkeypatch.setattr(running, "_trained", trained)
    place = Place(Path("/data"), tmp_path)
    ledger = Ledger(tmp_path / "ledger.json")
    assert best_rate(ledger, place, "covariance", "uniform") == 1e-3
    assert [roots for _, roots in asked] == [["data.root=/data/cifar10_choosing"]] * 3
    assert best_rate(ledger, place, "covariance", "uniform") == 1e-3
    assert len(asked) == 3
    assert best_rate(ledger, place, "osa", "qr") is None


def test_arms_that_are_not_trained_whole_have_their_first_run_alone(tmp_path, monkeypatch):
    asked = []

    def trained(place, row, arm, run, options, epochs):
        asked.append(run)
        return {**run_of(2.0, metric="loss"), "knn": [3.0]}

    monkeypatch.setattr(running, "_trained", trained)
    monkeypatch.setattr(running, "_compared", lambda *_: {"cosine": [0.5], "merged": [1.0]})
    monkeypatch.setattr(running, "probed", lambda *_, **__: {"cells": []})
    row = replace(ROWS["apart"], whole=("graying",))
    monkeypatch.setitem(ROWS, "apart", row)
    ledger = Ledger(tmp_path / "ledger.json")
    run_row(ledger, Place(Path("/data"), tmp_path), "apart", row.arms)
    first = [rate_run("apart", arm, 1e-3) for arm in row.arms]
    assert asked == [*first, "apart-graying-seed0"]
    assert sorted(ledger.runs) == sorted(names_of("apart"))
    compared = [*first, patches_of("apart-graying-seed0")]
    assert all(ledger.runs[name]["cosine"] == [0.5] for name in compared)


def test_two_processes_add_to_one_ledger(tmp_path):
    one, two = Ledger(tmp_path / "ledger.json"), Ledger(tmp_path / "ledger.json")
    assert one.runs == {}
    two.of("second", lambda: run_of(2.0))
    one.of("first", lambda: run_of(1.0))
    assert one.of("second", lambda: run_of(9.0)) == run_of(2.0)
    assert sorted(two.runs) == ["first", "second"]


def test_a_command_that_fails_is_told_in_one_line(tmp_path):
    with pytest.raises(SslBenchError, match=r"ended with 3.*out\.txt: the reason"):
        said_in(["sh", "-c", "echo first; echo the reason; exit 3"], tmp_path / "out.txt")


def packed_pictures(archive, names):
    archive.parent.mkdir(parents=True, exist_ok=True)
    (source := archive.parent / "picture").write_bytes(b"pixels")
    with tarfile.open(archive, "w:gz") as file:
        for name in names:
            file.add(source, name)
    source.unlink()


def test_archives_become_class_folders_and_the_last_images_are_held_out(tmp_path, monkeypatch):
    archives, data = tmp_path / "archives", tmp_path / "data"
    names = [f"c/{s}/{k}/{n:04}.jpg" for s in ("train", "test") for k in "ab" for n in range(5)]
    packed_pictures(archives / "cifar10/cifar10_images.tar.gz", ["c/README.md", *names])
    for part, label in enumerate("xy"):
        names = [f"t/train/{label}/images/{label}_{n}.JPEG" for n in range(4)]
        name = f"tiny_imagenet_train_0{part}.tar.gz"
        packed_pictures(archives / "tiny_imagenet" / name, names)
    (archives / "photos").mkdir()
    (data / "mnist").mkdir(parents=True)
    held_out = {"cifar10": 2, "tiny_imagenet": 1}
    monkeypatch.setattr("tests.benchmarks.evidence.data.HELD_OUT", held_out)
    unpack(archives, data)
    files = {str(p.relative_to(data)) for p in data.rglob("*") if p.is_file()}
    assert len([f for f in files if f.startswith("cifar10/")]) == 20
    assert "tiny_imagenet/train/y/y_3.JPEG" in files
    assert {f for f in files if f.startswith("cifar10_choosing/val/b")} == {
        f"cifar10_choosing/val/b/000{n}.jpg" for n in (3, 4)
    }
    assert "cifar10_choosing/train/b/0003.jpg" not in files
    assert "tiny_imagenet_choosing/val/x/x_3.JPEG" in files
    assert (data / "photos").is_dir()


def test_missing_archives_are_named(tmp_path):
    with pytest.raises(DataError, match=r"cifar10_images.tar.gz in .*, found none"):
        unpack(tmp_path, tmp_path / "data")


@pytest.mark.slow
def test_a_row_that_is_cut_short_runs_from_end_to_end(tmp_path):
    ledger = Ledger(tmp_path / "smoke.json")
    with unchecked_types():
        run_row(ledger, Place(tmp_path, tmp_path, steps=2), "copying", ["mimetic"])
    assert ledger.runs.keys() == {f"smoke-{seed_run('copying', 'mimetic', 0)}"}
    assert all(len(run["letters_32"]) == 1 for run in ledger.runs.values())
