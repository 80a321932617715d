"""Test the geometry probe, which measures how features are distributed."""

import math
from typing import Any

import pytest
import torch

from probes.features.moments import Moments
from probes.geometry import Geometry
from probes.spectra import rankme
from ssl_bench.cli.__main__ import main
from ssl_bench.errors import UnsupportedEncoderError
from ssl_bench.features import FeatureExtractor, central_square
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model
from ssl_bench.results import ResultStore
from tests.support.faults import make_probe_args, records
from tests.support.photographs import evaluate_probe, noise_photographs

SMALL: dict[str, Any] = {"view_images": 3, "views": 2, "num_workers": 1}


def image_folder(root, count):
    return noise_photographs(root, {str(number): (40, 60) for number in range(count)})


@pytest.fixture
def photographs(tmp_path):
    return image_folder(tmp_path / "photos", 7)


def vit(**changes):
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 8, "dim": 12, "depth": 2}
    return build_vit(ViTConfig(**{**sizes, **changes}, num_heads=2), seed=0)


def scores(dataset, model=None, *, layers=(0, 1), **options):
    run_options = {name: options.pop(name) for name in ("seed", "say") if name in options}
    probe, store = Geometry(**{**SMALL, **options}), ResultStore(dataset.root.parent / "out")
    encoder = encoder_from_model(model or vit(), name="tiny")
    records = evaluate_probe(probe, dataset, store, encoder, layers, **run_options)
    return {(record.layer, record.facet, record.metric): record for record in records}


def values(dataset, *more, **options):
    return {cell: score.value for cell, score in scores(dataset, *more, **options).items()}


def test_scores_have_units_counts_and_intervals_within_their_ranges(photographs):
    found = scores(photographs, vit(num_registers=2), layers=(1, 0), pair_images=6)

    records = found.values()
    # With seven images, there are six variances, so the range from rank 11 on is empty.
    assert {r.metric for r in records if math.isnan(r.value)} == {"alpha_req"}
    assert {r.metric for r in records if r.unit == "%"} == {"outlier_share"}
    assert not any(r.is_ranked for r in records)
    counts = {r.metric: r.num_images for r in records}
    expected = {"rankme": 7, "lidar": 3, "uniformity": 6, "position_r2": 7}
    assert expected.items() <= counts.items()
    assert found[1, "token", "position_r2"].details["num_held_out"] == 1
    for kind, count in (("cls", 1), ("register", 2)):
        details = found[1, "token", f"{kind}_patch_cosine"].details
        assert details[f"num_{kind}_tokens"] == count
    ranks = found[1, "cls", "rankme"]
    assert ranks.value < 7.001
    ends = {"alignment": (0, 4), "uniformity": (-8, 0), "outlier_share": (0, 100)}
    ends |= {"cls_patch_cosine": (-1, 1), "register_patch_cosine": (-1, 1)}
    ends |= {"position_r2": (-math.inf, 1)}
    for (_, _, metric), score in found.items():
        if score.ci95 is not None:
            low, high = ends[metric]
            assert low <= score.ci95[0] <= score.value <= score.ci95[1] <= high
    assert found[1, "cls", "alignment"].ci95
    assert ranks.ci95 is None


def test_facets_score_alike_alone_and_together(photographs):
    both = values(photographs, facet=["cls", "patch_mean"])

    for facet in ("cls", "patch_mean"):
        alone = values(photographs, facet=[facet], view_images=3)
        names = [cell for cell in alone if cell[1] == facet]
        assert {name: both[name] for name in names} == pytest.approx(
            {name: alone[name] for name in names}, nan_ok=True
        )
        assert len(names) == 12


def test_records_state_whether_the_number_of_images_limits_a_rank(tmp_path):
    for count, limits in (
        (7, {"rankme": (7, True), "effective_rank": (6, True), "lidar": (2, True)}),
        # Without their mean, eight vectors span seven dimensions.
        (8, {"rankme": (8, False), "effective_rank": (7, True), "lidar": (2, True)}),
        (9, {"rankme": (8, False), "effective_rank": (8, False), "lidar": (2, True)}),
    ):
        images = image_folder(tmp_path / str(count), count)
        found = scores(images, vit(dim=8), layers=(1,), facet="cls")
        ranks = {m: s.details for (_, _, m), s in found.items() if "rank_limit" in s.details}
        assert {m: (d["rank_limit"], d["limited_by_images"]) for m, d in ranks.items()} == limits


def test_features_come_from_the_central_squares(photographs):
    found = values(photographs, alpha_ranks=(1, 6))

    encoder = encoder_from_model(vit(), name="tiny")
    extractor = FeatureExtractor(encoder, layers=[1], facets=["cls_normed", "token_normed"])
    images = photographs.images()
    squares = [central_square(images[i].image, 32, crop_share=0.875) for i in range(len(images))]
    features = extractor(torch.stack(squares).float() / 255)[1]
    assert found[1, "cls", "rankme"] == pytest.approx(rankme(Moments().add(features["cls_normed"])))
    patches = Moments().add(features["token_normed"].flatten(1, 2).mean(1))
    assert found[1, "patch_mean", "rankme"] == pytest.approx(rankme(patches))


def test_outliers_are_counted_before_the_final_norm(photographs):
    model = vit()
    with torch.no_grad():
        model.get_parameter("norm.weight").zero_()
    # After the norm, all tokens are equal. Only tokens before the norm have outliers.
    found = scores(photographs, model, outlier_factor=1.0)
    outliers = found[1, "token", "outlier_share"]
    assert outliers.value == pytest.approx(50)
    assert outliers.details["percent_of_images_with_any"] == 100
    assert abs(found[1, "token", "cls_patch_cosine"].value) < 0.9
    assert found[1, "patch_mean", "rankme"].details["constant_features"]
    assert math.isnan(found[1, "patch_mean", "effective_rank"].value)


