"""TokenCut: does the normalised cut of a block's features find an object?

The file contains, in this order: settings, one pass over the images, and messages. `scores.py`
computes the results of images and the scores of blocks.
"""

import glob
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from probes.features.journal import Journal
from probes.features.stream import batched, fetch_and_check, read_ahead
from probes.pictures import save_sheet
from probes.tokencut.cuts import (
    Cut,
    Discovery,
    PatchGrid,
    discover,
    discover_with_lost,
    discover_with_maskcut,
)
from probes.tokencut.eigensolver import map_graphs
from probes.tokencut.log import DiscoveryLog, ImageResult, layer_facet_name
from probes.tokencut.pictures import (
    draw_panel,
    draw_sheets,
    mask_path,
    panel_path,
    save_masks,
    sheet_path,
)
from probes.tokencut.scores import (
    corloc_score,
    degenerate_score,
    flag_percentages,
    image_result,
    saliency_scores,
)
from ssl_bench import __version__
from ssl_bench.composition.compose import changed_settings
from ssl_bench.composition.fields import Count, CountOrZero, Pixels
from ssl_bench.data.files.fingerprints import sample_hashes
from ssl_bench.data.samples import Dataset, ImageSet, Sample
from ssl_bench.data.splits import sample_ids
from ssl_bench.errors import ConfigurationError, DataError, SslBenchError, with_hint
from ssl_bench.evaluation import SIZE_FIELDS, Probe, ProbeContext, Score
from ssl_bench.features import FeatureExtractor, Resize
from ssl_bench.layers import INNER_FACETS
from ssl_bench.results import encoder_id, is_degenerate
from ssl_bench.scores import OBJECT_SCORES
from ssl_bench.system.files import write_atomically
from ssl_bench.system.output import escape_unprintable

TOKENS_PER_BATCH = 8192
_NUM_WORKERS = 4
_WAITING_PIXELS = 64_000_000
"""Maximum number of decoded pixels that wait for other images of the same shape (192 MB)."""
# Version of the log's format. Increase it when the entries of older logs become invalid.
_LOG_FORMAT = 5


