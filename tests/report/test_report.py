"""Content and security of a report with a few records."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from pyarrow import parquet

from ssl_bench.cli.__main__ import main
from ssl_bench.report.panels import MAX_LINES, group_into_panels, list_checkpoints
from ssl_bench.report.pictures import PictureFiles, find_galleries
from ssl_bench.results import Record, ResultStore
from ssl_bench.system.files import REPORT_MARK
from tests.core.test_results import RECORD
from tests.support.faults import unchecked_types
from tests.support.report_cells import (
    EVIL,
    HALF,
    MOST_BYTES,
    PERFECT,
    SKIP,
    SKIPLESS,
    WRONG,
    Elements,
    cell,
    counts,
    folder_of,
    plain,
    save,
    save_pictures,
    skipless,
)


def report_on(root: Path, *records: Record) -> Path:
    for record in records:
        ResultStore(root).save(record)
    assert main(["report", "--out", str(root)]) == 0
    return root / "report"


def test_axes_and_columns_name_the_unit(tmp_path):
    report = report_on(tmp_path, cell(), plain())

    page, (own,) = (report / "index.html").read_text(), report.glob("checkpoint-*.html")
    charts = re.findall(r'<svg class="chart".*?</svg>', page, re.DOTALL)
    axes = [label for chart in charts for label in re.findall('class="measured".*?>(.*?)<', chart)]
    assert axes == ["corloc (%)", "condition_number"]
    text = Elements(own.read_text()).text
    assert "corloc (%)" in text
    assert "condition_number" in text
    assert "plain number" in (report / "records.js").read_text()


def test_tables_of_classes_say_that_they_show_one_seed(tmp_path):
    one, other = (
        replace(
            cell(seed=seed, task="segmentation", metric="miou_oracle"),
            details={"iou_by_class": {"dog": 3.0}},
        )
        for seed in (1, 0)
    )
    for records, is_said in (([one], False), ([other], True)):
        (page,) = report_on(tmp_path, *records).glob("checkpoint-*.html")
        assert ("are those of the lowest seed" in page.read_text()) == is_said


def test_pictures_are_found_by_block_and_by_protocol(tmp_path):
    records = [cell(protocol="lr=1e-3", facet="key"), cell(protocol="reference")]
    skip, other = (folder_of(cell(model=model)) for model in ("skip", "other"))
    save_pictures(
        tmp_path,
        f"tokencut/toy/{skip}/reference/block00_key/one",
        f"tokencut/toy/{skip}/reference/block00_key/two",
        f"tokencut/toy/{skip}/reference/block01_key/one",
        f"tokencut/toy/{skip}/reference/block01_key",
        f"tokencut/toy/{skip}/reference/masks/block01_key/one",
        f"tokencut/toy/{skip}/lr=1e-3-key-dog-7",
        f"tokencut/toy/{other}/reference/block00_key/one",
        f"tokencut/toy/{skip}/reference/grid",
    )
    drawing = tmp_path / f"pictures/tokencut/toy/{skip}/reference/block01_key.svg"
    drawing.write_text("<svg/>")
    (checkpoint,) = list_checkpoints(records)

    blocks, *panels = find_galleries(PictureFiles(tmp_path), records, checkpoint)

    start = f"pictures/tokencut/toy/{skip}/"
    # The second image lacks a block.
    assert (blocks.variant, blocks.layers, list(blocks.files)) == ("reference key", (0, 1), ["one"])
    assert blocks.path(1, "one") == f"{start}reference/block01_key/one.png"
    # Contact sheets of hits and misses are not shown.
    assert not any("block01_key.png" in path for panel in panels for path in panel.paths())
    assert {panel.variant: panel.files for panel in panels} == {
        "lr=1e-3 key": {"dog-7": "lr=1e-3-key-dog-7.png"},
        "reference": {"grid": "reference/grid.png"},
    }


@pytest.fixture(scope="module")
def evil_report(tmp_path_factory) -> Path:
    """Write a report of records whose names contain only markup."""
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
        folder = folder_of(record).replace("/", "_")
        save_pictures(root, f"segmentation/{record.dataset}/{folder}/reference/block00/a#b?<50%20")
    store.save_image_ids(RECORD.dataset_fingerprint, (EVIL, attribute, "c"))
    assert main(["report", "--out", str(root)]) == 0
    return root / "report"


def test_names_are_escaped_and_pictures_found_on_every_page(evil_report):
    pages = [Elements(path.read_text()) for path in evil_report.glob("*.html")]

    assert len(pages) == 4
    for page in pages:
        attributes = {name for _, given in page.elements for name in given}
        assert not {name for name in attributes if name.startswith("on")}
        scripts = [given for tag, given in page.elements if tag == "script"]
        assert all(
            given.get("src") in ("records.js", "report.js")
            or given.get("type") == "application/json"
            for given in scripts
        )
        assert "{{ 7 * 7 }}" in page.text
        assert EVIL in page.text
    sources = [given["src"] or "" for page in pages for tag, given in page.elements if tag == "img"]
    assert sources
    assert all((evil_report / unquote(source)).is_file() for source in sources)


def first_record(report: Path) -> dict[str, Any]:
    """Return the fields of the provenance dialog."""
    script = (report / "records.js").read_text()
    text = script.removeprefix("const RECORDS = JSON.parse(").rstrip().removesuffix(");")
    content = json.loads(json.loads(text))
    return {
        name: content["values"][index]
        for name, index in zip(content["names"], content["rows"][0], strict=True)
    }


def test_the_provenance_of_a_number_names_its_record(evil_report):
    first = first_record(evil_report)
    index = Elements((evil_report / "index.html").read_text())
    pressed = [given["data-r"] for tag, given in index.elements if "data-r" in given]

    assert (evil_report.parent / first["record"]).is_file()
    assert first["settings"] == {EVIL: EVIL}
    # 6 of 12 pixels in the union of the first class, 4 of 10 in that of the second.
    assert (first["value"], first["unit"], first["95 % interval"]) == (45, "%", [40, 50.5])
    assert set(pressed) == {"0", "1"}


def test_the_provenance_of_a_packed_record_names_the_file_that_holds_it(tmp_path):
    path = ResultStore(tmp_path).save(cell()).relative_to(tmp_path)
    ResultStore(tmp_path).pack()

    assert first_record(report_on(tmp_path))["record"] == f"records.parquet: {path}"


@pytest.mark.parametrize(("dataset", "is_whole"), [("voc2012", True), ("voc2012-limit64", False)])
def test_published_values_are_shown_with_their_differences(tmp_path, dataset, is_whole):
    segmentation = {"task": "segmentation", "metric": "miou_oracle", "facet": "token"}
    record = cell(dataset=dataset, value=62.0, **segmentation)

    page = Elements((report_on(tmp_path, record) / "index.html").read_text())

    assert "62.3 published" in page.text
    assert "not the same experiment: published: ViT-Small" in page.text
    # A chart has dashes at the published values unless its images are a subset.
    assert any(given.get("class") == "level" for _, given in page.elements) == is_whole


def test_only_requested_tasks_are_in_the_report(tmp_path):
    store = ResultStore(tmp_path)
    store.save(cell())
    store.save(cell(task="knn", metric="top1_k20"))
    store.save(skipless()).write_text("{")

    main(["report", "--out", str(tmp_path), "--task", "knn", "--into", str(tmp_path / "knn")])

    text = Elements((tmp_path / "knn" / "index.html").read_text()).text
    assert "top1_k20" in text
    assert "corloc" not in text
    assert "1 record of 1 checkpoint." in text
    assert "1 unreadable record is left out." in text
    assert (tmp_path / "knn" / REPORT_MARK).is_file()


@pytest.mark.slow
def test_four_checkpoints_with_all_records_stay_small(tmp_path):
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
        cell(
            model=f"run{number:02}",
            checkpoint_sha256=f"{number:064x}",
            layer=layer,
            value=10.0 + number - layer,
        )
        for number in range(count)
        for layer in range(2)
    ]

    report = report_on(tmp_path, *records)

    page = (report / "index.html").read_text()
    start = page.index('<article class="card" id="panel')
    card = page[start : page.index("</article>", start)]
    heads = re.findall(r'data-m="(\d+)"><button', card)
    assert set(map(str, range(count))) - set(heads) == {"0", "1"}
    assert f"{MAX_LINES} of {count} checkpoints are drawn" in card
    assert len(list(report.glob("checkpoint-*.html"))) == count
    # Plain numbers are drawn for the first checkpoints by name.
    records = [replace(record, unit="") for record in records]
    (panel,) = group_into_panels(records, list_checkpoints(records))
    assert [line.checkpoint.number for line in panel.drawn_lines] == [*range(MAX_LINES)]
