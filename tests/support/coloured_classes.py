"""Pictures of six classes that differ by colour, as class folders."""

from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = ((250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 0), (0, 250, 250), (250, 0, 250))


def coloured_classes(root: Path, *, train: int = 5, val: int = 2, noise: int = 90) -> Path:
    """So many pictures of each class; with more noise they are harder to tell apart."""
    generator = np.random.default_rng(0)
    for name, colour in enumerate(COLOURS):
        for split, count in (("train", train), ("val", val)):
            folder = root / split / f"class{name}"
            folder.mkdir(parents=True)
            for number in range(count):
                around = generator.integers(-noise, noise, (20, 26, 3))
                pixels = np.clip(np.array(colour) + around, 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root
