"""Test the linear segmentation probe."""

import json
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from probes.features.training_images import ScaledCrops, TrainingSplit
from probes.heads.scored_images import Squashed, class_counts
from probes.segmentation import SegmentationRun
from ssl_bench.composition.compose import build, compose_config, fill_in_guesses
from ssl_bench.data.files.images import voc_colours
from ssl_bench.errors import CheckpointError, DataError
from ssl_bench.intervals import few_images_warning
from ssl_bench.scores import mean_iou
from tests.support.colours import (
    ColourDataset,
    Colours,
    Counter,
    probe_context,
    quick_probe,
    score_values,
    tiny_encoder,
)


def test_colours_are_segmented_well_and_each_view_is_encoded_once(tmp_path):
    encoder = tiny_encoder()
    counter = Counter(encoder)
    probe = quick_probe(epochs=20, views=2, panels=3)
    scores = score_values(probe.run(probe_context(tmp_path, encoder)))
    assert scores[3, "miou_holdout"] > 80
    assert scores[3, "pixel_accuracy"] > 85
    assert counter.images == 2 * 18 + 7
    assert set(counter.passes.values()) == {1}


def test_figures_show_the_predictions_that_are_scored(tmp_path, monkeypatch):
    masks: list[np.ndarray] = []
    monkeypatch.setattr(
        "probes.segmentation.overlay_classes", lambda image, mask: masks.append(mask) or image
    )
    probe = quick_probe(learning_rates=[1e-7, 1e-2], holdout=0.3, panels=7)

    *_, score = probe.run(probe_context(tmp_path, layers=(3,)))

    assert score.metric == "pixel_accuracy"
    assert score.details["learning_rate"] == 1e-2
    # Each figure has the true mask and one prediction.
    correct = [
        int(((truth == predicted) & (truth != 255)).sum())
        for truth, predicted in zip(masks[::2], masks[1::2], strict=True)
    ]
    assert correct == np.asarray(score.per_image)[:, 0].sum(1).tolist()


def test_figures_of_a_resumed_run_show_the_same_predictions(tmp_path, monkeypatch):
    # With wrong masks, the held-out images select another rate than the scored images.
    rates, dataset = [1e-7, 1e-2, 1e3], relabel_held_out(0.3)
    probe, figures = quick_probe(panels=3, holdout=0.3, learning_rates=rates), []
    count = SegmentationRun.count_scored
    for folder in (tmp_path / "kept", tmp_path / "resumed"):
        list(probe.run(probe_context(folder, dataset=dataset)))
        figures.append({path.name: path.read_bytes() for path in folder.rglob("*.png")})
        # A resumed run has only the counts.
        monkeypatch.setattr(
            SegmentationRun, "count_scored", lambda run, heads, _: count(run, heads)
        )

    assert len(figures[0]) == 3
    assert figures[0] == figures[1]


def test_concatenated_blocks_end_with_the_last_requested_block():
    for mode, last, blocks in (
        ("multi", 11, (2, 5, 8, 11)),
        ("multi", 8, (1, 3, 5, 8)),
        ("last4", 11, (8, 9, 10, 11)),
        ("last4", 1, (0, 1)),
    ):
        assert quick_probe(layers_mode=mode).sources((0, last)) == [blocks]


def relabel_held_out(share: float) -> ColourDataset:
    """Return a dataset in which only held-out images have label 3."""
    split = TrainingSplit.draw(Colours("train", 18), max_images=None, holdout=share, seed=0)
    return ColourDataset(masks={split.indices[position]: 3 for position in split.held_out})


def test_held_out_images_do_not_train_heads(tmp_path):
    one, other = (
        list(quick_probe(holdout=0.3, epochs=1).run(probe_context(tmp_path, dataset=dataset)))
        for dataset in (ColourDataset(), relabel_held_out(0.3))
    )
    for before, after in zip(one, other, strict=True):
        assert before.details["miou_by_rate"] == after.details["miou_by_rate"]
        assert after.details["miou_by_rate_held_out"] != before.details["miou_by_rate_held_out"]


