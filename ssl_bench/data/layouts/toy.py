"""Generated scenes with exact masks and boxes. Most probes can use them without a download.

A scene shows textured objects in front of a photograph. All photographs come from scikit-image and
scikit-learn. `ToyObjects` contains crops of the same objects, and `ToyInstances` contains crops of
the scenes.
"""

import hashlib
import json
import shutil
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import numpy as np
from jaxtyping import Float32, Float64, Int64, UInt8
from PIL import Image, ImageEnhance

from ssl_bench.composition.fields import Bounds, OptionalPath, Seed
from ssl_bench.data.files.file_sets import FileImageSet, Files
from ssl_bench.data.files.fingerprints import file_state
from ssl_bench.data.files.images import read_image, voc_colours
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.layouts.instances import RetrievalImages
from ssl_bench.data.layouts.voc import VocFolder
from ssl_bench.data.samples import ImageSet, Layout, RetrievalTarget
from ssl_bench.errors import MachineError
from ssl_bench.system.files import cache_folder, file_sha256, list_files, mark_as_output
from ssl_bench.system.output import print_message
from ssl_bench.system.process import reraise_out_of_memory

_NumScenes = Annotated[int, Bounds(1, 100_000)]

_MANIFEST = "files.json"
# Number of images of each scene in `ToyInstances`: the scene itself and three crops.
_NUM_VIEWS = 4
VERSION = 1
"""Increase this number if the code draws other scenes, so that cached scenes are not used."""


@dataclass(frozen=True)
class Photograph:
    """A photograph in an installed Python package.

    Attributes:
        package: Name of the package.
        file: Path of the image in the package.
        scale: Factor by which the image is resized, so that a few ViT patches are enough to show
            the texture.
        cut: Part of the image to use, as (left, top, right, bottom) in pixels. If it is None, the
            whole image is used.
    """

    package: str
    file: str
    scale: float = 1.0
    cut: tuple[int, int, int, int] | None = None


TEXTURES = {
    "brick": Photograph("skimage", "data/brick.png", 0.5),
    "grass": Photograph("skimage", "data/grass.png", 0.5),
    "gravel": Photograph("skimage", "data/gravel.png", 0.6),
    "coins": Photograph("skimage", "data/coins.png", 0.5),
    "fur": Photograph("skimage", "data/chelsea.png", 0.5, cut=(60, 0, 330, 250)),
    "tissue": Photograph("skimage", "data/ihc.png", 0.5),
    "stars": Photograph("skimage", "data/hubble_deep_field.jpg", 0.5),
    "print": Photograph("skimage", "data/page.png", 0.7, cut=(5, 58, 375, 140)),
}
"""Photographs of the textures of classes 1 to 8, by class name. Class 0 is the background."""

BACKGROUNDS = (
    Photograph("skimage", "data/astronaut.png"),
    Photograph("skimage", "data/coffee.png"),
    Photograph("skimage", "data/motorcycle_left.png"),
    Photograph("skimage", "data/rocket.jpg"),
    Photograph("sklearn", "datasets/images/china.jpg"),
    Photograph("sklearn", "datasets/images/flower.jpg"),
)

CLASS_NAMES = ("background", *TEXTURES)

# Heights and widths. No scene is square, and some sides are not multiples of a patch size.
SIZES = ((128, 160), (160, 128), (120, 150), (150, 110))

# Columns of each photograph that a split uses, as fractions of the width. The two splits share no
# column.
_SHARES = {"train": (0.0, 0.6), "val": (0.6, 1.0)}


@dataclass(frozen=True)
class Scene:
    """A generated image of textured objects, with its mask and boxes.

    Attributes:
        image: RGB image with values from 0 to 255.
        mask: Class of the visible object at each pixel, or 0 for the background.
        classes: Class of each object, from the farthest to the nearest.
        boxes: Box around the visible part of each object, as (x0, y0, x1, y1) in pixels. The edges
            x1 and y1 are exclusive.
    """

    image: UInt8[np.ndarray, "height width 3"]
    mask: UInt8[np.ndarray, "height width"]
    classes: tuple[int, ...]
    boxes: tuple[tuple[int, int, int, int], ...]


