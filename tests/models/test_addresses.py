"""Addresses of baselines, normalisations, demo encoders and weights of torch hub."""

import hashlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import huggingface_hub
import pytest
import torch

from ssl_bench.cli.__main__ import main
from ssl_bench.errors import CheckpointError
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import ViTConfig, build_vit, identify_encoder, load_encoder, save_encoder
from ssl_bench.models.loading import addresses, hub
from ssl_bench.models.loading.addresses import NAMES, add_baselines
from ssl_bench.models.loading.checkpoint import normalization_metadata
from tests.benchmarks.evidence.rows import demo_of
from tests.benchmarks.generated import LEDGER, ROOT
from tests.cli.test_sweep import planned
from tests.support.faults import TINY, encoder_file, expect_error, photo_folder, probing, records
from tests.support.foreign_weights import assert_same_weights, normalise, timm_model


def test_random_weights_keep_the_mean_of_the_checkpoint(tmp_path):
    colours = normalization_metadata(((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    save_encoder(tmp_path / "one.safetensors", build_vit(TINY, seed=3), colours)

    drawn = load_encoder(f"random:{tmp_path}/one.safetensors")

    assert drawn.name == "one (random)"
    assert (drawn.mean, drawn.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert_same_weights(drawn.module, build_vit(TINY, seed=0).state_dict())


def test_colours_are_the_pixels_of_each_patch_in_every_facet():
    encoder = load_encoder("colours:2")
    images = torch.rand(2, 3, 4, 6)
    facets = ("token", "token_normed", "cls", "query", "key", "value")
    found = FeatureExtractor(encoder, layers=(0,), facets=facets)(images)[0]

    second = normalise(encoder, images)[1, :, 2:4, 4:6].flatten()
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
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    encoder_file(tmp_path / "encoder.safetensors", seed=1)
    photo_folder(tmp_path / "photos", 2)
    return tmp_path


def test_a_module_of_ones_own_has_no_random_weights_but_those_it_draws(workdir, capsys):
    Path("mine.py").write_text("from tests.support.own_module import own\n")

    with pytest.raises(CheckpointError, match="initialisation of this encoder is unknown"):
        load_encoder("random:mine.py:own")
    words = ["probe", "--task", "pca", "--checkpoint", "mine.py:own", "--dataset", "folder"]
    assert main([*words, "--data-root", "photos", "--baselines", "--layer", "0"]) == 0
    assert "without random weights of mine.py:own" in capsys.readouterr().err
    assert {record.model for record in records()} == {"mine.own", "colours of 8 x 8 pixels"}


def test_one_flag_probes_them_beside_the_encoder(workdir, capsys):
    asked = [*probing("pca", "folder", workdir / "photos"), "--baselines"]

    assert main(asked) == 0

    size = TINY.patch_size
    assert {(record.model, record.layer) for record in records()} == {
        ("encoder", 1), ("encoder (random)", 1), (f"colours of {size} x {size} pixels", 0),
    }  # fmt: skip
    assert [job["pending"] for job in planned(capsys, *asked[1:])["jobs"]] == [0, 0, 0]


def test_a_baseline_without_a_result_is_left_out_unless_requested(workdir, capsys):
    asked = ["probe", "--task", "conditioning", "--dataset", "folder", "--data-root", "photos"]
    asked += ["probe.num_images=1", "probe.image_size=16", "--layer", "0"]

    assert main([*asked, "--checkpoint", "encoder.safetensors", "--baselines", "--dry-run"]) == 0
    assert "left out: conditioning on folder: " in capsys.readouterr().err

    assert "colours" in expect_error(capsys, [*asked, "--checkpoint", "colours:16"], 2)


def test_files_with_usual_names_have_the_name_of_their_folder(workdir, capsys):
    stem = "best"
    for folder, dim in (("one", 64), ("other", 128)):
        (workdir / folder).mkdir()
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


@pytest.mark.parametrize("ask", [load_encoder, identify_encoder])
def test_an_encoder_that_is_not_there_is_refused_in_one_line(tmp_path, monkeypatch, ask):
    with pytest.raises(CheckpointError, match="unknown demo encoder 'demo:x'"):
        ask("demo:x")
    monkeypatch.setattr(addresses, "PACKAGE", tmp_path / "package")
    with pytest.raises(CheckpointError, match="demo:skip is missing") as raised:
        ask("demo:skip")
    assert "\n" not in str(raised.value)


def test_those_that_come_with_this_suite_are_those_of_the_ledger():
    """The files in results/demo are those that the last runs wrote."""
    runs = json.loads((ROOT / LEDGER).read_text())
    known = {name: runs[demo_of(name)] for name in NAMES}
    files = {path.name for path in addresses.demo_folder().glob("*.safetensors")}
    assert files == {f"demo_{name}.safetensors" for name in known}
    for name, run in known.items():
        encoder = load_encoder(f"demo:{name}")
        assert encoder.sha256 == identify_encoder(f"demo:{name}").sha256 == run["sha256"]
        assert encoder.name == f"demo_{name}"
        assert load_encoder(f"random:demo:{name}").sha256 != encoder.sha256


@pytest.fixture
def empty_caches(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    return tmp_path / "hub" / "checkpoints"


@pytest.fixture
def published(server, monkeypatch, tmp_path) -> Callable[[str], bytes]:
    """Return a function that serves DINO weights under a file name and returns their bytes."""
    config = ViTConfig(image_size=32, patch_size=8, dim=128, depth=2, num_heads=2)
    torch.save(build_vit(config, seed=0).state_dict(), tmp_path / "weights.pth")

    def publish(name: str) -> bytes:
        server.content = (tmp_path / "weights.pth").read_bytes()
        address = {"dino_vits16": server.url.replace("file.bin", name)}
        monkeypatch.setattr(hub, "HUB_WEIGHTS", {"facebookresearch/dino": address})
        return server.content

    return publish


DINO = "torchhub:facebookresearch/dino:dino_vits16"


def refuses() -> str:
    with pytest.raises(CheckpointError) as raised:
        load_encoder(DINO)
    assert "demo:skip" in raised.value.hint
    return str(raised.value)


@pytest.mark.parametrize(
    ("variable", "uri"),
    [
        ("HF_HUB_OFFLINE", DINO), ("TRANSFORMERS_OFFLINE", "hf-hub:org/name"),
        ("HF_HUB_OFFLINE", "timm:vit_small_patch16_224.dino"),
    ],
)  # fmt: skip
def test_offline_no_socket_is_opened_and_no_name_resolved(
    uri, variable, empty_caches, monkeypatch, capsys
):
    def refuse(*_: object) -> NoReturn:
        pytest.fail("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv(variable, "1")
    line = expect_error(capsys, ["models", uri], 4)
    assert variable in line
    assert "Run the command again" not in line
    assert "local-dir:" in line


@pytest.mark.parametrize("kind", ["text/html", "application/octet-stream"])
def test_a_page_in_place_of_weights_is_refused(kind, empty_caches, server, published):
    published("small.pth")
    server.content = b"<html>Please log in</html>"
    server.headers = {"Content-Type": kind}
    said = {"text/html": "a web page"}.get(kind, "was not written by torch.save")
    assert said in refuses()
    assert not (empty_caches / "small.pth").exists()


def test_the_digest_in_the_name_of_weights_is_held_against_them(empty_caches, server, published):
    content = published("small-0123abcd.pth")
    assert "its name states 0123abcd" in refuses()
    digest = hashlib.sha256(content).hexdigest()
    name = f"small-{digest[:8]}.pth"
    published(name)
    assert load_encoder(DINO).sha256 == digest

    kept = empty_caches / name
    kept.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert f"its name states {digest[:8]}" in refuses()
