"""Faults of what users type: values, paths and addresses end in one line with an exit code.

Most of them are rows of one table (number, command, exit code, hint). The others need files,
several processes or a device.
"""

import json
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision

from ssl_bench.cli.__main__ import main
from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import component_class, compose_config
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import load_encoder
from tests.support.faults import exit_code, fails, fork, unchecked_types

ENCODER = "--checkpoint encoder.safetensors --dataset folder --data-root photos"
PROBE = f"probe {ENCODER} --task"
RUN = "pretrain model=vit_tiny_skip data.root=photos --out run"
KEYS = "ssl-bench keys"
NO_HINT = ""

FAULTS = [
    # An override must not say which code is run.
    (69, f"{PROBE} pca probe._target_=subprocess.call", 2, KEYS),
    (69, f"{PROBE} pca probe._target_=probes.knn.KNN", 2, KEYS),
    (69, f"{PROBE} pca ++probe._target_=os.system", 2, KEYS),
    (69, f"{PROBE} pca +probe._partial_=true", 2, KEYS),
    (69, f"{PROBE} pca probe._args_=[left]", 2, KEYS),
    (69, f"{PROBE} pca probe._convert_=none", 2, NO_HINT),
    (69, f"{PROBE} pca 'probe.align_to={{_target_: pathlib.Path.touch, self: left}}'", 2, KEYS),
    (69, f"{PROBE} pca 'dataset={{_target_: os.mkdir, path: left}}'", 2, KEYS),
    (69, f"{PROBE} pca hydra.searchpath=[file:///tmp]", 2, KEYS),
    (69, f"{PROBE} pca +/tmp=evil", 2, KEYS),
    (69, f"{PROBE} pca ~probe._target_", 2, NO_HINT),
    # A home folder that does not exist.
    (70, f"{PROBE} pca \"data.root='~nosuchuser/x'\"", 2, NO_HINT),
    (70, "pretrain --out run \"data.root='~nosuchuser/x'\"", 2, NO_HINT),
    (70, "pretrain --out run \"monitor.root='~nosuchuser/x'\"", 2, NO_HINT),
    (70, "pretrain --out run \"init_from='~nosuchuser/x'\"", 2, NO_HINT),
    (70, f"{RUN} monitor.accuracy_epochs=1 \"monitor.results='~nosuchuser/x'\"", 2, NO_HINT),
    # Values without a meaning.
    (73, f"{PROBE} pca seed=99999999999999999999999", 2, NO_HINT),
    (73, f"{PROBE} pca data.root=???", 2, NO_HINT),
    (73, f"{PROBE} pca 'dtype=${{dtype}}'", 2, NO_HINT),
    (73, f"{PROBE} pca dtype=8", 2, NO_HINT),
    (73, f"{PROBE} pca probe.facet=8", 2, "\"probe.facet='8'\""),
    (73, f"{PROBE} pca --device meta", 5, "--device cpu"),
    (73, f"{PROBE} knn probe.batch_size=0", 2, NO_HINT),
    (73, f"{PROBE} classification probe.training.c_values=[nan]", 2, NO_HINT),
    (73, f"{PROBE} segmentation probe.training.weight_decay=-1", 2, NO_HINT),
    (73, f"{PROBE} tokencut probe.tau=7", 2, NO_HINT),
    (73, f"{RUN} optimizer.lr=-1", 2, NO_HINT),
    (73, f"{RUN} optimizer.lr=nan", 2, NO_HINT),
    (73, f"{RUN} optimizer.betas=[0.9]", 2, NO_HINT),
    (73, f"{RUN} objective.momentum=2", 2, NO_HINT),
    (73, f"{RUN} objective=mae objective.crops.flip_probability=7", 2, NO_HINT),
    (73, f"{RUN} objective.crops.global_scale=[0.1]", 2, NO_HINT),
    (73, f"{RUN} train=3", 2, KEYS),
    (73, f"{RUN} train.epochs=0", 2, NO_HINT),
    (73, f"{RUN} objective={{}}", 2, NO_HINT),
    (73, f"{RUN} model.init_options.mlp_mean=nan", 2, NO_HINT),
    (73, f"{RUN} model.init_options.mlp_mean=???", 2, NO_HINT),
    (73, f"{RUN} model.dim=100000000000", 2, NO_HINT),
    (73, f"{RUN} data.image_size=0", 2, NO_HINT),
    # Networks that are not supported.
    (75, f"{PROBE} pca --checkpoint torchvision:resnet50", 4, NO_HINT),
    (75, f"{PROBE} pca --checkpoint timm:mvitv2_tiny", 4, "--checkpoint FILE.py:NAME"),
]  # fmt: skip


