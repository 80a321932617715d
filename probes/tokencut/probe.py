"""TokenCut: does the normalised cut of a block's features find an object?

In the order of a run: what is asked (`TokenCut`), what is found in the images of a batch, what is
kept of an image, scores of a block, images in batches. The first object is the answer of an image;
that of a mask has at each pixel the answer of the patch over it.
"""

import glob
import itertools
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64, UInt8
from PIL import Image
from torch import Tensor

from probes.features.stream import batches, fetch_finite, read_ahead
from probes.pictures import sheet
from probes.tokencut.cuts import Cut, Discovery, PatchGrid, discover, lost, maskcut
from probes.tokencut.eigensolver import map_graphs
from probes.tokencut.log import Cell, DiscoveryLog, ImageResult, cell_name, pack_mask, unpack_mask
from probes.tokencut.pictures import (
    draw_sheets,
    mask_path,
    panel,
    panel_path,
    save_masks,
    sheet_path,
)
from ssl_bench import __version__
from ssl_bench.composition.compose import changed_settings
from ssl_bench.composition.fields import Count, CountOrZero, Pixels
from ssl_bench.data.files.fingerprints import entries_of
from ssl_bench.data.samples import IGNORED, Dataset, ImageSet, Sample
from ssl_bench.data.splits import sampled
from ssl_bench.errors import ConfigurationError, DataError, SslBenchError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.features import FeatureExtractor, Resize
from ssl_bench.intervals import Share, mean_estimate
from ssl_bench.layers import INNER_FACETS
from ssl_bench.results import Baseline, PerImageKind, encoder_id, is_degenerate
from ssl_bench.scores import OBJECT_SCORES, corloc, is_hit, object_iou
from ssl_bench.system.escaping import escape_unprintable
from ssl_bench.system.files import write_atomically

TOKENS_A_BATCH = 8192
_DECODERS = 4
_WAITING_PIXELS = 64_000_000
"""Decoded images that wait for others of their shape, together: 192 MB."""
# Percent of the image that the largest object covers.
_SIZES = {
    "below_10_percent": (0.0, 10.0),
    "10_to_40_percent": (10.0, 40.0),
    "from_40_percent": (40.0, np.inf),
}
_OBJECT_KINDS: Mapping[str, PerImageKind] = {
    "max_f_beta": "object_f_beta",
    "iou": "object_iou",
    "accuracy": "object_accuracy",
}
_COUNTS = {"1": (1.0, 2.0), "2_to_3": (2.0, 4.0), "from_4": (4.0, np.inf)}


