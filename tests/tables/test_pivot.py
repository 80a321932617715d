"""Tables of encoders by datasets, with chosen blocks counted by hand."""

import csv
import io
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from ssl_bench.tables.encoders import column_names, encoder_table
from ssl_bench.tables.entries import Entry
from ssl_bench.tables.layer_selection import choose_block
from ssl_bench.tables.sheets import render_tables
from tests.core.test_results import RECORD

NAMES = {"a": "skip", "d": "skipless", "e": "other"}
PIVOT = ("table", "--pivot")
# Ten images: block 1 wins by one image, and the fold that contains this image chooses block 0.
ONE = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0], bool)
TWO = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 0], bool)


def hits(*values):
    return np.array(values, bool)


def chosen_block(records, store, choice) -> Entry:
    found = choose_block(records, store, choice)
    assert found is not None
    return found


def save(store, sha, layer, values, *, keep: bool = True, **changes: Any):
    """Save a record whose value is the percentage of hits, and the hits if `keep` is true."""
    record = replace(
        RECORD,
        checkpoint_sha256=sha * 64,
        model=NAMES[sha],
        layer=layer,
        value=100 * values.mean(),
        num_images=len(values),
        ci95=None,
        **changes,
    )
    store.save(record, values if keep else None)
    return record


def cells(table):
    lines = render_tables([table], "markdown").splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]


def chosen_by_folds():
    """Return for each fold its images, and whether the other images select block 1."""
    folds = np.array_split(np.random.default_rng(0).permutation(10), 5)
    others = [np.setdiff1d(np.arange(10), fold) for fold in folds]
    return [
        (fold, TWO[those].sum() > ONE[those].sum())
        for fold, those in zip(folds, others, strict=True)
    ]


def test_the_oracle_takes_the_best_block_and_folds_choose_on_other_images(store):
    shares = (10.0, 40.0)
    records = [
        save(store, "a", layer, values, details={"degenerate_percent": shares[layer]})
        for layer, values in enumerate((ONE, TWO))
    ]

    oracle = chosen_block(records, store, "oracle")
    held_out = chosen_block(records, store, "holdout")

    assert (oracle.value, oracle.layers, oracle.offered_layers) == (50.0, (1,), (0, 1))
    folds = chosen_by_folds()
    expected = sum((TWO if second else ONE)[fold].sum() for fold, second in folds)
    assert held_out.value == 10.0 * expected
    assert held_out.layers == (0, 1)
    assert held_out.value < oracle.value
    exact = binomtest(expected, 10).proportion_ci()
    assert held_out.low == pytest.approx(100 * exact.low)
    assert held_out.high == pytest.approx(100 * exact.high)
    assert len(held_out.records) == 2
    # A block counts as often as folds choose it, not once and not half.
    percents = [shares[int(second)] for _, second in folds]
    assert percents.count(10.0) != percents.count(40.0)
    assert held_out.degenerate_percent == pytest.approx(np.mean(percents))


def test_the_oracle_never_takes_a_block_without_a_number(store):
    records = [save(store, "a", layer, hits(layer, 0), keep=False) for layer in (0, 1)]
    records += [replace(records[0], layer=2, value=math.nan)]

    oracle = chosen_block(records, store, "oracle")

    assert (oracle.value, oracle.layers, oracle.offered_layers) == (50.0, (1,), (0, 1, 2))


def test_the_blocks_that_most_seeds_have_are_offered(store):
    few, many = hits(1, 1), hits(1, 0)
    records = [save(store, "a", layer, few, seed=0) for layer in (0, 1)]
    records += [save(store, "a", layer, many, seed=seed) for seed in (1, 2) for layer in (2, 3)]

    for choice in ("holdout", "oracle"):
        chosen = chosen_block(records, store, choice)
        assert (chosen.offered_layers, chosen.omitted_seeds) == ((2, 3), (0,))
        assert (chosen.value, chosen.seeds) == (50.0, (1, 2))


def test_a_block_that_all_folds_choose_keeps_the_interval_of_its_record(store):
    records = [
        save(store, "a", 0, hits(0, 0, 0, 0, 0, 0)),
        save(store, "a", 1, hits(1, 1, 1, 1, 1, 1)),
    ]
    records[1] = replace(records[1], ci95=(90.0, 100.0), details={"degenerate_percent": 4.0})

    chosen = chosen_block(records, store, "holdout")

    assert (chosen.low, chosen.high, chosen.degenerate_percent) == (90.0, 100.0, 4.0)
    assert chosen.layers == (1,)
    # One block needs no values of images, and several do.
    alone = save(store, "a", 3, hits(1, 0), keep=False)
    assert chosen_block([alone], store, "holdout").value == 50.0
    assert choose_block([*records, alone], store, "holdout") is None


