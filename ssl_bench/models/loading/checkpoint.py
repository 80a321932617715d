"""Our checkpoint: one safetensors file that says what it is, and its sha256 beside it."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from ssl_bench.errors import CheckpointError, ConfigurationError
from ssl_bench.models.encoder import IMAGENET_COLOURS, Colours
from ssl_bench.models.kinds import EncoderConfig, EncoderModule, config_of, empty_encoder, kind_of
from ssl_bench.models.loading.weights import check_readable, load_weights, read_weights
from ssl_bench.system.files import read_digests, sha256_of, write_atomically, write_text_atomically

FORMAT = "ssl-bench"
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
    ours = {"format": FORMAT, "version": _VERSION, "config": json.dumps(model.config.to_dict())}
    if (kind := kind_of(model.config)) != _UNNAMED_KIND:
        ours["kind"] = kind
    content = _serialised(model.state_dict(), {**metadata, **ours})
    line = f"{sha256(content).hexdigest()}  {path.name}\n"
    sidecar = _sidecar(path)
    if path.is_file() and _is_there(sidecar):
        before = "".join(f"{digest}  {name}\n" for digest, name in read_digests(sidecar))
        write_text_atomically(sidecar, before + line)
    write_atomically(path, lambda file: file.write(content))
    write_text_atomically(sidecar, line)


def is_ours(path: Path) -> bool:
    """Whether a readable safetensors file was written by `save_encoder`."""
    return read_metadata(path).get("format") == FORMAT


def load_checkpoint(path: Path) -> tuple[EncoderModule, str]:
    """The model that `save_encoder` wrote and the sha256 of its file.

    Raises:
        CheckpointError: The file is missing, damaged, replaced meanwhile, or of a later version of
            this format.
    """
    with unreplaced(path):
        return _load_checkpoint(path)


def _load_checkpoint(path: Path) -> tuple[EncoderModule, str]:
    digest = verified_sha256(path)
    if not _is_there(_sidecar(path)):
        raise CheckpointError(
            f"{_sidecar(path)} is missing, so {path.name} cannot be verified; copy both files, or, "
            f"if you trust it, run: cd {path.parent} && sha256sum {path.name} > {path.name}.sha256"
        )
    metadata = read_metadata(path)
    if metadata.get("version") != _VERSION:
        raise CheckpointError(
            f"{path} has format version {metadata.get('version')}, this program reads {_VERSION}; "
            "install a newer ssl-bench"
        )
    model = empty_encoder(_config(path, metadata))
    load_weights(model, read_weights(path), path)
    return model, digest


def stated_identity(path: Path) -> tuple[EncoderConfig, str]:
    """Configuration and sha256 of a checkpoint of ours; its weights are not read if possible.

    The sha256 is the one beside the file, which `load_checkpoint` holds the file against.

    Raises:
        CheckpointError: The header cannot be read, or no single sha256 is stated and that of the
            file is not among them.
    """
    config = _config(path, read_metadata(path))
    stated = read_digests(_sidecar(path))
    # While the weights are replaced two lines stand there; others may speak of other files.
    is_single = [name for _, name in stated] == [path.name]
    return config, stated[0][0] if is_single else verified_sha256(path)


def stated_epoch(path: Path) -> float | None:
    """How many epochs of training a file of ours says it had."""
    try:
        epoch = float(read_metadata(path).get("epoch", "nan"))
    except ValueError:
        return None
    return epoch if math.isfinite(epoch) else None


def colours_metadata(colours: Colours) -> dict[str, str]:
    """Metadata for `save_encoder` of an encoder whose images are not normalised as ImageNet's."""
    if colours == IMAGENET_COLOURS:
        return {}
    return {"mean": json.dumps(colours[0]), "std": json.dumps(colours[1])}


def stated_colours(path: Path) -> Colours:
    """How a file of ours says that its images are normalised; as ImageNet's if it does not.

    Raises:
        CheckpointError: Not three numbers each.
    """
    metadata = read_metadata(path)
    mean, std = (
        _three_numbers(path, metadata[name]) if name in metadata else plain
        for name, plain in zip(("mean", "std"), IMAGENET_COLOURS, strict=True)
    )
    return mean, std


def read_metadata(path: Path) -> dict[str, str]:
    """What `save_encoder` wrote beside the weights: format, version, kind, config, step ...

    Raises:
        CheckpointError: Not a readable safetensors file.
    """
    check_readable(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a readable safetensors file ({error}); it is cut or something else: "
            "copy or download it again"
        ) from error


@contextmanager
def unreplaced(path: Path) -> Iterator[None]:
    """Refuse what was read of a file that a running pretraining replaced meanwhile.

    Otherwise the sha256 of one checkpoint would stand beside the numbers of the next.

    Raises:
        CheckpointError: It is another file now.
    """
    before = _stamp(path)
    try:
        yield
    finally:
        if _stamp(path) != before:
            raise CheckpointError(f"{path} was replaced while it was read; type the command again")


def verified_sha256(path: Path) -> str:
    """The sha256 of a file, compared with the one beside it where there is one.

    Raises:
        CheckpointError: They differ, or there is no file.
    """
    check_readable(path)
    digest = sha256_of(path)
    sidecar = _sidecar(path)
    if not _is_there(sidecar):
        return digest
    expected = [stated for stated, _ in read_digests(sidecar)]
    if digest not in expected:
        raise CheckpointError(
            f"{path} has sha256 {digest[:12]}..., {sidecar.name} says "
            f"{' or '.join(item[:12] for item in expected) or 'nothing'}...; the file was cut or "
            "changed: copy or download both again"
        )
    return digest


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _is_there(sidecar: Path) -> bool:
    try:
        return sidecar.is_file()
    # The name of the weights may be so long that none beside it can be longer.
    except OSError:
        return False


def _config(path: Path, metadata: Mapping[str, str]) -> EncoderConfig:
    try:
        kind = metadata.get("kind", _UNNAMED_KIND)
        return config_of(kind, json.loads(metadata["config"]))
    except (KeyError, TypeError, json.JSONDecodeError, ConfigurationError) as error:
        raise CheckpointError(
            f"{path} holds a model configuration that cannot be read ({error}); "
            "it needs the version of ssl-bench that wrote it"
        ) from error


def _three_numbers(path: Path, text: str) -> tuple[float, float, float]:
    try:
        red, green, blue = (float(value) for value in json.loads(text))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} states a mean or deviation of images that is not three numbers: {text[:80]}"
        ) from error
    return red, green, blue


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
