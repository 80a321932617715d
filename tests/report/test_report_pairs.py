import json
import re
from pathlib import Path

import numpy as np
import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import ViTConfig, build_vit, identify_encoder, save_encoder
from ssl_bench.report.comparing import (
    KINDS,
    extremes_of,
    outcomes_of,
    pairs_of,
    panel_pair,
    side_of,
)
from ssl_bench.report.model import group_into_panels, list_checkpoints
from ssl_bench.report.pictures import PictureFiles, galleries_of, gallery_pairs
from ssl_bench.results import ResultStore
from ssl_bench.tables.comparison import compare_encoders
from tests.support.faults import probing
from tests.support.report_cells import (
    EMPTY,
    HALF,
    PERFECT,
    WRONG,
    cell,
    compared_pair,
    counts,
    discovery_log,
    folder_of,
    known_as,
    save,
    save_pictures,
    skipless,
)


def test_a_pair_shows_every_kind_of_picture_that_both_have(tmp_path):
    records = [cell(task="pca"), skipless(task="pca")]
    for folder in map(folder_of, records):
        names = ("block00/one", "block01/one", "block01/two", "block01", "blocks-0-1")
        save_pictures(tmp_path, *(f"pca/toy/{folder}/image/{name}" for name in names))
    save_pictures(tmp_path, f"pca/toy/{folder_of(records[0])}/image/block02/one")
    files = PictureFiles(tmp_path)
    first, second = (galleries_of(files, records, c) for c in list_checkpoints(records))

    pairs = gallery_pairs(first, second)

    shown = [(list(one.prefixes), list(one.files)) for one, _ in pairs]
    assert shown == [([0, 1], ["one"]), ([1], [""]), ([None], ["blocks-0-1"])]
    assert all(folder_of(records[1]) in path for _, other in pairs for path in other.paths())


def test_hits_misses_and_degenerate_images_come_from_the_log_of_the_same_settings(tmp_path):
    records = [cell(settings={"tau": 0.2, "dtype": "float32"})]
    folder = tmp_path / f"pictures/tokencut/toy/{folder_of(records[0])}/reference"
    folder.mkdir(parents=True)
    (folder / "images_0.jsonl").write_text(discovery_log({"tau": 0.3}, x=(True, False, 1)))
    others = ({"dtype": "torch.float16"}, {"version": "0.0"})
    for number, other in enumerate(others):
        log = discovery_log({"tau": 0.2}, **other, y=(True, False, 1))
        (folder / f"images_0{number}.jsonl").write_text(log)
    (folder / "images_1.jsonl").write_text(
        discovery_log(
            {"tau": 0.2}, a=(True, False, 1), b=(False, False, 2), c=(True, True, 1), d=(True, 0, 0)
        )
    )
    (checkpoint,) = list_checkpoints(records)
    (panel,) = group_into_panels(records, (checkpoint,))

    found = outcomes_of(ResultStore(tmp_path), panel, panel.lines[0])

    (kinds,) = found.values()
    assert kinds == {"hits": ["a"], "misses": ["b"], "degenerate": ["c"]}


def test_every_image_that_tokencut_scored_is_a_hit_a_miss_or_degenerate(place):
    words = ["probe", "--task", "tokencut", "--checkpoint", "encoder.safetensors", "--layer", "1"]
    assert main([*words, "--dataset", "toy", "dataset.num_train=2", "dataset.num_val=3"]) == 0
    store = ResultStore(Path("results"))
    records = store.records()
    (panel,) = [
        p for p in group_into_panels(records, list_checkpoints(records)) if p.metric == "corloc"
    ]

    (kinds,) = outcomes_of(store, panel, panel.lines[0]).values()

    (record,) = [r for r in records if r.metric == "corloc"]
    assert sum(map(len, kinds.values())) == record.num_images
    degenerate = {*kinds["degenerate"]}
    assert 100 * len(degenerate) / record.num_images == record.details["degenerate_percent"]


