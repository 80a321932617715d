"""Test the comparison of two encoders on the same images."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from ssl_bench.intervals import holm
from ssl_bench.results.per_image import ImageCurve
from ssl_bench.tables.comparison import (
    Comparison,
    Difference,
    PairedScore,
    compare_encoders,
    subtract,
)
from ssl_bench.tables.sheets import NO_VALUE
from tests.core.test_results import RECORD
from tests.support.report_cells import add_interval, build_record, make_encoder_id
from tests.tables.test_pivot import hits

GENERATOR = np.random.default_rng(0)
IMAGES = hits(1, 0)
PAIR = ("compare", "skip", "skipless")
SINGLE = ("compare", "skip")


def save(store, sha, layers, **changes):
    for layer, values in layers.items():
        name = {"a": "skip", "d": "skipless"}[sha]
        record = replace(RECORD, checkpoint_sha256=sha * 64, model=name, layer=layer, **changes)
        if values is not None:
            fields = {"num_images": len(values), "value": 100 * float(values.mean())}
            record = replace(record, **add_interval(fields))
        store.save(record, values)


def compare(store, shas="ad"):
    tables, _ = compare_encoders(
        store, store.records(), {make_encoder_id(one): one for one in shas}
    )
    return tables


def difference(first, second, metric="corloc"):
    curve = ImageCurve(metric, {})
    return subtract("0", *(PairedScore(curve.estimate(v), (0,)) for v in (first, second)))


@pytest.mark.filterwarnings("error")
def test_undefined_differences_are_dashes_and_zero_has_no_minus():
    nothing = np.zeros((4, 3, 2), np.int64)

    row = difference(nothing, nothing, "miou_oracle")

    assert (row.first_text, row.second_text, row.text) == (NO_VALUE,) * 3
    assert not row.is_significant
    printed = Comparison(
        replace(RECORD, metric="miou_oracle"), (row,), ("a", "b"), (RECORD,)
    ).to_printed_table()
    assert [word.text for word in printed.rows[0]] == ["0", *[NO_VALUE] * 3]
    small = Difference("0", 50.0, 50.01, -0.04, 0.04, ((0,), (0,)))
    assert small.text == "+0.0 [+0.0, +0.0]"
    assert replace(small, low=math.nan).text == replace(small, high=math.nan).text == "+0.0"
    undefined = replace(small, first=math.nan)
    assert (undefined.first_text, undefined.second_text, undefined.text) == (
        *(NO_VALUE, "50.0", NO_VALUE),
    )


def test_the_interval_of_four_images_is_wide():
    same = difference(hits(1, 0, 1, 0), hits(1, 0, 1, 0))
    every = difference(hits(1, 1, 1, 1), hits(0, 0, 0, 0))

    assert (same.value, same.low, same.is_significant) == (0, -same.high, False)
    assert 40 < same.high < 50
    # One gain and one loss are added, so 5 of 6 images gain and 1 loses: 66.7 - 1.96 * 30.4.
    assert (every.value, every.low, every.high) == pytest.approx((100, 7.02, 100), abs=0.01)
    assert every.is_significant


def test_mean_iou_is_compared_over_the_whole_set():
    counts = GENERATOR.integers(1, 9, size=(2, 30, 3, 4))
    counts[:, :, 1:] += counts[:, :, :1]

    row = difference(counts[0], counts[1], "miou_holdout")

    def miou(images):
        right, predicted, true = images.sum(0).astype(float)
        return 100 * np.mean(right / (predicted + true - right))

    gap = miou(counts[0]) - miou(counts[1])
    jackknife = [np.delete(counts, i, axis=1) for i in range(30)]
    pseudo = [30 * gap - 29 * (miou(one) - miou(two)) for one, two in jackknife]
    assert (row.first, row.value) == pytest.approx((miou(counts[0]), gap))
    ends = scipy.stats.t.interval(0.95, 29, gap, np.std(pseudo, ddof=1) / 30**0.5)
    assert (row.low, row.high) == pytest.approx(ends)


def test_encoders_are_compared_per_block_and_at_their_best_blocks(store):
    save(store, "a", {0: hits(1, 1, 1, 1, 1, 1), 1: hits(*[0] * 6), 2: hits(1, 1, 0, 0, 0, 0)})
    save(store, "d", {0: hits(*[0] * 6), 1: hits(1, 1, 1, 1, 1, 0)})

    (table,) = compare(store)

    names = ["0", "1", "last (2, 1)", "best (0, 1)", "held-out choice (0; 1)"]
    assert [row.name for row in table.rows] == names
    values = [(100, 0), (0, 500 / 6), (200 / 6, 500 / 6), (100, 500 / 6), (100, 500 / 6)]
    for row, pair in zip(table.rows, values, strict=True):
        assert (row.first, row.second) == pytest.approx(pair)
    assert table.rows[3].layers == ((0,), (1,))


@pytest.mark.parametrize("shas", ["a", "ad"])
def test_no_block_is_best_when_higher_is_not_better(store, shas):
    save(store, "a", {0: hits(1, 1), 1: hits(0, 0), 2: hits(0, 1)}, metric="degenerate")
    save(store, "d", {0: hits(0, 0), 1: hits(1, 0), 2: hits(1, 1)}, metric="degenerate")

    (table,) = compare(store, shas)

    second = {"a": ("last block", 50, 50, 50), "ad": ("skipless", 0, 50, 100)}
    assert [(row.name, row.first) for row in table.rows] == [("0", 100), ("1", 0), ("2", 50)]
    assert (table.names[1], *(row.second for row in table.rows)) == second[shas]
    assert any(note.startswith("no block is best") for note in table.to_printed_table().notes)


def test_tables_name_their_seed_and_encoders_without_a_best_block(store):
    degenerate = {"details": {"degenerate_percent": 90.0}}
    for seed in (0, 7):
        save(store, "a", {0: hits(1, 0), 1: hits(1, 1)}, seed=seed, **degenerate)
        save(store, "d", {0: hits(1, 0)}, seed=seed, **degenerate)

    tables = compare(store)

    assert [table.title.rpartition(", ")[2] for table in tables] == ["seed 0", "seed 7"]
    # A single block is no choice.
    assert [table.encoders_without_best for table in tables] == [("skip",), ("skip",)]
    assert compare(store, "a")[0].names == ("skip", "last block")
    assert [row.name for row in tables[0].rows] == ["0", "last (1, 0)"]
    (note,) = tables[0].to_printed_table().symbol_notes
    assert note.startswith("†")
    assert "never marked" in note


def test_encoders_of_the_same_name_are_distinguished_by_id(store):
    for sha in "ad":
        store.save(build_record(checkpoint_sha256=sha * 64, value=50.0, num_images=2), hits(1, 0))

    (table,) = compare(store)

    assert table.names == tuple(f"skip {make_encoder_id(sha)[:6]}" for sha in "ad")
    assert set(table.code) == set(table.names)


def test_the_reasons_concern_only_tasks_of_the_compared_encoders(store):
    for sha in "ad":
        save(store, sha, {0: hits(1, 0)})
    save(store, "a", {0: hits(1, 0)}, task="knn", metric="top1_k20")
    store.save(build_record(checkpoint_sha256="e" * 64, task="pca", metric="explained_variance"))

    _, reasons = compare_encoders(
        store, store.records(), {make_encoder_id(one): one for one in "ad"}
    )

    assert list(reasons) == ["knn"]


def test_comparisons_of_older_data_say_so_in_their_titles(store, cli):
    for sha in "ad":
        save(store, sha, {0: hits(1, 0)})
        older = {"dataset_fingerprint": "0" * 64, "created": "2020-01-01T00:00:00+00:00"}
        save(store, sha, {0: hits(1, 1)}, **older)

    for words in (PAIR, SINGLE, ("table",)):
        out = cli(*words).out
        assert out.count("[older data 000000") == 1
        assert out.count("[data ") == 1


def test_encoders_are_found_by_name_and_digest(store, cli, cli_json):
    save(store, "a", {0: hits(1, 0, 0)})
    save(store, "d", {0: hits(1, 1, 1)})

    out = cli("compare", "skip", "dddd", "--format", "markdown").out
    (table,) = cli_json("compare", "skip", "dddd")

    assert "| block | skip | skipless | first - second [95 %] |" in out
    assert "| 0 | 33.3 | 100.0 | -66.7 [" in out
    assert table["checkpoint_sha256"] == ["a" * 64, "d" * 64]
    assert (table["names"], table["num_images"]) == (["skip", "skipless"], 3)
    first = table["rows"][0]
    assert (first["block"], first["second"]) == ("0", 100.0)
    assert first["difference"] == pytest.approx(-200 / 3)
    assert f"skip {make_encoder_id('a')[:8]}" in cli("compare", "skipp", "skip", code=3).err


def test_one_metric_of_a_task_is_compared_by_default(store, cli, cli_json):
    counts = np.ones((3, 3, 2), np.int64)
    every = {"miou_holdout", "miou_oracle", "pixel_accuracy"}
    for metric in every:
        for sha in "ad":
            blocks = {0: counts, 1: counts}
            save(store, sha, blocks, task="segmentation", metric=metric, facet="token")

    for words, metrics in (
        ((), {"miou_holdout"}),
        (("--metric", "pixel_accuracy"), {"pixel_accuracy"}),
        (("--all-metrics",), every),
    ):
        assert {table["metric"] for table in cli_json(*PAIR, *words)} == metrics
        assert ("--all-metrics" in cli(*PAIR, *words).err) == (not words)
    assert "averages over the classes" not in cli(*PAIR).out


@pytest.mark.parametrize(("dataset", "code"), [("other", 3), ("nowhere", 2)])
def test_a_dataset_without_results_of_these_encoders_gets_a_hint(store, cli, dataset, code):
    for sha, own in (("a", "one"), ("d", "one"), ("e", "other")):
        store.save(build_record(model=f"model {sha}", checkpoint_sha256=sha * 64, dataset=own))

    err = cli("compare", "model a", "model d", "--dataset", dataset, code=code).err

    assert ("ssl-bench probe" in err) == (code == 3)


def test_blocks_of_one_encoder_are_compared_with_its_best(store, cli, cli_json):
    # Block 5 is left out, because it has no per-image values.
    save(store, "a", {0: hits(*[0] * 10), 3: hits(*[1] * 8, 0, 0), 5: None}, num_images=10)

    out = cli(*SINGLE, "--format", "markdown").out

    assert "| block | skip | best block | first - second [95 %] |" in out
    assert "| 0 | 0.0 | 80.0 | **-80.0 [" in out
    assert "| 3 | 80.0 | 80.0 | +0.0 |" in out
    rows = {row["block"]: row for row in cli_json(*SINGLE)[0]["rows"]}
    assert list(rows) == ["0", "3", "held-out choice (3)"]
    assert rows["0"]["low"] is not None
    for name in ("3", "held-out choice (3)"):
        assert (rows[name]["difference"], rows[name]["low"], rows[name]["high"]) == (0, None, None)


def test_a_choice_among_different_blocks_is_noted(store, cli):
    best = hits(1, 1, 0, 0)
    save(store, "a", dict.fromkeys(range(6), best))
    save(store, "d", {0: best, 5: best})

    note = "among 6 blocks (0, 1, 2, 3, 4, 5) of skip and 2 blocks (0, 5) of skipless"
    assert note in cli(*PAIR).out
    assert "are among" not in cli(*SINGLE).out


@pytest.mark.parametrize(("metric", "value"), [("miou", 25.0), ("pixel_accuracy", 50.0)])
def test_a_choice_of_blocks_that_predict_different_classes_is_noted(store, cli, metric, value):
    # Both images show class 0. Each block confuses a different image with its own class.
    for layer in (0, 1):
        counts = np.zeros((2, 3, 3), np.int64)
        counts[:, 2, 0] = counts[layer, :2, 0] = counts[1 - layer, 1, 1 + layer] = 10
        fields = add_interval({"num_images": 2, "value": value})
        record = replace(RECORD, task="segmentation", metric=metric, layer=layer, **fields)
        store.save(record, counts)

    for words in (SINGLE, ("table", "--pivot")):
        note = "a held-out choice of several blocks averages over the classes"
        assert cli(*words).out.count(note) == (metric == "miou")


FAILURES = {
    "other settings": (
        [("a", {0: IMAGES}, {"settings": {"size": 224}}), ("d", {0: IMAGES}, {"settings": {}})],
        "size 224 and None",
    ),
    # Of several pairs of results, the one with the fewest differences is explained.
    "other pairs differ more": (
        [
            ("a", {0: IMAGES}, {"settings": {"size": 224}}),
            ("d", {0: IMAGES}, {"settings": {"size": 224}, "split": "test", "seed": 1}),
            ("d", {0: IMAGES}, {"settings": {}}),
        ],
        "size 224 and None",
    ),
    # Probing again with the same settings would not store per-image values either.
    "other settings without images": (
        [("a", {0: None}, {"settings": {"size": 224}}), ("d", {0: None}, {})],
        "no per-image values",
    ),
    "images of one encoder": (
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


@pytest.mark.parametrize("failure", FAILURES)
def test_the_reason_why_encoders_cannot_be_compared_is_printed(store, cli, failure):
    records, reason = FAILURES[failure]
    for sha, layers, changes in records:
        save(store, sha, layers, **changes)

    assert reason in cli(*PAIR, code=3).err

    # The reason is also printed if another task can be compared.
    for sha in "ad":
        save(store, sha, {0: IMAGES}, task="retrieval")
    err = cli(*PAIR).err
    assert "left out: tokencut: " in err
    assert reason in err


CODES = {
    "the same": ({}, {}, None),
    "changes": (
        {"git_commit": "a" * 40}, {"git_commit": f"{'a' * 40}-dirty"},
        "skip: 0.2.0 (aaaaaaaaaa); skipless: 0.2.0 (aaaaaaaaaa-dirty)",
    ),
    "versions": ({"version": "0.1.0"}, {}, "skip: 0.1.0 (unknown); skipless: 0.2.0 (unknown)"),
}  # fmt: skip


@pytest.mark.parametrize("case", CODES)
def test_one_warning_says_that_results_come_from_different_code(store, cli, case):
    one, other, expected = CODES[case]
    for sha, changes in (("a", one), ("d", other)):
        save(store, sha, {0: IMAGES, 1: IMAGES}, **{"version": "0.2.0", **changes})
        # No warning compares the versions of different tasks.
        save(store, sha, {0: IMAGES}, version="0.3.0", task="knn", metric="top1_k20")

    assert "different code" not in cli(*SINGLE).err
    warnings = [line for line in cli(*PAIR).err.splitlines() if "different code" in line]
    assert len(warnings) == (expected is not None)
    assert all(expected in line for line in warnings)
    # The blocks of a single encoder can differ, too.
    save(store, "a", {2: IMAGES}, version="0.2.0", git_commit="0" * 40)
    assert "(0000000000)" in cli(*SINGLE).err


def rejected_by_holm(ps: list[float]) -> set[int]:
    """Return the indices of the p-values that remain significant after Holm's correction."""
    rejected = set[int]()
    while left := [n for n in range(len(ps)) if n not in rejected]:
        least = min(left, key=lambda n: ps[n])
        if ps[least] >= 0.05 / len(left):
            return rejected
        rejected.add(least)
    return rejected


