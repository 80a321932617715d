"""What is there already: how far runs came, and what was recorded of their encoders."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ssl_bench.errors import DataError
from ssl_bench.reproduce.papers import split_address
from ssl_bench.results.record import Record
from ssl_bench.results.store import ResultStore
from ssl_bench.system.files import read_digests
from ssl_bench.system.progress import say

_WEIGHTS, _CONFIG = "last.safetensors", "config.yaml"
_LONGEST_HEADER = 100 * 2**20


@dataclass(frozen=True)
class RunState:
    """How far a run came.

    Attributes:
        step: Optimizer steps taken.
        epoch: Passes over the images in these steps.
    """

    step: int
    epoch: float
    is_finished: bool

    def __str__(self) -> str:
        return f"{'finished' if self.is_finished else 'begun'}, {self.step} steps"


def run_state(folder: Path) -> RunState | None:
    """What the weights and the configuration of a run folder say; None where there is no run."""
    try:
        said = _metadata(folder / _WEIGHTS)
        train = yaml.load((folder / _CONFIG).read_text(encoding="utf-8"), yaml.CSafeLoader)["train"]
        step, epoch = int(said["step"]), float(said["epoch"])
        most = train["max_steps"]
        is_finished = epoch >= train["epochs"] or (most is not None and step >= most)
    # Somebody's own files may hold anything.
    except (OSError, ValueError, KeyError, TypeError, struct.error, yaml.YAMLError):
        return None
    return RunState(step, epoch, is_finished)


def _metadata(weights: Path) -> Mapping[str, Any]:
    """What a file of weights says of itself, without its tensors."""
    with weights.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _LONGEST_HEADER:
            raise ValueError(f"{weights} is no safetensors file")
        return json.loads(file.read(length))["__metadata__"]


def recorded(out: Path) -> list[Record]:
    """All records of a folder, none where there are none."""
    store = ResultStore(out)
    try:
        found = store.records()
    except DataError:
        return []
    if store.unreadable:
        say(store.said_unreadable())
    return found


def records_of(address: Path, records: list[Record]) -> list[Record]:
    """Those of the encoder at RUN or RUN@EPOCH, by the digest beside its weights."""
    name, epoch = split_address(address.name)
    weights = _WEIGHTS if epoch is None else f"epoch{epoch:04}.safetensors"
    known = {digest for digest, _ in read_digests(address.with_name(name) / f"{weights}.sha256")}
    return [record for record in records if record.checkpoint_sha256 in known]