@dataclass(frozen=True)
class TokenCut(Cut, Probe):
    """One object an image against its true boxes or mask, for every asked block and facet.

    Attributes:
        truth: "boxes" scores CorLoc of the box, "masks" maximal F-beta, IoU and accuracy of the
            mask, "none" counts degenerate graphs. Of a dataset with masks of one object and no
            boxes it is "masks", of one with neither "none".
        protocol: "reference" is that of the reference code, "adaptive" takes the threshold of each
            image's own cosines. Changed options stand beside it in tables.
        facet: Which features make the graph, one or several of key, query, value, token,
            token_normed, attn_out, attn_skip, mlp_hidden, mlp_out, and submodules of a block.
        method: tokencut, lost, or maskcut, whose first mask counts.
        max_objects: Rounds of maskcut in an image, each of which gives a mask at most.
        panels: How many images, from all over the set, get a picture of their own, and how many of
            each kind (hits, misses, degenerate) are on the contact sheet of a block.
        longer_side: In pixels, of every image that the encoder sees; without it the image's own.
        max_side: In pixels; the longer side of an image that would be larger without `longer_side`.
            Of a folder of pictures 640, the largest that TokenCut was published on (COCO): the
            graph of a telephone's photograph would have 60,000 patches.
        squash: Side of the square that images are squashed to instead, whatever their shape; that
            of an encoder that takes no other size.
    """

    protocol: Literal["reference", "adaptive"] = "reference"
    truth: Literal["boxes", "masks", "none"] = "boxes"
    facet: str | Sequence[str] = "key"
    method: Literal["tokencut", "lost", "maskcut"] = "tokencut"
    max_objects: Count = 3
    panels: CountOrZero = 8
    longer_side: Pixels | None = None
    max_side: Pixels | None = None
    squash: Pixels | None = None

    task = "tokencut"
    known_facets = ("key", "query", "value", "token", "token_normed", *INNER_FACETS)
    further_protocols = ("adaptive",)
    keeps_images = True
    # The truth is another one where the metric is.
    excluded_from_identity = ("protocol", "facet", "panels", "truth")

    def __post_init__(self) -> None:
        super().__post_init__()
        # MaskCut's painted patches have cosine 0 with all: a lower tau would link them to all.
        if self.method == "maskcut" and self.tau != "otsu" and self.tau < 0:
            raise ConfigurationError(f"probe.tau must lie in [0, 1) for maskcut, got {self.tau}")

    @classmethod
    def settings_for(cls, roles: Collection[str]) -> Mapping[str, Any]:
        """Score masks if the dataset has no boxes; without either, search in smaller images."""
        if "boxes" in roles:
            return {}
        if "saliency" in roles:
            return {"truth": "masks"}
        return {"truth": "none", "max_side": 640} if "discovery" in roles else {}

    @property
    def role(self) -> str:
        return "saliency" if self.truth == "masks" else "discovery"

    @property
    def folder(self) -> str:
        """Where pictures and masks are, below those of an encoder: protocol and what differs."""
        return "_".join(self.variant)

    @property
    def variant(self) -> list[str]:
        """The protocol and each option that differs from it."""
        changed = changed_settings(self).items()
        return [self.protocol, *(f"{name}={value}" for name, value in changed)]

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        metrics = {"boxes": ["corloc"], "masks": [*OBJECT_SCORES], "none": ["degenerate"]}
        return list(itertools.product(layers, self.facets, metrics[self.truth]))

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.val() if self.truth == "masks" else dataset.discovery()

    @property
    def resize(self) -> Resize:
        if self.squash is not None:
            return Resize(self.squash)
        return Resize(self.longer_side, keep_aspect_ratio=True, max_side=self.max_side)

    def with_squares(self, side: int) -> "TokenCut":
        return replace(self, squash=side)

    def seen(self, sample: Sample) -> Sample:
        """An image as the encoder sees it, with its boxes and mask."""
        size = sample.image.shape[:2]
        new_size = self.resize.output_size(*size)
        return sample if new_size == size else resized(sample, new_size)

    def settings(self) -> dict[str, Any]:
        found = super().settings()
        if self.method != "maskcut":
            del found["max_objects"]
        if self.longer_side or self.squash:
            del found["max_side"]
        # Records of before these options had none.
        sizes = ("longer_side", "max_side", "squash")
        return {name: one for name, one in found.items() if name not in sizes or one is not None}

    def pictures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        del seed
        folder, drawn = Path(self.folder), sampled(images.ids, self.panels)
        shown: dict[str, Sequence[int]] = {}
        for layer, facet in itertools.product(layers, self.facets) if drawn else []:
            cell = cell_name(layer, facet)
            panels = [panel_path(folder, cell, image_id) for image_id in drawn]
            shown |= {path.as_posix(): [layer] for path in (sheet_path(folder, cell), *panels)}
        return shown

    def serves(self, other: Probe) -> bool:
        """Whether another cut is made of the same features of the same images."""

        def shown(probe: TokenCut) -> tuple[Any, ...]:
            return probe.facets, probe.resize, probe.truth == "masks"

        return isinstance(other, TokenCut) and shown(self) == shown(other)

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all layers and facets after one forward pass an image.

        What each image gave is kept at once and not computed again by a later run. Masks in images
        that come without ground truth are saved as PNG.

        Raises:
            DataError: a file cannot be read, or no image has a box to score with.
            CheckpointError: the encoder gives NaN for an image.
        """
        results = self.searched(context)
        for layer, facet in itertools.product(context.layers, self.facets):
            if self.truth == "masks":
                yield from saliency_scores(layer, facet, results)
            elif self.truth == "none":
                yield degenerate_score(layer, facet, results)
            else:
                yield corloc_score(layer, facet, results)

    def searched(self, context: ProbeContext) -> list[ImageResult]:
        """What is in each image; its pictures are drawn, and what helps degenerate blocks is said.

        Raises:
            DataError: as `run`.
        """
        images = self.split(context.dataset)
        folder = context.artifacts / self.folder
        names = [cell_name(*cell) for cell in itertools.product(context.layers, self.facets)]
        log = self._opened_log(context, folder, images, names)
        searches = [_Search(self, log, images, names)]
        for probe, artifacts in context.later:
            if isinstance(probe, TokenCut):
                its = replace(context, artifacts=artifacts)
                its_log = probe._opened_log(its, artifacts / probe.folder, images, names)
                searches.append(_Search(probe, its_log, images, names))
        self._search(context, images, searches)
        results = {image_id: log.images[image_id] for image_id in images.ids}
        if self.panels and results:
            where = f"{images.name} {images.split}, {context.encoder.name}"
            draw_sheets(
                context.progress(names, "contact sheets", len(names)),
                (where, f"protocol {', '.join(self.variant)}"),
                folder,
                images,
                results,
                patch_size=context.encoder.patch_size,
                per_kind=self.panels,
                seen=self.seen,
            )
        self._say_degenerate(context, list(results.values()))
        self._say_padding(context, results)
        if self.truth == "none":
            side = self.settings().get("max_side")
            shrunk = f" (of larger images at {side} pixels, see probe.max_side)" if side else ""
            context.say(
                f"{images.name} has no boxes to compare with: only degenerate graphs are counted; "
                f"masks, pictures and boxes are in {folder}{shrunk}"
            )
        elif not any(result.is_scored for result in results.values()):
            raise DataError(
                f"none of the {len(images)} images of {images.name} has a box to "
                f"score with; the boxes that were found are in {log.path}"
            )
        return list(results.values())

    def _opened_log(
        self, context: ProbeContext, folder: Path, images: ImageSet, names: Sequence[str]
    ) -> DiscoveryLog:
        """What was found before, also in other sets that have some of the same images."""
        key = {
            "encoder": encoder_id(context.encoder.identity()),
            "dtype": str(context.dtype),
            "settings": self.settings(),
            "version": __version__,
        }
        entries = dict(zip(images.ids, entries_of(images), strict=True))
        log = DiscoveryLog(
            folder, key, entries, forget=context.overwrite, kept=context.features.started_files
        )
        # Pictures of results lie in folders of task, set and encoder.
        sets = folder.parents[2] if len(folder.parents) > 2 else folder
        is_stored = folder.parent == context.artifacts and sets.name == self.task
        if context.overwrite or not is_stored:
            return log
        for path in sorted(sets.glob(f"*/*/{glob.escape(folder.name)}/{log.path.name}")):
            if path == log.path or all(log.has(image_id, names) for image_id in entries):
                continue
            for there, here, cells in log.take_up(path):
                for cell, place in itertools.product(cells, (mask_path, panel_path)):
                    source, target = place(path.parent, cell, there), place(folder, cell, here)
                    if source.is_file() and not target.exists():
                        content = source.read_bytes()
                        write_atomically(target, lambda file, data=content: file.write(data))
        return log

    def _search(
        self, context: ProbeContext, images: ImageSet, searches: Sequence["_Search"]
    ) -> None:
        """Let the images that any search lacks pass the encoder once for all searches."""
        pending = [
            number
            for number, image_id in enumerate(images.ids)
            if any(search.lacks(image_id) for search in searches)
        ]
        if not pending:
            return
        probes = [search.probe for search in searches]
        extractor = context.extractor(context.layers, *self.facets)

        def shape(sample: Sample) -> tuple[int, ...]:
            grid = grid_of(sample, extractor.patch_size)
            return *grid.shape, *itertools.chain(*(one.graph_shape(grid) for one in probes))

        def size(sample: Sample) -> int:
            return max(1, TOKENS_A_BATCH // math.prod(shape(sample)[:2]))

        def found_in_each() -> Iterator[tuple[Sample, list[dict[str, list[Discovery]]]]]:
            """Images of one shape pass the encoder together."""
            samples = read_ahead(images, pending, self.seen, workers=_DECODERS)
            largest = TOKENS_A_BATCH
            for batch in same_shape(samples, shape, size):
                if (patches := math.prod(shape(batch[0])[:2])) > largest:
                    largest = patches
                    context.say(
                        f"{self.task}: {batch[0].image_id} has {patches:,} patches, whose "
                        "graph takes minutes; probe.max_side=640 makes large images smaller"
                    )
                yield from zip(batch, find_in_batch(probes, extractor, batch), strict=True)

        for sample, found in context.progress(found_in_each(), self.method, len(pending)):
            grid = grid_of(sample, extractor.patch_size)
            for search, objects in zip(searches, found, strict=True):
                if search.lacks(sample.image_id):
                    search.keep(sample, objects, grid)

    def _say_degenerate(self, context: ProbeContext, results: Sequence[ImageResult]) -> None:
        """Say why, of the blocks most of whose graphs say nothing of the image, and what helps."""
        where = list[str]()
        for facet in self.facets:
            shares = {}
            for layer in context.layers:
                cells = [result.cells[cell_name(layer, facet)] for result in results]
                share = flags(cells)["degenerate_percent"]
                if is_degenerate(share):
                    shares[layer] = share
            if shares:
                ends = dict.fromkeys(f"{end(shares.values()):.0f}" for end in (min, max))
                blocks = ", ".join(map(str, shares))
                where.append(f"{facet} of block {blocks} ({' to '.join(ends)} %)")
        if not where:
            return
        helps = "; take another block or facet"
        if self.tau != "otsu":
            adaptive = "probe.protocol=adaptive" if self.task == "tokencut" else "probe.tau=otsu"
            helps = f"; {adaptive} takes a threshold of each image's own"
        threshold = "0" if self.method == "lost" else f"tau={self.tau}"
        context.say(
            f"{self.task}: degenerate graphs for {'; '.join(where)}: where all cosines of "
            f"an image lie above {threshold}, every patch is linked with every other and the box "
            f"is arbitrary{helps}"
        )

    def _say_padding(self, context: ProbeContext, results: Mapping[str, ImageResult]) -> None:
        """Say whose objects lie in padding alone, which are those of small images, what helps."""
        patch, cells = context.encoder.patch_size, itertools.product(context.layers, self.facets)
        names = [cell_name(*cell) for cell in cells]
        padding = [
            image_id
            for image_id, result in results.items()
            if any(
                PatchGrid(*result.size, patch).is_padding(
                    unpack_mask(result.cells[name]["mask"], result.grids.get(name, result.grid))
                )
                for name in names
            )
        ]
        if padding:
            first = ", ".join(escape_unprintable(image_id) for image_id in padding[:3])
            more = f" and {len(padding) - 3:,} more" if len(padding) > 3 else ""
            context.say(
                f"{self.task}: the object of {first}{more} lies in what fills the image up to "
                f"patches of {patch} pixels and counts as degenerate; probe.longer_side=224 "
                "enlarges small images, probe.mask_padding=true leaves such patches out"
            )


@dataclass(frozen=True)
class _Search:
    """One probe's search of all images: the log and the pictures of what it found."""

    probe: TokenCut
    log: DiscoveryLog
    images: ImageSet
    names: Sequence[str]

    @property
    def _folder(self) -> Path:
        return self.log.path.parent

    @cached_property
    def _drawn(self) -> set[str]:
        return set(sampled(self.images.ids, self.probe.panels))

    def lacks(self, image_id: str) -> bool:
        """Whether the log or a picture lacks something of an image."""
        if not self.log.has(image_id, self.names):
            return True
        places = [panel_path] if image_id in self._drawn else []
        if not self.log.images[image_id].has_truth:
            places.append(mask_path)
        paths = (place(self._folder, name, image_id) for place in places for name in self.names)
        return not all(path.is_file() for path in paths)

    def keep(self, sample: Sample, found: Mapping[str, list[Discovery]], grid: PatchGrid) -> None:
        """Draw what was found in an image, then log it."""
        result = image_result(sample, found, grid, masks=self.probe.truth == "masks")
        for name, objects in found.items():
            if not result.has_truth:
                save_masks(objects, grid, mask_path(self._folder, name, sample.image_id))
            if sample.image_id in self._drawn:
                layer, facet = name.split("/", 1)
                row = panel(sample, objects, f"block {layer}, {facet}", grid)
                sheet([row], panel_path(self._folder, name, sample.image_id))
        self.log.add(sample.image_id, result)


