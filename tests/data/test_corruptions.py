"""Test image corruptions, such as noise and blur."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from ssl_bench.data.corruptions import (
    CORRUPTION_NAMES,
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
from ssl_bench.data.samples import Frames, Sample
from ssl_bench.errors import ConfigurationError
from tests.support.faults import class_folders
from tests.support.spair import spair

pytest.importorskip("imagecorruptions")

# SHA-256 of `picture` with all corruptions and severities. Motion blur is left out, because its
# last bit depends on the processor. If a newer package changes the digest, increase `_VERSION` in
# corruptions.py.
PIXELS = "3534a8238b8ee5adb31bd19a18834c4a452f6f0b54c3a47d7bfbca2f4bff7dad"


def picture() -> np.ndarray:
    """Return an image of grey blocks with coloured noise."""
    draws = np.random.RandomState(0)
    blocks = np.kron(draws.randint(0, 256, (5, 6, 1)), np.ones((8, 8, 3)))
    return np.clip(blocks + draws.randint(-30, 31, (40, 48, 3)), 0, 255).astype(np.uint8)


@pytest.fixture
def folders(tmp_path) -> ClassFolders:
    return ClassFolders(class_folders(tmp_path))


@pytest.mark.slow
def test_pixels_are_those_of_earlier_records():
    found = hashlib.sha256()
    for name in (name for name in CORRUPTION_NAMES if name != "motion_blur"):
        for severity in range(1, 6):
            corrupted = corrupt_image(picture(), Corruption(name, severity), "a.jpg")
            found.update(corrupted.tobytes())

    assert found.hexdigest() == PIXELS


@pytest.mark.parametrize(
    "name",
    [
        # Glass blur moves pixels in a loop, which takes seconds.
        pytest.param(name, marks=pytest.mark.slow if name == "glass_blur" else ())
        for name in CORRUPTION_NAMES
    ],
)
def test_shape_and_input_and_the_global_generator_stay(name):
    np.random.seed(3)
    for shape in [(33, 70, 3), (70, 33, 3), (28, 28, 3)]:
        image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        untouched = image.copy()
        found = corrupt_image(image, Corruption(name, 3), "a.jpg")
        assert (found.shape, found.dtype) == (shape, np.uint8)
        assert np.array_equal(image, untouched)
    assert np.random.rand() == np.random.RandomState(3).rand()


@pytest.mark.slow
def test_draws_depend_on_the_image_id_alone(folders):
    for name in ("gaussian_noise", "glass_blur", "fog"):
        one, again, other = (corrupt_image(picture(), Corruption(name, 1), i) for i in "aab")
        assert np.array_equal(one, again)
        assert not np.array_equal(one, other)
    images = CorruptedImages(folders.val(), Corruption("glass_blur", 2))
    with ThreadPoolExecutor(4) as pool:
        backward = list(pool.map(lambda n: images[n].image, reversed(range(len(images)))))

    for number, image in enumerate(reversed(backward)):
        assert np.array_equal(image, images[number].image)


def test_scored_images_are_corrupted_and_training_images_are_not(folders):
    snow = Corruption("snow", 3)
    found = corrupt_dataset(folders, snow)

    assert found.train() == folders.train()
    assert found.name == found.val().name == found.images().name == "class_folders+snow-3"
    clean, one = folders.val()[1], found.val()[1]
    assert (one.image_id, one.label) == (clean.image_id, clean.label)
    assert np.array_equal(one.image, corrupt_image(clean.image, snow, clean.image_id))


def test_both_images_of_a_pair_have_their_own_corruption(tmp_path):
    dataset = Spair71k(spair(tmp_path))
    noise = Corruption("gaussian_noise", 2)
    clean, found = dataset.val()[0], corrupt_dataset(dataset, noise).val()[0]
    assert clean.pair is not None
    assert found.pair is not None

    first, second = clean.pair.image_ids
    assert np.array_equal(found.image, corrupt_image(clean.image, noise, first))
    assert np.array_equal(found.pair.image, corrupt_image(clean.pair.image, noise, second))
    assert np.array_equal(found.pair.target, clean.pair.target)


@dataclass(frozen=True)
class OneVideo:
    video: Sample
    name = "videos"
    split = "val"
    class_names: ClassVar[tuple[str, ...]] = ()
    ids = ("dog",)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Sample:
        return self.video

    def fingerprint(self) -> str:
        return "0"


def test_each_frame_of_a_video_has_its_own_corruption():
    snow, clean = Corruption("snow", 2), picture()
    frames = Frames(3, lambda number: Sample(f"dog/{number}", clean, mask=clean[..., 0] // 200))
    video = OneVideo(replace(frames[0], image_id="dog", frames=frames))
    found = CorruptedImages(video, snow)[0].frames
    assert found is not None

    assert [frame.image_id for frame in found] == ["dog/0", "dog/1", "dog/2"]
    for number in (0, 2, -1):
        own_id = frames[number].image_id
        assert np.array_equal(found[number].image, corrupt_image(clean, snow, own_id))
        assert np.array_equal(found[number].mask, frames[number].mask)
    assert [frame.image_id for frame in found[1:]] == ["dog/1", "dog/2"]
    with pytest.raises(IndexError):
        found[3]


def test_fingerprints_and_settings_distinguish_corruptions(folders):
    clean = folders.val()
    sets = [CorruptedImages(clean, Corruption.parse(one)) for one in ("snow:3", "snow:4", "fog:3")]

    assert len({clean.fingerprint(), *(one.fingerprint() for one in sets)}) == 4
    assert corruption_settings(clean) is None
    expected = {"name": "snow", "severity": 3, "dataset": "class_folders"}
    assert corruption_settings(sets[0]) == {**expected, "fingerprint": clean.fingerprint()}
    # A subset has the fingerprint of the same subset of clean images.
    rest = ImageSubset(clean, (0, 2)).fingerprint()
    assert corruption_settings(ImageSubset(sets[0], (0, 2))) == {**expected, "fingerprint": rest}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("snow:3", ["snow:3"]),
        ("snow:2-4", ["snow:2", "snow:3", "snow:4"]),
        ("clean,snow:1, fog:5,snow:1", ["clean", "snow:1", "fog:5"]),
        ("all:2", [f"{name}:2" for name in CORRUPTION_NAMES]),
    ],
)
def test_corruptions_are_parsed_from_names_and_severities(text, expected):
    found, others = parse_corruptions(["probe.tau=1", f"corrupt={text}", "seed=2"])

    assert found == [[] if one == "clean" else [f"corrupt={one}"] for one in expected]
    assert others == ["probe.tau=1", "seed=2"]
    assert parse_corruptions(others) == ([[]], others)
    with pytest.raises(ConfigurationError) as error:
        parse_corruptions([f"corrupt={text}", "corrupt=fog:2"])
    assert error.value.hint == (f"corrupt={text},fog:2",)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("gausian_noise:3", ["corrupt=gaussian_noise:3"]),
        ("snow:0", ["corrupt=snow:3"]),
        ("snow:6", ["corrupt=snow:3"]),
        ("snow:2-9", ["corrupt=snow:3"]),
        ("all:7", ["corrupt=gaussian_noise:3"]),
        ("snow:many", ["corrupt={corruption}:3"]),
        ("snow:1-3-5", ["corrupt={corruption}:3"]),
        ("snow", []),
        ("snow:4-2", []),
    ],
)
def test_unknown_corruptions_are_refused(text, hint):
    with pytest.raises(ConfigurationError) as error:
        parse_corruptions([f"corrupt={text}"])

    assert [*error.value.hint[:1]] == hint
