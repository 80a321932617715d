"""Geometry of one encoder's features on one data set: passes, then scores block by block."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from probes.geometry.gathered import Cell, Gathered
from probes.geometry.passes import GeometryPasses, Roles
from probes.geometry.probe import Geometry
from probes.geometry.similarity import alignment, uniformity
from probes.geometry.spectra import alpha_req, is_constant, lidar, rankme, spread_rank
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.intervals import Interval, Jackknife, mean_estimate

_FEW = "fewer than three images"
_ZERO = "a vector of zeros has no direction"
# Why a score is no number, where its details do not say it.
_WHY = {
    "rankme": "all vectors are zero",
    "alpha_req": "fewer than two eigenvalues above zero within probe.alpha_ranks",
    "effective_rank": "all vectors are the same",
    "lidar": "the means of the views are those of one image, or do not vary",
    "alignment": _ZERO,
    "uniformity": f"fewer than two images, or {_ZERO}",
    "cls_patch_cosine": "the encoder has no [CLS] token",
    "register_patch_cosine": "the encoder has no registers",
    "position_r2": "images of a single patch",
}


@dataclass(frozen=True)
class GeometryRun:
    """What `probe` describes, on the encoder and the dataset of `context`."""

    probe: Geometry
    context: ProbeContext

    def scores(self) -> Iterator[Score]:
        """See `Geometry.run`."""
        images = self.probe.split(self.context.dataset)
        roles = Roles.draw(len(images), self.probe, self.context.seed)
        passes = GeometryPasses(self.probe, self.context)
        # First what takes longest, ten times as long on few images; its time left is nearly all.
        views = passes.views(images, roles)
        found = passes.images(images, roles)
        if len(images) < 3:
            self.context.say(
                f"geometry: {_FEW}: spectra and positions say little, or are undefined"
            )
        layers = sorted(self.context.layers)
        for layer in self.context.progress(layers, "geometry, spectra", len(layers)):
            for facet in self.probe.facets:
                yield from self._spectra((layer, facet), found)
                yield from self._likeness((layer, facet), found, views[layer, facet])
            yield from self._tokens(layer, found)
            yield self._position(layer, found)
        passes.kept_views(images, roles).path.unlink(missing_ok=True)

    def _spectra(self, cell: Cell, found: Gathered) -> Iterator[Score]:
        """Without intervals: a spectrum depends on the number of images itself.

        Leaving images out, or drawing some of them twice, lowers every rank, so that resampling
        would show what few images do and not how sure a rank of so many is.
        """
        moments = found.moments[cell]
        count, dim = moments.count, len(moments.mean)
        first, last = self.probe.alpha_ranks
        alpha, ranks = alpha_req(moments, (first, last))
        details: dict[str, Any] = {
            "dim": dim,
            "constant_features": is_constant(moments),
        }
        for metric, value, more in (
            ("rankme", rankme(moments), _limit(count, dim)),
            ("alpha_req", alpha, {"ranks": list(ranks)}),
            ("effective_rank", spread_rank(moments), _limit(count - 1, dim)),
        ):
            yield self._plain(cell, metric, value, None, count, details | more)

    def _likeness(
        self, cell: Cell, found: Gathered, views: Float[Tensor, "images views dim"]
    ) -> Iterator[Score]:
        exact = views.double()
        count, dim = len(exact), exact.shape[-1]
        of_views: dict[str, Any] = {"views": self.probe.views}
        rank = lidar(exact, delta=self.probe.lidar_delta)
        yield self._plain(cell, "lidar", rank, None, count, of_views | _limit(count - 1, dim))
        yield self._mean(cell, "alignment", alignment(exact), (0.0, 4.0), of_views)
        vectors = found.compared(cell)
        even = uniformity(vectors)
        ci95 = _interval(even, (-8.0, 0.0))
        yield self._plain(cell, "uniformity", even.value, ci95, len(vectors), {})

    def _tokens(self, layer: int, found: Gathered) -> Iterator[Score]:
        encoder = self.context.encoder
        outliers = _numbers(found.per_image[layer, "outlier_share"])
        of_patches = {"percent_of_images_with_any": 100.0 * float((outliers > 0).mean())}
        yield self._mean((layer, "token"), "outlier_share", outliers, (0.0, 100.0), of_patches)
        num_cls = encoder.num_prefix_tokens - encoder.num_registers
        for kind, count in (("cls", num_cls), ("register", encoder.num_registers)):
            metric = f"{kind}_patch_cosine"
            nobody = torch.full((found.num_images,), math.nan)
            cosines = _numbers(found.per_image.get((layer, metric), nobody))
            details = {f"num_{kind}_tokens": count}
            yield self._mean((layer, "token"), metric, cosines, (-1.0, 1.0), details)

    def _position(self, layer: int, found: Gathered) -> Score:
        """With an interval over the images that were held out; what is fitted stays as it is."""
        shares = found.positions(layer).numpy()
        cell = (layer, "token")
        if not len(shares):
            undefined = {"undefined": _FEW}
            return self._plain(cell, "position_r2", math.nan, None, found.num_images, undefined)
        details = {"penalty": found.fits[layer].penalty, "num_held_out": len(shares)}
        score = self._mean(cell, "position_r2", shares, (-math.inf, 1.0), details)
        # It hangs on those that it is fitted to as much.
        return replace(score, num_images=found.num_images)

    def _mean(
        self,
        cell: Cell,
        metric: str,
        values: Float64[np.ndarray, " images"],
        ends: Interval,
        details: dict[str, Any],
    ) -> Score:
        estimate = mean_estimate(values)
        ci95 = _interval(estimate, ends)
        return self._plain(cell, metric, estimate.value, ci95, len(values), details)

    def _plain(
        self,
        cell: Cell,
        metric: str,
        value: float,
        ci95: Interval | None,
        num_images: int,
        details: dict[str, Any],
    ) -> Score:
        unit = "%" if metric == "outlier_share" else ""
        if math.isnan(value):
            details = {"undefined": _WHY[metric], **details}
        return Score(*cell, metric, value, ci95, num_images, details, unit=unit)


def _limit(images: int, dim: int) -> dict[str, Any]:
    """What a rank is at most, and whether more images would let it be more."""
    return {"rank_limit": min(images, dim), "limited_by_images": images < dim}


def _interval(estimate: Jackknife, ends: Interval) -> Interval | None:
    """Student's t, within what a score can be."""
    if math.isnan(estimate.value) or math.isnan(estimate.margin):
        return None
    low, high = ends
    margin = estimate.margin
    return max(low, estimate.value - margin), min(high, estimate.value + margin)


def _numbers(values: Float[Tensor, " images"]) -> Float64[np.ndarray, " images"]:
    return values.double().numpy()
