"""The overview, the leaderboard and the tables of blocks, by the elements of the pages."""

import math
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.composition.choices import choices
from ssl_bench.report.overview import (
    TASK_DESCRIPTIONS,
    build_leaderboard,
    group_block_tables,
    summarize_checkpoints,
)
from ssl_bench.report.panels import (
    group_by_task,
    group_into_panels,
    list_checkpoints,
    select_headline_panels,
)
from ssl_bench.report.pictures import MAX_STRIP_PICTURES, Gallery, keep_layers, select_strips
from ssl_bench.results import Baseline, Record, ResultStore
from tests.support.report_cells import Elements, cell, folder_of, plain, save_pictures, skipless

SEGMENTATION = {"task": "segmentation", "metric": "miou_oracle", "facet": "token"}


def panels(*records: Record):
    return group_into_panels(records, list_checkpoints(records))


def leaderboard(*records: Record):
    return build_leaderboard(panels(*records), list_checkpoints(records))


def written(root: Path, *records: Record, page: str = "index.html") -> str:
    store = ResultStore(root)
    for record in records:
        store.save(record)
    assert main(["report", "--out", str(root)]) == 0
    return next((root / "report").glob(page)).read_text()


def ids(page: str) -> list[str]:
    return [given["id"] or "" for _, given in Elements(page).elements if "id" in given]


def headlines(*records: Record) -> list[tuple[str, ...]]:
    chosen = select_headline_panels(panels(*records))
    return [(p.task, p.dataset, p.metric, p.protocol + p.settings_text) for p in chosen]


def test_a_task_has_one_headline_per_dataset():
    held_out = SEGMENTATION | {"metric": "miou_holdout"}
    assert headlines(
        cell(**SEGMENTATION),
        cell(**held_out | {"protocol": "fast"}),
        cell(**held_out | {"protocol": "full"}),
        skipless(**held_out | {"protocol": "full"}),
        cell(**held_out | {"dataset": "voc"}),
        cell(task="mine", metric="zeal"),
        cell(task="mine", metric="ardour", unit=""),
    ) == [
        ("segmentation", "toy", "miou_holdout", "full"),
        ("segmentation", "voc", "miou_holdout", "reference"),
        ("mine", "toy", "zeal", "reference"),
    ]
    # A dataset with masks stands beside one with boxes.
    boxes, masks, iou = (
        cell(dataset=dataset, metric=metric)
        for dataset, metric in (("voc2012", "corloc"), ("ecssd", "max_f_beta"), ("ecssd", "iou"))
    )
    assert {(place, metric) for _, place, metric, _ in headlines(iou, boxes, masks)} == {
        ("voc2012", "corloc"),
        ("ecssd", "max_f_beta"),
    }
    one = {"task": "knn", "dataset": "toy"}
    assert headlines(cell(**one, metric="top5"), cell(**one, metric="top1"))[0][2] == "top1"


def test_the_headline_has_all_blocks_and_no_changed_option():
    look = cell(layer=2, value=90.0, settings={"size": 448}, changed={"size": 448})
    changed = cell(value=90.0, settings={"tau": 0.1}, changed={"tau": 0.1})
    every = [cell(layer=n, value=50.0) for n in range(3)]

    for records in ([look, *every], [*every, look]):
        (panel,) = select_headline_panels(panels(*records))
        assert panel.layers == (0, 1, 2)
    for records in ([changed, cell()], [cell(), changed]):
        (panel,) = select_headline_panels(panels(*records))
        assert panel.title == "corloc, key, protocol reference [tau=0.2]"


def test_all_checkpoints_are_shown_in_the_same_protocol():
    squashed = {"settings": {"squash": 96}, "changed": {"squash": 96}}
    records = [cell(layer=n) for n in range(3)]
    records += [cell(layer=n, protocol="adaptive") for n in range(2)]
    records += [skipless(layer=n, protocol="reference", **squashed) for n in range(2)]
    records += [skipless(layer=n, protocol="adaptive", **squashed) for n in range(2)]

    chosen = select_headline_panels(panels(*records))

    assert [panel.protocol for panel in chosen] == ["reference", "reference"]
    assert [panel.lines[0].checkpoint.model for panel in chosen] == ["skip", "skipless"]


def test_every_checkpoint_has_a_headline_score(tmp_path):
    smaller = {"settings": {"longer_side": 144}, "changed": {"longer_side": 144}}
    dinov2 = cell(model="dinov2", checkpoint_sha256="f" * 64)
    records = [cell(**smaller), skipless(**smaller), cell(), dinov2]

    chosen = select_headline_panels(panels(*records))
    checkpoints = list_checkpoints(records)
    summaries = summarize_checkpoints(ResultStore(tmp_path), chosen, checkpoints)

    assert [[line.checkpoint.model for line in panel.lines] for panel in chosen] == [
        ["dinov2", "skip"],
        ["skip", "skipless"],
    ]
    assert [len(texts) for texts in summaries.values()] == [1, 1, 1]


