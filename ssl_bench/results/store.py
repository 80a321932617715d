"""Records of finished cells: one JSON file each, written whole or not at all."""

import glob
import hashlib
import io
import json
import math
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from ssl_bench.errors import DataError
from ssl_bench.results.ranges import INFINITE, colour_of, parsed, require_possible, shortened
from ssl_bench.system.escaping import is_file_name
from ssl_bench.system.files import read_within, write_atomically, write_text_atomically
from ssl_bench.system.memory import pass_on_memory
from ssl_bench.system.naming import file_name

PerImage = Shaped[np.ndarray, "images *values"]
"""What each scored image contributes to a value: 0 or 1 to a share; pixels that are right,
predicted and true by class (images x 3 x classes) to a mean IoU or an accuracy."""

UNRANKED_METRICS = frozenset({"explained_variance"})
"""In percent, and yet more is not better."""

SUPERVISED = "supervised"
"""Task of the record that a supervised run leaves of itself; no probe asks for it."""

ENCODER = ("checkpoint_sha256", "architecture", "mean", "std")
"""Fields that say which encoder was scored."""

TRAINED_ON = "trained_on"
"""Name among the settings of what a probe was fitted to."""

OUTDATED = "of an earlier kind, which says too little of encoder and training images to count"

# Of a record or a list of ids; of what all images contributed.
_MOST_BYTES, _MOST_OF_IMAGES = 16 * 2**20, 2**30
# Of what an image contributes: three counts of eight bytes for each of 2,700 classes.
_IMAGE_BYTES = 2**16


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
class CellKey:
    """The fields that change the number; device, workers and batch size are not among them.

    Attributes:
        checkpoint_sha256: Of the weights; with `architecture`, `mean` and `std` it is the encoder.
        settings: Those of the probe; under `TRAINED_ON` the images that it was fitted to.
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

    def digest(self) -> str:
        """Sixteen hexadecimal digits that are the same for the same cell on every machine."""
        return _digest(asdict(self))[:16]

    def __hash__(self) -> int:
        return hash(self.digest())

    def filename(self) -> str:
        return f"{self._place}-{self.digest()}.json"

    def of_any_kind(self) -> str:
        """Pattern of the file names of this block, facet and metric, whoever was asked and how."""
        return f"{glob.escape(self._place)}-*.json"

    @property
    def _place(self) -> str:
        return f"layer{self.layer:02d}-{self.facet}-{self.metric}"


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
        unit: "%", or nothing for a plain number.
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

    @property
    def is_ranked(self) -> bool:
        """Whether more is better; of a plain number nobody knows."""
        return self.unit == "%" and self.metric not in UNRANKED_METRICS

    @cached_property
    def encoder_id(self) -> str:
        """Tells encoders apart; equal weights that are used in another way are another encoder."""
        return encoder_id({name: getattr(self, name) for name in ENCODER})

    @property
    def trained_on(self) -> TrainingImages | None:
        """The images that something was fitted to, None where nothing was."""
        told = self.settings.get(TRAINED_ON)
        return None if told is None else TrainingImages(**told)

    def key(self) -> CellKey:
        return CellKey(**{f.name: getattr(self, f.name) for f in fields(CellKey)})

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON has them; infinity is "inf", what is no number null."""
        return _finite(asdict(self))


def encoder_id(identity: Mapping[str, Any]) -> str:
    """Hexadecimal digest of weights, architecture, mean and deviation: the fields of `ENCODER`."""
    return _digest(identity)


