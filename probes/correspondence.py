"""Correspondence: does a patch find the same point in another image?

In the order of a run: what is asked and scored (`Correspondence`), pairs of views and points whose
places in both are known, features, where points are found, pictures. A point is (x, y); in pixels
the middle of the one in column c and row r is (c + 0.5, r + 0.5).
"""

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, UInt8
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from probes.features.stream import batches, read_ahead
from probes.pictures import heading, sheet
from ssl_bench.composition.compose import changed_settings
from ssl_bench.composition.fields import (
    Bounds,
    Count,
    CountOrZero,
    Pixels,
    Positive,
    PositiveFraction,
    PositiveOrZero,
    Temperature,
    Threads,
    require_nonempty,
)
from ssl_bench.data.samples import Dataset, ImageSet, Sample
from ssl_bench.data.splits import sampled
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.features import FeatureExtractor, Resize, central_square
from ssl_bench.intervals import mean_estimate
from ssl_bench.layers import INNER_FACETS, Facet
from ssl_bench.neighbours import unit_vectors
from ssl_bench.results import Baseline
from ssl_bench.system.device import to_device, to_host
from ssl_bench.system.paths import figure_file_name

Cell = tuple[int, Facet]
CellFeatures = Mapping[Cell, Float[Tensor, "_rows _cols _dim"]]
View = UInt8[Tensor, "3 _size _size"]
Matrix = Float64[np.ndarray, "3 3"]
Points = Float64[np.ndarray, "_points 2"]
Warp = Literal["homography", "crop", "flip"]

# From a third on, four corners that move inwards may enclose nothing convex.
Strength = Annotated[float, Bounds(0, 0.33)]
NumPoints = Annotated[int, Bounds(1, 65536)]

_SHOWN_ALPHA = 0.1
# From the middles of pixels, which OpenCV counts from 0, to the coordinates of this file.
_HALF = np.array([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5], [0.0, 0.0, 1.0]])
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
        image_size: Side of both views in pixels, a multiple of the patch; without it the
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
    alphas: Sequence[PositiveFraction] = (0.01, 0.05, 0.1, 0.15)
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
    excluded_from_identity = (
        *Probe.excluded_from_identity,
        "alphas",
        "panels",
        "batch_size",
        "memory_gib",
    )
    keeps_images = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_nonempty("probe.alphas", self.alphas)
        if len(set(self.metrics)) < len(self.metrics):
            raise ConfigurationError(
                f"probe.alphas must name each share once, got {list(self.alphas)}"
            )

    @property
    def resize(self) -> Resize:
        return Resize(self.image_size, round_to_patch=True)

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
        return f"{self.folder}/block{layer:02d}_{facet}/{figure_file_name(image_id)}"

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
        extractor = context.extractor(context.layers, *self.facets)
        size = self.resize.square_side(context.encoder.native_size, extractor.patch_size)

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
        # the middle of their own patch, and that are right by a constant answer.
        points, categories = np.zeros(len(images), np.int64), [""] * len(images)
        reachable = np.zeros(counts, np.int64)
        at_constant = {answer: np.zeros(counts, np.int64) for answer in ("same place", "middle")}
        right = {cell: np.zeros(counts, np.int64) for cell in cells}
        # Pairs of which all patches of the second view are the same.
        arbitrary = {cell: np.zeros(len(images), bool) for cell in cells}
        for batch in batches(numbered, self.batch_size):
            views = {k: v for _, pair in batch for k, v in zip(pair.keys, pair.views, strict=True)}
            features = encoded.features(views)
            looked_for = pad_sequence(
                [torch.from_numpy(pair.source).float() for _, pair in batch], batch_first=True
            )
            looked_for = to_device(looked_for, context.device)
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
                unit = unit_vectors(target.flatten(1, 2))
                alike = (unit - unit[:, :1]).abs().amax((1, 2)) < _CONSTANT
                tensors += places, alike
            # Together, because the host waits for each fetching.
            flat = to_host(tensors)
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
            rows, cols = next(iter(features.values()))[cells[0]].shape[:2]
            sides = np.array([cols, rows])
            for index, pair in batch:
                points[index], categories[index] = len(pair.source), pair.category or ""
                # The middles of the patches that the points lie in.
                own = (np.minimum(np.floor(pair.truth * sides), sides - 1) + 0.5) / sides
                reachable[index] = pair.right(own, self.alphas).sum(1)
                for answer, place in _constant_places(pair).items():
                    at_constant[answer][index] = pair.right(place, self.alphas).sum(1)
        for (layer, facet), number in itertools.product(cells, range(len(self.alphas))):
            of_cell = right[layer, facet][:, number]
            shares = 100.0 * of_cell / points
            estimate = mean_estimate(shares)
            constant = {
                answer: float(np.mean(100.0 * hits[:, number] / points))
                for answer, hits in at_constant.items()
            }
            groups: dict[str, list[float]] = defaultdict(list)
            for share, category in zip(shares.tolist(), categories, strict=True):
                groups[category].append(share)
            means = {name: float(np.mean(some)) for name, some in sorted(groups.items()) if name}
            details: dict[str, Any] = {
                "points": int(points.sum()),
                "of_all_points": 100.0 * float(of_cell.sum() / points.sum()),
                "view_size": size,
                "degenerate_percent": 100.0 * float(np.mean(arbitrary[layer, facet])),
                **Baseline.best(constant).as_details(),
            }
            if means:
                of_categories = float(np.mean([*means.values()]))
                details |= {"by_category": means, "of_categories": of_categories}
            if self.prediction == "cell":
                details["reachable"] = float(np.mean(100.0 * reachable[:, number] / points))
            cell, value = (layer, facet, self.metrics[number]), estimate.value
            kept = np.stack([of_cell, points], 1)
            yield Score(
                *cell,
                value,
                estimate.ci95(),
                len(images),
                details,
                per_image=kept,
                per_image_kind="points",
            )


