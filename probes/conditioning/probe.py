"""How well conditioned every block is: its matrices, its Jacobians, its likeness to others."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from probes.conditioning.cka import linear_cka_ci95
from probes.conditioning.decomposition import block_passes, initialised_again
from probes.conditioning.figure import CkaMatrix, draw
from probes.conditioning.scores import (
    CELLS,
    SAME,
    cka_matrix,
    cka_with_input,
    exact_scores,
    lanczos_scores,
    left,
    mean_log_scores,
    plain,
    spectra_scores,
)
from probes.pictures import blocks_name
from ssl_bench.composition.fields import Count, Pixels
from ssl_bench.data.samples import Dataset, ImageSet, Sample
from ssl_bench.errors import CheckpointError, ConfigurationError, UnfitEncoder
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.layers import resolve_layers
from ssl_bench.models import Encoder, EncoderIdentity, identify_encoder, load_encoder
from ssl_bench.results import encoder_id
from ssl_bench.system.files import write_atomically

SPECTRA_FILE, CKA_FILE = "spectra.npz", "cka.npy"


@dataclass(frozen=True)
class Conditioning(Probe):
    """Condition numbers, effective ranks, token cosines, Jacobians and CKA of every block.

    Attributes:
        protocol: "spectra": attention matrices and outputs of the sub-blocks, and CKA with the
            block's input; "jacobian_exact": all singular values of the Jacobians, for few tokens;
            "jacobian_lanczos": bounds of the extreme ones, for any number of tokens;
            "checkpoints": CKA with the blocks of another encoder;
            "mean_log": natural logarithms of the tokens' condition numbers before and after
            attention with its skip, their mean over all blocks up to the asked one.
        num_images: How many images, from the first one on.
        image_size: Both sides in pixels; the nearest multiple of the patch unless
            it is chosen.
        num_steps: Of Lanczos.
        compare_to: Address of the other encoder, for "checkpoints".
        at_initialisation: Instead of the weights of the checkpoint, those that its configuration
            and the seed give before any training.
    """

    protocol: Literal[
        "spectra", "jacobian_exact", "jacobian_lanczos", "checkpoints", "mean_log"
    ] = "spectra"
    num_images: Count = 8
    image_size: Pixels = 224
    num_steps: Count = 64
    compare_to: str | None = None
    at_initialisation: bool = False

    task = "conditioning"
    role = "images"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compare_to is not None and self.protocol != "checkpoints":
            raise ConfigurationError(
                "probe.compare_to goes with probe.protocol=checkpoints, got "
                f"compare_to={self.compare_to} and protocol={self.protocol}"
            )

    def require_fitting(self, encoder: Encoder | EncoderIdentity) -> None:
        """Refuse blocks without attention, or of several grids and widths.

        Raises:
            UnfitEncoder: The encoder has such blocks.
        """
        if encoder.num_heads == 0:
            wanted, came = "blocks of attention and an MLP", "has none"
        elif encoder.is_staged:
            wanted, came = "blocks with the same tokens", "has stages of other grids and widths"
        else:
            return
        raise UnfitEncoder(
            f"conditioning expects {wanted}, {encoder.name} {came}; take --task pca or "
            "correspondence, which need no labels either"
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

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "num_images": self.num_images,
            "image_size": self.image_size,
            "arithmetic": "float64",
        }
        if self.protocol == "jacobian_lanczos":
            settings["num_steps"] = self.num_steps
        if self.compare_to is not None:
            settings["compare_to"] = self.compared_encoder
        if self.at_initialisation:
            settings["at_initialisation"] = True
        return settings

    @cached_property
    def compared_encoder(self) -> str:
        """Name and id of what `compare_to` is."""
        return _title_of(identify_encoder(str(self.compare_to)))

    def pictures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        del images
        if self.protocol == "mean_log":
            return {}
        arrays = [f"-{SPECTRA_FILE}", f"-{CKA_FILE}"] if self.protocol == "spectra" else []
        return {f"{self._stem(layers, seed)}{end}": layers for end in (".png", *arrays)}

    def _stem(self, layers: Sequence[int], seed: int) -> str:
        """Of the names of files, below the folder of an encoder."""
        more = f"-initialisation{seed}" if self.at_initialisation else ""
        return f"{self.protocol}{more}/{blocks_name(layers)}"

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score block after block, then draw."""
        self.require_fitting(context.encoder)
        if self.at_initialisation:
            context = replace(context, encoder=initialised_again(context.encoder, context.seed))
        images = self.split(context.dataset)
        count = min(self.num_images, len(images))
        if count < len(images):
            words = f"conditioning: the first {count} of {len(images)} images"
            context.say(f"{words}; probe.num_images={len(images)} takes all")
        samples = [images[number] for number in range(count)]
        scores: Mapping[str, Callable[[ProbeContext, Sequence[Sample]], Iterator[Score]]] = {
            "spectra": self._spectra,
            "checkpoints": self._compared,
            "mean_log": self._averaged,
        }
        found: list[Score] = []
        for score in scores.get(self.protocol, self._jacobians)(context, samples):
            found.append(score)
            yield score
        yield from self._undefined(context, found, count)

    def _spectra(self, context: ProbeContext, samples: Sequence[Sample]) -> Iterator[Score]:
        passes, embedded = block_passes(context.encoder, samples, self.image_size, context)
        scores: list[Score] = []
        spectra: dict[str, Any] = {}
        for layer in context.progress(passes, "blocks", len(passes)):
            of_matrices, values = spectra_scores(layer, passes[layer])
            # All singular values, images x heads x values.
            spectra |= {f"block{layer:02d}_{f}": some.numpy() for f, some in values.items()}
            found = [*of_matrices, cka_with_input(layer, passes[layer])]
            scores += found
            yield from found
        names = ["input", *map(str, passes)]
        states = [embedded, *map(left, passes.values())]
        likeness = CkaMatrix(cka_matrix(states, states), names, names, "")
        path = context.artifacts / self._stem(context.layers, context.seed)
        write_atomically(
            path.with_name(f"{path.name}-{SPECTRA_FILE}"),
            lambda file: np.savez_compressed(file, **spectra),
        )
        write_atomically(
            path.with_name(f"{path.name}-{CKA_FILE}"),
            lambda file: np.save(file, likeness.values),
        )
        self._draw(context, scores, likeness, len(samples))

    def _jacobians(self, context: ProbeContext, samples: Sequence[Sample]) -> Iterator[Score]:
        passes, _ = block_passes(context.encoder, samples, self.image_size, context)
        scores: list[Score] = []
        for layer in context.progress(passes, "blocks", len(passes)):
            # Of a block that an earlier run finished, they are drawn alone.
            found = [
                plain(r.layer, r.facet, r.metric, r.value, r.ci95, r.num_images, r.details)
                for r in context.known
                if r.layer == layer
            ]
            if len(found) < len(CELLS[self.protocol]):
                found = (
                    exact_scores(layer, passes[layer])
                    if self.protocol == "jacobian_exact"
                    else lanczos_scores(layer, passes[layer], self.num_steps, context.seed)
                )
            scores += found
            yield from found
        self._draw(context, scores, None, len(samples))

    def _averaged(self, context: ProbeContext, samples: Sequence[Sample]) -> Iterator[Score]:
        """Means over blocks, also over those that nobody asked for by themselves."""
        asked = context.layers
        whole = replace(context, layers=tuple(range(max(asked) + 1)))
        passes, _ = block_passes(context.encoder, samples, self.image_size, whole)
        yield from mean_log_scores(asked, passes)

    def _compared(self, context: ProbeContext, samples: Sequence[Sample]) -> Iterator[Score]:
        """CKA with the blocks of another encoder."""
        passes, _ = block_passes(context.encoder, samples, self.image_size, context)
        other = load_encoder(str(self.compare_to))
        if _title_of(other) != self.compared_encoder:
            raise CheckpointError(
                f"{self.compare_to} was replaced while it was read; type the command again"
            )
        self.require_fitting(other)
        theirs_context = replace(context, encoder=other, layers=resolve_layers("all", other.depth))
        theirs, _ = block_passes(other, samples, self.image_size, theirs_context)
        ours = {layer: left(some) for layer, some in passes.items()}
        states = {layer: left(some) for layer, some in theirs.items()}
        counts = [next(iter(some.values())).shape[1] for some in (ours, states)]
        if counts[0] != counts[1]:
            raise ConfigurationError(
                f"CKA needs the same tokens: {context.encoder.name} has {counts[0]}, {other.name} "
                f"{counts[1]}; compare encoders of the same patch size and registers"
            )
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
        self._draw(context, scores, likeness, len(samples))

    def _undefined(
        self, context: ProbeContext, found: Sequence[Score], num_images: int
    ) -> Iterator[Score]:
        """No numbers, with a reason, for cells of blocks that cannot be taken apart."""
        have = {(score.layer, score.facet, score.metric) for score in found}
        missing = [cell for cell in self.cells(context.layers) if cell not in have]
        why = "no pre-norm block of plain softmax attention and an MLP"
        if self.protocol == "checkpoints":
            why = "the other encoder has no such block"
        # Blocks that lack the same facets are said in one line.
        facets: dict[int, dict[str, None]] = {}
        for layer, facet, _ in missing:
            facets.setdefault(layer, {})[facet] = None
        blocks: dict[tuple[str, ...], list[int]] = {}
        for layer, lacking in facets.items():
            blocks.setdefault(tuple(lacking), []).append(layer)
        for lacking, layers in blocks.items():
            context.say(
                f"conditioning: {context.encoder.name}, block {', '.join(map(str, layers))}: "
                f"no number for {', '.join(lacking)}: {why}"
            )
        for score in found:
            if np.isnan(score.value) and score.details["undefined"] == SAME:
                context.say(
                    f"conditioning: block {score.layer}: {score.metric} of {score.facet} is "
                    f"undefined, {SAME}"
                )
        for cell in missing:
            yield plain(*cell, float("nan"), None, num_images, {"undefined": why})

    def _draw(
        self,
        context: ProbeContext,
        scores: Sequence[Score],
        likeness: CkaMatrix | None,
        num_images: int,
    ) -> None:
        when = f" at initialisation, seed {context.seed}" if self.at_initialisation else ""
        title = (
            f"{context.encoder.name}{when}: {self.protocol}, {num_images} images of "
            f"{self.image_size} x {self.image_size}"
        )
        path = context.artifacts / f"{self._stem(context.layers, context.seed)}.png"
        draw(scores, likeness, title, path)


def _title_of(encoder: Encoder | EncoderIdentity) -> str:
    """Not the address alone, where another encoder may lie tomorrow."""
    return f"{encoder.name} {encoder_id(encoder.identity())[:16]}"
