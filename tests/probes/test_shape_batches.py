import numpy as np
import pytest
import torch

from probes.tokencut.probe import padded_batch, same_shape
from ssl_bench.data.samples import Sample
from ssl_bench.errors import DataError
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model


def sample(name: str, height: int, width: int) -> Sample:
    pixels = np.random.default_rng(ord(name)).integers(256, size=(height, width, 3), dtype=np.uint8)
    return Sample(name, pixels)


def names(samples, size: int, waiting_pixels: int = 10**6) -> list[str]:
    found = same_shape(
        samples, lambda s: s.image.shape, lambda _: size, waiting_pixels=waiting_pixels
    )
    return ["".join(s.image_id for s in batch) for batch in found]


WIDE, TALL = (2, 5), (5, 2)
MIXED = [sample(n, *(WIDE if n in "acdf" else TALL)) for n in "abcdef"]


def test_a_batch_leaves_when_it_is_full_and_what_is_left_at_the_end():
    assert names(MIXED, size=2) == ["ac", "be", "df"]
    assert names(MIXED, size=3) == ["acd", "be", "f"]
    assert names(MIXED, size=1) == list("abcdef")


def test_when_too_many_pixels_wait_the_largest_group_goes_first():
    # 10 pixels each: a, b and c wait with 30, then the two wide ones go.
    assert names(MIXED, size=9, waiting_pixels=29) == ["ac", "be", "df"]
    assert names(MIXED, size=9, waiting_pixels=59) == ["acdf", "be"]


def test_what_came_before_an_unreadable_image_is_still_given():
    def broken():
        yield from MIXED[:3]
        raise DataError("d is empty")

    batches = same_shape(broken(), lambda s: s.image.shape, lambda _: 9)

    assert [s.image_id for _ in "12" for s in next(batches)] == ["a", "c", "b"]
    with pytest.raises(DataError, match="d is empty"):
        next(batches)


def test_filling_up_with_the_mean_is_filling_up_with_zeros_after_normalisation():
    config = ViTConfig(image_size=16, patch_size=4, dim=12, depth=2, num_heads=2)
    encoder = encoder_from_model(build_vit(config, seed=0), name="tiny")
    small, large = sample("a", 13, 18), sample("b", 16, 20)

    together = FeatureExtractor(encoder, layers=[1])(
        padded_batch([small, large], (16, 20), encoder.mean)
    )[1]["token"]

    padding = FeatureExtractor(encoder, layers=[1], pad=True)
    for one, found in zip((small, large), together, strict=True):
        image = torch.from_numpy(one.image).permute(2, 0, 1)[None].float() / 255
        torch.testing.assert_close(found, padding(image)[1]["token"][0], rtol=0, atol=1e-6)
