"""Short names for the ends of curves, and heights at which they do not touch."""

import re
from collections.abc import Sequence

LONGEST = 16
_WORDS = re.compile(r"[^\s_/.\-]+")


def short_names(names: Sequence[str]) -> tuple[str, ...]:
    """What each name has that not all of them have, at most `LONGEST` characters.

    Such as "skip" and "skipless" of vit_tiny_skip and vit_tiny_skipless. Where that is too long its
    words are cut as little as lets all names fit and differ; if nothing does, the names are.
    """
    words = [_WORDS.findall(name) for name in names]
    shared = set.intersection(*map(set, words)) if len(names) > 1 else set()
    own = [[word for word in those if word not in shared] for those in words]
    for most in range(LONGEST, 0, -1):
        short = [" ".join(word[:most] for word in those) for those in own]
        if all(0 < len(one) <= LONGEST for one in short) and len(set(short)) == len(names):
            return tuple(short)
    return tuple(one if len(one) <= LONGEST else one[: LONGEST - 1] + "…" for one in names)


def spread(heights: Sequence[float], gap: float, low: float, high: float) -> tuple[float, ...]:
    """Heights that are at least `gap` apart, in the same order, as near as one pass finds.

    Args:
        heights: Where the labels belong, downwards.
        gap: Height of a label.
        low: Least height; too many labels go below `high`.
        high: Largest height.
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = list(heights)
    reach = low
    for i in order:
        placed[i] = reach = max(placed[i], reach)
        reach += gap
    # What went too far down pushes the others back up.
    reach = high
    for i in reversed(order):
        placed[i] = max(low, min(placed[i], reach))
        reach = placed[i] - gap
    return tuple(round(height, 1) for height in placed)
