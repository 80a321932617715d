"""Submit the jobs of a sweep as a SLURM array with submitit."""

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
"""Maximum number of restarts of a task that reaches its time limit."""


@dataclass(frozen=True)
class CommandTask:
    """A command that SLURM queues again if it is preempted or reaches its time limit.

    Every SLURM task imports this file to unpickle the class, so this file imports no large package.

    Attributes:
        words: The command and its arguments.
        threads: Number of CPU threads, unless OMP_NUM_THREADS is already set.
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
        """Return this task unchanged, so that submitit queues it again.

        submitit calls this method if the task is preempted or reaches its time limit. When SLURM
        restarts the task, the command skips finished results.
        """
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def array_settings(
    *, minutes: int, gpus: int, cpus: int, partition: str | None = None
) -> dict[str, str | int]:
    """Return the settings of a SLURM array, with the names that submitit uses.

    Args:
        minutes: Time limit of each task. A task that reaches its time limit is queued again.
        gpus: Number of GPUs of each task.
        cpus: Number of CPU cores of each task.
        partition: Partition of the cluster (default: the cluster's default partition).
    """
    settings = {"timeout_min": minutes, "gpus_per_node": gpus, "cpus_per_task": cpus}
    partition_setting = {"slurm_partition": partition} if partition else {}
    return {"name": "ssl-bench", **settings, **partition_setting}


def submit_array(
    commands: Sequence[Sequence[str]],
    *,
    logs: Path,
    settings: Mapping[str, Any],
    cluster: Literal["slurm", "local", "debug"] = "slurm",
) -> "list[submitit.Job[None]]":
    """Submit one SLURM task for each command, and return without waiting for the tasks.

    Args:
        commands: The commands, each as a list of words.
        logs: Folder for log files, to which every node must have access.
        settings: Settings from `array_settings`. The environment variables SBATCH_* set other
            options of sbatch.
        cluster: "slurm", or "local" or "debug" to run the tasks on this machine.

    Raises:
        MachineError: SLURM or submitit is not installed, or sbatch rejects the array.
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