def test_a_line_of_the_log_with_a_wrong_checksum_is_left_out_and_counted(place, capsys):
    words = ["probe", "--task", "tokencut", "--checkpoint", "encoder.safetensors", "--layer", "1"]
    assert main([*words, "--dataset", "toy", "dataset.num_train=2", "dataset.num_val=3"]) == 0
    (log,) = Path("results").rglob("images_*.jsonl")
    header, *lines = map(json.loads, log.read_text().splitlines())
    (cell,) = lines[0]["cells"].values()
    cell |= {"hit": not cell["hit"], "degenerate": False}
    log.write_text("".join(json.dumps(line) + "\n" for line in (header, *lines)))
    capsys.readouterr()

    assert main(["report"]) == 0

    assert f"{log}: 1 of 5 lines are damaged" in capsys.readouterr().err
    (page,) = Path("results/report").glob("checkpoint-*.html")
    listed = re.findall(r'<p class="ids"><strong>(\w+)</strong> ([^<]*)</p>', page.read_text())
    assert [kind for kind, _ in listed] == [*KINDS]
    ids = {image for _, images in listed for image in images.split(", ")} - {"none"}
    assert ids == {line["image"] for line in lines[1:]}


@pytest.mark.parametrize("ids", [("dog", "cat", "cow", "sky"), None])
def test_the_worst_and_best_images_are_named_where_ids_were_kept(tmp_path, ids):
    store = ResultStore(tmp_path)
    record = cell(task="segmentation", metric="miou_holdout")
    save(store, record, counts(PERFECT, WRONG, EMPTY, HALF))
    if ids:
        store.save_image_ids(record.dataset_fingerprint, ids)
    records = store.records()
    checkpoints = list_checkpoints(records)
    (panel,) = group_into_panels(records, checkpoints)

    found = extremes_of(store, panel, panel.lines[0])

    assert found is not None
    names = ids or [f"image {i} of 4" for i in (1, 2, 3, 4)]
    # Of the half-right image: IoU 2 / 4 of the first class, 0 / 2 of the second.
    assert found.num_scored == 3
    assert found.worst == [(names[1], 0)]
    assert found.best == [(names[0], 100)]


def test_images_are_listed_from_the_worst_from_the_best_and_from_the_largest_loss(tmp_path):
    store, names = ResultStore(tmp_path), {"task": "segmentation", "metric": "miou_holdout"}
    good = [[3, 3], [4, 4], [4, 4]]
    save(store, cell(**names), counts(HALF, PERFECT, WRONG, good))
    save(store, skipless(**names), counts(PERFECT, WRONG, HALF, good))
    records = store.records()
    checkpoints = list_checkpoints(records)
    (panel,) = group_into_panels(records, checkpoints)

    found = extremes_of(store, panel, panel.lines[0])
    compared = compared_pair(store, records)

    assert found is not None
    assert [round(score) for _, score in found.worst] == [0, 25]
    assert [round(score) for _, score in found.best] == [100, 60]
    assert [round(image[-1]) for image in compared.images] == [100, -25, -75]


@pytest.mark.parametrize("metric", ["corloc", "miou", "pixel_accuracy"])
def test_differences_are_those_of_the_command_compare(tmp_path, metric):
    store, random = ResultStore(tmp_path), np.random.default_rng(0)
    made = [make(layer=n, metric=metric) for make in (cell, skipless) for n in (0, 1, 2)]
    for record in made:
        if metric == "corloc":
            save(store, record, random.random(11) < 0.5)
        else:
            right, wrong = random.integers(0, 9, (11, 1, 2)), np.array([2, 1])
            pixels = [right, right + wrong, right + wrong[::-1]]
            save(store, record, np.concatenate(pixels, 1).astype(np.int32))
    records = store.records()

    compared = compared_pair(store, records)

    (table,), _ = compare_encoders(store, records, {known_as(letter): letter for letter in "ac"})
    found = [row.difference for row in (*compared.rows, *compared.summary)]
    fields = ("first", "second", "low", "high")
    assert [[getattr(one, f) for f in fields] for one in found] == [
        [getattr(row, f) for f in fields] for row in table.rows
    ]
    blocks = [tuple(one.layer for one in (*r.first, *r.second)) for r in compared.rows]
    assert blocks == [(0, 0), (1, 1), (2, 2)]


