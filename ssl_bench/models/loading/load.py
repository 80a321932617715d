"""`load_encoder`: one address, one frozen encoder."""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path

from ssl_bench.errors import CheckpointError
from ssl_bench.models.encoder import ASSUMED, Contents, Encoder
from ssl_bench.models.loading.addresses import COLOURS, LAST, RANDOM, WEIGHTS, file_of, name_of
from ssl_bench.models.loading.identity import (
    EncoderIdentity,
    is_ours,
    stated_colours,
    stated_encoder,
    stated_epoch,
    unreplaced,
    verified_sha256,
)
from ssl_bench.models.loading.stated_colours import STATED, split_colours, with_colours

PYTHON_FILE = r"(.+\.py):(\w+)"
"""An address of one's own module: a file and a name in it."""
_KINDS = (
    f"a run folder, RUN@EPOCH, a file ({', '.join(WEIGHTS)}), FILE.py:NAME, timm:NAME, "
    "timm:NAME.TAG, timm:NAME@FILE, hf-hub:ORG/NAME, local-dir:FOLDER or "
    "torchhub:facebookresearch/dino:dino_vits16, demo:skip, random:URI or colours:PATCH; "
    "`ssl-bench models` lists them"
)


def load_encoder(uri: str) -> Encoder:
    """Load the frozen encoder that `uri` names; nothing that a file of weights holds is ever run.

    Args:
        uri: Our checkpoint, its run folder, or `RUN@EPOCH` for one it kept; a local file in the
            layout of DINO, DINOv2, MAE, iBOT or MoCo-v3; `timm:NAME` (random weights),
            `timm:NAME.TAG` (published), `timm:NAME@FILE`; `hf-hub:ORG/NAME@REVISION`;
            `local-dir:FOLDER`; `torchhub:REPOSITORY:NAME`; `demo:skip` and `demo:skipless`, which
            come with this suite; `mean=0.5,std=0.5:URI`, an encoder whose file does not say what
            its images are normalised by; `FILE.py:NAME`, a module of one's own, whose file is run;
            `random:URI`, that encoder before it was trained;
            `colours:PATCH`, patches as they are.

    Raises:
        CheckpointError: In one line, what was expected, what came and what to do.
    """
    if uri.startswith(STATED):
        return _with_colours(uri)
    if own := re.fullmatch(PYTHON_FILE, uri):
        from ssl_bench.models.from_module import load_own

        return load_own(uri, own[1], own[2])
    scheme, colon, _ = uri.partition(":")
    loaders: Mapping[str, Callable[[str], Encoder]] = {
        "timm": _from_timm,
        "torchhub": _from_torch_hub,
        "hf-hub": _from_hugging_face,
        "local-dir": _from_hugging_face,
        "torchvision": _refuse_torchvision,
        RANDOM: _with_random_weights,
        COLOURS: _from_colours,
    }
    return loaders.get(scheme, _from_path)(uri) if colon else _from_path(uri)


def identify_encoder(uri: str) -> EncoderIdentity:
    """The identity that `load_encoder(uri)` will have.

    Milliseconds and no torch for a checkpoint of ours, whose header and sha256 file say it all; any
    other is loaded and let go again.

    Raises:
        CheckpointError: As `load_encoder`; damaged weights are found only there.
    """
    if (stated := stated_identity(uri)) is not None:
        return stated
    encoder = load_encoder(uri)
    return EncoderIdentity(
        **{item.name: getattr(encoder, item.name) for item in fields(EncoderIdentity)}
    )


def stated_identity(uri: str) -> EncoderIdentity | None:
    """As `identify_encoder` of a checkpoint of ours; None for any other, which takes seconds.

    Raises:
        CheckpointError: As `stated_encoder`.
    """
    path = file_of(uri)
    is_stated = path.suffix == ".safetensors" and path.is_file() and is_ours(path)
    return stated_encoder(uri, path) if is_stated else None


# What reads weights is imported where it is needed: torch and timm take seconds, and who an encoder
# of ours is can be known without both.
def _from_timm(uri: str) -> Encoder:
    from ssl_bench.models.loading.timm_encoder import load_timm

    return load_timm(uri)


def _from_hugging_face(uri: str) -> Encoder:
    from ssl_bench.models.loading.hugging_face import load_hugging_face

    return load_hugging_face(uri)


