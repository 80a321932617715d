from pathlib import Path

import pytest

from tests.support.coloured_classes import coloured_classes


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """Class folders of six colours: 30 pictures to fit to, 12 to score."""
    return coloured_classes(tmp_path_factory.mktemp("colours"))
