"""Correspondence: do the features of a patch find the same point in another image?

The probe (`Correspondence`) compares pairs of square images, which are called views. The file
contains, in this order: the probe, pairs of views, features of the views, matching, and figures.

The coordinates of points are (x, y). In pixels, (0.5, 0.5) is the centre of the first pixel.
Relative to the sides of an image, x and y range from 0 to 1.
"""

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int64, UInt8
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from probes.features.stream import batched, read_ahead
from probes.pictures import draw_heading, save_sheet
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
from ssl_bench.data.splits import sample_ids
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.features import FeatureExtractor, Resize, central_square
from ssl_bench.intervals import mean_estimate
from ssl_bench.layers import INNER_FACETS, Facet
from ssl_bench.neighbours import unit_vectors
from ssl_bench.results import Baseline
from ssl_bench.system.device import to_device, to_host
from ssl_bench.system.files import figure_file_name

LayerFacet = tuple[int, Facet]
ViewFeatures = Mapping[LayerFacet, Float[Tensor, "_rows _cols _dim"]]
View = UInt8[Tensor, "3 _size _size"]
Homography = Float64[np.ndarray, "3 3"]
Points = Float64[np.ndarray, "_points 2"]
Warp = Literal["homography", "crop", "flip"]
Sampling = Literal["bilinear", "patch"]

# At 1/3 or more, the four moved corners may no longer form a convex quadrilateral.
Strength = Annotated[float, Bounds(0, 0.33)]
NumPoints = Annotated[int, Bounds(1, 65536)]

BASELINES = ("same place", "middle")
"""Names of the image-independent baselines.

They predict where a point of the first view (square image) is in the second view: at the same
position, or in the middle.
"""
_OWN_PATCH = "own patch"
# Figures mark points as correct by this metric. If it is not scored, they use the last metric.
_FIGURE_METRIC = "pck_0.1"
# In OpenCV, (0, 0) is the centre of the first pixel. This matrix adds half a pixel.
_ADD_HALF = np.array([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5], [0.0, 0.0, 1.0]])
# If the unit vectors of all patches differ by less than this value, the best match is arbitrary.
_CONSTANT = 1e-6
CORRECT_COLOUR, WRONG_COLOUR, EDGE_COLOUR = (40, 220, 60), (255, 70, 60), (0, 0, 0)
SIDE, GAP = 320, 12
MAX_LINES = 32
# Figures are drawn at twice their size and then reduced, so that lines are smooth.
_SUPERSAMPLING = 2
LEGEND = "green: right, red: wrong, ring: true place of a wrong point"


