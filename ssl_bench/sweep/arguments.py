"""What SLURM is asked for, by `sweep` and `reproduce`; imports nothing heavy."""

import argparse


def add_slurm(parser: argparse.ArgumentParser) -> None:
    """Flags of what a job asks for; the rest goes through sbatch's SBATCH_* variables."""
    add = parser.add_argument
    add("--slurm-partition", metavar="NAME", help="default: the cluster's own")
    add("--slurm-minutes", type=int, default=240, metavar="N", help="for each job (default 240)")
    add(
        "--slurm-gpus",
        type=int,
        default=1,
        metavar="N",
        help="for each job (default 1); several share the images of one probe",
    )
    add("--slurm-cpus", type=int, default=8, metavar="N", help="for each job (default 8)")
    add("--slurm-logs", metavar="DIR", help="logs of the jobs (default OUT/slurm)")
