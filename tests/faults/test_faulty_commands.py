"""Faulty arguments, Python files and machines: values, paths, devices."""

import json
import os
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import timm  # noqa: F401 - the import takes seconds, which are no part of any test
import torch
import torchvision

import probes
from ssl_bench.cli.__main__ import main
from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import component_class, compose_config
from ssl_bench.errors import BrokenFile, ConfigurationError
from ssl_bench.system.endings import run_and_catch
from tests.core.test_extending import FILES, ROOT
from tests.support.faults import (
    Fault,
    check_fault,
    class_folders,
    each,
    encoder_file,
    exit_code,
    expect_error,
    fork,
    nothing,
    pretraining,
    probing,
    unchecked_types,
    voc,
)

DATA = "--dataset folder --data-root photos"
PROBE = f"probe --checkpoint encoder.safetensors {DATA} --task"
PCA = f"{PROBE} pca"
RUN = "pretrain model=vit_tiny_skip data.root=photos --out run"
KEYS = "ssl-bench keys"
NO_USER = "~nosuchuser/x"


def typed(command: str, word: str, code: int = 2, hint: str = "", names: str = "") -> Fault:
    """Return a fault whose last argument is wrong. The error names its key or its value."""
    name = names or word.partition("=")[0].lstrip("+~-")
    words = shlex.join([*shlex.split(command), word])
    return Fault(f"{command.split()[-1]} {word[:40]}", nothing, words, code, name, hint)


CODE = [
    typed(PCA, "probe._target_=probes.knn.KNN", hint=KEYS),
    typed(PCA, "++probe._target_=os.system", hint=KEYS),
    typed(PCA, "+probe._partial_=true", hint=KEYS),
    typed(PCA, "probe._args_=[left]", hint=KEYS),
    typed(PCA, "probe._convert_=none"),
    typed(PCA, "probe.align_to={_target_: pathlib.Path.touch, self: left}", hint=KEYS),
    typed(PCA, "dataset={_target_: os.mkdir, path: left}", hint=KEYS),
    typed(PCA, "hydra.searchpath=[file:///tmp]", hint=KEYS),
    typed(PCA, "+/tmp=evil", hint=KEYS, names="tmp"),
    typed(PCA, "~probe._target_"),
]
VALUES = [
    typed(PCA, "seed=99999999999999999999999"),
    typed(PCA, "data.root=???"),
    typed(PCA, "dtype=${dtype}"),
    typed(PCA, "dtype=8"),
    typed(PCA, "probe.facet=8", hint="\"probe.facet='8'\""),
    typed(PCA, "probe.panels=1,2"),
    typed(PCA, "probe.panels=[1,2]"),
    typed(PCA, "probe.panels=two"),
    typed(PCA, "probe.panels="),
    typed(PCA, "probe.panels=${oc.env:HOME}"),
    typed(PCA, "++probe.new=1"),
    typed(PCA, "~probe.panels"),
    typed(PCA, "probe=tokencut=1"),
    typed(PCA, "dataset=nowhere"),
    typed(PCA, "probe.protocol=bacth", names="bacth"),
    typed(PCA, "prob.panels=1", hint="probe.panels=VALUE"),
    typed("probe --task", "pca,segmentaton", hint="--task segmentation", names="segmentaton"),
    typed(PCA, "--chekpoint", hint="--checkpoint"),
    typed(f"{PROBE} knn", "probe.batch_size=0"),
    typed(f"{PROBE} classification", "probe.training.c_values=[nan]", names="c_values"),
    typed(f"{PROBE} segmentation", "probe.training.weight_decay=-1", names="weight_decay"),
    typed(f"{PROBE} tokencut", "probe.tau=7"),
    typed(RUN, "optimizer.lr=-1"),
    typed(RUN, "optimizer.lr=nan"),
    typed(RUN, "optimizer.betas=[0.9]"),
    typed(RUN, "objective.momentum=2"),
    typed(f"{RUN} objective=mae", "objective.crops.flip_probability=7"),
    typed(RUN, "objective.crops.global_scale=[0.1]"),
    typed(RUN, "train=3", hint=KEYS),
    typed(RUN, "train.epochs=0"),
    typed(RUN, "objective={}"),
    typed(RUN, "model.init_options.mlp_mean=nan"),
    typed(RUN, "model.init_options.mlp_mean=???"),
    typed(RUN, "model.dim=100000000000"),
    typed(RUN, "data.image_size=0"),
]
# The argument is a path in all of these.
FLAGS = [
    f"{PCA} --out", f"{PCA} --data-root", f"{PCA} --checkpoint", "pretrain --out",
    "pretrain --data-root", "table --figure", "report --into", "sweep --slurm-logs",
    "data verify photos --manifest", "data verify", "data check voc2012 --data-root", "models",
    "quickstart --out",
]  # fmt: skip
PATHS = [
    *(typed(flag, NO_USER, names=" path") for flag in FLAGS),
    *(typed(f"{PCA} --out", path, names=" path") for path in ("", "a" * 300, "b/" * 3000)),
    *(typed(f"{PCA} --checkpoint", path, names=" path") for path in ("", "a" * 300)),
    typed(PCA, f"data.root='{NO_USER}'", names=NO_USER),
    *(typed("pretrain --out run", f"{key}='{NO_USER}'", names=NO_USER)
      for key in ("data.root", "monitor.root", "init_from")),
    typed(f"{RUN} monitor.accuracy_epochs=1", f"monitor.results='{NO_USER}'"),
]  # fmt: skip


