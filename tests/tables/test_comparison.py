"""Paired differences, compared with hand counts or an independent loop."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from ssl_bench.intervals import holm
from ssl_bench.results.per_image import ImageCurve
from ssl_bench.scores import iou_per_class
from ssl_bench.tables.comparison import (
    Comparison,
    Difference,
    PairedScore,
    compare_checkpoints,
    compare_encoders,
    subtract,
)
from ssl_bench.tables.sheets import NO_VALUE
from tests.core.test_results import RECORD
from tests.support.report_cells import around, cell, known_as
from tests.tables.test_pivot import hits

GENERATOR = np.random.default_rng(0)
IMAGES = hits(1, 0)
PAIR = ("compare", "skip", "skipless")
ALONE = ("compare", "skip")


def save(store, sha, layers, **changes):
    """Save a record for each block, with per-image hits if the record has them."""
    for layer, values in layers.items():
        name = {"a": "skip", "d": "skipless"}[sha]
        record = replace(RECORD, checkpoint_sha256=sha * 64, model=name, layer=layer, **changes)
        if values is not None:
            found = {"num_images": len(values), "value": 100 * float(values.mean())}
            record = replace(record, **around(found))
        store.save(record, values)


def compared(store, shas="ad"):
    tables, _ = compare_encoders(store, store.records(), {known_as(one): one for one in shas})
    return tables


def between(first, second, metric="corloc"):
    """Return the row for the first minus the second per-image values."""
    curve = ImageCurve(metric, {})
    scores = [PairedScore(curve.estimate(values), (0,)) for values in (first, second)]
    return subtract("0", *scores)


@pytest.mark.filterwarnings("error")
def test_an_undefined_difference_is_a_dash_and_zero_has_no_minus():
    nothing = np.zeros((4, 3, 2), np.int64)

    row = between(nothing, nothing, "miou_oracle")

    assert (row.first_text, row.second_text, row.text) == (NO_VALUE,) * 3
    assert not row.is_significant
    sheet = Comparison(replace(RECORD, metric="miou_oracle"), (row,), ("a", "b"), (RECORD,)).sheet()
    assert [word.text for word in sheet.rows[0]] == ["0", *[NO_VALUE] * 3]
    small = Difference("0", 50.0, 50.01, -0.04, 0.04, ((0,), (0,)))
    assert small.text == "+0.0 [+0.0, +0.0]"
    assert replace(small, low=math.nan).text == "+0.0"


def test_four_images_that_all_change_do_not_prove_that_every_image_does():
    same = between(hits(1, 0, 1, 0), hits(1, 0, 1, 0))
    every = between(hits(1, 1, 1, 1), hits(0, 0, 0, 0))

    assert (same.value, same.low, same.is_significant) == (0, -same.high, False)
    assert 40 < same.high < 50
    # Adds one gain and one loss, which makes 5 of 6 images: 66.7 minus 1.96 times 30.4.
    assert (every.value, every.low, every.high) == pytest.approx((100, 7.02, 100), abs=0.01)
    assert every.is_significant


def test_mean_iou_is_compared_over_the_whole_set():
    counts = GENERATOR.integers(1, 9, size=(2, 30, 3, 4))
    counts[:, :, 1:] += counts[:, :, :1]

    found = between(counts[0], counts[1], "miou_holdout")

    def miou(of):
        right, predicted, true = of.sum(0).astype(float)
        return 100 * np.mean(right / (predicted + true - right))

    gap = miou(counts[0]) - miou(counts[1])
    without = [np.delete(counts, i, axis=1) for i in range(30)]
    pseudo = [30 * gap - 29 * (miou(one) - miou(two)) for one, two in without]
    assert found.value == pytest.approx(gap)
    ends = scipy.stats.t.interval(0.95, 29, gap, np.std(pseudo, ddof=1) / 30**0.5)
    assert (found.low, found.high) == pytest.approx(ends)
    assert iou_per_class(counts[0].sum(0)).mean() == pytest.approx(found.first)


def test_different_image_sizes_are_stated(store, printed):
    for sha, size in (("a", 64), ("d", 518)):
        architecture = {**RECORD.architecture, "image_size": size}
        save(store, sha, {0: IMAGES}, architecture=architecture, settings={"image_size": None})

    sizes = "image_size=64 (tokencut of skip), image_size=518 (tokencut of skipless)"
    assert f"paired over 2 images, {sizes}\n" in printed(*PAIR).out
    printed("report")
    (page,) = (store.root / "report").glob("compare-*.html")
    assert sizes in page.read_text()


def test_encoders_are_compared_block_by_block_and_at_their_best():
    first = {0: hits(1, 0, 0, 0), 1: hits(1, 1, 0, 0), 2: hits(1, 1, 1, 1)}
    second = {0: hits(1, 1, 1, 0), 1: hits(0, 0, 0, 0)}

    rows = compare_checkpoints(ImageCurve("corloc", first), ImageCurve("corloc", second))

    assert [row.name for row in rows][:4] == ["0", "1", "last (2, 1)", "best (2, 0)"]
    values = [(25, 75), (50, 0), (100, 0), (100, 75)]
    assert [(row.first, row.second) for row in rows[:4]] == values
    assert rows[4].name.startswith("held-out choice (2; 0")


@pytest.mark.parametrize("shas", ["a", "ad"])
def test_no_block_is_best_when_higher_is_not_better(store, shas):
    save(store, "a", {0: hits(1, 1), 1: hits(0, 0), 2: hits(0, 1)}, metric="degenerate")
    save(store, "d", {0: hits(0, 0), 1: hits(1, 0), 2: hits(1, 1)}, metric="degenerate")

    (table,) = compared(store, shas)

    beside = {"a": ("last block", 50, 50, 50), "ad": ("skipless", 0, 50, 100)}
    assert [(row.name, row.first) for row in table.rows] == [("0", 100), ("1", 0), ("2", 50)]
    assert (table.names[1], *(row.second for row in table.rows)) == beside[shas]
    assert any(note.startswith("no block is best") for note in table.sheet().notes)


def test_each_side_is_compared_at_its_own_best_blocks(store):
    save(store, "a", {0: hits(1, 1, 1, 1, 1, 1), 1: hits(0, 0, 0, 0, 0, 0)})
    save(store, "d", {0: hits(0, 0, 0, 0, 0, 0), 1: hits(1, 1, 1, 1, 1, 0)})

    (table,) = compared(store)

    best, held_out = (row for row in table.rows if not row.name.isdigit())
    assert (best.name, best.layers) == ("best (0, 1)", ((0,), (1,)))
    assert held_out.name == "held-out choice (0; 1)"
    for row in (best, held_out):
        assert (row.first, row.second) == (100, pytest.approx(500 / 6))


def test_comparisons_of_older_data_say_so_in_their_titles(store, printed):
    for sha in "ad":
        save(store, sha, {0: hits(1, 0)})
        older = {"dataset_fingerprint": "0" * 64, "created": "2020-01-01T00:00:00+00:00"}
        save(store, sha, {0: hits(1, 1)}, **older)

    for words in (PAIR, ALONE, ("table",)):
        out = printed(*words).out
        assert out.count("[older data 000000") == 1
        assert out.count("[data ") == 1


def test_blocks_with_missing_or_damaged_image_values_are_left_out(store):
    save(store, "a", {0: hits(1, 0), 1: hits(1, 1), 2: None})
    half = store.path(replace(RECORD, layer=1).key()).with_suffix(".npz")
    half.write_bytes(half.read_bytes()[:40])

    (table,) = compared(store, "a")

    assert [row.name for row in table.rows][:-1] == ["0"]


def test_encoders_are_found_by_name_and_digest(store, printed, as_json):
    save(store, "a", {0: hits(1, 0, 0)})
    save(store, "d", {0: hits(1, 1, 1)})

    out = printed("compare", "skip", "dddd", "--format", "markdown").out
    (table,) = as_json("compare", "skip", "dddd")

    assert "| block | skip | skipless | first - second [95 %] |" in out
    assert "| 0 | 33.3 | 100.0 | -66.7 [" in out
    assert table["checkpoint_sha256"] == ["a" * 64, "d" * 64]
    assert (table["names"], table["num_images"]) == (["skip", "skipless"], 3)
    first = table["rows"][0]
    assert (first["block"], first["second"]) == ("0", 100.0)
    assert first["difference"] == pytest.approx(-200 / 3)
    assert f"skip {known_as('a')[:8]}" in printed("compare", "skipp", "skip", code=3).err


def test_one_metric_of_a_task_is_compared_by_default(store, printed, as_json):
    counts = np.ones((3, 3, 2), np.int64)
    every = {"miou_holdout", "miou_oracle", "pixel_accuracy"}
    for metric in every:
        for sha in "ad":
            save(store, sha, {0: counts}, task="segmentation", metric=metric, facet="token")

    for words, shown in (
        ((), {"miou_holdout"}),
        (("--metric", "pixel_accuracy"), {"pixel_accuracy"}),
        (("--all-metrics",), every),
    ):
        assert {table["metric"] for table in as_json(*PAIR, *words)} == shown
        assert ("--all-metrics" in printed(*PAIR, *words).err) == (not words)


@pytest.mark.parametrize(("dataset", "code"), [("other", 3), ("nowhere", 2)])
def test_a_dataset_of_other_encoders_is_no_typing_mistake(store, printed, dataset, code):
    for sha, own in (("a", "one"), ("d", "one"), ("e", "other")):
        store.save(cell(model=f"model {sha}", checkpoint_sha256=sha * 64, dataset=own))

    said = printed("compare", "model a", "model d", "--dataset", dataset, code=code).err

    assert ("ssl-bench probe" in said) == (code == 3)


def test_blocks_of_one_encoder_are_compared_with_its_best(store, printed, as_json):
    save(store, "a", {0: hits(*[0] * 10), 3: hits(*[1] * 8, 0, 0)})

    out = printed(*ALONE, "--format", "markdown").out

    assert "| block | skip | best block | first - second [95 %] |" in out
    assert "| 0 | 0.0 | 80.0 | **-80.0 [" in out
    assert "| 3 | 80.0 | 80.0 | +0.0 |" in out
    rows = {row["block"]: row for row in as_json(*ALONE)[0]["rows"]}
    assert rows["0"]["low"] is not None
    for name in ("3", "held-out choice (3)"):
        assert (rows[name]["difference"], rows[name]["low"], rows[name]["high"]) == (0, None, None)


def test_a_choice_among_different_blocks_is_noted(store, printed):
    best = hits(1, 1, 0, 0)
    save(store, "a", dict.fromkeys(range(6), best))
    save(store, "d", {0: best, 5: best})

    said = "among 6 blocks (0, 1, 2, 3, 4, 5) of skip and 2 blocks (0, 5) of skipless"
    assert said in printed(*PAIR).out
    assert "are among" not in printed(*ALONE).out


@pytest.mark.parametrize(("metric", "value"), [("miou", 25.0), ("pixel_accuracy", 50.0)])
def test_a_choice_of_blocks_that_predict_different_classes_is_noted(store, printed, metric, value):
    # Both images show class 0. Each block confuses a different image with its own class.
    for layer in (0, 1):
        counts = np.zeros((2, 3, 3), np.int64)
        counts[:, 2, 0] = counts[layer, :2, 0] = counts[1 - layer, 1, 1 + layer] = 10
        found = {"num_images": 2, "value": value}
        record = replace(RECORD, task="segmentation", metric=metric, layer=layer, **around(found))
        store.save(record, counts)

    for words in (ALONE, ("table", "--pivot")):
        said = "a held-out choice of several blocks averages over the classes"
        assert printed(*words).out.count(said) == (metric == "miou")


FAILURES = {
    "other settings": (
        [("a", {0: IMAGES}, {"settings": {"size": 224}}), ("d", {0: IMAGES}, {"settings": {}})],
        "size 224 and None",
    ),
    # A run of the same settings would leave none either.
    "no images of other settings": (
        [("a", {0: None}, {"settings": {"size": 224}}), ("d", {0: None}, {})],
        "no per-image values",
    ),
    "images of one": (
        [("a", {0: IMAGES}, {}), ("d", {0: None}, {"num_images": 2})],
        "`ssl-bench probe --task tokencut --overwrite`",
    ),
    "other facets": (
        [("a", {0: IMAGES}, {}), ("d", {0: IMAGES}, {"facet": "token"})],
        "skip only has results for corloc toy key reference; skipless only has results for",
    ),
    "never probed": (
        [("a", {0: IMAGES}, {}), ("d", {0: None}, {"task": "pca"})],
        "`ssl-bench probe --task tokencut --dataset toy --checkpoint",
    ),
}


@pytest.mark.parametrize("which", FAILURES)
def test_the_reason_why_encoders_cannot_be_compared_is_printed(store, printed, which):
    made, reason = FAILURES[which]
    for sha, layers, changes in made:
        save(store, sha, layers, **changes)

    assert reason in printed(*PAIR, code=3).err

    # It is also printed if another task can be compared.
    for sha in "ad":
        save(store, sha, {0: IMAGES}, task="retrieval")
    said = printed(*PAIR).err
    assert "left out: tokencut: " in said
    assert reason in said


CODES = {
    "the same": ({}, {}, None),
    "changes": (
        {"git_commit": "a" * 40}, {"git_commit": f"{'a' * 40}-dirty"},
        "skip: 0.2.0 (aaaaaaaaaa); skipless: 0.2.0 (aaaaaaaaaa-dirty)",
    ),
    "versions": ({"version": "0.1.0"}, {}, "skip: 0.1.0 (unknown); skipless: 0.2.0 (unknown)"),
}  # fmt: skip


@pytest.mark.parametrize("which", CODES)
def test_sides_from_different_code_are_warned_of_once(store, printed, which):
    one, other, said = CODES[which]
    for sha, changes in (("a", one), ("d", other)):
        save(store, sha, {0: IMAGES, 1: IMAGES}, **{"version": "0.2.0", **changes})
        # Tables that each come from one version are no reason for a warning.
        save(store, sha, {0: IMAGES}, version="0.3.0", task="knn", metric="top1_k20")

    assert "different code" not in printed(*ALONE).err
    lines = printed(*PAIR).err.splitlines()
    warnings = [line for line in lines if "different code" in line]
    assert len(warnings) == (said is not None)
    assert all(said in line for line in warnings)


def test_blocks_of_one_encoder_from_different_code_are_warned_of(store, printed):
    for layer in (0, 1):
        save(store, "a", {layer: IMAGES}, git_commit=f"{layer}" * 40)

    assert "(0000000000), " in printed(*ALONE).err


def by_hand(ps: list[float]) -> set[int]:
    """Return the p-values that Holm's step-down procedure rejects at level 0.05, as indices."""
    rejected = set[int]()
    while left := [n for n in range(len(ps)) if n not in rejected]:
        least = min(left, key=lambda n: ps[n])
        if ps[least] >= 0.05 / len(left):
            return rejected
        rejected.add(least)
    return rejected


