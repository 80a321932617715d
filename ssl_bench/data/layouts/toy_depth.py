"""Generated scenes with exact depth: a floor, a wall, and objects that stand on the floor."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Float64, UInt8, UInt16
from PIL import Image

from ssl_bench.data.files.file_sets import FileImageSet
from ssl_bench.data.layouts.depth_folders import DepthFolders, DepthImageSet
from ssl_bench.data.layouts.toy import SIZES, GeneratedDataset, Painter

_PIXELS_PER_METRE = 60
_MILLIMETRES = 1000
_SPLITS = ("train", "val")

Map = Float64[np.ndarray, "height width"]


class RoomPainter(Painter):
    """Generator of images of rooms, with the same textures and photographs as `Painter`.

    The camera is one to two metres above a horizontal floor and looks at a wall. One to three
    boards stand upright on the floor and face the camera. Distant surfaces are darker.
    """

    def paint_room(
        self, index: int
    ) -> tuple[UInt8[np.ndarray, "height width 3"], UInt16[np.ndarray, "height width"]]:
        """Return the image of a room, and the depth of each pixel in millimetres.

        The room depends on the split, the seed and `index`, which is its number in the split.
        """
        rng = np.random.default_rng([self.seed, _SPLITS.index(self.split), index])
        height, width = SIZES[rng.integers(len(SIZES))]
        focal, horizon = 0.9 * max(height, width), height * rng.uniform(0.3, 0.5)
        camera, wall = rng.uniform(1, 2), rng.uniform(3.5, 9)
        right = np.arange(width) + 0.5 - width / 2
        down = (np.arange(height) + 0.5 - horizon)[:, None]

        # Rows below the horizon show the floor, unless the wall is nearer.
        floor = focal * camera / np.maximum(down, 1e-9)
        depth = np.broadcast_to(np.minimum(floor, wall), (height, width)).copy()
        x, y = right * depth / focal, down * depth / focal
        ground = _take_texture(rng, self._textures[rng.integers(len(self._textures))], depth, x)
        photograph = self._backgrounds[rng.integers(len(self._backgrounds))]
        is_wall = (depth == wall)[..., None]
        pixels = np.where(is_wall, _take_texture(rng, photograph, y, x), ground)

        distances = rng.uniform(0.25 * wall, 0.9 * wall, size=rng.integers(1, 4))
        for distance in sorted(distances, reverse=True):
            x = right * distance / focal - rng.uniform(-0.4, 0.4) * width * distance / focal
            above = camera - down * distance / focal
            half_width, half_height = rng.uniform(0.2, 0.5), rng.uniform(0.3, 0.7)
            inside = np.abs(x / half_width) ** 3 + np.abs(above / half_height - 1) ** 3 < 1
            source = self._textures[rng.integers(len(self._textures))]
            texture = _take_texture(rng, source, *np.broadcast_arrays(above, x))
            pixels = np.where(inside[..., None], texture, pixels)
            depth[inside] = distance
        lit = pixels * (1.2 / (1 + (depth / 9) ** 2))[..., None]
        millimetres = np.rint(depth * _MILLIMETRES).astype(np.uint16)
        return lit.round().clip(0, 255).astype(np.uint8), millimetres


def _take_texture(
    rng: np.random.Generator, source: Float32[np.ndarray, "_ _ 3"], rows: Map, cols: Map
) -> Float64[np.ndarray, "height width 3"]:
    """Sample the colours of a texture, with a random offset and tint.

    Args:
        rng: Source of the random offset and tint.
        source: RGB image of the texture.
        rows: Vertical position of each pixel on the textured surface, in metres.
        cols: Horizontal position of each pixel on the textured surface, in metres.
    """
    # Imported only here, because the import takes a second and cached images do not need it.
    from scipy.ndimage import map_coordinates

    places = np.stack([rows, cols]) * _PIXELS_PER_METRE
    places += rng.uniform(0, source.shape[:2])[:, None, None]
    channels = [
        map_coordinates(source[..., channel], places, order=1, mode="mirror")
        for channel in range(3)
    ]
    return np.stack(channels, -1) * rng.uniform(0.9, 1.1, size=3)


@dataclass(frozen=True)
class ToyDepth(GeneratedDataset):
    """Generated images of rooms with textured objects, and the exact depth of each pixel."""

    name = "toy_depth"
    supports = frozenset({"depth", "images"})

    def train(self) -> DepthImageSet:
        return self._folders().train()

    def val(self) -> DepthImageSet:
        return self._folders().val()

    def images(self) -> FileImageSet:
        """Return the training images without their depth maps."""
        return self._folders().images()

    def _folders(self) -> DepthFolders:
        return DepthFolders(self.generate_once("toy_depth", self._write), name=self.name)

    def _write(self, folder: Path) -> None:
        for name, image, depth in self._paint_rooms():
            for part, suffix, content in (("images", "jpg", image), ("depth", "png", depth)):
                path = folder / part / f"{name}.{suffix}"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(content).save(path, quality=92)

    def _paint_rooms(self) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Yield a name such as "train/00003", the image and the depth map of each room."""
        for split, count in zip(_SPLITS, (self.num_train, self.num_val), strict=True):
            painter = RoomPainter(split, self.seed)
            for index in range(count):
                yield f"{split}/{index:05d}", *painter.paint_room(index)
