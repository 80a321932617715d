"""Compare two checkpoints by the paired differences of their scores on the same images."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from ssl_bench.errors import ConfigurationError
from ssl_bench.report.panels import Checkpoint, ScorePanel
from ssl_bench.results import PerImage, Record, ResultStore
from ssl_bench.results.per_image import ImageCurve, load_curve
from ssl_bench.scores import mean_iou
from ssl_bench.system.output import show_progress
from ssl_bench.tables.comparison import (
    Comparison,
    Difference,
    code_versions,
    compare_best_blocks,
    compare_block_by_block,
)

MAX_PAIRED = 6
"""By default, a report with up to this many checkpoints has a page for each pair of checkpoints."""
_NUM_IMAGES = 6


class Pair(NamedTuple):
    """Two checkpoints that one page of the report compares."""

    first: Checkpoint
    second: Checkpoint

    @property
    def page(self) -> str:
        """File name of the HTML page for this pair."""
        return f"compare-{self.first.encoder_id[:8]}-{self.second.encoder_id[:8]}.html"


class PerImageScores(NamedTuple):
    """One side of a comparison: the per-image scores of one checkpoint for one metric.

    Attributes:
        curve: The per-image scores at each block.
        records: The record (stored score) of each block, by block index.
        seed: Random seed of the scores.
    """

    checkpoint: Checkpoint
    curve: ImageCurve
    image_names: Sequence[str]
    records: Mapping[int, Record]
    seed: int

    def is_paired_with(self, other: "PerImageScores") -> bool:
        """Return whether the scores of both checkpoints can be compared image by image.

        Both checkpoints must have the same number of images and the same seed.
        """
        return len(self.image_names) == len(other.image_names) and self.seed == other.seed


class DifferenceRow(NamedTuple):
    """A row of a table: the difference between two scores.

    Attributes:
        first: The records (stored scores) from which the first score was computed.
        second: The records from which the second score was computed.
    """

    difference: Difference
    first: Sequence[Record]
    second: Sequence[Record]


class PanelComparison(NamedTuple):
    """Comparison of two checkpoints in one panel (a group of comparable scores).

    Attributes:
        table: The differences in `blocks` and `summary`, as a table of `ssl-bench compare`.
        blocks: Differences at each block, first checkpoint minus second checkpoint.
        summary: Differences at the best blocks and at blocks chosen on held-out images.
        layers: Indices of the best blocks of the first and of the second checkpoint.
        images: The images with the largest differences in mean IoU at the best blocks. Each tuple
            contains an image name, the IoU of both checkpoints in percent, and their difference.
        tally: Four numbers of images at the best blocks: correct for both checkpoints, only for the
            first, only for the second, and for neither. None if the metric does not classify images
            as correct or wrong.
    """

    panel: ScorePanel
    table: Comparison
    blocks: Sequence[DifferenceRow]
    summary: Sequence[DifferenceRow]
    layers: tuple[int, int]
    images: Sequence[tuple[str, float, float, float]]
    tally: Sequence[int] | None


def choose_pairs(
    checkpoints: Sequence[Checkpoint], id_pairs: Iterable[tuple[str, str]]
) -> list[Pair]:
    """Return the requested pairs of checkpoints, or all pairs if none are requested.

    With more than `MAX_PAIRED` checkpoints, only requested pairs are returned. `id_pairs` contains
    the requested pairs of encoder ids.

    Raises:
        ConfigurationError: A pair contains the same checkpoint twice.
    """
    by_id = {checkpoint.encoder_id: checkpoint for checkpoint in checkpoints}
    pairs = [(by_id[first], by_id[second]) for first, second in id_pairs]
    if any(first == second for first, second in pairs):
        raise ConfigurationError(
            "a pair must consist of two different checkpoints, got the same checkpoint twice",
            hint=("--pair", "{checkpoint}", "{other_checkpoint}"),
        )
    if not pairs and len(checkpoints) <= MAX_PAIRED:
        pairs = list(combinations(checkpoints, 2))
    return [Pair(first, second) for first, second in dict.fromkeys(pairs)]


def load_per_image_scores(
    store: ResultStore, panel: ScorePanel, checkpoint: Checkpoint
) -> PerImageScores | None:
    """Load the per-image scores of a checkpoint at each block, for its lowest seed.

    The scores belong to `panel`, a group of comparable scores. Return None if no per-image scores
    are stored, or if their arrays have different shapes at different blocks.
    """
    line = panel.find_line(checkpoint)
    records = [record for entry in line.entries for record in entry.records] if line else []
    seed = min((record.seed for record in records), default=0)
    by_layer = {record.layer: record for record in records if record.seed == seed}
    curve = load_curve(store, list(by_layer.values()))
    values = curve.per_image
    if not values or len({counts.shape for counts in values.values()}) > 1:
        return None
    number = len(next(iter(values.values())))
    return PerImageScores(
        checkpoint=checkpoint,
        curve=curve,
        image_names=_name_images(store, records[0], number),
        records={layer: by_layer[layer] for layer in values},
        seed=seed,
    )


def _name_images(store: ResultStore, record: Record, number: int) -> list[str]:
    """Return the names of the scored images of a record (a stored score).

    If the names are unknown, texts such as "image 3 of 40" are returned for `number` images.
    """
    names = store.image_ids(record.dataset_fingerprint)
    if names is not None and len(names) == number:
        return list(names)
    return [f"image {i + 1} of {number}" for i in range(number)]


def compare_in_panel(
    panel: ScorePanel, first: PerImageScores, second: PerImageScores
) -> PanelComparison | None:
    """Compare two checkpoints by their scores in one panel (a group of comparable scores).

    `first` and `second` are the scores of the two checkpoints. Return None if the checkpoints
    differ in their seeds or numbers of images.
    """
    if not first.is_paired_with(second):
        return None

    def add_records(difference: Difference) -> DifferenceRow:
        first_layers, second_layers = difference.layers
        return DifferenceRow(
            difference,
            [first.records[layer] for layer in first_layers],
            [second.records[layer] for layer in second_layers],
        )

    blocks = compare_block_by_block(first.curve, second.curve)
    summary = compare_best_blocks(first.curve, second.curve)
    layers = (first.curve.best_layer, second.curve.best_layer)
    values = (first.curve.per_image[layers[0]], second.curve.per_image[layers[1]])
    have_best = first.curve.has_best and second.curve.has_best
    encoders = tuple(next(iter(side.records.values())) for side in (first, second))
    names = (first.checkpoint.name, second.checkpoint.name)
    return PanelComparison(
        panel=panel,
        table=Comparison(
            record=panel.record,
            rows=(*blocks, *summary),
            names=names,
            encoders=encoders,
            code={
                name: code_versions(side.records.values())
                for name, side in zip(names, (first, second), strict=True)
            },
        ),
        blocks=list(map(add_records, blocks)),
        summary=list(map(add_records, summary)),
        layers=layers,
        images=_list_images(panel.metric, first.image_names, values) if have_best else [],
        tally=_count_correct(*values) if have_best else None,
    )


def _count_correct(first: PerImage, second: PerImage) -> list[int] | None:
    """Count the images on which both checkpoints, only one of them, or neither is correct.

    The counts have the order: both, only the first, only the second, neither. Return None unless
    the score of each image is an integer: 1 for correct, 0 for wrong.
    """
    # If there is one integer per image, it says whether the image is correct. Other per-image
    # values are percentages, counts or the results of several random draws.
    if first.ndim != 1 or "f" in (first.dtype.kind, second.dtype.kind):
        return None
    one, other = first.astype(bool), second.astype(bool)
    right = (one & other, one & ~other, ~one & other, ~one & ~other)
    return [int(images.sum()) for images in right]


def _list_images(
    metric: str, names: Sequence[str], sides: tuple[PerImage, PerImage]
) -> list[tuple[str, float, float, float]]:
    """Return the images on which the mean IoU of two checkpoints differs most.

    Images on which the first checkpoint is better come first. The list is empty unless the metric
    is mean IoU. `sides` contains the per-image scores of both checkpoints.

    Returns:
        For each image, its name, the IoU of both checkpoints in percent, and the difference.
    """
    if not metric.startswith("miou") or sides[0].ndim != 3:
        return []
    values = zip(names, *(mean_iou(side).tolist() for side in sides), strict=True)
    images = [
        (name, left, right, left - right)
        for name, left, right in values
        if np.isfinite(left - right) and left != right
    ]
    images.sort(key=lambda image: -image[-1])
    if len(images) <= 2 * _NUM_IMAGES:
        return images
    return [*images[:_NUM_IMAGES], *images[-_NUM_IMAGES:]]


def compare_pairs(
    store: ResultStore, panels: Sequence[ScorePanel], pairs: Sequence[Pair]
) -> dict[Pair, list[PanelComparison]]:
    """Compare the two checkpoints of each pair in every panel (a group of comparable scores).

    The keys of the result are the pairs. The per-image scores of a checkpoint are loaded only once
    per panel.
    """
    members = {checkpoint for pair in pairs for checkpoint in pair}
    compared: dict[Pair, list[PanelComparison]] = defaultdict(list)
    for panel in show_progress(panels, "comparisons", len(panels)):
        sides = {
            checkpoint: load_per_image_scores(store, panel, checkpoint) for checkpoint in members
        }
        for pair in pairs:
            first, second = sides[pair.first], sides[pair.second]
            comparison = compare_in_panel(panel, first, second) if first and second else None
            if comparison:
                compared[pair].append(comparison)
    return compared
