"""Test the addresses that select an encoder, such as `timm:NAME`."""

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
from ssl_bench.models.loading.addresses import DEMO_NAMES, add_baselines, expand_addresses
from ssl_bench.models.loading.checkpoint import normalization_metadata
from tests.benchmarks.evidence.rows import demo_of
from tests.benchmarks.generated import EVIDENCE_FILE, ROOT
from tests.cli.test_sweep import planned
from tests.support.faults import TINY, encoder_file, expect_error, make_probe_args, records
from tests.support.foreign_weights import assert_same_weights, normalise, timm_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a weights file that does not state how images are normalised."""
    path = tmp_path_factory.mktemp("weights") / "mine.pth"
    torch.save(timm_model().state_dict(), path)
    return path


def test_random_weights_keep_the_stated_mean(tmp_path, path):
    colours = normalization_metadata(((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    save_encoder(tmp_path / "one.safetensors", build_vit(TINY, seed=3), colours)
    random = load_encoder(f"random:{tmp_path}/one.safetensors")
    assert random.name == "one (random)"
    assert (random.mean, random.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert_same_weights(random.module, build_vit(TINY, seed=0).state_dict())
    random = load_encoder(f"random:mean=.5,std=.2/.3/.4:{path}")
    assert (random.mean, random.std) == ((0.5, 0.5, 0.5), (0.2, 0.3, 0.4))


def test_colour_features_are_patch_pixels_in_every_facet():
    encoder = load_encoder("colours:2")
    images = torch.rand(2, 3, 4, 6)
    facets = ("token", "token_normed", "query", "key", "value", "cls")
    features = FeatureExtractor(encoder, layers=(0,), facets=facets)(images)[0]

    pixels = normalise(encoder, images)[1, :, 2:4, 4:6].flatten()
    for facet in facets[:-1]:
        assert features[facet].shape == (2, 2, 3, 12)
        torch.testing.assert_close(features[facet][1, 1, 2], pixels)
    torch.testing.assert_close(features["cls"], features["token"].flatten(1, 2).mean(1))
    # The native size is the multiple of the patch size that is nearest to 224.
    sides = {size: load_encoder(f"colours:{size}").native_size for size in (15, 16, 100, 256)}
    assert sides == {15: (225, 225), 16: (224, 224), 100: (200, 200), 256: (256, 256)}
    for size in ("0", "x", "257", "²"):
        with pytest.raises(CheckpointError) as raised:
            load_encoder(f"colours:{size}")
        assert raised.value.hint == ("--checkpoint", "colours:16")


def test_baselines_follow_the_encoders_without_repetition():
    uris = ["runs/one", "random:runs/one", "runs/two"]
    expected = [*uris, "random:runs/two", "colours:8", "colours:16"]
    assert add_baselines(uris, [16, 8, 16]) == expected


@pytest.fixture
def workdir(workdir) -> Path:
    # The weights differ from the random ones, which have seed 0.
    encoder_file(workdir / "encoder.safetensors", seed=1)
    return workdir


def test_a_user_module_has_no_random_baseline(workdir, capsys):
    Path("mine.py").write_text("from tests.support.own_module import own\n")
    with pytest.raises(CheckpointError, match="initialisation of this encoder is unknown"):
        load_encoder("random:mine.py:own")
    words = ["probe", "--task", "pca", "--checkpoint", "mine.py:own", "--dataset", "folder"]
    assert main([*words, "--data-root", "photos", "--baselines", "--layer", "0"]) == 0
    assert "no random baseline for mine.py:own" in capsys.readouterr().err
    assert {record.model for record in records()} == {"mine.own", "colours of 8 x 8 pixels"}


def test_baselines_are_probed_with_one_flag(workdir, capsys):
    words = [*make_probe_args("pca", "folder", workdir / "photos"), "--baselines"]
    assert main(words) == 0
    size = TINY.patch_size
    assert {(record.model, record.layer) for record in records()} == {
        ("encoder", 1), ("encoder (random)", 1), (f"colours of {size} x {size} pixels", 0),
    }  # fmt: skip
    assert [job["pending"] for job in planned(capsys, *words[1:])["jobs"]] == [0, 0, 0]


def test_probes_omit_baselines_they_cannot_evaluate_unless_requested(workdir, capsys):
    words = ["probe", "--task", "conditioning", "--dataset", "folder", "--data-root", "photos"]
    words += ["probe.num_images=1", "probe.image_size=16", "--layer", "0"]
    assert main([*words, "--checkpoint", "encoder.safetensors", "--baselines", "--dry-run"]) == 0
    assert "left out: conditioning on folder: " in capsys.readouterr().err
    assert "colours" in expect_error(capsys, [*words, "--checkpoint", "colours:16"], 2)


@pytest.mark.slow
def test_encoders_with_a_common_file_name_have_their_folder_name(workdir, capsys):
    for folder, dim in (("one", 64), ("other", 128)):
        (workdir / folder).mkdir()
        torch.save(timm_model(dim=dim, heads=dim // 64).state_dict(), f"{folder}/best.pth")
    words = ["probe", "--task", "correspondence", "--dataset", "folder", "--data-root", "photos"]
    words += ["--layer", "0", "probe.image_size=32", "probe.num_points=16", "--checkpoint"]
    assert main([*words, "o*/best.pth"]) == 0
    assert {record.model for record in records()} == {"one/best", "other/best"}
    assert main(["compare", "one/best", "other/best"]) == 0
    assert main(["report"]) == 0


def test_an_address_can_state_the_mean_of_a_file(path):
    plain = load_encoder(str(path))
    encoder = load_encoder(f"mean=0.5,std=0.25:{path}")

    assert (encoder.mean, encoder.std) == ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    assert encoder.sha256 == plain.sha256
    assert encoder.identity() != plain.identity()
    assert identify_encoder(encoder.uri).identity() == encoder.identity()
    # Only the normalisation of the images differs.
    images = torch.rand(2, 3, 64, 64)
    scaled = (images - 0.5) / 0.25 * torch.tensor(plain.std).view(3, 1, 1)
    same = scaled + torch.tensor(plain.mean).view(3, 1, 1)
    torch.testing.assert_close(
        FeatureExtractor(encoder, layers=[0])(images)[0]["token"],
        FeatureExtractor(plain, layers=[0])(same)[0]["token"],
    )


@pytest.mark.parametrize(
    "address",
    [
        "mean=0.5:x.pth", "mean=0.5,std=0:x.pth", "mean=127,std=60:x.pth", "mean=.5,std=60:x.pth",
        "mean=.1/.2,std=.5:x.pth", "mean=.,std=1:x.pth", "mean=.5,std=.5:",
        "mean=.5,std=.5/.5/5:x.pth",
    ],
)  # fmt: skip
def test_a_malformed_mean_is_refused_with_an_example(address):
    with pytest.raises(CheckpointError, match=r"mean=0\.5,std=0\.5:FILE"):
        load_encoder(address)


def test_a_misspelled_file_is_suggested_with_its_folder(tmp_path):
    path = encoder_file(tmp_path / "skip" / "encoder.safetensors")

    with pytest.raises(CheckpointError) as caught:
        load_encoder(str(path.with_name("encodr.safetensors")))

    assert caught.value.hint == ("--checkpoint", str(path))


def test_a_pattern_matches_weights_files_of_every_format_and_no_others(tmp_path):
    names = ("a.bin", "b.onnx", "c.pt", "d.pth", "e.safetensors")
    for name in (*names, "notes.txt", "e.safetensors.sha256", "f.py"):
        (tmp_path / name).touch()
    assert expand_addresses([f"{tmp_path}/*"]) == [str(tmp_path / name) for name in names]


def test_an_encoder_has_the_name_of_the_folder_to_which_a_link_leads(tmp_path, monkeypatch):
    encoder_file(tmp_path / "skip/last.safetensors")
    (tmp_path / "latest").symlink_to("skip")
    monkeypatch.chdir(tmp_path / "skip")
    for address in (".", "../latest", "last.safetensors"):
        assert load_encoder(address).name == identify_encoder(address).name == "skip"


def test_a_mean_that_the_file_states_cannot_be_replaced(tmp_path):
    encoder_file(tmp_path / "ours.safetensors")
    with pytest.raises(CheckpointError, match=r"mean .*\(ssl-bench\)"):
        load_encoder(f"mean=0.5,std=0.5:{tmp_path / 'ours.safetensors'}")


@pytest.mark.parametrize("load", [load_encoder, identify_encoder])
def test_a_missing_demo_encoder_is_refused_in_one_line(tmp_path, monkeypatch, load):
    with pytest.raises(CheckpointError, match="unknown demo encoder 'demo:x'"):
        load("demo:x")
    monkeypatch.setattr(addresses, "PACKAGE_FOLDER", tmp_path / "package")
    with pytest.raises(CheckpointError, match="demo:skip is missing") as raised:
        load("demo:skip")
    assert "\n" not in str(raised.value)


def test_the_demo_encoders_are_those_of_the_last_recorded_runs():
    runs = json.loads((ROOT / EVIDENCE_FILE).read_text())
    known = {name: runs[demo_of(name)] for name in DEMO_NAMES}
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
    config = ViTConfig(image_size=32, patch_size=8, dim=128, depth=2, num_heads=2)
    torch.save(build_vit(config, seed=0).state_dict(), tmp_path / "weights.pth")

    def publish(name: str) -> bytes:
        server.content = (tmp_path / "weights.pth").read_bytes()
        address = {"dino_vits16": server.url.replace("file.bin", name)}
        monkeypatch.setattr(hub, "HUB_WEIGHTS", {"facebookresearch/dino": address})
        return server.content

    return publish


DINO = "torchhub:facebookresearch/dino:dino_vits16"


def refusal() -> str:
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
def test_offline_mode_uses_no_network(uri, variable, empty_caches, monkeypatch, capsys):
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
def test_a_download_that_is_a_web_page_is_refused(kind, empty_caches, server, published):
    published("small.pth")
    server.content = b"<html>Please log in</html>"
    server.headers = {"Content-Type": kind}
    reason = "a web page" if kind == "text/html" else "was not written by torch.save"
    assert reason in refusal()
    assert not (empty_caches / "small.pth").exists()


def test_downloaded_weights_must_match_the_digest_in_their_name(empty_caches, server, published):
    content = published("small-0123abcd.pth")
    assert "its name states 0123abcd" in refusal()
    digest = hashlib.sha256(content).hexdigest()
    name = f"small-{digest[:8]}.pth"
    published(name)
    assert load_encoder(DINO).sha256 == digest
    kept = empty_caches / name
    kept.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert f"its name states {digest[:8]}" in refusal()
