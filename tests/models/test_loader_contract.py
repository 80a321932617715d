"""Test that every installed encoder loader can load an example checkpoint."""

import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from ssl_bench.cli.__main__ import main
from ssl_bench.composition.choices import entry_points
from ssl_bench.errors import CheckpointError
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import Encoder, build_vit, identify_encoder, load_encoder
from ssl_bench.models.loading import load
from ssl_bench.models.loading.load import LOADERS, list_addresses
from tests.support.faults import DINO_LIKE, encoder_file

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extending.md").read_text()
((SOURCE,),) = [
    re.findall(r"^`toyvit/toyvit\.py`:\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
]
((SCHEME, TARGET),) = re.findall(
    r'^\[project\.entry-points\."ssl_bench\.encoder"\]\n(\S+) = "(.*)"$', PAGE, re.MULTILINE
)
((COMMAND,),) = [re.findall(rf"^ssl-bench (probe .*{SCHEME}:.*)$", PAGE, re.MULTILINE)]
(GUIDE,) = re.findall(r'^load\.example = "(.*)"$', SOURCE, re.MULTILINE)
IS_INSTALLED = SCHEME in entry_points("encoder")
of_page = pytest.mark.skipif(IS_INSTALLED, reason=f"an installed package has the scheme {SCHEME}")
ADDRESSES = list_addresses()
EXAMPLES = [*(a.example for a in ADDRESSES if a.example), *([] if IS_INSTALLED else [GUIDE])]
NO_EXAMPLE = pytest.mark.skip(reason="this loader has no attribute `example`")
URIS = [*EXAMPLES, *(pytest.param(a.form, marks=NO_EXAMPLE) for a in ADDRESSES if not a.example)]
SCHEMES = list(dict.fromkeys([*LOADERS, *entry_points("encoder"), SCHEME]))
# Paths of encoders that do not exist, and the beginnings of addresses that a path can follow.
MISSING = ["nothing", "nothing@200", "runs/no@200", "runs/skip@last", "runs/skip@300", "no.pth@1"]
PREFIXES = ["", "random:", "mean=0.5,std=0.5:", "timm:vit_tiny_patch16_224@"]
WITHOUT_NETWORK = r"(?!hf-hub|torchhub|local-dir|timm:.*\.dino|timm:.*@)"
MODULE = """
from ssl_bench.models import build_vit
from tests.support.faults import DINO_LIKE

def encoder():
    return build_vit(DINO_LIKE, seed=0)
"""


@pytest.fixture(scope="module", autouse=True)
def workdir(tmp_path_factory) -> Iterator[Path]:
    """Create example checkpoints in a new working directory."""
    folder, before = tmp_path_factory.mktemp("contract"), Path.cwd()
    for name in ("last", "epoch0200"):
        encoder_file(folder / f"runs/skip/{name}.safetensors")
    weights = build_vit(DINO_LIKE, seed=0).state_dict()
    for name in ("dinov2_vits14_pretrain", "my"):
        torch.save(weights, folder / f"{name}.pth")
    (folder / "my_model.py").write_text(MODULE)
    information = folder / "installed/pages-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: pages\nVersion: 1.0\n")
    points = ["[ssl_bench.encoder]", "broken = broken_loader:load", "other = broken_loader:other"]
    points += ["missing = no_such_module:load", "renamed = broken_loader:old"]
    if not IS_INSTALLED:
        # An installed package of the user may have the module name of the page.
        points.append(f"{SCHEME} = loader_of_page:{TARGET.partition(':')[2]}")
        (folder / "installed/loader_of_page.py").write_text(SOURCE)
    (information / "entry_points.txt").write_text("\n".join(points))
    (folder / "installed/broken_loader.py").write_text(
        "def load(uri):\n    return 1 / 0\n\ndef other(uri):\n    return uri\n"
    )
    os.chdir(folder)
    sys.path.insert(0, str(folder / "installed"))
    yield folder
    sys.path.remove(str(folder / "installed"))
    os.chdir(before)
    load_or_error.cache_clear()


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("ssl_bench.network.open_url", refuse)
    monkeypatch.setattr("ssl_bench.models.loading.hub.open_url", refuse)
    monkeypatch.setattr("urllib.request.urlopen", refuse)


def refuse(*_words: object, **_options: object) -> None:
    from ssl_bench.network import DownloadError

    raise DownloadError("there is no network")


