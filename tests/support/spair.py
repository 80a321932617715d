"""Create a small dataset in the layout of SPair-71k."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

# Width and height in pixels.
SOURCE_SIZE, TARGET_SIZE = (48, 32), (40, 60)


@dataclass(frozen=True)
class WrittenPair:
    """An image pair with keypoints on both images."""

    number: int
    source: str
    target: str
    category: str
    # As (x, y) in pixels of the first image.
    points: tuple[tuple[int, int], ...] = ((12, 8), (24, 16), (36, 24))

    @property
    def line(self) -> str:
        return f"{self.number:06d}-{self.source}-{self.target}:{self.category}"

    def annotation(self, **changed: Any) -> dict[str, Any]:
        scale = np.divide(TARGET_SIZE, SOURCE_SIZE)
        target = np.rint(np.array(self.points) * scale).astype(int).tolist()
        return {
            "pair_id": self.number,
            "filename": self.line,
            "src_imname": f"{self.source}.jpg",
            "trg_imname": f"{self.target}.jpg",
            "src_imsize": [*SOURCE_SIZE, 3],
            "trg_imsize": [*TARGET_SIZE, 3],
            "src_bndbox": [4, 4, 44, 28],
            "trg_bndbox": [5, 8, 30, 58],
            "category": self.category,
            "src_kps": [list(point) for point in self.points],
            "trg_kps": target,
            "kps_ids": [str(number) for number in range(len(self.points))],
            "mirror": 0,
            "viewpoint_variation": 0,
            "scale_variation": 1,
            "truncation": 0,
            "occlusion": 2,
            **changed,
        }


PAIRS = (
    WrittenPair(1, "2008_000001", "2008_000002", "cat"),
    WrittenPair(2, "2008_000003", "2008_000002", "cat", ((6, 6), (30, 20))),
    WrittenPair(3, "2009_000004", "2009_000005", "bird", ((20, 10),)),
)


def spair(root: Path, pairs: tuple[WrittenPair, ...] = PAIRS) -> Path:
    """Write a small test split in the layout of SPair-71k, and return its folder."""
    base = root / "SPair-71k"
    (base / "PairAnnotation/test").mkdir(parents=True)
    (base / "Layout/large").mkdir(parents=True)
    (base / "Layout/large/test.txt").write_text("".join(f"{pair.line}\n" for pair in pairs))
    for pair in pairs:
        write_annotation(base, pair)
        for name, size in ((pair.source, SOURCE_SIZE), (pair.target, TARGET_SIZE)):
            path = base / f"JPEGImages/{pair.category}/{name}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            _scene(pair.category).resize(size).save(path, quality=95)
    return base


def write_annotation(base: Path, pair: WrittenPair, **changed: Any) -> Path:
    path = base / f"PairAnnotation/test/{pair.line}.json"
    path.write_text(json.dumps(pair.annotation(**changed)))
    return path


def _scene(category: str) -> Image.Image:
    noise = np.random.default_rng(len(category)).integers(0, 255, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(noise)