def test_a_probe_leaves_the_ids_that_name_its_images(place):
    assert main(probing("pca", "folder", place / "photos")) == 0
    store = ResultStore(Path("results"))

    (record,) = store.records()
    assert store.image_ids(record.dataset_fingerprint) == ("0.jpg", "1.jpg", "2.jpg", "3.jpg")
    assert store.image_ids("0" * 64) is None


def test_of_several_seeds_the_lowest_is_compared_and_its_images_are_counted(tmp_path):
    store = ResultStore(tmp_path)
    save(store, cell(seed=1), np.array([1, 1, 1, 0, 0, 0, 0, 0], bool))
    save(store, skipless(seed=1), np.array([1, 0, 0, 1, 1, 1, 0, 0], bool))
    for make in (cell, skipless):
        save(store, make(seed=2), np.ones(8, bool))

    compared = compared_pair(store, store.records())

    assert [(row.difference.first, row.difference.second) for row in compared.rows] == [(37.5, 50)]
    # Right in both, in the first or the second alone, in neither.
    assert compared.tally == [1, 2, 3, 2]


def test_checkpoints_of_two_seeds_are_not_paired(tmp_path):
    store = ResultStore(tmp_path)
    save(store, cell(seed=1), np.array([1, 0, 0, 0], bool))
    save(store, skipless(seed=2), np.array([1, 1, 1, 0], bool))
    records = store.records()
    checkpoints = list_checkpoints(records)
    (panel,) = group_into_panels(records, checkpoints)

    first, second = (side_of(store, panel, checkpoint) for checkpoint in checkpoints)

    assert first is not None
    assert second is not None
    assert panel_pair(panel, first, second) is None


def test_of_what_more_is_not_better_a_page_says_neither_best_nor_right(tmp_path):
    store = ResultStore(tmp_path)
    for make in (cell, skipless):
        for layer in (0, 1):
            save(store, make(layer=layer, metric="degenerate"), np.array([1, 0, 0, 1], bool))

    compared = compared_pair(store, store.records())
    assert main(["report", "--out", str(tmp_path)]) == 0
    (path,) = (tmp_path / "report").glob("compare-*.html")
    page = path.read_text()

    assert (len(compared.rows), list(compared.summary), compared.tally) == (2, [], None)
    assert "Block by block" in page
    assert "Best blocks" not in page
    assert "Images right" not in page


def test_pairs_of_many_checkpoints_must_be_asked_for():
    few = list_checkpoints([cell(checkpoint_sha256=f"{i}" * 64, model=f"m{i}") for i in range(4)])
    many = list_checkpoints([cell(checkpoint_sha256=f"{i}" * 64, model=f"m{i}") for i in range(7)])

    assert len(pairs_of(few, [])) == 6
    assert pairs_of(many, []) == []
    assert [
        (p.first.name, p.second.name) for p in pairs_of(many, [(known_as("6"), known_as("0"))])
    ] == [("m6", "m0")]
    with pytest.raises(ConfigurationError, match="two different"):
        pairs_of(few, [(known_as("1"), known_as("1"))])


def test_a_pair_is_named_as_everywhere_by_path_name_or_sha256(tmp_path, capsys):
    config = ViTConfig(image_size=16, patch_size=8, dim=12, depth=1, num_heads=2)
    weights = tmp_path / "runs" / "vit" / "last.safetensors"
    weights.parent.mkdir(parents=True)
    save_encoder(weights, build_vit(config, seed=0), {})
    store = ResultStore(tmp_path)
    store.save(cell(model="vit", **identify_encoder(str(weights)).identity()))
    store.save(skipless())
    report = ["report", "--out", str(tmp_path)]

    assert main([*report, "--pair", str(weights.parent), "skipless"]) == 0
    assert len(list((tmp_path / "report").glob("compare-*.html"))) == 1
    assert main([*report, "--pair", "vit", "other"]) == 3
    assert "'other'" in capsys.readouterr().err
