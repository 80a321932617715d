"""Whether a dataset is there, whole and readable."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ssl_bench.data.files.manifests import Shown
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.errors import DataError

_ROLES: Mapping[str, tuple[str, ...]] = {
    "train": ("segmentation", "classification"),
    "val": ("segmentation", "classification", "correspondence", "saliency"),
    "discovery": ("discovery",),
}


@dataclass(frozen=True)
class SplitState:
    """What a split of a dataset was found to be.

    Attributes:
        role: `train`, `val`, `discovery`, or `images` where there is nothing else.
        split: As it is called on disk.
        images: How many there are; 0 where the split cannot be opened.
        published: How many there should be, None if nobody says.
        read: Images that were decoded with all that belongs to them.
        problems: One line each.
    """

    role: str
    split: str
    images: int
    published: int | None
    read: int
    problems: tuple[str, ...]


def check_dataset(
    dataset: Dataset, counts: Mapping[str, int], *, sample: int, shown: Shown
) -> Iterator[SplitState]:
    """Open every split, count it, and decode a random sample of it, always the same one.

    Args:
        dataset: Constructed, not opened.
        counts: Images by role, as published.
        sample: Images of each split to decode; all that can be, if there are fewer.
        shown: Puts a progress bar around what is iterated.
    """
    roles = [role for role, kinds in _ROLES.items() if dataset.supports.intersection(kinds)]
    for role in roles or ["images"]:
        opened: Callable[[], ImageSet] = getattr(dataset, role)
        yield _state(role, opened, counts.get(role), sample, shown)


def _state(
    role: str, opened: Callable[[], ImageSet], published: int | None, sample: int, shown: Shown
) -> SplitState:
    try:
        images = opened()
    except DataError as error:
        return SplitState(role, "", 0, published, 0, (str(error),))
    problems = []
    if published not in (None, len(images)):
        problems.append(f"{len(images):,} images, published are {published:,}")
    chosen = sorted(random.Random(0).sample(range(len(images)), min(sample, len(images))))
    read = 0
    for index in shown([str(number) for number in chosen], f"reading {images.split}", len(chosen)):
        try:
            images[int(index)]
            read += 1
        except DataError as error:
            problems.append(str(error))
    return SplitState(role, images.split, len(images), published, read, tuple(problems))