class Painter:
    """Generator of scenes, which are images of textured objects in front of a background.

    A scene depends only on the split, the seed and the number of the scene.

    Args:
        split: "train" or "val". The two splits use different parts of the photographs.
        seed: Seed of all scenes.

    Raises:
        MachineError: A photograph is missing in an installed package.
    """

    def __init__(self, split: str, seed: int) -> None:
        self.split, self.seed = split, seed
        self._textures = [_load_photograph(photograph, split) for photograph in TEXTURES.values()]
        self._backgrounds = [_load_photograph(photograph, split) for photograph in BACKGROUNDS]

    def paint_scene(self, index: int) -> Scene:
        rng = np.random.default_rng([self.seed, sorted(_SHARES).index(self.split), index])
        height, width = SIZES[rng.integers(len(SIZES))]
        depths = _draw_outlines(rng, height, width)
        classes = 1 + rng.permutation(len(TEXTURES))[: len(depths)]
        pixels = _crop_background(
            rng, self._backgrounds[rng.integers(len(BACKGROUNDS))], height, width
        )
        for depth, number in zip(depths, classes, strict=True):
            texture = _warp_texture(rng, self._textures[number - 1], height, width)
            pixels = _paste_object(pixels, texture, depth)
        visible = _visible_objects(depths)
        boxes = []
        for number in range(len(depths)):
            rows, cols = np.nonzero(visible == number)
            boxes.append(
                (int(cols.min()), int(rows.min()), int(cols.max()) + 1, int(rows.max()) + 1)
            )
        return Scene(
            image=pixels.round().clip(0, 255).astype(np.uint8),
            mask=np.array([0, *classes], np.uint8)[visible + 1],
            classes=tuple(classes.tolist()),
            boxes=tuple(boxes),
        )

    def paint_video(
        self, index: int, num_frames: int
    ) -> Iterator[tuple[UInt8[np.ndarray, "height width 3"], UInt8[np.ndarray, "height width"]]]:
        """Yield the image and the mask of each frame of a video.

        The mask stores the number of the visible object at each pixel, or 0 for the background.
        Each object moves along a straight line, by at most 2.5 pixels per frame horizontally and
        vertically.

        Args:
            index: Number of the video. Each number gives another video of this split and seed.
            num_frames: Number of frames.
        """
        from scipy.ndimage import shift

        # The generator of a scene is seeded with three numbers. The fourth number makes a video
        # differ from the scene with the same index.
        rng = np.random.default_rng([self.seed, sorted(_SHARES).index(self.split), index, 1])
        height, width = SIZES[rng.integers(len(SIZES))]
        depths = _draw_outlines(rng, height, width)
        background = _crop_background(
            rng, self._backgrounds[rng.integers(len(BACKGROUNDS))], height, width
        )
        classes = rng.permutation(len(TEXTURES))[: len(depths)]
        textures = [_warp_texture(rng, self._textures[number], height, width) for number in classes]
        speeds = rng.uniform(-2.5, 2.5, (len(depths), 2))
        for frame in range(num_frames):
            # Parts of an object that are outside of the first frame never appear.
            moved = [
                shift(depth, frame * speed, order=1, mode="constant", cval=2.0)
                for depth, speed in zip(depths, speeds, strict=True)
            ]
            pixels = background
            for depth, texture, speed in zip(moved, textures, speeds, strict=True):
                own = shift(texture, (*(frame * speed), 0.0), order=1, mode="nearest")
                pixels = _paste_object(pixels, own, depth)
            objects = (1 + _visible_objects(moved)).astype(np.uint8)
            yield pixels.round().clip(0, 255).astype(np.uint8), objects


