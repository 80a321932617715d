"""Folders of Hugging Face: config.json says what the weights beside it are."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ssl_bench.errors import CheckpointError
from ssl_bench.models.encoder import ASSUMED, IMAGENET_COLOURS, Colours, Encoder
from ssl_bench.models.kinds import encoder_from_model
from ssl_bench.models.loading.foreign import Description, load_foreign
from ssl_bench.models.loading.hub import WEIGHTS_FILES, hugging_face_file
from ssl_bench.models.loading.identity import unreplaced, verified_sha256
from ssl_bench.system.files import read_regular
from ssl_bench.system.paths import expanded, real

_CONFIG, _PREPROCESSOR = "config.json", "preprocessor_config.json"
_TRANSFORMERS = ("vit", "vit_mae", "dinov2", "dinov2_with_registers")
_DINOV3 = "dinov3_vit"
# What timm's architectures hold fast.
_DINOV3_ROTATION = 100.0
# Published with ImageNet's mean and deviation, all of them; `vit` with several.
_ON_IMAGENET_COLOURS = ("vit_mae", "dinov2", "dinov2_with_registers")


def load_hugging_face(uri: str) -> Encoder:
    """Load `hf-hub:ORG/NAME@REVISION` or `local-dir:FOLDER`.

    The folder is one of timm's (config.json names the architecture) or of transformers'
    (`model_type` is vit, vit_mae, dinov2, dinov2_with_registers or dinov3_vit).

    Raises:
        CheckpointError: Files are missing, cannot be had, or are of another kind.
    """
    scheme, _, place = uri.partition(":")
    folder = _LocalFolder(place) if scheme == "local-dir" else _Repository(place)
    path = folder.file(_CONFIG)
    config = _read(path)
    if "architecture" in config:
        # timm takes seconds to import.
        from ssl_bench.models.loading.timm_encoder import load_timm_folder

        return load_timm_folder(config, folder.file(*WEIGHTS_FILES), uri=uri, label=folder.name)
    if config.get("model_type") == _DINOV3:
        return _from_dinov3(config, folder, uri)
    if config.get("model_type") in _TRANSFORMERS:
        return _from_transformers(config, folder, uri)
    raise CheckpointError(
        f"{path} is neither timm's (architecture=...) nor of model_type "
        f"{', '.join((*_TRANSFORMERS, _DINOV3))}, but {config.get('model_type', 'unnamed')!r}; "
        "use timm:NAME@FILE"
    )


class _LocalFolder:
    def __init__(self, place: str) -> None:
        self.path = expanded(place)
        self.name = real(self.path).name

    def file(self, *names: str) -> Path:
        """The first of these that is there."""
        for name in names:
            if (self.path / name).is_file():
                return self.path / name
        raise CheckpointError(
            f"{self.path} has no {' or '.join(names)}; expected a folder of Hugging Face with "
            f"{_CONFIG} and {WEIGHTS_FILES[0]}"
        )


class _Repository:
    def __init__(self, place: str) -> None:
        self.repository, _, self.revision = place.partition("@")
        self.name = place.rpartition("/")[2]

    def file(self, *names: str) -> Path:
        """The first of these that the cache or the network gives."""
        return hugging_face_file(self.repository, names, self.revision or None)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected an object")
    return content


def _from_transformers(
    config: Mapping[str, Any], folder: _LocalFolder | _Repository, uri: str
) -> Encoder:
    weights = folder.file(*WEIGHTS_FILES)
    _require_plain(config, weights)
    described = Description(config["num_attention_heads"], float(config["layer_norm_eps"]))
    with unreplaced(weights):
        digest = verified_sha256(weights)
        found = load_foreign(weights, described)
    colours, colours_from = _colours(config["model_type"], folder)
    if config["hidden_size"] != found.model.config.dim:
        raise CheckpointError(
            f"{weights} has the width {found.model.config.dim}, config.json says "
            f"{config['hidden_size']}; fetch both again"
        )
    return encoder_from_model(
        found.model,
        name=folder.name,
        uri=uri,
        sha256=digest,
        keys=found.keys,
        contents=found.contents,
        colours=colours,
        colours_from=colours_from,
    )


def _from_dinov3(
    config: Mapping[str, Any], folder: "_LocalFolder | _Repository", uri: str
) -> Encoder:
    weights = folder.file(*WEIGHTS_FILES)
    said = config.get("rope_parameters") or config
    if float(said.get("rope_theta", _DINOV3_ROTATION)) != _DINOV3_ROTATION:
        raise CheckpointError(
            f"{weights.with_name(_CONFIG)} has rope_theta={said['rope_theta']}, the published "
            f"DINOv3 have {_DINOV3_ROTATION:g}, and no other is supported"
        )
    colours, colours_from = _colours(_DINOV3, folder)
    # timm takes seconds to import.
    from ssl_bench.models.loading.timm_encoder import load_dinov3_folder

    encoder = load_dinov3_folder(weights, uri=uri, label=folder.name, colours=colours)
    return replace(encoder, colours_from=colours_from)


def _require_plain(config: Mapping[str, Any], weights: Path) -> None:
    """Refuse what no tensor shape would tell."""
    missing = [
        key
        for key in ("num_attention_heads", "layer_norm_eps", "hidden_size")
        if not isinstance(config.get(key), int | float)
    ]
    if missing:
        raise CheckpointError(
            f"{weights.with_name(_CONFIG)} says nothing of {', '.join(missing)}; save it with "
            "config.to_json_file(..., use_diff=False)"
        )
    if config.get("hidden_act", "gelu") != "gelu" or config.get("use_swiglu_ffn"):
        what = "SwiGLU" if config.get("use_swiglu_ffn") else config["hidden_act"]
        raise CheckpointError(
            f"{weights} has an MLP with {what}, the ViT of this suite GELU; use timm:NAME@FILE"
        )


def _colours(model_type: str, folder: _LocalFolder | _Repository) -> tuple[Colours, str]:
    """Mean and deviation, and who says so."""
    try:
        path = folder.file(_PREPROCESSOR)
    except CheckpointError:
        # Of `vit` there are models with either: guessing would make every feature wrong.
        if model_type in _ON_IMAGENET_COLOURS:
            return IMAGENET_COLOURS, ASSUMED
        raise
    described = _read(path)
    mean, std = described.get("image_mean"), described.get("image_std")
    if isinstance(mean, list) and isinstance(std, list) and len(mean) == len(std) == 3:
        return ((mean[0], mean[1], mean[2]), (std[0], std[1], std[2])), path.name
    raise CheckpointError(f"{path} says nothing of image_mean and image_std; fetch it again")