def test_seeds_choose_for_themselves_and_are_averaged(store):
    good, bad = hits(1, 1, 1, 1, 1, 0), hits(0, 0, 0, 0, 0, 0)
    records = [
        save(store, "a", layer, values, seed=seed)
        for seed, blocks in enumerate(((good, bad), (bad, hits(1, 1, 1, 1, 1, 1))))
        for layer, values in enumerate(blocks)
    ]

    chosen = chosen_block(records, store, "holdout")
    oracle = chosen_block(records, store, "oracle")

    assert chosen.value == pytest.approx((500 / 6 + 100) / 2)
    assert chosen.layers == (0, 1)
    # One block for all seeds: of their means, 41.7 and 50.
    assert (oracle.value, oracle.layers) == (50.0, (1,))
    text = render_tables([encoder_table(records, store, "holdout")], "text")
    assert "91.7 @0,1" in text
    assert "each seed chooses its own block" in text
    # A mean needs the choices of all seeds.
    records += [save(store, "a", layer, good, seed=2, keep=False) for layer in (0, 1)]
    assert choose_block(records, store, "holdout") is None


def test_ties_as_printed_share_their_rank(store):
    records = [
        save(store, "a", 5, hits(1, 1, 0, 0)),
        save(store, "d", 5, hits(1, 0, 0, 0)),
        save(store, "e", 5, hits(1, 1, 0, 0)),
        save(store, "a", 5, hits(0, 0, 0, 1), dataset="voc2012"),
        save(store, "d", 5, hits(0, 1, 1, 1), dataset="voc2012"),
    ]

    table = encoder_table(records, store, "holdout")

    assert cells(table) == [
        ["encoder", "toy", "voc2012"],
        ["other", "**50.0**", ""],
        ["skip", "**50.0**", "25.0"],
        ["skipless", "25.0", "**75.0**"],
    ]
    text = render_tables([table], "text")
    assert text.startswith("encoders (%): tokencut, corloc, block 5\n")
    assert "voc2012: tokencut, corloc, val, key, protocol reference, 4 images" in text


def test_many_columns_stand_in_blocks_that_a_screen_holds(store, printed):
    names = [f"a_dataset_with_a_name_{number}" for number in range(12)]
    for sha in "ad":
        for name in names:
            save(store, sha, 3, hits(1, 0), dataset=name)

    table = printed(*PIVOT).out.partition("marked:")[0]

    lines = [line for line in table.splitlines() if not line.startswith("a_dataset")][:-1]
    assert max(map(len, lines)) <= 100
    heads = [line.split() for line in lines if line.startswith("encoder ")]
    assert [name for head in heads for name in head[1:]] == sorted(names)
    assert sum(line.startswith("skipless ") for line in lines) == len(heads) > 1


def test_a_cell_without_values_of_images_is_marked(store):
    for layer in (0, 1):
        save(store, "a", layer, hits(1, 0, layer), keep=False)
        save(store, "d", layer, hits(1, 0, 0))

    held_out, oracle = (
        encoder_table(store.records(), store, choice) for choice in ("holdout", "oracle")
    )

    assert [row[1] for row in cells(held_out)] == ["toy", "‡", "33.3 @0"]
    text = render_tables([held_out], "text")
    assert "\n‡: " in text
    assert "ORACLE" not in text
    assert [row[1] for row in cells(oracle)] == ["toy", "**66.7 @1**", "33.3 @0"]
    text = render_tables([oracle], "text")
    assert "oracle choice of the block" in text.splitlines()[0]
    assert "ORACLE" in text
    other = save(store, "e", 1, hits(1, 0, 0))
    several = encoder_table([*store.records(), other], store, "holdout")
    assert "not every encoder was probed at the same blocks" in render_tables([several], "text")


