"""Every published value in the files of papers occurs in the text of its paper."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from ssl_bench.composition.choices import experiments, papers
from ssl_bench.errors import ConfigurationError
from ssl_bench.tables.published import PublishedTable, load_published_tables

TEXTS = {
    "always_skip_attention": "always_skip_attention.txt",
    "cutting_the_skip": "cutting_the_skip.txt",
    "mimetic_initialization": "mimetic_initialization_thesis.txt",
    "orthogonal_self_attention": "orthogonal_self_attention.txt",
}


@pytest.fixture(scope="module")
def texts() -> Path:
    """Return the folder of paper texts, outside of this project."""
    beside = Path(__file__).parents[3] / "shared" / "paper"
    folder = Path(os.environ.get("SSL_BENCH_TEST_PAPERS", beside))
    if not folder.is_dir():
        pytest.skip(f"no texts of papers in {folder}; set SSL_BENCH_TEST_PAPERS")
    return folder


def printed(table: PublishedTable, text: str) -> Counter[float]:
    """Count each number in the paragraphs directly before and after a table's caption.

    If the text has lost its captions, all of it is counted.
    """
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
def test_every_value_stands_in_the_text_of_its_paper_as_often_as_here(texts, table):
    there = printed(table, (texts / TEXTS[table.paper]).read_text())

    assert not Counter(table.values.values()) - there


@pytest.mark.parametrize("number", range(9, 14))
def test_every_spread_stands_behind_its_value(texts, number):
    (table,) = [table for table in load_published_tables() if table.where == f"table B.{number}"]
    text = (texts / TEXTS[table.paper]).read_text()
    (rows,) = re.findall(rf"^Table B.{number}: .*?\n\n(.*?)(?:\n\n|\Z)", text, re.DOTALL | re.M)

    printed = re.findall(r"(\d+\.\d+)(?:</b>)? ± (\.\d+)", rows)

    assert table.values.keys() == table.spreads.keys()
    assert [(float(value), float(spread)) for value, spread in printed] == [
        (table.values[cell], table.spreads[cell]) for cell in table.values
    ]


def written(folder: Path, **files: str) -> Path:
    (folder / "papers").mkdir(parents=True)
    for name, runs in files.items():
        text = f"title: T\nreference: R\nruns:\n{runs}"
        (folder / f"papers/{name}.yaml").write_text(text)
    return folder


def test_an_arm_has_the_settings_of_its_stem_and_its_own(tmp_path):
    stem = "  a:\n    images: mnist\n    set: {model: x, model.depth: 3}\n"
    arms = "    arms:\n      b: {model: y, train.epochs: 4}\n"

    runs = experiments(written(tmp_path, p=stem + arms))

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
        papers(written(tmp_path / "two", p=run, q=run))
    with pytest.raises(ConfigurationError, match=r"run a expects the keys .* got \['hours'\]"):
        papers(written(tmp_path / "unknown", p=f"{run}    hours: 3\n"))
