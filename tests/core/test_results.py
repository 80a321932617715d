"""Test how results are saved and loaded."""

import hashlib
import json
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from ssl_bench.errors import DataError
from ssl_bench.results import Record, ResultKey, ResultStore
from ssl_bench.results.per_image import guess_kind, load_curve, matches_record
from ssl_bench.results.record import RecordReader

RECORD = Record(
    task="tokencut", dataset="toy", split="val", layer=3, depth=12, facet="key",
    protocol="reference", metric="corloc", value=40.0, ci95=(35.0, 45.5), num_images=60,
    model="skip", checkpoint_sha256="a" * 64, architecture={"kind": "vit", "dim": 12},
    mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.2), dataset_fingerprint="b" * 64, seed=0,
    settings={"tau": 0.2}, version="0.1.0", git_commit=None, torch="2.15.0",
    device="cpu: x86_64, 2 threads", seconds=1.5, created="2026-01-02T03:04:05+00:00",
    details={"share": (0.5, math.nan)},
)  # fmt: skip

# Fields that affect a value. Hardware, time and versions do not.
KEYS = """architecture checkpoint_sha256 dataset dataset_fingerprint facet layer mean metric
protocol seed settings split std task"""
VERSIONS = ("metric_version", "pipeline_version")


def test_results_of_older_versions_are_found(tmp_path):
    store, key = ResultStore(tmp_path), RECORD.key()
    newest = replace(key, metric_version=3, pipeline_version=2)
    stored = [(1, 1), (2, 2), (3, 1), (3, 2)]
    for metric, pipeline in stored:
        store.save(replace(RECORD, metric_version=metric, pipeline_version=pipeline))

    found = store.find_older_versions([newest])

    assert [(older.metric_version, older.pipeline_version) for older in found] == stored[:3]


def test_a_saved_record_comes_back_and_nan_becomes_null(tmp_path):
    store = ResultStore(tmp_path)

    path = store.save(RECORD)
    store.save(replace(RECORD, layer=4, value=math.nan, ci95=None))

    assert store.load(RECORD.key()) == replace(RECORD, details={"share": [0.5, None]})
    assert "NaN" not in path.read_text()
    assert math.isnan(store.records()[1].value)


