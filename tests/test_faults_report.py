"""Rows 66 to 68 of the catalogue of faults: records and pictures that come from somebody else."""

import io
import json
import os
import re
import zipfile
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hostile import CHECKS, HOSTILE, check_page, check_terminal, hostile, hostile_store
from report_cells import (
    SKIP,
    SKIPLESS,
    Elements,
    cell,
    counts,
    discovery_log,
    save,
    save_pictures,
    skipless,
)
from test_results import RECORD

from ssl_bench.cli import main
from ssl_bench.errors import DataError
from ssl_bench.files import open_within
from ssl_bench.progress import show_progress
from ssl_bench.results import CellKey, ResultStore
from ssl_bench.tables.depth import depth_tables, model_names
from ssl_bench.tables.published import published_table
from tests.faults import DINO_LIKE, Mark, encoder_file, fails, peak_memory_mib

PICTURES = "pictures/tokencut/toy/skip-aaaaaaaa/reference"
POLICY = (
    "default-src 'none'; img-src 'self' file:; style-src 'self' file:; "
    "script-src 'self' file:; base-uri 'none'; form-action 'none'"
)


def files_of(report: Path) -> set[str]:
    return {path.relative_to(report).as_posix() for path in report.rglob("*") if path.is_file()}


def said_by(capsys, arguments: list[str]) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().err


@pytest.fixture
def store(tmp_path) -> ResultStore:
    """One record with one picture, and a secret beside the folder of results."""
    store = ResultStore(tmp_path / "results")
    store.save(cell())
    save_pictures(store.root, PICTURES.removeprefix("pictures/") + "/good")
    (tmp_path / "secret").write_text("the key of the house")
    return store


def report_of(store: ResultStore) -> set[str]:
    assert main(["report", "--out", str(store.root)]) == 0
    names = files_of(store.root / "report")
    for name in names:
        assert b"the key of" not in (store.root / "report" / name).read_bytes()
    return {name for name in names if name.startswith("pictures/")}


def link_to_secret(place: Path) -> None:
    place.symlink_to(place.parents[5] / "secret")


def secret_bytes(place: Path) -> None:
    place.write_text("the key of the house")


def huge(place: Path) -> None:
    with place.open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        file.truncate(2**33)


@pytest.mark.parametrize(
    ("name", "make", "why"),
    [
        ("evil.png", link_to_secret, "links are not followed"),
        ("evil.png", lambda place: place.symlink_to(place.with_name("good.png")), "a link"),
        ("evil.png", lambda place: place.symlink_to("/dev/zero"), "a link"),
        ("evil.png", lambda place: place.symlink_to("nowhere"), "a link"),
        ("folder", lambda place: place.symlink_to(place.parents[5]), "a link"),
        ("evil.png", os.mkfifo, "a folder, pipe or device"),
        ("evil.png", Path.mkdir, "a folder, pipe or device"),
        ("evil.png", secret_bytes, "no PNG"),
        ("evil.png", lambda place: place.write_bytes(b""), "no PNG"),
        ("evil.png", huge, "8,589,934,592 bytes"),
        ("evil.svg", lambda place: place.write_text("<svg/>"), "an SVG can hold scripts"),
    ],
)
def test_fault_66_what_is_no_picture_of_this_folder_is_left_out_and_said(
    store, capsys, name, make, why
):
    place = store.root / PICTURES / name
    make(place)

    assert report_of(store) == {f"{PICTURES}/good.png"}

    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"1 pictures cannot be shown: {place}: ")
    assert why in said
    (page,) = (store.root / "report").glob("checkpoint-*.html")
    assert "evil" not in page.read_text()


@pytest.mark.parametrize("level", [0, 1, 2, 3, 4])
def test_fault_66_no_folder_of_pictures_is_reached_through_a_link(store, capsys, level):
    parts = Path(PICTURES).parts[: level + 1]
    place = store.root.joinpath(*parts)
    place.rename(store.root.parent / "elsewhere")
    place.symlink_to(store.root.parent / "elsewhere")

    assert report_of(store) == set()

    assert f"pictures cannot be shown: {place}: a link" in capsys.readouterr().err


