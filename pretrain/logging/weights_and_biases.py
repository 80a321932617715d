"""The rows of the log as a run of Weights & Biases, with its package `wandb`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from ssl_bench.errors import MachineError
from ssl_bench.system.files import write_text_atomically

_ID = "run-id.txt"


class WandbRun:
    """A run of a project; a resumed pretraining goes on with the run that it began.

    W&B takes no step twice: rows are drawn over their own "step", on which the repeated steps of
    work that was lost lie beside the lost ones. Without a network `WANDB_MODE=offline` keeps all
    of it in the folder.

    Args:
        project: Name of the project, made where there is none.
        folder: What W&B keeps, and the id of the run.
        config: What the run is.
        last_step: Of the work that is not lost; 0 begins a run of its own.

    Raises:
        MachineError: wandb is not installed, or its service refuses.
    """

    def __init__(
        self, project: str, folder: Path, config: Mapping[str, Any], *, last_step: int
    ) -> None:
        wandb = require_wandb()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=project,
                id=_id(folder / _ID, anew=last_step == 0),
                name=folder.parent.name,
                dir=str(folder),
                config=dict(config),
                resume="allow",
            )
        # Of what it raises for want of a network or a key, no class is promised.
        except Exception as error:
            raise MachineError(
                f"Weights & Biases does not begin a run ({error}); log in with `wandb login`, set "
                "WANDB_MODE=offline, or leave train.wandb out"
            ) from error
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Mapping[str, Any]) -> None:
        """Send every number of a row."""
        self._run.log({name: value for name, value in row.items() if value is not None})

    def close(self) -> None:
        self._run.finish()


def require_wandb() -> Any:
    """The package, found out at once.

    Raises:
        MachineError: it is not installed.
    """
    try:
        # Not for everybody, and no extra: it brings two dozen packages along.
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MachineError(
            "train.wandb=PROJECT needs the package wandb, which is not installed; "
            "pip install wandb, or leave it out"
        ) from error
    return wandb


def _id(file: Path, *, anew: bool) -> str:
    if anew or not file.is_file():
        write_text_atomically(file, f"{uuid4().hex[:12]}\n")
    return file.read_text().strip()
