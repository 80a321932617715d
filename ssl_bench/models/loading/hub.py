"""Find published weights in the torch hub and Hugging Face caches, or download them."""

import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from ssl_bench.errors import CheckpointError, DataError, join_alternatives
from ssl_bench.models.encoder import Encoder
from ssl_bench.models.loading.foreign import load_foreign
from ssl_bench.network import DownloadError, PublishedFile, download, open_url
from ssl_bench.system.files import file_sha256, open_regular

_FILES = "https://dl.fbaipublicfiles.com"
# URLs in the hubconf.py of each repository. The repositories' code is never run.
HUB_WEIGHTS: Mapping[str, Mapping[str, str]] = {
    "facebookresearch/dino": {
        name: f"{_FILES}/dino/{folder}/{folder}.pth"
        for name, folder in (
            ("dino_vits16", "dino_deitsmall16_pretrain"),
            ("dino_vits8", "dino_deitsmall8_pretrain"),
            ("dino_vitb16", "dino_vitbase16_pretrain"),
            ("dino_vitb8", "dino_vitbase8_pretrain"),
        )
    },
    "facebookresearch/dinov2": {
        f"dinov2_vit{size}14{suffix}": f"{_FILES}/dinov2/dinov2_vit{size}14/"
        f"dinov2_vit{size}14{registers}_pretrain.pth"
        for size in "sbl"
        for suffix, registers in (("", ""), ("_reg", "_reg4"))
    },
    "facebookresearch/deit": {
        f"deit_{size}_patch16_224": f"{_FILES}/deit/deit_{size}_patch16_224-{digest}.pth"
        for size, digest in (("tiny", "a1311bcf"), ("small", "cd65a155"), ("base", "b5f2ef4d"))
    },
}
# First bytes of a zip file, and of a pickle written by a torch version before 1.6.
_MAGIC = (b"PK\x03\x04", b"\x80\x02")
_DIGEST_IN_NAME = re.compile(r"-([0-9a-f]{8,64})\.pth?(?:\.part)?$")
_LOCAL_WAYS = join_alternatives(
    ("--checkpoint", "{weights_file}"),
    ("--checkpoint", "timm:{timm_name}@{weights_file}"),
    ("--checkpoint", "local-dir:{model_folder}"),
    ("--checkpoint", "demo:skip"),
)
WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin")


def load_torch_hub(uri: str) -> Encoder:
    """Load published weights from an address `torchhub:REPOSITORY:NAME`.

    An example is `torchhub:facebookresearch/dino:dino_vits16`. A branch, as in
    `torchhub:REPOSITORY:BRANCH:NAME`, is ignored.
    """
    match = re.fullmatch(r"torchhub:([^:]+):(?:[^:]+:)?([^:]+)", uri)
    repository, name = (match[1], match[2]) if match else ("", "")
    url = HUB_WEIGHTS.get(repository, {}).get(name)
    if url is None:
        known = [f"torchhub:{repo}:{key}" for repo, names in HUB_WEIGHTS.items() for key in names]
        raise CheckpointError(f"unknown encoder {uri!r}, expected one of {', '.join(known)}")
    return load_foreign(download_file(url), uri=uri, name=name)


def download_file(url: str) -> Path:
    """Return the path of a URL's file in torch's hub cache.

    The file is downloaded if it is missing.
    """
    target = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", maxsplit=1)[-1]
    try:
        return download(PublishedFile(url, None), target, _require_weights)
    except (DownloadError, DataError) as error:
        raise CheckpointError(
            f"{error}. You can also {_download_advice(url)}", hint=_LOCAL_WAYS
        ) from error


def _require_weights(file: Path) -> None:
    """Raise DataError if torch did not write the file, or if its name states another SHA-256.

    For example, the sha256 of deit_tiny_patch16_224-a1311bcf.pth begins with a1311bcf.
    """
    with open_regular(file) as opened:
        if not opened.read(4).startswith(_MAGIC):
            raise DataError(f"{file} was not written by torch.save")
    stated = _DIGEST_IN_NAME.search(file.name)
    if stated and not (digest := file_sha256(file)).startswith(stated[1]):
        raise DataError(f"{file} has sha256 {digest}, but its name states {stated[1]}")


def fetch_hub_file(
    repository: str, names: Sequence[str] = WEIGHTS_FILES, revision: str | None = None
) -> Path:
    """Return the path of a repository's file in the Hugging Face cache.

    The file is downloaded if it is missing.

    Args:
        repository: Name of the repository, such as `facebook/dinov2-small`.
        names: File names in order of preference. The first one that exists is used.
        revision: Branch, tag or commit. None for the main branch.
    """
    try:
        for name in names:
            # Look in the cache first, because hf_hub_download may send requests even for cached
            # files.
            cached = huggingface_hub.try_to_load_from_cache(repository, name, revision=revision)
            if isinstance(cached, str):
                return Path(cached)
    except HFValidationError as error:
        raise CheckpointError(
            f"{repository!r} cannot be a repository of Hugging Face, expected ORG/NAME",
            hint=("--checkpoint", "hf-hub:{org}/{name}"),
        ) from error
    url = f"{huggingface_hub.constants.ENDPOINT}/{repository}"
    try:
        # Any response, even an HTTP error, shows that the host can be reached.
        with suppress(urllib.error.HTTPError):
            open_url(urllib.request.Request(url, method="HEAD")).close()
    except DownloadError as error:
        raise CheckpointError(
            f"{error}. You can {_download_advice(url)}", hint=_LOCAL_WAYS
        ) from error
    for name in names:
        with suppress(HfHubHTTPError, LocalEntryNotFoundError, OSError):
            return Path(huggingface_hub.hf_hub_download(repository, name, revision=revision))
    at = f" at {revision}" if revision else ""
    raise CheckpointError(
        f"{url}{at} has no {' or '.join(names)}. You can {_download_advice(url)}",
        hint=_LOCAL_WAYS,
    )


def _download_advice(url: str) -> str:
    return f"download {url} on a machine with a network and load the file, or use demo:skip"
