"""What single images say: of one checkpoint, and in pairs, with the intervals of differences."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ssl_bench.errors import ConfigurationError
from ssl_bench.report.model import Checkpoint, Line, Panel
from ssl_bench.results import PerImage, Record, ResultStore
from ssl_bench.results.per_image import CurveEstimates, ImageCurve, load_curve
from ssl_bench.scores import mean_iou
from ssl_bench.system.files import parse_checked_lines, read_untrusted
from ssl_bench.system.paths import figures_folder, file_name
from ssl_bench.system.progress import show_progress
from ssl_bench.tables.comparison import Difference, compare_best_blocks, compare_block_by_block
from ssl_bench.tables.entries import Entry

MAX_PAIRED = 6
"""With more checkpoints than that, pairs must be asked for."""

KINDS = ("hits", "misses", "degenerate")
_NUM_SHOWN = 6
_NUM_EXTREMES = 8
_MOST_BYTES = 2**28


@dataclass(frozen=True)
class Pair:
    """Two checkpoints that get a page."""

    first: Checkpoint
    second: Checkpoint

    @property
    def page(self) -> str:
        return f"compare-{self.first.encoder_id[:8]}-{self.second.encoder_id[:8]}.html"


class Side(NamedTuple):
    """One checkpoint in one panel.

    Attributes:
        names: Of the images.
        records: By block.
    """

    curve: ImageCurve
    scored: CurveEstimates
    names: Sequence[str]
    records: Mapping[int, Record]
    seed: int


class Row(NamedTuple):
    """A difference and the records behind its two sides."""

    difference: Difference
    first: Sequence[Record]
    second: Sequence[Record]


class PanelPair(NamedTuple):
    """Two checkpoints in one panel.

    Attributes:
        rows: First minus second block by block.
        summary: Best blocks on the scored images, then those that held-out images choose; none
            where no block may be best.
        layers: The best block of each side.
        images: Those whose mean IoUs at these blocks differ most: name, both, difference.
        tally: Of images that are right or wrong: both, only the first, only the second, neither.
    """

    panel: Panel
    rows: Sequence[Row]
    summary: Sequence[Row]
    layers: tuple[int, int]
    images: Sequence[tuple[str, float, float, float]]
    tally: Sequence[int] | None


def pairs_of(checkpoints: Sequence[Checkpoint], asked: Iterable[tuple[str, str]]) -> list[Pair]:
    """All pairs, or those asked for by their ids.

    Raises:
        ConfigurationError: one checkpoint twice.
    """
    by_id = {checkpoint.encoder_id: checkpoint for checkpoint in checkpoints}
    wanted = [(by_id[first], by_id[second]) for first, second in asked]
    if any(first == second for first, second in wanted):
        raise ConfigurationError(
            "expected two different checkpoints, got one twice",
            hint=("--pair", "{checkpoint}", "{other_checkpoint}"),
        )
    if not wanted and len(checkpoints) <= MAX_PAIRED:
        wanted = list(combinations(checkpoints, 2))
    return [Pair(first, second) for first, second in dict.fromkeys(wanted)]


def side_of(store: ResultStore, panel: Panel, checkpoint: Checkpoint) -> Side | None:
    """The estimates of one checkpoint; None where images' contributions were not kept.

    Of several seeds the lowest, because images are paired with those of the same seed.
    """
    line = panel.line(checkpoint)
    records = [record for point in line.points for record in point.records] if line else []
    seed = min((record.seed for record in records), default=0)
    chosen = {record.layer: record for record in records if record.seed == seed}
    curve = load_curve(store, list(chosen.values()))
    found = curve.per_image
    if not found or len({counts.shape for counts in found.values()}) > 1:
        return None
    number = len(next(iter(found.values())))
    return Side(
        curve=curve,
        scored=CurveEstimates.from_curve(curve),
        names=image_names(store, records[0], number),
        records={layer: chosen[layer] for layer in found},
        seed=seed,
    )


def panel_pair(panel: Panel, first: Side, second: Side) -> PanelPair | None:
    """First minus second; None where they share no images or seed."""
    if len(first.names) != len(second.names) or first.seed != second.seed:
        return None

    def row(difference: Difference) -> Row:
        one, other = difference.layers
        return Row(difference, [first.records[n] for n in one], [second.records[n] for n in other])

    best = (first.scored.best, second.scored.best)
    sides = (first.curve.per_image[best[0]], second.curve.per_image[best[1]])
    have_best, tally = first.scored.has_best and second.scored.has_best, None
    # Floats are percentages, which have no right and wrong.
    if have_best and sides[0].ndim == 1 and "f" not in (side.dtype.kind for side in sides):
        one, other = (side.astype(bool) for side in sides)
        right = (one & other, one & ~other, ~one & other, ~one & ~other)
        tally = [int(some.sum()) for some in right]
    return PanelPair(
        panel=panel,
        rows=list(map(row, compare_block_by_block(first.scored, second.scored))),
        summary=list(map(row, compare_best_blocks(first.scored, second.scored))),
        layers=best,
        images=_images(panel.metric, first.names, sides) if have_best else [],
        tally=tally,
    )


def scored_by_panel(
    store: ResultStore, panels: Sequence[Panel], pairs: Sequence[Pair]
) -> dict[Pair, list[PanelPair]]:
    """Everything that the pairs can be compared in; each checkpoint is scored once a panel."""
    members = {checkpoint for pair in pairs for checkpoint in (pair.first, pair.second)}
    found: dict[Pair, list[PanelPair]] = defaultdict(list)
    for panel in show_progress(panels, "comparisons", len(panels)):
        sides = {checkpoint: side_of(store, panel, checkpoint) for checkpoint in members}
        for pair in pairs:
            first, second = sides[pair.first], sides[pair.second]
            compared = panel_pair(panel, first, second) if first and second else None
            if compared:
                found[pair].append(compared)
    return found


def _images(
    metric: str, names: Sequence[str], sides: tuple[PerImage, PerImage]
) -> list[tuple[str, float, float, float]]:
    """The images with the largest differences in mean IoU, the first's gains first."""
    if not metric.startswith("miou") or sides[0].ndim != 3:
        return []
    found = [
        (name, one, other, one - other)
        for name, one, other in zip(
            names, *(mean_iou(side).tolist() for side in sides), strict=True
        )
        if np.isfinite(one - other) and other != one
    ]
    found.sort(key=lambda image: -image[-1])
    if len(found) <= 2 * _NUM_SHOWN:
        return found
    return [*found[:_NUM_SHOWN], *found[-_NUM_SHOWN:]]


