"""Test the overview page of the HTML report."""

import math
import re
from dataclasses import replace
from html import unescape
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from probes.pictures import draw_tile, save_sheet
from ssl_bench.composition.choices import choices
from ssl_bench.report.overview import (
    build_leaderboard,
    find_best_checkpoints,
    find_tied_checkpoints,
    group_block_tables,
    summarize_checkpoints,
    summarize_leaderboard,
)
from ssl_bench.report.pages import build_index_page, build_report
from ssl_bench.report.panels import (
    group_by_task,
    group_into_panels,
    list_checkpoints,
    select_main_panels,
)
from ssl_bench.report.pictures import (
    Gallery,
    PictureFiles,
    build_picture_sections,
    count_hits,
    keep_layers,
    select_strips,
)
from ssl_bench.results import Baseline, Record, ResultStore
from ssl_bench.system.files import TILES
from ssl_bench.tables.styles import PALETTE
from ssl_bench.tables.tasks import task_texts
from tests.report.test_report import write_report
from tests.support.report_cells import (
    Elements,
    build_record,
    get_figures_folder,
    plain,
    save,
    save_pictures,
    skipless,
)

SEGMENTATION = {"task": "segmentation", "metric": "miou_oracle", "facet": "token"}


def panels(*records: Record):
    return group_into_panels(records, list_checkpoints(records))


def leaderboard(*records: Record):
    return build_leaderboard(panels(*records), list_checkpoints(records))


def headline_panels(*records: Record):
    return select_main_panels(panels(*records))


def write_page(root: Path, *records: Record, page: str = "index.html") -> str:
    return next(write_report(root, *records).glob(page)).read_text()


def element_ids(page: str) -> list[str]:
    return [attrs["id"] or "" for _, attrs in Elements(page).elements if "id" in attrs]


def headlines(*records: Record) -> list[tuple[str, ...]]:
    chosen = headline_panels(*records)
    return [(p.task, p.dataset, p.metric, p.protocol + p.settings_text) for p in chosen]


def test_a_task_has_one_headline_per_dataset():
    held_out = SEGMENTATION | {"metric": "miou_holdout"}
    assert headlines(
        build_record(**SEGMENTATION),
        build_record(**held_out | {"protocol": "fast"}),
        build_record(**held_out | {"protocol": "full"}),
        skipless(**held_out | {"protocol": "full"}),
        build_record(**held_out | {"dataset": "voc"}),
        build_record(task="mine", metric="zeal"),
        build_record(task="mine", metric="ardour", unit=""),
    ) == [
        ("segmentation", "toy", "miou_holdout", "full"),
        ("segmentation", "voc", "miou_holdout", "reference"),
        ("mine", "toy", "zeal", "reference"),
    ]
    # Boxes and masks have different metrics.
    metrics = (("ecssd", "iou"), ("voc2012", "corloc"), ("ecssd", "max_f_beta"))
    chosen = headlines(
        *(build_record(dataset=dataset, metric=metric) for dataset, metric in metrics)
    )
    assert {(dataset, metric) for _, dataset, metric, _ in chosen} == set(metrics[1:])
    one = {"task": "knn", "dataset": "toy"}
    assert (
        headlines(build_record(**one, metric="top5"), build_record(**one, metric="top1"))[0][2]
        == "top1"
    )


def test_the_headline_has_all_blocks_and_no_changed_option():
    single = build_record(layer=2, value=90.0, settings={"size": 448}, changed={"size": 448})
    changed = build_record(value=90.0, settings={"tau": 0.1}, changed={"tau": 0.1})
    every = [build_record(layer=n, value=50.0) for n in range(3)]

    for records in ([single, *every], [*every, single]):
        (panel,) = headline_panels(*records)
        assert panel.layers == (0, 1, 2)
    for records in ([changed, build_record()], [build_record(), changed]):
        (panel,) = headline_panels(*records)
        assert panel.title == "corloc, key, protocol reference [tau=0.2]"
    # Outputs of a whole block come before those from inside a block.
    (panel,) = headline_panels(*(build_record(facet=facet) for facet in ("attn_out", "token")))
    assert panel.facet == "token"


