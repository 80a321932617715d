"""Corruptions of images: always the same pixels and draws, and no state."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ssl_bench.data.corruptions import (
    NAMES,
    CorruptedImages,
    Corruption,
    corrupt_dataset,
    corrupt_image,
    corruption_settings,
    parse_corruptions,
)
from ssl_bench.data.files.readable import ImageSubset
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.layouts.spair71k import Spair71k
from ssl_bench.errors import ConfigurationError
from tests.support.faults import class_folders
from tests.support.spair import spair

pytest.importorskip("imagecorruptions")

# Sha256 of `picture` in all severities of all corruptions but motion_blur, whose last bit depends
# on the processor. Where a newer package gives another one, `_VERSION` of corrupted.py counts up.
PIXELS = "3534a8238b8ee5adb31bd19a18834c4a452f6f0b54c3a47d7bfbca2f4bff7dad"


def picture() -> np.ndarray:
    """Blocks of grey under coloured noise, 40 high and 48 wide."""
    draws = np.random.RandomState(0)
    blocks = np.kron(draws.randint(0, 256, (5, 6, 1)), np.ones((8, 8, 3)))
    return np.clip(blocks + draws.randint(-30, 31, (40, 48, 3)), 0, 255).astype(np.uint8)


def test_pixels_are_those_of_earlier_records():
    found = hashlib.sha256()
    for name in NAMES:
        if name != "motion_blur":
            for severity in range(1, 6):
                found.update(
                    corrupt_image(picture(), Corruption(name, severity), "a.jpg").tobytes()
                )

    assert found.hexdigest() == PIXELS


@pytest.mark.parametrize("name", NAMES)
def test_shape_and_kind_stay_and_the_global_generator_is_not_asked(name):
    np.random.seed(3)
    for shape in [(33, 70, 3), (70, 33, 3), (28, 28, 3)]:
        image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        untouched = image.copy()
        found = corrupt_image(image, Corruption(name, 3), "a.jpg")
        assert (found.shape, found.dtype) == (shape, np.uint8)
        assert np.array_equal(image, untouched)
    assert np.random.rand() == np.random.RandomState(3).rand()


def test_draws_are_of_the_image_alone(folders):
    for name in ("gaussian_noise", "glass_blur", "fog"):
        one, again, other = (corrupt_image(picture(), Corruption(name, 1), i) for i in "aab")
        assert np.array_equal(one, again)
        assert not np.array_equal(one, other)
    images = CorruptedImages(folders.val(), Corruption("glass_blur", 2))
    with ThreadPoolExecutor(4) as pool:
        backward = list(pool.map(lambda n: images[n].image, reversed(range(len(images)))))

    for number, image in enumerate(reversed(backward)):
        assert np.array_equal(image, images[number].image)


@pytest.fixture
def folders(tmp_path) -> ClassFolders:
    class_folders(tmp_path)
    return ClassFolders(tmp_path)


def test_what_is_scored_is_corrupted_and_what_is_fitted_to_is_not(folders):
    found = corrupt_dataset(folders, Corruption("snow", 3))

    assert found.train() == folders.train()
    assert found.name == found.val().name == found.images().name == "class_folders+snow-3"
    clean, one = folders.val()[1], found.val()[1]
    assert (one.image_id, one.label) == (clean.image_id, clean.label)
    assert np.array_equal(
        one.image, corrupt_image(clean.image, Corruption("snow", 3), clean.image_id)
    )


def test_both_images_of_a_pair_are_corrupted_as_they_are_wherever_they_come(tmp_path):
    dataset = Spair71k(spair(tmp_path))
    noise = Corruption("gaussian_noise", 2)
    clean, found = dataset.val()[0], corrupt_dataset(dataset, noise).val()[0]
    assert clean.pair is not None
    assert found.pair is not None

    for one, image, image_id in zip(
        (found.image, found.pair.image),
        (clean.image, clean.pair.image),
        clean.pair.image_ids,
        strict=True,
    ):
        assert np.array_equal(one, corrupt_image(image, noise, image_id))
    assert np.array_equal(found.pair.target, clean.pair.target)


def test_fingerprints_and_settings_tell_corruptions_apart(folders):
    clean = folders.val()
    sets = [CorruptedImages(clean, Corruption.parse(one)) for one in ("snow:3", "snow:4", "fog:3")]

    assert len({clean.fingerprint(), *(one.fingerprint() for one in sets)}) == 4
    assert corruption_settings(clean) is None
    told = {"name": "snow", "severity": 3, "dataset": "class_folders"}
    assert corruption_settings(sets[0]) == {**told, "fingerprint": clean.fingerprint()}
    # Of what is left of them as of what is left of the images as they are.
    rest = ImageSubset(clean, (0, 2)).fingerprint()
    assert corruption_settings(ImageSubset(sets[0], (0, 2))) == {**told, "fingerprint": rest}


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
    asked, others = parse_corruptions(["probe.tau=1", f"corrupt={text}", "seed=2"])

    assert asked == [[] if one == "clean" else [f"corrupt={one}"] for one in found]
    assert others == ["probe.tau=1", "seed=2"]
    assert parse_corruptions(others) == ([[]], others)
    with pytest.raises(ConfigurationError, match=f"corrupt={text},fog:2"):
        parse_corruptions([f"corrupt={text}", "corrupt=fog:2"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gausian_noise:3", "`corrupt=gaussian_noise:3`"),
        ("snow:0", "corrupt=snow expects a severity in 1 to 5, got 0"),
        ("snow:6", "expects a severity in 1 to 5, got 6"),
        ("snow:2-9", "expects a severity in 1 to 5, got 9"),
        ("all:7", "expects a severity in 1 to 5, got 7"),
        ("snow:many", "expects a severity in 1 to 5, got 'many'"),
        ("snow", "expects NAME:SEVERITY such as snow:3"),
        ("", "expects NAME:SEVERITY such as snow:3"),
        ("frost:3", "unknown corruption 'frost'"),
        ("snow:4-2", "expects the lower severity first, got 'snow:4-2'"),
    ],
)
def test_what_is_no_corruption_is_refused_with_what_is(text, why):
    with pytest.raises(ConfigurationError) as error:
        parse_corruptions([f"corrupt={text}"])

    assert why in str(error.value)
    assert "\n" not in str(error.value)
