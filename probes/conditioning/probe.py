"""How well conditioned every block is: its matrices, its Jacobians, its likeness to others."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float64
from torch import Tensor

from probes.conditioning.decomposition import Passes, block_passes
from probes.conditioning.scores import (
    CELLS,
    SAME,
    cka_matrix,
    cka_with_input,
    exact_scores,
    lanczos_scores,
    left,
    linear_cka_ci95,
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
    takes_long = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compare_to is not None and self.protocol != "checkpoints":
            raise ConfigurationError(
                f"probe.compare_to belongs to another protocol than {self.protocol}",
                hint=("probe.protocol=checkpoints",),
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
            f"conditioning expects {wanted}, {encoder.name} {came}; other tasks need no labels "
            "either",
            hint=("--task", "pca,correspondence"),
        )

    def cells(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [
            (layer, facet, metric) for layer in layers for facet, metric in CELLS[self.protocol]
        ]

    def split(self, dataset: Dataset) -> ImageSet:
        # Not at construction: whether a protocol is known, is asked without the other options.
        if self.protocol == "checkpoints" and self.compare_to is None:
            raise ConfigurationError(
                "probe.protocol=checkpoints compares two encoders",
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
            encoder = context.encoder
            if not isinstance(encoder.module, EncoderModule):
                raise ConfigurationError(
                    f"probe.at_initialisation needs a run of this suite, got {encoder.name}",
                    hint=("ssl-bench", "pretrain"),
                )
            model = build_encoder(encoder.module.config, seed=context.seed)
            colours = (encoder.mean, encoder.std)
            again = encoder_from_model(model, name=encoder.name, uri=encoder.uri, colours=colours)
            context = replace(context, encoder=again)
        images = self.split(context.dataset)
        count = min(self.num_images, len(images))
        if count < len(images):
            words = f"conditioning: the first {count} of {len(images)} images"
            context.say(f"{words}; probe.num_images={len(images)} takes all")
        samples = [images[number] for number in range(count)]
        passed = context
        if self.protocol == "mean_log":
            # Means over blocks, also over those that nobody asked for by themselves.
            passed = replace(context, layers=tuple(range(max(context.layers) + 1)))
        passes, embedded = block_passes(context.encoder, samples, self.image_size, passed)
        if self.protocol == "spectra":
            scores = self._spectra(context, samples, passes, embedded)
        elif self.protocol == "checkpoints":
            scores = self._compared(context, samples, passes)
        elif self.protocol == "mean_log":
            scores = mean_log_scores(context.layers, passes)
        else:
            scores = self._jacobians(context, samples, passes)
        found: list[Score] = []
        for score in scores:
            found.append(score)
            yield score
        yield from self._undefined(context, found, count, passes)

    def _spectra(
        self, context: ProbeContext, samples: Sequence[Sample], passes: Passes, embedded: Tensor
    ) -> Iterator[Score]:
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
        likeness = cka_matrix(states, states)
        path = context.artifacts / self._stem(context.layers, context.seed)
        write_atomically(
            path.with_name(f"{path.name}-{SPECTRA_FILE}"),
            lambda file: np.savez_compressed(file, **spectra),
        )
        write_atomically(
            path.with_name(f"{path.name}-{CKA_FILE}"),
            lambda file: np.save(file, likeness),
        )
        draw(scores, *self._title_and_path(context, samples), likeness, (names, names))

    def _jacobians(
        self, context: ProbeContext, samples: Sequence[Sample], passes: Passes
    ) -> Iterator[Score]:
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
        draw(scores, *self._title_and_path(context, samples))

    def _compared(
        self, context: ProbeContext, samples: Sequence[Sample], passes: Passes
    ) -> Iterator[Score]:
        """CKA with the blocks of another encoder."""
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
        names = list(map(str, ours)), list(map(str, states))
        draw(scores, *self._title_and_path(context, samples), matrix, names, other.name)

    def _undefined(
        self, context: ProbeContext, found: Sequence[Score], num_images: int, passes: Passes
    ) -> Iterator[Score]:
        """No numbers, with a reason, for cells of blocks that cannot be taken apart."""
        have = {(score.layer, score.facet, score.metric) for score in found}
        missing = [cell for cell in self.cells(context.layers) if cell not in have]
        why = {cell: self._why(*cell[:2], passes) for cell in missing}
        # Blocks that lack the same facets for the same reason are said in one line.
        facets: dict[tuple[int, str], dict[str, None]] = {}
        for (layer, facet, _), reason in why.items():
            facets.setdefault((layer, reason), {})[facet] = None
        blocks: dict[tuple[str, str], list[int]] = {}
        for (layer, reason), lacking in facets.items():
            blocks.setdefault((", ".join(lacking), reason), []).append(layer)
        for (lacking, reason), layers in blocks.items():
            context.say(
                f"conditioning: {context.encoder.name}, block {', '.join(map(str, layers))}: "
                f"no number for {lacking}: {reason}"
            )
        for score in found:
            if np.isnan(score.value) and score.details["undefined"] == SAME:
                context.say(
                    f"conditioning: block {score.layer}: {score.metric} of {score.facet} is "
                    f"undefined, {SAME}"
                )
        for cell, reason in why.items():
            yield plain(*cell, float("nan"), None, num_images, {"undefined": reason})

    def _why(self, layer: int, facet: str, passes: Passes) -> str:
        """Why a block has no number."""
        if self.protocol == "checkpoints":
            return "the other encoder has no such block"
        if facet == "block":
            return "called alone, the block does not give what it gave in the encoder"
        # A mean is over all blocks up to it.
        if self.protocol == "mean_log":
            first = next(n for n in passes if any(one.parts is None for one in passes[n]))
            where = "" if first == layer else f"block {first}: "
            return where + next(one.why for one in passes[first] if one.parts is None)
        # What cannot be taken apart at all says more than one whose attention cannot.
        return min(
            (one for one in passes[layer] if one.why), key=lambda one: one.parts is not None
        ).why

    def _title_and_path(self, context: ProbeContext, samples: Sequence[Sample]) -> tuple[str, Path]:
        """Of the figure."""
        when = f" at initialisation, seed {context.seed}" if self.at_initialisation else ""
        title = (
            f"{context.encoder.name}{when}: {self.protocol}, {len(samples)} images of "
            f"{self.image_size} x {self.image_size}"
        )
        return title, context.artifacts / f"{self._stem(context.layers, context.seed)}.png"


def _title_of(encoder: Encoder | EncoderIdentity) -> str:
    """Not the address alone, where another encoder may lie tomorrow."""
    return f"{encoder.name} {encoder_id(encoder.identity())[:16]}"


def draw(
    scores: Sequence[Score],
    title: str,
    path: Path,
    likeness: Float64[np.ndarray, "rows columns"] | None = None,
    names: tuple[Sequence[str], Sequence[str]] = ((), ()),
    other: str = "",
) -> None:
    """One panel a metric, one line a facet with its 95 % band; infinite values at the top.

    CKA of every block with every block has a panel of its own, with the names of its rows and of
    its columns, which may be blocks of another encoder.
    """
    # Not pyplot, whose backend and figures are the caller's.
    from matplotlib.figure import Figure

    metrics = list(dict.fromkeys(score.metric for score in scores))
    # A facet has the same colour in all panels.
    facets = list(dict.fromkeys(score.facet for score in scores))
    count = len(metrics) + (likeness is not None)
    columns = min(3, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(4.8 * columns, 3.8 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis, metric in zip(axes.flat, metrics, strict=False):
        _draw_metric(axis, [score for score in scores if score.metric == metric], facets)
    if likeness is not None:
        axis = axes.flat[len(metrics)]
        image = axis.imshow(likeness, vmin=0, vmax=1, cmap="magma", origin="lower")
        figure.colorbar(image, ax=axis)
        rows_shown, columns_shown = names
        axis.set_xticks(range(len(columns_shown)), columns_shown, fontsize=7)
        axis.set_yticks(range(len(rows_shown)), rows_shown, fontsize=7)
        axis.set_xlabel(f"block of {other}" if other else "block")
        axis.set_title("linear CKA", fontsize=9)
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    figure.suptitle(title, fontsize=10)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=110))


def _draw_metric(axis: Any, scores: Sequence[Score], facets: Sequence[str]) -> None:
    metric = scores[0].metric
    for facet in dict.fromkeys(score.facet for score in scores):
        some, number = [s for s in scores if s.facet == facet], facets.index(facet)
        layers = [score.layer for score in some]
        values = [score.value if math.isfinite(score.value) else math.nan for score in some]
        colour = f"C{number}"
        axis.plot(layers, values, marker="o", markersize=3, color=colour, label=facet)
        sure = [(s.layer, *s.ci95) for s in some if s.ci95 and math.isfinite(sum(s.ci95))]
        if sure:
            at, low, high = zip(*sure, strict=True)
            axis.fill_between(at, low, high, alpha=0.15, color=colour)
        for layer in (score.layer for score in some if math.isinf(score.value)):
            axis.annotate(
                "∞", (layer, 0.99 - 0.04 * number), xycoords=("data", "axes fraction"),
                color=colour, ha="center", va="top", fontsize=11, fontweight="bold",
            )  # fmt: skip
    finite = [score.value for score in scores if math.isfinite(score.value)]
    if "condition_number" in metric and finite:
        axis.set_yscale("log")
        if len(finite) < len(scores):
            # Room above the finite values.
            low, high = axis.get_ylim()
            axis.set_ylim(low, high * (high / low) ** 0.3)
    layers = sorted({score.layer for score in scores})
    # Not those of the finite values alone, or the infinite ones would stand outside.
    axis.set_xlim(layers[0] - 0.5, layers[-1] + 0.5)
    axis.set_xticks(layers)
    axis.set_title(metric.replace("_", " "), fontsize=9)
    axis.set_xlabel("block")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, framealpha=0.5)
