"""Discovery with one encoder on one dataset: features, objects, pictures, scores."""

import glob
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from probes.features.stream import read_ahead
from probes.pictures import sheet
from probes.tokencut.cuts import Discovery, cut_out, discover, graph_tokens, threshold
from probes.tokencut.extraction import BatchFeatures, extracted, grid_of
from probes.tokencut.files import DiscoveryFiles, cell_name
from probes.tokencut.log import DiscoveryLog, ImageResult, image_result
from probes.tokencut.lost import lost
from probes.tokencut.maskcut import MaskCutSearch, Taus, maskcut, search_together
from probes.tokencut.options import PatchGrid
from probes.tokencut.pictures.gallery import Gallery
from probes.tokencut.pictures.panels import panel, save_masks
from probes.tokencut.probe import TokenCut
from probes.tokencut.saliency import against_mask, saliency_scores
from probes.tokencut.scores import corloc_score, degenerate_score, flagged
from probes.tokencut.shape_batches import same_shape
from probes.tokencut.spectral.eigensolver import FiedlerVector, GraphPool
from probes.tokencut.spectral.eigensolver_batched import solve_batch
from ssl_bench.data.files.fingerprints import entries_of
from ssl_bench.data.limited import sampled
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.errors import DataError
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.features import FeatureExtractor
from ssl_bench.layers import Facet
from ssl_bench.results import encoder_id
from ssl_bench.system.files import write_atomically
from ssl_bench.version import __version__

TOKENS_A_BATCH = 8192
_DECODERS = 4
# Percent of degenerate graphs above which a block's numbers say nothing.
_MOST = 50.0


