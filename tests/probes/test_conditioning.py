"""Test the probe that measures the condition numbers of each block."""

import copy
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from timm.models.vision_transformer import Block
from torch import nn

from probes.conditioning.decomposition import BlockRecord, decompose_block
from probes.conditioning.probe import Conditioning
from probes.conditioning.scores import CELLS, MEAN_LOG, linear_cka, mean_cosine
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
from tests.support.photographs import evaluate_probe

TINY = ViTConfig(image_size=16, patch_size=8, dim=12, depth=2, num_heads=2)
BARE = replace(TINY, skip_attention=False, skip_mlp=False)


@pytest.fixture(autouse=True)
def blank_figures(monkeypatch):
    """Save empty files instead of figures to save time."""
    monkeypatch.setattr(Figure, "savefig", lambda _, file, **__: file.write(b"figure"))


class Runner:
    def __init__(self, photographs, folder):
        self.photographs, self.folder, self.messages = photographs, folder, []

    def __call__(self, encoder, layers=(0, 1), out="out", *, seed=0, **options):
        options = {"num_images": 2, "image_size": encoder.native_size[0], **options}
        probe, store = Conditioning(**options), ResultStore(self.folder / out)
        say = self.messages.append
        return evaluate_probe(probe, self.photographs, store, encoder, layers, seed=seed, say=say)


@pytest.fixture
def run(photographs, tmp_path):
    return Runner(photographs, tmp_path)


def tiny(config=TINY, seed=0):
    return encoder_from_model(build_vit(config, seed=seed), name="tiny")


def foreign(module=None):
    encoder = Encoder.from_module(module or own(), name="own", image_size=32)
    return replace(encoder, num_heads=2)


def embedded(encoder, folder):
    """Return the model in float64 and the tokens of the first image."""
    image = Image.open(folder / "photos" / "a.png").resize((16, 16), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(c).view(3, 1, 1) for c in (encoder.mean, encoder.std))
    model = copy.deepcopy(encoder.module).double().requires_grad_(False)
    assert isinstance(model, VisionTransformer)
    return model, model.embed(((pixels - mean) / std)[None].double())


def find(records, layer, facet, metric):
    (record,) = [r for r in records if (r.layer, r.facet, r.metric) == (layer, facet, metric)]
    return record


def undefined(records):
    missing = [r for r in records if math.isnan(r.value)]
    return {record.facet: record.details["undefined"] for record in missing}


@pytest.mark.parametrize("config", [TINY, BARE, replace(BARE, skip_mlp=True)])
def test_the_parts_of_a_block_reproduce_its_output(config):
    block = build_vit(config, seed=0).double().eval().requires_grad_(False).blocks[0]
    x = normal(5, 12, seed=9)
    output = block(x[None])[0]

    parts, _ = decompose_block(block, x, output, num_heads=2)

    assert parts is not None
    assert parts.heads is not None
    torch.testing.assert_close(parts(x), output, rtol=1e-12, atol=1e-12)
    normed = parts.norm1(x)
    torch.testing.assert_close(parts.heads.output(normed), parts.attention(normed))
    assert decompose_block(block, x, output + 1e-3, num_heads=2)[0] is None
    # With three heads the output would differ, and five heads do not divide the channels.
    for heads in (3, 5):
        other, reason = decompose_block(block, x, output, num_heads=heads)
        assert other is not None
        assert (other.heads, bool(reason)) == (None, True)


@pytest.mark.parametrize("kind", ["qk_norm", "layer scale", "torch", "tuples"])
def test_blocks_of_other_packages_are_decomposed(kind):
    if kind == "qk_norm":
        block = Block(12, 2, qk_norm=True)
        block.get_parameter("attn.q_norm.weight").data.mul_(3)
    elif kind == "layer scale":
        block = Block(12, 2, init_values=0.5)
        block.get_parameter("ls2.gamma").data.fill_(0.25)
    elif kind == "torch":
        block = nn.TransformerEncoderLayer(12, 2, 24, norm_first=True, batch_first=True)
        # Some blocks store their last attention weights. A tensor is not a part of the block.
        block.attention = normal(2, 5, 5)
    else:
        block = Layer(12)
    block, x = block.double().eval().requires_grad_(False), normal(5, 12, seed=9)
    output = block(x[None])
    # A layer of PyTorch states its own number of heads.
    num_heads = 3 if kind == "torch" else 2

    parts, reason = decompose_block(
        block, x, (output[0] if kind == "tuples" else output)[0], num_heads
    )

    assert reason == ""
    assert parts is not None
    assert parts.heads is not None


