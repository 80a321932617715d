"""Convert MNIST's published idx files to images in class folders, for pretraining.

    python -m tests.benchmarks.mnist_pictures IDX DIR

It writes 70,000 files DIR/{train,test}/DIGIT/NUMBER.png in about a minute.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

_PARTS = {"train": "train", "test": "t10k"}


def read_idx(path: Path) -> UInt8[np.ndarray, "..."]:
    """Read a gzipped idx file: two zero bytes, data type, number of axes, axis lengths, data."""
    content = gzip.decompress(path.read_bytes())
    kind, num_axes = content[2], content[3]
    if content[:2] != b"\0\0" or kind != 8:
        raise ValueError(f"{path} is no idx file of bytes")
    start = 4 + 4 * num_axes
    shape = np.frombuffer(content[4:start], dtype=">u4")
    return np.frombuffer(content[start:], dtype=np.uint8).reshape(tuple(shape))


def write_pictures(idx: Path, out: Path) -> None:
    for split, name in _PARTS.items():
        images = read_idx(idx / f"{name}-images-idx3-ubyte.gz")
        labels = read_idx(idx / f"{name}-labels-idx1-ubyte.gz")
        for digit in range(10):
            (out / split / str(digit)).mkdir(parents=True, exist_ok=True)
        for number, (image, digit) in enumerate(zip(images, labels, strict=True)):
            Image.fromarray(image).save(out / split / str(digit) / f"{number:05}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("idx", type=Path, help="folder of the four published .gz files")
    parser.add_argument("out", type=Path, metavar="DIR")
    options = parser.parse_args()
    write_pictures(options.idx, options.out)


if __name__ == "__main__":
    main()
