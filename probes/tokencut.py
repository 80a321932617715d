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
from probes.discovery_gallery import Gallery
from probes.discovery_log import Cell, DiscoveryLog, ImageResult, pack_mask
from probes.discovery_panels import panel, save_masks
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
        max_objects: How many masks maskcut looks for in an image.
        panels: How many images get a picture of their own, from the first one on, and how many of
            each kind (hits, misses, degenerate) are on the contact sheet of a block.
    """

    protocol: str = "reference"
    facet: str | Sequence[str] = "key"
    method: Literal["tokencut", "lost", "maskcut"] = "tokencut"
    max_objects: int = 3
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
        _require(self.max_objects >= 1, f"max_objects must be >= 1, got {self.max_objects}")
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
        left_out = {"protocol", "facet", "panels"}
        if self.method != "maskcut":
            left_out.add("max_objects")
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all layers and facets after one forward pass an image.

        What each image gave is kept at once and not computed again by a later run. Images that
        come without ground truth are not scored; their masks are saved as PNG.

        Raises:
            DataError: a file cannot be read, or the images have ground truth but no box in it.
            CheckpointError: the encoder gives NaN for an image.
        """
        images = self.split(context.dataset)
        folder = context.artifacts / self.protocol.replace(", ", "_")
        key = self._log_key(images, context)
        log = DiscoveryLog(folder, key, forget=context.overwrite)
        self._discover_all(images, log, context)
        results = {image_id: log.images[image_id] for image_id in images.ids}
        self._draw_sheets(images, results, folder, context)
        if not self._is_scored(images, list(results.values()), log.path):
            context.say(
                f"{images.name} has no boxes to compare with: CorLoc was not scored; "
                f"masks, pictures and boxes are in {folder}"
            )
            return
        for layer, facet, _ in self.cells(context.layers):
            yield corloc_score(layer, facet, list(results.values()), seed=context.seed)

    def find(self, features: Float[Tensor, "rows cols dim"], grid: PatchGrid) -> list[Discovery]:
        """What the chosen method finds in one image, the object that counts first."""
        if self.method == "lost":
            return [lost(features, grid, self)]
        if self.method == "maskcut":
            return maskcut(features, grid, self, num_masks=self.max_objects)
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
                self._draw(sample, found, grid, log.path.parent, with_panel=index < self.panels)
                log.add(sample.image_id, image_result(sample, found, grid))

    def _draw(
        self,
        sample: Sample,
        found: dict[str, list[Discovery]],
        grid: PatchGrid,
        folder: Path,
        *,
        with_panel: bool,
    ) -> None:
        for name, objects in found.items():
            if sample.boxes is None:
                path = folder / "masks" / _block_name(name) / f"{sample.image_id}.png"
                save_masks(objects, grid, path)
            if with_panel:
                layer, facet = name.split("/")
                row = panel(sample, objects[0], f"block {layer}, {facet}", grid.patch_size)
                picture = f"{sample.image_id.replace('/', '_')}.png"
                sheet([row], folder / _block_name(name) / picture)

    def _draw_sheets(
        self,
        images: ImageSet,
        results: dict[str, ImageResult],
        folder: Path,
        context: ProbeContext,
    ) -> None:
        if not self.panels or not results:
            return
        gallery = Gallery(images, results, context.encoder.patch_size, self.panels)
        cells = self.cells(context.layers)
        for layer, facet, _ in context.progress(cells, "contact sheets", len(cells)):
            name = cell_name(layer, facet)
            where = f"{images.name} {images.split}, {context.encoder.name}"
            title = f"{where}, block {layer}, {facet}, protocol {self.protocol}"
            gallery.draw(name, title, folder / f"{_block_name(name)}.png")

    def _is_scored(self, images: ImageSet, results: Sequence[ImageResult], log: Path) -> bool:
        if any(result.num_boxes for result in results):
            return True
        if results and all(result.num_boxes is None for result in results):
            return False
        raise DataError(
            f"none of the {len(images)} images of {images.name} has a box to "
            f"score with; the boxes that were found are in {log}"
        )

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


def image_result(sample: Sample, found: dict[str, list[Discovery]], grid: PatchGrid) -> ImageResult:
    """What is kept of an image."""
    true = np.zeros((0, 4)) if sample.boxes is None else sample.boxes
    areas = (true[:, 2:] - true[:, :2]).prod(-1)
    return ImageResult(
        num_boxes=None if sample.boxes is None else len(true),
        largest_box=100 * float(areas.max(initial=0)) / (grid.height * grid.width),
        grid=grid.shape,
        cells={name: _cell(objects, sample.boxes) for name, objects in found.items()},
    )


def _cell(objects: list[Discovery], true: Float64[np.ndarray, "boxes 4"] | None) -> Cell:
    first, *others = objects
    cell: Cell = {
        "box": _whole(first.box),
        "mask": pack_mask(first.mask),
        "hit": None if true is None else is_hit(first.box, true),
        "degenerate": first.degenerate,
    }
    if first.eigenvalue is not None:
        cell |= {"eigenvalue": first.eigenvalue, "gap": first.gap}
    if others:
        cell["further_boxes"] = [_whole(other.box) for other in others]
        cell["further_masks"] = [pack_mask(other.mask) for other in others]
    return cell


def _whole(box: Float64[np.ndarray, " 4"]) -> list[int]:
    return box.astype(int).tolist()


def _block_name(name: str) -> str:
    layer, facet = name.split("/")
    return f"block{int(layer):02d}_{facet}"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigurationError(f"probe.{message}")
