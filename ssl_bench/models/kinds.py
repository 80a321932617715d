"""The kinds of encoders of this suite: what a checkpoint calls them, and how they are built."""

from collections.abc import Mapping
from typing import Any

from ssl_bench.errors import ConfigurationError
from ssl_bench.models.build import build_conv_mixer, build_vit
from ssl_bench.models.config import ViTConfig
from ssl_bench.models.conv_mixer import ConvMixer, ConvMixerConfig
from ssl_bench.models.vit import VisionTransformer

EncoderConfig = ViTConfig | ConvMixerConfig
EncoderModule = VisionTransformer | ConvMixer

_CONFIGS: Mapping[str, type[EncoderConfig]] = {"vit": ViTConfig, "conv_mixer": ConvMixerConfig}


def build_encoder(config: EncoderConfig, *, seed: int) -> EncoderModule:
    """An encoder that `config` and `seed` alone decide; the global RNG is left alone."""
    if isinstance(config, ConvMixerConfig):
        return build_conv_mixer(config, seed=seed)
    return build_vit(config, seed=seed)


def empty_encoder(config: EncoderConfig) -> EncoderModule:
    """An encoder whose weights are yet to be loaded."""
    return ConvMixer(config) if isinstance(config, ConvMixerConfig) else VisionTransformer(config)


def kind_of(config: EncoderConfig) -> str:
    """The name under which `config_of` knows its class."""
    (kind,) = (name for name, known in _CONFIGS.items() if isinstance(config, known))
    return kind


def config_of(kind: str, values: Mapping[str, Any]) -> EncoderConfig:
    """What `to_dict` of a configuration of that kind wrote.

    Raises:
        ConfigurationError: A kind or key that this version does not know, or a wrong value.
    """
    if kind not in _CONFIGS:
        raise ConfigurationError(f"expected {' or '.join(_CONFIGS)}, got a model of kind {kind!r}")
    return _CONFIGS[kind].from_dict(values)
