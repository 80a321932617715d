"""What a report says, counted by hand from a handful of records."""

import hashlib
import json
import math
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from PIL import Image
from test_results import RECORD

from probes.pca import PCA
from ssl_bench.cli import main
from ssl_bench.data.folder import ImageFolder
from ssl_bench.errors import ConfigurationError, MachineError
from ssl_bench.evaluation import Evaluation
from ssl_bench.models import load_encoder
from ssl_bench.report.checkpoints import checkpoints_of
from ssl_bench.report.comparing import PanelPair, gallery_pairs, pairs_of, panel_pair, scored
from ssl_bench.report.curves import Curve, Reference, Spot, draw, nice_ticks
from ssl_bench.report.folder import MARKER, replacing
from ssl_bench.report.model import panels_of
from ssl_bench.report.outcomes import extremes_of, outcomes_of
from ssl_bench.report.pictures import galleries_of
from ssl_bench.results import Record, ResultStore
from ssl_bench.tables.comparison import Curve as Scores
from ssl_bench.tables.comparison import comparisons
from ssl_bench.tables.sheets import NO_VALUE
from tests.faults import encoder_file, photo_folder

SKIP, SKIPLESS = "a" * 64, "c" * 64
EVIL = "<script>alert(1)</script>\"'&{{ 7 * 7 }}"
MOST_BYTES = 3_000_000


def cell(**changes) -> Record:
    return replace(RECORD, details={}, **changes)


def skipless(**changes) -> Record:
    return cell(**{"model": "skipless", "checkpoint_sha256": SKIPLESS, **changes})


def curve(*values, low=None, high=None):
    spots = tuple(Spot(layer, value, low, high, "") for layer, value in enumerate(values))
    return Curve("skip", "c0 d0", 0, spots)


def save(store: ResultStore, record: Record, per_image) -> None:
    """With the value that the images add up to."""
    value = Scores(record.metric, {}).value(per_image)
    store.save(replace(record, value=value, num_images=len(per_image)), per_image)


def save_pictures(root: Path, *names: str) -> None:
    for name in names:
        path = root / "pictures" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 3)).save(path)


