"""Pairs of checkpoints: differences with intervals, and the images behind them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ssl_bench.errors import ConfigurationError
from ssl_bench.report.checkpoints import Checkpoint
from ssl_bench.report.model import Panel
from ssl_bench.report.outcomes import image_names, image_scores
from ssl_bench.report.pictures.panels import Gallery
from ssl_bench.results import PerImage, Record, ResultStore
from ssl_bench.tables.pairs.comparison import Difference, best_blocks, block_by_block
from ssl_bench.tables.pairs.image_scores import ImageCurve, Scored, stored_curve

MOST_PAIRED = 6
"""With more checkpoints than that, pairs must be asked for."""

_NUM_SHOWN = 6


@dataclass(frozen=True)
class Pair:
    """Two checkpoints that get a page."""

    first: Checkpoint
    second: Checkpoint

    @property
    def page(self) -> str:
        return f"compare-{self.first.encoder_id[:8]}-{self.second.encoder_id[:8]}.html"


@dataclass(frozen=True)
class Side:
    """One checkpoint in one panel.

    Attributes:
        names: Of the images.
        records: Numbers of the records by block.
    """

    curve: ImageCurve
    scored: Scored
    names: tuple[str, ...]
    records: Mapping[int, int]
    seed: int


@dataclass(frozen=True)
class ImageDifference:
    """What one image contributes on both sides, as text, and its difference in points."""

    image: str
    first: str
    second: str
    difference: float


@dataclass(frozen=True)
class Row:
    """A difference and the numbers of the records behind its two sides."""

    difference: Difference
    first: tuple[int, ...]
    second: tuple[int, ...]


@dataclass(frozen=True)
class PanelPair:
    """Two checkpoints in one panel.

    Attributes:
        rows: First minus second block by block.
        summary: Best blocks on the scored images, then those that held-out images choose.
        layers: The best block of each side.
        images: Those whose scores at these blocks differ most.
        tally: Of images that are right or wrong: both, only the first, only the second, neither.
    """

    panel: Panel
    rows: tuple[Row, ...]
    summary: tuple[Row, ...]
    layers: tuple[int, int]
    images: tuple[ImageDifference, ...]
    tally: tuple[int, int, int, int] | None


@dataclass(frozen=True)
class GalleryPair:
    """The same pictures of two checkpoints."""

    first: Gallery
    second: Gallery


def pairs_of(checkpoints: Sequence[Checkpoint], asked: Iterable[tuple[str, str]]) -> list[Pair]:
    """All pairs, or those asked for by their ids.

    Raises:
        ConfigurationError: one checkpoint twice.
    """
    by_id = {checkpoint.encoder_id: checkpoint for checkpoint in checkpoints}
    wanted = [(by_id[first], by_id[second]) for first, second in asked]
    if any(first == second for first, second in wanted):
        raise ConfigurationError("expected --pair of two different checkpoints, got one twice")
    if not wanted and len(checkpoints) <= MOST_PAIRED:
        wanted = list(combinations(checkpoints, 2))
    return [Pair(first, second) for first, second in dict.fromkeys(wanted)]


def side_of(
    store: ResultStore, records: Sequence[Record], panel: Panel, checkpoint: Checkpoint
) -> Side | None:
    """The estimates of one checkpoint; None where images' contributions were not kept.

    Of several seeds the lowest, because images are paired with those of the same seed.
    """
    line = panel.line(checkpoint)
    numbers = [number for point in line.points for number in point.records] if line else []
    seed = min((records[number].seed for number in numbers), default=0)
    chosen = {records[n].layer: n for n in numbers if records[n].seed == seed}
    curve = stored_curve(store, [records[number] for number in chosen.values()])
    found = curve.per_image
    if not found or len({counts.shape for counts in found.values()}) > 1:
        return None
    number = len(next(iter(found.values())))
    return Side(
        curve=curve,
        scored=Scored.of(curve),
        names=tuple(image_names(store, records[numbers[0]], number)),
        records={layer: chosen[layer] for layer in found},
        seed=seed,
    )


def panel_pair(panel: Panel, first: Side, second: Side) -> PanelPair | None:
    """First minus second; None where they share no block, images or seed."""
    rows = block_by_block(first.scored, second.scored)
    if not rows or len(first.names) != len(second.names) or first.seed != second.seed:
        return None

    def row(difference: Difference) -> Row:
        one, other = difference.layers
        numbers = (tuple(first.records[n] for n in one), tuple(second.records[n] for n in other))
        return Row(difference, *numbers)

    best = (first.scored.best, second.scored.best)
    sides = (first.curve.per_image[best[0]], second.curve.per_image[best[1]])
    return PanelPair(
        panel=panel,
        rows=tuple(map(row, rows)),
        summary=tuple(map(row, best_blocks(first.scored, second.scored))),
        layers=best,
        images=_images(panel.metric, first.names, sides),
        tally=_tally(*sides) if sides[0].ndim == 1 else None,
    )


def gallery_pairs(first: Sequence[Gallery], second: Sequence[Gallery]) -> list[GalleryPair]:
    """The galleries that both have, cut down to the blocks and images that both have."""
    others = {gallery.key: gallery for gallery in second}
    pairs = []
    for one in first:
        other = others.get(one.key)
        layers = [n for n in one.prefixes if other and n in other.prefixes]
        images = [image for image in one.files if other and image in other.files]
        if other and layers and images:
            pairs.append(GalleryPair(one.only(layers, images), other.only(layers, images)))
    return pairs


def scored_by_panel(
    store: ResultStore,
    records: Sequence[Record],
    panels: Sequence[Panel],
    pairs: Sequence[Pair],
    progress: Callable[[Sequence[Panel]], Iterable[Panel]],
) -> dict[Pair, list[PanelPair]]:
    """Everything that the pairs can be compared in; each checkpoint is scored once a panel."""
    members = {checkpoint for pair in pairs for checkpoint in (pair.first, pair.second)}
    found: dict[Pair, list[PanelPair]] = defaultdict(list)
    for panel in progress(panels):
        sides = {checkpoint: side_of(store, records, panel, checkpoint) for checkpoint in members}
        for pair in pairs:
            first, second = sides[pair.first], sides[pair.second]
            compared = panel_pair(panel, first, second) if first and second else None
            if compared:
                found[pair].append(compared)
    return found


def _tally(first: PerImage, second: PerImage) -> tuple[int, int, int, int]:
    one, other = first.astype(bool), second.astype(bool)
    both, neither = int((one & other).sum()), int((~one & ~other).sum())
    return both, int((one & ~other).sum()), int((~one & other).sum()), neither


def _images(
    metric: str, names: Sequence[str], sides: tuple[PerImage, PerImage]
) -> tuple[ImageDifference, ...]:
    """The images with the largest differences in mean IoU, the first's gains first."""
    if not metric.startswith("miou") or sides[0].ndim != 3:
        return ()
    found = [
        ImageDifference(name, f"{one:.1f}", f"{other:.1f}", one - other)
        for name, one, other in zip(names, *map(image_scores, sides), strict=True)
        if np.isfinite(one - other) and other != one
    ]
    found.sort(key=lambda image: -image.difference)
    if len(found) <= 2 * _NUM_SHOWN:
        return tuple(found)
    return (*found[:_NUM_SHOWN], *found[-_NUM_SHOWN:])
