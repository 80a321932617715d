"""Instance retrieval: which images show the same object or place?

The sections of this file are: settings, the pass over the images, queries, scores, and figures.
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any, Literal

import numpy as np
import simplejpeg
import torch
from jaxtyping import Float, Float64, UInt8
from PIL import Image, ImageOps
from torch import Tensor

from probes.features.image import is_constant
from probes.features.stream import batched, images_per_pass, read_ahead
from probes.features.training_images import resize_bicubic
from probes.instances.ranking import (
    Indices,
    Query,
    QueryScore,
    rank_database,
    score_ranking,
)
from probes.pictures import Picture, draw_heading, save_sheet, tile_size
from ssl_bench.composition.compose import changed_settings, load_protocol_file
from ssl_bench.composition.fields import (
    Bounds,
    Count,
    CountOrZero,
    Pixels,
    PositiveFraction,
    Threads,
    require_nonempty,
)
from ssl_bench.data.samples import Dataset, ImageSet, RetrievalTarget, Sample
from ssl_bench.data.splits import sample_indices
from ssl_bench.errors import ConfigurationError, DataError, UnsupportedEncoderError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.features import Resize
from ssl_bench.intervals import mean_estimate
from ssl_bench.layers import Facet
from ssl_bench.models import Encoder, EncoderIdentity
from ssl_bench.neighbours import unit_vectors, zero_vectors_warning
from ssl_bench.results import Baseline

FACETS: Mapping[Facet, tuple[Facet, ...]] = {
    "cls": ("cls_normed",),
    "patch_mean": ("token_normed",),
    "gem": ("token_normed",),
    "cls_gem": ("cls_normed", "token_normed"),
}
"""For each descriptor of a whole image, the encoder outputs that are needed to compute it.

