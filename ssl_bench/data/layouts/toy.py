"""Generated scenes with exact masks and boxes: every probe runs on them without a download."""

import hashlib
import shutil
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from PIL import Image

from ssl_bench.composition.fields import Place, Seed, Within, check_fields
from ssl_bench.data.files.file_sets import FileImageSet
from ssl_bench.data.labels import voc_colours
from ssl_bench.data.layouts.toy_scenes import CLASS_NAMES, VERSION, Painter, Scene
from ssl_bench.data.layouts.voc import VocFolder
from ssl_bench.data.locations import cache_folder
from ssl_bench.errors import MachineError
from ssl_bench.system.written import mark_as_written

_NumScenes = Annotated[int, Within(1, 100_000)]


@dataclass(frozen=True)
class Drawn:
    """Scenes that are drawn when they are first asked for.

    Attributes:
        num_train: Scenes of the training split.
        num_val: Scenes of the other split, cut from other parts of the photographs.
        seed: Another seed gives other scenes.
        cache: Folder that keeps them.
    """

    num_train: _NumScenes = 200
    num_val: _NumScenes = 60
    seed: Seed = 0
    cache: Place = None

    def __post_init__(self) -> None:
        check_fields(self, "dataset")

    def kept(self, kind: str, write: Callable[[Path], None]) -> Path:
        """The folder of the cache that `write` fills where there is none yet.

        It is written beside its place and renamed, so that a half-made folder is never seen.

        Raises:
            MachineError: nothing can be written there.
        """
        key = f"{VERSION} {self.num_train} {self.num_val} {self.seed}"
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        path = cache_folder(self.cache) / f"{kind}-{digest}"
        if path.is_dir():
            return path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = Path(tempfile.mkdtemp(dir=path.parent, prefix=".toy-"))
        except OSError as error:
            raise MachineError(
                f"cannot write to {path.parent} ({error.strerror}); set dataset.cache=DIR"
            ) from error
        try:
            write(unfinished)
            mark_as_written(unfinished)
            unfinished.rename(path)
        except OSError as error:
            # Another process may have been quicker; its scenes are the same.
            if not path.is_dir():
                raise MachineError(f"cannot write {path} ({error.strerror})") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return path


@dataclass(frozen=True)
class Toy(Drawn):
    """Textured objects before photographs, written in VOC's layout."""

    name = "toy"
    supports = frozenset({"segmentation", "discovery", "boxes", "images"})

    def train(self) -> FileImageSet:
        return self._folder().segmentation("train")

    def val(self) -> FileImageSet:
        return self._folder().segmentation("val")

    def discovery(self) -> FileImageSet:
        """All scenes, as VOC's trainval."""
        return self._folder().discovery("trainval", exclude_difficult=False)

    def images(self) -> FileImageSet:
        """The training scenes."""
        return self._folder().pictures("train")

    def _folder(self) -> VocFolder:
        path = self.kept("toy", self._write)
        return VocFolder(path, self.name, CLASS_NAMES)

    def _write(self, folder: Path) -> None:
        for part in ("JPEGImages", "SegmentationClass", "Annotations"):
            (folder / part).mkdir()
        ids = {}
        for split, count in (("train", self.num_train), ("val", self.num_val)):
            painter = Painter(split, self.seed)
            ids[split] = [f"{split}_{index:05d}" for index in range(count)]
            for index, image_id in enumerate(ids[split]):
                write_scene(folder, image_id, painter.scene(index))
        ids["trainval"] = ids["train"] + ids["val"]
        for kind in ("Segmentation", "Main"):
            (folder / "ImageSets" / kind).mkdir(parents=True)
            for split, names in ids.items():
                text = "".join(f"{name}\n" for name in names)
                (folder / "ImageSets" / kind / f"{split}.txt").write_text(text, encoding="utf-8")


def write_scene(folder: Path, image_id: str, scene: Scene) -> None:
    """Write the image, the mask and the boxes of one scene as VOC does."""
    image = Image.fromarray(scene.image)
    image.save(folder / "JPEGImages" / f"{image_id}.jpg", quality=92)
    mask = Image.fromarray(scene.mask)
    mask.putpalette(voc_colours().ravel().tolist())
    mask.save(folder / "SegmentationClass" / f"{image_id}.png")
    root = ElementTree.Element("annotation")
    _append(root, filename=f"{image_id}.jpg")
    size = ElementTree.SubElement(root, "size")
    _append(size, width=image.width, height=image.height, depth=3)
    objects = zip(scene.classes, scene.boxes, scene.truncated, strict=True)
    for number, (x0, y0, x1, y1), truncated in objects:
        one = ElementTree.SubElement(root, "object")
        _append(one, name=CLASS_NAMES[number], truncated=int(truncated), difficult=0)
        box = ElementTree.SubElement(one, "bndbox")
        _append(box, xmin=x0 + 1, ymin=y0 + 1, xmax=x1, ymax=y1)
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(folder / "Annotations" / f"{image_id}.xml")


def _append(parent: ElementTree.Element, **texts: object) -> None:
    for tag, text in texts.items():
        ElementTree.SubElement(parent, tag).text = str(text)
