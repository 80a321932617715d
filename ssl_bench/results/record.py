"""Define records, which store one result each, and read and check their files."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, reduce
from json.encoder import encode_basestring_ascii
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Shaped

from ssl_bench.errors import DataError
from ssl_bench.intervals import interval_contains
from ssl_bench.system.files import file_name
from ssl_bench.system.output import is_file_name, to_plain_json

PerImage = Shaped[np.ndarray, "images *values"]
"""One or several values for each scored image, from which the metric can be recomputed."""

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
"""Kind of the per-image values, which determines how the metric is recomputed.

- hits: 0 or 1 for each image. The metric is their mean.
- percent: a percentage for each image. The metric is their mean.
- hits_of_draws: 0 or 1, of shape (images, random draws of training images). The metric is their
  mean.
- points: shape (images, 2): the number of correct keypoints and the number of all keypoints. The
  metric (PCK) is the mean ratio over images.
- mean_iou, pixel_accuracy: shape (images, 3, classes): the numbers of correct, predicted and true
  pixels. The metric is computed from the sums over the images.
- average_precision, average_recall: counts of boxes by rank, as described in
  `ssl_bench.scores.DetectionCounts`. The metric is computed from the sums over the images.
- object_f_beta, object_iou, object_accuracy: shape (images, 4), as described in
  `ssl_bench.scores.ObjectCounts`. The metric is the mean over the images.
