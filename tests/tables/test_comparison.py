"""Paired differences, by hand where a resample leaves no choice, else by an independent loop."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from ssl_bench.cli.__main__ import main
from ssl_bench.errors import DataError
from ssl_bench.intervals import holm
from ssl_bench.results import ResultStore
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


def curve(**layers):
    return ImageCurve("corloc", {int(name[1:]): values for name, values in layers.items()})


def between(first, second, metric="corloc"):
    """The row of the first minus the second of two arrays of contributions."""
    curve = ImageCurve(metric, {})
    scores = [PairedScore(curve.estimate(values), (0,)) for values in (first, second)]
    return subtract("0", *scores)


@pytest.mark.filterwarnings("error")
def test_a_difference_of_what_has_no_value_is_a_dash():
    nothing = np.zeros((4, 3, 2), np.int64)

    row = between(nothing, nothing, "miou_oracle")

    assert (row.first_text, row.second_text, row.text, row.is_significant) == (
        *[NO_VALUE] * 3,
        False,
    )
    sheet = Comparison(replace(RECORD, metric="miou_oracle"), (row,), ("a", "b"), (RECORD,)).sheet()
    assert [word.text for word in sheet.rows[0]] == ["0", *[NO_VALUE] * 3]


def test_a_difference_that_rounds_to_nothing_has_no_minus():
    row = Difference("0", 50.0, 50.01, -0.04, 0.04, ((0,), (0,)))

    assert row.text == "+0.0 [+0.0, +0.0]"
    assert replace(row, low=math.nan).text == "+0.0"


def test_four_images_that_all_change_do_not_prove_that_every_image_does():
    same = between(hits(1, 0, 1, 0), hits(1, 0, 1, 0))
    every = between(hits(1, 1, 1, 1), hits(0, 0, 0, 0))

    assert (same.value, same.low, same.is_significant) == (0, -same.high, False)
    assert 40 < same.high < 50
    # As if of six images five had gained and one had lost: 66.7 minus 1.96 times 30.4.
    assert (every.value, every.low, every.high) == pytest.approx((100, 7.02, 100), abs=0.01)
    assert every.is_significant


def test_mean_iou_is_compared_over_the_whole_set_not_image_by_image():
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


def test_at_which_sizes_two_encoders_saw_the_images_is_said(tmp_path, capsys):
    store = ResultStore(tmp_path)
    for sha, size in (("a", 64), ("d", 518)):
        architecture = {**RECORD.architecture, "image_size": size}
        save(store, sha, {0: IMAGES}, architecture=architecture, settings={"image_size": None})

    assert main(["compare", "skip", "skipless", "--out", str(tmp_path)]) == 0
    assert main(["report", "--out", str(tmp_path)]) == 0

    (page,) = (tmp_path / "report").glob("compare-*.html")
    sizes = "image_size=64 (tokencut of skip), image_size=518 (tokencut of skipless)"
    assert f"paired over 2 images, {sizes}\n" in capsys.readouterr().out
    assert f"The image sizes differ, {sizes}." in page.read_text()


def test_checkpoints_are_compared_block_by_block_and_by_their_best_blocks():
    first = curve(b0=hits(1, 0, 0, 0), b1=hits(1, 1, 0, 0), b2=hits(1, 1, 1, 1))
    second = curve(b0=hits(1, 1, 1, 0), b1=hits(0, 0, 0, 0))

    rows = compare_checkpoints(first, second)

    assert [row.name for row in rows][:4] == ["0", "1", "last (2, 1)", "best (2, 0)"]
    values = [(25, 75), (50, 0), (100, 0), (100, 75)]
    assert [(row.first, row.second) for row in rows[:4]] == values
    assert rows[4].name.startswith("held-out choice (2; 0")


def test_encoders_of_other_depths_are_compared_by_their_last_blocks(tmp_path, capsys):
    store = ResultStore(tmp_path)
    save(store, "a", {5: hits(1, 1), 11: hits(0, 1)})
    save(store, "d", {2: hits(0, 0)})

    assert main(["compare", "skip", "skipless", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "last (11, 2)" in said
    assert "+50.0" in said
    assert "best" not in said

    assert main(["report", "--out", str(tmp_path), "--into", str(tmp_path / "page")]) == 0
    (page,) = (tmp_path / "page").rglob("compare-*.html")
    assert "last (11, 2)" in page.read_text()


def save(store, sha, layers, **changes):
    for layer, values in layers.items():
        name = {"a": "skip", "d": "skipless"}[sha]
        record = replace(RECORD, checkpoint_sha256=sha * 64, model=name, layer=layer, **changes)
        if values is not None:
            found = {"num_images": len(values), "value": 100 * float(values.mean())}
            record = replace(record, **around(found))
        store.save(record, values)


@pytest.mark.parametrize("asked", ["a", "ad"])
def test_of_what_more_is_not_better_no_block_is_best(tmp_path, asked):
    store = ResultStore(tmp_path)
    save(store, "a", {0: hits(1, 1), 1: hits(0, 0), 2: hits(0, 1)}, metric="degenerate")
    save(store, "d", {0: hits(0, 0), 1: hits(1, 0), 2: hits(1, 1)}, metric="degenerate")

    (table,), _ = compare_encoders(store, store.records(), {known_as(one): one for one in asked})

    beside = {"a": ("last block", 50, 50, 50), "ad": ("skipless", 0, 50, 100)}
    assert [(row.name, row.first) for row in table.rows] == [("0", 100), ("1", 0), ("2", 50)]
    assert (table.names[1], *(row.second for row in table.rows)) == beside[asked]
    assert any(note.startswith("no block is best") for note in table.sheet().notes)


def test_each_side_is_compared_at_the_blocks_that_are_best_for_it(tmp_path):
    store = ResultStore(tmp_path)
    save(store, "a", {0: hits(1, 1, 1, 1, 1, 1), 1: hits(0, 0, 0, 0, 0, 0)})
    save(store, "d", {0: hits(0, 0, 0, 0, 0, 0), 1: hits(1, 1, 1, 1, 1, 0)})

    (table,), _ = compare_encoders(store, store.records(), {known_as(one): one for one in "ad"})

    best, held_out = (row for row in table.rows if not row.name.isdigit())
    assert (best.name, best.layers) == ("best (0, 1)", ((0,), (1,)))
    assert held_out.name == "held-out choice (0; 1)"
    for row in (best, held_out):
        assert (row.first, row.second) == (100, pytest.approx(500 / 6))


def test_only_scores_of_the_same_images_and_settings_are_compared(tmp_path):
    store = ResultStore(tmp_path)
    save(store, "a", {0: hits(1, 0), 1: hits(1, 1)})
    save(store, "d", {0: hits(0, 0), 1: hits(1, 0)})
    save(store, "d", {0: hits(1, 1)}, settings={"tau": 0.3})

    (table,), _ = compare_encoders(store, store.records(), {known_as("a"): "a", known_as("d"): "d"})

    assert table.record.settings == {"tau": 0.2}
    assert [(row.first, row.second) for row in table.rows[:2]] == [(50, 0), (100, 50)]
    (alone,), _ = compare_encoders(store, store.records(), {known_as("a"): "a"})
    assert alone.record.settings == {"tau": 0.2}
    with pytest.raises(DataError, match="nothing to compare"):
        compare_encoders(store, store.records(), {known_as("a"): "a", known_as("e"): "e"})


def test_comparisons_of_older_data_say_so_in_their_titles(tmp_path, capsys):
    store = ResultStore(tmp_path)
    for sha in "ad":
        save(store, sha, {0: hits(1, 0)})
        older = {"dataset_fingerprint": "0" * 64, "created": "2020-01-01T00:00:00+00:00"}
        save(store, sha, {0: hits(1, 1)}, **older)

    for words in (["compare", "skip", "skipless"], ["compare", "skip"], ["table"]):
        assert main([*words, "--out", str(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert out.count("[older data 000000") == 1
        assert out.count("[data ") == 1


def test_a_record_whose_images_were_not_kept_or_half_kept_is_left_out(tmp_path):
    store = ResultStore(tmp_path)
    save(store, "a", {0: hits(1, 0), 1: hits(1, 1), 2: None})
    half = store.path(replace(RECORD, layer=1).key()).with_suffix(".npz")
    half.write_bytes(half.read_bytes()[:40])

    (table,), _ = compare_encoders(store, store.records(), {known_as("a"): "a"})

    assert [row.name for row in table.rows][:-1] == ["0"]


def test_the_command_takes_names_and_digests(tmp_path, capsys):
    store = ResultStore(tmp_path)
    save(store, "a", {0: hits(1, 0, 0)})
    save(store, "d", {0: hits(1, 1, 1)})

    assert main(["compare", "skip", "dddd", "--out", str(tmp_path), "--format", "markdown"]) == 0

    printed = capsys.readouterr().out
    assert "| block | skip | skipless | first - second [95 %] |" in printed
    assert "| 0 | 33.3 | 100.0 | -66.7 [" in printed
    assert main(["compare", "skip", "dddd", "--out", str(tmp_path), "--format", "json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    assert table["checkpoint_sha256"] == ["a" * 64, "d" * 64]
    assert (table["names"], table["num_images"], table["metric"]) == (
        ["skip", "skipless"],
        3,
        "corloc",
    )
    first = table["rows"][0]
    assert (first["block"], first["second"]) == ("0", 100.0)
    assert first["difference"] == pytest.approx(-200 / 3)
    assert main(["compare", "skipp", "skip", "--out", str(tmp_path)]) == 3
    assert f"skip {known_as('a')[:8]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], {"miou_holdout"}),
        (["--metric", "pixel_accuracy"], {"pixel_accuracy"}),
        (["--all-metrics"], {"miou_holdout", "miou_oracle", "pixel_accuracy"}),
    ],
)
def test_one_metric_a_task_is_compared_unless_others_are_asked_for(tmp_path, capsys, words, shown):
    store = ResultStore(tmp_path)
    counts = np.ones((3, 3, 2), np.int64)
    for metric in ("miou_holdout", "miou_oracle", "pixel_accuracy"):
        for sha in "ad":
            save(store, sha, {0: counts}, task="segmentation", metric=metric, facet="token")

    assert (
        main(["compare", "skip", "skipless", "--out", str(tmp_path), "--format", "json", *words])
        == 0
    )

    said = capsys.readouterr()
    assert {table["metric"] for table in json.loads(said.out)} == shown
    assert ("--all-metrics" in said.err) == (not words)
    assert ("miou_oracle, pixel_accuracy" in said.err) == (not words)


@pytest.mark.parametrize(("flag", "code"), [("other", 3), ("nowhere", 2)])
def test_a_dataset_of_other_encoders_is_no_typing_error(tmp_path, capsys, flag, code):
    store = ResultStore(tmp_path)
    for sha, dataset in (("a", "one"), ("d", "one"), ("e", "other")):
        store.save(cell(model=f"model {sha}", checkpoint_sha256=sha * 64, dataset=dataset))

    assert (
        main(["compare", "model a", "model d", "--out", str(tmp_path), "--dataset", flag]) == code
    )

    assert ("ssl-bench probe" in capsys.readouterr().err) == (code == 3)


def test_blocks_are_shown_minus_the_best_one_which_has_no_difference_from_itself(tmp_path, capsys):
    store = ResultStore(tmp_path)
    save(store, "a", {0: hits(*[0] * 10), 3: hits(*[1] * 8, 0, 0)})
    words = ["compare", "skip", "--out", str(tmp_path), "--format"]

    assert main([*words, "markdown"]) == 0
    printed = capsys.readouterr().out
    assert main([*words, "json"]) == 0

    assert "| block | skip | best block | first - second [95 %] |" in printed
    assert "| 0 | 0.0 | 80.0 | **-80.0 [" in printed
    assert "| 3 | 80.0 | 80.0 | +0.0 |" in printed
    rows = {row["block"]: row for row in json.loads(capsys.readouterr().out)[0]["rows"]}
    assert rows["0"]["low"] is not None
    for name in ("3", "held-out choice (3)"):
        assert (rows[name]["difference"], rows[name]["low"], rows[name]["high"]) == (0, None, None)


def test_other_blocks_to_choose_from_are_said(tmp_path, capsys):
    store, best = ResultStore(tmp_path), hits(1, 1, 0, 0)
    save(store, "a", dict.fromkeys(range(6), best))
    save(store, "d", {0: best, 5: best})

    assert main(["compare", "skip", "skipless", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert main(["compare", "skip", "--out", str(tmp_path)]) == 0

    said = "among 6 blocks (0, 1, 2, 3, 4, 5) of skip and 2 blocks (0, 5) of skipless"
    assert f"best block and held-out choice are {said}" in out
    assert "are among" not in capsys.readouterr().out


@pytest.mark.parametrize("metric", ["miou", "pixel_accuracy"])
def test_a_choice_of_blocks_that_predict_other_classes_is_said(tmp_path, capsys, metric):
    store = ResultStore(tmp_path)
    # Of two images of class 0 each block takes another one for a class of its own.
    for layer in (0, 1):
        counts = np.zeros((2, 3, 3), np.int64)
        counts[:, 2, 0] = counts[layer, :2, 0] = counts[1 - layer, 1, 1 + layer] = 10
        found = {"num_images": 2, "value": {"miou": 25.0, "pixel_accuracy": 50.0}[metric]}
        record = replace(RECORD, task="segmentation", metric=metric, layer=layer, **around(found))
        store.save(record, counts)

    for words in (["compare", record.model], ["table", "--pivot"]):
        assert main([*words, "--out", str(tmp_path)]) == 0
        said = "a held-out choice of several blocks averages over the classes"
        assert capsys.readouterr().out.count(said) == (metric == "miou")


REASONS = {
    "other settings": (
        [("a", {0: IMAGES}, {"settings": {"size": 224}}), ("d", {0: IMAGES}, {"settings": {}})],
        "(tokencut: size 224 and None)",
    ),
    "no images": (
        [("a", {0: None}, {}), ("d", {0: None}, {})],
        "(tokencut: no per-image values are stored)",
    ),
    # A run of the same settings would leave none either.
    "no images of other settings": (
        [("a", {0: None}, {"settings": {"size": 224}}), ("d", {0: None}, {})],
        "(tokencut: no per-image values are stored)",
    ),
    "images of one": (
        [("a", {0: IMAGES}, {}), ("d", {0: None}, {"num_images": 2})],
        "values are missing, recompute them with `ssl-bench probe --task tokencut --overwrite`",
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


@pytest.mark.parametrize("which", REASONS)
def test_why_two_checkpoints_cannot_be_compared_is_said(tmp_path, capsys, which):
    store, (made, why) = ResultStore(tmp_path), REASONS[which]
    for sha, layers, changes in made:
        save(store, sha, layers, **changes)

    assert main(["compare", "skip", "skipless", "--out", str(tmp_path)]) == 3
    assert why in capsys.readouterr().err

    # Of a task beside one that can be compared it is said too.
    for sha in "ad":
        save(store, sha, {0: IMAGES}, task="retrieval")
    assert main(["compare", "skip", "skipless", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert "left out: tokencut: " in said
    assert why.partition("(tokencut: ")[2].rstrip(")") in said


def test_a_task_that_one_side_was_never_asked_is_named_with_the_command(tmp_path, capsys):
    store = ResultStore(tmp_path)
    save(store, "a", {0: IMAGES}, task="knn", metric="top1_k20")
    save(store, "d", {0: IMAGES})

    words = ["compare", "skip", "skipless", "--task", "knn", "--out", str(tmp_path)]
    assert main(words) == 3

    said = capsys.readouterr().err
    assert f"skipless has no record of --task knn in {tmp_path}" in said
    assert "tokencut" in said


CODES = {
    "the same": ({}, {}, None),
    "commits": (
        {"git_commit": "a" * 40}, {"git_commit": "b" * 40},
        "skip: 0.2.0 (aaaaaaaaaa); skipless: 0.2.0 (bbbbbbbbbb)",
    ),
    "changes": (
        {"git_commit": "a" * 40}, {"git_commit": f"{'a' * 40}-dirty"},
        "skip: 0.2.0 (aaaaaaaaaa); skipless: 0.2.0 (aaaaaaaaaa-dirty)",
    ),
    "an unknown commit": (
        {"git_commit": "a" * 40}, {}, "skip: 0.2.0 (aaaaaaaaaa); skipless: 0.2.0 (unknown)",
    ),
    "versions": ({"version": "0.1.0"}, {}, "skip: 0.1.0 (unknown); skipless: 0.2.0 (unknown)"),
}  # fmt: skip


@pytest.mark.parametrize("which", CODES)
def test_sides_from_different_code_are_warned_of_in_one_line(tmp_path, capsys, which):
    store, (one, other, said) = ResultStore(tmp_path), CODES[which]
    for sha, changes in (("a", one), ("d", other)):
        save(store, sha, {0: IMAGES, 1: IMAGES}, **{"version": "0.2.0", **changes})

    for words in (["compare", "skip", "skipless"], ["compare", "skip"]):
        assert main([*words, "--out", str(tmp_path), "--format", "json"]) == 0
        warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
        assert len(warnings) == (said is not None and len(words) == 3)
        assert not warnings or f"different code ({said})" in warnings[0]


def test_comparisons_that_each_come_from_one_commit_are_not_warned_of(tmp_path, capsys):
    store = ResultStore(tmp_path)
    for sha in "ad":
        save(store, sha, {0: IMAGES, 1: IMAGES}, git_commit="a" * 40)
        save(store, sha, {0: IMAGES}, git_commit="b" * 40, task="knn", metric="top1_k20")

    for words in (["compare", "skip", "skipless"], ["compare", "skip"]):
        assert main([*words, "--out", str(tmp_path)]) == 0
        assert "different code" not in capsys.readouterr().err


def test_blocks_of_one_encoder_from_different_code_are_warned_of(tmp_path, capsys):
    store = ResultStore(tmp_path)
    for layer in (0, 1):
        save(store, "a", {layer: IMAGES}, git_commit=f"{layer}" * 40)

    assert main(["compare", "skip", "--out", str(tmp_path)]) == 0

    assert "(0000000000), " in capsys.readouterr().err


def by_hand(ps: list[float]) -> set[int]:
    """Holm's procedure as he describes it: the smallest first, until one is not significant."""
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
    assert math.isnan(holm([0.6, math.nan, 0.9])[1])


