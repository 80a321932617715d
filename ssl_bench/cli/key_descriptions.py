"""Describe config keys (names in KEY=VALUE settings): default, legal values and meaning."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ssl_bench.composition.choices import (
    MAX_NAME_LENGTH,
    PROBING_GROUPS,
    RUN_GROUPS,
    choices,
    config_folder,
    config_names,
    require_choice,
    unknown_name_error,
)
from ssl_bench.composition.compose import (
    TARGET,
    choice_group,
    compose_config,
    describe_keys,
    fill_defaults,
    flatten_config,
    import_component,
    list_keys,
    read_file,
)
from ssl_bench.composition.fields import describe_type
from ssl_bench.data.splits import SHARED_KEY_TYPES
from ssl_bench.errors import ConfigurationError, join_alternatives
from ssl_bench.request import probing_config

_MEANINGS = {
    "dataset.root": "folder of the dataset (--data-root)",
    "data.root": "folder of the dataset (--data-root)",
    "data.fingerprint": "whether files are identified by their content, or by their size and time",
    "data.bits": "number of bits that 16-bit images use",
    "data.limit": "maximum number of images per split, evenly spaced (--limit)",
    "data.first": "use only this number of images from the start of each split",
    "data.allow_overlap": "whether scored images may also be training images",
    "data.std": "standard deviation of red, green and blue for normalisation",
    "corrupt": "corruption and severity of the scored images, e.g. gaussian_noise:3",
    "seed": "random seed (--seed)",
    "dtype": "number format in which the encoder computes",
    "guesses": "settings that the paper does not state, and differences from its code",
    "num_workers": "number of processes that read images",
    "batch_size": "number of images or features per batch",
    "encoder_batch_size": "number of images that the encoder processes at once",
    "train_images": "number of training images to use",
    "views": "crops and augmentations of the encoder's input",
    "max_iterations": "maximum number of iterations of the solver",
    "mask_suffix": "text that follows the name of an image in the name of its mask",
    "train_split": "split to train on, or part of a split such as train:0-75%",
    "val_split": "split to score, or part of a split such as train:75-100%",
    "year": "year of the Pascal VOC challenge",
    "epochs": "number of passes over the training images",
    "schedule": "schedule of the learning rate",
    "optimizer": "optimizer of the weights",
    "optimizer.eps": "constant added to the square root of the second moment",
    "betas": "decay rates of the first and the second moment",
    "weight_decay": "weight decay",
    "final_weight_decay": "weight decay at the end of its cosine schedule",
    "final_lr": "learning rate at the end of its cosine schedule",
    "checkpoint_minutes": "minutes between two checkpoints",
    "bottleneck_dim": "width of the input of the head's last layer",
    "hidden_dim": "width of the hidden layers of the head",
    "center_momentum": "momentum of the teacher's centre",
    "student_temperature": "temperature of the student's softmax",
    "teacher_temperature": "temperature of the teacher's softmax after the warm-up",
    "teacher_temperature_start": "temperature of the teacher's softmax at the first step",
    "decoder_depth": "number of blocks of the decoder",
    "decoder_dim": "width of the decoder",
    "decoder_heads": "number of attention heads of the decoder",
    "num_locals": "number of local crops per image",
    "flip_probability": "probability of a horizontal flip",
    "grey_probability": "probability of a conversion to grey",
    "jitter_probability": "probability of colour jitter",
    "contrast": "maximum relative change of contrast",
    "saturation": "maximum relative change of saturation",
    "depth": "number of blocks",
    "dim": "width of the tokens",
    "norm": "normalisation before attention and MLP",
    "num_heads": "number of attention heads",
    "qkv_bias": "whether queries, keys and values have a bias",
}
"""Meanings of config keys that no class documents.