"""

UNRANKED_METRICS = frozenset({"explained_variance", "outlier_share", "degenerate"})
"""Metrics in percent for which a higher value is not better."""

MAX_DEGENERATE_PERCENT = 50.0
"""Maximum percentage of images with an arbitrary result for a block that is reported as best."""

SUPERVISED = "supervised"
"""Value of `Record.task` for supervised pretraining. No probe has the name "supervised"."""

ENCODER_FIELDS = ("checkpoint_sha256", "architecture", "mean", "std")
"""Fields of a record (a stored result) that identify its encoder."""

INFINITY_AS_JSON = "inf"

TRAINING_IMAGES_KEY = "trained_on"
"""Name of the setting that describes the images on which a probe was trained."""

CORRUPTION_KEY = "corrupted"
"""Name of the setting that describes the corruption of the scored images."""

_BASELINE = "baseline"
_MAX_SETTING_CHARACTERS = 24


@dataclass(frozen=True)
class TrainingImages:
    """The images on which a probe was trained before it was evaluated on other images.

    Attributes:
        split: Name of the dataset split, such as "train".
        fingerprint: Digest that identifies the images and their annotations.
        num_images: Number of images.
    """

    split: str
    fingerprint: str
    num_images: int

    def __str__(self) -> str:
        kind, dash, digits = self.fingerprint.rpartition("-")
        return f"{self.split} ({self.num_images} images, {kind}{dash}{digits[:6]})"


@dataclass(frozen=True)
class RecordedCorruption:
    """The corruption of the scored images, such as snow.

    Attributes:
        name: Name of the corruption.
        severity: Severity from 1 (mild) to 5 (strong).
        dataset: Name of the images before the corruption.
        fingerprint: Digest that identifies the images before the corruption, and their annotations.
    """

    name: str
    severity: int
    dataset: str
    fingerprint: str


@dataclass(frozen=True)
class Baseline:
    """An image-independent baseline, such as the most frequent class, and its score.

    Attributes:
        answer: Short description of what is always predicted, such as "centre box".
        value: Score of the baseline, in the same metric and on the same images as the result with
            which it is stored.
    """

    answer: str
    value: float

    def as_details(self) -> dict[str, Any]:
        """Return this baseline as a dictionary, to be stored in `Record.details`."""
        return {_BASELINE: asdict(self)}

    @classmethod
    def from_details(cls, details: Mapping[str, Any]) -> "Baseline | None":
        """Return the baseline in `Record.details`, or None if there is no baseline."""
        entry = details.get(_BASELINE)
        # The score of a baseline is saved as None if it is undefined.
        return None if entry is None or entry["value"] is None else cls(**entry)

    @classmethod
    def best(cls, values: Mapping[str, float]) -> "Baseline":
        """Return the baseline with the highest score, or the first of them if several have it.

        Args:
            values: Score of each baseline by its description, such as "centre box". NaN counts as
                the lowest score.
        """
        best = max(values, key=lambda name: -math.inf if math.isnan(values[name]) else values[name])
        return cls(best, values[best])

    @classmethod
    def most_frequent(cls, counts: Sequence[int], top: int) -> "Baseline":
        """Return the baseline that always predicts the most frequent classes.

        Args:
            counts: Number of scored images of each class.
            top: Number of classes that are predicted for each image, such as 5 for top-5 accuracy.
        """
        share = 100.0 * sum(sorted(counts, reverse=True)[:top]) / sum(counts)
        return cls("most frequent class" if top == 1 else f"{top} most frequent classes", share)


def is_degenerate(percent: float | None) -> bool:
    """Return whether a block has too many degenerate images to be reported as best.

    Args:
        percent: Percentage of degenerate images, or None if it is unknown. The result of a
            degenerate image is arbitrary, for example because it depends on rounding errors.
    """
    return percent is not None and percent > MAX_DEGENERATE_PERCENT


def block_stride(architecture: Mapping[str, Any], layer: int) -> int | None:
    """Return the stride of a block: the distance between neighbouring tokens in pixels.

    Return None if all blocks have the same stride, as in a ViT, or if the strides are unknown.

    Args:
        architecture: Description of an encoder, from the field `architecture` of `ResultKey`. The
            entry "strides" of this description lists the stride of each block.
        layer: Block index, 0-based.
    """
    strides = architecture.get("strides")
    if not isinstance(strides, (list, tuple)) or not 0 <= layer < len(strides):
        return None
    is_hierarchical = all(type(one) is int for one in strides) and len(set(strides)) > 1
    return strides[layer] if is_hierarchical else None


@dataclass(frozen=True, kw_only=True)
class ResultKey:
    """The identity of a result: all fields that affect its value.

    Fields that do not affect the value, such as the device, are only part of the subclass `Record`.

    Attributes:
        task: Name of the probe, such as "knn".
        dataset: Name of the dataset. The name of a subset contains its number of images.
        split: Name of the scored split of the dataset, such as "val".
        layer: Block index, from 0.
        facet: Kind of feature of the block, such as "token", "key" or "cls".
        protocol: Name of a preset of probe settings.
        metric: Name of the metric, such as "corloc".
        checkpoint_sha256: SHA-256 of the weights.
        architecture: Description of the encoder's forward pass without the weights.
        mean: Mean of each RGB channel, for values in [0, 1], which is subtracted from the images.
        std: Standard deviation of each RGB channel, by which the images are divided.
        dataset_fingerprint: Digest that identifies the scored images and their annotations.
        seed: Random seed of the probe.
        settings: Settings of the probe. The entries `TRAINING_IMAGES_KEY` and `CORRUPTION_KEY`
            describe the training images and the corruption.
        metric_version: `Probe.metric_version` of the code that computed the value.
        pipeline_version: `ssl_bench.results.versions.PIPELINE_VERSION` of the code that computed
            the value.
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
        """Create the record (stored result) that this key identifies.

        Args:
            measured: Fields of `Record` that the key does not have, such as `value`.
        """
        return Record(**{name: getattr(self, name) for name in _KEY_FIELDS}, **measured)

    def filename(self) -> str:
        return f"layer{self.layer:02d}-{self.facet}-{self.metric}-{self.digest}.json"

    def relative_path(self) -> tuple[str, str, str]:
        """Return the path of the result's JSON file below the folder `records`.

        The path consists of the task, the dataset and the name of the file.

        Raises:
            DataError: A name cannot be part of a file name.
        """
        for name in (self.task, self.facet, self.metric):
            if not is_file_name(name):
                raise DataError(
                    f"the name {name!r} of a task, facet or metric cannot be part of a file name. "
                    "Choose another name"
                )
        return self.task, file_name(self.dataset), self.filename()


class RecordedEncoder(NamedTuple):
    """The identity of an encoder and its name in tables, as stored with its results.

    Attributes:
        encoder_id: Digest of the fields that identify the encoder.
        model: Name of the encoder in tables.
        checkpoint_sha256: SHA-256 of the weights.
    """

    encoder_id: str
    model: str
    checkpoint_sha256: str


