"""Draw the propagated masks of a video: a figure with some frames, and an animation."""

import io
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from jaxtyping import UInt8
from PIL import Image

from probes.pictures import Picture, draw_heading, save_sheet
from ssl_bench.data.files.images import voc_colours
from ssl_bench.data.samples import IGNORE_INDEX
from ssl_bench.system.files import write_atomically

RGBImage = UInt8[np.ndarray, "height width 3"]
IndexedMask = UInt8[np.ndarray, "height width"]

STRIP_FRAMES = 6
ANIMATION_FRAMES = 40
_HEIGHT = 192
_ANIMATION_HEIGHT = 160
_MILLISECONDS = 100
_WHITE = (255, 255, 255)


def choose_frames(num_frames: int, count: int) -> list[int]:
    """Return the indices of up to `count` evenly spaced frames of a video.

    The first and the last frame are included.
    """
    return sorted(
        {*np.linspace(0, num_frames - 1, min(count, num_frames)).round().astype(int).tolist()}
    )


def draw_overlay(
    image: RGBImage, numbers: IndexedMask, truth: IndexedMask | None
) -> UInt8[np.ndarray, "_height _width 3"]:
    """Reduce a frame of a video to the height of figures, and colour the objects in it.

    Args:
        image: The frame.
        numbers: Predicted mask, with the number of the object at each pixel.
        truth: True mask, whose objects get white outlines. None for no outlines.
    """
    height = min(_HEIGHT, image.shape[0])
    size = (max(1, round(image.shape[1] * height / image.shape[0])), height)
    small = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
    own = cv2.resize(numbers, size, interpolation=cv2.INTER_NEAREST)
    mixed = (small.astype(np.uint16) + voc_colours()[own]) // 2
    drawn = np.where(own[..., None] > 0, mixed, small).astype(np.uint8)
    if truth is not None:
        true = cv2.resize(truth, size, interpolation=cv2.INTER_NEAREST)
        for number in set(np.unique(true).tolist()) - {0, IGNORE_INDEX}:
            contours, _ = cv2.findContours(
                (true == number).astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE
            )
            cv2.drawContours(drawn, contours, -1, _WHITE, 1)
    return drawn


def save_strip(frames: Sequence[tuple[RGBImage, str]], line: str, path: Path) -> None:
    """Save a figure with frames and their titles in two rows, below a line of text."""
    tiles = [Picture(image, (title,), height=image.shape[0]).tile() for image, title in frames]
    half = -(-len(tiles) // 2)
    save_sheet(
        [[draw_heading(line)], tiles[:half], *([tiles[half:]] if half < len(tiles) else [])], path
    )


def save_animation(frames: Sequence[RGBImage], path: Path) -> None:
    """Save frames as an animated PNG with 256 colours. The animation repeats forever."""
    height = min(_ANIMATION_HEIGHT, frames[0].shape[0])
    width = max(1, round(frames[0].shape[1] * height / frames[0].shape[0]))
    small = [
        Image.fromarray(cv2.resize(frame, (width, height), interpolation=cv2.INTER_AREA))
        for frame in frames
    ]
    # All frames of an animated PNG share one palette, which is computed from all frames together.
    joined = Image.fromarray(np.concatenate([np.asarray(frame) for frame in small], 0))
    palette = joined.quantize(256, Image.Quantize.MEDIANCUT)
    first, *others = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in small]
    buffer = io.BytesIO()
    first.save(
        buffer, format="PNG", save_all=True, append_images=others, duration=_MILLISECONDS, loop=0
    )
    write_atomically(path, lambda file: file.write(buffer.getvalue()))


def save_mask(numbers: IndexedMask, path: Path) -> None:
    """Save a mask as a PNG with the palette of VOC and DAVIS.

    The value of a pixel is the number of the object, or 0 for the background.
    """
    image = Image.fromarray(numbers)
    image.putpalette(voc_colours().ravel().tolist())
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    write_atomically(path, lambda file: file.write(buffer.getvalue()))