def test_error_for_a_run_folder_recommends_to_probe_its_encoder(tmp_path):
    config = {"objective": {"_target_": "a.Dino"}, "model": {"patch_size": 16}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    last = {"step": 7, "loss": 1.5, "lr": 1, "val_top1": None, "val_top5": 62.5}
    rows = [{"step": 1, "loss": 9, "lr": 1}, last]
    (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    with pytest.raises(DataError) as raised:
        ResultStore(tmp_path).records()

    assert "(Dino, step 7, loss 1.5, val_top5 62.5)" in str(raised.value)
    assert raised.value.hint[4:6] == ("--checkpoint", str(tmp_path))
    # No probe reads the model of a run on letters.
    (tmp_path / "config.yaml").write_text(json.dumps(config | {"model": {"depth": 2}}))
    with pytest.raises(DataError) as raised:
        ResultStore(tmp_path).records()
    assert (raised.value.hint, "Dino, step 7" in str(raised.value)) == ((), True)


@pytest.mark.parametrize("log", ["", "[]\n", "not JSON\n"])
@pytest.mark.parametrize("objective", ["x", "{_target_: a.Dino}"])
def test_folders_with_unrelated_config_and_log_files_are_no_runs(tmp_path, log, objective):
    (tmp_path / "config.yaml").write_text(f"objective: {objective}\nmodel: {{}}\n")
    (tmp_path / "log.jsonl").write_text(log)

    with pytest.raises(DataError, match="no records"):
        ResultStore(tmp_path).records()


def test_errors_without_records_name_a_file_and_another_folder(tmp_path):
    store = ResultStore(tmp_path / "a{b}")
    with pytest.raises(DataError, match="no records in") as raised:
        store.records()
    assert raised.value.hint[-2:] == ("--out", f"{tmp_path}/a{{{{b}}}}")
    paths = [store.save(replace(RECORD, layer=layer)) for layer in range(2)]
    for path in paths:
        path.write_text("{")
    with pytest.raises(DataError, match=f"none of the 2 records .*/{min(paths).name}"):
        store.records()


def test_records_are_sorted_by_path_and_outdated_ones_counted_once(tmp_path):
    store = ResultStore(tmp_path)
    for task in ("tokencut", "lost"):
        for layer in (1, 0):
            store.save(replace(RECORD, task=task, layer=layer))
    store.save(replace(RECORD, metric_version=0, layer=2))

    first, again = store.records(), store.records()

    paths = [store.path(record.key()).parts for record in first]
    assert paths == sorted(paths)
    assert (again, len(store.outdated), store.num_records) == (first, 1, 5)
    (line,) = store.describe_left_out()
    assert "(tokencut: metric version 0, now 1)" in line


def test_encoder_id_depends_on_weights_architecture_mean_and_std():
    for change in (
        {"checkpoint_sha256": "c" * 64},
        {"architecture": {"kind": "vit", "dim": 24}},
        {"mean": (0.5, 0.4, 0.2)},
        {"std": (0.2, 0.2, 0.3)},
    ):
        assert replace(RECORD, **change).encoder_id != RECORD.encoder_id
    assert replace(RECORD, model="renamed", seed=1).encoder_id == RECORD.encoder_id


@pytest.mark.parametrize(("hits", "layers"), [(81, set()), (80, {RECORD.layer})])
def test_per_image_values_that_differ_from_the_record_are_damaged(tmp_path, hits, layers):
    # 81 of 200 images are 40.5 %, and 80 are the 40 % of the record.
    store, record = ResultStore(tmp_path), replace(RECORD, num_images=200)
    store.save(record, np.arange(200) < hits)

    assert load_curve(store, [record]).per_image.keys() == layers
    assert bool(store.damaged_files) == (not layers)


def test_blocks_without_degenerate_images_have_zero_percent(tmp_path):
    records = [
        replace(
            RECORD, layer=layer, details={} if percent is None else {"degenerate_percent": percent}
        )
        for layer, percent in enumerate((0.0, 60.0, None))
    ]

    assert load_curve(ResultStore(tmp_path), records).degenerate == {0: 0.0, 1: 60.0}


BASELINE = {"answer": "random", "value": 12.5}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        # The record has the value 40.0, the interval 35.0 to 45.5, and a depth of 12 blocks.
        ({"layer": 11}, "another result"),
        ({"layer": 12}, "layer is 12, expected 0 to 11"),
        ({"dataset_fingerprint": "b" * 64 + "/"}, "dataset_fingerprint is"),
        ({"dataset_fingerprint": "B" * 64}, "dataset_fingerprint is"),
        ({"value": 34.0}, "outside of its ci95"),
        ({"unit": "", "value": 46.0}, "outside of its ci95"),
        ({"unit": "", "value": 146.0, "ci95": None}, None),
        ({"value": 100.1, "ci95": None}, "expected 0 to 100"),
        ({"value": -0.1, "ci95": None}, "expected 0 to 100"),
        ({"metric": "outlier_share", "value": 101.0, "ci95": None}, "expected 0 to 100"),
        ({"metric": "ami_x2", "value": -101.0, "ci95": None}, "expected -100 to 100"),
        ({"metric": "ami_x2", "value": -99.0, "ci95": None}, "another result"),
        ({"metric": "amiable", "value": -1.0, "ci95": None}, "expected 0 to 100"),
        ({"details": {"degenerate_percent": 101.0}}, "expected 0 to 100"),
        ({"details": {"degenerate_percent": None}}, None),
        ({"details": {"baseline": BASELINE}}, None),
        ({"details": {"baseline": BASELINE | {"value": -1.0}}}, "expected 0 to 100"),
        ({"details": {"baseline": BASELINE | {"value": "1"}}}, "expected a number"),
        ({"details": {"baseline": BASELINE | {"answer": 1}}}, "details.baseline is"),
        ({"details": {"baseline": BASELINE | {"more": 1}}}, "details.baseline is"),
        ({"task": "pca"}, "another result"),
        ({"model": "renamed"}, None),
    ],
)
def test_only_possible_records_are_read(tmp_path, changes, reason):
    store = ResultStore(tmp_path)
    path = store.save(RECORD)
    content = json.loads(path.read_text()) | changes
    # Older versions saved no digest.
    del content["record_sha256"]
    path.write_text(json.dumps(content))

    assert (store.load(RECORD.key()) is None) == (reason is not None)
    assert reason is None or reason in store.unreadable[path]


def test_records_in_the_folder_of_another_task_are_copies(tmp_path):
    store = ResultStore(tmp_path)
    path = store.save(RECORD)
    moved = Path(str(path).replace("/tokencut/", "/lost/"))
    moved.parent.mkdir(parents=True)
    moved.write_bytes(path.read_bytes())

    assert store.records() == [store.load(RECORD.key())]
    assert "another result" in store.unreadable[moved]


