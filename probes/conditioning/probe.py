"""Conditioning: how close to singular are the matrices and Jacobians of each block?

The probe runs a float64 copy of the encoder on a few images (`decomposition.py`), scores its blocks
(`scores.py`, `jacobians.py`) and draws a figure. The setting `probe.protocol=checkpoints` compares
two encoders.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from probes.conditioning.decomposition import BlockRecords, record_blocks
from probes.conditioning.scores import (
    CELLS,
    EQUAL_TOKENS,
    CkaMatrix,
    cka_matrix,
    cka_with_input,
    exact_scores,
    lanczos_scores,
    linear_cka_ci95,
    make_score,
    mean_log_scores,
    spectra_scores,
    stack_outputs,
)
from probes.pictures import blocks_name
from ssl_bench.composition.fields import Count, Pixels
from ssl_bench.data.samples import Dataset, ImageSet, Sample
from ssl_bench.errors import CheckpointError, ConfigurationError, UnsupportedEncoderError, with_hint
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.layers import resolve_layers
from ssl_bench.models import (
    Encoder,
    EncoderIdentity,
    EncoderModule,
    build_encoder,
    encoder_from_model,
    identify_encoder,
    load_encoder,
)
from ssl_bench.results import encoder_id
from ssl_bench.system.files import write_atomically

SPECTRA_ENDING, CKA_ENDING = "-spectra.npz", "-cka.npy"


@dataclass(frozen=True)
class Conditioning(Probe):
    """A probe that measures how close to singular the matrices and Jacobians of each block are.

    The scores are condition numbers, effective ranks, cosine similarities of tokens, Jacobian norms
    and the CKA (similarity) of tokens in different blocks. All computations are in float64. All
    scores except CKA are medians over images and heads.

    Attributes:
        protocol: What is scored. "spectra": the attention matrices, the outputs of attention and
            MLP, and CKA between the input and the output of the block. "jacobian_exact": the
            Jacobians, by computing all of their singular values (for few tokens only).
            "jacobian_lanczos": the Jacobians, by bounding their singular values (for any number of
            tokens). "checkpoints": CKA with the same block of another encoder. "mean_log": the
            logarithms of the condition numbers of tokens before and after attention, averaged over
            blocks 0 to the scored block.
        num_images: Number of images, taken from the start of the dataset.
        image_size: Side in pixels of the squares that images are resized to without keeping their
            aspect ratio. The default is rounded to a multiple of the patch size.
        num_steps: Number of Lanczos iterations.
        compare_to: The other encoder, for example a checkpoint file. Only for the protocol
            "checkpoints".
        at_initialisation: Whether to score a checkpoint of `ssl-bench pretrain` with its initial
            weights. The configuration in the checkpoint and the seed determine these weights.
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
    is_slow = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compare_to is not None and self.protocol != "checkpoints":
            raise ConfigurationError(
                f"probe.compare_to has no effect with probe.protocol={self.protocol}",
                hint=("probe.protocol=checkpoints",),
            )

    def check_encoder(self, encoder: Encoder | EncoderIdentity) -> None:
        """Check that all blocks of the encoder have attention, and the same token grid and width.

        Raises:
            UnsupportedEncoderError: The encoder has blocks without attention, or is divided into
                stages.
        """
        if encoder.num_heads == 0:
            problem = f"blocks with attention and an MLP, but {encoder.name} has none"
        elif encoder.is_staged:
            problem = f"the same token grid and width in all blocks, but {encoder.name} has stages"
        else:
            return
        raise UnsupportedEncoderError(
            f"conditioning needs {problem}", hint=("--task", "pca,correspondence")
        )

    def list_score_keys(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [(layer, *cell) for layer in layers for cell in CELLS[self.protocol]]

    def scored_images(self, dataset: Dataset) -> ImageSet:
        # This is not checked in __post_init__, because the protocol is also validated alone, before
        # the other settings are known.
        if self.protocol == "checkpoints" and self.compare_to is None:
            raise ConfigurationError(
                "probe.protocol=checkpoints compares two encoders, but probe.compare_to is not set",
                hint=("probe.compare_to={checkpoint}",),
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
            settings["compare_to"] = self._compared_encoder
        if self.at_initialisation:
            settings["at_initialisation"] = True
        return settings

    @cached_property
    def _compared_encoder(self) -> str:
        return _name_and_id(identify_encoder(str(self.compare_to)))

    def list_figures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        del images
        if self.protocol == "mean_log":
            return {}
        arrays = (SPECTRA_ENDING, CKA_ENDING) if self.protocol == "spectra" else ()
        return {f"{self._file_stem(layers, seed)}{end}": layers for end in (".png", *arrays)}

    def _file_stem(self, layers: Sequence[int], seed: int) -> str:
        """Return the path prefix that all output files of a run share.

        The path is relative to the output folder, `ProbeContext.artifacts`.
        """
        more = f"-initialisation{seed}" if self.at_initialisation else ""
        return f"{self.protocol}{more}/{blocks_name(layers)}"

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Yield the scores of one block after the other, then draw the figure.

        A score is NaN if it cannot be computed, for example because a block cannot be split into
        its parts. The details of a NaN score state the reason.
        """
        self.check_encoder(context.encoder)
        if self.at_initialisation:
            context = replace(context, encoder=_initialise(context.encoder, context.seed))
        samples = self._first_samples(context)
        # The means of logarithms include all earlier blocks, also those that are not scored.
        layers = range(max(context.layers) + 1) if self.protocol == "mean_log" else context.layers
        records, embedded = record_blocks(
            context.encoder, samples, layers, self.image_size, context
        )
        stem, cka = context.artifacts / self._file_stem(context.layers, context.seed), None
        scores: Iterable[Score]
        if self.protocol == "spectra":
            states = {"input": embedded, **_outputs_by_name(records)}
            cka = cka_matrix(states, states)
            scores = self._score_spectra(context, records, stem, cka)
        elif self.protocol == "checkpoints":
            scores, cka = self._compare_encoders(context, samples, records)
        elif self.protocol == "mean_log":
            scores = mean_log_scores(context.layers, records)
        else:
            scores = self._score_jacobians(context, records)
        finished: list[Score] = []
        for score in scores:
            finished.append(score)
            yield score
        if self.protocol != "mean_log":
            when = f" at initialisation, seed {context.seed}" if self.at_initialisation else ""
            images = f"{len(samples)} images of {self.image_size} x {self.image_size}"
            title = f"{context.encoder.name}{when}: {self.protocol}, {images}"
            draw_figure(finished, title, _append_ending(stem, ".png"), cka)
        yield from self._undefined_scores(context, finished, len(samples), records)

    def _first_samples(self, context: ProbeContext) -> list[Sample]:
        images = self.scored_images(context.dataset)
        count = len(images)
        if self.num_images < count:
            line = f"conditioning: using the first {self.num_images} of {count} images"
            context.say(with_hint(line, hint=(f"probe.num_images={count}",)))
        return [images[index] for index in range(min(self.num_images, count))]

    def _score_spectra(
        self, context: ProbeContext, records: BlockRecords, stem: Path, cka: CkaMatrix
    ) -> Iterator[Score]:
        """Yield the scores of attention matrices, attention outputs and MLP outputs.

        After the last score, save all singular values and the CKA of all pairs of blocks to files.
        The paths of these files begin with `stem`. `records` contains the inputs and outputs of the
        blocks.
        """
        spectra: dict[str, Any] = {}
        for layer in context.progress(records, "blocks", len(records)):
            scores, values = spectra_scores(layer, records[layer])
            # Each array has the shape images x heads x values.
            spectra |= {f"block{layer:02d}_{facet}": values[facet].numpy() for facet in values}
            yield from (*scores, cka_with_input(layer, records[layer]))
        write_atomically(
            _append_ending(stem, SPECTRA_ENDING), lambda file: np.savez_compressed(file, **spectra)
        )
        write_atomically(_append_ending(stem, CKA_ENDING), lambda file: np.save(file, cka.values))

    def _score_jacobians(self, context: ProbeContext, records: BlockRecords) -> Iterator[Score]:
        for layer in context.progress(records, "blocks", len(records)):
            # The figure also shows blocks that an earlier run has finished.
            scores = [
                make_score(r.layer, r.facet, r.metric, r.value, r.ci95, r.num_images, r.details)
                for r in context.known
                if r.layer == layer
            ]
            if len(scores) == len(CELLS[self.protocol]):
                yield from scores
            elif self.protocol == "jacobian_exact":
                yield from exact_scores(layer, records[layer])
            else:
                yield from lanczos_scores(layer, records[layer], self.num_steps, context.seed)

    def _compare_encoders(
        self, context: ProbeContext, samples: Sequence[Sample], records: BlockRecords
    ) -> tuple[list[Score], CkaMatrix]:
        """Score the CKA of each block with the block of the same index in a second encoder.

        Return the scores, and the CKA of each block with every block of the second encoder.
        """
        encoder, other = context.encoder, load_encoder(str(self.compare_to))
        if _name_and_id(other) != self._compared_encoder:
            raise CheckpointError(
                f"{self.compare_to} changed while it was read. Run the same command again"
            )
        self.check_encoder(other)
        layers = resolve_layers("all", other.depth)
        other_records, _ = record_blocks(other, samples, layers, self.image_size, context)
        outputs, other_outputs = _outputs_by_name(records), _outputs_by_name(other_records)
        counts = [next(iter(tokens.values())).shape[1] for tokens in (outputs, other_outputs)]
        if counts[0] != counts[1]:
            raise ConfigurationError(
                f"{encoder.name} has {counts[0]} tokens and {other.name} has {counts[1]}, but CKA "
                "needs equal numbers of tokens. Set probe.compare_to to an encoder with the "
                "same patch size and number of registers"
            )
        cka = cka_matrix(outputs, other_outputs, other.name)
        details = {"other": other.name, "other_sha256": other.sha256}
        scores = [
            make_score(
                *(layer, "token", "cka_with_checkpoint", float(row[layer])),
                linear_cka_ci95(outputs[str(layer)], other_outputs[str(layer)]),
                len(samples),
                {**details, "with_every_block": row.tolist()},
            )
            for row, layer in zip(cka.values, records, strict=True)
            if layer in other_records
        ]
        return scores, cka

    def _undefined_scores(
        self,
        context: ProbeContext,
        finished: Sequence[Score],
        num_images: int,
        records: BlockRecords,
    ) -> Iterator[Score]:
        """Yield a score of NaN for each score that could not be computed, and print the reasons.

        `finished` contains the scores that have been computed.
        """
        computed = {(score.layer, score.facet, score.metric) for score in finished}
        missing = [cell for cell in self.list_score_keys(context.layers) if cell not in computed]
        reasons = {cell: self._explain_missing(*cell[:2], records) for cell in missing}
        # Scores with the same reason are named in one message.
        for reason in dict.fromkeys(reasons.values()):
            cells = [cell for cell in missing if reasons[cell] == reason]
            layers, facets = (
                ", ".join(dict.fromkeys(str(cell[n]) for cell in cells)) for n in (0, 1)
            )
            context.say(
                f"conditioning: {context.encoder.name}, block {layers}: no score for {facets}. "
                f"Reason: {reason}"
            )
        for score in finished:
            if np.isnan(score.value) and score.details["undefined"] == EQUAL_TOKENS:
                context.say(
                    f"the score {score.metric} of {score.facet} in block {score.layer} is "
                    f"undefined, because {EQUAL_TOKENS}"
                )
        for cell, reason in reasons.items():
            yield make_score(*cell, math.nan, None, num_images, {"undefined": reason})

    def _explain_missing(self, layer: int, facet: str, records: BlockRecords) -> str:
        """Return the reason why a facet (part of a block, such as its attention) has no score."""
        if self.protocol == "checkpoints":
            return "the other encoder has no such block"
        if facet == "block":
            return "the block, called separately, does not reproduce its output in the encoder"
        if self.protocol == "mean_log":
            # The first block that cannot be decomposed makes the means of all later blocks NaN.
            first = next(n for n in records if any(r.parts is None for r in records[n]))
            where = "" if first == layer else f"block {first}: "
            return where + next(r.reason for r in records[first] if r.parts is None)
        # The reason for the whole block takes precedence over the reason for its attention.
        failed = [record for record in records[layer] if record.reason]
        return min(failed, key=lambda record: record.parts is not None).reason


def _initialise(encoder: Encoder, seed: int) -> Encoder:
    """Return a copy of the encoder with new initial weights, as at the start of its pretraining.

    The encoder must be a checkpoint of `ssl-bench pretrain`, whose configuration is known. `seed`
    determines the random weights.
    """
    if not isinstance(encoder.module, EncoderModule):
        raise ConfigurationError(
            f"probe.at_initialisation needs a checkpoint of ssl-bench pretrain, got {encoder.name}",
            hint=("probe.at_initialisation=false",),
        )
    model = build_encoder(encoder.module.config, seed=seed)
    mean_std = (encoder.mean, encoder.std)
    return encoder_from_model(model, name=encoder.name, uri=encoder.uri, normalization=mean_std)


def _name_and_id(encoder: Encoder | EncoderIdentity) -> str:
    """Return the name of an encoder, followed by a hash that identifies its checkpoint."""
    return f"{encoder.name} {encoder_id(encoder.identity())[:16]}"


def _outputs_by_name(records: BlockRecords) -> dict[str, Tensor]:
    return {str(layer): stack_outputs(records[layer]) for layer in records}


def _append_ending(stem: Path, ending: str) -> Path:
    return stem.with_name(f"{stem.name}{ending}")


def draw_figure(scores: Sequence[Score], title: str, path: Path, cka: CkaMatrix | None) -> None:
    """Save a figure with a chart for each metric, plotted against the block index.

    Each chart has one line with a 95 % confidence band for each facet (part of a block, such as its
    MLP). Infinite values are marked at the top of a chart. An additional chart shows the matrix
    `cka`, unless `cka` is None.
    """
    # pyplot is not used, because it would change the backend and the open figures of the caller.
    from matplotlib.figure import Figure

    metrics = list(dict.fromkeys(score.metric for score in scores))
    facets = list(dict.fromkeys(score.facet for score in scores))
    num_panels = len(metrics) + (cka is not None)
    columns = max(1, min(3, num_panels))
    rows = max(1, -(-num_panels // columns))
    figure = Figure(figsize=(4.8 * columns, 3.8 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis, metric in zip(axes.flat, metrics, strict=False):
        _draw_metric(axis, [score for score in scores if score.metric == metric], facets)
    if cka is not None:
        axis = axes.flat[len(metrics)]
        image = axis.imshow(cka.values, vmin=0, vmax=1, cmap="magma", origin="lower")
        figure.colorbar(image, ax=axis)
        axis.set_xticks(range(len(cka.columns)), cka.columns, fontsize=7)
        axis.set_yticks(range(len(cka.rows)), cka.rows, fontsize=7)
        axis.set_xlabel(f"block of {cka.other}" if cka.other else "block")
        axis.set_title("linear CKA", fontsize=9)
    for axis in axes.flat[num_panels:]:
        axis.set_axis_off()
    figure.suptitle(title, fontsize=10)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=110))


def _draw_metric(axis: Any, scores: Sequence[Score], facets: Sequence[str]) -> None:
    """Draw the chart of one metric.

    `facets` contains the facets (parts of a block, such as its MLP) of all charts. Each facet has
    the same colour in all charts.
    """
    metric = scores[0].metric
    for facet in dict.fromkeys(score.facet for score in scores):
        facet_scores, number = [s for s in scores if s.facet == facet], facets.index(facet)
        layers = [score.layer for score in facet_scores]
        values = [score.value if math.isfinite(score.value) else math.nan for score in facet_scores]
        colour = f"C{number}"
        axis.plot(layers, values, marker="o", markersize=3, color=colour, label=facet)
        bands = [(s.layer, *s.ci95) for s in facet_scores if s.ci95 and math.isfinite(sum(s.ci95))]
        if bands:
            band_layers, low, high = zip(*bands, strict=True)
            axis.fill_between(band_layers, low, high, alpha=0.15, color=colour)
        for layer in (score.layer for score in facet_scores if math.isinf(score.value)):
            axis.annotate(
                "∞", (layer, 0.99 - 0.04 * number), xycoords=("data", "axes fraction"),
                color=colour, ha="center", va="top", fontsize=11, fontweight="bold",
            )  # fmt: skip
    finite = [score.value for score in scores if math.isfinite(score.value)]
    if "condition_number" in metric and finite:
        axis.set_yscale("log")
        if len(finite) < len(scores):
            # Leave room above the finite values for the infinity signs.
            low, high = axis.get_ylim()
            axis.set_ylim(low, high * (high / low) ** 0.3)
    layers = sorted({score.layer for score in scores})
    # The default limits would exclude layers whose values are all infinite.
    axis.set_xlim(layers[0] - 0.5, layers[-1] + 0.5)
    axis.set_xticks(layers)
    axis.set_title(metric.replace("_", " "), fontsize=9)
    axis.set_xlabel("block")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, framealpha=0.5)
