"""Ours beside published values: never as equals, and with everything that differs."""

import csv
import io
import json
from typing import Any

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore
from ssl_bench.tables.paper import paper_table
from ssl_bench.tables.published import load_published_table
from ssl_bench.tables.sheets import render_tables
from tests.support.report_cells import known_as
from tests.tables.test_pivot import hits, save

VOC: dict[str, Any] = {"dataset": "voc2012", "split": "trainval"}


@pytest.fixture
def store(tmp_path):
    return ResultStore(tmp_path)


def laid(store, name="figure3", choice="holdout", **encoders):
    rows = {"skip": "skip, soap", "skipless": "skipless, soap"}
    known = {rows[row]: known_as(sha) for row, sha in encoders.items()}
    return paper_table(
        load_published_table(name), store.records(), store, encoders=known, choice=choice
    )


def test_rows_and_columns_are_the_published_ones_and_ours_stands_where_it_fits(store):
    save(store, "a", 11, hits(1, 0, 0, 0), **VOC)
    save(store, "d", 11, hits(1, 1, 0, 0), dataset="toy")

    lines = render_tables([laid(store, skip="a", skipless="d")], "text").splitlines()

    assert lines[0].startswith("published | ours with 95 % interval (images): TokenCut with DINO")
    assert lines[2].split() == ["encoder", "VOC2012", "COCO20k"]
    assert [line.strip() for line in lines[4:6]] == [
        "skip, adamw                             32.3 | -  21.2 | -",
        "skipless, adamw                         53.5 | -  36.5 | -",
    ]
    assert lines[7].split("  ")[0] == "skip, soap"
    assert "49.4 | 25.0 @11 (4)" in lines[7]
    assert "63.2 | -" in lines[8]
    assert "27.5 | -" in lines[7]


def test_the_notes_name_every_known_difference_and_what_is_missing(store):
    save(store, "a", 11, hits(1, 0, 0, 0), **VOC)
    save(store, "d", 11, hits(1, 0, 0, 0), **VOC)

    notes = laid(store, skip="a").notes

    assert notes[0].startswith("ours is not the published experiment in any cell")
    assert "DINO on ImageNet-1k for 300 epochs" in notes[1]
    assert "Not stated: patch size" in notes[1]
    assert notes[2] == (
        "VOC2012: published on 11,540 images if all were used. ours: 4 images of voc2012 trainval, "
        "protocol reference, key features"
    )
    assert notes[3] == "'skip, soap': skip, 12 blocks, sha256 aaaaaaaa"
    assert "no encoder for 'skip, adamw'" in notes[-2]
    assert notes[-2].endswith("Recorded encoders: skip, skipless")
    assert notes[-1].startswith("no record of these encoders for: COCO20k (`--task tokencut")


def test_what_papers_print_beside_values_or_leave_out_is_said(store):
    save(store, "a", 0, hits(1, 0))

    def notes(name):
        return laid(store, name).notes

    def rendered(name, style):
        return render_tables([laid(store, name)], style)

    # Perplexities are nothing that this suite measures; days stand in the log of a run.
    assert notes("mimetic_language")[-1].startswith("this suite has no probe for: Penn Treebank")
    assert "no encoder for" not in " ".join(notes("training_time"))
    assert "`ssl-bench reproduce`" in notes("training_time")[-1]
    assert notes("one_skip")[2].startswith("doubtful: the text at hand has lost the numbers")
    assert not [note for note in notes("mnist") if note.startswith("doubtful")]

    text = rendered("convmixer_cifar10", "text")
    assert "3 x 3, 20 epochs, uniform init" in text
    assert "89.69 ± 0.2 | -" in text
    first = next(csv.DictReader(io.StringIO(rendered("convmixer_cifar10", "csv"))))
    assert (first["published"], first["published_spread"]) == ("89.69", "0.2")
    assert "- | - 22.0 | -" in " ".join(rendered("one_skip", "text").split())
    assert json.loads(rendered("mnist", "json"))[0]["cells"][0]["published_spread"] is None


def test_an_accuracy_of_training_comes_from_the_run_itself(store):
    save(store, "a", 0, hits(1, 0), dataset="mnist", task="classification", metric="top1")

    def notes(sha):
        return laid_mnist(store, sha).notes

    assert "how an encoder was pretrained" in notes("a")[0]
    assert notes("a")[-1] == (
        "no record of these encoders for: accuracy (the head of a supervised run itself: "
        "`ssl-bench pretrain ... monitor.results=DIR`, images in a folder named mnist)"
    )

    fields: dict[str, Any] = {"task": "supervised", "metric": "top1", "facet": "head"}
    save(store, "d", 5, hits(1, 1, 1, 0), dataset="mnist", protocol="central_square", **fields)
    chosen = laid_mnist(store, "d").entries["ViT", "accuracy"]
    assert chosen is not None
    assert chosen.value == 75.0
    assert "how an encoder was pretrained" not in notes("d")[0]


def laid_mnist(store, sha):
    table, known = load_published_table("mnist"), {"ViT": known_as(sha)}
    return paper_table(table, store.records(), store, encoders=known, choice="holdout")


