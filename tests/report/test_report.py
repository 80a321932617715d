"""Contents and safety of a report, checked on a handful of records."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from pyarrow import parquet

from ssl_bench.cli.__main__ import main
from ssl_bench.report.panels import MAX_LINES, list_checkpoints
from ssl_bench.report.pictures import PictureFiles, find_galleries
from ssl_bench.results import ResultStore
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


@pytest.mark.parametrize(
    "records",
    [[cell()], [plain()], [cell(), plain()]],
    ids=["percent", "plain numbers", "both"],
)
def test_axes_and_columns_name_the_unit(tmp_path, records):
    store = ResultStore(tmp_path)
    for record in records:
        store.save(record)

    assert main(["report", "--out", str(tmp_path)]) == 0

    page = (tmp_path / "report" / "index.html").read_text()
    (own,) = (tmp_path / "report").glob("checkpoint-*.html")
    charts = re.findall(r'<svg class="chart".*?</svg>', page, re.DOTALL)
    axes = [re.findall('class="measured".*?>(.*?)<', chart) for chart in charts]
    labels = ["corloc (%)" if record.unit else record.metric for record in records]
    assert axes == [[label] for label in labels]
    assert all(label in Elements(own.read_text()).text for label in labels)
    script = (tmp_path / "report" / "records.js").read_text()
    assert ("plain number" in script) == any(not record.unit for record in records)


def test_a_note_names_tables_of_one_seed(tmp_path):
    store = ResultStore(tmp_path)
    for seed in (1, 0):
        record = cell(seed=seed, task="segmentation", metric="miou_oracle")
        save(store, replace(record, details={"iou_by_class": {"dog": 3.0}}), counts(PERFECT, HALF))

    assert main(["report", "--out", str(tmp_path)]) == 0

    (page,) = (tmp_path / "report").glob("checkpoint-*.html")
    assert "are those of the lowest seed" in page.read_text()
    shutil.rmtree(store.root / "records")
    save(store, record, counts(PERFECT, HALF))
    assert main(["report", "--out", str(tmp_path)]) == 0
    assert "are those of the lowest seed" not in page.read_text()


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
    """Write a report of records whose names are all markup."""
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


def test_names_are_escaped_on_every_page(evil_report):
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


def test_pictures_with_hostile_names_are_found(evil_report):
    sources = [
        given["src"] or ""
        for path in evil_report.glob("*.html")
        for tag, given in Elements(path.read_text()).elements
        if tag == "img"
    ]

    assert sources
    assert all((evil_report / unquote(source)).is_file() for source in sources)


def first_record(report: Path) -> dict[str, Any]:
    """Return the fields that the dialog on provenance shows."""
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
    store = ResultStore(tmp_path)
    path = store.save(cell()).relative_to(tmp_path)
    store.pack()

    assert main(["report", "--out", str(tmp_path)]) == 0

    assert first_record(tmp_path / "report")["record"] == f"records.parquet: {path}"


def test_published_values_are_marked_with_their_differences(tmp_path):
    store = ResultStore(tmp_path)
    store.save(cell(task="segmentation", dataset="voc2012", metric="miou_oracle", facet="token"))

    main(["report", "--out", str(tmp_path)])

    text = Elements((tmp_path / "report" / "index.html").read_text()).text
    assert "62.3 published" in text
    assert "table 2" in text
    assert "not the same experiment: published: ViT-Small" in text


def test_only_requested_tasks_are_in_the_report(tmp_path):
    store = ResultStore(tmp_path)
    store.save(cell())
    store.save(cell(task="knn", metric="top1_k20"))
    store.save(skipless()).write_text("{")

    main(["report", "--out", str(tmp_path), "--task", "knn", "--into", str(tmp_path / "knn")])

    text = (tmp_path / "knn" / "index.html").read_text()
    assert "top1_k20" in text
    assert "corloc" not in text
    assert "1 record of 1 checkpoint. Bands, ± and" in Elements(text).text
    assert "1 unreadable record is left out." in Elements(text).text
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


@pytest.mark.parametrize("unit", ["%", ""])
def test_the_highest_of_many_checkpoints_are_drawn(tmp_path, unit):
    store = ResultStore(tmp_path)
    count = MAX_LINES + 2
    for number in range(count):
        for layer in range(2):
            one = cell(
                model=f"run{number:02}",
                checkpoint_sha256=f"{number:064x}",
                layer=layer,
                value=10.0 + number - layer,
                unit=unit,
            )
            store.save(one)

    assert main(["report", "--out", str(tmp_path)]) == 0

    page = (tmp_path / "report/index.html").read_text()
    start = page.index('<article class="card" id="panel')
    card = page[start : page.index("</article>", start)]
    heads = re.findall(r'data-m="(\d+)"><button', card)
    left_out = {"0", "1"} if unit else {str(count - 2), str(count - 1)}
    assert set(map(str, range(count))) - set(heads) == left_out
    which = "those with the highest values" if unit else "the first by name"
    assert f"{MAX_LINES} of {count} checkpoints are drawn, {which}" in card
    assert len(list((tmp_path / "report").glob("checkpoint-*.html"))) == count
