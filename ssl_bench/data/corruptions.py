"""The common corruptions of ImageNet-C, by name and severity, always with the same draws.

Of a corrupted dataset the scored images are corrupted; what is fitted sees them as they are.
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
from ssl_bench.data.samples import Dataset, DatasetView, ImageSet, ImageView, Sample
from ssl_bench.errors import ConfigurationError, MachineError, escape_braces

Pixels = UInt8[np.ndarray, "height width 3"]

KEY = "corrupt"
SEVERITIES = (1, 2, 3, 4, 5)
NAMES = (
    *("gaussian_noise", "shot_noise", "impulse_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "fog", "brightness"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
"""Those of ImageNet-C in its order, without frost."""
# Count up when the same corruption gives other pixels.
_VERSION = 2
_CLEAN = ("clean", "null")
_ALL = "all"
# Those with a generator of their own; the others draw from NumPy's global one.
_SEEDED = ("impulse_noise", "glass_blur")
_GLOBAL_GENERATOR = Lock()


@dataclass(frozen=True)
class Corruption:
    """One of `NAMES`, in one of `SEVERITIES`.

    Raises:
        ConfigurationError: there is no such one.
    """

    name: str
    severity: int

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            message, known = f"unknown corruption {format_value(self.name)}", [*NAMES, _ALL]
            raise unknown_name_error(message, self.name, known, hint=("corrupt={near}:3",))
        if self.severity not in SEVERITIES:
            raise ConfigurationError(
                f"corrupt={self.name} expects a severity in 1 to 5, got "
                f"{format_value(self.severity)}; clean has none",
                hint=(f"corrupt={self.name}:3", "or", "corrupt=clean"),
            )

    def __str__(self) -> str:
        return f"{self.name}:{self.severity}"

    @classmethod
    def parse(cls, text: str) -> "Corruption":
        """The one that a text like "snow:3" names, which must not name several."""
        found = _of_part(text)
        if len(found) != 1:
            raise ConfigurationError(
                f"expected one corruption such as snow:3, got {format_value(text)}"
            )
        return found[0]


def corrupt_image(image: Pixels, corruption: Corruption, image_id: str) -> Pixels:
    """An image after a corruption, the same whenever and wherever it is asked for.

    Args:
        image: RGB, 0 to 255.
        corruption: Whose radii and distances are in pixels of this image.
        image_id: With the corruption it decides the draws.
    """
    # Not for everybody: the package is an extra.
    from imagecorruptions import corruption_dict

    text = f"{corruption}\n{image_id}".encode(errors="surrogateescape")
    seed = int.from_bytes(sha256(text).digest()[:4], "big")
    seeded = {"seed": seed} if corruption.name in _SEEDED else {}
    corrupt = corruption_dict[corruption.name]
    # NumPy's global generator begins at the seed, for one thread at a time, and goes on after.
    with _GLOBAL_GENERATOR:
        before = np.random.get_state()
        np.random.seed(seed)
        try:
            found = corrupt(Image.fromarray(image), corruption.severity, **seeded)
        finally:
            np.random.set_state(before)
    return np.array(found).astype(np.uint8)


def parse_corruptions(overrides: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """An override for each corruption, none for the images as they are, and all other overrides.

    Raises:
        ConfigurationError: there is no such corruption or severity, or the key comes twice.
        MachineError: imagecorruptions is not installed.
    """
    keys = [text.partition("=") for text in overrides]
    asked = [value for key, _, value in keys if key == KEY]
    if len(asked) > 1:
        corruptions = ",".join(asked)
        raise ConfigurationError(
            f"expected one corrupt=, got {len(asked)}; put several corruptions into one",
            hint=(f"corrupt={escape_braces(corruptions)}",),
        )
    found: dict[Corruption | None, None] = {}
    for part in (part.strip() for text in asked for part in text.split(",")):
        found |= dict.fromkeys([None] if part in _CLEAN else _of_part(part))
    if any(found) and find_spec("imagecorruptions") is None:
        raise MachineError(
            "corrupt= needs the package imagecorruptions-imaug, which is not installed; "
            "pip install 'ssl-bench[corruptions]'"
        )
    others = ["".join(parts) for parts in keys if parts[0] != KEY]
    return [[f"{KEY}={one}"] if one else [] for one in found] or [[]], others


def _of_part(text: str) -> list[Corruption]:
    """Of "snow:3", "snow:1-5" or "all:3"."""
    name, colon, numbers = text.partition(":")
    if not colon:
        raise ConfigurationError(
            f"corrupt expects NAME:SEVERITY such as snow:3 or snow:1-5, several with commas, or "
            f"clean; got {format_value(text)}"
        )
    ends = []
    for number in numbers.split("-", 1):
        if not (number.isascii() and number.isdigit() and len(number) < 4):
            raise ConfigurationError(
                f"corrupt={format_value(name)} expects a severity in 1 to 5, got "
                f"{format_value(number)}",
                hint=("corrupt={corruption}:3",),
            )
        ends.append(int(number))
    names = NAMES if name == _ALL else (name,)
    # The ends first, for what lies between them is legal where they are.
    for end in ends:
        Corruption(names[0], end)
    if ends[0] > ends[-1]:
        raise ConfigurationError(
            f"corrupt expects the lower severity first, got {format_value(text)}"
        )
    return [Corruption(one, n) for one in names for n in range(ends[0], ends[-1] + 1)]


@dataclass(frozen=True)
class CorruptedImages(ImageView):
    """An `ImageSet` after a corruption; masks, boxes, points and labels stay.

    It has a name and a fingerprint of its own, so that no table and no file of features holds it
    for the images as they are.
    """

    corruption: Corruption

    @property
    def name(self) -> str:
        return _corrupted_name(self.images.name, self.corruption)

    def __getitem__(self, index: int) -> Sample:
        sample = self.images[index]
        image_id, pair = sample.image_id, sample.pair
        if pair is not None:
            image_id, other_id = pair.image_ids
            pair = replace(pair, image=corrupt_image(pair.image, self.corruption, other_id))
        image = corrupt_image(sample.image, self.corruption, image_id)
        return replace(sample, image=image, pair=pair)

    @cached_property
    def _fingerprint(self) -> str:
        return extend_fingerprint(
            self.images.fingerprint(), ("corrupted", _VERSION, str(self.corruption))
        )


def corrupt_dataset(dataset: Dataset, corruption: Corruption) -> DatasetView:
    """A dataset of which all that is scored is corrupted, and training images are not."""
    return DatasetView(
        dataset,
        lambda role, images: images if role == "train" else CorruptedImages(images, corruption),
        _corrupted_name(dataset.name, corruption),
    )


def find_corruption(images: ImageSet) -> Corruption | None:
    """What a set of images went through, if anything."""
    if isinstance(images, ImageSubset):
        return find_corruption(images.images)
    return images.corruption if isinstance(images, CorruptedImages) else None


def corruption_settings(images: ImageSet) -> Mapping[str, Any] | None:
    """What a record says of the corruption of its images, and of what images they are.

    Cost: that of a fingerprint.
    """
    corruption = find_corruption(images)
    if corruption is None:
        return None
    clean = _clean(images)
    return {
        "name": corruption.name,
        "severity": corruption.severity,
        "dataset": clean.name,
        "fingerprint": clean.fingerprint(),
    }


def _clean(images: ImageSet) -> ImageSet:
    if isinstance(images, ImageSubset):
        return replace(images, images=_clean(images.images))
    return images.images if isinstance(images, CorruptedImages) else images


def _corrupted_name(name: str, corruption: Corruption) -> str:
    # No dash before it: what follows a dash are parts of a dataset.
    return f"{name}+{corruption.name}-{corruption.severity}"
