"""Correspondence with one encoder on one dataset: pairs, features, matches, scores."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from probes.correspondence.drawing import draw
from probes.correspondence.encoded import Cell, CellFeatures, EncodedViews
from probes.correspondence.matching import best_cells, constant, similarities, soft_cells
from probes.correspondence.pairs import ViewPair, annotated_pair, warped_pair
from probes.correspondence.probe import Correspondence
from probes.correspondence.warps import Points
from probes.features.stream import batches, read_ahead
from ssl_bench.data.limited import sampled
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.features import FeatureExtractor
from ssl_bench.intervals import mean_estimate
from ssl_bench.results import Baseline
from ssl_bench.system.transfers import fetched, sent

Predictions = Float[Tensor, "batch points 2"]


@dataclass(frozen=True)
class Found:
    """What one block and facet found, by index of the pair.

    Attributes:
        right: How many points were right, for each alpha.
        is_arbitrary: Whether all patches of the second view were the same.
    """

    right: dict[int, Int64[np.ndarray, " alphas"]] = field(default_factory=dict)
    is_arbitrary: dict[int, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Truth:
    """What the pairs themselves tell, by index of the pair.

    Attributes:
        points: How many there are.
        reachable: How many lie near enough to the middle of their own patch, for each alpha.
        same_place: How many are right where they lay in the first view, for each alpha.
        categories: Of annotated pairs.
    """

    points: dict[int, int] = field(default_factory=dict)
    reachable: dict[int, Int64[np.ndarray, " alphas"]] = field(default_factory=dict)
    same_place: dict[int, Int64[np.ndarray, " alphas"]] = field(default_factory=dict)
    categories: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CorrespondenceRun:
    """What `probe` describes, on the encoder and the dataset of `context`."""

    probe: Correspondence
    context: ProbeContext

    def scores(self) -> Iterator[Score]:
        """See `Correspondence.run`."""
        images = self.probe.split(self.context.dataset)
        is_annotated = self.probe.protocol != "warps"
        extractor = FeatureExtractor(
            self.context.encoder,
            layers=self.context.layers,
            facets=self.probe.facets,
            device=self.context.device,
            dtype=self.context.dtype,
        )
        size = self._size(extractor.patch_size)
        # Warps come once: nothing of them is worth remembering.
        most_bytes = int(self.probe.memory_gib * 2**30) if is_annotated else 0
        encoded = EncodedViews(extractor, most_bytes)
        drawn, truth = set(sampled(images.ids, self.probe.panels)), Truth()
        cells: dict[Cell, Found] = defaultdict(Found)
        order = _by_category(images.ids) if is_annotated else range(len(images))
        pairs = zip(order, self._pairs(images, order, size), strict=True)
        shown = self.context.progress(pairs, self.probe.task, len(images))
        for batch in batches(shown, self.probe.batch_size):
            self._match(batch, encoded, truth, cells, drawn)
        for (layer, facet), found in cells.items():
            yield from self._scores(layer, facet, found, truth, size)

    def _size(self, patch_size: int) -> int:
        asked = self.probe.image_size or min(self.context.encoder.native_size)
        return max(1, round(asked / patch_size)) * patch_size

    def _pairs(self, images: ImageSet, order: Sequence[int], size: int) -> Iterator[ViewPair]:
        def prepare(sample: Sample) -> ViewPair:
            if sample.pair is not None:
                return annotated_pair(sample, size)
            return warped_pair(sample, self.probe, size, self.context.seed)

        return read_ahead(images, order, prepare, workers=self.probe.num_workers)

    def _match(
        self,
        batch: Sequence[tuple[int, ViewPair]],
        encoded: EncodedViews,
        truth: Truth,
        cells: Mapping[Cell, Found],
        drawn: Set[str],
    ) -> None:
        """Look for the points of some pairs with every block and facet."""
        pairs = [pair for _, pair in batch]
        features = encoded.features(
            {k: view for pair in pairs for k, view in zip(pair.keys, pair.views, strict=True)}
        )
        points = sent(_padded([pair.source for pair in pairs]), self.context.device)
        names = [(n, facet) for n in self.context.layers for facet in self.probe.facets]
        found = [self._predicted(pairs, features, name, points) for name in names]
        flat = fetched([tensor for both in found for tensor in both])
        for name, predicted, arbitrary in zip(names, flat[::2], flat[1::2], strict=True):
            for row, (index, pair) in enumerate(batch):
                places = predicted[row, : len(pair.source)].double().numpy()
                cells[name].right[index] = pair.right(places, self.probe.alphas).sum(1)
                cells[name].is_arbitrary[index] = bool(arbitrary[row])
                if pair.pair_id in drawn:
                    self._draw(name, pair, places)
        grid = next(iter(features.values()))[names[0]].shape[:2]
        for index, pair in batch:
            truth.points[index] = len(pair.source)
            truth.reachable[index] = pair.right(
                _own_cells(pair.truth, grid), self.probe.alphas
            ).sum(1)
            truth.same_place[index] = pair.right(pair.source, self.probe.alphas).sum(1)
            if pair.category is not None:
                truth.categories[index] = pair.category

    def _predicted(
        self,
        pairs: Sequence[ViewPair],
        features: Mapping[str, CellFeatures],
        cell: Cell,
        points: Predictions,
    ) -> tuple[Predictions, Tensor]:
        """Where points are found, and of which pairs all patches are the same."""
        source, target = (
            torch.stack([features[pair.keys[side]][cell] for pair in pairs]) for side in (0, 1)
        )
        similarity = similarities(source, target, points)
        if self.probe.prediction == "cell":
            return best_cells(similarity), constant(target)
        found = soft_cells(similarity, sigma=self.probe.sigma, temperature=self.probe.temperature)
        return found, constant(target)

    def _draw(self, cell: Cell, pair: ViewPair, places: Points) -> None:
        right = pair.right(places, self.probe.alphas)[self.probe.shown]
        metric = self.probe.metrics[self.probe.shown]
        title = f"block {cell[0]}, {cell[1]}: {metric} {100 * right.mean():.0f} %"
        path = self.context.artifacts / self.probe.picture(*cell, pair.pair_id)
        draw(pair, places, right, title, path)

    def _scores(
        self, layer: int, facet: str, found: Found, truth: Truth, size: int
    ) -> Iterator[Score]:
        indices = sorted(found.right)
        right = np.stack([found.right[index] for index in indices])
        points = np.array([truth.points[index] for index in indices], np.int64)
        reachable = np.stack([truth.reachable[index] for index in indices])
        same_place = np.stack([truth.same_place[index] for index in indices])
        arbitrary = float(np.mean([found.is_arbitrary[index] for index in indices]))
        for number, metric in enumerate(self.probe.metrics):
            shares = 100.0 * right[:, number] / points
            estimate = mean_estimate(shares)
            details: dict[str, Any] = {
                "points": int(points.sum()),
                "of_all_points": 100.0 * float(right[:, number].sum() / points.sum()),
                "view_size": size,
                "degenerate_percent": 100.0 * arbitrary,
                **Baseline("same place", _percent(same_place[:, number], points)).as_details(),
                **_by_categories(shares, [truth.categories.get(index) for index in indices]),
            }
            if self.probe.prediction == "cell":
                details["reachable"] = _percent(reachable[:, number], points)
            yield Score(
                layer=layer,
                facet=facet,
                metric=metric,
                value=estimate.value,
                ci95=estimate.ci95(),
                num_images=len(indices),
                details=details,
                per_image=np.stack([right[:, number], points], 1),
            )


def _percent(right: Int64[np.ndarray, " pairs"], points: Int64[np.ndarray, " pairs"]) -> float:
    """Mean over the pairs of the points that are right."""
    return float(np.mean(100.0 * right / points))


def _by_category(ids: Sequence[str]) -> list[int]:
    """Indices such that pairs of one category, and of one image, follow each other."""

    def place(index: int) -> tuple[str, str]:
        number, _, rest = ids[index].partition("-")
        images, _, category = rest.rpartition(":")
        return category, images + number

    return sorted(range(len(ids)), key=place)


def _padded(points: Sequence[Points]) -> Predictions:
    """Of pairs with different numbers of points; what is filled in is looked at by nobody."""
    found = torch.zeros(len(points), max(map(len, points)), 2)
    for row, some in zip(found, points, strict=True):
        row[: len(some)] = torch.from_numpy(some)
    return found


def _own_cells(points: Points, grid: Sequence[int]) -> Points:
    """The middles of the patches that points lie in, relative to width and height."""
    sides = np.array([grid[1], grid[0]])
    cells = np.minimum(np.floor(points * sides), sides - 1)
    return (cells + 0.5) / sides


def _by_categories(
    shares: Float64[np.ndarray, " pairs"], categories: Iterable[str | None]
) -> dict[str, Any]:
    """Mean over the pairs of each category, and the mean of these; nothing without categories."""
    groups: dict[str, list[float]] = defaultdict(list)
    for share, category in zip(shares.tolist(), categories, strict=True):
        if category is not None:
            groups[category].append(share)
    means = {name: float(np.mean(some)) for name, some in sorted(groups.items())}
    if not means:
        return {}
    return {"by_category": means, "of_categories": float(np.mean([*means.values()]))}
