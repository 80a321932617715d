"""`ssl-bench features`: features of every image of a dataset, of any blocks, as files."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import torch

from ssl_bench.composition.choices import choices, require_choice
from ssl_bench.composition.compose import add_data_root, build, compose_config
from ssl_bench.composition.fields import Count, require_type
from ssl_bench.data.files.readable import Looked, as_readable, counts_and_first, with_a_way_out
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.data.splits import as_asked, shared_values
from ssl_bench.errors import CheckpointError, ConfigurationError, UnreadableImage
from ssl_bench.evaluation import left_out
from ssl_bench.features import FeatureExtractor, squashed
from ssl_bench.layers import resolve_layers
from ssl_bench.models.loading.asked import announced_encoder, newest_checkpoint, require_layers
from ssl_bench.planning import require_on_bad_image, require_writable
from ssl_bench.system.device import choose_device
from ssl_bench.system.files import remove_orphans_below, write_atomically, write_text_atomically
from ssl_bench.system.launch import require_single_process
from ssl_bench.system.memory import pass_on_memory
from ssl_bench.system.progress import say, show_progress, size_in_words

FORMATS = ("safetensors", "npz")
DTYPES = ("float32", "float16")
_SPLITS = ("train", "val", "images", "discovery")
# Of a file.
_MOST_BYTES, _MOST_IMAGES = 64 * 2**20, 1024
_BATCH = 16
_ABOUT, _INDEX = "about.json", "index.parquet"


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Write `about.json`, files of features and an index; files that are there are kept.

    An image is squashed to a square of the encoder's own size, or of --image-size. A file holds
    "block05.token" (images x rows x cols x dim), "block05.cls" (images x dim) and so on; the index
    says for each image its split, class, file and row.
    """
    require_single_process("features")
    require_choice("--format", options.format, FORMATS)
    require_choice("--dtype", options.dtype, DTYPES)
    require_on_bad_image(options)
    require_type("--batch-size", Count | None, options.batch_size)
    require_type("--image-size", Count | None, options.image_size)
    require_layers(options.layer, [options.checkpoint] if options.checkpoint else None)
    import pyarrow
    import pyarrow.parquet

    dataset, bits = _dataset(options, overrides)
    splits = {images.split: images for images in _splits(dataset, options.split)}
    out = Path(options.out)
    require_writable(out)
    remove_orphans_below(out)
    device = choose_device(options.device)
    encoder = announced_encoder(options.checkpoint or newest_checkpoint(Path("runs")))
    extractor = FeatureExtractor(
        encoder,
        layers=resolve_layers(options.layer, encoder.depth),
        facets=[name.strip() for name in options.facet.split(",")],
        device=device,
    )
    asked = options.image_size
    size = encoder.native_size if asked is None else (asked, asked)
    extractor.require_size(*size)
    about = {
        "encoder": {"name": encoder.name, "uri": encoder.uri, **encoder.identity()},
        "dataset": {
            "name": dataset.name,
            "splits": {n: i.fingerprint() for n, i in splits.items()},
            "left_out": counts_and_first(left_out(dataset)),
            "bits": bits,
        },
        "layers": list(extractor.layers),
        "facets": list(extractor.facets),
        "image_size": list(size),
        "dtype": options.dtype,
        "format": options.format,
    }
    _require_same(out / _ABOUT, json.loads(json.dumps(about)))
    each = _bytes_an_image(extractor, size, options.dtype)
    total = size_in_words(each * sum(map(len, splits.values())))
    say(f"each image squashed to {size[0]} x {size[1]} pixels; {total} of features into {out}")
    rows: list[dict[str, Any]] = []
    for images in splits.values():
        rows += _write_split(images, extractor, size, out, options)
    table = pyarrow.Table.from_pylist(rows)
    write_atomically(out / _INDEX, lambda file: pyarrow.parquet.write_table(table, file))
    say(f"features of {len(rows)} images in {out}; {_INDEX} says where each of them is")
    return 0


def _dataset(options: argparse.Namespace, overrides: Sequence[str]) -> tuple[Dataset, int | None]:
    """What is asked for, and the bits that its pictures of 16 are said to use."""
    name = require_choice("dataset", options.dataset, choices("dataset"))
    words = [f"dataset={name}", *add_data_root(overrides, options.data_root)]
    config = compose_config("data", words)
    values = shared_values(config)
    built: Dataset = build(config.dataset)
    view = as_asked(built, values)
    return as_readable(view, built, options.on_bad_image, Looked()), values["data.bits"]


def _splits(dataset: Dataset, asked: str | None) -> list[ImageSet]:
    """Those that are asked for; else what is fitted to and scored, or all there is."""
    if asked is not None:
        names = [require_choice("--split", n.strip(), _SPLITS) for n in asked.split(",")]
    elif {"segmentation", "classification", "correspondence"} & dataset.supports:
        names = ["train", "val"]
    else:
        names = ["images" if "images" in dataset.supports else "discovery"]
    return [getattr(dataset, name)() for name in names]


