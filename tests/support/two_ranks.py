"""Run pretraining in two processes, one of which fails.

    python -m tests.support.two_ranks PHOTOS OUT FAULT:RANK...

The program prints the exit codes and messages of both processes as JSON. The program needs its
own process, because forking is unsafe after a backward pass.
"""

import contextlib
import io
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from pretrain import checkpoints, step
from pretrain.batches import BatchChunks
from pretrain.logging import LogFile
from pretrain.monitor import Evaluator
from pretrain.objectives.dino import DinoLearner
from ssl_bench.cli import __main__ as cli
from ssl_bench.composition.compose import compose_config
from ssl_bench.data.files.file_sets import FileImageSet
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.errors import DataError, MachineError, UnreadableImageError

# The step of the fault. The first step is 0.
FAULT_STEP = 3
SECONDS = 90
AT_ONCE = 3
# In seconds, twice the timeout of `_SHORT`.
PAUSE = 8.0
MONITOR = ("monitor.knn_epochs=9", "monitor.neighbours=2")
OPTIONS = (
    *("model.dim=24", "model.depth=1", "model.image_size=16", "model.patch_size=8"),
    *("model.num_heads=2", "objective.out_dim=16", "objective.hidden_dim=8"),
    *("objective.crops.num_locals=1", "objective.crops.local_size=8", "train.batch_size=2"),
    *("train.max_steps=8", "train.num_workers=0", "train.non_finite_patience=2"),
)


def replace_method(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Return a function that replaces the method `name` of a class."""
    return lambda: setattr(owner, name, make(getattr(owner, name)))


def inject_at_step(fault: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that injects a fault into one training step."""
    # The run uses the result of `fault`, if any, instead of the images.

    def make(usual: Any) -> Any:
        def getitem(self: BatchChunks, piece: int) -> Any:
            result = fault() if piece == FAULT_STEP else None
            return usual(self, piece) if result is None else result

        return getitem

    return replace_method(BatchChunks, "__getitem__", make)


def send_signal(number: signal.Signals) -> Callable[[], None]:
    return inject_at_step(lambda: os.kill(os.getpid(), number))


def lose_worker() -> None:
    raise RuntimeError("DataLoader worker (pid 9) is killed by signal: Killed.")


def diverging(usual: Any) -> Any:
    def loss(self: DinoLearner, network: Any, views: Any, step: int) -> Any:
        value, report = usual(self, network, views, step)
        return (value * torch.nan if step >= FAULT_STEP else value), report

    return loss


def full_log(usual: Any) -> Any:
    def write(self: LogFile, row: Any) -> None:
        if row["step"] > FAULT_STEP:
            raise MachineError("cannot write log.jsonl: No space left on device; free space")
        usual(self, row)

    return write


def inject_before_save(fault: Callable[[int], None]) -> Callable[[], None]:
    """Return a function that injects a fault before a checkpoint is written."""

    def make(usual: Any) -> Any:
        def write(values: Any, file: Any) -> None:
            fault(values["step"])
            usual(values, file)

        return write

    return replace_method(checkpoints, "_write", make)


def fill_disk(step: int) -> None:
    if step > FAULT_STEP:
        raise OSError(28, "No space left on device")


def slow_monitor(usual: Any) -> Any:
    def measures(self: Evaluator, step: int) -> dict[str, float]:
        time.sleep(PAUSE * (step == FAULT_STEP - 1))
        return usual(self, step)

    return measures


def broken_monitor(usual: Any) -> Any:
    def measures(self: Evaluator, step: int) -> dict[str, float]:
        assert step != FAULT_STEP - 1, "an unforeseen error"
        return usual(self, step)

    return measures


def lost_image(usual: Any) -> Any:
    """Make one image of a dataset unreadable."""

    def getitem(self: FileImageSet, index: int) -> Any:
        if self.ids[index] == "3.jpg":
            raise UnreadableImageError("photos/3.jpg is cut short")
        return usual(self, index)

    return getitem


def no_images(usual: Any) -> Any:
    def images(self: ImageFolder) -> Any:
        raise DataError(f"{self.root} holds no images")

    return images


_SLOW_MONITOR = replace_method(Evaluator, "measure_if_due", slow_monitor)
FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "image": inject_at_step(lambda: DataError("photos/3.png is cut short")),
    "loss": replace_method(DinoLearner, "loss", diverging),
    "SIGTERM": send_signal(signal.SIGTERM),
    "SIGHUP": send_signal(signal.SIGHUP),
    "SIGINT": send_signal(signal.SIGINT),
    "disk": replace_method(LogFile, "write", full_log),
    "worker": inject_at_step(lose_worker),
    "images": replace_method(ImageFolder, "images", no_images),
    "monitor": replace_method(Evaluator, "measure_if_due", broken_monitor),
    "skipped": replace_method(FileImageSet, "__getitem__", lost_image),
    "taken": lambda: None,
    "states": inject_before_save(fill_disk),
    "slow disk": inject_before_save(lambda step: time.sleep(PAUSE * (step < FAULT_STEP))),
    "slow monitor": _SLOW_MONITOR,
    "slower monitor": _SLOW_MONITOR,
}
_SHORT = f"train.timeout_minutes={PAUSE / 2 / 60:.3f}"
# Options that a fault needs in addition.
EXTRA_OPTIONS: dict[str, tuple[str, ...]] = {
    "skipped": ("data.on_bad_image=skip",),
    "states": ("train.checkpoint_epochs=1",),
    "slow disk": ("train.checkpoint_epochs=1", _SHORT),
    "monitor": MONITOR,
    "slow monitor": MONITOR,
    "slower monitor": (*MONITOR, _SHORT),
}