def _from_torch_hub(uri: str) -> Encoder:
    from ssl_bench.models.loading.hub import HUB_WEIGHTS, downloaded_file

    # A branch may follow the repository, as torch.hub writes it: REPOSITORY:main:NAME.
    match = re.fullmatch(r"torchhub:([^:]+):(?:[^:]+:)?([^:]+)", uri)
    repository, name = (match[1], match[2]) if match else ("", "")
    url = HUB_WEIGHTS.get(repository, {}).get(name)
    if url is None:
        known = (f"torchhub:{repo}:{one}" for repo, names in HUB_WEIGHTS.items() for one in names)
        raise CheckpointError(f"unknown {uri!r}; known are {', '.join(known)}")
    return _from_foreign_file(downloaded_file(url), uri, name)


def _with_random_weights(uri: str) -> Encoder:
    from ssl_bench.models.loading.baselines import random_encoder

    return random_encoder(load_encoder(uri.removeprefix(f"{RANDOM}:")), uri)


def _with_colours(uri: str) -> Encoder:
    colours, inner = split_colours(uri)
    return with_colours(load_encoder(inner), uri, colours)


def _from_colours(uri: str) -> Encoder:
    from ssl_bench.models.loading.baselines import colour_patches

    return colour_patches(uri)


def _refuse_torchvision(uri: str) -> Encoder:
    name = uri.partition(":")[2]
    if not name.startswith("vit_"):
        raise CheckpointError(f"{uri}: this model of torchvision is not supported; give {_KINDS}")
    raise CheckpointError(
        f"{uri}: Vision Transformers of torchvision are loaded from a file; write it with `python "
        f"-c \"import torch, torchvision.models as m; torch.save(m.get_model('{name}', "
        f"weights='DEFAULT').state_dict(), '{name}.pth')\"` and give {name}.pth"
    )


def _from_path(uri: str) -> Encoder:
    path = file_of(uri)
    if path.name == LAST and not path.is_file() and path.with_name("config.json").is_file():
        folder = path.parent
        raise CheckpointError(f"{folder} is a folder of Hugging Face; type local-dir:{folder}")
    if not path.is_file():
        hint = _sibling_of(path) or _address_of(uri)
        wanted = f"did you mean {hint}?" if hint else f"give {_KINDS}"
        raise CheckpointError(f"no checkpoint at {path}; {wanted}")
    if path.suffix == ".py":
        raise CheckpointError(f"{path} is Python; name the module in it: {path}:NAME")
    if path.suffix == ".safetensors" and is_ours(path):
        return _from_our_file(path, uri)
    return _from_foreign_file(path, uri, name_of(path))


def _from_our_file(path: Path, uri: str) -> Encoder:
    from ssl_bench.models.kinds import encoder_from_model
    from ssl_bench.models.loading.checkpoint import load_checkpoint

    model, digest = load_checkpoint(path)
    keys = len(model.state_dict())
    return encoder_from_model(
        model,
        name=name_of(path),
        uri=uri,
        sha256=digest,
        keys=(keys, keys),
        colours=stated_colours(path),
        contents=Contents("ssl-bench", file=path, epoch=stated_epoch(path)),
    )


def _sibling_of(path: Path) -> str | None:
    """What lies there under nearly the same name."""
    try:
        names = [one.name for one in path.parent.iterdir()]
    except OSError:
        return None
    near = get_close_matches(path.name, names, n=1, cutoff=0.8)
    return str(path.with_name(near[0])) if near else None


def _address_of(name: str) -> str | None:
    """The address of a model that is known elsewhere by a name, None if nobody knows it."""
    from ssl_bench.models.loading.hub import HUB_WEIGHTS

    own = re.fullmatch(r"(.+):(\w+)", name)
    if own and Path(f"{own[1]}.py").is_file():
        return f"{own[1]}.py:{own[2]}"
    for repository, names in HUB_WEIGHTS.items():
        if name in names:
            return f"torchhub:{repository}:{name}"
    if re.fullmatch(r"[\w-]+/[\w.-]+", name) and not Path(name).parent.is_dir():
        return f"hf-hub:{name}"
    if "/" in name or not _is_of_timm(name.partition(".")[0]):
        return None
    return f"timm:{name}" if "." in name else f"timm:{name}.TAG (random weights without a tag)"


def _is_of_timm(name: str) -> bool:
    import timm

    return timm.is_model(name)


def _from_foreign_file(path: Path, uri: str, name: str) -> Encoder:
    from ssl_bench.models.kinds import encoder_from_model
    from ssl_bench.models.loading.foreign import load_foreign

    with unreplaced(path):
        digest = verified_sha256(path)
        found = load_foreign(path)
    return encoder_from_model(
        found.model,
        name=name,
        uri=uri,
        sha256=digest,
        keys=found.keys,
        contents=found.contents,
        colours_from=ASSUMED,
    )
