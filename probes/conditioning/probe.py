"""How well conditioned every block is: its matrices, its Jacobians, its likeness to others."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from probes.conditioning.cka import linear_cka_ci95
from probes.conditioning.figure import CkaMatrix, draw
from probes.conditioning.matrices import FACETS, OUTPUTS, Spectrum, block_spectra
from probes.conditioning.passes import Passes, block_passes, initialised_again
from probes.conditioning.scores import (
    BLOCK_JACOBIANS,
    ESTIMATE,
    cka_matrix,
    cka_with_input,
    entered,
    exact_scores,
    lanczos_scores,
    left,
    plain,
    require_same_tokens,
    save_spectra,
    spectra_scores,
)
from probes.pictures import blocks_name
from ssl_bench.composition.fields import Count, Pixels, check_fields
from ssl_bench.data.samples import Dataset, ImageSet, Sample
from ssl_bench.errors import CheckpointError, ConfigurationError
from ssl_bench.evaluation import ProbeContext, Score
from ssl_bench.layers import resolve_layers
from ssl_bench.models import Encoder, EncoderIdentity, identify_encoder, load_encoder
from ssl_bench.results import encoder_id
from ssl_bench.system.files import write_atomically

_MATRIX_CELLS = [(facet, m) for facet in FACETS for m in ("condition_number", "effective_rank")]
_COSINE_CELLS = [(facet, "mean_cosine") for facet in OUTPUTS]
_TERMS = [("dominant", "norm"), ("perturbation", "norm"), ("perturbation", "norm_over_dominant")]
CELLS: Mapping[str, Sequence[tuple[str, str]]] = {
    "spectra": [*_MATRIX_CELLS, *_COSINE_CELLS, ("token", "cka_with_input")],
    "jacobian_exact": [
        *((f, m) for f in BLOCK_JACOBIANS for m in ("condition_number", "effective_rank")),
        *_TERMS,
    ],
    # Other names, so that no bound stands in a table as if it were the number.
    "jacobian_lanczos": [
        *((f, "condition_number_at_least") for f in BLOCK_JACOBIANS),
        *((f, "effective_rank" + ESTIMATE) for f in BLOCK_JACOBIANS),
        *((f, m + ESTIMATE) for f, m in _TERMS),
    ],
    "checkpoints": [("token", "cka_with_checkpoint")],
}
_SPECTRA, _CKA = "spectra.npz", "cka.npy"


@dataclass(frozen=True)
class Conditioning:
    """Condition numbers, effective ranks, token cosines, Jacobians and CKA of every block.

    Attributes:
        protocol: "spectra": attention matrices and outputs of the sub-blocks, and CKA with the
            block's input; "jacobian_exact": all singular values of the Jacobians, for few tokens;
            "jacobian_lanczos": bounds of the extreme ones, for any number of tokens;
            "checkpoints": CKA with the blocks of another encoder.
        num_images: How many images, from the first one on.
        image_size: Both sides in pixels; a multiple of the patch.
        num_steps: Of Lanczos.
        compare_to: Address of the other encoder, for "checkpoints".
        at_initialisation: Instead of the weights of the checkpoint, those that its configuration
            and the seed give before any training.
    """

    protocol: Literal["spectra", "jacobian_exact", "jacobian_lanczos", "checkpoints"] = "spectra"
    num_images: Count = 8
    image_size: Pixels = 224
    num_steps: Count = 64
    compare_to: str | None = None
    at_initialisation: bool = False

    task = "conditioning"
    role = "images"

    def __post_init__(self) -> None:
        check_fields(self, "probe")
        if self.compare_to is not None and self.protocol != "checkpoints":
            raise ConfigurationError(
                "probe.compare_to goes with probe.protocol=checkpoints, got "
                f"compare_to={self.compare_to} and protocol={self.protocol}"
            )

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [
            (layer, facet, metric) for layer in layers for facet, metric in CELLS[self.protocol]
        ]

    def split(self, dataset: Dataset) -> ImageSet:
        # Not at construction: whether a protocol is known, is asked without the other options.
        if self.protocol == "checkpoints" and self.compare_to is None:
            raise ConfigurationError(
                "probe.protocol=checkpoints needs probe.compare_to=ADDRESS, the other encoder"
            )
        return dataset.images()

    def training_images(self, dataset: Dataset) -> None:
        """Nothing is fitted to other images than those that are scored."""

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "num_images": self.num_images,
            "image_size": self.image_size,
            "arithmetic": "float64",
        }
        if self.protocol == "jacobian_lanczos":
            settings["num_steps"] = self.num_steps
        if self.compare_to is not None:
            settings["compare_to"] = self._compared_encoder
        if self.at_initialisation:
            settings["at_initialisation"] = True
        return settings

    @cached_property
    def _compared_encoder(self) -> str:
        return _title_of(identify_encoder(str(self.compare_to)))

    def pictures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        del images
        arrays = [f"-{_SPECTRA}", f"-{_CKA}"] if self.protocol == "spectra" else []
        return {f"{self._stem(layers, seed)}{end}": layers for end in (".png", *arrays)}

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score block after block, then draw."""
        images = self.split(context.dataset)
        samples = [images[i] for i in range(min(self.num_images, len(images)))]
        if self.at_initialisation:
            encoder = initialised_again(context.encoder, context.seed)
            context = replace(context, encoder=encoder)
        passes = block_passes(context.encoder, samples, self.image_size, context)
        if self.protocol == "checkpoints":
            yield from self._compared(passes, samples, context)
        else:
            yield from self._scored(passes, context)

    def _scored(self, passes: Passes, context: ProbeContext) -> Iterator[Score]:
        scores: list[Score] = []
        spectra: dict[int, Mapping[str, Spectrum]] = {}
        for layer in context.progress(passes, "blocks", len(passes)):
            if self.protocol == "spectra":
                spectra[layer] = block_spectra(passes[layer])
                found = spectra_scores(layer, spectra[layer])
                found.append(cka_with_input(layer, passes[layer]))
            elif known := self._known(layer, context):
                found = known
            elif self.protocol == "jacobian_exact":
                found = exact_scores(layer, passes[layer])
            else:
                found = lanczos_scores(layer, passes[layer], self.num_steps, context.seed)
            self._say_what_is_missing(layer, found, context)
            scores += found
            yield from found
        likeness, path = None, self._path(context)
        if self.protocol == "spectra":
            save_spectra(spectra, path.with_name(f"{path.name}-{_SPECTRA}"))
            names = ["input", *map(str, passes)]
            states = [entered(next(iter(passes.values()))), *map(left, passes.values())]
            likeness = CkaMatrix(cka_matrix(states, states), names, names, "")
            values = likeness.values
            write_atomically(
                path.with_name(f"{path.name}-{_CKA}"), lambda file: np.save(file, values)
            )
        draw(scores, likeness, self._title(context), path.with_name(f"{path.name}.png"))

    def _known(self, layer: int, context: ProbeContext) -> list[Score]:
        """Scores of a block that an earlier run finished; nothing if it lacks any."""
        known = [
            plain(r.layer, r.facet, r.metric, r.value, r.ci95, r.num_images, r.details)
            for r in context.known
            if r.layer == layer
        ]
        return known if len(known) == len(CELLS[self.protocol]) else []

    def _compared(
        self, passes: Passes, samples: Sequence[Sample], context: ProbeContext
    ) -> Iterator[Score]:
        other = load_encoder(str(self.compare_to))
        if _title_of(other) != self._compared_encoder:
            raise CheckpointError(
                f"{self.compare_to} was replaced while it was read; type the command again"
            )
        layers = resolve_layers("all", other.depth)
        theirs = block_passes(
            other, samples, self.image_size, replace(context, encoder=other, layers=layers)
        )
        ours = {layer: left(some) for layer, some in passes.items()}
        states = {layer: left(some) for layer, some in theirs.items()}
        require_same_tokens(context.encoder, ours, other, states)
        matrix = cka_matrix(list(ours.values()), list(states.values()))
        details = {"other": other.name, "other_sha256": other.sha256}
        scores = []
        for row, (layer, state) in zip(matrix, ours.items(), strict=True):
            if layer not in states:
                context.say(f"conditioning: block {layer}: {other.name} has no such block")
                continue
            ci95 = linear_cka_ci95(state, states[layer])
            more = {**details, "with_every_block": row.tolist()}
            value = float(row[layer])
            scores.append(
                plain(layer, "token", "cka_with_checkpoint", value, ci95, len(samples), more)
            )
            yield scores[-1]
        likeness = CkaMatrix(matrix, list(map(str, ours)), list(map(str, states)), other.name)
        path = self._path(context)
        draw(scores, likeness, self._title(context), path.with_name(f"{path.name}.png"))

    def _say_what_is_missing(
        self, layer: int, found: Sequence[Score], context: ProbeContext
    ) -> None:
        have = {(score.facet, score.metric) for score in found}
        missing = dict.fromkeys(f for f, m in CELLS[self.protocol] if (f, m) not in have)
        if missing:
            context.say(
                f"conditioning: block {layer} of {context.encoder.name}: {', '.join(missing)} left "
                "out; it is no pre-norm block of plain softmax attention and an MLP"
            )
        for score in found:
            if np.isnan(score.value):
                context.say(
                    f"conditioning: block {layer}: {score.metric} of {score.facet} is undefined, "
                    "all tokens are the same"
                )

    def _path(self, context: ProbeContext) -> Path:
        """Of the figure, without its end."""
        return context.artifacts / self._stem(context.layers, context.seed)

    def _stem(self, layers: Sequence[int], seed: int) -> str:
        more = f"-initialisation{seed}" if self.at_initialisation else ""
        return f"{self.protocol}{more}/{blocks_name(layers)}"

    def _title(self, context: ProbeContext) -> str:
        when = f" at initialisation, seed {context.seed}" if self.at_initialisation else ""
        return (
            f"{context.encoder.name}{when}: {self.protocol}, {self.num_images} images of "
            f"{self.image_size} x {self.image_size}"
        )


def _title_of(encoder: Encoder | EncoderIdentity) -> str:
    """Not the address alone, where another encoder may lie tomorrow."""
    return f"{encoder.name} {encoder_id(encoder.identity())[:16]}"
