"""What is asked where few training images of each class are drawn: known before they are."""

from collections.abc import Sequence

from ssl_bench.composition.fields import Count, require_some
from ssl_bench.errors import ConfigurationError

AskedShots = Count | Sequence[Count] | None
"""Images of each class, one number or several; None takes all there are."""


def shots_of(asked: int | Sequence[int] | None) -> tuple[int, ...]:
    """Ascending, none of them twice; nothing where all images are taken.

    Raises:
        ConfigurationError: the list is empty.
    """
    if asked is None:
        return ()
    if isinstance(asked, int):
        return (asked,)
    require_some("probe.shots", asked)
    return tuple(sorted(set(asked)))


def require_one_way_to_draw(asked: int | Sequence[int] | None, train_images: int | None) -> None:
    """Refuse shots of each class beside a number of images of all classes.

    Raises:
        ConfigurationError: both are asked for.
    """
    if shots_of(asked) and train_images is not None:
        raise ConfigurationError(
            f"probe.train_images must be null where probe.shots draws images of each class, got "
            f"{train_images}; leave one of them out"
        )


def shot_metric(metric: str, count: int) -> str:
    """Such as "top1_k1_5shot"."""
    return f"{metric}_{count}shot"
