import os

import pytest
import torch

from pretrain.step import Trainer, deterministic
from ssl_bench.errors import ConfigurationError
from tests.support.faults import fails, photo_folder, pretraining

NO_FORM = (
    "upsample_bicubic2d_backward_out_cuda does not have a deterministic implementation, but you "
    "set 'torch.use_deterministic_algorithms(True)'. You can turn off determinism"
)


@pytest.fixture(autouse=True)
def workspace(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


def test_what_cublas_and_torch_need_is_set_as_long_as_the_run_lasts(monkeypatch):
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with deterministic(True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert not torch.are_deterministic_algorithms_enabled()


def test_unasked_nothing_is_set():
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_other_errors_pass_as_they_are():
    with pytest.raises(RuntimeError, match="shapes"), deterministic(True):
        raise RuntimeError("shapes do not fit")
    assert not torch.are_deterministic_algorithms_enabled()
    refused = pytest.raises(ConfigurationError, match="upsample_bicubic2d_backward_out_cuda has no")
    with refused, deterministic(True):
        raise RuntimeError(NO_FORM)


def test_a_run_is_deterministic_from_its_first_step_and_refuses_what_cannot_be(
    tmp_path, capsys, monkeypatch
):
    seen = []
    usual = Trainer.take_step

    def step(self, number, parts):
        seen.append(torch.are_deterministic_algorithms_enabled())
        if number == 1:
            raise RuntimeError(NO_FORM)
        return usual(self, number, parts)

    monkeypatch.setattr(Trainer, "take_step", step)
    photos = photo_folder(tmp_path / "photos")
    run = [*pretraining(photos, str(tmp_path / "run")), "train.max_steps=2"]

    said = fails(capsys, [*run, "train.deterministic=true"], 2)

    assert seen == [True, True]
    assert said.startswith("ssl-bench: train.deterministic=true: upsample_bicubic2d")
