"""The folder of a run: training state and encoders on disk, written while the run goes on.

A folder holds `state.pt`, until the last step the one before it as `state.previous.pt`, and the
sha256 of both. A kill or a full disk at any moment leaves at least one of them whole. Encoders lie
beside it. What is written are copies in host memory, in a thread of its own.
"""

import copy
import zipfile
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pretrain.lock import Hold
from ssl_bench.errors import CheckpointError, ConfigurationError, MachineError
from ssl_bench.models import EncoderModule, save_encoder
from ssl_bench.models.loading.addresses import LAST, epoch_file_name, parse_epoch
from ssl_bench.system.device import to_host
from ssl_bench.system.files import (
    file_sha256,
    read_digests,
    remove_orphans,
    write_atomically,
    write_text_atomically,
)
from ssl_bench.system.output import say
from ssl_bench.system.process import reraise_out_of_memory

ENCODER, CONFIG, LOG = LAST, "config.yaml", "log.jsonl"
BOARD, WANDB = "tensorboard", "wandb"
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
    lines = [f"{file_sha256(arrived)}  {STATE}\n"]
    if current.is_file():
        lines.append(f"{file_sha256(current)}  {PREVIOUS}\n")
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
            if known and file_sha256(path) in known:
                return _read(path, device), path
            if not known and _has_checksums(path):
                say(f"{out / _SIDECAR} is missing or empty: {path.name} is taken by its checksums")
                return _read(path, device), path
            problems.append(f"{path.name} is cut or changed")
    raise CheckpointError(
        f"no training state in {out} can be used ({'; '.join(problems) or 'there is none'}); "
        "start again without --resume",
        hint=("--overwrite",),
    )


def has_state(out: Path) -> bool:
    """Whether a run has ever saved its state here."""
    return any((out / name).exists() for name in _CANDIDATES)


def remove_previous(out: Path) -> None:
    """Keep the state of a run that is over once: it is whole, and none will take its place."""
    (out / PREVIOUS).unlink(missing_ok=True)
    kept = [f"{digest}  {name}\n" for digest, name in read_digests(out / _SIDECAR)[:1]]
    write_text_atomically(out / _SIDECAR, "".join(kept))


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
        reraise_out_of_memory(error)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} is not a training state ({reason})") from error
    if not isinstance(state, dict) or {key: state.get(key) for key in _FORMAT} != _FORMAT:
        raise CheckpointError(
            f"{path} is not a training state of this version; use the ssl-bench that wrote it"
        )
    return _State(state, path)


class _State(dict[str, Any]):
    """What a file holds of a run; what it lacks is said."""

    def __init__(self, parts: Mapping[str, Any], path: Path) -> None:
        super().__init__(parts)
        self._path = path

    def __missing__(self, key: str) -> NoReturn:
        raise unfit(self._path, f"lacks {key!r}")


def unfit(path: Path, why: str) -> CheckpointError:
    """The error of a state that no run of this version can go on from."""
    return CheckpointError(
        f"{path} {why}, expected all that a run saves; use the ssl-bench that wrote it, or start "
        "again without --resume",
        hint=("--overwrite",),
    )


