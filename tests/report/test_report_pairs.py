"""Test the page of the HTML report that compares two checkpoints."""

import re
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import identify_encoder
from ssl_bench.report.pairs import choose_pairs, compare_in_panel, load_per_image_scores
from ssl_bench.report.panels import group_into_panels, list_checkpoints
from ssl_bench.report.pictures import PictureFiles, find_galleries, keep_layers, pair_galleries
from ssl_bench.results import ResultStore
from ssl_bench.tables.comparison import compare_encoders
from tests.report.test_report import write_report
from tests.support.faults import encoder_file, make_probe_args
from tests.support.report_cells import (
    HALF,
    PERFECT,
    WRONG,
    build_record,
    compared_pair,
    counts,
    get_figures_folder,
    make_encoder_id,
    save,
    save_pictures,
    skipless,
)


def read_pair_page(root: Path) -> str:
    (page,) = write_report(root).glob("compare-*.html")
    return page.read_text()


def test_a_pair_shows_the_pictures_that_both_checkpoints_have(tmp_path):
    records = [build_record(task="pca"), skipless(task="pca")]
    for folder in map(get_figures_folder, records):
        names = ("block00/one", "block01/one", "block01/two", "block01", "blocks-0-1")
        save_pictures(tmp_path, *(f"pca/toy/{folder}/image/{name}" for name in names))
    save_pictures(tmp_path, f"pca/toy/{get_figures_folder(records[0])}/image/block02/one")
    files = PictureFiles(tmp_path)
    first, second = (find_galleries(files, records, c) for c in list_checkpoints(records))

    pairs = pair_galleries(first, second)

    shown = [(list(one.prefixes), list(one.files)) for one, _ in pairs]
    assert shown == [([0, 1], ["one"]), ([None], ["blocks-0-1"])]
    assert all(
        get_figures_folder(records[1]) in path for _, other in pairs for path in other.paths()
    )
    # Without a common block, only the picture of all blocks remains.
    pairs = pair_galleries(keep_layers(first, {0}, 3), keep_layers(second, {1}, 3))
    assert [list(one.prefixes) for one, _ in pairs] == [[None]]


@pytest.mark.parametrize("ids", [("dog", "cat", "cow", "sky"), ("dog",), None])
def test_images_are_listed_from_largest_gain_to_largest_loss(tmp_path, ids):
    store, same = ResultStore(tmp_path), {"task": "segmentation", "metric": "miou_holdout"}
    good = [[3, 3], [4, 4], [4, 4]]
    save(store, build_record(**same), counts(HALF, PERFECT, WRONG, good))
    save(store, skipless(**same), counts(PERFECT, WRONG, HALF, good))
    if ids:
        store.save_image_ids(build_record().dataset_fingerprint, ids)

    compared = compared_pair(store, store.records())

    assert [round(image[-1]) for image in compared.images] == [100, -25, -75]
    numbered = [f"image {i} of 4" for i in (1, 2, 3, 4)]
    names = ids if ids is not None and len(ids) == 4 else numbered
    assert [image[0] for image in compared.images] == [names[1], names[2], names[0]]


def test_of_many_images_those_with_the_largest_differences_are_listed(tmp_path):
    store, same = ResultStore(tmp_path), {"task": "segmentation", "metric": "miou"}
    right = [[[n, n], [10, 10], [10, 10]] for n in range(1, 10)]
    save(store, build_record(**same), counts(*right, *right))
    save(store, skipless(**same), counts(*right[::-1], *right[::-1]))

    differences = [round(image[-1]) for image in compared_pair(store, store.records()).images]

    assert (len(differences), differences[0], differences[-1]) == (12, 77, -77)
    assert differences == sorted(differences, reverse=True)


@pytest.mark.parametrize("metric", ["corloc", "miou", "pixel_accuracy"])
def test_the_differences_equal_those_of_the_command_compare(tmp_path, metric):
    store, random = ResultStore(tmp_path), np.random.default_rng(0)
    records = [make(layer=n, metric=metric) for make in (build_record, skipless) for n in (0, 1, 2)]
    for record in records:
        if metric == "corloc":
            save(store, record, random.random(11) < 0.5)
        else:
            right, wrong = random.integers(0, 9, (11, 1, 2)), np.array([2, 1])
            pixels = [right, right + wrong, right + wrong[::-1]]
            save(store, record, np.concatenate(pixels, 1).astype(np.int32))
    records = store.records()

    compared = compared_pair(store, records)

    (table,), _ = compare_encoders(
        store, records, {make_encoder_id(letter): letter for letter in "ac"}
    )
    fields = attrgetter("first", "second", "low", "high")
    differences = [row.difference for row in (*compared.blocks, *compared.summary)]
    assert list(map(fields, differences)) == list(map(fields, table.rows))
    blocks = [tuple(one.layer for one in (*r.first, *r.second)) for r in compared.blocks]
    assert blocks == [(0, 0), (1, 1), (2, 2)]


