"""Define fixtures for the tests of tables."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore


@pytest.fixture
def store(tmp_path) -> ResultStore:
    return ResultStore(tmp_path)


@pytest.fixture
def cli(store, capsys) -> Callable[..., Any]:
    def run(*words: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert main([*words, "--out", str(store.root)]) == code
        return capsys.readouterr()

    return run


@pytest.fixture
def cli_json(cli) -> Callable[..., list[dict[str, Any]]]:
    return lambda *words: json.loads(cli(*words, "--format", "json").out)
