"""MNIST's published idx files as pictures in class folders, which pretraining reads.

    python -m tests.benchmarks.mnist_pictures IDX DIR

makes DIR/{train,test}/DIGIT/NUMBER.png, 70,000 files, a minute.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

_PARTS = {"train": "train", "test": "t10k"}


def read_idx(path: Path) -> UInt8[np.ndarray, "..."]:
    """A gzipped idx file of bytes: two zeros, the type, the number of axes, their lengths."""
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
