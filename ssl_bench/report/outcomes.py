"""Which images a checkpoint does best and worst on, from what each contributed to a score."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssl_bench.report.checkpoints import Checkpoint
from ssl_bench.report.model import Line, Panel, Point
from ssl_bench.results import PerImage, Record, ResultStore
from ssl_bench.scores import mean_iou
from ssl_bench.system.files import read_within
from ssl_bench.system.naming import file_name, pictures_folder
from ssl_bench.tables.pairs.image_scores import stored_curve

NUM_SHOWN = 8
_MOST_BYTES = 2**28
KINDS = ("hits", "misses", "degenerate")


@dataclass(frozen=True)
class ImageScore:
    """Mean IoU of one image over the classes that occur in it, in percent."""

    image: str
    value: float


@dataclass(frozen=True)
class Extremes:
    """The images of a panel at the best block of a checkpoint.

    Attributes:
        worst: From the worst one on.
        best: From the best one on.
        num_scored: Images with at least one class.
    """

    panel: Panel
    point: Point
    worst: tuple[ImageScore, ...]
    best: tuple[ImageScore, ...]
    num_scored: int


@dataclass(frozen=True)
class Outcomes:
    """What became of the images of a panel, block by block.

    Attributes:
        by_point: Ids by kind of `KINDS`; degenerate ones are neither hits nor misses.
    """

    panel: Panel
    by_point: Mapping[Point, Mapping[str, tuple[str, ...]]]


def image_names(store: ResultStore, record: Record, number: int) -> list[str]:
    """Ids of the images that were scored, or their numbers where ids do not tell which were."""
    ids = store.image_ids(record.dataset_fingerprint)
    if ids is not None and len(ids) == number:
        return list(ids)
    return [f"image {i + 1} of {number}" for i in range(number)]


def image_scores(per_image: PerImage) -> list[float]:
    """Mean IoU in percent of each image; NaN where no class occurs."""
    return mean_iou(per_image).tolist()


def extremes_of(
    store: ResultStore, records: Sequence[Record], panel: Panel, line: Line
) -> Extremes | None:
    """The worst and best images at the best block; None for what is not a mean IoU."""
    best = line.best
    if not panel.metric.startswith("miou") or best is None:
        return None
    record = records[best.records[0]]
    counts = stored_curve(store, [record]).per_image.get(best.layer)
    if counts is None or counts.ndim != 3:
        return None
    names = image_names(store, record, len(counts))
    scored = [
        ImageScore(name, value)
        for name, value in zip(names, image_scores(counts), strict=True)
        if not math.isnan(value)
    ]
    ordered = sorted(scored, key=lambda score: score.value)
    shown = min(NUM_SHOWN, max(1, len(ordered) // 2))
    top = tuple(reversed(ordered[len(ordered) - shown :]))
    return Extremes(panel, best, tuple(ordered[:shown]), top, len(ordered))


def outcomes_of(
    root: Path, records: Sequence[Record], panel: Panel, checkpoint: Checkpoint
) -> Outcomes | None:
    """What became of each image of an object discovery; None where no log of it is kept."""
    line = panel.line(checkpoint)
    if panel.metric != "corloc" or line is None:
        return None
    record = records[line.last.records[0]]
    images = _logged(root, record, checkpoint)
    by_point = {}
    for point in line.points:
        cells = {
            image: cell
            for image, found in images.items()
            if isinstance(cell := found.get(f"{point.layer}/{panel.facet}"), dict)
        }
        kinds = {
            kind: tuple(i for i, cell in cells.items() if _kind(cell) == kind) for kind in KINDS
        }
        if cells:
            by_point[point] = kinds
    return Outcomes(panel, by_point) if by_point else None


def _kind(cell: Mapping[str, Any]) -> str:
    if cell.get("degenerate"):
        return "degenerate"
    return "hits" if cell.get("hit") else "misses"


def _logged(root: Path, record: Record, checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Cells by image id from the log with the settings of a record; of scored images alone."""
    place = root / "pictures" / record.task / file_name(record.dataset)
    fingerprint = record.dataset_fingerprint
    folders = [place / pictures_folder(folder, fingerprint) for folder in checkpoint.folders]
    for path in sorted(path for folder in folders for path in folder.rglob("images_*.jsonl")):
        lines = _json_lines(root, path)
        if not lines or not _is_of(lines[0].get("key"), record):
            continue
        images: dict[str, dict[str, Any]] = {}
        for line in lines[1:]:
            if line.get("num_boxes") and isinstance(line.get("cells"), dict):
                images.setdefault(str(line.get("image")), {}).update(line["cells"])
        return images
    return {}


def _is_of(key: Any, record: Record) -> bool:
    settings = {n: v for n, v in record.settings.items() if n not in ("dtype", "left_out")}
    return (
        isinstance(key, dict)
        and key.get("encoder") == record.encoder_id
        and key.get("dataset_fingerprint") == record.dataset_fingerprint
        and key.get("settings") == settings
        and key.get("dtype") == f"torch.{record.settings.get('dtype')}"
        and key.get("version") == record.version
    )


def _json_lines(root: Path, path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log; a kill may have cut the last one short."""
    found = []
    try:
        text = read_within(root, path, _MOST_BYTES).decode(errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            found.append(content)
    return found