def find_in_batch(
    probes: Sequence[TokenCut], extractor: FeatureExtractor, samples: Sequence[Sample]
) -> list[list[dict[str, list[Discovery]]]]:
    """Return what each probe finds in each image, by cell; the images fill one grid of patches.

    Padding is right and below, zero after normalisation. Graphs are cut on the host, one a thread.

    Raises:
        CheckpointError: features are not finite.
    """
    grids = [grid_of(sample, extractor.patch_size) for sample in samples]
    height, width = (extractor.patch_size * side for side in grids[0].shape)
    images = padded_batch(samples, (height, width), extractor.encoder.mean)
    features, sums = extractor.extract_unchecked(images)
    names = [cell_name(layer, facet) for layer, facets in features.items() for facet in facets]
    maps = [one for facets in features.values() for one in facets.values()]
    maps = fetch_finite(extractor, sums, [sample.image_id for sample in samples], maps)

    def found_by_method(
        graph: tuple[TokenCut, Float[Tensor, "rows cols dim"], PatchGrid],
    ) -> list[Discovery]:
        """Return the object that counts first, then the others."""
        probe, features, grid = graph
        if probe.method == "maskcut":
            return maskcut(features, grid, probe, num_masks=probe.max_objects)
        method = lost if probe.method == "lost" else discover
        return [method(features, grid, probe)]

    graphs = [
        (probe, one[number], grid)
        for number, grid in enumerate(grids)
        for probe in probes
        for one in maps
    ]
    found = map_graphs(found_by_method, graphs, num_threads=torch.get_num_threads())
    by_probe = [dict(zip(names, part, strict=True)) for part in batches(found, len(names))]
    return list(batches(by_probe, len(probes)))


