"""`ssl-bench features`: write the features of all images of a dataset to files with an index."""

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import torch

from ssl_bench.composition.choices import require_choice
from ssl_bench.composition.compose import add_data_root, build, compose_config
from ssl_bench.composition.fields import Count, require_type
from ssl_bench.data.files.readable import (
    OnBadImage,
    ReadabilityCache,
    leave_out_unreadable,
    suggest_skipping,
    summarize_left_out,
)
from ssl_bench.data.samples import SPLITS_OF_ROLES, Dataset, ImageSet
from ssl_bench.data.splits import apply_shared_values, read_shared_values
from ssl_bench.errors import CheckpointError, ConfigurationError, UnreadableImageError
from ssl_bench.evaluation import unreadable_ids
from ssl_bench.features import FeatureExtractor, resize_image
from ssl_bench.layers import resolve_layers
from ssl_bench.models.loading.load import load_and_log, newest_checkpoint, require_layers
from ssl_bench.request import parse_on_bad_image, require_dataset
from ssl_bench.system.device import choose_device
from ssl_bench.system.files import (
    remove_orphans_below,
    require_writable,
    write_atomically,
    write_text_atomically,
)
from ssl_bench.system.output import (
    escape_undecodable,
    format_size,
    print_message,
    show_progress,
    to_plain_json,
)
from ssl_bench.system.process import require_single_process, reraise_out_of_memory