def by_category(ids: Sequence[str]) -> list[int]:
    """Indices such that pairs of one category, and of one image, follow each other."""

    def place(index: int) -> tuple[str, str]:
        number, _, rest = ids[index].partition("-")
        images, _, category = rest.rpartition(":")
        return category, images + number

    return sorted(range(len(ids)), key=place)


def _constant_places(pair: "ViewPair") -> dict[str, Points]:
    """Return the places in the second view that answers without a look at the images name."""
    return {"same place": pair.source, "middle": np.full_like(pair.source, 0.5)}


@dataclass(frozen=True)
class ViewPair:
    """Two square views and points of the first whose true place in the second is known.

    Attributes:
        keys: What the views are called; equal for equal views.
        source: (x, y), relative to the side of the view.
        truth: The same points in the second view, relative to its side.
        units: Width and height of the second view in pixels.
        reference: What alphas are relative to, in pixels.
    """

    pair_id: str
    keys: tuple[str, str]
    views: tuple[View, View]
    source: Points
    truth: Points
    units: tuple[float, float]
    reference: float
    category: str | None = None

    def right(
        self, predicted: Points, alphas: Sequence[float]
    ) -> Bool[np.ndarray, "{len(alphas)} _points"]:
        """Which places, relative to the second view's side, are near enough, one row an alpha.

        One at that very distance is.
        """
        errors = np.linalg.norm((predicted - self.truth) * self.units, axis=1) / self.reference
        return errors <= np.array(alphas, np.float64)[:, None]


def warped_pair(
    sample: Sample, size: int, seed: int, *, warp: Warp, strength: float, num_points: int
) -> ViewPair:
    """The central square of an image, and a warp of it that is drawn with the seed and its id.

    The warp is made of the pixels of the first view: it never shows more than that.
    """
    chance = generator_of(seed, sample.image_id)
    view = central_square(sample.image, size, share=1.0)
    matrix = drawn_warp(warp, size, strength, chance)
    points = drawn_points(matrix, size, num_points, chance)
    target = warped(np.ascontiguousarray(view.permute(1, 2, 0).numpy()), matrix)
    return ViewPair(
        pair_id=sample.image_id,
        keys=(sample.image_id, f"warp of {sample.image_id}"),
        views=(view, torch.from_numpy(target).permute(2, 0, 1)),
        source=points / size,
        truth=moved(points, matrix) / size,
        units=(float(size), float(size)),
        reference=float(size),
    )


