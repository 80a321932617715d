"""Apply the corruptions of ImageNet-C to images, such as noise or blur.

The same image is always corrupted in the same way. In a corrupted dataset, training images stay
clean, and all other images are corrupted.

Source: Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", ICLR 2019.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from importlib.util import find_spec
from threading import Lock
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from ssl_bench.composition.choices import unknown_name_error
from ssl_bench.composition.fields import format_value
from ssl_bench.data.files.fingerprints import extend_fingerprint
from ssl_bench.data.files.readable import ImageSubset
from ssl_bench.data.samples import (
    Dataset,
    DatasetView,
    Frames,
    ImageSet,
    ImageView,
    Sample,
)
from ssl_bench.errors import ConfigurationError, MachineError, escape_braces

Pixels = UInt8[np.ndarray, "height width 3"]

KEY = "corrupt"
SEVERITIES = (1, 2, 3, 4, 5)
CORRUPTION_NAMES = (
    *("gaussian_noise", "shot_noise", "impulse_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "fog", "brightness"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
"""Names of the corruptions of ImageNet-C except frost, in the order of ImageNet-C."""
# Increase this number if a change of the code changes the pixels of corrupted images.
_VERSION = 2
_CLEAN = ("clean", "null")
_ALL = "all"
# These two corruptions accept a seed. All others draw from NumPy's global generator.
_SEEDED = ("impulse_noise", "glass_blur")
_GLOBAL_GENERATOR_LOCK = Lock()


@dataclass(frozen=True)
class Corruption:
    """A type of image corruption and its severity.

    Attributes:
        name: Type of the corruption, such as "snow". One of `CORRUPTION_NAMES`.
        severity: Number from 1 (weakest) to 5 (strongest).

    Raises:
        ConfigurationError: The name or the severity does not exist.
    """

    name: str
    severity: int

    def __post_init__(self) -> None:
        if self.name not in CORRUPTION_NAMES:
            message = f"unknown corruption {format_value(self.name)}"
            known = [*CORRUPTION_NAMES, _ALL]
            raise unknown_name_error(message, self.name, known, hint=("corrupt={near}:3",))
        if self.severity not in SEVERITIES:
            raise ConfigurationError(
                f"corrupt={self.name} expects a severity from 1 to 5, got "
                f"{format_value(self.severity)}. For images without corruption, use corrupt=clean",
                hint=(f"corrupt={self.name}:3", "or", "corrupt=clean"),
            )

    def __str__(self) -> str:
        return f"{self.name}:{self.severity}"

    @classmethod
    def parse(cls, text: str) -> "Corruption":
        """Parse a text such as "snow:3", which names one corruption and its severity."""
        corruptions = _parse_severities(text)
        if len(corruptions) != 1:
            raise ConfigurationError(
                f"expected one corruption such as snow:3, got {format_value(text)}"
            )
        return corruptions[0]


def corrupt_image(image: Pixels, corruption: Corruption, image_id: str) -> Pixels:
    """Return a corrupted copy of an image.

    The random number generator is seeded with the corruption and the image id, so the result is
    always the same.

    Args:
        image: RGB image with values from 0 to 255.
        corruption: Type and severity. Lengths, such as a blur radius, are in pixels of `image`.
        image_id: Id of the image.
    """
    # Imported here, because this package is an optional dependency.
    from imagecorruptions import corruption_dict

    text = f"{corruption}\n{image_id}".encode(errors="surrogateescape")
    seed = int.from_bytes(sha256(text).digest()[:4], "big")
    options = {"seed": seed} if corruption.name in _SEEDED else {}
    corrupt = corruption_dict[corruption.name]
    with _GLOBAL_GENERATOR_LOCK:
        state = np.random.get_state()
        np.random.seed(seed)
        try:
            corrupted = corrupt(Image.fromarray(image), corruption.severity, **options)
        finally:
            np.random.set_state(state)
    return np.array(corrupted).astype(np.uint8)


def parse_corruptions(overrides: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Separate the setting of the config key `corrupt` from all other settings of a command.

    Args:
        overrides: KEY=VALUE texts, such as ["corrupt=clean,snow:1-2", "probe.tau=0.3"].

    Returns:
        A list of settings for each requested corruption, and all other settings. For the example,
        the result is [[], ["corrupt=snow:1"], ["corrupt=snow:2"]] and ["probe.tau=0.3"]. The list
        for clean images is empty.

    Raises:
        ConfigurationError: A corruption or severity does not exist, or the key is given twice.
        MachineError: The package imagecorruptions is not installed.
    """
    settings = [text.partition("=") for text in overrides]
    values = [value for key, _, value in settings if key == KEY]
    if len(values) > 1:
        corruptions = ",".join(values)
        raise ConfigurationError(
            f"the key corrupt is set {len(values)} times, expected one list of corruptions",
            hint=(f"corrupt={escape_braces(corruptions)}",),
        )
    unique: dict[Corruption | None, None] = {}
    for part in (part.strip() for text in values for part in text.split(",")):
        unique |= dict.fromkeys([None] if part in _CLEAN else _parse_severities(part))
    if any(unique) and find_spec("imagecorruptions") is None:
        raise MachineError(
            "corrupt= needs the package imagecorruptions-imaug, which is not installed. Run "
            "pip install 'ssl-bench[corruptions]'"
        )
    others = ["".join(parts) for parts in settings if parts[0] != KEY]
    return [[f"{KEY}={one}"] if one else [] for one in unique] or [[]], others