FORMATS = ("safetensors", "npz")
DTYPES = ("float32", "float16")
_SPLITS = ("train", "val", "images", "discovery")
# Videos are left out, because only their first frames would be written.
_ANNOTATED_ROLES = ("segmentation", "classification", "correspondence", "depth", "instances")
# Maximum number of bytes and of images in one file of features.
_MAX_BYTES, _MAX_IMAGES = 64 * 2**20, 1024
_BATCH_SIZE = 16
_ABOUT, _INDEX = "about.json", "index.parquet"


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Write the features of a dataset, an index of the images, and a description in `about.json`.

    Images are resized to squares with a side of `--image-size` pixels, or to the encoder's native
    size by default. A file of features contains arrays such as "block05.token" (images x patch rows
    x patch columns x dim) and "block05.cls" (images x dim). For each image, the index states the
    split, the class, the file of features and the row in this file. Complete files from an earlier
    run are kept.
    """
    require_single_process("features")
    require_choice("format", options.format, FORMATS)
    require_choice("dtype", options.dtype, DTYPES)
    on_bad_image = parse_on_bad_image(options.on_bad_image)
    require_type("--batch-size", Count | None, options.batch_size)
    require_type("--image-size", Count | None, options.image_size)
    require_layers(options.layer, [options.checkpoint] if options.checkpoint else [])
    import pyarrow
    import pyarrow.parquet

    dataset, bits = _open_dataset(options, overrides, on_bad_image)
    splits = {images.split: images for images in _select_splits(dataset, options.split)}
    out = Path(options.out)
    require_writable(out)
    remove_orphans_below(out)
    device = choose_device(options.device)
    encoder = load_and_log(options.checkpoint or newest_checkpoint(Path("runs")))
    extractor = FeatureExtractor(
        encoder,
        layers=resolve_layers(options.layer, encoder.depth),
        facets=[name.strip() for name in options.facet.split(",")],
        device=device,
    )
    side = options.image_size
    size = (side, side) if side else encoder.native_size
    extractor.require_size(*size)
    about = {
        "encoder": {"name": encoder.name, "uri": encoder.uri, **encoder.identity()},
        "dataset": {
            "name": dataset.name,
            "splits": {name: images.fingerprint() for name, images in splits.items()},
            "left_out": summarize_left_out(unreadable_ids(dataset)),
            "bits": bits,
        },
        "layers": list(extractor.layers),
        "facets": list(extractor.facets),
        "image_size": list(size),
        "dtype": options.dtype,
        "format": options.format,
    }
    _write_or_check_description(out / _ABOUT, json.loads(json.dumps(about)))
    num_bytes = _bytes_per_image(extractor, size, options.dtype) * sum(map(len, splits.values()))
    print_message(f"images are resized to {size[0]} x {size[1]} pixels")
    print_message(f"writing {format_size(num_bytes)} of features to {out}")
    rows: list[dict[str, Any]] = []
    for images in splits.values():
        rows += _write_split(images, extractor, size, out, options)
    table = pyarrow.Table.from_pylist(to_plain_json(rows, text=escape_undecodable))
    write_atomically(out / _INDEX, lambda file: pyarrow.parquet.write_table(table, file))
    print_message(
        f"features of {len(rows)} images are in {out}. "
        f"{_INDEX} lists the file and row of each image"
    )
    return 0


def _open_dataset(
    options: argparse.Namespace, overrides: Sequence[str], on_bad_image: OnBadImage | None
) -> tuple[Dataset, int | None]:
    """Return the dataset, and the number of bits that its 16-bit images use (`data.bits`).

    Args:
        options: Options of the command, with the name and the folder of the dataset.
        overrides: KEY=VALUE settings.
        on_bad_image: Whether unreadable images are left out ("skip") or raise an error ("fail"), or
            None for the default of the dataset.
    """
    name, root = require_dataset(options.dataset)
    words = [f"dataset={name}", *add_data_root(overrides, root or options.data_root)]
    config = compose_config("data", words)
    values = read_shared_values(config)
    dataset: Dataset = build(config, "dataset")
    view = apply_shared_values(dataset, values)
    readable = leave_out_unreadable(view, dataset, on_bad_image, ReadabilityCache())
    return readable, values["data.bits"]


def _select_splits(dataset: Dataset, text: str | None) -> list[ImageSet]:
    """Return the splits of a dataset that `text` names, such as "train,val".

    If `text` is None, return all splits with annotations. If the dataset has no annotations, return
    the split with all of its images.
    """
    if text is not None:
        names = [require_choice("split", name.strip(), _SPLITS) for name in text.split(",")]
    elif annotated := [role for role in _ANNOTATED_ROLES if role in dataset.supports]:
        names = [*dict.fromkeys(chain.from_iterable(SPLITS_OF_ROLES[role] for role in annotated))]
    else:
        names = ["images" if "images" in dataset.supports else "discovery"]
    return [getattr(dataset, name)() for name in names]


def _write_or_check_description(path: Path, about: Mapping[str, Any]) -> None:
    """Write the description `about` of the features to the file `path`.

    If the folder of this file already contains features, only check that they have the same
    description, so that more features may be added.

    Raises:
        ConfigurationError: The folder contains features with another description.
    """
    # If the folder contains no features, replace an existing description.
    if not (path.is_file() and any(path.parent.glob("*-[0-9]*.*"))):
        write_text_atomically(path, json.dumps(about, indent=1) + "\n")
        return
    try:
        existing = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        existing = None
    if existing != about:
        known = existing if isinstance(existing, dict) else {}
        different = ", ".join(key for key in about if known.get(key) != about[key])
        raise ConfigurationError(
            f"{path.parent} already contains features that were written with other values of "
            f"{different}. Choose another folder",
            hint=("--out", "{folder}"),
        )


def _write_split(
    images: ImageSet,
    extractor: FeatureExtractor,
    size: tuple[int, int],
    out: Path,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Write the missing feature files of a split to the folder `out`.

    Images are resized to `size`, the (height, width) in pixels. Return one row of the file
    `index.parquet` for each image of the split.
    """
    num_bytes = _bytes_per_image(extractor, size, options.dtype)
    per_file = max(1, min(_MAX_IMAGES, _MAX_BYTES // num_bytes))
    starts = range(0, len(images), per_file)
    paths = {start: out / f"{images.split}-{start:07}.{options.format}" for start in starts}
    listed = {start: read for start in starts if (read := _read_ids_and_labels(paths[start]))}
    if listed:
        print_message(f"{images.split}: {len(listed)} of {len(starts)} files exist and are kept")
    missing = [start for start in starts if start not in listed]
    for start in show_progress(missing, f"features of {images.split}"):
        indices = range(start, min(start + per_file, len(images)))
        arrays = _extract(images, indices, extractor, size, options)
        _write(paths[start], arrays, options.format)
        listed[start] = arrays["image_id"].tolist(), arrays["label"].tolist()
    return [
        {
            "image_id": image_id,
            "split": images.split,
            "label": label if label >= 0 else None,
            "class": images.class_names[label] if label >= 0 else None,
            "file": paths[start].name,
            "row": row,
        }
        for start in starts
        for row, (image_id, label) in enumerate(zip(*listed[start], strict=True))
    ]


def _bytes_per_image(extractor: FeatureExtractor, size: tuple[int, int], dtype: str) -> int:
    count = 0
    for layer in extractor.layers:
        stride, width = extractor.encoder.stride(layer), extractor.encoder.width(layer)
        patches = (size[0] // stride) * (size[1] // stride)
        for facet in extractor.facets:
            # Features from inside a block may be wider than its tokens.
            channels = width * extractor.width(facet) // extractor.dim
            count += channels * (1 if facet.startswith("cls") else patches)
    return count * np.dtype(dtype).itemsize


def _extract(
    images: ImageSet,
    indices: range,
    extractor: FeatureExtractor,
    size: tuple[int, int],
    options: argparse.Namespace,
) -> dict[str, np.ndarray]:
    """Compute the features of the images at `indices`, after resizing them to `size`.

    `size` is the (height, width) in pixels.

    Returns:
        Arrays whose first axis is the image. Features have keys such as "block05.token", with the
        block and the facet (kind of feature). The key "image_id" has the image ids. The key "label"
        has the class indices, or -1 for images without a class.
    """
    parts: dict[str, list[np.ndarray]] = {}
    ids, labels = list[str](), list[int]()
    batch_size = options.batch_size or _BATCH_SIZE
    for start in range(0, len(indices), batch_size):
        try:
            # Resize images one by one, because a batch of large photographs may not fit into
            # memory.
            batch = [
                (resize_image(sample.image, size), sample.image_id, sample.label)
                for sample in map(images.__getitem__, indices[start : start + batch_size])
            ]
        except UnreadableImageError as error:
            raise suggest_skipping(error) from error
        pixels = torch.stack([image for image, _, _ in batch])
        names = [name for _, name, _ in batch]
        for layer, by_facet in extractor(pixels, names).items():
            for facet, value in by_facet.items():
                values, name = value.cpu().numpy(), f"block{layer:02}.{facet}"
                _require_range(values, options.dtype, name)
                parts.setdefault(name, []).append(values.astype(options.dtype))
        ids += names
        labels += [-1 if label is None else label for _, _, label in batch]
    arrays = {name: np.concatenate(values) for name, values in parts.items()}
    arrays["image_id"] = np.array(ids, dtype=str)
    arrays["label"] = np.array(labels, dtype=np.int64)
    return arrays


def _require_range(values: np.ndarray, dtype: str, name: str) -> None:
    """Check that the number format `dtype` can store the largest absolute value of a feature array.

    `name` is the name of the array for the error message, such as "block05.token".

    Raises:
        CheckpointError: The largest absolute value would overflow or underflow.
    """
    largest = float(np.abs(values).max(initial=0.0))
    lowest, highest = float(np.finfo(dtype).tiny), float(np.finfo(dtype).max)
    if largest and not lowest <= largest <= highest:
        raise CheckpointError(
            f"the largest magnitude in {name} is {largest:.2g}, but {dtype} only stores magnitudes "
            f"from {lowest:.2g} to {highest:.5g}",
            hint=("--dtype", "float32"),
        )


def _write(path: Path, arrays: dict[str, np.ndarray], file_format: str) -> None:
    if file_format == "npz":
        write_atomically(path, lambda file: np.savez(file, **arrays))  # pyrefly: ignore[bad-argument-type]
        return
    metadata = {name: json.dumps(arrays[name].tolist()) for name in ("image_id", "label")}
    features = {name: value for name, value in arrays.items() if name not in metadata}
    content = safetensors.numpy.save(features, metadata=metadata)
    write_atomically(path, lambda file: file.write(content))


def _read_ids_and_labels(path: Path) -> tuple[list[str], list[int]] | None:
    """Return the image ids and class labels in a file of features.

    Images without a class have the label -1. Return None if the file is missing or damaged.
    """
    try:
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                return arrays["image_id"].tolist(), arrays["label"].tolist()
        with safetensors.safe_open(path, "numpy") as file:
            metadata = file.metadata()
        return json.loads(metadata["image_id"]), json.loads(metadata["label"])
    # For damaged files, the readers of both formats raise many types of errors.
    except Exception as error:
        reraise_out_of_memory(error)
        return None
