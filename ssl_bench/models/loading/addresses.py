"""Find the weights file of an encoder's address, and expand patterns such as `runs/*`.

An address is a text that tells this suite which encoder to load, such as a path or `timm:NAME`.
"""

import glob
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ssl_bench.composition.choices import entry_points
from ssl_bench.errors import CheckpointError, join_alternatives
from ssl_bench.system.files import PACKAGE_FOLDER, expand_path, resolve_links

LAST_CHECKPOINT = "last.safetensors"
RANDOM, COLOURS = "random", "colours"
"""Schemes of the untrained baselines `random:URI` and `colours:PATCH`."""
DEMO, DEMO_NAMES = "demo", ("skip", "skipless")
"""Scheme and names of the demo encoders that come with this suite, with addresses `demo:NAME`."""
WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".onnx")
FILE_AND_NAME = re.compile(r"(.+\.py):(\w+)", re.DOTALL)
"""Pattern of `FILE.py:NAME`, the address of a user's module."""
_USUAL_STEMS = ("checkpoint", "model", "pytorch_model", "last", "best")
_EPOCH_FILE = re.compile(r"epoch(\d{4,9})\.safetensors")


def epoch_file_name(epoch: int) -> str:
    """Return the file name for the encoder of an epoch, such as epoch0200.safetensors."""
    return f"epoch{epoch:04}.safetensors"


def parse_epoch(path: Path) -> int | None:
    """Return the epoch in a file name such as epoch0200.safetensors, or None for other names."""
    match = _EPOCH_FILE.fullmatch(path.name)
    return int(match[1]) if match else None


def resolve_file(uri: str) -> Path:
    """Return the path of the weights file of an encoder address. The file need not exist.

    If RUN is the folder of a training run, the address `RUN` means its last encoder, and `RUN@200`
    means its encoder of epoch 200. `demo:skip` and `demo:skipless` are small encoders that come
    with this suite. Any other address is a path.

    Raises:
        CheckpointError: The run has no encoder of this epoch, or the demo encoder is missing.
    """
    if uri.startswith(f"{DEMO}:"):
        return demo_file(uri)
    path = expand_path(uri)
    if path.is_dir():
        return path / LAST_CHECKPOINT
    run, _, epoch = uri.rpartition("@")
    # If a dot or slash follows the @, the address is the path of a missing file.
    if path.exists() or not run or not re.fullmatch(r"[\w,-]+", epoch):
        return path
    folder = expand_path(run)
    if not folder.is_dir():
        return path
    is_number = re.fullmatch(r"\d{1,9}", epoch)
    if is_number and (file := folder / epoch_file_name(int(epoch))).is_file():
        return file
    epochs = sorted(n for other in folder.iterdir() if (n := parse_epoch(other)) is not None)
    stored = (
        ", ".join(f"@{n}" for n in epochs) or "none (see train.keep_epochs and train.keep_every)"
    )
    pattern = f", or '{folder}/epoch*' for all of them" if epochs else ""
    raise CheckpointError(
        f"{folder} has no encoder of epoch {epoch}. Stored epochs: {stored}. Type {folder} for the "
        f"last encoder{pattern}"
    )


def display_name(path: Path) -> str:
    """Return the name that tables show for the encoder in a weights file.

    The last encoder of a training run is named after the run folder RUN, and the encoder of an
    earlier epoch is called RUN@EPOCH. Any other encoder is named after its file, without an
    extension such as `.pth`. If the file has a common name, such as `checkpoint`, the name of its
    folder precedes it.
    """
    epoch, folder = parse_epoch(path), resolve_links(path).parent.name
    if path.name == LAST_CHECKPOINT:
        return folder
    if epoch is not None:
        return f"{folder}@{epoch}"
    return f"{folder}/{path.stem}" if path.stem in _USUAL_STEMS else path.stem


def expand_addresses(patterns: Sequence[str]) -> list[str]:
    """Expand file patterns and comma-separated lists to encoder addresses, without duplicates.

    Examples are "runs/*" and "runs/a,runs/b".
    """
    uris: list[str] = []
    for pattern in (part for text in patterns for part in _split_list(text)):
        # A shell expands RUN/epoch* to weights files and to their .sha256 files.
        if pattern.removesuffix(".sha256") not in uris:
            uris += _find_matches(pattern) if _is_pattern(pattern) else [pattern]
    return list(dict.fromkeys(uris))


def _split_list(text: str) -> list[str]:
    """Split a text at its commas if it is a list of encoder addresses, such as "runs/a,runs/b".

    A text is a list if at least one of its parts contains a colon, is an existing path, or is a
    pattern that matches a path. If the whole text is an existing path or a matching pattern, the
    text is not split.
    """
    # RUN@1,2 is not split, because 2 is not an address.
    if re.fullmatch(r"[^,]*@[\d,-]+", text, re.DOTALL):
        return [text]
    parts: list[str] = []
    for word in text.split(","):
        # The comma in mean=0.5,std=0.5:URI does not separate addresses.
        if parts and re.search(r"(^|:)mean=[^:]*$", parts[-1]):
            parts[-1] += f",{word}"
        else:
            parts.append(word)
    is_list = not _exists(text) and any(":" in part or _exists(part) for part in parts)
    return [part for part in parts if part] if is_list else [text]


