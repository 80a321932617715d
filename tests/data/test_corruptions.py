"""Corruptions of images: the pixels of the original, always the same draws, and no state."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from ssl_bench.data.corrupted import CorruptedDataset, CorruptedImages, as_settings
from ssl_bench.data.corruptions.apply import FUNCTIONS, corrupted
from ssl_bench.data.corruptions.blur import _origins
from ssl_bench.data.corruptions.lens import smeared, softened
from ssl_bench.data.corruptions.named import NAMES, Corruption, asked_corruptions
from ssl_bench.data.files.readable import RemainingImages
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.layouts.spair71k import Spair71k
from ssl_bench.errors import ConfigurationError
from tests.support.faults import class_folders
from tests.support.spair import spair

# The first digits of the sha256 of what imagecorruptions-imaug 1.1.5 makes of `picture`, severities
# 1 to 5, with NumPy 2.4.6, SciPy 1.17.1, scikit-image 0.26.0, OpenCV 5.0.0 and Pillow 13.0.0:
#   numpy.random.seed(severity)
#   corrupt(picture, severity, name, **({"seed": severity} if name has a seed of its own else {}))
# which are impulse_noise and glass_blur. Its motion_blur is that of processors without AVX-512,
# where NumPy's exp is the C library's; on the others its severity 4 is another (dffd2ee764b5).
ORIGINAL = {
    "gaussian_noise": "e4f70e460d0e 1ecd6ce87183 97ba50a26ee3 db949c2ccc2f cf6fd72e205e",
    "shot_noise": "f0b36cb26023 06148f84fbb4 9f0fe88f5035 30e01b048d9b 2d199bcfea55",
    "impulse_noise": "1c500bb4079e a2cc3866e640 1cac417170fe 4544f7788285 c2e890cb742b",
    "defocus_blur": "888b86348dcd 48d59e7f8414 54138e334973 3bd1f89ffa2e 98fe7a9b9aed",
    "glass_blur": "86a940104ae3 892a180c3ff6 a33a0593c53e 46bcecb4bbb7 b3f32619bf38",
    "motion_blur": "017ea499a9fa cb376e9fe966 577c8b8d7597 9bc0dd9591aa 1add6797ead3",
    "zoom_blur": "82f989050742 6c3af92957a5 d96a6f4732a8 bda5ab3929c9 4ba1f9d76e08",
    "snow": "f2f0f1114bd6 36b76940813d 7683436d1d00 a165d9dc279a b940a7ecaeb4",
    "fog": "eb14b8682187 0e61bb2bb313 4f6da7d4ca63 9c3d189bca3b 170df6997c75",
    "brightness": "df33eb24bbc8 56a267bd5c6c 75b2c9d96fde a07749504f50 28f4ab7382e3",
    "contrast": "37ec03af6e5e 03a5b809cee0 6f2ccb4bf115 ba7606e653db 9aeccd514568",
    "elastic_transform": "c01fe9138332 2b6e026b6229 500b5c9ddfe7 b19db381368c ff7ab7df1f63",
    "pixelate": "f83c1a36f14a f622831aab50 59504ab9fb24 31542924963e f5f8a7e2f1f6",
    "jpeg_compression": "b92120f1be5c 678dfb524180 8bb3ef13295f 6785078196e5 522043f9cc46",
}


def picture() -> np.ndarray:
    """Blocks of grey under coloured noise, 40 high and 48 wide."""
    draws = np.random.RandomState(0)
    blocks = np.kron(draws.randint(0, 256, (5, 6, 1)), np.ones((8, 8, 3)))
    return np.clip(blocks + draws.randint(-30, 31, (40, 48, 3)), 0, 255).astype(np.uint8)


def waves() -> np.ndarray:
    """Of many lengths, 64 high and 80 wide."""
    rows, columns = np.mgrid[0:64, 0:80]
    shares = [np.sin(columns / a) * np.cos(rows / b) for a, b in [(2, 3), (9, 5), (1.3, 11)]]
    return (127.5 + 120 * np.stack(shares, -1)).astype(np.uint8)


def digest(image: np.ndarray) -> str:
    return hashlib.sha256(image.tobytes()).hexdigest()[:12]


@pytest.mark.parametrize("name", NAMES)
def test_pixels_are_those_of_the_original_to_the_bit(name):
    made = [digest(FUNCTIONS[name](picture(), severity, severity)) for severity in range(1, 6)]

    assert made == ORIGINAL[name].split()


@pytest.mark.parametrize("name", NAMES)
def test_no_function_is_asked_whose_last_bit_depends_on_the_processor(name, monkeypatch):
    def asked(*_: object) -> None:
        raise AssertionError("NumPy's, which differ with AVX-512")

    for function in ["exp", "exp2", "expm1", "log", "log2", "log1p", "power", "cbrt", "tanh"]:
        monkeypatch.setattr(np, function, asked)
    for function in ["sin", "cos", "tan", "arcsin", "arccos", "arctan", "arctan2", "sinh", "cosh"]:
        monkeypatch.setattr(np, function, asked)

    for severity in range(1, 6):
        FUNCTIONS[name](picture(), severity, severity)


@pytest.mark.parametrize("name", NAMES)
def test_shape_and_kind_stay_and_the_global_generator_is_not_asked(name):
    np.random.seed(3)
    for shape in [(33, 70, 3), (70, 33, 3), (5, 3, 3), (1, 1, 3)]:
        image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        untouched = image.copy()
        found = corrupted(image, Corruption(name, 3), "a.jpg")
        assert (found.shape, found.dtype) == (shape, np.uint8)
        assert np.array_equal(image, untouched)
    assert np.random.rand() == np.random.RandomState(3).rand()


@pytest.mark.parametrize("name", NAMES)
def test_more_severity_is_farther_from_the_image(name):
    image = waves()
    found = [corrupted(image, Corruption(name, s), "a.jpg").astype(float) for s in range(1, 6)]
    far = [float(np.mean((one - image) ** 2)) for one in found]

    # From 3 to 5 glass blurs more and moves less often.
    assert far[0] < far[2] < far[4] or (name == "glass_blur" and far[0] < far[4])


@pytest.mark.parametrize("level", [0, 1, 100, 254, 255])
def test_a_constant_image_keeps_its_level_without_contrast(level):
    image = np.full((9, 12, 3), level, np.uint8)
    for severity in range(1, 6):
        found = corrupted(image, Corruption("contrast", severity), "a").astype(int)
        assert np.abs(found - level).max() <= 1


def test_contrast_counted_by_hand():
    image = np.zeros((1, 2, 3), np.uint8)
    image[0, 1] = 200

    # The mean is 100, and 0.4 of the distance stays.
    assert corrupted(image, Corruption("contrast", 1), "a")[0, :, 0].tolist() == [60, 140]


def test_impulses_are_lost_values_as_often_full_as_zero():
    image = np.full((200, 200, 3), 100, np.uint8)
    found = corrupted(image, Corruption("impulse_noise", 5), "a")

    values, counts = np.unique(found, return_counts=True)
    assert values.tolist() == [0, 100, 255]
    assert counts / found.size == pytest.approx([0.135, 0.73, 0.135], abs=0.005)


@pytest.mark.parametrize("mode", ["nearest", "reflect"])
def test_what_is_softened_is_that_of_the_normal_filter(mode):
    values = np.random.default_rng(0).standard_normal((20, 30, 3))
    expected = gaussian_filter(values, (2.5, 0.6, 0), mode=mode, truncate=3)

    found = softened(values, (2.5, 0.6), mode=mode, truncate=3)

    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)


def test_an_image_that_moved_goes_on_at_its_rim():
    image = np.array([[0.0, 0.0, 0.0, 0.0, 9.0]] * 5)
    found = smeared(image, radius=1, deviation=1e9, angle=0.0)

    # Equal weights of three steps to the left.
    assert found[2] == pytest.approx([0, 0, 3, 6, 9])


def test_origins_are_those_of_one_replacement_after_the_other():
    height, width, reach = 7, 9, 2
    draws = np.random.default_rng(0)
    moves = draws.integers(-reach, reach, ((height - 2 * reach) * (width - 2 * reach), 2))
    plain = np.arange(height * width).reshape(height, width)
    turns = iter(moves.tolist())
    for row in range(height - reach, reach, -1):
        for column in range(width - reach, reach, -1):
            right, down = next(turns)
            plain[row, column] = plain[row + down, column + right]

    assert _origins(height, width, reach, moves).tolist() == plain.ravel().tolist()


@pytest.mark.parametrize("name", ["gaussian_noise", "glass_blur", "fog"])
def test_draws_are_of_the_image_the_corruption_and_the_severity(name):
    image, mild = picture(), Corruption(name, 1)

    assert np.array_equal(corrupted(image, mild, "a"), corrupted(image, mild, "a"))
    assert not np.array_equal(corrupted(image, mild, "a"), corrupted(image, mild, "b"))


@pytest.fixture
def folders(tmp_path) -> ClassFolders:
    class_folders(tmp_path)
    return ClassFolders(tmp_path)


def test_order_and_threads_change_no_pixel(folders):
    images = CorruptedImages(folders.val(), Corruption("glass_blur", 2))
    forward = [images[n].image for n in range(len(images))]
    with ThreadPoolExecutor(4) as pool:
        backward = list(pool.map(lambda n: images[n].image, reversed(range(len(images)))))

    assert all(np.array_equal(a, b) for a, b in zip(forward, reversed(backward), strict=True))


def test_what_is_scored_is_corrupted_and_what_is_fitted_to_is_not(folders):
    found = CorruptedDataset(folders, Corruption("snow", 3))

    assert found.train() == folders.train()
    assert found.name == found.val().name == found.images().name == "class_folders+snow-3"
    clean, one = folders.val()[1], found.val()[1]
    assert (one.image_id, one.label) == (clean.image_id, clean.label)
    assert np.array_equal(one.image, corrupted(clean.image, Corruption("snow", 3), clean.image_id))


def test_both_images_of_a_pair_are_corrupted_as_they_are_wherever_they_come(tmp_path):
    dataset = Spair71k(spair(tmp_path))
    noise = Corruption("gaussian_noise", 2)
    clean, found = dataset.val()[0], CorruptedDataset(dataset, noise).val()[0]
    assert clean.pair is not None
    assert found.pair is not None

    for one, image, image_id in zip(
        (found.image, found.pair.image),
        (clean.image, clean.pair.image),
        clean.pair.image_ids,
        strict=True,
    ):
        assert np.array_equal(one, corrupted(image, noise, image_id))
    assert np.array_equal(found.pair.target, clean.pair.target)


def test_fingerprints_and_settings_tell_corruptions_apart(folders):
    clean = folders.val()
    several = [Corruption("snow", 3), Corruption("snow", 4), Corruption("fog", 3)]
    sets = [CorruptedImages(clean, one) for one in several]

    assert len({clean.fingerprint(), *(one.fingerprint() for one in sets)}) == 4
    assert as_settings(clean) is None
    told = {"name": "snow", "severity": 3, "dataset": "class_folders"}
    assert as_settings(sets[0]) == {**told, "fingerprint": clean.fingerprint()}
    # Of what is left of them as of what is left of the images as they are.
    some = RemainingImages(sets[0], (0, 2))
    rest = RemainingImages(clean, (0, 2)).fingerprint()
    assert as_settings(some) == {**told, "fingerprint": rest}
    assert replace(sets[0]).fingerprint() == sets[0].fingerprint()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("snow:3", ["snow:3"]),
        ("snow:2-4", ["snow:2", "snow:3", "snow:4"]),
        ("clean,snow:1, fog:5,snow:1", ["clean", "snow:1", "fog:5"]),
        ("all:2", [f"{name}:2" for name in NAMES]),
    ],
)
def test_corruptions_are_asked_for_by_name_and_severity(text, found):
    asked, others = asked_corruptions(["probe.tau=1", f"corrupt={text}", "seed=2"])

    assert asked == [[] if one == "clean" else [f"corrupt={one}"] for one in found]
    assert others == ["probe.tau=1", "seed=2"]


def test_without_the_key_images_stay_as_they_are():
    assert asked_corruptions(["seed=2"]) == ([[]], ["seed=2"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gausian_noise:3", "did you mean gaussian_noise"),
        ("snow:0", "corrupt=snow expects a severity in 1 to 5, got 0"),
        ("snow:6", "expects a severity in 1 to 5, got 6"),
        ("snow:2-9", "expects a severity in 1 to 5, got 9"),
        ("all:7", "expects a severity in 1 to 5, got 7"),
        ("snow:many", "expects a severity in 1 to 5, got 'many'"),
        ("snow", "expects NAME:SEVERITY such as snow:3"),
        ("", "expects NAME:SEVERITY such as snow:3"),
        ("frost:3", "needs photographs of frost"),
        ("snow:4-2", "expects the lower severity first, got 'snow:4-2'"),
    ],
)
def test_what_is_no_corruption_is_refused_with_what_is(text, why):
    with pytest.raises(ConfigurationError) as error:
        asked_corruptions([f"corrupt={text}"])

    assert why in str(error.value)
    assert "\n" not in str(error.value)


def test_two_keys_are_refused_with_the_one_that_says_both():
    with pytest.raises(ConfigurationError, match="corrupt=snow:1,fog:2"):
        asked_corruptions(["corrupt=snow:1", "corrupt=fog:2"])