@dataclass(frozen=True)
class TokenCut(Cut, Probe):
    """A probe that finds one object in each image and compares it with true boxes or a true mask.

    Attributes:
        protocol: Name of the preset: "reference" follows the authors' code, and "adaptive" sets tau
            to "otsu", so that each image has its own threshold. If the user has changed other
            options, tables show them after the name.
        truth: Annotations to compare with: "boxes" (scores CorLoc), "masks" (scores maximal F-beta,
            IoU and accuracy) or "none" (counts images whose object is arbitrary). The default is
            "boxes" for datasets with boxes, "masks" for datasets with masks of one object and no
            boxes, and "none" for datasets with neither.
        facet: Features for computing the similarity graph: one or several of key, query, value,
            token, token_normed, attn_out, attn_skip, mlp_hidden, mlp_out, and submodules of a
            block.
        method: Algorithm that finds the object. With "maskcut", the first object is scored.
        max_objects: Number of rounds of "maskcut". Each round finds one object or none.
        panels: Number of images that have their own figure. A contact sheet (a figure of many
            images) shows at most this number of images of each group (hits, misses, degenerate).
        longer_side: Longer side in pixels of the resized images. By default, images keep their
            size.
        max_side: Maximum length of the longer side in pixels, if `longer_side` is not set. Larger
            images are reduced to this length. For a folder of images without annotations, the
            default is 640, the longer side of COCO's images. Without a limit, the graph of a
            photograph with 12 million pixels could have 60,000 patches.
        squash: Side in pixels of the squares that images are resized to without keeping their
            aspect ratio. The value is set automatically if the encoder accepts only one image size.
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
    secondary_protocols = ("adaptive",)
    has_per_image_values = True
    reuses_results = True
    # `truth` is excluded, because each of its values has other metrics.
    excluded_from_identity = ("protocol", "facet", "panels", "truth")

    def __post_init__(self) -> None:
        super().__post_init__()
        # Masked patches of MaskCut have cosine 0 with all patches. A negative tau would link them.
        if self.method == "maskcut" and self.tau != "otsu" and self.tau < 0:
            raise ConfigurationError(f"probe.tau must lie in [0, 1) for maskcut, got {self.tau}")

    @classmethod
    def settings_for(cls, roles: Collection[str]) -> Mapping[str, Any]:
        if "boxes" in roles:
            return {}
        if "saliency" in roles:
            return {"truth": "masks"}
        return {"truth": "none", "max_side": 640} if "discovery" in roles else {}

    @property
    def role(self) -> str:
        return "saliency" if self.truth == "masks" else "discovery"

    @property
    def variant(self) -> list[str]:
        """Return the name of the preset, followed by the options that the user has changed.

        Each option has the form "NAME=VALUE".
        """
        changed = changed_settings(self).items()
        return [self.protocol, *(f"{name}={value}" for name, value in changed)]

    @property
    def folder(self) -> str:
        """Return the name of the folder for the figures, the masks and the log of found objects.

        The folder name consists of the name of the preset and the options that the user has
        changed.
        """
        return "_".join(self.variant)

    def list_score_keys(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        metrics = {"boxes": ["corloc"], "masks": [*OBJECT_SCORES], "none": ["degenerate"]}
        return list(itertools.product(layers, self.facets, metrics[self.truth]))

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        if self.method != "maskcut":
            del settings["max_objects"]
        if self.longer_side or self.squash:
            del settings["max_side"]
        # Records (stored results) that were written before these fields existed must stay valid.
        unset = {name for name in SIZE_FIELDS if settings.get(name) is None}
        return {name: value for name, value in settings.items() if name not in unset}

    def scored_images(self, dataset: Dataset) -> ImageSet:
        return dataset.val() if self.truth == "masks" else dataset.discovery()

    @property
    def resize(self) -> Resize:
        if self.squash is not None:
            return Resize(self.squash)
        return Resize(self.longer_side, keep_aspect_ratio=True, max_side=self.max_side)

    def with_squares(self, side: int) -> "TokenCut":
        return replace(self, squash=side)

    def prepare(self, sample: Sample) -> Sample:
        """Resize an image to the encoder's input size, together with its boxes and its mask.

        Boxes are not rounded, so resizing does not change their IoU.
        """
        height, width = sample.image.shape[:2]
        new_height, new_width = self.resize.output_size(height, width)
        if (new_height, new_width) == (height, width):
            return sample
        size, mask, boxes = (new_width, new_height), sample.mask, sample.boxes
        if mask is not None:
            mask = np.asarray(Image.fromarray(mask).resize(size, Image.Resampling.NEAREST))
        if boxes is not None:
            boxes = boxes * np.tile([new_width / width, new_height / height], 2)
        image = Image.fromarray(sample.image).resize(size, Image.Resampling.BICUBIC)
        return replace(sample, image=np.asarray(image), boxes=boxes, mask=mask)

    def list_figures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        del seed
        folder, panel_ids = Path(self.folder), sample_ids(images.ids, self.panels)
        figures: dict[str, Sequence[int]] = {}
        for layer, facet in itertools.product(layers, self.facets) if panel_ids else []:
            cell = layer_facet_name(layer, facet)
            panels = [panel_path(folder, cell, image_id) for image_id in panel_ids]
            figures |= {path.as_posix(): [layer] for path in (sheet_path(folder, cell), *panels)}
        return figures

    def can_precompute_for(self, other: Probe) -> bool:
        """Return whether another probe needs the same features of the same images.

        Two such probes can share one pass of the images through the encoder.
        """

        def inputs(probe: TokenCut) -> tuple[Any, ...]:
            return probe.facets, probe.resize, probe.truth == "masks"

        return isinstance(other, TokenCut) and inputs(self) == inputs(other)

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Find the objects of all images, and yield the scores of all requested layers and facets.

        A facet is a kind of feature, such as keys. Each image is encoded once. The result of an
        image is saved immediately, and later runs reuse it. For images without ground truth, the
        masks of the found objects are saved as PNG files.

        Raises:
            DataError: A file cannot be read, or no image has a box to score with.
            CheckpointError: The encoder returns NaN for an image.
        """
        results = self.find_objects(context)
        for layer, facet in itertools.product(context.layers, self.facets):
            if self.truth == "masks":
                yield from saliency_scores(layer, facet, results)
            elif self.truth == "none":
                yield degenerate_score(layer, facet, results)
            else:
                yield corloc_score(layer, facet, results)

    def find_objects(self, context: ProbeContext) -> list[ImageResult]:
        """Find the objects of all images, draw the figures, and return the objects of each image.

        Raises:
            DataError: A file cannot be read, or no image has a box to score with.
            CheckpointError: The encoder returns NaN for an image.
        """
        images = self.scored_images(context.dataset)
        cells = [layer_facet_name(*cell) for cell in itertools.product(context.layers, self.facets)]
        own = _DiscoveryOutput(self, context, context.artifacts, images, cells)
        # Later probes of the same command share this pass through the encoder if they have the same
        # inputs.
        later = [
            _DiscoveryOutput(probe, context, artifacts, images, cells)
            for probe, artifacts in context.later
            if isinstance(probe, TokenCut)
        ]
        _search_images(context, images, [own, *later])
        results = {image_id: own.log.results[image_id] for image_id in images.ids}
        if self.panels and results:
            where = f"{images.name} {images.split}, {context.encoder.name}"
            draw_sheets(
                context.progress(cells, "contact sheets", len(cells)),
                (where, f"protocol {', '.join(self.variant)}"),
                own.folder,
                images,
                results,
                patch_size=context.encoder.patch_size,
                per_group=self.panels,
                prepare=self.prepare,
            )
        _warn_about_degenerate_blocks(self, context, list(results.values()))
        _warn_about_padding(self, context, results, cells)
        if self.truth == "none":
            side = self.settings().get("max_side")
            reduced = f". Images with a side above {side} pixels were reduced (probe.max_side)"
            context.say(
                f"{images.name} has no ground truth, so only degenerate graphs are counted. Masks, "
                f"boxes and figures are in {own.folder}{reduced if side else ''}"
            )
        elif not any(result.is_scored for result in results.values()):
            raise DataError(
                f"none of the {len(images)} images of {images.name} has a box to score with. The "
                f"boxes that were found are in {own.log.path}"
            )
        return list(results.values())


