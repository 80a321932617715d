"""The keys that belong to no component, and a dataset in the form in which they ask for it.

Its files read in another way, some of its images, corrupted, opened once.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal

from omegaconf import DictConfig

from ssl_bench.composition.compose import value_of
from ssl_bench.composition.fields import Bits, Count, Place, Seed, require
from ssl_bench.data.corruptions import KEY as CORRUPT
from ssl_bench.data.corruptions import Corruption, corrupted_dataset
from ssl_bench.data.files.fingerprints import FingerprintKind, ReadOptions, dataset_read_as
from ssl_bench.data.files.readable import some_of
from ssl_bench.data.samples import Dataset, DatasetView, ImageSet

DType = Literal["float32", "float16", "bfloat16"]
"""As torch names them."""
Limit = Count | None
SHARED: Mapping[str, Any] = {
    "data.root": Place,
    "data.fingerprint": FingerprintKind,
    "data.bits": Bits,
    "data.limit": Limit,
    "data.allow_overlap": bool,
    CORRUPT: str | None,
    "seed": Seed,
    "dtype": DType,
}
"""What the keys take that belong to no component."""


def shared_values(config: DictConfig) -> dict[str, Any]:
    """What the keys of `SHARED` hold that are composed; a command on data alone has only those."""
    values = {key: value_of(config, key) for key in SHARED if key.split(".")[0] in config}
    for key, value in values.items():
        require(key, SHARED[key], value)
    return values


def as_asked(dataset: Dataset, values: Mapping[str, Any]) -> Dataset:
    """A dataset, its files read in one of several ways, perhaps a part of it, perhaps corrupted.

    The values are those that `shared_values` found.
    """
    found: Dataset = dataset_read_as(
        dataset, ReadOptions(values["data.fingerprint"], values["data.bits"])
    )
    if values["data.limit"]:
        found = limited_dataset(found, values["data.limit"])
    corrupt = values.get(CORRUPT)
    return corrupted_dataset(found, Corruption.of(corrupt)) if corrupt else found


class OpenedOnce(DatasetView):
    """A dataset as it was when each of its sets was asked for first; of that time are all answers.

    Opening a set looks at all of its files.
    """

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset, lambda _, images: images)
        self._opened: dict[str, ImageSet] = {}

    def _set(self, role: str) -> ImageSet:
        if role not in self._opened:
            self._opened[role] = super()._set(role)
        return self._opened[role]


class ListedOnce(OpenedOnce):
    """A dataset that is listed once: tasks and passes of a command get the same images.

    What its files hold is asked anew by each of them.
    """

    def _set(self, role: str) -> ImageSet:
        return _unread(super()._set(role))


def _unread(images: ImageSet) -> ImageSet:
    """The same images, nothing of their files remembered; those of other packages as they are."""
    if not is_dataclass(images) or isinstance(images, type):
        return images
    parts = {one.name: getattr(images, one.name) for one in fields(images)}
    return replace(images, **{k: _unread(v) for k, v in parts.items() if isinstance(v, ImageSet)})


def limited_dataset(dataset: Dataset, limit: int) -> DatasetView:
    """A dataset with at most `limit` images in each split, under a name of its own."""
    name = f"{dataset.name}-limit{limit}"
    return DatasetView(dataset, lambda _, images: limited(images, limit), name)


def limited(images: ImageSet, limit: int) -> ImageSet:
    """At most `limit` images, spread evenly over a split that may be sorted by class.

    They are named "voc2012-limit64", so that no table shows a score of them beside one of all.
    """
    count = min(limit, len(images))
    kept = [index * len(images) // count for index in range(count)]
    return some_of(images, f"{images.name}-limit{limit}", kept)


def sampled(ids: Sequence[str], count: int) -> tuple[str, ...]:
    """So many ids from all over a set, in its order; few change when other images come or go."""
    by_digest = sorted(ids, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
    chosen = set(by_digest[:count])
    return tuple(image_id for image_id in ids if image_id in chosen)


def sampled_numbers(ids: Sequence[str], count: int) -> list[int]:
    """Where in a set the ids of `sampled` stand."""
    chosen = set(sampled(ids, count))
    return [number for number, image_id in enumerate(ids) if image_id in chosen]
