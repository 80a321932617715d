"""Find the encoder's tensors among everything that training tools store in a weights file."""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ssl_bench.errors import CheckpointError
from ssl_bench.models.loading.checkpoint import check_tensors, list_names
from ssl_bench.models.loading.layouts import (
    CLIP,
    SAM,
    find_reasons,
    first_match,
    reject_unsupported,
    rename_tensors,
)

# The prefix of an encoder is the text before the name of its patch kernel. Nested dictionaries are
# flattened: slashes separate the keys, and keys other than strings are in brackets.
_KERNEL = re.compile(
    r"((?:.*[./])?)((?:patch_embed1?\.(?:module\.)*proj(?:ection)?|embeddings\.patch_embeddings"
    r"(?:\.projection)?|conv_proj|conv1|stem\.0|downsample_layers\.0\.0)\.)weight"
)
_BLOCKS = re.compile(r"(?:blocks?\d?|layers?|stages)\.\w*\d+\.")
_SEPARATOR = re.compile(r"[./]")
# Words in prefixes that distinguish several encoders in a file. Moving averages are preferred.
# MoCo-v3 and solo-learn are exceptions, because they evaluate the trained encoder. They call the
# moving average "momentum".
_AVERAGED = {"averaged", "average", "averaging", "avg", "ema", "swa", "teacher", "target"}
_NOT_PREFERRED = {"current", "momentum", "online", "student"}
# Reasons to ignore tensors outside of the encoder. Each pattern is compared with the first part of
# the tensor's name that differs from the encoder's prefix.
_REASONS_OUTSIDE = {
    r"neck|target_generator": "a head of pretraining",
    r"student": "the student, because the teacher is used",
    r"teacher": "a teacher that is not this encoder",
    r"momentum_encoder": "the momentum encoder, because MoCo-v3 evaluates its base encoder",
    r"momentum_backbone": "a moving average of the encoder",
    r"(?:\w+_)?(?:predictor|projector|prototypes)": "a head of pretraining",
    r"(?:\w+_)?head\w*|classifier|fc|pooler": "a head, after the encoder",
    r"\w*(?:loss|criterion)\w*|(?:\w+_)?center\w*|queue": "state of a loss",
    r"(?:mask_)?decoder": "a decoder, after the encoder",
    r"prompt_encoder": "the encoder of SAM's prompts",
    r"text\w*|transformer|token_embedding|positional_embedding|ln_final|logit_\w+": "text of CLIP",
    r"\w*optim\w*|\w*sched\w*|\w*scaler\w*|\w*rng\w*": "state of training",
    r"args|config|hyper_parameters|callbacks\w*|loops": "state of training",
}
# In timm's ConvNeXt, `head.norm` is the final norm, so it does not belong to the head.
_HEADS = {r"(?:head(?!\.norm\.)|head_dist|fc|classifier|pooler)\..*": "a head, after the encoder"}


@dataclass(frozen=True)
class Backbone:
    """The tensors of an encoder in a weights file.

    Attributes:
        weights: Tensors of the encoder by name, without prefixes such as "teacher.".
        total: Number of all tensors in the dictionary that contains the encoder.
        ignored: Reason why a tensor or dictionary of tensors is not used, by its name in the file.
        prefixes: Prefixes that were removed from the names, such as "teacher.".
        note: Message that tells users which of several encoders is used. Empty if the file contains
            only one encoder.
    """

    weights: Mapping[str, Tensor]
    total: int
    ignored: Mapping[str, str]
    prefixes: tuple[str, ...] = ()
    note: str = ""