def rows(number: int) -> pytest.MarkDecorator:
    table = [fault[1:] for fault in FAULTS if fault[0] == number]
    return pytest.mark.parametrize(("command", "code", "hint"), table)


def check(place: Path, capsys, command: str, code: int, hint: str) -> None:
    """Check that a command ends with an exit code and one line, and writes nothing.

    The line has the hint, and the key or the value of the last word of the command.
    """
    before = sorted(place.rglob("*"))

    line = fails(capsys, shlex.split(command), code)

    assert f"`{hint}`" in line or hint == NO_HINT
    assert any(part in line for part in shlex.split(command)[-1].split("=") if part)
    assert sorted(place.rglob("*")) == before


@rows(69)
def test_fault_69_no_override_names_the_code_to_run(place, capsys, command, code, hint):
    check(place, capsys, command, code, hint)


@rows(70)
def test_fault_70_a_home_that_does_not_exist_is_refused(place, capsys, command, code, hint):
    check(place, capsys, command, code, hint)


@rows(73)
def test_fault_73_values_without_a_meaning_are_refused(place, capsys, command, code, hint):
    check(place, capsys, command, code, hint)


@rows(75)
def test_fault_75_other_networks_are_refused(place, capsys, command, code, hint):
    check(place, capsys, command, code, hint)


PCA = ["probe", "--task", "pca", *ENCODER.split()]


@pytest.mark.parametrize("path", ["~nosuchuser/x", "", "a" * 300, "x\0y", "b/" * 3000])
@pytest.mark.parametrize(
    "words",
    [
        [*PCA, "--out"],
        [*PCA[:-1]],
        [*PCA, "--checkpoint"],
        ["pretrain", "--out"],
        ["pretrain", "--data-root"],
        ["table", "--figure"],
        ["report", "--into"],
        ["sweep", "--slurm-logs"],
        ["data", "verify", "photos", "--manifest"],
        ["data", "verify"],
        ["data", "check", "voc2012", "--data-root"],
        ["models"],
        ["quickstart", "--out"],
    ],
)
def test_fault_70_an_impossible_path_is_refused_wherever_it_is_typed(place, capsys, words, path):
    if words == ["models"] and path == "":
        path = "~nosuchuser/x"

    assert " path" in fails(capsys, [*words, path], 2)


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


@pytest.mark.parametrize(
    "address",
    [
        *("subprocess.call", "builtins.eval", "os", "", 3, None, "pretrain..x"),
        *("ssl_bench.system.files.subprocess.run", "ssl_bench.cli.__main__.main"),
        *("ssl_bench.errors.ConfigurationError", "probes.pca.Path", "ssl_bench.nothing.X"),
    ],
)
def test_fault_69_only_dataclasses_of_this_suite_are_built(address):
    with pytest.raises(ConfigurationError, match=r"neither a dataclass of ssl_bench, probes"):
        component_class(address, "probe._target_")


def test_fault_69_a_run_that_names_foreign_code_is_only_compared(place, begun):
    kept = place / "run/config.yaml"
    kept.write_text(f"_target_: pathlib.Path.touch\nself: {place}/left\n{kept.read_text()}")

    assert main([*begun, "--resume"]) == 0
    assert load_encoder("run").depth
    assert not (place / "left").exists()


def test_fault_69_an_installed_package_adds_a_probe_by_an_entry_point(place, monkeypatch, capsys):
    target, mark = place / "installed", str(place / "imported")
    information = target / "ones-1.0.dist-info"
    information.mkdir(parents=True)
    (target / "ones_probe.py").write_text(PLUGIN.format(mark=mark))
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: ones\nVersion: 1.0\n")
    points = "[ssl_bench.probe]\nones = ones_probe:Ones\nnone = ones_probe:Path\n"
    (information / "entry_points.txt").write_text(points)
    with pytest.raises(ConfigurationError, match="unknown probe="):
        compose_config("probing", ["probe=ones"])
    monkeypatch.syspath_prepend(target)

    assert "ones" in choices("probe")
    assert not Path(mark).exists()
    words = ["probe", "--task", "ones", *PCA[3:], "--json", "probe.value=2.5"]
    assert main(words) == 0
    assert [one["value"] for one in json.loads(capsys.readouterr().out)] == [2.5, 2.5]
    assert "probe.value expects a number" in fails(capsys, [*words, "probe.value=x"], 2)
    assert "must be a dataclass" in fails(capsys, ["probe", "--task", "none", *PCA[3:]], 2)


