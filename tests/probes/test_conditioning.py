"""The conditioning probe: its numbers are those of the matrices of the encoder itself."""

import copy
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

from probes.conditioning.decomposition import decompose_block
from probes.conditioning.probe import Conditioning
from probes.conditioning.scores import CELLS, MEAN_LOG, linear_cka, mean_cosine
from ssl_bench.cli.__main__ import main
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import (
    Encoder,
    VisionTransformer,
    ViTConfig,
    build_vit,
    encoder_from_model,
    load_encoder,
    save_encoder,
)
from ssl_bench.results import ResultStore
from ssl_bench.tables.depth import depth_tables
from tests.support.matrices import condition, normal, rank
from tests.support.own_module import Layer, Own, own
from tests.support.photographs import evaluated

TINY = ViTConfig(image_size=16, patch_size=8, dim=12, depth=2, num_heads=2)
FILES = ("blocks-0-1.png", "blocks-0-1-spectra.npz", "blocks-0-1-cka.npy")
BARE = replace(TINY, skip_attention=False, skip_mlp=False)


def passed(config=TINY, seed=0, tokens=5):
    """A block in float64, what enters it and what leaves it."""
    block = build_vit(config, seed=seed).double().eval().requires_grad_(False).blocks[0]
    x = normal(tokens, config.dim, seed=9)
    return block, x, block(x[None])[0]


@pytest.mark.parametrize("config", [TINY, BARE, replace(BARE, skip_mlp=True)])
def test_the_parts_of_a_block_give_what_the_block_gives(config):
    block, x, left = passed(config)
    parts, _ = decompose_block(block, x, left, num_heads=2)
    assert parts is not None
    assert parts.heads is not None
    torch.testing.assert_close(parts(x), left, rtol=1e-12, atol=1e-12)
    normed = parts.norm1(x)
    torch.testing.assert_close(parts.heads.output(normed), parts.attention(normed))
    assert decompose_block(block, x, left + 1e-3, num_heads=2)[0] is None
    # Three heads would be another encoder's matrices.
    three, _ = decompose_block(block, x, left, num_heads=3)
    assert three is not None
    assert three.heads is None


def test_a_tensor_under_the_name_of_a_part_is_no_part():
    layer = nn.TransformerEncoderLayer(12, 2, 24, norm_first=True, batch_first=True)
    block = layer.double().eval().requires_grad_(False)
    # Looked for before torch's own `self_attn`, as the weights of the last pass may be kept.
    block.attention = normal(2, 5, 5)
    x = normal(5, 12, seed=9)

    parts, _ = decompose_block(block, x, block(x[None])[0], num_heads=2)

    assert parts is not None
    assert parts.heads is not None


def probe(photographs, out, encoder, said=None, layers=(0, 1), **options):
    options = {"num_images": 2, "image_size": 16, **options}
    say = (lambda _: None) if said is None else said.append
    return evaluated(
        Conditioning(**options), photographs, ResultStore(out), encoder, layers, say=say
    )


