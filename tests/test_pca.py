import numpy as np
import pytest
import sklearn.decomposition
import torch

from probes.pca import PCA, as_colours, fit_projection, resize
from ssl_bench.errors import ConfigurationError


def anisotropic(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.tensor([5.0, 3.0, 2.0, 1.0, 0.5])


def test_components_equal_those_of_scikit_learn_up_to_sign():
    tokens = anisotropic(200, 5)
    reference = sklearn.decomposition.PCA(3).fit(tokens.double().numpy())

    projection = fit_projection(tokens)

    cosines = (projection.components.numpy() * reference.components_).sum(1)
    np.testing.assert_allclose(np.abs(cosines), 1.0, atol=1e-9)
    share = 100 * reference.explained_variance_ratio_.sum()
    assert projection.explained == pytest.approx(share, abs=1e-9)


def test_signs_do_not_depend_on_the_order_of_the_patches_or_on_a_flip_of_the_data():
    tokens = anisotropic(200, 5)
    one = fit_projection(tokens).components

    assert torch.allclose(one, fit_projection(tokens.flip(0)).components)
    assert torch.allclose(one, fit_projection(-tokens).components)
    assert (one.gather(1, one.abs().argmax(1, keepdim=True)) > 0).all()


def test_constant_features_explain_nothing_and_are_grey():
    features = torch.full((2, 3, 5), 0.7)
    projection = fit_projection(features.flatten(0, 1))

    (colours,) = as_colours([torch.zeros(2, 3, 3, dtype=torch.float64)])

    assert projection.explained == 0
    assert (colours == 128).all()


def test_colours_stretch_each_component_over_all_maps_together():
    one = torch.tensor([[[0.0, 5.0, -1.0]]], dtype=torch.float64)
    other = torch.tensor([[[2.0, 5.0, 1.0], [1.0, 5.0, 1.0]]], dtype=torch.float64)

    first, second = as_colours([one, other])

    assert first.tolist() == [[[0, 128, 0]]]
    assert second.tolist() == [[[255, 128, 255], [128, 128, 255]]]


def test_the_longer_side_is_as_asked_and_the_patch_divides_both():
    image = np.zeros((100, 150, 3), np.uint8)
    image[..., 0] = 255

    resized = resize(image, 96, 8)

    assert resized.shape == (3, 64, 96)
    assert resized[0].min() == 1
    assert resized[1:].max() == 0


@pytest.mark.parametrize("wrong", [{"protocol": "video"}, {"num_images": 0}])
def test_a_wrong_hyperparameter_is_named(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        PCA(**wrong)
