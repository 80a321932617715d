"""Correspondence: does a patch find the same point in another image?"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, UInt8
from PIL import Image, ImageDraw
from torch import Tensor

from probes.correspondence.views import (
    Points,
    View,
    ViewPair,
    Warp,
    annotated_pair,
    warped_pair,
)
from probes.features.stream import batches, read_ahead
from probes.pictures import heading, sheet
from ssl_bench.composition.fields import (
    Count,
    CountOrZero,
    Pixels,
    Positive,
    PositiveOrZero,
    PositiveShare,
    Temperature,
    Threads,
    Within,
    require_some,
)
from ssl_bench.composition.presets import changed_settings
from ssl_bench.data.limited import sampled
from ssl_bench.data.samples import Dataset, ImageSet, Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.features import FeatureExtractor
from ssl_bench.intervals import mean_estimate
from ssl_bench.layers import INNER_FACETS, Facet
from ssl_bench.results import Baseline
from ssl_bench.system.naming import image_name
from ssl_bench.system.transfers import fetched, sent

Cell = tuple[int, Facet]
CellFeatures = Mapping[Cell, Float[Tensor, "_rows _cols _dim"]]
Predictions = Float[Tensor, "batch points 2"]

# From a third on, four corners that move inwards may enclose nothing convex.
Strength = Annotated[float, Within(0, 0.33)]
NumPoints = Annotated[int, Within(1, 65536)]

_SHOWN_ALPHA = 0.1
# Unit vectors closer than this to each other tell nothing apart.
_CONSTANT = 1e-6
RIGHT, WRONG, EDGE = (40, 220, 60), (255, 70, 60), (0, 0, 0)
SIDE, GAP = 320, 12
MOST_LINES = 32
# Pictures are drawn larger and reduced, so that lines have no steps.
_TIMES = 2
LEGEND = "green: right, red: wrong, ring: the true place of a wrong one"


@dataclass(frozen=True)
class Correspondence(Probe):
    """PCK: the share of points whose nearest patch in another image lies near their true place.

    Attributes:
        protocol: "warps": the central square of each image and a warp of it, whose geometry is
            known; "spair": the annotated pairs of a dataset that has such.
        facet: What is compared, one or several of token, token_normed, key, query, value,
            attn_out, attn_skip, mlp_hidden, mlp_out, and submodules of a block.
        alphas: How far from its true place a point may be found, relative to the side of the view
            for warps and to the longer side of the object's box for annotated pairs.
        image_size: Side of both views in pixels, rounded to whole patches; without it the
            encoder's own.
        warp: For warps: "homography" moves the four corners on their own, "crop" enlarges a
            square, "flip" mirrors left and right.
        strength: For homography and crop: how far inwards corners move at most, relative to the
            side.
        num_points: For warps: how many points of an image are looked for.
        prediction: "cell" takes the middle of the most similar patch, "soft" a mean of patches
            around it, weighted by similarity.
        sigma: For soft: of a Gaussian around the most similar patch, in patches.
        temperature: For soft: similarities are divided by it.
        panels: How many pairs are drawn, from all over the set.
        memory_gib: For features of images that come in several pairs.

    Source: the soft prediction is `utils/keypoints.py` of https://github.com/visinf/INSID3
    (f1c9622a), whose cells begin where ours have their middle.
    """

    protocol: Literal["warps", "spair"] = "warps"
    facet: str | Sequence[str] = "token"
    alphas: Sequence[PositiveShare] = (0.01, 0.05, 0.1, 0.15)
    image_size: Pixels | None = None
    warp: Warp = "homography"
    strength: Strength = 0.25
    num_points: NumPoints = 256
    prediction: Literal["cell", "soft"] = "cell"
    sigma: Positive = 7.0
    temperature: Temperature = 0.04
    panels: CountOrZero = 6
    batch_size: Count = 16
    memory_gib: PositiveOrZero = 8.0
    num_workers: Threads = 4

    task = "correspondence"
    known_facets = ("token", "token_normed", "key", "query", "value", *INNER_FACETS)
    # Alphas are in the names of the metrics.
    not_settings = (*Probe.not_settings, "alphas", "panels", "batch_size", "memory_gib")
    rounds_size = True
    keeps_images = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_some("probe.alphas", self.alphas)
        if len(set(self.metrics)) < len(self.metrics):
            raise ConfigurationError(
                f"probe.alphas must name each share once, got {list(self.alphas)}"
            )

    @property
    def role(self) -> str:
        """Warps are made of any images."""
        return "images" if self.protocol == "warps" else "correspondence"

    @property
    def metrics(self) -> tuple[str, ...]:
        """One an alpha, in their order."""
        return tuple(f"pck_{float(alpha)!r}" for alpha in self.alphas)

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return list(itertools.product(layers, self.facets, self.metrics))

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.images() if self.protocol == "warps" else dataset.val()

    def settings(self) -> dict[str, Any]:
        left_out = set[str]()
        if self.protocol != "warps":
            left_out |= {"warp", "strength", "num_points"}
        if self.warp == "flip":
            left_out.add("strength")
        if self.prediction == "cell":
            left_out |= {"sigma", "temperature"}
        values = {name: v for name, v in super().settings().items() if name not in left_out}
        numbers = values.keys() & {"strength", "sigma", "temperature"}
        return values | {name: float(values[name]) for name in numbers}

    @property
    def folder(self) -> str:
        """Where pictures are, below those of an encoder: protocol and what differs."""
        changed = [f"{name}={value}" for name, value in changed_settings(self).items()]
        return "_".join([self.protocol, *changed])

    def picture(self, layer: int, facet: str, image_id: str) -> str:
        """Path of the picture of a pair, below those of an encoder."""
        return f"{self.folder}/block{layer:02d}_{facet}/{image_name(image_id)}"

    def pictures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        del seed
        drawn = sampled(images.ids, self.panels)
        return {
            self.picture(layer, facet, image_id): [layer]
            for layer, facet, image_id in itertools.product(layers, self.facets, drawn)
        }

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all layers and facets; every image passes the encoder once.

        Of annotated pairs as long as the images of a category fit into `memory_gib`.

        Raises:
            DataError: a file cannot be read.
            CheckpointError: features are not finite.
        """
        images, is_annotated = self.split(context.dataset), self.protocol != "warps"
        extractor = FeatureExtractor(
            context.encoder,
            layers=context.layers,
            facets=self.facets,
            device=context.device,
            dtype=context.dtype,
        )
        side = self.image_size or min(context.encoder.native_size)
        size = max(1, round(side / extractor.patch_size)) * extractor.patch_size

        def prepared(sample: Sample) -> ViewPair:
            if sample.pair is not None:
                return annotated_pair(sample, size)
            return warped_pair(
                sample,
                size,
                context.seed,
                warp=self.warp,
                strength=self.strength,
                num_points=self.num_points,
            )

        # Warps come once: nothing of them is worth remembering.
        encoded = EncodedViews(extractor, int(self.memory_gib * 2**30) if is_annotated else 0)
        order = by_category(images.ids) if is_annotated else range(len(images))
        pairs = read_ahead(images, order, prepared, workers=self.num_workers)
        numbered = context.progress(zip(order, pairs, strict=True), self.task, len(images))
        cells = list(itertools.product(context.layers, self.facets))
        alphas = [float(alpha) for alpha in self.alphas]
        # Which of them says in a picture what is right.
        shown = alphas.index(_SHOWN_ALPHA) if _SHOWN_ALPHA in alphas else len(alphas) - 1
        drawn, counts = set(sampled(images.ids, self.panels)), (len(images), len(self.alphas))
        # By pair: how many points there are, and for each alpha those that are right, that lie near
        # the middle of their own patch, and that are right where they lay in the first view.
        points, categories = np.zeros(len(images), np.int64), [""] * len(images)
        reachable, same_place = np.zeros(counts, np.int64), np.zeros(counts, np.int64)
        right = {cell: np.zeros(counts, np.int64) for cell in cells}
        # Pairs of which all patches of the second view are the same.
        arbitrary = {cell: np.zeros(len(images), bool) for cell in cells}
        for batch in batches(numbered, self.batch_size):
            views = {k: v for _, pair in batch for k, v in zip(pair.keys, pair.views, strict=True)}
            features = encoded.features(views)
            looked_for = sent(padded([pair.source for _, pair in batch]), context.device)
            tensors = list[Tensor]()
            for cell in cells:
                source, target = (
                    torch.stack([features[pair.keys[of]][cell] for _, pair in batch])
                    for of in (0, 1)
                )
                similarity = similarities(source, target, looked_for)
                if self.prediction == "cell":
                    places = best_cells(similarity)
                else:
                    places = soft_cells(similarity, sigma=self.sigma, temperature=self.temperature)
                tensors += places, constant(target)
            # Together, because the host waits for each fetching.
            flat = fetched(tensors)
            for cell, places, same in zip(cells, flat[::2], flat[1::2], strict=True):
                for row, (index, pair) in enumerate(batch):
                    found = places[row, : len(pair.source)].double().numpy()
                    is_right = pair.right(found, self.alphas)
                    right[cell][index], arbitrary[cell][index] = is_right.sum(1), bool(same[row])
                    if pair.pair_id in drawn:
                        percent = 100 * is_right[shown].mean()
                        title = f"block {cell[0]}, {cell[1]}: {self.metrics[shown]} {percent:.0f} %"
                        path = context.artifacts / self.picture(*cell, pair.pair_id)
                        draw(pair, found, is_right[shown], title, path)
            grid = next(iter(features.values()))[cells[0]].shape[:2]
            for index, pair in batch:
                points[index], categories[index] = len(pair.source), pair.category or ""
                reachable[index] = pair.right(own_cells(pair.truth, grid), self.alphas).sum(1)
                same_place[index] = pair.right(pair.source, self.alphas).sum(1)
        for (layer, facet), number in itertools.product(cells, range(len(self.alphas))):
            of_cell = right[layer, facet][:, number]
            shares = 100.0 * of_cell / points
            estimate = mean_estimate(shares)
            blind = float(np.mean(100.0 * same_place[:, number] / points))
            details: dict[str, Any] = {
                "points": int(points.sum()),
                "of_all_points": 100.0 * float(of_cell.sum() / points.sum()),
                "view_size": size,
                "degenerate_percent": 100.0 * float(np.mean(arbitrary[layer, facet])),
                **Baseline("same place", blind).as_details(),
                **category_means(shares, categories),
            }
            if self.prediction == "cell":
                details["reachable"] = float(np.mean(100.0 * reachable[:, number] / points))
            yield Score(
                layer=layer,
                facet=facet,
                metric=self.metrics[number],
                value=estimate.value,
                ci95=estimate.ci95(),
                num_images=len(images),
                details=details,
                per_image=np.stack([of_cell, points], 1),
            )