def test_fault_66_a_picture_that_became_a_link_since_is_not_followed(store):
    good = store.root / PICTURES / "good.png"
    before = good.is_symlink
    good.rename(good.with_name("away.png"))
    good.symlink_to(store.root.parent / "secret")
    assert before()

    # As if it were a file still when it was looked at.
    with pytest.raises(OSError, match="symbolic"), open_within(good, good, 100):
        pass


@pytest.mark.parametrize("kind", ["link", "pipe", "below a link"])
@pytest.mark.parametrize("what", ["record", "contributions", "ids", "log"])
def test_fault_66_records_and_what_lies_beside_them_are_not_read_through_links(
    tmp_path, capsys, what, kind
):
    store = ResultStore(tmp_path / "results")
    save(store, cell(layer=0), np.arange(4) < 2)
    save(store, skipless(layer=1), np.arange(4) < 2)
    store.save_image_ids(RECORD.dataset_fingerprint, ("a", "b"))
    path = {
        "record": store.path(cell(layer=0).key()),
        "contributions": store.per_image_path(cell(layer=0)),
        "ids": store.root / "images" / f"{RECORD.dataset_fingerprint[:16]}.json",
        "log": store.root / PICTURES / "images_1.jsonl",
    }[what]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    moved = path.parent if kind == "below a link" else path
    moved.rename(tmp_path / "elsewhere")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        moved.symlink_to(tmp_path / "elsewhere")

    both_records = (what, kind) in [("record", "below a link"), ("contributions", "below a link")]
    assert main(["report", "--out", str(store.root)]) == (3 if both_records else 0)

    said = capsys.readouterr().err
    if what == "record" or both_records:
        assert "pipe or device" in said if kind == "pipe" else "links are not followed" in said
    if what == "contributions" and not both_records:
        assert f"ignored {path}: a link" in said
    assert store.image_ids(RECORD.dataset_fingerprint) == (None if what == "ids" else ("a", "b"))


def test_fault_66_a_log_is_not_read_through_a_link(tmp_path):
    store = ResultStore(tmp_path / "results")
    store.save(cell(settings={"tau": 0.2, "dtype": "float32"}))
    log = store.root / PICTURES / "images_1.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text(discovery_log({"tau": 0.2}, secret=(True, False, 1)))

    def shown() -> bool:
        assert main(["report", "--out", str(store.root)]) == 0
        (page,) = (store.root / "report").glob("checkpoint-*.html")
        return "secret" in page.read_text()

    assert shown()
    log.rename(tmp_path / "elsewhere")
    log.symlink_to(tmp_path / "elsewhere")
    assert not shown()


@pytest.mark.parametrize("style", CHECKS)
@pytest.mark.parametrize("command", ["depth", "pivot", "oracle", "paper", "compare", "blocks"])
def test_fault_67_no_text_of_a_record_acts_in_a_table(tmp_path, capsys, command, style):
    hostile_store(tmp_path)
    name, other = (f"{HOSTILE} {digits[:6]}" for digits in (SKIP, SKIPLESS))
    row = published_table("mnist").rows[0]
    words = {
        "depth": ["table"],
        "pivot": ["table", "--pivot"],
        "oracle": ["table", "--pivot", "--best-layer", "oracle"],
        "paper": ["table", "--paper", "mnist", "--as", f"{row}={name}"],
        "compare": ["compare", name, other],
        "blocks": ["compare", name],
    }[command]
    code = main([*words, "--out", str(tmp_path), "--format", style])

    out, err = capsys.readouterr()
    assert code == 0, err
    CHECKS[style](out)
    check_terminal(err)
    assert "input" in out or command == "paper"


def test_fault_67_no_text_of_a_record_acts_in_a_report(tmp_path, capsys):
    store = hostile_store(tmp_path)
    save(store, hostile(task="segmentation", metric="miou_oracle"), counts([[4, 4]] * 3))

    said = said_by(capsys, ["report", "--out", str(tmp_path)])

    check_terminal(said)
    pages = list((tmp_path / "report").glob("*.html"))
    assert len(pages) == 4
    for page in pages:
        check_page(page.read_text())
    script = (tmp_path / "report/records.js").read_text()
    assert script.isascii()
    assert script.count("\n") == 1
    found = re.fullmatch(r"const RECORDS = JSON\.parse\((\".*\")\);\n", script)
    assert found is not None
    texts = json.loads(json.loads(found[1]))["words"]
    assert all(word.isprintable() for word in texts if isinstance(word, str))


