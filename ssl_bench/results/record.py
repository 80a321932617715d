"""Records: the identity of a result, its fields, and how its file is read and checked."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from json.encoder import encode_basestring_ascii
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Shaped

from ssl_bench.errors import DataError
from ssl_bench.intervals import interval_contains
from ssl_bench.system.escaping import is_file_name, to_plain_json
from ssl_bench.system.files import read_untrusted
from ssl_bench.system.paths import file_name

PerImage = Shaped[np.ndarray, "images *values"]
"""Values of the single images behind a result, from which the metric can be recomputed."""

PerImageKind = Literal[
    "hits",
    "percent",
    "hits_of_draws",
    "points",
    "mean_iou",
    "pixel_accuracy",
    "average_precision",
    "average_recall",
    "object_f_beta",
    "object_iou",
    "object_accuracy",
]
"""Meaning of per-image values, which determines how the metric is recomputed from them.

- hits: 0 or 1 for each image. The metric is their mean.
- percent: a percentage for each image. The metric is their mean.
- hits_of_draws: images x draws of training images, 0 or 1. The metric is their mean.
- points: images x 2, correct and all keypoints. The metric (PCK) is the mean ratio.
- mean_iou, pixel_accuracy: images x 3 x classes, the correct, predicted and true pixels. The metric
  is computed from their sums over the images.
- average_precision, average_recall: counts of boxes by rank, see
  `ssl_bench.scores.DetectionCounts`. The metric is computed from their sums over the images.
- object_f_beta, object_iou, object_accuracy: images x 4, see `ssl_bench.scores.ObjectCounts`. The
  metric is the mean over the images.
"""

UNRANKED_METRICS = frozenset({"explained_variance", "outlier_share", "degenerate"})
"""Percentages for which higher is not better."""

MAX_DEGENERATE_PERCENT = 50.0
"""If more than this percentage of the images is degenerate, a block is never reported as best."""

SUPERVISED = "supervised"
"""Task of the records that supervised pretraining writes; no probe has this name."""

ENCODER_FIELDS = ("checkpoint_sha256", "architecture", "mean", "std")
"""Fields of a record that identify its encoder."""

INFINITY_AS_JSON = "inf"

TRAINED_ON = "trained_on"
"""Name of the setting that describes the images to which a probe was fitted."""

CORRUPTED = "corrupted"
"""Name of the setting that describes the corruption of the scored images."""

_BASELINE = "baseline"
_MAX_SETTING_CHARACTERS = 24


@dataclass(frozen=True)
class TrainingImages:
    """The images to which a probe was fitted before it scored others."""

    split: str
    fingerprint: str
    num_images: int

    def __str__(self) -> str:
        kind, dash, digits = self.fingerprint.rpartition("-")
        return f"{self.split} ({self.num_images} images, {kind}{dash}{digits[:6]})"


@dataclass(frozen=True)
class RecordedCorruption:
    """The corruption that was applied to the scored images.

    Attributes:
        name: Name of the corruption.
        severity: From 1 (mild) to 5 (strong).
        dataset: Name of the dataset without the corruption.
        fingerprint: Fingerprint of the images without the corruption.
    """

    name: str
    severity: int
    dataset: str
    fingerprint: str


@dataclass(frozen=True)
class Baseline:
    """An image-independent baseline, such as the most frequent class, and its score.

    Attributes:
        answer: Short description, such as "centre box".
        value: Score on the same images, in the metric and unit of the record that contains it.
    """

    answer: str
    value: float

    def as_details(self) -> dict[str, Any]:
        """Return the entry of `Record.details` that stores this baseline."""
        return {_BASELINE: asdict(self)}

    @classmethod
    def from_details(cls, details: Mapping[str, Any]) -> "Baseline | None":
        """Return the baseline that `Record.details` contains, or None if there is none."""
        entry = details.get(_BASELINE)
        return None if entry is None else cls(**entry)

    @classmethod
    def best(cls, values: Mapping[str, float]) -> "Baseline":
        """Return the baseline with the highest score.

        Args:
            values: Score of each baseline. The first of equal scores wins, and NaN never does.
        """
        best = max(values, key=lambda name: -math.inf if math.isnan(values[name]) else values[name])
        return cls(best, values[best])

    @classmethod
    def most_frequent(cls, counts: Sequence[int], top: int) -> "Baseline":
        """Return the top-k accuracy, in percent, of always predicting the most frequent classes.

        Args:
            counts: Number of scored images of each class. At least one is positive.
            top: Number of classes that are predicted for each image.
        """
        share = 100.0 * sum(sorted(counts, reverse=True)[:top]) / sum(counts)
        return cls("most frequent class" if top == 1 else f"{top} most frequent classes", share)


def is_degenerate(percent: float | None) -> bool:
    """Return whether too many images are degenerate for a value to be the best.

    Args:
        percent: Percentage of degenerate images. None if the task has no degenerate images.
    """
    return percent is not None and percent > MAX_DEGENERATE_PERCENT


def block_stride(architecture: Mapping[str, Any], layer: int) -> int | None:
    """Return the stride of a block's tokens in pixels, or None if all blocks have the same one."""
    strides = architecture.get("strides")
    if not isinstance(strides, (list, tuple)) or not 0 <= layer < len(strides):
        return None
    is_hierarchical = all(type(one) is int for one in strides) and len(set(strides)) > 1
    return strides[layer] if is_hierarchical else None