def _digest(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()


class ResultStore:
    """A folder of records that many processes may write at once.

    Attributes:
        unreadable: Files that the last `records` passed over, and why.
        found: How many files it looked at.
        damaged: Files of images' contributions that do not fit their records.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.unreadable: dict[Path, str] = {}
        self.found = 0
        self.damaged: list[Path] = []

    def path(self, key: CellKey) -> Path:
        """Where the record of a cell is.

        Raises:
            DataError: a name in it would lead elsewhere.
        """
        for name in (key.task, key.facet, key.metric):
            if not is_file_name(name):
                raise DataError(f"expected a name that a file can have, got {name!r}")
        return self.root / "records" / key.task / file_name(key.dataset) / key.filename()

    def has(self, key: CellKey) -> bool:
        """Whether the cell is finished; a half-written file is not."""
        return self.load(key) is not None

    def load(self, key: CellKey) -> Record | None:
        """The record of a finished cell, None when there is none or only half of one."""
        path = self.path(key)
        return self._read(path) if path.is_file() else None

    def outdated(self, key: CellKey) -> Path | None:
        """A record of this block, facet and metric that is of an earlier kind.

        Cost: opens all records of them, of whatever encoder.
        """
        for path in sorted(self.path(key).parent.glob(key.of_any_kind())):
            if self._tells_encoder(path):
                continue
            if self._read(path) is None and self.unreadable[path] == OUTDATED:
                return path
        return None

    def _tells_encoder(self, path: Path) -> bool:
        """Whether a file has the names that an earlier kind lacks; takes no parsing."""
        try:
            content = read_within(self.root, path, _MOST_BYTES)
        except OSError:
            return False
        return all(f'"{name}":'.encode() in content for name in ENCODER)

    def save(self, record: Record, per_image: PerImage | None = None) -> Path:
        """Write a record and, beside it, what each image contributed to the value."""
        path = self.path(record.key())
        if per_image is not None:
            # First, so that a record never stands there without it.
            write_atomically(
                path.with_suffix(".npz"), lambda file: np.savez_compressed(file, per_image)
            )
        text = json.dumps(record.as_json(), indent=1, sort_keys=True, default=list)
        write_text_atomically(path, text + "\n")
        return path

    def per_image(self, record: Record) -> PerImage | None:
        """What each image contributed; None where nothing was kept, or it is `damaged`."""
        path = self.per_image_path(record)
        try:
            most = min(_IMAGE_BYTES * record.num_images, _MOST_OF_IMAGES)
            found = _read_array(io.BytesIO(read_within(self.root, path, most)), most)
            if found.dtype.kind in "biu" and found.shape[:1] == (record.num_images,):
                return found
        except FileNotFoundError:
            return None
        # A damaged file makes the readers of zip and npy fail in any way.
        except Exception as error:
            pass_on_memory(error)
        self.damaged.append(path)
        return None

    def save_image_ids(self, fingerprint: str, ids: Sequence[str]) -> None:
        """Keep the ids behind a dataset's fingerprint, in the order of `per_image`."""
        write_text_atomically(self._ids_path(fingerprint), json.dumps(list(ids)) + "\n")

    def image_ids(self, fingerprint: str) -> tuple[str, ...] | None:
        """Ids of all images of a split; None where they were not kept."""
        try:
            ids = json.loads(read_within(self.root, self._ids_path(fingerprint), _MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return None
        whole = isinstance(ids, list) and all(isinstance(name, str) for name in ids)
        return tuple(ids) if whole else None

    def _ids_path(self, fingerprint: str) -> Path:
        return self.root / "images" / f"{fingerprint[:16]}.json"

    def per_image_path(self, record: Record) -> Path:
        """Where they are, if they were kept."""
        return self.path(record.key()).with_suffix(".npz")

    def records(self) -> list[Record]:
        """Every readable record; the others are in `unreadable`.

        Raises:
            DataError: there is no record at all.
        """
        self.unreadable = {}
        paths = sorted((self.root / "records").glob("*/*/*.json"))
        self.found = len(paths)
        found = [record for path in paths if (record := self._read(path)) is not None]
        if paths and not found:
            raise DataError(
                f"none of the {len(paths)} records in {self.root / 'records'} can be read, such as "
                f"{paths[0]} ({self.unreadable[paths[0]]}); run `ssl-bench probe --out {self.root}`"
            )
        if not found:
            raise DataError(
                f"no records in {self.root / 'records'}; run `ssl-bench probe --out {self.root}`"
            )
        return found

    def _read(self, path: Path) -> Record | None:
        try:
            fields_read = parsed(read_within(self.root, path, _MOST_BYTES))
            # Later versions may know more about the same cell, earlier ones knew less.
            known = {item.name for item in fields(Record)}
            if "checkpoint_sha256" in fields_read and not set(ENCODER) <= fields_read.keys():
                raise ValueError(OUTDATED)
            for colour in ("mean", "std"):
                fields_read[colour] = colour_of(fields_read[colour])
            record = _checked(Record(**{k: v for k, v in fields_read.items() if k in known}))
            if path != self.path(record.key()):
                raise ValueError("a copy, or of another cell")
            return record
        except OSError as error:
            self.unreadable[path] = error.strerror or str(error)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            self.unreadable[path] = shortened(error)
        return None


def _read_array(content: io.BytesIO, most_bytes: int) -> np.ndarray:
    """The array of an .npz file, which may claim and inflate to anything."""
    with zipfile.ZipFile(content) as archive, archive.open("arr_0.npy") as file:
        size = archive.getinfo("arr_0.npy").file_size
        if size > most_bytes:
            raise ValueError(f"it claims {size} bytes")
        # With a number, because without one it inflates all and cuts that.
        return np.load(io.BytesIO(file.read(size)), allow_pickle=False)


def _finite(value: Any) -> Any:
    # JSON has neither; null and a text keep the files readable everywhere.
    if isinstance(value, float) and not math.isfinite(value):
        return INFINITE if value == math.inf else None
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _checked(record: Record) -> Record:
    """The record, once its fields are known to be of their kinds: a file may hold anything."""
    for item in fields(record):
        value = getattr(record, item.name)
        kinds = {str: (str,), int: (int,), float: (int, float)}.get(item.type, (type(value),))
        if item.name in ("settings", "details", "architecture"):
            kinds = (dict,)
        # Not isinstance, for which true and false are whole numbers.
        if type(value) not in kinds:
            raise TypeError(f"{item.name} is {value!r}")
    require_possible(vars(record))
    told = record.trained_on
    if told and [type(value) for value in asdict(told).values()] != [str, str, int]:
        raise TypeError(f"{TRAINED_ON} is {told!r}")
    return record


@cache
def source_commit() -> str | None:
    """Commit of the checkout that runs, with "-dirty" for uncommitted changes; None for a wheel."""
    source = Path(__file__).parents[1]
    if not (source / ".git").exists():
        return None
    try:
        commit = _git(source, "rev-parse", "HEAD")
        changed = _git(source, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("-dirty" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(
        command, capture_output=True, check=True, text=True, timeout=10
    ).stdout.strip()
