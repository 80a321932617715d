"""The interface of a probe: what it is given, and what it gives."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.evaluation.passed import Passed
from ssl_bench.models import Encoder
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


@runtime_checkable
class Probe(Protocol):
    """A question asked of every block of a frozen encoder."""

    @property
    def task(self) -> str: ...

    @property
    def protocol(self) -> str: ...

    @property
    def role(self) -> str:
        """What the dataset must support: a role of `ssl_bench.data.samples.Dataset`."""
        ...

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        """Every (layer, facet, metric) that `run` will score."""
        ...

    def split(self, dataset: Dataset) -> ImageSet:
        """The images that are scored."""
        ...

    def training_images(self, dataset: Dataset) -> ImageSet | None:
        """The images that something is fitted to before others are scored; None for nothing."""
        ...

    def settings(self) -> dict[str, Any]:
        """What changes the number, as plain JSON types."""
        ...

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score the layers of the context, each as soon as it is known."""
        ...


def called(probe: Probe) -> str:
    """Its task, such as "tokencut", or "tokencut, adaptive" in one of its further protocols."""
    protocol = getattr(probe, "protocol", None)
    is_further = protocol in getattr(probe, "further_protocols", ())
    return f"{probe.task}, {protocol}" if is_further else probe.task
