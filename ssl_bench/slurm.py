"""A SLURM array whose tasks are the jobs of a sweep, submitted through submitit."""

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

# Of a task whose time is up.
_MOST_RESTARTS = 3


@dataclass(frozen=True)
class CommandTask:
    """Runs a command, and runs it again when SLURM took the node away or time was up.

    This module imports nothing heavy, because every task unpickles this class.
    """

    words: tuple[str, ...]
    threads: int = 1

    def __call__(self) -> None:
        environment = {"OMP_NUM_THREADS": str(self.threads), **os.environ}
        code = subprocess.run(self.words, check=False, env=environment).returncode
        if code:
            # An exception is how submitit learns of it, and SLURM through it.
            raise RuntimeError(f"exit code {code} of: {shlex.join(self.words)}")

    def checkpoint(self) -> "submitit.helpers.DelayedSubmission":
        """What submitit queues again: the same, since finished cells are skipped."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def array_settings(
    *, minutes: int, gpus: int, cpus: int, partition: str | None = None
) -> dict[str, str | int]:
    """Return the parameters of a SLURM array, as submitit names them.

    Args:
        minutes: Time limit of a task. SLURM queues the task again after it.
        gpus: GPUs for each task.
        cpus: Cores for each task.
        partition: None for the cluster's own.
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
    """Submit one task a command and do not wait; on `cluster` "local" and "debug" they run here.

    What is not said here goes through sbatch's SBATCH_* variables.

    Args:
        commands: Words of each.
        logs: Folder that every node sees; gets output and errors of each task.
        settings: From `array_settings`.
        cluster: Where they run.

    Raises:
        MachineError: submitit or SLURM is not there, or SLURM refuses.
    """
    missing = [name for name in ("sbatch", "srun") if shutil.which(name) is None]
    if cluster == "slurm" and missing:
        raise MachineError(
            f"no {' and no '.join(missing)} in PATH; run this on a machine that submits to SLURM",
            hint=("--print",),
        )
    try:
        import submitit
        from submitit.core.utils import FailedJobError
    except ImportError as error:
        raise MachineError(
            "--slurm needs submitit; run: pip install 'ssl-bench[slurm]'", hint=("--print",)
        ) from error
    executor = submitit.AutoExecutor(logs, cluster=cluster, slurm_max_num_timeout=_MOST_RESTARTS)
    executor.update_parameters(**settings)
    try:
        with executor.batch():
            return [
                executor.submit(CommandTask(tuple(w), settings["cpus_per_task"])) for w in commands
            ]
    except FailedJobError as error:
        raise MachineError(f"sbatch refused the array: {error}") from error
