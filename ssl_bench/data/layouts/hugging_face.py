"""Datasets of Hugging Face, from the hub, its cache on disk, or a folder of parquet files.

The datasets are read with the library `datasets`, an optional dependency (`ssl-bench[hf]`). Images
and masks are decoded in the same way as image files on disk.
"""

import os
import re
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, get_args

import huggingface_hub
import numpy as np
from jaxtyping import Integer

from ssl_bench.composition.fields import OptionalPath
from ssl_bench.data.files.images import decode_image, decode_integer_image, decode_oriented
from ssl_bench.data.layouts.indexed import (
    Annotation,
    IndexedDataset,
    Item,
    ItemIdentity,
    Items,
    SelectedItems,
    digest_of_parts,
    to_corners,
)
from ssl_bench.data.splits import Split, missing_split_error, require_disjoint
from ssl_bench.errors import (
    ConfigurationError,
    DataError,
    MachineError,
    escape_braces,
    join_alternatives,
)
from ssl_bench.network import DownloadError, open_url
from ssl_bench.system.files import expand_path, read_regular
from ssl_bench.system.output import print_message_once
from ssl_bench.system.process import reraise_out_of_memory

_IMAGE_NAMES = ("image", "img")
_LABEL_NAMES = ("label", "labels")
_BOX_NAMES = ("bbox", "bboxes", "box", "boxes")
_VALIDATION_NAMES = ("validation", "val", "valid", "dev", "test")
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Columns:
    """Names of the columns with images and annotations, or None for columns that do not exist.

    The name "objects.bbox" stands for the column `bbox`, which is nested in the column `objects`.
    """

    image: str
    label: str | None
    mask: str | None
    boxes: str | None


class TableItems(Items):
    """Sequence of images and annotations from the rows of a `datasets.Dataset`.

    Args:
        table: The dataset.
        split: Name of the split, for messages.
        options: Settings of the user, such as the names of the columns and the format of the boxes.
    """

    def __init__(self, table: Any, split: str, options: IndexedDataset) -> None:
        super().__init__()
        import datasets

        self.title = f"{table.info.dataset_name or type(table).__name__} {split}"
        if table.format["type"] == "custom":
            raise ConfigurationError(
                f"{split} has a transform, which would be ignored. Pass the dataset without it: "
                "dataset.with_format(None)"
            )
        self.columns = find_columns(table.features, options, self.title)
        self.annotations = frozenset(
            kind for kind in get_args(Annotation) if getattr(self.columns, kind) is not None
        )
        self._box_format = options.box_format if self.columns.boxes else None
        if self.columns.boxes and self._box_format is None:
            raise ConfigurationError(
                f"{self.title} does not state the format of the boxes in {self.columns.boxes}",
                hint=("dataset.box_format=xyxy", "or", "dataset.box_format=xywh"),
            )
        if self.columns.label:
            self.class_names = tuple(getattr(table.features[self.columns.label], "names", ()) or ())
        names = [self.columns.image, self.columns.label, self.columns.mask]
        names += [self.columns.boxes.partition(".")[0]] if self.columns.boxes else []
        table = table.with_format(None).select_columns([name for name in names if name])
        for column in filter(None, (self.columns.image, self.columns.mask)):
            table = table.cast_column(column, datasets.Image(decode=False))
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def read(self, index: int, bits: int | None = None) -> Item:
        row, place, columns = self._table[index], self.describe_item(index), self.columns
        # Masks and boxes refer to the pixels before the EXIF orientation is applied.
        decode = decode_image if columns.mask or columns.boxes else decode_oriented
        image = decode(_read_bytes(row[columns.image], place), place, bits)
        mask = self.read_mask(index) if columns.mask else None
        boxes = None
        if columns.boxes and self._box_format:
            try:
                boxes = to_corners(_get_boxes(row, columns.boxes), self._box_format)
            except (ValueError, TypeError) as error:
                raise DataError(f"{place}, {columns.boxes}: {error}") from error
        allows_flat_boxes = self._box_format == "xywh"
        return Item(image, self._get_label(row, place), mask, boxes, allows_flat_boxes)

    def read_identity(self, index: int) -> ItemIdentity:
        row, place, columns = self._table[index], self.describe_item(index), self.columns
        image_digest = digest_of_parts(_read_bytes(row[columns.image], place))
        parts = [_read_bytes(row[columns.mask], place)] if columns.mask else []
        label = self._get_label(row, place)
        boxes = repr(_get_boxes(row, columns.boxes)) if columns.boxes else None
        described = repr((image_digest, label, boxes, self._box_format)).encode()
        return ItemIdentity(digest_of_parts(described, *parts), image_digest, label)

    def read_mask(self, index: int) -> Integer[np.ndarray, "rows cols"]:
        data = _read_bytes(self._table[index][self.columns.mask], self.describe_item(index))
        return decode_integer_image(data, f"the mask of {self.describe_item(index)}")

    @cached_property
    def labels(self) -> list[int]:
        """Return the class label of each row."""
        return list(self._table[self.columns.label])

    def _get_label(self, row: Mapping[str, Any], place: str) -> int | None:
        if self.columns.label is None:
            return None
        label = row[self.columns.label]
        if not isinstance(label, int):
            raise DataError(f"{place} has the label {label!r}, expected a whole number")
        return label


