"""Files of weights behind what is typed: run folders, epochs, patterns, demonstrations."""

import glob
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ssl_bench.composition.choices import entry_points
from ssl_bench.errors import CheckpointError
from ssl_bench.system.files import PACKAGE, expand_path, resolve_links

LAST = "last.safetensors"
RANDOM, COLOURS = "random", "colours"
"""Schemes of encoders that learned nothing: `random:URI` and `colours:PATCH`."""
DEMO, NAMES = "demo", ("skip", "skipless")
"""Encoders that come with this suite: `demo:NAME`."""
WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".onnx")
OWN = re.compile(r"(.+\.py):(\w+)", re.DOTALL)
"""`FILE.py:NAME`, a module of one's own."""
_USUAL = ("checkpoint", "model", "pytorch_model", "last", "best")
_KEPT = re.compile(r"epoch(\d{4,9})\.safetensors")


def kept_name(epoch: int) -> str:
    """Name of the file in a run folder with the encoder as it was after so many epochs."""
    return f"epoch{epoch:04}.safetensors"


def kept_epoch(path: Path) -> int | None:
    """The epoch that `kept_name` was given; None for another file."""
    found = _KEPT.fullmatch(path.name)
    return int(found[1]) if found else None


def file_of(uri: str) -> Path:
    """The file of weights that a path names, which need not be there.

    `RUN` is the last encoder of a run folder, `RUN@200` the one it kept after epoch 200, and
    `demo:skip` one that comes with this suite.
    """
    if uri.startswith(f"{DEMO}:"):
        return demo_file(uri)
    path = expand_path(uri)
    if path.is_dir():
        return path / LAST
    run, _, epoch = uri.rpartition("@")
    # What has dots or slashes is a file that is not there.
    if path.exists() or not run or not re.fullmatch(r"[\w,-]+", epoch):
        return path
    folder = expand_path(run)
    if not folder.is_dir():
        return path
    is_one = re.fullmatch(r"\d{1,9}", epoch)
    if is_one and (kept := folder / kept_name(int(epoch))).is_file():
        return kept
    epochs = sorted(n for other in folder.iterdir() if (n := kept_epoch(other)) is not None)
    there = ", ".join(f"@{n}" for n in epochs) or "none (train.keep_epochs, train.keep_every)"
    every = f", or '{folder}/epoch*' for all that it kept" if epochs else ""
    raise CheckpointError(
        f"{folder} kept no encoder after epoch {epoch}; expected one of {there}, or {folder} for "
        f"its last{every}"
    )


def name_of(path: Path) -> str:
    """The run's name for its last encoder, with @EPOCH for one it kept; else the file's own.

    Of a name that every run gives its files, such as `checkpoint`, with the folder before it.
    """
    epoch, folder = kept_epoch(path), resolve_links(path).parent.name
    if path.name == LAST:
        return folder
    if epoch is not None:
        return f"{folder}@{epoch}"
    return f"{folder}/{path.stem}" if path.stem in _USUAL else path.stem


def expand(patterns: Sequence[str]) -> list[str]:
    """Addresses of encoders, from addresses and patterns of files and run folders, or several."""
    found: list[str] = []
    for pattern in (part for text in patterns for part in _separated(text)):
        # A shell gives of RUN/epoch* the digests beside the weights, too.
        if pattern.removesuffix(".sha256") not in found:
            found += _matching(pattern) if _is_pattern(pattern) else [pattern]
    return list(dict.fromkeys(found))


def _separated(text: str) -> list[str]:
    """The parts of "a,b" where one of them is known; commas of other addresses stay."""
    # RUN@1,2 is no list: each epoch has an address of its own.
    if re.fullmatch(r"[^,]*@[\d,-]+", text, re.DOTALL):
        return [text]
    parts: list[str] = []
    for word in text.split(","):
        # Numbers of mean=0.5,std=0.5:URI, however many addresses stand before it.
        if parts and re.search(r"(^|:)mean=[^:]*$", parts[-1]):
            parts[-1] += f",{word}"
        else:
            parts.append(word)
    is_list = not _is_there(text) and any(":" in part or _is_there(part) for part in parts)
    return [part for part in parts if part] if is_list else [text]