@dataclass(frozen=True)
class Correspondence(Probe):
    """A probe for PCK, the percentage of points that are found correctly in another image.

    The two images of a pair are called views. A point of the first view is matched to the patch of
    the second view that has the most similar features. The score is the mean PCK over all pairs.
    Nothing is trained.

    Attributes:
        protocol: Pairs of views to match. "warps" pairs the central square of each image with a
            random warp of it. "spair" uses the annotated pairs of a dataset such as SPair-71k.
        facet: One or several facets (kinds of features) to compare: token, token_normed, key,
            query, value, attn_out, attn_skip, mlp_hidden, mlp_out, or submodules of a block.
        alphas: Tolerances for the distance between the predicted and the true position of a point,
            one for each metric. For warps, distances are relative to the side of the view. For
            annotated pairs, they are relative to the longer side of the object's box.
        image_size: Side of both views in pixels, a multiple of the patch size. Null for the
            encoder's native size.
        warp: Kind of warp, for the protocol "warps" only. "homography" moves the four corners
            independently. "crop" enlarges a random square. "flip" mirrors the image horizontally.
        strength: For "homography", the largest inward shift of a corner along x and along y,
            relative to the side. For "crop", the side of the square is at least
            (1 - 2 * `strength`) times the side of the view.
        num_points: Number of points to match in each image, for the protocol "warps" only.
        sampling: How the features of a point are taken from the first view. "bilinear" interpolates
            between the centres of patches. "patch" takes the patch that contains the point.
        prediction: How the position of a point in the second view is predicted. "cell" takes the
            centre of the most similar patch. "soft" takes a weighted mean of patch centres. Patches
            that are similar to the point and near the most similar patch have large weights.
        sigma: For "soft" only: standard deviation in patches of the Gaussian around the most
            similar patch.
        temperature: For "soft" only: divisor of the similarities.
        panels: Number of pairs to show in figures. They are spread over the whole dataset.
        batch_size: Number of pairs in each batch.
        memory_gib: Memory in GiB for caching the features of images that occur in several annotated
            pairs.
        num_workers: Number of threads that read images.

    Source: The soft prediction follows `utils/keypoints.py` of https://github.com/visinf/INSID3
    (f1c9622a). Unlike that source, this probe uses patch centres instead of patch indices.
    """

    protocol: Literal["warps", "spair"] = "warps"
    facet: str | Sequence[str] = "token"
    alphas: Sequence[PositiveFraction] = (0.01, 0.05, 0.1, 0.15)
    image_size: Pixels | None = None
    warp: Warp = "homography"
    strength: Strength = 0.25
    num_points: NumPoints = 256
    sampling: Sampling = "bilinear"
    prediction: Literal["cell", "soft"] = "cell"
    sigma: Positive = 7.0
    temperature: Temperature = 0.04
    panels: CountOrZero = 6
    batch_size: Count = 16
    memory_gib: PositiveOrZero = 8.0
    num_workers: Threads = 4

    task = "correspondence"
    known_facets = ("token", "token_normed", "key", "query", "value", *INNER_FACETS)
    # Alphas are part of the names of the metrics.
    excluded_from_identity = (
        *Probe.excluded_from_identity,
        "alphas",
        "panels",
        "batch_size",
        "memory_gib",
    )
    has_per_image_values = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_nonempty("probe.alphas", self.alphas)
        if len(set(self.metrics)) < len(self.metrics):
            raise ConfigurationError(
                f"probe.alphas must contain each value only once, got {list(self.alphas)}"
            )

    @property
    def resize(self) -> Resize:
        return Resize(self.image_size, round_to_patch=True)

    @property
    def role(self) -> str:
        return "images" if self.protocol == "warps" else "correspondence"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the name of the metric for each tolerance in `alphas`, such as "pck_0.1"."""
        return tuple(f"pck_{float(alpha)!r}" for alpha in self.alphas)

    def list_score_keys(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return list(itertools.product(layers, self.facets, self.metrics))

    def scored_images(self, dataset: Dataset) -> ImageSet:
        return dataset.images() if self.protocol == "warps" else dataset.val()

    def settings(self) -> dict[str, Any]:
        unused = set[str]()
        if self.protocol != "warps":
            unused |= {"warp", "strength", "num_points"}
        if self.warp == "flip":
            unused.add("strength")
        if self.sampling == "bilinear":
            # Records (stored results) from before this setting existed must stay valid.
            unused.add("sampling")
        if self.prediction == "cell":
            unused |= {"sigma", "temperature"}
        return {name: value for name, value in super().settings().items() if name not in unused}

    def list_figures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        del seed
        figure_ids = sample_ids(images.ids, self.panels)
        return {
            self.figure_path(layer, facet, image_id): [layer]
            for layer, facet, image_id in itertools.product(layers, self.facets, figure_ids)
        }

    def figure_path(self, layer: int, facet: str, image_id: str) -> str:
        """Return the path of the figure of an image pair.

        The path is relative to the output folder, `ProbeContext.artifacts`. `image_id` is the id of
        the pair.
        """
        changed = [f"{name}={value}" for name, value in changed_settings(self).items()]
        folder = "_".join([self.protocol, *changed])
        return f"{folder}/block{layer:02d}_{facet}/{figure_file_name(image_id)}"

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Match the points of all image pairs, and yield the scores of all layers and facets.

        A facet is a kind of feature, such as keys. Some of the pairs are drawn as figures.

        Raises:
            DataError: A file cannot be read.
            CheckpointError: Features are not finite.
        """
        images = self.scored_images(context.dataset)
        extractor = context.extractor(context.layers, *self.facets)
        size = self.resize.square_side(context.encoder.native_size, extractor.patch_size)
        # With the protocol "warps", each view occurs in only one pair.
        cache_bytes = 0 if self.protocol == "warps" else int(self.memory_gib * 2**30)
        encoder = ViewEncoder(extractor, cache_bytes)
        layer_facets = list(itertools.product(context.layers, self.facets))
        figure_ids = set(sample_ids(images.ids, self.panels))
        counts = PairCounts(len(images), self.alphas)
        for batch in batched(self._read_pairs(context, images, size), self.batch_size):
            pairs = [pair for _, pair in batch]
            features = encoder.encode(pairs)
            grid = next(iter(features.values()))[layer_facets[0]].shape[:2]
            matches = self._match_points(pairs, features, layer_facets, context.device)
            for row, (index, pair) in enumerate(batch):
                counts.add_pair(index, pair, grid)
                for layer_facet, (positions, is_degenerate) in matches.items():
                    predicted = positions[row, : len(pair.source)].double().numpy()
                    correct = counts.add_prediction(index, pair, layer_facet, predicted)
                    counts.degenerate[layer_facet][index] = bool(is_degenerate[row])
                    if pair.pair_id in figure_ids:
                        self._draw(context.artifacts, pair, layer_facet, predicted, correct)
        for layer_facet, number in itertools.product(layer_facets, range(len(self.alphas))):
            yield self._score(layer_facet, number, counts, size)

    def _read_pairs(
        self, context: ProbeContext, images: ImageSet, size: int
    ) -> Iterable[tuple[int, "ViewPair"]]:
        """Yield all pairs of views (square images), each with its index in the dataset.

        Annotated pairs are sorted by category and then by their first image. `size` is the side of
        the views in pixels.
        """

        def prepare(sample: Sample) -> ViewPair:
            if sample.pair is None:
                return make_warped_pair(sample, size, context.seed, self)
            return make_annotated_pair(sample, size)

        order = range(len(images)) if self.protocol == "warps" else order_by_category(images.ids)
        pairs = read_ahead(images, order, prepare, num_workers=self.num_workers)
        return context.progress(zip(order, pairs, strict=True), self.task, len(images))

    def _match_points(
        self,
        pairs: Sequence["ViewPair"],
        features: Mapping[str, ViewFeatures],
        layer_facets: Sequence[LayerFacet],
        device: torch.device,
    ) -> dict[LayerFacet, tuple[Float[Tensor, "pairs points 2"], Bool[Tensor, " pairs"]]]:
        """For each pair, predict where the points of the first view are in the second view.

        Args:
            pairs: A batch of pairs of views (square images).
            features: Features of the views, by their ids in `ViewPair.view_ids`.
            layer_facets: Layers and facets (kinds of features) to use.
            device: Device of the features.

        Returns:
            A dictionary from layer and facet to two tensors. The first contains the predicted
            positions, relative to the side of the view. Pairs with few points are padded. The
            second states whether the positions of a pair are arbitrary, because all patches of its
            second view have the same features.
        """
        sources = [torch.from_numpy(pair.source).float() for pair in pairs]
        points = to_device(pad_sequence(sources, batch_first=True), device)
        tensors = list[Tensor]()
        for layer_facet in layer_facets:
            source, target = (
                torch.stack([features[pair.view_ids[view]][layer_facet] for pair in pairs])
                for view in (0, 1)
            )
            similarity = cosine_similarities(sample_features(source, points, self.sampling), target)
            if self.prediction == "cell":
                positions = argmax_positions(similarity)
            else:
                positions = soft_argmax_positions(
                    similarity, sigma=self.sigma, temperature=self.temperature
                )
            directions = unit_vectors(target.flatten(1, 2))
            is_degenerate = (directions - directions[:, :1]).abs().amax((1, 2)) < _CONSTANT
            tensors += positions, is_degenerate
        # All tensors are copied together, because the CPU waits for the device at each copy.
        on_host = to_host(tensors)
        return dict(zip(layer_facets, zip(on_host[::2], on_host[1::2], strict=True), strict=True))

    def _draw(
        self,
        folder: Path,
        pair: "ViewPair",
        layer_facet: LayerFacet,
        predicted: Points,
        correct: Bool[np.ndarray, "alphas _points"],
    ) -> None:
        layer, facet = layer_facet
        metric = _FIGURE_METRIC if _FIGURE_METRIC in self.metrics else self.metrics[-1]
        is_correct = correct[self.metrics.index(metric)]
        title = f"block {layer}, {facet}: {metric} {100 * is_correct.mean():.0f} %"
        path = folder / self.figure_path(layer, facet, pair.pair_id)
        draw_matches(pair, predicted, is_correct, title, path)

    def _score(
        self, layer_facet: LayerFacet, number: int, counts: "PairCounts", view_size: int
    ) -> Score:
        """Return PCK, the percentage of correctly matched points, of one layer and facet.

        A facet is a kind of feature. A point is correct if its relative error is at most the
        tolerance `self.alphas[number]`. `view_size` is the side of the views (square images) in
        pixels.
        """
        correct = counts.correct[layer_facet][:, number]
        pck = counts.pck(layer_facet, number)
        estimate = mean_estimate(pck)
        baselines = {answer: float(counts.pck(answer, number).mean()) for answer in BASELINES}
        details: dict[str, Any] = {
            "points": int(counts.points.sum()),
            "of_all_points": 100.0 * float(correct.sum() / counts.points.sum()),
            "view_size": view_size,
            "degenerate_percent": 100.0 * float(counts.degenerate[layer_facet].mean()),
            **Baseline.best(baselines).as_details(),
        }
        categories = np.array(counts.categories)
        by_category = {
            name: float(pck[categories == name].mean())
            for name in sorted(set(counts.categories))
            if name
        }
        if by_category:
            details["by_category"] = by_category
            details["of_categories"] = float(np.mean([*by_category.values()]))
        if self.prediction == "cell":
            details["reachable"] = float(counts.pck(_OWN_PATCH, number).mean())
        return Score(
            *layer_facet,
            self.metrics[number],
            estimate.value,
            estimate.ci95(),
            len(pck),
            details,
            per_image=np.stack([correct, counts.points], 1),
            per_image_kind="points",
        )


