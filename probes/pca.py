"""PCA maps: three principal components of the patch features, shown as red, green and blue.

The file contains, in this order: the probe (`PCA`), the computation of principal components, the
split into foreground and background, the alignment of colours, and reference maps. Reference maps
are saved maps of one encoder. The maps of other encoders can be aligned with the reference maps, so
that the colours are similar.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from glob import escape
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from probes.features.moments import Moments
from probes.features.stream import fetch_and_check
from probes.features.training_images import resize_bicubic
from probes.pictures import Picture, blocks_name, draw_heading, save_sheet, save_svg_sheet
from ssl_bench.composition.fields import Count, FilePath, Pixels
from ssl_bench.data.samples import Dataset, ImageSet, Sample
from ssl_bench.data.splits import sample_ids, sample_indices
from ssl_bench.errors import CheckpointError, ConfigurationError, DataError, with_hint
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.features import Resize
from ssl_bench.intervals import mean_estimate
from ssl_bench.layers import INNER_FACETS
from ssl_bench.system.files import (
    expand_path,
    figure_file_name,
    file_name,
    model_file_name,
    open_regular,
    write_atomically,
)
from ssl_bench.system.process import reraise_out_of_memory

REFERENCE_FILE = "reference.npz"
"""Name of the file with the PCA maps of an encoder, in the folder of its figures.

The colours of other encoders' maps can be aligned with these maps.
"""
NUM_COMPONENTS = 3
PERCENTILES = (1.0, 99.0)
LOW_VARIANCE = 10.0
"""If the variance of the features is below this percentage, the title of a map states the variance.

