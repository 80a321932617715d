"""Convert the published MNIST files to images in class folders.

    python -m tests.benchmarks.mnist_pictures IDX DIR

IDX is the folder of the downloaded files. The command writes the images as
DIR/{train,test}/DIGIT/NUMBER.png.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image


def read_idx(path: Path) -> UInt8[np.ndarray, "..."]:
    """Read a gzipped idx file of MNIST as an array."""
    # Two zero bytes, the data type, the number of axes, the length of each axis, and the data.
    content = gzip.decompress(path.read_bytes())
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an idx file of bytes; download it again")
    start = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:start], dtype=">u4")
    return np.frombuffer(content[start:], dtype=np.uint8).reshape(tuple(shape))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("idx", type=Path, help="folder of the four published .gz files")
    parser.add_argument("out", type=Path, metavar="DIR")
    options = parser.parse_args()
    for split, name in (("train", "train"), ("test", "t10k")):
        images = read_idx(options.idx / f"{name}-images-idx3-ubyte.gz")
        labels = read_idx(options.idx / f"{name}-labels-idx1-ubyte.gz")
        for digit in range(10):
            (options.out / split / str(digit)).mkdir(parents=True, exist_ok=True)
        for number, (image, digit) in enumerate(zip(images, labels, strict=True)):
            Image.fromarray(image).save(options.out / split / str(digit) / f"{number:05}.png")


if __name__ == "__main__":
    main()
