"""Features of views, each of which passes the encoder once while it is remembered."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from ssl_bench.features import FeatureExtractor
from ssl_bench.layers import Facet

Cell = tuple[int, Facet]
CellFeatures = Mapping[Cell, Float[Tensor, "_rows _cols _dim"]]


class EncodedViews:
    """The views of pairs, of which many have an image in common.

    Args:
        extractor: Gives the features.
        most_bytes: How much is remembered beside the views that are asked for; those that were
            asked for last.
    """

    def __init__(self, extractor: FeatureExtractor, most_bytes: int) -> None:
        self._extractor, self._most_bytes = extractor, most_bytes
        self._known: dict[str, CellFeatures] = {}
        self.passes = 0

    def features(
        self, views: Mapping[str, UInt8[Tensor, "3 size size"]]
    ) -> Mapping[str, CellFeatures]:
        """Of each view, by its key.

        Raises:
            CheckpointError: features are not finite.
        """
        fresh = [key for key in views if key not in self._known]
        found = dict(zip(fresh, self._passed([views[key] for key in fresh], fresh), strict=True))
        asked = {key: found[key] if key in found else self._known.pop(key) for key in views}
        self._remember(asked)
        return asked

    def _remember(self, asked: Mapping[str, CellFeatures]) -> None:
        """Let go of those that were not asked for the longest time."""
        self._known |= asked
        each = max(map(_bytes, asked.values()), default=0)
        for key in list(self._known):
            if len(self._known) * each <= self._most_bytes:
                break
            del self._known[key]

    def _passed(
        self, views: Sequence[UInt8[Tensor, "3 size size"]], keys: Sequence[str]
    ) -> Sequence[CellFeatures]:
        if not views:
            return []
        self.passes += len(views)
        by_layer = self._extractor(torch.stack([*views]).float() / 255, keys)
        cells = {(n, facet): f for n, facets in by_layer.items() for facet, f in facets.items()}
        # Copies, because a part of a batch would keep all of it.
        return [
            {cell: batch[number].clone() if self._most_bytes else batch[number]
             for cell, batch in cells.items()}
            for number in range(len(views))
        ]  # fmt: skip


def _bytes(features: CellFeatures) -> int:
    return sum(values.numel() * values.element_size() for values in features.values())