def test_segmentation_and_discovery_come_first_and_many_plain_numbers_last():
    rest = [cell(task="knn", metric="top1_k20"), cell(task="pca", metric="explained_variance")]
    shares = [plain(facet=facet) for facet in ("attention", "mlp")]

    tasks = group_by_task(panels(*shares, *rest, cell(), cell(**SEGMENTATION)))

    assert list(tasks) == ["segmentation", "tokencut", "knn", "pca", "conditioning"]


def test_the_leaderboard_shows_the_best_or_the_last_block():
    records = [cell(layer=n, value=v) for n, v in enumerate((40.0, 60.0, 50.0))]
    records += [plain(facet="mlp", layer=n, value=v) for n, v in enumerate((3.0, 2.0, 1.0))]
    board, (checkpoint,) = leaderboard(*records), list_checkpoints(records)

    points = [panel.find_headline_entry(checkpoint) for panel in board.panels]
    assert [(p.layer, p.value) for p in points if p] == [(1, 60.0), (2, 1.0)]
    assert [panel.facet for panel in board.panels] == ["key", "mlp"]


def test_the_leaderboard_names_a_baseline_that_is_not_exceeded(tmp_path):
    details = Baseline("centre box", 55.0).as_details()
    low = [replace(cell(layer=n, value=v), details=details) for n, v in enumerate((40.0, 55.0))]
    high = replace(cell(value=56.0), details=details)

    page = Elements(written(tmp_path / "low", *low)).text
    better = Elements(written(tmp_path / "high", high)).text

    assert "not above centre box 55.0" in page
    assert "centre box 55.0" in better
    assert "not above" not in better


def test_differences_of_checkpoints_are_columns():
    small = {"kind": "vit", "dim": 12, "patch_size": 8}
    other = {**small, "dim": 24, "modules_sha256": "ab" * 32}

    board = leaderboard(cell(architecture=small), skipless(architecture=other, depth=6))

    assert board.fact_names == ["depth", "dim"]
    assert board.fact_rows == [["12", "12"], ["6", "24"]]
    assert board.shared_facts == [("skips", "yes"), ("kind", "vit"), ("patch size", "8")]


def test_checkpoints_of_one_model_show_their_differences(tmp_path):
    named = {"kind": "timm", "name": "vit_tiny_patch16_224"}
    own = {"kind": "module", "name": "Net"}
    records = [
        cell(model="tiny", architecture={**named, "image_size": None}),
        cell(model="tiny", architecture={**named, "image_size": 224}),
        cell(model="net", architecture={**own, "modules_sha256": "ab" * 32}),
        cell(model="net", architecture={**own, "modules_sha256": "cd" * 32}),
        skipless(),
    ]

    page = written(tmp_path, *records)

    apart = {one.distinction for one in list_checkpoints(records)}
    digests = {f"modules sha256 {letters * 6}" for letters in ("ab", "cd")}
    assert apart == {"image size not set", "image size 224", *digests, ""}
    assert all(f'"block">{words}<' in page for words in apart - {""})


def test_a_missing_value_has_its_reason(tmp_path):
    record = cell(task="classification", metric="top1", value=math.nan, ci95=None)
    explained = replace(record, details={"reason": "no class has two images"})

    index = written(tmp_path, explained)
    own = next((tmp_path / "report").glob("checkpoint-*.html")).read_text()

    for page in (index, own):
        assert 'title="no class has two images"' in page
        assert "\N{EN DASH}: no class has two images" in page
    assert "No block has a value of top1 (no class has two images)." in index


def test_the_overview_has_summary_leaderboard_pictures_and_curves(tmp_path):
    assert set(choices("probe")) <= set(TASK_DESCRIPTIONS)
    shares = [plain(facet=facet) for facet in ("attention", "mlp", "mlp_skip")]
    save_pictures(tmp_path, f"tokencut/toy/{folder_of(cell())}/reference/block03_key/dog")

    page = written(tmp_path, *shares, cell(), cell(**SEGMENTATION))

    sections = [i for i in ids(page) if not i.startswith("panel")]
    order = ["summary", "leaderboard", "pictures", "filters"]
    assert [i for i in sections if i in order] == order
    tasks = ["task-segmentation", "task-tokencut", "task-conditioning"]
    assert [i for i in sections if i.startswith("task-")] == tasks
    assert unescape(page).count(TASK_DESCRIPTIONS["tokencut"]) == 1
    folds = re.findall(r'<details class="fold".*?</summary>', page)
    assert [Elements(fold).text for fold in folds] == ["3 panels of conditioning"]
    places = ('data-task="tokencut"', 'class="fold"', 'data-task="conditioning"')
    assert [*map(page.index, places)] == sorted(map(page.index, places))


def gallery(layers, *images: str, task: str = "pca", dataset: str = "toy") -> Gallery:
    prefixes = {layer: f"{task}/block{layer}/" for layer in layers}
    files = {image: f"{image}.png" for image in images}
    return Gallery(task, dataset, "b" * 8, "image", prefixes, files)


