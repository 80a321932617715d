"""PCA maps: three principal components of the patch features as red, green and blue.

In the order of a run: what is asked (`PCA`), features, components, foreground, colours that agree
between maps, score, pictures, and the maps that other checkpoints are aligned with.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from probes.features.moments import Moments
from probes.features.stream import fetch_finite
from probes.features.views import resize_bicubic
from probes.pictures import Picture, blocks_name, heading, sheet, svg_sheet
from ssl_bench.composition.fields import Count, FilePath, Pixels
from ssl_bench.data.samples import Dataset, ImageSet, Sample
from ssl_bench.data.splits import sampled, sampled_numbers
from ssl_bench.errors import CheckpointError, ConfigurationError, DataError, with_hint
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.features import Resize
from ssl_bench.intervals import mean_estimate
from ssl_bench.layers import INNER_FACETS
from ssl_bench.system.files import open_regular, write_atomically
from ssl_bench.system.paths import encoder_folder_prefix, expand_path, figure_file_name, file_name
from ssl_bench.system.process import reraise_out_of_memory

FILE = "reference.npz"
"""Maps that others are aligned with, beside the pictures."""
NUM_COMPONENTS = 3
PERCENTILES = (1.0, 99.0)
SMALL_SPREAD = 10.0
"""Percent of the mean square; a variance below it is said beside a map."""
_AT_LEAST = 224
# Features that are equal but for the rounding of float32 count as constant.
_CONSTANT = 1e-12
_TILES_A_ROW = 13

Map = Float64[Tensor, "_rows _cols 3"]
"""Three components of the patches of one image."""
Mask = Bool[Tensor, "_rows _cols"]
Colours = UInt8[np.ndarray, "_rows _cols 3"]


@dataclass(frozen=True)
class PCA(Probe):
    """PCA maps of some images of a dataset, in colours that agree between blocks.

    Attributes:
        protocol: "image" fits the components on each image, "batch" on all drawn images, "dataset"
            on all images of the dataset; with these two a colour means the same in every image.
        facet: What is projected: token, token_normed, key, query, value, attn_out, attn_skip,
            mlp_hidden, mlp_out, or a submodule of a block.
        panels: How many images are projected and drawn, from all over the set.
        image_size: Longer side in pixels, a multiple of the patch, to which the other side is
            rounded. Without it the encoder's own, and at least 224.
        own_size: What that is, known once the encoder is; another one is in the name of the folder
            of pictures.
        squash: Side of the square that images are squashed to instead, whatever their shape; that
            of an encoder that takes no other size.
        background: "keep", or "first_component": patches on one side of the first component are
            left out and the components fitted again without them; see `foreground`.
        align_to: Folder of pictures, or name of a checkpoint that was probed into the same folder
            with the same protocol, whose colours are taken over; null for the checkpoint's own
            last block.
        grid: What the overview is saved as: png, svg or both.
    """

    protocol: Literal["image", "batch", "dataset"] = "image"
    facet: str = "token"
    panels: Count = 8
    image_size: Pixels | None = None
    own_size: int | None = field(default=None, init=False)
    squash: Pixels | None = None
    background: Literal["keep", "first_component"] = "keep"
    align_to: FilePath | None = None
    grid: Literal["png", "svg", "both"] = "png"

    task = "pca"
    role = "images"
    known_facets = ("token", "token_normed", "key", "query", "value", *INNER_FACETS)
    # What is drawn and how, not what the variance is.
    excluded_from_identity = ("protocol", "facet", "align_to", "grid", "own_size")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protocol == "dataset" and self.background != "keep":
            raise ConfigurationError(
                "the images pass the encoder once with probe.protocol=dataset, got "
                f"probe.background={self.background}",
                hint=("probe.background=keep",),
            )

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [(layer, self.scored_facet, "explained_variance") for layer in layers]

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.images()

    def settings(self) -> dict[str, Any]:
        # Records of before `squash` had none.
        found = super().settings().items()
        return {name: value for name, value in found if (name, value) != ("squash", None)}

    @property
    def resize(self) -> Resize:
        if self.squash is not None:
            return Resize(self.squash)
        return Resize(self.image_size, keep_aspect_ratio=True, round_to_patch=True)

    def with_squares(self, side: int) -> "PCA":
        return replace(self, image_size=side, squash=side)

    def with_native_size(self, native_size: tuple[int, int]) -> "PCA":
        """The same with images of a size, for an encoder with images of that one."""
        own_size = max(_AT_LEAST, *native_size)
        fitted = replace(self, image_size=self.image_size or own_size)
        object.__setattr__(fitted, "own_size", own_size)
        return fitted

    def pictures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        del seed
        together = [f"{blocks_name(layers)}.{kind}" for kind in self.grid_kinds]
        shown = {f"{self.kind}/{name}": layers for name in (*together, FILE)}
        for image_id in sampled(images.ids, self.panels):
            for layer in layers:
                shown[f"{self.kind}/block{layer:02d}/{figure_file_name(image_id)}"] = [layer]
        return shown

    @property
    def grid_kinds(self) -> tuple[str, ...]:
        """Ends of the names of the overviews."""
        return ("png", "svg") if self.grid == "both" else (self.grid,)

    @property
    def kind(self) -> str:
        """Name of the folder of the pictures, with what their colours are aligned with."""
        if self.align_to is None:
            return self._own_kind
        return f"{self._own_kind}-as-{file_name('-'.join(Path(self.align_to).parts[-2:]))}"

    @property
    def _own_kind(self) -> str:
        more = [self.scored_facet] if self.scored_facet != "token" else []
        more += ["foreground"] if self.background != "keep" else []
        more += [f"{self.image_size}px"] if self.own_size not in (None, self.image_size) else []
        return "-".join([self.protocol, *more])

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Draw the maps, then score the variance that three components explain."""
        images = self.split(context.dataset)
        drawn = sampled_numbers(images.ids, self.panels)
        if len(drawn) < len(images):
            line = f"pca: only {len(drawn)} of {len(images)} images are projected"
            context.say(with_hint(line, hint=("--pictures", str(len(images)))))
        samples = [images[number] for number in drawn]
        given = None
        if self.align_to is not None:
            folder = reference_folder(self.align_to, context.artifacts, self._own_kind)
            source, given = load_reference(folder, [sample.image_id for sample in samples])
            context.say(f"pca: colours aligned with {source}")
        # The last block of the kind of the asked ones, so that colours hang on no other command.
        encoder = context.encoder
        kinds = [layers for _, layers in encoder.stages(range(encoder.depth))]
        (last,) = (layers[-1] for layers in kinds if context.layers[0] in layers)
        layers = tuple(dict.fromkeys((*context.layers, last)))
        try:
            features, moments = features_of(self, context, images, samples, layers)
        except CheckpointError:
            if layers == context.layers:
                raise
            # A last block that is not finite lends its colours to nobody.
            layers = context.layers
            features, moments = features_of(self, context, images, samples, layers)
        blocks = {
            layer: _fit(self, [f[layer] for f in features], moments.get(layer)) for layer in layers
        }
        _draw(self, context, blocks, samples, given)
        num_images = len(images) if self.protocol == "dataset" else len(samples)
        for layer in context.layers:
            yield _score(self, layer, blocks[layer], num_images)