def grid_of(sample: Sample, patch_size: int) -> PatchGrid:
    height, width = sample.image.shape[:2]
    return PatchGrid(height, width, patch_size)


def image_result(
    sample: Sample, found: Mapping[str, list[Discovery]], grid: PatchGrid, *, masks: bool
) -> ImageResult:
    """What is kept of an image; with masks a hit has an IoU of half or more."""
    if masks and sample.mask is None:
        raise DataError(f"{sample.image_id} has no mask to score with", hint=("probe.truth=boxes",))
    boxes, truth, size = sample.boxes, sample.mask if masks else None, (grid.height, grid.width)

    def kept(objects: list[Discovery]) -> Cell:
        first, *others = objects
        cell: Cell = {
            "box": first.box.astype(int).tolist(),
            "mask": pack_mask(first.mask),
            "hit": None if boxes is None else is_hit(first.box, boxes),
            "degenerate": first.degenerate,
        }
        if first.eigenvalue is None:
            cell["tied_cutoff"] = first.tied_cutoff
        else:
            cell |= {"eigenvalue": first.eigenvalue, "gap": first.gap}
        if others:
            cell["further_boxes"] = [other.box.astype(int).tolist() for other in others]
            cell["further_masks"] = [pack_mask(other.mask) for other in others]
        if truth is not None:
            counts = object_counts(grid.pixels(first.mask), truth)
            cell |= {"object": counts.tolist(), "hit": bool(object_iou(counts) >= 50)}
        return cell

    centre = None
    if truth is not None:
        # Of the pixels whose middles lie in the centre box.
        x0, y0, x1, y1 = centre_box(size)
        x, y = np.arange(grid.width) + 0.5, np.arange(grid.height) + 0.5
        inside = ((y > y0) & (y < y1))[:, None] & ((x > x0) & (x < x1))
        centre = object_counts(inside, truth).tolist()
    true = np.zeros((0, 4)) if boxes is None else boxes
    areas = (true[:, 2:] - true[:, :2]).prod(-1)
    return ImageResult(
        num_boxes=None if boxes is None else len(true),
        largest_box=100 * float(areas.max(initial=0)) / (grid.height * grid.width),
        grid=grid.shape,
        cells={name: kept(objects) for name, objects in found.items()},
        size=size,
        true_boxes=None if boxes is None else boxes.tolist(),
        pixels=zlib.crc32(sample.image.tobytes()),
        centre=centre,
    )


