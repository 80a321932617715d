"""The kinds of encoders of this suite: how they are built, and frozen for probes."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from ssl_bench.models.config import ConvMixerConfig, ConvNeXtConfig, EncoderConfig, ViTConfig
from ssl_bench.models.convolutional import ConvMixer, ConvNeXt, build_convolutional
from ssl_bench.models.encoder import (
    IMAGENET_COLOURS,
    NORM_EPS,
    Colours,
    Contents,
    Encoder,
    configured,
    require_images,
    state_dict_sha256,
)
from ssl_bench.models.positions import DINO_MARGIN
from ssl_bench.models.timm_config import TimmConfig
from ssl_bench.models.vit import EncoderModule, VisionTransformer, build_vit


def build_encoder(config: EncoderConfig, *, seed: int) -> EncoderModule:
    """An encoder that `config` and `seed` alone decide; the global RNG is left alone."""
    return _kind(config)[1](config, seed=seed)


def empty_encoder(config: EncoderConfig) -> EncoderModule:
    """An encoder whose weights are yet to be loaded."""
    return _kind(config)[0](config)


def _kind(config: EncoderConfig) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The class of an encoder, and what makes one with initial weights."""
    if isinstance(config, ViTConfig):
        return VisionTransformer, build_vit
    if isinstance(config, ConvMixerConfig):
        return ConvMixer, build_convolutional
    if isinstance(config, ConvNeXtConfig):
        return ConvNeXt, build_convolutional
    if isinstance(config, TimmConfig):
        # timm takes seconds to import.
        from ssl_bench.models.timm_model import TimmEncoder, build_timm

        return TimmEncoder, build_timm
    # What reads tokens is no part of the encoders; it is imported by name alone.
    state_space = import_module("ssl_bench.models.state_space.model")
    return state_space.StateSpaceModel, state_space.build_state_space_model


def encoder_from_model(
    model: EncoderModule,
    *,
    name: str,
    uri: str = "memory",
    sha256: str | None = None,
    keys: tuple[int, int] = (0, 0),
    contents: Contents | None = None,
    colours: Colours = IMAGENET_COLOURS,
    colours_from: str = "ssl-bench",
) -> Encoder:
    """Freeze a model of ours as an encoder; `keys` counts loaded and all weights of its file."""
    config: EncoderConfig = model.config
    require_images(config, uri)
    shape = config.shape if isinstance(config, TimmConfig) else None
    # Norms of others may have another epsilon than those of this suite.
    epsilons = {part.eps for part in model.modules() if isinstance(part, nn.LayerNorm)}
    (eps,) = epsilons if epsilons and shape is None else {NORM_EPS}
    described = configured(config, norm_eps=eps, strides=shape.strides if shape else ())
    native_size = (config.image_size, config.image_size)
    if isinstance(model, VisionTransformer):
        rows, cols = model.grid_size
        native_size = (rows * config.patch_size, cols * config.patch_size)
        if rows != cols:
            described["grid_size"] = [rows, cols]
        if model.position_margin != DINO_MARGIN:
            described["position_margin"] = model.position_margin
    return Encoder(
        module=model.eval().requires_grad_(False),
        name=name,
        uri=uri,
        sha256=sha256 or state_dict_sha256(model),
        architecture=described,
        patch_size=shape.strides[0] if shape else config.patch_size,
        depth=config.depth,
        dim=config.dim,
        num_heads=config.num_heads,
        num_prefix_tokens=config.num_prefix_tokens,
        native_size=native_size,
        loaded_keys=keys[0],
        mean=colours[0],
        std=colours[1],
        colours_from=colours_from,
        total_keys=keys[1],
        num_registers=config.num_registers,
        contents=contents or Contents(),
        strides=shape.strides if shape else (),
        widths=shape.widths if shape else (),
        channels_last=shape is not None and shape.channels_last,
    )