def test_holm_marks_the_blocks_that_his_procedure_rejects():
    for _ in range(300):
        ps = (GENERATOR.random(GENERATOR.integers(1, 12)) ** 4).round(4).tolist()
        found = {n for n, p in enumerate(holm(ps)) if p < 0.05}
        assert found == by_hand(ps)
    # The definition: (m - rank) p, never below the one before, at most 1; ties and NaN.
    assert holm([0.04, 0.01, 0.02, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, math.nan, 0.9])[::2] == pytest.approx([1.0, 1.0])
    assert holm([0.02, math.nan, 0.9])[::2] == pytest.approx([0.04, 0.9])
    assert math.isnan(holm([0.6, math.nan, 0.9])[1])


def test_rows_that_remain_significant_among_the_blocks_carry_a_sign(store, printed, as_json):
    order = np.arange(60)
    # Block by block fewer images of the first alone are right.
    gains = {0: 30, 1: 14, 2: 8, 3: 6, 4: 0}
    save(store, "a", {layer: order < 20 + gain for layer, gain in gains.items()})
    save(store, "d", dict.fromkeys(gains, order < 20))

    rows = {row["block"]: row for row in as_json(*PAIR)[0]["rows"]}

    ps = []
    for gain in gains.values():
        # Bonett and Price, with one more image right in each alone.
        gained, lost = (gain + 1) / 62, 1 / 62
        error = ((gained + lost - (gained - lost) ** 2) / 62) ** 0.5
        ps.append(2 * scipy.stats.norm.sf((gained - lost) / error))
    assert [rows[f"{n}"]["p"] for n in gains] == pytest.approx(ps)
    remaining = {f"{n}" for n in by_hand(ps)}
    assert {name for name, row in rows.items() if row["significant_after_holm"]} == remaining
    assert {name for name in "01234" if rows[name]["interval_leaves_out_0"]} > remaining > {"0"}
    assert rows["best (0, 0)"]["p_holm"] is None
    lines = printed(*PAIR).out.splitlines()
    assert {line.split()[0] for line in lines if "] §" in line} == remaining
    assert "§: significant at 5 % after Holm's correction over 5 blocks" in lines
    latex = printed(*PAIR, "--format", "latex").out
    assert latex.count(r"] \S{}") == len(remaining)
    assert r"footnotesize \S{}: significant" in latex
    head = printed(*PAIR, "--format", "csv").out.splitlines()[0].split(",")
    assert "significant_after_holm" in head
    printed("report")
    (page,) = (store.root / "report").glob("compare-*.html")
    assert page.read_text().count("] §</button>") == len(remaining)
