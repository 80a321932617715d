"""Test that commands report problems of the machine, such as too little memory.

Faulty arguments are tested in `test_fault_table`.
"""

import errno
import json
import os
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import probes
from ssl_bench.cli.__main__ import main
from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import compose_config, import_component
from ssl_bench.errors import BrokenFileError, ConfigurationError
from ssl_bench.request import ProbeRequest
from ssl_bench.system.endings import run_and_catch
from tests.core.test_extending import FILES, ROOT
from tests.faults.test_fault_table import PCA, PROBE, RUN
from tests.support.faults import (
    encoder_file,
    exit_code,
    expect_error,
    fork,
    make_pretrain_args,
    make_probe_args,
    photo_folder,
    unchecked_types,
)


def test_only_dataclasses_of_this_suite_are_built():
    for address in (
        *("subprocess.call", "os", "", 3, None, "probes.pca.Path", "ssl_bench.nothing.X"),
        *("ssl_bench.system.files.subprocess.run", "ssl_bench.cli.__main__.main"),
        "ssl_bench.errors.ConfigurationError",
    ):
        with pytest.raises(ConfigurationError):
            import_component(address, "probe._target_")


PLUGIN = """
from dataclasses import dataclass
from pathlib import Path
from ssl_bench.evaluation import Probe
Path({mark!r}).touch()

@dataclass(frozen=True)
class Ones(Probe):
    value: float = 1.0
    task = "ones"
"""


def test_a_probe_of_another_package_is_imported_only_for_use(workdir, monkeypatch, capsys):
    target, mark = workdir / "installed", workdir / "imported"
    information = target / "ones-1.0.dist-info"
    information.mkdir(parents=True)
    (target / "ones_probe.py").write_text(PLUGIN.format(mark=str(mark)))
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: ones\nVersion: 1.0\n")
    (target / "misspelt.py").write_text("import os\n\nos.pathh\n")
    points = "[ssl_bench.probe]\nones = ones_probe:Ones\nnone = ones_probe:Path\n"
    points += "absent = ones_probe:Twos\nmisspelt = misspelt:Ones\n"
    (information / "entry_points.txt").write_text(points)
    with pytest.raises(ConfigurationError):
        compose_config("probing", ["probe=ones"])
    monkeypatch.syspath_prepend(target)

    assert "ones" in choices("probe")
    assert not mark.exists()
    assert "probe.value" in expect_error(capsys, shlex.split(f"{PROBE} ones probe.value=x"), 2)
    assert mark.exists()
    assert "dataclass" in expect_error(capsys, shlex.split(f"{PROBE} none"), 5)
    assert "'Twos'" in expect_error(capsys, shlex.split(f"{PROBE} absent"), 5)
    line = f"{target / 'misspelt.py'}, line 3"
    assert line in expect_error(capsys, shlex.split(f"{PROBE} misspelt"), 5)
    # The other tasks are not imported here, which would take seconds.
    few = {"probe": ["absent", "misspelt", "none", "ones", "pca"], "dataset": ["folder"]}
    monkeypatch.setattr("ssl_bench.request.choices", few.get)
    request = ProbeRequest.parse(task="all", dataset="folder", overrides=())
    assert (request.tasks, request.all_tasks) == (["ones", "pca"], True)
    said = re.findall(r"left out: (\w+): ", capsys.readouterr().err)
    assert said == ["absent", "misspelt", "none"]


BROKEN_FILES = {
    "import nopackage": "pip install nopackage",
    "import nopackage.part": "pip install nopackage",
    "import torch.nopart": "torch.nopart",
    "from ssl_bench.errors import Nothing": "ImportError",
    "def (": "SyntaxError",
    "1 / 0": "ZeroDivisionError",
}


def test_a_broken_probe_file_is_named_with_its_line(tmp_path, monkeypatch):
    folder = tmp_path / "probes"
    folder.mkdir()
    monkeypatch.setattr(probes, "__path__", [*probes.__path__, str(folder)])
    for number, (line, why) in enumerate(BROKEN_FILES.items()):
        file = folder / f"broken{number}.py"
        file.write_text(f'"""A probe."""\n\n{line}\n')

        with pytest.raises(BrokenFileError) as raised:
            import_component(f"probes.{file.stem}.Norms", "probe._target_")

        assert f"{file}, line 3" in str(raised.value)
        assert why in str(raised.value)
        assert ("pip install" in str(raised.value)) == ("nopackage" in line)


def test_an_import_error_during_a_sweep_ends_only_its_job():
    source = compile("\n\nimport nopackage", "/somewhere/probes/norms/run.py", "exec")

    outcome = run_and_catch(lambda: exec(source), "sweep", debug=False)

    assert outcome.exit_code == 5
    assert "/somewhere/probes/norms/run.py, line 3" in outcome.error


RUN_COMMANDS = """
import json, sys
from ssl_bench.cli.__main__ import main
for words in json.loads(sys.argv[1]):
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    print(f"exit {code}", file=sys.stderr, flush=True)
"""
PHOTOS = ["--dataset", "folder", "--data-root", "photos", "probe.image_size=32"]


