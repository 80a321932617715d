"""The forms in which a dataset can be asked for, one on top of the other."""

from ssl_bench.data.corrupted import CorruptedDataset
from ssl_bench.data.corruptions import Corruption
from ssl_bench.data.files.fingerprints import FingerprintKind
from ssl_bench.data.files.read_options import DatasetReadAs, ReadOptions
from ssl_bench.data.limited import LimitedDataset
from ssl_bench.data.samples import Dataset


def as_asked(
    dataset: Dataset,
    *,
    fingerprint: FingerprintKind,
    bits: int | None,
    limit: int | None,
    corrupt: str | None,
) -> Dataset:
    """A dataset, its files read in one of several ways, perhaps a part of it, perhaps corrupted.

    Args:
        dataset: As its adapter gives it.
        fingerprint: What its files are known by.
        bits: Those that its pictures of 16 bits use.
        limit: At most so many images of each split.
        corrupt: What `Corruption.of` takes.

    Raises:
        ConfigurationError: there is no such corruption.
    """
    found = DatasetReadAs(dataset, ReadOptions(fingerprint, bits))
    found = LimitedDataset(found, limit) if limit else found
    return CorruptedDataset(found, Corruption.of(corrupt)) if corrupt else found
