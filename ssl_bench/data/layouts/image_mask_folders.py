"""Datasets with a folder of images and a folder of masks."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int64, Integer, UInt8

from ssl_bench.composition.fields import MaskValue, OptionalPath, Rgb, format_value
from ssl_bench.data.files.file_sets import FileImageSet, Files, LabelMap, Masks
from ssl_bench.data.files.images import read_integer_image, read_mask_colours, read_palette
from ssl_bench.data.samples import (
    IGNORE_INDEX,
    PUBLISHED_COUNTS,
    Layout,
    find_root,
    resolve_dataset_name,
    unsupported_role_error,
)
from ssl_bench.data.splits import (
    Split,
    find_image_ids,
    missing_split_error,
    read_list,
    require_disjoint,
)
from ssl_bench.errors import ConfigurationError, DataError, UnreadableImageError
from ssl_bench.system.files import list_files

_CLASSES_FILE = "classes.txt"
_SPLIT = "{split}"
Colour = tuple[int, int, int]


class PairedFolders(Layout):
    """Base class of datasets with an image folder and a mask folder for each split.

    Subclasses implement `_images` and `_masks`, which return the files of a split.

    Attributes:
        published_splits: Names of the folders of published splits, such as {"train": "training"}.
            A split is not listed if its folder has the same name.
    """

    supports: Any
    published_splits: ClassVar[Mapping[str, str]] = MappingProxyType({})
    train_split: str
    val_split: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if "segmentation" in self.supports:
            require_disjoint(self.train_split, self.val_split)

    def train(self) -> FileImageSet:
        """Return the training images with masks.

        Raises:
            DataError: An image or its mask is missing.
        """
        return self._segmentation(self.train_split)

    def val(self) -> FileImageSet:
        """Return the images that are scored, with masks.

        Raises:
            DataError: An image or its mask is missing.
        """
        return self._segmentation(self.val_split)

    def images(self) -> FileImageSet:
        """Return the training images without their masks."""
        return self._image_set(self.train_split, None, ()).validate()

    def _segmentation(self, split: str) -> FileImageSet:
        return self._image_set(split, *self._masks(split)).validate()

    def _image_set(
        self, split: str, masks: Masks | None, class_names: tuple[str, ...]
    ) -> FileImageSet:
        images = self._images(split)
        source, ids = self._list_ids(split, images, masks)
        share = Split.parse(split).cut(ids)
        if isinstance(masks, IndexMasks) and share:
            masks = replace(masks, reference=masks.files.path(share[0]))
        return FileImageSet(
            name=self._full_name,
            split=split,
            source=source,
            ids=share,
            images=images,
            class_names=class_names,
            masks=masks,
        )

    def _list_ids(
        self, split: str, images: Files, masks: Masks | None
    ) -> tuple[Path, Collection[str]]:
        """Return the folder or list file of a split, and the image ids that it contains."""
        del split
        # Masks without an image are included, so that the missing image is reported.
        return images.folder, {*images.ids(), *(masks.files.ids() if masks else ())}

    @cached_property
    def _full_name(self) -> str:
        ids = {}
        for split in PUBLISHED_COUNTS.get(self.name, ()):
            # A missing split does not change the name.
            with suppress(DataError):
                ids[split] = self._images(self.published_splits.get(split, split)).ids()
        return resolve_dataset_name(self.name, ids)

    def _images(self, split: str) -> Files:
        raise NotImplementedError

    def _masks(self, split: str) -> tuple[Masks, tuple[str, ...]]:
        """Return the masks of a split and the names of their classes."""
        raise NotImplementedError


def split_folder(parent: Path, split: str) -> Path:
    """Return the folder of a split such as `train`, or of a part such as `train:0-75%`.

    Args:
        parent: Folder that contains a folder for each split.
        split: The split or the part.

    Raises:
        DataError: The folder does not exist. The message lists the existing splits.
    """
    name = Split.parse(split).name
    if not (parent / name).is_dir():
        existing = [folder.name for folder in parent.glob("*") if folder.is_dir()]
        raise missing_split_error(name, existing, parent)
    return parent / name


@dataclass(frozen=True)
class NestedFiles(Files):
    """Files in a folder and its subfolders. An id such as "cat/07" includes the subfolder."""

    def ids(self) -> list[str]:
        """Return the sorted ids of all non-hidden files in the folder and its subfolders."""
        return sorted(
            name.removesuffix(self.suffix)
            for name in list_files(self.folder)
            if self.matches(name.rpartition("/")[2])
        )


@dataclass(frozen=True)
class IndexMasks(Masks):
    """Masks that store class numbers.

    Attributes:
        checks_first_mask: Whether the first mask is read when a split is opened, to detect
            unexpected class numbers early.
        reference: Path of another mask of the split, or None. In every mask with a colour palette,
            each colour must have the same number as in this mask. This detects palettes that an
            image editor has reordered.
    """

    checks_first_mask: ClassVar[bool] = False

    reference: Path | None = None

    def read(self, image_id: str) -> UInt8[np.ndarray, "height width"]:
        """Read the mask of an image, and return the class of each pixel.

        Raises:
            DataError: The file is not a valid mask, stores a number without a class, does not use
                the expected numbering of classes, or has another palette than `reference`.
        """
        path = self.files.path(image_id)
        if palette := read_palette(path):
            self._require_same_order(path, palette)
        numbers = read_integer_image(path)
        self.require_convention(numbers, path)
        return self.labels.apply(numbers, path)

    def require_convention(self, numbers: Integer[np.ndarray, "height width"], path: Path) -> None:
        """Raise `DataError` if a mask does not use the expected numbering of classes.

        This implementation accepts every numbering. Subclasses override this method.

        Args:
            numbers: Number that the mask stores for each pixel.
            path: Path of the mask, for the error message.
        """

    def _require_same_order(self, path: Path, palette: Mapping[Colour, int]) -> None:
        expected, source = self._reference_palette, str(self.reference)
        greys = {r for r, g, b in palette if r == g == b}
        # If all colours are grey values that are also class numbers, a tool has probably added a
        # palette to a grey mask. A palette of only black and white does not show this, because both
        # are common class colours.
        if greys - {0, 255} and len(greys) == len(palette) and greys <= self.labels.classes.keys():
            expected, source = {(grey, grey, grey): grey for grey in greys}, "its grey value"
        for colour, number in palette.items():
            if expected.get(colour, number) != number:
                raise DataError(
                    f"{path} stores {number} for the colour {list(colour)}, expected "
                    f"{expected[colour]} according to {source}. A tool has changed the order of "
                    "the palette. Use the original masks, or list the colours of all classes in "
                    "dataset.colours"
                )

    @cached_property
    def _reference_palette(self) -> Mapping[Colour, int]:
        return read_palette(self.reference) if self.reference else {}


@dataclass(frozen=True)
class TwoClassMasks(IndexMasks):
    """Masks of two classes, in which 255 means either the second class or ignored pixels."""

    checks_first_mask = True

    def require_convention(self, numbers: Integer[np.ndarray, "height width"], path: Path) -> None:
        """Raise `DataError` if a mask stores only 0 and 255, because 255 is then ambiguous."""
        if set(np.unique(numbers)) == {0, IGNORE_INDEX}:
            raise DataError(
                f"{path} stores 0 and 255 but not 1, so the meaning of 255 is unclear. Choose "
                "whether 255 means the second class or ignored pixels",
                hint=(
                    "dataset.numbers=[0,255]",
                    "dataset.ignored=[]",
                    "or",
                    "dataset.ignored=[255]",
                ),
            )


@dataclass(frozen=True)
class ColourMasks(Masks):
    """Masks with one colour for each class.

    Attributes:
        colours: All colours that masks may contain, as RGB values. `labels` maps the index of a
            colour in this list to its class.
    """

    colours: Sequence[Colour] = ()

    def read(self, image_id: str) -> UInt8[np.ndarray, "height width"]:
        """Read the mask of an image, and return the class of each pixel.

        Raises:
            DataError: The file cannot be read, or contains a colour without a class.
        """
        path = self.files.path(image_id)
        pixels = read_mask_colours(path)
        packed = _pack_colours(pixels)
        known = _pack_colours(np.array([self.colours], np.uint8))[0]
        order = known.argsort()
        positions = np.searchsorted(known, packed, sorter=order).clip(max=len(known) - 1)
        numbers = order[positions]
        is_unknown = known[numbers] != packed
        if is_unknown.any():
            colour = pixels[is_unknown][0].tolist()
            raise DataError(
                f"{path} contains the colour {colour}, which is neither in dataset.colours nor in "
                "dataset.ignored_colours. Add this colour, or save the masks as PNG"
            )
        return self.labels.apply(numbers, path)

    def fingerprint_key(self) -> str:
        return f"{super().fingerprint_key()} {list(self.colours)}"


def _pack_colours(pixels: UInt8[np.ndarray, "height width 3"]) -> Int64[np.ndarray, "height width"]:
    """Return the colour of each pixel as one 24-bit number."""
    return pixels.astype(np.int64) @ np.array([65536, 256, 1])


@dataclass(frozen=True)
class ImageMaskFolders(PairedFolders):
    """A folder of images and a folder of masks. An image and its mask have the same name.

    Attributes:
        root: The folder that contains the folders of the images and of the masks.
        name: Name of the dataset in stored results and tables.
        train_split: Name of the training split, or a part of it such as `train:0-75%`.
        val_split: Name of the scored split, or a part of it such as `val:0-50%`.
        image_folder: Folder of the images below the root. `{split}` stands for the name of the
            split. Images and masks may be in subfolders with the same names.
        mask_folder: Folder of the masks below the root. `{split}` stands for the name of the split.
        image_suffix: End of the file names of the images. An image and its mask have the same name
            before this suffix.
        mask_suffix: End of the file names of the masks.
        lists: Path below the root of a file that lists the images of a split, one name per line.
            `{split}` stands for the name of the split. By default, a split consists of all files in
            its folder.
        class_names: Names of the classes. By default they are read from classes.txt, one per line.
            With `one_object`, they default to background and object.
        numbers: Number that the masks store for each class. By default 0, 1, 2 and so on.
        reduce_zero: Whether masks store 1 for the first class, and 0 for ignored pixels.
        ignored: Numbers of ignored pixels. By default 255. Any number that is neither in `numbers`
            nor in `ignored` is an error.
        colours: Red, green and blue of each class, if masks store colours.
        ignored_colours: Colours of ignored pixels.
        one_object: Whether masks show one object (class 1) on a background (class 0). In this case,
            `train_split` and `val_split` may be the same, except for probes that train segmentation
            heads.
    """

    root: OptionalPath = None
    name: str = "paired_folders"
    train_split: str = "train"
    val_split: str = "val"
    image_folder: str = f"images/{_SPLIT}"
    mask_folder: str = f"masks/{_SPLIT}"
    image_suffix: str = ".jpg"
    mask_suffix: str = ".png"
    lists: str | None = None
    class_names: Sequence[str] = ()
    numbers: Sequence[MaskValue] | None = None
    reduce_zero: bool = False
    ignored: Sequence[MaskValue] | None = None
    colours: Sequence[Rgb] | None = None
    ignored_colours: Sequence[Rgb] = ()
    one_object: bool = False

    @property
    def supports(self) -> frozenset[str]:
        """Return the evaluations that the dataset supports, such as "segmentation".

        Segmentation needs different splits for training and scoring.
        """
        saliency = {"saliency"} if self.one_object else set()
        has_two_splits = not self.one_object or self.train_split != self.val_split
        return frozenset({"images", *saliency, *(["segmentation"] if has_two_splits else [])})

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.colours is not None) + (self.numbers is not None) + self.reduce_zero > 1:
            raise ConfigurationError(
                "dataset.colours, dataset.numbers and dataset.reduce_zero=true cannot be combined. "
                "Set only one of them"
            )
        if self._is_one_folder and self.image_suffix == self.mask_suffix:
            raise ConfigurationError(
                f"{self.image_folder}/*{self.image_suffix} matches both images and masks",
                hint=(
                    "dataset.mask_folder={mask_folder}",
                    "or",
                    "dataset.mask_suffix={mask_suffix}",
                ),
            )

    def train(self) -> FileImageSet:
        """Return the training images with masks.

        Raises:
            DataError: An image has no mask, or the same split is used for training and scoring.
        """
        if "segmentation" not in self.supports:
            raise unsupported_role_error(self.name, "segmentation")
        return super().train()

    def _segmentation(self, split: str) -> FileImageSet:
        images = super()._segmentation(split)
        if isinstance(images.masks, IndexMasks) and images.masks.checks_first_mask:
            with suppress(UnreadableImageError):
                images.masks.read(images.ids[0])
        return images

    def _images(self, split: str) -> Files:
        return self._files(self.image_folder, self.image_suffix, split)

    def _list_ids(
        self, split: str, images: Files, masks: Masks | None
    ) -> tuple[Path, Collection[str]]:
        if self.lists is None:
            return super()._list_ids(split, images, masks)
        source = self._root() / self.lists.replace(_SPLIT, Split.parse(split).name)
        return source, find_image_ids(read_list(source), images)

    def _files(self, pattern: str, suffix: str, split: str) -> NestedFiles:
        other = self.mask_suffix if suffix == self.image_suffix else self.image_suffix
        # If images and masks share a folder, `*.png` also matches `*_label.png`.
        excluded = other if self._is_one_folder and other.endswith(suffix) else None
        return NestedFiles(self._folder(pattern, split), suffix, excluded)

    @property
    def _is_one_folder(self) -> bool:
        return self.image_folder == self.mask_folder

    def _folder(self, pattern: str, split: str) -> Path:
        root, name = self._root(), Split.parse(split).name
        folder = root / pattern.replace(_SPLIT, name)
        if folder.is_dir():
            return folder
        if _SPLIT not in pattern:
            raise DataError(f"{folder} does not exist, expected {self._tree()}")
        # To list the existing splits in the error, find the folders "prefix*suffix" in the parent
        # of the pattern "parent/prefix{split}suffix/rest".
        before, _, after = pattern.partition(_SPLIT)
        parent, prefix = (root / f"{before}x").parent, before.rpartition("/")[2]
        suffix = after.partition("/")[0]
        names = [path.name for path in parent.glob(f"{prefix}*{suffix}") if path.is_dir()]
        splits = [found.removeprefix(prefix).removesuffix(suffix) for found in names]
        raise missing_split_error(name, splits, parent)

    def _class_names(self) -> tuple[str, ...]:
        if self.class_names:
            return tuple(self.class_names)
        path = self._root() / _CLASSES_FILE
        if self.one_object and not path.is_file():
            return ("background", "object")
        if not path.is_file():
            raise DataError(
                f"{self.name} needs class names, as a list or one per line in {path}",
                hint=("dataset.class_names=[road,sky]",),
            )
        return tuple(read_list(path))

    def _masks(self, split: str) -> tuple[Masks, tuple[str, ...]]:
        files, names = self._files(self.mask_folder, self.mask_suffix, split), self._class_names()
        if self.one_object and len(names) != 2:
            raise ConfigurationError(
                "dataset.one_object=true expects two class names, background and object, got "
                f"{format_value(list(names))}",
                hint=("dataset.class_names=[background,object]",),
            )
        if self.colours is not None:
            return self._colour_masks(files, self.colours, len(names)), names
        count = len(names)
        first = int(self.reduce_zero)
        numbers = range(first, first + count) if self.numbers is None else self.numbers
        ignored = {IGNORE_INDEX} if self.ignored is None else set(self.ignored)
        ignored |= {0} if self.reduce_zero else set()
        if len(set(numbers)) != count or not set(numbers).isdisjoint(ignored):
            raise ConfigurationError(
                f"dataset.numbers must contain {count} different numbers, one for each class, and "
                f"no number of dataset.ignored, got dataset.numbers={format_value(list(numbers))} "
                f"and dataset.ignored={format_value(sorted(ignored))}"
            )
        if not {*numbers, *ignored} <= set(range(256)):
            raise ConfigurationError(
                "dataset.numbers and dataset.ignored must be between 0 and 255"
            )
        classes = {number: index for index, number in enumerate(numbers)}
        hint = (
            "List the numbers of all classes in dataset.numbers and other numbers in "
            "dataset.ignored, and check dataset.class_names"
        )
        labels = LabelMap({**classes, **dict.fromkeys(ignored, IGNORE_INDEX)}, hint)
        is_ambiguous = self.ignored is None and list(numbers) == [0, 1]
        return (TwoClassMasks if is_ambiguous else IndexMasks)(files, labels), names

    def _colour_masks(self, files: Files, classes: Sequence[Rgb], count: int) -> ColourMasks:
        colours = [(r, g, b) for r, g, b in (*classes, *self.ignored_colours)]
        if len(classes) != count or len(set(colours)) != len(colours):
            raise ConfigurationError(
                f"dataset.colours must contain {count} different colours, one for each class, and "
                f"no colour of dataset.ignored_colours, got {len(classes)} colours"
            )
        numbers = {
            number: number if number < count else IGNORE_INDEX for number in range(len(colours))
        }
        return ColourMasks(files, LabelMap(numbers, hint="-"), colours=colours)

    def _root(self) -> Path:
        names = {Split.parse(split).name for split in (self.train_split, self.val_split)}
        return find_root(
            self.root,
            name=self.name,
            subfolders=(),
            marker_folders=[self.image_folder.replace(_SPLIT, name) for name in sorted(names)],
            tree=self._tree(),
        )

    def _tree(self) -> str:
        names = dict.fromkeys(Split.parse(s).name for s in (self.train_split, self.val_split))
        splits = f"{{{','.join(names)}}}" if len(names) > 1 else next(iter(names))
        images = f"{self.image_folder}/*{self.image_suffix}"
        masks = f"{self.mask_folder}/*{self.mask_suffix}"
        return f"{images} and {masks}".replace(_SPLIT, splits)
