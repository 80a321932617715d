"""What is promised of the solver, on graphs of photographs: counted, and none may fail."""

import pytest
import skimage.data

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


def kept(images):
    """Agreement on all blocks and facets of encoders with and without skip connections."""
    found = []
    for skip in (True, False):
        encoder = extractor(4, skip=skip)
        for image in images:
            features, grid = photograph_features(encoder, image, 200, 270)
            # Centred too: in deep blocks of random encoders all patches are alike.
            both = [*features, *(one - one.mean((0, 1)) for one in features)]
            found += [compare(one, grid) for one in both]
            # A common offset links every pair of patches.
            found.append(compare(features[0] + 10 * features[0].norm(dim=-1).max(), grid))
    return tally(found)


def check(counts, at_least: dict[str, int]) -> None:
    assert {name: kept for name, (kept, _) in counts.items()} == {
        name: of for name, (_, of) in counts.items()
    }
    assert all(counts[name][1] >= number for name, number in at_least.items()), counts


@pytest.mark.slow
def test_every_graph_of_a_photograph_keeps_the_promises():
    counts = kept([skimage.data.chelsea()])

    check(counts, {"same box": 17, "|cos| > .9999": 17, "complete graphs flagged": 2})


@pytest.mark.slow
def test_every_graph_of_four_photographs_keeps_the_promises():
    images = [getattr(skimage.data, name)() for name in NAMES]

    counts = kept(images)

    check(counts, {"same box": 70, "|cos| > .9999": 70, "complete graphs flagged": 8})


@pytest.mark.data
@pytest.mark.slow
def test_every_graph_of_twelve_more_photographs_keeps_the_promises(photos):
    images = Voc(root=photos).discovery()

    counts = kept([images[i].image for i in range(0, 60, 5)])

    check(counts, {"same box": 220, "|cos| > .9999": 220, "complete graphs flagged": 24})