@cache
def _load_photograph(photograph: Photograph, split: str) -> Float32[np.ndarray, "height width 3"]:
    package = find_spec(photograph.package)
    if package is None or not package.submodule_search_locations:
        raise MachineError(
            f"the toy datasets use photographs from the package {photograph.package}. Install it"
        )
    path = Path(package.submodule_search_locations[0]) / photograph.file
    if not path.is_file():
        raise MachineError(
            f"the photograph {path} is missing in the installed package. Install another version"
        )
    image = Image.fromarray(read_image(path)).crop(photograph.cut)
    height, width = round(image.height * photograph.scale), round(image.width * photograph.scale)
    pixels = np.asarray(image.resize((width, height), Image.Resampling.LANCZOS), np.float32)
    start, stop = (round(width * share) for share in _SHARES[split])
    part = pixels[:, start:stop]
    part.flags.writeable = False
    return part


def _draw_outlines(
    rng: np.random.Generator, height: int, width: int
) -> list[Float64[np.ndarray, "height width"]]:
    """Return the random shapes of one to three objects, from the farthest to the nearest.

    A shape stores the relative distance of each pixel from the object's centre. This distance is
    below 1 inside the object. At least half of each object is visible.
    """
    number = int(rng.integers(1, 4))
    while True:
        depths = [_draw_outline(rng, height, width) for _ in range(number)]
        visible = _visible_objects(depths)
        if all((visible == k).sum() >= 0.5 * (depth < 1).sum() for k, depth in enumerate(depths)):
            return depths


def _draw_outline(
    rng: np.random.Generator, height: int, width: int
) -> Float64[np.ndarray, "height width"]:
    """Return a random smooth shape, given by the relative distance of each pixel from its centre.

    The distance is 0 at the centre, 1 on the outline, and larger outside.
    """
    y, x = np.mgrid[:height, :width] - np.array(
        [height * rng.uniform(0.2, 0.8), width * rng.uniform(0.2, 0.8)]
    ).reshape(2, 1, 1)
    angle = np.arctan2(y, x * rng.uniform(0.7, 1.4))
    radius = np.full((height, width), rng.uniform(0.22, 0.38) * min(height, width))
    for waves in range(2, 6):
        swing = rng.uniform(0, 0.3 / waves)
        radius *= 1 + swing * np.cos(waves * angle + rng.uniform(0, 2 * np.pi))
    return np.hypot(y, x) / radius


def _visible_objects(
    depths: list[Float64[np.ndarray, "height width"]],
) -> Int64[np.ndarray, "height width"]:
    """Return the index of the nearest object at each pixel, or -1 for the background.

    `depths` contains a map for each object, from the farthest to the nearest. Pixels with a value
    below 1 are inside the object.
    """
    visible = np.full(depths[0].shape, -1, np.int64)
    for number, depth in enumerate(depths):
        visible[depth < 1] = number
    return visible


def _crop_background(
    rng: np.random.Generator, photograph: Float32[np.ndarray, "_ _ 3"], height: int, width: int
) -> Float64[np.ndarray, "height width 3"]:
    """Return a random crop of a photograph, resized to the given size.

    With a probability of one half, the crop is flipped horizontally.
    """
    rows, cols = photograph.shape[:2]
    zoom = rng.uniform(0.6, 1.0) * min(rows / height, cols / width)
    top = rng.uniform(0, rows - zoom * height)
    left = rng.uniform(0, cols - zoom * width)
    cut = (left, top, left + zoom * width, top + zoom * height)
    image = Image.fromarray(photograph.round().clip(0, 255).astype(np.uint8))
    resized = image.resize((width, height), Image.Resampling.BICUBIC, box=cut)
    pixels = np.asarray(resized, np.float64)
    return pixels[:, ::-1] if rng.random() < 0.5 else pixels


