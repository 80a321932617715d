"""Which cells of checkpoints x probes x datasets are pending."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ssl_bench.asked import asked_encoders, planned_probes, require_layers
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import UnfitEncoder
from ssl_bench.evaluation import called, cell_keys, cell_settings
from ssl_bench.evaluation.pending import find_pending, pictures_folder
from ssl_bench.layers import layers_of
from ssl_bench.models import EncoderIdentity, identify_encoder
from ssl_bench.models.loading.addresses import is_baseline, layers_asked
from ssl_bench.planning import PlannedProbe, sharing_datasets
from ssl_bench.results import CellKey, ResultStore, encoder_id
from ssl_bench.results.store import first_few
from ssl_bench.system.progress import say


@dataclass(frozen=True)
class Job:
    """The cells of one encoder, one probe and one dataset, or those of some of their blocks.

    Attributes:
        layers: Block indices.
        is_share: Whether other jobs have further blocks that were asked for.
        arguments: `ssl-bench` with these computes what is pending and nothing else.
    """

    encoder: EncoderIdentity
    planned: PlannedProbe
    layers: tuple[int, ...]
    is_share: bool
    dataset: str
    split: str
    keys: tuple[CellKey, ...]
    pending: tuple[CellKey, ...]
    arguments: tuple[str, ...]

    @property
    def title(self) -> str:
        where = f"{self.dataset} {self.split}"
        return f"{self.planned.probe.task}{self.blocks} on {where}, {self.encoder.name}"

    @property
    def blocks(self) -> str:
        """Such as ", blocks 0 to 3" of a share."""
        ends = dict.fromkeys([self.layers[0], self.layers[-1]])
        return f", blocks {' to '.join(map(str, ends))}" if self.is_share else ""


def plan_sweep(
    options: argparse.Namespace,
    overrides: Sequence[str],
    *,
    at_least: int = 1,
    needs_all: bool = False,
) -> list[Job]:
    """The jobs of a sweep, checkpoint by checkpoint; nothing is computed or written.

    What does not fit an encoder is said and left out, unless all is needed or nothing else is left.

    Args:
        options: Of the command.
        overrides: KEY=VALUE.
        at_least: So many jobs, if need be by shares of the blocks: each passes the images anew.
        needs_all: What does not fit an encoder is refused.

    Raises:
        SslBenchError: As `probe` with the same arguments.
    """
    if options.device not in (None, "cpu"):
        # A word that torch does not know is better met here than by every job.
        from ssl_bench.system.device import named_device

        named_device(options.device)
    require_layers(options)
    uris = asked_encoders(options)
    plan = planned_probes(options, overrides)
    # For the plan alone: what runs later looks at the files as they are then.
    questions = sharing_datasets(plan)
    for question in questions:
        question.require_images()
    encoders = _distinct(identify_encoder(uri) for uri in uris)
    store = ResultStore(Path(options.out))
    asked = [
        (planned, question.probe.split(question.dataset), _beside_its_own(question))
        for planned, question in zip(plan, questions, strict=True)
    ]
    jobs, unfit, num_questions = list[Job](), list[UnfitEncoder](), len(encoders) * len(asked)
    for encoder in encoders:
        known_as = encoder_id(encoder.identity())
        asked_layers = layers_asked(encoder.uri, options.layer)
        for planned, images, settings in asked:
            try:
                fitted = planned.fitted_to(encoder)
            except UnfitEncoder as error:
                if needs_all and not is_baseline(encoder.uri):
                    raise
                unfit.append(error)
                say(f"left out: {planned.probe.task} on {planned.dataset.name}: {error}")
                continue
            layers = layers_of(fitted.probe.asked_facets, asked_layers, encoder.depth)
            folder = pictures_folder(store, fitted.probe.task, images, encoder.name, known_as)
            shares = _shares(fitted, layers, images, -(-at_least // num_questions))
            for share in shares:
                keys = cell_keys(
                    fitted,
                    images,
                    share,
                    identity=encoder.identity(),
                    settings={**settings, **fitted.probe.settings()},
                )
                found = find_pending(fitted.probe, encoder, keys, images, store, folder)
                # Where pictures alone are missing, the cells that are run for them.
                left = found.cells or [key for key in keys if key.layer in found.layers]
                is_share = len(shares) > 1
                words = ",".join(map(str, share)) if is_share else asked_layers
                jobs.append(
                    Job(
                        encoder=encoder,
                        planned=planned,
                        layers=share,
                        is_share=is_share,
                        dataset=images.name,
                        split=images.split,
                        keys=tuple(keys),
                        pending=tuple(key for key in keys if key in left),
                        arguments=_arguments(options, planned, encoder.uri, words),
                    )
                )
    if unfit and not jobs:
        raise unfit[0]
    if store.unreadable:
        say(f"to be computed again: {first_few(store.unreadable)}")
    return jobs


def _shares(
    question: PlannedProbe, layers: tuple[int, ...], images: ImageSet, count: int
) -> list[tuple[int, ...]]:
    """Blocks of so many jobs; all of one where a cell or a picture is of several of them."""
    count = min(count, len(layers))
    ends = [len(layers) * number // count for number in range(count + 1)]
    shares = [layers[start:end] for start, end in pairwise(ends)]
    probe = question.probe
    if {cell for share in shares for cell in probe.cells(share)} != {*probe.cells(layers)}:
        return [layers]
    drawn = probe.pictures(layers, images, question.seed) if count > 1 else {}
    if any(len(shown) > 1 for shown in drawn.values()):
        why = "its pictures show several blocks (of segmentation none with probe.panels=0)"
        say(f"{called(probe)} is one job: {why}")
        return [layers]
    return shares


def _beside_its_own(question: PlannedProbe) -> dict[str, Any]:
    """The settings of cells that are not the probe's, which hang on the encoder."""
    own = question.probe.settings()
    return {name: value for name, value in cell_settings(question).items() if name not in own}


def _distinct(encoders: Iterable[EncoderIdentity]) -> list[EncoderIdentity]:
    """Without those that came before under another address: their cells are the same."""
    found: dict[str, EncoderIdentity] = {}
    for encoder in encoders:
        first = found.setdefault(encoder_id(encoder.identity()), encoder)
        if first is not encoder:
            say(f"{encoder.uri} is the encoder of {first.uri}, which stands for both")
    return list(found.values())


def _arguments(
    options: argparse.Namespace, planned: PlannedProbe, uri: str, layers: str
) -> tuple[str, ...]:
    task, dataset = planned.choice
    flags = {
        "--task": task,
        "--layer": layers,
        "--checkpoint": uri,
        "--dataset": dataset,
        "--data-root": planned.root,
        "--out": options.out,
        "--device": options.device,
        "--on-bad-image": options.on_bad_image,
    }
    words = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
    return ("probe", *words, *planned.overrides)