def test_fault_67_the_policy_of_every_page_lets_nothing_in(tmp_path):
    store = hostile_store(tmp_path)
    main(["report", "--out", str(store.root)])

    for page in (tmp_path / "report").glob("*.html"):
        policies = [
            given["content"]
            for tag, given in Elements(page.read_text()).elements
            if tag == "meta" and given.get("http-equiv") == "Content-Security-Policy"
        ]
        assert policies == [POLICY]


def test_fault_67_no_text_of_a_record_acts_in_a_figure_or_a_document(tmp_path, capsys):
    hostile_store(tmp_path)
    document = tmp_path / "page.md"
    document.write_text("<!-- ssl-bench table -->\n<!-- end of ssl-bench table -->\n")
    figure = tmp_path / "curves.svg"

    main(["table", "--out", str(tmp_path), "--into", str(document), "--figure", str(figure)])

    text = document.read_text(encoding="utf-8")
    CHECKS["markdown"]("\n".join(text.splitlines()[1:-1]))
    assert figure.stat().st_size
    check_terminal(capsys.readouterr().err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["table", "--out", f"no{HOSTILE}"],
        ["table", "--format", HOSTILE],
        ["table", f"--{HOSTILE}"],
        ["table", "--paper", HOSTILE],
        [HOSTILE],
        ["models", HOSTILE],
        ["models", "--json", HOSTILE],
        ["data", "list", HOSTILE],
        ["data", "check", "folder", "--data-root", HOSTILE],
        ["data", "verify", HOSTILE],
        ["probe", "--task", HOSTILE],
        ["probe", "--task", "pca", f"{HOSTILE}=1"],
        ["probe", "--task", "pca", "--checkpoint", HOSTILE],
        ["pretrain", f"model={HOSTILE}"],
        ["sweep", "--checkpoint", HOSTILE],
        ["report", "--into", __file__ + "\x1b[2J"],
        ["completion", HOSTILE],
    ],
    ids=lambda words: " ".join(words)[:20].encode("unicode_escape").decode(),
)
def test_fault_67_what_is_typed_comes_back_in_one_line_that_is_only_seen(
    tmp_path, monkeypatch, capsys, arguments
):
    monkeypatch.chdir(tmp_path)

    code = main(arguments)

    out, err = capsys.readouterr()
    check_terminal(out)
    check_terminal(err)
    assert code in (2, 3, 4, 5)
    assert err.startswith("ssl-bench: ")
    assert err.count("\n") == 1


def test_fault_67_what_a_checkpoint_calls_its_tensors_is_only_seen(place, capsys):
    path = encoder_file(place / "wide.safetensors", config=DINO_LIKE)
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({**tensors, HOSTILE[:150]: torch.zeros(3)}, "more.safetensors")

    said = fails(capsys, ["models", "more.safetensors"], 4)

    check_terminal(said)
    assert r"\x1b]0;t\x07" in said


def test_fault_67_what_doctor_finds_is_only_seen(capsys):
    assert main(["doctor", "--data-root", f"/nowhere{HOSTILE[:80]}".replace("=", "")]) in (0, 5)

    out = capsys.readouterr().out
    check_terminal(out)
    assert r"\ninput" in out or r"\n" in out


def test_fault_67_the_description_of_a_bar_is_only_seen(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)

    assert list(show_progress([1], HOSTILE)) == [1]

    said = capsys.readouterr().err
    assert "\\x1b]0;t\\x07" in said
    assert not [sign for sign in ("\x1b]", "\x07", "\u202e") if sign in said]


