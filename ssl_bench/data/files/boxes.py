"""The one gate of boxes: whatever file they come from, they are numbers, in order, in the image."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from ssl_bench.errors import DataError

_DECIMAL = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
# Of pixels; what is larger is none, and would not stay what it is in computations.
_MOST = 2.0**31


def number(text: str) -> float:
    """The decimal number that a text is: no `nan`, no `1e400`, no `1_7`.

    Raises:
        ValueError: it is none.
    """
    if not _DECIMAL.fullmatch(text) or abs(float(text)) >= _MOST:
        raise ValueError(f"expected a number of pixels, got {text!r}")
    return float(text)


def whole(value: object, what: str) -> int:
    """An integer of JSON, which `1.0`, `true` and `"1"` are not.

    Raises:
        ValueError: it is none.
    """
    if type(value) is not int or abs(value) >= 2**63:
        raise ValueError(f"expected a whole number as {what}, got {value!r}")
    return value


def numbers(value: object, count: int) -> list[float]:
    """So many numbers of JSON, all finite; texts, booleans and null are none.

    Raises:
        ValueError: they are not.
    """
    if not (
        isinstance(value, (list, tuple))
        and len(value) == count
        and all(type(one) in (int, float) and abs(one) < _MOST for one in value)
    ):
        raise ValueError(f"expected {count} numbers of pixels, got {value!r}")
    return [float(one) for one in value]


def checked_boxes(
    corners: Sequence[object] | np.ndarray,
    file: Path,
    names: Sequence[object],
    size: tuple[int, int] | None = None,
    *,
    stated: tuple[float, float] | None = None,
    may_be_flat: bool = False,
) -> Float64[np.ndarray, "boxes 4"]:
    """Boxes, once they are known to be some: (x0, y0, x1, y1), far edges exclusive.

    A box has to have a part of the image in it, and no edge further outside than the image is
    large. What lies outside by less stays as it is, as in the field's own code.

    Args:
        corners: Four numbers a box.
        file: That they are from.
        names: Of the objects, for messages.
        size: Height and width of the image as it was decoded; before, nothing is asked about it.
        stated: Height and width that the file gives the image, if it does.
        may_be_flat: Boxes without height or width are kept. COCO has some, rounding makes more,
            and LOST, whose numbers these are compared with, counts them: nothing hits them.

    Raises:
        DataError: with the file and the first object that is none.
    """
    rows = corners.tolist() if isinstance(corners, np.ndarray) else corners
    if size is not None and stated not in (None, size):
        assert stated is not None
        raise DataError(
            f"{file} is about an image of {stated[1]:g} x {stated[0]:g}, which is {size[1]} x "
            f"{size[0]}; take both as published"
        )
    found = []
    for name, row in zip(names, rows, strict=True):
        try:
            box = numbers(row, 4)
            for axis, low, high in (("x", box[0], box[2]), ("y", box[1], box[3])):
                if low > high or (low == high and not may_be_flat):
                    raise ValueError(
                        f"the box {box} begins at {axis} = {low:g} and ends at {high:g}"
                    )
            sides = () if size is None else zip("xy", box[:2], box[2:], size[::-1], strict=True)
            for axis, low, high, side in sides:
                # A flat box may lie on the edge of its image.
                meets = low <= side and high >= 0 if may_be_flat else low < side and high > 0
                if not meets or low < -side or high > 2 * side:
                    raise ValueError(f"the box {box} is not in its image, {axis} from 0 to {side}")
        except ValueError as error:
            raise DataError(f"{file}, object {name}: {error}; mend or fetch it again") from error
        found.append(box)
    return np.array(found, np.float64).reshape(-1, 4)