class Extremes(NamedTuple):
    """Images of a panel at the best block of a checkpoint, with their mean IoUs in percent.

    Attributes:
        worst: From the worst one on.
        best: From the best one on.
        num_scored: Images with at least one class.
    """

    panel: Panel
    point: Entry
    worst: Sequence[tuple[str, float]]
    best: Sequence[tuple[str, float]]
    num_scored: int


def image_names(store: ResultStore, record: Record, number: int) -> list[str]:
    """Ids of the images that were scored, or their numbers where ids do not tell which were."""
    ids = store.image_ids(record.dataset_fingerprint)
    if ids is not None and len(ids) == number:
        return list(ids)
    return [f"image {i + 1} of {number}" for i in range(number)]


def extremes_of(store: ResultStore, panel: Panel, line: Line) -> Extremes | None:
    """The worst and best images at the best block; None for what is not a mean IoU."""
    best = line.best
    if not panel.metric.startswith("miou") or best is None:
        return None
    record = best.records[0]
    counts = load_curve(store, [record]).per_image.get(best.layer)
    if counts is None or counts.ndim != 3:
        return None
    names = image_names(store, record, len(counts))
    scored = [
        (name, value)
        for name, value in zip(names, mean_iou(counts).tolist(), strict=True)
        if not math.isnan(value)
    ]
    ordered = sorted(scored, key=lambda score: score[1])
    shown = min(_NUM_EXTREMES, max(1, len(ordered) // 2))
    top = ordered[len(ordered) - shown :][::-1]
    return Extremes(panel, best, ordered[:shown], top, len(ordered))


def outcomes_of(store: ResultStore, panel: Panel, line: Line) -> dict[Entry, dict[str, list[str]]]:
    """Ids of the images of an object discovery by point and kind of `KINDS`, as far as logged.

    Degenerate ones are neither hits nor misses.
    """
    if panel.metric != "corloc":
        return {}
    images = _logged(store.root, line.last.records[0], line.checkpoint)
    by_point = {}
    for point in line.points:
        kinds: dict[str, list[str]] = {kind: [] for kind in KINDS}
        for image, found in images.items():
            if isinstance(cell := found.get(f"{point.layer}/{panel.facet}"), dict):
                hit = "hits" if cell.get("hit") else "misses"
                kinds["degenerate" if cell.get("degenerate") else hit].append(image)
        if any(kinds.values()):
            by_point[point] = kinds
    return by_point


def _logged(root: Path, record: Record, checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Cells by image id from the log with the settings of a record; of scored images alone."""
    place = root / "pictures" / record.task / file_name(record.dataset)
    fingerprint = record.dataset_fingerprint
    folders = [place / figures_folder(folder, fingerprint) for folder in checkpoint.folders]
    for path in sorted(path for folder in folders for path in folder.rglob("images_*.jsonl")):
        try:
            header, lines = parse_checked_lines(read_untrusted(root, path, _MOST_BYTES), path)
        except OSError:
            continue
        if not _is_of(header.get("key"), record):
            continue
        images: dict[str, dict[str, Any]] = {}
        for line in lines:
            if line.get("num_boxes") and isinstance(line.get("cells"), dict):
                images.setdefault(str(line.get("image")), {}).update(line["cells"])
        return images
    return {}


def _is_of(key: Any, record: Record) -> bool:
    settings = {n: v for n, v in record.settings.items() if n not in ("dtype", "left_out")}
    return (
        isinstance(key, dict)
        and key.get("encoder") == record.encoder_id
        and key.get("settings") == settings
        and key.get("dtype") == f"torch.{record.settings.get('dtype')}"
        and key.get("version") == record.version
    )