def test_the_batch_size_does_not_change_scores(photographs):
    options = {"alpha_ranks": (1, 6), "pair_images": 5}
    whole = values(photographs, **options)
    parts = values(photographs, batch_size=3, **options)

    assert parts == pytest.approx(whole, rel=1e-4, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize(("size", "largest"), [(32, 5), (512, 2)])
def test_all_blocks_share_one_pass_of_images_and_views(photographs, size, largest):
    model, batches = vit(image_size=size, patch_size=size // 4), []
    model.patch_embed.register_forward_hook(lambda _m, given, _o: batches.append(len(given[0])))

    values(photographs, model, image_size=size)

    assert sum(batches) == 7 + 3 * 2
    # On a CPU, batches of large images are small, so that the progress is visible.
    assert max(batches) == largest


def interrupt_views(photographs, **options):
    """Interrupt the geometry probe during the third batch."""
    model, batches = vit(), []

    def interrupt(_module, given, _output):
        batches.append(len(given[0]))
        if len(batches) == 3:
            raise KeyboardInterrupt

    model.patch_embed.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        values(photographs, model, **options)
    assert batches == [2, 2, 2]
    return model, batches


@pytest.mark.parametrize("damaged", [0, 1])
def test_views_of_an_interrupted_run_are_not_computed_again(
    photographs, tmp_path, monkeypatch, damaged
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    expected = values(photographs)
    model, batches = interrupt_views(photographs)
    (journal,) = (tmp_path / "cache").rglob("*.jsonl")
    header, first, second = journal.read_bytes().splitlines()
    journal.write_bytes(b"\n".join([header, first[damaged:], second, b""]))

    assert values(photographs, model) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)

    # The views of the third image and of the damaged entry are computed, and then all images.
    assert batches[3 : 4 + damaged] == [2] * (1 + damaged)
    assert sum(batches[4 + damaged :]) == 7
    assert not list((tmp_path / "cache").rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("changes", "changed", "kept"),
    [
        ({"seed": 1}, ["alignment", "position_r2"], []),
        ({"view_area": (0.1, 0.2)}, ["alignment"], ["position_r2"]),
        ({"layers": (1,)}, [], ["alignment", "position_r2"]),
    ],
)
def test_other_views_and_blocks_are_computed_after_an_interrupted_run(
    photographs, tmp_path, monkeypatch, changes, changed, kept
):
    # All images have views, so that only their crops depend on the seed.
    one, other = (values(photographs, view_images=7, **more) for more in ({}, changes))
    for name in (*changed, *kept):
        cell = (1, "token" if name == "position_r2" else "cls", name)
        assert (one[cell] != other[cell]) == (name in changed)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, _ = interrupt_views(photographs, view_images=7)
    assert list((tmp_path / "cache").rglob("*.jsonl"))

    found = values(photographs, model, view_images=7, **changes)

    assert found == pytest.approx(other, rel=0, abs=0, nan_ok=True)


def test_an_encoder_without_cls_has_no_cosine_with_it(photographs, encoder_without_cls):
    model = encoder_without_cls.module
    with pytest.raises(UnsupportedEncoderError):
        values(photographs, model)
    found = scores(photographs, model, facet="patch_mean")
    assert math.isnan(found[1, "token", "cls_patch_cosine"].value)
    assert "[CLS]" in found[1, "token", "cls_patch_cosine"].details["undefined"]
    assert found[1, "patch_mean", "rankme"].value >= 1


def test_tables_state_why_a_value_or_interval_is_missing(workdir, capsys):
    assert main(make_probe_args("geometry", "folder", workdir / "photos")) == 0
    for metric, missing, why in (
        ("register_patch_cosine", "value for block 1", "the encoder has no registers"),
        ("alpha_req", "value for block 1", "fewer than two eigenvalues"),
        ("rankme", "interval", "the score depends on the number of images"),
    ):
        (record,) = [r for r in records() if r.metric == metric and r.facet != "patch_mean"]
        assert record.ci95 is None
        capsys.readouterr()
        assert main(["table", "--metric", metric]) == 0
        assert f"no {missing}: {why}" in capsys.readouterr().out


def test_registers_lie_between_cls_and_the_patches():
    model, outputs = vit(num_registers=2), []
    model.blocks[1].register_forward_hook(lambda _m, _i, output: outputs.append(output))
    encoder, facets = encoder_from_model(model, name="tiny"), ["token", "cls", "registers"]

    found = FeatureExtractor(encoder, layers=[1], facets=facets)(torch.rand(1, 3, 32, 32))[1]

    assert torch.equal(found["registers"], outputs[0][:, 1:3])
    assert torch.equal(found["token"].flatten(1, 2), outputs[0][:, 3:])
    with pytest.raises(UnsupportedEncoderError) as caught:
        FeatureExtractor(encoder_from_model(vit(), name="x"), layers=[1], facets=["registers"])
    assert "probe.facet=token" in caught.value.hint


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_images_leave_only_some_scores_undefined(tmp_path, count):
    messages = []
    found = scores(image_folder(tmp_path / "few", count), say=messages.append)

    assert any("fewer than three images" in line for line in messages)
    known = {m for (layer, facet, m), s in found.items() if facet != "cls" and s.value == s.value}
    assert {"outlier_share", "cls_patch_cosine", "alignment", "rankme"} <= known
    assert ("uniformity" in known, "lidar" in known, "effective_rank" in known) == 3 * (count > 1,)
    position = found[1, "token", "position_r2"]
    assert math.isnan(position.value)
    assert position.details["undefined"] == "fewer than three images"
    assert count > 1 or all(score.ci95 is None for score in found.values())
