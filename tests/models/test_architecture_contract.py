"""Test every encoder architecture, including architectures from other packages."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ssl_bench.cli.__main__ import main
from ssl_bench.composition.compose import import_component
from ssl_bench.errors import BrokenFileError, ConfigurationError
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import (
    EncoderConfig,
    ViTConfig,
    build_encoder,
    build_vit,
    encoder_from_model,
    identify_encoder,
    load_encoder,
    save_encoder,
)
from ssl_bench.models.config import config_from_dict, find_registered, registered_names
from ssl_bench.results import ResultStore
from tests.support.faults import class_folders

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()
PLUGIN = re.findall(r"^`patch_mlp\.py`:\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0]
POINTS = """
[ssl_bench.model]
patch_mlp = patch_mlp:PatchMlpConfig
broken = patch_mlp_broken:Config

[ssl_bench.attention]
mean = patch_mlp_parts:build_mean

[ssl_bench.graying]
half = patch_mlp_parts:Half
"""
ATTENTION_AND_GRAYING = """
from torch import nn

from ssl_bench.models.vit import Attention


class MeanAttention(Attention):
    def mix_values(self, q, k, v):
        return v.mean(2, keepdim=True).expand_as(v)


build_mean = MeanAttention.from_config


class Half(nn.Module):
    def __init__(self, config):
        super().__init__()

    def forward(self, tokens):
        return tokens / 2
"""
# Small values keep the tests fast.
REDUCED = {
    "image_size": 32, "patch_size": 8, "dim": 12, "depth": 2, "num_heads": 2, "num_states": 3,
    "head_width": 4, "num_tokens": 7, "name": "vit_tiny_patch16_224", "widths": (12,),
    "depths": (2,), "heads": (3,), "graying": "dct", "drop_path": 0.5,
}  # fmt: skip
KINDS = [*registered_names("model"), "patch_mlp"]


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory) -> Iterator[Path]:
    """Install the example encoder from docs/extending.md as a separate package."""
    folder = tmp_path_factory.mktemp("plugin")
    information = folder / "patch_mlp-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: patch_mlp\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(POINTS)
    (folder / "patch_mlp.py").write_text(PLUGIN)
    (folder / "patch_mlp_parts.py").write_text(ATTENTION_AND_GRAYING)
    (folder / "patch_mlp_broken.py").write_text("import nopackage\n")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def small_config(kind: str) -> EncoderConfig:
    config_class = find_registered("model", kind)
    names = [item.name for item in fields(config_class)]
    return config_class(**{name: value for name, value in REDUCED.items() if name in names})


def inputs_of(config: EncoderConfig) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if not config.reads_images:
        return torch.randint(REDUCED["num_tokens"], (2, 9), generator=generator)
    return torch.randn(2, 3, 32, 48, generator=generator)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_depend_on_the_seed_alone(kind):
    config, state = small_config(kind), torch.get_rng_state()
    one, same, other = (build_encoder(config, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    assert any(not torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_can_be_saved_as_json(kind):
    config = small_config(kind)
    values = json.loads(json.dumps(config.to_dict()))
    assert config.kind == kind
    assert config_from_dict(kind, values) == config
    with pytest.raises(ConfigurationError):
        config_from_dict(kind, values | {"nonsense": 1})


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_gives_the_same_encoder(kind, tmp_path):
    config = small_config(kind)
    model, inputs = build_encoder(config, seed=3).eval(), inputs_of(config)
    path = tmp_path / "last.safetensors"
    save_encoder(path, model, {})
    if not config.reads_images:
        empty = config.build_empty().eval()
        empty.load_state_dict(model.state_dict())
        assert torch.equal(empty(inputs), model(inputs))
        return
    encoder = load_encoder(str(path))

    assert getattr(encoder.module, "config", None) == config
    assert torch.equal(encoder.module(inputs), model(inputs))
    identity = identify_encoder(str(path))
    assert identity.identity() == encoder.identity()
    assert (identity.depth, identity.patch_size) == (encoder.depth, encoder.patch_size)
    random = load_encoder(f"random:{path}").module
    assert torch.equal(random(inputs), build_encoder(config, seed=0).eval()(inputs))


@pytest.mark.parametrize("kind", KINDS)
def test_every_block_has_features(kind):
    config = small_config(kind)
    if not config.reads_images:
        pytest.skip("reads tokens")
    encoder = encoder_from_model(build_encoder(config, seed=0), name=kind)
    layers = range(encoder.depth)
    features = FeatureExtractor(encoder, layers=layers, facets=("token",))(torch.rand(2, 3, 32, 48))
    assert list(features) == list(layers)
    assert {tuple(features[layer]["token"].shape) for layer in layers} == {(2, 4, 6, encoder.dim)}


ATTENTIONS = [*registered_names("attention"), "mean"]
PARTS = list(product(ATTENTIONS, [*registered_names("graying"), "half"]))


@pytest.mark.parametrize(("attention", "graying"), PARTS)
def test_every_attention_and_graying_maps_tokens_to_finite_tokens(attention, graying):
    config = ViTConfig(
        image_size=32, patch_size=8, dim=12, depth=1, num_heads=2, attention=attention,
        graying=graying, qkv_bias=False,
    )  # fmt: skip
    model = build_vit(config, seed=0)
    features = model.forward_features(torch.rand(2, 3, 16, 24))
    features.square().sum().backward()
    assert features.shape == (2, 7, 12)
    gradients = [p.grad for p in model.blocks.parameters()]
    assert all(g is not None and g.isfinite().all() and g.any() for g in gradients)


def test_a_timm_model_uses_the_graying_of_another_package():
    inputs = []
    for graying in ("none", "half"):
        model = build_encoder(replace(small_config("timm"), graying=graying), seed=0)
        model.blocks[0].norm1.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        model(torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(inputs[1], inputs[0] / 2)


@pytest.mark.slow
def test_an_encoder_of_another_package_is_trained_and_probed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    class_folders(tmp_path / "photos")
    train = [
        "pretrain", "objective=supervised", "model=patch_mlp", "model.dim=12", "model.depth=2",
        "model.image_size=32", "data.root=photos", "train.max_steps=2", "train.batch_size=4",
        "train.num_workers=0", "--device", "cpu", "--out", "run",
    ]  # fmt: skip
    assert main(train) == 0
    dataset = ["--dataset", "toy_objects", "dataset.num_train=8", "dataset.num_val=4"]
    words = [*dataset, "probe.facet=patch_mean", "--out", "out"]
    assert main(["probe", "--task", "knn", "--checkpoint", "run", *words]) == 0

    assert load_encoder("run").architecture["kind"] == "patch_mlp"
    assert {record.layer for record in ResultStore(Path("out")).records()} == {0, 1}


def test_a_package_that_cannot_be_imported_is_named():
    for find in (
        lambda: find_registered("model", "broken"),
        lambda: import_component("patch_mlp_broken.Config", "model._target_"),
    ):
        with pytest.raises(BrokenFileError, match=r"patch_mlp_broken\.py, line 1"):
            find()