def test_rows_that_remain_significant_among_the_blocks_carry_a_sign(tmp_path, capsys):
    store, order = ResultStore(tmp_path), np.arange(60)
    # Block by block fewer images of the first alone are right.
    gains = {0: 30, 1: 14, 2: 8, 3: 6, 4: 0}
    save(store, "a", {layer: order < 20 + gain for layer, gain in gains.items()})
    save(store, "d", dict.fromkeys(gains, order < 20))
    words = ["compare", "skip", "skipless", "--out", str(tmp_path)]

    assert main([*words, "--format", "json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    rows = {row["block"]: row for row in table["rows"]}
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

    assert main(words) == 0
    text = capsys.readouterr().out
    shown = {line.split()[0] for line in text.splitlines() if "] §" in line}
    assert shown == remaining
    assert "§: significant at 5 % after Holm's correction over 5 blocks" in text.splitlines()
    assert main([*words, "--format", "latex"]) == 0
    latex = [x for x in capsys.readouterr().out.splitlines() if not x.startswith("%")]
    assert sum(r"] \S{}" in line for line in latex) == len(remaining)
    assert any(r"footnotesize \S{}: significant" in line for line in latex)
    assert main([*words, "--format", "csv"]) == 0
    assert "significant_after_holm" in capsys.readouterr().out.splitlines()[0].split(",")
    assert main(["report", "--out", str(tmp_path)]) == 0
    (page,) = (tmp_path / "report").glob("compare-*.html")
    assert page.read_text().count("] §</button>") == len(remaining)