class Elements(HTMLParser):
    """Elements with their attributes, and the text outside of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag):
        self._open = "" if tag == self._open else self._open

    def handle_data(self, data):
        self.text += "" if self._open == "script" else data


def test_a_point_is_the_mean_of_its_seeds_with_the_interval_of_one():
    records = [
        cell(value=40.0, ci95=(35.0, 45.0)),
        cell(value=50.0, ci95=(46.0, 56.0), seed=1),
        cell(value=math.nan, ci95=None, layer=4),
        cell(value=9.0, ci95=None, layer=5),
    ]

    (line,) = panels_of(records, checkpoints_of(records))[0].lines

    assert [point.text for point in line.points] == ["45.0 ± 5.0", NO_VALUE, "9.0"]
    assert (line.points[0].entry.low, line.points[0].entry.high) == (40.5, 50.5)
    assert line.points[0].records == (0, 1)
    assert line.best == line.points[0]


def plain(**changes) -> Record:
    return cell(**{"task": "conditioning", "metric": "condition_number", "unit": "", **changes})


def test_of_a_plain_number_no_block_is_best_and_its_interval_is_shown_by_its_ends():
    records = [
        plain(value=12345.0, ci95=(9e3, math.inf), layer=0),
        plain(value=math.inf, ci95=None, layer=1),
        cell(task="pca", metric="explained_variance", layer=0),
        cell(layer=0),
    ]

    panels = panels_of(records, checkpoints_of(records))

    lines = {panel.metric: panel.lines[0] for panel in panels}
    texts = [point.text for point in lines["condition_number"].points]
    assert texts == ["1.23e+04 [9e+03, ∞]", "∞"]
    assert [point.sort_key for point in lines["condition_number"].points] == ["12345.0", "Infinity"]
    best = {metric: line.best is not None for metric, line in lines.items()}
    assert best == {"condition_number": False, "explained_variance": False, "corloc": True}


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([cell()], "Values are percent; bands and ± are"),
        ([plain()], "Values are plain numbers; bands and [ ] are"),
        (
            [cell(), plain()],
            "Values are percent, except plain numbers: condition_number; bands, ± and [ ] are",
        ),
    ],
    ids=["percent", "plain numbers", "both"],
)
def test_pages_say_percent_of_percent_alone(tmp_path, records, said):
    store = ResultStore(tmp_path)
    for record in records:
        store.save(record)

    assert main(["report", "--out", str(tmp_path)]) == 0

    page = (tmp_path / "report" / "index.html").read_text()
    assert said in Elements(page).text
    charts = re.findall(r'<svg class="chart".*?</svg>', page, re.DOTALL)
    assert ['text x="6" y="236">%<' in chart for chart in charts] == [
        record.unit == "%" for record in sorted(records, key=lambda record: record.task)
    ]
    assert ("Highest value over blocks" in page) == any(record.unit for record in records)
    script = (tmp_path / "report" / "records.js").read_text()
    assert ('"plain number"' in script) == any(not record.unit for record in records)


def test_means_over_seeds_say_what_is_of_one_seed_alone(tmp_path):
    store = ResultStore(tmp_path)
    for seed in (1, 0):
        record = cell(seed=seed, task="segmentation", metric="miou_oracle")
        save(store, replace(record, details={"iou_by_class": {"dog": 3.0}}), counts(PERFECT, HALF))

    assert main(["report", "--out", str(tmp_path)]) == 0

    (page,) = (tmp_path / "report").glob("checkpoint-*.html")
    assert "are of the lowest seed alone" in page.read_text()
    shutil.rmtree(store.root / "records")
    save(store, record, counts(PERFECT, HALF))
    assert main(["report", "--out", str(tmp_path)]) == 0
    assert "are of the lowest seed alone" not in page.read_text()


def test_the_records_of_a_point_stand_in_the_order_of_their_seeds():
    records = [cell(seed=2), cell(seed=0), cell(seed=1)]

    (line,) = panels_of(records, checkpoints_of(records))[0].lines

    assert line.points[0].records == (1, 2, 0)


def test_numbers_with_other_settings_or_data_stand_in_panels_of_their_own():
    same, other = {"tau": 0.2, "eps": 1}, {"tau": 0.3, "eps": 1}
    records = [cell(settings=same), skipless(settings=same), cell(settings=other)]
    records.append(cell(settings=same, dataset_fingerprint="d" * 64))

    panels = panels_of(records, checkpoints_of(records))

    assert [panel.difference for panel in panels] == [
        ", eps=1 [tau=0.2, data bbbbbb]",
        ", eps=1, tau=0.3 [data bbbbbb]",
        ", eps=1 [tau=0.2, data dddddd]",
    ]
    assert [line.checkpoint.name for line in panels[0].lines] == ["skip", "skipless"]


def test_a_checkpoint_without_skips_is_drawn_dashed_in_the_colour_of_its_counterpart():
    names = ["skip_soap", "vit", "skipless_soap", "skip_adamw"]
    records = [cell(model=m, checkpoint_sha256=f"{i}" * 64) for i, m in enumerate(names)]

    styles = {checkpoint.name: checkpoint.style for checkpoint in checkpoints_of(records)}

    assert styles == {
        "skip_adamw": "c0 d0",
        "skip_soap": "c1 d0",
        "skipless_soap": "c1 d0s",
        "vit": "c2 d0",
    }


def test_no_two_of_many_checkpoints_look_the_same():
    shas = [hashlib.sha256(bytes([i])).hexdigest() for i in range(22)]
    records = [cell(checkpoint_sha256=s, model=f"vit{i % 11}") for i, s in enumerate(shas)]

    checkpoints = checkpoints_of(records)

    assert len({checkpoint.name for checkpoint in checkpoints}) == 22
    assert len({checkpoint.style for checkpoint in checkpoints}) == 22
    assert len({checkpoint.page for checkpoint in checkpoints}) == 22


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 10.0, (0, 2, 4, 6, 8, 10)),
        (21.4, 33.0, (20, 25, 30, 35)),
        (-3.1, 0.9, (-4, -3, -2, -1, 0, 1)),
        (97.0, 97.0, (96.5, 97.0, 97.5)),
        (100 / 3, 100 / 3 + 1e-14, (32.5, 33.0, 33.5, 34.0)),
        (1e18, 1e18, (0.999e18, 0.9995e18, 1e18, 1.0005e18, 1.001e18)),
        (0.001, 0.0042, (0.001, 0.002, 0.003, 0.004, 0.005)),
    ],
)
def test_ticks_are_round_and_hold_all_values(low, high, ticks):
    found = nice_ticks(low, high)

    assert found[0] <= low
    assert found[-1] >= high
    assert len(found) <= 6
    assert found == pytest.approx(ticks)


def test_a_curve_spans_the_drawing_and_a_missing_value_breaks_it():
    chart = draw([curve(0.0, 10.0, math.nan, 5.0)])

    (drawn,) = chart.curves
    assert [mark.x for mark in drawn.marks] == pytest.approx([52, 161.3, 380], abs=0.1)
    assert [mark.y for mark in drawn.marks] == [chart.bottom, chart.top, 108.0]
    assert drawn.line.count("M") == 2
    assert drawn.band == ""


def test_a_band_goes_up_the_upper_ends_and_back_along_the_lower_ones():
    chart = draw([curve(5.0, 5.0, low=0.0, high=10.0)])

    left, right = chart.left + 10, chart.right - 10
    assert chart.curves[0].band == f"M{left} 10L{right} 10L{right} 206L{left} 206Z"


def test_plain_numbers_that_span_magnitudes_lie_on_powers_of_ten():
    chart = draw([curve(1.0, 10.0, math.inf, 1000.0)], unit="")

    (drawn,) = chart.curves
    assert [tick.label for tick in chart.y_ticks] == ["1", "10", "100", "1000"]
    assert [tick.label for tick in draw([curve(0.0, 3e5)], unit="").y_ticks][-1] == "3e5"
    heights = [chart.bottom, chart.bottom - 196 / 3, chart.top, chart.top]
    assert [mark.y for mark in drawn.marks] == pytest.approx(heights, abs=0.1)
    assert [mark.is_infinite for mark in drawn.marks] == [False, False, True, False]
    assert drawn.line.count("M") == 1


def test_the_band_of_a_plain_number_ends_where_its_interval_does():
    chart = draw([curve(10.0, 10.0, low=1.0, high=math.inf), curve(1000.0)], unit="")

    left, right = chart.left + 10, chart.right - 10
    assert chart.curves[0].band == f"M{left} 10L{right} 10L{right} 206L{left} 206Z"


@pytest.mark.parametrize(
    ("values", "unit"), [((1.0, 100.0), ""), ((0.0, 1000.0), ""), ((0.1, 99.0), "%")]
)
def test_other_numbers_lie_on_even_steps(values, unit):
    steps = [float(tick.label) for tick in draw([curve(*values)], unit=unit).y_ticks]

    assert np.diff(steps, 2) == pytest.approx(0)


def test_powers_of_ten_are_few_however_many_there_are():
    chart = draw([curve(3e-7, 5e11)], unit="")

    powers = [math.log10(float(tick.label)) for tick in chart.y_ticks]
    assert len(powers) <= 6
    assert max(len(tick.label) for tick in chart.y_ticks) <= 5
    assert (powers[0] <= -7, powers[-1] >= 12) == (True, True)


def test_a_published_value_far_away_does_not_flatten_the_curves():
    near, far = Reference("near", 7.0), Reference("far", 70.0)

    chart = draw([curve(0.0, 10.0)], [near, far])

    assert [level.label for level in chart.levels] == ["near"]
    assert chart.y_ticks[-1].label == "10"


def test_pictures_are_found_by_block_by_sheet_and_by_protocol(tmp_path):
    records = [cell(protocol="lr=1e-3", facet="key"), cell(protocol="reference")]
    save_pictures(
        tmp_path,
        "tokencut/toy/skip-aaaaaaaa/reference/block00_key/one",
        "tokencut/toy/skip-aaaaaaaa/reference/block00_key/two",
        "tokencut/toy/skip-aaaaaaaa/reference/block01_key/one",
        "tokencut/toy/skip-aaaaaaaa/reference/block01_key",
        "tokencut/toy/skip-aaaaaaaa/reference/masks/block01_key/one",
        "tokencut/toy/skip-aaaaaaaa/lr=1e-3-key-dog-7",
        "tokencut/toy/other-aaaaaaaa/reference/block00_key/one",
    )
    drawing = tmp_path / "pictures/tokencut/toy/skip-aaaaaaaa/reference/block01_key.svg"
    drawing.write_text("<svg/>")
    drawing.with_name("grid.svg").write_text("<svg/>")
    (checkpoint,) = checkpoints_of(records)

    blocks, sheet, *panels = galleries_of(tmp_path, records, checkpoint)

    start = "pictures/tokencut/toy/skip-aaaaaaaa/"
    # The second image lacks a block.
    assert (blocks.variant, blocks.layers, list(blocks.files)) == ("reference key", (0, 1), ["one"])
    assert blocks.path(1, "one") == f"{start}reference/block01_key/one.png"
    assert sheet.paths() == [f"{start}reference/block01_key.png"]
    assert {panel.variant: panel.files for panel in panels} == {
        "lr=1e-3 key": {"dog-7": "lr=1e-3-key-dog-7.png"},
        "reference": {"grid": "reference/grid.svg"},
    }


def test_a_pair_shows_every_kind_of_picture_that_both_have(tmp_path):
    records = [cell(task="pca"), skipless(task="pca")]
    for folder in ("skip-aaaaaaaa", "skipless-cccccccc"):
        names = ("block00/one", "block01/one", "block01/two", "block01", "blocks-0-1")
        save_pictures(tmp_path, *(f"pca/toy/{folder}/image/{name}" for name in names))
    save_pictures(tmp_path, "pca/toy/skip-aaaaaaaa/image/block02/one")
    first, second = (galleries_of(tmp_path, records, c) for c in checkpoints_of(records))

    pairs = gallery_pairs(first, second)

    shown = [(list(p.first.prefixes), list(p.first.files)) for p in pairs]
    assert shown == [([0, 1], ["one"]), ([1], [""]), ([None], ["blocks-0-1"])]
    assert all("skipless-cccccccc" in path for pair in pairs for path in pair.second.paths())


def discovery_log(settings, dtype="torch.float32", version=RECORD.version, **outcomes) -> str:
    key = {"checkpoint_sha256": SKIP, "dataset_fingerprint": "b" * 64, "settings": settings}
    key |= {"dtype": dtype, "version": version}
    lines = [{"key": key, "format": 2}]
    for image, (hit, degenerate, boxes) in outcomes.items():
        found = {"3/key": {"hit": hit, "degenerate": degenerate}}
        lines.append({"image": image, "num_boxes": boxes, "cells": found})
    return "\n".join(map(json.dumps, lines)) + '\n{"image": "cut sh'


def test_hits_misses_and_degenerate_images_come_from_the_log_of_the_same_settings(tmp_path):
    records = [cell(settings={"tau": 0.2, "dtype": "float32"})]
    folder = tmp_path / "pictures/tokencut/toy/skip-aaaaaaaa/reference"
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
    (checkpoint,) = checkpoints_of(records)
    (panel,) = panels_of(records, (checkpoint,))

    found = outcomes_of(tmp_path, records, panel, checkpoint)

    assert found is not None
    (kinds,) = found.by_point.values()
    assert kinds == {"hits": ("a",), "misses": ("b",), "degenerate": ("c",)}


def counts(*images):
    """Right, predicted and true pixels of two classes for each image."""
    return np.array(images, np.int32)


PERFECT = [[4, 4], [4, 4], [4, 4]]
HALF = [[2, 0], [4, 0], [2, 2]]
WRONG = [[0, 0], [4, 0], [0, 4]]
EMPTY = [[0, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("ids", [("dog", "cat", "cow", "sky"), None])
def test_the_worst_and_best_images_are_named_where_ids_were_kept(tmp_path, ids):
    store = ResultStore(tmp_path)
    record = cell(task="segmentation", metric="miou_holdout")
    save(store, record, counts(PERFECT, WRONG, EMPTY, HALF))
    if ids:
        store.save_image_ids(record.dataset_fingerprint, ids)
    records = store.records()
    checkpoints = checkpoints_of(records)
    (panel,) = panels_of(records, checkpoints)

    found = extremes_of(store, records, panel, panel.lines[0])

    assert found is not None
    names = ids or [f"image {i} of 4" for i in (1, 2, 3, 4)]
    # Of the half-right image: IoU 2 / 4 of the first class, 0 / 2 of the second.
    assert found.num_scored == 3
    assert [(s.image, s.value) for s in found.worst] == [(names[1], 0)]
    assert [(s.image, s.value) for s in found.best] == [(names[0], 100)]


def compared_pair(store: ResultStore, records: list[Record]) -> PanelPair:
    """The only two checkpoints in the only panel."""
    one, other = checkpoints_of(records)
    (panel,) = panels_of(records, (one, other))
    first, second = (scored(store, records, panel, checkpoint) for checkpoint in (one, other))
    assert first is not None
    assert second is not None
    compared = panel_pair(panel, first, second)
    assert compared is not None
    return compared


@pytest.mark.parametrize("metric", ["corloc", "miou", "pixel_accuracy"])
def test_differences_are_those_of_the_command_compare(tmp_path, metric):
    store, random = ResultStore(tmp_path), np.random.default_rng(0)
    made = [make(layer=n, metric=metric) for make in (cell, skipless) for n in (0, 1, 2)]
    for record in made:
        if metric == "corloc":
            save(store, record, random.random(11) < 0.5)
        else:
            right = random.integers(0, 9, (11, 1, 2))
            save(store, record, np.concatenate([right, right + 2, right + 1], 1).astype(np.int32))
    records = store.records()

    compared = compared_pair(store, records)

    ((_, rows),) = comparisons(store, records, [SKIP, SKIPLESS])
    found = [row.difference for row in (*compared.rows, *compared.summary)]
    fields = ("first", "second", "low", "high")
    assert [[getattr(one, f) for f in fields] for one in found] == [
        [getattr(row, f) for f in fields] for row in rows
    ]
    blocks = [tuple(records[i].layer for i in (*r.first, *r.second)) for r in compared.rows]
    assert blocks == [(0, 0), (1, 1), (2, 2)]


def test_of_several_seeds_the_lowest_is_compared(tmp_path):
    store = ResultStore(tmp_path)
    for seed in (2, 1):
        save(store, cell(seed=seed), np.arange(10) < 2 * seed)
        save(store, skipless(seed=seed), np.arange(10) < 5 * seed)

    (row,) = compared_pair(store, store.records()).rows

    assert (row.difference.first, row.difference.second) == (20, 50)


def test_a_probe_leaves_the_ids_that_name_its_images(tmp_path):
    encoder = load_encoder(str(encoder_file(tmp_path / "encoder.safetensors")))
    dataset = ImageFolder(photo_folder(tmp_path / "photos", 2))
    store, cpu = ResultStore(tmp_path / "results"), torch.device("cpu")
    probe = PCA(num_images=1, image_size=32)

    evaluation = Evaluation(encoder, dataset, probe, (0,), 0, cpu, torch.float32)
    (record,) = evaluation.run(store, say=print)

    assert store.image_ids(record.dataset_fingerprint) == dataset.images().ids
    assert store.image_ids("0" * 64) is None


def test_images_right_on_one_side_only_are_counted(tmp_path):
    store = ResultStore(tmp_path)
    save(store, cell(), np.array([1, 1, 1, 0, 0, 0, 0], bool))
    save(store, skipless(), np.array([1, 0, 0, 1, 1, 1, 0], bool))

    assert compared_pair(store, store.records()).tally == (1, 2, 3, 1)


def test_pairs_of_many_checkpoints_must_be_asked_for():
    few = checkpoints_of([cell(checkpoint_sha256=f"{i}" * 64, model=f"m{i}") for i in range(4)])
    many = checkpoints_of([cell(checkpoint_sha256=f"{i}" * 64, model=f"m{i}") for i in range(7)])

    assert len(pairs_of(few, [])) == 6
    assert pairs_of(many, []) == []
    assert [(p.first.name, p.second.name) for p in pairs_of(many, [("m6", "0000")])] == [
        ("m6", "m0")
    ]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("skip", "skip"), "two different"),
        (("skip", "vit"), "no record of 'vit'; expected one of skip, skipless"),
    ],
)
def test_a_wrong_pair_is_refused(asked, message):
    checkpoints = checkpoints_of([cell(), skipless()])

    with pytest.raises(ConfigurationError, match=message):
        pairs_of(checkpoints, [asked])


def test_a_folder_that_is_no_report_is_not_touched(tmp_path, capsys):
    ResultStore(tmp_path / "results").save(cell())
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")

    arguments = ["report", "--out", str(tmp_path / "results"), "--into", str(tmp_path / "thesis")]
    code = main(arguments)

    message = capsys.readouterr().err
    assert code == 2
    assert message.count("\n") == 1
    assert "is no report" in message
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter.txt"]


def test_a_report_takes_the_place_of_an_older_one_only_when_it_is_whole(tmp_path):
    def write(text):
        with replacing(tmp_path / "report") as new:
            (new / "index.html").write_text(text)
            if text == "half":
                raise KeyboardInterrupt

    write("first")
    with pytest.raises(KeyboardInterrupt):
        write("half")
    assert (tmp_path / "report" / "index.html").read_text() == "first"

    write("second")
    assert (tmp_path / "report" / "index.html").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


@pytest.mark.parametrize("name", ["old", "new"])
def test_an_interrupt_between_two_names_leaves_the_older_report(tmp_path, monkeypatch, name):
    with replacing(tmp_path / "report") as new:
        (new / "index.html").write_text("first")
    rename = Path.rename

    def interrupted(path, target):
        if path.suffix == ".new" or name == "old":
            monkeypatch.undo()
            if name == "old":
                rename(path, target)
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "report") as new:
        (new / "index.html").write_text("second")

    assert (tmp_path / "report" / "index.html").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_an_older_report_that_cannot_be_put_back_is_kept(tmp_path, monkeypatch):
    with replacing(tmp_path / "report") as new:
        (new / "index.html").write_text("first")
    rename = Path.rename

    def refused(path, target):
        if path.name == "report":
            return rename(path, target)
        raise OSError("no")

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(MachineError), replacing(tmp_path / "report"):
        pass

    (kept,) = tmp_path.glob(".report.*.old/index.html")
    assert kept.read_text() == "first"


@pytest.fixture(scope="module")
def evil_report(tmp_path_factory) -> Path:
    """A report of records in which every name is markup."""
    root = tmp_path_factory.mktemp("evil")
    store = ResultStore(root)
    attribute = '" onmouseover="alert(1)'
    for make, sha in ((cell, SKIP), (skipless, SKIPLESS)):
        record = replace(
            make(task="segmentation", metric="miou_oracle"),
            model=EVIL,
            checkpoint_sha256=sha,
            dataset="<img src=x onerror=alert(1)>",
            facet=attribute,
            settings={EVIL: EVIL},
            device=EVIL,
            details={"iou_by_class": {EVIL: 3.0, "dog": None}, "note": EVIL},
        )
        save(store, record, counts(PERFECT, HALF, WRONG))
        folder = f"{EVIL.replace('/', '_')}-{sha[:8]}"
        save_pictures(root, f"segmentation/{record.dataset}/{folder}/reference/block00/a#b?<50%20")
    store.save_image_ids(RECORD.dataset_fingerprint, (EVIL, attribute, "c"))
    assert main(["report", "--out", str(root)]) == 0
    return root / "report"


def test_names_are_text_wherever_they_stand(evil_report):
    pages = {path.name: Elements(path.read_text()) for path in evil_report.glob("*.html")}

    assert len(pages) == 4
    for page in pages.values():
        attributes = {name for _, given in page.elements for name in given}
        assert not {name for name in attributes if name.startswith("on")}
        scripts = [given for tag, given in page.elements if tag == "script"]
        assert all(
            given.get("src") in ("records.js", "report.js")
            or given.get("type") == "application/json"
            for given in scripts
        )
        assert all(given["src"] != "x" for tag, given in page.elements if tag == "img")
        assert "{{ 7 * 7 }}" in page.text
        assert EVIL in page.text


def test_the_pictures_of_evil_names_are_where_the_pages_look_for_them(evil_report):
    sources = [
        given["src"] or ""
        for path in evil_report.glob("*.html")
        for tag, given in Elements(path.read_text()).elements
        if tag == "img"
    ]

    assert sources
    assert all((evil_report / unquote(source)).is_file() for source in sources)


def test_the_provenance_of_a_number_names_its_record(evil_report):
    script = (evil_report / "records.js").read_text()
    content = json.loads(script.removeprefix("const RECORDS = ").rstrip().removesuffix(";"))

    first = {
        name: content["words"][word]
        for name, word in zip(content["names"], content["rows"][0], strict=True)
    }
    index = Elements((evil_report / "index.html").read_text())
    pressed = [given["data-r"] for tag, given in index.elements if "data-r" in given]

    assert (evil_report.parent / first["record"]).is_file()
    assert first["settings"] == {EVIL: EVIL}
    # 6 of 12 pixels in the union of the first class, 4 of 10 in that of the second.
    assert (first["value"], first["unit"], first["95 % interval"]) == (45, "%", [35, 45.5])
    assert set(pressed) == {"0", "1"}


def test_published_values_are_marked_and_say_what_differs(tmp_path):
    store = ResultStore(tmp_path)
    store.save(cell(task="segmentation", dataset="voc2012", metric="miou_oracle", facet="token"))

    main(["report", "--out", str(tmp_path)])

    text = Elements((tmp_path / "report" / "index.html").read_text()).text
    assert "62.3 published" in text
    assert "table 2" in text
    assert "Not the same experiment; published: ViT-Small" in text


def test_unreadable_records_are_counted_and_said(tmp_path, capsys):
    store = ResultStore(tmp_path)
    store.save(cell())
    store.save(skipless()).write_text("{")

    main(["report", "--out", str(tmp_path)])

    assert "not a complete record" in capsys.readouterr().err
    text = Elements((tmp_path / "report" / "index.html").read_text()).text
    assert "1 record of 1 checkpoint in 1 panel." in text
    assert "1 unreadable record left out." in text


def test_only_what_was_asked_for_is_in_the_report(tmp_path):
    store = ResultStore(tmp_path)
    store.save(cell())
    store.save(cell(task="knn", metric="top1_k20"))

    main(["report", "--out", str(tmp_path), "--task", "knn", "--into", str(tmp_path / "knn")])

    text = (tmp_path / "knn" / "index.html").read_text()
    assert "top1_k20" in text
    assert "corloc" not in text
    assert (tmp_path / "knn" / MARKER).is_file()


@pytest.mark.slow
def test_four_checkpoints_with_all_records_stay_small(tmp_path):
    source = ResultStore(Path(__file__).parents[1] / "results" / "dino_photographs")
    store = ResultStore(tmp_path)
    for record in source.records():
        if not record.model.startswith("random"):
            store.save(record, source.per_image(record))

    main(["report", "--out", str(tmp_path)])

    sizes = [path.stat().st_size for path in (tmp_path / "report").rglob("*") if path.is_file()]
    assert len(list((tmp_path / "report").glob("compare-*.html"))) == 6
    assert sum(sizes) < MOST_BYTES