@dataclass(frozen=True, kw_only=True)
class ResultKey:
    """The identity of a result: all fields that affect its value.

    The device and the number of workers, for example, do not.

    Attributes:
        layer: Block index, from 0.
        facet: Feature of the block, such as "token", "key" or "cls".
        protocol: Name of a set of settings of the probe.
        checkpoint_sha256: Digest of the weights.
        architecture: Description of the forward pass, apart from the weights.
        mean: Subtracted from the images, RGB in [0, 1].
        std: The images are divided by it, RGB.
        dataset_fingerprint: Digest that identifies the scored images and their annotations.
        settings: Settings of the probe. `TRAINED_ON` and `CORRUPTED` are names of further entries.
        metric_version: `Probe.metric_version` of the code that computed the value. Records that do
            not state it have version 1.
        pipeline_version: `ssl_bench.results.versions.PIPELINE_VERSION` of that code. Records that
            do not state it have version 1.
    """

    task: str
    dataset: str
    split: str
    layer: int
    facet: str
    protocol: str
    metric: str
    checkpoint_sha256: str
    architecture: Mapping[str, Any]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    dataset_fingerprint: str
    seed: int
    settings: Mapping[str, Any]
    metric_version: int = 1
    pipeline_version: int = 1

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that identify the result, equal on every machine."""
        return result_digest(self)

    def __hash__(self) -> int:
        return hash(self.digest)

    def record(self, **measured: Any) -> "Record":
        """Return a record with this key, given the remaining fields of `Record`."""
        return Record(**{name: getattr(self, name) for name in _KEY_FIELDS}, **measured)

    def filename(self) -> str:
        """Return the name of the record's file."""
        return f"layer{self.layer:02d}-{self.facet}-{self.metric}-{self.digest}.json"

    def relative_path(self) -> tuple[str, str, str]:
        """Return the two folders and the file of the record, below `records`.

        Raises:
            DataError: The task, facet or metric cannot be part of a file name.
        """
        for name in (self.task, self.facet, self.metric):
            if not is_file_name(name):
                raise DataError(f"{name!r} cannot be part of a file name. Choose another name")
        return self.task, file_name(self.dataset), self.filename()


class RecordedEncoder(NamedTuple):
    """An encoder that has records.

    Attributes:
        encoder_id: See the function `encoder_id`.
        model: Its name in tables.
    """

    encoder_id: str
    model: str
    checkpoint_sha256: str