def test_held_out_rates_are_not_chosen_on_scored_images(tmp_path):
    # With wrong masks, the held-out images select another rate than the scored images.
    context = probe_context(tmp_path, layers=(3,), dataset=relabel_held_out(0.3))
    probe = quick_probe(layers_mode="single", holdout=0.3, learning_rates=[1e-7, 1e-2, 1e3])
    holdout, oracle, accuracy = probe.run(context)
    assert holdout.details["learning_rate"] != oracle.details["learning_rate"]
    held_out, scored = (holdout.details[f"miou_by_rate{end}"] for end in ("_held_out", ""))
    rates = holdout.details["learning_rates"]
    assert holdout.details["learning_rate"] == rates[int(np.argmax(held_out))]
    assert oracle.details["learning_rate"] == rates[int(np.argmax(scored))]
    assert accuracy.details["learning_rate"] == holdout.details["learning_rate"]
    for score in (holdout, oracle, accuracy):
        rate, warnings = score.details["learning_rate"], score.details["warnings"]
        assert any(f"{rate:g} is at the edge" in line for line in warnings) == (rate != 1e-2)
    assert holdout.value == scored[int(np.argmax(held_out))]
    assert oracle.value == max(scored)


def test_selected_rates_at_the_edge_of_the_grid_cause_warnings(tmp_path):
    cases = ([1e-6, 1e-2], True), ([1e-2], False), ([1e-7, 1e-2, 1e3], False)
    for rates, is_edge in cases:
        probe = quick_probe(learning_rates=rates, epochs=2)

        details = next(iter(probe.run(probe_context(tmp_path, layers=(3,))))).details

        assert any("0.01 is at the edge" in line for line in details["warnings"]) == is_edge
        assert set(few_images_warning(7)) <= {*details["warnings"]}


def test_an_error_in_a_window_names_its_image(tmp_path):
    encoder = tiny_encoder()
    probe = quick_probe(inference="slide", holdout=0.0, batch_size=4)
    run = SegmentationRun(probe, probe_context(tmp_path, encoder))
    heads = run.train(run.features())

    def spoil(_, given):
        given[0][-1] = torch.nan

    encoder.module.register_forward_pre_hook(spoil)
    with pytest.raises(CheckpointError, match="val/3"):
        run.count_scored(heads, None)


def test_heads_that_predict_no_pixel_correctly_are_scored(tmp_path):
    run = SegmentationRun(quick_probe(holdout=0.0, epochs=1), probe_context(tmp_path))
    heads = run.train(run.features())
    # The last class never occurs.
    wrong = replace(heads, bias=heads.bias + 1e6 * torch.eye(4)[3])
    total = run.count_scored(wrong, None).total
    assert (total[:, :, 0].any(), total[:, :, 2].any()) == (False, True)


def test_scaled_crops_are_padded_with_the_mean_of_the_encoder(tmp_path):
    encoder = replace(tiny_encoder(), mean=(0.1, 0.2, 0.3))
    probe = quick_probe(crops="scaled", views=3, holdout=0.0)
    run = SegmentationRun(probe, probe_context(tmp_path, encoder, seed=5))
    assert run.training_pass.views == ScaledCrops(3, 5, (0.1, 0.2, 0.3))


def test_held_out_images_are_scored_without_their_mirror_images(tmp_path):
    run = SegmentationRun(quick_probe(views=2, holdout=0.3), probe_context(tmp_path))
    features = run.features()
    heads = run.train(features)
    samples = run.training_pass.images
    held_out = [samples[run.split.indices[position]] for position in sorted(run.split.held_out)]
    images = [run.prepare(sample) for sample in held_out]
    counts = [
        class_counts(predicted.flatten(0, 1), image.mask, 4)
        for predicted, image in zip(run.predict(heads, images), images, strict=True)
    ]
    total = torch.stack(counts).sum(0).unflatten(0, heads.bias.shape[:2]).numpy()
    # Cached features are float16, so a few pixels close to a class boundary change.
    differences = np.abs(run.count_held_out(heads, features) - total)
    assert differences.max() <= 0.01 * total.sum(-1).max()


def test_a_refit_fits_all_views_of_all_training_images(tmp_path):
    probe = quick_probe(
        training="lbfgs", c_values=[1.0], loss="majority", inference="patch", max_iterations=3,
        refit=True, holdout=0.7, views=2,
    )  # fmt: skip
    # Without a refit, the heads would not know the label of the held-out images.
    dataset = relabel_held_out(0.7)
    run = SegmentationRun(probe, probe_context(tmp_path / "expected", dataset=dataset))
    fitted = probe.training.train(
        run.head_spec, run.features(), run.sources, torch.arange(2 * 18), run.context.progress
    )
    expected = mean_iou(run.count_scored(fitted).total[-1]).tolist()
    *_, score, _, _ = probe.run(probe_context(tmp_path / "found", dataset=dataset))
    assert score.metric == "miou_holdout"
    assert score.details["miou_by_rate"] == expected
    assert score.details["miou_by_rate_held_out"] == [0]
    assert (score.details["num_train_images"], score.details["c_value"]) == (18, 1.0)
    assert "learning_rates" not in probe.settings()


