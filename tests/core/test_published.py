"""Test the scores that were copied from published papers."""

import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ssl_bench.composition.choices import experiments, papers
from ssl_bench.errors import ConfigurationError
from ssl_bench.tables.published import (
    PublishedTable,
    describe_experiments,
    find_published_values,
    load_published_table,
    load_published_tables,
)
from tests.core.test_results import RECORD

CUT = replace(RECORD, dataset="voc2012", split="trainval", num_images=62)
HEADS = replace(CUT, task="segmentation", metric="miou_holdout", facet="token", protocol="fast")


# The sum of each column in its paper, computed by hand.
SUMS = {
    "table1": [457.7], "table2": [353.0, 150.2, 133.3, 377.6, 161.5, 153.9],
    "table3": [318.0, 136.0, 129.3], "table4": [211.9, 139.0], "figure3": [320.5, 224.5],
    "one_skip": [0.0, 24.0], "tiny_imagenet": [264.0, 407.0], "imagenet1k": [817.0, 956.7],
    "graying_exponent": [892.9, 68.48, 68.73], "training_time": [6.007], "mae": [166.2, 193.0],
    "cifar10": [1763.16], "mimetic_datasets": [96.11, 128.27, 193.19],
    "mimetic_language": [2.443, 167.18, 57.08], "other_initialisations": [442.75],
    "position_scale": [0.0, 0.5], "mimetic_mlp": [0.0], "mimetic_mlp_imagenet": [137.2],
    "mnist": [465.5], "tokencut": [68.8, 72.1, 58.8],
}  # fmt: skip


def test_columns_have_the_same_sums_as_in_the_papers():
    for table, sums in SUMS.items():
        found = load_published_table(table)
        for column, expected in zip(found.columns, sums, strict=True):
            total = sum(v for (_, name), v in found.values.items() if name == column.name)
            assert total == pytest.approx(expected), (table, column.name)
    # Another test compares the cells with the texts of the papers if these are available.
    assert sum(len(table.values) for table in load_published_tables()) == 851


def test_training_accuracies_are_compared_with_runs_and_not_with_probes():
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
    [("tabel2", "--paper table2"), ("figure1", "--paper orth"), ("x", "always_skip_attention/")],
)
def test_errors_for_unknown_or_ambiguous_tables_name_known_ones(name, hint):
    with pytest.raises(ConfigurationError, match=hint):
        load_published_table(name)
    long = load_published_table("cutting_the_skip/figure3")
    assert long is load_published_table("figure3")


def test_records_are_compared_within_the_same_metric_and_dataset():
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


def test_published_values_have_the_settings_of_paper_and_record():
    run = replace(CUT, task="supervised", dataset="mnist", metric="top1", facet="head")
    trained = replace(run, details={"training": "10 epochs, batch 128"})
    heads = replace(HEADS, settings={"image_size": 256, "epochs": 10})

    (published, here), (_, trained_here) = (
        find_published_values(record)[0].experiment_notes.split(". Here: ")
        for record in (heads, trained)
    )

    for setting in ("300 epochs", "1,449 images", "Not stated: patch size"):
        assert setting in published
    for setting in ("62 images of voc2012 trainval", "protocol fast", "256 px", "10 epochs"):
        assert setting in here
    assert "10 epochs, batch 128" in trained_here
    table = load_published_table("one_skip")
    sentence = describe_experiments(table, table.columns[0], replace(run, dataset="cifar10"))
    assert "the text at hand has lost the numbers" in sentence
    table = load_published_table("graying_exponent")
    counts = [
        re.findall("([0-9,]+) images if", describe_experiments(table, column, run))
        for column in table.columns
    ]
    assert counts == [["50,000"], [], []]


TEXTS = {
    "always_skip_attention": "always_skip_attention.txt",
    "cutting_the_skip": "cutting_the_skip.txt",
    "mimetic_initialization": "mimetic_initialization_thesis.txt",
    "orthogonal_self_attention": "orthogonal_self_attention.txt",
}


