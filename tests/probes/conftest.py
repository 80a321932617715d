from pathlib import Path

import pytest

from ssl_bench.data.layouts.folder import ImageFolder
from tests.support.coloured_classes import coloured_classes
from tests.support.photographs import noise_photographs


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """Class folders of six colours: 30 pictures to fit to, 12 to score."""
    return coloured_classes(tmp_path_factory.mktemp("colours"))


@pytest.fixture
def photographs(tmp_path: Path) -> ImageFolder:
    """Three pictures of noise."""
    return noise_photographs(tmp_path / "photos")