PIXELS = [[2, 1], [3, 1], [2, 2]]


@pytest.mark.parametrize(
    ("kind", "values", "value", "expected"),
    [
        # The rows are correct, predicted and true pixels: IoUs of 2/3 and 1/2.
        ("mean_iou", [PIXELS], 175 / 3, True),
        ("mean_iou", [PIXELS, PIXELS], 175 / 3, True),
        ("pixel_accuracy", [PIXELS], 75.0, True),
        ("pixel_accuracy", [PIXELS], 74.9999, False),
        # More correct than predicted pixels, more correct than true ones, and unequal sums.
        ("pixel_accuracy", [[[2, 1], [1, 3], [2, 2]]], 75.0, False),
        ("pixel_accuracy", [[[3, 0], [3, 1], [2, 2]]], 75.0, False),
        ("pixel_accuracy", [[[2, 1], [3, 2], [2, 2]]], 75.0, False),
        ("mean_iou", [[[0, 0], [0, 0], [0, 0]]], math.nan, True),
        ("mean_iou", [[[0, 0], [0, 0], [0, 0]]], 0.0, False),
        ("mean_iou", [PIXELS[:2]], 175 / 3, False),
        ("hits", [1, 0, 0, 1], 50.0, True),
        ("hits", [[1], [0]], 50.0, False),
        ("hits_of_draws", [[1, 0], [0, 0]], 25.0, True),
        ("points", [[1, 2], [4, 4]], 75.0, True),
        ("percent", np.float32([10, 30.0001]), 20.0, True),
        ("percent", np.float32([10, 30.01]), 20.0, False),
        ("object_iou", [[1, 1, 1, 4], [0, 1, 0, 4]], 50.0, True),
        ("unknown", [1, 0], 50.0, False),
    ],
)
def test_per_image_values_match_only_a_record_of_their_metric(kind, values, value, expected):
    record = replace(RECORD, per_image_kind=kind, value=value)

    assert matches_record(np.asarray(values), record) == expected


@pytest.mark.parametrize(
    ("metric", "kind"),
    [
        ("miou_holdout", "mean_iou"), ("pixel_accuracy", "pixel_accuracy"),
        ("knn_5shot", "hits_of_draws"), ("pck_bbox", "points"), ("ap50", "average_precision"),
        ("ap", "average_precision"), ("ar100", "average_recall"), ("max_f_beta", "object_f_beta"),
        ("iou", "object_iou"), ("accuracy", "object_accuracy"), ("top1", "hits"),
    ],
)  # fmt: skip
def test_older_per_image_values_are_recognised_by_shape_and_metric(metric, kind):
    assert guess_kind(metric, np.zeros((2, 4), int)) == kind
    assert guess_kind(metric, np.zeros(2, int)) == "hits"
    assert guess_kind(metric, np.zeros(2)) == "percent"


@pytest.mark.parametrize("content", ["{}", '"ab"', "[1]", '["a", null]', "[", ""])
def test_files_of_image_ids_with_other_content_are_ignored(tmp_path, content):
    store = ResultStore(tmp_path)
    store.save_image_ids("b" * 64, ["a", "b"])
    assert store.image_ids("b" * 64) == ("a", "b")
    (path,) = (tmp_path / "images").iterdir()

    path.write_text(content)

    assert ResultStore(tmp_path).image_ids("b" * 64) is None


def test_digest_is_the_sha256_of_the_key_as_sorted_json():
    names = [item.name for item in fields(ResultKey) if item.name not in VERSIONS]
    assert sorted(names) == KEYS.split()
    text = json.dumps({name: getattr(RECORD, name) for name in names}, sort_keys=True)

    expected = hashlib.sha256(text.encode()).hexdigest()[:16]

    assert RECORD.digest == RECORD.key().digest == expected
    # The digest is part of file names, so another digest would orphan all records.
    assert expected == "ebb0052e2a1f2f9c"
    assert replace(RECORD, facet='ä"').digest == replace(RECORD, facet='ä"').key().digest
    # Version 1 is not part of the digest.
    others = [replace(RECORD, **{name: 2}) for name in VERSIONS]
    assert len({RECORD.digest, *(other.digest for other in others)}) == 3
    assert all(other.digest == other.key().digest for other in others)


