"""What an answer scores that looks at no image: a score means nothing without it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_DETAIL = "baseline"


@dataclass(frozen=True)
class Baseline:
    """An answer that looks at no image, such as the same for all, and its score.

    Attributes:
        answer: In words, such as "centre box".
        value: Of the metric that it stands beside, on the same images, in the same unit.
    """

    answer: str
    value: float

    def as_details(self) -> dict[str, Any]:
        """As records keep it."""
        return {_DETAIL: asdict(self)}

    @classmethod
    def of(cls, details: Mapping[str, Any]) -> "Baseline | None":
        """What `as_details` was put among; None where nothing was, as in older records."""
        told = details.get(_DETAIL)
        return None if told is None else cls(**told)

    @classmethod
    def most_frequent(cls, counts: Sequence[int], top: int) -> "Baseline":
        """Naming the classes that most of the scored images are of, the same ones for each.

        Args:
            counts: Images of each class, at least one in all.
            top: How many classes may be named.
        """
        share = 100.0 * sum(sorted(counts, reverse=True)[:top]) / sum(counts)
        return cls("most frequent class" if top == 1 else f"{top} most frequent classes", share)
