"""Generated videos, in which textured objects move in front of a photograph."""

from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from ssl_bench.data.files.images import voc_colours
from ssl_bench.data.layouts.toy import GeneratedDataset, Painter
from ssl_bench.data.layouts.videos import FrameFolders, VideoSet

NUM_FRAMES = 12


@dataclass(frozen=True)
class ToyVideo(GeneratedDataset):
    """Generated videos of 12 frames, with a mask of each frame.

    There are `num_val` videos for scoring, and no training videos.
    """

    name = "toy_video"
    supports = frozenset({"tracking"})

    def val(self) -> VideoSet:
        root = str(self.generate_once("toy_video", self._write))
        return replace(FrameFolders(root=root, name=self.name).val(), split="val")

    def _write(self, folder: Path) -> None:
        painter = Painter("val", self.seed)
        for index in range(self.num_val):
            video = folder / f"video_{index:05d}"
            video.mkdir()
            for number, (pixels, objects) in enumerate(painter.paint_video(index, NUM_FRAMES)):
                Image.fromarray(pixels).save(video / f"{number:05d}.jpg", quality=92)
                mask = Image.fromarray(objects)
                mask.putpalette(voc_colours().ravel().tolist())
                mask.save(video / f"{number:05d}.png")
