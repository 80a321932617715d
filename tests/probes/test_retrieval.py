"""Test the retrieval of nearest-neighbour patches."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from probes.features.training_images import WholeImage, resize_mask
from probes.heads.scored_images import Squashed
from probes.retrieval import Retrieval, matched_score
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.errors import ConfigurationError, DataError
from tests.support.colours import ColourDataset, Counter, probe_context, tiny_encoder

QUICK: dict[str, Any] = {"neighbours": 5, "image_size": 32, "batch_size": 4, "num_workers": 1}


def make_probe(**changes) -> Retrieval:
    return Retrieval(**{**QUICK, **changes})


def test_colours_are_retrieved_almost_without_error(tmp_path):
    probe, context = make_probe(), probe_context(tmp_path)
    scores = list(probe.run(context))
    assert [(s.layer, s.facet, s.metric) for s in scores] == probe.list_score_keys(context.layers)
    assert {s.metric: s.value for s in scores if s.layer == 3}["miou"] > 80
    for score in scores:
        # If all images are perfect, they do not show how scores vary.
        assert (score.ci95 is None) == (score.value == 100)
        low, high = score.ci95 or (100, 100)
        assert low <= score.value <= high
        json.dumps(score.details, allow_nan=False)
    # If the features of all blocks do not fit into memory, blocks are computed separately.
    separate = list(make_probe(memory_gib=1e-5).run(probe_context(tmp_path)))
    assert [s.value for s in separate] == [s.value for s in scores]


def test_every_image_passes_the_encoder_once_for_all_layers(tmp_path):
    encoder = tiny_encoder()
    counter = Counter(encoder)
    # Each image has patches in the memory, because only few patches are completely ignored.
    list(make_probe(crops="resized", views=2).run(probe_context(tmp_path, encoder)))
    assert counter.images == 2 * 18 + 7
    assert set(counter.passes.values()) == {1}
    # Images without a patch in the memory are not encoded.
    counter.passes.clear()
    list(make_probe(memory_patches=5).run(probe_context(tmp_path, encoder)))
    assert 0 < counter.images - 7 <= 5


@pytest.mark.parametrize(("seed", "score_size"), [(0, None), (1, 13)])
def test_scores_equal_a_computation_in_float64(tmp_path, seed, score_size):
    # Half of the memory votes, so the weights and the shares of classes are important.
    options = {"memory_patches": 40, "neighbours": 20, "temperature": 0.05, "image_size": 40}
    context = probe_context(tmp_path, layers=(0,), seed=seed)
    (_, accuracy) = make_probe(**options, score_size=score_size).run(context)

    extractor = context.extractor([0], "token")

    def patches(image):
        return extractor(image)[0]["token"][0].flatten(0, 1)

    images, found = context.dataset.train(), []
    for index in range(len(images)):
        image, mask = WholeImage().make_view(images[index], 0, 40)
        squares = resize_mask(mask, 40, 40).view(5, 8, 5, 8).transpose(1, 2).reshape(25, 64)
        counts = F.one_hot(squares.long().clamp(max=4), 5).sum(1)[:, :4].double()
        found.append((patches(image[None]).half().double(), counts))
    features, counts = map(torch.cat, zip(*found, strict=True))
    labelled = counts.sum(1).nonzero()[:, 0]
    order = torch.randperm(len(labelled), generator=torch.Generator().manual_seed(seed))
    chosen = labelled[order[:40]]
    memory, shares = F.normalize(features[chosen]), counts[chosen] / counts[chosen].sum(1, True)
    images, right, total = context.dataset.val(), 0, 0
    for index in range(len(images)):
        image = Squashed(score_size).prepare(images[index], 40)
        unit = F.normalize(patches(image.windows).double())
        similarity, nearest = (unit @ memory.T).topk(20)
        votes = ((similarity / 0.05).softmax(1)[..., None] * shares[nearest]).sum(1)
        maps = votes.T.view(1, 4, 5, 5)
        predicted = F.interpolate(maps, image.mask.shape, mode="bilinear").argmax(1)[0]
        right += int((predicted == image.mask)[image.mask != 255].sum())
        total += int((image.mask != 255).sum())
    assert accuracy.value == pytest.approx(100 * right / total, abs=0.05)


def test_unlabelled_pixels_are_neither_stored_nor_scored(tmp_path):
    dataset = ColourDataset(masks=dict.fromkeys(range(10), 255))
    score = next(iter(make_probe().run(probe_context(tmp_path, dataset=dataset))))
    assert score.details["memory_patches"] <= 8 * 16
    assert score.value > 60
    assert score.per_image is not None
    _, predicted, true = np.moveaxis(score.per_image.sum(-1), 1, 0)
    assert np.array_equal(predicted, true)


def test_too_many_neighbours_and_images_without_labels_are_refused(tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        list(make_probe(neighbours=500).run(probe_context(tmp_path)))
    assert caught.value.hint == ("probe.neighbours=288",)
    unlabelled = ColourDataset(masks=dict.fromkeys(range(18), 255))
    with pytest.raises(DataError):
        list(make_probe().run(probe_context(tmp_path, dataset=unlabelled)))


def test_hbird_also_scores_renamed_classes(tmp_path):
    context = probe_context(tmp_path, layers=(3,))
    overrides = ["probe=retrieval", "probe/retrieval/protocol=hbird"]
    preset = build(compose_config("probing", overrides), "probe")
    assert preset.guesses
    assert preset.settings().items() >= {"norm": "final"}.items()
    found = {score.metric: score for score in make_probe(protocol="hbird").run(context)}
    plain = {score.metric: score for score in make_probe().run(context)}

    assert set(plain) == {"miou", "pixel_accuracy"}
    assert {metric: found[metric].value for metric in plain} == {
        metric: score.value for metric, score in plain.items()
    }
    matched = found["miou_matched"]
    # All colours are recognised, so renaming does not help. The class that never occurs has an IoU
    # of 0.
    assert matched.value == pytest.approx(0.75 * found["miou"].value)
    assert matched.details["baseline"]["value"] < matched.value
    assert (matched.ci95, matched.per_image) == (None, None)


def test_renamed_classes_map_predicted_to_true_classes():
    # Every pixel of "sky" was predicted as "sea", of "sea" as "sand", and of "sand" as "sky".
    confusion = np.array([[0, 9, 0], [0, 0, 5], [3, 0, 0]])

    score = matched_score((0, "token"), confusion, ("sky", "sea", "sand"), 4, {})

    assert score.value == 100
    assert score.details["renamed_classes"] == {"sea": "sky", "sand": "sea", "sky": "sand"}
