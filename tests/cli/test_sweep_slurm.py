"""SLURM arrays of a sweep and the template for pretraining; SLURM's own commands are stand-ins."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed.run

from ssl_bench.cli.__main__ import main
from ssl_bench.cli.parser import build_parser
from ssl_bench.models import load_encoder
from ssl_bench.slurm import SlurmOptions, submit_array
from tests.cli.test_sweep import PHOTOS, values
from tests.support.faults import PRETRAIN, encoder_file, fails, photo_folder
from tests.support.runs import log_rows


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """Two runs of two blocks each, and two photographs."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(["one", "two"]):
        encoder_file(tmp_path / "runs" / name / "last.safetensors", seed=seed)
    photo_folder(tmp_path / "photos", 2)
    return tmp_path


# One keeps the script, the other starts what it is given.
SBATCH = """#!/bin/sh
cp "$1" "$KEPT"
echo "Submitted batch job 4711"
"""
SRUN = """#!/bin/sh
while true; do case "$1" in
  --output|--error) shift 2 ;;
  --*) shift ;;
  *) exec "$@" ;;
esac; done
"""


@pytest.fixture
def cluster(place, monkeypatch) -> Path:
    """A folder of commands that look like SLURM's; gives the file the submitted script goes to."""
    folder = place / "commands"
    folder.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o700 | stat.S_IRUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("KEPT", str(place / "submitted.sh"))
    return place / "submitted.sh"


def test_an_array_with_a_task_for_each_job_is_submitted(place, cluster, capsys):
    sweep = ["sweep", *PHOTOS, "--checkpoint", "runs/*", "--slurm", "--slurm-partition", "short"]

    assert main([*sweep, "--slurm-minutes", "90", "--slurm-gpus", "1", "--slurm-cpus", "3"]) == 0

    script = cluster.read_text().splitlines()
    for wanted in ("array=0-1%2", "partition=short", "time=90", "gpus-per-node=1"):
        assert f"#SBATCH --{wanted}" in script
    assert "#SBATCH --cpus-per-task=3" in script
    assert "2 jobs submitted as SLURM array 4711, logs in results/slurm" in capsys.readouterr().err


@pytest.mark.slow
def test_tasks_of_an_array_leave_the_cells_of_the_plan(place, cluster):
    sweep = ["sweep", *PHOTOS, "--checkpoint", "runs/*"]
    assert main([*sweep, "--slurm"]) == 0

    for task in "01":
        ids = {"SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": task}
        ids |= {"SLURM_JOB_ID": f"471{task}", "SLURM_NTASKS": "1", "SLURM_NODEID": "0"}
        ids |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NNODES": "1"}
        subprocess.run(["sh", cluster], env={**os.environ, **ids}, check=True)

    assert main([*sweep, "--out", "through"]) == 0
    assert values("results") == values("through")


def test_submitit_runs_a_task_here_and_learns_of_its_exit_code(tmp_path):
    good, bad = ([sys.executable, "-c", f"raise SystemExit({code})"] for code in (0, 3))
    options = SlurmOptions(partition=None, minutes=1, gpus=0, cpus=1, logs=tmp_path)

    jobs = submit_array([good, bad], options, cluster="local")

    assert jobs[0].exception() is None
    assert "exit code 3" in str(jobs[1].exception())


# Of a minute submitit says that it is up whenever a signal comes, of an hour that it is not.
@pytest.mark.parametrize(("minutes", "why"), [(1, "timed-out"), (60, "preempted")])
def test_a_task_that_slurm_takes_the_node_from_runs_again(tmp_path, minutes, why):
    runs = tmp_path / "runs"
    # The parent is the process that SLURM sends its signal to.
    script = (
        "import os, pathlib, sys, time; runs = pathlib.Path(sys.argv[1]);"
        "first = not runs.exists();"
        "runs.open('a').write(f'{os.getppid()}\\n'); time.sleep(20 * first)"
    )
    options = SlurmOptions(partition=None, minutes=minutes, gpus=0, cpus=1, logs=tmp_path)
    (job,) = submit_array([[sys.executable, "-c", script, str(runs)]], options, cluster="local")
    end = time.monotonic() + 60
    while not (runs.exists() and runs.read_text()) and time.monotonic() < end:
        time.sleep(0.1)

    os.kill(int(runs.read_text()), signal.SIGUSR2)

    assert job.exception() is None
    assert len(runs.read_text().split()) == 2
    assert f"this job is {why}" in (job.stderr() or "")


