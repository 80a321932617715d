"""Encoders: our Vision Transformer and ConvMixer, their checkpoints, and everybody else's."""

from ssl_bench.models.build import build_vit
from ssl_bench.models.config import ViTConfig
from ssl_bench.models.conv_mixer import ConvMixer, ConvMixerConfig
from ssl_bench.models.encoder import IMAGENET_MEAN, IMAGENET_STD, Encoder, encoder_from_model
from ssl_bench.models.initialisers.statistics import block_statistics, token_statistics
from ssl_bench.models.kinds import EncoderConfig, EncoderModule, build_encoder
from ssl_bench.models.loading.checkpoint import save_encoder
from ssl_bench.models.loading.identity import EncoderIdentity, identify_encoder
from ssl_bench.models.loading.load import load_encoder
from ssl_bench.models.vit import VisionTransformer

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "ConvMixer",
    "ConvMixerConfig",
    "Encoder",
    "EncoderConfig",
    "EncoderIdentity",
    "EncoderModule",
    "ViTConfig",
    "VisionTransformer",
    "block_statistics",
    "build_encoder",
    "build_vit",
    "encoder_from_model",
    "identify_encoder",
    "load_encoder",
    "save_encoder",
    "token_statistics",
]
