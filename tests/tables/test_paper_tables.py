"""Test tables that compare computed scores with published values."""

import csv
import io
import json
from typing import Any

import pytest

from ssl_bench.tables.paper import paper_table
from ssl_bench.tables.published import load_published_table
from ssl_bench.tables.sheets import render_tables
from tests.support.report_cells import make_encoder_id
from tests.tables.test_pivot import hits, save

VOC: dict[str, Any] = {"dataset": "voc2012", "split": "trainval"}
ROWS = {"a": "skip, soap", "d": "skipless, soap"}


def build_table(store, name="figure3", choice="holdout", shas="", rows=ROWS):
    encoders = {rows[sha]: make_encoder_id(sha) for sha in shas}
    published = load_published_table(name)
    return paper_table(published, store.records(), store, encoders=encoders, choice=choice)


def test_our_scores_appear_next_to_published_values_per_dataset(store):
    save(store, "a", 11, hits(1, 0, 0, 0), **VOC)
    save(store, "d", 11, hits(1, 1, 0, 0), dataset="toy")
    table = build_table(store, shas="ad")

    lines = render_tables([table], "text").splitlines()
    rows = list(csv.DictReader(io.StringIO(render_tables([table], "csv"))))
    (whole,) = json.loads(render_tables([table], "json"))

    assert lines[2].split() == ["encoder", "VOC2012", "COCO20k"]
    assert [line.strip() for line in lines[4:6]] == [
        "skip, adamw                             32.3 | -  21.2 | -",
        "skipless, adamw                         53.5 | -  36.5 | -",
    ]
    assert lines[7].split("  ")[0] == "skip, soap"
    assert "49.4 | 25.0 @11 (4)" in lines[7]
    assert "27.5 | -" in lines[7]
    assert "63.2 | -" in lines[8]
    assert len(rows) == len(whole["cells"]) == 12
    (ours,) = [row for row in rows if row["value"]]
    assert (ours["row"], ours["column"]) == ("skip, soap", "VOC2012")
    assert (ours["published"], ours["value"]) == ("49.4", "25.0")
    (cell,) = [cell for cell in whole["cells"] if cell["ours"]]
    assert (cell["published"], cell["ours"]["records"][0]["num_images"]) == (49.4, 4)
    assert whole["notes"] == list(table.notes)


def test_the_notes_name_differences_and_missing_encoders_and_records(store):
    for sha in "ad":
        save(store, sha, 11, hits(1, 0, 0, 0), **VOC)

    notes = build_table(store, shas="a").notes

    assert "how an encoder was pretrained" in notes[0]
    assert "DINO on ImageNet-1k for 300 epochs" in notes[1]
    assert notes[2] == (
        "VOC2012: published on 11,540 images if all were used. ours: 4 images of voc2012 trainval, "
        "protocol reference, key features"
    )
    assert notes[3] == "'skip, soap': skip, 12 blocks, sha256 aaaaaaaa"
    assert "no encoder for 'skip, adamw'" in notes[-2]
    assert notes[-2].endswith("Recorded encoders: skip, skipless")
    assert notes[-1].startswith("no record of these encoders for: COCO20k (`--task tokencut")
    # The name of a published dataset may differ from the name of the layout that reads it.
    (note,) = build_table(store, "dino_imagenet", shas="a", rows={"a": "100 epochs"}).notes[-1:]
    assert "k-NN (`--task knn --dataset class_folders --layer -1`, facet cls)" in note


def test_published_spreads_doubts_and_gaps_are_shown(store):
    save(store, "a", 0, hits(1, 0))

    def notes(name):
        return build_table(store, name).notes

    def rendered(name, style):
        return render_tables([build_table(store, name)], style)

    # No probe measures perplexity. The training time is in the log of a run.
    assert "no probe for: Penn Treebank" in notes("mimetic_language")[-1]
    assert "no encoder for" not in " ".join(notes("training_time"))
    assert "`ssl-bench reproduce`" in notes("training_time")[-1]
    assert notes("one_skip")[2].startswith("doubtful: ")
    assert not [note for note in notes("mnist") if note.startswith("doubtful")]
    assert "89.69 ± 0.2 | -" in rendered("convmixer_cifar10", "text")
    first = next(csv.DictReader(io.StringIO(rendered("convmixer_cifar10", "csv"))))
    assert (first["published"], first["published_spread"]) == ("89.69", "0.2")
    assert "- | - 22.0 | -" in " ".join(rendered("one_skip", "text").split())
    assert json.loads(rendered("mnist", "json"))[0]["cells"][0]["published_spread"] is None


