"""What the folder of a run says of itself where somebody looks for records in it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

_CONFIG, _LOG = "config.yaml", "log.jsonl"
_UNPROBED = "StateSpaceConfig"


def said_of_run(folder: Path) -> str | None:
    """One line on a run folder, with what its last step measured; None for any other folder.

    What a run measures of itself, such as the letters that it copies, is in its log alone: numbers
    of the last row that the first one lacks.
    """
    log = folder / _LOG
    try:
        config = yaml.load((folder / _CONFIG).read_text(encoding="utf-8"), yaml.CSafeLoader)
        objective, model = (_class(config[name]) for name in ("objective", "model"))
        lines = log.read_text(encoding="utf-8").splitlines()
        first, last = json.loads(lines[0]), json.loads(lines[-1])
        step, measured = int(last["step"]), _measured(first, last)
    # Somebody's own files may hold anything.
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, yaml.YAMLError):
        return None
    further = (
        "no probe takes its model"
        if model == _UNPROBED
        else f"`ssl-bench probe --checkpoint {folder} --out results` leaves records of its encoder"
    )
    found = f", {measured}" if measured else ""
    return (
        f"{folder} is a run of {objective} and holds no records: step {step}{found}; every step is "
        f"in {log}; {further}"
    )


def _class(values: Mapping[str, Any]) -> str:
    return str(values["_target_"]).rpartition(".")[2]


def _measured(first: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """The loss and what is measured now and then, as "loss 1.2, letters_16 88.7"."""
    names = ["loss", *(name for name in last if name not in first and name != "loss")]
    return ", ".join(f"{name} {last[name]:.4g}" for name in names if last.get(name) is not None)
