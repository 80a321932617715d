"""`ssl-bench doctor` on this machine, and on machines with a broken package."""

import json
import sys
from importlib import metadata
from types import ModuleType

import torch

from ssl_bench.cli.__main__ import main
from ssl_bench.cli.doctor import PACKAGES
from tests.support.faults import class_folders, voc


def findings(capsys, *arguments: str, code: int = 0) -> dict[str, list[str]]:
    """Name to values; the exit code is checked."""
    assert main(["doctor", "--json", *arguments]) == code
    out = capsys.readouterr().out
    found: dict[str, list[str]] = {}
    for row in json.loads(out)["findings"]:
        found.setdefault("BROKEN" if row["broken"] else row["name"], []).append(row["value"])
    return found


def test_doctor_says_what_is_here(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))

    found = findings(capsys)

    assert {module for module, _ in PACKAGES} <= set(found)
    assert found["torch"] == [torch.__version__]
    assert "OMP_NUM_THREADS=3" in found["threads"][0]
    assert f"TORCH_HOME={tmp_path / 'torch'}" in found["caches"][0]
    assert found["torch cache"][0].endswith(f"GiB free in {tmp_path / 'torch' / 'hub'}")
    assert found["results"][0].endswith("GiB free in results")
    assert "BROKEN" not in found
    assert not list(tmp_path.iterdir())
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(map(len, found.values()))
    assert f"{'torch':<12} {torch.__version__}" in lines


def test_a_version_outside_what_is_needed_is_broken_with_the_remedy(capsys, monkeypatch):
    installed = metadata.version

    def version(name: str) -> str:
        return "2.4.1" if name == "omegaconf" else installed(name)

    monkeypatch.setattr(metadata, "version", version)

    found = findings(capsys, code=5)

    (line,) = found["BROKEN"]
    assert "omegaconf is 2.4.1" in line
    assert line.endswith("pip install 'omegaconf<2.4,>=2.3'")


def test_a_package_that_does_not_import_is_broken_and_comes_last(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pycocotools", None)

    assert main(["doctor"]) == 5

    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("BROKEN       pycocotools ")


def test_faiss_is_shown_with_its_number_of_gpus(capsys, monkeypatch):
    faiss = ModuleType("faiss")
    faiss.__version__ = "9.9"  # pyrefly: ignore[missing-attribute]
    monkeypatch.setitem(sys.modules, "faiss", faiss)
    assert findings(capsys)["faiss"] == ["9.9, 0 GPUs for probe.engine=faiss"]

    faiss.get_num_gpus = lambda: 2  # pyrefly: ignore[missing-attribute]
    assert findings(capsys)["faiss"] == ["9.9, 2 GPUs for probe.engine=faiss"]


def test_datasets_are_found_with_their_roles_and_sizes(capsys, tmp_path):
    voc(tmp_path / "a")
    class_folders(tmp_path / "b")

    found = findings(capsys, "--data-root", f"voc2012={tmp_path}/a,class_folders={tmp_path}/b")

    assert found["data"] == [
        f"voc2012 in {tmp_path}/a: discovery (7 trainval), images (7 trainval), "
        "segmentation (4 train, 3 val)",
        f"class_folders in {tmp_path}/b: classification (6 train, 6 val), images (6 train)",
    ]
    (tmp_path / "empty").mkdir()
    (line,) = findings(capsys, "--data-root", str(tmp_path / "empty"))["data"]
    assert f"no dataset in {tmp_path / 'empty'}" in line
