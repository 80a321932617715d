import numpy as np
import pytest
import scipy.linalg
import scipy.ndimage
import torch

from probes.tokencut.cuts import (
    Cut,
    PatchGrid,
    component_of,
    cut_out,
    discover,
    lost,
    maskcut,
    split_at_mean,
)
from probes.tokencut.eigensolver import FiedlerVector
from ssl_bench.data.layouts.voc import Voc
from ssl_bench.data.samples import Sample
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model
from tests.support.scenes import scene

GRID = PatchGrid(height=60, width=80, patch_size=10)
BACKGROUND, OBJECT, OTHER = 0, 1, 2


def dense_discovery(features, grid):
    """Independent restatement of the reference protocol with a dense solver."""
    rows, cols, dim = features.shape
    tokens = features.reshape(-1, dim).numpy()
    unit = tokens / np.linalg.norm(tokens, axis=1, keepdims=True)
    weights = np.where(unit @ unit.T > 0.2, 1.0, 1e-5)
    np.fill_diagonal(weights, 1)
    degrees = np.diag(weights.sum(1))
    values, vectors = scipy.linalg.eigh(degrees - weights, degrees, subset_by_index=[1, 2])
    vector = vectors[:, 0]
    side = vector > vector.mean()
    seed = np.argmax(abs(vector))
    if not side[seed]:
        side = ~side
    labels = np.zeros((rows, cols), int)
    scipy.ndimage.label(side.reshape(rows, cols), output=labels)
    mask = labels == labels[seed // cols, seed % cols]
    ys, xs = np.nonzero(mask)
    patch = grid.patch_size
    right, lower = (xs.max() + 1) * patch, (ys.max() + 1) * patch
    box = [xs.min() * patch, ys.min() * patch, min(right, grid.width), min(lower, grid.height)]
    tied = (abs(vector) >= (1 - 1e-6) * abs(vector).max()) & ~mask.ravel()
    return mask, box, values[1] - values[0], tied.any()


def random_encoder():
    config = ViTConfig(image_size=64, patch_size=16, dim=48, depth=4, num_heads=3)
    return encoder_from_model(build_vit(config, seed=0), name="random")


def block_features(photo, grid):
    """Keys and tokens of all blocks of a random encoder."""
    encoder = random_encoder()
    extractor = FeatureExtractor(encoder, layers=range(4), facets=("key", "token"), pad=True)
    image = torch.from_numpy(photo.image.copy()).permute(2, 0, 1)[None] / 255
    assert grid.patch_size == encoder.patch_size
    return [value[0] for facets in extractor(image).values() for value in facets.values()]


def class_features(photo, grid):
    """As a pretrained encoder's: a direction for each class, smooth colours, some noise."""
    generator = torch.Generator().manual_seed(0)
    rows, cols = grid.shape
    ys = np.minimum(np.arange(rows) * grid.patch_size + 8, grid.height - 1)
    xs = np.minimum(np.arange(cols) * grid.patch_size + 8, grid.width - 1)
    classes = torch.from_numpy(photo.mask[np.ix_(ys, xs)]).long()
    colours = torch.from_numpy(photo.image[np.ix_(ys, xs)]).float() / 255 - 0.5
    directions = torch.randn(256, 32, generator=generator) + torch.randn(32, generator=generator)
    mixed = colours @ torch.randn(3, 32, generator=generator)
    noise = torch.randn(rows, cols, 32, generator=generator)
    return [directions[classes] + strength * mixed + 0.5 * noise for strength in (0.5, 1, 2)]


def equals_dense(features, grid):
    """Whether the answer is well posed; if so, it must be that of the dense solver."""
    mask, box, gap, tied = dense_discovery(features, grid)
    found = discover(features, grid)
    assert found.gap == pytest.approx(gap, rel=1e-2)
    if gap <= 1e-3 or tied:
        return False
    assert np.array_equal(found.mask, mask)
    assert found.box.tolist() == box
    return True


def cropped(photo, height, width):
    return Sample(photo.image_id, photo.image[:height, :width], photo.mask[:height, :width])


@pytest.mark.data
@pytest.mark.parametrize("features_of", [block_features, class_features])
def test_photographs_give_the_masks_and_boxes_of_a_dense_solver(photos, features_of):
    images, grid = Voc(root=photos).val(), PatchGrid(150, 203, 16)
    samples = [cropped(images[index], grid.height, grid.width) for index in range(4)]

    compared = [equals_dense(f, grid) for sample in samples for f in features_of(sample, grid)]

    assert np.mean(compared) > 0.7


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize("features_of", [block_features, class_features])
def test_photographs_at_native_size_equal_the_dense_solver(photos, features_of):
    images, compared = Voc(root=photos).val(), []
    for index in range(6):
        sample = images[index]
        grid = PatchGrid(sample.image.shape[0], sample.image.shape[1], 16)
        compared += [equals_dense(features, grid) for features in features_of(sample, grid)]

    assert np.mean(compared) > 0.9


def test_a_rectangle_before_a_background_is_counted_by_hand():
    labels, features = scene((slice(2, 4), slice(3, 6)))

    found = discover(features, GRID)

    assert np.array_equal(found.mask, labels == OBJECT)
    assert found.box.tolist() == [30, 20, 60, 40]
    degrees = 6 + 42e-5, 42 + 6e-5
    assert found.eigenvalue == pytest.approx(42e-5 / degrees[0] + 6e-5 / degrees[1])
    assert not found.degenerate


@pytest.mark.parametrize(("height", "width"), [(60, 80), (51, 71), (55, 80)])
def test_boxes_are_clipped_to_the_image_without_its_padding(height, width):
    _, features = scene((slice(4, 6), slice(5, 8)))

    found = discover(features, PatchGrid(height, width, 10))

    assert found.box.tolist() == [50, 40, width, height]


def test_a_transposed_image_gives_the_transposed_object():
    torch.manual_seed(0)
    features = scene((slice(1, 4), slice(2, 7)))[1] + 0.2 * torch.randn(6, 8, 4)

    found = discover(features, GRID)
    turned = discover(features.transpose(0, 1), PatchGrid(80, 60, 10))

    assert np.array_equal(turned.mask, found.mask.T)
    assert turned.box.tolist() == found.box[[1, 0, 3, 2]].tolist()


def found_in(*vector):
    """What is cut out of a strip of patches with this eigenvector."""
    spectrum = FiedlerVector(np.array(vector), 0.1, 0.5, 0.0, degenerate=False)
    return cut_out(spectrum, PatchGrid(10, 10 * len(vector), 10), Cut())


def test_the_object_is_the_part_that_holds_the_seed():
    found = found_in(1.9, 0.0, 2.0, 1.0, -1.0, 1.5)

    assert found.mask.tolist() == [[False, False, True, True, False, False]]
    assert found.box.tolist() == [20, 0, 40, 10]


@pytest.mark.parametrize(("connectivity", "size"), [(4, 4), (8, 8)])
def test_patches_that_meet_at_a_corner_are_neighbours_only_if_asked(connectivity, size):
    mask = np.zeros((6, 8), bool)
    mask[0:2, 0:2] = mask[2:4, 2:4] = True

    assert component_of(mask, (1, 1), connectivity).sum() == size


def test_a_seed_below_the_mean_takes_the_complement():
    vector = np.array([[1.0, 1.0, 2.0], [1.0, -4.0, 1.0]])

    split = split_at_mean(vector)

    assert split.seed == (1, 1)
    assert split.foreground.tolist() == [[False, False, False], [False, True, False]]


def test_the_first_of_equal_seeds_is_taken_and_the_stable_one_forgives_rounding():
    vector = np.array([[0.0, 3 - 1e-9, 1.0], [-3.0, 0.0, 3.0]])

    assert split_at_mean(vector).seed == (1, 0)
    assert split_at_mean(vector, stable_seed=True).seed == (0, 1)


def test_two_equal_halves_and_constant_features_are_flagged():
    halves = torch.eye(2)[torch.arange(8) // 4].expand(6, 8, 2)

    assert discover(halves, GRID).degenerate
    assert discover(torch.ones(6, 8, 3), GRID).degenerate


def test_equal_entries_in_one_object_are_no_tie_but_in_two_they_are():
    assert not found_in(2.0, 2.0, 0.0, -1.0, 1.0).degenerate
    assert found_in(2.0, 0.0, 2.0, -1.0, 1.0).degenerate
    assert found_in(2.0, 0.0, 0.0, -2.0, 1.0).degenerate


def test_a_degenerate_object_can_be_refused():
    found = discover(torch.ones(6, 8, 3), GRID, Cut(refuse_degenerate=True))

    assert found.degenerate
    assert not found.mask.any()
    assert found.box.tolist() == [0, 0, 0, 0]


def test_masked_padding_is_left_out_of_the_graph():
    labels, features = scene((slice(1, 3), slice(1, 4)), (slice(5, 6), slice(0, 8)))
    grid = PatchGrid(59, 80, 10)

    kept = discover(features, grid)
    masked = discover(features, grid, Cut(mask_padding=True))

    assert np.array_equal(kept.mask, labels == OTHER)
    assert np.array_equal(masked.mask, labels == OBJECT)
    assert masked.eigenvector is not None
    assert not masked.eigenvector[5].any()


def test_centring_shows_what_a_common_offset_hides():
    labels, features = scene((slice(2, 4), slice(3, 6)))
    hidden = features + 5

    assert discover(hidden, GRID).degenerate
    assert np.array_equal(discover(hidden, GRID, Cut(centred=True)).mask, labels == OBJECT)


def test_weighted_links_move_the_cut():
    features = torch.rand(6, 8, 5, generator=torch.Generator().manual_seed(3)) - 0.3

    plain, weighted = discover(features, GRID), discover(features, GRID, Cut(weighted=True))

    assert weighted.eigenvalue != pytest.approx(plain.eigenvalue, abs=1e-3)


@pytest.mark.parametrize("mask_padding", [False, True])
@pytest.mark.parametrize(("height", "width", "shape"), [(1, 1, (1, 1)), (3, 17, (1, 2))])
def test_images_smaller_than_a_patch_give_a_flagged_box_inside(height, width, shape, mask_padding):
    cut = Cut(mask_padding=mask_padding)

    found = discover(torch.randn(*shape, 4), PatchGrid(height, width, 10), cut)

    assert found.degenerate
    assert 0 <= found.box[0] < found.box[2] <= width
    assert 0 <= found.box[1] < found.box[3] <= height


@pytest.mark.parametrize("method", [discover, lost, maskcut])
def test_every_method_accepts_one_patch(method):
    assert method(torch.ones(1, 1, 4), PatchGrid(5, 5, 10)) is not None
