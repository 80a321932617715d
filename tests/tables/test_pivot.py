"""Test tables with one row per encoder and one column per dataset."""

import csv
import io
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from ssl_bench.results import Baseline
from ssl_bench.tables.encoders import column_names, encoder_table
from ssl_bench.tables.entries import ScoreEntry
from ssl_bench.tables.layer_selection import choice_notes, choose_block
from ssl_bench.tables.sheets import render_tables
from tests.core.test_results import RECORD

NAMES = {"a": "skip", "d": "skipless", "e": "other"}
PIVOT = ("table", "--pivot")
# Block 1 is better by one image. The fold that contains this image chooses block 0.
BLOCK0 = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0], bool)
BLOCK1 = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 0], bool)


def hits(*values):
    return np.array(values, bool)


def choose(records, store, choice) -> ScoreEntry:
    entry = choose_block(records, store, choice)
    assert entry is not None
    return entry


def save(store, sha, layer, values, *, has_hits: bool = True, **changes: Any):
    fields: dict[str, Any] = {"num_images": len(values), "value": 100 * values.mean(), "ci95": None}
    encoder = {"checkpoint_sha256": sha * 64, "model": NAMES[sha]}
    record = replace(RECORD, layer=layer, **encoder, **fields, **changes)
    store.save(record, values if has_hits else None)
    return record


def markdown_cells(table):
    lines = render_tables([table], "markdown").splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]


def test_oracles_take_the_best_block_and_folds_other_images(store):
    percents = (10.0, 40.0)
    records = [
        save(store, "a", layer, values, details={"degenerate_percent": percents[layer]})
        for layer, values in enumerate((BLOCK0, BLOCK1))
    ]

    oracle = choose(records, store, "oracle")
    held_out = choose(records, store, "holdout")

    assert (oracle.value, oracle.layers, oracle.candidate_layers) == (50.0, (1,), (0, 1))
    hit_count, chosen = 0, []
    for fold in np.array_split(np.random.default_rng(0).permutation(10), 5):
        others = np.setdiff1d(np.arange(10), fold)
        chosen += [int(BLOCK1[others].sum() > BLOCK0[others].sum())]
        hit_count += (BLOCK0, BLOCK1)[chosen[-1]][fold].sum()
    assert held_out.value == 10.0 * hit_count < oracle.value
    assert (held_out.layers, len(held_out.records)) == ((0, 1), 2)
    exact = binomtest(hit_count, 10).proportion_ci()
    assert (held_out.low, held_out.high) == pytest.approx((100 * exact.low, 100 * exact.high))
    # The percentages are weighted by the number of folds that choose a block.
    assert chosen.count(0) != chosen.count(1)
    assert held_out.degenerate_percent == pytest.approx(np.mean([percents[n] for n in chosen]))


def test_the_oracle_never_takes_an_undefined_value(store):
    records = [save(store, "a", layer, hits(layer > 1, 0), has_hits=False) for layer in (1, 2)]
    undefined = [replace(records[0], layer=layer, value=math.nan) for layer in (0, 3)]

    oracle = choose([*records, *undefined], store, "oracle")

    assert (oracle.value, oracle.layers, oracle.candidate_layers) == (50.0, (2,), (0, 1, 2, 3))


def test_the_set_of_blocks_that_most_seeds_have_is_offered(store):
    records = [save(store, "a", layer, hits(1, 1), seed=0) for layer in (0, 1)]
    records += [save(store, "a", n, hits(1, 0), seed=seed) for seed in (1, 2) for n in (2, 3)]

    for choice in ("holdout", "oracle"):
        chosen = choose(records, store, choice)
        assert (chosen.candidate_layers, chosen.omitted_seeds) == ((2, 3), (0,))
        assert (chosen.value, chosen.seeds) == (50.0, (1, 2))


def test_a_block_chosen_by_all_folds_keeps_its_interval(store):
    records = [save(store, "a", layer, hits(*[layer] * 6)) for layer in (0, 1)]
    records[1] = replace(records[1], ci95=(90.0, 100.0), details={"degenerate_percent": 4.0})

    chosen = choose(records, store, "holdout")

    assert (chosen.low, chosen.high, chosen.degenerate_percent) == (90.0, 100.0, 4.0)
    assert chosen.layers == (1,)
    # Only a mean IoU over several blocks gets a second note.
    miou = replace(chosen, records=(replace(records[1], metric="miou"),))
    assert len(choice_notes([miou], "holdout")) == 1
    # The hold-out choice needs per-image values only if there are several blocks.
    other = save(store, "a", 3, hits(1, 0), has_hits=False)
    assert choose([other], store, "holdout").value == 50.0
    assert choose_block([*records, other], store, "holdout") is None