@pytest.mark.parametrize("newer", [0.2, 0.3])
def test_the_headline_has_the_newest_record_of_equally_complete_panels(newer):
    def make(tau: float, layer: int, month: int) -> Record:
        created = f"2026-0{month}-01T00:00:00+00:00"
        return build_record(layer=layer, settings={"tau": tau}, created=created)

    other = 0.5 - newer
    months = ((newer, 0, 1), (newer, 1, 4), (other, 0, 2), (other, 1, 3))
    (panel,) = headline_panels(*(make(*one) for one in months))

    assert panel.record.settings["tau"] == pytest.approx(newer)


def test_all_checkpoints_are_shown_in_the_same_protocol():
    squashed = {"settings": {"squash": 96}, "changed": {"squash": 96}}
    records = [build_record(layer=2)]
    for n in range(2):
        for protocol in ("reference", "adaptive"):
            fields = {"layer": n, "protocol": protocol}
            records += [build_record(**fields), skipless(**fields, **squashed)]

    chosen = headline_panels(*records)

    assert [panel.protocol for panel in chosen] == ["reference", "reference"]
    assert [panel.lines[0].checkpoint.model for panel in chosen] == ["skip", "skipless"]


def test_every_checkpoint_has_a_headline_score(tmp_path):
    smaller = {"settings": {"longer_side": 144}, "changed": {"longer_side": 144}}
    dinov2 = build_record(model="dinov2", checkpoint_sha256="f" * 64)
    records = [build_record(**smaller), skipless(**smaller), build_record(), dinov2]

    chosen, checkpoints = headline_panels(*records), list_checkpoints(records)
    summaries = summarize_checkpoints(ResultStore(tmp_path), chosen, checkpoints)

    assert [[line.checkpoint.model for line in panel.lines] for panel in chosen] == [
        ["dinov2", "skip"],
        ["skip", "skipless"],
    ]
    assert [len(texts) for texts in summaries.values()] == [1, 1, 1]


def test_segmentation_and_discovery_come_first_and_unitless_values_last():
    rest = [
        build_record(task="knn", metric="top1_k20"),
        build_record(task="pca", metric="explained_variance"),
    ]
    unitless = [plain(facet=facet) for facet in ("attention", "mlp")]

    tasks = group_by_task(panels(*unitless, *rest, build_record(), build_record(**SEGMENTATION)))

    assert list(tasks) == ["segmentation", "tokencut", "knn", "pca", "conditioning"]


def test_the_leaderboard_shows_the_best_or_the_last_block():
    records = [build_record(layer=n, value=v) for n, v in enumerate((40.0, 60.0, 50.0))]
    records += [plain(facet="mlp", layer=n, value=v) for n, v in enumerate((3.0, 2.0, 1.0))]
    board, (checkpoint,) = leaderboard(*records), list_checkpoints(records)

    points = [panel.find_main_entry(checkpoint) for panel in board.panels]
    assert [(p.layer, p.value) for p in points if p] == [(1, 60.0), (2, 1.0)]
    assert [panel.facet for panel in board.panels] == ["key", "mlp"]


def test_the_leaderboard_names_a_baseline_that_is_not_significantly_exceeded(tmp_path):
    details = Baseline("centre box", 55.0).as_details()
    low = replace(skipless(value=40.0, ci95=(30.0, 50.0)), details=details)
    unclear = replace(build_record(value=60.0, ci95=(50.0, 70.0)), details=details)
    clear = replace(unclear, ci95=(56.0, 64.0))

    page = write_page(tmp_path / "unclear", unclear, low)
    assert "not significantly above centre box 55.0" in Elements(page).text
    assert "not above baseline" in page
    assert "No encoder is significantly above the baseline in tokencut on toy." in page
    assert ' class="best"' not in page.partition('id="leaderboard"')[2].partition("</table>")[0]
    assert "is best in" not in page
    page = write_page(tmp_path / "clear", clear, low)
    assert "is best in 1 of 1 comparisons: tokencut on toy." in page
    assert "No encoder is significantly" not in page
    page = Elements(write_page(tmp_path / "single", clear)).text
    assert "centre box 55.0" in page
    assert "not above baseline" not in page
    assert "significantly above" not in page


