"""The geometry probe: its scores of every block, few images, and encoders without some tokens."""

import math
from typing import Any

import pytest
import torch

from probes.features.moments import Moments
from probes.geometry import Geometry
from probes.spectra import rankme
from ssl_bench.cli.__main__ import main
from ssl_bench.errors import UnfitEncoder
from ssl_bench.features import FeatureExtractor, central_square
from ssl_bench.models import (
    ConvMixerConfig,
    ViTConfig,
    build_encoder,
    build_vit,
    encoder_from_model,
)
from ssl_bench.results import ResultStore
from tests.support.faults import probing, records
from tests.support.photographs import evaluated, noise_photographs

SMALL: dict[str, Any] = {"view_images": 3, "views": 2, "num_workers": 1}


def folder(root, count):
    return noise_photographs(root, {str(number): (40, 60) for number in range(count)})


@pytest.fixture
def photographs(tmp_path):
    return folder(tmp_path / "photos", 7)


def vit(**changes):
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 8, "dim": 12, "depth": 2}
    return build_vit(ViTConfig(**{**sizes, **changes}, num_heads=2), seed=0)


def scores(dataset, model=None, *, seed=0, layers=(0, 1), said=None, **options):
    records = evaluated(
        Geometry(**{**SMALL, **options}),
        dataset,
        ResultStore(dataset.root.parent / "out"),
        encoder_from_model(model or vit(), name="tiny"),
        layers,
        seed=seed,
        say=(lambda _: None) if said is None else said.append,
    )
    return {(record.layer, record.facet, record.metric): record for record in records}


def values(dataset, *more, **options):
    return {cell: score.value for cell, score in scores(dataset, *more, **options).items()}


def test_scores_have_units_counts_and_intervals_within_their_ranges(photographs):
    found = scores(photographs, vit(num_registers=2), layers=(1, 0), pair_images=6)

    records = found.values()
    # Seven images have six variances, none of rank 11.
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


@pytest.mark.parametrize(
    ("count", "limits"),
    [
        (7, {"rankme": (7, True), "effective_rank": (6, True), "lidar": (2, True)}),
        # Without their mean, eight vectors span seven dimensions.
        (8, {"rankme": (8, False), "effective_rank": (7, True), "lidar": (2, True)}),
        (9, {"rankme": (8, False), "effective_rank": (8, False), "lidar": (2, True)}),
    ],
)
def test_ranks_that_more_images_would_raise_are_stated(tmp_path, count, limits):
    found = scores(folder(tmp_path / "some", count), vit(dim=8), layers=(1,), facet="cls")

    details = {metric: score.details for (_, _, metric), score in found.items()}
    ranks = {m: d for m, d in details.items() if "rank_limit" in d}
    assert {m: (d["rank_limit"], d["limited_by_images"]) for m, d in ranks.items()} == limits


def test_the_vectors_are_those_of_the_central_squares(photographs):
    found = values(photographs, alpha_ranks=(1, 6))

    encoder = encoder_from_model(vit(), name="tiny")
    extractor = FeatureExtractor(encoder, layers=[1], facets=["cls_normed", "token_normed"])
    images = photographs.images()
    squares = [central_square(images[i].image, 32, share=0.875) for i in range(len(images))]
    features = extractor(torch.stack(squares).float() / 255)[1]
    assert found[1, "cls", "rankme"] == pytest.approx(rankme(Moments().add(features["cls_normed"])))
    patches = Moments().add(features["token_normed"].flatten(1, 2).mean(1))
    assert found[1, "patch_mean", "rankme"] == pytest.approx(rankme(patches))


def test_outliers_are_counted_before_the_final_norm(photographs):
    model = vit()
    with torch.no_grad():
        model.get_parameter("norm.weight").zero_()
    # Normed tokens are all the same, so only tokens before the norm have outliers.
    found = scores(photographs, model, outlier_factor=1.0)
    assert found[1, "token", "outlier_share"].value == pytest.approx(50)
    assert abs(found[1, "token", "cls_patch_cosine"].value) < 0.9
    assert found[1, "patch_mean", "rankme"].details["constant_features"]
    assert math.isnan(found[1, "patch_mean", "effective_rank"].value)


