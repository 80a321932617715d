"""What a question lacks: cells without a record, and files that belong to a record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ssl_bench.data.samples import ImageSet
from ssl_bench.evaluation.image_size import earlier_settings
from ssl_bench.evaluation.probe import Probe
from ssl_bench.models import Encoder, EncoderIdentity
from ssl_bench.results import CellKey, Record, ResultStore, stride_of
from ssl_bench.system import naming


def pictures_folder(
    store: ResultStore, task: str, images: ImageSet, encoder: str, encoder_id: str
) -> Path:
    """Where the pictures of these images by an encoder of that name and id are."""
    beginning = naming.encoder_folder(encoder, encoder_id)
    folder = naming.pictures_folder(beginning, images.fingerprint())
    return store.root / "pictures" / task / naming.file_name(images.name) / folder


@dataclass(frozen=True)
class Pending:
    """What is to be done.

    Attributes:
        cells: Whose records are to be written.
        layers: That are to be run for them and for pictures, in the order asked for.
        finished: Records of the other cells.
    """

    cells: frozenset[CellKey]
    layers: tuple[int, ...]
    finished: Mapping[CellKey, Record]

    @classmethod
    def everything(cls, keys: Sequence[CellKey]) -> "Pending":
        return cls(frozenset(keys), _layers(keys), {})


def find_pending(
    probe: Probe,
    encoder: Encoder | EncoderIdentity,
    keys: Sequence[CellKey],
    images: ImageSet,
    store: ResultStore,
    folder: Path,
) -> Pending:
    """Cells that are not finished, and the layers whose pictures are not all in `folder`.

    A picture of several layers is drawn by a run of all of them, so that none ever shows a part.
    """
    earlier, found = earlier_settings(probe, encoder), dict[CellKey, Record | None]()
    for key in keys:
        with_images = probe.keeps_images and key.metric not in probe.metrics_of_sets
        found[key] = _finished(key, store, keeps_images=with_images)
        if found[key] is None and earlier:
            known_as = replace(key, settings={**key.settings, **earlier})
            found[key] = _finished(known_as, store, keeps_images=with_images)
    finished = {key: record for key, record in found.items() if record is not None}
    cells = frozenset(key for key in keys if key not in finished)
    asked, layers = _layers(keys), {key.layer for key in cells}
    drawn = _drawn(probe, keys, images) if keys else {}
    for name, shown in drawn.items():
        if not (folder / name).is_file():
            layers.update(shown)
    for shown in drawn.values():
        if not layers.isdisjoint(shown):
            layers.update(shown)
    return Pending(cells, tuple(layer for layer in asked if layer in layers), finished)


def _drawn(probe: Probe, keys: Sequence[CellKey], images: ImageSet) -> dict[str, tuple[int, ...]]:
    """Every file and what it shows, drawn stage by stage as `ProbeContext.stages` has them."""
    stages: dict[int | None, list[CellKey]] = {}
    for key in keys:
        stages.setdefault(stride_of(key.architecture, key.layer), []).append(key)
    drawn: dict[str, tuple[int, ...]] = {}
    for of_stage in stages.values():
        for name, shown in probe.pictures(_layers(of_stage), images, keys[0].seed).items():
            drawn[name] = (*drawn.get(name, ()), *shown)
    return drawn


def _finished(key: CellKey, store: ResultStore, *, keeps_images: bool) -> Record | None:
    """Its record, if it is there, and what each image contributed to it."""
    if keeps_images and not store.path(key).with_suffix(".npz").is_file():
        return None
    return store.load(key)


def _layers(keys: Sequence[CellKey]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(key.layer for key in keys))
