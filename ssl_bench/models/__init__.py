"""Encoders of this suite, wrapped timm models, and loaders for checkpoints of other libraries."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ssl_bench.models.config import EncoderConfig, ViTConfig
from ssl_bench.models.encoder import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Encoder,
    EncoderIdentity,
    build_encoder,
    encoder_from_model,
)
from ssl_bench.models.loading.checkpoint import save_encoder
from ssl_bench.models.loading.load import identify_encoder, load_encoder
from ssl_bench.models.vit import EncoderModule, VisionTransformer, build_vit

if TYPE_CHECKING:
    from ssl_bench.models.convolutional import ConvMixer, ConvMixerConfig, ConvNeXtConfig
    from ssl_bench.models.orthogonal import OrthogonalAttention
    from ssl_bench.models.state_space import StateSpaceConfig, StateSpaceModel
    from ssl_bench.models.timm_config import TimmConfig

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "ConvMixer",
    "ConvMixerConfig",
    "ConvNeXtConfig",
    "Encoder",
    "EncoderConfig",
    "EncoderIdentity",
    "EncoderModule",
    "OrthogonalAttention",
    "StateSpaceConfig",
    "StateSpaceModel",
    "TimmConfig",
    "ViTConfig",
    "VisionTransformer",
    "build_encoder",
    "build_vit",
    "encoder_from_model",
    "identify_encoder",
    "load_encoder",
    "save_encoder",
]

# Names that are imported at their first use, with the modules that define them.
_LAZY_MODULES = {
    "ConvMixer": "convolutional",
    "ConvMixerConfig": "convolutional",
    "ConvNeXtConfig": "convolutional",
    "OrthogonalAttention": "orthogonal",
    "StateSpaceConfig": "state_space",
    "StateSpaceModel": "state_space",
    "TimmConfig": "timm_config",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY_MODULES[name]}"), name)