def embedded(encoder, folder):
    """The encoder in float64, and what enters its first block for the first photograph."""
    image = Image.open(folder / "photos" / "a.png").resize((16, 16), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(c).view(3, 1, 1) for c in (encoder.mean, encoder.std))
    model = copy.deepcopy(encoder.module).double().requires_grad_(False)
    assert isinstance(model, VisionTransformer)
    return model, model.embed(((pixels - mean) / std)[None].double())


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures without axes, whose text takes more time than all that they show."""
    monkeypatch.setattr(Figure, "savefig", lambda _, file, **__: file.write(b"picture"))


def tiny(config=TINY, seed=0, name="tiny"):
    return encoder_from_model(build_vit(config, seed=seed), name=name)


def found(records, layer, facet, metric):
    (value,) = [r for r in records if (r.layer, r.facet, r.metric) == (layer, facet, metric)]
    return value


def test_spectra_are_those_of_the_matrices_of_the_encoder_itself(photographs, tmp_path):
    encoder = tiny()

    records = probe(photographs, tmp_path / "out", encoder, num_images=1)

    assert {(r.facet, r.metric) for r in records} == set(CELLS["spectra"])
    assert {(r.unit, r.num_images, r.ci95) for r in records} == {("", 1, None)}
    model, x = embedded(encoder, tmp_path)
    attn, norm1, mlp_part, norm2 = (
        model.get_submodule(f"blocks.0.{name}") for name in ("attn", "norm1", "mlp", "norm2")
    )
    update = attn(norm1(x))[0]
    middle = x[0] + update
    mlp = mlp_part(norm2(middle)[None])[0]
    weights = attn.get_parameter("qkv.weight"), attn.get_parameter("qkv.bias")
    qkv = (norm1(x)[0] @ weights[0].T + weights[1]).reshape(5, 3, 2, 6)
    softmax = [(qkv[:, 0, h] @ qkv[:, 1, h].T / 6**0.5).softmax(1) for h in range(2)]
    for metric, of in (("condition_number", condition), ("effective_rank", rank)):
        value = found(records, 0, "attention_matrix", metric).value
        assert value == pytest.approx(sum(map(of, softmax)) / 2, rel=1e-4)
    for facet, matrix in {
        "attention": update,
        "attention_skip": middle,
        "mlp": mlp,
        "mlp_skip": middle + mlp,
    }.items():
        assert found(records, 0, facet, "condition_number").value == pytest.approx(
            condition(matrix), rel=1e-4
        )
        assert found(records, 0, facet, "effective_rank").value == pytest.approx(rank(matrix))
        assert found(records, 0, facet, "mean_cosine").value == pytest.approx(mean_cosine(matrix))
    assert found(records, 0, "token", "cka_with_input").value == pytest.approx(
        linear_cka(x, (middle + mlp)[None])
    )
    (pictures,) = (tmp_path / "out" / "pictures").rglob("spectra")
    assert {p.name for p in pictures.iterdir()} == set(FILES)
    with np.load(pictures / FILES[1]) as arrays:
        assert arrays["block00_attention_matrix"].shape == (1, 2, 5)
        np.testing.assert_allclose(arrays["block01_mlp"].shape, (1, 1, 5))
    assert np.load(pictures / FILES[2]).shape == (3, 3)


@pytest.mark.usefixtures("undrawn")
def test_the_input_of_the_cka_matrix_is_the_patch_embedding_whatever_blocks_are_asked(place):
    words = ["probe", "--task", "conditioning", "--checkpoint", "encoder.safetensors"]
    words += ["--dataset", "folder", "--data-root", "photos"]
    for out, layers in (("all", "all"), ("last", "1")):
        more = ["--layer", layers, "--out", out, "probe.image_size=32", "probe.num_images=1"]
        assert main([*words, *more]) == 0

    (every,), (last,) = (list(Path(out).rglob("*-cka.npy")) for out in ("all", "last"))
    np.testing.assert_array_equal(np.load(last), np.load(every)[[0, 2]][:, [0, 2]])


def test_a_silent_attention_is_infinite_in_records_and_tables(photographs, tmp_path):
    model = build_vit(TINY, seed=0)
    with torch.no_grad():
        # Uniform attention of equal values: rank one, then an output of zeros.
        model.get_parameter("blocks.0.attn.qkv.weight").zero_()
        model.get_parameter("blocks.0.attn.qkv.bias").zero_()
    said = []

    records = probe(photographs, tmp_path, encoder_from_model(model, name="silent"), said)

    matrix = found(records, 0, "attention_matrix", "condition_number")
    assert (matrix.value, matrix.ci95) == (math.inf, (math.inf, math.inf))
    assert matrix.details["infinite_percent"] == 100
    assert found(records, 0, "attention_matrix", "effective_rank").value == pytest.approx(1)
    assert found(records, 0, "attention", "condition_number").value == math.inf
    assert found(records, 0, "attention", "effective_rank").value == 0
    path = ResultStore(tmp_path).path(matrix.key())
    text = path.read_text()
    assert json.loads(text)["value"] == "inf"
    assert "Infinity" not in text
    (table,) = [t for t in depth_tables(records) if "matrix" in t.title and "number" in t.title]
    assert table.entries[0, "silent"].text() == "∞"
    assert "%" not in table.title
    assert table.best_row("silent") is None


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("is_torchs", [True, False])
def test_a_pre_norm_block_of_ones_own_is_taken_apart(photographs, tmp_path, is_torchs):
    module, said = own(), []
    if is_torchs:
        layer = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, batch_first=True)
        module.trunk = nn.ModuleList(_Alone(copy.deepcopy(layer)) for _ in range(3))
    encoder = Encoder.from_module(module, name="own", image_size=32)

    records = probe(photographs, tmp_path, encoder, said, image_size=32)

    assert not [r for r in records if math.isnan(r.value)]
    assert not [line for line in said if "no number" in line]


class _Told(nn.Module):
    """Attention that is told where the tokens lie."""

    def forward(self, tokens, positions):
        return tokens * positions


def without_mlp(layer, tokens):
    layer._modules.pop("mlp", None)
    return tokens + layer.ln_1(tokens)


def post_norm(layer, tokens):
    return layer.ln_1(tokens + layer.mlp(layer.ln_2(tokens)))


def telling_positions(layer, tokens):
    layer.attention = _Told()
    middle = tokens + layer.attention(layer.ln_1(tokens), 1)
    return middle + layer.mlp(layer.ln_2(middle))


def linear(layer, tokens):
    layer.attention = layer.mlp
    middle = tokens + layer.attention(layer.ln_1(tokens))
    return middle + layer.mlp(layer.ln_2(middle))


NOT_PRE_NORM = "the block is not x + attn(norm1(x)), then that + mlp(norm2(that)), which "


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (without_mlp, "the block has no part called mlp or ffn or feed_forward"),
        (post_norm, f"{NOT_PRE_NORM}gives other numbers"),
        (telling_positions, f"{NOT_PRE_NORM}ends in TypeError: _Told.forward() missing 1 required"),
        (linear, "Sequential has no Linear layers called qkv and proj"),
    ],
)
def test_why_a_block_is_not_taken_apart_is_said(photographs, tmp_path, monkeypatch, forward, why):
    monkeypatch.setattr(Layer, "forward", lambda *given: (forward(*given), None))
    module, said = own(), []
    encoder = Encoder.from_module(module, name="own", image_size=32)
    encoder = replace(encoder, num_heads=2)

    records = probe(photographs, tmp_path, encoder, said, image_size=32, num_images=1)

    (line,) = [line for line in said if "no number for" in line]
    assert line.startswith("conditioning: own, block 0, 1: no number for ")
    assert f": {why}" in line
    assert why in found(records, 1, "attention_matrix", "effective_rank").details["undefined"]


@pytest.mark.usefixtures("undrawn")
def test_a_mean_over_blocks_names_the_one_that_is_not_taken_apart(
    photographs, tmp_path, monkeypatch
):
    usual = Layer.forward

    def forward(layer, tokens):
        return (
            (post_norm(layer, tokens), None) if hasattr(layer, "is_first") else usual(layer, tokens)
        )

    module, said = own(), []
    module.trunk[0].is_first = True
    monkeypatch.setattr(Layer, "forward", forward)
    encoder = replace(Encoder.from_module(module, name="own", image_size=32), num_heads=2)

    probe(photographs, tmp_path, encoder, said, image_size=32, num_images=1, protocol="mean_log")

    lines = [line.split("no number for ")[1] for line in said if "no number for" in line]
    assert [line.partition(": ")[2] for line in lines] == [
        f"{NOT_PRE_NORM}gives other numbers",
        f"block 0: {NOT_PRE_NORM}gives other numbers",
    ]


@pytest.mark.usefixtures("undrawn")
def test_a_block_that_its_encoder_calls_otherwise_has_no_jacobian(
    photographs, tmp_path, monkeypatch
):
    of_layer, of_module, module, said = Layer.forward, Own.forward, own(), []
    running = []

    def whole(self, images):
        running.append(1)
        try:
            return of_module(self, images)
        finally:
            running.pop()

    monkeypatch.setattr(Own, "forward", whole)
    monkeypatch.setattr(
        Layer, "forward", lambda self, tokens: of_layer(self, tokens + (0.0 if running else 0.1))
    )
    encoder = replace(Encoder.from_module(module, name="own", image_size=32), num_heads=2)

    probe(
        photographs, tmp_path, encoder, said,
        image_size=32, num_images=1, protocol="jacobian_exact", layers=(0,),
    )  # fmt: skip

    (line,) = [line for line in said if "no number for" in line]
    assert "no number for block: called alone, the block does not give" in line


@pytest.mark.usefixtures("undrawn")
def test_blocks_with_further_arguments_have_no_jacobian_but_a_figure(
    photographs, tmp_path, monkeypatch
):
    usual = Layer.forward

    def forward(self, images):
        tokens = self.embed(images).flatten(2).transpose(1, 2)
        for layer in self.trunk:
            tokens, _ = layer(tokens, 2.0)
        return tokens

    monkeypatch.setattr(Own, "forward", forward)
    monkeypatch.setattr(Layer, "forward", lambda self, x, scale: usual(self, x * scale))
    said, module = [], own()
    encoder = replace(Encoder.from_module(module, name="own", image_size=32), num_heads=2)

    records = probe(
        photographs, tmp_path, encoder, said,
        image_size=32, num_images=1, protocol="jacobian_exact",
    )  # fmt: skip

    assert all(math.isnan(record.value) for record in records)
    assert len([line for line in said if "no number for" in line]) == 2
    assert len(list((tmp_path / "pictures").rglob("*.png"))) == 1


class _Alone(nn.TransformerEncoderLayer):
    """Torch's layer, which gives a pair as those of the module do."""

    def __init__(self, layer):
        nn.Module.__init__(self)
        self.__dict__.update(layer.__dict__)

    def forward(self, tokens):
        return super().forward(tokens), None


