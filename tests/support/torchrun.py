"""Set the environment variables that torchrun sets."""

import pytest


def set_torchrun_env(monkeypatch: pytest.MonkeyPatch, count: int, **more: str) -> None:
    defaults = {"RANK": "0", "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**defaults, "MASTER_PORT": "29500", **more}.items():
        monkeypatch.setenv(name, value)