def _warp_texture(
    rng: np.random.Generator, source: Float32[np.ndarray, "_ _ 3"], height: int, width: int
) -> Float64[np.ndarray, "height width 3"]:
    """Return an image of the given size that is filled with a texture.

    The texture is slightly rotated, scaled and tinted at random. A texture that is too small is
    continued by reflection.
    """
    # Imported only here, because the import takes a second and cached scenes do not need it.
    from scipy.ndimage import map_coordinates

    turn, zoom = rng.uniform(-0.4, 0.4), rng.uniform(0.8, 1.1)
    y, x = np.mgrid[:height, :width] * zoom
    rows = y * np.cos(turn) - x * np.sin(turn) + rng.uniform(0, source.shape[0])
    cols = y * np.sin(turn) + x * np.cos(turn) + rng.uniform(0, source.shape[1])
    channels = [
        map_coordinates(source[..., channel], [rows, cols], order=1, mode="mirror")
        for channel in range(3)
    ]
    return np.stack(channels, axis=-1) * rng.uniform(0.9, 1.1, size=3)


def _paste_object(
    pixels: Float64[np.ndarray, "height width 3"],
    texture: Float64[np.ndarray, "height width 3"],
    depth: Float64[np.ndarray, "height width"],
) -> Float64[np.ndarray, "height width 3"]:
    """Paste a textured object with a darker rim and a soft shadow into an image.

    Args:
        pixels: The image without the object.
        texture: Texture of the object at each pixel.
        depth: Shape of the object. Values are 0 at its centre, below 1 inside it, and above 1
            outside.
    """
    from scipy.ndimage import gaussian_filter

    inside = depth < 1
    shadow = gaussian_filter(np.roll(inside, (4, 3), (0, 1)).astype(np.float64), 4)
    lit = texture * (1.1 - 0.35 * np.minimum(depth, 1) ** 2)[..., None]
    return np.where(inside[..., None], lit, pixels * (1 - 0.5 * shadow)[..., None])


@dataclass(frozen=True)
class GeneratedDataset(Layout):
    """Base class of generated datasets, which are written to the cache on first use.

    A scene is a generated image of textured objects in front of a background. Textures and
    backgrounds are parts of photographs.

    Attributes:
        num_train: Number of training scenes.
        num_val: Number of scored scenes. Scored and training scenes use different parts of the
            photographs.
        seed: Seed of the scenes.
        cache: Folder in which the scenes are stored.
    """

    num_train: _NumScenes = 200
    num_val: _NumScenes = 60
    seed: Seed = 0
    cache: OptionalPath = None

    def generate_once(self, kind: str, write: Callable[[Path], None]) -> Path:
        """Return the folder of a generated dataset in the cache.

        If the folder is missing or its files have changed, the dataset is generated again.

        Args:
            kind: Beginning of the folder's name, such as "toy".
            write: Function that writes the files of the dataset to the given folder. This folder is
                temporary and is renamed when it is complete.

        Raises:
            MachineError: The cache cannot be written.
        """
        key = f"{VERSION} {self.num_train} {self.num_val} {self.seed}"
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        path = cache_folder(self.cache) / f"{kind}-{digest}"
        if path.is_dir():
            if _is_intact(path):
                return path
            print_message(f"files in {path} have changed, so they are generated again")
            shutil.rmtree(path, ignore_errors=True)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = Path(tempfile.mkdtemp(dir=path.parent, prefix=".toy-"))
        except OSError as error:
            raise MachineError(
                f"cannot write to {path.parent} ({error.strerror}). Choose another folder",
                hint=("dataset.cache={folder}",),
            ) from error
        try:
            write(unfinished)
            _write_manifest(unfinished)
            mark_as_output(unfinished)
            unfinished.rename(path)
        except OSError as error:
            # Another process may have created the folder in the meantime, with the same scenes.
            if not path.is_dir():
                raise MachineError(f"cannot write {path} ({error.strerror})") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return path

    def _paint_scenes(self) -> Iterator[tuple[str, int, Scene]]:
        """Yield (split, number, scene) for each generated image. The split is "train" or "val"."""
        for split, count in (("train", self.num_train), ("val", self.num_val)):
            painter = Painter(split, self.seed)
            for index in range(count):
                yield split, index, painter.paint_scene(index)