def by_category(ids: Sequence[str]) -> list[int]:
    """Indices such that pairs of one category, and of one image, follow each other."""

    def place(index: int) -> tuple[str, str]:
        number, _, rest = ids[index].partition("-")
        images, _, category = rest.rpartition(":")
        return category, images + number

    return sorted(range(len(ids)), key=place)


def padded(points: Sequence[Points]) -> Predictions:
    """Of pairs with different numbers of points; what is filled in is looked at by nobody."""
    found = torch.zeros(len(points), max(map(len, points)), 2)
    for row, some in zip(found, points, strict=True):
        row[: len(some)] = torch.from_numpy(some)
    return found


def own_cells(points: Points, grid: Sequence[int]) -> Points:
    """The middles of the patches that points lie in, relative to width and height."""
    sides = np.array([grid[1], grid[0]])
    cells = np.minimum(np.floor(points * sides), sides - 1)
    return (cells + 0.5) / sides


def category_means(
    shares: Float64[np.ndarray, " pairs"], categories: Iterable[str]
) -> dict[str, Any]:
    """Mean over the pairs of each category, and the mean of these; nothing without categories."""
    groups: dict[str, list[float]] = defaultdict(list)
    for share, category in zip(shares.tolist(), categories, strict=True):
        if category:
            groups[category].append(share)
    means = {name: float(np.mean(some)) for name, some in sorted(groups.items())}
    if not means:
        return {}
    return {"by_category": means, "of_categories": float(np.mean([*means.values()]))}


