"""Published values: some are checked against the papers by hand; rules for comparable records."""

from dataclasses import replace

import pytest

from ssl_bench.errors import ConfigurationError
from ssl_bench.tables.published import (
    describe_experiments,
    find_published_values,
    load_published_table,
    load_published_tables,
)
from tests.core.test_results import RECORD

CUT = replace(RECORD, dataset="voc2012", split="trainval", num_images=62)
HEADS = replace(CUT, task="segmentation", metric="miou_holdout", facet="token", protocol="fast")


# Each column's sum in its paper, counted by hand.
SUMS = {
    "table1": [457.7],
    "table2": [353.0, 150.2, 133.3, 377.6, 161.5, 153.9],
    "table3": [318.0, 136.0, 129.3],
    "table4": [211.9, 139.0],
    "figure3": [320.5, 224.5],
    "one_skip": [0.0, 24.0],
    "tiny_imagenet": [264.0, 407.0],
    "imagenet1k": [817.0, 956.7],
    "graying_exponent": [892.9, 68.48, 68.73],
    "training_time": [6.007],
    "mae": [166.2, 193.0],
    "cifar10": [1763.16],
    "mimetic_datasets": [96.11, 128.27, 193.19],
    "mimetic_language": [2.443, 167.18, 57.08],
    "other_initialisations": [442.75],
    "position_scale": [0.0, 0.5],
    "mimetic_mlp": [0.0],
    "mimetic_mlp_imagenet": [137.2],
    "mnist": [465.5],
    "tokencut": [68.8, 72.1, 58.8],
}


def test_columns_have_the_sums_of_the_papers():
    for table, sums in SUMS.items():
        found = load_published_table(table)
        for column, expected in zip(found.columns, sums, strict=True):
            total = sum(v for (_, name), v in found.values.items() if name == column.name)
            assert total == pytest.approx(expected), (table, column.name)
    # Their hundreds of cells are compared with the texts, where these are available.
    assert sum(len(table.values) for table in load_published_tables()) == 851


def test_accuracies_of_training_are_those_of_a_run_and_never_of_a_probe():
    run = replace(CUT, task="supervised", dataset="mnist", metric="top1", facet="head")

    rows = {b.row for b in find_published_values(run)}

    assert rows == set(load_published_table("mnist").rows)
    for task, facet in (("classification", "head"), ("knn", "head"), ("supervised", "cls")):
        assert find_published_values(replace(run, task=task, facet=facet)) == ()
    assert find_published_values(replace(run, metric="top1_holdout")) == ()
    tables = {b.table for b in find_published_values(replace(run, dataset="cifar10"))}
    assert tables
    hidden = {table.name for table in load_published_tables() if not table.in_reports}
    assert hidden.isdisjoint(tables)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("tabel2", "--paper table2"), ("figure1", "--paper orth"), ("x", "always_skip_attention:")],
)
def test_an_unknown_or_ambiguous_name_is_answered_with_the_known_ones(name, hint):
    with pytest.raises(ConfigurationError, match=hint):
        load_published_table(name)
    long = load_published_table("cutting_the_skip:figure3")
    assert long is load_published_table("figure3")


def test_beside_a_record_stand_the_values_of_the_same_question_on_the_same_data():
    cut = {(b.table, b.column) for b in find_published_values(CUT)}
    part = {b.column for b in find_published_values(replace(CUT, dataset="coco20k-7"))}
    heads = {(b.table, b.column) for b in find_published_values(HEADS)}
    several = replace(HEADS, settings={**HEADS.settings, "layers_mode": "multi"})
    multi = {(b.table, b.column) for b in find_published_values(several)}

    assert cut == {("table4", "VOC2012"), ("figure3", "VOC2012"), ("tokencut", "VOC2012")}
    assert part == {"COCO20k"}
    assert heads == {("table2", "VOC2012, single")}
    assert multi == {("table2", "VOC2012, multi-scale"), ("table3", "VOC2012")}
    for change in (
        {"metric": "pixel_accuracy"},
        {"task": "retrieval"},
        {"dataset": "voc20"},
        {"dataset": "toy"},
        {"dataset": "voc2012+snow-3"},
        {"task": "knn", "metric": "top1_k20"},
    ):
        assert find_published_values(replace(HEADS, **change)) == ()


def test_published_values_come_with_the_settings_of_both_sides():
    run = replace(CUT, task="supervised", dataset="mnist", metric="top1", facet="head")
    trained = replace(run, details={"training": "10 epochs, batch 128"})
    heads = replace(HEADS, settings={"image_size": 256, "epochs": 10})

    (published, here), (_, trained_here) = (
        find_published_values(record)[0].differs.split(". Here: ") for record in (heads, trained)
    )

    for setting in ("300 epochs", "1,449 images", "Not stated: patch size"):
        assert setting in published
    for setting in ("62 images of voc2012 trainval", "protocol fast", "256 px", "10 epochs"):
        assert setting in here
    assert "10 epochs, batch 128" in trained_here
    table = load_published_table("one_skip")
    sentence = describe_experiments(table, table.columns[0], replace(run, dataset="cifar10"))
    assert "the text at hand has lost the numbers" in sentence