def test_of_several_series_the_nearest_to_the_paper_is_shown_and_the_others_are_named(store):
    fields: dict[str, Any] = {"task": "segmentation", "dataset": "voc2012", "facet": "token"}
    save(store, "a", 5, hits(1, 0, 0, 0), metric="miou_oracle", protocol="fast", **fields)
    save(
        store, "a", 5, hits(1, 1, 1, 0), metric="miou_oracle", protocol="cutting_the_skip", **fields
    )
    shorter = {"metric": "miou_oracle", "protocol": "cutting_the_skip", "changed": {"epochs": 2}}
    save(store, "a", 5, hits(0, 0, 0, 0), settings={"epochs": 2}, **shorter, **fields)
    save(store, "a", 5, hits(1, 1, 1, 1), metric="miou_holdout", protocol="ssl_bench", **fields)

    table = laid(store, "table2", skip="a")

    (chosen,) = table.entries.values()
    assert (chosen.value, chosen.records[0].protocol) == (75.0, "cutting_the_skip")
    assert table.notes[2].endswith(
        "also recorded: miou_oracle, token, protocol cutting_the_skip, epochs=2 | miou_oracle, "
        "token, protocol fast | miou_holdout, token, protocol ssl_bench"
    )
    # Multi-scale heads stand in the multi-scale columns alone.
    multi = {"metric": "miou_oracle", "settings": {"layers_mode": "multi"}}
    save(store, "d", 11, hits(1, 0), **multi, **fields)
    assert list(laid(store, "table2", skip="d").entries) == [("skip, soap", "VOC2012, multi-scale")]


def test_the_choice_of_the_block_is_named_as_what_it_is(store):
    for layer in (0, 1):
        save(store, "a", layer, hits(1, 0, layer), **VOC)
        save(store, "d", layer, hits(1, 0, layer), keep=False, **VOC)

    held_out = laid(store, skip="a", skipless="d")
    oracle = laid(store, choice="oracle", skip="a")

    assert held_out.undecided == {("skipless, soap", "VOC2012")}
    text = render_tables([held_out], "text")
    assert "63.2 | ‡" in text
    assert "‡: no block was chosen" in text
    assert "held-out choice" in text
    assert "ORACLE" in " ".join(oracle.notes)


def test_a_column_has_the_block_of_its_paper_unless_another_choice_is_asked_for(store):
    for layer in (0, 11):
        save(store, "a", layer, hits(1, 1, 1, 1 - layer // 11), **VOC)
    metric = {"task": "conditioning", "metric": "mean_log_condition_number", "facet": "before"}
    for layer in range(2):
        fields: dict[str, Any] = {**metric, "unit": "", "dataset": "folder", "depth": 2}
        save(store, "d", layer, hits(1, layer), keep=False, **fields)

    def chosen(sha, name, row, column, choice=None):
        records, table, known = store.records(), load_published_table(name), {row: known_as(sha)}
        found = paper_table(table, records, store, encoders=known, choice=choice)
        one = found.entries[row, column]
        assert one is not None
        return one

    # Figure 3 shows the best block on the scored images, TokenCut's own table the last one.
    best = chosen("a", "figure3", "skip, soap", "VOC2012")
    assert (best.layers, best.value) == ((0,), 100.0)
    own = chosen("a", "tokencut", "ViT-S/16, DINO", "VOC2012", "oracle")
    assert (own.layers, own.value) == ((11,), 75.0)
    # Its number of a block is the mean over all blocks up to it, whatever is asked for.
    for choice in (None, "holdout", "oracle"):
        cell = ("graying_exponent", "no token graying", "condition number before")
        last = chosen("d", *cell, choice)
        assert (last.layers, last.value) == ((1,), 100.0)
    choices = laid(store, choice=None, skip="a").as_json()["layer_selection"]
    assert (choices, laid(store, skip="a").as_json()["layer_selection"]) == ("oracle", "holdout")


def test_csv_and_json_hold_every_published_cell(store):
    save(store, "a", 11, hits(1, 0, 0, 0), **VOC)
    table = laid(store, skip="a")

    rows = list(csv.DictReader(io.StringIO(render_tables([table], "csv"))))
    (whole,) = json.loads(render_tables([table], "json"))

    assert len(rows) == len(whole["cells"]) == 12
    (ours,) = [row for row in rows if row["value"]]
    assert (ours["row"], ours["column"]) == ("skip, soap", "VOC2012")
    assert (ours["published"], ours["value"]) == ("49.4", "25.0")
    (cell,) = [cell for cell in whole["cells"] if cell["ours"]]
    assert cell["published"] == 49.4
    assert cell["ours"]["records"][0]["num_images"] == 4
    assert whole["notes"] == list(table.notes)


def test_the_command_maps_rows_to_checkpoints(store, capsys):
    save(store, "a", 11, hits(1, 0, 0, 0), **VOC)
    command = ["table", "--out", str(store.root), "--paper", "cutting_the_skip:figure3"]

    assert main([*command, "--as", "skip, soap=aaaa", "--format", "markdown"]) == 0
    assert r"| skip, soap | 49.4 \| 25.0 @11 (4) | 27.5 \| - |" in capsys.readouterr().out
    assert main([*command, "--as", "skp, soap=skip"]) == 2
    assert "--as 'skip, soap=CHECKPOINT'" in capsys.readouterr().err
    assert main([*command, "--as", "skip, soap"]) == 2
    assert "--as ROW=CHECKPOINT" in capsys.readouterr().err
    assert main([*command, "--as", "skip, soap=skip", "--as", "skip, soap=aaaa"]) == 2
    assert "got several" in capsys.readouterr().err
    assert main([*command, "--as", "skip, soap=nobody"]) == 3
