"""Send the rows of a run's log to TensorBoard and Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from ssl_bench.errors import MachineError
from ssl_bench.system.files import write_text_atomically

_RUN_ID_FILE = "run-id.txt"


class TensorBoardLog:
    """A tracker that writes event files for TensorBoard.

    Args:
        folder: Folder of the event files.
        last_step: Number of completed steps in the checkpoint that the run continues from. In older
            event files, TensorBoard hides the points of later steps.
    """

    def __init__(self, folder: Path, *, last_step: int) -> None:
        self._writer = require_tensorboard()(str(folder), purge_step=last_step + 1)

    def write(self, row: Mapping[str, float]) -> None:
        """Add the metrics of one step (a row of the log) to the curves in TensorBoard."""
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class WandbLog:
    """A tracker that sends rows of the log to a run of Weights & Biases.

    A resumed pretraining run continues the same run of Weights & Biases. The step number is sent as
    a metric named `step`, because Weights & Biases rejects step numbers that it has received
    before. The metric `step` is the x-axis of all curves. If a resumed run repeats steps after a
    crash, the curves show the points of both attempts. With `WANDB_MODE=offline`, Weights & Biases
    stores everything in `folder` and needs no network.

    Args:
        project: Name of the project. Weights & Biases creates a missing project.
        folder: Folder for the files of Weights & Biases and for the id of the run.
        config: Settings of the pretraining run, which Weights & Biases displays.
        last_step: Number of steps in the checkpoint that the run continues from. If `last_step` is
            0, a new run of Weights & Biases starts.

    Raises:
        MachineError: The package wandb is missing, or Weights & Biases refuses to start a run.
    """

    def __init__(
        self, project: str, folder: Path, config: Mapping[str, Any], *, last_step: int
    ) -> None:
        wandb = require_wandb()
        folder.mkdir(parents=True, exist_ok=True)
        id_file = folder / _RUN_ID_FILE
        if last_step == 0 or not id_file.is_file():
            write_text_atomically(id_file, f"{uuid4().hex[:12]}\n")
        try:
            self._run = wandb.init(
                project=project,
                id=id_file.read_text().strip(),
                name=folder.parent.name,
                dir=str(folder),
                config=dict(config),
                resume="allow",
            )
        # wandb does not document which exceptions it raises without a network or an API key.
        except Exception as error:
            raise MachineError(
                f"Weights & Biases cannot start a run ({error}). Log in with `wandb login`, set "
                "WANDB_MODE=offline, or train without Weights & Biases",
                hint=("train.wandb=null",),
            ) from error
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Mapping[str, float]) -> None:
        """Send the metrics of one step (a row of the log) to Weights & Biases."""
        self._run.log(dict(row))

    def close(self) -> None:
        self._run.finish()


Tracker = TensorBoardLog | WandbLog
"""A class that draws the metrics of a run as curves."""


def require_tensorboard() -> type[Any]:
    """Import TensorBoard, and return its class `SummaryWriter`.

    Raises:
        MachineError: The package tensorboard is missing.
    """
    try:
        # Imported here because the package is optional and slow to import.
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MachineError(
            "train.tensorboard=true needs the package tensorboard, which is not installed. Run "
            "pip install 'ssl-bench[track]', or train without TensorBoard",
            hint=("train.tensorboard=false",),
        ) from error
    return SummaryWriter


def require_wandb() -> Any:
    """Import the package wandb, and return it.

    Raises:
        MachineError: The package wandb is missing.
    """
    try:
        # Imported here because the package is optional. No extra of ssl-bench installs it, because
        # it depends on two dozen other packages.
        import wandb
    except ImportError as error:
        raise MachineError(
            "train.wandb=PROJECT needs the package wandb, which is not installed. Run "
            "pip install wandb, or train without Weights & Biases",
            hint=("train.wandb=null",),
        ) from error
    return wandb
