"""Correspondence: runs over photographs and annotated pairs, their records and settings."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from probes.correspondence import Correspondence
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.data.layouts.spair71k import Spair71k
from ssl_bench.data.samples import Dataset
from ssl_bench.models import Encoder, ViTConfig, build_vit, encoder_from_model
from ssl_bench.results import Record, ResultStore
from ssl_bench.results.per_image import load_curve
from tests.support.colours import Counter
from tests.support.faults import unchecked_types
from tests.support.photographs import evaluated
from tests.support.spair import spair

KINDS = ("homography", "crop", "flip")
WARPS: dict[str, Any] = {
    "image_size": 32,
    "num_points": 20,
    "num_workers": 1,
    "batch_size": 2,
    "panels": 0,
}


def tiny(**changes: Any) -> Encoder:
    config = ViTConfig(image_size=32, patch_size=8, dim=12, depth=3, num_heads=2, **changes)
    return encoder_from_model(build_vit(config, seed=0), name="tiny")


def run(dataset: Dataset, store: ResultStore, *, encoder: Encoder | None = None, **options: Any):
    probe = Correspondence(**{**WARPS, **options})
    return evaluated(probe, dataset, store, encoder or tiny(), (0, 2), overwrite=False)


def by_cell(records: Sequence[Record]) -> dict[tuple[int, str, str], float]:
    return {(r.layer, r.facet, r.metric): r.value for r in records}


@pytest.mark.parametrize("warp", KINDS)
def test_every_block_and_facet_gets_a_score_an_alpha(photographs, tmp_path, warp):
    store = ResultStore(tmp_path / "out")

    records = run(photographs, store, warp=warp, facet=["token", "key"])

    alphas = ("pck_0.01", "pck_0.05", "pck_0.1", "pck_0.15")
    assert by_cell(records).keys() == {
        (layer, facet, metric)
        for layer in (0, 2)
        for facet in ("token", "key")
        for metric in alphas
    }
    for layer, facet in ((0, "token"), (2, "key")):
        values = [by_cell(records)[layer, facet, metric] for metric in alphas]
        assert values == sorted(values)
    assert {(r.num_images, r.details["points"]) for r in records} == {(3, 60)}
    assert run(photographs, store, warp=warp, facet=["token", "key"]) == records


def test_the_files_that_are_announced_are_left(photographs, tmp_path):
    store = ResultStore(tmp_path / "out")
    probe = Correspondence(**{**WARPS, "panels": 1, "warp": "flip"})

    run(photographs, store, panels=1, warp="flip")

    (folder,) = (store.root / "pictures/correspondence/folder").iterdir()
    left = {p.relative_to(folder).as_posix() for p in folder.rglob("*.png")}
    assert left == probe.pictures((0, 2), photographs.images(), 0).keys()
    assert len(left) == 2
    assert all("warp=flip" in name and name.endswith(".png.png") for name in left)


def test_an_image_scores_the_same_without_the_others(photographs, tmp_path):
    whole, alone = ResultStore(tmp_path / "one"), ResultStore(tmp_path / "other")
    first = run(photographs, whole)
    for name in ("a.png", "b.png"):
        (photographs.root / name).unlink()
    second = run(photographs, alone)

    for one, other in zip(first, second, strict=True):
        images = whole.per_image(one), alone.per_image(other)
        assert images[0] is not None
        assert images[1] is not None
        assert images[0][2].tolist() == images[1][0].tolist()


def test_kept_images_give_the_value_again_and_can_be_paired(photographs, tmp_path):
    store = ResultStore(tmp_path / "out")
    records = [r for r in run(photographs, store) if r.metric == "pck_0.15"]

    scored = load_curve(store, records)

    assert not store.damaged
    assert {layer: one.value for layer, one in scored.blocks.items()} == pytest.approx(
        {record.layer: record.value for record in records}
    )
    assert [one.ci95() for one in scored.blocks.values()] == [record.ci95 for record in records]


def test_a_block_whose_patches_are_all_alike_is_marked(photographs, tmp_path):
    encoder = tiny(skip_mlp=False)
    with torch.no_grad():
        encoder.module.get_parameter("blocks.2.mlp.fc2.weight").zero_()
        encoder.module.get_parameter("blocks.2.mlp.fc2.bias").fill_(1)

    # A size is rounded to whole patches.
    records = run(photographs, ResultStore(tmp_path / "out"), encoder=encoder, image_size=45)

    marks = {record.layer: record.details["degenerate_percent"] for record in records}
    assert marks == {0: 0.0, 2: 100.0}
    assert {record.details["view_size"] for record in records} == {48}


def test_pairs_are_averaged_by_pair_by_point_and_by_category(tmp_path):
    spair(tmp_path)
    store = ResultStore(tmp_path / "out")

    records = run(Spair71k(tmp_path), store, protocol="spair", alphas=[0.08])

    record = records[0]
    counts = store.per_image(record)
    assert counts is not None
    # Two pairs of cats, with none of three points right and one of two, and a bird's only point.
    assert counts.tolist() == [[0, 3], [1, 2], [1, 1]]
    assert record.value == pytest.approx((0 + 50 + 100) / 3)
    assert record.details["of_all_points"] == pytest.approx(100 * 2 / 6)
    assert record.details["by_category"] == pytest.approx({"bird": 100, "cat": 25})
    assert record.details["of_categories"] == pytest.approx((100 + 25) / 2)
    baseline = record.details["baseline"]
    assert baseline["answer"] in ("same place", "middle")
    assert not {"warp", "strength", "num_points"} & record.settings.keys()


def test_the_same_object_in_two_sizes_is_found_and_reachable_is_recorded(tmp_path):
    spair(tmp_path)

    near, far = (
        run(Spair71k(tmp_path), ResultStore(tmp_path / name), protocol="spair", alphas=[alpha])
        for name, alpha in (("near", 0.08), ("far", 0.2))
    )

    # Squashed to one size both pictures of a pair are the same; a patch is 15 of 50 pixels high.
    assert [record.value for record in far] == [100.0, 100.0]
    # Patches of 10 x 15 pixels, 4 of the box are near enough. Targets of the first pair lie on
    # corners of patches; (5.5, 11.5) is 4 from the middle (5, 7.5) of its patch, and a bit;
    # (25.5, 38.5) is 1 from (25, 37.5); (17.5, 19.5) is 3.9 from (15, 22.5).
    assert near[0].details["reachable"] == pytest.approx((0 + 50 + 100) / 3)


def test_an_image_of_several_pairs_is_encoded_once_while_it_is_cached(tmp_path):
    spair(tmp_path)
    values, images = [], []
    for gib in (8.0, 0.0):
        encoder, store = tiny(), ResultStore(tmp_path / str(gib))
        counter = Counter(encoder)
        options = {"protocol": "spair", "batch_size": 1, "memory_gib": gib}
        records = run(Spair71k(tmp_path), store, encoder=encoder, **options)
        values.append([record.value for record in records])
        images.append(counter.images)

    assert values[0] == values[1]
    # Two of three pairs have one picture in common.
    assert images == [5, 6]


def composed(*overrides: str) -> Correspondence:
    return build(compose_config("probing", ["probe=correspondence", *overrides]), "probe")


def test_settings_name_what_the_choice_uses_and_nothing_else():
    everything = composed("probe.prediction=soft").settings()
    assert everything == {
        "image_size": None, "warp": "homography", "strength": 0.25, "num_points": 256,
        "prediction": "soft", "sigma": 7.0, "temperature": 0.04,
    }  # fmt: skip
    cells = composed("probe.warp=flip").settings()
    assert cells == {"image_size": None, "warp": "flip", "num_points": 256, "prediction": "cell"}
    pairs = composed("probe.protocol=spair")
    assert pairs.settings() == {"image_size": None, "prediction": "cell"}
    assert (pairs.role, pairs.metrics[-1]) == ("correspondence", "pck_0.2")
    assert (composed().role, composed().metrics[0]) == ("images", "pck_0.01")


def test_a_whole_number_names_the_same_cell():
    whole = ("probe.strength=0", "probe.prediction=soft", "probe.sigma=2", "probe.alphas=[1]")

    with unchecked_types():
        one = composed(*whole)

    assert [repr(one.settings()[name]) for name in ("strength", "sigma")] == ["0.0", "2.0"]
    assert one.metrics == ("pck_1.0",)