def features_of(
    probe: PCA,
    context: ProbeContext,
    images: ImageSet,
    samples: Sequence[Sample],
    layers: Sequence[int],
) -> tuple[list[dict[int, Float[Tensor, "_rows _cols _dim"]]], dict[int, Moments]]:
    """Features of the drawn samples by layer; sums over all images where the protocol wants them.

    Raises:
        CheckpointError: features are not finite.
    """
    extractor = context.extractor(layers, probe.scored_facet)
    whole = probe.protocol == "dataset"
    total = len(images) if whole else len(samples)
    shown = {sample.image_id for sample in samples}
    resize = probe.with_native_size(context.encoder.native_size).resize
    kept = []
    moments = {layer: Moments() for layer in layers} if whole else {}
    for number in context.progress(range(total), "pca", total):
        sample = images[number] if whole else samples[number]
        height, width, _ = sample.image.shape
        size = resize.output_size(height, width, extractor.patch_size)
        image = resize_bicubic(sample.image, *size)
        blocks, sums = extractor.extract_unchecked(image[None])
        maps = [facets[probe.scored_facet][0] for facets in blocks.values()]
        maps = fetch_finite(extractor, sums, [sample.image_id], maps)
        found = dict(zip(blocks, maps, strict=True))
        for layer, some in moments.items():
            some.add(found[layer].flatten(0, 1))
        if not whole or sample.image_id in shown:
            kept.append(found)
    return kept, moments