def test_records_share_equal_settings_of_int_and_float(tmp_path):
    store = ResultStore(tmp_path)
    kinds = [{"n": 7, "tau": 1}, {"n": 7, "tau": 1.0}, {"n": 7, "tau": True}]
    for layer, settings in enumerate(kinds):
        store.save(replace(RECORD, layer=layer, settings=settings))

    one, same, other = store.records()

    assert repr(one.settings) == repr(kinds[1])
    assert one.settings is same.settings
    assert other.settings == {"n": 7, "tau": True}
    # Each record represents the file that it was read from.
    for record, settings in zip((one, same, other), kinds, strict=True):
        assert record.digest == replace(RECORD, layer=record.layer, settings=settings).digest


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize(
    ("old", "new"),
    [(1.0, 1), ((1, 2.5), [1.0, 2.5]), ({"a": [0]}, {"a": [0.0]}), (1e20, 10**20)],
)
def test_load_finds_equal_settings_of_int_and_float(tmp_path, pack, old, new):
    hits = np.array([True, False])
    record = replace(RECORD, num_images=2, value=50.0, ci95=None, settings={"tau": old})
    path = ResultStore(tmp_path).save(record, hits)
    if pack:
        ResultStore(tmp_path).pack()
    # A damaged file does not hide the files after it.
    path.with_name("0.json").write_text(f'{{"checkpoint_sha256": "{record.checkpoint_sha256}"')
    store, key = ResultStore(tmp_path), replace(record, settings={"tau": new}).key()

    found = store.load(key)

    assert found is not None
    assert (found.value, found.settings) == (50.0, {"tau": new})
    assert store.has_per_image(key)
    assert np.array_equal(store.load_per_image(found), hits)
    assert store.load(replace(key, settings={"tau": 2})) is None
    assert store.load(replace(key, settings={"tau": True})) is None


def test_the_later_of_two_records_with_equal_settings_is_returned(tmp_path):
    store = ResultStore(tmp_path)
    for hour, (tau, value) in enumerate([(2, 40.0), (1.0, 41.0), (1, 42.0), (2.0, 43.0)]):
        created = f"2026-01-02T0{hour}:00:00+00:00"
        store.save(replace(RECORD, settings={"tau": tau}, value=value, created=created))

    assert sorted(record.value for record in store.records()) == [42.0, 43.0]


def test_records_with_a_flipped_bit_are_never_read_as_others(tmp_path):
    store = ResultStore(tmp_path)
    path = store.save(RECORD)
    (before,), content = store.records(), path.read_bytes()

    for bit in range(0, 8 * len(content), 149):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert store.load(RECORD.key()) in (None, before)


def test_reformatted_and_older_records_without_digests_are_read(tmp_path):
    store = ResultStore(tmp_path)
    path = store.save(RECORD)
    (before,) = store.records()
    content = json.loads(path.read_text())

    path.write_text(json.dumps(content))
    assert store.records() == [before]

    for name in ("record_sha256", "per_image_kind", "metric_version", "pipeline_version"):
        del content[name]
    path.write_text(json.dumps(content))
    assert store.records() == [before]


def pack_records(folder: Path) -> ResultStore:
    store, hits = ResultStore(folder), np.arange(8) < 4
    for layer in range(3):
        changed = replace(RECORD, layer=layer, num_images=8, value=50.0, ci95=None)
        store.save(replace(changed, details={"noise": [layer * 0.37 + n for n in range(9)]}), hits)
    store.save_image_ids("b" * 64, [f"image {n}" for n in range(8)])
    store.pack()
    return store


def contents(store: ResultStore) -> list:
    records = store.records()
    images = [store.load_per_image(record) for record in records]
    assert store.damaged_files == []
    return [records, [one.tolist() for one in images if one is not None], store.image_ids("b" * 64)]


def test_a_record_saved_after_packing_replaces_the_packed_one(tmp_path):
    record, hits = pack_records(tmp_path).records()[0], np.arange(8) < 6

    ResultStore(tmp_path).save(replace(record, value=75.0), hits)

    (found, *_) = ResultStore(tmp_path).records()
    assert found.value == 75.0
    assert np.array_equal(ResultStore(tmp_path).load_per_image(found), hits)


