"""Corruptions by name and severity, as they are typed; imports nothing that computes."""

from collections.abc import Sequence
from dataclasses import dataclass

from ssl_bench.composition.choices import nearest
from ssl_bench.composition.fields import shown
from ssl_bench.errors import ConfigurationError

KEY = "corrupt"
SEVERITIES = (1, 2, 3, 4, 5)
NAMES = (
    *("gaussian_noise", "shot_noise", "impulse_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "fog", "brightness"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
"""Those of ImageNet-C in its order, without frost."""
_CLEAN = ("clean", "null")
_ALL = "all"


@dataclass(frozen=True)
class Corruption:
    """One of `NAMES`, in one of `SEVERITIES`.

    Raises:
        ConfigurationError: there is no such one.
    """

    name: str
    severity: int

    def __post_init__(self) -> None:
        if self.name == "frost":
            raise ConfigurationError(
                "corrupt=frost needs photographs of frost, which are no part of this package; the "
                f"other corruptions of ImageNet-C: {', '.join(NAMES)}"
            )
        if self.name not in NAMES:
            raise ConfigurationError(
                f"unknown corruption {shown(self.name)}; {nearest(self.name, [*NAMES, _ALL])}"
            )
        if self.severity not in SEVERITIES:
            raise ConfigurationError(
                f"corrupt={self.name} expects a severity in 1 to 5, got {shown(self.severity)}; "
                "without corruption: corrupt=clean"
            )

    def __str__(self) -> str:
        return f"{self.name}:{self.severity}"

    @classmethod
    def of(cls, text: str) -> "Corruption":
        """The one that a text like "snow:3" names.

        Raises:
            ConfigurationError: it names none, or several.
        """
        found = _of_part(text)
        if len(found) != 1:
            raise ConfigurationError(f"expected one corruption such as snow:3, got {shown(text)}")
        return found[0]


def asked_corruptions(overrides: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """An override for each corruption, none for the images as they are, and all other overrides.

    Raises:
        ConfigurationError: there is no such corruption or severity, or the key comes twice.
    """
    asked = [text.partition("=")[2] for text in overrides if _is_key(text)]
    if len(asked) > 1:
        raise ConfigurationError(
            f"corrupt= comes {len(asked)} times; several corruptions in one: "
            f"corrupt={','.join(asked)}"
        )
    found: dict[Corruption | None, None] = {}
    for part in (part.strip() for text in asked for part in text.split(",")):
        found |= dict.fromkeys([None] if part in _CLEAN else _of_part(part))
    others = [text for text in overrides if not _is_key(text)]
    return [[f"{KEY}={one}"] if one else [] for one in found] or [[]], others


def _is_key(override: str) -> bool:
    return override.partition("=")[0] == KEY


def _of_part(text: str) -> list[Corruption]:
    """Of "snow:3", "snow:1-5" or "all:3"."""
    name, colon, numbers = text.partition(":")
    if not colon:
        raise ConfigurationError(
            f"corrupt expects NAME:SEVERITY such as snow:3 or snow:1-5, several with commas, or "
            f"clean; got {shown(text)}"
        )
    ends = [_number(name, number) for number in numbers.split("-", 1)]
    names = NAMES if name == _ALL else (name,)
    # The ends first, for what lies between them is legal where they are.
    for end in ends:
        Corruption(names[0], end)
    if ends[0] > ends[-1]:
        raise ConfigurationError(f"corrupt expects the lower severity first, got {shown(text)}")
    return [Corruption(one, n) for one in names for n in range(ends[0], ends[-1] + 1)]


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 4):
        raise ConfigurationError(
            f"corrupt={shown(name)} expects a severity in 1 to 5, got {shown(text)}"
        )
    return int(text)