def test_a_training_accuracy_comes_from_the_pretraining_run(store):
    save(store, "a", 0, hits(1, 0), dataset="mnist", task="classification", metric="top1")
    fields: dict[str, Any] = {"task": "supervised", "metric": "top1", "facet": "head"}
    save(store, "d", 5, hits(1, 1, 1, 0), dataset="mnist", protocol="central_square", **fields)
    rows = {"a": "ViT", "d": "ViT"}

    probed, trained = (build_table(store, "mnist", shas=sha, rows=rows) for sha in "ad")

    assert "how an encoder was pretrained" in probed.notes[0]
    assert "`ssl-bench pretrain ... monitor.results=DIR`" in probed.notes[-1]
    chosen = trained.entries["ViT", "accuracy"]
    assert chosen is not None
    assert chosen.value == 75.0
    assert "how an encoder was pretrained" not in trained.notes[0]


@pytest.mark.parametrize(
    ("name", "rows", "column", "difference", "word"),
    [
        ("one_skip", ("both skips", "no skip around the MLP"), "points lost", 25, "below"),
        ("position_scale", ("factor 1", "factor 2"), "points gained", -25, "above"),
    ],
)
def test_every_filled_column_has_a_note(store, name, rows, column, difference, word):
    fields: dict[str, Any] = {"task": "supervised", "metric": "top1", "facet": "head"}
    for sha, values in (("a", hits(1, 1, 1, 0)), ("d", hits(1, 0, 1, 0))):
        save(store, sha, 5, values, dataset="cifar10", **fields)

    table = build_table(store, name, shas="ad", rows=dict(zip("ad", rows, strict=True)))

    # The values are 75 and 50 percent.
    assert table.derived_values == {(rows[0], column): 0, (rows[1], column): difference}
    notes = {note.partition(":")[0]: note for note in table.notes if "ours: " in note}
    assert notes.keys() == {"top-1", column}
    assert all(text in notes[column] for text in ("top-1", word, rows[0]))


def test_results_with_the_protocol_nearest_to_the_paper_are_shown(store):
    fields: dict[str, Any] = {"task": "segmentation", "dataset": "voc2012", "facet": "token"}
    oracle = fields | {"metric": "miou_oracle", "protocol": "cutting_the_skip"}
    save(store, "a", 5, hits(1, 0, 0, 0), **oracle | {"protocol": "fast"})
    save(store, "a", 5, hits(1, 1, 1, 0), **oracle)
    save(store, "a", 5, hits(0, 0, 0, 0), settings={"epochs": 2}, changed={"epochs": 2}, **oracle)
    save(store, "a", 5, hits(1, 1, 1, 1), metric="miou_holdout", protocol="ssl_bench", **fields)

    table = build_table(store, "table2", shas="a")

    (chosen,) = table.entries.values()
    assert (chosen.value, chosen.records[0].protocol) == (75.0, "cutting_the_skip")
    assert "learning rate chosen on the scored images" in table.notes[2]
    assert table.notes[2].endswith(
        "also recorded: miou_oracle, token, protocol cutting_the_skip, epochs=2 | miou_oracle, "
        "token, protocol fast | miou_holdout, token, protocol ssl_bench"
    )
    # If results differ only in their images, those on the most images are shown, although a result
    # of another encoder has the same images as before.
    save(store, "e", 5, hits(1, 1, 0, 0), **oracle)
    save(store, "a", 5, hits(1, 1, 1, 1, 0), dataset_fingerprint="c" * 64, **oracle)
    (chosen,) = build_table(store, "table2", shas="a").entries.values()
    assert (chosen.value, chosen.records[0].num_images) == (80.0, 5)
    # If both encoders are shown, their results have the same images.
    rows = {"a": "skip, soap", "e": "skipless, soap"}
    shown = build_table(store, "table2", shas="ae", rows=rows).entries.values()
    assert [entry.value for entry in shown] == [75.0, 50.0]
    # Multi-scale heads are shown in the multi-scale columns only.
    multi = {"metric": "miou_oracle", "settings": {"layers_mode": "multi"}}
    save(store, "d", 11, hits(1, 0), **multi, **fields)
    table = build_table(store, "table2", shas="d", rows={"d": "skip, soap"})
    assert list(table.entries) == [("skip, soap", "VOC2012, multi-scale")]


