"""Which cells a question has, and what identifies them beside its encoder."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

from ssl_bench.data.corruptions import as_settings
from ssl_bench.data.files.overlap import shared_files
from ssl_bench.data.files.readable import ReadableDataset, summary
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.data.views import OpenedOnce
from ssl_bench.evaluation.probe import Probe
from ssl_bench.results.record import CORRUPTED, TRAINED_ON, CellKey, TrainingImages


@runtime_checkable
class Question(Protocol):
    """What is asked of an encoder: with its weights and the layers it names the cells."""

    @property
    def probe(self) -> Probe: ...

    @property
    def dataset(self) -> Dataset: ...

    @property
    def seed(self) -> int: ...

    @property
    def dtype(self) -> object:
        """Of torch, or its name there."""
        ...

    @property
    def allow_overlap(self) -> bool:
        """Whether scored images may be files that something is fitted to."""
        ...


def cell_keys(
    question: Question,
    images: ImageSet,
    layers: Sequence[int],
    *,
    identity: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> list[CellKey]:
    """Every cell of a question on the split that its probe scores, known without the encoder.

    `identity` is that of `ssl_bench.models.Encoder.identity`, `settings` of `cell_settings`.
    """
    fingerprint = images.fingerprint()
    return [
        CellKey(
            task=question.probe.task,
            dataset=images.name,
            split=images.split,
            layer=layer,
            facet=facet,
            protocol=question.probe.protocol,
            metric=metric,
            **identity,
            dataset_fingerprint=fingerprint,
            seed=question.seed,
            settings=settings,
        )
        for layer, facet, metric in question.probe.cells(layers)
    ]


def cell_settings(question: Question) -> dict[str, Any]:
    """What changes the number and has no field of its own in a key.

    Cost: reads the training images for their fingerprint, so ask once.

    Raises:
        DataError: an image that is scored is a file that something is fitted to.
    """
    gone = left_out(question.dataset)
    fitted = question.probe.training_images(question.dataset)
    scored = question.probe.split(question.dataset)
    corrupted = as_settings(scored)
    shared = shared_files(fitted, scored, allowed=question.allow_overlap) if fitted else 0
    return {
        **question.probe.settings(),
        "dtype": str(question.dtype).removeprefix("torch."),
        **({TRAINED_ON: asdict(trained_on(fitted))} if fitted else {}),
        **({CORRUPTED: corrupted} if corrupted else {}),
        **({"fitted_and_scored": shared} if shared else {}),
        # Among the settings, so that no table shows it beside numbers of all images.
        **({"left_out": summary(gone)} if gone else {}),
    }


def trained_on(images: ImageSet) -> TrainingImages:
    """What a record says of the images that something was fitted to."""
    return TrainingImages(images.split, images.fingerprint(), len(images))


def left_out(dataset: Dataset) -> dict[str, list[str]]:
    sieve = dataset.dataset if isinstance(dataset, OpenedOnce) else dataset
    return sieve.left_out() if isinstance(sieve, ReadableDataset) else {}