def loop(folder: Path) -> None:
    (folder / "loop").symlink_to(folder / "loop")


def file_and_no_encoder(folder: Path) -> None:
    """Create `a_file`, and remove the encoder, which must not be loaded first."""
    (folder / "a_file").touch()
    (folder / "encoder.safetensors").unlink()


def weights(*names: str) -> Callable[[Path], None]:
    return lambda folder: torch.save({n: torch.ones(3) for n in names}, folder / "weights.pth")


NO_GPU = torch.cuda.is_available()
BY_NAME = "timm's name of its architecture"
PLACES = [
    Fault("a link to itself as a model", loop, "models loop", 4, "loop"),
    Fault("a link to itself as a checkpoint", loop, f"{PCA} --checkpoint loop", 4, "loop"),
    Fault("a link to itself for results", loop, f"{PCA} --out loop", 5, "loop"),
    Fault("a link to itself for data", loop, f"{PCA} --data-root loop", 3, "loop"),
    Fault("a file in the path of results", file_and_no_encoder, f"{PCA} --out a_file/results", 5,
          "a_file/results", "--out "),
    Fault("a folder that cannot be written", file_and_no_encoder, f"{PCA} --out /proc/results", 5,
          "/proc/results", "--out "),
    Fault("a file in the path of a run", file_and_no_encoder,
          "pretrain --data-root photos --out a_file/run", 5, "a_file/run"),
    *(Fault(f"no {device}", nothing, f"{PCA} --device {device}", 5, device, "--device cpu")
      for device in ("meta", *(() if NO_GPU else ("cuda", "cuda:3", "mps")))),
    Fault("a network of torchvision", nothing, f"{PCA} --checkpoint torchvision:resnet50", 4,
          "torchvision:resnet50"),
    Fault("an unsupported network of timm", nothing, f"{PCA} --checkpoint timm:mvitv2_tiny", 4,
          "mvitv2_tiny", "--checkpoint FILE.py:NAME"),
    Fault("weights of a ResNet", weights("layer1.0.conv1.weight"), "models weights.pth", 4,
          ("a ResNet", BY_NAME), "ssl-bench models"),
    Fault("weights of a ConvNeXt", weights("stages.0.blocks.0.gamma"), "models weights.pth", 4,
          ("a ConvNeXt", BY_NAME), "ssl-bench models"),
    Fault("weights of a Swin", weights("layers.0.blocks.0.norm1.weight"), "models weights.pth", 4,
          ("a Swin", BY_NAME), "ssl-bench models"),
    Fault("weights of a BEiT", weights("blocks.0.attn.relative_position_bias_table"),
          "models weights.pth", 4, ("a BEiT", BY_NAME), "ssl-bench models"),
    Fault("more neighbours than images", class_folders,
          "probe --task knn --dataset class_folders --data-root . "
          "--checkpoint encoder.safetensors probe.neighbours=[7]", 2, "at most 6"),
    Fault("more neighbours than patches", voc,
          "probe --task retrieval --dataset voc2012 --data-root . probe.image_size=32 "
          "--checkpoint encoder.safetensors probe.neighbours=9999", 2, "at most 64"),
]  # fmt: skip