@pytest.mark.parametrize("mode", ["single", "last4"])
def test_scores_equal_an_independent_confusion_matrix_over_all_scored_images(tmp_path, mode):
    # The second learning rate has the higher score.
    rates = [1e-7, 1e-2]
    probe, context = quick_probe(layers_mode=mode, learning_rates=rates), probe_context(tmp_path)
    run = SegmentationRun(probe, context)
    heads, scores = run.train(run.features()), list(run.train_and_score())
    confusion, by_image = np.zeros((4, 4), np.int64), np.asarray(scores[-1].per_image)
    for index, sample in enumerate(context.dataset.val()[index] for index in range(7)):
        assert sample.mask is not None
        before = confusion.copy()
        image = Squashed().prepare(sample, 32).windows
        blocks = run.training_pass.extractor(image)
        tokens = torch.cat([blocks[layer]["token"][0] for layer in heads.sources[-1]], -1)
        rate = rates.index(scores[-1].details["learning_rate"])
        assert rate == 1
        logits = tokens @ heads.weight[-1, rate].T + heads.bias[-1, rate]
        size = sample.mask.shape
        upsampled = F.interpolate(logits.movedim(-1, 0)[None], size, mode="bilinear")
        predicted = upsampled.argmax(1)[0].numpy()
        counted = sample.mask != 255
        np.add.at(confusion, (sample.mask[counted], predicted[counted]), 1)
        counts = confusion - before
        expected = [np.diag(counts), counts.sum(0), counts.sum(1)]
        assert by_image[index].tolist() == np.array(expected).tolist()
    right = np.diag(confusion)
    union = confusion.sum(0) + confusion.sum(1) - right
    assert scores[-1].value == pytest.approx(100 * right.sum() / confusion.sum())
    iou = [100 * r / u if u else None for r, u in zip(right, union, strict=True)]
    assert list(scores[-1].details["iou_by_class"].values()) == pytest.approx(iou)


def test_seed_norm_and_training_images_change_the_scores(tmp_path):
    def run(**changes):
        context = probe_context(tmp_path, layers=(3,), seed=changes.pop("seed", 0))
        return list(quick_probe(epochs=2, **changes).run(context))

    changes = ({}, {"seed": 1}, {"norm": "none"}, {"norm": "final"}, {"train_images": 5})
    again, *found = [run(), *(run(**change) for change in changes)]

    assert score_values(again) == score_values(found[0])
    rates = [tuple(scores[0].details["miou_by_rate"]) for scores in found]
    assert len(set(rates)) == len(changes)
    details = found[-1][0].details
    digests = {sha256(p.read_bytes()).hexdigest() for p in tmp_path.rglob("*-seed0-train.txt")}
    assert details["train_ids_sha256"] in digests
    assert details["num_train_images"] + details["num_held_out_images"] == 5


def test_features_after_the_final_norm_are_not_standardised(tmp_path):
    encoder = tiny_encoder()
    encoder.module.set_submodule("norm", torch.nn.Identity())
    none, final = (
        quick_probe(epochs=2, norm=norm).run(probe_context(tmp_path, encoder, layers=(3,)))
        for norm in ("none", "final")
    )
    assert score_values(none) == score_values(final)


def test_images_without_a_label_and_equal_features_are_reported(tmp_path):
    encoder = tiny_encoder()
    with torch.no_grad():
        for name, parameter in encoder.module.named_parameters():
            if not name.startswith("blocks.3"):
                parameter.zero_()
    dataset = ColourDataset(masks=dict.fromkeys(range(6), 255), val_masks={0: 255})
    for one, share, mode in (
        (encoder, 100, "single"), (tiny_encoder(), 0, "single"), (encoder, 100, "last4"),
    ):  # fmt: skip
        probe = quick_probe(epochs=1, batch_size=1, layers_mode=mode, views=2)
        for score in probe.run(probe_context(tmp_path, one, dataset)):
            details = score.details
            assert np.isfinite(score.value)
            assert (details["all_ignored_train_images"], score.num_images) == (6, 7)
            assert details["constant_channels_percent"] == share
            assert details["constant_features"] == (share == 100)
            assert any("degenerate" in line for line in details["warnings"]) == (share == 100)