class EncodedViews:
    """Features of views, each of which passes the encoder once while it is remembered.

    Args:
        extractor: Gives the features.
        most_bytes: How much is remembered beside the views that are asked for; those that were
            asked for last.
    """

    def __init__(self, extractor: FeatureExtractor, most_bytes: int) -> None:
        self._extractor, self._most_bytes = extractor, most_bytes
        self._known: dict[str, CellFeatures] = {}

    def features(
        self, views: Mapping[str, UInt8[Tensor, "3 size size"]]
    ) -> Mapping[str, CellFeatures]:
        """Of each view, by its key.

        Raises:
            CheckpointError: features are not finite.
        """
        fresh = [key for key in views if key not in self._known]
        found = dict[str, CellFeatures]()
        if fresh:
            together = torch.stack([views[key] for key in fresh]).float() / 255
            by_layer = self._extractor(together, fresh)
            cells = {(n, facet): f for n, facets in by_layer.items() for facet, f in facets.items()}
            for number, key in enumerate(fresh):
                parts = {cell: batch[number] for cell, batch in cells.items()}
                # Copies, because a part of a batch would keep all of it.
                is_kept = self._most_bytes > 0
                found[key] = {c: f.clone() if is_kept else f for c, f in parts.items()}
        asked = {key: found[key] if key in found else self._known.pop(key) for key in views}
        self._known |= asked
        # Those that were not asked for the longest time are let go.
        each = max(
            sum(f.numel() * f.element_size() for f in features.values())
            for features in asked.values()
        )
        for key in list(self._known):
            if len(self._known) * each <= self._most_bytes:
                break
            del self._known[key]
        return asked