def test_a_probe_stores_the_names_of_its_images(workdir):
    assert main(make_probe_args("pca", "folder", workdir / "photos")) == 0
    store = ResultStore(Path("results"))

    (record,) = store.records()
    assert store.image_ids(record.dataset_fingerprint) == ("0.jpg", "1.jpg", "2.jpg", "3.jpg")
    assert store.image_ids("0" * 64) is None


def test_the_lowest_of_several_seeds_is_compared(tmp_path):
    store = ResultStore(tmp_path)
    save(store, build_record(seed=1), np.array([1, 1, 1, 0, 0, 0, 0, 0], bool))
    save(store, skipless(seed=1), np.array([1, 0, 0, 1, 1, 1, 0, 0], bool))
    for make in (build_record, skipless):
        save(store, make(seed=2), np.ones(8, bool))

    compared = compared_pair(store, store.records())

    (row,) = compared.blocks
    assert (row.difference.first, row.difference.second) == (37.5, 50)
    # The images that both classify correctly, only the first, only the second, and neither.
    assert compared.tally == [1, 2, 3, 2]


def test_checkpoints_with_different_seeds_are_not_compared(tmp_path):
    store = ResultStore(tmp_path)
    save(store, build_record(seed=1), np.array([1, 0, 0, 0], bool))
    save(store, skipless(seed=2), np.array([1, 1, 1, 0], bool))
    checkpoints = list_checkpoints(store.records())
    (panel,) = group_into_panels(store.records(), checkpoints)

    first, second = (load_per_image_scores(store, panel, checkpoint) for checkpoint in checkpoints)

    assert first is not None
    assert second is not None
    assert compare_in_panel(panel, first, second) is None


@pytest.mark.parametrize("commit", ["1" * 40, "2" * 40])
def test_the_page_warns_if_the_results_come_from_different_code(tmp_path, commit):
    store = ResultStore(tmp_path)
    save(store, build_record(git_commit="1" * 40), np.array([1, 0, 0, 0], bool))
    save(store, skipless(git_commit=commit), np.array([1, 1, 1, 0], bool))

    warnings = re.findall(r'<p class="warning">(.*)</p>', read_pair_page(tmp_path))

    assert any("2222222222" in warning for warning in warnings) == (commit != "1" * 40)


def test_metrics_without_a_best_block_have_no_summary_or_counts(tmp_path):
    store = ResultStore(tmp_path)
    for make in (build_record, skipless):
        for layer in (0, 1):
            save(store, make(layer=layer, metric="degenerate"), np.array([1, 0, 0, 1], bool))

    compared, page = compared_pair(store, store.records()), read_pair_page(tmp_path)

    assert (len(compared.blocks), list(compared.summary), compared.tally) == (2, [], None)
    assert "Block by block" in page
    assert "Best blocks" not in page
    assert "Correct images" not in page


def test_pairs_of_many_checkpoints_must_be_requested(tmp_path, capsys):
    store = ResultStore(tmp_path)
    records = [build_record(checkpoint_sha256=f"{i}" * 64, model=f"m{i}") for i in range(7)]
    few, many = (list_checkpoints(records[:count]) for count in (6, 7))
    for record in records:
        store.save(record)
    for words in ([], ["--pair", "m6", "m0"]):
        assert main(["report", "--out", str(tmp_path), *words]) == 0
        assert ("--pair A B" in capsys.readouterr().err) == (not words)

    assert len(choose_pairs(few, [])) == 15
    assert choose_pairs(many, []) == []
    for checkpoints, name in ((many, "6"), (few, "5")):
        # A pair that is given twice has one page.
        (pair,) = choose_pairs(checkpoints, 2 * [(make_encoder_id(name), make_encoder_id("0"))])
        assert (pair.first.name, pair.second.name) == (f"m{name}", "m0")
    with pytest.raises(ConfigurationError) as caught:
        choose_pairs(few, [(make_encoder_id("1"), make_encoder_id("1"))])
    assert caught.value.hint == ("--pair", "{checkpoint}", "{other_checkpoint}")


def test_a_pair_is_given_by_path_or_name(tmp_path, capsys):
    (tmp_path / "runs/vit").mkdir(parents=True)
    weights = encoder_file(tmp_path / "runs/vit/last.safetensors")
    store = ResultStore(tmp_path)
    store.save(build_record(model="vit", **identify_encoder(str(weights)).identity()))
    store.save(skipless())
    report = ["report", "--out", str(tmp_path)]

    assert main([*report, "--pair", str(weights.parent), "skipless"]) == 0
    assert len(list((tmp_path / "report").glob("compare-*.html"))) == 1
    assert main([*report, "--pair", "vit", "other"]) == 3
    assert "'other'" in capsys.readouterr().err
    # Without a file of its digest, the checkpoint itself is read.
    weights.with_name("last.safetensors.sha256").unlink()
    assert main([*report, "--pair", str(weights.parent), "skipless"]) == 0
    weights.write_bytes(weights.read_bytes()[:99])
    assert main([*report, "--pair", str(weights.parent), "skipless"]) == 4
