import hashlib
import json
import math
from dataclasses import fields, replace

import pytest

from ssl_bench.errors import DataError
from ssl_bench.results import CellKey, Record, ResultStore

RECORD = Record(
    task="tokencut",
    dataset="toy",
    split="val",
    layer=3,
    depth=12,
    facet="key",
    protocol="reference",
    metric="corloc",
    value=40.0,
    ci95=(35.0, 45.5),
    num_images=60,
    model="skip",
    checkpoint_sha256="a" * 64,
    architecture={"kind": "vit", "dim": 12},
    mean=(0.5, 0.4, 0.3),
    std=(0.2, 0.2, 0.2),
    dataset_fingerprint="b" * 64,
    seed=0,
    settings={"tau": 0.2},
    version="0.1.0",
    git_commit=None,
    torch="2.15.0",
    device="cpu: x86_64, 2 threads",
    seconds=1.5,
    created="2026-01-02T03:04:05+00:00",
    details={"share": (0.5, math.nan)},
)


def test_a_saved_record_comes_back_and_nan_becomes_null(tmp_path):
    store = ResultStore(tmp_path)

    path = store.save(RECORD)

    assert store.load(RECORD.key()) == replace(RECORD, details={"share": [0.5, None]})
    assert "NaN" not in path.read_text()


def test_a_missing_score_comes_back_as_nan(tmp_path):
    store = ResultStore(tmp_path)
    store.save(replace(RECORD, value=math.nan, ci95=None))

    assert math.isnan(store.records()[0].value)


@pytest.mark.parametrize(
    "change",
    [
        {"task": "pca"},
        {"dataset": "voc2012"},
        {"split": "train"},
        {"layer": 4},
        {"facet": "token"},
        {"protocol": "stable"},
        {"metric": "miou_holdout"},
        {"checkpoint_sha256": "c" * 64},
        {"dataset_fingerprint": "c" * 64},
        {"architecture": {"kind": "vit", "dim": 12, "norm_eps": 1e-12}},
        {"mean": (0.5, 0.5, 0.5)},
        {"std": (0.5, 0.5, 0.5)},
        {"seed": 1},
        {"settings": {"tau": 0.3}},
    ],
)
def test_what_changes_the_number_is_another_cell(tmp_path, change):
    store = ResultStore(tmp_path)
    store.save(RECORD)

    assert store.load(replace(RECORD, **change).key()) is None


def test_hardware_and_time_do_not_make_another_cell(tmp_path):
    store = ResultStore(tmp_path)
    store.save(RECORD)
    elsewhere = replace(RECORD, device="cuda: H200", seconds=9.0, torch="2.11", value=1.0)

    assert store.load(elsewhere.key()) is not None


def test_a_half_written_record_is_not_finished_and_is_named(tmp_path):
    store = ResultStore(tmp_path)
    whole = store.save(RECORD)
    half = store.save(replace(RECORD, layer=5))
    half.write_text(half.read_text()[:200])

    assert store.load(replace(RECORD, layer=5).key()) is None
    assert store.records() == [store.load(RECORD.key())]
    assert list(store.unreadable) == [half]
    assert whole.is_file()


def test_an_empty_folder_says_what_to_run(tmp_path):
    with pytest.raises(DataError, match="run `ssl-bench probe"):
        ResultStore(tmp_path).records()