def test_the_leaderboard_names_three_encoders_that_are_best_most_often():
    winners = (0, 1, 1, 2, 3)
    records = [
        build_record(checkpoint_sha256=f"{i}" * 64, model=f"m{i}", dataset=f"d{n}", value=value)
        for n, winner in enumerate(winners)
        for i in range(4)
        for value in [60.0 if i == winner else 20.0]
    ]

    assert summarize_leaderboard(panels(*records)) == [
        "m1 is best in 2 of 5 comparisons: tokencut on d1 and tokencut on d2.",
        "m0 is best in 1 of 5 comparisons: tokencut on d0.",
        "m2 is best in 1 of 5 comparisons: tokencut on d3.",
    ]


def test_the_leaderboard_names_settings_that_do_not_exceed_baselines():
    details = Baseline("centre box", 55.0).as_details()
    low = replace(
        build_record(protocol="reference", value=40.0, ci95=(30.0, 50.0)), details=details
    )
    high = replace(
        build_record(protocol="adaptive", value=60.0, ci95=(58.0, 62.0)), details=details
    )

    (sentence,) = summarize_leaderboard(panels(low, high))

    assert sentence.endswith(" in tokencut on toy (corloc, key, protocol reference).")


def test_the_leaderboard_has_a_column_for_each_difference_of_checkpoints():
    small = {"kind": "vit", "dim": 12, "patch_size": 8}
    other = {**small, "dim": 24, "modules_sha256": "ab" * 32, "position_margin": 0.1}

    board = leaderboard(build_record(architecture=small), skipless(architecture=other, depth=6))

    assert board.fact_names == ["depth", "dim"]
    assert board.fact_rows == [["12", "12"], ["6", "24"]]
    assert board.shared_facts == [("skips", "yes"), ("kind", "vit"), ("patch size", "8")]


def test_checkpoints_with_the_same_name_show_their_differences(tmp_path):
    timm = {"kind": "timm", "name": "vit_tiny_patch16_224"}
    module = {"kind": "module", "name": "Net"}
    records = [
        build_record(model="tiny", architecture={**timm, "image_size": n}) for n in (None, 224)
    ]
    records += [
        build_record(model="net", architecture={**module, "modules_sha256": digits * 32})
        for digits in ("ab", "cd")
    ]
    records += [skipless()]

    page = write_page(tmp_path, *records)

    distinctions = {one.distinction for one in list_checkpoints(records)}
    digests = {f"modules sha256 {digits * 6}" for digits in ("ab", "cd")}
    assert distinctions == {"image size not set", "image size 224", *digests, ""}
    assert all(f'"block">{words}<' in page for words in distinctions - {""})


def index_page(root: Path, *records: Record):
    return build_index_page(build_report(ResultStore(root), records, []))


def test_the_best_checkpoint_comes_first_and_is_drawn_on_top(tmp_path):
    records = [
        build_record(value=40.0),
        skipless(value=60.0),
        build_record(**SEGMENTATION),
        plain(),
    ]
    for record in records[:2]:
        save_pictures(
            tmp_path, f"tokencut/toy/{get_figures_folder(record)}/reference/block03_key/dog"
        )

    page = index_page(tmp_path, *records)

    assert [one.name for one, _ in page["summaries"]] == ["skipless", "skip"]
    assert [strip.checkpoint.name for strip in page["strips"]] == ["skipless", "skip"]
    (column,) = [one for one in page["columns"] if one["panel"].task == "tokencut"]
    assert [one.name for one in column["chart"].curves] == ["skip", "skipless"]
    assert {one.name for one in column["best"]} == {"skipless"}
    assert [one["task"] for one in page["sections"]] == ["segmentation", "tokencut", "conditioning"]
    assert dict(page["filters"])["task"] == ["conditioning", "segmentation", "tokencut"]
    assert dict(page["filters"])["facet"] == ["key", "token"]