class PairCounts:
    """Counts of correctly matched points in each pair of views (square images).

    Attributes:
        alphas: Tolerances. A point is correct if its relative error is at most alpha.
        points: Number of points of each pair.
        categories: Object category of each pair, or an empty string.
        correct: Number of correct points for each pair and alpha. The key is a layer and a facet
            (kind of feature), or the name of a prediction that needs no features, such as a
            baseline.
        degenerate: For each layer and facet, whether the predicted positions of a pair are
            arbitrary. This happens if all patches of its second view have the same features.
    """

    def __init__(self, num_pairs: int, alphas: Sequence[float]) -> None:
        self.alphas = alphas
        self.points = np.zeros(num_pairs, np.int64)
        self.categories = [""] * num_pairs
        self.correct: dict[LayerFacet | str, Int64[np.ndarray, "pairs alphas"]] = defaultdict(
            lambda: np.zeros((num_pairs, len(alphas)), np.int64)
        )
        self.degenerate: dict[LayerFacet, Bool[np.ndarray, " pairs"]] = defaultdict(
            lambda: np.zeros(num_pairs, bool)
        )

    def add_pair(self, index: int, pair: "ViewPair", grid: tuple[int, ...]) -> None:
        """Store the category and number of points of a pair, and score the baselines on the pair.

        The baselines are predictions that need no features. `index` is the index of the pair in the
        dataset. `grid` contains the numbers of rows and columns of patches.
        """
        self.points[index], self.categories[index] = len(pair.source), pair.category
        sides = np.array(grid[::-1])
        # Perfect features would find the patch that contains the true position.
        own_patch = (np.minimum(np.floor(pair.truth * sides), sides - 1) + 0.5) / sides
        answers = (pair.source, np.full_like(pair.source, 0.5), own_patch)
        for answer, positions in zip((*BASELINES, _OWN_PATCH), answers, strict=True):
            self.add_prediction(index, pair, answer, positions)

    def add_prediction(
        self, index: int, pair: "ViewPair", key: LayerFacet | str, positions: Points
    ) -> Bool[np.ndarray, "alphas _points"]:
        """Count the correctly predicted points of a pair, and return which of them are correct.

        Args:
            index: Index of the pair in the dataset.
            pair: The pair of views (square images).
            key: Layer and facet (kind of feature) of the prediction, or the name of a baseline.
            positions: Predicted positions, relative to the side of the second view.
        """
        is_correct = pair.is_correct(positions, self.alphas)
        self.correct[key][index] = is_correct.sum(1)
        return is_correct

    def pck(self, key: LayerFacet | str, number: int) -> Float64[np.ndarray, " pairs"]:
        """Return PCK of each pair, the percentage of its points that are matched correctly.

        `key` is the layer and facet (kind of feature) of the prediction, or the name of a baseline.
        A point is correct if its relative error is at most the tolerance `self.alphas[number]`.
        """
        return 100.0 * self.correct[key][:, number] / self.points


