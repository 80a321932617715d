"""How well conditioned every block is: its matrices, its Jacobians, its likeness to others."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from probes.pictures import blocks_name
from ssl_bench.composition.fields import Count, Pixels, check_fields
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.errors import ConfigurationError, UnfitEncoder
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.models import Encoder, EncoderIdentity, identify_encoder
from ssl_bench.results import encoder_id

MATRIX = "attention_matrix"
OUTPUTS = ("attention", "attention_skip", "mlp", "mlp_skip")
FACETS = (MATRIX, *OUTPUTS)
BLOCK_JACOBIANS = ("attention", "attention_skip", "mlp", "block", "dominant")
AROUND_ATTENTION = ("before", "after")
MEAN_LOG = "mean_log_condition_number"
ESTIMATE = "_estimate"
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
    "mean_log": [(facet, MEAN_LOG) for facet in AROUND_ATTENTION],
}
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
            settings["compare_to"] = self.compared_encoder
        if self.at_initialisation:
            settings["at_initialisation"] = True
        return settings

    @cached_property
    def compared_encoder(self) -> str:
        """Name and id of what `compare_to` is."""
        return title_of(identify_encoder(str(self.compare_to)))

    def require_fitting(self, encoder: Encoder | EncoderIdentity) -> None:
        """See `require_fitting`."""
        require_fitting(encoder)

    def pictures(
        self, layers: Sequence[int], images: ImageSet, seed: int
    ) -> Mapping[str, Sequence[int]]:
        del images
        if self.protocol == "mean_log":
            return {}
        arrays = [f"-{SPECTRA_FILE}", f"-{CKA_FILE}"] if self.protocol == "spectra" else []
        return {f"{self.stem(layers, seed)}{end}": layers for end in (".png", *arrays)}

    def run(self, context: ProbeContext) -> Iterator[Score]:
        """Score block after block, then draw."""
        from probes.conditioning.run import all_scores

        yield from all_scores(self, context)

    def stem(self, layers: Sequence[int], seed: int) -> str:
        """Of the names of files, below the folder of an encoder."""
        more = f"-initialisation{seed}" if self.at_initialisation else ""
        return f"{self.protocol}{more}/{blocks_name(layers)}"


def require_fitting(encoder: Encoder | EncoderIdentity) -> None:
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


def title_of(encoder: Encoder | EncoderIdentity) -> str:
    """Not the address alone, where another encoder may lie tomorrow."""
    return f"{encoder.name} {encoder_id(encoder.identity())[:16]}"