@pytest.mark.parametrize("is_headline", [True, False])
def test_signs_are_explained_only_for_scores_of_the_leaderboard(tmp_path, is_headline):
    details = {"degenerate_percent": 90.0} | Baseline("centre box", 55.0).as_details()
    changed = {} if is_headline else {"settings": {"tau": 0.3}, "changed": {"tau": 0.3}}

    page = index_page(
        tmp_path, replace(build_record(**changed), details=details), build_record(layer=0)
    )

    signs = [page[name] for name in ("has_crosses", "has_baselines")]
    assert signs == [is_headline, is_headline]
    assert any("†" in note for note in page["notes"])
    assert page["has_labels"]
    assert not page["has_degenerate"]


def test_headlines_show_their_settings_if_there_are_several(tmp_path):
    smaller = {"settings": {"longer_side": 144}, "changed": {"longer_side": 144}}
    several = [
        build_record(**smaller),
        skipless(**smaller),
        build_record(),
        build_record(dataset="voc"),
    ]
    other = [
        build_record(checkpoint_sha256="f" * 64, model="dinov2"),
        build_record(**smaller, dataset="voc"),
    ]

    for records, shown in ((several, [False, False]), ([*several, *other], [True, True, False])):
        columns = index_page(tmp_path, *records)["columns"]
        assert [one["has_variant"] for one in columns] == shown


def test_the_reason_of_an_undefined_value_is_shown(tmp_path):
    record = build_record(task="classification", metric="top1", value=math.nan, ci95=None)
    explained = replace(record, details={"undefined": "no class has two images"})

    index = write_page(tmp_path, explained)
    own = next((tmp_path / "report").glob("checkpoint-*.html")).read_text()

    for page in (index, own):
        assert 'title="no class has two images"' in page
        assert "\N{EN DASH}: no class has two images" in page
    assert "top-1 accuracy at any block (no class has two images)" in index


def test_the_overview_starts_with_curves_and_folds_other_panels(tmp_path):
    assert all(task_texts(task).description for task in choices("probe"))
    unitless = [plain(facet=facet) for facet in ("attention", "mlp", "mlp_skip")]
    save_pictures(
        tmp_path, f"tokencut/toy/{get_figures_folder(build_record())}/reference/block03_key/dog"
    )

    page = write_page(tmp_path, *unitless, build_record(), build_record(**SEGMENTATION))

    sections = [i for i in element_ids(page) if not i.startswith("panel")]
    order = ["overview", "leaderboard", "summary", "pictures", "all", "filters"]
    assert [i for i in sections if i in order] == order
    tasks = ["task-segmentation", "task-tokencut", "task-conditioning"]
    assert [i for i in sections if i.startswith("task-")] == tasks
    assert unescape(page).count(task_texts("tokencut").description) == 1
    folds = [Elements(fold).text for fold in re.findall(r'<details class="fold.*?</summary>', page)]
    assert folds[-2:] == ["All metrics and numbers", "3 panels of conditioning"]
    # Three charts are visible without unfolding.
    before, _, after = page.partition('id="all"')
    assert before.count('<svg class="chart"') == 3
    assert after.index('data-task="tokencut"') < after.index('data-task="conditioning"')


