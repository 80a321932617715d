"""The objects of the toy scenes, cut out: labelled pictures without a download."""

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from PIL import Image

from ssl_bench.data.layouts.class_folders import ClassFolders, LabelledImages
from ssl_bench.data.layouts.toy import Drawn
from ssl_bench.data.layouts.toy_scenes import CLASS_NAMES, Painter
from ssl_bench.data.roles import lacking


@dataclass(frozen=True)
class ToyObjects(Drawn):
    """Each object of the toy scenes in its box, in a folder for its class."""

    name = "toy_objects"
    supports = frozenset({"classification", "images"})

    def train(self) -> LabelledImages:
        return self._folders().train()

    def val(self) -> LabelledImages:
        return self._folders().val()

    def discovery(self) -> NoReturn:
        raise lacking(self.name, "discovery")

    def images(self) -> LabelledImages:
        """The training pictures."""
        return self.train()

    def _folders(self) -> ClassFolders:
        root = str(self.kept("toy_objects", self._write))
        return ClassFolders(root=root, name=self.name, known_only=True)

    def _write(self, folder: Path) -> None:
        for split, count in (("train", self.num_train), ("val", self.num_val)):
            painter = Painter(split, self.seed)
            for index in range(count):
                scene = painter.scene(index)
                image = Image.fromarray(scene.image)
                for number, box in zip(scene.classes, scene.boxes, strict=True):
                    class_folder = folder / split / CLASS_NAMES[number]
                    class_folder.mkdir(parents=True, exist_ok=True)
                    image.crop(box).save(class_folder / f"{index:05d}.jpg", quality=92)