def rank(number: int, port: int, fault: str, photos: Path, out: Path) -> None:
    """Run one process of a distributed training run."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # Under nohup, this process inherits an ignored SIGHUP, and the command would keep ignoring it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # The fault "slow disk:0" affects the process of rank 0.
    name, _, where = fault.partition(":")
    if int(where) == number:
        FAULTS[name]()
    stderr, code = io.StringIO(), 1
    try:
        with contextlib.redirect_stderr(stderr):
            arguments = [*run_arguments(photos, out), *EXTRA_OPTIONS.get(name, ())]
            code = cli.main([*arguments, f"monitor.root={photos.parent / 'classes'}"])
    finally:
        Path(f"{out}.{number}").write_text(stderr.getvalue())
        # Skip the shutdown of the interpreter, which is the task of the parent process.
        os._exit(code)


def run_arguments(photos: Path, out: Path) -> list[str]:
    return ["pretrain", "--out", str(out), f"data.root={photos}", *OPTIONS]


def start(fault: str, photos: Path, out: Path) -> list[int]:
    """Start the two processes of a training run and return their process ids."""
    if fault.startswith("taken"):
        out.mkdir()
        (out / "config.yaml").write_text("{}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for number in range(2):
        if not (pid := os.fork()):
            rank(number, port, fault, photos, out)
        pids.append(pid)
    return pids


def wait_for(pids: list[int], out: Path) -> dict[str, Any]:
    """Wait for two processes and return their exit codes and stderr."""
    end = time.monotonic() + SECONDS
    codes = [exit_code(pid, end) for pid in pids]
    return {"codes": codes, "stderr": [Path(f"{out}.{n}").read_text() for n in range(2)]}


def exit_code(pid: int, end: float) -> int | None:
    """Wait for a process and return its exit code. Kill the process if it still runs at `end`."""
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def prepare() -> None:
    torch.set_num_threads(1)
    compose_config("pretraining", [])
    # Counting FLOPs would take as long as the run, and no fault depends on the count.
    step.count_training_flops = lambda *_: 1e6


def main() -> None:
    photos, out = map(Path, sys.argv[1:3])
    faults, results = sys.argv[3:], {}
    prepare()
    folders = {fault: out / fault.replace(":", "-") for fault in faults}
    sleeping = [fault for fault in faults if fault.startswith("slow")]
    others = [fault for fault in faults if fault not in sleeping]
    pids = {fault: start(fault, photos, folders[fault]) for fault in sleeping}
    for first in range(0, len(others), AT_ONCE):
        several = others[first : first + AT_ONCE]
        pids |= {fault: start(fault, photos, folders[fault]) for fault in several}
        results |= {fault: wait_for(pids[fault], folders[fault]) for fault in several}
    results |= {fault: wait_for(pids[fault], folders[fault]) for fault in sleeping}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