@dataclass(frozen=True, kw_only=True)
class Record(ResultKey):
    """A result: its key, its value, and the information that is needed to reproduce it.

    Attributes:
        depth: Number of blocks of the encoder.
        value: Value of the metric in `unit`. The value is NaN if the metric is undefined, and can
            be infinite, for example for a singular matrix.
        ci95: 95 % confidence interval over images, or None if the metric has no interval.
        num_images: Number of scored images.
        model: Name of the encoder in tables.
        version: Version of ssl-bench.
        git_commit: Commit of ssl-bench, or None if it is unknown.
        torch: Version of PyTorch.
        device: Device, with the number of CPU threads or whether a GPU uses TF32.
        seconds: Wall-clock time from the start of the probe until this result was computed. The
            probe may compute several results at once.
        created: Time at which the record was created, in UTC and ISO 8601.
        details: Further output of the probe, such as the IoU of each class.
        unit: "%", or "" for a plain number.
        changed: The settings that differ from those of the protocol, which is a preset of settings.
        peak_memory: Peak memory use in bytes, from the start of the probe until this result was
            computed: the memory of tensors on a GPU, or the resident memory of the process on a
            CPU. None if it is unknown.
        per_image_kind: Kind of the per-image values, one of `PerImageKind`, or None without such
            values.
        per_image_sha256: Digest of the file of per-image values, or None if there is no such file.
        record_sha256: Digest of all other fields in the record's file. The digest is stored in the
            same file, and verified when the file is read.

    The last four fields are None if an older version wrote the record.
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
    peak_memory: int | None = None
    per_image_kind: str | None = None
    per_image_sha256: str | None = field(default=None, repr=False, compare=False)
    record_sha256: str | None = field(default=None, repr=False, compare=False)

    @property
    def is_ranked(self) -> bool:
        """Whether a higher value of the metric is better.

        A higher value is better for all percentages except those in `UNRANKED_METRICS`.
        """
        return self.unit == "%" and self.metric not in UNRANKED_METRICS

    @property
    def degenerate_percent(self) -> float | None:
        """Percentage of degenerate images, whose result is arbitrary.

        Arbitrary results may depend on rounding errors. The percentage is None if the task does not
        count degenerate images.
        """
        return self.details.get("degenerate_percent")

    @property
    def stride(self) -> int | None:
        """The distance between neighbouring tokens of the block in pixels.

        The stride is None if all blocks of the encoder have the same stride, as in a ViT.
        """
        return block_stride(self.architecture, self.layer)

    @property
    def protocol_label(self) -> str:
        """Text for tables that states the protocol and the settings that differ from it.

        A protocol is a preset of settings. An example of the text is "dinov2, image_size=448".
        """
        changes = [f"{name}={_shorten(value)}" for name, value in sorted(self.changed.items())]
        return ", ".join([self.protocol, *changes])

    @cached_property
    def encoder_id(self) -> str:
        return encoder_id({name: getattr(self, name) for name in ENCODER_FIELDS})

    def encoder(self) -> RecordedEncoder:
        return RecordedEncoder(self.encoder_id, self.model, self.checkpoint_sha256)

    @property
    def trained_on(self) -> TrainingImages | None:
        """The images on which the probe was trained, or None if it was not trained."""
        setting = self.settings.get(TRAINING_IMAGES_KEY)
        return None if setting is None else TrainingImages(**setting)

    @property
    def num_training_images(self) -> int:
        """Number of images on which the probe was trained, or 0 if it was not trained."""
        return 0 if self.trained_on is None else self.trained_on.num_images

    @property
    def corruption(self) -> RecordedCorruption | None:
        """The corruption of the scored images, or None if they are not corrupted."""
        setting = self.settings.get(CORRUPTION_KEY)
        return None if setting is None else RecordedCorruption(**setting)

    def key(self) -> ResultKey:
        """Return the key that identifies this result, without the value and other measurements."""
        return ResultKey(**{name: getattr(self, name) for name in _KEY_FIELDS})

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON types, with "inf" for infinity and None for NaN.

        `per_image_sha256` and `record_sha256` are left out, because the store adds them when it
        writes the files.
        """
        values = {name: value for name, value in asdict(self).items() if name not in _FILE_DIGESTS}
        return to_plain_json(values, infinity=INFINITY_AS_JSON)


_FILE_DIGESTS = ("per_image_sha256", "record_sha256")
_KEY_FIELDS = sorted(item.name for item in fields(ResultKey))
# A version is part of the digest only if it is above 1, so that the digests of older records stay
# valid.
_VERSIONS = ("metric_version", "pipeline_version")