def stranger(store: ResultStore, changes: dict) -> Path:
    """A record with fields that no run leaves, as far as possible in the place they give it."""
    fields_read = cell().as_json() | changes
    try:
        key = CellKey(**{item.name: fields_read[item.name] for item in fields(CellKey)})
        path = store.root / "records" / key.task / key.dataset / key.filename()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(fields_read))
    except (OSError, ValueError, TypeError, RecursionError):
        path = store.root / "records/tokencut/toy/layer.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Levels beyond what can be written, too.
        text = json.dumps(fields_read | {"settings": "DEEP"} if changes == DEEPEST else fields_read)
        path.write_text(text.replace('"DEEP"', '{"x":' * 5000 + "1" + "}" * 5000))
    return path


def nested(levels: int) -> dict:
    found: dict = {}
    for _ in range(levels):
        found = {"x": found}
    return found


DEEPEST = {"settings": nested(900)}
STRANGE = [
    *[{n: text} for n in ("model", "split", "device") for text in ("a\0b", "\ud800", "x" * 2000)],
    *[{name: "../../../x"} for name in ("checkpoint_sha256", "dataset_fingerprint")],
    {"checkpoint_sha256": ""}, {"checkpoint_sha256": "A" * 64}, {"git_commit": 5},
    {"git_commit": {"a": 1}}, {"unit": "\n"}, {"facet": "a\\b"},
    *[{"dataset": name, "facet": "a/b"} for name in ("", ".")], {"dataset": "toy/."},
    {"layer": 12}, {"layer": -1}, {"layer": True}, {"layer": 10**400}, {"layer": 3.0},
    {"depth": 10**9}, {"depth": 0}, {"depth": 10**400},
    {"seed": 10**400}, {"seed": False}, {"num_images": 0}, {"num_images": -3},
    {"num_images": 10**400}, {"num_images": True}, {"seconds": -1.0}, {"seconds": 10**400},
    {"value": 101.0}, {"value": -1.0}, {"value": 1e308}, {"value": 1e308, "unit": ""},
    {"value": -1e308, "unit": ""}, {"value": 5e-324, "unit": ""}, {"value": 10**400},
    {"value": True}, {"value": "nan"}, {"value": [1]}, {"value": float("nan")},
    {"ci95": [0.0, "inf"]}, {"ci95": [1.0]}, {"ci95": 4}, {"ci95": [1.0, 2.0, 3.0]},
    {"ci95": [True, 2.0]}, {"ci95": [-1e308, 1e308], "unit": ""},
    {"settings": nested(30)}, DEEPEST, {"settings": {"x": 10**400}}, {"settings": [1]},
    {"details": nested(30)}, {"details": {"iou_by_class": {"dog": 10**400}}},
    {"details": {"degenerate_percent": "many"}}, {"details": {"degenerate_percent": 1e9}},
    {"details": {"degenerate_percent": None}}, {"details": None},
]  # fmt: skip


def named(change: dict) -> str:
    return (
        ", ".join(f"{k}={v!r}"[:30] for k, v in change.items()).encode("ascii", "replace").decode()
    )


@pytest.mark.parametrize("changes", STRANGE, ids=named)
def test_fault_68_a_record_that_no_run_can_leave_is_named_and_the_others_are_shown(
    tmp_path, capsys, changes
):
    store = ResultStore(tmp_path / "results")
    store.save(cell(layer=0))
    path = stranger(store, changes)
    before = files_of(tmp_path)

    said = said_by(capsys, ["report", "--out", str(store.root)]).splitlines()
    printed = [said_by(capsys, ["table", "--out", str(store.root), "--format", s]) for s in CHECKS]

    assert said[-1].startswith(f"1 of 2 records cannot be shown: {path}: ")
    assert len(said[-1]) < 600
    # Its place is right where a place could be made of it.
    assert path.name == "layer.json" or "of another cell" not in said[-1]
    assert all(line.splitlines() == [said[-1]] for line in printed)
    written = {name for name in files_of(tmp_path) if not name.startswith("results/report/")}
    assert written == before


@pytest.mark.parametrize("model", ["../../x", "/tmp/x", "..", ".", "a/../../b", "x" * 1000, "\n"])
def test_fault_68_the_name_of_a_model_leads_nowhere(tmp_path, capsys, model):
    store = ResultStore(tmp_path / "results")
    path = store.save(cell(model=model))
    before = files_of(tmp_path)

    assert said_by(capsys, ["report", "--out", str(store.root)]).count("\n") == 1

    new = files_of(tmp_path) - before
    assert {Path(name).parent.as_posix() for name in new} == {"results/report"}
    assert len([name for name in new if "checkpoint-" in name]) == 1
    assert path.is_file()