@pytest.mark.parametrize(
    ("counts", "marks"),
    [
        # Of 20 paired images, a difference of 1 hit is not significant, and one of 10 is.
        ((19, 18, 9), {"a": "best", "b": "tied", "c": ""}),
        ((18, 18, 9), {"a": "best", "b": "best", "c": ""}),
    ],
)
def test_the_leaderboard_marks_the_best_and_those_not_significantly_lower(tmp_path, counts, marks):
    store = ResultStore(tmp_path)
    for name, count in zip("abc", counts, strict=True):
        record = build_record(model=name, checkpoint_sha256=name * 64)
        save(store, record, np.arange(20) < count)
        degenerate = replace(record, layer=4, details={"degenerate_percent": 90.0})
        save(store, degenerate, np.ones(20, bool))
    (panel,) = panels(*store.records())

    best, tied = find_best_checkpoints(panel), find_tied_checkpoints(store, panel)

    for line in panel.lines:
        one = line.checkpoint
        assert ("best" if one in best else "tied" if one in tied else "") == marks[one.name]
        assert line.best_blocks_text == "block 3"
    (single,) = panels(*(record for record in store.records() if record.model == "a"))
    assert (find_best_checkpoints(single), find_tied_checkpoints(store, single)) == (set(), set())


def test_ties_compare_each_checkpoint_at_its_own_best_block(tmp_path):
    store = ResultStore(tmp_path)
    for name, counts in {"a": (19, 5), "b": (5, 18)}.items():
        for layer, count in enumerate(counts):
            record = build_record(model=name, checkpoint_sha256=name * 64, layer=layer)
            save(store, record, np.arange(20) < count)
    (panel,) = panels(*store.records())

    assert [one.name for one in find_tied_checkpoints(store, panel)] == ["b"]


def test_overlapping_intervals_are_tied_without_per_image_values(tmp_path):
    intervals = {"a": (70.0, 90.0), "b": (60.0, 75.0), "c": (30.0, 50.0)}
    (panel,) = panels(
        *(
            build_record(model=name, checkpoint_sha256=name * 64, value=sum(ends) / 2, ci95=ends)
            for name, ends in intervals.items()
        ),
        build_record(model="d", checkpoint_sha256="d" * 64, value=75.0, ci95=None),
    )

    tied = find_tied_checkpoints(ResultStore(tmp_path), panel)

    assert [checkpoint.name for checkpoint in tied] == ["b"]


def test_checkpoints_are_sorted_by_mean_rank_and_the_best_coloured(tmp_path):
    count = len(PALETTE) + 2
    records = [
        build_record(
            model=f"run{n:02}", checkpoint_sha256=f"{n:064x}", value=50.0 + n, dataset=dataset
        )
        for n in range(count)
        for dataset in ("a", "b")
    ]
    single = build_record(model="a", checkpoint_sha256="f" * 64, dataset="c")

    report = build_report(ResultStore(tmp_path), [*records, single], [])
    board = build_leaderboard(report.panels, report.checkpoints)

    names = [checkpoint.name for checkpoint in board.checkpoints]
    assert names == [*(f"run{n:02}" for n in reversed(range(count))), "a"]
    muted = [checkpoint.name for checkpoint in report.checkpoints if "muted" in checkpoint.style]
    assert muted == ["a", "run00", "run01"]
    coloured = {c.style for c in report.checkpoints if c.name not in muted}
    assert len(coloured) == len(PALETTE)


def test_datasets_have_equal_weight_regardless_of_their_number_of_checkpoints():
    order = {"large": "bcade", "small": "ab"}
    records = [
        build_record(model=name, checkpoint_sha256=name * 64, value=50.0 - rank, dataset=dataset)
        for dataset, names in order.items()
        for rank, name in enumerate(names)
    ]

    names = [checkpoint.name for checkpoint in leaderboard(*records).checkpoints]

    # Other settings are no headline, so they do not count.
    changed = [replace(r, changed={"tau": 0}, value=99 - r.value) for r in records]
    other = [replace(r, settings={"tau": n}) for n in (0.3, 0.4) for r in changed]
    assert names == [checkpoint.name for checkpoint in leaderboard(*records, *other).checkpoints]
    # The mean ranks are (2/5 + 0/2) / 2 = 0.2 for a, (0/5 + 1/2) / 2 = 0.25 for b, and 1/5 for c.
    assert names == list("acbde")


