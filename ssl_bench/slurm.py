"""Submit the jobs of a sweep as a SLURM array, through submitit."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ssl_bench.errors import MachineError

if TYPE_CHECKING:
    import submitit

_MAX_RESTARTS = 3
"""How often a task that reaches its time limit is started again."""


@dataclass(frozen=True)
class CommandTask:
    """A command that runs again after SLURM took the node away or its time was up.

    Every task imports this module to unpickle the class, so it imports nothing heavy.

    Attributes:
        words: The command and its arguments.
        threads: Threads of the numerical libraries.
    """

    words: tuple[str, ...]
    threads: int = 1

    def __call__(self) -> None:
        environment = {"OMP_NUM_THREADS": str(self.threads), **os.environ}
        code = subprocess.run(self.words, check=False, env=environment).returncode
        if code:
            # submitit and SLURM recognise a failed task by its exception.
            raise RuntimeError(f"command failed with exit code {code}: {shlex.join(self.words)}")

    def checkpoint(self) -> "submitit.helpers.DelayedSubmission":
        """Return the task to queue again. It is the same, because finished results are skipped."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def array_settings(
    *, minutes: int, gpus: int, cpus: int, partition: str | None = None
) -> dict[str, str | int]:
    """Return the parameters of a SLURM array, as submitit names them.

    Args:
        minutes: Time limit of a task, after which it is queued again.
        gpus: GPUs for each task.
        cpus: Cores for each task.
        partition: SLURM partition (default: that of the cluster).
    """
    settings = {"timeout_min": minutes, "gpus_per_node": gpus, "cpus_per_task": cpus}
    return {
        "name": "ssl-bench",
        **settings,
        **({"slurm_partition": partition} if partition else {}),
    }


def submit_array(
    commands: Sequence[Sequence[str]],
    *,
    logs: Path,
    settings: Mapping[str, Any],
    cluster: Literal["slurm", "local", "debug"] = "slurm",
) -> "list[submitit.Job[None]]":
    """Submit one task for each command, and return without waiting for them.

    Set other options of sbatch through its SBATCH_* environment variables.

    Args:
        commands: Words of each command.
        logs: Folder for the output of each task, which every node must see.
        settings: From `array_settings`.
        cluster: "local" and "debug" run the tasks on this machine.

    Raises:
        MachineError: submitit or SLURM is missing, or SLURM rejects the array.
    """
    missing = [name for name in ("sbatch", "srun") if shutil.which(name) is None]
    if cluster == "slurm" and missing:
        raise MachineError(
            f"{' and '.join(missing)} not found, so this is not a SLURM login node",
            hint=("--print",),
        )
    try:
        import submitit
        from submitit.core.utils import FailedJobError
    except ImportError as error:
        raise MachineError(
            "submitit is not installed (pip install 'ssl-bench[slurm]')",
            hint=("--print",),
        ) from error
    executor = submitit.AutoExecutor(logs, cluster=cluster, slurm_max_num_timeout=_MAX_RESTARTS)
    executor.update_parameters(**settings)
    try:
        with executor.batch():
            return [
                executor.submit(CommandTask(tuple(w), settings["cpus_per_task"])) for w in commands
            ]
    except FailedJobError as error:
        raise MachineError(f"sbatch rejected the array: {error}") from error
