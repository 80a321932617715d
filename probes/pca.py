"""PCA maps: three principal components of the patch features as red, green and blue."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Float64, UInt8
from PIL import Image
from torch import Tensor

from probes.pictures import sheet, titled
from ssl_bench.data.samples import Dataset, ImageSet, Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.features import FeatureExtractor
from ssl_bench.metrics import bootstrap_ci95

NUM_COMPONENTS = 3


@dataclass(frozen=True)
class Projection:
    """Where features are projected to.

    Attributes:
        mean: Subtracted first.
        components: Unit rows, by falling variance; the entry of largest magnitude is positive.
        explained: Percent of the variance in the three components; 0 for constant features.
    """

    mean: Float64[Tensor, " dim"]
    components: Float64[Tensor, "components dim"]
    explained: float

    def apply(
        self, features: Float[Tensor, "rows cols dim"]
    ) -> Float64[Tensor, "rows cols components"]:
        return (features.double() - self.mean) @ self.components.T


def fit_projection(tokens: Float[Tensor, "tokens dim"]) -> Projection:
    """Principal components of tokens in float64, with signs that do not depend on the solver."""
    centred = tokens.double() - tokens.double().mean(0)
    variances, vectors = torch.linalg.eigh(centred.T @ centred)
    components = vectors[:, -NUM_COMPONENTS:].flip(1).T
    largest = components.gather(1, components.abs().argmax(1, keepdim=True))
    total = float(variances.clamp(min=0).sum())
    top = float(variances[-NUM_COMPONENTS:].clamp(min=0).sum())
    scale = float(tokens.double().square().sum())
    explained = 100.0 * top / total if total > 1e-12 * scale else 0.0
    return Projection(tokens.double().mean(0), components * largest.sign(), explained)


def as_colours(
    maps: Sequence[Float64[Tensor, "_rows _cols 3"]],
) -> list[UInt8[np.ndarray, "_rows _cols 3"]]:
    """Stretch each component over all given maps from black to full colour; constant is grey."""
    values = torch.cat([m.reshape(-1, NUM_COMPONENTS) for m in maps])
    low, high = values.amin(0), values.amax(0)
    span = high - low
    shares = [torch.where(span > 0, (m - low) / span.clamp(min=1e-300), 0.5) for m in maps]
    return [(255 * share).round().to(torch.uint8).numpy() for share in shares]


@dataclass(frozen=True)
class PCA:
    """PCA maps of the first images of a dataset.

    Attributes:
        protocol: "image" fits the components on each image, "batch" on all of them together, so
            that a colour means the same in every map.
        facet: What is projected: token, token_normed, key, query or value.
        num_images: How many images, from the first one on.
        image_size: Longer side in pixels; both sides are rounded to multiples of the patch.
    """

    protocol: str = "image"
    facet: Literal["token", "token_normed", "key", "query", "value"] = "token"
    num_images: int = 8
    image_size: int = 224

    task = "pca"
    role = "images"

    def __post_init__(self) -> None:
        if self.protocol not in ("image", "batch"):
            raise ConfigurationError(f"probe.protocol must be image or batch, got {self.protocol}")
        if self.num_images < 1:
            raise ConfigurationError(f"probe.num_images must be >= 1, got {self.num_images}")

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [(layer, self.facet, "explained_variance") for layer in layers]

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.images()

    def settings(self) -> dict[str, Any]:
        return {name: v for name, v in asdict(self).items() if name not in ("protocol", "facet")}

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score the variance that three components explain and draw the maps."""
        images = self.split(context.dataset)
        samples = [images[i] for i in range(min(self.num_images, len(images)))]
        features = self._features(samples, context)
        columns = {}
        for layer in context.layers:
            score, columns[layer] = self._score(layer, [f[layer] for f in features], context.seed)
            self._draw_block(layer, samples, columns[layer], context)
            yield score
        self._draw_sheet(samples, columns, context)

    def _features(
        self, samples: Sequence[Sample], context: ProbeContext
    ) -> list[dict[int, Float[Tensor, "rows cols dim"]]]:
        extractor = FeatureExtractor(
            context.encoder,
            layers=context.layers,
            facets=(self.facet,),
            device=context.device,
            dtype=context.dtype,
        )
        found = []
        for sample in context.progress(samples, "pca", len(samples)):
            image = resize(sample.image, self.image_size, extractor.patch_size)
            blocks = extractor(image[None].to(context.device), [sample.image_id])
            found.append({layer: facets[self.facet][0].cpu() for layer, facets in blocks.items()})
        return found

    def _score(
        self, layer: int, features: list[Float[Tensor, "_rows _cols dim"]], seed: int
    ) -> tuple[Score, list[UInt8[np.ndarray, "_rows _cols 3"]]]:
        flat = [f.flatten(0, 1) for f in features]
        if self.protocol == "batch":
            shared = fit_projection(torch.cat(flat))
            colours = as_colours([shared.apply(f) for f in features])
            explained = np.array([shared.explained])
            ci95 = None
        else:
            fits = [fit_projection(tokens) for tokens in flat]
            colours = [as_colours([fit.apply(f)])[0] for fit, f in zip(fits, features, strict=True)]
            explained = np.array([fit.explained for fit in fits])
            ci95 = bootstrap_ci95(len(fits), lambda i: float(explained[i].mean()), seed=seed)
        details = {"num_constant": int((explained == 0).sum())}
        value = float(explained.mean())
        score = Score(layer, self.facet, "explained_variance", value, ci95, len(features), details)
        return score, colours

    def _draw_block(
        self,
        layer: int,
        samples: Sequence[Sample],
        colours: Sequence[UInt8[np.ndarray, "_rows _cols 3"]],
        context: ProbeContext,
    ) -> None:
        folder = context.artifacts / self.protocol / f"block{layer:02d}"
        for sample, colour in zip(samples, colours, strict=True):
            row = [titled(sample.image, sample.image_id), titled(colour, f"block {layer}")]
            sheet([row], folder / f"{sample.image_id.replace('/', '_')}.png")

    def _draw_sheet(
        self,
        samples: Sequence[Sample],
        columns: dict[int, list[UInt8[np.ndarray, "_rows _cols 3"]]],
        context: ProbeContext,
    ) -> None:
        rows = [
            [
                titled(sample.image, sample.image_id),
                *(titled(maps[i], f"block {layer}") for layer, maps in columns.items()),
            ]
            for i, sample in enumerate(samples)
        ]
        name = "-".join(map(str, sorted({min(columns), max(columns)})))
        sheet(rows, context.artifacts / self.protocol / f"blocks-{name}.png")


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
