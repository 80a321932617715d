"""Who an encoder is: what a file of weights says of itself, without a tensor of it."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors

from ssl_bench.errors import CheckpointError, ConfigurationError
from ssl_bench.models.config import EncoderConfig, config_of
from ssl_bench.models.encoder import (
    IMAGENET_COLOURS,
    Colours,
    configured,
    identity_of,
    require_images,
)
from ssl_bench.models.loading.addresses import name_of
from ssl_bench.system.files import open_regular, read_digests, sha256_of

FORMAT = "ssl-bench"
# What a checkpoint holds that does not say it, as all did when there was one kind.
UNNAMED_KIND = "vit"
_LARGEST = 1e9


@dataclass(frozen=True)
class EncoderIdentity:
    """What names the cells of an encoder; the fields are those of `Encoder`.

    Attributes:
        num_heads: None where only timm knows, which takes seconds to import.
    """

    uri: str
    name: str
    sha256: str
    architecture: Mapping[str, Any]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    depth: int
    patch_size: int
    native_size: tuple[int, int]
    num_heads: int | None
    is_staged: bool
    has_cls: bool
    any_size: bool = True
    instead: Mapping[str, str] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """As `Encoder.identity`."""
        return identity_of(self.sha256, self.architecture, (self.mean, self.std))


def stated_encoder(uri: str, path: Path) -> EncoderIdentity:
    """The encoder in a file of ours; its weights are not read if possible.

    The sha256 is the one beside the file, which loading holds the file against.
    """
    metadata = read_metadata(path)
    config, strides = stated_config(path, metadata), _stated_strides(path, metadata)
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
        *stated_colours(path),
        depth=len(strides) if strides else config.depth,
        patch_size=strides[0] if strides else config.patch_size,
        native_size=(config.image_size, config.image_size),
        num_heads=None if strides else config.num_heads,
        is_staged=(is_staged := len(set(strides)) > 1),
        has_cls=not is_staged and config.num_prefix_tokens > config.num_registers,
    )


def _stated_strides(path: Path, metadata: Mapping[str, str]) -> list[int]:
    """Of every block, where a file of ours says that they may differ.

    Raises:
        CheckpointError: not whole numbers.
    """
    text = metadata.get("strides", "[]")
    try:
        strides = json.loads(text)
    except json.JSONDecodeError:
        strides = None
    if not isinstance(strides, list) or not all(type(one) is int and one > 0 for one in strides):
        raise CheckpointError(f"{path} states strides that are no whole numbers: {text[:80]}")
    return strides


def is_ours(path: Path) -> bool:
    """Whether a readable safetensors file was written by `save_encoder`."""
    return read_metadata(path).get("format") == FORMAT


def stated_epoch(path: Path) -> float | None:
    """How many epochs of training a file of ours says it had."""
    text = read_metadata(path).get("epoch", "")
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def stated_colours(path: Path) -> Colours:
    """How a file of ours says that its images are normalised; as ImageNet's if it does not."""
    metadata = read_metadata(path)
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


def stated_config(path: Path, metadata: Mapping[str, str]) -> EncoderConfig:
    try:
        kind = metadata.get("kind", UNNAMED_KIND)
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


def check_readable(path: Path) -> None:
    """Refuse what cannot be a weights file."""
    try:
        with open_regular(path) as file:
            start = file.read(256).lstrip()
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path} ({error.strerror}); give a weights file or a run folder"
        ) from error
    if not start:
        raise CheckpointError(f"{path} is empty; copy or download it again")
    if start.startswith(b"<"):
        raise CheckpointError(f"{path} is a web page, not weights; download the file itself")


@contextmanager
def unreplaced(path: Path) -> Iterator[None]:
    """Refuse what was read of a file that a running pretraining replaced meanwhile.

    Otherwise the sha256 of one checkpoint would stand beside the numbers of the next.
    """
    before = _stamp(path)
    try:
        yield
    finally:
        if _stamp(path) != before:
            raise CheckpointError(f"{path} was replaced while it was read; type the command again")


def verified_sha256(path: Path) -> str:
    """The sha256 of a file, compared with the one beside it where there is one."""
    check_readable(path)
    digest = sha256_of(path)
    sidecar = sidecar_of(path)
    if not is_there(sidecar):
        return digest
    expected = [stated for stated, _ in read_digests(sidecar)]
    if digest not in expected:
        raise CheckpointError(
            f"{path} has sha256 {digest[:12]}..., {sidecar.name} says "
            f"{' or '.join(item[:12] for item in expected) or 'nothing'}...; the file was cut or "
            "changed: copy or download both again"
        )
    return digest


def sidecar_of(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def is_there(sidecar: Path) -> bool:
    try:
        return sidecar.is_file()
    # The name of the weights may be so long that none beside it can be longer.
    except OSError:
        return False


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def colour_of(described: Mapping[str, Any], key: str, path: Path) -> tuple[float, float, float]:
    """Mean or deviation of red, green and blue in a configuration; a deviation ends with std."""
    value: Any = described.get(key)
    numbers: list[Any] = list(value) if isinstance(value, list | tuple) else [value] * 3
    sound = len(numbers) == 3 and all(is_number(one) for one in numbers)
    if not sound or (key.endswith("std") and min(numbers) <= 0):
        raise CheckpointError(
            f"{path}: expected {key} of red, green and blue, three numbers and no deviation of 0, "
            f"came {value!r}; fetch it again"
        )
    red, green, blue = map(float, numbers)
    return red, green, blue


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number as images and norms have them."""
    return type(value) in (int, float) and abs(value) < _LARGEST
