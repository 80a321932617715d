"""Public weights: from the usual caches, else from the network, else a quick error."""

import shutil
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from threading import Thread
from typing import BinaryIO

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from ssl_bench.errors import CheckpointError
from ssl_bench.files import write_atomically

# Long enough for a slow line, short enough that a machine without network answers within 5 s.
REACH_SECONDS = 3.0
_STALL_SECONDS = 30.0
_DINO = "https://dl.fbaipublicfiles.com/dino/{name}/{name}.pth"
# Addresses of hubconf.py in facebookresearch/dino; its code is not run.
DINO_WEIGHTS = {
    "dino_vits16": _DINO.format(name="dino_deitsmall16_pretrain"),
    "dino_vits8": _DINO.format(name="dino_deitsmall8_pretrain"),
    "dino_vitb16": _DINO.format(name="dino_vitbase16_pretrain"),
    "dino_vitb8": _DINO.format(name="dino_vitbase8_pretrain"),
}
_HUGGING_FACE_FILES = ("model.safetensors", "pytorch_model.bin")


def downloaded_file(url: str) -> Path:
    """The file of `url` in torch's hub cache, fetched if it is not there.

    Raises:
        CheckpointError: Not cached and not to be had.
    """
    target = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", maxsplit=1)[-1]
    if not target.is_file():
        _require_network(url)
        write_atomically(target, lambda file: _fetch(url, file))
    return target


def hugging_face_file(repository: str) -> Path:
    """The weights file of a repository in the Hugging Face cache, fetched if it is not there.

    Raises:
        CheckpointError: Not cached and not to be had.
    """
    for name in _HUGGING_FACE_FILES:
        try:
            return Path(huggingface_hub.hf_hub_download(repository, name, local_files_only=True))
        except LocalEntryNotFoundError:
            continue
    url = f"{huggingface_hub.constants.ENDPOINT}/{repository}"
    _require_network(url)
    for name in _HUGGING_FACE_FILES:
        try:
            return Path(huggingface_hub.hf_hub_download(repository, name))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError):
            continue
    raise CheckpointError(f"{url} gave no {' or '.join(_HUGGING_FACE_FILES)}; {_local_ways(url)}")


def _require_network(url: str) -> None:
    # In a thread: no timeout of a socket covers a name server that does not answer.
    reached: list[bool] = []
    thread = Thread(target=lambda: reached.append(_answers(url)), daemon=True)
    thread.start()
    thread.join(REACH_SECONDS)
    if not any(reached):
        raise CheckpointError(
            f"{urllib.parse.urlsplit(url).netloc} cannot be reached; {_local_ways(url)}"
        )


def _answers(url: str) -> bool:
    request = urllib.request.Request(url, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=REACH_SECONDS).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def _fetch(url: str, file: BinaryIO) -> None:
    try:
        with urllib.request.urlopen(url, timeout=_STALL_SECONDS) as response:
            shutil.copyfileobj(response, file)
            expected = int(response.headers.get("Content-Length", file.tell()))
    except urllib.error.URLError as error:
        raise CheckpointError(
            f"cannot download {url} ({error.reason}); {_local_ways(url)}"
        ) from error
    # A line that breaks looks like the end of the file to the reader.
    if file.tell() != expected:
        raise CheckpointError(
            f"{url} broke off after {file.tell()} of {expected} bytes; try again, or "
            f"{_local_ways(url)}"
        )


def _local_ways(url: str) -> str:
    return (
        f"fetch {url} where there is a network and give the file: --checkpoint FILE.pth for DINO, "
        "timm:NAME@FILE for others; timm:NAME alone has random weights"
    )
