"""PCA maps: three principal components of the patch features as red, green and blue.

Longer than other files: the probe is its pictures, and they are drawn here in order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from PIL import Image
from torch import Tensor

from probes.pca.alignment import FILE, MapReference, load_reference, reference_folder
from probes.pca.components import (
    Colours,
    Map,
    Moments,
    Projection,
    aligned,
    as_colours,
    fit_projection,
    foreground,
    oriented,
)
from probes.pictures import (
    Picture,
    blocks_name,
    heading,
    image_name,
    sheet,
    svg_sheet,
    titled,
)
from ssl_bench.composition.fields import Count, FilePath, Pixels, check_fields
from ssl_bench.data.samples import Dataset, ImageSet, Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.features import FeatureExtractor
from ssl_bench.intervals import mean_estimate
from ssl_bench.system.transfers import fetched

_TILES_A_ROW = 13
_SMALL_SPREAD = 10.0
# What is drawn and how, not what the variance is.
_NOT_SETTINGS = ("protocol", "facet", "align_to", "grid")

Features = dict[int, Float[Tensor, "_rows _cols _dim"]]


@dataclass(frozen=True)
class Fitted:
    """One block: what was fitted to it, and the maps of the first images.

    Attributes:
        fits: One an image, or one for all.
        masks: Patches that are shown and that the components were fitted to.
    """

    fits: list[Projection]
    maps: list[Map]
    masks: list[Bool[Tensor, "_rows _cols"]]

    def fit(self, image: int) -> Projection:
        return self.fits[image if len(self.fits) > 1 else 0]

    def title(self, layer: int, image: int) -> str:
        """What stands above a map."""
        fit = self.fit(image)
        if fit.is_constant:
            return f"block {layer}: constant"
        spread = f" ({fit.spread:.2g})" if fit.spread < _SMALL_SPREAD else ""
        return f"block {layer}: {float(fit.explained.sum()):.0f} %{spread}"


@dataclass(frozen=True)
class PCA:
    """PCA maps of the first images of a dataset, in colours that agree between blocks.

    Attributes:
        protocol: "image" fits the components on each image, "batch" on all drawn images, "dataset"
            on all images of the dataset; with these two a colour means the same in every image.
        facet: What is projected: token, token_normed, key, query or value.
        num_images: How many images are drawn, from the first one on.
        image_size: Longer side in pixels; both sides are rounded to multiples of the patch.
        background: "keep", or "first_component": patches on one side of the first component are
            left out and the components fitted again without them; see `foreground`.
        align_to: Folder of pictures, or name of a checkpoint that was probed into the same folder
            with the same protocol, whose colours are taken over; null for the checkpoint's own
            last block that varies.
        grid: What the overview is saved as: png, svg or both.
    """

    protocol: Literal["image", "batch", "dataset"] = "image"
    facet: Literal["token", "token_normed", "key", "query", "value"] = "token"
    num_images: Count = 8
    image_size: Pixels = 224
    background: Literal["keep", "first_component"] = "keep"
    align_to: FilePath | None = None
    grid: Literal["png", "svg", "both"] = "png"

    task = "pca"
    role = "images"

    def __post_init__(self) -> None:
        check_fields(self, "probe")
        if self.protocol == "dataset" and self.background != "keep":
            raise ConfigurationError(
                "probe.background must be keep for probe.protocol=dataset, whose images pass the "
                f"encoder once, got {self.background!r}"
            )

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [(layer, self.facet, "explained_variance") for layer in layers]

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.images()

    def training_images(self, dataset: Dataset) -> None:
        """Nothing is fitted to other images than those that are scored."""

    def settings(self) -> dict[str, Any]:
        return {name: v for name, v in asdict(self).items() if name not in _NOT_SETTINGS}

    def pictures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        del seed
        together = [f"{blocks_name(layers)}.{kind}" for kind in self._grid_kinds]
        shown = {f"{self._kind}/{name}": layers for name in (*together, FILE)}
        for image_id in images.ids[: self.num_images]:
            for layer in layers:
                shown[f"{self._kind}/block{layer:02d}/{image_name(image_id)}"] = [layer]
        return shown

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Draw the maps, then score the variance that three components explain."""
        images = self.split(context.dataset)
        samples = [images[i] for i in range(min(self.num_images, len(images)))]
        reference = self._given_reference(context, [sample.image_id for sample in samples])
        features, moments = self._features(images, samples, context)
        blocks = {
            layer: self._fit([f[layer] for f in features], moments.get(layer))
            for layer in context.layers
        }
        self._draw(blocks, samples, reference, context)
        num_images = len(images) if self.protocol == "dataset" else len(samples)
        for layer, block in blocks.items():
            yield self._score(layer, block, num_images)

    def _features(
        self, images: ImageSet, samples: Sequence[Sample], context: ProbeContext
    ) -> tuple[list[Features], dict[int, Moments]]:
        """Features of the drawn images, and sums over all where the protocol wants them."""
        extractor = FeatureExtractor(
            context.encoder,
            layers=context.layers,
            facets=(self.facet,),
            device=context.device,
            dtype=context.dtype,
        )
        whole = self.protocol == "dataset"
        total = len(images) if whole else len(samples)
        kept: list[Features] = []
        moments = {layer: Moments() for layer in context.layers} if whole else {}
        for number in context.progress(range(total), "pca", total):
            sample = samples[number] if number < len(samples) else images[number]
            image = resize(sample.image, self.image_size, extractor.patch_size)
            blocks, sums = extractor.unchecked(image[None])
            sums, *maps = fetched([sums, *(facets[self.facet][0] for facets in blocks.values())])
            extractor.check(sums, [sample.image_id])
            found = dict(zip(blocks, maps, strict=True))
            for layer, sums in moments.items():
                sums.add(found[layer].flatten(0, 1))
            if number < len(samples):
                kept.append(found)
        return kept, moments

    def _fit(
        self, features: list[Float[Tensor, "_rows _cols _dim"]], sums: Moments | None
    ) -> Fitted:
        together = [features] if self.protocol != "image" else [[f] for f in features]
        fits, maps, masks = [], [], []
        for group in together:
            shown = self._masks(group)
            tokens = torch.cat([f[mask] for f, mask in zip(group, shown, strict=True)])
            fits.append(fit_projection(tokens) if sums is None else sums.projection())
            # Outside the masks 0, where it has no say in an alignment.
            some = [fits[-1].apply(f) * m[..., None] for f, m in zip(group, shown, strict=True)]
            maps += oriented(some, shown)
            masks += shown
        return Fitted(fits, maps, masks)

    def _masks(
        self, group: Sequence[Float[Tensor, "_rows _cols _dim"]]
    ) -> list[Bool[Tensor, "_rows _cols"]]:
        if self.background == "first_component":
            return foreground(group)
        return [torch.ones(f.shape[:2], dtype=torch.bool) for f in group]

    def _score(self, layer: int, block: Fitted, num_images: int) -> Score:
        by_component = torch.stack([fit.explained for fit in block.fits]).numpy()
        explained = by_component.sum(1)
        ci95 = mean_estimate(explained).ci95() if self.protocol == "image" else None
        details: dict[str, Any] = {
            "num_constant": int((explained == 0).sum()),
            "explained_by_component": by_component.mean(0).tolist(),
            "spread_percent": float(np.mean([fit.spread for fit in block.fits])),
        }
        if self.background != "keep":
            shown = torch.cat([mask.flatten() for mask in block.masks]).double().mean()
            details["foreground_percent"] = 100 * float(shown)
        value = float(explained.mean())
        return Score(layer, self.facet, "explained_variance", value, ci95, num_images, details)

    def _given_reference(self, context: ProbeContext, images: Sequence[str]) -> MapReference | None:
        """Maps of another checkpoint if asked for, else those of an earlier run of this one."""
        if self.align_to is not None:
            folder = reference_folder(self.align_to, context.artifacts.parent, self._kind)
            given = load_reference(folder)
            context.say(f"pca: colours aligned with {given.source}")
            return given
        own = context.artifacts / self._kind
        if not (own / FILE).is_file():
            return None
        earlier = load_reference(own)
        is_replaced = context.overwrite and max(context.layers) >= earlier.layer
        return None if is_replaced or not earlier.covers(images) else earlier

    @property
    def _grid_kinds(self) -> tuple[str, ...]:
        return ("png", "svg") if self.grid == "both" else (self.grid,)

    @property
    def _kind(self) -> str:
        """Name of the folder of the pictures."""
        more = [self.facet] if self.facet != "token" else []
        more += ["foreground"] if self.background != "keep" else []
        return "-".join([self.protocol, *more])

    def _draw(
        self,
        blocks: Mapping[int, Fitted],
        samples: Sequence[Sample],
        given: MapReference | None,
        context: ProbeContext,
    ) -> None:
        folder = context.artifacts / self._kind
        ids = [sample.image_id for sample in samples]
        own = self._reference(blocks, len(samples))
        reference = own if given is None else given.of(ids)
        maps = {layer: self._aligned(block.maps, reference) for layer, block in blocks.items()}
        if given is None or self.align_to is not None:
            kept = dict(zip(ids, self._aligned(own, reference), strict=True))
            MapReference(context.encoder.name, max(blocks), kept).save(folder)
        pictures = self._pictures(blocks, self._colours(blocks, maps), samples)
        self._draw_tiles(pictures, samples, folder)
        self._draw_grid(pictures, samples, folder, context)
        for layer, block in blocks.items():
            if constant := sum(fit.is_constant for fit in block.fits):
                context.say(
                    f"pca: block {layer}: {constant} of {len(block.fits)} maps are constant"
                )

    def _reference(self, blocks: Mapping[int, Fitted], num_images: int) -> list[Map]:
        """Of each image the map of the last block that is not constant."""
        found = []
        for i in range(num_images):
            varying = [layer for layer, b in blocks.items() if not b.fit(i).is_constant]
            found.append(blocks[max(varying or blocks)].maps[i])
        return found

    def _aligned(self, maps: list[Map], reference: list[Map]) -> list[Map]:
        if self.protocol != "image":
            return aligned(maps, reference)
        return [aligned([m], [r])[0] for m, r in zip(maps, reference, strict=True)]

    def _colours(
        self, blocks: Mapping[int, Fitted], maps: Mapping[int, list[Map]]
    ) -> dict[int, list[Colours]]:
        """One stretch for all blocks, of each image alone where components are of an image."""
        masks = {layer: block.masks for layer, block in blocks.items()}
        if self.protocol != "image":
            return as_colours(maps, masks)
        found: dict[int, list[Colours]] = {layer: [] for layer in maps}
        for i in range(len(next(iter(maps.values())))):
            some = as_colours(
                {layer: [column[i]] for layer, column in maps.items()},
                {layer: [column[i]] for layer, column in masks.items()},
            )
            for layer, colours in some.items():
                found[layer] += colours
        return found

    def _pictures(
        self,
        blocks: Mapping[int, Fitted],
        colours: Mapping[int, list[Colours]],
        samples: Sequence[Sample],
    ) -> dict[int, list[Picture]]:
        return {
            layer: [
                Picture(colours[layer][i], (block.title(layer, i),)) for i in range(len(samples))
            ]
            for layer, block in blocks.items()
        }

    def _draw_tiles(
        self, pictures: Mapping[int, list[Picture]], samples: Sequence[Sample], folder: Path
    ) -> None:
        photographs = photographs_of(samples)
        for layer, column in pictures.items():
            for sample, *both in zip(samples, photographs, column, strict=True):
                tiles = [titled(picture.image, *picture.titles) for picture in both]
                sheet([tiles], folder / f"block{layer:02d}" / image_name(sample.image_id))

    def _draw_grid(
        self,
        pictures: Mapping[int, list[Picture]],
        samples: Sequence[Sample],
        folder: Path,
        context: ProbeContext,
    ) -> None:
        of_images = [
            [photograph, *(column[i] for column in pictures.values())]
            for i, photograph in enumerate(photographs_of(samples))
        ]
        # Several images in a row where each has few blocks.
        step = max(1, _TILES_A_ROW // (1 + len(pictures)))
        rows = [
            [picture for row in of_images[i : i + step] for picture in row]
            for i in range(0, len(of_images), step)
        ]
        name = blocks_name(list(pictures))
        line = f"{context.encoder.name}: {self._legend()}"
        if "png" in self._grid_kinds:
            tiles = [[titled(p.image, *p.titles) for p in row] for row in rows]
            sheet([[heading(line)], *tiles], folder / f"{name}.png")
        if "svg" in self._grid_kinds:
            svg_sheet(rows, folder / f"{name}.svg", line)

    def _legend(self) -> str:
        """What the colours of the overview are."""
        fitted = {
            "image": "fitted to each image",
            "batch": f"fitted to these {self.num_images} images",
            "dataset": "fitted to the whole dataset",
        }
        left_out = ", one side of the first component left out" if self.background != "keep" else ""
        return (
            f"three principal components of {self.facet} features, "
            f"{fitted[self.protocol]}{left_out}; above, their share of the variance "
            f"(and the variance in percent of the mean square, where below {_SMALL_SPREAD:g})"
        )


def photographs_of(samples: Sequence[Sample]) -> list[Picture]:
    """The photographs under their names."""
    return [Picture(sample.image, (sample.image_id,)) for sample in samples]


def resize(
    image: UInt8[np.ndarray, "height width 3"], longer_side: int, patch: int
) -> Float[Tensor, "3 rows_px cols_px"]:
    """Resize an image so that its longer side is as asked and the patch divides both.

    Returns:
        RGB in [0, 1].
    """
    scale = longer_side / max(image.shape[:2])
    height, width = (max(patch, round(side * scale / patch) * patch) for side in image.shape[:2])
    resized = Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(resized).copy()).permute(2, 0, 1).float() / 255