@dataclass(frozen=True)
class Projection:
    """Where features are projected to.

    Attributes:
        mean: Subtracted first.
        components: Unit rows, by falling variance; the entry of largest magnitude is positive.
        deviations: Standard deviation along each component, by which projections are divided.
        explained: Percent of the variance along each component; 0 for constant features.
        spread: The variance in percent of the mean square of the features; small where all
            patches are nearly the same, which a map in full contrast hides.
    """

    mean: Float64[Tensor, " dim"]
    components: Float64[Tensor, "components dim"]
    deviations: Float64[Tensor, " components"]
    explained: Float64[Tensor, " components"]
    spread: float

    @property
    def is_constant(self) -> bool:
        return not bool(self.explained.any())

    def apply(self, features: Float[Tensor, "rows cols dim"]) -> Map:
        """Components of unit variance; 0 where there is no variance."""
        if self.is_constant:
            return torch.zeros(*features.shape[:2], NUM_COMPONENTS, dtype=torch.float64)
        projected = (features.double() - self.mean) @ self.components.T
        return torch.where(self.deviations > 0, projected / self.deviations.clamp(min=1e-300), 0.0)


def projection_of(moments: Moments) -> Projection:
    """The first three principal components, with signs that do not depend on the solver."""
    variances, vectors = torch.linalg.eigh(moments.covariance)
    variances = variances.clamp(min=0)
    components = vectors[:, -NUM_COMPONENTS:].flip(1).T
    largest = components.gather(1, components.abs().argmax(1, keepdim=True))
    mean = moments.mean
    total = variances.sum()
    energy = mean.square().sum() + total
    varies = total > _CONSTANT * energy
    top = variances[-NUM_COMPONENTS:].flip(0)
    # Rounding would be stretched to full contrast where features have fewer dimensions.
    top = torch.where(top > _CONSTANT * total, top, 0.0)
    return Projection(
        mean=mean,
        components=_padded(components * largest.sign()),
        deviations=_padded(top.sqrt()),
        explained=_padded(100 * top / total if varies else torch.zeros_like(top)),
        spread=float(100 * total / energy) if varies else 0.0,
    )


def _padded(values: Float64[Tensor, " some *dim"]) -> Float64[Tensor, " components *dim"]:
    """With zeros for the components that features of fewer than three channels lack."""
    missing = torch.zeros(NUM_COMPONENTS - len(values), *values.shape[1:], dtype=torch.float64)
    return torch.cat([values, missing])


def fit_projection(tokens: Float[Tensor, "tokens dim"]) -> Projection:
    """Principal components of tokens in float64."""
    return projection_of(Moments().add(tokens))


def foreground(features: Sequence[Float[Tensor, "_rows _cols dim"]]) -> list[Mask]:
    """Split patches in two by their first principal component; one side is called foreground.

    The threshold is the one between the two most compact groups (2-means on a line, solved
    exactly). The foreground is the side that holds the smaller share of the patches on the borders
    of the images, which are split together: a guess that photographers center what they show.
    Nothing knows of objects.

    Source: DINOv2, https://arxiv.org/abs/2304.07193, figure 1, which sets threshold and side by
    hand.
    """
    fit = fit_projection(torch.cat([f.flatten(0, 1) for f in features]))
    firsts = [fit.apply(f)[..., 0] for f in features]
    if fit.is_constant:
        return [torch.ones_like(first, dtype=torch.bool) for first in firsts]
    threshold = two_means(torch.cat([first.flatten() for first in firsts]))
    above = [first > threshold for first in firsts]
    border = [torch.ones_like(side) for side in above]
    for one in border:
        one[1:-1, 1:-1] = False
    on_border = torch.cat([side[b] for side, b in zip(above, border, strict=True)]).double().mean()
    anywhere = torch.cat([side.flatten() for side in above]).double().mean()
    # Of two sides that are as common on the border as elsewhere, the smaller one.
    is_above = on_border < anywhere or (on_border == anywhere and anywhere <= 0.5)
    return [side == bool(is_above) for side in above]


