"""Mean and deviation that an address says where a file does not."""

from pathlib import Path

import pytest
import torch

from ssl_bench.errors import CheckpointError
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import identify_encoder, load_encoder
from tests.support.faults import encoder_file
from tests.support.foreign_weights import timm_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "mine.pth"
    torch.save(timm_model().state_dict(), path)
    return path


def test_an_address_says_the_mean_of_a_file_that_does_not(path):
    plain = load_encoder(str(path))

    found = load_encoder(f"mean=0.5,std=0.25:{path}")

    assert (found.mean, found.std) == ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    assert found.sha256 == plain.sha256
    assert found.identity() != plain.identity()
    assert identify_encoder(found.uri).identity() == found.identity()
    # Only what comes in is different.
    images = torch.rand(2, 3, 64, 64)
    scaled = (images - 0.5) / 0.25 * torch.tensor(plain.std).view(3, 1, 1)
    same = scaled + torch.tensor(plain.mean).view(3, 1, 1)
    torch.testing.assert_close(
        FeatureExtractor(found, layers=[0])(images)[0]["token"],
        FeatureExtractor(plain, layers=[0])(same)[0]["token"],
    )


def test_colours_may_differ_and_random_weights_keep_them(path):
    found = load_encoder(f"random:mean=.5,std=.2/.3/.4:{path}")

    assert (found.mean, found.std) == ((0.5, 0.5, 0.5), (0.2, 0.3, 0.4))


@pytest.mark.parametrize(
    "address",
    [
        "mean=0.5:x.pth",
        "mean=0.5,std=0:x.pth",
        "mean=127,std=60:x.pth",
        "mean=.1/.2,std=.5:x.pth",
        "mean=.,std=1:x.pth",
        "mean=.5,std=.5:",
    ],
)
def test_another_form_is_refused_with_an_example(address):
    with pytest.raises(CheckpointError, match=r"such as mean=0\.5,std=0\.5:my_vit\.pth"):
        load_encoder(address)


def test_what_says_its_mean_keeps_it(tmp_path):
    encoder_file(tmp_path / "ours.safetensors")

    with pytest.raises(CheckpointError, match=r"of its own \(ssl-bench\)"):
        load_encoder(f"mean=0.5,std=0.5:{tmp_path / 'ours.safetensors'}")