def test_every_flipped_bit_of_packed_records_is_noticed(tmp_path):
    expected = contents(pack_records(tmp_path))
    path = tmp_path / "records.parquet"
    whole, noticed = path.read_bytes(), 0

    for bit in range(0, 8 * len(whole), 499):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        store = ResultStore(tmp_path)
        try:
            found = contents(store)
        except DataError:
            noticed += 1
            continue
        noticed += bool(store.unreadable)
        assert store.unreadable or found == expected

    assert noticed > 12


@pytest.mark.parametrize("column", ["file", "record", "images", "sha256"])
def test_a_changed_row_is_reported_and_stays_damaged(tmp_path, column):
    pack_records(tmp_path)
    path = tmp_path / "records.parquet"
    table = parquet.read_table(path)
    at = next(n for n, file in enumerate(table["file"].to_pylist()) if file.startswith(b"records"))
    cells = table[column].to_pylist()
    cells[at] = cells[at].replace(cells[at][9:10], bytes([cells[at][9] ^ 1]))
    table = table.set_column(table.column_names.index(column), column, pyarrow.array([*cells]))
    parquet.write_table(table, path)
    store = ResultStore(tmp_path)

    assert len(store.records()) == 2
    assert len(store.unreadable) == 1
    store.encoders()
    assert (len(store.unreadable), store.num_records) == (1, 3)
    store.pack()
    assert len(ResultStore(tmp_path).records()) == 2
    # A damaged row is replaced by a new record, unless the name of its file is damaged.
    for layer in range(3):
        store.save(replace(RECORD, layer=layer))
    assert len(store.records()) == 3
    assert (store.unreadable == {}) == (column != "file")


def test_packed_records_need_all_rows_but_no_digests(tmp_path):
    expected = contents(pack_records(tmp_path))
    path = tmp_path / "records.parquet"
    table = parquet.read_table(path)
    parquet.write_table(table.slice(1), path)
    with pytest.raises(DataError):
        ResultStore(tmp_path).records()

    # Older files had no digests.
    parquet.write_table(table.drop_columns("sha256").replace_schema_metadata(None), path)
    store = ResultStore(tmp_path)
    assert contents(store) == expected
    assert store.unreadable == {}


def test_reordered_per_image_values_are_damaged(tmp_path):
    store, hits = ResultStore(tmp_path), np.arange(8) < 4
    store.save(replace(RECORD, num_images=8, value=50.0, ci95=None), hits)
    (record,) = store.records()
    path = store.per_image_path(record)

    np.savez_compressed(path.open("wb"), hits[::-1])

    assert store.load_per_image(record) is None
    assert store.damaged_files == [path]


def encoder_records(count: int) -> list[Record]:
    models = [f"encoder {number}" for number in range(count)]
    return [
        replace(RECORD, model=model, checkpoint_sha256=f"{number}" * 64, layer=layer, details={})
        for number, model in enumerate(models)
        for layer in (0, 1)
    ]


@pytest.mark.parametrize("pack", [False, True])
def test_encoders_are_found_without_parsing_their_records(tmp_path, monkeypatch, pack):
    records = encoder_records(3)
    for record in records:
        ResultStore(tmp_path).save(record)
    if pack:
        ResultStore(tmp_path).pack()
    store, read = ResultStore(tmp_path), list[Path]()
    parse = RecordReader.parse
    monkeypatch.setattr(RecordReader, "parse", lambda *a: (read.append(a[2]), parse(*a))[1])

    paths = store.encoders()

    assert read == []
    assert {one: len(files) for one, files in paths.items()} == {
        record.encoder(): 2 for record in records
    }
    assert store.records(paths[records[2].encoder()]) == records[2:4]
    assert {*read} == {store.path(record.key()) for record in records[2:4]}


def test_encoders_reports_invalid_files_and_reads_reformatted_ones(tmp_path):
    store, records = ResultStore(tmp_path), encoder_records(4)
    paths = [store.save(record) for record in records]
    paths[0].write_text(json.dumps(json.loads(paths[0].read_text())))
    paths[2].write_text("{")
    # One digit of the digest of the weights is wrong.
    paths[4].write_text(paths[4].read_text().replace("2" * 64, "3" + "2" * 63))
    paths[6].rename(tmp_path / "elsewhere")
    paths[6].symlink_to(tmp_path / "elsewhere")

    found = store.encoders()

    counts = {one.model: len(files) for one, files in found.items()}
    assert counts == {"encoder 0": 2, "encoder 1": 1, "encoder 2": 1, "encoder 3": 1}
    assert store.unreadable.keys() == {paths[2], paths[4], paths[6]}
    assert store.num_records == 8
