"""Choose the colour and line dashes of each encoder for all figures and reports."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ssl_bench.system.files import natural_sort_key

PALETTE = (
    *("#b6250b", "#dd6000", "#00916a", "#264c5b"),
    *("#0072b2", "#421e66", "#8177ff", "#502600"),
)
"""Colours that readers with deuteranopia or protanopia can tell apart on a white page."""
DASHES = (((), (6, 4)), ((12, 3, 2, 3), (2, 3)), ((16, 4), (9, 3, 2, 3, 2, 3)))
"""Dash patterns in pairs: for encoders with skip connections, and for encoders without.

A pattern lists the lengths of dashes and gaps, and () is a solid line. The second and third pairs
are for encoders that share their colour with another encoder.
"""

SKIPS = ("skip", "skip_attention", "skip_mlp")
"""Configuration fields of an encoder that are false if it lacks skip connections."""
_NO_SKIP = re.compile(r"skip-?less|no-?skip|without-?skip", re.IGNORECASE)


class Style(NamedTuple):
    """Colour and dashes of a line.

    Attributes:
        colour: Index into `PALETTE`.
        dashes: Index of a pair of dash patterns in `DASHES`.
        is_skipless: Whether to use the second pattern of the pair, for an encoder without skip
            connections.
    """

    colour: int
    dashes: int
    is_skipless: bool

    @property
    def css(self) -> str:
        """CSS classes of the style, separated by a space."""
        return f"c{self.colour} d{self.dashes}{'s' if self.is_skipless else ''}"

    @property
    def line(self) -> Mapping[str, Any]:
        """Keyword arguments for a matplotlib line in this style."""
        lengths = DASHES[self.dashes][self.is_skipless]
        # Matplotlib measures dashes in units of the line width.
        dashes = (0, [length / 2 for length in lengths]) if lengths else "-"
        return {"color": PALETTE[self.colour], "linestyle": dashes}


def choose_styles(skipless: Mapping[str, bool]) -> dict[str, Style]:
    """Choose a colour and dashes for each encoder or training run.

    The colour of a name depends on a hash of the name, not on its position. If two names have the
    same hash colour, the second name in natural order gets an unused colour. If there are more
    names than colours, dashes distinguish names of the same colour.

    Args:
        skipless: For each name, whether the encoder lacks skip connections.
    """
    styles: dict[str, Style] = {}
    waiting, dashes = sorted(skipless, key=natural_sort_key), 0
    while waiting:
        first: dict[int, str] = {}
        for name in waiting:
            digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
            first.setdefault(digest[-1] % len(PALETTE), name)
        free = (number for number in range(len(PALETTE)) if number not in first)
        others = [name for name in waiting if name not in first.values()]
        colours = first | dict(zip(free, others, strict=False))
        for colour, name in colours.items():
            styles[name] = Style(colour, dashes, skipless[name])
        waiting = [name for name in others if name not in styles]
        dashes = min(dashes + 1, len(DASHES) - 1)
    return styles


def lacks_skips(name: str, architecture: Mapping[str, Any]) -> bool:
    """Return whether an encoder lacks skip connections, judging by its configuration or its name.

    Args:
        name: Name of the encoder or of its run.
        architecture: Configuration of the encoder, in which fields such as "skip_attention" may be
            false.
    """
    return any(architecture.get(skip) is False for skip in SKIPS) or bool(_NO_SKIP.search(name))