def test_a_run_folder_says_what_it_is_and_how_its_encoder_is_probed(tmp_path):
    config = {"objective": {"_target_": "a.Dino"}, "model": {"_target_": "a.ViTConfig"}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    rows = [{"step": 1, "loss": 9, "lr": 1}, {"step": 7, "loss": 1.5, "lr": 1, "val_top1": None}]
    (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    with pytest.raises(DataError) as raised:
        ResultStore(tmp_path).records()

    assert str(raised.value) == (
        f"{tmp_path} is a run of Dino and holds no records: step 7, loss 1.5; every step is in "
        f"{tmp_path / 'log.jsonl'}; `ssl-bench probe --checkpoint {tmp_path} --out results` leaves "
        "records of its encoder"
    )


@pytest.mark.parametrize("log", ["", "[]\n", "not JSON\n"])
def test_somebody_elses_folder_is_no_run(tmp_path, log):
    (tmp_path / "config.yaml").write_text("objective: x\nmodel: y\n")
    (tmp_path / "log.jsonl").write_text(log)

    with pytest.raises(DataError, match="no records in"):
        ResultStore(tmp_path).records()


def test_a_cell_is_known_by_the_sha256_of_its_fields_as_sorted_json():
    names = [item.name for item in fields(CellKey)]
    text = json.dumps({name: getattr(RECORD, name) for name in names}, sort_keys=True)

    expected = hashlib.sha256(text.encode()).hexdigest()[:16]

    assert RECORD.digest == RECORD.key().digest() == expected
    # Stands in the names of files, so that another one would orphan all records.
    assert expected == "ebb0052e2a1f2f9c"
    assert replace(RECORD, facet='ä"').digest == replace(RECORD, facet='ä"').key().digest()


def test_records_that_are_read_together_share_what_they_have_in_common(tmp_path):
    store = ResultStore(tmp_path)
    for layer in range(3):
        details = {"iou_by_class": {"dog": float(layer)}}
        store.save(replace(RECORD, layer=layer, details=details))

    one, two, three = store.records()

    assert one.settings is two.settings is three.settings
    assert one.architecture is three.architecture
    names = [next(iter(r.details["iou_by_class"])) for r in (one, two, three)]
    assert names[0] is names[1] is names[2]
    assert [r.details["iou_by_class"]["dog"] for r in (one, two, three)] == [0.0, 1.0, 2.0]


def test_equal_numbers_of_other_kinds_are_not_taken_for_each_other(tmp_path):
    store = ResultStore(tmp_path)
    kinds = [{"tau": 1}, {"tau": 1.0}, {"tau": True}]
    for layer, settings in enumerate(kinds):
        store.save(replace(RECORD, layer=layer, settings=settings))

    assert [repr(record.settings) for record in store.records()] == list(map(repr, kinds))
    assert store.unreadable == {}


def test_what_was_seen_in_one_record_is_still_checked_in_the_next(tmp_path):
    store = ResultStore(tmp_path)
    for layer in range(2):
        store.save(replace(RECORD, layer=layer))
    wrong = store.path(replace(RECORD, layer=1).key())
    wrong.write_text(wrong.read_text().replace('"share": [', '"share": [1e999, '))

    assert [record.layer for record in store.records()] == [0]
    assert "too large" in store.unreadable[wrong]


def test_a_folder_that_is_a_link_is_refused_for_every_file_in_it(tmp_path):
    store = ResultStore(tmp_path / "results")
    first = store.save(RECORD)
    elsewhere = ResultStore(tmp_path / "elsewhere")
    for layer in range(2):
        elsewhere.save(replace(RECORD, dataset="other", layer=layer))
    (first.parent.parent / "other").symlink_to(elsewhere.path(RECORD.key()).parent.parent / "other")

    assert store.records() == [replace(RECORD, details={"share": [0.5, None]})]
    assert len(store.unreadable) == 2
    assert all("below the link" in why for why in store.unreadable.values())


def test_what_one_field_may_hold_another_field_may_not(tmp_path):
    store = ResultStore(tmp_path)
    endless = {"tau": math.inf}
    one = store.save(replace(RECORD, layer=0, changed=endless))
    other = store.save(replace(RECORD, layer=1, settings=endless))
    for path in (one, other):
        path.write_text(path.read_text().replace('"inf"', "1e999"))

    assert [record.changed for record in store.records()] == [endless]
    assert "too large" in store.unreadable[other]


@pytest.mark.parametrize("severity", ["3", True, None])
def test_a_corruption_that_no_run_leaves_is_passed_over(tmp_path, severity):
    told = {"name": "snow", "severity": severity, "dataset": "toy", "fingerprint": "b" * 64}
    store = ResultStore(tmp_path)
    store.save(replace(RECORD, settings={"corrupted": told}))
    store.save(replace(RECORD, settings={"corrupted": told | {"severity": 3}}))

    (found,) = store.records()

    assert found.corrupted is not None
    assert (found.corrupted.severity, len(store.unreadable)) == (3, 1)
