"""The training state on disk: never half written, never trusted unchecked.

A folder holds `state.pt`, until the last step the one before it as `state.previous.pt`, and the
sha256 of both. A kill or a full disk at any moment leaves at least one of them whole.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ssl_bench.errors import CheckpointError, MachineError
from ssl_bench.system.files import read_digests, sha256_of, write_atomically, write_text_atomically
from ssl_bench.system.memory import pass_on_memory
from ssl_bench.system.progress import say

STATE, PREVIOUS = "state.pt", "state.previous.pt"
# Complete, but not yet renamed: seen only after a kill between two renames.
_ARRIVED = "state.new.pt"
_SIDECAR = f"{STATE}.sha256"
_CANDIDATES = (_ARRIVED, STATE, PREVIOUS)
_FORMAT = {"format": "ssl-bench pretraining state", "version": 1}


def save_state(out: Path, state: Mapping[str, Any]) -> None:
    """Write the state of a run; the last one becomes the previous one.

    `state` holds tensors, numbers, texts, and containers of them: it is read without pickles.

    Raises:
        MachineError: the folder cannot be written or the disk is full; older files stay intact.
    """
    arrived, current = out / _ARRIVED, out / STATE
    write_atomically(arrived, lambda file: _write({**_FORMAT, **state}, file))
    lines = [f"{sha256_of(arrived)}  {STATE}\n"]
    if current.is_file():
        lines.append(f"{sha256_of(current)}  {PREVIOUS}\n")
    write_text_atomically(out / _SIDECAR, "".join(lines))
    try:
        if current.is_file():
            current.replace(out / PREVIOUS)
        arrived.replace(current)
    except OSError as error:
        raise MachineError(f"cannot rename {arrived}: {error.strerror or error}") from error


def _write(state: Mapping[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # torch closes its archive after a disk was full, and fails at that instead.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def load_state(out: Path, device: torch.device) -> tuple[dict[str, Any], Path]:
    """The newest whole state of a run, and the file it came from.

    Where the file of their sha256 is lost, a state that loads counts as whole: its parts have
    checksums of their own.

    Raises:
        CheckpointError: every file there is cut, changed, or of a later version.
    """
    problems, known = [], {digest for digest, _ in read_digests(out / _SIDECAR)}
    for path in (out / name for name in _CANDIDATES):
        if path.is_file():
            if known and sha256_of(path) in known:
                return _read(path, device), path
            if not known and _has_checksums(path):
                say(f"{out / _SIDECAR} is missing or empty: {path.name} is taken by its checksums")
                return _read(path, device), path
            problems.append(f"{path.name} is cut or changed")
    raise CheckpointError(
        f"no training state in {out} can be used ({'; '.join(problems) or 'there is none'}); "
        "start again with --overwrite in place of --resume"
    )


def has_state(out: Path) -> bool:
    """Whether a run has ever saved its state here."""
    return any((out / name).exists() for name in _CANDIDATES)


def remove_previous(out: Path) -> None:
    """Keep the state of a run that is over once: it is whole, and none will take its place."""
    (out / PREVIOUS).unlink(missing_ok=True)
    kept = [f"{digest}  {name}\n" for digest, name in read_digests(out / _SIDECAR)[:1]]
    write_text_atomically(out / _SIDECAR, "".join(kept))


def remove_states(out: Path) -> None:
    """Forget the run that was saved here."""
    for name in (*_CANDIDATES, _SIDECAR):
        (out / name).unlink(missing_ok=True)


def _has_checksums(path: Path) -> bool:
    """Whether all parts of torch's archive are there and have the checksums that it states."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except Exception:  # Damaged bytes make its reader fail in any way.
        return False


def _read(path: Path, device: torch.device) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # What is no archive of torch makes its reader fail in any way.
        pass_on_memory(error)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} is not a training state ({reason})") from error
    if not isinstance(state, dict) or {key: state.get(key) for key in _FORMAT} != _FORMAT:
        raise CheckpointError(
            f"{path} is not a training state of this version; use the ssl-bench that wrote it"
        )
    return state