def two_means(values: Float64[Tensor, " values"]) -> float:
    """The threshold that leaves the least variance within the values below and above it."""
    ordered = values.sort().values
    below = torch.arange(1, len(ordered), dtype=torch.float64)
    above = len(ordered) - below
    sums = ordered.cumsum(0)
    gap = sums[:-1] / below - (sums[-1] - sums[:-1]) / above
    cut = int((below * above * gap.square()).argmax())
    return float((ordered[cut] + ordered[cut + 1]) / 2)


def oriented(maps: Sequence[Map], masks: Sequence[Mask]) -> list[Map]:
    """Each component with the sign that gives it its longer tail upwards within the masks.

    Unlike a sign by the entries of a component, this one survives a rotation of the features.
    """
    shown = torch.cat([m[mask] for m, mask in zip(maps, masks, strict=True)])
    signs = torch.where(shown.pow(3).sum(0) < 0, -1.0, 1.0).double()
    return [m * signs for m in maps]


def aligned(maps: Sequence[Map], reference: Sequence[Map]) -> list[Map]:
    """The maps, turned and mirrored in the space of the three components to meet a reference.

    Orthogonal Procrustes: of all turns of components of unit variance, the one with the least
    squared distance to the reference. Signs, order and mixtures of components of nearly equal
    variance, which are arbitrary in each of two fits, become the same. A channel of the result is
    therefore not one component but a mixture of the three; the space that is shown is the same.
    The reference is of the same images, at whatever resolution.

    Source: P. Schönemann, A generalized solution of the orthogonal Procrustes problem, 1966.
    """
    products = []
    for one, wanted in zip(maps, reference, strict=True):
        if wanted.shape != one.shape:
            channels_first = wanted.permute(2, 0, 1)[None]
            resized = interpolate(channels_first, size=tuple(one.shape[:2]), mode="bilinear")
            wanted = resized[0].permute(1, 2, 0)
        products.append(torch.einsum("rci,rcj->ij", one, wanted))
    left, _, right = torch.linalg.svd(torch.stack(products).sum(0))
    return [m @ (left @ right) for m in maps]


def as_colours(maps: Sequence[Map], masks: Sequence[Mask]) -> list[Colours]:
    """Stretch each channel over the maps of a block together; what is constant is grey.

    From the first to the 99th percentile, so that one patch of extreme value takes the contrast
    from no other. Black outside of the masks.
    """
    shown = torch.cat([m[mask] for m, mask in zip(maps, masks, strict=True)])
    low, high = np.percentile(shown.numpy(), PERCENTILES, axis=0)
    span = high - low
    found = []
    for m, mask in zip(maps, masks, strict=True):
        shares = np.where(span > 0, (m.numpy() - low) / np.where(span > 0, span, 1.0), 0.5)
        stretched = np.rint(255 * shares.clip(0, 1)).astype(np.uint8)
        found.append(stretched * mask.numpy()[..., None])
    return found


@dataclass(frozen=True)
class _Fitted:
    """One block: what was fitted to it, and the maps of the drawn images.

    Attributes:
        fits: One an image, or one for all.
        masks: Patches that are shown and that the components were fitted to.
    """

    fits: list[Projection]
    maps: list[Map]
    masks: list[Mask]

    def fit(self, image: int) -> Projection:
        return self.fits[image if len(self.fits) > 1 else 0]

    def title(self, layer: int, image: int) -> str:
        """What stands above a map."""
        fit = self.fit(image)
        if fit.is_constant:
            return f"block {layer}: constant"
        spread = f" ({fit.spread:.2g})" if fit.spread < SMALL_SPREAD else ""
        return f"block {layer}: {float(fit.explained.sum()):.0f} %{spread}"


