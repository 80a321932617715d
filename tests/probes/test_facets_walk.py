"""Test that every probe can use the output of a submodule as features."""

from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.cli.key_descriptions import list_described_keys
from ssl_bench.request import probing_config
from ssl_bench.results import Record
from tests.support.faults import SMALL, class_folders, expect_error, make_probe_args, records, voc


@pytest.fixture(autouse=True)
def data(workdir):
    voc(workdir)
    class_folders(workdir)


def command(task: str, facet: str, *more: str) -> list[str]:
    dataset = "class_folders" if task in ("knn", "classification", "clustering") else "voc2012"
    on_disk = ["probe.tier=disk", "probe.cache=cache"] if task == "segmentation" else []
    words = make_probe_args(task, dataset, Path(), "--layer", "all", f"probe.facet={facet}")
    return [*words, *on_disk, *more]


def run(task: str, facet: str, out: str = "results") -> list[Record]:
    assert main([*command(task, facet), "--out", out]) == 0
    return records(out)


def has_facets(task: str) -> bool:
    keys = list_described_keys(probing_config(task, "toy", []), ["probe"])
    return "probe.facet" in {key.name for key in keys}


@pytest.mark.parametrize("task", [*filter(has_facets, SMALL)])
def test_each_probe_accepts_a_submodule_of_one_block(task):
    found = run(task, "blocks.1.mlp.fc1")

    # Geometry also scores the output tokens of the block.
    facets = {"blocks.*.mlp.fc1", *(["token"] if task == "geometry" else [])}
    assert {(record.layer, record.facet) for record in found} == {(1, f) for f in facets}
    drawn = [str(path) for path in Path("results/pictures").rglob("*.png")]
    has_figures = task in ("segmentation", "tokencut", "discovery", "pca", "correspondence")
    assert bool(drawn) == has_figures
    assert all("mlp.fc1" in path for path in drawn)


@pytest.mark.parametrize("task", ["geometry", "tokencut"])
def test_a_submodule_of_all_blocks_reuses_the_block_already_scored(task, capsys):
    first = run(task, "blocks.1.mlp.fc1")
    capsys.readouterr()
    everywhere = run(task, "blocks.*.mlp.fc1")
    assert {record.layer for record in everywhere} == {0, 1}
    assert f"skipping {len(first)} of {2 * len(first)} results" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["retrieval", "knn"])
def test_a_submodule_has_the_scores_of_the_equal_facet(task):
    # In our blocks, the facet mlp_out is the output of the submodule mlp.
    named, dotted = (
        {(r.layer, r.metric): r.value for r in run(task, facet, out=facet[:3])}
        for facet in ("mlp_out", "blocks.*.mlp")
    )
    assert named == dotted


@pytest.mark.parametrize(
    ("facet", "more", "hint"),
    [
        ("key", "probe.norm=final", "probe.facet=token"),
        ("blocks.1.attn", "probe.layers_mode=multi", "probe.layers_mode=multi"),
    ],
)
def test_settings_that_do_not_fit_the_facet_are_refused(capsys, facet, more, hint):
    assert hint in expect_error(capsys, command("segmentation", facet, more), 2)


def test_a_plan_contains_only_the_block_of_the_facet(capsys):
    assert main([*command("tokencut", "blocks.1.attn"), "--dry-run"]) == 0
    assert "1 job, 1 scores: 0 finished, 1 pending" in capsys.readouterr().out
