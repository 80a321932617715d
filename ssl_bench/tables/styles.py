"""Choose the colour and the dashes that an encoder has in every figure and report."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ssl_bench.system.files import natural_sort_key

PALETTE = (
    *("#b6250b", "#dd6000", "#00916a", "#264c5b"),
    *("#0072b2", "#421e66", "#8177ff", "#502600"),
)
"""Colours that also differ for readers with deuteranopia or protanopia, on a white page."""
DASHES = (((), (6, 4)), ((12, 3, 2, 3), (2, 3)), ((16, 4), (9, 3, 2, 3, 2, 3)))
"""Lengths of dashes and gaps of encoders with skip connections, and of those without. The second
and third pair are for encoders that share a colour with another one, () is a solid line."""

SKIPS = ("skip", "skip_attention", "skip_mlp")
"""Settings of an encoder that are false if skip connections are missing."""
_NO_SKIP = re.compile(r"skip-?less|no-?skip|without-?skip", re.IGNORECASE)


class Style(NamedTuple):
    """Indices into `PALETTE` and `DASHES`, and which dashes of the pair are drawn."""

    colour: int
    dashes: int
    is_skipless: bool

    @property
    def css(self) -> str:
        """CSS classes, separated by a space."""
        return f"c{self.colour} d{self.dashes}{'s' if self.is_skipless else ''}"

    @property
    def line(self) -> Mapping[str, Any]:
        """Arguments of a matplotlib line."""
        lengths = DASHES[self.dashes][self.is_skipless]
        # Matplotlib measures dashes in units of the line width.
        dashes = (0, [length / 2 for length in lengths]) if lengths else "-"
        return {"color": PALETTE[self.colour], "linestyle": dashes}


def choose_styles(skipless: Mapping[str, bool]) -> dict[str, Style]:
    """Return a style for each name of an encoder or run, given whether it lacks skip connections.

    The name decides the colour, whatever its position. If two names have the same colour, the
    second in natural order gets a free one. Dashes tell apart more names than there are colours.
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
    """Return whether an architecture or the name says that skip connections are missing."""
    return any(architecture.get(skip) is False for skip in SKIPS) or bool(_NO_SKIP.search(name))