def _fit(
    probe: PCA, features: list[Float[Tensor, "_rows _cols _dim"]], sums: Moments | None
) -> _Fitted:
    fits, maps, masks = [], [], []
    for group in [features] if probe.protocol != "image" else [[f] for f in features]:
        shown = [torch.ones(f.shape[:2], dtype=torch.bool) for f in group]
        if probe.background == "first_component":
            shown = foreground(group)
        tokens = torch.cat([f[mask] for f, mask in zip(group, shown, strict=True)])
        fits.append(fit_projection(tokens) if sums is None else projection_of(sums))
        # Outside the masks 0, where it has no say in an alignment.
        some = [fits[-1].apply(f) * m[..., None] for f, m in zip(group, shown, strict=True)]
        maps += oriented(some, shown)
        masks += shown
    return _Fitted(fits, maps, masks)


def _score(probe: PCA, layer: int, block: _Fitted, num_images: int) -> Score:
    by_component = torch.stack([fit.explained for fit in block.fits]).numpy()
    explained = by_component.sum(1)
    ci95 = mean_estimate(explained).ci95() if probe.protocol == "image" else None
    details: dict[str, Any] = {
        "num_constant": int((explained == 0).sum()),
        "explained_by_component": by_component.mean(0).tolist(),
        "spread_percent": float(np.mean([fit.spread for fit in block.fits])),
    }
    if probe.background != "keep":
        shown = torch.cat([mask.flatten() for mask in block.masks]).double().mean()
        details["foreground_percent"] = 100 * float(shown)
    value = float(explained.mean())
    return Score(layer, probe.scored_facet, "explained_variance", value, ci95, num_images, details)


