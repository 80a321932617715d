"""Images through a frozen encoder, which every probe begins with."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssl_bench.composition.fields import Count, check_fields
from ssl_bench.cost.places import Place
from ssl_bench.errors import ConfigurationError
from ssl_bench.features import FeatureExtractor
from ssl_bench.layers import INNER_FACETS, Facet, submodule_of
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model

Size = tuple[int, int]


@dataclass(frozen=True)
class OfSplits:
    """What a probe costs that is fitted to some images and scored on others."""

    train_images: Count
    val_images: Count

    def __post_init__(self) -> None:
        check_fields(self, "cost")

    @property
    def images(self) -> float:
        return float(self.train_images + self.val_images)


def extractor_on(
    place: Place, model: ViTConfig, layers: Sequence[int], facets: Sequence[Facet]
) -> FeatureExtractor:
    """Of an encoder with random weights, in float32.

    Raises:
        ConfigurationError: a facet from inside of blocks, whose channels only a pass tells.
    """
    inner = [f for f in facets if f in INNER_FACETS or submodule_of(f) is not None]
    if inner:
        raise ConfigurationError(
            f"costs are known of what blocks give, got probe.facet={inner[0]}; "
            "take probe.facet=token"
        )
    encoder = place.built(
        lambda _: encoder_from_model(build_vit(model, seed=0), name="priced", sha256="none"),
        lambda built: [built.module],
    )
    return FeatureExtractor(encoder, layers=layers, facets=facets, device=place.device)


def pictures(count: int, size: Size) -> Tensor:
    """In host memory, RGB in [0, 1]."""
    return torch.rand(count, 3, *size)
