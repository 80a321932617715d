"""Images and masks in folders, whatever these are called: Cityscapes, CamVid, your own."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int64, Integer, UInt8

from ssl_bench.composition.fields import MaskValue, OptionalPath, Rgb, format_value
from ssl_bench.data.files.file_sets import FileImageSet, Files, LabelMap, Masks
from ssl_bench.data.files.images import read_indices, read_mask_colours, read_palette
from ssl_bench.data.layouts.lists import find_image_ids, read_list
from ssl_bench.data.samples import IGNORED, PUBLISHED, Layout, find_root, lacking, name_of_images
from ssl_bench.data.splits import Split, absent_split, read_lines, require_disjoint
from ssl_bench.errors import ConfigurationError, DataError, UnreadableImage
from ssl_bench.system.files import list_files

CLASSES_FILE = "classes.txt"
_SPLIT = "{split}"
Colour = tuple[int, int, int]


class PairedFolders(Layout):
    """What all such datasets have in common; each says where its files are and what masks mean."""

    supports: Any
    train_split: str
    val_split: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if "segmentation" in self.supports:
            require_disjoint(self.train_split, self.val_split)

    def train(self) -> FileImageSet:
        """Images with masks to fit to; an image or a mask without the other is an error."""
        return self._segmentation(self.train_split)

    def val(self) -> FileImageSet:
        """Images with masks to score with; errors are those of `train`."""
        return self._segmentation(self.val_split)

    def images(self) -> FileImageSet:
        """The pictures of `train_split`, of which there have to be some."""
        return self._set(self.train_split, None, ()).validate()

    def _segmentation(self, split: str) -> FileImageSet:
        return self._set(split, *self._masks(split)).validate()

    def _set(self, split: str, masks: Masks | None, class_names: tuple[str, ...]) -> FileImageSet:
        images = self._images(split)
        source, ids = self._listed(split, images, masks)
        share = Split.parse(split).cut(ids)
        if isinstance(masks, IndexMasks) and share:
            masks = replace(masks, reference=masks.files.path(share[0]))
        return FileImageSet(
            name=self._images_name,
            split=split,
            source=source,
            ids=share,
            images=images,
            class_names=class_names,
            masks=masks,
        )

    def _listed(
        self, split: str, images: Files, masks: Masks | None
    ) -> tuple[Path, Collection[str]]:
        """Where the ids of a whole split come from, and they."""
        del split
        # Of both: an image that got lost must not shrink the split in silence.
        return images.folder, {*images.ids(), *(masks.files.ids() if masks else ())}

    @cached_property
    def _images_name(self) -> str:
        files = self._counted()
        present = {role: one.ids() for role, one in files.items() if one.folder.is_dir()}
        return name_of_images(self.name, present)

    def _images(self, split: str) -> Files:
        raise NotImplementedError

    def _masks(self, split: str) -> tuple[Masks, tuple[str, ...]]:
        """Those of a split, and the names of their classes."""
        raise NotImplementedError

    def _counted(self) -> Mapping[str, Files]:
        """The whole splits by role, as published numbers count them."""
        raise NotImplementedError


def split_folder(parent: Path, split: str) -> Path:
    """The folder of a split; where there is none, an error with those that are there."""
    name = Split.parse(split).name
    if not (parent / name).is_dir():
        present = [folder.name for folder in parent.glob("*") if folder.is_dir()]
        raise absent_split(name, present, parent)
    return parent / name


@dataclass(frozen=True)
class NestedFiles(Files):
    """Files at any depth; the folders below the first are part of the ids."""

    def ids(self) -> list[str]:
        """What `list_files` finds, sorted."""
        return sorted(
            name.removesuffix(self.suffix)
            for name in list_files(self.folder)
            if self._is_one(name.rpartition("/")[2])
        )


@dataclass(frozen=True)
class IndexMasks(Masks):
    """Masks that store class numbers.

    Attributes:
        reference: A mask of the same split. Other masks must not store other numbers for the
            colours in its palette, as after a tool has sorted each palette.
        has_convention: Whether the first mask of a split is checked before a model is loaded.
    """

    has_convention: ClassVar[bool] = False

    reference: Path | None = None

    def read(self, image_id: str) -> UInt8[np.ndarray, "height width"]:
        """Return the classes of a mask.

        Raises:
            DataError: As for `Masks`, or the numbers have another meaning than expected.
        """
        path = self.files.path(image_id)
        if palette := read_palette(path):
            self._require_same_order(path, palette)
        numbers = read_indices(path)
        self.require_convention(numbers, path)
        return self.labels.apply(numbers, path)

    def require_convention(self, numbers: Integer[np.ndarray, "height width"], path: Path) -> None:
        """Raise DataError if the numbers of a mask follow another convention of its dataset."""

    def _require_same_order(self, path: Path, palette: Mapping[Colour, int]) -> None:
        expected, source = self._reference_palette, str(self.reference)
        greys = {r for r, g, b in palette if r == g == b}
        # A tool has stored a grey mask with a palette, so the grey value is the class number. Black
        # and white are also usual colours of the numbers 0 and 1.
        if greys - {0, 255} and len(greys) == len(palette) and greys <= self.labels.classes.keys():
            expected, source = {(grey, grey, grey): grey for grey in greys}, "its grey value"
        for colour, number in palette.items():
            if expected.get(colour, number) != number:
                raise DataError(
                    f"{path} stores {number} for the colour {list(colour)}, expected "
                    f"{expected[colour]} as in {source}. A tool has changed the order of the "
                    "palette. Use the original masks, or list the colours of all classes in "
                    "dataset.colours"
                )

    @cached_property
    def _reference_palette(self) -> Mapping[Colour, int]:
        return read_palette(self.reference) if self.reference else {}


@dataclass(frozen=True)
class TwoClassMasks(IndexMasks):
    """Masks of two classes in a dataset that does not state the meaning of 255."""

    has_convention = True

    def require_convention(self, numbers: Integer[np.ndarray, "height width"], path: Path) -> None:
        """Refuse a mask of 0 and 255, because 255 may be the second class or may be ignored."""
        if set(np.unique(numbers)) == {0, IGNORED}:
            raise DataError(
                f"{path} holds 0 and 255 but no 1, the number of the second class; either 255 is "
                "that class, or such pixels do not count",
                hint=(
                    "dataset.numbers=[0,255]",
                    "dataset.ignored=[]",
                    "or",
                    "dataset.ignored=[255]",
                ),
            )


@dataclass(frozen=True)
class ColourMasks(Masks):
    """Masks that are pictures, with a colour for each number of `labels`."""

    colours: Sequence[Colour] = ()

    def read(self, image_id: str) -> UInt8[np.ndarray, "height width"]:
        """As that of `Masks`, which also refuses a colour that has no class."""
        path = self.files.path(image_id)
        packed = _packed(read_mask_colours(path))
        known = _packed(np.array([self.colours], np.uint8))[0]
        order = known.argsort()
        place = np.searchsorted(known, packed, sorter=order).clip(max=len(known) - 1)
        numbers = order[place]
        strange = known[numbers] != packed
        if strange.any():
            value = int(packed[strange][0])
            colour = [value >> 16, value >> 8 & 255, value & 255]
            raise DataError(
                f"{path} holds the colour {colour}, which is neither in dataset.colours nor in "
                "dataset.ignored_colours; add it there, or save masks without loss, as PNG"
            )
        return self.labels.apply(numbers, path)

    def meaning(self) -> str:
        return f"{super().meaning()} {list(self.colours)}"


def _packed(pixels: UInt8[np.ndarray, "height width 3"]) -> Int64[np.ndarray, "height width"]:
    """Colours as one number each."""
    return pixels.astype(np.int64) @ np.array([65536, 256, 1])


@dataclass(frozen=True)
class ImageMaskFolders(PairedFolders):
    """A folder of images and one of masks for each split; a mask has its image's name.

    Attributes:
        name: By which records and tables call it.
        image_folder: Below the root, with `{split}` for the name of the split. Deeper folders may
            part the images further, alike for their masks.
        mask_folder: Below the root, with `{split}` for the name of the split.
        image_suffix: What follows the common part of the names.
        lists: File with the names of a split, one a line, in place of all that is in the folders.
        class_names: Without them those in classes.txt, one a line; with `one_object` neither is
            needed.
        numbers: What the masks store for each class; 0, 1, 2 ... if None.
        reduce_zero: The classes begin at one and zero is ignored.
        ignored: Numbers that do not count; any other is an error. 255 if None.
        colours: Red, green and blue of each class, where masks are pictures.
        ignored_colours: Colours that do not count.
        one_object: Masks are of the background, class 0, and of one object, class 1. Then both
            splits may be the same one, to which nothing can be fitted.
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
        """Heads are fitted where there are two splits."""
        saliency = {"saliency"} if self.one_object else set()
        has_two = not self.one_object or self.train_split != self.val_split
        return frozenset({"images", *saliency, *(["segmentation"] if has_two else [])})

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.colours is not None) + (self.numbers is not None) + self.reduce_zero > 1:
            raise ConfigurationError(
                "dataset.colours, dataset.numbers and dataset.reduce_zero=true exclude each other; "
                "give one of them"
            )
        if self._together and self.image_suffix == self.mask_suffix:
            raise ConfigurationError(
                f"images and masks are both {self.image_folder}/*{self.image_suffix}",
                hint=(
                    "dataset.mask_folder={mask_folder}",
                    "or",
                    "dataset.mask_suffix={mask_suffix}",
                ),
            )

    def train(self) -> FileImageSet:
        """As that of `PairedFolders`, which also refuses two splits that are the same one."""
        if "segmentation" not in self.supports:
            raise lacking(self.name, "segmentation")
        return super().train()

    def _images(self, split: str) -> Files:
        return self._files(self.image_folder, self.image_suffix, split)

    def _segmentation(self, split: str) -> FileImageSet:
        found = super()._segmentation(split)
        if isinstance(found.masks, IndexMasks) and found.masks.has_convention:
            with suppress(UnreadableImage):
                found.masks.read(found.ids[0])
        return found

    def _listed(
        self, split: str, images: Files, masks: Masks | None
    ) -> tuple[Path, Collection[str]]:
        if self.lists is None:
            return super()._listed(split, images, masks)
        source = self._root() / self.lists.replace(_SPLIT, Split.parse(split).name)
        return source, find_image_ids(read_list(source), images)

    def _counted(self) -> dict[str, Files]:
        root, folder = self._root(), self.image_folder
        return {
            role: NestedFiles(root / folder.replace(_SPLIT, role), self.image_suffix)
            for role in PUBLISHED.get(self.name, ())
        }

    def _files(self, pattern: str, suffix: str, split: str) -> NestedFiles:
        other = self.mask_suffix if suffix == self.image_suffix else self.image_suffix
        # `*.png` are also those that end in `_label.png`, which is the other kind.
        hidden = other if self._together and other.endswith(suffix) else None
        return NestedFiles(self._folder(pattern, split), suffix, hidden)

    @property
    def _together(self) -> bool:
        """Whether images and masks lie beside each other."""
        return self.image_folder == self.mask_folder

    def _folder(self, pattern: str, split: str) -> Path:
        root, name = self._root(), Split.parse(split).name
        folder = root / pattern.replace(_SPLIT, name)
        if folder.is_dir():
            return folder
        if _SPLIT not in pattern:
            raise DataError(f"{folder} is not there; expected {self._tree()}")
        before, _, after = pattern.partition(_SPLIT)
        parent, prefix = (root / f"{before}x").parent, f"{before}x".rpartition("/")[2][:-1]
        end = after.partition("/")[0]
        names = [one.name for one in parent.glob(f"{prefix}*{end}") if one.is_dir()]
        present = [one.removeprefix(prefix).removesuffix(end) for one in names]
        raise absent_split(name, present, parent)

    def _class_names(self) -> tuple[str, ...]:
        if self.class_names:
            return tuple(self.class_names)
        path = self._root() / CLASSES_FILE
        if self.one_object and not path.is_file():
            return ("background", "object")
        if not path.is_file():
            raise DataError(
                f"{self.name} needs the names of its classes, here or one a line in {path}",
                hint=("dataset.class_names=[road,sky]",),
            )
        lines = (line.strip() for line in read_lines(path))
        return tuple(line for line in lines if line)

    def _masks(self, split: str) -> tuple[Masks, tuple[str, ...]]:
        files, names = self._files(self.mask_folder, self.mask_suffix, split), self._class_names()
        if self.one_object and len(names) != 2:
            raise ConfigurationError(
                "dataset.one_object=true expects two names, background and object, got "
                f"{format_value(list(names))}",
                hint=("dataset.class_names=[background,object]",),
            )
        if self.colours is not None:
            return self._colour_masks(files, len(names)), names
        count = len(names)
        first = int(self.reduce_zero)
        numbers = range(first, first + count) if self.numbers is None else self.numbers
        ignored = {IGNORED} if self.ignored is None else set(self.ignored)
        ignored |= {0} if self.reduce_zero else set()
        if len(set(numbers)) != count or not set(numbers).isdisjoint(ignored):
            raise ConfigurationError(
                f"dataset.numbers must be {count} different numbers, one a class and none of "
                f"dataset.ignored, got {format_value(list(numbers))} and "
                f"{format_value(sorted(ignored))}"
            )
        if not {*numbers, *ignored} <= set(range(256)):
            raise ConfigurationError("dataset.numbers and dataset.ignored must lie in 0..255")
        classes = {number: index for index, number in enumerate(numbers)}
        hint = (
            "name those that do not count in dataset.ignored and those of the classes in "
            "dataset.numbers; is dataset.class_names complete?"
        )
        labels = LabelMap({**classes, **dict.fromkeys(ignored, IGNORED)}, hint)
        is_unsaid = self.ignored is None and list(numbers) == [0, 1]
        return (TwoClassMasks if is_unsaid else IndexMasks)(files, labels), names

    def _colour_masks(self, files: Files, count: int) -> ColourMasks:
        assert self.colours is not None
        colours = [(r, g, b) for r, g, b in (*self.colours, *self.ignored_colours)]
        if len(self.colours) != count or len(set(colours)) != len(colours):
            raise ConfigurationError(
                f"dataset.colours must be {count} different colours, one a class and none of "
                f"dataset.ignored_colours, got {len(self.colours)}"
            )
        classes = {number: number if number < count else IGNORED for number in range(len(colours))}
        return ColourMasks(files, LabelMap(classes, hint="-"), colours=colours)

    def _root(self) -> Path:
        names = {Split.parse(split).name for split in (self.train_split, self.val_split)}
        return find_root(
            self.root,
            name=self.name,
            inside=(),
            landmarks=[self.image_folder.replace(_SPLIT, name) for name in sorted(names)],
            tree=self._tree(),
        )

    def _tree(self) -> str:
        names = dict.fromkeys(Split.parse(s).name for s in (self.train_split, self.val_split))
        splits = f"{{{','.join(names)}}}" if len(names) > 1 else next(iter(names))
        images = f"{self.image_folder}/*{self.image_suffix}"
        masks = f"{self.mask_folder}/*{self.mask_suffix}"
        return f"{images} and {masks}".replace(_SPLIT, splits)
