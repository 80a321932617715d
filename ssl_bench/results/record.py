"""A record: one cell of a table, with everything needed to trust or repeat it, and its file read.

A file that is cut, of another version or of a wrong type is refused.
"""

import glob
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
from typing import Any, Literal

import numpy as np
from jaxtyping import Shaped

from ssl_bench.errors import DataError
from ssl_bench.intervals import holds
from ssl_bench.system.escaping import is_file_name, plain_json
from ssl_bench.system.files import read_within
from ssl_bench.system.paths import file_name

PerImage = Shaped[np.ndarray, "images *values"]
"""What each scored image contributes to a value: 0 or 1 to a share; pixels that are right,
predicted and true by class (images x 3 x classes) to a mean IoU or an accuracy; points that are
right, and all points (images x 2), to a PCK; boxes by rank (see `ssl_bench.scores.DetectionCounts`)
to an average precision or recall; a float, its own percentage, to a mean. Hits of several draws
stand side by side (images x draws)."""

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
"""How a value comes from what its images contribute: their share, the mean of their percentages,
the mean of their shares of draws or of points; from the sums of class counts the mean IoU or the
accuracy, from those of boxes the average precision or recall; from the object counts of each image
the mean F-beta, IoU or accuracy."""

UNRANKED_METRICS = frozenset({"explained_variance", "outlier_share", "degenerate"})
"""In percent, and yet more is not better."""

MAX_DEGENERATE_PERCENT = 50.0
"""Percent of degenerate images above which a value says nothing: it is never best, see
`is_degenerate`."""

SUPERVISED = "supervised"
"""Task of the record that a supervised run leaves of itself; no probe asks for it."""

ENCODER_FIELDS = ("checkpoint_sha256", "architecture", "mean", "std")
"""Fields that say which encoder was scored."""

INFINITY_AS_JSON = "inf"
"""Infinity in the JSON of records."""

_BASELINE = "baseline"
_LONG = 24

TRAINED_ON = "trained_on"
"""Name among the settings of what a probe was fitted to."""

CORRUPTED = "corrupted"
"""Name among the settings of what the scored images went through."""


@dataclass(frozen=True)
class TrainingImages:
    """The images that a probe was fitted to before it scored others."""

    split: str
    fingerprint: str
    num_images: int

    def __str__(self) -> str:
        kind, dash, digits = self.fingerprint.rpartition("-")
        return f"{self.split} ({self.num_images} images, {kind}{dash}{digits[:6]})"


@dataclass(frozen=True)
class RecordedCorruption:
    """What the scored images went through, and what they were before.

    Attributes:
        dataset: Name of the images as they are; `fingerprint` is theirs too.
    """

    name: str
    severity: int
    dataset: str
    fingerprint: str


@dataclass(frozen=True)
class Baseline:
    """An answer that looks at no image, such as the same for all, and its score.

    Attributes:
        answer: In words, such as "centre box".
        value: Of the metric that it stands beside, on the same images, in the same unit.
    """

    answer: str
    value: float

    def as_details(self) -> dict[str, Any]:
        """As records keep it."""
        return {_BASELINE: asdict(self)}

    @classmethod
    def of(cls, details: Mapping[str, Any]) -> "Baseline | None":
        """What `as_details` was put among; None where nothing was, as in older records."""
        told = details.get(_BASELINE)
        return None if told is None else cls(**told)

    @classmethod
    def best(cls, values: Mapping[str, float]) -> "Baseline":
        """Return the best of some constant answers, by answer the score; of equals the first.

        A score that is not a number is never better than another one.
        """
        answer = max(values, key=lambda one: -math.inf if math.isnan(values[one]) else values[one])
        return cls(answer, values[answer])

    @classmethod
    def most_frequent(cls, counts: Sequence[int], top: int) -> "Baseline":
        """Naming the classes that most of the scored images are of, the same ones for each.

        Args:
            counts: Images of each class, at least one in all.
            top: How many classes may be named.
        """
        share = 100.0 * sum(sorted(counts, reverse=True)[:top]) / sum(counts)
        return cls("most frequent class" if top == 1 else f"{top} most frequent classes", share)


