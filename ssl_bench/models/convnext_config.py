"""The frozen description of an isotropic ConvNeXt."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from ssl_bench.composition.fields import Depth, Pixels, RateOrZero, Width, Within
from ssl_bench.models.config import EncoderConfig, check_divisible
from ssl_bench.models.initialisers import FILTER_INITIALISERS, make_initialiser


@dataclass(frozen=True)
class ConvNeXtConfig(EncoderConfig):
    """Architecture and initialisation of a ConvNeXt of one stage; the defaults are 256/8.

    Args:
        image_size: Side in pixels it is trained at; any other size works, nothing is resized.
        frozen_filters: Leave the depthwise filters, not their biases, as they were drawn.
        mlp_mean: Added to all entries of the first matrix of every MLP, equation 3.40 of the thesis
            whose ConvNeXt this is (Trockman, "Mimetic initialization", 2025).
        mlp_input_std: Deviation of a normal number that each input channel of that matrix adds to
            its weights towards all hidden units, equation 3.39.
        init: Of the depthwise filters of 7 x 7, see `ssl_bench.models.initialisers`; all else
            starts as PyTorch starts convolutions.
        init_options: Its hyperparameters that differ from their defaults; None means the default.
    """

    kind = "convnext"

    image_size: Pixels = 32
    patch_size: Pixels = 2
    dim: Width = 256
    depth: Depth = 8
    frozen_filters: bool = False
    mlp_mean: Annotated[float, Within(-1000, 1000)] = 0.0
    mlp_input_std: RateOrZero = 0.0
    init: str = "uniform"
    init_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_divisible(self, "image_size", "patch_size")
        make_initialiser(FILTER_INITIALISERS, self.init, self.init_options)