def _require_same(path: Path, about: Mapping[str, Any]) -> None:
    """Begin in an empty folder, or go on with what was begun there."""
    # What was refused before the first features leaves a folder that anything may begin in.
    if path.is_file() and any(path.parent.glob("*-[0-9]*.*")):
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            before = None
        if before != about:
            known = before if isinstance(before, dict) else {}
            differ = ", ".join(k for k in about if known.get(k) != about[k])
            raise ConfigurationError(
                f"{path.parent} holds other features ({differ} differ); choose another folder",
                hint=("--out", "{folder}"),
            )
        return
    write_text_atomically(path, json.dumps(about, indent=1) + "\n")


def _write_split(
    images: ImageSet,
    extractor: FeatureExtractor,
    size: tuple[int, int],
    out: Path,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Every file of a split that is not there; what the index says of all of them."""
    each = _bytes_an_image(extractor, size, options.dtype)
    rows, per_file = list[dict[str, Any]](), max(1, min(_MOST_IMAGES, _MOST_BYTES // each))
    starts = range(0, len(images), per_file)
    names = {start: out / f"{images.split}-{start:07}.{options.format}" for start in starts}
    listed = {start: told for start in starts if (told := _listed(names[start]))}
    if listed:
        say(f"{images.split}: {len(listed)} of {len(starts)} files were written before, kept")
    lacking = [start for start in starts if start not in listed]
    for start in show_progress(lacking, f"features of {images.split}"):
        numbers = range(start, min(start + per_file, len(images)))
        found = _features(images, numbers, extractor, size, options)
        _write(names[start], found, options.format)
        listed[start] = found["image_id"].tolist(), found["label"].tolist()
    for start in starts:
        rows += [
            {
                "image_id": image_id,
                "split": images.split,
                "label": label if label >= 0 else None,
                "class": images.class_names[label] if label >= 0 else None,
                "file": names[start].name,
                "row": row,
            }
            for row, (image_id, label) in enumerate(zip(*listed[start], strict=True))
        ]
    return rows


def _bytes_an_image(extractor: FeatureExtractor, size: tuple[int, int], dtype: str) -> int:
    numbers = 0
    for layer in extractor.layers:
        stride, width = extractor.encoder.stride(layer), extractor.encoder.width(layer)
        patches = (size[0] // stride) * (size[1] // stride)
        for facet in extractor.facets:
            numbers += width * (1 if facet.startswith("cls") else patches)
    return numbers * (4 if dtype == "float32" else 2)


def _features(
    images: ImageSet,
    numbers: range,
    extractor: FeatureExtractor,
    size: tuple[int, int],
    options: argparse.Namespace,
) -> dict[str, np.ndarray]:
    """By name, with the ids and classes of the images."""
    parts: dict[str, list[np.ndarray]] = {}
    ids, labels = list[str](), list[int]()
    at_once = options.batch_size or _BATCH
    for start in range(0, len(numbers), at_once):
        try:
            # Photographs are squashed one by one, as whole ones of a batch would fill the memory.
            batch = [
                (squashed(sample.image, size), sample.image_id, sample.label)
                for sample in map(images.__getitem__, numbers[start : start + at_once])
            ]
        except UnreadableImage as error:
            raise with_a_way_out(error) from error
        pixels = torch.stack([image for image, _, _ in batch])
        names = [name for _, name, _ in batch]
        for layer, by_facet in extractor(pixels, names).items():
            for facet, value in by_facet.items():
                values, name = value.cpu().numpy(), f"block{layer:02}.{facet}"
                _require_range(values, options.dtype, name)
                parts.setdefault(name, []).append(values.astype(options.dtype))
        ids += names
        labels += [-1 if label is None else label for _, _, label in batch]
    found = {name: np.concatenate(those) for name, those in parts.items()}
    return found | {"image_id": np.array(ids, dtype=str), "label": np.array(labels, dtype=np.int64)}


def _require_range(values: np.ndarray, dtype: str, name: str) -> None:
    """Refuse features whose largest entry is no normal number of the type that keeps them.

    Raises:
        CheckpointError: It is too small or too large, so that precision would be lost.
    """
    largest = float(np.abs(values).max(initial=0.0))
    least, most = float(np.finfo(dtype).tiny), float(np.finfo(dtype).max)
    if largest and not least <= largest <= most:
        raise CheckpointError(
            f"{name} has entries up to {largest:.2g}, expected {least:.2g} to {most:.5g} in "
            f"{dtype}",
            hint=("--dtype", "float32"),
        )


def _write(path: Path, found: dict[str, np.ndarray], style: str) -> None:
    if style == "npz":
        write_atomically(path, lambda file: np.savez(file, **found))  # pyrefly: ignore[bad-argument-type]
        return
    told = {name: json.dumps(found[name].tolist()) for name in ("image_id", "label")}
    arrays = {name: value for name, value in found.items() if name not in told}
    write_atomically(path, lambda file: file.write(safetensors.numpy.save(arrays, metadata=told)))


def _listed(path: Path) -> tuple[list[str], list[int]] | None:
    """Ids and classes (-1 for none) of a file's images; None where it is not there or damaged."""
    try:
        if path.suffix == ".npz":
            with np.load(path) as held:
                return held["image_id"].tolist(), held["label"].tolist()
        with safetensors.safe_open(path, "numpy") as held:
            told = held.metadata()
        return json.loads(told["image_id"]), json.loads(told["label"])
    # A damaged file makes the readers of both formats fail in any way.
    except Exception as error:
        pass_on_memory(error)
        return None