@dataclass(frozen=True, kw_only=True)
class Record(ResultKey):
    """A result: its key, its value, and what is needed to trust or to repeat it.

    Attributes:
        depth: Number of blocks of the encoder.
        value: In `unit`. NaN if it is undefined, infinite for example for a singular matrix.
        ci95: 95 % confidence interval over images, or None if the metric has none.
        num_images: Number of scored images.
        model: Name of the encoder in tables.
        version: Version of ssl-bench.
        git_commit: Commit of ssl-bench, or None if it is unknown.
        torch: Version of PyTorch.
        device: Description of the hardware.
        seconds: Wall-clock time of the pass that computed this result and others.
        created: ISO 8601, UTC.
        details: Further output of the probe, such as the IoU of each class.
        unit: "%", or "" for a plain number.
        changed: The settings that differ from those of the protocol.
        per_image_kind: One of `PerImageKind`. None if no per-image values are stored, and in
            records of versions that did not state it.
        per_image_sha256: Digest of the file with the per-image values. None if there is no such
            file, and in records of older versions.
        record_sha256: Digest of the rest of the record's file, with which it was checked. None in
            records of older versions.
    """

    depth: int
    value: float
    ci95: tuple[float, float] | None
    num_images: int
    model: str
    version: str
    git_commit: str | None
    torch: str
    device: str
    seconds: float
    created: str
    details: Mapping[str, Any] = field(default_factory=dict)
    unit: str = "%"
    changed: Mapping[str, Any] = field(default_factory=dict)
    per_image_kind: str | None = None
    per_image_sha256: str | None = field(default=None, repr=False, compare=False)
    record_sha256: str | None = field(default=None, repr=False, compare=False)

    @property
    def is_ranked(self) -> bool:
        """Whether higher is better, which is known for most percentages and for no plain number."""
        return self.unit == "%" and self.metric not in UNRANKED_METRICS

    @property
    def degenerate_percent(self) -> float | None:
        """Percentage of degenerate images, or None if the task has no degenerate images."""
        return self.details.get("degenerate_percent")

    @property
    def stride(self) -> int | None:
        """See `block_stride`."""
        return block_stride(self.architecture, self.layer)

    @property
    def protocol_label(self) -> str:
        """The protocol, followed by the settings that differ from it, as tables print it."""
        changes = [f"{name}={_shorten(value)}" for name, value in sorted(self.changed.items())]
        return ", ".join([self.protocol, *changes])

    @cached_property
    def encoder_id(self) -> str:
        """See the function `encoder_id`."""
        return encoder_id({name: getattr(self, name) for name in ENCODER_FIELDS})

    def encoder(self) -> RecordedEncoder:
        """Return the encoder's id, name and weights."""
        return RecordedEncoder(self.encoder_id, self.model, self.checkpoint_sha256)

    @property
    def trained_on(self) -> TrainingImages | None:
        """The images to which the probe was fitted, or None if nothing was fitted."""
        setting = self.settings.get(TRAINED_ON)
        return None if setting is None else TrainingImages(**setting)

    @property
    def corrupted(self) -> RecordedCorruption | None:
        """The corruption of the scored images, or None if they are not corrupted."""
        setting = self.settings.get(CORRUPTED)
        return None if setting is None else RecordedCorruption(**setting)

    def key(self) -> ResultKey:
        """Return the key alone, which can be a key of a dictionary."""
        return ResultKey(**{name: getattr(self, name) for name in _KEY_FIELDS})

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, with "inf" for infinity and None for NaN.

        The digests of the files are left out.
        """
        values = {name: value for name, value in asdict(self).items() if name not in _FILE_DIGESTS}
        return to_plain_json(values, infinity=INFINITY_AS_JSON)

    def with_digest(self, digest: str) -> "Record":
        """Set the digest, which is part of the file name, instead of computing it, and return self.

        A record that is found under settings typed in another way keeps the digest of its file.
        """
        vars(self)["digest"] = digest
        return self


_FILE_DIGESTS = ("per_image_sha256", "record_sha256")
_KEY_FIELDS = sorted(item.name for item in fields(ResultKey))
# A digest includes a version only if it is above 1, so that digests of older records stay valid.
_VERSIONS = ("metric_version", "pipeline_version")


def result_digest(key: ResultKey, json_texts: Mapping[str, str] | None = None) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of the key as JSON.

    Args:
        key: The key, or a record.
        json_texts: Canonical JSON of some fields, if it is known already.
    """
    texts = json_texts or {}
    items = (
        f'"{name}": {texts.get(name) or canonical_json(getattr(key, name))}'
        for name in _KEY_FIELDS
        if name not in _VERSIONS or getattr(key, name) != 1
    )
    return hashlib.sha256(f"{{{', '.join(items)}}}".encode()).hexdigest()[:16]


