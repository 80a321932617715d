"""Folders of Hugging Face: config.json says what the weights beside it are."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from ssl_bench.errors import CheckpointError, escape_braces
from ssl_bench.models.config import ViTConfig
from ssl_bench.models.encoder import ASSUMED, IMAGENET_COLOURS, Colours, Encoder
from ssl_bench.models.loading.checkpoint import IN_PYTHON, PYTHON_FILE, colour_of, is_number
from ssl_bench.models.loading.foreign import load_foreign
from ssl_bench.models.loading.hub import WEIGHTS_FILES, hugging_face_file
from ssl_bench.models.loading.layouts import Description
from ssl_bench.system.files import expand_path, read_regular, resolve_links

_Find = Callable[[Sequence[str]], Path]
_CONFIG, _PREPROCESSOR = "config.json", "preprocessor_config.json"
_TRANSFORMERS = ("vit", "vit_mae", "dinov2", "dinov2_with_registers")
_DINOV3 = "dinov3_vit"
# What timm's architectures hold fast.
_DINOV3_ROTATION = 100.0
# Published with ImageNet's mean and deviation, all of them; `vit` with several.
_ON_IMAGENET_COLOURS = ("vit_mae", "dinov2", "dinov2_with_registers")
_EXPECTED = {"layer_norm_eps": "a number above 0", "image_size": "pixels or [HEIGHT, WIDTH]"}
# Steps of a preprocessor that leave colours alone, or are a mean and a deviation.
_STEPS = (
    *("do_resize", "do_center_crop", "do_pad", "do_convert_rgb", "do_rescale", "do_normalize"),
    "do_reduce_labels",
)
_DONE_TO_COLOURS = re.compile("bgr|channel_order|offset|gr[ae]y")


def load_hugging_face(uri: str, *, colours_stated: bool = False) -> Encoder:
    """Load `hf-hub:ORG/NAME@REVISION` or `local-dir:FOLDER`.

    The folder is one of timm's (config.json names the architecture) or of transformers'
    (`model_type` is vit, vit_mae, dinov2, dinov2_with_registers or dinov3_vit). Where the address
    states mean and deviation, none have to be there.
    """
    scheme, _, place = uri.partition(":")
    if scheme == "local-dir":
        folder = expand_path(place)
        label, file = resolve_links(folder).name, partial(_file_in, folder)
    else:
        repository, _, revision = place.partition("@")
        label = place.rpartition("/")[2]
        file = partial(hugging_face_file, repository, revision=revision or None)
    path = file([_CONFIG])
    config = _read(path)
    if "architecture" in config:
        # timm takes seconds to import.
        from ssl_bench.models.loading.timm_encoder import load_timm_folder

        return load_timm_folder(config, file(WEIGHTS_FILES), uri=uri, label=label)
    model_type = config.get("model_type", "")
    if model_type not in (*_TRANSFORMERS, _DINOV3):
        raise CheckpointError(
            f"{path} is neither timm's (architecture=...) nor of model_type "
            f"{', '.join((*_TRANSFORMERS, _DINOV3))}, but {config.get('model_type', 'unnamed')!r}; "
            f"{IN_PYTHON}, such as AutoModel.from_pretrained({str(path.parent)!r}) of transformers",
            hint=PYTHON_FILE,
        )
    weights = file(WEIGHTS_FILES)
    described = None if model_type == _DINOV3 else _described(config, path)
    colours, colours_from = IMAGENET_COLOURS, ASSUMED
    try:
        preprocessor = file([_PREPROCESSOR])
    except CheckpointError as error:
        # Of the others there are models with either: guessing would make every feature wrong.
        if model_type not in _ON_IMAGENET_COLOURS and not colours_stated:
            raise CheckpointError(
                f"{uri} has no {_PREPROCESSOR} here, which would say the mean and deviation of its "
                "images; save its image processor beside the weights, or state them",
                hint=("--checkpoint", f"mean=0.5,std=0.5:{escape_braces(uri)}"),
            ) from error
    else:
        colours, colours_from = _preprocessed(_read(preprocessor), preprocessor), preprocessor.name
    if described is None:
        from ssl_bench.models.loading.timm_encoder import load_dinov3_folder

        encoder = load_dinov3_folder(weights, uri=uri, label=label, colours=colours)
        encoder = replace(encoder, colours_from=colours_from)
        is_gated = any(".mlp.fc1_g." in name for name in encoder.module.state_dict())
        built: dict[str, Any] = {
            "layer_norm_eps": encoder.module.get_submodule("norm").eps,
            "use_gated_mlp": is_gated,
            "hidden_act": "silu" if is_gated else "gelu",
            "rope_theta": _DINOV3_ROTATION,
        }
        rotation = config.get("rope_parameters")
        said = {**config, **rotation} if isinstance(rotation, Mapping) else config
    else:
        encoder = load_foreign(
            weights,
            uri=uri,
            name=label,
            described=described,
            colours=colours,
            colours_from=colours_from,
        )
        said, ours = config, cast(ViTConfig, encoder.module.config)
        built = {
            "qkv_bias": ours.qkv_bias,
            "hidden_act": "gelu",
            "use_swiglu_ffn": False,
        }
        if model_type.startswith("dinov2"):
            built["mlp_ratio"] = ours.mlp_ratio
        else:
            built["intermediate_size"] = ours.hidden_dim
    sizes = {
        "hidden_size": encoder.dim,
        "num_hidden_layers": encoder.depth,
        "num_attention_heads": encoder.num_heads,
        "num_register_tokens": encoder.num_registers,
        "num_channels": 3,
        "patch_size": encoder.patch_size,
    }
    # Followed where it says what no tensor tells, refused where it says something else.
    for key, value in {**sizes, **built}.items():
        theirs = said.get(key, value)
        if theirs != value and theirs != [value, value]:
            raise CheckpointError(
                f"{path} says {key}={theirs!r}, the encoder of {weights.name} has {value!r}; fetch "
                f"both again, or {IN_PYTHON}",
                hint=PYTHON_FILE,
            )
    return encoder


def _file_in(folder: Path, names: Sequence[str]) -> Path:
    """The first of these that is there."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    if any((folder / f"{name}.index.json").is_file() for name in names):
        raise CheckpointError(
            f"{folder} holds its weights in parts, expected one file; save them in one: "
            "model.save_pretrained(FOLDER, max_shard_size='100GB')"
        )
    raise CheckpointError(
        f"{folder} has no {' or '.join(names)}; expected a folder of Hugging Face with "
        f"{_CONFIG} and {WEIGHTS_FILES[0]}"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected an object")
    return content


def _described(config: Mapping[str, Any], path: Path) -> Description:
    """What no tensor shape would tell; refused where it is missing or cannot be meant."""
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
                f"{_EXPECTED.get(key, 'a whole number above 0')}; save it with "
                "config.to_json_file(..., use_diff=False)"
            )
    return Description(int(heads), float(eps), None if size is None else (sides[0], sides[1]))


