"""What the scores of an encoder say, in a sentence a task.

Such as "segmentation on voc2012: best at block 5, mIoU 20.5; nine of the other eleven blocks
cannot be told from it on 30 images".
"""

import math
import re
from collections.abc import Sequence

from ssl_bench.report.comparing import side_of
from ssl_bench.report.model import Line, Panel, Point
from ssl_bench.results import Record, ResultStore
from ssl_bench.tables.pairs.comparison import difference

_NUMBERS = (
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve",
)  # fmt: skip
_METRICS = {
    r"miou.*": "mIoU",
    r"corloc": "CorLoc",
    r"ap(\d*)": r"AP\1",
    r"ar(\d+)": r"AR\1",
    r"top(\d).*": r"top-\1 accuracy",
    r"pck_(.*)": r"PCK@\1",
    r"ami": "AMI",
    r"nmi": "NMI",
    r"rankme": "RankMe",
    r"degenerate": "degenerate graphs",
}


def answer(panel: Panel, line: Line, told: set[int] | None, *, protocol: bool = False) -> str:
    """Such as "segmentation on voc2012: best at block 5, mIoU 20.5; all others are lower".

    Args:
        panel: The task's.
        line: The encoder's.
        told: Blocks whose images tell them from the best one; None where nothing is known of it.
        protocol: Say it, as the same was asked in others.
    """
    task = f"{panel.task}, {panel.protocol}," if protocol else panel.task
    return f"{task} on {panel.dataset}: {_found(panel, line, told)}"


def _found(panel: Panel, line: Line, told: set[int] | None) -> str:
    known = [point for point in line.points if not math.isnan(point.value)]
    metric = _metric(panel.metric)
    if not known:
        return f"no block has a value of {metric}"
    if not panel.is_ranked:
        low = min(known, key=lambda point: point.value)
        high = max(known, key=lambda point: point.value)
        metric = f"{metric} of {panel.facet}"
        if low.value == high.value:
            return f"{metric} {_value(low)} at {_blocks([point.layer for point in known])}"
        return (
            f"{metric} from {_value(low)} at block {low.layer} to {_value(high)} at block "
            f"{high.layer}, where more is not better"
        )
    if len(known) == 1:
        text = f"{metric} {_value(known[0])} at block {known[0].layer}, the only one with a value"
        return text + _beaten(panel, known[0])
    if not line.bests:
        text = f"all {_count(len(known))} blocks are alike, {metric} {_value(known[0])}"
        return text + _beaten(panel, known[0])
    best, layers = line.bests[0], [point.layer for point in line.bests]
    others = len(known) - len(layers)
    where, number = _blocks(layers), panel.record.num_images
    it = "it" if len(layers) == 1 else "them"
    untold = None if told is None else others - len(told)
    if untold == others:
        which = f"none of the other {_count(others)}" if others > 1 else "not even the other one"
        text = (
            f"no block stands out; {metric} is highest at {where}, {_value(best)}, but {which} can "
            f"be told from {it} on {number} images"
        )
    else:
        text = f"best at {where}, {metric} {_value(best)}"
        if untold == 0:
            text += f"; {'the other is' if others == 1 else 'all others are'} lower on the same "
            text += f"{number} images"
        elif untold:
            text += f"; {_count(untold)} of the other {_count(others)} blocks cannot be told from "
            text += f"{it} on {number} images"
    return text + _beaten(panel, best)


def told_apart(
    store: ResultStore, records: Sequence[Record], panel: Panel, line: Line, *, paired: bool
) -> set[int] | None:
    """Blocks that are lower than the best one: by pairs of images, or else by their intervals.

    Of several seeds the lowest is paired. None where there are neither.
    """
    best = line.best
    if best is None:
        return None
    side = side_of(store, records, panel, line.checkpoint) if paired else None
    if side is not None and best.layer in side.scored.blocks:
        blocks = side.scored.blocks
        return {
            layer
            for layer, estimate in blocks.items()
            if difference("", blocks[best.layer], estimate, ((), ())).is_clear
        }
    low = best.entry.low
    ends = {point.layer: point.entry.high for point in line.points}
    if low is None or any(high is None for high in ends.values()):
        return None
    return {layer for layer, high in ends.items() if high is not None and high < low}


def _beaten(panel: Panel, point: Point) -> str:
    """The answers without a look at the images that a score does not beat."""
    found = [name for name, score in panel.baselines if point.value <= score]
    return f"; that is not above {' and '.join(found)}" if found else ""


def _metric(name: str) -> str:
    for pattern, words in _METRICS.items():
        if re.fullmatch(pattern, name):
            return re.sub(pattern, words, name, count=1)
    return name.replace("_", " ")


def _value(point: Point) -> str:
    return point.parts[0]


def _count(number: int) -> str:
    return _NUMBERS[number] if number < len(_NUMBERS) else str(number)


def _blocks(layers: Sequence[int]) -> str:
    *some, last = map(str, layers)
    return f"blocks {', '.join(some)} and {last}" if some else f"block {last}"