def _write_manifest(folder: Path) -> None:
    """Write a manifest, which lists the SHA-256, size and modification time of each file.

    `_is_intact` uses the manifest to detect damaged files.
    """
    rows = {}
    for name in sorted(list_files(folder)):
        path = folder / name
        rows[name] = [file_sha256(path), *file_state(path)[:2]]
    (folder / _MANIFEST).write_text(json.dumps(rows), encoding="utf-8")


def _is_intact(folder: Path) -> bool:
    """Return whether no file in a folder has changed since the manifest was written.

    The manifest is a list of the files' hashes. A folder without a manifest counts as intact.
    """
    manifest = folder / _MANIFEST
    # Older versions of this code wrote no manifest.
    if not manifest.is_file():
        return True
    try:
        rows = json.loads(manifest.read_text(encoding="utf-8"))
        for name, (digest, *state) in rows.items():
            path = folder / name
            if [*file_state(path)[:2]] != state and file_sha256(path) != digest:
                return False
    except Exception as error:
        reraise_out_of_memory(error)
        return False
    return True


@dataclass(frozen=True)
class Toy(GeneratedDataset):
    """Generated images of textured objects in front of photographs, in VOC's folders."""

    name = "toy"
    supports = frozenset({"segmentation", "discovery", "boxes", "images"})

    def train(self) -> FileImageSet:
        return self._folder().segmentation("train")

    def val(self) -> FileImageSet:
        return self._folder().segmentation("val")

    def discovery(self) -> FileImageSet:
        """Return training and scored images with boxes, like the images of VOC's split trainval."""
        return self._folder().discovery("trainval", exclude_difficult=False)

    def images(self) -> FileImageSet:
        """Return the training images without annotations."""
        return self._folder().images("train")

    def _folder(self) -> VocFolder:
        path = self.generate_once("toy", self._write)
        return VocFolder(path, self.name, CLASS_NAMES)

    def _write(self, folder: Path) -> None:
        for part in ("JPEGImages", "SegmentationClass", "Annotations"):
            (folder / part).mkdir()
        ids: dict[str, list[str]] = {"train": [], "val": []}
        for split, index, scene in self._paint_scenes():
            image_id = f"{split}_{index:05d}"
            ids[split].append(image_id)
            write_scene(folder, image_id, scene)
        ids["trainval"] = ids["train"] + ids["val"]
        for kind in ("Segmentation", "Main"):
            (folder / "ImageSets" / kind).mkdir(parents=True)
            for split, names in ids.items():
                text = "".join(f"{name}\n" for name in names)
                (folder / "ImageSets" / kind / f"{split}.txt").write_text(text, encoding="utf-8")


def write_scene(folder: Path, image_id: str, scene: Scene) -> None:
    """Write a generated image, its mask and its boxes in VOC's format.

    Files are written to the subfolders JPEGImages, SegmentationClass and Annotations of `folder`.
    """
    image = Image.fromarray(scene.image)
    image.save(folder / "JPEGImages" / f"{image_id}.jpg", quality=92)
    mask = Image.fromarray(scene.mask)
    mask.putpalette(voc_colours().ravel().tolist())
    mask.save(folder / "SegmentationClass" / f"{image_id}.png")
    root = ElementTree.Element("annotation")
    _append_texts(root, filename=f"{image_id}.jpg")
    size = ElementTree.SubElement(root, "size")
    _append_texts(size, width=image.width, height=image.height, depth=3)
    for number, (x0, y0, x1, y1) in zip(scene.classes, scene.boxes, strict=True):
        one = ElementTree.SubElement(root, "object")
        is_truncated = x0 == 0 or y0 == 0 or x1 == image.width or y1 == image.height
        _append_texts(one, name=CLASS_NAMES[number], truncated=int(is_truncated), difficult=0)
        box = ElementTree.SubElement(one, "bndbox")
        _append_texts(box, xmin=x0 + 1, ymin=y0 + 1, xmax=x1, ymax=y1)
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(folder / "Annotations" / f"{image_id}.xml")