def _parse_severities(text: str) -> list[Corruption]:
    """Parse a text such as "snow:3", "snow:1-5" or "all:3" into a list of corruptions.

    "snow:1-5" means snow at severities 1 to 5. "all:3" means all types of corruption at severity 3.
    """
    name, colon, numbers = text.partition(":")
    if not colon:
        raise ConfigurationError(
            f"corrupt expects clean or NAME:SEVERITY such as snow:3 or snow:1-5, or several of "
            f"them separated by commas, got {format_value(text)}"
        )
    limits = []
    for number in numbers.split("-", 1):
        if not (number.isascii() and number.isdigit() and len(number) < 4):
            raise ConfigurationError(
                f"corrupt={format_value(name)} expects a severity from 1 to 5, got "
                f"{format_value(number)}",
                hint=("corrupt={corruption}:3",),
            )
        limits.append(int(number))
    names = CORRUPTION_NAMES if name == _ALL else (name,)
    # If both limits are valid, the severities between them are valid too.
    for limit in limits:
        Corruption(names[0], limit)
    if limits[0] > limits[-1]:
        raise ConfigurationError(
            f"corrupt expects a range that begins with the lower severity, got {format_value(text)}"
        )
    severities = range(limits[0], limits[-1] + 1)
    return [Corruption(name, severity) for name in names for severity in severities]


@dataclass(frozen=True)
class CorruptedImages(ImageView):
    """An image set with corrupted images and unchanged annotations.

    The name and the fingerprint (hash of the images) of the set depend on the corruption.
    Therefore, cached features and results of corrupted images are never used for clean images.

    Attributes:
        corruption: Corruption that is applied to every image.
    """

    corruption: Corruption

    @property
    def name(self) -> str:
        return _corrupted_name(self.images.name, self.corruption)

    def __getitem__(self, index: int) -> Sample:
        return _corrupt_sample(self.images[index], self.corruption)

    @cached_property
    def _fingerprint(self) -> str:
        row = ("corrupted", _VERSION, str(self.corruption))
        return extend_fingerprint(self.images.fingerprint(), row)


def _corrupt_sample(sample: Sample, corruption: Corruption) -> Sample:
    """Corrupt all images of a sample, including the second image of a pair and video frames.

    Annotations stay unchanged.
    """
    image_id, pair, frames = sample.image_id, sample.pair, sample.frames
    if pair is not None:
        image_id, other_id = pair.image_ids
        pair = replace(pair, image=corrupt_image(pair.image, corruption, other_id))
    if frames is not None:
        clean = frames
        frames = Frames(len(clean), lambda number: _corrupt_sample(clean[number], corruption))
    image = corrupt_image(sample.image, corruption, image_id)
    return replace(sample, image=image, pair=pair, frames=frames)


def corrupt_dataset(dataset: Dataset, corruption: Corruption) -> DatasetView:
    """Return a dataset with corrupted images. Training images stay clean."""
    return DatasetView(
        dataset,
        lambda method, images: images if method == "train" else CorruptedImages(images, corruption),
        _corrupted_name(dataset.name, corruption),
    )


def find_corruption(images: ImageSet) -> Corruption | None:
    """Return the corruption of an image set, or None for clean images."""
    return _separate_corruption(images)[0]


def corruption_settings(images: ImageSet) -> Mapping[str, Any] | None:
    """Return the corruption of an image set as a dictionary, or None for clean images.

    The dictionary is stored with results. The keys "name" and "severity" describe the corruption.
    The keys "dataset" and "fingerprint" contain the name and the hash of the clean images. The
    image files are read to compute this hash.
    """
    corruption, clean = _separate_corruption(images)
    if corruption is None:
        return None
    return {
        "name": corruption.name,
        "severity": corruption.severity,
        "dataset": clean.name,
        "fingerprint": clean.fingerprint(),
    }


def _separate_corruption(images: ImageSet) -> tuple[Corruption | None, ImageSet]:
    """Return the corruption of an image set, and the image set without the corruption.

    If the images are clean, the corruption is None.
    """
    if isinstance(images, ImageSubset):
        corruption, clean = _separate_corruption(images.images)
        return corruption, replace(images, images=clean)
    if isinstance(images, CorruptedImages):
        return images.corruption, images.images
    return None, images


def _corrupted_name(name: str, corruption: Corruption) -> str:
    # The separator is a plus sign, because a dash precedes a number of images, as in voc2012-62.
    return f"{name}+{corruption.name}-{corruption.severity}"
