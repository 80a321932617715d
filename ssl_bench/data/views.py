"""The forms in which a dataset can be asked for, one on top of the other."""

from ssl_bench.data.corrupted import CorruptedDataset
from ssl_bench.data.corruptions.named import Corruption
from ssl_bench.data.files.fingerprints import FingerprintKind
from ssl_bench.data.files.known_by_stat import DatasetByStat
from ssl_bench.data.limited import LimitedDataset
from ssl_bench.data.samples import Dataset


def as_asked(
    dataset: Dataset,
    *,
    fingerprint: FingerprintKind,
    limit: int | None,
    corrupt: str | None,
) -> Dataset:
    """A dataset, its files known in one of two ways, perhaps a part of it, perhaps corrupted.

    Args:
        dataset: As its adapter gives it.
        fingerprint: What its files are known by.
        limit: At most so many images of each split.
        corrupt: What `Corruption.of` takes.

    Raises:
        ConfigurationError: there is no such corruption.
    """
    found = DatasetByStat(dataset) if fingerprint == "stat" else dataset
    found = LimitedDataset(found, limit) if limit else found
    return CorruptedDataset(found, Corruption.of(corrupt)) if corrupt else found