@each([*CODE, *VALUES, *PATHS, *PLACES])
def test_a_faulty_value_path_or_device_is_named(fault, workdir, capsys):
    check_fault(fault, workdir, capsys)

    assert not (workdir / "left").exists()


@pytest.mark.parametrize("address", ["subprocess.call", "os", "", 3, None, "probes.pca.Path",
    "ssl_bench.system.files.subprocess.run", "ssl_bench.cli.__main__.main", "ssl_bench.nothing.X",
    "ssl_bench.errors.ConfigurationError"])  # fmt: skip
def test_only_dataclasses_of_this_suite_are_built(address):
    with pytest.raises(ConfigurationError):
        component_class(address, "probe._target_")


PLUGIN = """
from dataclasses import dataclass
from pathlib import Path
Path({mark!r}).touch()
from ssl_bench.evaluation import Probe, Score

@dataclass(frozen=True)
class Ones(Probe):
    protocol: str = "plain"
    value: float = 1.0
    task = "ones"
    role = "images"
    def cells(self, layers):
        return [(layer, "token", "one") for layer in layers]
    def split(self, dataset):
        return dataset.images()
    def run(self, context):
        for layer in context.layers:
            yield Score(layer, "token", "one", self.value, None, 1)
"""


def test_an_installed_package_adds_a_probe_by_an_entry_point(workdir, monkeypatch, capsys):
    target, mark = workdir / "installed", str(workdir / "imported")
    information = target / "ones-1.0.dist-info"
    information.mkdir(parents=True)
    (target / "ones_probe.py").write_text(PLUGIN.format(mark=mark))
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: ones\nVersion: 1.0\n")
    points = "[ssl_bench.probe]\nones = ones_probe:Ones\nnone = ones_probe:Path\n"
    (information / "entry_points.txt").write_text(points)
    with pytest.raises(ConfigurationError):
        compose_config("probing", ["probe=ones"])
    monkeypatch.syspath_prepend(target)

    assert "ones" in choices("probe")
    assert not Path(mark).exists()
    words = shlex.split(f"{PROBE} ones --json probe.value=2.5")
    assert main(words) == 0
    assert [one["value"] for one in json.loads(capsys.readouterr().out)] == [2.5, 2.5]
    assert "probe.value" in expect_error(capsys, [*words, "probe.value=x"], 2)
    assert "dataclass" in expect_error(capsys, shlex.split(f"{PROBE} none"), 2)


BROKEN_FILES = {
    "import nopackage": "pip install nopackage",
    "import nopackage.part": "pip install nopackage",
    "import torch.nopart": "torch.nopart",
    "from ssl_bench.errors import Nothing": "ImportError",
    "def (": "SyntaxError",
    "1 / 0": "ZeroDivisionError",
}


