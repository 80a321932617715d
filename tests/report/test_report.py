"""Test the HTML report that `ssl-bench report` writes."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from pyarrow import parquet

from ssl_bench.cli.__main__ import main
from ssl_bench.errors import ConfigurationError, MachineError
from ssl_bench.report.panels import MAX_LINES, group_into_panels, list_checkpoints
from ssl_bench.report.pictures import PictureFiles, find_galleries
from ssl_bench.report.writing import make_records_script, replace_report
from ssl_bench.results import Record, ResultStore
from ssl_bench.system.files import REPORT_MARK
from ssl_bench.tables.styles import PALETTE
from tests.core.test_results import RECORD
from tests.support.faults import expect_error, unchecked_types
from tests.support.report_cells import (
    EVIL,
    HALF,
    MOST_BYTES,
    PERFECT,
    SKIP,
    SKIPLESS,
    WRONG,
    Elements,
    build_record,
    counts,
    get_figures_folder,
    plain,
    save,
    save_pictures,
    skipless,
)


def write_report(root: Path, *records: Record) -> Path:
    for record in records:
        ResultStore(root).save(record)
    assert main(["report", "--out", str(root)]) == 0
    return root / "report"


def test_axes_and_columns_name_the_unit(tmp_path):
    report = write_report(tmp_path, build_record(), plain())

    page, (own,) = (report / "index.html").read_text(), report.glob("checkpoint-*.html")
    charts = re.findall(r'<svg class="chart".*?</svg>', page, re.DOTALL)
    axes = [label for chart in charts for label in re.findall('class="measured".*?>(.*?)<', chart)]
    assert axes == ["corloc (%)", "condition_number"]
    text = Elements(own.read_text()).text
    assert "corloc (%)" in text
    assert "condition_number" in text
    assert "plain number" in (report / "records.js").read_text()


def test_a_table_of_classes_of_several_seeds_has_a_note(tmp_path):
    for seed in (1, 0):
        record = build_record(seed=seed, task="segmentation", metric="miou_oracle")
        record = replace(record, details={"iou_by_class": {"dog": 3.0}})
        (page,) = write_report(tmp_path, record).glob("checkpoint-*.html")
        assert ("are those of the lowest seed" in page.read_text()) == (seed == 0)
    # Of several mean IoU metrics, only the first has a table of classes.
    details = {"iou_by_class": {"dog": 7.0}}
    (page,) = write_report(tmp_path, replace(record, metric="miou_holdout", details=details)).glob(
        "checkpoint-*.html"
    )
    assert re.findall(r">dog</th><td>(.*?)<", page.read_text()) == ["7.0"]


def test_pictures_are_found_by_block_and_by_protocol(tmp_path):
    records = [build_record(protocol="lr=1e-3", facet=facet) for facet in ("key", "key-all")]
    records.append(build_record(protocol="reference"))
    skip, other = (get_figures_folder(build_record(model=model)) for model in ("skip", "other"))
    save_pictures(
        tmp_path,
        f"tokencut/toy/{skip}/reference/block00_key/one",
        f"tokencut/toy/{skip}/reference/block00_key/two",
        f"tokencut/toy/{skip}/reference/block01_key/one",
        f"tokencut/toy/{skip}/reference/block01_key",
        f"tokencut/toy/{skip}/reference/masks/block01_key/one",
        f"tokencut/toy/{skip}/lr=1e-3-key-dog-7",
        f"tokencut/toy/{skip}/lr=1e-3-key-all-cat-7",
        f"tokencut/toy/{other}/reference/block00_key/one",
        f"tokencut/toy/{skip}/reference/grid",
    )
    for name in ("block01_key", "lone"):
        path = tmp_path / f"pictures/tokencut/toy/{skip}/reference/{name}.svg"
        path.write_text("<svg/>")
    (checkpoint,), files = list_checkpoints(records), PictureFiles(tmp_path)

    blocks, *panels = find_galleries(files, records, checkpoint)

    start = f"pictures/tokencut/toy/{skip}/"
    # The image "two" has no picture of block 1.
    assert (blocks.variant, blocks.layers, list(blocks.files)) == ("reference key", (0, 1), ["one"])
    assert blocks.path(1, "one") == f"{start}reference/block01_key/one.png"
    # The contact sheet of a block is not shown.
    assert not any("block01_key.png" in path for panel in panels for path in panel.paths())
    assert {panel.variant: panel.files for panel in panels} == {
        "lr=1e-3 key": {"dog-7": "lr=1e-3-key-dog-7.png"},
        "lr=1e-3 key-all": {"cat-7": "lr=1e-3-key-all-cat-7.png"},
        "reference": {"grid": "reference/grid.png"},
    }
    # A PNG file replaces an SVG file with the same name.
    assert list(files.rejected_paths) == [path]
    for layer in (0, 1):
        ResultStore(tmp_path).save(build_record(layer=layer))
    assert main(["report", "--out", str(tmp_path), "--layer", "1"]) == 0
    shown = (tmp_path / "report").rglob("one.png")
    assert {path.parent.name for path in shown} == {"block01_key"}


@pytest.fixture(scope="module")
def evil_report(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("evil")
    store = ResultStore(root)
    attribute = '" onmouseover="alert(1)'
    names: dict[str, Any] = {"dataset": "<img src=x onerror=alert(1)>", "facet": attribute}
    names |= {"model": EVIL, "settings": {EVIL: EVIL}, "device": EVIL}
    details = {"iou_by_class": {EVIL: 3.0, "dog": None}, "note": EVIL}
    for sha in (SKIP, SKIPLESS):
        record = build_record(
            task="segmentation", metric="miou_oracle", checkpoint_sha256=sha, **names
        )
        save(store, replace(record, details=details), counts(PERFECT, HALF, WRONG))
        folder = get_figures_folder(record).replace("/", "_")
        save_pictures(root, f"segmentation/{record.dataset}/{folder}/reference/block00/a#b?<50%20")
    store.save_image_ids(RECORD.dataset_fingerprint, (EVIL, attribute, "c"))
    return write_report(root)


def test_names_are_escaped_and_pictures_found_on_every_page(evil_report):
    pages = [Elements(path.read_text()) for path in evil_report.glob("*.html")]

    assert len(pages) == 4
    for page in pages:
        names = {name for _, attrs in page.elements for name in attrs}
        assert not {name for name in names if name.startswith("on")}
        scripts = [attrs for tag, attrs in page.elements if tag == "script"]
        assert all(
            attrs.get("src") in ("records.js", "report.js")
            or attrs.get("type") == "application/json"
            for attrs in scripts
        )
        assert "{{ 7 * 7 }}" in page.text
        assert EVIL in page.text
    sources = [attrs["src"] or "" for page in pages for tag, attrs in page.elements if tag == "img"]
    assert sources
    assert all((evil_report / unquote(source)).is_file() for source in sources)


def parse_provenance(script: str) -> list[dict[str, Any]]:
    text = script.removeprefix("const RECORDS = JSON.parse(").rstrip().removesuffix(");")
    content = json.loads(json.loads(text))
    rows = [[content["values"][index] for index in row] for row in content["rows"]]
    return [dict(zip(content["names"], values, strict=True)) for values in rows]


def read_first_provenance(report: Path) -> dict[str, Any]:
    return parse_provenance((report / "records.js").read_text())[0]


def test_the_provenance_of_each_record_has_its_own_rounded_values(tmp_path):
    values = [(10.123456 + n, f"{n}", n) for n in range(20)]
    details = {"seconds": [0.123456, math.inf], "long": "x" * 201, "short": "x" * 200, "map": {}}
    records = [
        replace(
            build_record(value=value, facet=facet, layer=n),
            settings={"tau": n},
            details={**details, "n": n},
        )
        for value, facet, n in values
    ]
    records.append(plain(value=123456.789, ci95=(0.00012345678, math.inf)))

    *rows, last = parse_provenance(make_records_script(ResultStore(tmp_path), records))

    for (value, facet, n), row in zip(values, rows, strict=True):
        assert (row["value"], row["facet"], row["block"]) == (round(value, 4), facet, n)
        assert row["settings"] == {"tau": n}
        assert row["details"] == {"seconds": [0.1235, "inf"], "short": "x" * 200, "n": n}
    assert (last["value"], last["unit"]) == (123457, "plain number")
    assert last["95 % interval"] == [0.000123457, "inf"]


def test_only_the_style_sheet_defines_encoder_colours_and_dashes(tmp_path):
    report = write_report(tmp_path, build_record())

    style, script = ((report / name).read_text() for name in ("style.css", "report.js"))
    for number, colour in enumerate(PALETTE):
        assert f".c{number} {{ --ink: light-dark({colour}, " in style
    for rule in (".d0 .line { stroke-dasharray: none;", ".d1s .line { stroke-dasharray: 2 3;"):
        assert rule in style
    assert "stroke-dasharray" not in script


def test_the_provenance_of_a_number_names_its_record(evil_report, tmp_path):
    first = read_first_provenance(evil_report)
    index = Elements((evil_report / "index.html").read_text())

    assert (evil_report.parent / first["record"]).is_file()
    assert first["settings"] == {EVIL: EVIL}
    # The IoU is 6 / 12 for the first class and 4 / 10 for the second class.
    assert (first["value"], first["unit"], first["95 % interval"]) == (45, "%", [40, 50.5])
    assert {attrs["data-r"] for _, attrs in index.elements if "data-r" in attrs} == {
        "0",
        "1",
    }

    path = ResultStore(tmp_path).save(build_record()).relative_to(tmp_path)
    ResultStore(tmp_path).pack()
    record = read_first_provenance(write_report(tmp_path))["record"]
    assert record == f"records.parquet: {path}"


@pytest.mark.parametrize(("dataset", "is_whole"), [("voc2012", True), ("voc2012-limit64", False)])
def test_published_values_are_shown_with_their_differences(tmp_path, dataset, is_whole):
    segmentation = {"task": "segmentation", "metric": "miou_oracle", "facet": "token"}
    record = build_record(dataset=dataset, value=62.0, **segmentation)

    page = Elements((write_report(tmp_path, record) / "index.html").read_text())

    assert "62.3 published" in page.text
    assert "not the same experiment: published: ViT-Small" in page.text
    # Published values are drawn as dashed lines unless the images are a subset of the dataset.
    assert any(attrs.get("class") == "level" for _, attrs in page.elements) == is_whole


def test_a_checkpoint_page_states_the_cost_of_each_evaluation(tmp_path):
    store, scored = ResultStore(tmp_path), "f0" * 32
    trained_on = {"split": "train", "fingerprint": "0f" * 32, "num_images": 30}
    # The results of the first block were stored before the evaluation ended.
    for layer, seconds, created in ((0, 50.0, "03:04:00"), (1, 200.0, "03:06:30")):
        settings = {"dataset_fingerprint": scored, "settings": {"trained_on": trained_on}}
        settings |= {"created": f"2026-01-02T{created}+00:00", "num_images": 10}
        store.save(build_record(task="knn", layer=layer, seconds=seconds, **settings))
    store.save(build_record(seconds=30.0, peak_memory=3 * 2**30))
    write_report(tmp_path)

    (page,) = (tmp_path / "report").glob("checkpoint-*.html")
    row = r"<th[^>]*>(knn|tokencut) on[^<]*? \((\d+) images\)</th>" + 3 * "<td[^>]*>(.*?)</td>"
    assert re.findall(row, page.read_text().replace("<wbr>", "")) == [
        ("knn", "40", "3 min", "0.2", ""),
        ("tokencut", "60", "30 s", "2", "3 GiB"),
    ]


def test_only_requested_tasks_are_in_the_report(tmp_path):
    store = ResultStore(tmp_path)
    store.save(build_record())
    store.save(build_record(task="knn", metric="top1_k20"))
    store.save(skipless()).write_text("{")

    main(["report", "--out", str(tmp_path), "--task", "knn", "--into", str(tmp_path / "knn")])

    text = Elements((tmp_path / "knn" / "index.html").read_text()).text
    assert "top1_k20" in text
    assert "corloc" not in text
    assert "1 record of 1 checkpoint." in text
    assert "1 unreadable record is left out." in text
    assert (tmp_path / "knn" / REPORT_MARK).is_file()


@pytest.mark.slow
def test_a_report_on_four_checkpoints_with_all_records_is_small(tmp_path):
    source = Path(__file__).parents[2] / "results" / "dino_photographs"
    packed = parquet.read_table(source / "records.parquet")
    trained = [b'"model": "random' not in record.as_py() for record in packed["record"]]
    parquet.write_table(packed.filter(trained), tmp_path / "records.parquet")

    with unchecked_types():
        assert main(["report", "--out", str(tmp_path)]) == 0

    sizes = [path.stat().st_size for path in (tmp_path / "report").rglob("*") if path.is_file()]
    assert len(list((tmp_path / "report").glob("compare-*.html"))) == 6
    assert sum(sizes) < MOST_BYTES


def test_the_highest_of_many_checkpoints_are_drawn(tmp_path):
    count = MAX_LINES + 2
    records = [
        build_record(
            model=f"run{n:02}", checkpoint_sha256=f"{n:064x}", layer=layer, value=10.0 + n - layer
        )
        for n in range(count)
        for layer in range(2)
    ]

    report = write_report(tmp_path, *records)

    page = (report / "index.html").read_text()
    card = page.partition('<article class="card" id="panel')[2].partition("</article>")[0]
    heads = re.findall(r'data-m="(\d+)"><button', card)
    assert set(map(str, range(count))) - set(heads) == {"0", "1"}
    assert f"{MAX_LINES} of {count} checkpoints are drawn" in card
    assert len(list(report.glob("checkpoint-*.html"))) == count
    # For values without a unit, the first checkpoints by name are drawn.
    records = [replace(record, unit="") for record in records]
    (panel,) = group_into_panels(records, list_checkpoints(records))
    assert [line.checkpoint.number for line in panel.drawn_lines] == [*range(MAX_LINES)]


# The folder of a report.


def replace_page(folder: Path, text: str) -> None:
    with replace_report(folder) as new:
        (new / "index.html").write_text(text)
        if text == "interrupt":
            raise KeyboardInterrupt
        if text == "full disk":
            raise OSError(28, "no space")


@pytest.mark.parametrize("into", ["thesis", "thesis/chapter.txt"])
def test_other_files_are_not_replaced(tmp_path, capsys, into):
    ResultStore(tmp_path / "results").save(build_record())
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.txt").write_text("years of work")

    report = ["report", "--out", str(tmp_path / "results"), "--into", str(tmp_path / into)]
    assert "--into" in expect_error(capsys, report, 2)

    assert [path.read_text() for path in (tmp_path / "thesis").iterdir()] == ["years of work"]


def test_only_a_complete_report_replaces_an_older_one(tmp_path):
    report = tmp_path / "report"
    replace_page(report, "first")
    with pytest.raises(KeyboardInterrupt):
        replace_page(report, "interrupt")
    with pytest.raises(MachineError, match="no space") as caught:
        replace_page(report, "full disk")
    assert caught.value.hint == ("--into", "{folder}")
    assert (report / "index.html").read_text() == "first"

    replace_page(report, "second")
    assert (report / "index.html").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


@pytest.mark.parametrize("name", ["notes/chapter.txt", ".git/config"])
def test_a_report_is_not_replaced_if_someone_added_files(tmp_path, name):
    report = tmp_path / "report"
    replace_page(report, "first")
    (report / ".DS_Store").write_text("from a file manager")
    replace_page(report, "second")
    notes = report / name
    notes.parent.mkdir()
    notes.write_text("years of work")

    with pytest.raises(ConfigurationError, match=re.escape(name)) as caught:
        replace_page(report, "third")

    assert caught.value.hint == ("--into", "{folder}")
    assert (report / "index.html").read_text() == "second"
    shutil.rmtree(notes.parent)
    # Older versions did not store the names of their files.
    (report / REPORT_MARK).write_text('{"report": 1}\n')
    replace_page(report, "third")
    assert sorted(path.name for path in report.iterdir()) == [REPORT_MARK, "index.html"]


def test_files_that_appear_during_report_writing_are_not_replaced(tmp_path):
    thesis = tmp_path / "report/thesis.txt"

    def write_both() -> None:
        with replace_report(tmp_path / "report"):
            thesis.parent.mkdir()
            thesis.write_text("years of work")

    with pytest.raises(ConfigurationError) as caught:
        write_both()
    assert caught.value.hint == ("--into", "{folder}")
    assert thesis.read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


@pytest.mark.parametrize("name", ["old", "new"])
def test_an_interrupt_while_folders_are_renamed_keeps_the_older_report(tmp_path, monkeypatch, name):
    replace_page(tmp_path / "report", "first")
    rename = Path.rename

    def interrupt(path, target):
        if path.suffix == ".new" or name == "old":
            monkeypatch.undo()
            if name == "old":
                rename(path, target)
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        replace_page(tmp_path / "report", "second")

    assert (tmp_path / "report/index.html").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
