"""The rows of the log as curves of TensorBoard, with the extra `track`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssl_bench.errors import MachineError


class Board:
    """Scalars in event files; those after `last_step` are of work that was lost, and are hidden.

    Raises:
        MachineError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path, *, last_step: int) -> None:
        self._writer = _writer_class()(str(folder), purge_step=last_step + 1)

    def write(self, row: Mapping[str, Any]) -> None:
        """Draw every number of a row at its step."""
        for name, value in row.items():
            if value is not None and name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


def require_tensorboard() -> None:
    """Find out at once whether a board can be written.

    Raises:
        MachineError: TensorBoard is not installed.
    """
    _writer_class()


def _writer_class() -> type[Any]:
    try:
        # Not for everybody: the package is an extra, and slow to import.
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MachineError(
            "train.tensorboard=true needs the package tensorboard, which is not installed; "
            "pip install 'ssl-bench[track]', or leave it out"
        ) from error
    return SummaryWriter
