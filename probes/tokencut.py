"""TokenCut: does the normalised cut of a block's features find an object?"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from probes.discovery import Cut, Discovery, PatchGrid, cut_out, discover, lost, maskcut
from probes.discovery_log import Cell, DiscoveryLog, ImageResult
from probes.discovery_panels import panel
from probes.discovery_scores import cell_name, corloc_score
from probes.pictures import sheet
from probes.spectral import GraphPool
from probes.spectral_batched import solve_batch
from ssl_bench import __version__
from ssl_bench.data.samples import Dataset, ImageSet, Sample
from ssl_bench.errors import CheckpointError, ConfigurationError, DataError
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.features import Facet, FeatureExtractor
from ssl_bench.metrics import is_hit

FACETS: tuple[Facet, ...] = ("key", "query", "value", "token", "token_normed")
METHODS = ("tokencut", "lost", "maskcut")
Graphs = dict[str, Float[Tensor, "rows cols dim"]]


@dataclass(frozen=True)
class TokenCut(Cut):
    """CorLoc of one box an image, for every asked block and facet.

    Attributes:
        protocol: "reference" unless an option says otherwise; then the changed options are added.
        facet: Which features make the graph, one or several of key, query, value, token and
            token_normed.
        method: tokencut, lost, or maskcut, whose first mask counts.
        panels: How many images get a picture, from the first one on.
    """

    protocol: str = "reference"
    facet: str | Sequence[str] = "key"
    method: Literal["tokencut", "lost", "maskcut"] = "tokencut"
    panels: int = 8

    task = "tokencut"
    role = "discovery"

    def __post_init__(self) -> None:
        named = self.protocol.split(",")[0]
        _require(named == "reference", f"protocol must be reference, got {named}")
        _require(self.method in METHODS, f"method must be one of {METHODS}, got {self.method}")
        _require(-1 <= self.tau < 1, f"tau must lie in [-1, 1), got {self.tau}")
        _require(0 < self.eps < 1, f"eps must lie in (0, 1), got {self.eps}")
        _require(self.connectivity in (4, 8), f"connectivity: 4 or 8, got {self.connectivity}")
        _require(self.panels >= 0, f"panels must be >= 0, got {self.panels}")
        unknown = [facet for facet in self._asked_facets() if facet not in FACETS]
        wrong = f"facet must be among {', '.join(FACETS)}, got {', '.join(unknown) or 'none'}"
        _require(bool(self._asked_facets()) and not unknown, wrong)
        # Frozen for everybody else: a changed option must not pass for the reference in a table.
        object.__setattr__(self, "protocol", ", ".join([named, *self._changed_options()]))

    @property
    def facets(self) -> tuple[Facet, ...]:
        return tuple(facet for facet in FACETS if facet in self._asked_facets())

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [(layer, facet, "corloc") for layer in layers for facet in self.facets]

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.discovery()

    def settings(self) -> dict[str, Any]:
        left_out = ("protocol", "facet", "panels")
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all layers and facets after one forward pass an image.

        What each image gave is kept at once and not computed again by a later run.

        Raises:
            DataError: no image has a box to compare with.
            CheckpointError: the encoder gives NaN for an image.
        """
        images = self.split(context.dataset)
        folder = context.artifacts / self.protocol.replace(", ", "_")
        key = self._log_key(images, context)
        log = DiscoveryLog(folder, key, forget=context.overwrite)
        self._discover_all(images, log, context)
        results = [log.images[image_id] for image_id in images.ids]
        if not any(result.num_boxes for result in results):
            raise DataError(
                f"none of the {len(results)} images of {images.name} has a box to score with; "
                f"the boxes that were found are in {log.path}"
            )
        for layer, facet, _ in self.cells(context.layers):
            yield corloc_score(layer, facet, results, seed=context.seed)

    def find(self, features: Float[Tensor, "rows cols dim"], grid: PatchGrid) -> list[Discovery]:
        """What the chosen method finds in one image, the object that counts first."""
        if self.method == "lost":
            return [lost(features, grid, self)]
        if self.method == "maskcut":
            return maskcut(features, grid, self)
        return [discover(features, grid, self)]

    def _discover_all(self, images: ImageSet, log: DiscoveryLog, context: ProbeContext) -> None:
        names = [cell_name(layer, facet) for layer, facet, _ in self.cells(context.layers)]
        pending = [i for i, image_id in enumerate(images.ids) if not log.has(image_id, names)]
        extractor = FeatureExtractor(
            context.encoder,
            layers=context.layers,
            facets=self.facets,
            device=context.device,
            dtype=context.dtype,
            pad=True,
        )
        with GraphPool(torch.get_num_threads()) as pool:
            for index in context.progress(pending, self.method, len(pending)):
                sample = images[index]
                height, width = sample.image.shape[:2]
                grid = PatchGrid(height, width, extractor.patch_size)
                found = self._find_all(extract(extractor, sample), grid, pool)
                if index < self.panels:
                    _draw(sample, found, grid, log.path.parent)
                log.add(sample.image_id, image_result(sample, found))

    def _find_all(
        self, graphs: Graphs, grid: PatchGrid, pool: GraphPool
    ) -> dict[str, list[Discovery]]:
        features = list(graphs.values())
        on_device = features[0].is_cuda and self.method == "tokencut" and not self.weighted
        if on_device:
            tokens = torch.stack([self.graph_tokens(f, grid) for f in features])
            spectra = solve_batch(tokens, tau=self.tau, eps=self.eps)
            found = pool.map(lambda spectrum: [cut_out(spectrum, grid, self)], spectra)
        else:
            found = pool.map(lambda f: self.find(f, grid), features)
        return dict(zip(graphs, found, strict=True))

    def _asked_facets(self) -> Sequence[str]:
        return (self.facet,) if isinstance(self.facet, str) else self.facet

    def _changed_options(self) -> list[str]:
        defaults = {field.name: field.default for field in fields(self)}
        return [f"{k}={v}" for k, v in self.settings().items() if v != defaults[k]]

    def _log_key(self, images: ImageSet, context: ProbeContext) -> dict[str, Any]:
        return {
            "checkpoint_sha256": context.encoder.sha256,
            "dataset_fingerprint": images.fingerprint(),
            "dtype": str(context.dtype),
            "settings": self.settings(),
            "version": __version__,
        }


