"""Test the command `ssl-bench doctor`."""

import json
import os
import sys
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch

from ssl_bench.cli.__main__ import main
from ssl_bench.cli.doctor import PACKAGES
from ssl_bench.system.process import count_usable_cores
from tests.support.faults import class_folders, voc


def findings(capsys, *arguments: str, code: int = 0) -> dict[str, list[str]]:
    assert main(["doctor", "--json", *arguments]) == code
    found: dict[str, list[str]] = {}
    for row in json.loads(capsys.readouterr().out)["findings"]:
        found.setdefault("BROKEN" if row["broken"] else row["name"], []).append(row["value"])
    return found


def test_versions_threads_caches_and_datasets_are_listed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    faiss = ModuleType("faiss")
    faiss.__spec__ = ModuleSpec("faiss", None)
    faiss.__version__ = "9.9"  # pyrefly: ignore[missing-attribute]
    monkeypatch.setitem(sys.modules, "faiss", faiss)

    found = findings(capsys)

    assert {module for module, _ in PACKAGES} <= set(found)
    assert found["torch"] == [torch.__version__]
    assert found["faiss"] == ["9.9, 0 GPUs for probe.engine=faiss"]
    assert "OMP_NUM_THREADS=3" in found["threads"][0]
    assert f"TORCH_HOME={tmp_path / 'torch'}" in found["caches"][0]
    assert found["torch cache"][0].endswith(f"GiB free in {tmp_path / 'torch' / 'hub'}")
    assert found["results"][0].endswith("GiB free in results")
    assert "BROKEN" not in found
    assert not list(tmp_path.iterdir())
    faiss.get_num_gpus = lambda: 2  # pyrefly: ignore[missing-attribute]
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(map(len, found.values()))
    assert f"{'torch':<12} {torch.__version__}" in lines
    assert f"{'faiss':<12} 9.9, 2 GPUs for probe.engine=faiss" in lines

    voc(tmp_path / "a")
    class_folders(tmp_path / "b")
    (tmp_path / "empty").mkdir()
    both = findings(capsys, "--data-root", f"voc2012={tmp_path}/a,class_folders={tmp_path}/b")
    assert both["data"] == [
        f"voc2012 in {tmp_path}/a: discovery (7 trainval), images (7 trainval), "
        "segmentation (4 train, 3 val)",
        f"class_folders in {tmp_path}/b: classification (6 train, 6 val), images (6 train)",
    ]
    (line,) = findings(capsys, "--data-root", str(tmp_path / "empty"))["data"]
    assert f"no dataset in {tmp_path / 'empty'}" in line


def test_settings_that_limit_commands_are_stated(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 999)
    monkeypatch.setattr(os, "access", lambda _, mode: not mode & os.W_OK)

    found = findings(capsys)

    assert found["caches"][0].endswith(", offline")
    assert f"(set OMP_NUM_THREADS={count_usable_cores()} " in found["cpu"][0]
    monkeypatch.setattr(torch, "get_num_threads", count_usable_cores)
    assert "OMP_NUM_THREADS" not in findings(capsys)["cpu"][0]
    assert found["disk"][0].endswith(f", but {Path.cwd()} is not writable")


def test_broken_packages_come_last_with_the_remedy(capsys, monkeypatch):
    installed = metadata.version

    def version(name: str) -> str:
        if name == "pillow":
            raise metadata.PackageNotFoundError
        return "2.4.1" if name == "omegaconf" else installed(name)

    with monkeypatch.context() as patch:
        patch.setattr(metadata, "version", version)
        lines = findings(capsys, code=5)["BROKEN"]
    (line,) = (line for line in lines if "omegaconf is 2.4.1" in line)
    assert any(line.startswith("pillow is not installed. ") for line in lines)
    assert line.endswith("pip install 'omegaconf<2.4,>=2.3'")

    monkeypatch.setitem(sys.modules, "pycocotools", None)
    assert main(["doctor"]) == 5
    assert capsys.readouterr().out.splitlines()[-1].startswith("BROKEN       pycocotools ")