@pytest.mark.parametrize(("line", "why"), BROKEN_FILES.items())
def test_a_broken_probe_file_is_named_with_its_line(tmp_path, monkeypatch, line, why):
    monkeypatch.setattr(probes, "__path__", [*probes.__path__, str(tmp_path / "probes")])
    file = tmp_path / "probes" / f"broken{abs(hash(line))}.py"
    file.parent.mkdir()
    file.write_text(f'"""A probe."""\n\n{line}\n')

    with pytest.raises(BrokenFile) as raised:
        component_class(f"probes.{file.stem}.Norms", "probe._target_")

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
SMALL = ["dataset.num_train=3", "dataset.num_val=2", "probe.panels=2", "probe.image_size=32"]


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
    broken = {
        ("probe", "--task", "reconstruction"): "probes/reconstruction.py",
        ("probe", "--task", "reconstruction,pca", *SMALL): "probes/reconstruction.py",
        ("keys", "probe.reconstruction"): "probes/reconstruction.py",
        ("pretrain", "objective=rotation", "--dry-run"): "pretrain/objectives/rotation.py",
    }
    others = [["--help"], ["keys"], ["sweep", "--dry-run", *SMALL]]
    others += [["probe", "--task", "all", "--layer", "0", *SMALL, "probe.training.epochs=1"]]
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
    assert [one.count("left out: reconstruction: ") for one in outputs[-3:]] == [1, 1, 0]
    assert len(list((workdir / "results/records").glob("*"))) >= 4


@pytest.mark.slow
def test_the_advice_for_a_torchvision_network_loads_it(workdir, capsys):
    torch.save(torchvision.models.convnext_tiny().state_dict(), "weights.pth")
    message = expect_error(capsys, ["models", "weights.pth"], 4)
    advice = message.rpartition("with ")[2].partition("; use")[0]
    (workdir / "mine.py").write_text(
        "import torch, torchvision\nfrom ssl_bench import Encoder\n\ndef encoder():\n"
        "    model = torchvision.models.convnext_tiny()\n"
        f"    model.load_state_dict(torch.load('weights.pth'))\n    return {advice}\n"
    )

    assert main(["models", "mine.py:encoder"]) == 0

    assert "9 blocks, width 384" in capsys.readouterr().out


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


@pytest.mark.slow
def test_closed_streams_change_only_what_is_printed(workdir):
    words = [*shlex.split(PCA), "--layer"]
    code = "from ssl_bench.cli.__main__ import main\n"
    code += "".join(f"print('ended', main({[*words, layer]}))\n" for layer in "09")
    command = ["bash", "-c", 'exec "$0" -c "$1" <&- 2>&-', sys.executable, code]

    ended = subprocess.run(command, cwd=workdir, stdout=subprocess.PIPE, text=True, timeout=300)

    right, _, wrong = ended.stdout.partition("ended 0\n")
    assert "explained_variance" in right
    # Progress messages do not end up among the results.
    assert "encoder encoder: " not in right
    assert wrong == "ended 2\n"


@pytest.mark.parametrize(
    ("output", "code", "error"),
    [("/dev/full", 5, "No space left on device"), ("ascii.txt", 0, ""), (None, 0, "")],
)
def test_stdout_may_be_full_closed_or_ascii(workdir, output, code, error):
    assert main(probing("pca", "folder", workdir / "photos")) == 0

    def print_table() -> int:
        sys.stdout = None if output is None else open(output, "w", encoding="ascii")  # noqa: PTH123, SIM115
        return main(["table"])

    assert exit_code(fork(print_table, stderr=workdir / "stderr")) == code

    lines = (workdir / "stderr").read_text().splitlines()
    assert len(lines) == bool(error)
    assert error in "".join(lines)
    if output == "ascii.txt":
        assert "\\xb1" in (workdir / output).read_text()


def test_a_closed_pipe_is_no_error(workdir):
    assert main(probing("pca", "folder", workdir / "photos")) == 0
    reading, writing = os.pipe()
    os.close(reading)

    def print_into_the_pipe() -> int:
        sys.stdout = os.fdopen(writing, "w", buffering=1)
        return main(["table", "--format", "csv"])

    child = fork(print_into_the_pipe, stderr=workdir / "stderr")
    os.close(writing)

    assert exit_code(child) == 0
    assert (workdir / "stderr").read_text() == ""


