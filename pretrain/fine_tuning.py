"""Start a training run from the weights of a trained encoder instead of random weights."""

import json
import re
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
"""Keys in the description of a run: the address of the initial checkpoint, and its sha256."""


def load_initial_weights(
    address: str,
    encoders: Sequence[EncoderModule],
    normalization: Normalization = IMAGENET_NORMALIZATION,
) -> str:
    """Copy the weights of a checkpoint into the encoders of a new run.

    Learned position embeddings are resized if the run has another image size than the checkpoint.
    Fixed (sinusoidal) position embeddings are not copied.

    Args:
        address: Address of the checkpoint, in the form that `load_encoder` accepts.
        encoders: Encoders of the run, such as a student and a teacher.
        normalization: Mean and standard deviation that the run uses to normalise its images.

    Returns:
        The SHA-256 of the checkpoint.

    Raises:
        CheckpointError: The checkpoint cannot be loaded.
        ConfigurationError: The checkpoint has another architecture or another normalisation.
    """
    source = load_encoder(address)
    if (source.mean, source.std) != normalization:
        mean, std = (f"[{','.join(map(repr, values))}]" for values in (source.mean, source.std))
        raise ConfigurationError(
            f"init_from={address} expects images that are normalised with a different mean and "
            "standard deviation. Use the values of the checkpoint, or choose another checkpoint",
            hint=(f"data.mean={mean}", f"data.std={std}"),
        )
    for encoder in encoders:
        module = _require_same_architecture(source, encoder, address)
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
    return source.sha256


def find_initial_sha256(address: str, saved: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the checkpoint whose weights a resumed run originally started from.

    If the checkpoint no longer exists, its SHA-256 is read from the saved state of the run. The
    checkpoint itself is not needed, because a resumed run loads its weights from the saved state.

    Args:
        address: Address of the initial checkpoint in the current command.
        saved: Description of the run in its saved state.

    Raises:
        CheckpointError: There is no checkpoint at `address`, and the saved state contains no
            SHA-256 for `address`.
    """
    try:
        return identify_encoder(address).sha256
    except CheckpointError:
        if saved.get(INIT_FROM) != address or INIT_FROM_SHA256 not in saved:
            raise
        return saved[INIT_FROM_SHA256]


def require_other_folder(address: str, out: Path) -> None:
    """Check that a run does not write to the folder of the checkpoint that it starts from.

    Args:
        address: Address of the checkpoint: a file, a run folder, or a run folder with "@EPOCH".
        out: Folder of the run.

    Raises:
        ConfigurationError: The checkpoint lies in `out`.
    """
    # The checkpoint RUN@EPOCH is a file in the folder RUN.
    names = (address, re.sub(r"@\d{1,9}$", "", address))
    paths = [resolve_links(expand_path(name)) for name in names]
    if any(resolve_links(out) in (path, path.parent) for path in paths):
        raise ConfigurationError(
            f"init_from={address} lies in the run folder {out}, so the run would replace the "
            "checkpoint that it starts from",
            hint=("--out", "{folder}"),
        )


def _require_same_architecture(
    source: Encoder, encoder: EncoderModule, address: str
) -> EncoderModule:
    """Check that `encoder` can use the weights of `source`, and return the module of `source`.

    Raises:
        ConfigurationError: The two modules have different classes or incompatible configurations.
    """
    module, config = source.module, encoder.config
    if not isinstance(module, type(encoder)):
        raise ConfigurationError(
            f"init_from={address} is a {type(module).__name__}, but this run trains a "
            f"{type(encoder).__name__}. Use a checkpoint of the same architecture. If its address "
            "is timm:NAME@FILE, give only FILE"
        )
    may_differ = {"image_size", *config.training_fields}
    if isinstance(config, ViTConfig) and config.position_embedding == "sinusoidal":
        # Fixed position embeddings are computed instead of copied, and the copied weights expect
        # the same scale.
        may_differ.remove("position_scale")
    names = [item.name for item in fields(config) if item.name not in may_differ]
    pairs = [(name, getattr(config, name), getattr(module.config, name)) for name in names]
    # Learned position embeddings may start from fixed ones, but not the other way round.
    allowed = ("position_embedding", "sinusoidal")
    wrong = [pair for pair in pairs if pair[1] != pair[2] and (pair[0], pair[2]) != allowed]
    if wrong:
        expected = " ".join(f"model.{name}={_format_value(ours)}" for name, ours, _ in wrong)
        actual = " ".join(f"model.{name}={_format_value(theirs)}" for name, _, theirs in wrong)
        raise ConfigurationError(
            f"the checkpoint init_from={address} has {actual}, but this run has {expected}. Set "
            "these keys to the values of the checkpoint, or use another checkpoint"
        )
    return module


def _format_value(value: Any) -> str:
    """Format a configuration value as a user types it on the command line."""
    return str(value) if isinstance(value, str | bool) else json.dumps(value, separators=(",", ":"))
