"""TokenCut: does the normalised cut of a block's features find an object?"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from probes.features.stream import read_ahead
from probes.pictures import sheet
from probes.tokencut.cuts import Cut, Discovery, PatchGrid, cut_out, discover
from probes.tokencut.extraction import BatchFeatures, extracted, grid_of, require
from probes.tokencut.files import DiscoveryFiles
from probes.tokencut.gallery import Gallery
from probes.tokencut.log import DiscoveryLog, ImageResult, image_result
from probes.tokencut.lost import lost
from probes.tokencut.maskcut import MaskCutSearch, maskcut, search_together
from probes.tokencut.panels import panel, save_masks
from probes.tokencut.scores import cell_name, corloc_score
from probes.tokencut.shape_batches import same_shape
from probes.tokencut.spectral.eigensolver import FiedlerVector, GraphPool
from probes.tokencut.spectral.eigensolver_batched import solve_batch
from ssl_bench import __version__
from ssl_bench.composition.fields import Count, CountOrZero, check_fields
from ssl_bench.composition.presets import changed_settings
from ssl_bench.data.samples import Dataset, ImageSet, Sample
from ssl_bench.errors import DataError
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.features import FeatureExtractor
from ssl_bench.layers import Facet
from ssl_bench.results import encoder_id

FACETS: tuple[Facet, ...] = ("key", "query", "value", "token", "token_normed")
TOKENS_A_BATCH = 8192
_DECODERS = 4


@dataclass(frozen=True)
class TokenCut(Cut):
    """CorLoc of one box an image, for every asked block and facet.

    Attributes:
        protocol: That of the reference code. Changed options stand beside it in tables.
        facet: Which features make the graph, one or several of key, query, value, token and
            token_normed.
        method: tokencut, lost, or maskcut, whose first mask counts.
        max_objects: Rounds of maskcut in an image, each of which gives a mask at most.
        panels: How many images get a picture of their own, from the first one on, and how many of
            each kind (hits, misses, degenerate) are on the contact sheet of a block.
    """

    protocol: Literal["reference"] = "reference"
    facet: str | Sequence[str] = "key"
    method: Literal["tokencut", "lost", "maskcut"] = "tokencut"
    max_objects: Count = 3
    panels: CountOrZero = 8

    task = "tokencut"
    role = "discovery"
    keeps_images = True

    def __post_init__(self) -> None:
        check_fields(self, "probe")
        # MaskCut's painted patches have cosine 0 with all: a lower tau would link them to all.
        require(
            self.method != "maskcut" or self.tau >= 0,
            f"tau must lie in [0, 1) for maskcut, got {self.tau}",
        )
        unknown = [facet for facet in self._asked_facets() if facet not in FACETS]
        wrong = f"facet must be among {', '.join(FACETS)}, got {', '.join(unknown) or 'none'}"
        require(bool(self._asked_facets()) and not unknown, wrong)

    @property
    def _folder(self) -> str:
        changed = [f"{name}={value}" for name, value in changed_settings(self).items()]
        return "_".join([self.protocol, *changed])

    @property
    def facets(self) -> tuple[Facet, ...]:
        return tuple(facet for facet in FACETS if facet in self._asked_facets())

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [(layer, facet, "corloc") for layer in layers for facet in self.facets]

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.discovery()

    def training_images(self, dataset: Dataset) -> None:
        """Nothing is fitted to other images than those that are scored."""

    def settings(self) -> dict[str, Any]:
        left_out = {"protocol", "facet", "panels"}
        if self.method != "maskcut":
            left_out.add("max_objects")
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    def pictures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        del seed
        drawn, files = images.ids[: self.panels], DiscoveryFiles(Path(self._folder))
        shown: dict[str, Sequence[int]] = {}
        for layer, facet, _ in self.cells(layers) if drawn else []:
            cell = cell_name(layer, facet)
            paths = [files.sheet(cell), *(files.panel(cell, image_id) for image_id in drawn)]
            shown |= {path.as_posix(): [layer] for path in paths}
        return shown

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all layers and facets after one forward pass an image.

        What each image gave is kept at once and not computed again by a later run. Images that
        come without ground truth are not scored; their masks are saved as PNG.

        Raises:
            DataError: a file cannot be read, or the images have ground truth but no box in it.
            CheckpointError: the encoder gives NaN for an image.
        """
        images = self.split(context.dataset)
        folder = context.artifacts / self._folder
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
            yield corloc_score(layer, facet, list(results.values()))

    def find(self, features: Float[Tensor, "rows cols dim"], grid: PatchGrid) -> list[Discovery]:
        """What the chosen method finds in one image, the object that counts first."""
        if self.method == "lost":
            return [lost(features, grid, self)]
        if self.method == "maskcut":
            return maskcut(features, grid, self, num_masks=self.max_objects)
        return [discover(features, grid, self)]

    def _discover_all(self, images: ImageSet, log: DiscoveryLog, context: ProbeContext) -> None:
        names = [cell_name(layer, facet) for layer, facet, _ in self.cells(context.layers)]
        drawn, files = set(images.ids[: self.panels]), DiscoveryFiles(log.path.parent)
        pending = [
            i
            for i, image_id in enumerate(images.ids)
            if not log.has(image_id, names)
            or not files.has_all(image_id, log.images[image_id], names, drawn)
        ]
        extractor = FeatureExtractor(
            context.encoder,
            layers=context.layers,
            facets=self.facets,
            device=context.device,
            dtype=context.dtype,
        )
        found_in = self._each_image(images, pending, extractor)
        for sample, found in context.progress(found_in, self.method, len(pending)):
            grid = grid_of(sample, extractor.patch_size)
            with_panel = sample.image_id in drawn
            self._draw(sample, found, grid, files, with_panel=with_panel)
            log.add(sample.image_id, image_result(sample, found, grid))

    def _each_image(
        self, images: ImageSet, pending: Sequence[int], extractor: FeatureExtractor
    ) -> Iterator[tuple[Sample, dict[str, list[Discovery]]]]:
        """What is found in each pending image; images of one shape pass the encoder together."""

        def shape(sample: Sample) -> tuple[int, ...]:
            grid = grid_of(sample, extractor.patch_size)
            return *grid.shape, *self.graph_shape(grid)

        def size(sample: Sample) -> int:
            return max(1, TOKENS_A_BATCH // math.prod(shape(sample)[:2]))

        samples = read_ahead(images, pending, lambda sample: sample, workers=_DECODERS)
        with GraphPool(torch.get_num_threads()) as pool:
            for batch in same_shape(samples, shape, size):
                grids = [grid_of(sample, extractor.patch_size) for sample in batch]
                with extracted(extractor, batch, grids[0]) as features:
                    found = self._find_all(features, grids, pool)
                yield from zip(batch, found, strict=True)

    def _draw(
        self,
        sample: Sample,
        found: dict[str, list[Discovery]],
        grid: PatchGrid,
        files: DiscoveryFiles,
        *,
        with_panel: bool,
    ) -> None:
        for name, objects in found.items():
            if sample.boxes is None:
                save_masks(objects, grid, files.mask(name, sample.image_id))
            if with_panel:
                layer, facet = name.split("/")
                row = panel(sample, objects[0], f"block {layer}, {facet}", grid.patch_size)
                sheet([row], files.panel(name, sample.image_id))

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
            gallery.draw(name, title, DiscoveryFiles(folder).sheet(name))

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
        self, features: BatchFeatures, grids: Sequence[PatchGrid], pool: GraphPool
    ) -> list[dict[str, list[Discovery]]]:
        """Objects by cell of each image of a batch."""
        grids_of = [grid for grid in grids for _ in features]
        graphs = [f[image] for image in range(len(grids)) for f in features.values()]
        if graphs[0].is_cuda and self.method != "lost" and not self.weighted:
            found = self._find_together(graphs, grids_of, pool)
        else:
            found = pool.map(lambda pair: self.find(*pair), zip(graphs, grids_of, strict=True))
        cells = len(features)
        return [
            dict(zip(features, found[first : first + cells], strict=True))
            for first in range(0, len(found), cells)
        ]

    def _find_together(
        self,
        graphs: Sequence[Float[Tensor, "rows cols dim"]],
        grids: Sequence[PatchGrid],
        pool: GraphPool,
    ) -> list[list[Discovery]]:
        """As `find`, for graphs of one shape that are solved together on their device."""

        def solve(
            graphs: Sequence[Float[Tensor, "tokens dim"]],
        ) -> Sequence[FiedlerVector]:
            return solve_batch(torch.stack([*graphs]), tau=self.tau, eps=self.eps, each=pool.map)

        pairs = list(zip(graphs, grids, strict=True))
        if self.method == "maskcut":
            searches = [MaskCutSearch(*pair, self, self.max_objects) for pair in pairs]
            search_together(searches, solve)
            return [search.found for search in searches]
        spectra = solve([self.graph_tokens(*pair) for pair in pairs])
        return [[cut_out(one, grid, self)] for one, grid in zip(spectra, grids, strict=True)]

    def _asked_facets(self) -> Sequence[str]:
        return (self.facet,) if isinstance(self.facet, str) else self.facet

    def _log_key(self, images: ImageSet, context: ProbeContext) -> dict[str, Any]:
        return {
            "encoder": encoder_id(context.encoder.identity()),
            "dataset_fingerprint": images.fingerprint(),
            "dtype": str(context.dtype),
            "settings": self.settings(),
            "version": __version__,
        }