def limited(words: list[str]) -> int:
    """Run a command with 200 MiB of address space in addition to what is used."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + 200 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return main(words)


@pytest.mark.slow
def test_fault_71_closed_streams_change_only_what_is_printed(place):
    words = [*PCA, "--layer"]
    typed = "from ssl_bench.cli.__main__ import main\n"
    typed += "".join(f"print('ended', main({[*words, layer]}))\n" for layer in "09")
    command = ["bash", "-c", 'exec "$0" -c "$1" <&- 2>&-', sys.executable, typed]

    ended = subprocess.run(command, cwd=place, stdout=subprocess.PIPE, text=True, timeout=300)

    right, _, wrong = ended.stdout.partition("ended 0\n")
    assert "explained_variance" in right
    # What is said of the encoder goes nowhere, and not among the results.
    assert "encoder encoder: " not in right
    assert wrong == "ended 2\n"


TRAINED = ["pretrain", "data.root=photos", "--out", "run", "train.batch_size=2", "model.dim=98304"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ([*PCA, "probe.image_size=8192", "--layer", "0"], "`probe.batch_size="),
        (TRAINED, "`train.batch_size="),
    ],
)
@unchecked_types()
def test_fault_72_too_little_memory_is_reported_with_what_to_lower(place, words, remedy):
    code = exit_code(fork(lambda: limited(words), stderr=place / "said"))

    said = (place / "said").read_text()
    assert code == 5, said[-2000:]
    (line,) = (text for text in said.splitlines() if text.startswith("ssl-bench: "))
    assert "out of memory" in line
    assert remedy in line
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_fault_72_out_of_memory_on_any_device_ends_with_code_5(place, capsys, monkeypatch, error):
    def fault(*_, **__):
        raise error

    monkeypatch.setattr("probes.pca.PCA.run", fault)

    assert "`probe.batch_size=" in fails(capsys, PCA, 5)
    assert main(["sweep", *PCA[1:]]) == 5


def test_fault_72_an_image_is_not_called_damaged_without_memory(place, capsys, monkeypatch):
    def fault(*_, **__):
        raise MemoryError

    monkeypatch.setattr("PIL.Image.Image.load", fault)
    monkeypatch.setattr("ssl_bench.data.files.images._decode_jpeg", lambda *_: None)

    fails(capsys, [*PCA, "--on-bad-image", "skip"], 5)


def test_fault_74_a_link_to_itself_is_no_traceback(place, capsys):
    loop = place / "photos/loop"
    loop.symlink_to(loop)
    (place / "photos/round").symlink_to(place / "photos")

    assert "photos/loop" in fails(capsys, ["data", "verify", "photos"], 3)
    assert main([*PCA, "--layer", "0"]) == 0
    for words in (["models", str(loop)], [*PCA, "--checkpoint", str(loop)]):
        fails(capsys, words, 4)
    fails(capsys, [*PCA, "--out", str(loop)], 5)
    fails(capsys, [*PCA[:-1], str(loop)], 3)


@pytest.mark.parametrize(
    ("weights", "what", "way"),
    [
        (torchvision.models.resnet18, "contains a ResNet", "timm's name of its architecture"),
        (
            torchvision.models.convnext_tiny,
            "contains a network of torchvision",
            "Python (docs/python.md), with Encoder.from_module(model, blocks='features.5'",
        ),
        (
            "stages.0.blocks.0.gamma",
            "contains stages, such as a ConvNeXt's",
            "timm's name of its architecture",
        ),
        (
            "layers.0.blocks.0.norm1.weight",
            "contains a Swin Transformer",
            "timm's name of its architecture",
        ),
        (
            "blocks.0.attn.relative_position_bias_table",
            "such as a BEiT's",
            "timm's name of its architecture",
        ),
    ],
)
def test_fault_75_weights_of_other_networks_are_named(place, capsys, weights, what, way):
    content = {weights: torch.ones(3)} if isinstance(weights, str) else weights().state_dict()
    torch.save(content, "weights.pth")

    line = fails(capsys, ["models", "weights.pth"], 4)

    assert what in line
    assert "`ssl-bench models`" in line
    assert way in line


def test_fault_75_the_advice_for_a_torchvision_network_loads_it(place, capsys):
    torch.save(torchvision.models.convnext_tiny().state_dict(), "weights.pth")
    said = fails(capsys, ["models", "weights.pth"], 4)
    advised = said.rpartition("with ")[2].partition("; use")[0]
    (place / "mine.py").write_text(
        "import torch, torchvision\nfrom ssl_bench import Encoder\n\ndef encoder():\n"
        "    model = torchvision.models.convnext_tiny()\n"
        f"    model.load_state_dict(torch.load('weights.pth'))\n    return {advised}\n"
    )

    assert main(["models", "mine.py:encoder"]) == 0

    assert "9 blocks, width 384" in capsys.readouterr().out