def test_spectra_equal_those_computed_from_the_matrices_of_the_encoder(run, tmp_path):
    encoder = tiny()

    records = run(encoder, num_images=1)

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
    for metric, compute in (("condition_number", condition), ("effective_rank", rank)):
        value = find(records, 0, "attention_matrix", metric).value
        assert value == pytest.approx(sum(map(compute, softmax)) / 2, rel=1e-4)
    outputs = {
        "attention": update, "attention_skip": middle, "mlp": mlp, "mlp_skip": middle + mlp,
    }  # fmt: skip
    numbers = {"condition_number": condition, "effective_rank": rank, "mean_cosine": mean_cosine}
    for (facet, matrix), metric in itertools.product(outputs.items(), numbers):
        record = find(records, 0, facet, metric)
        assert record.value == pytest.approx(numbers[metric](matrix), rel=1e-4)
        if metric == "effective_rank":
            centred = record.details["centred_effective_rank"]
            assert centred == pytest.approx(rank(matrix - matrix.mean(0)), rel=1e-4)
    assert find(records, 0, "token", "cka_with_input").value == pytest.approx(
        linear_cka(x, (middle + mlp)[None])
    )
    # The input of the CKA matrix is the patch embedding, even if only the last block is scored.
    run(encoder, layers=(1,), out="last", num_images=1)
    (every,), (last,) = (list((tmp_path / out).rglob("*-cka.npy")) for out in ("out", "last"))
    np.testing.assert_array_equal(np.load(last), np.load(every)[[0, 2]][:, [0, 2]])
    with np.load(str(every).replace("-cka.npy", "-spectra.npz")) as arrays:
        assert arrays["block00_attention_matrix"].shape == (1, 2, 5)
        assert arrays["block01_mlp"].shape == (1, 1, 5)


def test_attention_with_zero_output_is_infinite_in_records_and_tables(run, tmp_path):
    encoder = tiny()
    with torch.no_grad():
        # Attention is uniform, so its matrix has rank one. All values are 0, so the output is 0.
        encoder.module.get_parameter("blocks.0.attn.qkv.weight").zero_()
        encoder.module.get_parameter("blocks.0.attn.qkv.bias").zero_()

    records = run(encoder)

    matrix = find(records, 0, "attention_matrix", "condition_number")
    assert (matrix.value, matrix.ci95) == (math.inf, (math.inf, math.inf))
    assert matrix.details["infinite_percent"] == 100
    assert find(records, 0, "attention_matrix", "effective_rank").value == pytest.approx(1)
    assert find(records, 0, "attention", "condition_number").value == math.inf
    assert find(records, 0, "attention", "effective_rank").value == 0
    text = ResultStore(tmp_path / "out").path(matrix.key()).read_text()
    assert json.loads(text)["value"] == "inf"
    assert "Infinity" not in text
    (table,) = [t for t in depth_tables(records) if "matrix" in t.title and "number" in t.title]
    assert table.entries[0, "tiny"].text() == "∞"
    assert "%" not in table.title
    assert table.best_row("tiny") is None


def test_constant_tokens_have_no_cka_and_are_reported(run):
    encoder = tiny(BARE)
    with torch.no_grad():
        encoder.module.get_parameter("blocks.0.mlp.fc2.weight").zero_()
        encoder.module.get_parameter("blocks.0.mlp.fc2.bias").fill_(1)

    records = run(encoder)

    assert math.isnan(find(records, 0, "token", "cka_with_input").value)
    assert any("cka_with_input of token in block 0 is undefined" in x for x in run.messages)
    assert find(records, 0, "mlp", "condition_number").value == math.inf
    assert find(records, 0, "mlp", "effective_rank").value == pytest.approx(1)
    assert find(records, 0, "mlp", "mean_cosine").value == pytest.approx(1)
    assert find(records, 1, "attention_matrix", "condition_number").value == math.inf


class PositionAttention(nn.Module):
    def forward(self, tokens, positions):
        return tokens * positions


def forward_without_mlp(layer, tokens):
    layer._modules.pop("mlp", None)
    return tokens + layer.ln_1(tokens)


def forward_post_norm(layer, tokens):
    return layer.ln_1(tokens + layer.mlp(layer.ln_2(tokens)))


def forward_with_positions(layer, tokens):
    layer.attention = PositionAttention()
    middle = tokens + layer.attention(layer.ln_1(tokens), 1)
    return middle + layer.mlp(layer.ln_2(middle))


