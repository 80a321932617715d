"""PCA maps with one encoder on one dataset: features, components, pictures, scores."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from PIL import Image
from torch import Tensor

from probes.features.moments import Moments
from probes.pca.alignment import MapReference, load_reference, reference_folder
from probes.pca.components import (
    Map,
    Projection,
    aligned,
    as_colours,
    fit_projection,
    foreground,
    oriented,
    projection_of,
)
from probes.pca.drawing import SMALL_SPREAD, draw_overview, draw_tiles
from probes.pca.probe import PCA
from probes.pictures import Picture
from ssl_bench.data.limited import sampled_numbers
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.errors import CheckpointError
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.features import FeatureExtractor
from ssl_bench.intervals import mean_estimate
from ssl_bench.system.transfers import fetched

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
        spread = f" ({fit.spread:.2g})" if fit.spread < SMALL_SPREAD else ""
        return f"block {layer}: {float(fit.explained.sum()):.0f} %{spread}"


@dataclass(frozen=True)
class PCARun:
    """What `probe` describes, on the encoder and the dataset of `context`."""

    probe: PCA
    context: ProbeContext

    def scores(self) -> Iterator[Score]:
        """See `PCA.run`."""
        images = self.probe.split(self.context.dataset)
        drawn = sampled_numbers(images.ids, self.probe.panels)
        if len(drawn) < len(images):
            words = f"pca: {len(drawn)} of {len(images)} images"
            self.context.say(f"{words}; --pictures {len(images)} takes all")
        samples = [images[number] for number in drawn]
        given = self._given_reference()
        layers = self._with_last
        try:
            features, moments = self._features(images, samples, layers)
        except CheckpointError:
            if layers == self.context.layers:
                raise
            # A last block that is not finite lends its colours to nobody.
            layers = self.context.layers
            features, moments = self._features(images, samples, layers)
        blocks = {
            layer: self._fit([f[layer] for f in features], moments.get(layer)) for layer in layers
        }
        self._draw(blocks, samples, given)
        num_images = len(images) if self.probe.protocol == "dataset" else len(samples)
        for layer in self.context.layers:
            yield self._score(layer, blocks[layer], num_images)

    @property
    def _with_last(self) -> tuple[int, ...]:
        """The asked blocks and the last of their kind, so that colours hang on no other command."""
        encoder = self.context.encoder
        kinds = [layers for _, layers in encoder.stages(range(encoder.depth))]
        (last,) = (layers[-1] for layers in kinds if self.context.layers[0] in layers)
        return tuple(dict.fromkeys((*self.context.layers, last)))

    def _features(
        self, images: ImageSet, samples: Sequence[Sample], layers: Sequence[int]
    ) -> tuple[list[Features], dict[int, Moments]]:
        """Features of the drawn images, and sums over all where the protocol wants them."""
        extractor = FeatureExtractor(
            self.context.encoder,
            layers=layers,
            facets=(self.probe.scored_facet,),
            device=self.context.device,
            dtype=self.context.dtype,
        )
        whole = self.probe.protocol == "dataset"
        total = len(images) if whole else len(samples)
        shown = {sample.image_id for sample in samples}
        kept: list[Features] = []
        moments = {layer: Moments() for layer in layers} if whole else {}
        for number in self.context.progress(range(total), "pca", total):
            sample = images[number] if whole else samples[number]
            image = self._resized(sample.image, extractor.patch_size)
            blocks, sums = extractor.unchecked(image[None])
            sums, *maps = fetched(
                [sums, *(facets[self.probe.scored_facet][0] for facets in blocks.values())]
            )
            extractor.check(sums, [sample.image_id])
            found = dict(zip(blocks, maps, strict=True))
            for layer, sums in moments.items():
                sums.add(found[layer].flatten(0, 1))
            if not whole or sample.image_id in shown:
                kept.append(found)
        return kept, moments

    def _resized(
        self, image: UInt8[np.ndarray, "height width 3"], patch: int
    ) -> Float[Tensor, "3 rows_px cols_px"]:
        if self.probe.squash is not None:
            return _as_tensor(image, self.probe.squash, self.probe.squash)
        fitted = self.probe.shown_to(self.context.encoder.native_size)
        assert fitted.image_size is not None
        return resize(image, fitted.image_size, patch)

    def _fit(
        self, features: list[Float[Tensor, "_rows _cols _dim"]], sums: Moments | None
    ) -> Fitted:
        together = [features] if self.probe.protocol != "image" else [[f] for f in features]
        fits, maps, masks = [], [], []
        for group in together:
            shown = self._masks(group)
            tokens = torch.cat([f[mask] for f, mask in zip(group, shown, strict=True)])
            fits.append(fit_projection(tokens) if sums is None else projection_of(sums))
            # Outside the masks 0, where it has no say in an alignment.
            some = [fits[-1].apply(f) * m[..., None] for f, m in zip(group, shown, strict=True)]
            maps += oriented(some, shown)
            masks += shown
        return Fitted(fits, maps, masks)

    def _masks(
        self, group: Sequence[Float[Tensor, "_rows _cols _dim"]]
    ) -> list[Bool[Tensor, "_rows _cols"]]:
        if self.probe.background == "first_component":
            return foreground(group)
        return [torch.ones(f.shape[:2], dtype=torch.bool) for f in group]

    def _score(self, layer: int, block: Fitted, num_images: int) -> Score:
        by_component = torch.stack([fit.explained for fit in block.fits]).numpy()
        explained = by_component.sum(1)
        ci95 = mean_estimate(explained).ci95() if self.probe.protocol == "image" else None
        details: dict[str, Any] = {
            "num_constant": int((explained == 0).sum()),
            "explained_by_component": by_component.mean(0).tolist(),
            "spread_percent": float(np.mean([fit.spread for fit in block.fits])),
        }
        if self.probe.background != "keep":
            shown = torch.cat([mask.flatten() for mask in block.masks]).double().mean()
            details["foreground_percent"] = 100 * float(shown)
        value = float(explained.mean())
        return Score(
            layer, self.probe.scored_facet, "explained_variance", value, ci95, num_images, details
        )

    def _given_reference(self) -> MapReference | None:
        """Maps of another checkpoint, if they are asked for."""
        if self.probe.align_to is None:
            return None
        folder = reference_folder(self.probe.align_to, self.context.artifacts, self.probe.kind)
        given = load_reference(folder)
        self.context.say(f"pca: colours aligned with {given.source}")
        return given

    def _draw(
        self,
        blocks: Mapping[int, Fitted],
        samples: Sequence[Sample],
        given: MapReference | None,
    ) -> None:
        folder = self.context.artifacts / self.probe.kind
        ids = [sample.image_id for sample in samples]
        own = self._reference(blocks, len(samples))
        reference = own if given is None else given.of(ids)
        kept = dict(zip(ids, self._aligned(own, reference), strict=True))
        MapReference(self.context.encoder.name, kept).save(folder)
        pictures = {
            layer: self._pictures(layer, blocks[layer], reference, samples)
            for layer in self.context.layers
        }
        draw_tiles(pictures, samples, folder)
        name = self.context.encoder.name
        draw_overview(self.probe, name, pictures, samples, folder)
        for layer in self.context.layers:
            fits = blocks[layer].fits
            if constant := sum(fit.is_constant for fit in fits):
                self.context.say(f"pca: block {layer}: {constant} of {len(fits)} maps are constant")

    def _reference(self, blocks: Mapping[int, Fitted], num_images: int) -> list[Map]:
        """Of each image the map of the last block that is not constant."""
        found = []
        for i in range(num_images):
            varying = [layer for layer, b in blocks.items() if not b.fit(i).is_constant]
            found.append(blocks[max(varying or blocks)].maps[i])
        return found

    def _aligned(self, maps: list[Map], reference: list[Map]) -> list[Map]:
        if self.probe.protocol != "image":
            return aligned(maps, reference)
        return [aligned([m], [r])[0] for m, r in zip(maps, reference, strict=True)]

    def _pictures(
        self, layer: int, block: Fitted, reference: list[Map], samples: Sequence[Sample]
    ) -> list[Picture]:
        maps = self._aligned(block.maps, reference)
        if self.probe.protocol == "image":
            pairs = zip(maps, block.masks, strict=True)
            colours = [as_colours([one], [mask])[0] for one, mask in pairs]
        else:
            colours = as_colours(maps, block.masks)
        return [
            Picture(colours[i], (block.title(layer, i),), self._shape(sample))
            for i, sample in enumerate(samples)
        ]

    def _shape(self, sample: Sample) -> tuple[int, int] | None:
        """Of an image that is squashed, so that its map is as wide as its photograph."""
        if self.probe.squash is None:
            return None
        height, width = sample.image.shape[:2]
        return height, width


def resize(
    image: UInt8[np.ndarray, "height width 3"], longer_side: int, patch: int
) -> Float[Tensor, "3 rows_px cols_px"]:
    """Resize an image so that its longer side is as asked and the patch divides both.

    Returns:
        RGB in [0, 1].
    """
    scale = longer_side / max(image.shape[:2])
    height, width = (max(patch, round(side * scale / patch) * patch) for side in image.shape[:2])
    return _as_tensor(image, height, width)


def _as_tensor(
    image: UInt8[np.ndarray, "height width 3"], height: int, width: int
) -> Float[Tensor, "3 {height} {width}"]:
    resized = Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(resized).copy()).permute(2, 0, 1).float() / 255
