import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from probes.features.training_images import WholeImage, resize_mask
from probes.heads.scored_images import Squashed
from probes.retrieval import Retrieval, matched_score
from ssl_bench.cli.__main__ import main
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.results import ResultStore
from tests.support.colours import ColourDataset, Counter, probe_context, tiny_encoder
from tests.support.faults import probing, records, voc

QUICK: dict[str, Any] = {"neighbours": 5, "image_size": 32, "batch_size": 4, "num_workers": 1}


def _probe(**changes) -> Retrieval:
    return Retrieval(**{**QUICK, **changes})


def test_colours_are_retrieved_almost_without_error(tmp_path):
    probe, context = _probe(), probe_context(tmp_path)
    scores = list(probe.run(context))
    assert [(s.layer, s.facet, s.metric) for s in scores] == probe.cells(context.layers)
    assert {s.metric: s.value for s in scores if s.layer == 3}["miou"] > 80
    for score in scores:
        # Where all images are perfect, they do not tell how others might be.
        assert (score.ci95 is None) == (score.value == 100)
        low, high = score.ci95 or (100, 100)
        assert low <= score.value <= high
        json.dumps(score.details, allow_nan=False)
    # Memories that do not fit together are computed one after the other.
    apart = list(_probe(memory_gib=1e-5).run(probe_context(tmp_path)))
    assert [s.value for s in apart] == [s.value for s in scores]


def test_every_image_passes_the_encoder_once_for_all_layers(tmp_path):
    encoder = tiny_encoder()
    counter = Counter(encoder)
    # All patches are remembered but few whose pixels are ignored, so that all images are.
    list(_probe(crops="resized", views=2).run(probe_context(tmp_path, encoder)))
    assert counter.images == 2 * 18 + 7
    assert set(counter.passes.values()) == {1}
    # And images of which nothing is remembered do not pass.
    counter.passes.clear()
    list(_probe(memory_patches=5).run(probe_context(tmp_path, encoder)))
    assert 0 < counter.images - 7 <= 5


@pytest.mark.parametrize("seed", [0, 1])
def test_scores_are_those_of_a_restatement_in_float64(tmp_path, seed):
    # So many distant patches vote that their weights and shares decide.
    asked = {"memory_patches": 40, "neighbours": 20, "temperature": 0.05, "image_size": 40}
    context = probe_context(tmp_path, layers=(0,), seed=seed)
    (_, accuracy) = _probe(**asked).run(context)

    extractor = context.extractor([0], "token")

    def patches(image):
        return extractor(image)[0]["token"][0].flatten(0, 1)

    images, found = context.dataset.train(), []
    for index in range(len(images)):
        image, mask = WholeImage().view(images[index], 0, 40)
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
        image = Squashed().prepare(images[index], 40)
        unit = F.normalize(patches(image.windows).double())
        similarity, nearest = (unit @ memory.T).topk(20)
        votes = ((similarity / 0.05).softmax(1)[..., None] * shares[nearest]).sum(1)
        maps = votes.T.view(1, 4, 5, 5)
        predicted = F.interpolate(maps, image.mask.shape, mode="bilinear").argmax(1)[0]
        right += int((predicted == image.mask)[image.mask != 255].sum())
        total += int((image.mask != 255).sum())
    assert accuracy.value == pytest.approx(100 * right / total, abs=0.05)


def test_pixels_without_a_label_are_neither_remembered_nor_counted(tmp_path):
    dataset = ColourDataset(masks=dict.fromkeys(range(10), 255))
    score = next(iter(_probe().run(probe_context(tmp_path, dataset=dataset))))
    assert score.details["memory_patches"] <= 8 * 16
    assert score.value > 60
    assert score.per_image is not None
    _, predicted, true = np.moveaxis(score.per_image.sum(-1), 1, 0)
    assert np.array_equal(predicted, true)


@pytest.mark.parametrize(
    ("changes", "masks", "error"),
    [({"neighbours": 500}, {}, ConfigurationError), ({}, dict.fromkeys(range(18), 255), DataError)],
)
def test_what_cannot_be_retrieved_is_refused(tmp_path, changes, masks, error):
    with pytest.raises(error) as caught:
        list(_probe(**changes).run(probe_context(tmp_path, dataset=ColourDataset(masks=masks))))
    assert changes == {} or caught.value.hint == ("probe.neighbours=288",)


def test_hbird_also_scores_renamed_classes(tmp_path):
    context = probe_context(tmp_path, layers=(3,))
    overrides = ["probe=retrieval", "probe/retrieval/protocol=hbird"]
    preset = build(compose_config("probing", overrides), "probe")
    assert preset.guesses
    assert preset.settings().items() >= {"norm": "final"}.items()
    found = {score.metric: score for score in _probe(protocol="hbird").run(context)}
    plain = {score.metric: score for score in _probe().run(context)}

    assert set(plain) == {"miou", "pixel_accuracy"}
    assert {metric: found[metric].value for metric in plain} == {
        metric: score.value for metric, score in plain.items()
    }
    matched = found["miou_matched"]
    # Colours are recognised, so that no new name helps; the class that never occurs counts as 0.
    assert matched.value == pytest.approx(0.75 * found["miou"].value)
    assert matched.details["baseline"]["value"] < matched.value
    assert (matched.ci95, matched.per_image) == (None, None)


def test_matched_names_lead_from_the_predicted_to_the_true_class():
    # Every pixel of "sky" was predicted as "sea", and so on in a circle.
    confusion = np.array([[0, 9, 0], [0, 0, 5], [3, 0, 0]])

    score = matched_score((0, "token"), confusion, ("sky", "sea", "sand"), 4, {})

    assert score.value == 100
    assert score.details["renamed_classes"] == {"sea": "sky", "sand": "sea", "sky": "sand"}


def test_a_metric_more_leaves_finished_scores_as_they_are(workdir, capsys):
    voc(workdir / "voc")
    words = probing("retrieval", "voc2012", workdir / "voc", "probe.protocol=hbird")
    assert main(words) == 0
    before = {record.key(): record for record in records()}
    assert {key.metric for key in before} == {"miou", "pixel_accuracy", "miou_matched"}
    store = ResultStore(Path("results"))
    for key in before:
        if key.metric == "miou_matched":
            store.path(key).unlink()

    capsys.readouterr()
    assert main(words) == 0

    assert "skipping 2 of 3 results" in capsys.readouterr().err
    after = {record.key(): record for record in records()}
    assert {key: one.value for key, one in after.items()} == {
        key: one.value for key, one in before.items()
    }
    assert all(after[key] == one for key, one in before.items() if key.metric != "miou_matched")