def test_the_size_of_the_batches_changes_nothing(photographs):
    options = {"alpha_ranks": (1, 6), "pair_images": 5}
    whole = values(photographs, **options)
    parts = values(photographs, batch_size=3, **options)

    assert parts == pytest.approx(whole, rel=1e-4, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize(("size", "most"), [(32, 5), (512, 2)])
def test_all_blocks_share_one_pass_of_images_and_views(photographs, size, most):
    model, seen = vit(image_size=size, patch_size=size // 4), []
    model.patch_embed.register_forward_hook(lambda _m, given, _o: seen.append(len(given[0])))

    values(photographs, model, image_size=size)

    assert sum(seen) == 7 + 3 * 2
    # On a CPU only few large images pass together, so that progress is seen.
    assert max(seen) == most


@pytest.mark.parametrize("damaged", [0, 1])
def test_views_of_an_interrupted_run_are_not_computed_again(
    photographs, tmp_path, monkeypatch, damaged
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    whole, model, seen = values(photographs), vit(), []

    def interrupt(_module, given, _output):
        seen.append(len(given[0]))
        if len(seen) == 3:
            raise KeyboardInterrupt

    model.patch_embed.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        values(photographs, model)
    assert seen == [2, 2, 2]
    (journal,) = (tmp_path / "cache").rglob("*.jsonl")
    header, first, second = journal.read_bytes().splitlines()
    journal.write_bytes(b"\n".join([header, first[damaged:], second, b""]))
    assert values(photographs, model) == pytest.approx(whole, rel=0, abs=0, nan_ok=True)

    # The views of the third image and of the damaged one, and all images as they are.
    assert seen[3 : 4 + damaged] == [2] * (1 + damaged)
    assert sum(seen[4 + damaged :]) == 7
    assert not list((tmp_path / "cache").rglob("*.jsonl"))


def test_views_of_an_interrupted_run_are_not_used_with_another_seed(
    photographs, tmp_path, monkeypatch
):
    # All images have views, so that only their crops depend on the seed.
    expected, model, seen = values(photographs, seed=1, view_images=7), vit(), []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def interrupt(*_: object) -> None:
        seen.append(1)
        if len(seen) == 3:
            raise KeyboardInterrupt

    model.patch_embed.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        values(photographs, model, view_images=7)

    assert list((tmp_path / "cache").rglob("*.jsonl"))
    found = values(photographs, model, seed=1, view_images=7)
    assert found == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


def test_the_seed_draws_views_and_held_out_images(photographs):
    # The views are of all images, so that only their crops differ.
    one, same, other = (values(photographs, seed=seed, view_images=7) for seed in (0, 0, 1))

    assert one == pytest.approx(same, rel=0, abs=0, nan_ok=True)
    for cell in ((1, "cls", "alignment"), (1, "token", "position_r2")):
        assert one[cell] != other[cell]


def test_an_encoder_without_cls_has_no_cosine_with_it(photographs):
    config = ConvMixerConfig(image_size=32, patch_size=8, dim=12, depth=2, kernel_size=3)
    model = build_encoder(config, seed=0)
    with pytest.raises(UnfitEncoder, match=r"no \[CLS\] token"):
        values(photographs, model)
    found = values(photographs, model, facet="patch_mean")
    assert math.isnan(found[1, "token", "cls_patch_cosine"])
    assert found[1, "patch_mean", "rankme"] >= 1


@pytest.mark.parametrize(
    ("metric", "what", "why"),
    [
        ("register_patch_cosine", "value for block 1", "the encoder has no registers"),
        ("alpha_req", "value for block 1", "fewer than two eigenvalues"),
        ("rankme", "interval", "it depends on the number of images"),
    ],
)
def test_tables_state_why_a_value_or_interval_is_missing(workdir, capsys, metric, what, why):
    assert main(probing("geometry", "folder", workdir / "photos")) == 0
    (record,) = [r for r in records() if (r.metric, r.facet != "patch_mean") == (metric, True)]
    assert record.ci95 is None
    capsys.readouterr()
    assert main(["table", "--metric", metric]) == 0
    assert f"no {what}: {why}" in capsys.readouterr().out


def test_registers_lie_between_cls_and_the_patches():
    model, outputs = vit(num_registers=2), []
    model.blocks[1].register_forward_hook(lambda _m, _i, output: outputs.append(output))
    encoder, facets = encoder_from_model(model, name="tiny"), ["token", "cls", "registers"]

    found = FeatureExtractor(encoder, layers=[1], facets=facets)(torch.rand(1, 3, 32, 32))[1]

    assert torch.equal(found["registers"], outputs[0][:, 1:3])
    assert torch.equal(found["token"].flatten(1, 2), outputs[0][:, 3:])
    with pytest.raises(UnfitEncoder) as caught:
        FeatureExtractor(encoder_from_model(vit(), name="x"), layers=[1], facets=["registers"])
    assert "probe.facet=token" in caught.value.hint


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_images_give_the_scores_that_they_can(tmp_path, count):
    said = []
    found = scores(folder(tmp_path / "few", count), said=said)

    assert any("fewer than three images" in line for line in said)
    known = {m for (layer, facet, m), s in found.items() if facet != "cls" and s.value == s.value}
    assert {"outlier_share", "cls_patch_cosine", "alignment", "rankme"} <= known
    assert ("uniformity" in known, "lidar" in known, "effective_rank" in known) == 3 * (count > 1,)
    position = found[1, "token", "position_r2"]
    assert math.isnan(position.value)
    assert position.details["undefined"] == "fewer than three images"
    assert count > 1 or all(score.ci95 is None for score in found.values())
