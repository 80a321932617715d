"""Test the command `ssl-bench sweep`."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed.run

from ssl_bench.cli import sweep as sweep_command
from ssl_bench.cli.__main__ import main
from ssl_bench.cli.parser import build_parser
from ssl_bench.models.loading.addresses import expand_addresses
from ssl_bench.request import parse_data_roots
from ssl_bench.results import ResultStore
from ssl_bench.slurm import array_settings, submit_array
from ssl_bench.system.endings import Outcome
from tests.support.faults import (
    TINY,
    class_folders,
    encoder_file,
    exit_code,
    expect_error,
    fork,
    photo_folder,
    records,
    unchecked_types,
    voc,
)
from tests.support.torchrun import set_torchrun_env

PHOTOS = ["--task", "pca", "--dataset", "folder", "--data-root", "photos"]
PHOTOS += ["probe.image_size=32", "probe.panels=1"]
SMALL = ["probe.protocol=fast", "probe.image_size=32", "probe.training.epochs=2"]


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(["one", "two"]):
        encoder_file(tmp_path / "runs" / name / "last.safetensors", seed=seed)
    photo_folder(tmp_path / "photos", 2)
    return tmp_path


def planned(capsys, *arguments: str) -> dict:
    capsys.readouterr()
    assert main(["sweep", *arguments, "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_plan_counts_the_results_that_a_probe_left(workdir, capsys):
    assert main(["probe", *PHOTOS, "--checkpoint", "runs/two", "--layer", "1"]) == 0

    plan = planned(capsys, *PHOTOS, "--checkpoint", "runs/*")

    rows = [(job["model"], job["layers"], job["cells"], job["pending"]) for job in plan["jobs"]]
    assert rows == [("one", [0, 1], 2, 2), ("two", [0, 1], 2, 1)]
    assert (plan["cells"], plan["pending"]) == (4, 3)
    # A result without its figure is computed again.
    last = [*PHOTOS, "--checkpoint", "runs/two", "--layer", "1"]
    assert planned(capsys, *last)["pending"] == 0
    shutil.rmtree("results/pictures")
    assert planned(capsys, *last)["pending"] == 1
    # Other settings need other results.
    other = [word.replace("=32", "=40") for word in PHOTOS]
    assert planned(capsys, *other, "--checkpoint", "runs/*")["pending"] == 4
    path = ResultStore(Path("results")).path(records()[0].key())
    path.write_text("{")

    assert main(["sweep", *PHOTOS, "--checkpoint", "runs/*", "--dry-run"]) == 0

    shown, said = capsys.readouterr()
    assert f"will be computed again: {path}: " in said
    assert shown.splitlines()[-1] == "2 jobs, 4 scores: 0 finished, 4 pending"


def test_the_printed_plan_names_each_encoder_and_the_blocks_of_each_job(workdir, capsys):
    encoder_file(workdir / "other/one/last.safetensors", seed=2)
    words = ["--task", "tokencut", *PHOTOS[2:6], "--checkpoint", "runs/*", "--checkpoint"]

    assert main(["sweep", *words, "other/one", "--jobs", "4", "--dry-run"]) == 0

    _, *rows, total, _ = capsys.readouterr().out.splitlines()
    ones = {row[:12] for row in rows if row.startswith("one")}
    assert len(ones) == 2
    assert all(re.fullmatch("one [0-9a-f]{8}", name) for name in ones)
    assert [re.split("  +", row) for row in rows if row.startswith("two")] == [
        ["two", f"tokencut, blocks {block}", "folder all", "0", "1"] for block in (0, 1)
    ]
    assert total == "6 jobs, 6 scores: 0 finished, 6 pending"


@pytest.mark.parametrize(
    ("device", "shared"), [([], True), (["cuda"], True), (["cuda:1"], False), (["cpu"], False)]
)
def test_parallel_jobs_use_all_devices_unless_one_is_chosen(
    workdir, capsys, monkeypatch, device, shared
):
    called = []

    def run_all(jobs, count, devices):
        called.append(([job.encoder.name for job in jobs], count, devices))
        return (
            (job, Outcome(1.0, code, "x")) for job, code in zip(jobs[::-1], (3, 4), strict=True)
        )

    monkeypatch.setattr(sweep_command, "choose_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(sweep_command, "visible_devices", lambda: ["GPU-a", "7"])
    monkeypatch.setattr(sweep_command, "run_in_processes", run_all)
    flags = [word for name in device for word in ("--device", name)]
    words = ["sweep", *PHOTOS, "--checkpoint", "runs/*", "--jobs", "2", "--json", *flags]

    # The first job ends last.
    assert main(words) == 4

    assert called == [(["one", "two"], 2, ["GPU-a", "7"] if shared else [])]
    out, err = capsys.readouterr()
    assert [job["exit_code"] for job in json.loads(out)["jobs"]] == [4, 3]
    assert re.findall(r"failed (\d of 2 in)", err) == ["1 of 2 in", "2 of 2 in"]


def test_patterns_and_equal_weights_are_planned_once(workdir, capsys):
    Path("runs/notes.txt").write_text("not weights")
    Path("runs/empty").mkdir()

    found = expand_addresses(["runs/*", "runs/t*", "timm:vit_*", "runs/one"])

    assert found == ["runs/one", "runs/two", "timm:vit_*"]
    weights = [f"runs/{name}/last.safetensors" for name in ("one", "two")]
    assert expand_addresses(["runs/**/*.safetensors"]) == weights
    encoder_file(workdir / "runs/copy/last.safetensors", seed=1)
    plan = planned(capsys, *PHOTOS, "--checkpoint", "runs/*")
    assert [job["checkpoint"] for job in plan["jobs"]] == ["runs/copy", "runs/one"]
    main(["sweep", *PHOTOS, "--checkpoint", "runs/*", "--dry-run"])
    assert "runs/two is the same encoder as runs/copy" in capsys.readouterr().err


def test_tasks_run_on_the_datasets_that_have_their_labels(workdir, capsys):
    voc(workdir / "a")
    class_folders(workdir / "b")
    tasks = ["--task", "pca,segmentation,knn", "--dataset", "voc2012,class_folders"]
    roots = ["--data-root", "voc2012=a,class_folders=b", "--layer", "-1"]

    plan = planned(capsys, *tasks, *roots, "--checkpoint", "runs/one", *SMALL[1:])

    found = [(job["dataset"], job["task"]) for job in plan["jobs"]]
    assert sorted(found) == [
        ("class_folders", "knn"),
        ("class_folders", "pca"),
        ("voc2012-7", "pca"),
        ("voc2012-7", "segmentation"),
    ]
    assert all(job["layers"] == [1] for job in plan["jobs"])
    # A job's command contains only the overrides whose keys its probe has.
    epochs = [job["task"] for job in plan["jobs"] if "probe.training.epochs=2" in job["command"]]
    assert epochs == ["segmentation"]


def test_roots_are_one_folder_or_one_for_each_dataset():
    for text, roots in (
        (None, {}),
        ("/d", {"toy": "/d", "voc2012": "/d"}),
        ("/d,e=f", {"toy": "/d,e=f", "voc2012": "/d,e=f"}),
        ("voc2012=/a b, ade20k=c=d", {"voc2012": "/a b", "ade20k": "c=d"}),
    ):
        assert parse_data_roots(text, ["toy", "voc2012"]) == roots


def test_a_failed_job_stops_no_other_and_is_retried(workdir, capsys, monkeypatch):
    weights = workdir / "runs/one/last.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    sweep = ["sweep", *PHOTOS, "--checkpoint", "runs/*"]

    assert main([*sweep, "--json"]) == 4

    out, err = capsys.readouterr()
    assert [job["state"] for job in json.loads(out)["jobs"]] == ["failed", "finished"]
    (line,) = (line for line in err.splitlines() if line.startswith("failed"))
    assert "sha256" in line
    assert "1 jobs finished, 1 failed, 0 skipped" in err
    assert {record.model for record in records()} == {"two"}
    weights.write_bytes(good)

    assert main(sweep) == 0

    said = capsys.readouterr()
    assert said.out == ""
    assert "1 jobs finished, 0 failed, 1 skipped" in said.err
    assert {record.model for record in records()} == {"one", "two"}
    plan = planned(capsys, *sweep[1:])
    assert (plan["cells"], plan["pending"]) == (len(records()), 0) == (4, 0)
    assert main([*sweep, "--json"]) == 0
    assert {job["state"] for job in json.loads(capsys.readouterr().out)["jobs"]} == {"skipped"}

    # An error of the program itself stops no other job either, but --debug raises it.
    def fault(*_, **__):
        raise AssertionError

    monkeypatch.setattr("probes.pca.PCA.run", fault)
    assert main([*sweep, "--out", "other"]) == 1
    with pytest.raises(AssertionError):
        main([*sweep, "--out", "other", "--debug"])


@pytest.fixture
def no_type_checks() -> Iterator[None]:
    with unchecked_types():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("no_type_checks")
def test_killed_sweeps_compute_only_pending_results_when_restarted(workdir):
    sizes = ["dataset.num_train=4", "dataset.num_val=3"]
    sweep = [
        "sweep",
        "--task",
        "pca,segmentation,retrieval",
        "--checkpoint",
        "runs/*",
        *SMALL,
        *sizes,
    ]
    assert main([*sweep, "--out", "through"]) == 0
    cells = len(records("through"))

    child = fork(lambda: main(sweep), stderr=workdir / "said")
    latest = time.monotonic() + 300
    while len(found := record_times()) < cells // 2:
        assert time.monotonic() < latest, Path("said").read_text()
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    assert exit_code(child) == -signal.SIGKILL
    before = record_times()

    assert len(found) <= len(before) < cells
    # Partial files of a killed process are removed once they are old enough.
    for one in Path("results").rglob("*.tmp"):
        os.utime(one, (0, 0))
    assert main(sweep) == 0
    after = record_times()
    assert {path: after[path] for path in before} == before
    assert len(after) == cells
    assert values("results") == values("through")
    assert not list(Path("results/records").rglob("*.tmp"))


def record_times() -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in Path("results/records").rglob("*.json")}


def values(out: str) -> dict:
    store = ResultStore(Path(out))
    found = {record.key(): record.value for record in store.records()}
    assert store.unreadable == {}
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("no_type_checks")
def test_jobs_that_share_blocks_of_a_probe_write_one_table(workdir, capsys):
    sweep = ["sweep", "--task", "segmentation", "--checkpoint", "runs/one", *SMALL]
    sweep += ["dataset.num_train=4", "dataset.num_val=3", "probe.panels=0"]
    assert main([*sweep, "--out", "through"]) == 0
    plan = planned(capsys, *sweep[1:], "--jobs", "2")
    assert [job["layers"] for job in plan["jobs"]] == [[0], [1]]

    assert main([*sweep, "--jobs", "2"]) == 0

    assert values("results") == values("through")
    assert planned(capsys, *sweep[1:])["pending"] == 0
    tables = []
    for out in ("results", "through"):
        assert main(["table", "--out", out]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]


@pytest.mark.slow
def test_jobs_are_split_by_block_if_there_are_too_few(workdir, capsys):
    voc(workdir / "voc")
    words = ["--dataset", "voc2012", "--data-root", "voc", "--checkpoint", "runs/*"]
    words += ["--task", "retrieval,pca", "--jobs"]

    def layers(count: str) -> list[tuple[str, list[int]]]:
        jobs = planned(capsys, *words, count)["jobs"]
        return [(job["task"], job["layers"]) for job in jobs if job["model"] == "one"]

    # A figure of pca shows several blocks.
    assert layers("5") == [("pca", [0, 1]), ("retrieval", [0]), ("retrieval", [1])]
    assert layers("4") == [("pca", [0, 1]), ("retrieval", [0, 1])]
    assert layers("100") == layers("5")
    assert main(["sweep", *words, "5", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "retrieval, blocks 0" in out
    assert "split into jobs" in out.splitlines()[-1]
    assert "pca runs as one job, because a figure shows several blocks\n" in err

    one = [*["--task", "segmentation", "--checkpoint", "runs/one"], *SMALL, "--jobs", "2"]
    found = [
        [job["layers"] for job in planned(capsys, *one, *more)["jobs"]]
        for more in ((), ("probe.panels=0",), ("probe.panels=0", "probe.layers_mode=last4"))
    ]
    assert found == [[[0, 1]], [[0], [1]], [[0, 1]]]

    encoder_file(workdir / "deep/last.safetensors", config=replace(TINY, depth=5))
    deep = [*words[:4], "--task", "retrieval", "--checkpoint", "deep", "--jobs"]
    assert [[job["layers"] for job in planned(capsys, *deep, n)["jobs"]] for n in "237"] == [
        [[0, 1], [2, 3, 4]], [[0], [1, 2], [3, 4]], [[0], [1], [2], [3], [4]],
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["probe", "sweep", "features"])
def test_one_of_several_processes_is_refused(workdir, capsys, monkeypatch, command):
    set_torchrun_env(monkeypatch, 4)
    more = ["--out", "there"] if command == "features" else PHOTOS[:2]

    said = expect_error(capsys, [command, *more, *PHOTOS[2:6], "--checkpoint", "runs/one"], 2)

    assert "ssl-bench sweep --jobs 4" in said


def test_printed_commands_run_in_a_shell(workdir, capsys):
    out = "it's $(touch bad); results"
    flags = {"--out": out, "--layer": "-1", "--on-bad-image": "skip", "--device": "cpu"}
    sweep = ["sweep", *PHOTOS, "--checkpoint", "runs/*"]
    sweep += [word for flag in flags.items() for word in flag]
    assert main([*sweep, "--print"]) == 0
    printed = capsys.readouterr().out

    shell = f"ssl-bench() {{ printf '%s\\0' \"$@\"; printf '\\n'; }}\n{printed}"
    run = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)

    lines = [line.split("\0")[:-1] for line in run.stdout.splitlines()]
    assert len(lines) == 2
    # A job contains its own layers instead of all layers of the sweep.
    for flag in flags.keys() - {"--layer"}:
        assert all(dict(pairwise(line))[flag] == flags[flag] for line in lines)
    assert lines == [shlex.split(line)[1:] for line in printed.splitlines()]
    assert all(main(line) == 0 for line in lines)
    assert sorted(record.model for record in records(out)) == ["one", "two"]
    assert not Path("bad").exists()
    capsys.readouterr()
    assert main([*sweep, "--print"]) == 0
    assert capsys.readouterr().out == ""


# Replacements of SLURM's programs: sbatch only copies the script to the file $KEPT, and srun starts
# the command in its arguments.
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


def replace_commands(folder: Path, monkeypatch, **commands: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in commands.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.fixture
def cluster(workdir, monkeypatch) -> Path:
    replace_commands(workdir / "commands", monkeypatch, sbatch=SBATCH, srun=SRUN)
    monkeypatch.setenv("KEPT", str(workdir / "submitted.sh"))
    return workdir / "submitted.sh"


def test_an_array_with_a_task_for_each_job_is_submitted(workdir, cluster, capsys):
    sweep = ["sweep", *PHOTOS, "--checkpoint", "runs/*", "--slurm", "--slurm-partition", "short"]
    sweep += ["--slurm-minutes", "90"]
    assert main([*sweep, "--dry-run"]) == 0
    *plan, array = capsys.readouterr().out.splitlines()
    assert "4 pending" in plan[-1]
    settings = ("2 tasks", "timeout_min=90", "gpus_per_node=1", "cpus_per_task=8")
    for setting in (*settings, "slurm_partition=short"):
        assert setting in array
    assert not cluster.exists()
    assert not Path("results").exists()

    assert main([*sweep, "--slurm-gpus", "1", "--slurm-cpus", "3", "--json"]) == 0

    out, err = capsys.readouterr()
    assert json.loads(out)["pending"] == 4
    assert "2 jobs submitted as SLURM array 4711, logs in results/slurm" in err
    script = cluster.read_text().splitlines()
    for wanted in ("array=0-1%2", "partition=short", "time=90", "gpus-per-node=1"):
        assert f"#SBATCH --{wanted}" in script
    assert "#SBATCH --cpus-per-task=3" in script
    # With more tasks than probes, tasks share the blocks of a probe.
    blocks = ["sweep", *PHOTOS[2:6], "--task", "tokencut", "--checkpoint", "runs/*"]
    assert main([*blocks, "--slurm", "--jobs", "3"]) == 0
    assert {"#SBATCH --array=0-3%4", "#SBATCH --time=240"} <= {*cluster.read_text().splitlines()}
    assert "4 jobs submitted" in capsys.readouterr().err


@pytest.mark.slow
def test_a_task_of_an_array_runs_its_job(workdir, cluster):
    sweep = ["sweep", *PHOTOS, "--checkpoint", "runs/*"]
    assert main([*sweep, "--slurm"]) == 0

    ids = {"SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "4712"}
    ids |= {"SLURM_NTASKS": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    environment = {**os.environ, **ids, "SLURM_NNODES": "1"}
    subprocess.run(["sh", cluster], env=environment, check=True)

    assert main([*sweep[:-1], "runs/two", "--out", "alone"]) == 0
    assert values("results") == values("alone")


# On every signal, submitit calls a job of one minute timed out, and a job of an hour preempted.
@pytest.mark.slow
@pytest.mark.parametrize(("minutes", "why"), [(1, "timed-out"), (60, "preempted")])
def test_a_task_that_slurm_interrupts_runs_again(tmp_path, minutes, why):
    runs = tmp_path / "runs"
    # SLURM would send its signal to the parent process. The second attempt fails.
    script = (
        "import os, pathlib, sys, time; runs = pathlib.Path(sys.argv[1]);"
        "first = not runs.exists();"
        "runs.open('a').write(f'{os.getppid()}\\n'); time.sleep(20 * first); sys.exit(3)"
    )
    words = [sys.executable, "-S", "-c", script, str(runs)]
    settings = array_settings(minutes=minutes, gpus=0, cpus=1)
    (job,) = submit_array([words], settings=settings, logs=tmp_path, cluster="local")
    end = time.monotonic() + 60
    while not (runs.exists() and runs.read_text()) and time.monotonic() < end:
        time.sleep(0.02)

    os.kill(int(runs.read_text()), signal.SIGUSR2)

    assert "exit code 3" in str(job.exception())
    assert len(runs.read_text().split()) == 2
    assert f"this job is {why}" in (job.stderr() or "")


def test_missing_programs_and_refusals_of_slurm_are_one_line(workdir, cluster, capsys, monkeypatch):
    sweep = ["sweep", *PHOTOS, "--checkpoint", "runs/*", "--slurm"]
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert re.search("sbatch and srun.*`--print`", expect_error(capsys, sweep, 5))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "submitit", None)
        line = expect_error(capsys, sweep, 5)
        assert re.search(r"ssl-bench\[slurm\].*`--print`", line)
    refusal = "#!/bin/sh\necho 'sbatch: error: invalid partition' >&2; exit 1\n"
    (workdir / "commands/sbatch").write_text(refusal)
    assert "invalid partition" in expect_error(capsys, sweep, 5)


TEMPLATE = Path(__file__).parents[2] / "configs/slurm/pretrain.sbatch"
SLURM_JOB = {
    "SLURM_JOB_ID": "70001", "SLURM_JOB_NAME": "pretrain", "SLURM_JOB_NODELIST": "node[7-8]",
    "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "32",
}  # fmt: skip


@pytest.fixture
def allocation(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    scontrol = 'case "$1" in show) echo node7; echo node8 ;; *) echo "$*" >> said ;; esac'
    srun = "printf '%s\\0' threads=$OMP_NUM_THREADS \"$@\" > started"
    scancel = 'echo "scancel $*" >> said; kill $(cat pid)'
    texts = {"scontrol": scontrol, "srun": srun, "scancel": scancel}
    scripts = {name: f"#!/bin/sh\n{text}\n" for name, text in texts.items()}
    replace_commands(tmp_path, monkeypatch, **scripts)
    for name, value in (SLURM_JOB | {"DATA": "/my photos"}).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_the_template_starts_a_run_that_torchrun_and_pretrain_parse(allocation):
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


def test_the_template_requeues_the_job_when_time_is_nearly_up(allocation):
    Path("srun").write_text('#!/bin/sh\ntrap "echo saved >> said; exit 0" TERM\necho $$ > pid\n')
    with Path("srun").open("a") as file:
        file.write("for tick in $(seq 3000); do sleep 0.01; done\n")
    with subprocess.Popen(["bash", TEMPLATE]) as job:
        while not Path("pid").exists() or not Path("pid").read_text():
            time.sleep(0.005)
        job.send_signal(signal.SIGUSR1)

    said = Path("said").read_text().splitlines()
    assert said == ["scancel --signal=TERM 70001.0", "saved", "requeue 70001"]