@pytest.mark.parametrize(
    ("metric", "unit", "title"),
    [
        ("condition_number", "", "encoders: tokencut, condition_number, block 1"),
        ("explained_variance", "%", "encoders (%): tokencut, explained_variance, block 1"),
    ],
)
def test_no_block_and_no_encoder_is_best_when_higher_is_not_better(store, metric, unit, title):
    for layer in (0, 1):
        for sha in "ad":
            save(store, sha, layer, hits(1, 0, layer and sha == "a"), metric=metric, unit=unit)
    records = store.records()

    several = encoder_table(records, store, "oracle")
    alone = encoder_table([record for record in records if record.layer == 1], store, "oracle")

    assert [row[1] for row in cells(several)][1:] == ["‡", "‡"]
    assert "--best-layer oracle" not in render_tables([several], "text")
    assert f"\n‡ of {metric}: " in render_tables([several], "text")
    assert [row[1] for row in cells(alone)][1:] == ["66.7", "33.3"]
    assert render_tables([alone], "text").startswith(title)
    mixed = encoder_table([*records, RECORD], store, "oracle")
    assert mixed.title.split(":")[0] == title.split(":")[0]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ([{}, {"facet": "token"}], ["toy, key", "toy, token"]),
        ([{}, {"protocol": "lost"}, {"dataset": "voc"}], ["toy, reference", "toy, lost", "voc"]),
        (
            [
                {},
                {"task": "segmentation", "metric": "miou"},
                {"task": "retrieval", "metric": "miou"},
            ],
            ["toy, corloc", "toy, miou, segmentation", "toy, miou, retrieval"],
        ),
        (
            [{}, {"settings": {"tau": 0.3}, "changed": {"tau": 0.3}}],
            ["toy, reference", "toy, reference, tau=0.3"],
        ),
        ([{}, {"split": "train"}], ["toy, val", "toy, train"]),
    ],
)
def test_columns_are_named_by_what_tells_them_apart(changes, names):
    assert column_names([replace(RECORD, **change) for change in changes]) == names


def test_seeds_at_other_blocks_are_not_pooled(store, printed):
    for seed, layer in ((0, 2), (1, 3), (2, 2)):
        save(store, "a", layer, hits(1, 0, layer == 3), seed=seed)
        save(store, "d", 2, hits(0, 0, 0), seed=seed)
    save(store, "d", 3, hits(1, 1, 1), seed=1)

    out = printed(*PIVOT).out

    # The first encoder has seeds 0 and 2 at block 2; the second has seed 1 and two blocks.
    assert "33.3 (2 seeds) @2" in out
    assert "(1 seed) @3" in out
    assert "seed 0, 1, 2 is left out" in out
    assert "33.3 (2 seeds) @2" in printed(*PIVOT, "--best-layer", "oracle").out


def test_the_main_metric_of_each_task_is_a_column(store, printed):
    for metric in ("top1_k10", "top1_k20", "top5_k20"):
        save(store, "a", 0, hits(1, 0, 0), task="knn", metric=metric)
    for metric in ("corloc", "degenerate"):
        save(store, "a", 0, hits(1, 0, 0), metric=metric)

    def head(*words):
        lines = printed(*PIVOT, *words).out.splitlines()
        return next(line for line in lines if line.startswith("encoder ")).split()

    assert head() == ["encoder", "toy,", "top1_k20", "toy,", "corloc"]
    assert "degenerate, top1_k10, top5_k20" in printed(*PIVOT).err
    assert "top1_k10" in head("--task", "knn")
    # A single column is described in the title.
    title = "encoders (%): tokencut, degenerate, block 0\n"
    assert printed(*PIVOT, "--metric", "degenerate").out.startswith(title)
    assert len(printed(*PIVOT, "--format", "csv").out.splitlines()) == 6


def test_the_block_is_chosen_among_the_requested_ones(store, printed, as_json):
    for layer in (0, 1, 11):
        save(store, "a", layer, hits(layer == 0, 0, layer == 11))

    def blocks(*flags):
        out = printed(*PIVOT, "--format", "csv", *flags).out
        (row,) = csv.DictReader(io.StringIO(out))
        return row["blocks"], row["layer_selection"]

    assert blocks("--layer", "-1") == ("11", "block")
    assert blocks("--layer", "1,-1", "--best-layer", "oracle") == ("11", "oracle")
    assert blocks("--best-layer", "oracle") == ("0", "oracle")
    (cell,) = as_json(*PIVOT, "--best-layer", "oracle")[0]["cells"]
    assert (cell["blocks"], cell["blocks_offered"], cell["encoder"]) == ([0], [0, 1, 11], "skip")
    assert cell["value"] == pytest.approx(100 / 3)
    assert cell["checkpoint_sha256"] == "a" * 64
    assert "0, 1, 11" in printed(*PIVOT, "--layer", "7", code=3).err
    assert "`--layer 0-3`" in printed(*PIVOT, "--layer", "last", code=2).err