# One pass over all images.


class _DiscoveryOutput:
    """The results of one probe that searches images for objects: its log and its figures.

    Attributes:
        folder: Folder of the log and the figures.
        log: The objects that have been found so far, by image.
    """

    def __init__(
        self,
        probe: TokenCut,
        context: ProbeContext,
        artifacts: Path,
        images: ImageSet,
        cells: Sequence[str],
    ) -> None:
        self.probe, self.folder, self._cells = probe, artifacts / probe.folder, cells
        self._panel_ids = set(sample_ids(images.ids, probe.panels))
        key = {
            "encoder": encoder_id(context.encoder.identity()),
            "dtype": str(context.dtype),
            "settings": probe.settings(),
            "version": __version__,
        }
        header = {"key": key, "format": _LOG_FORMAT}
        journal = Journal(self.folder, "images", header, say=context.say)
        started_files = context.features.started_files
        if context.overwrite and journal.path not in started_files:
            journal.remove()
        started_files.add(journal.path)
        identities = dict(zip(images.ids, sample_hashes(images), strict=True))
        self.log = DiscoveryLog(journal, identities)
        # A result store (a folder of results) has its figures in TASK/DATASET/ENCODER.
        task_folder = artifacts.parent.parent
        if not context.overwrite and task_folder.name == probe.task:
            self._copy_from_other_sets(task_folder, images)

    def _copy_from_other_sets(self, task_folder: Path, images: ImageSet) -> None:
        """Copy results from the logs of other image sets that contain the same image files.

        For example, one image set may be a subset of the other.
        """
        pattern = f"*/*/{glob.escape(self.folder.name)}/{self.log.path.name}"
        for path in sorted(task_folder.glob(pattern)):
            is_complete = all(self.log.has_cells(image_id, self._cells) for image_id in images.ids)
            if path == self.log.path or is_complete:
                continue
            for other_id, image_id, cells in self.log.copy_from(path):
                for cell, figure_path in itertools.product(cells, (mask_path, panel_path)):
                    source = figure_path(path.parent, cell, other_id)
                    target = figure_path(self.folder, cell, image_id)
                    if source.is_file() and not target.exists():
                        content = source.read_bytes()
                        write_atomically(target, lambda file, data=content: file.write(data))

    def is_incomplete(self, image_id: str) -> bool:
        """Return whether a result or a figure of an image is missing."""
        if not self.log.has_cells(image_id, self._cells):
            return True
        figure_paths = [panel_path] if image_id in self._panel_ids else []
        if not self.log.results[image_id].has_truth:
            figure_paths.append(mask_path)
        pairs = itertools.product(figure_paths, self._cells)
        return not all(path(self.folder, cell, image_id).is_file() for path, cell in pairs)

    def save(
        self, sample: Sample, objects: Mapping[str, Sequence[Discovery]], grid: PatchGrid
    ) -> None:
        """Save the figures of an image, and then the objects that were found in it.

        If all figures and objects are saved already, do nothing. `objects` contains the found
        objects by block and facet (kind of feature), with keys such as "11/key".
        """
        if not self.is_incomplete(sample.image_id):
            return
        result = image_result(sample, objects, grid, has_mask=self.probe.truth == "masks")
        for cell, found in objects.items():
            if not result.has_truth:
                save_masks(found, grid, mask_path(self.folder, cell, sample.image_id))
            if sample.image_id in self._panel_ids:
                layer, facet = cell.split("/", 1)
                tiles = draw_panel(sample, found, f"block {layer}, {facet}", grid)
                save_sheet([tiles], panel_path(self.folder, cell, sample.image_id))
        self.log.add(sample.image_id, result)


