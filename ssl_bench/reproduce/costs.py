"""What a table takes: gigabytes to download."""

from collections.abc import Iterable

from ssl_bench.data.sources import SOURCES

TRAINING_GB = {
    "imagenet1k": 154.6,
    "tiny_imagenet": 0.25,
    "cifar10": 0.17,
    "cifar100": 0.17,
    "svhn": 0.25,
    "mnist": 0.012,
    "copying": 0.0,
}
"""Gigabytes of the published archives that runs train on: the training and validation images of
ILSVRC 2012 (147.9 and 6.7), tiny-imagenet-200.zip, cifar-10-python.tar.gz, cifar-100-python.tar.gz,
SVHN's train_32x32.mat and test_32x32.mat, MNIST's four files."""


def gigabytes(name: str) -> float | None:
    """Of the archives of a dataset or of images to train on; None for what is one's own."""
    if name in TRAINING_GB:
        return TRAINING_GB[name]
    source = SOURCES.get(name)
    return source.size / 1e9 if source and source.size else None


def said_gigabytes(names: Iterable[str]) -> str:
    """Each dataset with its size, and the sum."""
    sizes = {name: gigabytes(name) for name in names}
    words = [f"{name} {'?' if size is None else f'{size:.2g} GB'}" for name, size in sizes.items()]
    total = sum(size for size in sizes.values() if size is not None)
    return f"{', '.join(words)}; {total:.3g} GB to download" if words else "none"