def order_by_category(ids: Sequence[str]) -> list[int]:
    """Return the indices of annotated pairs, sorted by category and then by the first image.

    In this order, pairs that share their first image are adjacent. The ids of pairs have the form
    "NUMBER-SOURCE-TARGET:CATEGORY".
    """

    def sort_key(index: int) -> tuple[str, str]:
        number, _, rest = ids[index].partition("-")
        images, _, category = rest.rpartition(":")
        return category, images + number

    return sorted(range(len(ids)), key=sort_key)


@dataclass(frozen=True)
class ViewPair:
    """Two square views, with points in the first view and their positions in the second view.

    Attributes:
        pair_id: Id of the pair in the dataset.
        view_ids: Ids of the two views. A view that occurs in several pairs always has the same id.
        views: The two views in RGB.
        source: Points in the first view, relative to its side.
        truth: True position of each point of `source` in the second view, relative to its side.
        target_size: Width and height of the second image in pixels, before it is resized to a
            square. Errors are measured in these pixels.
        reference_length: Length in pixels, such as the longer side of the object's box. Errors are
            divided by it before they are compared with the tolerance alpha.
        category: Category of the object that both images show, or an empty string.
    """

    pair_id: str
    view_ids: tuple[str, str]
    views: tuple[View, View]
    source: Points
    truth: Points
    target_size: tuple[float, float]
    reference_length: float
    category: str = ""

    def is_correct(
        self, positions: Points, alphas: Sequence[float]
    ) -> Bool[np.ndarray, "{len(alphas)} _points"]:
        """For each tolerance (row), return whether each predicted position (column) is correct.

        `positions` contains the predicted positions, relative to the side of the second view. A
        position is correct at the tolerance alpha if its distance from the true position is at most
        alpha * `reference_length`.
        """
        errors = (
            np.linalg.norm((positions - self.truth) * self.target_size, axis=1)
            / self.reference_length
        )
        return errors <= np.array(alphas, np.float64)[:, None]