def test_constant_tokens_are_said_and_nothing_else_breaks(photographs, tmp_path):
    model = build_vit(BARE, seed=0)
    with torch.no_grad():
        model.get_parameter("blocks.0.mlp.fc2.weight").zero_()
        model.get_parameter("blocks.0.mlp.fc2.bias").fill_(1)
    said = []

    records = probe(photographs, tmp_path, encoder_from_model(model, name="constant"), said)

    assert math.isnan(found(records, 0, "token", "cka_with_input").value)
    assert any("block 0: cka_with_input of token is undefined" in line for line in said)
    assert found(records, 0, "mlp", "condition_number").value == math.inf
    assert found(records, 0, "mlp", "effective_rank").value == pytest.approx(1)
    assert found(records, 0, "mlp", "mean_cosine").value == pytest.approx(1)
    assert found(records, 1, "attention_matrix", "condition_number").value == math.inf


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("protocol", ["jacobian_exact", "jacobian_lanczos"])
def test_jacobians_of_blocks_and_attention_are_recorded(photographs, tmp_path, protocol):
    encoder = encoder_from_model(build_vit(BARE, seed=0), name="bare")
    records = probe(photographs, tmp_path, encoder, protocol=protocol)
    assert {(r.facet, r.metric) for r in records} == set(CELLS[protocol])
    # Attention that does not move over attention of nothing.
    nan = {r.metric.removesuffix("_estimate") for r in records if math.isnan(r.value)}
    assert nan <= {"norm_over_dominant"}