def test_a_strip_shows_an_image_that_all_checkpoints_have():
    first, second, third = list_checkpoints([cell(), skipless(), cell(checkpoint_sha256="e" * 64)])
    galleries = {
        first.encoder_id: [gallery([None], "all"), gallery(range(12), "cat", "dog")],
        second.encoder_id: [gallery(range(3), "dog")],
        third.encoder_id: [],
    }

    strips = select_strips((first, second, third), galleries, [])

    assert [strip.checkpoint for strip in strips] == [first, second]
    assert {strip.title for strip in strips} == {"pca on toy, protocol image, image dog"}
    blocks = [[block for block, _, _ in strip.pictures] for strip in strips]
    assert blocks == [[f"block {n}" for n in (0, 4, 7, 11)], [f"block {n}" for n in range(3)]]
    assert len(blocks[0]) == MAX_STRIP_PICTURES
    assert strips[0].pictures[-1][1] == "pca/block11/dog.png"


def test_strips_prefer_common_kinds_and_many_blocks():
    first, second = list_checkpoints([cell(), skipless()])

    def shown(few: Gallery, many: Gallery, *others: Gallery) -> list[tuple[str, ...]]:
        galleries = {first.encoder_id: [few, many], second.encoder_id: list(others)}
        return [
            (strip.title.split()[0], strip.title.split()[2], strip.checkpoint.name)
            for strip in select_strips((first, second), galleries, [])
        ]

    cut, pca = gallery([0], "dog", task="tokencut"), gallery([0], "dog")
    # The first of two tasks, then the second.
    assert shown(pca, cut, cut) == [
        ("pca", "toy,", "skip"), ("tokencut", "toy,", "skip"), ("tokencut", "toy,", "skipless")
    ]  # fmt: skip
    many, few = gallery([0], "dog", dataset="many"), gallery([0], "dog", dataset="few")
    assert [words[1] for words in shown(few, many, many)] == ["many,", "many,"]
    many = gallery([0, 1, 2], "dog", dataset="many")
    assert [words[1] for words in shown(few, many)] == ["many,"]


def test_pictures_of_other_blocks_are_left_out():
    both = [gallery(range(12), "dog"), gallery([None], "all"), gallery(range(3), "cat")]
    kept = keep_layers(both, {5, -1}, 12)
    assert [list(one.prefixes) for one in kept] == [[5, 11], [None]]
    assert keep_layers(both, None, 12) == both


def test_tables_of_blocks_have_few_columns(tmp_path):
    records = [
        cell(**SEGMENTATION | {"metric": f"miou_{name}"}, layer=layer, value=float(layer))
        for name in "abcd"
        for layer in (0, 5, 11)
    ]

    page = written(tmp_path, *records, page="checkpoint-*.html")

    tables = re.findall(r'<table class="blocks">.*?</table>', page, re.DOTALL)
    rows = [re.findall(r'<th scope="row">(\d+)</th>', table) for table in tables]
    heads = [re.findall(r"<button type=\"button\">(.*?)</button>", table) for table in tables]
    assert rows == [["0", "5", "11"]] * 2
    assert heads == [["block", *(f"miou_<wbr>{n} (%)" for n in names)] for names in ("ab", "cd")]
    assert [table.count('class="best"') for table in tables] == [2, 2]
    # Of many on one dataset some are folded.
    many = [plain(facet=f"f{number}") for number in range(11)]
    (group,) = group_block_tables([(panel, panel.lines[0]) for panel in panels(*many)])
    assert list(map(len, [*group.tables, *group.folded])) == [2, 3, 3, 3]
    assert len(group.folded) == 1


@pytest.mark.parametrize(
    ("values", "text", "marked"),
    [
        ((1, 3, 2), "block 1", [1]),
        ((3, 1, 3), "blocks 0 and 2", [0, 2]),
        ((2, 2, 2), "all 3 blocks equal", []),
        ((2,), "block 0", [0]),
    ],
)
def test_equal_blocks_share_the_best_place(values, text, marked):
    records = [cell(layer=layer, value=float(value)) for layer, value in enumerate(values)]
    (line,) = panels(*records)[0].lines
    assert line.best_blocks_text == text
    assert [point.layer for point in line.marked_entries] == marked


def test_pictures_come_first_without_labels(tmp_path):
    pca = cell(task="pca", metric="explained_variance", dataset="folder")
    for root, labelled in ((tmp_path / "a", []), (tmp_path / "b", [cell()])):
        for task in ("pca", "conditioning"):
            save_pictures(root, f"{task}/folder/{folder_of(pca)}/image/block03/dog")
        index = ids(written(root, pca, plain(layer=0, dataset="folder"), *labelled))
        own = ids(next((root / "report").glob("checkpoint-*.html")).read_text())

        for found in (index, own):
            first = next(i for i in found if i.startswith("pictures"))
            assert (found.index(first) < found.index("summary")) == (not labelled)
        pictures = [i for i in own if i.startswith("pictures")]
        assert pictures == ["pictures-pca", "pictures-conditioning"]
        assert own.index(pictures[-1]) < own.index("properties")
