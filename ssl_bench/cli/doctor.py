"""`ssl-bench doctor`: what this machine has, what is missing and what to do about it."""

import argparse
import importlib
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch
from huggingface_hub import constants as hub
from packaging.requirements import Requirement

from ssl_bench import __version__
from ssl_bench.composition.choices import choices, config_folder
from ssl_bench.composition.compose import add_data_root, build, compose_config
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.errors import SslBenchError
from ssl_bench.network import OFFLINE_VARIABLES, offline_variable
from ssl_bench.system.escaping import dump_json, escape_lines, to_one_line
from ssl_bench.system.paths import resolve_links
from ssl_bench.system.process import count_usable_cores
from ssl_bench.system.provenance import source_commit

PACKAGES = (
    ("torch", "torch"),
    ("torchvision", "torchvision"),
    ("timm", "timm"),
    ("faiss", "faiss"),
    ("cv2", "opencv-python-headless"),
    ("pycocotools", "pycocotools"),
    ("sklearn", "scikit-learn"),
    ("hydra", "hydra-core"),
    ("pandas", "pandas"),
    ("pyarrow", "pyarrow"),
)
EXTRAS = (
    ("submitit", "ssl-bench[slurm]", "sweep --slurm"),
    ("tensorboard", "ssl-bench[track]", "train.tensorboard"),
    ("wandb", "wandb", "train.wandb"),
)
"""Packages that something optional needs, what to install for it, and what needs it."""
CACHE_VARIABLES = (
    *("HF_HOME", "HF_HUB_CACHE", *OFFLINE_VARIABLES, "TORCH_HOME", "XDG_CACHE_HOME"),
)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_WAIT_POLICY")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        broken: Commands will fail until this is mended.
    """

    name: str
    value: str
    broken: bool = False

    def line(self) -> str:
        return f"{'BROKEN' if self.broken else self.name:<12} {self.value}"


def command(options: argparse.Namespace) -> int:
    """Print one line per finding; exit code 5 when a needed package is not as it must be."""
    findings = list(_findings(options.data_root))
    # What is broken comes last, where it is read.
    findings.sort(key=lambda finding: finding.broken)
    broken = any(finding.broken for finding in findings)
    if options.json:
        rows = [asdict(finding) for finding in findings]
        print(dump_json({"broken": broken, "findings": rows}))
    else:
        print(escape_lines(finding.line() for finding in findings))
    return 5 if broken else 0


def _findings(data_root: str | None) -> Iterator[Finding]:
    yield Finding("ssl-bench", f"{__version__} ({source_commit() or 'installed wheel'})")
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    yield from (_package(module, distribution) for module, distribution in PACKAGES)
    yield from _unmet_requirements()
    for distribution, wanted, purpose in EXTRAS:
        try:
            yield Finding(distribution, metadata.version(distribution))
        except metadata.PackageNotFoundError:
            text = f"none; only {purpose} needs it: pip install '{wanted}'"
            yield Finding(distribution, text)
    yield from _processors()
    yield from _gpus()
    yield from _disks()
    # What moves them and whether the network is asked; docs/daily.md has all of them.
    network = "offline" if offline_variable() else "the network is asked for what is not there"
    yield Finding("caches", f"{_set(CACHE_VARIABLES) or 'where they usually are'}; {network}")
    none = "no sbatch in PATH; sweep --print works everywhere"
    yield Finding("slurm", shutil.which("sbatch") or none)
    yield Finding("configs", str(config_folder()))
    yield Finding("probes", ", ".join(choices("probe")))
    yield Finding("datasets", ", ".join(choices("dataset")))
    yield from _data(data_root)


def _package(module: str, distribution: str) -> Finding:
    try:
        found = importlib.import_module(module)
    except Exception as error:
        reason = to_one_line(error)
        text = f"{module} does not import ({reason}); install {distribution} again"
        return Finding(module, text, broken=True)
    version = getattr(found, "__version__", None) or metadata.version(distribution)
    searches = ""
    if module == "faiss" and (count := getattr(found, "get_num_gpus", lambda: 0)()):
        many = f"{count} GPU{'s' * (count > 1)}"
        searches = f", searches on the CPU, and with probe.engine=faiss on {many}"
    elif module == "faiss":
        why = "no GPU found" if hasattr(found, "StandardGpuResources") else "built without GPU"
        searches = f", searches on the CPU ({why})"
    return Finding(module, f"{version}{searches}")


def _set(names: Sequence[str]) -> str:
    """Those of the environment variables that are set, with their values."""
    return ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def _unmet_requirements() -> Iterator[Finding]:
    """Packages that this version of ssl-bench was not made for."""
    try:
        requirements = metadata.requires("ssl-bench") or ()
    except metadata.PackageNotFoundError:
        yield Finding("ssl-bench", "runs from its folder, not installed; packages are not compared")
        return
    for text in requirements:
        needed = Requirement(text)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        remedy = f"run: pip install '{needed.name}{needed.specifier}'"
        try:
            version = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            yield Finding(needed.name, f"{needed.name} is not installed; {remedy}", broken=True)
            continue
        if not needed.specifier.contains(version, prereleases=True):
            text = f"{needed.name} is {version}, expected {needed.specifier}; {remedy}"
            yield Finding(needed.name, text, broken=True)


def _processors() -> Iterator[Finding]:
    cores, threads = count_usable_cores(), torch.get_num_threads()
    advice = f"; more threads than cores: set OMP_NUM_THREADS={cores}" if threads > cores else ""
    yield Finding("cpu", f"{cores} cores, torch uses {threads} threads{advice}")
    yield Finding("threads", _set(THREADS) or f"no limit by {', '.join(THREADS[:3])}")
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total / 2**30
        advice = "; little for data workers: train.num_workers=0" if size < 1 else ""
        yield Finding("shm", f"{size:.1f} GiB in {shared}{advice}")


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("gpu", "none; everything runs on the CPU")
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_properties(index).name
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
        kind = f"CUDA {torch.version.cuda}"
        yield Finding(f"gpu {index}", f"{name}, {free:.0f} of {total:.0f} GiB free, {kind}")


def _disks() -> Iterator[Finding]:
    """Free space where results, runs and downloads go."""
    places = {
        "disk": Path.cwd(),
        "results": Path("results"),
        "runs": Path("runs"),
        "torch cache": Path(torch.hub.get_dir()),
        "hub cache": Path(hub.HF_HUB_CACHE),
    }
    for name, folder in places.items():
        existing = next(
            p for p in (resolve_links(folder), *resolve_links(folder).parents) if p.is_dir()
        )
        free = shutil.disk_usage(existing).free / 2**30
        advice = "" if os.access(existing, os.W_OK) else f"; {existing} cannot be written"
        yield Finding(name, f"{free:.0f} GiB free in {folder}{advice}")


def _data(text: str | None) -> Iterator[Finding]:
    if text is None:
        yield Finding("data", "not looked for; pass --data-root DIR or DATASET=DIR,DATASET=DIR")
        return
    # Not above: this takes the encoders' libraries along, which may be what is broken.
    from ssl_bench.request import parse_data_roots

    roots = parse_data_roots(text, choices("dataset"))
    found = [Finding("data", line) for name, root in roots.items() if (line := _roles(name, root))]
    yield from found or [Finding("data", f"none of {', '.join(roots)} in {text}; see docs/data.md")]


def _roles(name: str, root: str) -> str | None:
    """What a dataset can be used for, None where it is not there or not asked for its files."""
    config = compose_config("data", add_data_root([f"dataset={name}"], root))
    dataset: Dataset = build(config, "dataset")
    if not hasattr(dataset, "root"):
        return None
    opened = {
        "segmentation": ("train", "val"),
        "classification": ("train", "val"),
        "correspondence": ("val",),
        "discovery": ("discovery",),
        "saliency": ("val",),
        "images": ("images",),
    }
    roles = []
    for role in sorted(dataset.supports & opened.keys()):
        with suppress(SslBenchError):
            sets: list[ImageSet] = [getattr(dataset, split)() for split in opened[role]]
            counts = ", ".join(f"{len(images)} {images.split}" for images in sets)
            roles.append(f"{role} ({counts})")
    return f"{name} in {root}: {', '.join(roles)}" if roles else None