def make_warped_pair(sample: Sample, size: int, seed: int, probe: Correspondence) -> ViewPair:
    """Return a pair of views: the central square of an image, and a random warp of this square.

    The warped view shows no pixels from outside the square. The random numbers depend only on the
    seed and the id of the image. `size` is the side of both views in pixels. `probe` provides the
    kind of warp and the number of points.
    """
    generator = make_image_rng(seed, sample.image_id)
    view = central_square(sample.image, size, crop_share=1.0)
    matrix = sample_warp(probe.warp, size, probe.strength, generator)
    points = sample_points(matrix, size, probe.num_points, generator)
    target = warp_image(np.ascontiguousarray(view.permute(1, 2, 0).numpy()), matrix)
    return ViewPair(
        pair_id=sample.image_id,
        view_ids=(sample.image_id, f"warp of {sample.image_id}"),
        views=(view, torch.from_numpy(target).permute(2, 0, 1)),
        source=points / size,
        truth=transform_points(points, matrix) / size,
        target_size=(float(size), float(size)),
        reference_length=float(size),
    )


def make_annotated_pair(sample: Sample, size: int) -> ViewPair:
    """Resize both images of an annotated pair to squares, and return them as a pair of views.

    The squares have a side of `size` pixels. Resizing changes the aspect ratio, so errors are
    measured in pixels of the original second image.
    """
    assert sample.pair is not None
    pair = sample.pair

    def to_square(image: UInt8[np.ndarray, "height width 3"]) -> View:
        square = Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC)
        return torch.from_numpy(np.array(square)).permute(2, 0, 1)

    (height, width), (other_height, other_width) = sample.image.shape[:2], pair.image.shape[:2]
    return ViewPair(
        pair_id=sample.image_id,
        view_ids=pair.image_ids,
        views=(to_square(sample.image), to_square(pair.image)),
        source=pair.source / (width, height),
        truth=pair.target / (other_width, other_height),
        target_size=(float(other_width), float(other_height)),
        reference_length=pair.extent,
        category=pair.category,
    )


