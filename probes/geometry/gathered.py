"""What one pass over the images leaves, block by block: sums, and a number for each image."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from probes.features.image import image_vectors
from probes.features.moments import Moments
from probes.geometry.positions import PositionFit, PositionSums
from probes.geometry.probe import Geometry
from probes.geometry.tokens import outlier_share, patch_cosine
from ssl_bench.features import Features
from ssl_bench.layers import REGISTERS
from ssl_bench.system.transfers import fetched

Cell = tuple[int, str]


class Gathered:
    """Filled batch by batch; those that positions are fitted to come before those held out.

    Attributes:
        moments: By block and facet, of what stands for the images.
        compared: By block and facet the vectors of the images whose pairs are compared.
        per_image: By block and metric a number for each image; NaN where nobody knows.
        positions: By block the share of the spread of positions that is read from the patches of
            each image that was held out.
        fits: By block what reads them.
    """

    def __init__(self, probe: Geometry, layers: Sequence[int], num_images: int) -> None:
        cells = [(layer, facet) for facet in probe.facets for layer in layers]
        self.probe, self.layers, self.num_images = probe, tuple(layers), num_images
        self.moments = {cell: Moments() for cell in cells}
        self._compared: dict[Cell, list[Tensor]] = {cell: [] for cell in cells}
        self.per_image: dict[Cell, Float[Tensor, " images"]] = {}
        self.fits: dict[int, PositionFit] = {}
        self._positions: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        self._sums = {
            role: {layer: PositionSums() for layer in layers} for role in ("fitted", "choosing")
        }

    def add(
        self,
        features: Features,
        rows: Sequence[int],
        role: str,
        compared: AbstractSet[int],
        sums: Float[Tensor, "features batch"],
    ) -> Float[Tensor, "features batch"]:
        """Take in the features of some images; gives back `sums` in host memory."""
        kept = [place for place, row in enumerate(rows) if row in compared]
        pairs: list[Tensor] = []
        for facet in self.probe.facets:
            for layer, vectors in zip(features, image_vectors(features, facet), strict=True):
                self.moments[layer, facet].add(vectors)
                pairs.append(vectors[kept] if len(kept) < len(rows) else vectors)
        numbers = {
            (layer, metric): values
            for layer, of in features.items()
            for metric, values in self._of_images(of)
        }
        for layer, of in features.items():
            self._read_positions(layer, of["token"], role)
        sums, *values = fetched([sums, *pairs, *numbers.values()])
        for cell, found in zip(self._compared, values[: len(pairs)], strict=True):
            self._compared[cell].append(found)
        for cell, found in zip(numbers, values[len(pairs) :], strict=True):
            whole = self.per_image.setdefault(cell, torch.full((self.num_images,), torch.nan))
            whole[list(rows)] = found
        return sums

    def compared(self, cell: Cell) -> Float64[Tensor, "images dim"]:
        return torch.cat(self._compared[cell]).double()

    def positions(self, layer: int) -> Float64[Tensor, " images"]:
        """Nothing where there are too few images to hold any out."""
        found = self._positions[layer]
        return torch.cat(found).cpu() if found else torch.empty(0, dtype=torch.float64)

    def _of_images(self, of: dict[str, Tensor]) -> Iterator[tuple[str, Float[Tensor, " images"]]]:
        patches = of["token"]
        yield "outlier_share", outlier_share(patches, self.probe.outlier_factor)
        if "cls" in of:
            yield "cls_patch_cosine", patch_cosine(of["cls"][:, None], patches)
        if REGISTERS in of:
            yield "register_patch_cosine", patch_cosine(of[REGISTERS], patches)

    def _read_positions(
        self, layer: int, patches: Float[Tensor, "images rows cols dim"], role: str
    ) -> None:
        if role in self._sums:
            self._sums[role][layer].add(patches)
            return
        if layer not in self.fits:
            # The sums are not needed any more, and large.
            fitted, choosing = (self._sums[role].pop(layer) for role in ("fitted", "choosing"))
            self.fits[layer] = PositionFit.of(fitted, choosing)
        self._positions[layer].append(self.fits[layer].r2(patches))