def gallery(layers, *images: str, task: str = "pca", dataset: str = "toy") -> Gallery:
    prefixes = {layer: f"pictures/{task}/block{layer}/" for layer in layers}
    files = {image: f"{image}.png" for image in images}
    return Gallery(task, dataset, "b" * 8, "image", prefixes, files)


def strips(root, checkpoints, galleries, headline=(), hits=None):
    for one in chain(*galleries.values()):
        paths = (path.removeprefix("pictures/").removesuffix(".png") for path in one.paths())
        save_pictures(root, *paths)
    files = PictureFiles(root)
    files.list_below("pictures")
    return select_strips(files, checkpoints, galleries, headline, hits or {})


def test_figure_rows_show_an_image_that_all_checkpoints_have(tmp_path):
    first, second, third = list_checkpoints(
        [build_record(), skipless(), build_record(checkpoint_sha256="e" * 64)]
    )
    galleries = {
        first.encoder_id: [gallery([None], "all"), gallery(range(12), "cat", "dog")],
        second.encoder_id: [gallery(range(3), "dog")],
        third.encoder_id: [],
    }

    shown = strips(tmp_path, (first, second, third), galleries, hits={"cat.png": 9.0})

    assert [strip.checkpoint for strip in shown] == [first, second]
    assert {strip.title for strip in shown} == {"pca on toy, protocol image, image dog"}
    blocks = [[picture.block for picture in strip.pictures] for strip in shown]
    assert blocks == [[f"block {n}" for n in range(12)], [f"block {n}" for n in range(3)]]
    assert shown[0].pictures[-1].address == "pictures/pca/block11/dog.png"
    assert shown[0].pictures[-1].size[:2] == (4, 3)


def test_figure_rows_start_with_the_best_block_and_photograph(tmp_path):
    records = [build_record(layer=n, value=v) for n, v in enumerate((40.0, 60.0, 50.0))]
    (checkpoint,) = list_checkpoints(records)
    pair = [gallery(range(3), "cat", "dog", task=task) for task in ("tokencut", "pca")]
    galleries = {checkpoint.encoder_id: pair}

    shown = strips(tmp_path, (checkpoint,), galleries, panels(*records), {"dog.png": 1.0})

    for strip, note in zip(shown, ("best for tokencut", "best"), strict=True):
        blocks = [(picture.block, picture.note) for picture in strip.pictures]
        assert blocks == [("block 1", note), ("block 0", ""), ("block 2", "")]
        assert all(picture.address.endswith("dog.png") for picture in strip.pictures)


def test_hits_and_shares_of_the_highest_percentage_are_added(tmp_path):
    store = ResultStore(tmp_path)
    store.save_image_ids(build_record().dataset_fingerprint, ["cat", "dog", "cow"])
    save(store, build_record(), np.array([1, 0, 1], bool))
    save(store, skipless(metric="overlap"), np.array([40.0, 80.0, 0.0]))

    counted = count_hits(store, panels(*store.records()))

    assert counted == {"cat.png": 1.5, "dog.png": 1.0, "cow.png": 1.0}


def test_tiles_outside_of_a_picture_are_ignored(tmp_path):
    tiles = PngInfo()
    tiles.add_text(TILES, "[[0, 0, 4, 3], [1, 0, 4, 3], [0, 1, 4, 3], [-1, 0, 2, 2]]")
    Image.new("L", (4, 3)).save(tmp_path / "a.png", pnginfo=tiles)
    files = PictureFiles(tmp_path)

    assert list(map(str, files.list_below(""))) == ["a.png"]
    assert files.picture_size("a.png").tiles == [(0, 0, 4, 3)]


PHOTOGRAPH, MAP = (4, 22, 192, 144), (200, 22, 192, 144)