def make_image_rng(seed: int, image_id: str) -> np.random.Generator:
    """Return a random number generator that depends only on a seed and the id of an image."""
    digest = hashlib.sha256(f"{seed}\0{image_id}".encode(errors="surrogateescape")).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def sample_warp(
    kind: Warp, size: int, strength: float, generator: np.random.Generator
) -> Homography:
    """Return a random homography that maps points of a square image to points of the warped image.

    For "flip", the warped image is a mirror image. For "crop" and "homography", the warped image
    shows a random part of the original, enlarged to the same size. For "crop", the part is a square
    whose side is at least (1 - 2 * `strength`) times the original side. For "homography", the part
    is a quadrilateral. The corners of the quadrilateral are the original corners, moved inwards
    along x and along y by at most `strength` times the side.
    """
    if kind == "flip":
        return np.array([[-1.0, 0.0, size], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    corners = size * np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    if kind == "crop":
        scale = 1.0 - 2.0 * strength * generator.random()
        part = scale * corners + (1.0 - scale) * size * generator.random(2)
    else:
        inwards = np.where(corners > 0, -1.0, 1.0)
        part = corners + inwards * strength * size * generator.random((4, 2))
    return homography(part, corners)


def homography(
    source: Float64[np.ndarray, "4 2"], target: Float64[np.ndarray, "4 2"]
) -> Homography:
    """Return the homography that maps four source points to four target points.

    The sign of the matrix is chosen so that the mean of the source points gets a positive third
    homogeneous coordinate.
    """
    matrix = cv2.getPerspectiveTransform(source.astype(np.float32), target.astype(np.float32))
    # The four points define the matrix up to a factor, whose sign decides which points are visible.
    return matrix * np.sign(matrix[2] @ [*source.mean(0), 1.0])


def warp_image(
    image: UInt8[np.ndarray, "height width 3"], matrix: Homography
) -> UInt8[np.ndarray, "height width 3"]:
    """Apply a homography to an image by bicubic interpolation. The result has the same size."""
    height, width = image.shape[:2]
    return cv2.warpPerspective(
        image,
        np.linalg.inv(_ADD_HALF) @ matrix @ _ADD_HALF,
        (width, height),
        flags=cv2.INTER_CUBIC,
        borderMode=cv2.BORDER_REPLICATE,
    )


def transform_points(points: Points, matrix: Homography) -> Points:
    """Apply a homography to points (x, y).

    A point becomes NaN if its third homogeneous coordinate becomes 0 or negative, because such a
    point has no position in the new image.
    """
    homogeneous = np.column_stack([points, np.ones(len(points))]) @ matrix.T
    scale = np.where(homogeneous[:, 2:] > 0, homogeneous[:, 2:], np.nan)
    return homogeneous[:, :2] / scale


def is_inside(points: Points, size: int) -> Bool[np.ndarray, " _points"]:
    """Return whether each point (x, y) lies in the square from (0, 0) to (size, size).

    The result is False for points that are NaN.
    """
    x, y = points.T
    return (x >= 0) & (x < size) & (y >= 0) & (y < size)


def sample_points(
    matrix: Homography, size: int, count: int, generator: np.random.Generator
) -> Points:
    """Draw random pixels that stay visible in the warped view, and return their centres.

    A pixel may be drawn several times.

    Args:
        matrix: Homography from the square image to the warped view.
        size: Side of the square image and of the warped view in pixels.
        count: Number of pixels to draw.
        generator: Source of the random numbers.
    """
    parts: list[Points] = []
    while sum(map(len, parts)) < count:
        points = generator.integers(size, size=(2 * count, 2)) + 0.5
        parts.append(points[is_inside(transform_points(points, matrix), size)])
    return np.concatenate(parts)[:count]


class ViewEncoder:
    """A feature extractor for views (square images), with a cache of recently computed features.

    The cache takes at most `cache_bytes` bytes.
    """

    def __init__(self, extractor: FeatureExtractor, cache_bytes: int) -> None:
        self._extractor, self._cache_bytes = extractor, cache_bytes
        # The view that was used most recently comes last.
        self._cache: dict[str, ViewFeatures] = {}

    def encode(self, pairs: Sequence[ViewPair]) -> dict[str, ViewFeatures]:
        """Encode all views (square images) in the pairs, and return their features by view id.

        `ViewPair.view_ids` contains the ids of the views.

        Raises:
            CheckpointError: Features are not finite.
        """
        views = {k: v for pair in pairs for k, v in zip(pair.view_ids, pair.views, strict=True)}
        new = self._extract({key: view for key, view in views.items() if key not in self._cache})
        features = {key: new[key] if key in new else self._cache.pop(key) for key in views}
        self._cache |= features
        view_bytes = max(
            sum(values.numel() * values.element_size() for values in view.values())
            for view in features.values()
        )
        for key in list(self._cache):
            if len(self._cache) * view_bytes <= self._cache_bytes:
                break
            del self._cache[key]
        return features

    def _extract(self, views: Mapping[str, View]) -> dict[str, ViewFeatures]:
        if not views:
            return {}
        by_layer = self._extractor(torch.stack([*views.values()]).float() / 255, [*views])
        return {
            key: {
                # A slice would keep the whole batch in memory, so the cache needs a copy.
                (layer, facet): batch[number].clone() if self._cache_bytes else batch[number]
                for layer, facets in by_layer.items()
                for facet, batch in facets.items()
            }
            for number, key in enumerate(views)
        }


def sample_features(
    source: Float[Tensor, "batch rows cols dim"],
    points: Float[Tensor, "batch points 2"],
    sampling: Sampling,
) -> Float[Tensor, "batch points dim"]:
    """Return the features at given points of feature maps.

    The coordinates in `points` are relative to the width and height of the map. With "bilinear",
    features are interpolated between the centres of patches. A point beyond the outermost centres
    gets the features of the outermost patch. With "patch", a point gets the features of the patch
    that contains it. A point on the border of two patches gets the features of the right or lower
    patch.
    """
    if sampling == "patch":
        rows, cols = source.shape[1:3]
        sides = torch.tensor([cols, rows], device=points.device)
        x, y = torch.minimum((points * sides).long(), sides - 1).clamp(min=0).unbind(-1)
        return source[torch.arange(len(source), device=points.device)[:, None], y, x]
    # If `align_corners` is false, -1 and 1 are the edges of the map, which are 0 and 1 in `points`.
    sampled_features = F.grid_sample(
        source.permute(0, 3, 1, 2),
        (2 * points - 1)[:, :, None],
        padding_mode="border",
        align_corners=False,
    )
    return sampled_features[..., 0].mT


def cosine_similarities(
    features: Float[Tensor, "batch points dim"],
    target: Float[Tensor, "batch rows cols dim"],
) -> Float[Tensor, "batch points rows cols"]:
    """Return the cosine similarity between the features of each point and each target patch."""
    patches = unit_vectors(target.flatten(1, 2))
    return (unit_vectors(features) @ patches.mT).unflatten(-1, target.shape[1:3])


def argmax_positions(
    similarity: Float[Tensor, "batch points rows cols"],
) -> Float[Tensor, "batch points 2"]:
    """For each point, return the centre (x, y) of the most similar patch.

    x and y are relative to the width and height of the image.


    """
    rows, cols = similarity.shape[-2:]
    best = similarity.flatten(2).argmax(-1)
    middles = torch.stack([best % cols, best // cols], -1) + 0.5
    return middles / torch.tensor([cols, rows], device=middles.device)


def soft_argmax_positions(
    similarity: Float[Tensor, "batch points rows cols"], *, sigma: float, temperature: float
) -> Float[Tensor, "batch points 2"]:
    """For each point, return the mean of all patch centres, weighted by a softmax of similarities.

    Before the softmax, the similarities are multiplied by a Gaussian around the most similar patch
    and divided by `temperature`. The Gaussian has a standard deviation of `sigma` patches. The
    result (x, y) is relative to the width and height of the image.

    Source: `kernel_softargmax_get_matches_logits` in `utils/keypoints.py` of
    https://github.com/visinf/INSID3 (f1c9622a). Unlike that source, this function returns patch
    centres instead of patch indices.
    """
    rows, cols = similarity.shape[-2:]
    sides = torch.tensor([cols, rows], device=similarity.device)
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    middles = torch.stack([x, y], -1).to(similarity) + 0.5  # rows cols 2
    best = (argmax_positions(similarity) * sides)[:, :, None, None]
    damped = similarity * torch.exp(-(middles - best).square().sum(-1) / (2 * sigma**2))
    weights = (damped.flatten(2) / temperature).softmax(-1)
    return weights @ middles.flatten(0, 1) / sides


def draw_matches(
    pair: ViewPair, positions: Points, correct: Bool[np.ndarray, " _points"], title: str, path: Path
) -> None:
    """Save a figure of a pair of views, with lines from some points to their predicted positions.

    Args:
        pair: The pair of views (square images).
        positions: Predicted positions in the second view, relative to its side.
        correct: Whether each predicted position is correct. It determines the colour of the line.
        title: Text above the figure.
        path: File of the figure.
    """

    def coordinates(*points: np.ndarray) -> list[float]:
        return [_SUPERSAMPLING * float(value) for point in points for value in point]

    def circle(center: np.ndarray, radius: float) -> list[float]:
        return coordinates(center - radius, center + radius)

    def enlarge(view: View) -> Image.Image:
        pixels = Image.fromarray(np.ascontiguousarray(view.permute(1, 2, 0).numpy()))
        side = _SUPERSAMPLING * SIDE
        return pixels.resize((side, side), Image.Resampling.BICUBIC)

    width = 2 * SIDE + GAP
    canvas = Image.new("RGB", (_SUPERSAMPLING * width, _SUPERSAMPLING * SIDE), "white")
    for left, view in zip((0, SIDE + GAP), pair.views, strict=True):
        canvas.paste(enlarge(view), (_SUPERSAMPLING * left, 0))
    pen = ImageDraw.Draw(canvas)
    starts = pair.source[:MAX_LINES] * SIDE
    ends, true_ends = (p[:MAX_LINES] * SIDE + [SIDE + GAP, 0] for p in (positions, pair.truth))
    # Correct points are drawn last, so that wrong points do not hide them.
    for number in sorted(range(len(starts)), key=lambda n: bool(correct[n])):
        colour = CORRECT_COLOUR if correct[number] else WRONG_COLOUR
        line = coordinates(starts[number], ends[number])
        pen.line(line, fill=EDGE_COLOUR, width=3 * _SUPERSAMPLING)
        pen.line(line, fill=colour, width=3 * _SUPERSAMPLING // 2)
        for end in (starts[number], ends[number]):
            pen.ellipse(circle(end, 4.5), fill=colour, outline=EDGE_COLOUR, width=_SUPERSAMPLING)
        if not correct[number]:
            ring = true_ends[number]
            pen.ellipse(circle(ring, 7.5), outline=EDGE_COLOUR, width=4 * _SUPERSAMPLING)
            pen.ellipse(circle(ring, 6.5), outline=CORRECT_COLOUR, width=2 * _SUPERSAMPLING)
    small = canvas.resize((width, SIDE), Image.Resampling.LANCZOS)
    save_sheet([[draw_heading(title)], [draw_heading(f"{pair.pair_id}; {LEGEND}")], [small]], path)