def _is_there(text: str) -> bool:
    """Whether a path, or the run before an epoch, exists, or a pattern matches something."""
    paths = [str(expand_path(one)) for one in (text, re.sub(r"@\d{1,9}$", "", text)) if one]
    # Path.glob takes no absolute pattern.
    return any(Path(p).exists() or (_is_pattern(p) and glob.glob(p)) for p in paths)  # noqa: PTH207


def is_baseline(uri: str) -> bool:
    """Whether an address names an encoder that learned nothing, as `with_baselines` adds them."""
    return uri.partition(":")[0] in (RANDOM, COLOURS)


def has_random_weights(uri: str) -> bool:
    """Whether `random:URI` exists. Only the loaders of this package know how weights begin."""
    is_external = uri.partition(":")[0] in entry_points("encoder")
    return not (is_baseline(uri) or OWN.fullmatch(uri) or is_external)


def with_baselines(uris: Sequence[str], patch_sizes: Iterable[int]) -> list[str]:
    """Add each encoder with random weights, and raw colours of patches of all their sizes."""
    drawn = [f"{RANDOM}:{uri}" for uri in uris if has_random_weights(uri)]
    colours = [f"{COLOURS}:{size}" for size in sorted(set(patch_sizes))]
    return list(dict.fromkeys([*uris, *drawn, *colours]))


def layers_of_encoder(uri: str, layers: str | int | Sequence[int]) -> str | int | Sequence[int]:
    """Return the requested layers, or "all" for raw colours, which have a single block."""
    return "all" if uri.partition(":")[0] == COLOURS else layers


def _is_pattern(text: str) -> bool:
    is_address = ":" in text.partition("/")[0]
    return glob.has_magic(text) and not is_address and not Path(text).exists()


def _matching(pattern: str) -> list[str]:
    # Of all runs that kept it: runs/*@200.
    run, at, epoch = pattern.rpartition("@")
    if at and re.fullmatch(r"\d{1,9}", epoch):
        pattern = f"{run}/{kept_name(int(epoch))}"
    # Path.glob takes no absolute pattern.
    names = glob.glob(str(expand_path(pattern)), recursive=True)  # noqa: PTH207
    paths = map(Path, sorted(names))
    found = [
        str(path)
        for path in paths
        if (path / LAST).is_file() or (path.is_file() and path.suffix in WEIGHTS)
    ]
    if not found:
        raise CheckpointError(
            f"no checkpoint matches {pattern!r}; expected run folders or files of weights "
            f"({', '.join(WEIGHTS)}), such as 'runs/*/last.safetensors', or 'runs/*/epoch*' for "
            "all epochs that were kept"
        )
    return found


def demo_folder() -> Path:
    """Where they lie: inside `ssl_bench` in a wheel, in results/ of a checkout."""
    inside = PACKAGE / DEMO
    return inside if inside.is_dir() else PACKAGE.parent / "results" / DEMO


def demo_file(uri: str) -> Path:
    """The file of weights that `demo:NAME` names."""
    name = uri.removeprefix(f"{DEMO}:")
    if name not in NAMES:
        known = " or ".join(f"{DEMO}:{one}" for one in NAMES)
        raise CheckpointError(f"expected {known}, got {uri!r}")
    path = demo_folder() / file_name(name)
    if not path.is_file():
        raise CheckpointError(
            f"{uri} does not come with this version: no {path.name} in {path.parent}; train an "
            "encoder, or give a checkpoint",
            hint=("ssl-bench", "pretrain", "or", "--checkpoint", "{checkpoint}"),
        )
    return path


def file_name(name: str) -> str:
    """Of the weights; card, configuration and log lie beside them under the same stem."""
    return f"demo_{name}.safetensors"
