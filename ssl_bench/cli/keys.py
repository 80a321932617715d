"""`ssl-bench keys`: every KEY=VALUE with what it takes and its default."""

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ssl_bench.composition.choices import (
    MAX_NAME_LENGTH,
    choices,
    config_folder,
    config_names,
    require_choice,
    unknown_name_error,
)
from ssl_bench.composition.compose import (
    TARGET,
    choice_group,
    component_class,
    compose_config,
    describe_keys,
    fill_defaults,
    flatten_config,
    list_keys,
    read_file,
)
from ssl_bench.composition.fields import describe_type
from ssl_bench.data.splits import SHARED
from ssl_bench.errors import ConfigurationError, join_alternatives
from ssl_bench.request import probing_config
from ssl_bench.system.progress import say

_RUN = ("model", "objective", "optimizer", "experiment")
_PROBING = ("probe", "dataset")
_GROUPS = (*_PROBING, *_RUN)
_MOST_LISTED = 50
_COMMANDS = {
    "probe": "`ssl-bench probe` and `sweep`",
    "dataset": "`ssl-bench probe`, `sweep`, `features` and `data check`",
}
_ALL = "all of one run; also train, data or monitor alone"


_MEANINGS = {
    "dataset.root": "the folder of the data; --data-root",
    "data.root": "the folder of the data; --data-root",
    "data.fingerprint": "by what files are known again: their bytes, or size and time",
    "data.bits": "how many bits pictures of 16 bits use",
    "data.limit": "at most so many images of each split, spread over it; --limit",
    "data.first": "the first so many images of each split",
    "data.allow_overlap": "let images be scored that something was fitted to",
    "data.std": "deviation of red, green and blue that images are divided by",
    "corrupt": "corruption and severity of the scored images, such as gaussian_noise:3",
    "seed": "whence all that is random is drawn; --seed",
    "dtype": "of the encoder's numbers",
    "protocol": "whose procedure, with all of its values",
    "guesses": "what its paper leaves open",
    "num_workers": "processes that read images",
    "batch_size": "images, or features, taken at once",
    "encoder_batch_size": "images that the encoder takes at once",
    "image_size": "side in pixels at which images are shown",
    "train_images": "how many training images are taken",
    "views": "how images are cut before the encoder sees them",
    "max_iterations": "steps of the solver at most",
    "mask_suffix": "what follows the common part of the names of masks",
    "train_split": "name of the split to train on, or a share such as train:0-75%",
    "val_split": "name of the split to score, or a share such as train:75-100%",
    "year": "of the challenge",
    "epochs": "passes over the training images",
    "schedule": "how the learning rate falls",
    "optimizer": "what updates the weights",
    "optimizer.eps": "added to the root of the second moment",
    "betas": "how long the two moments remember",
    "weight_decay": "pull of the weights towards 0",
    "final_weight_decay": "weight decay at the end of its cosine",
    "final_lr": "learning rate at the end of its cosine",
    "checkpoint_minutes": "minutes between two saved states",
    "bottleneck_dim": "width of the head before its last layer",
    "hidden_dim": "width of the hidden layers of the head",
    "center_momentum": "how slowly the centre of the teacher moves",
    "student_temperature": "of the student's softmax",
    "teacher_temperature": "of the teacher's softmax, after the warm-up",
    "teacher_temperature_start": "of the teacher's softmax, at the first step",
    "decoder_depth": "blocks of the decoder",
    "decoder_dim": "width of the decoder",
    "decoder_heads": "heads of the decoder's attention",
    "num_locals": "small crops of an image",
    "flip_probability": "share of the crops that are mirrored",
    "grey_probability": "share of the crops that lose their colours",
    "jitter_probability": "share of the crops whose colours change",
    "contrast": "how far contrast may change",
    "saturation": "how far saturation may change",
    "depth": "number of blocks",
    "dim": "width of a token",
    "norm": "what stands before attention and MLP",
    "num_heads": "heads of attention",
    "patch_size": "side of a patch in pixels",
    "qkv_bias": "whether queries, keys and values have biases",
}


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print a line for each key of what is named, or what can be named."""
    if options.target is None:
        print("\n".join(_listing()))
    else:
        lines = _lines(options.target, overrides)
        say(f"keys of {_COMMANDS.get(options.target.partition('.')[0], '`ssl-bench pretrain`')}")
        print("\n".join(_fitted(lines) if sys.stdout.isatty() else lines))
    return 0


def _fitted(lines: Sequence[str]) -> list[str]:
    """What is wider than the terminal goes on in the next line, behind some blanks."""
    width = max(40, shutil.get_terminal_size().columns)
    found = []
    for line in lines:
        text, _, words = line.partition("  ")
        short = line if len(line) <= width else f"{text}  {words.strip()}"
        found += textwrap.wrap(short, width, subsequent_indent="    ", break_on_hyphens=False)
    return found


def _listing() -> list[str]:
    lines = [f"pretrain         {_ALL}"]
    for group in _GROUPS:
        names = choices(group)
        many = f"{len(names)} of them: ssl-bench keys {group}"
        lines += _wrapped(f"{group}.NAME", many if len(names) > _MOST_LISTED else ", ".join(names))
    return [*lines, "`ssl-bench keys probe.tokencut` lists the keys of one, with what they take"]


def _wrapped(head: str, words: str) -> list[str]:
    found = textwrap.wrap(words, 100, break_on_hyphens=False)
    return [f"{before:<16} {part}" for before, part in zip_longest([head], found, fillvalue="")]


def _lines(target: str, overrides: Sequence[str]) -> list[str]:
    """The keys that a name like "probe.tokencut", "train" or "train.epochs" stands for."""
    group, _, rest = target.partition(".")
    name, _, field = rest.partition(".")
    named = f"{group}.{field}" if field else group
    if group in _PROBING and rest:
        kind, hint = (
            "task" if group == "probe" else group,
            ("ssl-bench", "keys", f"{group}.{{near}}"),
        )
        require_choice(kind, name, choices(group), hint=hint)
        if group == "dataset":
            config = compose_config("data", [f"dataset={name}", *overrides])
            return _within(config, (named, *([] if field else ["data"])))
        shared = [] if field else ["data", "seed", "corrupt", "dtype"]
        return _within(probing_config(name, "toy", overrides), (named, *shared))
    if group in _RUN and name in choices(group):
        config = compose_config("pretraining", [f"{group}={name}", *overrides])
        return _within(config, () if group == "experiment" else (named,))
    if target == "experiment":
        return _wrapped("experiment.NAME", ", ".join(choices(target)))
    if group == "experiment":
        hint = ("ssl-bench", "keys", "experiment.{near}")
        require_choice(group, name, choices(group), hint=hint)
    if group in _PROBING:
        names = choices(group)
        raise ConfigurationError(
            f"name one: {', '.join(f'{group}.{one}' for one in names)}",
            hint=("ssl-bench", "keys", f"{group}.{names[0]}"),
        )
    config = compose_config("pretraining", overrides)
    return _within(config, () if target == "pretrain" else (target,))


def _within(config: dict[str, Any], within: Sequence[str]) -> list[str]:
    lines = _key_lines(config, within)
    if not lines:
        named = [f"{one}.{within[0]}" for one in sorted(_GROUPS) if within[0] in choices(one)]
        if named:
            ways = [("ssl-bench", "keys", target) for target in named]
            raise ConfigurationError(
                f"no key is called {within[0]!r}", hint=join_alternatives(*ways)
            )
        known = {key.rsplit(".", depth)[0] for key in list_keys(config) for depth in (0, 1)}
        known |= {"pretrain", "probe", "dataset", *_RUN}
        message, hint = f"no key is called {within[0]!r}", ("ssl-bench", "keys", "{near}")
        raise unknown_name_error(message, within[0], known, hint=hint)
    return lines


def _key_lines(config: dict[str, Any], within: Sequence[str]) -> list[str]:
    """Lines such as "train.seed=0  a whole number in [0, 4294967295]: whence numbers are drawn".

    Of the keys that `within` names, and those below them; of all without any.
    """
    said, shown = describe_keys(config), {}
    legal = {key: takes for key, (takes, _) in said.items()}
    legal |= {key: describe_type(kind) for key, kind in SHARED.items()}
    for key, value in flatten_config(config).items():
        owner, _, last = key.rpartition(".")
        group, name = _named(config, owner if last == TARGET else key, value)
        if group:
            named = owner if last == TARGET else key
            shown[named], legal[named] = name, " or ".join(choices(group))
        elif last != TARGET:
            shown[key] = json.dumps(value)
    texts = {
        key: f"{key}={value}"
        for key, value in shown.items()
        if not within or any(f"{key}.".startswith(f"{one}.") for one in within)
    }
    width = min(max(map(len, texts.values()), default=0), MAX_NAME_LENGTH)
    lines = []
    for key, text in texts.items():
        meaning = said.get(key, ("", ""))[1] or _meaning(key)
        words = ": ".join(part for part in (legal.get(key, ""), meaning) if part)
        lines.append(f"{text:{width}}  {words}".rstrip())
    return lines


def _meaning(key: str) -> str:
    """What keys mean that belong to no class, or whose name its class explains no further."""
    parts = key.split(".")
    names = (".".join(parts[start:]) for start in range(len(parts)))
    if ".init_options." in key:
        return "any value: what `model.init` takes, if it does"
    return next((_MEANINGS[name] for name in names if name in _MEANINGS), "")


def _named(plain: Mapping[str, Any], key: str, value: Any) -> tuple[str | None, str]:
    """The folder whose files a key can be, and which of them it is; None where it takes values."""
    top, _, field = key.partition(".")
    parts = plain.get(top)
    if not (isinstance(parts, Mapping) and TARGET in parts):
        return None, ""
    kind = component_class(parts[TARGET], top)
    group = choice_group(key, {top: getattr(kind, "task", None)})
    if group is None:
        return None, ""
    call = parts[field]
    return group, _name_in(group, call) if isinstance(call, Mapping) else str(value)


def _name_in(group: str, call: Mapping[str, Any]) -> str:
    """The file that makes a component, or the first of its class where values differ."""
    known = {
        name: read_file(config_folder() / group / f"{name}.yaml") for name in config_names(group)
    }
    equal = sorted(name for name, said in known.items() if fill_defaults(said, "") == call)
    alike = sorted(name for name, said in known.items() if said[TARGET] == call[TARGET])
    return [*equal, *alike][0]