@cache
def load_or_error(uri: str) -> Encoder | CheckpointError:
    try:
        return load_encoder(uri)
    except CheckpointError as error:
        return error


def encoder_of(uri: str) -> Encoder:
    encoder = load_or_error(uri)
    if isinstance(encoder, CheckpointError):
        if re.match(WITHOUT_NETWORK, uri):
            raise encoder
        assert "\n" not in str(encoder)
        pytest.skip("needs the network or a file that is not there")
    return encoder


def test_every_loader_of_this_package_has_an_example():
    assert {uri.partition(":")[0] for uri in EXAMPLES} >= LOADERS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("uri", URIS)
def test_an_address_always_gives_the_same_encoder(uri):
    first, state = encoder_of(uri), torch.get_rng_state()
    second, stated = load_encoder(uri), identify_encoder(uri)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.uri == second.uri == uri
    assert first.identity() == second.identity() == stated.identity()
    for name in ("name", "depth", "patch_size", "native_size", "has_cls", "is_staged"):
        assert getattr(stated, name) == getattr(second, name)


@pytest.mark.parametrize("uri", URIS)
def test_every_block_gives_finite_tokens_on_its_grid(uri):
    encoder = encoder_of(uri)
    assert re.fullmatch(r"[0-9a-f]{64}", encoder.sha256)
    assert all(0 <= value <= 1 for value in encoder.mean)
    assert all(0 < value <= 1 for value in encoder.std)
    (height, width), layers = encoder.native_size, range(encoder.depth)
    facets = ("token", "cls") if encoder.has_cls else ("token",)
    images = torch.rand(1, 3, height, width)
    features = FeatureExtractor(encoder, layers=layers, facets=facets)(images)

    for layer in layers:
        stride, dim = encoder.stride(layer), encoder.width(layer)
        expected = (1, height // stride, width // stride, dim)
        assert features[layer]["token"].shape == expected
        assert features[layer]["token"].isfinite().all()


@pytest.mark.parametrize(
    "uri",
    [
        *(f"{scheme}:nothing/of this name" for scheme in SCHEMES),
        *(f"{prefix}{path}" for prefix in PREFIXES for path in MISSING),
        *("runs/*@300", "nothing/*", "my_model.py:nothing", "nothing.py:encoder"),
        *("hf-hub:nothing/nothing@main", "local-dir:nothing@200", "timm:vit_tiny_patch16_224."),
    ],
)
def test_an_unknown_address_is_refused_in_one_line(uri, capsys):
    code = main(["models", uri])
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 4, line
    assert "Traceback" not in line


@pytest.mark.parametrize(
    "uri",
    [
        "{}",
        "{}@last",
        "mean=0.5,std=0.5:{}",
        "random:{}",
        "local-dir:{}",
        "timm:vit_tiny_patch16_224@{}",
        "{}/*",
        "{}.py:encoder",
    ],
)
def test_every_path_in_an_address_may_begin_with_the_home_folder(uri, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(Path.cwd()))
    assert main(["models", uri.format("~/nothing")]) == 4
    assert str(Path.cwd() / "nothing") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("uri", "code", "message"),
    [
        ("broken:x", 4, "line 2"),
        ("other:x", 4, "returned a str"),
        ("missing:x", 5, "pip install no_such_module"),
        ("renamed:x", 5, "'broken_loader' has no attribute 'old'"),
    ],
)
def test_failing_loaders_of_packages_are_reported_in_one_line(uri, code, message, capsys):
    assert main(["models", uri]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert uri.partition(":")[0] in line


@of_page
def test_schemes_of_packages_are_listed_with_their_examples(capsys):
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[-1] for line in lines if ":ADDRESS" in line}
    assert rows[f"{SCHEME}:ADDRESS"] == GUIDE
    assert list_addresses()[: len(load.ADDRESSES)] == [*load.ADDRESSES]
    assert rows["other:ADDRESS"] == "broken_loader:other"
    assert rows["missing:ADDRESS"] == "no_such_module:load"


@of_page
def test_encoders_of_packages_are_probed_without_a_random_baseline(capsys):
    words = [*COMMAND.split(), "--baselines", "dataset.num_train=6", "dataset.num_val=6"]
    assert main([*words, "--out", "out"]) == 0
    assert f"no random baseline for {GUIDE}" in capsys.readouterr().err