def limited(words: list[str]) -> int:
    """Run a command that may use 200 MiB more address space than now."""
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
    code = exit_code(fork(lambda: limited(words), stderr=workdir / "stderr"))

    output = (workdir / "stderr").read_text()
    assert code == 5, output[-2000:]
    (line,) = (text for text in output.splitlines() if text.startswith("ssl-bench: "))
    assert "out of memory" in line
    assert hint in line
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_out_of_memory_on_any_device_ends_with_code_5(workdir, capsys, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("probes.pca.PCA.run", fail)

    assert "`probe.batch_size=" in expect_error(capsys, shlex.split(PCA), 5)
    assert main(["sweep", *shlex.split(PCA)[1:]]) == 5


def test_an_image_is_not_called_damaged_without_memory(workdir, capsys, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr("PIL.Image.Image.load", fail)
    monkeypatch.setattr("ssl_bench.data.files.images._decode_jpeg", lambda *_: None)

    expect_error(capsys, shlex.split(f"{PCA} --on-bad-image skip"), 5)


# A variable with a wrong value, or None to unset it.
LAUNCHERS = {
    "no address": ("MASTER_ADDR", None),
    "no port": ("MASTER_PORT", ""),
    "a port that is no number": ("MASTER_PORT", "http"),
    "a port that is too large": ("MASTER_PORT", "70000"),
    "no rank": ("RANK", None),
    "a rank that is no number": ("RANK", "one"),
    "a rank that is too large": ("RANK", "2"),
    "a negative rank": ("RANK", "-1"),
    "no world size": ("WORLD_SIZE", None),
    "a world size of 0": ("WORLD_SIZE", "0"),
    "a world size that is no number": ("WORLD_SIZE", "2.0"),
    "a local rank that is no number": ("LOCAL_RANK", "gpu0"),
    "too many local processes": ("LOCAL_WORLD_SIZE", "3"),
}
TWO_RANKS = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}


def set_launcher(monkeypatch: pytest.MonkeyPatch, **values: str | None) -> None:
    for name in (*TWO_RANKS, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
        if value := values.get(name):
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("name", "value"), LAUNCHERS.values(), ids=LAUNCHERS)
def test_a_wrong_variable_of_a_launcher_is_named(workdir, capsys, monkeypatch, name, value):
    set_launcher(monkeypatch, **(TWO_RANKS | {name: value}))
    named = "RANK is 1, expected 0" if name == "WORLD_SIZE" and value is None else f"{name} is "

    assert named in expect_error(capsys, pretraining(workdir / "photos", "run"), 2)
    assert named in expect_error(capsys, probing("pca", "folder", workdir / "photos"), 2)


@pytest.mark.parametrize(
    "values",
    [
        {"MASTER_ADDR": "somewhere", "MASTER_PORT": "none"},
        {"LOCAL_RANK": "3"},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
    ],
    ids=str,
)
def test_variables_of_a_single_process_are_accepted(workdir, monkeypatch, values):
    set_launcher(monkeypatch, **values)

    assert main(probing("pca", "folder", workdir / "photos")) == 0
    dry_run = [*pretraining(workdir / "photos", "run"), "--dry-run"]
    assert main(dry_run) == 0


def test_processes_that_cannot_connect_name_the_address(workdir, capsys, monkeypatch):
    set_launcher(monkeypatch, **(TWO_RANKS | {"RANK": "0", "MASTER_PORT": "1"}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))

        message = expect_error(capsys, pretraining(workdir / "photos", "run"), 5)

    assert "MASTER_ADDR=127.0.0.1" in message


def test_an_interruption_is_reported_although_the_launcher_is_wrong(capsys, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    set_launcher(monkeypatch, WORLD_SIZE="2", RANK="none")
    monkeypatch.setattr("ssl_bench.cli.parser.run", interrupt)

    assert main(["probe"]) == 130
