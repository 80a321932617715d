"""`ssl-bench quickstart`, with fewer steps and images than users have."""

import pytest

from ssl_bench.cli import quickstart
from ssl_bench.cli.__main__ import main
from ssl_bench.composition.choices import choices
from tests.support.faults import fits, unchecked_types

pytestmark = pytest.mark.slow


@pytest.fixture
def small(monkeypatch):
    few = [o for o in quickstart.PRETRAINING if not o.startswith(("train.", "model.image"))]
    short = ["train.batch_size=4", "train.max_steps=1", "model.image_size=32", "model.depth=4"]
    monkeypatch.setattr(quickstart, "PRETRAINING", (*few, *short))
    swapped = {"16": "8", "200": "60", "probe.image_size=128": "probe.image_size=32"}
    fewer = [tuple(swapped.get(word, word) for word in words) for words in quickstart.PROBES]
    monkeypatch.setattr(quickstart, "PROBES", [(*words, "--layer", "3") for words in fewer])


def test_it_ends_with_a_row_for_every_probe_and_a_report(small, tmp_path, capsys):
    words = ["quickstart", "--out", str(tmp_path / "out")]
    datasets = ("toy", "toy_objects")
    scored = sorted(
        task for task in choices("probe") if any(fits(task, dataset) for dataset in datasets)
    )
    capsys.readouterr()

    with unchecked_types():
        assert main(words) == 0

    said = capsys.readouterr()
    rows = [line.split() for line in said.out.strip().splitlines()]
    assert rows[0][:3] == ["task", "metric", "encoder"]
    # Each task runs once for each demo encoder and once for the trained encoder.
    assert sorted({row[0] for row in rows[1:]}) == scored
    assert len(rows) == 1 + (1 + len(quickstart.DEMOS)) * len(scored)
    assert all("block" not in row for row in rows[1:])
    index = tmp_path / "out" / "results" / "report" / "index.html"
    assert f"  {index}\n" in said.err
    assert index.is_file()
    assert (tmp_path / "out" / "results" / "curves.png").is_file()
    # Progress lines are not counted, because a busy machine prints more of them.
    assert len([line for line in said.err.splitlines() if not line.endswith(" left")]) < 100

    with unchecked_types():
        assert main(words) == 0
    again = capsys.readouterr()
    assert again.out == said.out
    assert again.err.count("already pretrained") == 1