def is_degenerate(percent: float | None) -> bool:
    """Return whether so many images are degenerate that a value cannot be best."""
    return percent is not None and percent > MAX_DEGENERATE_PERCENT


def block_stride(architecture: Mapping[str, Any], layer: int) -> int | None:
    """Pixels along a side of what a token stands for, where that differs between blocks."""
    strides = architecture.get("strides")
    if not isinstance(strides, (list, tuple)) or not 0 <= layer < len(strides):
        return None
    is_staged = all(type(one) is int for one in strides) and len(set(strides)) > 1
    return strides[layer] if is_staged else None


@dataclass(frozen=True)
class ResultKey:
    """The fields that change the number; device and workers, for example, are not among them.

    Attributes:
        checkpoint_sha256: Of the weights; with `architecture`, `mean` and `std` it is the encoder.
        settings: Those of the probe; under `TRAINED_ON` the images that it was fitted to, under
            `CORRUPTED` what the scored ones went through.
        metric_version: `Probe.metric_version` of the code that computes the number.
        pipeline_version: `ssl_bench.results.versions.PIPELINE_VERSION` of that code.
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

    def digest(self) -> str:
        """Sixteen hexadecimal digits that are the same for the same cell on every machine."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return result_digest(self)

    def __hash__(self) -> int:
        return hash(self.digest())

    def record(self, **measured: Any) -> "Record":
        """The record of this cell, given the fields that do not identify it."""
        return Record(**{name: getattr(self, name) for name in _KEY_FIELDS}, **measured)

    def filename(self) -> str:
        return record_filename(self, self.digest())

    def of_any_kind(self) -> str:
        """Pattern of the file names of this block, facet and metric, whoever was asked and how."""
        return f"{glob.escape(_start_of_name(self))}-*.json"


