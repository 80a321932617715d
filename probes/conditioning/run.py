"""Conditioning of one encoder on one dataset: passes, scores, figure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float

from probes.conditioning.cka import linear_cka_ci95
from probes.conditioning.figure import CkaMatrix, draw
from probes.conditioning.matrices import Spectrum, block_spectra
from probes.conditioning.passes import Passes, block_passes, initialised_again
from probes.conditioning.probe import CELLS, CKA_FILE, SPECTRA_FILE, Conditioning, title_of
from probes.conditioning.scores import (
    SAME,
    cka_matrix,
    cka_with_input,
    exact_scores,
    lanczos_scores,
    left,
    mean_log_scores,
    plain,
    require_same_tokens,
    save_spectra,
    spectra_scores,
)
from ssl_bench.data.samples import Sample
from ssl_bench.errors import CheckpointError
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.layers import resolve_layers
from ssl_bench.models import Encoder, load_encoder
from ssl_bench.system.files import write_atomically


def all_scores(probe: Conditioning, context: ProbeContext) -> Iterator[Score]:
    """What `probe` describes, on the encoder and the dataset of `context`."""
    if probe.at_initialisation:
        encoder = initialised_again(context.encoder, context.seed)
        context = replace(context, encoder=encoder)
    yield from ConditioningRun(probe, context).scores()


@dataclass(frozen=True)
class ConditioningRun:
    """As `all_scores`, with the encoder that is looked at."""

    probe: Conditioning
    context: ProbeContext

    def scores(self) -> Iterator[Score]:
        """Score block after block, then draw."""
        images, encoder = self.probe.split(self.context.dataset), self.context.encoder
        count = min(self.probe.num_images, len(images))
        if count < len(images):
            words = f"conditioning: the first {count} of {len(images)} images"
            self.context.say(f"{words}; probe.num_images={len(images)} takes all")
        samples = [images[number] for number in range(count)]
        found: list[Score] = []
        for score in self._found(encoder, samples):
            found.append(score)
            yield score
        yield from self._undefined(found, len(samples))

    def _found(self, encoder: Encoder, samples: Sequence[Sample]) -> Iterator[Score]:
        if self.probe.protocol == "mean_log":
            yield from self._averaged(samples)
            return
        passes, embedded = block_passes(encoder, samples, self.probe.image_size, self.context)
        if self.probe.protocol == "checkpoints":
            yield from self._compared(passes, samples)
        else:
            yield from self._scored(passes, embedded)

    def _scored(
        self, passes: Passes, embedded: Float[torch.Tensor, "images tokens dim"]
    ) -> Iterator[Score]:
        scores: list[Score] = []
        spectra: dict[int, Mapping[str, Spectrum]] = {}
        for layer in self.context.progress(passes, "blocks", len(passes)):
            if self.probe.protocol == "spectra":
                spectra[layer] = block_spectra(passes[layer])
                found = spectra_scores(layer, spectra[layer])
                found.append(cka_with_input(layer, passes[layer]))
            elif known := self._known(layer):
                found = known
            elif self.probe.protocol == "jacobian_exact":
                found = exact_scores(layer, passes[layer])
            else:
                found = lanczos_scores(
                    layer, passes[layer], self.probe.num_steps, self.context.seed
                )
            scores += found
            yield from found
        likeness, path = None, self._path()
        if self.probe.protocol == "spectra":
            save_spectra(spectra, path.with_name(f"{path.name}-{SPECTRA_FILE}"))
            names = ["input", *map(str, passes)]
            states = [embedded, *map(left, passes.values())]
            likeness = CkaMatrix(cka_matrix(states, states), names, names, "")
            values = likeness.values
            write_atomically(
                path.with_name(f"{path.name}-{CKA_FILE}"), lambda file: np.save(file, values)
            )
        draw(scores, likeness, self._title(len(embedded)), path.with_name(f"{path.name}.png"))

    def _averaged(self, samples: Sequence[Sample]) -> Iterator[Score]:
        """Means over blocks, also over those that nobody asked for by themselves."""
        encoder, asked = self.context.encoder, self.context.layers
        whole = replace(self.context, layers=tuple(range(max(asked) + 1)))
        passes, _ = block_passes(encoder, samples, self.probe.image_size, whole)
        yield from mean_log_scores(asked, passes)

    def _known(self, layer: int) -> list[Score]:
        """Scores of a block that an earlier run finished; nothing if it lacks any."""
        known = [
            plain(r.layer, r.facet, r.metric, r.value, r.ci95, r.num_images, r.details)
            for r in self.context.known
            if r.layer == layer
        ]
        return known if len(known) == len(CELLS[self.probe.protocol]) else []

    def _compared(self, passes: Passes, samples: Sequence[Sample]) -> Iterator[Score]:
        other = load_encoder(str(self.probe.compare_to))
        if title_of(other) != self.probe.compared_encoder:
            raise CheckpointError(
                f"{self.probe.compare_to} was replaced while it was read; type the command again"
            )
        layers = resolve_layers("all", other.depth)
        theirs, _ = block_passes(
            other,
            samples,
            self.probe.image_size,
            replace(self.context, encoder=other, layers=layers),
        )
        ours = {layer: left(some) for layer, some in passes.items()}
        states = {layer: left(some) for layer, some in theirs.items()}
        require_same_tokens(self.context.encoder, ours, other, states)
        matrix = cka_matrix(list(ours.values()), list(states.values()))
        details = {"other": other.name, "other_sha256": other.sha256}
        scores = []
        for row, (layer, state) in zip(matrix, ours.items(), strict=True):
            if layer not in states:
                continue
            ci95 = linear_cka_ci95(state, states[layer])
            more = {**details, "with_every_block": row.tolist()}
            value = float(row[layer])
            scores.append(
                plain(layer, "token", "cka_with_checkpoint", value, ci95, len(samples), more)
            )
            yield scores[-1]
        likeness = CkaMatrix(matrix, list(map(str, ours)), list(map(str, states)), other.name)
        path = self._path()
        draw(scores, likeness, self._title(len(samples)), path.with_name(f"{path.name}.png"))

    def _undefined(self, found: Sequence[Score], num_images: int) -> Iterator[Score]:
        """No numbers, with a reason, for cells of blocks that cannot be taken apart."""
        have = {(score.layer, score.facet, score.metric) for score in found}
        missing = [cell for cell in self.probe.cells(self.context.layers) if cell not in have]
        why = "no pre-norm block of plain softmax attention and an MLP"
        if self.probe.protocol == "checkpoints":
            why = "the other encoder has no such block"
        facets: dict[int, dict[str, None]] = {}
        for layer, facet, _ in missing:
            facets.setdefault(layer, {})[facet] = None
        layers: dict[tuple[str, ...], list[int]] = {}
        for layer, lacking in facets.items():
            layers.setdefault(tuple(lacking), []).append(layer)
        for lacking, blocks in layers.items():
            self.context.say(
                f"conditioning: {self.context.encoder.name}, block {', '.join(map(str, blocks))}: "
                f"no number for {', '.join(lacking)}: {why}"
            )
        for score in found:
            if np.isnan(score.value) and score.details["undefined"] == SAME:
                self.context.say(
                    f"conditioning: block {score.layer}: {score.metric} of {score.facet} is "
                    f"undefined, {SAME}"
                )
        for cell in missing:
            yield plain(*cell, float("nan"), None, num_images, {"undefined": why})

    def _path(self) -> Path:
        """Of the figure, without its end."""
        return self.context.artifacts / self.probe.stem(self.context.layers, self.context.seed)

    def _title(self, num_images: int) -> str:
        probe, context = self.probe, self.context
        when = f" at initialisation, seed {context.seed}" if probe.at_initialisation else ""
        return (
            f"{context.encoder.name}{when}: {probe.protocol}, {num_images} images of "
            f"{probe.image_size} x {probe.image_size}"
        )
