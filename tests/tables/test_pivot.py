"""Encoders against datasets; choices of the block counted by hand."""

import csv
import io
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore
from ssl_bench.tables.encoders import column_names, encoder_table
from ssl_bench.tables.entries import Entry
from ssl_bench.tables.layer_selection import choose_block
from ssl_bench.tables.sheets import render_tables
from tests.core.test_results import RECORD

NAMES = {"a": "skip", "d": "skipless", "e": "other"}


def hits(*values):
    return np.array(values, bool)


def chosen_block(records, store, choice) -> Entry:
    found = choose_block(records, store, choice)
    assert found is not None
    return found


def save(store, sha, layer, values, *, keep: bool = True, **changes: Any):
    """A record whose value is the share of the hits, and the hits beside it."""
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


def cells(table, style="markdown"):
    lines = [line for line in render_tables([table], style).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture
def store(tmp_path):
    return ResultStore(tmp_path)


def test_the_oracle_takes_the_best_block_and_the_held_out_choice_one_that_others_choose(store):
    # Ten images: block 1 wins by one image, and the fold that holds this image chooses block 0.
    one, two = hits(1, 1, 1, 1, 0, 0, 0, 0, 0, 0), hits(0, 0, 0, 0, 1, 1, 1, 1, 1, 0)
    records = [save(store, "a", 0, one), save(store, "a", 1, two)]

    oracle = chosen_block(records, store, "oracle")
    held_out = chosen_block(records, store, "holdout")

    assert (oracle.value, oracle.layers, oracle.offered_layers) == (50.0, (1,), (0, 1))
    folds = np.array_split(np.random.default_rng(0).permutation(10), 5)
    expected = 0
    for fold in folds:
        others = np.setdiff1d(np.arange(10), fold)
        chosen = two if two[others].sum() > one[others].sum() else one
        expected += chosen[fold].sum()
    assert held_out.value == 10.0 * expected
    assert held_out.layers == (0, 1)
    assert held_out.value < oracle.value
    exact = binomtest(expected, 10).proportion_ci()
    assert held_out.low == pytest.approx(100 * exact.low)
    assert held_out.high == pytest.approx(100 * exact.high)
    assert len(held_out.records) == 2


def test_the_oracle_never_takes_a_block_without_a_number(store):
    records = [save(store, "a", layer, hits(layer, 0), keep=False) for layer in (0, 1)]
    records += [replace(records[0], layer=2, value=math.nan)]

    oracle = chosen_block(records, store, "oracle")

    assert (oracle.value, oracle.layers, oracle.offered_layers) == (50.0, (1,), (0, 1, 2))


def test_a_block_counts_for_the_degenerate_images_as_often_as_folds_choose_it(store):
    # Folds choose both blocks, as in the test of the oracle.
    one, two = hits(1, 1, 1, 1, 0, 0, 0, 0, 0, 0), hits(0, 0, 0, 0, 1, 1, 1, 1, 1, 0)
    shares = (10.0, 40.0)
    records = [
        save(store, "a", layer, values, details={"degenerate_percent": shares[layer]})
        for layer, values in enumerate((one, two))
    ]
    folds = np.array_split(np.random.default_rng(0).permutation(10), 5)
    others = [np.setdiff1d(np.arange(10), fold) for fold in folds]
    expected = [shares[int(two[those].sum() > one[those].sum())] for those in others]

    chosen = chosen_block(records, store, "holdout")

    assert expected.count(10.0) != expected.count(40.0)
    assert chosen.degenerate_percent == pytest.approx(np.mean(expected))


def test_of_blocks_that_seeds_have_the_set_of_most_seeds_is_offered(store):
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
        save(store, "a", 0, good, seed=0),
        save(store, "a", 1, bad, seed=0),
        save(store, "a", 0, bad, seed=1),
        save(store, "a", 1, hits(1, 1, 1, 1, 1, 1), seed=1),
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


def test_rows_are_encoders_columns_datasets_and_ties_as_printed_share_their_rank(store):
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


def test_many_columns_stand_in_blocks_that_a_screen_holds(store, capsys):
    names = [f"a_dataset_with_a_name_{number}" for number in range(12)]
    for sha in "ad":
        for name in names:
            save(store, sha, 3, hits(1, 0), dataset=name)

    assert main(["table", "--out", str(store.root), "--pivot"]) == 0

    table = capsys.readouterr().out.partition("marked:")[0]
    lines = [line for line in table.splitlines() if not line.startswith("a_dataset")][:-1]
    assert max(map(len, lines)) <= 100
    heads = [line.split() for line in lines if line.startswith("encoder ")]
    assert [name for head in heads for name in head[1:]] == sorted(names)
    assert sum(line.startswith("skipless ") for line in lines) == len(heads) > 1


def test_a_cell_without_values_of_images_says_so_and_the_oracle_is_called_one(store):
    for layer in (0, 1):
        save(store, "a", layer, hits(1, 0, layer), keep=False)
        save(store, "d", layer, hits(1, 0, 0))
    held_out = encoder_table(store.records(), store, "holdout")
    oracle = encoder_table(store.records(), store, "oracle")

    assert [row[1] for row in cells(held_out)] == ["toy", "‡", "33.3 @0"]
    assert "\n‡: " in render_tables([held_out], "text")
    assert [row[1] for row in cells(oracle)] == ["toy", "**66.7 @1**", "33.3 @0"]
    other = save(store, "e", 1, hits(1, 0, 0))
    several = encoder_table([*store.records(), other], store, "holdout")
    assert "not every encoder was probed at the same blocks" in render_tables([several], "text")
    text = render_tables([oracle], "text")
    assert "oracle choice of the block" in text.splitlines()[0]
    assert "ORACLE, the best block on the scored images" in text
    assert "ORACLE" not in render_tables([held_out], "text")


@pytest.mark.parametrize(
    ("metric", "unit", "title"),
    [
        ("condition_number", "", "encoders: tokencut, condition_number, block 1"),
        ("explained_variance", "%", "encoders (%): tokencut, explained_variance, block 1"),
    ],
)
def test_where_more_is_not_better_no_block_and_no_encoder_is_best(store, metric, unit, title):
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


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ([{}], ["toy"]),
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


def test_seeds_at_other_blocks_are_not_pooled(store, capsys):
    for seed, layer in ((0, 2), (1, 3), (2, 2)):
        save(store, "a", layer, hits(1, 0, layer == 3), seed=seed)
        save(store, "d", 2, hits(0, 0, 0), seed=seed)
    save(store, "d", 3, hits(1, 1, 1), seed=1)
    command = ["table", "--out", str(store.root), "--pivot"]

    assert main(command) == 0
    out = capsys.readouterr().out
    # Of the first seeds 0 and 2, both at block 2; of the second seed 1, which has two blocks.
    assert "33.3 (2 seeds) @2" in out
    assert "(1 seed) @3" in out
    assert "seed 0, 1, 2 is left out" in out
    assert main([*command, "--best-layer", "oracle"]) == 0
    assert "33.3 (2 seeds) @2" in capsys.readouterr().out


def test_of_one_encoder_nothing_is_marked_and_no_other_is_spoken_of(store, capsys):
    for layer in (0, 1):
        save(store, "a", layer, hits(layer, layer, layer))
    save(store, "a", 0, hits(1, 0, 0), dataset="voc2012")

    assert main(["table", "--out", str(store.root), "--pivot"]) == 0

    out = capsys.readouterr().out
    assert "100.0 @1" in out
    assert "*" not in out
    assert not any(word in out for word in ("marked:", "every encoder", "seed chooses"))


def test_of_several_tasks_the_headline_of_each_is_a_column(store, capsys):
    for metric in ("top1_k10", "top1_k20", "top5_k20"):
        save(store, "a", 0, hits(1, 0, 0), task="knn", metric=metric)
    for metric in ("corloc", "degenerate"):
        save(store, "a", 0, hits(1, 0, 0), metric=metric)
    command = ["table", "--out", str(store.root), "--pivot"]

    def columns(*words):
        assert main([*command, *words]) == 0
        out, said = capsys.readouterr()
        return next(line for line in out.splitlines() if line.startswith("encoder ")), said

    heads, said = columns()
    assert heads.split() == ["encoder", "toy,", "top1_k20", "toy,", "corloc"]
    assert "degenerate, top1_k10, top5_k20" in said
    assert "top1_k10" in columns("--task", "knn")[0]
    # Of one column it stands above.
    assert main([*command, "--metric", "degenerate"]) == 0
    assert capsys.readouterr().out.startswith("encoders (%): tokencut, degenerate, block 0\n")
    assert main([*command, "--format", "csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_the_command_chooses_among_the_asked_blocks(store, capsys):
    for layer in (0, 1, 11):
        save(store, "a", layer, hits(layer == 0, 0, layer == 11))
    command = ["table", "--out", str(store.root), "--pivot", "--format", "csv"]

    def blocks(*flags):
        assert main([*command, *flags]) == 0
        (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
        return row["blocks"], row["layer_selection"]

    assert blocks("--layer", "-1") == ("11", "block")
    assert blocks("--layer", "1,-1", "--best-layer", "oracle") == ("11", "oracle")
    assert blocks("--best-layer", "oracle") == ("0", "oracle")
    assert main([*command[:-1], "json", "--best-layer", "oracle"]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    (cell,) = table["cells"]
    assert (cell["blocks"], cell["blocks_offered"], cell["encoder"]) == ([0], [0, 1, 11], "skip")
    assert cell["value"] == pytest.approx(100 / 3)
    assert cell["checkpoint_sha256"] == "a" * 64
    assert main([*command, "--layer", "7"]) == 3
    assert "0, 1, 11" in capsys.readouterr().err
    assert main([*command, "--layer", "last"]) == 2
    said = capsys.readouterr().err
    assert "`--layer 0-3`" in said