def _read_bytes(value: Any, place: str) -> bytes:
    """Return the bytes of an encoded image, such as a JPEG.

    Args:
        value: Value of an image column of `datasets`: a mapping with the encoded "bytes", or with
            the "path" of the image file.
        place: Description of the image, for error messages.
    """
    if not isinstance(value, Mapping):
        raise DataError(f"the image or mask of {place} is missing. Remove this row")
    if value.get("bytes") is not None:
        return value["bytes"]
    try:
        return read_regular(Path(value["path"]))
    except (OSError, TypeError, ValueError) as error:
        raise DataError(f"cannot read {value.get('path')} of {place} ({error})") from error


def _get_boxes(row: Mapping[str, Any], column: str) -> Any:
    """Return the boxes in a row of a table.

    In a nested column such as "objects.bbox", the value of `objects` is one dictionary for all
    objects, or a list with one dictionary for each object.
    """
    first, *rest = column.split(".")
    value = row[first]
    for name in rest:
        value = [one[name] for one in value] if isinstance(value, list) else value[name]
    return value


def find_columns(features: Mapping[str, Any], options: IndexedDataset, title: str) -> Columns:
    """Find the columns of images and annotations by their types and names.

    Args:
        features: Type of each column of the table, by column name.
        options: Settings of the user, which may contain names of columns.
        title: Name of the table, for messages.

    Raises:
        ConfigurationError: A column that the user named does not exist, or the user must choose
            between several columns.
        DataError: There is no column with images.
    """
    import datasets

    pictures = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    labels = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    labels = labels or [
        name
        for name, kind in features.items()
        if name in _LABEL_NAMES and str(getattr(kind, "dtype", "")).startswith(("int", "uint"))
    ]
    boxes = [*_find_box_columns(features)]
    image, label = options.image_column, options.label_column
    mask, box = options.mask_column, options.box_column
    known = {"image": pictures, "label": [*features], "mask": pictures, "box": boxes}
    for kind, name in {"image": image, "label": label, "mask": mask, "box": box}.items():
        if name is not None and name not in known[kind]:
            raise ConfigurationError(
                f"dataset.{kind}_column expects a {kind} column of {title} (existing ones: "
                f"{', '.join(known[kind]) or 'none'}), got {name}"
            )
    if image is None:
        usual = [name for name in pictures if name in _IMAGE_NAMES]
        image = _choose_column("image", usual or pictures, title)
    if image is None:
        raise DataError(
            f"{title} has no images, only the columns {', '.join(features)}. Pass another dataset"
        )
    # If a dataset has labels and masks, the user must choose one of them.
    others = [name for name in pictures if name != image]
    if mask is None and label is None:
        mask = _choose_column("mask", others, title)
        label = _choose_column("label", labels, title)
        if mask and label:
            raise ConfigurationError(
                f"{title} has labels (column {label}) and masks (column {mask}). Choose one of "
                "them",
                hint=(
                    f"dataset.label_column={escape_braces(label)}",
                    "or",
                    f"dataset.mask_column={escape_braces(mask)}",
                ),
            )
    if box is None and not (mask or label):
        box = _choose_column("box", boxes, title)
    chosen = {"labels": label, "masks": mask, "boxes": box}
    described = "".join(f", {kind} in {name}" for kind, name in chosen.items() if name)
    print_message_once(f"{title}: images in {image}{described}")
    return Columns(image, label, mask, box)


