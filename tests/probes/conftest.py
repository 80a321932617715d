from pathlib import Path

import pytest

from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.models import ConvMixerConfig, Encoder, build_encoder, encoder_from_model
from tests.support.coloured_classes import coloured_classes
from tests.support.photographs import noise_photographs


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """Create a classification dataset with images of six colours."""
    return coloured_classes(tmp_path_factory.mktemp("colours"))


@pytest.fixture
def photographs(tmp_path: Path) -> ImageFolder:
    return noise_photographs(tmp_path / "photos")


@pytest.fixture
def encoder_without_cls() -> Encoder:
    config = ConvMixerConfig(image_size=32, patch_size=8, dim=12, depth=2, kernel_size=3)
    return encoder_from_model(build_encoder(config, seed=0), name="convmixer")