def result_digest(key: ResultKey, json_texts: Mapping[str, str] | None = None) -> str:
    """Return 16 hexadecimal digits that identify a result, from the SHA-256 of its key as JSON.

    Version numbers are left out if they are 1, so that the digests of older results stay valid.

    Args:
        key: All fields that affect the value of the result.
        json_texts: Results of `canonical_json` for some fields by name, so that these fields need
            not be converted again.
    """
    texts = json_texts or {}
    items = (
        f'"{name}": {texts.get(name) or canonical_json(getattr(key, name))}'
        for name in _KEY_FIELDS
        if name not in _VERSIONS or getattr(key, name) != 1
    )
    return hashlib.sha256(f"{{{', '.join(items)}}}".encode()).hexdigest()[:16]


def canonical_json(value: Any) -> str:
    """Return a value as JSON text with sorted keys, so that equal values give equal texts."""
    # For a string, this function returns the same as `json.dumps`, but is ten times faster.
    if type(value) is str:
        return encode_basestring_ascii(value)
    return json.dumps(value, sort_keys=True, default=list)


def encoder_id(identity: Mapping[str, Any]) -> str:
    """Return the id of an encoder: the SHA-256 of the fields that identify it, as JSON.

    Args:
        identity: The values of the fields in `ENCODER_FIELDS`, such as `checkpoint_sha256`.
    """
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()


def _shorten(value: Any) -> str:
    text, most = str(value).replace(" ", ""), _MAX_SETTING_CHARACTERS
    return text if len(text) <= most else f"{text[: most - 3]}..."


OLD_FORMAT = "old format without the identity of the encoder and the training images"
"""Text for messages: why a stored result of an early version cannot be read."""

MAX_FILE_BYTES = 16 * 2**20
"""Maximum size, in bytes, of a record's file and of a file with image ids."""

_MAX_REASON_CHARACTERS = 200
# Metrics that are adjusted for chance. They are negative if the result is worse than chance.
_CHANCE_ADJUSTED = re.compile(r"ami(_x\d+)?")
_ROUNDING = 1e-6
# Largest possible number of images, of seconds and of bytes of memory in a record.
_MAX_COST = 1e18
# The first digits of a fingerprint are part of the names of figure folders.
_FINGERPRINT = re.compile(r"(stat-)?[0-9a-f]{8,128}")
_MAPPINGS = ("settings", "details", "architecture", "changed")
_TYPES: dict[Any, tuple[type, ...]] = {
    str: (str,), int: (int,), float: (int, float), str | None: (str, NoneType),
    int | None: (int, NoneType),
}  # fmt: skip
# Allowed Python types of each field after the JSON text is parsed. None stands for pairs and
# triples of numbers, which are checked separately.
_FIELD_TYPES = {
    item.name: (dict,) if item.name in _MAPPINGS else _TYPES.get(item.type)
    for item in fields(Record)
}
# Fields that are equal in many records. Equal values are kept in memory only once.
_SHARED_FIELDS = ("settings", "architecture", "changed", "mean", "std")
_RECORD_DIGEST_LINE = re.compile(rb'\n "record_sha256": "[0-9a-f]{64}",')


def text_with_digest(content: Mapping[str, Any]) -> str:
    """Return the JSON text of a record's file. A record is a stored result.

    The field `record_sha256`, which contains the digest of all other fields, is added.

    Args:
        content: Fields of the record as JSON types.
    """
    digest = hashlib.sha256(_file_text(content)).hexdigest()
    return _file_text({**content, "record_sha256": digest}).decode()


def _file_text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True, default=list) + "\n").encode()


def _require_digest(content: bytes, expected: str) -> None:
    """Raise ValueError if the content of a record's JSON file does not match the expected digest.

    Differences in white space are accepted.
    """
    # First check the file as it is, which is fast. If the digest differs, perhaps only the white
    # space has changed, so restore the white space and check again.
    if hashlib.sha256(_RECORD_DIGEST_LINE.sub(b"", content, count=1)).hexdigest() != expected:
        rest = {name: one for name, one in json.loads(content).items() if name != "record_sha256"}
        if hashlib.sha256(_file_text(rest)).hexdigest() != expected:
            raise ValueError("edited or damaged: the content does not match its record_sha256")