def test_each_seed_chooses_its_block_and_the_values_are_averaged(store):
    good, bad = hits(1, 1, 1, 1, 1, 0), hits(0, 0, 0, 0, 0, 0)
    records = [
        save(store, "a", layer, values, seed=seed)
        for seed, blocks in enumerate(((good, bad), (bad, hits(1, 1, 1, 1, 1, 1))))
        for layer, values in enumerate(blocks)
    ]

    chosen = choose(records, store, "holdout")
    oracle = choose(records, store, "oracle")

    assert chosen.value == pytest.approx((500 / 6 + 100) / 2)
    assert chosen.layers == (0, 1)
    # The oracle takes the same block for all seeds. The means of the blocks are 41.7 and 50.
    assert (oracle.value, oracle.layers) == (50.0, (1,))
    text = render_tables([encoder_table(records, store, "holdout")], "text")
    assert "91.7 @0,1" in text
    assert "each seed chooses its own block" in text
    # Without per-image values of every seed, there is no mean.
    records += [save(store, "a", layer, good, seed=2, has_hits=False) for layer in (0, 1)]
    assert choose_block(records, store, "holdout") is None


def test_values_that_are_printed_equal_share_their_rank(store):
    toy = {"a": hits(1, 1, 0, 0), "d": hits(1, 0, 0, 0), "e": hits(1, 1, 0, 0)}
    voc = {"a": hits(0, 0, 0, 1), "d": hits(0, 1, 1, 1)}
    baseline = Baseline("centre box", 20.0).as_details()
    records = [save(store, sha, 5, values, details=baseline) for sha, values in toy.items()]
    records += [save(store, sha, 5, values, dataset="voc2012") for sha, values in voc.items()]

    table = encoder_table(records, store, "holdout")

    assert markdown_cells(table) == [
        ["encoder", "toy", "voc2012"],
        ["other", "**50.0**", ""],
        ["skip", "**50.0**", "25.0"],
        ["skipless", "25.0", "**75.0**"],
    ]
    text = render_tables([table], "text")
    assert text.startswith("encoders (%): tokencut, corloc, block 5\n")
    assert "voc2012: tokencut, corloc, val, key, protocol reference, 4 images" in text
    assert text.count("image-independent baseline") == 1
    assert "toy: image-independent baseline (centre box): 20.0" in text


def test_a_wide_table_is_split_into_parts_of_100_characters(store, cli):
    names = [f"a_dataset_with_a_name_{number}" for number in range(12)]
    for name in names:
        for sha in "ad":
            save(store, sha, 3, hits(1, 0), dataset=name)

    table = cli(*PIVOT).out.partition("marked:")[0]

    lines = [line for line in table.splitlines() if not line.startswith("a_dataset")][:-1]
    assert max(map(len, lines)) <= 100
    heads = [line.split() for line in lines if line.startswith("encoder ")]
    assert [name for head in heads for name in head[1:]] == sorted(names)
    assert sum(line.startswith("skipless ") for line in lines) == len(heads) > 1


def test_a_result_without_per_image_values_is_marked(store):
    for layer in (0, 1):
        save(store, "a", layer, hits(1, 0, layer), has_hits=False)
        save(store, "d", layer, hits(1, 0, 0))
    records = store.records()
    held_out, oracle = (encoder_table(records, store, choice) for choice in ("holdout", "oracle"))

    assert [row[1] for row in markdown_cells(held_out)] == ["toy", "‡", "33.3 @0"]
    text = render_tables([held_out], "text")
    assert "\n‡: " in text
    assert "ORACLE" not in text
    assert [(cell["encoder"], cell["value"]) for cell in held_out.as_json()["cells"]] == [
        ("skip", None),
        ("skipless", pytest.approx(100 / 3)),
    ]
    assert [row[1] for row in markdown_cells(oracle)] == ["toy", "**66.7 @1**", "33.3 @0"]
    text = render_tables([oracle], "text")
    assert "oracle choice of the block" in text.splitlines()[0]
    assert "ORACLE" in text
    other = save(store, "e", 1, hits(1, 0, 0))
    several = encoder_table([*records, other], store, "holdout")
    note = "not every encoder was probed at the same blocks"
    assert note in render_tables([several], "text")
    voc = save(store, "e", 2, hits(1, 0, 0), dataset="voc2012")
    assert note not in render_tables([encoder_table([other, voc], store, "holdout")], "text")


@pytest.mark.parametrize(
    ("metric", "unit", "title"),
    [
        ("condition_number", "", "encoders: tokencut, condition_number, block 1"),
        ("explained_variance", "%", "encoders (%): tokencut, explained_variance, block 1"),
    ],
)
def test_nothing_is_best_when_higher_is_not_better(store, metric, unit, title):
    for layer in (0, 1):
        for sha in "ad":
            save(store, sha, layer, hits(1, 0, layer and sha == "a"), metric=metric, unit=unit)
    records = store.records()

    several = encoder_table(records, store, "oracle")
    single = encoder_table([record for record in records if record.layer == 1], store, "oracle")

    assert [row[1] for row in markdown_cells(several)][1:] == ["‡", "‡"]
    assert "--best-layer oracle" not in render_tables([several], "text")
    assert f"\n‡ of {metric}: " in render_tables([several], "text")
    assert [row[1] for row in markdown_cells(single)][1:] == ["66.7", "33.3"]
    assert render_tables([single], "text").startswith(title)
    mixed = encoder_table([*records, RECORD], store, "oracle")
    assert mixed.title.split(":")[0] == title.split(":")[0]
    # The only chosen score has a single block, but no block was chosen for the others.
    assert (mixed.choice, single.choice) == ("oracle", "block")