def similarities(
    source: Float[Tensor, "batch source_rows source_cols dim"],
    target: Float[Tensor, "batch rows cols dim"],
    points: Float[Tensor, "batch points 2"],
) -> Float[Tensor, "batch points rows cols"]:
    """Cosine between what the source has at some points and every patch of the target.

    Args:
        source: Features of patches.
        target: The same.
        points: (x, y) in the source, relative to its width and height.
    """
    wanted = F.normalize(at_points(source, points), dim=-1)
    offered = F.normalize(target.flatten(1, 2), dim=-1)
    return (wanted @ offered.mT).unflatten(-1, target.shape[1:3])


def at_points(
    features: Float[Tensor, "batch rows cols dim"], points: Float[Tensor, "batch points 2"]
) -> Float[Tensor, "batch points dim"]:
    """Features at points between the middles of patches, bilinear; beyond the last ones theirs."""
    maps = features.permute(0, 3, 1, 2)
    # Without aligned corners -1 and 1 are the edges of the map, as 0 and 1 are ours.
    found = F.grid_sample(
        maps, (2 * points - 1)[:, :, None], padding_mode="border", align_corners=False
    )
    return found[..., 0].mT


def best_cells(
    similarity: Float[Tensor, "batch points rows cols"],
) -> Float[Tensor, "batch points 2"]:
    """The middle of the most similar patch as (x, y) relative to width and height."""
    rows, cols = similarity.shape[-2:]
    best = similarity.flatten(2).argmax(-1)
    cells = torch.stack([best % cols, best // cols], -1) + 0.5
    return cells / torch.tensor([cols, rows], device=cells.device)


def soft_cells(
    similarity: Float[Tensor, "batch points rows cols"], *, sigma: float, temperature: float
) -> Float[Tensor, "batch points 2"]:
    """The mean place under a softmax of similarities that a Gaussian damps away from the best.

    Args:
        similarity: Cosines.
        sigma: Of the Gaussian, in patches.
        temperature: Of the softmax.

    Source: `kernel_softargmax_get_matches_logits` of https://github.com/visinf/INSID3 (f1c9622a),
    `utils/keypoints.py`. Theirs gives the index of a cell, ours its middle.
    """
    rows, cols = similarity.shape[-2:]
    sides = torch.tensor([cols, rows], device=similarity.device)
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    middles = torch.stack([x, y], -1).to(similarity) + 0.5  # rows cols 2
    best = (best_cells(similarity) * sides)[:, :, None, None]
    damped = similarity * torch.exp(-(middles - best).square().sum(-1) / (2 * sigma**2))
    weights = (damped.flatten(2) / temperature).softmax(-1)
    return weights @ middles.flatten(0, 1) / sides


def constant(features: Float[Tensor, "batch rows cols dim"]) -> Bool[Tensor, " batch"]:
    """Whether all patches of an image look the same, so that rounding chooses among them."""
    unit = F.normalize(features.flatten(1, 2), dim=-1)
    return (unit - unit[:, :1]).abs().amax((1, 2)) < _CONSTANT


def draw(
    pair: ViewPair, places: Points, right: Bool[np.ndarray, " _points"], title: str, path: Path
) -> None:
    """Save both views side by side with lines between the first points of a pair.

    Args:
        pair: The views and the true places.
        places: Where the points were found, relative to the second view.
        right: Whether that is near enough.
        title: Stands above.
        path: A PNG.
    """

    def flat(*points: np.ndarray) -> list[float]:
        return [_TIMES * float(value) for point in points for value in point]

    def around(point: np.ndarray, radius: float) -> list[float]:
        return flat(point - radius, point + radius)

    def picture(view: View) -> Image.Image:
        pixels = Image.fromarray(np.ascontiguousarray(view.permute(1, 2, 0).numpy()))
        return pixels.resize((_TIMES * SIDE, _TIMES * SIDE), Image.Resampling.BICUBIC)

    width = 2 * SIDE + GAP
    canvas = Image.new("RGB", (_TIMES * width, _TIMES * SIDE), "white")
    for left, view in zip((0, SIDE + GAP), pair.views, strict=True):
        canvas.paste(picture(view), (_TIMES * left, 0))
    pen = ImageDraw.Draw(canvas)
    starts = pair.source[:MOST_LINES] * SIDE
    ends, true = (some[:MOST_LINES] * SIDE + [SIDE + GAP, 0] for some in (places, pair.truth))
    # Right ones above wrong ones, of which there may be many; all edged, to be seen on any view.
    for number in sorted(range(len(starts)), key=lambda n: bool(right[n])):
        colour = RIGHT if right[number] else WRONG
        line = flat(starts[number], ends[number])
        pen.line(line, fill=EDGE, width=3 * _TIMES)
        pen.line(line, fill=colour, width=3 * _TIMES // 2)
        for place in (starts[number], ends[number]):
            pen.ellipse(around(place, 4.5), fill=colour, outline=EDGE, width=_TIMES)
        if not right[number]:
            pen.ellipse(around(true[number], 7.5), outline=EDGE, width=4 * _TIMES)
            pen.ellipse(around(true[number], 6.5), outline=RIGHT, width=2 * _TIMES)
    small = canvas.resize((width, SIDE), Image.Resampling.LANCZOS)
    sheet([[heading(title)], [heading(f"{pair.pair_id}; {LEGEND}")], [small]], path)
