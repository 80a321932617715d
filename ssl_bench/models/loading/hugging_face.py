"""Load folders and repositories in the Hugging Face format: config.json and a weights file."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from ssl_bench.errors import CheckpointError, escape_braces
from ssl_bench.models.config import ViTConfig
from ssl_bench.models.encoder import ASSUMED, IMAGENET_NORMALIZATION, Encoder, Normalization
from ssl_bench.models.loading.checkpoint import (
    JSON_ERRORS,
    PYTHON_ADVICE,
    PYTHON_FILE,
    is_number,
    read_rgb,
)
from ssl_bench.models.loading.foreign import load_foreign
from ssl_bench.models.loading.hub import WEIGHTS_FILES, fetch_hub_file
from ssl_bench.models.loading.layouts import ModelSpec
from ssl_bench.system.files import expand_path, read_regular, resolve_links

_CONFIG, _PREPROCESSOR = "config.json", "preprocessor_config.json"
_TRANSFORMERS = ("vit", "vit_mae", "dinov2", "dinov2_with_registers")
_DINOV3 = "dinov3_vit"
# Base of the rotary position embedding (`rope_theta`) in timm's DINOv3.
_DINOV3_ROTATION = 100.0
# Model types whose published models all use ImageNet's mean and standard deviation.
_IMAGENET_NORMALIZED = ("vit_mae", "dinov2", "dinov2_with_registers")
_EXPECTED = {"layer_norm_eps": "a number above 0", "image_size": "pixels or [HEIGHT, WIDTH]"}
# Preprocessing steps that do not change colours, or that a mean and standard deviation can express.
_STEPS = (
    *("do_resize", "do_center_crop", "do_pad", "do_convert_rgb", "do_rescale", "do_normalize"),
    "do_reduce_labels",
)
_COLOUR_CHANGES = re.compile("bgr|channel_order|offset|gr[ae]y")


def load_hugging_face(uri: str, *, allow_missing_preprocessor: bool = False) -> Encoder:
    """Load an encoder from `hf-hub:ORG/NAME@REVISION` or `local-dir:FOLDER`.

    If config.json has the key `architecture`, the encoder is loaded into a timm model. Otherwise,
    `model_type` in config.json must be one of these types of the transformers library: vit,
    vit_mae, dinov2, dinov2_with_registers or dinov3_vit.

    Args:
        uri: The address of the encoder.
        allow_missing_preprocessor: Whether preprocessor_config.json may be missing, because the
            caller provides the mean and standard deviation.
    """
    scheme, _, place = uri.partition(":")
    if scheme == "local-dir":
        folder = expand_path(place)
        label, file = resolve_links(folder).name, partial(_find_file, folder)
    else:
        repository, _, revision = place.partition("@")
        label = place.rpartition("/")[2]
        file = partial(fetch_hub_file, repository, revision=revision or None)
    path = file([_CONFIG])
    config = _read(path)
    if "architecture" in config:
        # timm takes seconds to import.
        from ssl_bench.models.loading.timm_encoder import load_timm_folder

        return load_timm_folder(config, file(WEIGHTS_FILES), uri=uri, label=label)
    model_type = config.get("model_type", "")
    if model_type not in (*_TRANSFORMERS, _DINOV3):
        raise CheckpointError(
            f"{path} has model_type={config.get('model_type')!r}, expected a timm architecture "
            f"or one of {', '.join((*_TRANSFORMERS, _DINOV3))}. To use the model, {PYTHON_ADVICE}, "
            f"such as transformers.AutoModel.from_pretrained({str(path.parent)!r})",
            hint=PYTHON_FILE,
        )
    weights = file(WEIGHTS_FILES)
    model_spec = None if model_type == _DINOV3 else _read_model_spec(config, path)
    normalization, normalization_source = IMAGENET_NORMALIZATION, ASSUMED
    try:
        preprocessor = file([_PREPROCESSOR])
    except CheckpointError as error:
        # Published models of type `vit` have different means and deviations, so a guess could be
        # wrong.
        if model_type not in _IMAGENET_NORMALIZED and not allow_missing_preprocessor:
            raise CheckpointError(
                f"{uri} has no {_PREPROCESSOR} with the mean and standard deviation of its images. "
                "Save the model's image processor next to the weights, or state the mean and "
                "standard deviation in the address",
                hint=("--checkpoint", f"mean=0.5,std=0.5:{escape_braces(uri)}"),
            ) from error
    else:
        normalization = _read_normalization(_read(preprocessor), preprocessor)
        normalization_source = preprocessor.name
    if model_spec is None:
        from ssl_bench.models.loading.timm_encoder import load_dinov3_folder

        encoder = load_dinov3_folder(weights, uri=uri, label=label, normalization=normalization)
        encoder = replace(encoder, normalization_source=normalization_source)
        is_gated = any(".mlp.fc1_g." in name for name in encoder.module.state_dict())
        built: dict[str, Any] = {
            "layer_norm_eps": encoder.module.get_submodule("norm").eps,
            "use_gated_mlp": is_gated,
            "hidden_act": "silu" if is_gated else "gelu",
            "rope_theta": _DINOV3_ROTATION,
        }
        rotation = config.get("rope_parameters")
        stated = {**config, **rotation} if isinstance(rotation, Mapping) else config
    else:
        encoder = load_foreign(
            weights,
            uri=uri,
            name=label,
            model_spec=model_spec,
            normalization=normalization,
            normalization_source=normalization_source,
        )
        stated, vit = config, cast(ViTConfig, encoder.module.config)
        built = {"qkv_bias": vit.qkv_bias, "hidden_act": "gelu", "use_swiglu_ffn": False}
        if model_type.startswith("dinov2"):
            built["mlp_ratio"] = vit.mlp_ratio
        else:
            built["intermediate_size"] = vit.hidden_dim
    sizes = {
        "hidden_size": encoder.dim,
        "num_hidden_layers": encoder.depth,
        "num_attention_heads": encoder.num_heads,
        "num_register_tokens": encoder.num_registers,
        "num_channels": 3,
        "patch_size": encoder.patch_size,
    }
    for key, value in {**sizes, **built}.items():
        expected = stated.get(key, value)
        if expected != value and expected != [value, value]:
            raise CheckpointError(
                f"{path} states {key}={expected!r}, but the encoder in {weights.name} has "
                f"{value!r}. Download both files again, or {PYTHON_ADVICE}",
                hint=PYTHON_FILE,
            )
    return encoder


def _find_file(folder: Path, names: Sequence[str]) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    if any((folder / f"{name}.index.json").is_file() for name in names):
        raise CheckpointError(
            f"{folder} contains weights in several files, expected one file. Save them in one: "
            "model.save_pretrained(FOLDER, max_shard_size='100GB')"
        )
    raise CheckpointError(
        f"{folder} has no {' or '.join(names)}, expected a folder in the Hugging Face format with "
        f"{_CONFIG} and {WEIGHTS_FILES[0]}"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(path))
    except (OSError, *JSON_ERRORS) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} contains a {type(content).__name__}, expected an object. Download it again"
        )
    return content


def _read_model_spec(config: Mapping[str, Any], path: Path) -> ModelSpec:
    """Read properties of an encoder, such as the number of heads, from a parsed config.json."""
    heads: Any = config.get("num_attention_heads")
    eps: Any = config.get("layer_norm_eps")
    size: Any = config.get("image_size")
    sides = size if isinstance(size, list) else [size, size]
    wrong = {
        "num_attention_heads": type(heads) is not int or heads < 1,
        "layer_norm_eps": not is_number(eps) or eps <= 0,
        "hidden_size": type(config.get("hidden_size")) is not int,
        "image_size": size is not None
        and (len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides)),
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise CheckpointError(
                f"{path} has {key}={config.get(key)!r}, expected "
                f"{_EXPECTED.get(key, 'a positive integer')}. Save it with "
                "config.to_json_file(..., use_diff=False)"
            )
    return ModelSpec(int(heads), float(eps), None if size is None else (sides[0], sides[1]))


def _read_normalization(preprocessor: Mapping[str, Any], path: Path) -> Normalization:
    """Read the mean and standard deviation by which an image processor normalises images.

    The mean and standard deviation apply to images with values in [0, 1].

    Args:
        preprocessor: Content of preprocessor_config.json.
        path: Path of preprocessor_config.json, for error messages.

    Raises:
        CheckpointError: The processor changes colours in another way, or a value is invalid.
    """
    unknown = [
        key
        for key, value in preprocessor.items()
        if value and (_COLOUR_CHANGES.search(key) or key.startswith("do_")) and key not in _STEPS
    ]
    if unknown:
        raise CheckpointError(
            f"{path} has {unknown[0]}={preprocessor[unknown[0]]!r}, which cannot be expressed "
            f"as a mean and standard deviation of RGB. To use the model, {PYTHON_ADVICE}"
        )
    for key in ("do_normalize", "do_rescale"):
        if type(preprocessor.get(key, True)) is not bool:
            raise CheckpointError(
                f"{path} has {key}={preprocessor[key]!r}, expected true or false. Download it again"
            )
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if preprocessor.get("do_normalize", True):
        mean = read_rgb(preprocessor, "image_mean", path)
        std = read_rgb(preprocessor, "image_std", path)
    factor: Any = (
        preprocessor.get("rescale_factor", 1 / 255) if preprocessor.get("do_rescale", True) else 1
    )
    if not is_number(factor) or factor <= 0 or not is_number(1 / factor):
        raise CheckpointError(
            f"{path} has rescale_factor={factor!r}, expected a number above 0, such as 1/255. "
            "Download it again"
        )
    if math.isclose(brightest := 255.0 * factor, 1):
        return mean, std
    red, green, blue = (colour / brightest for colour in mean)
    return (red, green, blue), (std[0] / brightest, std[1] / brightest, std[2] / brightest)