def find_backbone(content: Mapping[str, Any], path: Path) -> Backbone:
    """Find the tensors of the encoder in the content of a weights file.

    A file may contain several encoders, such as a student and a teacher. Each encoder has its own
    prefix in the tensor names. The moving average of the weights, with a prefix such as "teacher"
    or "ema", is used, with two exceptions. A moving average that was never updated is not used,
    because it contains the initial weights. For MoCo-v3 and solo-learn, the trained encoder is
    used, as in their own evaluations.

    Args:
        content: Content of the file, as nested dictionaries and lists of tensors and other values.
        path: The weights file, for error messages.

    Raises:
        CheckpointError: There is no encoder, or it is unclear which of several encoders to use, or
            the purpose of a tensor is unknown.
    """
    leaves = list(_iterate_leaves(content))
    tensors = _require_unique(
        ((name, value) for name, value in leaves if isinstance(value, Tensor)), path
    )
    if not tensors:
        return Backbone({}, 0, {})
    training = tuple(
        {name.partition("param_groups/")[0] for name, _ in leaves if "/param_groups/" in name}
    )
    # Before its first update, a moving average contains the initial weights.
    unaveraged = tuple(
        name.removesuffix("n_averaged")
        for name, value in leaves
        if name.endswith(("/n_averaged", ".n_averaged")) and str(value) in ("0", "tensor(0)")
    )
    candidates = {name: value for name, value in tensors.items() if not name.startswith(training)}
    encoders = _find_encoders(candidates)
    if not (roots := encoders or _largest_containers(candidates)):
        raise CheckpointError(
            f"{path} is not a Vision Transformer: expected tensors with names such as "
            f"blocks.0.attn.qkv.weight, got {list_names(list(tensors))}. Save model.state_dict() "
            "instead"
        )
    root = _choose_encoder(roots, unaveraged, path)
    others = [other for other in roots if other != root]
    container = root[: root.rfind("/") + 1]
    if invalid := [name for name in tensors if name.startswith(f"{container}[")]:
        raise CheckpointError(
            f"{path}: the key {invalid[0].removeprefix(container)} is not a string. "
            "Save model.state_dict() instead"
        )
    own: dict[str, Tensor] = {}
    ignored: dict[str, str] = {}
    unknown: list[str] = []
    inner = tuple(other for other in others if other.startswith(root))
    for name, value in tensors.items():
        is_inside = name.startswith(root) and not name.startswith(inner)
        if is_inside and not _is_counter(name.removeprefix(root), value):
            own[name] = value
            continue
        above = _common_prefix((root, name))
        # Tensors in another dictionary are reported by the name of that dictionary.
        key = name.removeprefix(above).partition("/")[0]
        if name.startswith(training):
            ignored[key] = "state of training"
        elif reason := _find_reason_outside(name, value, above, root, others):
            ignored[key] = reason
        else:
            unknown.append(key)
    inside = ((_remove_wrapper("module", name.removeprefix(root)), own[name]) for name in own)
    weights = _require_unique(inside, path)
    if first_match(weights, CLIP.patterns[0]) is not None:
        weights, projection = rename_tensors(CLIP, weights, path)
        ignored |= projection
        for name, ndim in (("cls_token", 1), ("pos_embed", 2)):
            if name in weights and weights[name].ndim == ndim:
                weights[name] = weights[name][(None,) * (3 - ndim)]
    if first_match(weights, SAM.patterns[0]) is not None:
        weights, _ = rename_tensors(SAM, weights, path)
    if unknown:
        if not encoders:
            reject_unsupported(weights, path)
        raise CheckpointError(
            f"{path} contains {list_names(list(dict.fromkeys(unknown)))}, "
            "which are not known parts of an encoder. Save only the state_dict of the encoder"
        )
    heads = find_reasons(weights, _HEADS)
    plain = {name: value for name, value in weights.items() if name not in heads}
    total = sum(
        name.startswith(container) and "/" not in name[len(container) :] for name in tensors
    )
    note = f"{_label(root)} is used, not {list_names(list(map(_label, others)))}; "
    parts = tuple(f"{part}." for part in _SEPARATOR.split(root) if part)
    return Backbone(
        check_tensors(plain, path), total, {**ignored, **heads}, parts, note if others else ""
    )


