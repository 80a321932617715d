"""PCA maps: three principal components of the patch features as red, green and blue."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from probes.pictures import blocks_name
from ssl_bench.composition.fields import Count, FilePath, Pixels, check_fields
from ssl_bench.data.limited import sampled
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.layers import INNER_FACETS, AskedFacets, Facet, asked_facets
from ssl_bench.system.naming import image_name

FILE = "reference.npz"
"""Maps that others are aligned with, beside the pictures."""
_FACETS: tuple[Facet, ...] = ("token", "token_normed", "key", "query", "value", *INNER_FACETS)
# What is drawn and how, not what the variance is.
_AT_LEAST = 224
_NOT_SETTINGS = ("protocol", "facet", "align_to", "grid", "own_size")


@dataclass(frozen=True)
class PCA(Probe):
    """PCA maps of some images of a dataset, in colours that agree between blocks.

    Attributes:
        protocol: "image" fits the components on each image, "batch" on all drawn images, "dataset"
            on all images of the dataset; with these two a colour means the same in every image.
        facet: What is projected: token, token_normed, key, query, value, attn_out, attn_skip,
            mlp_hidden, mlp_out, or a submodule of a block.
        panels: How many images are projected and drawn, from all over the set.
        image_size: Longer side in pixels; both sides are rounded to multiples of the patch. Without
            it the encoder's own, and at least 224.
        own_size: What that is, known once the encoder is; another one is in the name of the folder
            of pictures.
        squash: Side of the square that images are squashed to instead, whatever their shape; that
            of an encoder that takes no other size.
        background: "keep", or "first_component": patches on one side of the first component are
            left out and the components fitted again without them; see `foreground`.
        align_to: Folder of pictures, or name of a checkpoint that was probed into the same folder
            with the same protocol, whose colours are taken over; null for the checkpoint's own
            last block.
        grid: What the overview is saved as: png, svg or both.
    """

    protocol: Literal["image", "batch", "dataset"] = "image"
    facet: str = "token"
    panels: Count = 8
    image_size: Pixels | None = None
    own_size: int | None = field(default=None, init=False)
    squash: Pixels | None = None
    background: Literal["keep", "first_component"] = "keep"
    align_to: FilePath | None = None
    grid: Literal["png", "svg", "both"] = "png"

    task = "pca"
    role = "images"
    rounds_size = True

    def __post_init__(self) -> None:
        check_fields(self, "probe")
        asked_facets(self.facet, _FACETS)
        if self.protocol == "dataset" and self.background != "keep":
            raise ConfigurationError(
                "probe.background must be keep for probe.protocol=dataset, whose images pass the "
                f"encoder once, got {self.background!r}"
            )

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [(layer, self.scored_facet, "explained_variance") for layer in layers]

    def split(self, dataset: Dataset) -> ImageSet:
        return dataset.images()

    def training_images(self, dataset: Dataset) -> None:
        """Nothing is fitted to other images than those that are scored."""

    def settings(self) -> dict[str, Any]:
        # Records of before this option had none.
        left_out = {*_NOT_SETTINGS, *(["squash"] if self.squash is None else [])}
        return {name: v for name, v in asdict(self).items() if name not in left_out}

    def shown_to(self, native_size: tuple[int, int]) -> "PCA":
        """The same with images of a size, for an encoder with images of that one."""
        own_size = max(_AT_LEAST, *native_size)
        fitted = replace(self, image_size=self.image_size or own_size)
        object.__setattr__(fitted, "own_size", own_size)
        return fitted

    def pictures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        del seed
        together = [f"{blocks_name(layers)}.{kind}" for kind in self.grid_kinds]
        shown = {f"{self.kind}/{name}": layers for name in (*together, FILE)}
        for image_id in sampled(images.ids, self.panels):
            for layer in layers:
                shown[f"{self.kind}/block{layer:02d}/{image_name(image_id)}"] = [layer]
        return shown

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Draw the maps, then score the variance that three components explain."""
        from probes.pca.run import PCARun

        yield from PCARun(self, context).scores()

    @property
    def asked_facets(self) -> AskedFacets:
        return asked_facets(self.facet, _FACETS)

    @property
    def scored_facet(self) -> Facet:
        """As records have it."""
        return self.asked_facets.names[0]

    @property
    def grid_kinds(self) -> tuple[str, ...]:
        """Ends of the names of the overviews."""
        return ("png", "svg") if self.grid == "both" else (self.grid,)

    @property
    def kind(self) -> str:
        """Name of the folder of the pictures."""
        more = [self.scored_facet] if self.scored_facet != "token" else []
        more += ["foreground"] if self.background != "keep" else []
        more += [f"{self.image_size}px"] if self.own_size not in (None, self.image_size) else []
        return "-".join([self.protocol, *more])