"cls_normed" is the [CLS] token and "token_normed" are the patch tokens, both after the encoder's
final norm.
"""
GEM_POWER, GEM_SMALLEST = 4, 1e-6
CUTOFFS = (1, 5, 10)
"""Values of k for the metric precision at k, the fraction of correct images among the k nearest."""
# Names of published datasets, and the protocol (retrieval task) of each.
_PROTOCOL_OF_DATASET = {
    "roxford5k": "landmarks",
    "rparis6k": "landmarks",
    "copydays": "copydays",
}
_NEAREST_IN_FIGURE = 8
_FRAME = 5
_GREEN, _RED, _GREY, _BLACK = "#28dc3c", "#ff463c", "#a0a0a0", "#000000"

JpegQuality = Annotated[int, Bounds(1, 95)]
LayerFacet = tuple[int, Facet]
RGBImage = UInt8[np.ndarray, "_height _width 3"]


@dataclass(frozen=True)
class Instances(Probe):
    """A training-free probe that ranks database images by their cosine similarity to query images.

    Attributes:
        protocol: Retrieval task, which defines the matches that a query should find. "holidays"
            searches all other images for the annotated matches of each query. "landmarks" does the
            same, and also gives a separate score for matches that are difficult to find. "copydays"
            searches for the original images of given modified copies. "class_folders" searches the
            other scored images for images of the same class. "copies" makes modified copies of any
            images and searches for the original images.
        facet: Descriptor of an image, or a list of descriptors: "cls" is the [CLS] token,
            "patch_mean" is the mean of the patches, "gem" is their generalised mean with the power
            4, and "cls_gem" concatenates "cls" and "gem". All are computed after the encoder's
            final norm.
        image_size: Side in pixels of the squares that images are resized to without keeping their
            aspect ratio. The default is the encoder's native size, unless `max_side` is set.
        max_side: Maximum length of the longer side in pixels. Larger images are reduced to this
            length. Images then keep their aspect ratio, and their sides are reduced to multiples of
            the patch size.
        scales: Factors that resize an image before it is encoded. The descriptor is the mean over
            all factors.
        top: Number of nearest images that are scored for each query. By default, all are scored.
        jpeg_qualities: JPEG qualities of the compressed copies, for the protocol "copies" only.
        crop_areas: Areas of the cropped copies relative to the image, for the protocol "copies"
            only.
        panels: Number of queries in the figure of a block. They are spread over the dataset.
        batch_size: Number of images that are read together.
        num_workers: Number of threads that decode images.

    Source: eval_image_retrieval.py and eval_copy_detection.py of
    https://github.com/facebookresearch/dino/tree/7c446df5.
    """

    protocol: Literal["holidays", "landmarks", "copydays", "class_folders", "copies"] = "holidays"
    facet: str | Sequence[str] = "cls"
    image_size: Pixels | None = None
    max_side: Pixels | None = None
    scales: Sequence[PositiveFraction] = (1.0,)
    top: Count | None = None
    jpeg_qualities: Sequence[JpegQuality] = (30, 5)
    crop_areas: Sequence[PositiveFraction] = (0.5, 0.2)
    panels: CountOrZero = 4
    batch_size: Count = 16
    num_workers: Threads = 4

    task = "instances"
    known_facets = tuple(FACETS)
    has_per_image_values = True
    excluded_from_identity = (*Probe.excluded_from_identity, "panels", "batch_size")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_nonempty("probe.scales", self.scales)
        if self.protocol == "copies" and not self.copy_names:
            raise ConfigurationError(
                "probe.protocol=copies needs at least one copy of each image, but "
                "probe.jpeg_qualities and probe.crop_areas are empty",
                hint=("probe.jpeg_qualities=[30,5]", "or", "probe.crop_areas=[0.5,0.2]"),
            )

    @property
    def role(self) -> str:
        roles = {"class_folders": "classification", "copies": "images"}
        return roles.get(self.protocol, "instances")

    def adapt_to_dataset(self, dataset: Dataset, chosen_fields: Collection[str]) -> "Instances":
        """For a published retrieval dataset, return a copy with the protocol of the dataset.

        A protocol is a retrieval task with its settings. Settings that the user has set
        (`chosen_fields`) do not change.
        """
        # If only a part of a dataset is used, its name is followed by a dash or a plus sign.
        protocol = _PROTOCOL_OF_DATASET.get(re.split("[-+]", dataset.name)[0])
        if protocol is None or "protocol" in chosen_fields:
            return self
        values = load_protocol_file(self, protocol)
        return replace(self, **{name: v for name, v in values.items() if name not in chosen_fields})

    @property
    def difficulties(self) -> tuple[str, ...]:
        """Return the suffixes of the metric names for all levels of difficulty, such as "_hard".

        The level of difficulty determines which matching images count as correct. The retrieval
        task "landmarks" has two levels of difficulty. Other tasks have one level, with an empty
        suffix.
        """
        return ("_medium", "_hard") if self.protocol == "landmarks" else ("",)

    @property
    def cutoffs(self) -> tuple[int, ...]:
        """Return the values of k for the metric precision at k: 1, 5 and 10.

        If the setting `top` is set, the only value is k = 1, because `top` is meant for queries
        with few matches.
        """
        return CUTOFFS if self.top is None else CUTOFFS[:1]

    @property
    def copy_names(self) -> tuple[str, ...]:
        """Return a name for each modified copy of an image, such as "jpeg 30" or "crop 0.5".

        The tuple is empty unless the setting `protocol` is "copies".
        """
        if self.protocol != "copies":
            return ()
        crops = (f"crop {float(area)!r}" for area in self.crop_areas)
        return (*(f"jpeg {quality}" for quality in self.jpeg_qualities), *crops)

    def metrics(self, difficulty: str) -> list[str]:
        return [f"{name}{difficulty}" for name in ("map", *(f"mp_at_{k}" for k in self.cutoffs))]

    def list_score_keys(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        metrics = [name for difficulty in self.difficulties for name in self.metrics(difficulty)]
        return list(product(layers, self.facets, metrics))

    def settings(self) -> dict[str, Any]:
        unused = {"image_size" if self._keeps_aspect_ratio else "max_side"}
        unused |= set() if self.protocol == "copies" else {"jpeg_qualities", "crop_areas"}
        return {name: value for name, value in super().settings().items() if name not in unused}

    def scored_images(self, dataset: Dataset) -> ImageSet:
        return dataset.images() if self.protocol == "copies" else dataset.val()

    def check_encoder(self, encoder: Encoder | EncoderIdentity) -> None:
        super().check_encoder(encoder)
        if not encoder.has_cls and "cls_gem" in self.facets:
            raise UnsupportedEncoderError(
                f"{encoder.name} has no [CLS] token, which probe.facet=cls_gem needs",
                hint=("probe.facet=gem",),
            )
        if not encoder.dynamic_image_size and set(self.scales) != {1.0}:
            raise UnsupportedEncoderError(
                f"{encoder.name} accepts images of one size only, so probe.scales must be [1.0]",
                hint=("probe.scales=[1.0]",),
            )

    @property
    def _keeps_aspect_ratio(self) -> bool:
        return self.image_size is None and self.max_side is not None

    @property
    def resize(self) -> Resize:
        if self._keeps_aspect_ratio:
            return Resize(None, keep_aspect_ratio=True, max_side=self.max_side)
        return Resize(self.image_size)

    def with_squares(self, side: int) -> "Instances":
        has_native_size = self.image_size is None and self.max_side is None
        return self if has_native_size else replace(self, image_size=side)

    def list_figures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        del images, seed
        cells = product(layers, self.facets) if self.panels else ()
        return {self.figure_path(layer, facet): [layer] for layer, facet in cells}

    def figure_path(self, layer: int, facet: str) -> str:
        """Return the path of the figure of a block and facet (kind of feature).

        The path is relative to the output folder, `ProbeContext.artifacts`.
        """
        changed = [f"{name}={value}" for name, value in changed_settings(self).items()]
        folder = "_".join([self.protocol, *changed])
        return f"{folder}/block{layer:02d}_{facet}/{self.panels}-queries.png"

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Rank the database images for each query, and yield the scores of all layers and facets.

        A facet is a kind of feature, such as the [CLS] token. Figures show some queries.

        Raises:
            DataError: No query has a matching image.
            CheckpointError: Features are not finite.
        """
        images = self.scored_images(context.dataset)
        descriptors, annotations = self._encode(context, images)
        queries, database = self._find_queries(images, annotations)
        drawn = self._select_figure_queries(images, queries) if self.panels else []
        thumbnails = Thumbnails(self, images)
        for (layer, facet), vectors in descriptors.items():
            unit = unit_vectors(vectors).to(context.device)
            scores: dict[str, list[QueryScore | None]] = {name: [] for name in self.difficulties}
            nearest: dict[int, Indices] = {}
            rankings = rank_database(unit, queries, database, self.top)
            for number, (query, ranked) in enumerate(zip(queries, rankings, strict=True)):
                for difficulty, query_scores in scores.items():
                    labels = query.label_images(len(unit), hard_only=difficulty == "_hard")
                    score = score_ranking(
                        ranked, labels, database, cutoffs=self.cutoffs, top=self.top
                    )
                    query_scores.append(score)
                if number in drawn:
                    nearest[number] = ranked[ranked != query.row][:_NEAREST_IN_FIGURE]
            details = {
                "queries": len(queries),
                "database": len(database),
                "constant_features": is_constant(unit),
                "warnings": zero_vectors_warning(unit),
            }
            for difficulty, query_scores in scores.items():
                yield from self._block_scores(layer, facet, difficulty, query_scores, details)
            if nearest:
                rows = [
                    self._draw_row(thumbnails, unit, queries[number], found)
                    for number, found in nearest.items()
                ]
                line = (
                    f"{context.encoder.name}, block {layer}, {facet}: each query, then its nearest "
                    "images with their cosine. Green: right, red: wrong, grey: not scored"
                )
                path = context.artifacts / self.figure_path(layer, facet)
                save_sheet([[draw_heading(line)], *rows], path)

    # One pass over the images.

    def make_variants(self, image: RGBImage) -> list[RGBImage]:
        """Return a list with an image and its modified copies, in the order of `copy_names`.

        Modified copies are made only if the setting `protocol` is "copies".
        """
        copies = self.protocol == "copies"
        jpegs = [jpeg_copy(image, quality) for quality in self.jpeg_qualities if copies]
        return [image, *jpegs, *(crop_copy(image, area) for area in self.crop_areas if copies)]

    def _encode(
        self, context: ProbeContext, images: ImageSet
    ) -> tuple[
        dict[LayerFacet, Float[Tensor, "rows dim"]], list[tuple[RetrievalTarget | None, int | None]]
    ]:
        """Compute the descriptors (feature vectors) of all images and their modified copies.

        Returns:
            Two results. The first contains the descriptors by layer and facet (kind of feature,
            such as the [CLS] token). Each image is followed by its copies. The second contains two
            values for each image: the target of this image as a query, and the class.
            Unknown values are None.
        """
        parts = dict.fromkeys(part for facet in self.facets for part in FACETS[facet])
        extractor = context.extractor(context.layers, *parts)
        patch_size = max((*context.encoder.strides, context.encoder.patch_size))
        native = context.encoder.native_size
        num_views = 1 + len(self.copy_names)
        descriptors: dict[LayerFacet, Float[Tensor, "rows dim"]] = {}
        annotations = []

        def prepare(sample: Sample) -> tuple[Sample, list[Float[Tensor, "3 _height _width"]]]:
            pixels = [
                resize_bicubic(view, *self._input_size(view.shape, scale, native, patch_size))
                for view in self.make_variants(sample.image)
                for scale in self.scales
            ]
            # Only a single pixel of the image is kept, so that the other pixels are freed.
            return replace(sample, image=sample.image[:1, :1]), pixels

        read = read_ahead(images, range(len(images)), prepare, num_workers=self.num_workers)
        shown = context.progress(read, f"{images.name} images", len(images))
        first = 0
        for batch in batched(shown, self.batch_size):
            annotations += [(sample.retrieval_target, sample.label) for sample, _ in batch]
            # Images of the same size are encoded together.
            by_size = defaultdict(list)
            for number, (sample, pixels) in enumerate(batch):
                for index, one in enumerate(pixels):
                    row = (first + number) * num_views + index // len(self.scales)
                    by_size[one.shape[1:]].append((row, sample.image_id, one))
            for (height, width), items in by_size.items():
                side = math.isqrt(height * width)
                for some in batched(items, images_per_pass(self.batch_size, side, context.device)):
                    rows, ids, pixels = zip(*some, strict=True)
                    for layer, features in extractor(torch.stack(pixels), ids).items():
                        for facet in self.facets:
                            vectors = compute_descriptors(features, facet).cpu() / len(self.scales)
                            if (layer, facet) not in descriptors:
                                shape = (len(images) * num_views, vectors.shape[1])
                                descriptors[layer, facet] = torch.zeros(shape)
                            descriptors[layer, facet].index_add_(0, torch.tensor(rows), vectors)
            first += len(batch)
        return descriptors, annotations

    def _input_size(
        self, shape: Sequence[int], scale: float, native: tuple[int, int], patch_size: int
    ) -> tuple[int, int]:
        """Return the height and width in pixels of an image that the encoder receives.

        Args:
            shape: Height and width of the image.
            scale: Factor that resizes the image, one value of the setting `scales`.
            native: Native size of the encoder.
            patch_size: Side of a patch in pixels. The results are multiples of it.
        """
        if self._keeps_aspect_ratio:
            sides = self.resize.output_size(shape[0], shape[1])
        else:
            sides = (self.resize.square_side(native),) * 2
        height, width = (max(1, int(side * scale) // patch_size) * patch_size for side in sides)
        return height, width

    # Queries.

    def _find_queries(
        self, images: ImageSet, annotations: Sequence[tuple[RetrievalTarget | None, int | None]]
    ) -> tuple[list[Query], Indices]:
        """Return the queries, and the row of each database image in the matrix of descriptors.

        `annotations` contains the annotated matches and the class of each image.
        """
        everything, none = np.arange(len(images)), np.empty(0, np.int64)
        if self.protocol == "class_folders":
            labels = np.array([label for _, label in annotations])
            same = {label: np.flatnonzero(labels == label) for label in np.unique(labels)}
            queries = [Query(i, same[label], none, none) for i, label in enumerate(labels)]
            return self._require_matches(queries, everything, images), everything
        if self.protocol == "copies":
            originals = everything * (1 + len(self.copy_names))
            return [
                Query(row + number, np.array([row]), none, none)
                for row in originals.tolist()
                for number in range(1, 1 + len(self.copy_names))
            ], originals
        rows = {image_id: row for row, image_id in enumerate(images.ids)}

        def find(ids: Collection[str]) -> Indices:
            return np.array(sorted(rows[i] for i in ids if i in rows), np.int64)

        targets = {row: target for row, (target, _) in enumerate(annotations) if target}
        distinct = {id(one.excluded_ids): one.excluded_ids for one in targets.values()}
        database = np.setdiff1d(everything, find(frozenset().union(*distinct.values())))
        queries = [
            Query(row, find(one.matches), find(one.hard_matches), find(one.ignored))
            for row, one in targets.items()
        ]
        return self._require_matches(queries, database, images), database

    def _require_matches(
        self, queries: list[Query], database: Indices, images: ImageSet
    ) -> list[Query]:
        is_in_database = np.zeros(len(images), bool)
        is_in_database[database] = True
        for query in queries:
            right = np.concatenate([query.matches, query.hard_matches])
            if is_in_database[right[right != query.row]].any():
                return queries
        raise DataError(
            f"no query of {images.name} {images.split} has a matching image among the selected "
            "images. Use all images, or the first images of the dataset, because matching images "
            "often follow each other",
            hint=("data.limit=null", "or", "data.limit=null", "data.first=200"),
        )

    def _select_figure_queries(self, images: ImageSet, queries: Sequence[Query]) -> list[int]:
        """Choose queries for the figures, spread over the dataset, and return their indices."""
        num_views = 1 + len(self.copy_names)
        names = [f"{images.ids[query.row // num_views]}\n{query.row}" for query in queries]
        return sample_indices(names, self.panels)

    # Scores.

    def _block_scores(
        self,
        layer: int,
        facet: str,
        difficulty: str,
        query_scores: Sequence[QueryScore | None],
        details: Mapping[str, Any],
    ) -> Iterator[Score]:
        """Yield the scores of all metrics for one block, facet and level of difficulty.

        A facet is a kind of feature, such as the [CLS] token. `difficulty` is the suffix of the
        metric names, such as "_hard". `query_scores` contains None for queries without a match.
        """
        scored = [score for score in query_scores if score is not None]
        details = {**details, "queries_without_match": len(query_scores) - len(scored)}
        names = self.metrics(difficulty)
        if not scored:
            undefined = {
                **details,
                "undefined": f"no query has a{difficulty.replace('_', ' ')} match",
            }
            for name in names:
                yield Score(layer, facet, name, math.nan, None, len(query_scores), undefined)
            return
        values = 100 * np.array([score.values for score in scored])
        by_chance = 100 * np.array([score.by_chance for score in scored]).mean(0)
        by_copy = self._mean_by_copy(values)
        if self.copy_names:
            # Scores of copies of the same image depend on each other, so they are averaged first.
            values = values.reshape(-1, len(self.copy_names), len(names)).mean(1)
        for number, name in enumerate(names):
            estimate = mean_estimate(values[:, number])
            baseline = Baseline("random ranking", float(by_chance[number]))
            own = {**details, **baseline.as_details()}
            if by_copy:
                own["by_copy"] = {copy: float(means[number]) for copy, means in by_copy.items()}
            yield Score(
                layer,
                facet,
                name,
                estimate.value,
                estimate.ci95(),
                len(values),
                own,
                per_image=values[:, number],
            )

    def _mean_by_copy(
        self, values: Float64[np.ndarray, "queries metrics"]
    ) -> dict[str, Float64[np.ndarray, " metrics"]]:
        """Average the scores of the queries for each kind of modified copy, such as "jpeg 30".

        The keys of the result are the kinds of copies. The result is empty unless `protocol` is
        "copies".
        """
        step = len(self.copy_names)
        return {name: values[number::step].mean(0) for number, name in enumerate(self.copy_names)}

    # Figures.

    def _draw_row(
        self, thumbnails: "Thumbnails", unit: Tensor, query: Query, found: Indices
    ) -> list[Image.Image]:
        """Return the images of one row in a figure: a query, followed by its nearest images.

        `unit` contains the L2-normalised descriptors of all images, and `found` contains the
        indices of the nearest images.
        """
        labels = query.label_images(len(unit))
        colours = {1: _GREEN, 0: _RED, -1: _GREY}
        tiles = [thumbnails.tile(query.row, "query", _BLACK)]
        for row in found.tolist():
            cosine = float(unit[query.row] @ unit[row])
            tiles.append(thumbnails.tile(row, f"{cosine:.3f}", colours[int(labels[row])]))
        return tiles


class Thumbnails:
    """Small versions of images for figures. Each small image is created when it is first drawn."""

    def __init__(self, probe: Instances, images: ImageSet) -> None:
        self._probe, self._images = probe, images
        self._by_row: dict[int, Image.Image] = {}

    def tile(self, row: int, note: str, colour: str) -> Image.Image:
        """Draw a small image in a frame, with its id and the text `note` above it.

        `row` is the index of the image's descriptor, and `colour` is the colour of the frame.
        """
        index, view = divmod(row, 1 + len(self._probe.copy_names))
        if row not in self._by_row:
            image = self._probe.make_variants(self._images[index].image)[view]
            self._by_row[row] = Image.fromarray(image).resize(tile_size(image.shape))
        framed = np.asarray(ImageOps.expand(self._by_row[row], _FRAME, colour))
        copy = self._probe.copy_names[view - 1] if view else ""
        title = " ".join(filter(None, (self._images.ids[index], copy)))
        return Picture(framed, (title, note), height=framed.shape[0]).tile()


def compute_descriptors(
    features: Mapping[Facet, Tensor], facet: Facet
) -> Float[Tensor, "batch dim"]:
    """Compute the descriptors (feature vectors) of a batch of images from the features of a block.

    `facet` is the kind of descriptor, such as "patch_mean".
    """
    if facet == "cls":
        return features["cls_normed"]
    patches = features["token_normed"].flatten(1, 2)
    if facet == "patch_mean":
        return patches.mean(1)
    pooled = generalised_mean(patches)
    return pooled if facet == "gem" else torch.cat([features["cls_normed"], pooled], 1)


def generalised_mean(patches: Float[Tensor, "batch patches dim"]) -> Float[Tensor, "batch dim"]:
    """Pool the patches of each image by their generalised mean (GeM) with the power `GEM_POWER`.

    Features that are not positive are first replaced by a small positive number.
    """
    return patches.clamp(min=GEM_SMALLEST).pow(GEM_POWER).mean(1).pow(1 / GEM_POWER)


def jpeg_copy(image: RGBImage, quality: int) -> RGBImage:
    """Compress an image as JPEG with the given quality (1 to 95), and return the decoded copy."""
    data = simplejpeg.encode_jpeg(
        np.ascontiguousarray(image), quality=quality, colorspace="RGB", colorsubsampling="420"
    )
    return simplejpeg.decode_jpeg(data, colorspace="RGB")


def crop_copy(image: RGBImage, area: float) -> RGBImage:
    """Crop the centre of an image, and enlarge the crop to the size of the image.

    `area` is the area of the crop relative to the image.
    """
    height, width = image.shape[:2]
    margin = (1 - math.sqrt(area)) / 2
    box = (width * margin, height * margin, width * (1 - margin), height * (1 - margin))
    resized = Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC, box=box)
    return np.asarray(resized)
