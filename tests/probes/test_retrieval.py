import json
from typing import Any

import numpy as np
import pytest
import torch

from probes.features.views import WholeImage, nearest_labels
from probes.retrieval import (
    Retrieval,
    chosen_patches,
    is_labelled,
    nearest_patches,
    patch_votes,
    remembered,
)
from ssl_bench.composition.compose import build, compose_config
from ssl_bench.errors import ConfigurationError, DataError
from tests.support.colours import ColourDataset, Counter, probe_context, tiny_encoder

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


def test_layers_whose_memories_do_not_fit_together_give_the_same_scores(tmp_path):
    together = list(_probe().run(probe_context(tmp_path)))
    apart = list(_probe(memory_gib=1e-5).run(probe_context(tmp_path)))
    assert [s.value for s in apart] == [s.value for s in together]


def test_labelled_patches_are_remembered_as_the_seed_draws_them():
    labels = torch.full((3, 16, 24), 255, dtype=torch.uint8)
    labels[1:, 9, :17] = 0
    labelled = {1 * 6 + 3, 1 * 6 + 4, 1 * 6 + 5, 2 * 6 + 3, 2 * 6 + 4, 2 * 6 + 5}
    candidates = is_labelled(labels, 8).flatten().nonzero()[:, 0]
    assert set(chosen_patches(_probe(), candidates, seed=0).tolist()) == labelled
    few = _probe(memory_patches=3, neighbours=1)
    draws = [tuple(chosen_patches(few, candidates, seed=seed).tolist()) for seed in (0, 0, 1, 2, 3)]
    assert draws[0] == draws[1]
    assert len(set(draws)) > 1
    assert all(set(draw) < labelled and len(draw) == 3 for draw in draws)


def test_a_vote_is_the_softmax_of_the_similarities_over_the_label_histograms():
    memory = torch.eye(3)[:, :2]
    labels = torch.tensor([[1.0, 0.0], [0.25, 0.75], [0.0, 1.0]])
    features = torch.tensor([3.0, 4.0]).view(1, 1, 1, 2)
    probe = _probe(neighbours=2, temperature=0.5)
    votes = patch_votes(probe, features, memory, labels)
    near, far = np.exp(0.8 / 0.5), np.exp(0.6 / 0.5)
    first = (far * 1.0 + near * 0.25) / (near + far)
    assert votes.flatten().tolist() == pytest.approx([first, 1 - first])


def test_the_nearest_neighbours_are_those_of_an_exact_search():
    generator = torch.Generator().manual_seed(0)
    memory, queries = (
        torch.nn.functional.normalize(torch.randn(n, 16, generator=generator)) for n in (3000, 64)
    )
    similarity, index = nearest_patches(queries, memory, 30)
    exact = (queries.double() @ memory.double().T).topk(30)
    recall = (index[:, :, None] == exact.indices[:, None]).any(2).double().mean()
    assert recall >= 0.999
    torch.testing.assert_close(similarity.double(), exact.values, rtol=0, atol=1e-5)


def test_pixels_without_a_label_are_neither_remembered_nor_counted(tmp_path):
    dataset = ColourDataset(masks=dict.fromkeys(range(10), 255))
    score = next(iter(_probe().run(probe_context(tmp_path, dataset=dataset))))
    assert score.details["memory_patches"] <= 8 * 16
    assert score.value > 60


@pytest.mark.parametrize(
    ("changes", "dataset", "error", "message"),
    [
        ({"neighbours": 500}, ColourDataset(), ConfigurationError, "at most the 288 patches"),
        ({}, ColourDataset(masks=dict.fromkeys(range(18), 255)), DataError, "no training patch"),
    ],
)
def test_what_cannot_be_retrieved_is_named(tmp_path, changes, dataset, error, message):
    with pytest.raises(error, match=message):
        list(_probe(**changes).run(probe_context(tmp_path, dataset=dataset)))


@pytest.mark.parametrize("protocol", ["ssl_bench", "hbird"])
def test_a_protocol_is_a_file_that_names_itself_and_its_guesses(protocol):
    overrides = [f"probe/retrieval/protocol={protocol}", "probe.image_size=64"]
    probe = build(compose_config("probing", ["probe=retrieval", *overrides]).probe)
    assert (probe.protocol, probe.image_size) == (protocol, 64)
    assert bool(probe.guesses) == (protocol != "ssl_bench")
    assert json.loads(json.dumps(probe.settings())) == probe.settings()


def test_what_is_remembered_are_features_and_label_shares_of_the_chosen_patches(tmp_path):
    context = probe_context(tmp_path)
    training_pass = _probe(image_size=40, batch_size=3).training_pass(context)
    chosen = torch.tensor([3, 7, 24, 5 * 25 + 2, 16 * 25, 17 * 25 + 24])
    remembered_features, shares = remembered(training_pass, [3, 1], chosen, classes=4)
    for number, place in enumerate(chosen.tolist()):
        index, patch = divmod(place, 25)
        image, mask = WholeImage(1).view(training_pass.images[index], 0, 40)
        features = training_pass.extractor(image[None])
        for at, layer in enumerate((3, 1)):
            expected = features[layer]["token"][0].flatten(0, 1)[patch].half()
            assert torch.equal(remembered_features[at, number], expected)
        row, col = 8 * (patch // 5), 8 * (patch % 5)
        labels = nearest_labels(mask, 40, 40)[row : row + 8, col : col + 8].flatten()
        counts = torch.bincount(labels.long(), minlength=256)[:4].float()
        assert torch.equal(shares[number], counts / counts.sum())