def corloc_score(layer: int, facet: str, results: Sequence[ImageResult]) -> Score:
    """CorLoc of one block and facet over the images that have boxes, at least one."""
    name = cell_name(layer, facet)
    scored = [result for result in results if result.num_boxes]
    hits = np.array([result.cells[name]["hit"] for result in scored])
    true = [np.array(result.true_boxes, np.float64) for result in scored]
    pairs = list(zip([result.size for result in scored], true, strict=True))
    constant = {
        answer: corloc(np.array([is_hit(box(size), boxes) for size, boxes in pairs]))
        for answer, box in CONSTANT_BOXES.items()
    }

    def by_group(
        groups: Mapping[str, tuple[float, float]], measure: Callable[[ImageResult], float]
    ) -> dict[str, Any]:
        found = {}
        for group, (low, high) in groups.items():
            some = hits[[low <= measure(result) < high for result in scored]]
            if len(some):
                found[group] = {"num_images": len(some), "corloc": corloc(some)}
        return found

    details = {
        **flags([result.cells[name] for result in results]),
        **Baseline.best(constant).as_details(),
        "images_without_boxes": len(results) - len(scored),
        "by_object_size": by_group(_SIZES, lambda result: result.largest_box),
        "by_num_objects": by_group(_COUNTS, lambda result: result.num_boxes or 0),
    }
    value, ci95 = corloc(hits), Share(hits).ci95()
    return Score(layer, facet, "corloc", value, ci95, len(hits), details, per_image=hits)