def annotated_pair(sample: Sample, size: int) -> ViewPair:
    """Both images of a pair, squashed to squares; errors are told in pixels of the second."""
    assert sample.pair is not None
    pair = sample.pair

    def squashed(image: UInt8[np.ndarray, "height width 3"]) -> View:
        square = Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC)
        return torch.from_numpy(np.array(square)).permute(2, 0, 1)

    (height, width), (other_height, other_width) = sample.image.shape[:2], pair.image.shape[:2]
    return ViewPair(
        pair_id=sample.image_id,
        keys=pair.image_ids,
        views=(squashed(sample.image), squashed(pair.image)),
        source=pair.source / (width, height),
        truth=pair.target / (other_width, other_height),
        units=(float(other_width), float(other_height)),
        reference=pair.extent,
        category=pair.category,
    )


def generator_of(seed: int, image_id: str) -> np.random.Generator:
    """Random numbers of an image, the same whatever images come before it."""
    digest = hashlib.sha256(f"{seed}\0{image_id}".encode(errors="surrogateescape")).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def drawn_warp(kind: Warp, size: int, strength: float, chance: np.random.Generator) -> Matrix:
    """A matrix that takes points of a square to those of its warp, which is as large.

    The warp shows a part of the square and nothing else, whose corners lie at most `strength` of
    its side inwards.
    """
    if kind == "flip":
        return np.array([[-1.0, 0.0, size], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    corners = size * np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    if kind == "crop":
        share = 1.0 - 2.0 * strength * chance.random()
        shown = share * corners + (1.0 - share) * size * chance.random(2)
    else:
        inwards = np.where(corners > 0, -1.0, 1.0)
        shown = corners + inwards * strength * size * chance.random((4, 2))
    return homography(shown, corners)


def homography(source: Float64[np.ndarray, "4 2"], target: Float64[np.ndarray, "4 2"]) -> Matrix:
    """The matrix that takes four points to four others, with a positive scale between them."""
    matrix = cv2.getPerspectiveTransform(source.astype(np.float32), target.astype(np.float32))
    # The scale is known up to its sign, which tells what lies before the horizon.
    return matrix * np.sign(matrix[2] @ [*source.mean(0), 1.0])


def warped(
    image: UInt8[np.ndarray, "height width 3"], matrix: Matrix
) -> UInt8[np.ndarray, "height width 3"]:
    """The image as `matrix` shows it, bicubic, in a frame of the same size."""
    height, width = image.shape[:2]
    return cv2.warpPerspective(
        image,
        np.linalg.inv(_HALF) @ matrix @ _HALF,
        (width, height),
        flags=cv2.INTER_CUBIC,
        borderMode=cv2.BORDER_REPLICATE,
    )


def moved(points: Points, matrix: Matrix) -> Points:
    """Where points go; NaN for those beyond the horizon."""
    found = np.column_stack([points, np.ones(len(points))]) @ matrix.T
    scale = np.where(found[:, 2:] > 0, found[:, 2:], np.nan)
    return found[:, :2] / scale


def visible(points: Points, size: int) -> Bool[np.ndarray, " _points"]:
    """Whether points lie in a square."""
    x, y = points.T
    return (x >= 0) & (x < size) & (y >= 0) & (y < size)


def drawn_points(matrix: Matrix, size: int, count: int, chance: np.random.Generator) -> Points:
    """So many middles of pixels, all of which are to be seen in the warp; some may come twice."""
    found: list[Points] = []
    while sum(map(len, found)) < count:
        some = chance.integers(size, size=(2 * count, 2)) + 0.5
        found.append(some[visible(moved(some, matrix), size)])
    return np.concatenate(found)[:count]


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
    """Cosine between what the source has at (x, y), relative to its sides, and every patch."""
    # Between the middles of patches bilinear, beyond the last ones theirs. Without aligned corners
    # -1 and 1 are the edges of the map, as 0 and 1 are ours.
    at = F.grid_sample(
        source.permute(0, 3, 1, 2),
        (2 * points - 1)[:, :, None],
        padding_mode="border",
        align_corners=False,
    )
    wanted = unit_vectors(at[..., 0].mT)
    offered = unit_vectors(target.flatten(1, 2))
    return (wanted @ offered.mT).unflatten(-1, target.shape[1:3])


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

    `sigma` is of the Gaussian, in patches, `temperature` of the softmax.

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


def draw(
    pair: ViewPair, places: Points, right: Bool[np.ndarray, " _points"], title: str, path: Path
) -> None:
    """Save both views side by side with lines between the first points of a pair.

    `places` is where they were found, relative to the second view, `right` whether near enough.
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