def _search_images(
    context: ProbeContext, images: ImageSet, outputs: Sequence[_DiscoveryOutput]
) -> None:
    """Find the objects of all images for several probes, with one pass through the encoder.

    Images are skipped if the results and figures of all probes exist already.
    """
    probes = [output.probe for output in outputs]
    first = probes[0]
    pending = [
        index
        for index, image_id in enumerate(images.ids)
        if any(output.is_incomplete(image_id) for output in outputs)
    ]
    if not pending:
        return
    extractor = context.extractor(context.layers, *first.facets)

    def shape(sample: Sample) -> tuple[int, ...]:
        """Return the numbers of rows and columns of the patch grid and of each probe's graph."""
        grid = patch_grid(sample, extractor.patch_size)
        return *grid.shape, *itertools.chain(*(probe.graph_shape(grid) for probe in probes))

    def find_in_batches() -> Iterator[tuple[Sample, list[dict[str, list[Discovery]]]]]:
        samples = read_ahead(images, pending, first.prepare, num_workers=_NUM_WORKERS)
        largest = TOKENS_PER_BATCH
        for batch in batch_by_shape(samples, shape, max_patches=TOKENS_PER_BATCH):
            if (patches := math.prod(shape(batch[0])[:2])) > largest:
                largest = patches
                line = f"{first.task}: {batch[0].image_id} has {patches:,} patches, so its graph "
                context.say(with_hint(f"{line}takes minutes", hint=("probe.max_side=640",)))
            yield from zip(batch, find_in_batch(probes, extractor, batch), strict=True)

    for sample, objects in context.progress(find_in_batches(), first.method, len(pending)):
        grid = patch_grid(sample, extractor.patch_size)
        for output, found in zip(outputs, objects, strict=True):
            output.save(sample, found, grid)


def batch_by_shape(
    samples: Iterable[Sample],
    shape: Callable[[Sample], tuple[int, ...]],
    *,
    max_patches: int,
    waiting_pixels: int = _WAITING_PIXELS,
) -> Iterator[list[Sample]]:
    """Collect samples of equal shape into batches, and yield each batch as soon as it is full.

    If a sample cannot be read, all earlier samples are yielded before the error is raised.

    Args:
        samples: The samples.
        shape: Function that returns the shape of a sample. The first two values are the numbers of
            rows and columns of patches.
        max_patches: Maximum number of patches in a batch of several samples. A batch is full if a
            further sample would exceed this number.
        waiting_pixels: Maximum number of pixels in all incomplete batches. If they have more, the
            largest of them is yielded.
    """

    def count_pixels(batch: Sequence[Sample]) -> int:
        return sum(sample.image.shape[0] * sample.image.shape[1] for sample in batch)

    waiting: dict[tuple[int, ...], list[Sample]] = defaultdict(list)
    try:
        for sample in samples:
            rows, cols, *_ = key = shape(sample)
            waiting[key].append(sample)
            if (len(waiting[key]) + 1) * rows * cols > max_patches:
                yield waiting.pop(key)
            elif sum(map(count_pixels, waiting.values())) > waiting_pixels:
                yield waiting.pop(max(waiting, key=lambda key: count_pixels(waiting[key])))
    except SslBenchError:
        yield from waiting.values()
        raise
    yield from waiting.values()