def _iterate_leaves(value: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each leaf (value that is not a container) of nested containers.

    The name consists of the keys that lead to the leaf, separated by slashes, such as
    "model/head.bias". List indices and keys other than strings are in brackets.
    """
    items: Iterable[tuple[str, object]]
    if isinstance(value, Mapping):
        items = (
            (_remove_wrapper(r"_\w+", k) if isinstance(k, str) else f"[{k!r}]", v)
            for k, v in value.items()
        )
    elif isinstance(value, (list, tuple)):
        items = ((f"[{index}]", item) for index, item in enumerate(value))
    else:
        yield name, value
        return
    for key, item in items:
        yield from _iterate_leaves(item, f"{name}/{key}" if name else key)


def _remove_wrapper(wrapper: str, name: str) -> str:
    """Remove the parts of a tensor's name that match the regular expression `wrapper`.

    If `wrapper` is "module", the name "module.blocks.0.attn" becomes "blocks.0.attn".
    """
    return re.sub(rf"(?:^|(?<=\.)){wrapper}\.", "", name)


def _require_unique(pairs: Iterable[tuple[str, Tensor]], path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, value in pairs:
        if name in tensors:
            raise CheckpointError(
                f"{path} contains {name} twice, with and without a prefix such as module. or "
                "_orig_mod. from a wrapper. Save only the state_dict of the encoder"
            )
        tensors[name] = value
    return tensors


def _find_encoders(names: Collection[str]) -> list[str]:
    """Return the name prefix of each encoder among the tensors of a weights file.

    An encoder is recognised by blocks and by the weight of a patch embedding, such as
    "conv1.weight". If several weights have this name, and only some of them have a bias, those
    without a bias belong to other layers and are ignored.

    Args:
        names: Names of all tensors in the file.
    """
    kernels = dict.fromkeys(match.groups() for name in names if (match := _KERNEL.fullmatch(name)))
    return [
        root
        for root, kernel in kernels
        if any(name.startswith(root) and _BLOCKS.search(name, len(root)) for name in names)
        and (
            f"{root}{kernel}bias" in names
            or not any(name.endswith(f"{kernel}bias") for name in names)
        )
    ]


def _largest_containers(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the prefixes of the dictionaries in a weights file that contain the most tensors.

    Use this function if `_find_encoders` finds no encoder. The returned dictionaries may be
    encoders whose tensors have unknown names.
    """
    inside: dict[str, list[str]] = {}
    for name, value in tensors.items():
        container, _, key = name.rpartition("/")
        if not key.startswith("[") and not _is_counter(key, value):
            inside.setdefault(f"{container}/" if container else "", []).append(name)
    most = max(map(len, inside.values()), default=0)
    return [
        _common_prefix(names) if most > 1 else container
        for container, names in inside.items()
        if len(names) == most
    ]


def _choose_encoder(roots: list[str], unaveraged: tuple[str, ...], path: Path) -> str:
    """Choose one of several encoders in a weights file, and return its prefix.

    The words of prefixes such as "teacher.backbone." are compared from left to right. At the first
    word in which the prefixes differ, only encoders with the highest priority are kept. `_rank`
    computes the priority.

    Args:
        roots: Prefix of each encoder.
        unaveraged: Prefixes of moving averages that were never updated.
        path: The weights file, for error messages.

    Raises:
        CheckpointError: Several encoders have the highest priority.
    """
    if len(roots) == 1:
        return roots[0]
    above = _common_prefix(roots)
    branches: dict[str, list[str]] = {}
    for root in roots:
        branches.setdefault(_SEPARATOR.split(root.removeprefix(above))[0], []).append(root)
    ranks = {
        branch: max(_rank(root, above, unaveraged) for root in inside)
        for branch, inside in branches.items()
    }
    best = [branch for branch in branches if ranks[branch] == max(ranks.values())]
    if len(best) > 1:
        labels = list_names([_label(branches[branch][0]) for branch in best])
        raise CheckpointError(
            f"{path} contains {len(best)} encoders ({labels}), and no name shows which of them is "
            "the moving average. Save the state_dict of only one encoder"
        )
    return _choose_encoder(branches[best[0]], unaveraged, path)


def _rank(root: str, above: str, unaveraged: tuple[str, ...]) -> int:
    """Return the priority (rank) of an encoder in a file with several encoders.

    The encoder with the highest priority is loaded. The priorities are:

    - 3: The trained encoder "current", if its moving average was never updated.
    - 2: A moving average, such as "teacher" or "ema".
    - 1: Any other encoder.
    - 0: A moving average that was never updated, a student or a momentum encoder.

    Args:
        root: Prefix of the encoder.
        above: Common prefix of the tensor names of all compared encoders.
        unaveraged: Prefixes of moving averages that were never updated.
    """
    below = root.removeprefix(above)
    if any(len(place) > len(above) and root.startswith(place) for place in unaveraged):
        return 0
    for part in _SEPARATOR.split(below):
        words = {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part)}
        if words & _AVERAGED:
            return 2
        if "current" in words and f"{above}averaging_state/" in unaveraged:
            return 3
        if words & _NOT_PREFERRED:
            return 0
    return 1


def _find_reason_outside(
    name: str, value: Tensor, above: str, root: str, others: Sequence[str]
) -> str | None:
    """Return why a tensor outside of the encoder can be ignored, or None if its purpose is unknown.

    Args:
        name: Name of the tensor.
        value: The tensor.
        above: Common prefix of `root` and `name`.
        root: Prefix of the encoder.
        others: Prefixes of all other encoders in the file.
    """
    rest = name.removeprefix(above)
    part = _SEPARATOR.split(rest)[0]
    branch = name[: len(above) + len(part) + 1]
    if reason := find_reasons([part], _REASONS_OUTSIDE).get(part):
        return reason
    if any(
        other.startswith(branch) or (root.startswith(other) and name.startswith(other))
        for other in others
    ):
        return "another encoder, see the note"
    if _is_counter(rest.rpartition("/")[2], value):
        return "a number next to the weights"
    is_outside = "/" in root[len(above) :] and not set("./") & set(rest)
    return "a tensor next to the state_dict of the model" if is_outside else None


def _is_counter(key: str, value: Tensor) -> bool:
    """Return whether a tensor is a counter or another single number, but not a parameter.

    A tensor with one number is a parameter if its name (`key`) contains a dot, "token" or "embed".
    """
    return value.numel() == 1 and not re.search(r"\.|token|embed", key)


def _common_prefix(names: Sequence[str]) -> str:
    """Return the longest prefix that all names share and that ends with a dot or a slash.

    If there is no such prefix, the result is "".
    """
    common = os.path.commonprefix(names)  # noqa: RUF071 - cut at a whole part in the next line
    return common[: max(common.rfind("."), common.rfind("/")) + 1]


def _label(root: str) -> str:
    return root.rstrip("./") or "the encoder without a prefix"
