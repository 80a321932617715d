"""What passes the encoder: every image once, and random views of some."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from probes.features.image import image_vectors
from probes.features.sources import parts_of
from probes.features.stream import at_once, batches, read_ahead
from probes.features.views import ResizedCrops
from probes.geometry.gathered import Gathered
from probes.geometry.probe import Geometry
from probes.heads.kept import KeptState
from ssl_bench.data.central_square import central_square
from ssl_bench.data.locations import cache_folder
from ssl_bench.data.samples import ImageSet, Sample
from ssl_bench.evaluation import ProbeContext
from ssl_bench.features import FeatureExtractor
from ssl_bench.layers import REGISTERS, Facet
from ssl_bench.results import encoder_id
from ssl_bench.system.transfers import fetched, sent

Cell = tuple[int, str]
# Of the images, for reading positions: to choose the penalty with, and to score on.
_SHARE = 0.2


@dataclass(frozen=True)
class Roles:
    """Which images serve what; indices into the set, ascending, drawn with the seed.

    Attributes:
        fitted: Positions are fitted to them; with `choosing` and `held_out` these are all.
        compared: Whose pairs make uniformity.
        viewed: That are also looked at in random views.
    """

    fitted: tuple[int, ...]
    choosing: tuple[int, ...]
    held_out: tuple[int, ...]
    compared: frozenset[int]
    viewed: tuple[int, ...]

    @classmethod
    def draw(cls, count: int, probe: Geometry, seed: int) -> "Roles":
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        # Fewer than three images cannot be divided, and no position is read.
        part = max(1, round(_SHARE * count)) if count > 2 else 0
        parts = (order[2 * part :], order[part : 2 * part], order[:part])
        fitted, choosing, held_out = (tuple(sorted(some)) for some in parts)
        compared = frozenset(order[: probe.pair_images])
        return cls(fitted, choosing, held_out, compared, tuple(sorted(order[: probe.view_images])))


@dataclass(frozen=True)
class GeometryPasses:
    """All that passes the encoder for a probe."""

    probe: Geometry
    context: ProbeContext

    def images(self, images: ImageSet, roles: Roles) -> Gathered:
        """Every image once, those that positions are fitted to before those that are scored."""
        extractor = self._extractor(self._token_parts())
        found = Gathered(self.probe, self.context.layers, len(images))
        order = (*roles.fitted, *roles.choosing, *roles.held_out)
        squares = read_ahead(images, order, self._square(), workers=self.probe.num_workers)
        shown = iter(self.context.progress(squares, "geometry", len(order)))
        for role in ("fitted", "choosing", "held_out"):
            indices: tuple[int, ...] = getattr(roles, role)
            for batch in batches(
                zip(indices, islice(shown, len(indices)), strict=True), self._at_once
            ):
                rows = [index for index, _ in batch]
                pixels = torch.stack([square for _, square in batch])
                features, sums = extractor.unchecked(
                    sent(pixels, self.context.device).float() / 255
                )
                checked = found.add(features, rows, role, roles.compared, sums)
                extractor.check(checked, [images.ids[row] for row in rows])
        return found

    def views(
        self, images: ImageSet, roles: Roles
    ) -> Mapping[Cell, Float[Tensor, "images views _dim"]]:
        """Vectors of random views of some images, in host memory; goes on where a run ended."""
        kept = self.kept_views(images, roles)
        # Of each image and facet "layers views dim".
        done: list[list[Tensor]] = list(kept.found.get("views", ()))
        left = roles.viewed[len(done) :]
        extractor = self._extractor(())
        made = read_ahead(images, left, self._crops(), workers=self.probe.num_workers)
        shown = self.context.progress(
            made, f"geometry, {self.probe.views} views of each image", len(left)
        )
        try:
            for index, crops in zip(left, shown, strict=True):
                done.append(self._vectors(extractor, crops, images.ids[index]))
                if kept.is_due():
                    kept.write({"views": done})
        except BaseException:
            if len(done) > len(roles.viewed) - len(left):
                kept.write({"views": done})
            raise
        by_facet = zip(self.probe.facets, map(torch.stack, zip(*done, strict=True)), strict=True)
        return {
            (layer, facet): vectors[:, place]
            for facet, vectors in by_facet
            for place, layer in enumerate(self.context.layers)
        }

    def _vectors(
        self, extractor: FeatureExtractor, crops: Float[Tensor, "views 3 size size"], image_id: str
    ) -> list[Float[Tensor, "layers views _dim"]]:
        parts = []
        for part in crops.split(self._at_once):
            features, sums = extractor.unchecked(sent(part, self.context.device))
            vectors = [image_vectors(features, facet) for facet in self.probe.facets]
            sums, *vectors = fetched([sums, *vectors])
            extractor.check(sums, [image_id] * len(part))
            parts.append(vectors)
        return [torch.cat(some, 1) for some in zip(*parts, strict=True)]

    def kept_views(self, images: ImageSet, roles: Roles) -> KeptState:
        """What is kept of views until the scores are known, named after all it depends on."""
        context = self.context
        facts = (
            encoder_id(context.encoder.identity()),
            (images.fingerprint(), roles.viewed, context.layers, context.seed),
            (str(context.dtype), context.device.type, self._size),
            (self.probe.facets, self.probe.views, self.probe.view_area),
        )
        name = f"{sha256(repr(facts).encode()).hexdigest()[:16]}.views"
        return KeptState(cache_folder(None) / "features" / name, 1.0, context.say)

    def _extractor(self, more: Iterable[Facet]) -> FeatureExtractor:
        parts = [part for facet in self.probe.facets for part in parts_of(facet)]
        return FeatureExtractor(
            self.context.encoder,
            layers=self.context.layers,
            facets=tuple(dict.fromkeys([*parts, *more])),
            device=self.context.device,
            dtype=self.context.dtype,
        )

    def _token_parts(self) -> Iterator[Facet]:
        """What patches are compared with, as blocks give it, as far as the encoder has it."""
        yield "token"
        if self.context.encoder.has_cls:
            yield "cls"
        if self.context.encoder.num_registers:
            yield REGISTERS

    @property
    def _at_once(self) -> int:
        return at_once(self.probe.batch_size, self._size, self.context.device)

    @property
    def _size(self) -> int:
        return self.probe.image_size or min(self.context.encoder.native_size)

    def _square(self) -> Callable[[Sample], UInt8[Tensor, "3 size size"]]:
        size, share = self._size, self.probe.crop_share
        return lambda sample: central_square(sample.image, size, share=share)

    def _crops(self) -> Callable[[Sample], Float[Tensor, "views 3 size size"]]:
        size, (least, most) = self._size, self.probe.view_area
        crops = ResizedCrops(self.probe.views, self.context.seed, area=(least, most))

        def views(sample: Sample) -> Float[Tensor, "views 3 size size"]:
            # Crops come with a mask, of which nothing is asked here.
            empty = replace(sample, mask=np.zeros(sample.image.shape[:2], np.uint8))
            return torch.stack([crops.view(empty, n, size)[0] for n in range(crops.count)])

        return views
