"""Start a run with the weights of a trained encoder instead of random weights."""

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
"""Keys of the address of the checkpoint and of its sha256, in the description of a run."""


def load_initial_weights(
    address: str,
    encoders: Sequence[EncoderModule],
    normalization: Normalization = IMAGENET_NORMALIZATION,
) -> str:
    """Copy the weights of a checkpoint into the encoders of a new run.

    Learned position embeddings are resized if the image size differs. Fixed position embeddings
    are not copied.

    Args:
        address: Address of the checkpoint, as `load_encoder` accepts it.
        encoders: Encoders of the run, such as those of a student and a teacher.
        normalization: Mean and standard deviation with which the run normalises its images.

    Returns:
        The sha256 of the checkpoint.

    Raises:
        CheckpointError: The checkpoint cannot be loaded.
        ConfigurationError: The checkpoint has another architecture or another normalisation.
    """
    source = load_encoder(address)
    if (source.mean, source.std) != normalization:
        mean, std = (f"[{','.join(map(repr, values))}]" for values in (source.mean, source.std))
        raise ConfigurationError(
            f"init_from={address} expects images with another mean and standard deviation than "
            "those of the run. Start from another checkpoint, or use its values",
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
    """Return the sha256 of the checkpoint that a resumed run started from.

    If the checkpoint no longer exists, the sha256 in the state of the run is returned. The file
    itself is not needed, because a resumed run reads its weights from its own state.

    Args:
        address: Address of the checkpoint in the current command.
        saved: Description of the run in its state.

    Raises:
        CheckpointError: There is no checkpoint at the address, and the state names another address.
    """
    try:
        return identify_encoder(address).sha256
    except CheckpointError:
        if saved.get(INIT_FROM) != address or INIT_FROM_SHA256 not in saved:
            raise
        return saved[INIT_FROM_SHA256]


def require_other_folder(address: str, out: Path) -> None:
    """Raise an error if the checkpoint lies in the folder that the run writes to.

    Args:
        address: Address of the checkpoint: a file, a run folder, or a run folder with "@EPOCH".
        out: Folder of the run.

    Raises:
        ConfigurationError: The checkpoint lies in `out`.
    """
    # The file of RUN@EPOCH lies in RUN.
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
    """Return the module of `source` if its weights can be used in `encoder`.

    Raises:
        ConfigurationError: The modules have different classes or different configurations.
    """
    module, config = source.module, encoder.config
    if not isinstance(module, type(encoder)):
        raise ConfigurationError(
            f"init_from={address}: the run trains a {type(encoder).__name__} of this suite, but "
            f"the checkpoint loads as a {type(module).__name__}. Set init_from to the path of its "
            "weights file, or train another model"
        )
    may_differ = {"image_size", *config.training_fields}
    if isinstance(config, ViTConfig) and config.position_embedding == "sinusoidal":
        # Fixed positions are not copied but computed, and the weights expect the same scale.
        may_differ.remove("position_scale")
    names = [item.name for item in fields(config) if item.name not in may_differ]
    pairs = [(name, getattr(config, name), getattr(module.config, name)) for name in names]
    # Fixed positions of a checkpoint may become learned positions, but not the reverse.
    allowed = ("position_embedding", "sinusoidal")
    wrong = [pair for pair in pairs if pair[1] != pair[2] and (pair[0], pair[2]) != allowed]
    if wrong:
        expected = " ".join(f"model.{name}={_format_value(ours)}" for name, ours, _ in wrong)
        actual = " ".join(f"model.{name}={_format_value(theirs)}" for name, _, theirs in wrong)
        raise ConfigurationError(
            f"init_from={address} has another architecture: expected {expected}, got {actual}. "
            "Set the values of the checkpoint, or start from another checkpoint"
        )
    return module


def _format_value(value: Any) -> str:
    """Return a value of a configuration as a user types it on the command line."""
    return str(value) if isinstance(value, str | bool) else json.dumps(value, separators=(",", ":"))
