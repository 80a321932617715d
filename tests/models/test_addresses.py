"""Encoders that learned nothing, and what an address says where a file does not."""

from pathlib import Path

import pytest
import torch

from ssl_bench.cli.__main__ import main
from ssl_bench.errors import CheckpointError
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import build_vit, identify_encoder, load_encoder, save_encoder
from ssl_bench.models.loading.addresses import add_baselines
from ssl_bench.models.loading.checkpoint import normalization_metadata
from tests.cli.test_sweep import planned
from tests.support.faults import TINY, encoder_file, fails, photo_folder, probing, records
from tests.support.foreign_weights import timm_model


def test_random_weights_are_those_that_the_run_began_with(tmp_path):
    trained, before = build_vit(TINY, seed=3), build_vit(TINY, seed=0)
    colours = normalization_metadata(((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    save_encoder(tmp_path / "one.safetensors", trained, colours)

    drawn = load_encoder(f"random:{tmp_path}/one.safetensors")

    assert drawn.name == "one (random)"
    assert (drawn.mean, drawn.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    for name, tensor in before.state_dict().items():
        assert torch.equal(drawn.module.state_dict()[name], tensor)
    assert drawn.architecture == load_encoder(f"{tmp_path}/one.safetensors").architecture
    again = identify_encoder(f"random:{tmp_path}/one.safetensors")
    assert again.identity() == drawn.identity()


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


@pytest.mark.parametrize("uri", ["colours:0", "colours:x", "colours:257", "colours:²"])
def test_a_patch_that_cannot_be_is_refused(uri):
    with pytest.raises(CheckpointError) as raised:
        load_encoder(uri)
    assert raised.value.hint == ("--checkpoint", "colours:16")


def test_baselines_follow_the_encoders_once_each():
    uris = ["runs/one", "random:runs/one", "runs/two"]

    assert add_baselines(uris, [16, 8, 16]) == [
        *uris, "random:runs/two", "colours:8", "colours:16",
    ]  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    encoder_file(tmp_path / "encoder.safetensors", seed=1)
    photo_folder(tmp_path / "photos", 2)
    return tmp_path


def test_a_module_of_ones_own_has_no_random_weights_but_those_it_draws(place, capsys):
    Path("mine.py").write_text("from tests.support.own_module import own\n")

    with pytest.raises(CheckpointError, match="initialisation of this encoder is unknown"):
        load_encoder("random:mine.py:own")
    words = ["probe", "--task", "pca", "--checkpoint", "mine.py:own", "--dataset", "folder"]
    assert main([*words, "--data-root", "photos", "--baselines", "--layer", "0"]) == 0
    assert "without random weights of mine.py:own" in capsys.readouterr().err
    assert {record.model for record in records()} == {"mine.own", "colours of 8 x 8 pixels"}


def test_one_flag_probes_them_beside_the_encoder(place, capsys):
    asked = [*probing("pca", "folder", place / "photos"), "--baselines"]

    assert main(asked) == 0

    size = TINY.patch_size
    assert {(record.model, record.layer) for record in records()} == {
        ("encoder", 1), ("encoder (random)", 1), (f"colours of {size} x {size} pixels", 0),
    }  # fmt: skip
    assert [job["pending"] for job in planned(capsys, *asked[1:])["jobs"]] == [0, 0, 0]


def test_a_baseline_without_a_result_is_left_out_unless_requested(place, capsys):
    asked = ["probe", "--task", "conditioning", "--dataset", "folder", "--data-root", "photos"]
    asked += ["probe.num_images=1", "probe.image_size=16", "--layer", "0"]

    assert main([*asked, "--checkpoint", "encoder.safetensors", "--baselines", "--dry-run"]) == 0
    assert "left out: conditioning on folder: " in capsys.readouterr().err

    assert "colours" in fails(capsys, [*asked, "--checkpoint", "colours:16"], 2)


def test_files_with_usual_names_have_the_name_of_their_folder(place, capsys):
    stem = "best"
    for folder, dim in (("one", 64), ("other", 128)):
        (place / folder).mkdir()
        torch.save(timm_model(dim=dim, heads=dim // 64).state_dict(), f"{folder}/{stem}.pth")
    words = ["probe", "--task", "correspondence", "--dataset", "folder", "--data-root", "photos"]
    words += ["--layer", "0", "probe.image_size=32", "probe.num_points=16", "--checkpoint"]

    assert main([*words, f"o*/{stem}.pth"]) == 0

    assert {record.model for record in records()} == {f"one/{stem}", f"other/{stem}"}
    assert main(["compare", f"one/{stem}", f"other/{stem}"]) == 0
    assert main(["report"]) == 0


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


def test_random_weights_keep_the_mean_of_the_address(path):
    found = load_encoder(f"random:mean=.5,std=.2/.3/.4:{path}")

    assert (found.mean, found.std) == ((0.5, 0.5, 0.5), (0.2, 0.3, 0.4))


@pytest.mark.parametrize(
    "address",
    [
        "mean=0.5:x.pth", "mean=0.5,std=0:x.pth", "mean=127,std=60:x.pth", "mean=.5,std=60:x.pth",
        "mean=.1/.2,std=.5:x.pth", "mean=.,std=1:x.pth", "mean=.5,std=.5:",
    ],
)  # fmt: skip
def test_another_form_is_refused_with_an_example(address):
    with pytest.raises(CheckpointError, match=r"mean=0\.5,std=0\.5:FILE"):
        load_encoder(address)


def test_what_says_its_mean_keeps_it(tmp_path):
    encoder_file(tmp_path / "ours.safetensors")

    with pytest.raises(CheckpointError, match=r"states its mean .*\(ssl-bench\)"):
        load_encoder(f"mean=0.5,std=0.5:{tmp_path / 'ours.safetensors'}")