def claim(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Make sure that only this run writes into a folder.

    Raises:
        ConfigurationError: another run is there, and neither of the options says what to do.
    """
    if not (resume or overwrite):
        require_free(out)
    remove_orphans(out, idle_seconds=0.0)
    if overwrite and not resume:
        states = [out / name for name in (*_CANDIDATES, _SIDECAR)]
        for path in (*states, *_files_of_a_run(out)):
            path.unlink(missing_ok=True)


def require_free(out: Path) -> None:
    """Refuse a folder that holds a run.

    Raises:
        ConfigurationError: it does.
    """
    if has_state(out) or any(path.exists() for path in _files_of_a_run(out)):
        raise ConfigurationError(
            f"{out} already holds a run; `--resume` continues it, `--overwrite` deletes it",
            hint=("--resume", "or", "--overwrite", "or", "--out", "{folder}"),
        )


def _files_of_a_run(out: Path) -> list[Path]:
    kept = [path for path in out.glob("*") if parse_epoch(path) is not None]
    encoders = [out / ENCODER, *kept]
    digests = [path.with_name(f"{path.name}.sha256") for path in encoders]
    return [out / CONFIG, out / LOG, *encoders, *digests]


T = TypeVar("T")


def copied(value: T, tensors: Iterable[Tensor] | None = None) -> T:
    """A copy that nobody else changes, with all tensors in host memory; the device is waited for.

    Args:
        value: Tensors and plain values in dictionaries, lists and tuples, or what holds tensors.
        tensors: Those that it holds, where they are not its leaves.
    """
    if tensors is None:
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    # What occurs under two names is copied, and written, once.
    once: dict[tuple[object, ...], list[Tensor]] = {}
    for tensor in tensors:
        memory = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        once.setdefault(memory, []).append(tensor)
    detached = [alike[0].detach() for alike in once.values()]
    memo: dict[int, Any] = {}
    # From a device to pinned memory; what is on the host already must not change with the run.
    for alike, there, here in zip(once.values(), detached, to_host(detached), strict=True):
        copy_of = here.clone() if here is there else here
        for one in alike:
            is_trained = isinstance(one, nn.Parameter)
            memo[id(one)] = nn.Parameter(copy_of, one.requires_grad) if is_trained else copy_of
    return copy.deepcopy(value, memo)


class Saver:
    """Leaves states and encoders in a folder while the run goes on, one thing after the other.

    It writes in a thread of its own, and looks before whether the folder still belongs to this
    process. A process that ends waits for it: a thread that is cut off in torch's code aborts the
    process.
    """

    def __init__(self, out: Path, hold: Hold) -> None:
        self._out, self._hold = out, hold
        self._thread = futures.ThreadPoolExecutor(1, "writer")
        self._given: list[tuple[str, futures.Future[None]]] = []

    def save(
        self,
        state: Mapping[str, Any],
        encoder: EncoderModule,
        metadata: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        """Let a copy of a state and an encoder take the places of the last ones.

        Neither state nor encoder waits for the disk: `encoder` must be a copy already.
        """
        state = copied(state)

        def work() -> None:
            # A broken one would push out the last good one.
            if not all(bool(value.isfinite().all()) for value in state["learner"].values()):
                say(f"step {state['step']}: weights are not finite and are not saved")
                return
            save_state(self._out, state)
            self._hold.require()
            save_encoder(self._out / ENCODER, encoder, metadata)

        self.write(STATE, work)

    def keep(
        self,
        epoch: int,
        encoder: EncoderModule,
        metadata: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        """Let the copied encoder of an epoch be written, and say so then."""
        name = epoch_file_name(epoch)

        def work() -> None:
            save_encoder(self._out / name, encoder, metadata)
            say(f"epoch {epoch}: kept {name}")

        self.write(name, work)

    def write(self, name: str, work: Callable[[], None]) -> None:
        """Do work, which uses nothing that the run changes, as soon as no other is under way.

        Work of the same name that still waits is left out.
        """

        def held() -> None:
            self._hold.require()
            work()

        given = [(n, job) for n, job in self._given if n != name or not job.cancel()]
        self._given = [*given, (name, self._thread.submit(held))]

    def check(self) -> None:
        """Raise what has gone wrong since the last time, if anything has."""
        done = [job for _, job in self._given if job.done()]
        self._given = [(name, job) for name, job in self._given if job not in done]
        for error in (job.exception() for job in done):
            if error is not None:
                raise error

    def wait(self) -> None:
        """Return when all is written; raises as `check` does."""
        futures.wait([job for _, job in self._given])
        self.check()

    def close(self) -> None:
        """Return when all is written, or what is under way where somebody interrupts that."""
        try:
            self._thread.shutdown()
        except KeyboardInterrupt:
            self._thread.shutdown(cancel_futures=True)
            raise