@dataclass(frozen=True)
class Record:
    """One cell of a table with everything needed to trust or repeat it.

    Attributes:
        value: In `unit`; infinite where that is the answer, as for a singular matrix.
        ci95: 95 % interval over images, None where the metric has none.
        seconds: Wall-clock time of the pass that gave this cell, shared by the cells of that pass.
        created: ISO 8601, UTC.
        architecture: What the forward pass is, apart from the weights.
        mean: Subtracted from the images, RGB in [0, 1]; `std` divides them.
        details: What the probe adds, such as per-class IoU; does not identify the cell.
        changed: The settings among `settings` that are not those of the protocol.
        unit: "%", or nothing for a plain number.
        per_image_kind: One of `PerImageKind`; None where nothing was kept of single images, and in
            records of versions that did not state it.
        metric_version: As in `ResultKey`; 1 in records that do not state it.
        pipeline_version: As `metric_version`.
        per_image_sha256: Of the file of what each image contributed; None where nothing was kept,
            and in older records.
        record_sha256: Of the rest of the file that the record was read from, which agrees with it;
            None in older records.
    """

    task: str
    dataset: str
    split: str
    layer: int
    depth: int
    facet: str
    protocol: str
    metric: str
    value: float
    ci95: tuple[float, float] | None
    num_images: int
    model: str
    checkpoint_sha256: str
    architecture: Mapping[str, Any]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    dataset_fingerprint: str
    seed: int
    settings: Mapping[str, Any]
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
    metric_version: int = 1
    pipeline_version: int = 1
    # What a file holds of itself makes no other record.
    per_image_sha256: str | None = field(default=None, repr=False, compare=False)
    record_sha256: str | None = field(default=None, repr=False, compare=False)

    @property
    def is_ranked(self) -> bool:
        """Whether more is better; of a plain number nobody knows."""
        return self.unit == "%" and self.metric not in UNRANKED_METRICS

    @property
    def degenerate_percent(self) -> float | None:
        """Percent of the images whose answer rounding chose; None where that cannot happen."""
        return self.details.get("degenerate_percent")

    @property
    def stride(self) -> int | None:
        """See `block_stride`."""
        return block_stride(self.architecture, self.layer)

    @property
    def protocol_label(self) -> str:
        """The protocol as tables print it, with the settings in which the run departed from it."""
        words = [f"{name}={_short(value)}" for name, value in sorted(self.changed.items())]
        return ", ".join([self.protocol, *words])

    @cached_property
    def encoder_id(self) -> str:
        """Tells encoders apart; equal weights that are used in another way are another encoder."""
        return encoder_id({name: getattr(self, name) for name in ENCODER_FIELDS})

    @cached_property
    def digest(self) -> str:
        """That of its cell."""
        return result_digest(self)

    @property
    def trained_on(self) -> TrainingImages | None:
        """The images that something was fitted to, None where nothing was."""
        told = self.settings.get(TRAINED_ON)
        return None if told is None else TrainingImages(**told)

    @property
    def corrupted(self) -> RecordedCorruption | None:
        """What the scored images went through, None where they are as they are."""
        told = self.settings.get(CORRUPTED)
        return None if told is None else RecordedCorruption(**told)

    def key(self) -> ResultKey:
        return ResultKey(**{name: getattr(self, name) for name in _KEY_FIELDS})

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON has them; infinity is "inf", what is no number null.

        Without those that only the file of a record has.
        """
        values = {name: value for name, value in asdict(self).items() if name not in _OF_THE_FILE}
        return plain_json(values, infinity=INFINITY_AS_JSON)


_OF_THE_FILE = ("per_image_sha256", "record_sha256")
_KEY_FIELDS = sorted(item.name for item in fields(ResultKey))
# Left out of digests where they are 1: records from before there were versions keep theirs.
_VERSIONS = ("metric_version", "pipeline_version")


def result_digest(cell: ResultKey | Record, known: Mapping[str, str] | None = None) -> str:
    """Return `ResultKey.digest` of a cell or of its record.

    Args:
        cell: The one or the other.
        known: Fields of it as JSON, where `json_of` wrote them before.
    """
    written = known or {}
    texts = (
        f'"{name}": {written.get(name) or json_of(getattr(cell, name))}'
        for name in _KEY_FIELDS
        if name not in _VERSIONS or getattr(cell, name) != 1
    )
    return hashlib.sha256(f"{{{', '.join(texts)}}}".encode()).hexdigest()[:16]


def numeric_digest(cell: ResultKey | Record) -> str:
    """Return a digest of a cell that is the same whether a setting was typed as 1 or as 1.0."""
    return result_digest(cell, {"settings": json_of(_with_whole_numbers(cell.settings))})


def _with_whole_numbers(value: Any) -> Any:
    """Return JSON in which each float without a fraction is a whole number."""
    if isinstance(value, Mapping):
        return {name: _with_whole_numbers(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _take_floats(into: Any, other: Any) -> None:
    """Make whole numbers in JSON floats where they are floats in other JSON of equal numbers."""
    for place in into if isinstance(into, dict) else range(len(into)):
        if isinstance(into[place], (dict, list)):
            _take_floats(into[place], other[place])
        elif isinstance(other[place], float):
            into[place] = other[place]


def record_filename(cell: ResultKey | Record, digest: str) -> str:
    """Of the record of a cell with this digest."""
    return f"{_start_of_name(cell)}-{digest}.json"


def _start_of_name(cell: ResultKey | Record) -> str:
    return f"layer{cell.layer:02d}-{cell.facet}-{cell.metric}"


def json_of(value: Any) -> str:
    """The same text for the same value."""
    # What `dumps` does, in a tenth of its time.
    if type(value) is str:
        return encode_basestring_ascii(value)
    return json.dumps(value, sort_keys=True, default=list)


def encoder_id(identity: Mapping[str, Any]) -> str:
    """Return the hexadecimal digest of the fields in `ENCODER_FIELDS`."""
    return hashlib.sha256(json_of(identity).encode()).hexdigest()


def _short(value: Any) -> str:
    text = str(value).replace(" ", "")
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."


OLD_FORMAT = "of an earlier kind, which says too little of encoder and training images to count"

MOST_BYTES = 16 * 2**20
"""Of a record or a list of ids."""

_LONGEST_REASON = 200
# Percents that fall below 0 where an answer is worse than chance.
_BEYOND_CHANCE = re.compile(r"ami(_x\d+)?")
_ROUNDING = 1e-6
# Names of folders of pictures end in the first digits.
_FINGERPRINT = re.compile(r"(stat-)?[0-9a-f]{8,128}")
_MAPPINGS = ("settings", "details", "architecture", "changed")
_KINDS: dict[Any, tuple[type, ...]] = {
    str: (str,), int: (int,), float: (int, float), str | None: (str, NoneType)
}  # fmt: skip
# None for those that are pairs and triples of numbers.
_KINDS_OF_FIELDS = {
    item.name: (dict,) if item.name in _MAPPINGS else _KINDS.get(item.type)
    for item in fields(Record)
}
# Few among many records; no two are of equal details.
_ALIKE = ("settings", "architecture", "changed", "mean", "std")
# Those of them in which older versions kept 1 and 1.0 as they were typed.
_AS_TYPED = ("settings", "changed")
_SEAL = re.compile(rb'\n "record_sha256": "[0-9a-f]{64}",')


def sealed_text(content: Mapping[str, Any]) -> str:
    """Return the text of a record's file, with a digest over all of it."""
    digest = hashlib.sha256(_file_text(content)).hexdigest()
    return _file_text({**content, "record_sha256": digest}).decode()