@pytest.mark.parametrize(
    ("task", "parts"),
    [
        ("pca", [("photograph", PHOTOGRAPH), ("block 3", MAP)]),
        ("attention", [("photograph", PHOTOGRAPH), ("block 3", MAP)]),
        # The objects are drawn on the photograph.
        ("tokencut", [("block 3", PHOTOGRAPH)]),
        ("knn", [("block 3", None)]),
    ],
)
def test_figure_rows_show_the_relevant_parts_of_a_sheet(tmp_path, task, parts):
    (checkpoint,) = list_checkpoints([build_record()])
    path = tmp_path / f"pictures/{task}/block3/dog.png"
    photograph, patches = np.zeros((150, 200, 3), np.uint8), np.zeros((3, 4, 3), np.uint8)
    save_sheet([[draw_tile(photograph, "dog"), draw_tile(patches, "block 3")]], path)
    files = PictureFiles(tmp_path)
    files.list_below("pictures")

    galleries = {checkpoint.encoder_id: [gallery([3], "dog", task=task)]}
    (strip,) = select_strips(files, (checkpoint,), galleries, [], {})

    assert [(picture.block, picture.view) for picture in strip.pictures] == parts
    assert strip.pictures[-1].alt == f"skip, {task} on toy, protocol image, block 3, image dog"


def test_viewers_list_both_checkpoints_and_start_at_the_last_block(tmp_path):
    first, other = gallery([0, 3], "a#b", "cat"), gallery([None], "all", task="tokencut")
    second = replace(first, prefixes={n: f"pictures/other/block{n}/" for n in (0, 3)})
    for one in (first, second, other):
        save_pictures(tmp_path, *(p.removeprefix("pictures/")[:-4] for p in one.paths()))
    Image.new("RGB", (8, 6)).save(tmp_path / "pictures/other/block3/a#b.png")
    files = PictureFiles(tmp_path)
    files.list_below("pictures")

    sections = build_picture_sections(files, [[("x", other)], [("skip", first), ("b", second)]])

    assert [(one["title"], one["anchor"]) for one in sections] == [
        *(("pca", "pictures-pca"), ("tokencut", "pictures-tokencut")),
    ]
    (viewer,), (tall,) = (section["viewers"] for section in sections)
    assert (viewer["title"], viewer["start"]) == ("toy, protocol image", 1)
    assert (viewer["is_tall"], tall["is_tall"]) == (False, True)
    assert tall["title"] == "toy, protocol image, all blocks"
    assert [side["address"] for side in viewer["sides"]] == [
        *("pictures/pca/block3/a%23b.png", "pictures/other/block3/a%23b.png"),
    ]
    assert [side["size"][:2] for side in viewer["sides"]] == [(4, 3), (8, 6)]
    alt = "pca on toy, protocol image, block 3, image a#b"
    assert [side["alt"] for side in viewer["sides"]] == [f"skip, {alt}", f"b, {alt}"]
    assert viewer["data"] == {
        "what": "pca on toy, protocol image",
        "layers": [0, 3],
        "images": [["a#b", "a%23b.png", 4, 3], ["cat", "cat.png", 4, 3]],
        "sides": [
            {"name": "skip", "prefixes": ["pictures/pca/block0/", "pictures/pca/block3/"]},
            {"name": "b", "prefixes": ["pictures/other/block0/", "pictures/other/block3/"]},
        ],
    }


def test_figure_rows_prefer_datasets_with_more_checkpoints_and_blocks(tmp_path):
    first, second = list_checkpoints([build_record(), skipless()])

    def describe_strips(own: list[Gallery], *others: Gallery) -> list[tuple[str, ...]]:
        galleries = {first.encoder_id: own, second.encoder_id: list(others)}
        return [
            (strip.title.split()[0], strip.title.split()[2], strip.checkpoint.name)
            for strip in strips(tmp_path, (first, second), galleries)
        ]

    cut, pca = gallery([0], "dog", task="tokencut"), gallery([0], "dog")
    # The strips are sorted by the rank of their task.
    assert describe_strips([pca, cut], cut) == [
        ("pca", "toy,", "skip"), ("tokencut", "toy,", "skip"), ("tokencut", "toy,", "skipless")
    ]  # fmt: skip
    many, few = gallery([0], "dog", dataset="many"), gallery([0], "dog", dataset="few")
    assert [words[1] for words in describe_strips([few, many], many)] == ["many,", "many,"]
    many = gallery([0, 1, 2], "dog", dataset="many")
    assert [words[1] for words in describe_strips([few, many])] == ["many,"]


