"""TokenCut: does the normalised cut of a block's features find an object?"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from probes.tokencut.files import DiscoveryFiles, cell_name
from probes.tokencut.options import Cut
from ssl_bench.composition.fields import Count, CountOrZero, Pixels, check_fields
from ssl_bench.composition.presets import changed_settings
from ssl_bench.data.limited import sampled
from ssl_bench.data.samples import Dataset, ImageSet, Sample
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.layers import INNER_FACETS, AskedFacets, Facet, asked_facets
from ssl_bench.scores import OBJECT_SCORES

DEGENERATE = "degenerate"
FACETS: tuple[Facet, ...] = (
    *("key", "query", "value", "token", "token_normed"),
    *INNER_FACETS,
)


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
    further_protocols = ("adaptive",)
    truths_by_role = MappingProxyType({"boxes": "boxes", "saliency": "masks", "discovery": "none"})
    max_sides_by_role = MappingProxyType({"boxes": None, "saliency": None, "discovery": 640})
    keeps_images = True

    def __post_init__(self) -> None:
        check_fields(self, "probe")
        # MaskCut's painted patches have cosine 0 with all: a lower tau would link them to all.
        _require(
            self.method != "maskcut" or self.tau == "otsu" or self.tau >= 0,
            f"tau must lie in [0, 1) for maskcut, got {self.tau}",
        )
        asked_facets(self.facet, FACETS)

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

    @property
    def facets(self) -> tuple[Facet, ...]:
        return self.asked_facets.names

    @property
    def asked_facets(self) -> AskedFacets:
        return asked_facets(self.facet, FACETS)

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        metrics = {"boxes": ["corloc"], "masks": OBJECT_SCORES, "none": [DEGENERATE]}[self.truth]
        return [(layer, f, metric) for layer in layers for f in self.facets for metric in metrics]

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.val() if self.truth == "masks" else dataset.discovery()

    def training_images(self, dataset: Dataset) -> None:
        """Nothing is fitted to other images than those that are scored."""

    def seen(self, sample: Sample) -> Sample:
        """An image as the encoder sees it, with its boxes and mask."""
        from probes.tokencut.extraction import resized

        if self.squash is not None:
            return resized(sample, (self.squash, self.squash))
        shape = np.array(sample.image.shape[1::-1])
        own = int(shape.max())
        longer_side = self.longer_side or min(own, self.max_side or own)
        if longer_side == own:
            return sample
        width, height = np.maximum(1, (shape * longer_side / own).round().astype(int))
        return resized(sample, (int(height), int(width)))

    def settings(self) -> dict[str, Any]:
        # The truth is another one where the metric is.
        left_out = {"protocol", "facet", "panels", "truth"}
        if self.method != "maskcut":
            left_out.add("max_objects")
        # Records of before these options had none.
        sizes = ("longer_side", "max_side", "squash")
        left_out |= {name for name in sizes if getattr(self, name) is None}
        if self.longer_side or self.squash:
            left_out.add("max_side")
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    def pictures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        del seed
        drawn, files = sampled(images.ids, self.panels), DiscoveryFiles(Path(self.folder))
        shown: dict[str, Sequence[int]] = {}
        for layer, facet in itertools.product(layers, self.facets) if drawn else []:
            cell = cell_name(layer, facet)
            paths = [files.sheet(cell), *(files.panel(cell, image_id) for image_id in drawn)]
            shown |= {path.as_posix(): [layer] for path in paths}
        return shown

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all layers and facets after one forward pass an image.

        What each image gave is kept at once and not computed again by a later run. Masks in images
        that come without ground truth are saved as PNG.

        Raises:
            DataError: a file cannot be read, or no image has a box to score with.
            CheckpointError: the encoder gives NaN for an image.
        """
        from probes.tokencut.run import DiscoveryRun

        yield from DiscoveryRun(self, context).scores()


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigurationError(f"probe.{message}")
