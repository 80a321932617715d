"""What users type wrong: values, paths and addresses that must end in one line."""

import json
import resource
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

PCA = ["probe", "--task", "pca", "--checkpoint", "encoder.safetensors", "--dataset", "folder"]
PCA += ["--data-root", "photos"]
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


def limited(words: list[str]) -> int:
    """The command, with 200 MiB of addresses; what is loaded already has gigabytes of them."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + 200 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return main(words)


@pytest.mark.parametrize(
    "override",
    [
        "probe._target_=subprocess.call",
        "++probe._target_=os.system",
        "probe._target_=ssl_bench.system.files.os.remove",
        "probe._target_=probes.knn.KNN",
        "+probe._partial_=true",
        "probe._args_=[left]",
        "probe._convert_=none",
        "probe.align_to={_target_: pathlib.Path.touch, self: left}",
        "dataset={_target_: os.mkdir, path: left}",
        "hydra.searchpath=[file:///tmp]",
        "+/tmp=evil",
        "~probe._target_",
    ],
)
def test_fault_69_no_override_says_what_is_built(place, capsys, override):
    before = sorted(place.rglob("*"))

    fails(capsys, [*PCA, override], 2)

    assert sorted(place.rglob("*")) == before


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
def test_fault_70_what_can_be_no_path_is_refused_wherever_it_is_typed(place, capsys, words, path):
    if words == ["models"] and path == "":
        path = "~nosuchuser/x"

    assert " path" in fails(capsys, [*words, path], 2)


@pytest.mark.parametrize("key", ["data.root", "monitor.root", "init_from", "monitor.results"])
def test_fault_70_a_home_that_is_not_there_is_refused_in_keys(place, capsys, key):
    words = ["pretrain", "--out", "run", f"{key}='~nosuchuser/x'"]
    words += ["monitor.accuracy_epochs=1"] if key == "monitor.results" else []

    assert "~nosuchuser/x" in fails(capsys, words, 2)
    assert not (place / "run").exists()


@pytest.mark.slow
def test_fault_71_closed_streams_change_nothing_but_what_is_said(place):
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
def test_fault_72_memory_that_does_not_suffice_is_said_with_what_to_lower(place, words, remedy):
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
def test_fault_72_the_memory_of_any_device_is_5_with_what_to_lower(
    place, capsys, monkeypatch, error
):
    def fault(*_, **__):
        raise error

    monkeypatch.setattr("probes.pca.PCA.run", fault)

    assert "`probe.batch_size=" in fails(capsys, PCA, 5)
    assert main(["sweep", *PCA[1:]]) == 5


def test_fault_72_an_image_is_not_damaged_where_memory_does_not_suffice(place, capsys, monkeypatch):
    def fault(*_, **__):
        raise MemoryError

    monkeypatch.setattr("PIL.Image.Image.load", fault)
    monkeypatch.setattr("ssl_bench.data.files.images._decode_usual_jpeg", lambda *_: None)

    fails(capsys, [*PCA, "--on-bad-image", "skip"], 5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pca", "seed=99999999999999999999999"], "seed expects a whole number in [0, 4294967295]"),
        (["pca", "data.root=???"], "Missing mandatory value: data.root"),
        (["pca", "dtype=${dtype}"], "dtype expects a value"),
        (["pca", "dtype=8"], "dtype expects float32 or float16 or bfloat16"),
        (["pca", "--device", "meta"], None),
        (["knn", "probe.batch_size=0"], "probe.batch_size expects a whole number"),
        (["classification", "probe.training.c_values=[nan]"], "training.c_values expects a list"),
        (["segmentation", "probe.training.weight_decay=-1"], "weight_decay expects a number"),
        (["tokencut", "probe.tau=7"], "probe.tau expects a number in [-1, 1)"),
    ],
)
def test_fault_73_values_without_a_meaning_name_the_legal_ones(place, capsys, words, said):
    command = ["probe", *PCA[3:], "--task", *words]

    line = fails(capsys, command, 2 if said else 5)

    assert said is None or said in line


@pytest.mark.parametrize(
    "override",
    [
        *("optimizer.lr=-1", "optimizer.lr=nan", "optimizer.betas=[0.9]", "objective.momentum=2"),
        *("objective.crops.flip_probability=7", "objective.crops.global_scale=[0.1]"),
        *(
            "train=3",
            "train.epochs=0",
            "objective={}",
            "model.init_options.alpha=nan",
            "model.init_options.mlp_mean=???",
        ),
        *("model.dim=100000000000", "data.image_size=0"),
    ],
)
def test_fault_73_a_run_with_values_without_a_meaning_never_begins(place, capsys, override):
    more = ["objective=mae"] if "flip" in override else []

    fails(capsys, ["pretrain", "model=vit_tiny_skip", *more, "--out", "run", override], 2)

    assert not (place / "run").exists()


def test_fault_74_a_link_that_leads_to_itself_ends_no_walk_in_a_traceback(place, capsys):
    loop = place / "photos/loop"
    loop.symlink_to(loop)
    (place / "photos/round").symlink_to(place / "photos")

    assert "photos/loop cannot be read" in fails(capsys, ["data", "verify", "photos"], 3)
    assert main([*PCA, "--layer", "0"]) == 0
    for words in (["models", str(loop)], [*PCA, "--checkpoint", str(loop)]):
        fails(capsys, words, 4)
    fails(capsys, [*PCA, "--out", str(loop)], 5)
    fails(capsys, [*PCA[:-1], str(loop)], 3)


@pytest.mark.parametrize(
    ("weights", "what", "way"),
    [
        (torchvision.models.resnet18, "holds a ResNet", "from_module(model, blocks='layer3'"),
        (
            torchvision.models.convnext_tiny,
            "holds a network of torchvision",
            "Python (docs/python.md), with Encoder.from_module(model, blocks='features.5'",
        ),
        (
            "stages.0.blocks.0.gamma",
            "holds stages, such as a ConvNeXt's",
            "timm's name of its architecture",
        ),
        (
            "layers.0.blocks.0.norm1.weight",
            "holds a Swin Transformer",
            "timm's name of its architecture",
        ),
        (
            "blocks.0.attn.relative_position_bias_table",
            "such as a BEiT's",
            "use `--checkpoint FILE.py:NAME`",
        ),
    ],
)
def test_fault_75_weights_of_other_networks_are_named_with_who_takes_them(
    place, capsys, weights, what, way
):
    content = {weights: torch.ones(3)} if isinstance(weights, str) else weights().state_dict()
    torch.save(content, "weights.pth")

    line = fails(capsys, ["models", "weights.pth"], 4)

    assert what in line
    assert "`ssl-bench models`" in line
    assert way in line


def test_fault_75_what_is_advised_for_a_network_of_torchvision_loads_it(place, capsys):
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


@pytest.mark.parametrize("address", ["torchvision:resnet50", "timm:resnet50"])
def test_fault_75_addresses_of_other_networks_say_what_is_supported(place, capsys, address):
    line = fails(capsys, [*PCA, "--checkpoint", address], 4)

    assert "not supported" in line
    assert "timm" in line