def test_the_notes_say_how_the_block_was_chosen(store):
    for layer in (0, 1):
        save(store, "a", layer, hits(1, 0, layer), **VOC)
        save(store, "d", layer, hits(1, 0, layer), has_hits=False, **VOC)

    held_out = build_table(store, shas="ad")

    assert held_out.cells_without_layer == {("skipless, soap", "VOC2012")}
    text = render_tables([held_out], "text")
    assert "63.2 | ‡" in text
    assert "\n‡: " in text
    assert "held-out choice" in text
    assert "ORACLE" in " ".join(build_table(store, choice="oracle", shas="a").notes)


def test_each_column_shows_the_block_that_its_paper_reports(store):
    for layer in (0, 11):
        save(store, "a", layer, hits(1, 1, 1, 1 - layer // 11), **VOC)
    metric = {"task": "conditioning", "metric": "mean_log_condition_number", "facet": "before"}
    for layer in range(2):
        fields: dict[str, Any] = {**metric, "unit": "", "dataset": "folder", "depth": 2}
        save(store, "d", layer, hits(1, layer), has_hits=False, **fields)

    def chosen_block(sha, name, row, column, choice=None):
        entry = build_table(store, name, choice, sha, {sha: row}).entries[row, column]
        assert entry is not None
        return entry.layers, entry.value

    # Figure 3 shows the best block on the scored images, and TokenCut's own table the last block.
    assert chosen_block("a", "figure3", "skip, soap", "VOC2012") == ((0,), 100.0)
    assert chosen_block("a", "tokencut", "ViT-S/16, DINO", "VOC2012", "oracle") == ((11,), 75.0)
    # This column's value is a mean over all blocks so far, so `choice` has no effect.
    for choice in (None, "holdout", "oracle"):
        cell = ("graying_exponent", "no token graying", "condition number before")
        assert chosen_block("d", *cell, choice) == ((1,), 100.0)
    choices = [build_table(store, choice=one, shas="a").as_json() for one in (None, "holdout")]
    assert [one["layer_selection"] for one in choices] == ["oracle", "holdout"]
    graying = build_table(store, "graying_exponent", "oracle").as_json()
    assert "last" in graying["layer_selection"]


def test_the_command_maps_rows_to_checkpoints(store, cli, cli_json):
    save(store, "a", 11, hits(1, 0, 0, 0), **VOC)
    command = ["table", "--paper", "cutting_the_skip/figure3"]

    out = cli(*command, "--as", "skip, soap=aaaa", "--format", "markdown").out
    assert r"| skip, soap | 49.4 \| 25.0 @11 (4) | 27.5 \| - |" in out
    for words, choice in (([], "oracle"), (["--best-layer", "holdout"], "holdout")):
        assert cli_json(*command, *words)[0]["layer_selection"] == choice
    for words, code, hint in (
        (["--as", "skp, soap=skip"], 2, "`--as 'skip, soap=CHECKPOINT'`"),
        (["--as", "skip, soap"], 2, "`--as ROW=CHECKPOINT`"),
        (["--as", "skip, soap=skip", "--as", "skip, soap=aaaa"], 2, ""),
        (["--as", "skip, soap=nobody"], 3, ""),
    ):
        assert hint in cli(*command, *words, code=code).err