@pytest.mark.slow
def test_other_probes_and_objectives_run_beside_a_broken_file(tmp_path):
    suite, workdir = tmp_path / "suite", tmp_path / "workdir"
    for name in ("ssl_bench", "probes", "pretrain", "configs"):
        shutil.copytree(ROOT / name, suite / name)
    for path, text in FILES.items():
        (suite / path).parent.mkdir(exist_ok=True)
        (suite / path).write_text(text)
    for path in ("probes/reconstruction.py", "pretrain/objectives/rotation.py"):
        (suite / path).write_text("import nopackage\n" + (suite / path).read_text())
    encoder_file(workdir / "runs/x/last.safetensors")
    photo_folder(workdir / "photos")
    broken = {
        ("probe", "--task", "reconstruction"): "probes/reconstruction.py",
        ("probe", "--task", "reconstruction,pca", *PHOTOS): "probes/reconstruction.py",
        ("keys", "probe.reconstruction"): "probes/reconstruction.py",
        ("pretrain", "objective=rotation", "--dry-run"): "pretrain/objectives/rotation.py",
    }
    others = [["--help"], ["keys"], ["sweep", "--dry-run", *PHOTOS]]
    others += [["probe", "--task", "all", "--dry-run", *PHOTOS]]
    others += [["probe", "--task", "pca", "--layer", "0", *PHOTOS]]
    others += [["pretrain", "--batch-size", "8", "--dry-run"]]
    code = f"import sys; sys.path.insert(0, {str(suite)!r}){RUN_COMMANDS}"
    commands = json.dumps([*map(list, broken), *others])

    done = subprocess.run(
        [sys.executable, "-c", code, commands], cwd=workdir, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    # Each part begins with the exit code of one command, followed by the output of the next.
    first, *parts = done.stderr.split("exit ")
    assert [int(part[0]) for part in parts] == [5] * 4 + [0] * len(others), done.stderr
    outputs = [first, *(part[2:] for part in parts[:-1])]
    for output, file in zip(outputs, broken.values(), strict=False):
        assert output.count("\n") == 1
        assert f"{suite / file}, line 1" in output
    assert [one.count("left out: reconstruction: ") for one in outputs[-4:]] == [1, 1, 0, 0]
    assert list((workdir / "results/records").glob("*"))


NETWORK = """
import torch
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from ssl_bench import Encoder

def network():
    stages = ((8, 16, 1), (16, 24, 1), (24, 32, 3), (32, None, 1))
    return ConvNeXt([CNBlockConfig(*stage) for stage in stages])

def encoder():
    model = network()
    model.load_state_dict(torch.load("weights.pth"))
    return ADVICE
"""


def test_the_advice_for_a_torchvision_network_loads_it(workdir, capsys):
    module: dict[str, Any] = {}
    exec(NETWORK, module)
    torch.save(module["network"]().state_dict(), "weights.pth")
    message = expect_error(capsys, ["models", "weights.pth"], 4)
    advice = message.rpartition("with ")[2].partition("; use")[0]
    (workdir / "mine.py").write_text(NETWORK.replace("ADVICE", advice))

    assert main(["models", "mine.py:encoder"]) == 0

    assert "3 blocks, width 24" in capsys.readouterr().out


HUB_MODELS = ["torchhub:facebookresearch/dino:dino_vits16",
    "timm:vit_tiny_patch16_224.augreg_in21k", "hf-hub:timm/vit_small_patch16_224.dino"]  # fmt: skip


@pytest.mark.parametrize("uri", HUB_MODELS)
@pytest.mark.parametrize("network", ["refuses", pytest.param("hangs", marks=pytest.mark.slow)])
def test_a_hub_model_fails_within_five_seconds_offline(workdir, capsys, monkeypatch, uri, network):
    monkeypatch.setenv("TORCH_HOME", str(workdir / "torch"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(workdir / "hf"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1] if network == 'hangs' else 9}"
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, address)
        # Count the time that the network takes, and not the time of a busy machine.
        start = time.monotonic() - time.process_time()

        message = expect_error(capsys, shlex.split(f"{PCA} --checkpoint {uri}"), 4)

    assert time.monotonic() - time.process_time() - start < 5
    assert "demo:skip`" in message
    assert "local-dir:MODEL_FOLDER`" in message


def test_closed_streams_change_only_what_is_printed(workdir):
    def run_with_closed_streams(layer: str) -> int:
        # After stdin and stderr are closed, the files that are opened next get their descriptors.
        sys.stdout = (workdir / f"stdout{layer}").open("w", buffering=1)
        sys.stdin = sys.stderr = None
        os.close(0)
        os.close(2)
        return main([*shlex.split(PCA), "--layer", layer])

    codes = [exit_code(fork(lambda layer=layer: run_with_closed_streams(layer))) for layer in "09"]

    assert codes == [0, 2]
    right, wrong = ((workdir / f"stdout{layer}").read_text() for layer in "09")
    assert "explained_variance" in right
    # Progress messages do not end up among the results.
    assert "encoder encoder: " not in right
    assert wrong == ""


def test_stdout_may_be_full_ascii_or_closed(workdir):
    assert main(make_probe_args("pca", "folder", workdir / "photos")) == 0
    reading, writing = os.pipe()
    os.close(reading)

    def print_table(output: Any) -> int:
        sys.stdout = None if output is None else open(output, "w", 1, encoding="ascii")  # noqa: PTH123, SIM115
        return main(["table"])

    for output, code, error in (
        *(("/dev/full", 5, "No space left on device"), ("ascii.txt", 0, ""), (None, 0, "")),
        # Nobody reads from this pipe.
        (writing, 0, ""),
    ):
        child = fork(lambda output=output: print_table(output), stderr=workdir / "stderr")
        assert exit_code(child) == code
        lines = (workdir / "stderr").read_text().splitlines()
        assert len(lines) == bool(error)
        assert error in "".join(lines)
    assert "\\xb1" in Path("ascii.txt").read_text()
    os.close(writing)


def run_in_little_memory(words: list[str]) -> int:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + 200 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return main(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (f"{PCA} probe.image_size=8192 --layer 0", "`probe.batch_size="),
        (f"{RUN} train.batch_size=2 model.dim=98304", "`train.batch_size="),
    ],
)
@unchecked_types()
def test_too_little_memory_is_reported_with_what_to_lower(workdir, command, hint):
    words = shlex.split(command)
    code = exit_code(fork(lambda: run_in_little_memory(words), stderr=workdir / "stderr"))

    output = (workdir / "stderr").read_text()
    assert code == 5, output[-2000:]
    (line,) = (text for text in output.splitlines() if text.startswith("ssl-bench: "))
    assert "out of memory" in line
    assert hint in line
    assert "Traceback" not in output