def saliency_scores(layer: int, facet: str, results: Sequence[ImageResult]) -> Iterator[Score]:
    """Mean over images of what `OBJECT_SCORES` say of each; all of them have a true mask."""
    cells = [result.cells[cell_name(layer, facet)] for result in results]
    counts = np.array([cell["object"] for cell in cells], np.int64)
    centred = np.array([result.centre for result in results], np.int64)
    constant = constant_masks(centred)
    for metric, score in OBJECT_SCORES.items():
        found = mean_estimate(score(counts))
        scores = {answer: float(score(some).mean()) for answer, some in constant.items()}
        details = {
            **flags(cells),
            **Baseline.best(scores).as_details(),
            "images_without_object": int((counts[:, 2] == 0).sum()),
        }
        yield Score(
            layer,
            facet,
            metric,
            found.value,
            found.ci95(),
            len(counts),
            details,
            per_image=counts,
            per_image_kind=_OBJECT_KINDS[metric],
        )


def degenerate_score(layer: int, facet: str, results: Sequence[ImageResult]) -> Score:
    """Percent of the images whose graph says nothing, for those that nothing is known of."""
    flagged = np.array([result.cells[cell_name(layer, facet)]["degenerate"] for result in results])
    value, ci95 = 100 * float(flagged.mean()), Share(flagged).ci95()
    return Score(layer, facet, "degenerate", value, ci95, len(flagged), per_image=flagged)


def flags(cells: Sequence[Cell]) -> dict[str, float]:
    """Percent of the images that carry a flag, of the flags that the method knows."""
    found = {}
    for flag in ("degenerate", "tied_cutoff"):
        values = [cell[flag] for cell in cells if flag in cell]
        if values:
            found[f"{flag}_percent"] = 100 * float(np.mean(values))
    return found


def centre_box(size: tuple[int, int]) -> Float64[np.ndarray, " 4"]:
    """The box in the middle of an image that has its shape and half of its area.

    Of (height, width) in pixels (x0, y0, x1, y1).
    """
    height, width = size
    sides = np.array([width, height, width, height], np.float64)
    return sides * (0.5 + np.sqrt(0.125) * np.array([-1.0, -1.0, 1.0, 1.0]))


def whole_image(size: tuple[int, int]) -> Float64[np.ndarray, " 4"]:
    """Return the box that holds all of an image of (height, width), as `centre_box` returns it."""
    height, width = size
    return np.array([0, 0, width, height], np.float64)