@pytest.mark.usefixtures("undrawn")
def test_a_checkpoint_is_like_itself_and_less_like_another(photographs, tmp_path):
    paths = [tmp_path / name / "last.safetensors" for name in ("one", "other")]
    for seed, path in enumerate(paths):
        path.parent.mkdir()
        save_encoder(path, build_vit(TINY, seed=seed), {})
    encoder = load_encoder(str(paths[0]))

    def compared(path):
        return probe(
            photographs, tmp_path / "out", encoder, protocol="checkpoints", compare_to=str(path)
        )

    same, other = compared(paths[0]), compared(paths[1])

    assert [r.value for r in same] == pytest.approx([1, 1])
    assert all(0 < r.value < 0.999 for r in other)
    assert [len(r.details["with_every_block"]) for r in other] == [2, 2]
    assert other[0].details["other"] == "other"
    assert same[0].key() != other[0].key()


@pytest.mark.usefixtures("undrawn")
def test_the_weights_before_training_are_those_of_the_seed(photographs, tmp_path):
    model = build_vit(TINY, seed=0)
    small = {"layers": (0,), "num_images": 1}
    fresh = probe(photographs, tmp_path, encoder_from_model(model, name="a"), **small)
    with torch.no_grad():
        model.get_parameter("blocks.0.attn.qkv.weight").mul_(7)
    trained = encoder_from_model(model, name="a")

    changed = probe(photographs, tmp_path, trained, **small)
    again = probe(photographs, tmp_path, trained, at_initialisation=True, **small)

    assert [r.value for r in again] == [r.value for r in fresh]
    assert changed[0].value != fresh[0].value
    assert again[0].settings["at_initialisation"]
    foreign = replace(trained, module=torch.nn.Identity())
    with pytest.raises(ConfigurationError) as caught:
        probe(photographs, tmp_path, foreign, at_initialisation=True)
    assert caught.value.hint == ("probe.at_initialisation=false",)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("vit_tiny_patch16_224", set()),
        ("deit3_small_patch16_224", set()),
        ("vit_small_patch16_dinov3", {"attention", "mlp", "attention_matrix"}),
    ],
)
@pytest.mark.slow
def test_encoders_of_timm_are_measured_or_it_is_said(photographs, tmp_path, name, left_out):
    said, encoder = [], load_encoder(f"timm:{name}")

    records = probe(photographs, tmp_path, encoder, said, layers=(0,), image_size=32)

    without = {record.facet for record in records if "undefined" in record.details}
    assert "token" not in without
    assert left_out <= without
    assert bool(without) == bool(left_out) == any("no number for" in line for line in said)
    assert {r.facet for r in records} == {f for f, _ in CELLS["spectra"]}