@dataclass(frozen=True)
class DiscoveryRun:
    """What `probe` describes, on the encoder and the dataset of `context`."""

    probe: TokenCut
    context: ProbeContext

    def scores(self) -> Iterator[Score]:
        """See `TokenCut.run`."""
        results = self.results()
        for layer, facet in self._blocks():
            if self.probe.truth == "masks":
                yield from saliency_scores(layer, facet, results)
            elif self.probe.truth == "none":
                yield degenerate_score(layer, facet, results)
            else:
                yield corloc_score(layer, facet, results)

    def results(self) -> list[ImageResult]:
        """What is in each image.

        Raises:
            DataError: as `TokenCut.run`.
        """
        images = self.probe.split(self.context.dataset)
        folder = self.context.artifacts / self.probe.folder
        entries = dict(zip(images.ids, entries_of(images), strict=True))
        log = self._opened_log(folder, entries)
        self._discover_all(images, log)
        results = {image_id: log.images[image_id] for image_id in images.ids}
        self._draw_sheets(images, results, folder)
        self._tell_degenerate(list(results.values()))
        if self.probe.truth == "none":
            side = self.probe.settings().get("max_side")
            shrunk = f" (of larger images at {side} pixels, see probe.max_side)" if side else ""
            self.context.say(
                f"{images.name} has no boxes to compare with: only degenerate graphs are counted; "
                f"masks, pictures and boxes are in {folder}{shrunk}"
            )
        elif not any(result.is_scored for result in results.values()):
            raise DataError(
                f"none of the {len(images)} images of {images.name} has a box to "
                f"score with; the boxes that were found are in {log.path}"
            )
        return list(results.values())

    def _tell_degenerate(self, results: Sequence[ImageResult]) -> None:
        """Say why, of the blocks most of whose graphs say nothing of the image, and what helps."""
        shares = defaultdict[Facet, dict[int, float]](dict)
        for layer, facet in self._blocks():
            cells = [result.cells[cell_name(layer, facet)] for result in results]
            share = flagged("degenerate", cells)["degenerate_percent"]
            if share > _MOST:
                shares[facet][layer] = share
        if not shares:
            return
        where = list[str]()
        for facet, of in shares.items():
            ends = " to ".join(dict.fromkeys(f"{end(of.values()):.0f}" for end in (min, max)))
            where.append(f"{facet} of block {', '.join(map(str, of))} ({ends} %)")
        helps = "; take another block or facet"
        if self.probe.tau != "otsu":
            adaptive = (
                "probe.tau=otsu" if self.probe.task != "tokencut" else "probe.protocol=adaptive"
            )
            helps = f"; {adaptive} takes a threshold of each image's own"
        threshold = "0" if self.probe.method == "lost" else f"tau={self.probe.tau}"
        self.context.say(
            f"{self.probe.task}: degenerate graphs for {'; '.join(where)}: where all cosines of "
            f"an image lie above {threshold}, every patch is linked with every other and the box "
            f"is arbitrary{helps}"
        )

    def _blocks(self) -> list[tuple[int, Facet]]:
        return list(itertools.product(self.context.layers, self.probe.facets))

    def _opened_log(self, folder: Path, entries: Mapping[str, str]) -> DiscoveryLog:
        """What was found before, also in other sets that have some of the same images."""
        anew = self.context.overwrite
        log = DiscoveryLog(folder, self._log_key(), entries, forget=anew)
        names, sets = [cell_name(*block) for block in self._blocks()], folder.parents[2]
        is_stored = folder.parent == self.context.artifacts and sets.name == self.probe.task
        if anew or not is_stored:
            return log
        ours = DiscoveryFiles(folder)
        for path in sorted(sets.glob(f"*/*/{glob.escape(folder.name)}/{log.path.name}")):
            if path == log.path or all(log.has(image_id, names) for image_id in entries):
                continue
            theirs = DiscoveryFiles(path.parent)
            for there, here, cells in log.take_up(path):
                for cell in cells:
                    _copy(theirs.mask(cell, there), ours.mask(cell, here))
                    _copy(theirs.panel(cell, there), ours.panel(cell, here))
        return log

    def _discover_all(self, images: ImageSet, log: DiscoveryLog) -> None:
        drawn = set(sampled(images.ids, self.probe.panels))
        files = DiscoveryFiles(log.path.parent)
        pending = [i for i, n in enumerate(images.ids) if not self._has(n, log, files, drawn)]
        extractor = FeatureExtractor(
            self.context.encoder,
            layers=self.context.layers,
            facets=self.probe.facets,
            device=self.context.device,
            dtype=self.context.dtype,
        )
        found_in = self._each_image(images, pending, extractor)
        for sample, found in self.context.progress(found_in, self.probe.method, len(pending)):
            grid = grid_of(sample, extractor.patch_size)
            result = image_result(sample, found, grid)
            if self.probe.truth == "masks":
                result = against_mask(result, sample, found, grid)
            with_panel = sample.image_id in drawn
            with_masks = not result.has_truth
            self._draw(sample, found, grid, files, with_panel=with_panel, with_masks=with_masks)
            log.add(sample.image_id, result)

    def _has(
        self, image_id: str, log: DiscoveryLog, files: DiscoveryFiles, drawn: Set[str]
    ) -> bool:
        """Whether an image was searched, and all that is shown of it is there."""
        names = [cell_name(*block) for block in self._blocks()]
        if not log.has(image_id, names):
            return False
        has_masks = not log.images[image_id].has_truth
        return files.has_all(image_id, names, drawn, has_masks=has_masks)

    def _each_image(
        self, images: ImageSet, pending: Sequence[int], extractor: FeatureExtractor
    ) -> Iterator[tuple[Sample, dict[str, list[Discovery]]]]:
        """What is found in each pending image; images of one shape pass the encoder together."""

        def shape(sample: Sample) -> tuple[int, ...]:
            grid = grid_of(sample, extractor.patch_size)
            return *grid.shape, *self.probe.graph_shape(grid)

        def size(sample: Sample) -> int:
            return max(1, TOKENS_A_BATCH // math.prod(shape(sample)[:2]))

        samples = read_ahead(images, pending, self.probe.seen, workers=_DECODERS)
        largest = TOKENS_A_BATCH
        with GraphPool(torch.get_num_threads()) as pool:
            for batch in same_shape(samples, shape, size):
                grids = [grid_of(sample, extractor.patch_size) for sample in batch]
                if (patches := math.prod(grids[0].shape)) > largest:
                    largest = patches
                    self.context.say(
                        f"{self.probe.task}: {batch[0].image_id} has {patches:,} patches, whose "
                        "graph takes minutes; probe.max_side=640 makes large images smaller"
                    )
                with extracted(extractor, batch, grids[0]) as features:
                    found = find_all(self.probe, features, grids, pool)
                yield from zip(batch, found, strict=True)

    def _draw(
        self,
        sample: Sample,
        found: dict[str, list[Discovery]],
        grid: PatchGrid,
        files: DiscoveryFiles,
        *,
        with_panel: bool,
        with_masks: bool,
    ) -> None:
        for name, objects in found.items():
            if with_masks:
                save_masks(objects, grid, files.mask(name, sample.image_id))
            if with_panel:
                layer, facet = name.split("/")
                row = panel(sample, objects, f"block {layer}, {facet}", grid.patch_size)
                sheet([row], files.panel(name, sample.image_id))

    def _draw_sheets(
        self,
        images: ImageSet,
        results: dict[str, ImageResult],
        folder: Path,
    ) -> None:
        if not self.probe.panels or not results:
            return
        patch, panels = self.context.encoder.patch_size, self.probe.panels
        gallery = Gallery(images, results, patch, panels, self.probe.seen)
        blocks = self._blocks()
        for layer, facet in self.context.progress(blocks, "contact sheets", len(blocks)):
            name = cell_name(layer, facet)
            where = f"{images.name} {images.split}, {self.context.encoder.name}"
            title = f"{where}, block {layer}, {facet}, protocol {', '.join(self.probe.variant)}"
            gallery.draw(name, title, DiscoveryFiles(folder).sheet(name))

    def _log_key(self) -> dict[str, Any]:
        return {
            "encoder": encoder_id(self.context.encoder.identity()),
            "dtype": str(self.context.dtype),
            "settings": self.probe.settings(),
            "version": __version__,
        }


def _copy(source: Path, target: Path) -> None:
    if source.is_file() and not target.exists():
        content = source.read_bytes()
        write_atomically(target, lambda file: file.write(content))


def find_all(
    probe: TokenCut, features: BatchFeatures, grids: Sequence[PatchGrid], pool: GraphPool
) -> list[dict[str, list[Discovery]]]:
    """Objects by cell of each image of a batch."""
    grids_of = [grid for grid in grids for _ in features]
    graphs = [f[image] for image in range(len(grids)) for f in features.values()]
    if graphs[0].is_cuda and probe.method != "lost" and not probe.weighted:
        found = find_together(probe, graphs, grids_of, pool)
    else:
        found = pool.map(lambda pair: find(probe, *pair), zip(graphs, grids_of, strict=True))
    cells = len(features)
    return [
        dict(zip(features, found[first : first + cells], strict=True))
        for first in range(0, len(found), cells)
    ]


def find_together(
    probe: TokenCut,
    graphs: Sequence[Float[Tensor, "rows cols dim"]],
    grids: Sequence[PatchGrid],
    pool: GraphPool,
) -> list[list[Discovery]]:
    """As `find`, for graphs of one shape that are solved together on their device."""

    def solve(graphs: Sequence[Float[Tensor, "tokens dim"]], taus: Taus) -> Sequence[FiedlerVector]:
        found: dict[int, FiedlerVector] = {}
        # Facets differ in their channels.
        for width in dict.fromkeys(graph.shape[-1] for graph in graphs):
            some = {n: graph for n, graph in enumerate(graphs) if graph.shape[-1] == width}
            together = torch.stack([*some.values()])
            own = [taus[number] for number in some]
            on_device = [one for one in own if isinstance(one, Tensor)]
            tau = torch.stack(on_device) if on_device else float(own[0])
            solved = solve_batch(together, tau=tau, eps=probe.eps, each=pool.map)
            found |= zip(some, solved, strict=True)
        return [found[number] for number in range(len(graphs))]

    pairs = list(zip(graphs, grids, strict=True))
    if probe.method == "maskcut":
        searches = [MaskCutSearch(*pair, probe, probe.max_objects) for pair in pairs]
        search_together(searches, solve)
        return [search.found for search in searches]
    tokens = [graph_tokens(probe, *pair) for pair in pairs]
    spectra = solve(tokens, [threshold(probe, graph) for graph in tokens])
    return [[cut_out(one, grid, probe)] for one, grid in zip(spectra, grids, strict=True)]


def find(
    probe: TokenCut, features: Float[Tensor, "rows cols dim"], grid: PatchGrid
) -> list[Discovery]:
    """What the chosen method finds in one image, the object that counts first."""
    if probe.method == "lost":
        return [lost(features, grid, probe)]
    if probe.method == "maskcut":
        return maskcut(features, grid, probe, num_masks=probe.max_objects)
    return [discover(features, grid, probe)]