@pytest.mark.parametrize("name", ["../x", "..", ".", "", "a/b", "a\\b", "a\0b", "\ud800", "/x"])
@pytest.mark.parametrize("field", ["task", "dataset", "facet", "metric"])
def test_fault_68_no_record_is_written_elsewhere(tmp_path, field, name):
    store = ResultStore(tmp_path / "a" / "b" / "results")

    with pytest.raises(DataError, match="expected a name that a file can have"):
        store.save(replace(cell(), **{field: name}), np.zeros(60, bool))

    assert list(tmp_path.iterdir()) == []


def test_fault_68_where_nothing_is_left_to_show_the_reason_is_said(store, capsys):
    path = store.save(cell(task="knn", metric="top1_k20"))
    path.write_text("{")

    said = fails(capsys, ["table", "--out", str(store.root), "--task", "knn"], 3)

    assert (
        f"no records of --task knn in {store.root}; 1 of 2 records cannot be shown: {path}" in said
    )


def test_fault_68_many_records_that_cannot_be_shown_are_one_line(store, capsys):
    for layer in range(7):
        store.save(skipless(layer=layer)).write_text("{")

    said = said_by(capsys, ["table", "--out", str(store.root)])

    assert said.count("\n") == 1
    assert said.startswith("7 of 8 records cannot be shown: ")
    assert "; and 2 more; " in said


def test_fault_68_values_of_images_that_are_pickled_never_run(tmp_path, capsys):
    store, mark = ResultStore(tmp_path), tmp_path / "mark"
    save(store, cell(), np.arange(4) < 2)
    save(store, skipless(), np.arange(4) < 2)
    path = store.per_image_path(cell())
    evil = np.array([Mark(mark)] * 4, dtype=object)
    np.savez(path.open("wb"), evil)

    said = said_by(capsys, ["report", "--out", str(tmp_path)])

    assert f"ignored {path}: " in said
    assert not mark.exists()
    # The pickle does leave its mark where it is let.
    np.load(path, allow_pickle=True)["arr_0"]
    assert mark.exists()


def test_fault_68_values_of_images_that_unpack_to_more_than_memory_are_not_unpacked(
    tmp_path, capsys, monkeypatch
):
    store = ResultStore(tmp_path)
    save(store, cell(), np.arange(4) < 2)
    save(store, skipless(), np.arange(4) < 2)
    path = store.per_image_path(cell())
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|b1", "fortran_order": False, "shape": (4, 65 * 2**18)}
    )
    deflated = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED)
    with deflated as file, file.open("arr_0.npy", "w") as member:
        member.write(header.getvalue())
        for _ in range(65):
            member.write(bytes(2**20))
    monkeypatch.setattr("ssl_bench.results._MOST_OF_IMAGES", 2**26)

    with peak_memory_mib() as grown:
        said = said_by(capsys, ["report", "--out", str(tmp_path)])

    assert f"ignored {path}: " in said
    assert grown() < 60


def test_fault_68_a_name_that_another_checkpoint_is_given_is_no_ones_twice():
    records = [
        cell(model="run"),
        cell(model="run", checkpoint_sha256="b" * 64),
        cell(model="run aaaaaa", checkpoint_sha256="c" * 64),
        cell(model="run", checkpoint_sha256="aaaaaa" + "d" * 58),
    ]

    names = model_names(records)

    assert len(set(names.values())) == len(names) == 4
    (table,) = depth_tables(records)
    assert all(len(entry.records) == 1 for entry in table.entries.values())


def test_fault_68_an_interval_without_ends_is_none(tmp_path, capsys):
    store = ResultStore(tmp_path)
    store.save(cell(ci95=(float("nan"), 3.0)))

    assert main(["table", "--out", str(tmp_path)]) == 0

    out = capsys.readouterr().out
    assert "40.0" in out
    assert "nan" not in out
