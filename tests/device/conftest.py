"""Define fixtures for the tests that need a GPU or a simulated GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults import data_of_every_role, encoder_file, unchecked_types


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return data_of_every_role(tmp_path_factory.mktemp("walk"))


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    encoder_file(tmp_path / "encoder.safetensors")
    # The tests on the CPU already check types and shapes.
    with unchecked_types():
        yield tmp_path