CONSTANT_BOXES: Mapping[str, Callable[[tuple[int, int]], Float64[np.ndarray, " 4"]]] = (
    MappingProxyType({"centre box": centre_box, "whole image": whole_image})
)
"""Boxes that depend on the size of an image alone: the better one is the baseline of a score."""


def constant_masks(
    centred: Int64[np.ndarray, "images 4"],
) -> dict[str, Int64[np.ndarray, "images 4"]]:
    """Return the `ObjectCounts` of masks that look at no image, by answer.

    The best of them is the baseline of a score: pixel accuracy favours an empty mask where objects
    are small, and the whole image where they are large.

    Args:
        centred: Those of the centre box.
    """
    _, _, true, every = centred.T
    nothing = np.zeros_like(true)
    return {
        "centre box": centred,
        "whole image": np.stack([true, every, true, every], 1),
        "empty mask": np.stack([nothing, nothing, true, every], 1),
    }


def object_counts(
    answer: Bool[np.ndarray, "height width"], truth: UInt8[np.ndarray, "height width"]
) -> Int64[np.ndarray, " 4"]:
    """What an image contributes: `ssl_bench.scores.ObjectCounts`.

    Args:
        answer: Where the object is said to be.
        truth: 0 where the background is, 1 where the object is, `IGNORED` where neither counts.
    """
    counted, is_true = truth != IGNORED, truth == 1
    is_found = answer & counted
    parts = (is_found & is_true, is_found, is_true, counted)
    return np.array([part.sum() for part in parts], np.int64)


def resized(sample: Sample, size: tuple[int, int]) -> Sample:
    """An image at another height and width, bicubic; its boxes, not rounded, and mask with it.

    A box in the same part of the image overlaps its true ones as much as before. Of the mask each
    pixel is the nearest one of before.
    """
    height, width = sample.image.shape[:2]
    image = Image.fromarray(sample.image).resize((size[1], size[0]), Image.Resampling.BICUBIC)
    scale = np.tile([size[1] / width, size[0] / height], 2)
    boxes = None if sample.boxes is None else sample.boxes * scale
    mask = sample.mask
    if mask is not None:
        nearest = Image.fromarray(mask).resize((size[1], size[0]), Image.Resampling.NEAREST)
        mask = np.asarray(nearest)
    return replace(sample, image=np.asarray(image), boxes=boxes, mask=mask)


def same_shape(
    samples: Iterable[Sample],
    shape: Callable[[Sample], Hashable],
    size: Callable[[Sample], int],
    *,
    waiting_pixels: int = _WAITING_PIXELS,
) -> Iterator[list[Sample]]:
    """Batches of samples of equal `shape`, each as soon as it holds `size` of them.

    When more decoded pixels wait than `waiting_pixels`, the shape that holds most of them goes
    first. Every sample comes once, those of one shape in their order; also those that came before
    one that cannot be read.
    """

    def pixels(some: Sequence[Sample]) -> int:
        return sum(sample.image.shape[0] * sample.image.shape[1] for sample in some)

    waiting: dict[Hashable, list[Sample]] = defaultdict(list)
    try:
        for sample in samples:
            group = waiting[shape(sample)]
            group.append(sample)
            if len(group) >= size(sample):
                yield waiting.pop(shape(sample))
            elif sum(map(pixels, waiting.values())) > waiting_pixels:
                yield waiting.pop(max(waiting, key=lambda key: pixels(waiting[key])))
    except SslBenchError:
        yield from waiting.values()
        raise
    yield from waiting.values()


def padded_batch(
    samples: Sequence[Sample], shape: tuple[int, int], colour: tuple[float, float, float]
) -> Float[Tensor, "batch 3 height width"]:
    """RGB in [0, 1], filled up right and below with a colour to a height and width in pixels.

    An image that is filled up with an encoder's mean is, after normalisation, filled up with zeros.
    """
    batch = torch.tensor(colour)[:, None, None].repeat(len(samples), 1, *shape)
    for image, sample in zip(batch, samples, strict=True):
        height, width = sample.image.shape[:2]
        # A copy, because torch warns of arrays that nobody may write to.
        pixels = torch.from_numpy(sample.image.copy()).permute(2, 0, 1)
        image[:, :height, :width] = pixels.float() / 255
    return batch