def find_in_batch(
    probes: Sequence[TokenCut], extractor: FeatureExtractor, samples: Sequence[Sample]
) -> list[list[dict[str, list[Discovery]]]]:
    """With each of several probes, find the objects of all images of a batch.

    The images are encoded together, so all of them must have the same patch grid. The similarity
    graphs of the images are cut on the CPU in parallel threads.

    Returns:
        For each image, a list with a dictionary for each probe. The dictionary contains the found
        objects by block and facet (kind of feature), with keys such as "11/key".

    Raises:
        CheckpointError: The features are not finite.
    """
    grids = [patch_grid(sample, extractor.patch_size) for sample in samples]
    height, width = (extractor.patch_size * side for side in grids[0].shape)
    images = pad_and_stack(samples, (height, width), extractor.encoder.mean)
    features, sums = extractor.extract_unchecked(images)
    cells = [
        layer_facet_name(layer, facet) for layer, facets in features.items() for facet in facets
    ]
    maps = [values for facets in features.values() for values in facets.values()]
    maps = fetch_and_check(extractor, sums, [sample.image_id for sample in samples], maps)

    def find_objects(
        graph: tuple[TokenCut, Float[Tensor, "rows cols dim"], PatchGrid],
    ) -> list[Discovery]:
        probe, features, grid = graph
        if probe.method == "maskcut":
            return discover_with_maskcut(features, grid, probe, num_masks=probe.max_objects)
        method = discover_with_lost if probe.method == "lost" else discover
        return [method(features, grid, probe)]

    graphs = [
        (probe, values[index], grid)
        for index, grid in enumerate(grids)
        for probe in probes
        for values in maps
    ]
    objects = map_graphs(find_objects, graphs, num_threads=torch.get_num_threads())
    by_cell = [dict(zip(cells, part, strict=True)) for part in batched(objects, len(cells))]
    return list(batched(by_cell, len(probes)))


def patch_grid(sample: Sample, patch_size: int) -> PatchGrid:
    height, width = sample.image.shape[:2]
    return PatchGrid(height, width, patch_size)


def pad_and_stack(
    samples: Sequence[Sample], shape: tuple[int, int], colour: tuple[float, float, float]
) -> Float[Tensor, "batch 3 height width"]:
    """Stack images with values in [0, 1], and pad them on the right and at the bottom.

    Args:
        samples: The images.
        shape: Height and width after padding, in pixels.
        colour: RGB colour of the padding in [0, 1]. With the mean colour of the encoder's
            normalisation, the padding is zero after the normalisation.
    """
    batch = torch.tensor(colour)[:, None, None].repeat(len(samples), 1, *shape)
    for image, sample in zip(batch, samples, strict=True):
        height, width = sample.image.shape[:2]
        # torch warns about arrays that are not writable, so the pixels are copied.
        pixels = torch.from_numpy(sample.image.copy()).permute(2, 0, 1)
        image[:, :height, :width] = pixels.float() / 255
    return batch


# Messages.


def _warn_about_degenerate_blocks(
    probe: TokenCut, context: ProbeContext, results: Sequence[ImageResult]
) -> None:
    """Print the blocks whose similarity graphs are mostly degenerate, and recommend a setting.

    The object that is found in a degenerate graph is arbitrary.
    """
    blocks = []
    for facet in probe.facets:
        cells = {
            n: [result.cells[layer_facet_name(n, facet)] for result in results]
            for n in context.layers
        }
        percentages = {n: flag_percentages(own)["degenerate_percent"] for n, own in cells.items()}
        if layers := [str(n) for n, percent in percentages.items() if is_degenerate(percent)]:
            blocks.append(f"{facet} of block {', '.join(layers)}")
    if not blocks:
        return
    line = f"{probe.task}: most graphs are degenerate for {'; '.join(blocks)}"
    if probe.tau == "otsu":
        context.say(
            f"{line}. If most patches of an image are nearly equal, the box is arbitrary. Try "
            "another block or facet"
        )
        return
    threshold = "0" if probe.method == "lost" else f"tau={probe.tau}"
    line += (
        f". If all cosines of an image exceed {threshold}, all patches are linked and the box is "
        "arbitrary"
    )
    if "adaptive" in probe.secondary_protocols:
        context.say(with_hint(line, hint=("probe.protocol=adaptive",)))
    else:
        context.say(with_hint(line, hint=("probe.tau=otsu",)))


def _warn_about_padding(
    probe: TokenCut,
    context: ProbeContext,
    results: Mapping[str, ImageResult],
    cells: Sequence[str],
) -> None:
    """Print which images have an object that lies entirely in the padding of the image.

    Such objects occur mostly in small images.
    """
    patch_size = context.encoder.patch_size
    image_ids = [
        escape_unprintable(image_id)
        for image_id, result in results.items()
        if any(
            PatchGrid(*result.size, patch_size).is_padding(next(result.patch_masks(cell)))
            for cell in cells
        )
    ]
    if image_ids:
        more = f" and {len(image_ids) - 3:,} more" if len(image_ids) > 3 else ""
        line = (
            f"{probe.task}: the object of {', '.join(image_ids[:3])}{more} lies in the padding, so "
            "it counts as degenerate"
        )
        hint = ("probe.longer_side=224", "or", "probe.mask_padding=true")
        context.say(with_hint(line, hint=hint))