The percentage is relative to the mean square of the features. A low percentage means that all
patches are nearly equal.
"""
# Lower limit of the default image size (the longer side) in pixels.
_MIN_DEFAULT_SIZE = 224
# Features whose variance is below this share of their mean square are constant up to rounding.
_CONSTANT = 1e-12
_MAX_TILES_IN_ROW = 13

T = TypeVar("T")
PatchFeatures = Float[Tensor, "_rows _cols _dim"]
"""Features of the patches of one image."""
Map = Float64[Tensor, "_rows _cols 3"]
"""The first three principal components of each patch of one image."""
Mask = Bool[Tensor, "_rows _cols"]
Colours = UInt8[np.ndarray, "_rows _cols 3"]


@dataclass(frozen=True)
class PCA(Probe):
    """A probe that draws PCA maps of some images, in similar colours for all blocks.

    A map shows three principal components of the patch features as red, green and blue. The score
    is the percentage of the variance that these components explain. Nothing is trained.

    Attributes:
        protocol: Images that the components are fitted to. "image" fits them to each image
            separately. "batch" fits them to all images in the figures together. "dataset" fits them
            to all images of the dataset. With "batch" and "dataset", a colour means the same in
            every image.
        facet: Facet (kind of feature) to project: token, token_normed, key, query, value, attn_out,
            attn_skip, mlp_hidden, mlp_out, or a submodule of a block.
        panels: Number of images to show in figures. They are spread over the whole dataset.
        image_size: Longer side of the images in pixels, a multiple of the patch size. The shorter
            side is rounded to a multiple of the patch size. Null for the larger of 224 and the
            encoder's native size.
        squash: Side in pixels of the squares that images are resized to without keeping their
            aspect ratio. The value is set automatically for encoders that accept only one image
            size.
        background: How to treat patches of the background. "keep" shows them. "first_component"
            removes patches by a threshold on the first component, and fits the components to the
            remaining patches.
        align_to: Another encoder whose colours the maps should resemble, as a folder of its PCA
            figures or the name of its checkpoint. The other encoder must have been probed on the
            same images with the same protocol and output folder. If null, the colours are aligned
            with the encoder's own last block.
        grid: File format of the overview figure, which shows all images and maps.
    """

    protocol: Literal["image", "batch", "dataset"] = "image"
    facet: str = "token"
    panels: Count = 8
    image_size: Pixels | None = None
    squash: Pixels | None = None
    background: Literal["keep", "first_component"] = "keep"
    align_to: FilePath | None = None
    grid: Literal["png", "svg", "both"] = "png"

    task = "pca"
    role = "images"
    known_facets = ("token", "token_normed", "key", "query", "value", *INNER_FACETS)
    # Records (stored results) have separate columns for protocol and facet. `align_to` and `grid`
    # only change figures.
    excluded_from_identity = ("protocol", "facet", "align_to", "grid")
    # Default of `image_size` for the encoder. If another size is set, the name of the figure folder
    # states it.
    _default_size: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protocol == "dataset" and self.background != "keep":
            raise ConfigurationError(
                "probe.protocol=dataset reads the images only once and cannot remove the "
                f"background, got probe.background={self.background}",
                hint=("probe.background=keep",),
            )

    def list_score_keys(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [(layer, self.scored_facet, "explained_variance") for layer in layers]

    def scored_images(self, dataset: Dataset) -> ImageSet:
        return dataset.images()

    def settings(self) -> dict[str, Any]:
        # Records (stored results) that are older than `squash` do not have this setting.
        values = super().settings().items()
        return {name: value for name, value in values if (name, value) != ("squash", None)}

    @property
    def resize(self) -> Resize:
        if self.squash is not None:
            return Resize(self.squash)
        return Resize(self.image_size, keep_aspect_ratio=True, round_to_patch=True)

    def with_squares(self, side: int) -> "PCA":
        return replace(self, image_size=side, squash=side)

    def with_native_size(self, native_size: tuple[int, int]) -> "PCA":
        default_size = max(_MIN_DEFAULT_SIZE, *native_size)
        probe = replace(self, image_size=self.image_size or default_size)
        object.__setattr__(probe, "_default_size", default_size)
        return probe

    def list_figures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        del seed
        names = [*self._overview_names(layers), REFERENCE_FILE]
        figures = {f"{self.figure_folder}/{name}": layers for name in names}
        for image_id in sample_ids(images.ids, self.panels):
            for layer in layers:
                figures[f"{self.figure_folder}/{_tile_name(layer, image_id)}"] = [layer]
        return figures

    @property
    def figure_folder(self) -> str:
        """Return the folder name for figures. The name contains `align_to` if it is set."""
        if self.align_to is None:
            return self._unaligned_folder
        return f"{self._unaligned_folder}-as-{file_name('-'.join(Path(self.align_to).parts[-2:]))}"

    @property
    def _unaligned_folder(self) -> str:
        parts: list[str] = [self.protocol]
        parts += [self.scored_facet] if self.scored_facet != "token" else []
        parts += ["foreground"] if self.background != "keep" else []
        has_default_size = self._default_size in (None, self.image_size)
        parts += [] if has_default_size else [f"{self.image_size}px"]
        return "-".join(parts)

    def _overview_names(self, layers: Sequence[int]) -> list[str]:
        formats = ("png", "svg") if self.grid == "both" else (self.grid,)
        return [f"{blocks_name(layers)}.{extension}" for extension in formats]

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Draw the PCA maps, and yield the percentage of variance that three components explain."""
        images = self.scored_images(context.dataset)
        numbers = sample_indices(images.ids, self.panels)
        if len(numbers) < len(images):
            line = f"pca: only {len(numbers)} of {len(images)} images are shown as PCA maps"
            context.say(with_hint(line, hint=("--pictures", str(len(images)))))
        samples = [images[number] for number in numbers]
        reference = None if self.align_to is None else self._load_reference(context, samples)
        # Colours are aligned with the last block, even if that block is not requested. The colours
        # of a block therefore do not depend on which other blocks are requested.
        encoder = context.encoder
        stages = [layers for _, layers in encoder.group_by_shape(range(encoder.depth))]
        (last,) = (layers[-1] for layers in stages if context.layers[0] in layers)
        layers = tuple(dict.fromkeys((*context.layers, last)))
        try:
            features, moments = self._extract(context, images, samples, layers)
        except CheckpointError:
            if layers == context.layers:
                raise
            # Perhaps only features of the last block, which was not requested, are not finite.
            features, moments = self._extract(context, images, samples, context.layers)
        blocks = {layer: self._fit(maps, moments.get(layer)) for layer, maps in features.items()}
        self._draw(context, blocks, samples, reference)
        num_images = len(images) if self.protocol == "dataset" else len(samples)
        for layer in context.layers:
            yield self._score(layer, blocks[layer], num_images)

    def _load_reference(self, context: ProbeContext, samples: Sequence[Sample]) -> list[Map]:
        folder = find_reference(str(self.align_to), context.artifacts, self._unaligned_folder)
        source, maps = load_reference(folder, [sample.image_id for sample in samples])
        context.say(f"pca: the colours of the maps are aligned with {source}")
        return maps

    def _extract(
        self,
        context: ProbeContext,
        images: ImageSet,
        samples: Sequence[Sample],
        layers: Sequence[int],
    ) -> tuple[dict[int, list[PatchFeatures]], dict[int, Moments]]:
        """Compute the patch features of `samples`, the images to draw, and return them by layer.

        Also return the moments (mean and covariance) of the features of all images in the dataset.
        If `protocol` is not "dataset", the moments are empty.

        Raises:
            CheckpointError: Features are not finite.
        """
        extractor = context.extractor(layers, self.scored_facet)
        resize = self.with_native_size(context.encoder.native_size).resize
        reads_all = self.protocol == "dataset"
        total = len(images) if reads_all else len(samples)
        drawn_ids = {sample.image_id for sample in samples}
        features: dict[int, list[PatchFeatures]] = {layer: [] for layer in layers}
        moments = {layer: Moments() for layer in layers} if reads_all else {}
        for number in context.progress(range(total), "pca", total):
            sample = images[number] if reads_all else samples[number]
            height, width, _ = sample.image.shape
            size = resize.output_size(height, width, extractor.patch_size)
            image = resize_bicubic(sample.image, *size)
            blocks, sums = extractor.extract_unchecked(image[None])
            on_device = [facets[self.scored_facet][0] for facets in blocks.values()]
            on_host = fetch_and_check(extractor, sums, [sample.image_id], on_device)
            for layer, block_features in zip(blocks, on_host, strict=True):
                if reads_all:
                    moments[layer].add(block_features.flatten(0, 1))
                if sample.image_id in drawn_ids:
                    features[layer].append(block_features)
        return features, moments

    def _fit(self, features: Sequence[PatchFeatures], moments: Moments | None) -> "BlockMaps":
        """Fit principal components to the features of one block, and compute the projections.

        `features` has one element for each image in the figures. If `moments` (mean and covariance
        of the whole dataset) is given, the components are computed from these moments instead.
        """
        block = BlockMaps([], [], [])
        for group in self._group_images(features):
            masks = [torch.ones(f.shape[:2], dtype=torch.bool) for f in group]
            if self.background == "first_component":
                masks = foreground_masks(group)
            if moments is None:
                tokens = torch.cat([f[mask] for f, mask in zip(group, masks, strict=True)])
                projection = fit_projection(tokens)
            else:
                projection = principal_components(moments)
            # Patches outside the mask are 0, so that they do not affect the alignment.
            maps = [projection.apply(f) * m[..., None] for f, m in zip(group, masks, strict=True)]
            block.projections.append(projection)
            block.maps.extend(orient_signs(maps, masks))
            block.masks.extend(masks)
        return block

    def _group_images(self, values: Sequence[T]) -> list[Sequence[T]]:
        """Group images that share principal components. `values` has one element for each image.

        If `protocol` is "image", each image has its own components and is a group of its own.
        Otherwise, all images are in one group.
        """
        return [[value] for value in values] if self.protocol == "image" else [values]

    def _score(self, layer: int, block: "BlockMaps", num_images: int) -> Score:
        by_component = torch.stack([p.explained_percent for p in block.projections]).numpy()
        explained = by_component.sum(1)
        ci95 = mean_estimate(explained).ci95() if self.protocol == "image" else None
        details: dict[str, Any] = {
            "num_constant": int((explained == 0).sum()),
            "explained_by_component": by_component.mean(0).tolist(),
            "spread_percent": float(np.mean([p.spread for p in block.projections])),
        }
        if self.background != "keep":
            share = torch.cat([mask.flatten() for mask in block.masks]).double().mean()
            details["foreground_percent"] = 100 * float(share)
        value, facet = float(explained.mean()), self.scored_facet
        return Score(layer, facet, "explained_variance", value, ci95, num_images, details)

    def _draw(
        self,
        context: ProbeContext,
        blocks: Mapping[int, "BlockMaps"],
        samples: Sequence[Sample],
        reference: list[Map] | None,
    ) -> None:
        """Save all figures: one for each block and image, and an overview.

        Also save reference maps, so that the maps of other encoders can be drawn in similar
        colours.

        Colours are aligned with the maps in `reference`, which has one map for each image. If
        `reference` is None, the maps of an image are aligned with its map from the encoder's last
        block. If the last block's map is constant, an earlier block is used.
        """
        folder = context.artifacts / self.figure_folder
        # For each image, the last map that is not constant.
        own_maps = []
        for i in range(len(samples)):
            varying = [layer for layer, b in blocks.items() if not b.projection(i).is_constant]
            own_maps.append(blocks[max(varying or blocks)].maps[i])
        reference = own_maps if reference is None else reference
        aligned = self._align(own_maps, reference)
        ids = [sample.image_id for sample in samples]
        save_reference(folder, context.encoder.name, dict(zip(ids, aligned, strict=True)))
        rows = [[Picture(sample.image, (sample.image_id,))] for sample in samples]
        for layer in context.layers:
            block = blocks[layer]
            groups = zip(
                self._group_images(self._align(block.maps, reference)),
                self._group_images(block.masks),
                strict=True,
            )
            colours = [image for maps, masks in groups for image in to_colours(maps, masks)]
            for i, (sample, row) in enumerate(zip(samples, rows, strict=True)):
                # A map of a squashed image is drawn with the aspect ratio of the photograph.
                height, width = sample.image.shape[:2]
                shape = None if self.squash is None else (height, width)
                row.append(Picture(colours[i], (block.title(layer, i),), shape))
                tiles = [picture.tile() for picture in (row[0], row[-1])]
                save_sheet([tiles], folder / _tile_name(layer, sample.image_id))
        self._draw_overview(context, folder, rows)
        for layer in context.layers:
            projections = blocks[layer].projections
            if constant := sum(projection.is_constant for projection in projections):
                context.say(
                    f"pca: block {layer}: {constant} of {len(projections)} maps are constant"
                )

    def _align(self, maps: Sequence[Map], reference: Sequence[Map]) -> list[Map]:
        groups = zip(self._group_images(maps), self._group_images(reference), strict=True)
        return [one_map for group in groups for one_map in align_maps(*group)]

    def _draw_overview(
        self, context: ProbeContext, folder: Path, rows: Sequence[Sequence[Picture]]
    ) -> None:
        """Save one figure with all images and maps. Each row contains an image and its maps."""
        fitted = {
            "image": "fitted to each image",
            "batch": f"fitted to these {len(rows)} images",
            "dataset": "fitted to the whole dataset",
        }
        is_partial = self.background != "keep"
        left_out = ", without patches on one side of the first component" if is_partial else ""
        line = (
            f"{context.encoder.name}: three principal components of {self.scored_facet} features, "
            f"{fitted[self.protocol]}{left_out}. Titles: share of the variance that they explain "
            f"(in brackets: variance in % of the mean square, if below {LOW_VARIANCE:g})"
        )
        # Images with few blocks share a row.
        step = max(1, _MAX_TILES_IN_ROW // (1 + len(context.layers)))
        rows = [list(chain(*rows[i : i + step])) for i in range(0, len(rows), step)]
        for name in self._overview_names(context.layers):
            if name.endswith(".svg"):
                save_svg_sheet(rows, folder / name, line)
            else:
                tiles = [[picture.tile() for picture in row] for row in rows]
                save_sheet([[draw_heading(line)], *tiles], folder / name)


def _tile_name(layer: int, image_id: str) -> str:
    return f"block{layer:02d}/{figure_file_name(image_id)}"


@dataclass(frozen=True)
class Projection:
    """The first three principal components of some features.

    Attributes:
        mean: Mean of the features.
        components: Unit vectors in the directions of the components, sorted by decreasing variance.
            If features have fewer than three channels, the missing components are zeros.
        deviations: Standard deviation of the features along each component.
        explained_percent: Percentage of the variance that each component explains, or 0 for
            constant features.
        spread: Variance of the features in percent of their mean square. If this value is small,
            all patches are nearly equal. The map does not show this, because maps always have full
            contrast.
    """

    mean: Float64[Tensor, " dim"]
    components: Float64[Tensor, "components dim"]
    deviations: Float64[Tensor, " components"]
    explained_percent: Float64[Tensor, " components"]
    spread: float

    @property
    def is_constant(self) -> bool:
        return not bool(self.explained_percent.any())

    def apply(self, features: Float[Tensor, "rows cols dim"]) -> Map:
        """Project the features of an image onto the components, and divide by standard deviations.

        Components without variance become 0.
        """
        if self.is_constant:
            return torch.zeros(*features.shape[:2], NUM_COMPONENTS, dtype=torch.float64)
        projected = (features.double() - self.mean) @ self.components.T
        return torch.where(self.deviations > 0, projected / self.deviations.clamp(min=1e-300), 0.0)


def fit_projection(tokens: Float[Tensor, "tokens dim"]) -> Projection:
    """Compute the first three principal components of tokens in float64."""
    return principal_components(Moments().add(tokens))


def principal_components(moments: Moments) -> Projection:
    """Compute the first three principal components from moments (mean and covariance) of features.

    In each component, the entry of largest magnitude is positive, so the signs of components do not
    depend on the eigensolver.
    """
    variances, vectors = torch.linalg.eigh(moments.covariance)
    variances = variances.clamp(min=0)
    components = vectors[:, -NUM_COMPONENTS:].flip(1).T
    largest = components.gather(1, components.abs().argmax(1, keepdim=True))
    mean = moments.mean
    total = variances.sum()
    mean_square = mean.square().sum() + total
    varies = total > _CONSTANT * mean_square
    top = variances[-NUM_COMPONENTS:].flip(0)
    # Otherwise, rounding errors would be shown with full contrast if the rank is below three.
    top = torch.where(top > _CONSTANT * total, top, 0.0)
    return Projection(
        mean=mean,
        components=_pad_components(components * largest.sign()),
        deviations=_pad_components(top.sqrt()),
        explained_percent=_pad_components(100 * top / total if varies else torch.zeros_like(top)),
        spread=float(100 * total / mean_square) if varies else 0.0,
    )


def _pad_components(values: Float64[Tensor, " some *dim"]) -> Float64[Tensor, " components *dim"]:
    """Append zeros along the first axis until there are values for three principal components.

    Features with fewer than three channels have fewer than three components.
    """
    missing = torch.zeros(NUM_COMPONENTS - len(values), *values.shape[1:], dtype=torch.float64)
    return torch.cat([values, missing])


def foreground_masks(features: Sequence[PatchFeatures]) -> list[Mask]:
    """Split patches into foreground and background, and return the masks of the foreground.

    The patches of all images are split by a threshold on their first principal component. The
    threshold minimises the variance within the two groups (exact 2-means in one dimension). Objects
    are assumed to be near the centre, so the foreground is the group that is less frequent on the
    image borders than in whole images. The masks are only a heuristic for figures.

    Source: DINOv2, https://arxiv.org/abs/2304.07193, figure 1. The authors of DINOv2 choose the
    threshold and the side of the foreground by hand.
    """
    projection = fit_projection(torch.cat([f.flatten(0, 1) for f in features]))
    firsts = [projection.apply(f)[..., 0] for f in features]
    if projection.is_constant:
        return [torch.ones_like(first, dtype=torch.bool) for first in firsts]
    threshold = two_means_threshold(torch.cat([first.flatten() for first in firsts]))
    above = [first > threshold for first in firsts]
    borders = [torch.ones_like(side) for side in above]
    for border in borders:
        border[1:-1, 1:-1] = False
    on_border = torch.cat([side[b] for side, b in zip(above, borders, strict=True)]).double().mean()
    anywhere = torch.cat([side.flatten() for side in above]).double().mean()
    # If the shares on the border and elsewhere are equal, the smaller side is returned.
    is_above = on_border < anywhere or (on_border == anywhere and anywhere <= 0.5)
    return [side == bool(is_above) for side in above]


def two_means_threshold(values: Float64[Tensor, " values"]) -> float:
    """Return the threshold that splits values into two groups by exact 2-means.

    The threshold minimises the sum of the squared deviations of all values from the mean of their
    group.
    """
    ordered = values.sort().values
    below = torch.arange(1, len(ordered), dtype=torch.float64)
    above = len(ordered) - below
    sums = ordered.cumsum(0)
    gap = sums[:-1] / below - (sums[-1] - sums[:-1]) / above
    cut = int((below * above * gap.square()).argmax())
    return float((ordered[cut] + ordered[cut + 1]) / 2)


@dataclass(frozen=True)
class BlockMaps:
    """Principal components of one block's features, and the PCA maps of the images in the figures.

    Attributes:
        projections: Principal components of each image, or a single element for all images.
        maps: The map of each image.
        masks: The mask of each image. It is true for the patches that are drawn, and false for the
            background.
    """

    projections: list[Projection]
    maps: list[Map]
    masks: list[Mask]

    def projection(self, image: int) -> Projection:
        return self.projections[image if len(self.projections) > 1 else 0]

    def title(self, layer: int, image: int) -> str:
        """Return the title of a map, such as "block 5: 62 %" for 62 % of explained variance."""
        projection = self.projection(image)
        if projection.is_constant:
            return f"block {layer}: constant"
        spread = f" ({projection.spread:.2g})" if projection.spread < LOW_VARIANCE else ""
        return f"block {layer}: {float(projection.explained_percent.sum()):.0f} %{spread}"


def orient_signs(maps: Sequence[Map], masks: Sequence[Mask]) -> list[Map]:
    """Flip the sign of each principal component whose cubed values have a negative sum.

    The longer tail of a component's values is then positive. Only patches within the masks are
    considered. Unlike the signs from `principal_components`, these signs do not change if the
    feature space is rotated.
    """
    values = torch.cat([m[mask] for m, mask in zip(maps, masks, strict=True)])
    signs = torch.where(values.pow(3).sum(0) < 0, -1.0, 1.0).double()
    return [m * signs for m in maps]


def align_maps(maps: Sequence[Map], reference: Sequence[Map]) -> list[Map]:
    """Rotate and reflect the three components of PCA maps so that the maps resemble a reference.

    All maps are multiplied by the orthogonal matrix that minimises their squared distance to the
    reference (orthogonal Procrustes). Each channel of the result is therefore a mixture of the
    three components.

    The alignment is necessary because PCA leaves the signs of components arbitrary. If components
    have nearly equal variance, their order and their mixture are arbitrary, too.

    Args:
        maps: Maps to align.
        reference: Maps of the same images, at any resolution.

    Source: P. Schönemann, A generalized solution of the orthogonal Procrustes problem, 1966.
    """
    products = []
    for source, target in zip(maps, reference, strict=True):
        if target.shape != source.shape:
            channels_first = target.permute(2, 0, 1)[None]
            resized = interpolate(channels_first, size=tuple(source.shape[:2]), mode="bilinear")
            target = resized[0].permute(1, 2, 0)
        products.append(torch.einsum("rci,rcj->ij", source, target))
    left, _, right = torch.linalg.svd(torch.stack(products).sum(0))
    return [m @ (left @ right) for m in maps]


def to_colours(maps: Sequence[Map], masks: Sequence[Mask]) -> list[Colours]:
    """Convert PCA maps to RGB images. Each component becomes one colour channel.

    The 1st percentile of a component over all maps becomes 0, and the 99th percentile becomes 255.
    A few extreme patches therefore do not reduce the contrast. Constant components become 128
    (grey), and patches outside the masks are black.
    """
    values = torch.cat([m[mask] for m, mask in zip(maps, masks, strict=True)])
    low, high = np.percentile(values.numpy(), PERCENTILES, axis=0)
    span = high - low
    colours = []
    for m, mask in zip(maps, masks, strict=True):
        shares = np.where(span > 0, (m.numpy() - low) / np.where(span > 0, span, 1.0), 0.5)
        stretched = np.rint(255 * shares.clip(0, 1)).astype(np.uint8)
        colours.append(stretched * mask.numpy()[..., None])
    return colours


def save_reference(folder: Path, source: str, maps: Mapping[str, Map]) -> None:
    """Save the PCA maps of an encoder, so that the maps of other encoders can be aligned with them.

    Args:
        folder: Folder for the file.
        source: Name of the encoder's checkpoint.
        maps: PCA maps by image id.
    """
    arrays: dict[str, Any] = {
        "source": np.array(source),
        "images": np.array(list(maps)),
        **{f"map{i}": m.float().numpy() for i, m in enumerate(maps.values())},
    }
    write_atomically(folder / REFERENCE_FILE, lambda file: np.savez_compressed(file, **arrays))


def load_reference(folder: Path, images: Sequence[str]) -> tuple[str, list[Map]]:
    """Load PCA maps that `save_reference` has saved. Return the checkpoint's name and the maps.

    Args:
        folder: Folder of the file.
        images: Ids of the images whose maps are returned, in this order.

    Raises:
        DataError: The file is missing or damaged, or does not contain all images.
    """
    path = folder / REFERENCE_FILE
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
            source = str(arrays["source"])
            maps = {
                str(image): torch.from_numpy(arrays[f"map{i}"]).double()
                for i, image in enumerate(arrays["images"])
            }
    # zipfile and numpy may raise any exception for a damaged file.
    except Exception as error:
        reraise_out_of_memory(error)
        raise DataError(
            f"cannot read the reference maps in {path}. Run the PCA probe again on the "
            "checkpoint in probe.align_to",
            hint=("--overwrite",),
        ) from error
    if missing := [image for image in images if image not in maps]:
        raise DataError(
            f"the checkpoint {source} has no maps of {len(missing)} of {len(images)} images, such "
            f"as {missing[0]}. Run the PCA probe on this checkpoint with all images first",
            hint=("--pictures", "{number}"),
        )
    return source, [maps[image] for image in images]


def find_reference(align_to: str, artifacts: Path, figure_folder: str) -> Path:
    """Find the folder with the PCA maps of another encoder, given the setting `align_to`.

    Args:
        align_to: A folder with maps, or the beginning of a checkpoint's name in the form
            NAME-SHA256.
        artifacts: Folder of this encoder's figures. The folders of other encoders are in the same
            parent folder.
        figure_folder: Name of the subfolder with the maps, which is the same for each encoder. It
            contains the protocol and the facet (kind of feature).

    Raises:
        ConfigurationError: There is no such folder, or there are several.
    """
    path = expand_path(align_to)
    if (path / REFERENCE_FILE).is_file():
        return path
    # The name of an encoder's folder ends with a digest of the images. Only maps of the same images
    # can be used.
    _, dash, digest = artifacts.name.rpartition("-")
    checkpoint = path.parent.name if path.name == "last.safetensors" else path.name
    known: list[str] = []
    # Maps in a checkpoint's own colours take precedence over maps that were aligned with others.
    for pattern in (escape(figure_folder), f"{escape(figure_folder)}-as-*"):
        files = sorted(artifacts.parent.glob(f"*{dash}{digest}/{pattern}/{REFERENCE_FILE}"))
        encoders = {file.parent: file.parent.parent.name for file in files}
        known += encoders.values()
        prefix = model_file_name(checkpoint)
        folders = [f for f, name in encoders.items() if name.rsplit("-", 2)[0] == prefix]
        folders = folders or [f for f, name in encoders.items() if name.startswith(checkpoint)]
        if len(folders) == 1:
            return folders[0]
    raise ConfigurationError(
        f"probe.align_to must be a folder with {REFERENCE_FILE} or the name of one checkpoint, got "
        f"{align_to!r}. These checkpoints in {artifacts.parent} have maps of the same images in a "
        f"folder {figure_folder!r}: {', '.join(dict.fromkeys(known)) or 'none'}"
    )
