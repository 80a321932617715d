"""Discovery: how many of the objects of an image do the cuts of a block's features find?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Any, Literal

from probes.tokencut.options import Tau
from probes.tokencut.probe import TokenCut
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.scores import MOST_DETECTIONS

METRICS = ("ap", "ap50", "ar100", "ap_coco", "corloc")


@dataclass(frozen=True)
class ObjectDiscovery(TokenCut):
    """Boxes of several objects an image against all true boxes, whatever their class.

    Attributes:
        protocol: MaskCut as `tokencut` has it, with the tau of CutLER's commands.
        method: maskcut, or lost, which finds one object.

    Source: CutLER, https://arxiv.org/abs/2301.11320, whose metrics these are. MaskCut says not how
    sure it is of a mask; that an earlier one is surer is ours.
    """

    protocol: Literal["ssl_bench"] = "ssl_bench"  # pyright: ignore[reportIncompatibleVariableOverride]
    truth: Literal["boxes"] = "boxes"  # pyright: ignore[reportIncompatibleVariableOverride]
    tau: Tau = 0.15
    method: Literal["maskcut", "lost"] = "maskcut"

    task = "discovery"
    further_protocols = ()
    truths_by_role = max_sides_by_role = MappingProxyType({})
    metrics_of_sets = ("ap_coco",)

    @property
    def role(self) -> str:
        """Of pictures without boxes TokenCut already shows what is found."""
        return "boxes"

    @property
    def num_ranks(self) -> int:
        """How many boxes of an image count at most, one of each rank."""
        return min(self.max_objects, MOST_DETECTIONS) if self.method == "maskcut" else 1

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [
            (layer, facet, metric)
            for layer in layers
            for facet in self.facets
            for metric in METRICS
        ]

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "confidence": "order"}

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score all layers and facets after one forward pass an image; see `TokenCut.run`."""
        from probes.discovery.run import scores_of_block
        from probes.tokencut.run import DiscoveryRun
        from probes.tokencut.scores import corloc_score

        results = DiscoveryRun(self, context).results()
        for layer, facet in product(context.layers, self.facets):
            yield from scores_of_block(layer, facet, results, self.num_ranks)
            yield corloc_score(layer, facet, results)
