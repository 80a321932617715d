"""Types are checked where functions begin and end, but for those that other functions make.

A function inside another is made anew at each call; to prepare its checks took a third of a step.
"""

from typing import Any

from beartype import beartype


def checked(function: Any, *options: Any, **more: Any) -> Any:
    is_inside = "<locals>" in function.__qualname__
    return function if is_inside else beartype(function, *options, **more)
