"""Is one better than the other? Paired over images, between checkpoints and between blocks."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64, Shaped

from ssl_bench.errors import DataError
from ssl_bench.metrics import bootstrap_sums, interval95, mean_iou, pixel_accuracy
from ssl_bench.results import ENCODER, TRAINED_ON, PerImage, Record, ResultStore
from ssl_bench.tables.depth import said_training, settings_text, trusted_note
from ssl_bench.tables.deviations import named_protocol
from ssl_bench.tables.sheets import NO_VALUE, Sheet, Word

RESAMPLES = 2000
FOLDS = 5
_SERIES = ("task", "dataset", "split", "metric", "facet", "protocol", "seed")


@dataclass(frozen=True)
class Curve:
    """One metric of one checkpoint over its blocks, image by image.

    Attributes:
        per_image: By block.
    """

    metric: str
    per_image: Mapping[int, PerImage]

    def value(self, per_image: PerImage) -> float:
        """The metric in percent."""
        return float(self._score(_summable(per_image).sum(0, keepdim=True), len(per_image))[0])

    def resamples(
        self, per_image: Shaped[np.ndarray, "images scored *values"]
    ) -> Float64[np.ndarray, "resamples scored"]:
        """The metric over images drawn with replacement, the same for all that is scored."""
        sums = bootstrap_sums(_summable(per_image), num_resamples=RESAMPLES)
        return self._score(sums, len(per_image)).numpy()

    def resampled(self, per_image: PerImage) -> Float64[torch.Tensor, " resamples"]:
        """Likewise for one array of contributions."""
        return torch.from_numpy(self.resamples(per_image[:, None])[:, 0])

    def best_layer(self, images: Int64[np.ndarray, " chosen"] | slice = slice(None)) -> int:
        """The block with the largest value on some of the images."""
        values = {layer: self.value(counts[images]) for layer, counts in self.per_image.items()}
        return max(values, key=lambda layer: np.nan_to_num(values[layer], nan=-1.0))

    def held_out(self) -> tuple[PerImage, list[int]]:
        """Every image as the block sees it that the images of the other folds choose.

        Returns:
            The contributions, and the block that each fold was given.
        """
        num_images = len(next(iter(self.per_image.values())))
        order = np.random.default_rng(0).permutation(num_images)
        folds = [fold for fold in np.array_split(order, FOLDS) if len(fold)]
        mixed = np.empty_like(next(iter(self.per_image.values())))
        layers = []
        for fold in folds:
            others = np.setdiff1d(order, fold)
            layers.append(self.best_layer(others if len(others) else fold))
            mixed[fold] = self.per_image[layers[-1]][fold]
        return mixed, layers

    def _score(self, sums: torch.Tensor, num_images: int) -> torch.Tensor:
        if self.metric.startswith("miou"):
            return mean_iou(sums)
        if self.metric == "pixel_accuracy":
            return pixel_accuracy(sums)
        return 100.0 * sums.double() / num_images


@dataclass(frozen=True)
class Difference:
    """Second minus first, in points, over the same images.

    Attributes:
        low: Of the 95 % percentile interval of the paired bootstrap; likewise `high`.
    """

    name: str
    first: float
    second: float
    low: float
    high: float

    @property
    def value(self) -> float:
        return self.second - self.first

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0

    @property
    def first_text(self) -> str:
        """The value of the first; a dash where it has none."""
        return _shown(self.first, ".1f")

    @property
    def second_text(self) -> str:
        return _shown(self.second, ".1f")

    @property
    def text(self) -> str:
        """Such as "+2.5 [-1.0, +6.0]"; a dash where one side has no value."""
        if math.isnan(self.value) or math.isnan(self.low + self.high):
            return _shown(self.value, "+.1f")
        return f"{self.value:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


def difference(name: str, curve: Curve, first: PerImage, second: PerImage) -> Difference:
    """Compare two arrays of contributions of the same images to one metric."""
    resampled = curve.resamples(np.stack([first, second], axis=1))
    values = (curve.value(first), curve.value(second))
    return resampled_difference(name, values, resampled[:, 1] - resampled[:, 0])


def resampled_difference(
    name: str, values: tuple[float, float], resampled: Float64[np.ndarray, " resamples"]
) -> Difference:
    """Two values and how their difference varies over images drawn with replacement."""
    return Difference(name, *values, *interval95(torch.from_numpy(resampled)))


def between_checkpoints(first: Curve, second: Curve) -> list[Difference]:
    """Block by block; then the best blocks, chosen on the scored images and held out.

    The best block on the scored images flatters both sides; the held-out one is what somebody
    gets who must choose a block before seeing the image.
    """
    shared = sorted(first.per_image.keys() & second.per_image.keys())
    rows = [
        difference(str(layer), first, first.per_image[layer], second.per_image[layer])
        for layer in shared
    ]
    if len(shared) > 1:
        one, other = first.best_layer(), second.best_layer()
        name = f"best ({one}, {other})"
        rows.append(difference(name, first, first.per_image[one], second.per_image[other]))
        (one, chosen), (other, others) = first.held_out(), second.held_out()
        name = f"held-out choice ({_named(chosen)}; {_named(others)})"
        rows.append(difference(name, first, one, other))
    return rows


def between_blocks(curve: Curve) -> list[Difference]:
    """Every block against the best one on the scored images, and the held-out choice likewise."""
    best = curve.per_image[curve.best_layer()]
    rows = [
        difference(str(layer), curve, best, counts)
        for layer, counts in sorted(curve.per_image.items())
    ]
    mixed, layers = curve.held_out()
    return [*rows, difference(f"held-out choice ({_named(layers)})", curve, best, mixed)]


def comparisons(
    store: ResultStore, records: Sequence[Record], encoders: Sequence[str]
) -> list[tuple[Record, list[Difference]]]:
    """Everything that one checkpoint, block by block, or two can be compared in.

    Args:
        store: Holds the images' contributions.
        records: Those to look at.
        encoders: Their `Record.encoder_id`, one or two.

    Returns:
        A record of each comparable group, and its rows.

    Raises:
        DataError: nothing can be compared.
    """
    found = []
    for group in _comparable_groups(records):
        curves = [
            stored_curve(store, [r for r in group if r.encoder_id == one]) for one in encoders
        ]
        if not all(curve.per_image for curve in curves):
            continue
        rows = between_blocks(curves[0]) if len(curves) == 1 else between_checkpoints(*curves)
        if rows:
            found.append((group[0], rows))
    if not found:
        raise DataError(
            f"nothing to compare in {store.root}: no task was scored image by image for "
            f"{'both checkpoints' if len(encoders) > 1 else 'the checkpoint'} on the same images "
            f"with the same settings and training images{_apart(records, encoders)}; run "
            "`ssl-bench probe --overwrite` for what is missing"
        )
    return found


def _apart(records: Sequence[Record], encoders: Sequence[str]) -> str:
    """In what the scores of one question differ that two encoders were asked."""
    same = ("task", "dataset", "metric", "facet", "protocol")
    asked = [[r for r in records if r.encoder_id == encoder] for encoder in encoders]
    for one, other in itertools.product(asked[0], asked[-1]):
        if all(getattr(one, name) == getattr(other, name) for name in same):
            apart = [
                f"{name} {ours} and {theirs}"
                for name, ours, theirs in _beside(one, other)
                if ours != theirs
            ]
            return f" ({one.task}: {'; '.join(apart)})" if apart else ""
    return ""


def _beside(one: Record, other: Record) -> Iterator[tuple[str, Any, Any]]:
    yield "trained on", one.trained_on, other.trained_on
    for name in ("split", "dataset_fingerprint", "seed"):
        yield name, getattr(one, name), getattr(other, name)
    for name in sorted((one.settings.keys() | other.settings.keys()) - {TRAINED_ON}):
        yield name, one.settings.get(name), other.settings.get(name)


@dataclass(frozen=True)
class Comparison:
    """Differences of one metric as a table, over blocks.

    Attributes:
        record: One of those that were compared; gives what they have in common.
        names: Heads of the two columns of values.
        encoders: Those that were compared, one or two records.
    """

    record: Record
    rows: tuple[Difference, ...]
    names: tuple[str, str]
    encoders: tuple[Record, ...]

    def sheet(self, style: str) -> Sheet:
        """Differences whose interval leaves out 0 are marked."""
        del style
        cells = [
            (
                Word(row.name),
                Word(row.first_text),
                Word(row.second_text),
                Word(row.text, row.is_clear),
            )
            for row in self.rows
        ]
        record = self.record
        return Sheet(
            title=(
                f"{record.task}: {record.metric} (%) on {record.dataset} {record.split}, "
                f"{record.facet}, protocol {named_protocol(record)}"
                f"{said_training(record)}, seed {record.seed}"
            ),
            head=("block", *self.names, "difference [95 %]"),
            rows=tuple(cells),
            notes=(
                f"paired bootstrap over {record.num_images} images{trusted_note([record])}, "
                f"{RESAMPLES} resamples; no correction for the number of rows",
            ),
        )

    def csv_rows(self) -> list[dict[str, Any]]:
        """A difference a row, with what tells the comparison from others."""
        return [
            {
                **{name: getattr(self.record, name) for name in _SERIES},
                "block": row.name,
                "first_name": self.names[0],
                "second_name": self.names[1],
                **_numbers(row),
                "num_images": self.record.num_images,
            }
            for row in self.rows
        ]

    def as_json(self) -> dict[str, Any]:
        """The differences with what is needed to trust them."""
        return {
            "kind": "comparison",
            **{name: getattr(self.record, name) for name in _SERIES},
            "dataset_fingerprint": self.record.dataset_fingerprint,
            "settings": dict(self.record.settings),
            "num_images": self.record.num_images,
            "resamples": RESAMPLES,
            "names": list(self.names),
            **{name: [getattr(one, name) for one in self.encoders] for name in ENCODER},
            "version": self.record.version,
            "git_commit": self.record.git_commit,
            "device": self.record.device,
            "rows": [{"block": row.name, **_numbers(row)} for row in self.rows],
        }


def _numbers(row: Difference) -> dict[str, Any]:
    values = {
        "first": row.first,
        "second": row.second,
        "difference": row.value,
        "low": row.low,
        "high": row.high,
    }
    finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
    return {**finite, "interval_leaves_out_0": row.is_clear}


def _comparable_groups(records: Sequence[Record]) -> list[list[Record]]:
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        where = (record.task, record.dataset, record.split, record.dataset_fingerprint)
        how = (record.metric, record.facet, record.protocol, record.seed, settings_text(record))
        groups[repr((where, how))].append(record)
    return [group for _, group in sorted(groups.items())]


def stored_curve(store: ResultStore, records: Sequence[Record]) -> Curve:
    """Of records of one checkpoint and seed; without blocks whose images were not kept.

    Contributions that do not add up to the value of their record join `store.damaged`.
    """
    kept = {}
    for record in records:
        per_image = store.per_image(record)
        if per_image is not None and _adds_up(per_image, record):
            kept[record.layer] = per_image
        elif per_image is not None:
            store.damaged.append(store.per_image_path(record))
    return Curve(records[0].metric if records else "", kept)


def _adds_up(per_image: PerImage, record: Record) -> bool:
    """Whether the value of a record comes from these contributions."""
    try:
        value = Curve(record.metric, {}).value(per_image)
    # Of another shape.
    except (ValueError, IndexError, RuntimeError):
        return False
    is_near = math.isclose(value, record.value, rel_tol=0, abs_tol=1e-6)
    return is_near or (math.isnan(value) and math.isnan(record.value))


def _summable(per_image: PerImage) -> torch.Tensor:
    return torch.from_numpy(per_image.astype(np.int64))


def _named(layers: Sequence[int]) -> str:
    return ", ".join(str(layer) for layer in sorted(set(layers)))


def _shown(value: float, style: str) -> str:
    return NO_VALUE if math.isnan(value) else f"{value:{style}}"