def test_an_array_of_more_tasks_than_questions_shares_the_blocks(place, cluster, capsys):
    sweep = ["sweep", *PHOTOS[2:], "--task", "tokencut", "--checkpoint", "runs/*"]

    assert main([*sweep, "--slurm", "--jobs", "3"]) == 0

    assert "#SBATCH --array=0-3%4" in cluster.read_text().splitlines()
    assert "4 jobs submitted" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["sbatch", "submitit"])
def test_what_slurm_needs_is_named_where_it_is_missing(
    place, cluster, capsys, monkeypatch, missing
):
    if missing == "sbatch":
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setitem(sys.modules, "submitit", None)

    said = fails(capsys, ["sweep", *PHOTOS, "--checkpoint", "runs/*", "--slurm"], 5)

    assert ("no sbatch and no srun in PATH" if missing == "sbatch" else "ssl-bench[slurm]") in said


def test_an_array_that_slurm_refuses_is_one_line(place, cluster, capsys):
    refusal = "#!/bin/sh\necho 'sbatch: error: invalid partition' >&2; exit 1\n"
    (place / "commands/sbatch").write_text(refusal)

    said = fails(capsys, ["sweep", *PHOTOS, "--checkpoint", "runs/*", "--slurm"], 5)

    assert "sbatch refused the array" in said
    assert "invalid partition" in said


TEMPLATE = Path(__file__).parents[2] / "configs/slurm/pretrain.sbatch"
SLURM_JOB = {
    "SLURM_JOB_ID": "70001", "SLURM_JOB_NAME": "pretrain", "SLURM_JOB_NODELIST": "node[7-8]",
    "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "32",
}  # fmt: skip


@pytest.fixture
def allocation(tmp_path, monkeypatch) -> Path:
    """A folder of stand-ins for SLURM's commands and the variables that SLURM sets in a job."""
    monkeypatch.chdir(tmp_path)
    scontrol = 'case "$1" in show) echo node7; echo node8 ;; *) echo "$*" >> said ;; esac'
    for name, text in (
        ("scontrol", scontrol),
        ("srun", "printf '%s\\0' threads=$OMP_NUM_THREADS \"$@\" > started"),
        ("scancel", 'echo "scancel $*" >> said; kill $(cat pid)'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    for name, value in (SLURM_JOB | {"DATA": "/my photos"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_the_template_is_bash_and_starts_what_torchrun_and_pretrain_understand(allocation):
    subprocess.run(["bash", "-n", TEMPLATE], check=True)

    subprocess.run(["bash", TEMPLATE, "model=vit_tiny_skip"], check=True)

    threads, program, *words = Path("started").read_text().split("\0")[:-1]
    assert (threads, program) == ("threads=8", "torchrun")
    launch = torch.distributed.run.parse_args(words)
    assert (launch.nnodes, launch.nproc_per_node) == ("2", "4")
    assert (launch.rdzv_backend, launch.rdzv_endpoint) == ("c10d", "node7:30001")
    assert (launch.module, launch.training_script) == (True, "ssl_bench")
    options, overrides = build_parser().parse_known_args(launch.training_script_args)
    assert (options.command, options.data_root, options.resume) == ("pretrain", "/my photos", True)
    assert options.out == "runs/pretrain-70001"
    assert overrides == ["model=vit_tiny_skip"]


def test_the_template_stops_the_run_and_queues_the_job_again_when_time_is_nearly_up(allocation):
    Path("srun").write_text('#!/bin/sh\ntrap "echo saved >> said; exit 0" TERM\necho $$ > pid\n')
    with Path("srun").open("a") as file:
        file.write("for tick in $(seq 3000); do sleep 0.01; done\n")
    with subprocess.Popen(["bash", TEMPLATE]) as job:
        while not Path("pid").exists() or not Path("pid").read_text():
            time.sleep(0.005)
        job.send_signal(signal.SIGUSR1)

    said = Path("said").read_text().splitlines()
    assert said == ["scancel --signal=TERM 70001.0", "saved", "requeue 70001"]


@pytest.mark.slow
def test_two_processes_of_torchrun_pretrain_one_run_on_the_cpu(place):
    sizes = [word for word in PRETRAIN if not word.startswith("train.max_steps")]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "ssl_bench"]
    command += ["pretrain", "--data-root", "photos", "--out", "runs/both", "--device", "cpu"]
    limited = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TEMPLATE.parents[2])}

    run = subprocess.run(
        [*command, *sizes, "train.max_steps=2"], env=limited, capture_output=True, text=True
    )

    assert run.returncode == 0, run.stderr
    assert [row["step"] for row in log_rows("runs/both")] == [1, 2]
    assert load_encoder("runs/both").depth == 2
    # Said by one process.
    assert run.stderr.count("run folder runs/both") == 1