def _file_text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True, default=list) + "\n").encode()


def _require_seal(content: bytes, stated: str) -> None:
    """Refuse the content of a file that is not what its digest was computed from.

    Raises:
        ValueError: A hand or a fault changed it.
    """
    # As it was written, which takes no time, or with other blanks.
    if hashlib.sha256(_SEAL.sub(b"", content, count=1)).hexdigest() != stated:
        rest = {name: one for name, one in json.loads(content).items() if name != "record_sha256"}
        if hashlib.sha256(_file_text(rest)).hexdigest() != stated:
            raise ValueError("edited or damaged: not what its record_sha256 was computed from")


class RecordReader:
    """Reads the records of one folder of results, each part that many have in common held once.

    Attributes:
        has_retyped: Whether equal settings of two records were typed as 1 and as 1.0. These records
            share one part, with the floats of both.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._folders = root, set[Path]()
        # By field, because not all are checked alike, and text in Python, which tells 1 from 1.0
        # and true: the part, and its JSON as it was read.
        self._parts: dict[str, tuple[Any, str]] = {}
        self._by_number: dict[str, Any] = {}
        self.has_retyped = False

    def read(self, path: Path) -> Record:
        """The record in a file of a folder `records/TASK/DATASET`.

        Raises:
            OSError: it cannot be read.
            ValueError, TypeError, KeyError, OverflowError, RecursionError: as `record`.
        """
        return self.record(read_within(self._root, path, MOST_BYTES, known=self._folders), path)

    def record(self, content: bytes, path: Path) -> Record:
        """As `read`, of what lies at `path` or would, were it not packed.

        Raises:
            ValueError, TypeError, KeyError, OverflowError, RecursionError: it is no record of this
                version, or that of another cell.
        """
        known = _known_fields(content)
        texts = {name: f"{name} {known[name]!r}" for name in _ALIKE if name in known}
        for name, text in texts.items():
            if text not in self._parts:
                self._parts[text] = (self._shared(name, known[name]), json_of(known[name]))
            known[name] = self._parts[text][0]
        record = Record(**known)
        if not 0 <= record.layer < record.depth:
            raise ValueError(f"layer is {record.layer} of {record.depth} blocks")
        if not _FINGERPRINT.fullmatch(record.dataset_fingerprint):
            raise ValueError(f"dataset_fingerprint is {record.dataset_fingerprint!r}")
        _require_possible(record)
        if not holds(record.ci95, record.value):
            raise ValueError(f"value is {record.value}, outside of its ci95 {record.ci95}")
        digest = result_digest(record, {name: self._parts[text][1] for name, text in texts.items()})
        if path.parts[-3:] != place_of(record, digest):
            raise ValueError("a copy, or of another cell")
        # Last, because the reasons above say more.
        if record.record_sha256 is not None:
            _require_seal(content, record.record_sha256)
        # What the property would find, which for thousands of records takes seconds.
        vars(record)["digest"] = digest
        return record

    def _shared(self, name: str, part: Any) -> Any:
        """Return a part of a record, or the one that has the same numbers in other types."""
        if name not in _AS_TYPED:
            return part
        found = self._by_number.setdefault(f"{name} {json_of(_with_whole_numbers(part))}", part)
        if found is not part:
            self.has_retyped = True
            _take_floats(found, part)
        return found


def _require_possible(record: Record) -> None:
    """Refuse what a table would take for the best block, or stumble over.

    Raises:
        TypeError, ValueError, KeyError: a number that cannot be, or a part of another kind.
    """
    _ = record.trained_on, record.corrupted
    told, degenerate = (record.details.get(n) for n in ("baseline", "degenerate_percent"))
    percents = {"details.degenerate_percent": degenerate}
    if record.unit == "%":
        percents["value"] = record.value
    if told is not None:
        is_known = isinstance(told, dict) and set(told) == {"answer", "value"}
        if not is_known or type(told["answer"]) is not str:
            raise TypeError(f"details.baseline is {told!r}")
        percents["details.baseline"] = told["value"]
    for name, value in percents.items():
        if value is None:
            continue
        if type(value) not in (int, float):
            raise TypeError(f"{name} is {value!r}, no number")
        least = -100 if _BEYOND_CHANCE.fullmatch(record.metric) else 0
        if not (math.isnan(value) or least - _ROUNDING <= value <= 100 + _ROUNDING):
            raise ValueError(f"{name} is {value}, expected {least} to 100")


def place_of(cell: ResultKey | Record, digest: str) -> tuple[str, str, str]:
    """Folders and file, below `records`, of the record of a cell with this digest.

    Raises:
        DataError: a name in it would lead elsewhere.
    """
    for name in (cell.task, cell.facet, cell.metric):
        if not is_file_name(name):
            raise DataError(f"expected a name that a file can have, got {name!r}")
    return cell.task, file_name(cell.dataset), record_filename(cell, digest)


def _known_fields(content: bytes) -> dict[str, Any]:
    """The fields of a record's file; later versions may know more, earlier ones knew less."""
    try:
        told = json.loads(content)
    except ValueError as error:
        raise ValueError(f"no complete JSON: {error}") from error
    if not isinstance(told, dict):
        raise ValueError("no JSON object")
    if "checkpoint_sha256" in told and not told.keys() >= set(ENCODER_FIELDS):
        raise ValueError(OLD_FORMAT)
    told["value"] = _number(told["value"])
    for name, count in (("ci95", 2), ("mean", 3), ("std", 3)):
        if name != "ci95" or told[name] is not None:
            told[name] = tuple(map(_number, told[name]))
            if len(told[name]) != count:
                raise ValueError(f"expected {count} numbers, got {name}={told[name]}")
    known = {name: value for name, value in told.items() if name in _KINDS_OF_FIELDS}
    for name, value in known.items():
        kinds = _KINDS_OF_FIELDS[name]
        # Not isinstance, for which true and false are whole numbers.
        if kinds is not None and type(value) not in kinds:
            raise TypeError(f"{name} is {value!r}")
    return known


def _number(value: Any) -> float:
    """As it was before it was JSON."""
    if value is None:
        return math.nan
    if value == INFINITY_AS_JSON:
        return math.inf
    if type(value) not in (int, float):
        raise ValueError(f"expected a number, got {value!r}")
    return float(value)


def shortened(error: Exception) -> str:
    """Why, in a few words, whatever the field was."""
    reason = f"no {error}" if isinstance(error, KeyError) else str(error)
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."
