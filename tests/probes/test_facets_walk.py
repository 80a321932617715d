"""Every probe asked for what is inside of a block, by the command line."""

from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.results import Record, ResultStore
from tests.support.faults import SMALL, class_folders, encoder_file, fails, voc

STORED = ["probe.tier=disk", "probe.cache=cache"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    encoder_file(Path("encoder.safetensors"))
    voc(tmp_path)
    class_folders(tmp_path)
    return tmp_path


def words(task: str, facet: str, *more: str) -> list[str]:
    classes = task in ("knn", "classification", "clustering")
    found = ["probe", "--task", task, "--dataset", "class_folders" if classes else "voc2012"]
    found += ["--data-root", ".", "--checkpoint", "encoder.safetensors"]
    found += STORED if task == "segmentation" else []
    return [*found, *SMALL[task], f"probe.facet={facet}", *more]


def probed(task: str, facet: str, *more: str, out: str = "results") -> list[Record]:
    assert main([*words(task, facet, *more), "--out", out]) == 0
    return ResultStore(Path(out)).records()


@pytest.mark.parametrize("task", SMALL)
def test_a_probe_takes_a_submodule_of_one_block(task, capsys):
    records = probed(task, "blocks.1.mlp.fc1")

    # Geometry also looks at the patches that the block gives.
    facets = {"blocks.*.mlp.fc1", *(["token"] if task == "geometry" else [])}
    assert {(record.layer, record.facet) for record in records} == {(1, f) for f in facets}
    if task in ("segmentation", "tokencut", "discovery", "pca", "correspondence"):
        drawn = [str(path) for path in Path("results/pictures").rglob("*.png")]
        assert drawn
        assert all("mlp.fc1" in path for path in drawn)
    capsys.readouterr()
    everywhere = probed(task, "blocks.*.mlp.fc1")
    assert {record.layer for record in everywhere} == {0, 1}
    # What was there is taken, not computed again.
    assert f"skipping {len(records)} of {2 * len(records)} results" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["retrieval", "knn"])
def test_a_submodule_with_another_name_gives_the_scores_of_the_named_facet(task):
    # Of our blocks nothing stands between the MLP and its skip.
    named, dotted = (
        {(r.layer, r.metric): r.value for r in probed(task, facet, out=facet[:3])}
        for facet in ("mlp_out", "blocks.*.mlp")
    )
    assert named == dotted


@pytest.mark.parametrize(
    ("task", "facet", "more", "said"),
    [
        ("tokencut", "blocks.1.attn", ["--layer", "0"], "--layer 1"),
        ("tokencut", "blocks.2.attn", [], "layers must lie in 0..1"),
        ("pca", "blocks.*.mlp.fc7", [], "`'probe.facet=blocks.*.mlp.fc2'`"),
        ("segmentation", "keys", [], "must be one of token, key, query, value, attn_out"),
        ("segmentation", "key", ["probe.norm=final"], "probe.facet=token"),
        (
            "segmentation", "blocks.1.attn", ["probe.layers_mode=multi"],
            "probe.layers_mode=multi",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_in_a_line(capsys, task, facet, more, said):
    assert said in fails(capsys, words(task, facet, *more), 2)


def test_a_plan_knows_the_block_of_a_name(capsys):
    assert main([*words("tokencut", "blocks.1.attn"), "--dry-run"]) == 0
    assert "1 job, 1 scores: 0 finished, 1 pending" in capsys.readouterr().out