class RecordReader:
    """Parser of JSON files that contain a record, which is a stored result.

    If several records have equal settings, they share one settings object to save memory. Records
    also share equal values of some other fields.

    Attributes:
        checked_folders: Folders that were already checked for symbolic links, which the store does
            not follow.
    """

    def __init__(self) -> None:
        self.checked_folders = set[Path]()
        # The shared objects and their canonical JSON. The keys are Python representations, which
        # distinguish 1, 1.0 and True.
        self._shared: dict[str, tuple[Any, str]] = {}

    def parse(self, content: bytes, path: Path) -> Record:
        """Parse and check the content of a JSON file that contains a record (a stored result).

        Args:
            content: Content of the JSON file.
            path: Path of the JSON file, even if a row of `records.parquet` replaces the file.

        Raises:
            ValueError, TypeError, KeyError, OverflowError, RecursionError: The content is not a
                valid record, or the name of the file belongs to another record.
        """
        values = _parse_fields(content)
        keys = {name: f"{name} {values[name]!r}" for name in _SHARED_FIELDS if name in values}
        for name, key in keys.items():
            if key not in self._shared:
                # Settings that are nested too deeply raise RecursionError here, not in a table.
                to_plain_json(values[name])
                self._shared[key] = values[name], canonical_json(values[name])
            values[name] = self._shared[key][0]
        record = Record(**values)
        if not 0 <= record.layer < record.depth:
            raise ValueError(f"layer is {record.layer}, expected 0 to {record.depth - 1}")
        if not _FINGERPRINT.fullmatch(record.dataset_fingerprint):
            raise ValueError(
                f"dataset_fingerprint is {record.dataset_fingerprint!r}, expected a digest"
            )
        _require_possible_values(record)
        if not interval_contains(record.ci95, record.value):
            raise ValueError(f"value is {record.value}, outside of its ci95 {record.ci95}")
        # Computing the digest from cached JSON saves seconds for thousands of records.
        texts = {name: self._shared[key][1] for name, key in keys.items()}
        vars(record)["digest"] = result_digest(record, texts)
        if path.parts[-3:] != record.relative_path():
            raise ValueError("the file name belongs to another result. The file may be a copy")
        # This check comes last, because the other checks give more specific reasons.
        if record.record_sha256 is not None:
            _require_digest(content, record.record_sha256)
        return record


# Beginnings of the lines with these fields, in the order of the file.
_SCANNED_FIELDS = tuple(f'\n "{name}": '.encode() for name in sorted((*ENCODER_FIELDS, "model")))


def find_encoder(
    content: bytes, by_fields: dict[tuple[bytes, ...], RecordedEncoder]
) -> RecordedEncoder | None:
    """Return the encoder of a record (a stored result) without parsing its whole JSON file.

    The result is None unless `text_with_digest` has written the file. In files of
    `text_with_digest`, each field is on a line that starts with one space.

    Args:
        content: Content of the JSON file.
        by_fields: Cache of encoders by the JSON text of their fields, to which new encoders are
            added.
    """
    texts, end = list[bytes](), 0
    for name in _SCANNED_FIELDS:
        start = content.find(name, end)
        if start < 0:
            return None
        start += len(name)
        end = content.find(b',\n "', start)
        texts.append(content[start:end])
    key = tuple(texts)
    if key not in by_fields:
        try:
            architecture, checkpoint_sha256, mean, model, std = map(json.loads, texts)
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
    """Raise an error if a number in a record (a stored result) is out of range or not a number.

    Percentages and costs are checked. An error is also raised if the training images, the
    corruption or the baseline have unexpected fields.

    Raises:
        TypeError, ValueError: The record contains an impossible value.
    """
    # Reading these properties raises a TypeError if the settings have unexpected fields.
    _ = record.trained_on, record.corruption
    costs = ("num_images", record.num_images), ("peak_memory", record.peak_memory)
    for name, cost in (*costs, ("seconds", record.seconds)):
        if cost is not None and not 0 <= cost <= _MAX_COST:
            raise ValueError(f"{name} is {cost}, expected 0 to {_MAX_COST:g}")
    percentages = {"details.degenerate_percent": record.details.get("degenerate_percent")}
    if record.unit == "%":
        percentages["value"] = record.value
    baseline = record.details.get(_BASELINE)
    if baseline is not None:
        has_known_names = isinstance(baseline, dict) and set(baseline) == {"answer", "value"}
        if not has_known_names or type(baseline["answer"]) is not str:
            raise TypeError(
                f"details.baseline is {baseline!r}, expected a text 'answer' and a 'value'"
            )
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
    """Parse the content of a record's JSON file, and return the fields of `Record` by name.

    Unknown fields, which later versions may have written, are ignored.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: The content is not a valid record.
    """
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
        # `isinstance` would accept True as an integer.
        if types is not None and type(value) not in types:
            raise TypeError(f"{name} is {value!r}, which has a wrong type")
    return known


