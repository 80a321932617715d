"""Mean and deviation in the address of an encoder whose file does not say them."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ssl_bench.errors import CheckpointError
from ssl_bench.models.encoder import ASSUMED, Colours, Encoder

STATED = "mean="
"""How such an address begins: `mean=0.5,std=0.5:URI`, one number or three with / between."""
_FORM = re.compile(r"mean=([\d./]+),std=([\d./]+):(.+)", re.DOTALL)
_LARGEST = 1e9
_EXAMPLE = "mean=0.5,std=0.5:my_vit.pth or mean=0.48/0.46/0.41,std=0.27/0.26/0.28:my_vit.pth"


def split_colours(uri: str) -> tuple[Colours, str]:
    """Mean and deviation of red, green and blue, in units of the brightest pixel, and the rest.

    Raises:
        CheckpointError: the address is written in another way, a mean is above 1, or a deviation 0.
    """
    found = _FORM.fullmatch(uri)
    mean, std = (_three(words) for words in found.groups()[:2]) if found else (None, None)
    if found is None or mean is None or std is None or max(mean) > 1 or not 0 < min(std) <= 1:
        raise CheckpointError(
            "expected mean=NUMBERS,std=NUMBERS:URI, of images from 0 to 1 and no deviation of 0, "
            f"such as {_EXAMPLE}; got {uri!r}"
        )
    return (mean, std), found[3]


def with_colours(encoder: Encoder, uri: str, colours: Colours) -> Encoder:
    """The encoder with another mean and deviation than were assumed: another encoder.

    Raises:
        CheckpointError: what it was loaded from says its own.
    """
    if not encoder.colours_from.startswith(ASSUMED):
        raise CheckpointError(
            f"{encoder.uri} has a mean and deviation of its own ({encoder.colours_from}), got "
            f"{uri!r}; leave them out of the address"
        )
    return replace(encoder, uri=uri, mean=colours[0], std=colours[1], colours_from="the address")


def colour_of(described: Mapping[str, Any], key: str, path: Path) -> tuple[float, float, float]:
    """The mean or deviation of red, green and blue that a configuration gives.

    Args:
        described: The configuration.
        key: Such as mean or image_std; a deviation ends with std.
        path: The file to name in an error.

    Raises:
        CheckpointError: Not three numbers, or a deviation of 0.
    """
    value: Any = described.get(key)
    numbers: list[Any] = list(value) if isinstance(value, list | tuple) else [value] * 3
    sound = len(numbers) == 3 and all(is_number(one) for one in numbers)
    if not sound or (key.endswith("std") and min(numbers) <= 0):
        raise CheckpointError(
            f"{path}: expected {key} of red, green and blue, three numbers and no deviation of 0, "
            f"came {value!r}; fetch it again"
        )
    red, green, blue = map(float, numbers)
    return red, green, blue


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number as images and norms have them."""
    return type(value) in (int, float) and abs(value) < _LARGEST


def _three(words: str) -> tuple[float, float, float] | None:
    try:
        values = [float(word) for word in words.split("/")]
    except ValueError:
        return None
    if len(values) not in (1, 3):
        return None
    red, green, blue = values * 3 if len(values) == 1 else values
    return red, green, blue