An entry such as "depth" applies to all keys that end with this name, such as "model.depth". If
several entries apply to a key, the entry with the longest name is used.
"""


def describe_target(target: str, overrides: Sequence[str]) -> list[str]:
    """Describe a part of the configuration (the target), with one line of text for each config key.

    Examples of targets are "pretrain" (all keys of a run), "train" (a group of keys),
    "probe.tokencut" (all keys of a probe) and "probe.tokencut.tau" (one key). `overrides` contains
    KEY=VALUE settings, whose values are shown instead of the defaults.
    """
    group, _, rest = target.partition(".")
    name, _, field = rest.partition(".")
    key = f"{group}.{field}" if field else group
    if group in PROBING_GROUPS and rest:
        kind = "task" if group == "probe" else group
        hint = ("ssl-bench", "keys", f"{group}.{{near}}")
        require_choice(kind, name, choices(group), hint=hint)
        if group == "dataset":
            config = compose_config("data", [f"dataset={name}", *overrides])
            return _describe_keys_below(config, (key, *([] if field else ["data"])))
        shared = [] if field else ["data", "seed", "corrupt", "dtype"]
        return _describe_keys_below(probing_config(name, "toy", overrides), (key, *shared))
    if group in RUN_GROUPS and name in choices(group):
        config = compose_config("pretraining", [f"{group}={name}", *overrides])
        return _describe_keys_below(config, () if group == "experiment" else (key,))
    if group == "experiment":
        hint = ("ssl-bench", "keys", "experiment.{near}")
        require_choice(group, name, choices(group), hint=hint)
    if group in PROBING_GROUPS:
        names = choices(group)
        raise ConfigurationError(
            f"the target must be one of {', '.join(f'{group}.{name}' for name in names)}, "
            f"got {group}",
            hint=("ssl-bench", "keys", f"{group}.{names[0]}"),
        )
    config = compose_config("pretraining", overrides)
    return _describe_keys_below(config, () if target == "pretrain" else (target,))


def _describe_keys_below(config: dict[str, Any], parents: Sequence[str]) -> list[str]:
    """Return one line of text for each config key in `parents`, and for all keys below them.

    If `parents` is empty, all keys are described.

    Raises:
        ConfigurationError: A key in `parents` does not exist.
    """
    if lines := _describe_keys(config, parents):
        return lines
    name = parents[0]
    message = f"unknown key {name!r}"
    if targets := [
        f"{group}.{name}"
        for group in sorted((*PROBING_GROUPS, *RUN_GROUPS))
        if name in choices(group)
    ]:
        ways = [("ssl-bench", "keys", target) for target in targets]
        raise ConfigurationError(message, hint=join_alternatives(*ways))
    known = {key.rsplit(".", depth)[0] for key in list_keys(config) for depth in (0, 1)}
    known |= {"pretrain", "probe", "dataset", *RUN_GROUPS}
    raise unknown_name_error(message, name, known, hint=("ssl-bench", "keys", "{near}"))


def _describe_keys(config: dict[str, Any], parents: Sequence[str]) -> list[str]:
    """Return lines such as "train.seed=0  a whole number in [0, 4294967295]: random seed".

    `parents` contains groups of keys, such as "train", or is empty to describe all keys.
    """
    keys = list_described_keys(config, parents)
    assignments = [f"{key.name}={key.default}" for key in keys]
    width = min(max(map(len, assignments), default=0), MAX_NAME_LENGTH)
    return [
        f"{assignment:{width}}  {': '.join(filter(None, (key.type, key.meaning)))}".rstrip()
        for assignment, key in zip(assignments, keys, strict=True)
    ]


class Key(NamedTuple):
    """A config key with its default value, legal values and meaning, all as text."""

    name: str
    default: str
    type: str
    meaning: str


def list_described_keys(config: dict[str, Any], parents: Sequence[str]) -> list[Key]:
    """Return the config keys in `parents` and all keys below them, with their descriptions.

    For example, the key "train.seed" is below "train". If `parents` is empty, all keys are
    returned.
    """
    descriptions = describe_keys(config)
    types = {key: kind for key, (kind, _) in descriptions.items()}
    types |= {key: describe_type(kind) for key, kind in SHARED_KEY_TYPES.items()}
    values = {}
    for full_key, value in flatten_config(config).items():
        owner, _, last = full_key.rpartition(".")
        key = owner if last == TARGET else full_key
        if chosen := _find_selected_file(config, key, value):
            group, values[key] = chosen
            types[key] = " or ".join(choices(group))
        elif last != TARGET:
            values[key] = json.dumps(value)
    return [
        Key(
            key, value, types.get(key, ""), descriptions.get(key, ("", ""))[1] or _find_meaning(key)
        )
        for key, value in values.items()
        if not parents or any(f"{key}.".startswith(f"{parent}.") for parent in parents)
    ]


def _find_meaning(key: str) -> str:
    if ".init_options." in key:
        return "any value: argument of the function `model.init`"
    parts = key.split(".")
    endings = (".".join(parts[start:]) for start in range(len(parts)))
    return next((_MEANINGS[ending] for ending in endings if ending in _MEANINGS), "")


def _find_selected_file(config: Mapping[str, Any], key: str, value: Any) -> tuple[str, str] | None:
    """Return the group (config folder) and the name of the config file that a key selects.

    Return None if the key selects no file, but sets a value such as a number.

    Args:
        config: The nested configuration.
        key: A key with a dot, such as "probe.loss".
        value: The value of the key in the flattened configuration.
    """
    top, _, field = key.partition(".")
    component = config.get(top)
    if not (isinstance(component, Mapping) and TARGET in component):
        return None
    task = getattr(import_component(component[TARGET], top), "task", None)
    if (group := choice_group(key, {top: task})) is None:
        return None
    part = component[field]
    return group, _find_file(group, part) if isinstance(part, Mapping) else str(value)


def _find_file(group: str, component: Mapping[str, Any]) -> str:
    """Return the name of the config file from which a part of a configuration was read.

    If no file has exactly the same values, return the first file for the same class.

    Args:
        group: The folder with the config files to consider.
        component: The part of the configuration, with all defaults filled in.
    """
    contents = {
        name: read_file(config_folder() / group / f"{name}.yaml") for name in config_names(group)
    }
    equal = sorted(n for n, values in contents.items() if fill_defaults(values, "") == component)
    alike = sorted(n for n, values in contents.items() if values[TARGET] == component[TARGET])
    return [*equal, *alike][0]
