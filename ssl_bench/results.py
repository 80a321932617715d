"""Records of finished cells: one JSON file each, written whole or not at all."""

import hashlib
import io
import json
import math
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from ssl_bench.errors import DataError
from ssl_bench.files import write_atomically, write_text_atomically

PerImage = Shaped[np.ndarray, "images *values"]
"""What each scored image contributes to a value: 0 or 1 to a share; pixels that are right,
predicted and true by class (images x 3 x classes) to a mean IoU or an accuracy."""

UNRANKED_METRICS = frozenset({"explained_variance"})
"""In percent, and yet more is not better."""

SUPERVISED = "supervised"
"""Task of the record that a supervised run leaves of itself; no probe asks for it."""

_INFINITE = "inf"
# Of what an image contributes: three counts of eight bytes for each of 2,700 classes.
_IMAGE_BYTES, _MOST_BYTES = 2**16, 2**30


@dataclass(frozen=True)
class CellKey:
    """The fields that change the number; device, workers and batch size are not among them."""

    task: str
    dataset: str
    split: str
    layer: int
    facet: str
    protocol: str
    metric: str
    checkpoint_sha256: str
    dataset_fingerprint: str
    seed: int
    settings: Mapping[str, Any]

    def digest(self) -> str:
        """Sixteen hexadecimal digits that are the same for the same cell on every machine."""
        text = json.dumps(asdict(self), sort_keys=True, default=list)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __hash__(self) -> int:
        return hash(self.digest())

    def filename(self) -> str:
        return f"layer{self.layer:02d}-{self.facet}-{self.metric}-{self.digest()}.json"


@dataclass(frozen=True)
class Record:
    """One cell of a table with everything needed to trust or repeat it.

    Attributes:
        value: In `unit`; infinite where that is the answer, as for a singular matrix.
        ci95: 95 % interval over images, None where the metric has none.
        seconds: Wall-clock time of the pass that gave this cell, shared by the cells of that pass.
        created: ISO 8601, UTC.
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

    def key(self) -> CellKey:
        return CellKey(**{f.name: getattr(self, f.name) for f in fields(CellKey)})

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON has them; infinity is "inf", what is no number null."""
        return _finite(asdict(self))


class ResultStore:
    """A folder of records that many processes may write at once.

    Attributes:
        unreadable: Files that the last `records` passed over.
        damaged: Files of images' contributions that do not fit their records.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.unreadable: list[Path] = []
        self.damaged: list[Path] = []

    def path(self, key: CellKey) -> Path:
        return self.root / "records" / key.task / key.dataset / key.filename()

    def has(self, key: CellKey) -> bool:
        """Whether the cell is finished; a half-written file is not."""
        return self.load(key) is not None

    def load(self, key: CellKey) -> Record | None:
        """The record of a finished cell, None when there is none or only half of one."""
        path = self.path(key)
        return self._read(path) if path.is_file() else None

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
        if not path.is_file():
            return None
        try:
            found = _read_array(path, min(_IMAGE_BYTES * record.num_images, _MOST_BYTES))
            if found.dtype.kind in "biu" and found.shape[:1] == (record.num_images,):
                return found
        # A damaged file makes the readers of zip and npy fail in any way.
        except Exception:
            pass
        self.damaged.append(path)
        return None

    def save_image_ids(self, fingerprint: str, ids: Sequence[str]) -> None:
        """Keep the ids behind a dataset's fingerprint, in the order of `per_image`."""
        write_text_atomically(self._ids_path(fingerprint), json.dumps(list(ids)) + "\n")

    def image_ids(self, fingerprint: str) -> tuple[str, ...] | None:
        """Ids of all images of a split; None where they were not kept."""
        try:
            ids = json.loads(self._ids_path(fingerprint).read_text())
        except (OSError, ValueError):
            return None
        whole = isinstance(ids, list) and all(isinstance(name, str) for name in ids)
        return tuple(ids) if whole else None

    def _ids_path(self, fingerprint: str) -> Path:
        return self.root / "images" / f"{fingerprint[:16]}.json"

    def per_image_path(self, record: Record) -> Path:
        """Where they are, if they were kept."""
        return self.path(record.key()).with_suffix(".npz")

    def records(self) -> list[Record]:
        """Every readable record; the paths of the others are in `unreadable`.

        Raises:
            DataError: there is no record at all.
        """
        self.unreadable = []
        paths = sorted((self.root / "records").glob("*/*/*.json"))
        found = [record for path in paths if (record := self._read(path)) is not None]
        if paths and not found:
            raise DataError(
                f"none of the {len(paths)} records in {self.root / 'records'} can be read, such as "
                f"{paths[0]}; run `ssl-bench probe --out {self.root}`"
            )
        if not found:
            raise DataError(
                f"no records in {self.root / 'records'}; run `ssl-bench probe --out {self.root}`"
            )
        return found

    def _read(self, path: Path) -> Record | None:
        try:
            fields_read = json.loads(path.read_text())
            fields_read["value"] = _number(fields_read["value"])
            if fields_read["ci95"] is not None:
                low, high = fields_read["ci95"]
                fields_read["ci95"] = (_number(low), _number(high))
            # Later versions may know more about the same cell.
            known = {item.name for item in fields(Record)}
            record = _checked(Record(**{k: v for k, v in fields_read.items() if k in known}))
            if path != self.path(record.key()):
                raise ValueError("a copy, or of another cell")
            return record
        # A number too large for a float; brackets within brackets.
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            self.unreadable.append(path)
            return None


def _read_array(path: Path, most_bytes: int) -> np.ndarray:
    """The array of an .npz file, which may claim and inflate to anything."""
    if path.stat().st_size > most_bytes:
        raise ValueError(f"{path} is larger than {most_bytes} bytes")
    with zipfile.ZipFile(path) as archive, archive.open("arr_0.npy") as file:
        size = archive.getinfo("arr_0.npy").file_size
        if size > most_bytes:
            raise ValueError(f"{path} claims {size} bytes")
        # With a number, because without one it inflates all and cuts that.
        return np.load(io.BytesIO(file.read(size)), allow_pickle=False)


def _finite(value: Any) -> Any:
    # JSON has neither; null and a text keep the files readable everywhere.
    if isinstance(value, float) and not math.isfinite(value):
        return _INFINITE if value == math.inf else None
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _number(value: float | str | None) -> float:
    if value is None:
        return math.nan
    if value == _INFINITE:
        return math.inf
    if isinstance(value, str) or type(value) not in (int, float) or math.isinf(value):
        raise ValueError(f"expected a number, got {value!r}")
    return float(value)


def _checked(record: Record) -> Record:
    """The record, once its fields are known to be of their kinds: a file may hold anything."""
    for item in fields(record):
        value = getattr(record, item.name)
        kinds = {str: (str,), int: (int,), float: (int, float)}.get(item.type, (type(value),))
        if item.name in ("settings", "details"):
            kinds = (dict,)
        # Not isinstance, for which true and false are whole numbers.
        if type(value) not in kinds:
            raise TypeError(f"{item.name} is {value!r}")
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
