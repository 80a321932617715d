"""Correspondence: runs over photographs and annotated pairs, their records and settings."""

from typing import Any

import pytest
import torch
from PIL import Image

from probes.correspondence import Correspondence
from ssl_bench.cli.__main__ import main
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.data.layouts.spair71k import Spair71k
from ssl_bench.data.samples import Dataset
from ssl_bench.models import Encoder, ViTConfig, build_vit, encoder_from_model
from ssl_bench.results import ResultStore
from ssl_bench.results.per_image import load_curve
from tests.support.colours import Counter
from tests.support.faults import unchecked_types
from tests.support.photographs import evaluated
from tests.support.spair import TARGET_SIZE, WrittenPair, spair

WARPS: dict[str, Any] = {
    "image_size": 32, "num_points": 20, "num_workers": 1, "batch_size": 2, "panels": 0,
}  # fmt: skip


def tiny(**changes: Any) -> Encoder:
    config = ViTConfig(image_size=32, patch_size=8, dim=12, depth=3, num_heads=2, **changes)
    return encoder_from_model(build_vit(config, seed=0), name="tiny")


def run(dataset: Dataset, store: ResultStore, *, encoder: Encoder | None = None, **options: Any):
    probe = Correspondence(**{**WARPS, **options})
    return evaluated(probe, dataset, store, encoder or tiny(), (0, 2), overwrite=False)


def test_larger_alphas_score_higher_and_figures_are_named_after_the_warp(photographs, tmp_path):
    store = ResultStore(tmp_path / "out")
    options = {"warp": "flip", "facet": ["token", "key"], "panels": 1}

    records = run(photographs, store, **options)

    alphas = ("pck_0.01", "pck_0.05", "pck_0.1", "pck_0.15")
    by_cell = {(r.layer, r.facet, r.metric): r.value for r in records}
    for layer, facet in ((0, "token"), (2, "key")):
        found = [by_cell[layer, facet, metric] for metric in alphas]
        assert found == sorted(found)
    assert {(r.num_images, r.details["points"]) for r in records} == {(3, 60)}
    (folder,) = (store.root / "pictures/correspondence/folder").iterdir()
    drawn = {p.relative_to(folder).as_posix() for p in folder.rglob("*.png")}
    probe = Correspondence(**{**WARPS, **options})
    assert drawn == probe.pictures((0, 2), photographs.images(), 0).keys()
    assert len(drawn) == 4
    assert all("warp=flip" in name and name.endswith(".png.png") for name in drawn)


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


def test_stored_images_give_the_value_and_interval_again(photographs, tmp_path):
    store = ResultStore(tmp_path / "out")
    records = [r for r in run(photographs, store) if r.metric == "pck_0.15"]

    blocks = load_curve(store, records).blocks

    assert not store.damaged
    for record in records:
        assert blocks[record.layer].value == pytest.approx(record.value)
        assert blocks[record.layer].ci95() == record.ci95


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


def test_a_pair_is_degenerate_if_the_patches_of_its_target_are_all_alike(tmp_path):
    base, encoder = spair(tmp_path), tiny()
    with torch.no_grad():
        encoder.module.get_parameter("pos_embed").zero_()
    # The target of two of the three pairs.
    Image.new("RGB", TARGET_SIZE, (90, 120, 30)).save(base / "JPEGImages/cat/2008_000002.jpg")

    store = ResultStore(tmp_path / "out")
    records = run(Spair71k(tmp_path), store, encoder=encoder, protocol="spair", alphas=[0.08])

    assert records[0].details["degenerate_percent"] == pytest.approx(200 / 3)


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
    pairs = ("ax", "by", "cx", "dx")
    spair(tmp_path, tuple(WrittenPair(n, a, b, "cat") for n, (a, b) in enumerate(pairs)))
    values, images = [], []
    # Two blocks of 4 x 4 patches with 12 channels in float32.
    view_gib = 2 * 4 * 4 * 12 * 4 / 2**30
    for gib in (8.0, 3 * view_gib, 2 * view_gib, 0.0):
        encoder, store = tiny(), ResultStore(tmp_path / str(gib))
        counter = Counter(encoder)
        options = {"protocol": "spair", "batch_size": 1, "memory_gib": gib}
        records = run(Spair71k(tmp_path), store, encoder=encoder, **options)
        values.append([record.value for record in records])
        images.append(counter.images)

    assert values == [values[0]] * 4
    # If three images fit, x is still cached for the last pair, because it was used just before.
    assert images == [6, 6, 7, 8]


def composed(*overrides: str) -> Correspondence:
    return build(compose_config("probing", ["probe=correspondence", *overrides]), "probe")


def test_settings_contain_only_what_the_choice_uses():
    everything = composed("probe.prediction=soft").settings()
    assert everything == {
        "image_size": None, "warp": "homography", "strength": 0.25, "num_points": 256,
        "prediction": "soft", "sigma": 7.0, "temperature": 0.04,
    }  # fmt: skip
    cells = composed("probe.warp=flip").settings()
    assert cells == {"image_size": None, "warp": "flip", "num_points": 256, "prediction": "cell"}
    pairs = composed("probe.protocol=spair")
    assert pairs.settings() == {"image_size": None, "prediction": "cell"}
    assert composed("probe.sampling=patch").settings()["sampling"] == "patch"
    assert (pairs.role, pairs.metrics[-1]) == ("correspondence", "pck_0.2")
    assert (composed().role, composed().metrics[0]) == ("images", "pck_0.01")


def test_whole_numbers_identify_the_same_result():
    whole = ("probe.strength=0", "probe.prediction=soft", "probe.sigma=2", "probe.alphas=[1]")

    with unchecked_types():
        one = composed(*whole)

    assert [repr(one.settings()[name]) for name in ("strength", "sigma")] == ["0.0", "2.0"]
    assert one.metrics == ("pck_1.0",)


@pytest.mark.data
def test_a_published_encoder_has_the_expected_pck(shared_data, published_encoder, tmp_path):
    """Another program computed the values, with points half a pixel away from those here."""
    words = ["probe", "--task", "correspondence", "--checkpoint", str(published_encoder)]
    words += ["--dataset", f"pf_willow:{shared_data}/real/pf-willow", "--layer", "2,8"]
    words += ["probe.protocol=spair", "probe.sampling=patch", "probe.image_size=224"]

    assert main([*words, "--pictures", "0", "--out", str(tmp_path)]) == 0

    records = {r.layer: r.value for r in ResultStore(tmp_path).records() if r.metric == "pck_0.1"}
    assert records == pytest.approx({2: 15.31, 8: 39.49}, abs=0.3)