def test_pictures_of_other_blocks_are_left_out():
    both = [gallery(range(12), "dog"), gallery([None], "all"), gallery(range(3), "cat")]
    kept = keep_layers(both, {5, -1}, 12)
    assert [list(one.prefixes) for one in kept] == [[5, 11], [None]]
    assert keep_layers(both, None, 12) == both


def test_tables_of_blocks_have_few_columns(tmp_path):
    records = [
        build_record(**SEGMENTATION | {"metric": f"miou_{name}"}, layer=layer, value=float(layer))
        for name in "abcd"
        for layer in (0, 5, 11)
    ]

    page = write_page(tmp_path, *records, page="checkpoint-*.html")

    tables = re.findall(r'<table class="blocks">.*?</table>', page, re.DOTALL)
    rows = [re.findall(r'<th scope="row">(\d+)</th>', table) for table in tables]
    heads = [re.findall(r"<button type=\"button\">(.*?)</button>", table) for table in tables]
    assert rows == [["0", "5", "11"]] * 2
    assert heads == [["block", *(f"miou_<wbr>{n} (%)" for n in names)] for names in ("ab", "cd")]
    assert [table.count('class="best"') for table in tables] == [2, 2]
    # The fourth table of a dataset is folded.
    many = [plain(facet=f"f{number}") for number in range(11)]
    (group,) = group_block_tables([(panel, panel.lines[0]) for panel in panels(*many)])
    assert list(map(len, [*group.tables, *group.folded])) == [2, 3, 3, 3]
    assert len(group.folded) == 1


def test_blocks_with_equal_values_are_all_the_best():
    for values, text, marked in (
        ((1, 3, 2), "block 1", [1]),
        ((3, 1, 3), "blocks 0 and 2", [0, 2]),
        ((2, 2, 2), "all 3 blocks equal", []),
        ((2,), "block 0", [0]),
    ):
        records = [
            build_record(layer=layer, value=float(value)) for layer, value in enumerate(values)
        ]
        (line,) = panels(*records)[0].lines
        assert line.best_blocks_text == text
        assert [point.layer for point in line.marked_entries] == marked
    degenerate = {"details": {"degenerate_percent": 90.0}}
    for make, changes, text in (
        (plain, {}, "block 1"),
        (build_record, degenerate, "block 1, degenerate"),
    ):
        records = [replace(make(layer=layer), **changes) for layer in (0, 1)]
        assert panels(*records)[0].lines[0].best_blocks_text == text


def test_pictures_come_first_if_no_task_has_labels(tmp_path):
    pca = build_record(task="pca", metric="explained_variance", dataset="folder")
    for root, labelled in ((tmp_path / "a", []), (tmp_path / "b", [build_record()])):
        for task in ("pca", "conditioning"):
            save_pictures(root, f"{task}/folder/{get_figures_folder(pca)}/image/block03/dog")
        index = element_ids(write_page(root, pca, plain(layer=0, dataset="folder"), *labelled))
        own = element_ids(next((root / "report").glob("checkpoint-*.html")).read_text())

        for ids in (index, own):
            first = next(i for i in ids if i.startswith("pictures"))
            assert (ids.index(first) < ids.index("summary")) == (not labelled)
        pictures = [i for i in own if i.startswith("pictures")]
        assert pictures == ["pictures-pca", "pictures-conditioning"]
        assert own.index(pictures[-1]) < own.index("properties")
