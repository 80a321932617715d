"""Datasets whose scored images are corrupted; what is fitted sees them as they are."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ssl_bench.data.corruptions import Corruption, corrupted
from ssl_bench.data.files.fingerprints import extended
from ssl_bench.data.files.readable import RemainingImages
from ssl_bench.data.samples import Dataset, DatasetView, ImageSet, Pair, Sample

# Count up when the same corruption gives other pixels.
_VERSION = 2


@dataclass(frozen=True)
class CorruptedImages:
    """An `ImageSet` after a corruption; masks, boxes, points and labels stay.

    It has a name and a fingerprint of its own, so that no table and no file of features holds it
    for the images as they are.
    """

    images: ImageSet
    corruption: Corruption

    @property
    def name(self) -> str:
        return _corrupted_name(self.images.name, self.corruption)

    @property
    def split(self) -> str:
        return self.images.split

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.images.class_names

    @property
    def ids(self) -> tuple[str, ...]:
        return self.images.ids

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        sample = self.images[index]
        if sample.pair is None:
            image_id, pair = sample.image_id, None
        else:
            image_id, pair = sample.pair.image_ids[0], self._corrupted_pair(sample.pair)
        image = corrupted(sample.image, self.corruption, image_id)
        return replace(sample, image=image, pair=pair)

    def _corrupted_pair(self, pair: Pair) -> Pair:
        return replace(pair, image=corrupted(pair.image, self.corruption, pair.image_ids[1]))

    def fingerprint(self) -> str:
        """Another one than that of the images as they are, and for every corruption."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return extended(self.images.fingerprint(), ("corrupted", _VERSION, str(self.corruption)))


class CorruptedDataset(DatasetView):
    """A dataset of which all that is scored is corrupted, and training images are not."""

    def __init__(self, dataset: Dataset, corruption: Corruption) -> None:
        super().__init__(dataset)
        self._corruption = corruption

    @property
    def name(self) -> str:
        return _corrupted_name(self._dataset.name, self._corruption)

    def _given(self, role: str, images: ImageSet) -> ImageSet:
        return images if role == "train" else CorruptedImages(images, self._corruption)


def corruption_of(images: ImageSet) -> Corruption | None:
    """What a set of images went through, if anything."""
    if isinstance(images, RemainingImages):
        return corruption_of(images.images)
    return images.corruption if isinstance(images, CorruptedImages) else None


def as_settings(images: ImageSet) -> Mapping[str, Any] | None:
    """What a record says of the corruption of its images, and of what images they are.

    Cost: that of a fingerprint.
    """
    corruption = corruption_of(images)
    if corruption is None:
        return None
    clean = _clean(images)
    return {
        "name": corruption.name,
        "severity": corruption.severity,
        "dataset": clean.name,
        "fingerprint": clean.fingerprint(),
    }


def _clean(images: ImageSet) -> ImageSet:
    if isinstance(images, RemainingImages):
        return replace(images, images=_clean(images.images))
    return images.images if isinstance(images, CorruptedImages) else images


def _corrupted_name(name: str, corruption: Corruption) -> str:
    # No dash before it: what follows a dash are parts of a dataset.
    return f"{name}+{corruption.name}-{corruption.severity}"
