"""The files of a run folder, and the background thread that writes them during training.

Each checkpoint is written in this order:

1. The training state is written to the temporary file `state.new.pt`.
2. The checksums (SHA-256) of `state.new.pt` and `state.pt` are written to `state.pt.sha256`.
3. `state.pt` is renamed to `state.previous.pt`, and `state.new.pt` is renamed to `state.pt`.
4. The encoder is written to `last.safetensors`, and its SHA-256 to `last.safetensors.sha256`. While
   an earlier encoder is replaced, the .sha256 file contains the SHA-256 of both encoders.

Each file is written atomically, so at least one usable training state remains if the process is
killed or the disk is full. If the process is killed before `state.pt.sha256` is written, the old
`state.pt` is used. If the process is killed after `state.pt.sha256` is written, the new training
state remains as `state.new.pt` or `state.pt`. If the process is killed before the encoder is
written, `last.safetensors` may be older than the training state. The function `load_state` finds
the newest complete training state. After the last step of the run, `state.previous.pt` is deleted.

`pretrain/train.py` describes when each file of a run folder is written.
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

from ssl_bench.errors import CheckpointError, ConfigurationError, MachineError
from ssl_bench.models import EncoderModule, save_encoder
from ssl_bench.models.loading.addresses import LAST_CHECKPOINT, epoch_file_name, parse_epoch
from ssl_bench.system.device import to_host
from ssl_bench.system.files import (
    file_sha256,
    read_digests,
    remove_orphans,
    write_atomically,
    write_text_atomically,
)
from ssl_bench.system.output import print_message
from ssl_bench.system.process import reraise_out_of_memory

ENCODER, CONFIG, LOG = LAST_CHECKPOINT, "config.yaml", "log.jsonl"
BOARD, WANDB = "tensorboard", "wandb"
STATE, PREVIOUS = "state.pt", "state.previous.pt"
_NEW = "state.new.pt"
_DIGESTS = f"{STATE}.sha256"
# From the newest to the oldest.
_CANDIDATES = (_NEW, STATE, PREVIOUS)
_FORMAT = {"format": "ssl-bench pretraining state", "version": 1}
_START_AGAIN = ("--overwrite", "or", "--out", "{folder}")


class Saver:
    """A background thread that writes the checkpoints of a run while training continues.

    At exit, the process waits for the background thread, because torch aborts a process if a thread
    is stopped while running torch code.

    Attributes:
        saved_step: Number of completed steps in the last training state that was saved or loaded.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = futures.ThreadPoolExecutor(1, "writer")
        self._jobs: list[tuple[str, futures.Future[None]]] = []
        self.saved_step = 0

    def save(
        self,
        state: Mapping[str, Any],
        encoder: EncoderModule,
        metadata: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        """Copy a training state to CPU memory, and save state and encoder in the background.

        The new files replace the last saved state and encoder. The method returns before the files
        are written. If a weight is not finite, nothing is saved and a message is printed, because
        the last usable weights must not be replaced.

        Args:
            state: State of the run. `state["learner"]` contains the weights of all networks.
            encoder: A copy of the encoder in CPU memory, made by `copy_to_host`.
            metadata: Metadata to store in the file of the encoder.
            say: Function that the background thread calls to print a message.
        """
        state = copy_to_host(state)

        def work() -> None:
            if not _are_finite(state["learner"].values()):
                say(f"step {state['step']}: weights are not finite and are not saved")
                return
            save_state(self._folder, state)
            self.saved_step = state["step"]
            save_encoder(self._folder / ENCODER, encoder, metadata)

        self.submit(STATE, work)

    def keep(
        self,
        epoch: int,
        encoder: EncoderModule,
        metadata: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        """Save the encoder after an epoch to its own file, such as `epoch0100.safetensors`.

        The background thread writes the file. The encoders of later epochs are saved to other
        files. If the weights are not finite, a message is printed and no file is written.

        Args:
            epoch: Number of epochs that the run has completed.
            encoder: A copy of the encoder in CPU memory, made by `copy_to_host`.
            metadata: Metadata to store in the file of the encoder.
            say: Function that the background thread calls to print a message.
        """
        name = epoch_file_name(epoch)

        def work() -> None:
            if not _are_finite(encoder.state_dict().values()):
                say(f"epoch {epoch}: weights are not finite and are not saved")
                return
            save_encoder(self._folder / name, encoder, metadata)
            say(f"epoch {epoch}: kept {name}")

        self.submit(name, work)

    def submit(self, name: str, work: Callable[[], None]) -> None:
        """Queue a job for the background thread, which runs jobs one after the other.

        The new job replaces a waiting job with the same name. On a slow disk, only the newest of
        several queued training states is written.

        Args:
            name: Name of the file that the job writes.
            work: Function that writes the file. The function must not use data that the training
                loop changes.
        """
        others = [(n, job) for n, job in self._jobs if n != name or not job.cancel()]
        self._jobs = [*others, (name, self._thread.submit(work))]

    def check(self) -> None:
        """Raise an error if the background thread has failed to write a file."""
        finished = [job for _, job in self._jobs if job.done()]
        self._jobs = [(name, job) for name, job in self._jobs if job not in finished]
        for error in (job.exception() for job in finished):
            if error is not None:
                raise error

    def wait(self) -> None:
        """Wait until all queued files are written. Raise an error if writing a file has failed."""
        futures.wait([job for _, job in self._jobs])
        self.check()

    def close(self) -> None:
        """Wait until all queued files are written, and end the background thread.

        If Ctrl-C is pressed while this method waits, the file that is being written is completed,
        and all other queued files are discarded.
        """
        try:
            self._thread.shutdown()
        except KeyboardInterrupt:
            self._thread.shutdown(cancel_futures=True)
            raise


T = TypeVar("T")


def copy_to_host(value: T, tensors: Iterable[Tensor] | None = None) -> T:
    """Return a deep copy of a value with all tensors in CPU memory.

    Args:
        value: Nested dictionaries, lists and tuples that contain tensors, or any other object.
        tensors: All tensors in `value`. The argument is optional if `value` consists of
            dictionaries, lists and tuples.
    """
    if tensors is None:
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    # A tensor that occurs under two names is copied, and later written, only once.
    groups: dict[tuple[object, ...], list[Tensor]] = {}
    for tensor in tensors:
        memory = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        groups.setdefault(memory, []).append(tensor)
    originals = [group[0].detach() for group in groups.values()]
    memo: dict[int, Any] = {}
    for group, original, on_host in zip(
        groups.values(), originals, to_host(originals), strict=True
    ):
        # `to_host` does not copy tensors in CPU memory, so the next step would change them.
        copied = on_host.clone() if on_host is original else on_host
        for tensor in group:
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = (
                nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
            )
    return copy.deepcopy(value, memo)


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Save the training state of a run as `state.pt`.

    An existing `state.pt` is renamed to `state.previous.pt`, which replaces an older
    `state.previous.pt`.

    Args:
        folder: The run folder.
        state: Tensors, numbers, strings, and containers of these types. Other types are not
            allowed, because loading them would run code from the file.

    Raises:
        MachineError: The folder cannot be written or the disk is full. Older saved states are kept.
    """
    new, current = folder / _NEW, folder / STATE
    write_atomically(new, lambda file: _write({**_FORMAT, **state}, file))
    lines = [f"{file_sha256(new)}  {STATE}\n"]
    if current.is_file():
        lines.append(f"{file_sha256(current)}  {PREVIOUS}\n")
    write_text_atomically(folder / _DIGESTS, "".join(lines))
    try:
        if current.is_file():
            current.replace(folder / PREVIOUS)
        new.replace(current)
    except OSError as error:
        raise MachineError(
            f"cannot rename {new} to {current}: {error.strerror or error}. Make sure that no other "
            "program uses these files"
        ) from error


def _write(state: Mapping[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # After an error of the disk, torch also fails to close its archive and raises this error.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def _are_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def load_state(folder: Path, device: torch.device) -> tuple[dict[str, Any], Path]:
    """Return the newest complete training state of a run, and the path of its file.

    A training state counts as complete if its SHA-256 is in `state.pt.sha256`. If `state.pt.sha256`
    is missing or empty, the checksums that torch stores within a state file are verified instead.

    Raises:
        CheckpointError: No state is complete, or the newest complete state has another format. The
            returned dictionary raises the same error when a missing key is read.
    """
    problems, digests = [], {digest for digest, _ in read_digests(folder / _DIGESTS)}
    for path in (folder / name for name in _CANDIDATES):
        if path.is_file():
            if digests and file_sha256(path) in digests:
                return _read(path, device), path
            if not digests and _matches_own_checksums(path):
                print_message(
                    f"{folder / _DIGESTS} is missing or empty. {path.name} is used because it "
                    "matches its own checksums"
                )
                return _read(path, device), path
            problems.append(f"{path.name} is truncated or changed")
    raise CheckpointError(
        f"{folder} has no complete training state ({'; '.join(problems) or 'no file exists'}). "
        "The run cannot be resumed. Start a new one without --resume or --extend",
        hint=_START_AGAIN,
    )


def has_state(folder: Path) -> bool:
    """Return whether this folder contains a saved training state."""
    return any((folder / name).exists() for name in _CANDIDATES)


def remove_previous_state(folder: Path) -> None:
    """Delete `state.previous.pt` and its SHA-256, which a finished run no longer needs."""
    (folder / PREVIOUS).unlink(missing_ok=True)
    kept = [f"{digest}  {name}\n" for digest, name in read_digests(folder / _DIGESTS)[:1]]
    write_text_atomically(folder / _DIGESTS, "".join(kept))


def _matches_own_checksums(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except Exception:  # Damaged bytes can raise any error.
        return False


def _read(path: Path, device: torch.device) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # Bytes that are not a torch archive can raise any error.
        reraise_out_of_memory(error)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise unusable_state_error(path, f"cannot be loaded ({reason})") from error
    if not isinstance(state, dict) or {key: state.get(key) for key in _FORMAT} != _FORMAT:
        raise unusable_state_error(path, "is not a training state that this version can read")
    return _State(state, path)


class _State(dict[str, Any]):
    """A loaded training state, which raises a CheckpointError when a missing key is read."""

    def __init__(self, parts: Mapping[str, Any], path: Path) -> None:
        super().__init__(parts)
        self._path = path

    def __missing__(self, key: str) -> NoReturn:
        raise unusable_state_error(self._path, f"lacks {key!r}")


def unusable_state_error(path: Path, problem: str) -> CheckpointError:
    """Return the error for a saved training state that cannot be used to resume a run.

    The error message begins with the path of the state and `problem`, such as "lacks 'step'".
    """
    return CheckpointError(
        f"{path} {problem}. Use the version of ssl-bench that wrote it, or start a new run without "
        "--resume or --extend",
        hint=_START_AGAIN,
    )


def prepare_folder(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Prepare a run folder: delete temporary files and, if `overwrite` is true, the previous run.

    Args:
        folder: The run folder.
        resume: Whether the run in the folder is continued. The files of a continued run are kept,
            even if `overwrite` is true.
        overwrite: Whether the checkpoints, log and configuration of the previous run are deleted.
            All other files in the folder are kept, including the folders of TensorBoard and
            Weights & Biases.

    Raises:
        ConfigurationError: The folder contains a run, and neither `resume` nor `overwrite` is true.
    """
    if not (resume or overwrite):
        require_no_run(folder)
    remove_orphans(folder, idle_seconds=0.0)
    if overwrite and not resume:
        states = [folder / name for name in (*_CANDIDATES, _DIGESTS)]
        for path in (*states, *_list_files(folder)):
            path.unlink(missing_ok=True)


def require_no_run(folder: Path) -> None:
    """Raise ConfigurationError if a folder contains files of a run."""
    if has_state(folder) or any(path.exists() for path in _list_files(folder)):
        raise ConfigurationError(
            f"{folder} already contains a run; `--resume` continues it, `--overwrite` deletes it",
            hint=("--resume", "or", "--overwrite", "or", "--out", "{folder}"),
        )


def _list_files(folder: Path) -> list[Path]:
    """Return the paths of a run's configuration, log, encoders and SHA-256 files.

    Some of the returned paths may not exist.
    """
    kept = [path for path in folder.glob("*") if parse_epoch(path) is not None]
    encoders = [folder / ENCODER, *kept]
    digests = [path.with_name(f"{path.name}.sha256") for path in encoders]
    return [folder / CONFIG, folder / LOG, *encoders, *digests]