def _exists(text: str) -> bool:
    """Return whether a text is an existing path or a pattern with matches.

    An epoch at the end of the text, such as "@200" in "runs/a@200", is ignored.
    """
    names = (text, re.sub(r"@\d{1,9}$", "", text))
    paths = [str(expand_path(name)) for name in names if name]
    # Path.glob does not accept absolute patterns.
    return any(Path(p).exists() or (_is_pattern(p) and glob.glob(p)) for p in paths)  # noqa: PTH207


def is_baseline(uri: str) -> bool:
    """Return whether an address is an untrained baseline, `random:URI` or `colours:PATCH`."""
    return uri.partition(":")[0] in (RANDOM, COLOURS)


def has_random_baseline(uri: str) -> bool:
    """Return whether the baseline `random:URI` exists for the encoder at the address `uri`.

    The baseline is the same encoder with its initial weights. The baseline does not exist for
    untrained baselines, and for user modules and encoders from other packages, whose initialisation
    is unknown. This function does not load the encoder.
    """
    is_external = uri.partition(":")[0] in entry_points("encoder")
    return not (is_baseline(uri) or FILE_AND_NAME.fullmatch(uri) or is_external)


def add_baselines(uris: Sequence[str], patch_sizes: Iterable[int]) -> list[str]:
    """Return encoder addresses, followed by the addresses of untrained baselines.

    Two kinds of baselines are added: the same encoder with random weights if its initialisation is
    known, and the raw colours of patches for each patch size of the encoders.
    """
    drawn = [f"{RANDOM}:{uri}" for uri in uris if has_random_baseline(uri)]
    colours = [f"{COLOURS}:{size}" for size in sorted(set(patch_sizes))]
    return list(dict.fromkeys([*uris, *drawn, *colours]))


def layers_of_encoder(uri: str, layers: str | int | Sequence[int]) -> str | int | Sequence[int]:
    """Return the layers (block indices) to probe for the encoder at an address.

    The raw-colour baseline `colours:PATCH` has only one block, so its result is "all". For all
    other encoders, the result is `layers`.
    """
    return "all" if uri.partition(":")[0] == COLOURS else layers


def _is_pattern(text: str) -> bool:
    is_address = ":" in text.partition("/")[0]
    return glob.has_magic(text) and not is_address and not Path(text).exists()


def _find_matches(pattern: str) -> list[str]:
    # runs/*@200 means all runs that have an encoder of epoch 200.
    run, at, epoch = pattern.rpartition("@")
    if at and re.fullmatch(r"\d{1,9}", epoch):
        pattern = f"{run}/{epoch_file_name(int(epoch))}"
    # Path.glob does not accept absolute patterns.
    names = glob.glob(str(expand_path(pattern)), recursive=True)  # noqa: PTH207
    paths = map(Path, sorted(names))
    matches = [
        str(path)
        for path in paths
        if (path / LAST_CHECKPOINT).is_file() or (path.is_file() and path.suffix in WEIGHTS)
    ]
    if not matches:
        raise CheckpointError(
            f"no checkpoint matches {pattern!r}, expected run folders or weights files "
            f"({', '.join(WEIGHTS)}), such as 'runs/*/last.safetensors', or 'runs/*/epoch*' for "
            "all stored epochs"
        )
    return matches


def demo_folder() -> Path:
    """Return the folder of the demo encoders, in an installed wheel or in a git checkout."""
    inside = PACKAGE_FOLDER / DEMO
    return inside if inside.is_dir() else PACKAGE_FOLDER.parent / "results" / DEMO


def demo_file(uri: str) -> Path:
    """Return the path of the weights file of a demo encoder `demo:NAME`.

    Raises:
        CheckpointError: NAME is unknown, or this installation lacks the file.
    """
    name = uri.removeprefix(f"{DEMO}:")
    if name not in DEMO_NAMES:
        ways = [("--checkpoint", f"{DEMO}:{known}") for known in DEMO_NAMES]
        raise CheckpointError(f"unknown demo encoder {uri!r}", hint=join_alternatives(*ways))
    path = demo_folder() / f"demo_{name}.safetensors"
    if not path.is_file():
        raise CheckpointError(
            f"{uri} is missing in this installation: {path.parent} has no file {path.name}. Train "
            "an encoder, or pass another checkpoint",
            hint=("ssl-bench", "pretrain", "or", "--checkpoint", "{checkpoint}"),
        )
    return path