def _draw(
    probe: PCA,
    context: ProbeContext,
    blocks: Mapping[int, _Fitted],
    samples: Sequence[Sample],
    given: list[Map] | None,
) -> None:
    """A tile for each asked block and image, an overview of all of them, and the reference."""
    folder, ids = context.artifacts / probe.kind, [sample.image_id for sample in samples]
    # Of each image the map of the last block that is not constant.
    own = []
    for i in range(len(samples)):
        varying = [layer for layer, block in blocks.items() if not block.fit(i).is_constant]
        own.append(blocks[max(varying or blocks)].maps[i])
    reference = own if given is None else given
    alone = probe.protocol == "image"

    def all_aligned(maps: list[Map]) -> list[Map]:
        if not alone:
            return aligned(maps, reference)
        return [aligned([m], [r])[0] for m, r in zip(maps, reference, strict=True)]

    kept = dict(zip(ids, all_aligned(own), strict=True))
    save_reference(folder, context.encoder.name, kept)
    # Of each image its photograph and the maps of the asked blocks.
    rows = [[Picture(sample.image, (sample.image_id,))] for sample in samples]
    for layer in context.layers:
        block = blocks[layer]
        maps = all_aligned(block.maps)
        if alone:
            pairs = zip(maps, block.masks, strict=True)
            colours = [as_colours([one], [mask])[0] for one, mask in pairs]
        else:
            colours = as_colours(maps, block.masks)
        for i, (sample, row) in enumerate(zip(samples, rows, strict=True)):
            # The map of an image that was squashed is shown as wide as its photograph.
            height, width = sample.image.shape[:2]
            shape = None if probe.squash is None else (height, width)
            row.append(Picture(colours[i], (block.title(layer, i),), shape))
            tiles = [picture.tile() for picture in (row[0], row[-1])]
            sheet([tiles], folder / f"block{layer:02d}" / figure_file_name(sample.image_id))
    # Several images in a row of the overview where each has few blocks.
    step = max(1, _TILES_A_ROW // (1 + len(context.layers)))
    rows = [
        [picture for row in rows[i : i + step] for picture in row]
        for i in range(0, len(rows), step)
    ]
    fitted = {
        "image": "fitted to each image",
        "batch": f"fitted to these {len(samples)} images",
        "dataset": "fitted to the whole dataset",
    }
    left_out = ", one side of the first component left out" if probe.background != "keep" else ""
    line = (
        f"{context.encoder.name}: three principal components of {probe.scored_facet} features, "
        f"{fitted[probe.protocol]}{left_out}; above, their share of the variance "
        f"(and the variance in percent of the mean square, where below {SMALL_SPREAD:g})"
    )
    name = blocks_name(context.layers)
    if "png" in probe.grid_kinds:
        tiles = [[picture.tile() for picture in row] for row in rows]
        sheet([[heading(line)], *tiles], folder / f"{name}.png")
    if "svg" in probe.grid_kinds:
        svg_sheet(rows, folder / f"{name}.svg", line)
    for layer in context.layers:
        fits = blocks[layer].fits
        if constant := sum(fit.is_constant for fit in fits):
            context.say(f"pca: block {layer}: {constant} of {len(fits)} maps are constant")


def save_reference(folder: Path, source: str, maps: Mapping[str, Map]) -> None:
    """Write the aligned maps of a checkpoint by image into a folder of pictures."""
    arrays: dict[str, Any] = {
        "source": np.array(source),
        "images": np.array(list(maps)),
        **{f"map{i}": m.float().numpy() for i, m in enumerate(maps.values())},
    }
    write_atomically(folder / FILE, lambda file: np.savez_compressed(file, **arrays))


def load_reference(folder: Path, images: Sequence[str]) -> tuple[str, list[Map]]:
    """Name of the checkpoint, and its maps of some images, that `save_reference` wrote.

    Raises:
        DataError: the file is missing or damaged, or there is no map of one of the images.
    """
    path = folder / FILE
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
            source = str(arrays["source"])
            maps = {
                str(image): torch.from_numpy(arrays[f"map{i}"]).double()
                for i, image in enumerate(arrays["images"])
            }
    # A damaged file makes the readers of zip and npy fail in any way.
    except Exception as error:
        reraise_out_of_memory(error)
        raise DataError(
            f"cannot read {path}; probe the checkpoint to align with first", hint=("--overwrite",)
        ) from error
    missing = [image for image in images if image not in maps]
    if missing:
        raise DataError(
            f"the maps of {source} to align with lack the images {', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}; probe that checkpoint on the same images "
            "first, with as many pictures",
            hint=("--pictures", "{number}"),
        )
    return source, [maps[image] for image in images]


def reference_folder(align_to: str, own: Path, kind: str) -> Path:
    """Where the maps to align with are.

    Args:
        align_to: A folder, or the beginning of NAME-SHA256 of a checkpoint that was probed before.
        own: Folder of the pictures of these images, beside those of other checkpoints.
        kind: Name of the folder in it, which tells protocol and facet.

    Raises:
        ConfigurationError: there is no such folder, or there are several.
    """
    given = expand_path(align_to)
    if (given / FILE).is_file():
        return given
    # Maps of other images, or from before one was replaced, have no colours to give.
    _, dash, images = own.name.rpartition("-")
    name = given.parent.name if given.name == "last.safetensors" else given.name
    known = []
    # Its own colours, else those that it took over.
    for of in (escape(kind), f"{escape(kind)}-as-*"):
        paths = sorted(own.parent.glob(f"*{dash}{images}/{of}/{FILE}"))
        folders = {path.parent: path.parent.parent.name for path in paths}
        known += folders.values()
        found = [
            one
            for one, of in folders.items()
            if of.rsplit("-", 2)[0] == encoder_folder_prefix(name)
        ]
        found = found or [one for one, of in folders.items() if of.startswith(name)]
        if len(found) == 1:
            return found[0]
    have = ", ".join(dict.fromkeys(known)) or "none"
    raise ConfigurationError(
        f"expected probe.align_to to be a folder with {FILE} or one checkpoint with maps of "
        f"{kind!r} of the same images in {own.parent}, got {align_to!r}; there are: {have}"
    )