def forward_without_attention(layer, tokens):
    layer.attention = layer.mlp
    middle = tokens + layer.attention(layer.ln_1(tokens))
    return middle + layer.mlp(layer.ln_2(middle))


@pytest.mark.parametrize(
    ("forward", "why", "facets"),
    [
        (forward_without_mlp, "no part called mlp or ffn", 5),
        (forward_post_norm, "gives a different output", 5),
        (forward_with_positions, "TypeError: PositionAttention.forward() missing 1 required", 5),
        (forward_without_attention, "Sequential has no Linear layers called qkv and proj", 1),
    ],
)
def test_the_reason_why_a_block_is_not_decomposed_is_stated(run, monkeypatch, forward, why, facets):
    monkeypatch.setattr(Layer, "forward", lambda *given: (forward(*given), None))

    reasons = undefined(run(foreign(), num_images=1))

    (line,) = [line for line in run.messages if "no score for" in line]
    assert line.startswith("conditioning: own, block 0, 1: no score for attention_matrix")
    assert len(reasons) == facets
    assert all(why in reason for reason in (*reasons.values(), line))


def test_blocks_with_another_output_in_a_separate_call_lack_jacobians(run, monkeypatch):
    monkeypatch.setattr(BlockRecord, "run_block", lambda _, tokens: tokens + 0.1)

    records = run(tiny(), layers=(0,), num_images=1, protocol="jacobian_exact")

    assert undefined(records).keys() == {"block"}
    assert "called separately" in undefined(records)["block"]


def test_blocks_with_further_arguments_have_no_jacobian_but_a_figure(run, monkeypatch, tmp_path):
    forward_layer = Layer.forward

    def forward(self, images):
        tokens = self.embed(images).flatten(2).transpose(1, 2)
        for layer in self.trunk:
            tokens, _ = layer(tokens, 2.0)
        return tokens

    monkeypatch.setattr(Own, "forward", forward)
    monkeypatch.setattr(Layer, "forward", lambda self, x, scale: forward_layer(self, x * scale))

    records = run(foreign(), num_images=1, protocol="jacobian_exact")

    assert all(math.isnan(record.value) for record in records)
    lines = [line for line in run.messages if "no score for" in line]
    whole = [line for line in lines if "called separately" in line]
    assert len(lines) == 2
    assert ["no score for block. " in line for line in whole] == [True]
    assert len(list((tmp_path / "out/pictures").rglob("*.png"))) == 1


def test_modules_that_store_computed_tensors_are_scored(run):
    module = own()
    plain = run(foreign(module), layers=(0,), num_images=1)
    # `copy.deepcopy` refuses tensors with a gradient function, even in lists and buffers.
    module.stored = [module.positions * 2]
    module.register_buffer("kept", module.positions * 3, persistent=False)

    stored = run(foreign(module), layers=(0,), out="stored", num_images=1)

    assert [r.value for r in stored] == [r.value for r in plain]


@pytest.mark.slow
def test_exhaustive_lanczos_iterations_record_the_exact_numbers(run):
    encoder, small = tiny(replace(TINY, dim=6)), {"layers": (1,), "num_images": 1}
    exact, lanczos = (
        run(encoder, protocol=f"jacobian_{name}", **small) for name in ("exact", "lanczos")
    )

    for protocol, records in (("jacobian_exact", exact), ("jacobian_lanczos", lanczos)):
        assert {(r.facet, r.metric) for r in records} == set(CELLS[protocol])
        assert not undefined(records)
    for facet, metric in CELLS["jacobian_exact"]:
        ending = "_at_least" if metric == "condition_number" else "_estimate"
        if metric != "effective_rank":
            one, other = (
                find(records, 1, facet, name).value
                for records, name in ((exact, metric), (lanczos, metric + ending))
            )
            assert other == pytest.approx(one, rel=1e-3)