def numeric_digest(key: ResultKey) -> str:
    """Return a digest that does not depend on whether a setting was typed as 1 or as 1.0."""
    return result_digest(key, {"settings": canonical_json(_floats_as_integers(key.settings))})


def _floats_as_integers(value: Any) -> Any:
    """Return a JSON value in which floats without a fraction are integers."""
    if isinstance(value, Mapping):
        return {name: _floats_as_integers(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_floats_as_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _copy_floats(target: Any, source: Any) -> None:
    """Replace integers of a JSON value, in place, by the floats of a numerically equal value."""
    for place in target if isinstance(target, dict) else range(len(target)):
        if isinstance(target[place], (dict, list)):
            _copy_floats(target[place], source[place])
        elif isinstance(source[place], float):
            target[place] = source[place]


def canonical_json(value: Any) -> str:
    """Return JSON text with sorted names, which is equal for equal values."""
    # Ten times faster than `json.dumps`, with the same result.
    if type(value) is str:
        return encode_basestring_ascii(value)
    return json.dumps(value, sort_keys=True, default=list)


def encoder_id(identity: Mapping[str, Any]) -> str:
    """Return the SHA-256 of weights, architecture, mean and std, which identifies an encoder.

    Args:
        identity: The fields of `ENCODER_FIELDS`.
    """
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()


def _shorten(value: Any) -> str:
    text, most = str(value).replace(" ", ""), _MAX_SETTING_CHARACTERS
    return text if len(text) <= most else f"{text[: most - 3]}..."


OLD_FORMAT = "old format without the identity of the encoder and the training images"
"""Reason for which a record of an early version is not read."""

MAX_FILE_BYTES = 16 * 2**20
"""Maximum size of the file of a record, or of a list of image ids."""

_MAX_REASON_CHARACTERS = 200
# Chance-adjusted percentages, which are negative for results below chance.
_CHANCE_ADJUSTED = re.compile(r"ami(_x\d+)?")
_ROUNDING = 1e-6
# Folders of pictures have the first digits in their names.
_FINGERPRINT = re.compile(r"(stat-)?[0-9a-f]{8,128}")
_MAPPINGS = ("settings", "details", "architecture", "changed")
_TYPES: dict[Any, tuple[type, ...]] = {
    str: (str,), int: (int,), float: (int, float), str | None: (str, NoneType)
}  # fmt: skip
# JSON types of each field. None for pairs and triples of numbers, which have their own check.
_FIELD_TYPES = {
    item.name: (dict,) if item.name in _MAPPINGS else _TYPES.get(item.type)
    for item in fields(Record)
}
# Fields in which many records are equal, so that equal values are kept only once.
_SHARED_FIELDS = ("settings", "architecture", "changed", "mean", "std")
# Shared fields in which older versions stored 1 or 1.0, depending on what was typed.
_TYPED_BY_USERS = ("settings", "changed")
_RECORD_DIGEST_LINE = re.compile(rb'\n "record_sha256": "[0-9a-f]{64}",')


def text_with_digest(content: Mapping[str, Any]) -> str:
    """Return the text of a record's file, including `record_sha256`, the digest of the rest."""
    digest = hashlib.sha256(_file_text(content)).hexdigest()
    return _file_text({**content, "record_sha256": digest}).decode()


def _file_text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True, default=list) + "\n").encode()


