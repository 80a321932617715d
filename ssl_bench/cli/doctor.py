"""`ssl-bench doctor`: show versions, devices and caches, and report broken packages."""

import argparse
import importlib
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import constants as hub
from packaging.requirements import Requirement

from ssl_bench import __version__
from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import add_data_root, build, compose_config
from ssl_bench.data.samples import SPLITS_OF_ROLES, Dataset, ImageSet
from ssl_bench.errors import SslBenchError
from ssl_bench.network import OFFLINE_VARIABLES, offline_variable
from ssl_bench.system.files import resolve_links
from ssl_bench.system.output import dump_json, escape_lines, to_one_line
from ssl_bench.system.process import count_usable_cores, source_commit

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
"""Required packages, as pairs of a module name and a distribution name."""
EXTRAS = (
    ("submitit", "ssl-bench[slurm]", "sweep --slurm"),
    ("tensorboard", "ssl-bench[track]", "train.tensorboard"),
    ("wandb", "wandb", "train.wandb"),
)
"""Optional packages: distribution name, argument of `pip install`, and feature that needs it."""
CACHE_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", *OFFLINE_VARIABLES, "TORCH_HOME", "XDG_CACHE_HOME")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_WAIT_POLICY")


class Finding(NamedTuple):
    """One line of the output of `ssl-bench doctor`.

    Attributes:
        name: Subject of the line, such as "python".
        value: Version or state of the subject.
        broken: Whether a package is broken, so that commands fail until the user repairs it.
    """

    name: str
    value: str
    broken: bool = False


def command(options: argparse.Namespace) -> int:
    """Print the versions, devices and caches. Return 5 if a required package is broken, else 0."""
    # Print broken packages last, because users notice the last lines.
    findings = sorted(_find_all(options.data_root), key=lambda finding: finding.broken)
    has_broken = any(finding.broken for finding in findings)
    if options.json:
        rows = [finding._asdict() for finding in findings]
        print(dump_json({"broken": has_broken, "findings": rows}))
    else:
        print(
            escape_lines(
                f"{'BROKEN' if finding.broken else finding.name:<12} {finding.value}"
                for finding in findings
            )
        )
    return 5 if has_broken else 0


def _find_all(data_root: str | None) -> Iterator[Finding]:
    yield Finding("ssl-bench", f"{__version__} ({source_commit() or 'installed wheel'})")
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    for module, distribution in PACKAGES:
        yield _find_package(module, distribution)
    yield from _find_unmet_requirements()
    for distribution, requirement, purpose in EXTRAS:
        try:
            yield Finding(distribution, metadata.version(distribution))
        except metadata.PackageNotFoundError:
            advice = f"not installed, only needed for {purpose} (pip install '{requirement}')"
            yield Finding(distribution, advice)
    yield from _find_processors()
    yield from _find_gpus()
    yield from _find_caches()
    if data_root is not None:
        yield from _find_datasets(data_root)


def _find_package(module: str, distribution: str) -> Finding:
    try:
        imported = importlib.import_module(module)
    except Exception as error:
        text = f"{module} cannot be imported ({to_one_line(error)}). Reinstall {distribution}"
        return Finding(module, text, broken=True)
    version = getattr(imported, "__version__", None) or metadata.version(distribution)
    if module == "faiss":
        gpus = getattr(imported, "get_num_gpus", lambda: 0)()
        version += f", {gpus} GPU{'s' * (gpus != 1)} for probe.engine=faiss"
    return Finding(module, version)


def _find_unmet_requirements() -> Iterator[Finding]:
    try:
        requirements = metadata.requires("ssl-bench") or ()
    except metadata.PackageNotFoundError:
        text = "not installed as a package, so the versions of required packages were not checked"
        yield Finding("ssl-bench", text)
        return
    for text in requirements:
        required = Requirement(text)
        if required.marker is not None and not required.marker.evaluate({"extra": ""}):
            continue
        install = f"Run: pip install '{required.name}{required.specifier}'"
        try:
            version = metadata.version(required.name)
        except metadata.PackageNotFoundError:
            text = f"{required.name} is not installed. {install}"
            yield Finding(required.name, text, broken=True)
            continue
        if not required.specifier.contains(version, prereleases=True):
            text = f"{required.name} is {version}, expected {required.specifier}. {install}"
            yield Finding(required.name, text, broken=True)


def _find_processors() -> Iterator[Finding]:
    cores, threads = count_usable_cores(), torch.get_num_threads()
    advice = f" (set OMP_NUM_THREADS={cores} to use one per core)" if threads > cores else ""
    yield Finding("cpu", f"{cores} cores, torch uses {threads} threads{advice}")
    yield Finding("threads", _format_environment(THREAD_VARIABLES) or "no variables set")
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total / 2**30
        advice = " (too small for data workers, set train.num_workers=0)" if size < 1 else ""
        yield Finding("shm", f"{size:.1f} GiB in {shared}{advice}")


def _find_gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("gpu", "none, everything runs on the CPU")
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_properties(index).name
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
        kind = f"CUDA {torch.version.cuda}"
        yield Finding(f"gpu {index}", f"{name}, {free:.0f} of {total:.0f} GiB free, {kind}")


def _find_caches() -> Iterator[Finding]:
    folders = {
        "disk": Path.cwd(),
        "results": Path("results"),
        "runs": Path("runs"),
        "torch cache": Path(torch.hub.get_dir()),
        "hub cache": Path(hub.HF_HUB_CACHE),
    }
    for name, folder in folders.items():
        resolved = resolve_links(folder)
        existing = next(path for path in (resolved, *resolved.parents) if path.is_dir())
        free = shutil.disk_usage(existing).free / 2**30
        advice = "" if os.access(existing, os.W_OK) else f", but {existing} is not writable"
        yield Finding(name, f"{free:.0f} GiB free in {folder}{advice}")
    network = "offline" if offline_variable() else "missing files are downloaded"
    variables = _format_environment(CACHE_VARIABLES) or "default folders"
    yield Finding("caches", f"{variables}, {network}")


def _format_environment(names: tuple[str, ...]) -> str:
    return ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def _find_datasets(text: str) -> Iterator[Finding]:
    # Import it only here, because ssl_bench.request imports encoder libraries that may be broken.
    from ssl_bench.request import parse_data_roots

    roots = parse_data_roots(text, choices("dataset"))
    findings = [
        Finding("data", line)
        for name, root in roots.items()
        if (line := _describe_dataset(name, root))
    ]
    none = f"no dataset in {text} (looked for {', '.join(roots)}), see docs/data.md"
    yield from findings or [Finding("data", none)]


def _describe_dataset(name: str, root: str) -> str | None:
    """Describe the possible uses of the dataset `name` in the folder `root`, and its split sizes.

    For example, the text is "voc2012 in /data: segmentation (1464 train, 1449 val)". Return None if
    the folder does not contain the dataset.
    """
    config = compose_config("data", add_data_root([f"dataset={name}"], root))
    dataset: Dataset = build(config, "dataset")
    if not hasattr(dataset, "root"):
        return None
    roles: list[str] = []
    # Opening the files may fail. For some datasets, only the files show how they can be used.
    with suppress(SslBenchError):
        roles = sorted(dataset.supports & SPLITS_OF_ROLES.keys())
    lines = []
    for role in roles:
        with suppress(SslBenchError):
            splits: list[ImageSet] = [getattr(dataset, split)() for split in SPLITS_OF_ROLES[role]]
            counts = ", ".join(f"{len(images)} {images.split}" for images in splits)
            lines.append(f"{role} ({counts})")
    return f"{name} in {root}: {', '.join(lines)}" if lines else None
