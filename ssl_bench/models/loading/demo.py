"""Demonstration encoders, which come with this suite: `demo:skip` and `demo:skipless`."""

from pathlib import Path

from ssl_bench.errors import CheckpointError
from ssl_bench.system.paths import PACKAGE

DEMO = "demo"
NAMES = ("skip", "skipless")


def demo_folder() -> Path:
    """Where they lie: inside `ssl_bench` in a wheel, in results/ of a checkout."""
    inside = PACKAGE / DEMO
    return inside if inside.is_dir() else PACKAGE.parent / "results" / DEMO


def demo_file(uri: str) -> Path:
    """The file of weights that `demo:NAME` names.

    Raises:
        CheckpointError: there is no encoder of that name, or none was trained yet.
    """
    name = uri.removeprefix(f"{DEMO}:")
    if name not in NAMES:
        known = " or ".join(f"{DEMO}:{one}" for one in NAMES)
        raise CheckpointError(f"expected {known}, got {uri!r}")
    path = demo_folder() / file_name(name)
    if not path.is_file():
        raise CheckpointError(
            f"{uri} does not come with this version: no {path.name} in {path.parent}; train an "
            "encoder with `ssl-bench pretrain`, or give a checkpoint"
        )
    return path


def file_name(name: str) -> str:
    """Of the weights; card, configuration and log lie beside them under the same stem."""
    return f"demo_{name}.safetensors"