COLUMNS = (
    ([{"facet": "token"}], ["toy, key", "toy, token"]),
    ([{"protocol": "lost"}, {"dataset": "voc"}], ["toy, reference", "toy, lost", "voc"]),
    (
        [{"task": task, "metric": "miou"} for task in ("segmentation", "retrieval")],
        ["toy, corloc", "toy, miou, segmentation", "toy, miou, retrieval"],
    ),
    (
        [{"settings": {"tau": 0.3}, "changed": {"tau": 0.3}}],
        ["toy, reference", "toy, reference, tau=0.3"],
    ),
    ([{"split": "train"}], ["toy, val", "toy, train"]),
    # The setting b only differs from that of a column of another name.
    (
        [{"dataset": "voc", "settings": {"a": a, "b": 0}} for a in (1, 2)],
        ["toy", "voc, a=1", "voc, a=2"],
    ),
)


@pytest.mark.parametrize(("changes", "names"), COLUMNS)
def test_columns_are_named_by_their_differences(changes, names):
    assert column_names([RECORD, *(replace(RECORD, **change) for change in changes)]) == names


def test_seeds_at_other_blocks_are_not_pooled(store, cli):
    for seed, layer in ((0, 2), (1, 3), (2, 2)):
        save(store, "a", layer, hits(1, 0, layer == 3), seed=seed)
        save(store, "d", 2, hits(0, 0, 0), seed=seed)
    save(store, "d", 3, hits(1, 1, 1), seed=1)

    out = cli(*PIVOT).out

    # Seeds 0 and 2 of the first encoder have block 2. Only seed 1 of the second has two blocks.
    assert "33.3 (2 seeds) @2" in out
    assert "(1 seed) @3" in out
    assert "seed 0, 1, 2 is left out" in out
    assert "33.3 (2 seeds) @2" in cli(*PIVOT, "--best-layer", "oracle").out


def test_the_main_metric_of_each_task_is_a_column(store, cli):
    for metric in ("top1_k10", "top1_k20", "top5_k20"):
        save(store, "a", 0, hits(1, 0, 0), task="knn", metric=metric)
    for metric in ("corloc", "degenerate"):
        save(store, "a", 0, hits(1, 0, 0), metric=metric)

    def head(*words):
        lines = cli(*PIVOT, *words).out.splitlines()
        return next(line for line in lines if line.startswith("encoder ")).split()

    assert head() == ["encoder", "toy,", "top1_k20", "toy,", "corloc"]
    assert "degenerate, top1_k10, top5_k20" in cli(*PIVOT).err
    assert "top1_k10" in head("--task", "knn")
    # The title describes a single column.
    title = "encoders (%): tokencut, degenerate, block 0\n"
    assert cli(*PIVOT, "--metric", "degenerate").out.startswith(title)
    assert len(cli(*PIVOT, "--format", "csv").out.splitlines()) == 6
    # A metric that is shown for one dataset is not among those that are left out.
    save(store, "a", 0, hits(1, 0, 0), task="knn", dataset="voc2012", metric="top1_k10")
    assert "not shown: degenerate, top5_k20." in cli(*PIVOT).err


def test_the_best_block_is_chosen_among_the_requested_blocks(store, cli, cli_json):
    for layer in (0, 1, 11):
        save(store, "a", layer, hits(layer == 0, 0, layer == 11))

    def blocks(*flags):
        (row,) = csv.DictReader(io.StringIO(cli(*PIVOT, "--format", "csv", *flags).out))
        return row["blocks"], row["layer_selection"]

    assert blocks("--layer", "-1") == ("11", "block")
    assert blocks("--layer", "1,-1", "--best-layer", "oracle") == ("11", "oracle")
    assert blocks("--best-layer", "oracle") == ("0", "oracle")
    (cell,) = cli_json(*PIVOT, "--best-layer", "oracle")[0]["cells"]
    assert (cell["blocks"], cell["blocks_offered"], cell["encoder"]) == ([0], [0, 1, 11], "skip")
    assert cell["value"] == pytest.approx(100 / 3)
    assert cell["checkpoint_sha256"] == "a" * 64
    assert "0, 1, 11" in cli(*PIVOT, "--layer", "7", code=3).err
    assert "`--layer 0-3`" in cli(*PIVOT, "--layer", "last", code=2).err
