"""The interface of a probe: what it is given, and what it gives."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.errors import UnfitEncoder
from ssl_bench.evaluation.passed import Passed
from ssl_bench.layers import AskedFacets
from ssl_bench.models import Encoder, EncoderIdentity
from ssl_bench.results.record import PerImage, Record

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@runtime_checkable
class Progress(Protocol):
    """Shows how far an iteration is; gives back the items of `items` unchanged."""

    def __call__(
        self, items: Iterable[T], description: str, total: int | None = None
    ) -> Iterable[T]: ...


@dataclass(frozen=True)
class ProbeContext:
    """Everything a probe needs for one checkpoint and one dataset.

    Attributes:
        say: Tells the user one line that no record holds.
        known: Records of asked cells that are finished; their scores need not be given again.
        passed: What probes before this one got from this encoder of the same images.
    """

    encoder: Encoder
    dataset: Dataset
    layers: tuple[int, ...]
    device: "torch.device"
    dtype: "torch.dtype"
    seed: int
    artifacts: Path
    progress: Progress
    overwrite: bool = False
    say: Callable[[str], None] = print
    known: Sequence[Record] = ()
    passed: Passed = field(default_factory=dict)

    def stages(self) -> list["ProbeContext"]:
        """One for the asked blocks of each grid and width; one alone where all are alike."""
        return [
            replace(self, encoder=encoder, layers=layers)
            for encoder, layers in self.encoder.stages(self.layers)
        ]


@dataclass(frozen=True)
class Score:
    """One number of one block and how sure it is.

    Attributes:
        unit: "%", or nothing for a plain number.
        details: What else a record says; "undefined" is why the value is NaN, which tables print.
        per_image: What each image contributes, in the same order for all blocks, facets and
            encoders; pairs images when two scores are compared.
    """

    layer: int
    facet: str
    metric: str
    value: float
    ci95: tuple[float, float] | None
    num_images: int
    details: Mapping[str, Any] = field(default_factory=dict)
    per_image: PerImage | None = field(default=None, repr=False, compare=False)
    unit: str = "%"


class Probe:
    """A question asked of every block of a frozen encoder: a frozen dataclass of this class.

    What a probe does not say has the values below. Its own fields are what a user can set.

    Attributes:
        task: Its name on the command line.
        role: What the dataset must support: a role of `ssl_bench.data.samples.Dataset`.
        protocol: Field of the preset that the other fields' values come from; records carry it.
        keeps_images: Whether its scores come with what each image contributes.
        metrics_of_sets: Scores of a whole set, to which no image contributes alone.
        further_protocols: Presets that `--task all` runs too.
        protocols_by_role: What `protocol` is for a dataset that supports a role, where nobody
            typed one; likewise `truths_by_role` and `max_sides_by_role` for these fields.
        rounds_size: Whether it fits `image_size` to the patch of the encoder itself.
        not_settings: Fields that change no number, or are said elsewhere in a record.
    """

    task: str
    protocol: Any
    role: Any
    keeps_images: ClassVar[bool] = False
    metrics_of_sets: ClassVar[Collection[str]] = ()
    further_protocols: ClassVar[Sequence[str]] = ()
    protocols_by_role: ClassVar[Mapping[str, str]] = MappingProxyType({})
    truths_by_role: ClassVar[Mapping[str, str]] = MappingProxyType({})
    max_sides_by_role: ClassVar[Mapping[str, int | None]] = MappingProxyType({})
    rounds_size: ClassVar[bool] = False
    not_settings: ClassVar[Collection[str]] = ("protocol", "facet", "num_workers", "guesses")

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        """Every (layer, facet, metric) that `run` will score."""
        raise NotImplementedError

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score the layers of the context, each as soon as it is known."""
        raise NotImplementedError

    @property
    def asked_facets(self) -> AskedFacets | None:
        """What of a block it looks at, where that may name a block."""
        return None

    def require_fitting(self, encoder: Encoder | EncoderIdentity) -> None:
        """Refuse an encoder for whose blocks there is no answer.

        Raises:
            UnfitEncoder: a facet is of [CLS], which the encoder has not.
        """
        facets = self.asked_facets.names if self.asked_facets else ()
        if not encoder.has_cls and {"cls", "cls_patch_mean"}.intersection(facets):
            raise UnfitEncoder(f"{encoder.name} has no [CLS] token; take probe.facet=patch_mean")

    def fitted_to_images(self, dataset: Dataset, typed: Collection[str]) -> "Probe":
        """Itself, with values that the images of a dataset allow in fields that nobody typed."""
        del dataset, typed
        return self

    def split(self, dataset: Dataset) -> ImageSet:
        """The images that are scored."""
        return dataset.val()

    def training_images(self, dataset: Dataset) -> ImageSet | None:
        """The images that something is fitted to before others are scored; None for nothing."""
        del dataset
        return None

    def settings(self) -> dict[str, Any]:
        """What changes the number, as plain JSON types."""
        fields: Any = self
        return {n: value for n, value in asdict(fields).items() if n not in self.not_settings}

    def pictures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        """Every file that a run of these layers leaves, and which of them it shows.

        Paths are relative to `ProbeContext.artifacts`.
        """
        del layers, images, seed
        return {}


def called(probe: Probe) -> str:
    """Its task, such as "tokencut", or "tokencut, adaptive" in one of its further protocols."""
    is_further = probe.protocol in probe.further_protocols
    return f"{probe.task}, {probe.protocol}" if is_further else probe.task