def test_data_that_cannot_be_scored_is_refused(tmp_path):
    for changes, part in (
        ({"masks": dict.fromkeys(range(18), 1)}, "green"),
        ({"masks": dict.fromkeys(range(18), 255)}, "no class"),
        ({"num_train": 1}, "1 training image"),
        ({"val_masks": dict.fromkeys(range(7), 255)}, "val"),
    ):
        context = probe_context(tmp_path, dataset=ColourDataset(**changes))
        with pytest.raises(DataError, match=part):
            list(quick_probe(epochs=1).run(context))


def test_panels_show_the_image_the_true_mask_and_every_block(tmp_path):
    dataset = ColourDataset(num_val=2, val_masks={1: 3})
    probe = quick_probe(panels=2, epochs=20, score_size=10)
    list(probe.run(probe_context(tmp_path, dataset=dataset, layers=(0, 3))))
    names = sorted(path.name for path in (tmp_path / "pictures").glob("*.png"))
    begins = [f"ssl_bench-token-val_{number}" for number in (0, 1)]
    assert [name.partition("~")[0] for name in names] == begins
    announced = probe.list_figures([0, 3], dataset.val(), 0)
    assert {*names} == {name for name in announced if name.endswith(".png")}
    with Image.open(tmp_path / "pictures" / names[0]) as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    # Each of the four tiles has 144 x 192 pixels. The legend is to their right.
    truth, last_block = pixels[30:160, 204:388], pixels[30:160, 596:780]
    assert pixels.shape[1] > 4 * 196
    assert abs(truth - pixels[30:160, 8:192]).mean() > 20
    assert abs(truth - last_block).mean() < 10
    # The first line of the legend is the most frequent class, which fills the second true mask.
    list(probe.run(probe_context(tmp_path / "one", dataset=dataset, layers=(3,))))
    with Image.open(tmp_path / "one/pictures" / names[1]) as picture:
        shown = np.asarray(picture.convert("RGB")).reshape(-1, 3).tolist()
    colours = voc_colours()[:4].tolist()
    assert next(pixel for pixel in shown if pixel in colours[1:]) == colours[3]


PROTOCOLS = {
    "ssl_bench": {"loss": "upsample4", "holdout": 0.1},
    "fast": {"loss": "histogram", "holdout": 0.1},
    "cutting_the_skip": {"loss": "full_resolution", "holdout": 0.0, "train_images": 3000},
    "dinov2": {"loss": "full_resolution", "crops": "scaled", "scoring": "slide"},
    "neco": {"loss": "100", "optimizer": "sgd", "score_size": 100, "norm": "final"},
    "capi": {"loss": "majority", "optimizer": "preconditioned_lbfgs", "score_size": 224},
}
MODES = ("multi", "single", "multi", "last4", "single", "last4")


@pytest.mark.parametrize(("protocol", "mode"), [*zip(PROTOCOLS, MODES, strict=True)])
def test_every_protocol_runs_and_records_state_its_settings(tmp_path, protocol, mode):
    few = "max_iterations=3" if protocol == "capi" else "epochs=1"
    small = [f"probe.training.{few}", "probe.image_size=32", "probe.panels=0"]
    choice = [f"probe/segmentation/protocol={protocol}", f"probe.layers_mode={mode}"]
    overrides = ["probe=segmentation", *choice, *small, f"probe.cache={tmp_path}"]
    probe = build(compose_config("probing", overrides), "probe")
    context = probe_context(tmp_path)
    scores = list(probe.run(context))
    assert [(s.layer, s.facet, s.metric) for s in scores] == probe.list_score_keys(context.layers)
    assert scores[0].details["layers"] == ([0] if mode == "single" else [0, 1, 2, 3])
    assert PROTOCOLS[protocol].items() <= probe.settings().items()
    assert bool(probe.settings().get("refit")) == (protocol == "capi")
    assert scores[0].details["guesses"] == fill_in_guesses(probe, probe.guesses)
    assert bool(probe.guesses) == (protocol not in ("ssl_bench", "fast"))
    names = {replace(probe, facet="token", norm=norm).list_name(0) for norm in ("none", "final")}
    assert len(names) == 2
    for score in scores:
        assert score.facet == ("token_normed" if protocol == "neco" else "token")
        # If all images are perfect, they do not show how scores vary.
        assert (score.ci95 is None) == (score.value == 100)
        low, high = score.ci95 or (100, 100)
        assert low <= score.value <= high
        assert score.num_images == 7
        json.dumps(score.details, allow_nan=False)