def test_holm_corrects_p_values_like_his_step_down_procedure():
    for _ in range(300):
        ps = (GENERATOR.random(GENERATOR.integers(1, 12)) ** 4).round(4).tolist()
        assert {n for n, p in enumerate(holm(ps)) if p < 0.05} == rejected_by_holm(ps)
    # The definition is (m - rank) p, not below the previous value and at most 1. NaN is left out.
    assert holm([0.04, 0.01, 0.02, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, math.nan, 0.9])[::2] == pytest.approx([1.0, 1.0])
    assert holm([0.02, math.nan, 0.9])[::2] == pytest.approx([0.04, 0.9])
    assert math.isnan(holm([0.6, math.nan, 0.9])[1])


def test_blocks_that_are_significant_after_holms_correction_are_marked(store, cli, cli_json):
    order = np.arange(60)
    # Number of images that only the first encoder gets right.
    gains = {0: 30, 1: 14, 2: 8, 3: 6, 4: 0}
    for sha, size in (("a", 64), ("d", 518)):
        hits = {layer: order < 20 + gain * (sha == "a") for layer, gain in gains.items()}
        architecture = {**RECORD.architecture, "image_size": size}
        save(store, sha, hits, architecture=architecture, settings={"image_size": None})

    rows = {row["block"]: row for row in cli_json(*PAIR)[0]["rows"]}

    ps = []
    for gain in gains.values():
        # The Wald statistic of Bonett and Price, who add one image to the gains and to the losses.
        gained, lost = (gain + 1) / 62, 1 / 62
        error = ((gained + lost - (gained - lost) ** 2) / 62) ** 0.5
        ps.append(2 * scipy.stats.norm.sf((gained - lost) / error))
    assert [rows[f"{n}"]["p"] for n in gains] == pytest.approx(ps)
    remaining = {f"{n}" for n in rejected_by_holm(ps)}
    assert {name for name, row in rows.items() if row["significant_after_holm"]} == remaining
    assert {name for name in "01234" if rows[name]["interval_leaves_out_0"]} > remaining > {"0"}
    assert rows["best (0, 0)"]["p_holm"] is None
    sizes = "image_size=64 (tokencut of skip), image_size=518 (tokencut of skipless)"
    out = cli(*PAIR).out
    assert f"paired over 60 images, {sizes}\n" in out
    lines = out.splitlines()
    assert {line.split()[0] for line in lines if "] §" in line} == remaining
    assert "§: significant at 5 % after Holm's correction over 5 blocks" in lines
    latex = cli(*PAIR, "--format", "latex").out
    assert latex.count(r"] \S{}") == len(remaining)
    assert r"footnotesize \S{}: significant" in latex
    head = cli(*PAIR, "--format", "csv").out.splitlines()[0].split(",")
    assert "significant_after_holm" in head
    cli("report")
    (page,) = (store.root / "report").glob("compare-*.html")
    text = page.read_text()
    assert text.count("] §</button>") == len(remaining)
    assert sizes in text
