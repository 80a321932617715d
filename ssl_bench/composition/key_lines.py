"""Every key of a configuration with its value and what it takes, one a line."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ssl_bench.composition.choices import LONG, choices, config_folder, files
from ssl_bench.composition.components import TARGET, completed, component_class, legal_values
from ssl_bench.composition.compose import choice_group, flattened, read_file
from ssl_bench.composition.fields import described

_NONE: Mapping[str, Any] = {}
_MEANINGS = {
    "dataset.root": "the folder of the data; --data-root",
    "data.root": "the folder of the data; --data-root",
    "data.fingerprint": "by what files are known again: their bytes, or size and time",
    "data.bits": "how many bits pictures of 16 bits use",
    "data.limit": "at most so many images of each split; --limit",
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


def key_lines(
    config: DictConfig, within: Sequence[str] = (), shared: Mapping[str, Any] = _NONE
) -> list[str]:
    """Lines such as "train.seed=0  a whole number in [0, 4294967295]: whence numbers are drawn".

    Args:
        config: What was composed.
        within: Only these keys and those below them, such as "train"; all without any.
        shared: What the keys take that are no field of a component, as `fields` has it.
    """
    plain: Any = OmegaConf.to_container(config, resolve=False)
    said, shown = legal_values(plain), {}
    legal = {key: takes for key, (takes, _) in said.items()}
    legal |= {key: described(kind) for key, kind in shared.items()}
    for key, value in flattened(config).items():
        owner, _, last = key.rpartition(".")
        group, name = _named(plain, owner if last == TARGET else key, value)
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
    width = min(max(map(len, texts.values()), default=0), LONG)
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
    known = {name: read_file(config_folder() / group / f"{name}.yaml") for name in files(group)}
    equal = sorted(name for name, said in known.items() if completed(said, "") == call)
    alike = sorted(name for name, said in known.items() if said[TARGET] == call[TARGET])
    return [*equal, *alike][0]