def _parse_number(value: Any) -> float:
    """Convert a number that was parsed from JSON to a float.

    None becomes NaN, and the text "inf" becomes infinity, because JSON has no such numbers.
    """
    if value is None:
        return math.nan
    if value == INFINITY_AS_JSON:
        return math.inf
    if type(value) not in (int, float):
        raise ValueError(f"expected a number, got {value!r}")
    return float(value)


def describe_reading_error(error: Exception) -> str:
    """Return a text that says why a record (a stored result) could not be parsed.

    The text has at most about 200 characters. `error` is the exception that `RecordReader.parse`
    raised.
    """
    reason = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
    most = _MAX_REASON_CHARACTERS
    return reason if len(reason) <= most else f"{reason[:most]}..."


# The following functions compare settings by value, so that 1 and 1.0 are equal.
#
# Versions before 0.2 stored a number as the user typed it. Now each setting has one type. An older
# record may therefore contain 1 where a new key of the same result contains 1.0. The digest in its
# file name then differs, so `ResultStore.load` also searches for the `numeric_digest`. Tables would
# show such records as different results, so `ResultStore.records` calls `unify_settings`. If the
# settings of a record are replaced, it keeps its old digest, because the file name contains it.


def numeric_digest(key: ResultKey) -> str:
    """Return the digest of a result's key, with settings such as 1.0 converted to 1.

    Keys that only differ in number types (1 and 1.0) therefore have the same digest.
    """
    return result_digest(key, {"settings": _numeric_text(key.settings)})


def unify_settings(records: Sequence[Record]) -> list[Record]:
    """Return records, with settings made equal if they only differ in number types (1 and 1.0).

    A number becomes a float if at least one of the records stores it as a float. Of several records
    with the same key, only the latest one is returned.

    Args:
        records: Stored results, perhaps from several versions of the suite.
    """
    unified: dict[int, Mapping[str, Any]] = {}
    for name in ("settings", "changed"):
        # Records share equal settings, so there are few objects to compare.
        distinct = {id(value): value for value in (getattr(one, name) for one in records)}
        by_text: dict[str, list[Mapping[str, Any]]] = {}
        for value in distinct.values():
            by_text.setdefault(_numeric_text(value), []).append(value)
        for equal in by_text.values():
            if len(equal) > 1:
                unified |= dict.fromkeys(map(id, equal), reduce(_prefer_floats, equal))
    if not unified:
        return list(records)
    latest = {numeric_digest(one): one for one in sorted(records, key=lambda one: one.created)}
    kept = set(map(id, latest.values()))
    return [
        replace_settings(
            record,
            settings=unified.get(id(record.settings), record.settings),
            changed=unified.get(id(record.changed), record.changed),
        )
        for record in records
        if id(record) in kept
    ]


def replace_settings(record: Record, **settings: Any) -> Record:
    """Return a copy of a record (a stored result) with other values of some fields.

    The copy keeps the digest of the original record, because the file name contains this digest.

    Args:
        record: The record.
        settings: New values of the fields `settings` or `changed`.
    """
    copy = replace(record, **settings)
    vars(copy)["digest"] = record.digest
    return copy


def _numeric_text(value: Any) -> str:
    return canonical_json(_floats_as_integers(value))


def _floats_as_integers(value: Any) -> Any:
    """Return nested mappings and lists with floats such as 1.0 replaced by integers such as 1."""
    if isinstance(value, Mapping):
        return {name: _floats_as_integers(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_floats_as_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _prefer_floats(first: Any, second: Any) -> Any:
    """Merge two nested mappings or lists that are equal except for number types (1 and 1.0).

    A number in the result is a float if at least one of the two inputs has a float.
    """
    if isinstance(first, Mapping):
        return {name: _prefer_floats(item, second[name]) for name, item in first.items()}
    if isinstance(first, list):
        return list(map(_prefer_floats, first, second))
    return first if isinstance(first, float) else second