def _choose_column(kind: str, names: Sequence[str], title: str) -> str | None:
    """Return the only column name in `names`, or None if `names` is empty.

    The error message contains `kind`, such as "mask", and the `title` of the table.

    Raises:
        ConfigurationError: There are several names.
    """
    if len(names) < 2:
        return next(iter(names), None)
    ways = [(f"dataset.{kind}_column={escape_braces(name)}",) for name in names]
    raise ConfigurationError(
        f"{title} has several columns that may be the {kind} column: {', '.join(names)}",
        hint=join_alternatives(*ways),
    )


def _find_box_columns(features: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, kind in features.items():
        inner = getattr(kind, "feature", kind)
        if name in _BOX_NAMES and not isinstance(inner, Mapping):
            yield f"{before}{name}"
        elif isinstance(inner, Mapping) and not before:
            yield from _find_box_columns(inner, f"{name}.")


@dataclass(frozen=True)
class HuggingFace(IndexedDataset):
    """A dataset on the hub of Hugging Face, or in a folder that the library `datasets` can read.

    Attributes:
        root: ORG/NAME or ORG/NAME@REVISION on the hub, or a folder, such as one with parquet files.
        subset: Name of a subset, which `datasets` calls a configuration (default: the only one).
        train_split: Training split, or a part of it such as `train:0-75%` (default: `train`).
        val_split: Scored split, or a part of it such as `test:0-50%` (default: the first existing
            split of `validation`, `val`, `valid`, `dev` and `test`).
    """

    name: str = "hf"
    root: OptionalPath = None
    subset: str | None = None
    train_split: str | None = None
    val_split: str | None = None

    @property
    def supports(self) -> frozenset[str]:
        if self.root is None:
            return frozenset(
                {"classification", "segmentation", "saliency", "discovery", "boxes", "images"}
            )
        return super().supports

    def list_sequences(self) -> Mapping[str, Items]:
        return self._items

    def select_items(self, usage: str) -> SelectedItems | None:
        if usage == "images" or (split := self._splits[usage]) is None:
            return None
        share = Split.parse(split)
        if self._splits["train"] and self._splits["val"]:
            require_disjoint(self._splits["train"], self._splits["val"])
        items = self._items[share.name]
        # Take the same fraction of each class, because rows are often sorted by class.
        groups: dict[int, list[str]] = {}
        labels = items.labels if "label" in items.annotations else [0] * len(items)
        for index, label in enumerate(labels):
            groups.setdefault(label, []).append(f"{index:09}")
        return SelectedItems(
            items, split, sorted(int(i) for ids in groups.values() for i in share.cut(ids))
        )

    def missing_images_error(self, usage: str) -> DataError:
        return missing_split_error(usage, [*self._tables], Path(str(self.root)))

    def result_name(self) -> str:
        if self.name != "hf":
            return self.name
        folder = expand_path(str(self.root))
        name = folder.name if folder.is_dir() else str(self.root).partition("@")[0].split("/")[-1]
        return f"{name}-{sum(map(len, self._items.values()))}"

    @cached_property
    def _splits(self) -> dict[str, str | None]:
        """Return the training split (key "train") and the scored split (key "val").

        Each value is the name of a split, a part such as `train:0-75%`, or None if there is no such
        split.
        """
        existing = (name for name in _VALIDATION_NAMES if name in self._tables)
        train = self.train_split or ("train" if "train" in self._tables else None)
        val = self.val_split or next(existing, None)
        if train is None and val is None:
            train = next(iter(self._tables))
        return {"train": train, "val": val}

    @cached_property
    def _items(self) -> Mapping[str, TableItems]:
        names = {Split.parse(split).name for split in self._splits.values() if split}
        for name in names - set(self._tables):
            raise missing_split_error(name, [*self._tables], Path(str(self.root)))
        return {name: TableItems(self._tables[name], name, self) for name in sorted(names)}

    @property
    def _tables(self) -> Mapping[str, Any]:
        if self.root is None:
            raise DataError(
                "dataset hf expects the name of a dataset on the hub, or a folder of parquet files",
                hint=("--dataset", "hf:{org}/{name}", "or", "--data-root", "{folder}"),
            )
        return load_tables(str(self.root), self.subset)


@cache
def load_tables(address: str, subset: str | None) -> Mapping[str, Any]:
    """Load a dataset with the library `datasets`. Return a dictionary of all splits.

    Args:
        address: A folder, or ORG/NAME or ORG/NAME@REVISION on the hub.
        subset: Name of a subset, or None for the default subset.

    Raises:
        MachineError: The library `datasets` is missing, or the hub cannot be reached.
        DataError: The dataset does not exist, or the library cannot read it.
    """
    folder = Path(address).expanduser()
    name, _, revision = address.partition("@")
    if not folder.is_dir() and (folder.exists() or not _REPOSITORY.fullmatch(name)):
        raise DataError(
            f"{address} is neither a folder nor a dataset on the hub, expected ORG/NAME or a folder"
        )
    try:
        import datasets
    except ImportError as error:
        raise MachineError(
            "dataset hf needs the package datasets, which is not installed. Run "
            "pip install 'ssl-bench[hf]'"
        ) from error
    with _hide_warnings(datasets):
        try:
            if folder.is_dir():
                loaded = datasets.load_dataset(str(folder.absolute()), subset)
            else:
                loaded = _load_from_hub(datasets, name, subset, revision or None)
        except (DataError, MachineError):
            raise
        # Each file format has its own reader, and readers raise errors of many types.
        except Exception as error:
            reraise_out_of_memory(error)
            reason = " ".join(str(error).split())[:300]
            raise DataError(
                f"the package `datasets` cannot read {address} ({type(error).__name__}: {reason})"
            ) from error
    return {str(split): table for split, table in loaded.items()}


def _load_from_hub(datasets: Any, name: str, subset: str | None, revision: str | None) -> Any:
    """Load a dataset from the hub, or from its cache on disk if the hub cannot be reached."""
    url = f"{huggingface_hub.constants.ENDPOINT}/api/datasets/{name}"
    headers = huggingface_hub.utils.build_hf_headers()
    try:
        open_url(urllib.request.Request(url, headers=headers)).close()
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 404):
            raise DataError(
                f"the hub has no dataset {name}, or you have no access to it ({url} answered "
                f"{error.code})"
            ) from error
    except DownloadError as error:
        with _enable_offline_mode(datasets):
            try:
                return datasets.load_dataset(name, subset, revision=revision)
            # An incomplete cache raises errors of many types.
            except Exception as missing:
                raise MachineError(
                    f"{error}, and {name} is not in the cache of the package `datasets`. Download "
                    "its parquet files on another machine",
                    hint=("--dataset", "hf:{folder}"),
                ) from missing
    return datasets.load_dataset(name, subset, revision=revision)


@contextmanager
def _enable_offline_mode(datasets: Any) -> Generator[None]:
    """Use the library `datasets` offline inside a `with` block.

    Otherwise, the library retries requests for half a minute if there is no network access.
    """
    modules = (datasets.config, huggingface_hub.constants)
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


@contextmanager
def _hide_warnings(datasets: Any) -> Generator[None]:
    """Hide the warnings of the library `datasets` inside a `with` block.

    If stderr is not a terminal, progress bars are hidden too.
    """
    level = datasets.logging.get_verbosity()
    had_bars = datasets.is_progress_bar_enabled()
    datasets.logging.set_verbosity_error()
    if not os.isatty(2):
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if had_bars:
            datasets.enable_progress_bars()