def _require_digest(content: bytes, expected: str) -> None:
    """Raise ValueError unless the file's content has the digest that it states."""
    # Files with the original white space, which is the fast case, then all others.
    if hashlib.sha256(_RECORD_DIGEST_LINE.sub(b"", content, count=1)).hexdigest() != expected:
        rest = {name: one for name, one in json.loads(content).items() if name != "record_sha256"}
        if hashlib.sha256(_file_text(rest)).hexdigest() != expected:
            raise ValueError("edited or damaged: the content does not match its record_sha256")


class RecordReader:
    """Reads and checks the records of one folder of results.

    Values that many records share, such as settings, are parsed into one object.

    Attributes:
        has_retyped: Whether the settings of two records differ only in 1 and 1.0. Such records
            share one object, which has the floats of both.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._checked_folders = root, set[Path]()
        # From the Python text of a shared field, which distinguishes 1, 1.0 and True, to its object
        # and its canonical JSON.
        self._shared: dict[str, tuple[Any, str]] = {}
        self._shared_by_number: dict[str, Any] = {}
        self.has_retyped = False

    def read(self, path: Path) -> Record:
        """Return the record in a file of a folder `records/TASK/DATASET`.

        Raises:
            OSError: The file cannot be read.
            ValueError, TypeError, KeyError, OverflowError, RecursionError: As `parse` raises.
        """
        content = read_untrusted(
            self._root, path, MAX_FILE_BYTES, checked_folders=self._checked_folders
        )
        return self.parse(content, path)

    def parse(self, content: bytes, path: Path) -> Record:
        """Return the record in the content of a file.

        Args:
            content: The content, which may come from a packed folder.
            path: Path that the file has, or would have if it were not packed.

        Raises:
            ValueError, TypeError, KeyError, OverflowError, RecursionError: The content is not a
                valid record, or belongs to another file name.
        """
        values = _parse_fields(content)
        keys = {name: f"{name} {values[name]!r}" for name in _SHARED_FIELDS if name in values}
        for name, key in keys.items():
            if key not in self._shared:
                self._shared[key] = self._share(name, values[name]), canonical_json(values[name])
            values[name] = self._shared[key][0]
        record = Record(**values)
        if not 0 <= record.layer < record.depth:
            raise ValueError(f"layer is {record.layer}, expected 0 to {record.depth - 1}")
        if not _FINGERPRINT.fullmatch(record.dataset_fingerprint):
            raise ValueError(f"dataset_fingerprint is {record.dataset_fingerprint!r}")
        _require_possible_values(record)
        if not interval_contains(record.ci95, record.value):
            raise ValueError(f"value is {record.value}, outside of its ci95 {record.ci95}")
        # Computing it from the cached JSON saves seconds for thousands of records.
        texts = {name: self._shared[key][1] for name, key in keys.items()}
        record.with_digest(result_digest(record, texts))
        if path.parts[-3:] != record.relative_path():
            raise ValueError("the file name belongs to another result. It may be a copy")
        # After the other checks, which give more specific reasons.
        if record.record_sha256 is not None:
            _require_digest(content, record.record_sha256)
        return record

    def _share(self, name: str, value: Any) -> Any:
        """Return the object of a numerically equal value if there is one, or the value itself."""
        if name not in _TYPED_BY_USERS:
            return value
        by_number = f"{name} {canonical_json(_floats_as_integers(value))}"
        shared = self._shared_by_number.setdefault(by_number, value)
        if shared is not value:
            self.has_retyped = True
            _copy_floats(shared, value)
        return shared


_SCANNED_FIELDS = tuple(f'\n "{name}": '.encode() for name in (*ENCODER_FIELDS, "model"))


def find_encoder(
    content: bytes, by_fields: dict[tuple[bytes, ...], RecordedEncoder]
) -> RecordedEncoder | None:
    """Return the encoder in a record's file without parsing the whole file.

    None if the file was not written by `text_with_digest`, in which each field of the record starts
    a line with one space.

    Args:
        content: Content of the file.
        by_fields: Encoders by the text of their fields, to which a new one is added.
    """
    texts = []
    for name in _SCANNED_FIELDS:
        start = content.find(name)
        if start < 0:
            return None
        start += len(name)
        texts.append(content[start : content.find(b',\n "', start)])
    key = tuple(texts)
    if key not in by_fields:
        try:
            checkpoint_sha256, architecture, mean, std, model = map(json.loads, texts)
            if not isinstance(checkpoint_sha256, str) or not isinstance(model, str):
                return None
            identity = {
                "checkpoint_sha256": checkpoint_sha256,
                "architecture": architecture,
                "mean": tuple(map(_parse_number, mean)),
                "std": tuple(map(_parse_number, std)),
            }
        except (ValueError, TypeError, RecursionError):
            return None
        by_fields[key] = RecordedEncoder(encoder_id(identity), model, checkpoint_sha256)
    return by_fields[key]


def _require_possible_values(record: Record) -> None:
    """Raise an error if a field has a value that no run writes.

    Raises:
        TypeError, ValueError, KeyError: A percentage is out of range, or a field has another type.
    """
    # These properties fail if their settings have other names than expected.
    _ = record.trained_on, record.corrupted
    percentages = {"details.degenerate_percent": record.details.get("degenerate_percent")}
    if record.unit == "%":
        percentages["value"] = record.value
    baseline = record.details.get(_BASELINE)
    if baseline is not None:
        has_known_names = isinstance(baseline, dict) and set(baseline) == {"answer", "value"}
        if not has_known_names or type(baseline["answer"]) is not str:
            raise TypeError(f"details.baseline is {baseline!r}")
        percentages["details.baseline"] = baseline["value"]
    for name, value in percentages.items():
        if value is None:
            continue
        if type(value) not in (int, float):
            raise TypeError(f"{name} is {value!r}, expected a number")
        least = -100 if _CHANCE_ADJUSTED.fullmatch(record.metric) else 0
        if not (math.isnan(value) or least - _ROUNDING <= value <= 100 + _ROUNDING):
            raise ValueError(f"{name} is {value}, expected {least} to 100")


def _parse_fields(content: bytes) -> dict[str, Any]:
    """Return the fields of `Record` in a file, ignoring other names, which later versions add."""
    try:
        values = json.loads(content)
    except ValueError as error:
        raise ValueError(f"not complete JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    if "checkpoint_sha256" in values and not values.keys() >= set(ENCODER_FIELDS):
        raise ValueError(OLD_FORMAT)
    values["value"] = _parse_number(values["value"])
    for name, count in (("ci95", 2), ("mean", 3), ("std", 3)):
        if name != "ci95" or values[name] is not None:
            values[name] = tuple(map(_parse_number, values[name]))
            if len(values[name]) != count:
                raise ValueError(f"{name} is {values[name]}, expected {count} numbers")
    known = {name: value for name, value in values.items() if name in _FIELD_TYPES}
    for name, value in known.items():
        types = _FIELD_TYPES[name]
        # Not isinstance, which accepts True as an integer.
        if types is not None and type(value) not in types:
            raise TypeError(f"{name} is {value!r}")
    return known


def _parse_number(value: Any) -> float:
    """Return the number that `Record.as_json` wrote as this JSON value."""
    if value is None:
        return math.nan
    if value == INFINITY_AS_JSON:
        return math.inf
    if type(value) not in (int, float):
        raise ValueError(f"expected a number, got {value!r}")
    return float(value)


def describe_reading_error(error: Exception) -> str:
    """Return in at most 200 characters why a record could not be parsed."""
    reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
    most = _MAX_REASON_CHARACTERS
    return reason if len(reason) <= most else f"{reason[:most]}..."
