"""Our checkpoint: one safetensors file that says what it is, and its sha256 beside it."""

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from ssl_bench.errors import CheckpointError, ConfigurationError
from ssl_bench.models.config import EncoderConfig, config_of
from ssl_bench.models.encoder import (
    IMAGENET_COLOURS,
    Colours,
    Contents,
    Encoder,
    EncoderIdentity,
    configured,
    empty_encoder,
    encoder_from_model,
    require_images,
)
from ssl_bench.models.loading.addresses import name_of
from ssl_bench.models.loading.weights import (
    check_readable,
    is_there,
    load_weights,
    read_weights,
    sidecar_of,
    unreplaced,
    usable,
    verified_sha256,
)
from ssl_bench.models.vit import EncoderModule
from ssl_bench.system.escaping import quote_command
from ssl_bench.system.files import read_digests, write_atomically, write_text_atomically

_FORMAT = "ssl-bench"
_VERSION = "1"
# What a checkpoint holds that does not say it, as all did when there was one kind.
_UNNAMED_KIND = "vit"


def save_encoder(path: Path, model: EncoderModule, metadata: Mapping[str, str]) -> None:
    """Write weights, configuration and `metadata`; equal content gives equal bytes.

    A kill at any moment leaves a file that loads: while the weights are replaced, the sha256 file
    names the old and the new ones.

    Raises:
        MachineError: The folder cannot be written or the disk is full; older files stay intact.
    """
    ours = {"format": _FORMAT, "version": _VERSION, "config": json.dumps(model.config.to_dict())}
    if model.config.kind != _UNNAMED_KIND:
        ours["kind"] = model.config.kind
    if (shape := model.config.shape) is not None:
        # So that nobody has to ask timm, and torch, which blocks there are.
        ours["strides"] = json.dumps(shape.strides)
    content = _serialised(model.state_dict(), {**metadata, **ours})
    line = f"{sha256(content).hexdigest()}  {path.name}\n"
    sidecar = sidecar_of(path)
    if path.is_file() and is_there(sidecar):
        before = "".join(f"{digest}  {name}\n" for digest, name in read_digests(sidecar))
        write_text_atomically(sidecar, before + line)
    write_atomically(path, lambda file: file.write(content))
    write_text_atomically(sidecar, line)


def load_own_encoder(uri: str, path: Path) -> Encoder:
    """The frozen encoder in a file of ours."""
    model, digest = load_checkpoint(path)
    metadata, keys = read_metadata(path), len(model.state_dict())
    epoch = metadata.get("epoch", "")
    trained = float(epoch) if re.fullmatch(r"\d+(\.\d+)?", epoch) else None
    return encoder_from_model(
        model,
        name=name_of(path),
        uri=uri,
        sha256=digest,
        keys=(keys, keys),
        colours=_stated_colours(path, metadata),
        contents=Contents("ssl-bench", file=path, epoch=trained),
    )


def load_checkpoint(path: Path) -> tuple[EncoderModule, str]:
    """The model that `save_encoder` wrote and the sha256 of its file."""
    with unreplaced(path):
        digest, sidecar = verified_sha256(path), sidecar_of(path)
        if not is_there(sidecar):
            folder, name = quote_command([str(path.parent)]), quote_command([path.name])
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
        model = empty_encoder(_stated_config(path, metadata))
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


def stated_encoder(uri: str, path: Path) -> EncoderIdentity:
    """The encoder in a file of ours; its weights are not read if possible.

    The sha256 is the one beside the file, which loading holds the file against.
    """
    metadata = read_metadata(path)
    config = _stated_config(path, metadata)
    # Of every block, where they may differ.
    text = metadata.get("strides", "[]")
    try:
        strides = json.loads(text)
    except json.JSONDecodeError:
        strides = None
    if not isinstance(strides, list) or not all(type(one) is int and one > 0 for one in strides):
        raise CheckpointError(f"{path} states strides that are no whole numbers: {text[:80]}")
    require_images(config, uri)
    stated = read_digests(sidecar_of(path))
    # While the weights are replaced two lines stand there; others may speak of other files.
    is_single = [name for _, name in stated] == [path.name]
    digest = stated[0][0] if is_single else verified_sha256(path)
    return EncoderIdentity(
        uri,
        name_of(path),
        digest,
        configured(config, strides=strides),
        *_stated_colours(path, metadata),
        depth=len(strides) if strides else config.depth,
        patch_size=strides[0] if strides else config.patch_size,
        native_size=(config.image_size, config.image_size),
        num_heads=None if strides else config.num_heads,
        is_staged=(is_staged := len(set(strides)) > 1),
        has_cls=not is_staged and config.num_prefix_tokens > config.num_registers,
    )


def is_ours(path: Path) -> bool:
    """Whether a readable safetensors file was written by `save_encoder`."""
    return read_metadata(path).get("format") == _FORMAT


def _stated_colours(path: Path, metadata: Mapping[str, str]) -> Colours:
    found = [(0.0, 0.0, 0.0)] * 2
    for place, name in enumerate(("mean", "std")):
        text = metadata.get(name, json.dumps(IMAGENET_COLOURS[place]))
        try:
            red, green, blue = (float(value) for value in json.loads(text))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} states a mean or deviation of images that is not three numbers: "
                f"{text[:80]}"
            ) from error
        found[place] = (red, green, blue)
    return found[0], found[1]


def _stated_config(path: Path, metadata: Mapping[str, str]) -> EncoderConfig:
    try:
        kind = metadata.get("kind", _UNNAMED_KIND)
        return config_of(kind, json.loads(metadata["config"]))
    except (KeyError, TypeError, json.JSONDecodeError, ConfigurationError) as error:
        raise CheckpointError(
            f"{path} holds a model configuration that cannot be read ({error}); "
            "it needs the version of ssl-bench that wrote it"
        ) from error


def read_metadata(path: Path) -> dict[str, str]:
    """What `save_encoder` wrote beside the weights: format, version, kind, config, step ..."""
    check_readable(path)
    try:
        with safetensors.safe_open(path, framework="np") as file:
            return file.metadata() or {}
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a readable safetensors file ({error}); it is cut or something else: "
            "copy or download it again"
        ) from error
