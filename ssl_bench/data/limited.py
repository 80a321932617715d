"""The first try of something on few images: data of which each split gives so many, and says so."""

import hashlib
import os
from collections.abc import Sequence

from ssl_bench.data.files.readable import some_of
from ssl_bench.data.samples import Dataset, DatasetView, ImageSet


def limited_dataset(dataset: Dataset, limit: int) -> DatasetView:
    """A dataset with at most `limit` images in each split, under a name of its own."""
    name = _limited_name(dataset.name, limit)
    return DatasetView(dataset, lambda _, images: limited(images, limit), name)


def limited(images: ImageSet, limit: int) -> ImageSet:
    """At most `limit` images, spread evenly over a split that may be sorted by class.

    They are named "voc2012-limit64", so that no table shows a score of them beside one of all.
    """
    count = min(limit, len(images))
    kept = [index * len(images) // count for index in range(count)]
    return some_of(images, _limited_name(images.name, limit), kept)


def sampled(ids: Sequence[str], count: int) -> tuple[str, ...]:
    """So many ids from all over a set, in its order; few change when other images come or go."""
    by_digest = sorted(ids, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
    chosen = set(by_digest[:count])
    return tuple(image_id for image_id in ids if image_id in chosen)


def sampled_numbers(ids: Sequence[str], count: int) -> list[int]:
    """Where in a set the ids of `sampled` stand."""
    chosen = set(sampled(ids, count))
    return [number for number, image_id in enumerate(ids) if image_id in chosen]


def _limited_name(name: str, limit: int) -> str:
    return f"{name}-limit{limit}"