def _preprocessed(described: Mapping[str, Any], path: Path) -> Colours:
    """Mean and deviation of images from 0 to 1 that do what a preprocessor does to bytes.

    A step that is more than a mean and a deviation is refused.
    """
    strange = [
        key
        for key, value in described.items()
        if value and (_DONE_TO_COLOURS.search(key) or key.startswith("do_")) and key not in _STEPS
    ]
    if strange:
        raise CheckpointError(
            f"{path} has {strange[0]}={described[strange[0]]!r}, which no mean and deviation of "
            "RGB can do; take another encoder"
        )
    for key in ("do_normalize", "do_rescale"):
        if type(described.get(key, True)) is not bool:
            raise CheckpointError(
                f"{path} has {key}={described[key]!r}, expected true or false; fetch it again"
            )
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if described.get("do_normalize", True):
        mean = colour_of(described, "image_mean", path)
        std = colour_of(described, "image_std", path)
    factor: Any = (
        described.get("rescale_factor", 1 / 255) if described.get("do_rescale", True) else 1
    )
    if not is_number(factor) or factor <= 0 or not is_number(1 / factor):
        raise CheckpointError(
            f"{path} has rescale_factor={factor!r}, expected a number above 0, such as 1/255; "
            "fetch it again"
        )
    if math.isclose(brightest := 255.0 * factor, 1):
        return mean, std
    red, green, blue = (colour / brightest for colour in mean)
    return (red, green, blue), (std[0] / brightest, std[1] / brightest, std[2] / brightest)
