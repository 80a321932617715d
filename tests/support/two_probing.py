"""`ssl-bench probe` in one process and in two; prints how each ended, as JSON.

`python -m tests.support.two_probing PLACE COUNT:CASE[:FAULT]...` imports once and forks. Each case
finds its datasets and its encoder in PLACE, and leaves its records in PLACE/COUNT-CASE.
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
from functools import partial
from pathlib import Path
from typing import Any

import torch

# Once, before the processes are forked.
import probes.classification.attentive
import probes.classification.run
import probes.discovery.run
import probes.heads.logistic
import probes.knn.run
import probes.retrieval.run
import probes.segmentation.assembly
import probes.tokencut.run  # noqa: F401
from probes.heads.kept import KeptState
from probes.heads.linear import ParallelHeads
from probes.tokencut.log import DiscoveryLog, ImageResult
from ssl_bench.cli import __main__ as cli
from ssl_bench.errors import MachineError
from tests.support.two_ranks import SECONDS, exit_code

CLASSES = ("--dataset", "class_folders", "--data-root", "classes", "probe.batch_size=2")
FITS = ("--dataset", "class_folders", "--data-root", "classes", "probe.encoder_batch_size=2")
VOC = ("--dataset", "voc2012", "--data-root", "voc", "probe.image_size=32")
SEGMENTATION = (
    *("--task", "segmentation", *VOC),
    *("probe.training.batch_size=2", "probe.holdout=0.3"),
)
SGD = (*SEGMENTATION, "probe.training.epochs=3", "probe.keep_minutes=0")
VIEWS = ("probe.views=2", "probe.crops=scaled", "probe.holdout=0")
LBFGS = (
    *SEGMENTATION,
    *("probe.training=lbfgs", "probe.training.c_values=[0.01,1.0]"),
    "probe.training.max_iterations=9",
)
CASES: dict[str, tuple[str, ...]] = {
    "knn": ("--task", "knn", *CLASSES, "probe.neighbours=[1,2]", "probe.facet=[cls,patch_mean]"),
    "classification": ("--task", "classification", *FITS, "probe.training.c_values=[0.01,1.0]"),
    "shots": (
        *("--task", "classification", *FITS, "probe.shots=[1]", "probe.draws=3"),
        "probe.training.c_values=[0.01,1.0]",
    ),
    "knn_shots": ("--task", "knn", *CLASSES, "probe.shots=[1,2]", "probe.draws=3"),
    "attentive": (
        *("--task", "classification", *FITS, "probe.pool=attentive", "probe.pool.queries=4"),
        *("probe.pool.epochs=2", "probe.holdout=0.3"),
    ),
    "left_out": (
        *("--task", "all", "--dataset", "class_folders", "--data-root", "classes"),
        *("--layer", "2", "probe.panels=2", "probe.num_images=2", "probe.image_size=32"),
    ),
    "retrieval": ("--task", "retrieval", *VOC, "probe.neighbours=5", "probe.batch_size=2"),
    "memory": (*SGD, "probe.tier=memory"),
    "disk": (*SGD, "probe.tier=disk"),
    "stream": (*SGD, "probe.tier=stream"),
    "views": (*SGD, *VIEWS, "probe.tier=memory"),
    "streamed_views": (*SGD, *VIEWS, "probe.tier=stream"),
    "one_layer": (*SGD, "probe.tier=disk", "--layer", "2"),
    "one_layer_stream": (*SGD, "probe.tier=stream", "--layer", "2"),
    "resumed": (*SGD, "probe.tier=stream"),
    "unreadable": (*SGD, "probe.tier=stream", "--data-root", "broken"),
    "skipped": (*SGD, "probe.tier=stream", "--data-root", "broken", "--on-bad-image", "skip"),
    "lbfgs": (*LBFGS, "probe.tier=stream"),
    "tokencut": ("--task", "tokencut", "--dataset", "voc2012", "--data-root", "voc"),
    "discovery": ("--task", "discovery", "--dataset", "voc2012", "--data-root", "voc"),
    "late": ("--task", "tokencut", "--dataset", "voc2012", "--data-root", "voc", "--layer", "2"),
    "pca": ("--task", "pca", *VOC),
}


def at_step(number: int, happens: Callable[[], None]) -> None:
    """Let something happen before the heads take a step."""
    usual = ParallelHeads.step

    def step(self: ParallelHeads, *words: Any, **more: Any) -> Any:
        if self._steps == number:
            happens()
        return usual(self, *words, **more)

    ParallelHeads.step = step


def switch_off() -> None:
    raise MachineError("the machine is switched off")


def keep_nothing() -> None:
    KeptState.is_due = lambda self: False  # noqa: ARG005


def dawdle() -> None:
    usual = DiscoveryLog.add

    def add(self: DiscoveryLog, image_id: str, result: ImageResult) -> None:
        time.sleep(1)
        usual(self, image_id, result)

    DiscoveryLog.add = add


# What happens in the first process, and what in the second.
FAULTS: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
    "": (lambda: None, lambda: None),
    "late": (lambda: None, dawdle),
    # Of a run that ends so one process has kept more of its heads than the other.
    "dies": (partial(at_step, 3, switch_off), keep_nothing),
    "killed": (lambda: None, partial(at_step, 1, lambda: os.kill(os.getpid(), signal.SIGKILL))),
}


def process(number: int, count: int, port: int, case: str, fault: str) -> None:
    """One process of a command, to its end; what it said goes into a file."""
    if count > 1:
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    FAULTS[fault][number]()
    said, code = io.StringIO(), 1
    out = f"{count}-{case}"
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            cache = [f"probe.cache=cache{count}"] if "segmentation" in CASES[case] else []
            words = ("--checkpoint", "encoder.safetensors", "--out", out, "--json")
            code = cli.main(["probe", *CASES[case], *words, *cache])
    finally:
        Path(f"{out}.{number}.txt").write_text(said.getvalue())
        # Not through the interpreter, which is that of the parent.
        os._exit(code)


def ended(count: int, case: str, fault: str) -> dict[str, Any]:
    """Exit codes and lines of all processes."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    pids = []
    for number in range(count):
        if not (pid := os.fork()):
            process(number, count, port, case, fault)
        pids.append(pid)
    codes = [exit_code(pid, SECONDS + time.monotonic()) for pid in pids]
    texts = [Path(f"{count}-{case}.{number}.txt") for number in range(count)]
    return {"codes": codes, "said": [text.read_text() if text.exists() else "" for text in texts]}


def main() -> None:
    torch.set_num_threads(1)
    os.chdir(sys.argv[1])
    found = {}
    for words in sys.argv[2:]:
        count, case, *fault = words.split(":")
        found[words] = ended(int(count), case, "".join(fault))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
