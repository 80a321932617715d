"""Test the command `ssl-bench quickstart`."""

import re

import pytest

from ssl_bench.cli import quickstart
from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore
from tests.cli.test_sweep import planned
from tests.support.faults import unchecked_types
from tests.support.report_cells import build_record, skipless

SMALL_VALUES = {
    "--limit": "4",
    "probe.image_size": "32",
    "probe.num_images": "2",
    "probe.training.epochs": "2",
    "probe.view_images": "2",
}


def shrink(words: tuple[str, ...]) -> list[str]:
    short = [
        f"{key}={SMALL_VALUES.get(key, value)}" if value else key
        for key, _, value in (word.partition("=") for word in words)
    ]
    # The k-NN probe needs more images than it has neighbours.
    limit = "30" if "toy_objects" in short else SMALL_VALUES["--limit"]
    short[short.index("--limit") + 1] = limit
    return [*short, "--layer", "3"]


@pytest.mark.parametrize(
    ("existing", "flags", "trained", "probed"),
    [
        ("", [], [False], [False, False]),
        ("log.jsonl", [], [True], [False, False]),
        ("last.safetensors", [], [], [False, False]),
        ("last.safetensors", ["--overwrite"], [True], [True, True]),
    ],
)
def test_finished_runs_are_kept_and_interrupted_ones_start_again(
    tmp_path, monkeypatch, capsys, existing, flags, trained, probed
):
    commands, drawn = [], []
    run = tmp_path / quickstart.MODEL
    store = ResultStore(tmp_path / "results")
    other = {"settings": {"tau": 0.3}, "changed": {"tau": 0.3}}
    for record in (
        build_record(),
        build_record(layer=11, value=70.0),
        skipless(layer=4, value=20.0),
        build_record(metric="iou", layer=1),
        build_record(**other, layer=5),
    ):
        store.save(record)
    if existing:
        run.mkdir()
        (run / existing).touch()
    monkeypatch.setattr(quickstart, "run_command", commands.append)
    monkeypatch.setattr(quickstart, "draw_curves", lambda *args: drawn.append(args))

    assert main(["quickstart", "--out", str(tmp_path), *flags]) == 0

    def of(name: str) -> list[bool]:
        return ["--overwrite" in words for words in commands if words[0] == name]

    assert (of("pretrain"), of("probe")) == (trained, probed)
    assert commands[-1] == ("report", "--out", str(store.root), "--pair", *quickstart.DEMOS)
    for words in commands:
        folder = run if words[0] == "pretrain" else store.root
        assert words[words.index("--out") + 1] == str(folder)
        probes = [words[n + 1] for n, word in enumerate(words) if word == "--checkpoint"]
        assert probes == ([*quickstart.DEMOS, str(run)] if words[0] == "probe" else [])
    # Only the main scores are drawn.
    ((tables, path),) = drawn
    assert path == store.root / "curves.png"
    assert [(table.record.metric, table.rows) for table in tables] == [("corloc", (3, 4, 11))]
    # The table shows four blocks, from the first to the last.
    lines = capsys.readouterr().out.strip().splitlines()
    assert [re.split(" {2,}", line)[2:] for line in lines] == [
        ["encoder", "block 0", "block 4", "block 7", "block 11"],
        ["skip", "-", "-", "-", "70.0"],
        ["skipless", "-", "20.0", "-", "-"],
    ]


@pytest.mark.slow
def test_it_ends_with_one_row_per_probe_and_a_report(tmp_path, capsys, monkeypatch):
    few = [o for o in quickstart.PRETRAINING if not o.startswith(("train.", "model.image"))]
    short = ["train.batch_size=4", "train.max_steps=1", "model.image_size=32", "model.depth=4"]
    monkeypatch.setattr(quickstart, "PRETRAINING", (*few, *short))
    monkeypatch.setattr(quickstart, "PROBES", [*map(shrink, quickstart.PROBES)])
    words = ["quickstart", "--out", str(tmp_path / "out")]
    every = ["--task", "all", "--dataset", "toy,toy_objects", "--checkpoint", "demo:skip"]
    scored = sorted({job["task"] for job in planned(capsys, *every)["jobs"]})
    capsys.readouterr()

    with unchecked_types():
        assert main(words) == 0

    first = capsys.readouterr()
    rows = [line.split() for line in first.out.strip().splitlines()]
    assert rows[0][:3] == ["task", "metric", "encoder"]
    # Each task runs once for each demo encoder and once for the trained encoder.
    assert sorted({row[0] for row in rows[1:]}) == scored
    assert len(rows) == 1 + (1 + len(quickstart.DEMOS)) * len(scored)
    assert all("block" not in row for row in rows[1:])
    index = tmp_path / "out" / "results" / "report" / "index.html"
    assert f"  {index}\n" in first.err
    assert index.is_file()
    assert (tmp_path / "out" / "results" / "curves.png").is_file()
    # Progress lines are not counted, because a busy machine prints more of them.
    assert len([line for line in first.err.splitlines() if not line.endswith(" left")]) < 100

    monkeypatch.setattr(quickstart, "PROBES", [])
    monkeypatch.setattr(quickstart, "draw_curves", lambda *_: None)
    with unchecked_types():
        assert main(words) == 0
    again = capsys.readouterr()
    assert again.out == first.out
    assert again.err.count("already pretrained") == 1