def test_out_of_memory_on_any_device_ends_with_code_5(workdir, capsys, monkeypatch):
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("lib.so: failed to map segment from shared object"),
    ):
        monkeypatch.setattr("probes.pca.PCA.run", Mock(side_effect=error))

        assert "`probe.batch_size=" in expect_error(capsys, shlex.split(PCA), 5)
        assert main(["sweep", *shlex.split(PCA)[1:]]) == 5


def test_an_image_is_not_called_damaged_without_memory(workdir, capsys, monkeypatch):
    monkeypatch.setattr("PIL.Image.Image.load", Mock(side_effect=MemoryError))
    monkeypatch.setattr("ssl_bench.data.files.images._decode_jpeg", lambda *_: None)

    expect_error(capsys, shlex.split(f"{PCA} --on-bad-image skip"), 5)


# Environment variables that a launcher sets, with a wrong value or None if they are unset.
WRONG_VARIABLES = [
    *(("MASTER_ADDR", None), *(("MASTER_PORT", value) for value in ("", "http", "70000"))),
    *(("RANK", value) for value in (None, "one", "2", "-1")),
    *(("WORLD_SIZE", value) for value in (None, "0", "2.0")),
    *(("LOCAL_RANK", "gpu0"), ("LOCAL_WORLD_SIZE", "3")),
]
TWO_RANKS = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}


def set_launcher(monkeypatch: pytest.MonkeyPatch, **values: str | None) -> None:
    for name in (*TWO_RANKS, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
        if value := values.get(name):
            monkeypatch.setenv(name, value)


def test_a_wrong_variable_of_a_launcher_is_named(workdir, capsys, monkeypatch):
    for name, value in WRONG_VARIABLES:
        set_launcher(monkeypatch, **(TWO_RANKS | {name: value}))
        is_single = name == "WORLD_SIZE" and value is None
        words = "RANK is 1, expected 0" if is_single else f"{name} is "

        assert words in expect_error(capsys, make_pretrain_args(workdir / "photos", "run"), 2)
        assert words in expect_error(
            capsys, make_probe_args("pca", "folder", workdir / "photos"), 2
        )


def test_variables_of_a_single_process_are_accepted(workdir, monkeypatch):
    for values in (
        {"MASTER_ADDR": "somewhere", "MASTER_PORT": "none"},
        {"LOCAL_RANK": "3"},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
    ):
        set_launcher(monkeypatch, **values)
        assert main([*make_probe_args("pca", "folder", workdir / "photos"), "--overwrite"]) == 0
        assert main([*make_pretrain_args(workdir / "photos", "run"), "--dry-run"]) == 0


def test_processes_that_cannot_connect_name_the_address(workdir, capsys, monkeypatch):
    set_launcher(monkeypatch, **(TWO_RANKS | {"RANK": "0", "MASTER_PORT": "1"}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))

        message = expect_error(capsys, make_pretrain_args(workdir / "photos", "run"), 5)

    assert "MASTER_ADDR=127.0.0.1" in message


def test_an_interruption_is_reported_although_the_launcher_is_wrong(monkeypatch):
    set_launcher(monkeypatch, WORLD_SIZE="2", RANK="none")
    monkeypatch.setattr("ssl_bench.cli.parser.run_command", Mock(side_effect=KeyboardInterrupt))

    assert main(["probe"]) == 130
