"""Encoders that learned nothing stand beside those that did."""

import pytest
import torch

from ssl_bench.cli.__main__ import main
from ssl_bench.errors import CheckpointError
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import build_vit, identify_encoder, load_encoder, save_encoder
from ssl_bench.models.loading.addresses import with_baselines
from tests.cli.test_sweep import planned
from tests.support.faults import TINY, encoder_file, fails, photo_folder, probing, records


def test_random_weights_are_those_that_the_run_began_with(tmp_path):
    trained, before = build_vit(TINY, seed=3), build_vit(TINY, seed=0)
    save_encoder(tmp_path / "one.safetensors", trained, {"mean": "[0.1, 0.2, 0.3]"})

    drawn = load_encoder(f"random:{tmp_path}/one.safetensors")

    assert drawn.name == "one (random)"
    assert drawn.mean == (0.1, 0.2, 0.3)
    for name, tensor in before.state_dict().items():
        assert torch.equal(drawn.module.state_dict()[name], tensor)
    assert drawn.architecture == load_encoder(f"{tmp_path}/one.safetensors").architecture
    again = identify_encoder(f"random:{tmp_path}/one.safetensors")
    assert again.identity() == drawn.identity()


def test_random_weights_of_timm_are_those_of_its_bare_name():
    plain = load_encoder("timm:vit_tiny_patch16_224")

    drawn = load_encoder("random:timm:vit_tiny_patch16_224")

    assert drawn.identity() == plain.identity()
    assert drawn.name == plain.name


def test_colours_are_the_pixels_of_each_patch_in_every_facet():
    encoder = load_encoder("colours:2")
    images = torch.rand(2, 3, 4, 6)
    facets = ("token", "token_normed", "cls", "query", "key", "value")
    found = FeatureExtractor(encoder, layers=(0,), facets=facets)(images)[0]

    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (encoder.mean, encoder.std))
    second = ((images - mean) / std)[1, :, 2:4, 4:6].flatten()
    for facet in ("token", "token_normed", "query", "key", "value"):
        assert found[facet].shape == (2, 2, 3, 12)
        torch.testing.assert_close(found[facet][1, 1, 2], second)
    torch.testing.assert_close(found["cls"], found["token"].flatten(1, 2).mean(1))


@pytest.mark.parametrize("uri", ["colours:0", "colours:x", "colours:", "colours:1000", "colours:²"])
def test_a_patch_that_cannot_be_is_refused(uri):
    with pytest.raises(CheckpointError, match="colours:16"):
        load_encoder(uri)


def test_baselines_follow_the_encoders_once_each():
    uris = ["runs/one", "random:runs/one", "runs/two"]

    assert with_baselines(uris, [16, 8, 16]) == [
        *uris, "random:runs/two", "colours:8", "colours:16",
    ]  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    encoder_file(tmp_path / "encoder.safetensors", seed=1)
    photo_folder(tmp_path / "photos", 2)
    return tmp_path


def test_one_flag_probes_them_beside_the_encoder(place, capsys):
    asked = [*probing("pca", "folder", place / "photos"), "--baselines"]

    assert main(asked) == 0

    size = TINY.patch_size
    assert {(record.model, record.layer) for record in records()} == {
        ("encoder", 1), ("encoder (random)", 1), (f"colours of {size} x {size} pixels", 0),
    }  # fmt: skip
    assert [job["pending"] for job in planned(capsys, *asked[1:])["jobs"]] == [0, 0, 0]


def test_a_baseline_that_has_no_answer_is_left_out_and_an_asked_one_ends_the_command(place, capsys):
    asked = ["probe", "--task", "conditioning", "--dataset", "folder", "--data-root", "photos"]
    asked += ["probe.num_images=1", "probe.image_size=16", "--layer", "0"]

    assert main([*asked, "--checkpoint", "encoder.safetensors", "--baselines"]) == 0
    assert "left out: conditioning on folder: " in capsys.readouterr().err

    assert "colours" in fails(capsys, [*asked, "--checkpoint", "colours:16"], 2)
