"""Test the parallel jobs of `ssl-bench sweep`."""

import sys
import textwrap
from pathlib import Path

import pytest
import torch

from ssl_bench import sweep
from ssl_bench.sweep import Job, run_in_processes
from ssl_bench.system.device import visible_devices

# Program that replaces a probe. It logs its begin, its end and its device. Its second argument
# states how it ends, such as "killed".
SCRIPT = textwrap.dedent(
    """
    import os, signal, sys, time
    from pathlib import Path
    name, ends = sys.argv[1:]
    tried = Path(name + ".tried")
    first = not tried.exists()
    tried.touch()
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "none")
    for what in ("begin", "end"):
        with open("log", "a") as log:
            log.write(f"{what} {name} {device}\\n")
        time.sleep(0.1)
    if ends == "killed" or ends == "killed once" and first:
        os.kill(os.getpid(), signal.SIGKILL)
    if ends == "short once" and first:
        print("ssl-bench: out of memory (CUDA out of memory)", file=sys.stderr)
        sys.exit(5)
    if ends == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if ends == "fails":
        print("a warning\\nssl-bench: no such image", file=sys.stderr)
    sys.exit(3 if ends == "fails" else 0)
    """
)


class _Job(Job):
    title = ""

    def __init__(self, title: str, ends: str = "well") -> None:
        vars(self).update(title=title, ends=ends)


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    words = [sys.executable, "-S", "-c", SCRIPT]
    monkeypatch.setattr(sweep, "probe_command", lambda job: [*words, job.title, job.ends])
    return tmp_path


def log_rows() -> list[list[str]]:
    return [line.split() for line in Path("log").read_text().splitlines()]


def test_parallel_jobs_have_different_devices(workdir):
    jobs = [_Job(f"job{number}") for number in range(6)]

    outcomes = list(run_in_processes(jobs, 3, ["GPU-a", "GPU-b", "7"]))

    assert {outcome.state for _, outcome in outcomes} == {"finished"}
    busy: set[str] = set()
    for what, _, device in log_rows():
        assert (device in busy) == (what == "end")
        busy ^= {device}
    assert {device for _, _, device in log_rows()} == {"GPU-a", "GPU-b", "7"}


def test_more_jobs_than_devices_share_them_evenly(workdir, monkeypatch):
    list(run_in_processes([_Job(f"job{number}") for number in range(4)], 4, ["0", "1"]))
    begun = [device for what, _, device in log_rows() if what == "begin"]
    assert sorted(begun) == ["0", "0", "1", "1"]
    # Without a list of devices, a job may use the devices of this process.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    list(run_in_processes([_Job("one")], 2))
    assert log_rows()[-1] == ["end", "one", "3"]


@pytest.mark.parametrize(
    ("ends", "said"), [("short once", "ran out of memory"), ("killed once", "was killed")]
)
def test_a_job_that_ran_out_of_memory_is_retried_alone(workdir, capsys, ends, said):
    jobs = [_Job("hungry", ends), *(_Job(f"job{number}") for number in range(2))]

    outcomes = list(run_in_processes(jobs, 2))

    assert [outcome.state for _, outcome in outcomes] == ["finished"] * 3
    assert log_rows()[-2:] == [["begin", "hungry", "none"], ["end", "hungry", "none"]]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hungry {said}")


def test_jobs_that_fail_again_or_for_other_reasons_have_failed(workdir):
    jobs = [_Job("hungry", "killed"), _Job("wrong", "fails"), _Job("good")]
    jobs.append(_Job("broken", "crashes"))

    outcomes = {job.title: outcome for job, outcome in run_in_processes(jobs, 2)}

    codes = {title: outcome.exit_code for title, outcome in outcomes.items()}
    assert codes == {"hungry": 5, "wrong": 3, "good": 0, "broken": 5}
    assert outcomes["hungry"].error.endswith("; use `--layer BLOCKS`")
    assert outcomes["broken"].error.endswith("; use `--jobs 1`")
    assert outcomes["wrong"].error == "no such image"
    begun = [name for what, name, _ in log_rows() if what == "begin"]
    assert [begun.count(name) for name in ("wrong", "broken", "hungry")] == [1, 1, 2]


def test_parallel_jobs_share_the_cores(workdir, monkeypatch):
    code = "import os, sys; sys.exit(int(os.environ['OMP_NUM_THREADS']))"
    words = [sys.executable, "-S", "-c", code]
    monkeypatch.setattr(sweep, "probe_command", lambda _: words)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)

    for count, threads in ((1, 7), (3, 2), (9, 1)):
        ((_, outcome),) = run_in_processes([_Job("one")], count)
        assert outcome.exit_code == threads


def test_the_visible_devices_are_those_of_the_environment(monkeypatch):
    for named, count, found in (
        (None, 3, ["0", "1", "2"]),
        ("4, 6", 2, ["4", "6"]),
        ("MIG-1/2/0,GPU-8f", 2, ["MIG-1/2/0", "GPU-8f"]),
        ("", 0, []),
        ("0,9", 1, ["0"]),
    ):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if named is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert visible_devices() == found