def extract(extractor: FeatureExtractor, sample: Sample) -> Graphs:
    """Features of one image by cell, at its native size.

    Raises:
        CheckpointError: they are not finite.
    """
    image = torch.from_numpy(sample.image.copy()).permute(2, 0, 1).float() / 255
    try:
        features = extractor(image[None])
    except CheckpointError as error:
        raise CheckpointError(f"{sample.image_id}: {error}") from error
    return {
        cell_name(layer, facet): values[0]
        for layer, facets in features.items()
        for facet, values in facets.items()
    }


def image_result(sample: Sample, found: dict[str, list[Discovery]]) -> ImageResult:
    """What is kept of an image."""
    boxes = np.zeros((0, 4)) if sample.boxes is None else sample.boxes
    height, width = sample.image.shape[:2]
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    return ImageResult(
        num_boxes=len(boxes),
        largest_box=100 * float(areas.max(initial=0)) / (height * width),
        cells={name: _cell(objects, boxes) for name, objects in found.items()},
    )


def _cell(objects: list[Discovery], boxes: Float64[np.ndarray, "boxes 4"]) -> Cell:
    first, *others = objects
    cell: Cell = {
        "box": first.box.astype(int).tolist(),
        "hit": is_hit(first.box, boxes),
        "degenerate": first.degenerate,
    }
    if first.eigenvalue is not None:
        cell |= {"eigenvalue": first.eigenvalue, "gap": first.gap}
    if others:
        cell["further_boxes"] = [other.box.astype(int).tolist() for other in others]
    return cell


def _draw(sample: Sample, found: dict[str, list[Discovery]], grid: PatchGrid, folder: Path) -> None:
    for name, objects in found.items():
        layer, facet = name.split("/")
        row = panel(sample, objects[0], f"block {layer}, {facet}", grid.patch_size)
        picture = f"{sample.image_id.replace('/', '_')}.png"
        sheet([row], folder / f"block{int(layer):02d}_{facet}" / picture)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigurationError(f"probe.{message}")
