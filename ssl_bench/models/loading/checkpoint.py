"""Our checkpoint: one safetensors file that says what it is, and its sha256 beside it."""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import safetensors.torch
from torch import Tensor

from ssl_bench.errors import CheckpointError
from ssl_bench.models.encoder import IMAGENET_COLOURS, Colours
from ssl_bench.models.kinds import EncoderModule, empty_encoder
from ssl_bench.models.loading.identity import (
    FORMAT,
    UNNAMED_KIND,
    is_there,
    read_metadata,
    sidecar_of,
    stated_config,
    unreplaced,
    verified_sha256,
)
from ssl_bench.models.loading.weights import load_weights, read_weights, usable
from ssl_bench.models.timm_config import TimmConfig
from ssl_bench.system.escaping import shell_words
from ssl_bench.system.files import read_digests, write_atomically, write_text_atomically

_VERSION = "1"


def save_encoder(path: Path, model: EncoderModule, metadata: Mapping[str, str]) -> None:
    """Write weights, configuration and `metadata`; equal content gives equal bytes.

    A kill at any moment leaves a file that loads: while the weights are replaced, the sha256 file
    names the old and the new ones.

    Raises:
        MachineError: The folder cannot be written or the disk is full; older files stay intact.
    """
    ours = {"format": FORMAT, "version": _VERSION, "config": json.dumps(model.config.to_dict())}
    if model.config.kind != UNNAMED_KIND:
        ours["kind"] = model.config.kind
    if isinstance(model.config, TimmConfig):
        # So that nobody has to ask timm, and torch, which blocks there are.
        ours["strides"] = json.dumps(model.config.shape.strides)
    content = _serialised(model.state_dict(), {**metadata, **ours})
    line = f"{sha256(content).hexdigest()}  {path.name}\n"
    sidecar = sidecar_of(path)
    if path.is_file() and is_there(sidecar):
        before = "".join(f"{digest}  {name}\n" for digest, name in read_digests(sidecar))
        write_text_atomically(sidecar, before + line)
    write_atomically(path, lambda file: file.write(content))
    write_text_atomically(sidecar, line)


def load_checkpoint(path: Path) -> tuple[EncoderModule, str]:
    """The model that `save_encoder` wrote and the sha256 of its file."""
    with unreplaced(path):
        digest, sidecar = verified_sha256(path), sidecar_of(path)
        if not is_there(sidecar):
            folder, name = shell_words([str(path.parent)]), shell_words([path.name])
            raise CheckpointError(
                f"{sidecar} is missing, so {path.name} cannot be verified; copy both files, or, "
                f"if you trust it, run: cd {folder} && sha256sum {name} > {name}.sha256"
            )
        metadata = read_metadata(path)
        if metadata.get("version") != _VERSION:
            raise CheckpointError(
                f"{path} has format version {metadata.get('version')}, this program reads "
                f"{_VERSION}; install a newer ssl-bench"
            )
        model = empty_encoder(stated_config(path, metadata))
        load_weights(model, usable(read_weights(path), path), path)
    return model, digest


def colours_metadata(colours: Colours) -> dict[str, str]:
    """Metadata for `save_encoder` of an encoder whose images are not normalised as ImageNet's."""
    if colours == IMAGENET_COLOURS:
        return {}
    return {"mean": json.dumps(colours[0]), "std": json.dumps(colours[1])}


def _serialised(weights: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    tensors = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    content = safetensors.torch.save(tensors, dict(metadata))
    # The library writes the metadata in random order; sorted, equal weights have equal sha256.
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + size :]
