"""Fine-tuning: an encoder that was trained before takes the place of random weights."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ssl_bench.errors import CheckpointError, ConfigurationError
from ssl_bench.models import (
    Encoder,
    EncoderModule,
    VisionTransformer,
    ViTConfig,
    identify_encoder,
    load_encoder,
)
from ssl_bench.models.encoder import IMAGENET_NORMALIZATION, Normalization
from ssl_bench.models.vit import resize_positions
from ssl_bench.system.files import expand_path, resolve_links

INIT_FROM, INIT_FROM_SHA256 = "init_from", "init_from_sha256"


def load_initial_weights(
    address: str, encoders: Sequence[EncoderModule], colours: Normalization = IMAGENET_NORMALIZATION
) -> str:
    """Copy the weights of a checkpoint into all these encoders.

    Learned positions are resized where the image size is another; fixed ones stay as they are.
    `colours` are mean and deviation of the run's images.

    Returns:
        The checkpoint's sha256.

    Raises:
        CheckpointError: as `load_encoder`, which takes the address.
        ConfigurationError: it is of another architecture, or of images in other colours.
    """
    found = load_encoder(address)
    if (found.mean, found.std) != colours:
        mean, std = (f"[{','.join(map(repr, of))}]" for of in (found.mean, found.std))
        raise ConfigurationError(
            f"init_from={address} expects images of another scale than those of the run; start "
            "from another checkpoint, or take its scale",
            hint=(f"data.mean={mean}", f"data.std={std}"),
        )
    for encoder in encoders:
        module = _require_fit(found, encoder, address)
        weights = dict(module.state_dict())
        if isinstance(module, VisionTransformer) and isinstance(encoder, VisionTransformer):
            weights["pos_embed"] = (
                encoder.pos_embed.detach()
                if encoder.config.position_embedding == "sinusoidal"
                else resize_positions(
                    module.pos_embed, old_size=module.grid_size, new_size=encoder.grid_size
                )
            )
        encoder.load_state_dict(weights)
    return found.sha256


def find_initial_sha256(address: str, before: Mapping[str, Any]) -> str:
    """The sha256 behind the address now, or what the run knew, if the file is gone since.

    `before` describes the run as it was saved; the weights themselves are in its state.

    Raises:
        CheckpointError: the address is another than before, and nothing is there.
    """
    try:
        return identify_encoder(address).sha256
    except CheckpointError:
        if before.get(INIT_FROM) != address or INIT_FROM_SHA256 not in before:
            raise
        return before[INIT_FROM_SHA256]


def require_other_folder(address: str, out: Path) -> None:
    """Refuse to begin in the very folder that the weights come from.

    Raises:
        ConfigurationError: the checkpoint lies in `out`.
    """
    path = resolve_links(expand_path(address))
    if resolve_links(out) in (path, path.parent):
        raise ConfigurationError(
            f"init_from={address} lies in the run folder {out}, which would replace it",
            hint=("--out", "{folder}"),
        )


def _require_fit(found: Encoder, encoder: EncoderModule, address: str) -> EncoderModule:
    """The module of `found`, of which every weight means what it means in `encoder`."""
    module, config = found.module, encoder.config
    if not isinstance(module, type(encoder)):
        raise ConfigurationError(
            f"init_from={address} expects a {type(encoder).__name__} of this suite, got a "
            f"{type(module).__name__}; give its weights as a file, or take another model"
        )
    may_differ = {"image_size", *config.training_fields}
    if isinstance(config, ViTConfig) and config.position_embedding == "sinusoidal":
        # Fixed positions are not copied from the checkpoint.
        may_differ.remove("position_scale")
    names = [item.name for item in fields(config) if item.name not in may_differ]
    pairs = [(name, getattr(config, name), getattr(module.config, name)) for name in names]
    # Positions that were fixed may be trained from now on, but not the other way round.
    freed = ("position_embedding", "sinusoidal")
    wrong = [pair for pair in pairs if pair[1] != pair[2] and (pair[0], pair[2]) != freed]
    if wrong:
        expected = " ".join(f"model.{name}={_typed(here)}" for name, here, _ in wrong)
        came = " ".join(f"model.{name}={_typed(there)}" for name, _, there in wrong)
        raise ConfigurationError(
            f"init_from={address} is of another architecture: expected {expected}, came {came}; "
            "type the latter, or start from another checkpoint"
        )
    return module


def _typed(value: Any) -> str:
    """A value of a configuration as it is typed on a command line."""
    return str(value) if isinstance(value, str | bool) else json.dumps(value, separators=(",", ":"))