def test_a_comparison_needs_the_address_of_the_other_encoder(photographs):
    with pytest.raises(ConfigurationError) as caught:
        Conditioning(protocol="checkpoints").split(photographs)
    assert caught.value.hint == ("probe.compare_to={checkpoint}",)


def test_encoders_of_other_tokens_are_not_compared(photographs, tmp_path):
    path = Path(tmp_path / "coarse" / "last.safetensors")
    path.parent.mkdir()
    save_encoder(path, build_vit(replace(TINY, patch_size=16), seed=0), {})
    with pytest.raises(ConfigurationError, match="tiny has 5 tokens and coarse 2"):
        probe(photographs, tmp_path, tiny(), protocol="checkpoints", compare_to=str(path))


DEEP = replace(TINY, depth=3)


@pytest.mark.parametrize("graying", ["none", "svd"])
def test_mean_logarithms_are_those_of_the_tokens_of_the_encoder_itself(
    photographs, tmp_path, graying
):
    encoder, asked = tiny(replace(DEEP, graying=graying, graying_exponent=0.5)), (0, 2)

    records = probe(
        photographs, tmp_path / "out", encoder, layers=asked, protocol="mean_log", num_images=1
    )

    model, x = embedded(encoder, tmp_path)
    logs = []
    for block in model.blocks:
        # What attention is given is grayed.
        given = block.get_submodule("graying")(x)
        middle = given + block.get_submodule("attn")(block.get_submodule("norm1")(given))
        logs.append([math.log(condition(tokens[0])) for tokens in (given, middle)])
        x = block(x)
    assert {(r.layer, r.metric, r.unit) for r in records} == {(n, MEAN_LOG, "") for n in asked}
    for layer, (column, facet) in itertools.product(asked, enumerate(("before", "after"))):
        expected = sum(pair[column] for pair in logs[: layer + 1]) / (layer + 1)
        assert found(records, layer, facet, MEAN_LOG).value == pytest.approx(expected, rel=1e-5)
    # Of blocks from the first on that cannot be taken apart there is none.
    block = encoder.module.get_submodule("blocks.1")
    encoder.module.set_submodule("blocks.1", nn.Sequential(block))
    again = probe(photographs, tmp_path / "again", encoder, layers=asked, protocol="mean_log")
    assert {r.layer for r in again if math.isnan(r.value)} == {2}
    # A picture that is promised and not drawn would leave the cells pending for ever.
    assert not list((tmp_path / "out" / "pictures").rglob("*.png"))
    assert not Conditioning(protocol="mean_log").pictures((2,), photographs.images(), 0)