@pytest.fixture(scope="module")
def texts() -> Path:
    beside = Path(__file__).parents[3] / "shared" / "paper"
    folder = Path(os.environ.get("SSL_BENCH_TEST_PAPERS", beside))
    if not folder.is_dir():
        pytest.skip(f"no texts of papers in {folder}; set SSL_BENCH_TEST_PAPERS")
    return folder


def count_numbers(table: PublishedTable, text: str) -> Counter[float]:
    blocks = [block.splitlines() for block in re.split(r"\n\s*\n", text)]
    kind, _, number = table.where.partition(" ")
    caption = re.compile(rf"\W*{kind}\s*{re.escape(number)}\s*:", re.IGNORECASE)
    found = [i for i, lines in enumerate(blocks) if any(map(caption.match, lines))]
    near = [line for i in found for block in blocks[max(0, i - 1) : i + 2] for line in block]
    return numbers("\n".join(near) or text)


def numbers(text: str) -> Counter[float]:
    return Counter(float(word) for word in re.findall(r"(?<![\d.])\d+(?:\.\d+)?(?![\d.]*\d)", text))


@pytest.mark.parametrize(
    "table",
    [table for table in load_published_tables() if table.paper in TEXTS],
    ids=lambda table: f"{table.paper}:{table.name}",
)
def test_every_value_occurs_in_the_text_of_its_paper(texts, table):
    in_paper = count_numbers(table, (texts / TEXTS[table.paper]).read_text())

    assert not Counter(table.values.values()) - in_paper


@pytest.mark.parametrize("number", range(9, 14))
def test_every_spread_follows_its_value_in_the_text(texts, number):
    (table,) = [table for table in load_published_tables() if table.where == f"table B.{number}"]
    text = (texts / TEXTS[table.paper]).read_text()
    (rows,) = re.findall(rf"^Table B.{number}: .*?\n\n(.*?)(?:\n\n|\Z)", text, re.DOTALL | re.M)

    printed = re.findall(r"(\d+\.\d+)(?:</b>)? ± (\.\d+)", rows)

    assert table.values.keys() == table.spreads.keys()
    assert [(float(value), float(spread)) for value, spread in printed] == [
        (table.values[cell], table.spreads[cell]) for cell in table.values
    ]


def write_papers(folder: Path, **files: str) -> Path:
    (folder / "papers").mkdir(parents=True)
    for name, runs in files.items():
        text = f"title: T\nreference: R\nruns:\n{runs}"
        (folder / f"papers/{name}.yaml").write_text(text)
    return folder


def test_longer_experiment_names_extend_the_settings_of_shorter_ones(tmp_path):
    stem = "  a:\n    images: mnist\n    set: {model: x, model.depth: 3}\n"
    arms = "    arms:\n      b: {model: y, train.epochs: 4}\n"

    runs = experiments(write_papers(tmp_path, p=stem + arms))

    assert list(runs) == ["a", "a_b"]
    assert runs["a"].changes == {"model": "x", "model.depth": 3}
    assert runs["a_b"].changes == {"model": "y", "model.depth": 3, "train.epochs": 4}
    assert runs["a_b"].to_config() == {
        "defaults": ["a", {"override /model": "y"}],
        "model": {"depth": 3},
        "train": {"epochs": 4},
    }


def test_two_runs_of_one_name_and_unknown_keys_are_refused(tmp_path):
    run = "  a:\n    images: mnist\n"
    with pytest.raises(ConfigurationError, match="have the name a"):
        papers(write_papers(tmp_path / "two", p=run, q=run))
    with pytest.raises(ConfigurationError, match=r"run a has the unknown keys hours"):
        papers(write_papers(tmp_path / "unknown", p=f"{run}    hours: 3\n"))
    for text in ("- a", "titel: T"):
        (tmp_path / "unknown/papers/p.yaml").write_text(text)
        with pytest.raises(ConfigurationError, match="reference, runs, tables, title"):
            papers(tmp_path / "unknown")
    (paper,) = papers(write_papers(tmp_path / "empty", p="tables:\n"))
    assert (paper.name, paper.title, paper.reference) == ("p", "T", "R")
    assert (paper.tables, paper.experiments) == ((), {})
    with pytest.raises(ConfigurationError, match=r"run name .* got A"):
        papers(write_papers(tmp_path / "name", p=run.replace("a:", "A:")))
