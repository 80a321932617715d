"""What is promised of the solver, on graphs of photographs: counted, and none may fail."""

import pytest
import skimage.data
import torch

from probes.tokencut.spectral.eigensolver import second_eigenvector
from probes.tokencut.spectral.eigensolver_batched import solve_batch
from ssl_bench.data.layouts.voc import Voc
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model
from tests.support.agreement import compare, photograph_features, tally

NAMES = ("coffee", "astronaut", "chelsea", "rocket")


def extractor(depth: int, *, skip: bool) -> FeatureExtractor:
    config = ViTConfig(
        image_size=64,
        patch_size=16,
        dim=48,
        depth=depth,
        num_heads=3,
        skip_attention=skip,
        skip_mlp=skip,
    )
    encoder = encoder_from_model(build_vit(config, seed=0), name="random")
    return FeatureExtractor(encoder, layers=range(depth), facets=("key", "token"), pad=True)


def kept(images, *, batched: bool):
    """Agreement on all blocks and facets of encoders with and without skip connections."""
    found = []
    for skip in (True, False):
        encoder = extractor(4, skip=skip)
        for image in images:
            features, grid = photograph_features(encoder, image, 200, 270)
            # Centred too: in deep blocks of random encoders all patches are alike.
            both = [*features, *(one - one.mean((0, 1)) for one in features)]
            found += [compare(one, grid, batched=batched) for one in both]
            # A common offset links every pair of patches.
            found.append(compare(features[0] + 10 * features[0].norm(dim=-1).max(), grid))
    return tally(found)


def check(counts, at_least: dict[str, int]) -> None:
    assert {name: kept for name, (kept, _) in counts.items()} == {
        name: of for name, (_, of) in counts.items()
    }
    assert all(counts[name][1] >= number for name, number in at_least.items()), counts


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True])
def test_every_graph_of_a_photograph_keeps_the_promises(batched):
    counts = kept([skimage.data.chelsea()], batched=batched)

    check(counts, {"same box": 17, "|cos| > .9999": 17, "complete graphs flagged": 2})


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True])
def test_every_graph_of_four_photographs_keeps_the_promises(batched):
    images = [getattr(skimage.data, name)() for name in NAMES]

    counts = kept(images, batched=batched)

    check(counts, {"same box": 70, "|cos| > .9999": 70, "complete graphs flagged": 8})


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True])
def test_every_graph_of_twelve_more_photographs_keeps_the_promises(photos, batched):
    images = Voc(root=photos).discovery()

    counts = kept([images[i].image for i in range(0, 60, 5)], batched=batched)

    check(counts, {"same box": 220, "|cos| > .9999": 220, "complete graphs flagged": 24})


def test_the_batched_form_takes_images_of_one_shape_together():
    encoder, tokens = extractor(2, skip=True), []
    for name in NAMES:
        features, _ = photograph_features(encoder, getattr(skimage.data, name)(), 200, 270)
        tokens += [one.flatten(0, 1) for one in features]

    together = solve_batch(torch.stack(tokens), tau=0.2, eps=1e-5)

    for one, alone in zip(together, tokens, strict=True):
        expected = second_eigenvector(alone.numpy(), tau=0.2, eps=1e-5)
        assert one.degenerate == expected.degenerate
        assert one.gap == pytest.approx(expected.gap, rel=1e-3, abs=1e-6)
        if expected.gap > 1e-3:
            assert one.vector == pytest.approx(expected.vector, abs=1e-6)