def test_a_checkpoint_equals_itself_and_differs_from_another(run, tmp_path):
    paths = [tmp_path / name / "last.safetensors" for name in ("one", "other", "coarse")]
    for seed, path in enumerate(paths):
        path.parent.mkdir()
        save_encoder(path, build_vit(replace(TINY, patch_size=8 + 8 * (seed == 2)), seed=seed), {})
    encoder = load_encoder(str(paths[0]))

    same, other = (run(encoder, protocol="checkpoints", compare_to=str(path)) for path in paths[:2])

    assert [r.value for r in same] == pytest.approx([1, 1])
    assert all(0 < r.value < 0.999 for r in other)
    assert [len(r.details["with_every_block"]) for r in other] == [2, 2]
    assert other[0].details["other"] == "other"
    # CKA is symmetric, and the score of a block does not depend on which blocks are requested.
    swapped = {"protocol": "checkpoints", "compare_to": str(paths[0])}
    (last,) = run(load_encoder(str(paths[1])), layers=(1,), out="swapped", **swapped)
    assert last.value == pytest.approx(other[1].value)
    assert last.ci95 == pytest.approx(other[1].ci95)
    assert [r.details["with_every_block"][1] for r in (last, other[1])] == [
        last.value, other[1].value
    ]  # fmt: skip
    assert same[0].key() != other[0].key()
    with pytest.raises(ConfigurationError, match="one has 5 tokens and coarse has 2"):
        run(encoder, protocol="checkpoints", compare_to=str(paths[2]))
    with pytest.raises(ConfigurationError) as caught:
        run(encoder, protocol="checkpoints")
    assert caught.value.hint == ("probe.compare_to={checkpoint}",)


def test_the_seed_determines_the_initial_weights(run, tmp_path):
    # The run that trained the encoder had normalised images with its own mean and deviation.
    trained = replace(tiny(), mean=(0.1, 0.2, 0.3), std=(0.9, 0.8, 0.7))
    fresh = run(trained, layers=(0,), num_images=1)
    with torch.no_grad():
        trained.module.get_parameter("blocks.0.attn.qkv.weight").mul_(7)

    changed = run(trained, layers=(0,), num_images=1)
    again, other = (
        run(trained, layers=(0,), num_images=1, at_initialisation=True, seed=seed)
        for seed in (0, 1)
    )

    assert [r.value for r in again] == [r.value for r in fresh] != [r.value for r in other]
    folders = {path.parent.name for path in (tmp_path / "out/pictures").rglob("*.png")}
    assert folders == {"spectra", "spectra-initialisation0", "spectra-initialisation1"}
    assert changed[0].value != fresh[0].value
    assert again[0].settings["at_initialisation"]
    with pytest.raises(ConfigurationError) as caught:
        run(replace(trained, module=torch.nn.Identity()), at_initialisation=True)
    assert caught.value.hint == ("probe.at_initialisation=false",)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("vit_tiny_patch16_224", set()),
        ("vit_small_patch16_dinov3", {"attention", "mlp", "attention_matrix"}),
    ],
)
@pytest.mark.slow
def test_encoders_of_timm_are_scored_or_the_reason_is_stated(run, name, left_out):
    records = run(load_encoder(f"timm:{name}"), layers=(0,), image_size=32)

    without = undefined(records).keys()
    assert "token" not in without
    assert left_out <= without
    assert bool(without) == bool(left_out) == any("no score for" in line for line in run.messages)


@pytest.mark.parametrize("graying", ["none", "svd"])
def test_mean_logarithms_equal_those_computed_from_the_tokens(run, photographs, tmp_path, graying):
    encoder = tiny(replace(TINY, depth=3, graying=graying, graying_exponent=0.5))
    layers = (0, 2)

    records = run(encoder, layers, protocol="mean_log", num_images=1)

    model, x = embedded(encoder, tmp_path)
    logs = []
    for block in model.blocks:
        # Attention receives grayed tokens.
        given = block.get_submodule("graying")(x)
        middle = given + block.get_submodule("attn")(block.get_submodule("norm1")(given))
        logs.append([math.log(condition(tokens[0])) for tokens in (given, middle)])
        x = block(x)
    assert {(r.layer, r.metric, r.unit) for r in records} == {(n, MEAN_LOG, "") for n in layers}
    for layer, (column, facet) in itertools.product(layers, enumerate(("before", "after"))):
        expected = sum(pair[column] for pair in logs[: layer + 1]) / (layer + 1)
        assert find(records, layer, facet, MEAN_LOG).value == pytest.approx(expected, rel=1e-5)
    # If a block cannot be decomposed, the means of all later blocks are undefined.
    block = encoder.module.get_submodule("blocks.1")
    encoder.module.set_submodule("blocks.1", nn.Sequential(block))
    again = run(encoder, layers, out="again", protocol="mean_log")
    assert {r.layer for r in again if math.isnan(r.value)} == {2}
    assert undefined(again)["before"].startswith("block 1: ")
    # If the probe announced figures and did not draw them, its results would stay pending.
    assert not list((tmp_path / "out/pictures").rglob("*.png"))
    assert not Conditioning(protocol="mean_log").list_figures((2,), photographs.images(), 0)
