"""`load_encoder`: one address, one frozen encoder."""

from pathlib import Path

from ssl_bench.errors import CheckpointError
from ssl_bench.models.checkpoint import is_ours, load_checkpoint, verified_sha256
from ssl_bench.models.dino import load_dino
from ssl_bench.models.encoder import Encoder, encoder_from_vit
from ssl_bench.models.hub import DINO_WEIGHTS, downloaded_file

_LAST = "last.safetensors"
_KINDS = (
    "a run folder, a .safetensors or .pth file, timm:NAME, timm:NAME.TAG, timm:NAME@FILE, or "
    "torchhub:facebookresearch/dino:dino_vits16"
)


def load_encoder(uri: str) -> Encoder:
    """Load the frozen encoder that `uri` names; nothing a file holds is ever run.

    Args:
        uri: Our checkpoint or its run folder; a local DINO `.pth`; `timm:NAME` (random weights),
            `timm:NAME.TAG` (published), `timm:NAME@FILE`; `torchhub:facebookresearch/dino:NAME`.

    Raises:
        CheckpointError: In one line, what was expected, what came and what to do.
    """
    if uri.startswith("timm:"):
        # timm takes seconds to import, and our own checkpoints do not need it.
        from ssl_bench.models.timm_encoder import load_timm

        return load_timm(uri)
    if uri.startswith("torchhub:"):
        return _from_torch_hub(uri)
    return _from_path(uri)


def _from_torch_hub(uri: str) -> Encoder:
    prefix = "torchhub:facebookresearch/dino:"
    name = uri.removeprefix(prefix)
    if not uri.startswith(prefix) or name not in DINO_WEIGHTS:
        known = ", ".join(prefix + known for known in DINO_WEIGHTS)
        raise CheckpointError(f"unknown {uri!r}; known are {known}")
    return _from_dino_file(downloaded_file(DINO_WEIGHTS[name]), uri, name)


def _from_path(uri: str) -> Encoder:
    path = Path(uri).expanduser()
    if path.is_dir():
        path /= _LAST
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}; give {_KINDS}")
    if path.suffix == ".safetensors" and is_ours(path):
        model, digest = load_checkpoint(path)
        keys = len(model.state_dict())
        return encoder_from_vit(model, name=_name(path), uri=uri, sha256=digest, keys=(keys, keys))
    return _from_dino_file(path, uri, _name(path))


def _from_dino_file(path: Path, uri: str, name: str) -> Encoder:
    digest = verified_sha256(path)
    model, keys = load_dino(path)
    return encoder_from_vit(model, name=name, uri=uri, sha256=digest, keys=keys)


def _name(path: Path) -> str:
    """The run's name for its last checkpoint, the file's own otherwise."""
    return path.resolve().parent.name if path.name == _LAST else path.stem