def _append_texts(parent: ElementTree.Element, **texts: object) -> None:
    for tag, text in texts.items():
        ElementTree.SubElement(parent, tag).text = str(text)


@dataclass(frozen=True)
class ToyObjects(GeneratedDataset):
    """Crops of single objects from the images of `Toy`, in one folder for each class."""

    name = "toy_objects"
    supports = frozenset({"classification", "images"})

    def train(self) -> ImageSet:
        return self._folders().train()

    def val(self) -> ImageSet:
        return self._folders().val()

    def images(self) -> ImageSet:
        """Return the training images."""
        return self.train()

    def _folders(self) -> Layout:
        root = str(self.generate_once("toy_objects", self._write))
        return ClassFolders(root=root, name=self.name, known_only=True)

    def _write(self, folder: Path) -> None:
        for split, index, scene in self._paint_scenes():
            image = Image.fromarray(scene.image)
            for number, box in zip(scene.classes, scene.boxes, strict=True):
                class_folder = folder / split / CLASS_NAMES[number]
                class_folder.mkdir(parents=True, exist_ok=True)
                image.crop(box).save(class_folder / f"{index:05d}.jpg", quality=92)


@dataclass(frozen=True)
class ToyInstances(GeneratedDataset):
    """Generated images and their crops, as a dataset of instance retrieval.

    Each whole image is a query, and a search should find its three crops. Two crops are easy to
    find. The third is smaller and grey, so it is difficult to find.
    """

    name = "toy_instances"
    supports = frozenset({"instances", "images"})

    def val(self) -> RetrievalImages:
        targets = {}
        for scene in range(self.num_val):
            query, *easy, hard = (_view_id(scene, view) for view in range(_NUM_VIEWS))
            targets[query] = RetrievalTarget(frozenset(easy), frozenset({hard}))
        return RetrievalImages(self.images(), targets)

    def images(self) -> FileImageSet:
        """Return all images: the scored whole images and their crops."""
        folder = self.generate_once("toy_instances", self._write)
        files = Files(folder, ".jpg")
        return FileImageSet(
            name=self.name, split="val", source=folder, ids=tuple(files.ids()), images=files
        ).validate()

    def _write(self, folder: Path) -> None:
        painter = Painter("val", self.seed)
        for index in range(self.num_val):
            image = Image.fromarray(painter.paint_scene(index).image)
            rng = np.random.default_rng([self.seed, index])
            for view in range(_NUM_VIEWS):
                path = folder / f"{_view_id(index, view)}.jpg"
                _draw_view(rng, image, view).save(path, quality=92)


def _view_id(scene: int, view: int) -> str:
    return f"{scene:05d}_{view}"


def _draw_view(rng: np.random.Generator, scene: Image.Image, view: int) -> Image.Image:
    """Return a whole generated image, or one of its crops.

    View 0 is the whole image. All other views are crops with random brightness, and the last crop
    is smaller and grey.
    """
    if view == 0:
        return scene
    is_hard = view == _NUM_VIEWS - 1
    share = rng.uniform(0.45, 0.55) if is_hard else rng.uniform(0.65, 0.85)
    width, height = share * scene.width, share * scene.height
    left, top = rng.uniform(0, scene.width - width), rng.uniform(0, scene.height - height)
    box = (left, top, left + width, top + height)
    part = scene.resize(scene.size, Image.Resampling.BICUBIC, box=box)
    view_of_scene = ImageEnhance.Brightness(part).enhance(rng.uniform(0.7, 1.3))
    return view_of_scene.convert("L").convert("RGB") if is_hard else view_of_scene
