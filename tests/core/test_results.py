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

# What changes a number; hardware, time and versions do not.
KEYS = """architecture checkpoint_sha256 dataset dataset_fingerprint facet layer mean metric
protocol seed settings split std task"""


def test_a_saved_record_comes_back_and_nan_becomes_null(tmp_path):
    store = ResultStore(tmp_path)

    path = store.save(RECORD)
    store.save(replace(RECORD, layer=4, value=math.nan, ci95=None))

    assert store.load(RECORD.key()) == replace(RECORD, details={"share": [0.5, None]})
    assert "NaN" not in path.read_text()
    assert math.isnan(store.records()[1].value)


def test_a_run_folder_says_what_it_is_and_how_its_encoder_is_probed(tmp_path):
    config = {"objective": {"_target_": "a.Dino"}, "model": {"_target_": "a.ViTConfig"}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    rows = [{"step": 1, "loss": 9, "lr": 1}, {"step": 7, "loss": 1.5, "lr": 1, "val_top1": None}]
    (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    with pytest.raises(DataError) as raised:
        ResultStore(tmp_path).records()

    said = f"{tmp_path} is a run of Dino and holds no records: step 7, loss 1.5; every step is in "
    assert str(raised.value).startswith(f"{said}{tmp_path / 'log.jsonl'}")
    assert raised.value.hint[4:6] == ("--checkpoint", str(tmp_path))


@pytest.mark.parametrize("log", ["", "[]\n", "not JSON\n"])
def test_somebody_elses_folder_is_no_run(tmp_path, log):
    (tmp_path / "config.yaml").write_text("objective: x\nmodel: y\n")
    (tmp_path / "log.jsonl").write_text(log)

    with pytest.raises(DataError, match="no records in"):
        ResultStore(tmp_path).records()


def test_a_cell_is_known_by_the_sha256_of_its_fields_as_sorted_json():
    names = [item.name for item in fields(CellKey)]
    assert sorted(names) == KEYS.split()
    text = json.dumps({name: getattr(RECORD, name) for name in names}, sort_keys=True)

    expected = hashlib.sha256(text.encode()).hexdigest()[:16]

    assert RECORD.digest == RECORD.key().digest() == expected
    # Stands in the names of files, so that another one would orphan all records.
    assert expected == "ebb0052e2a1f2f9c"
    assert replace(RECORD, facet='ä"').digest == replace(RECORD, facet='ä"').key().digest()


def test_records_share_what_is_equal_and_not_equal_numbers_of_other_kinds(tmp_path):
    store = ResultStore(tmp_path)
    kinds = [{"tau": 1}, {"tau": 1.0}, {"tau": True}, {"tau": 1}]
    for layer, settings in enumerate(kinds):
        store.save(replace(RECORD, layer=layer, settings=settings))

    records = store.records()

    assert [repr(record.settings) for record in records] == list(map(repr, kinds))
    assert records[0].settings is records[3].settings
    assert store.unreadable == {}
