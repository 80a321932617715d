"""The conditioning probe: its numbers are those of the matrices of the encoder itself."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from probes.conditioning.cka import linear_cka
from probes.conditioning.decomposition import decompose_block
from probes.conditioning.probe import Conditioning
from probes.conditioning.scores import CELLS
from probes.spectra import mean_cosine
from ssl_bench.cli.__main__ import main
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import Evaluation
from ssl_bench.models import (
    VisionTransformer,
    ViTConfig,
    build_vit,
    encoder_from_model,
    load_encoder,
    save_encoder,
)
from ssl_bench.planning import plan_probes
from ssl_bench.results import ResultStore
from ssl_bench.tables.depth import depth_tables
from tests.support.configured import configured
from tests.support.matrices import condition, normal, rank

TINY = ViTConfig(image_size=16, patch_size=8, dim=12, depth=2, num_heads=2)
FILES = ("blocks-0-1.png", "blocks-0-1-spectra.npz", "blocks-0-1-cka.npy")
BARE = replace(TINY, skip_attention=False, skip_mlp=False)


def passed(config=TINY, seed=0, tokens=5):
    """A block in float64, what enters it and what leaves it."""
    block = build_vit(config, seed=seed).double().eval().requires_grad_(False).blocks[0]
    x = normal(tokens, config.dim, seed=9)
    return block, x, block(x[None])[0]


def test_the_attention_matrix_of_one_head_is_that_computed_by_hand():
    config = replace(TINY, dim=2, num_heads=1)
    block, x, _ = passed(config, tokens=2)
    with torch.no_grad():
        # q = x, k = 2 x; logits x_i . x_j * 2 / sqrt(2).
        thirds = torch.cat([torch.eye(2), 2 * torch.eye(2), torch.eye(2)])
        block.get_parameter("attn.qkv.weight").copy_(thirds)
        block.get_parameter("attn.qkv.bias").zero_()
    parts = decompose_block(block, x, block(x[None])[0], num_heads=1)
    assert parts is not None
    assert parts.heads is not None
    tokens = torch.tensor([[1.0, 0.0], [0.0, 2.0]]).double()

    (matrix,) = parts.heads.matrices(tokens)

    first, second = math.exp(2**0.5), math.exp(4 * 2**0.5)
    expected = [[first / (first + 1), 1 / (first + 1)], [1 / (second + 1), second / (second + 1)]]
    np.testing.assert_allclose(matrix, expected, rtol=1e-12)


@pytest.mark.parametrize("config", [TINY, BARE, replace(BARE, skip_mlp=True)])
def test_the_parts_of_a_block_give_what_the_block_gives(config):
    block, x, left = passed(config)
    parts = decompose_block(block, x, left, num_heads=2)
    assert parts is not None
    assert parts.heads is not None
    torch.testing.assert_close(parts(x), left, rtol=1e-12, atol=1e-12)
    normed = parts.norm1(x)
    torch.testing.assert_close(parts.heads.output(normed), parts.attention(normed))
    assert decompose_block(block, x, left + 1e-3, num_heads=2) is None
    # Three heads would be another encoder's matrices.
    three = decompose_block(block, x, left, num_heads=3)
    assert three is not None
    assert three.heads is None


@pytest.fixture
def photographs(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name, shape in (("a", (40, 60, 3)), ("b", (60, 40, 3)), ("c", (50, 50, 3))):
        small = generator.integers(0, 255, (5, 5, 3), dtype=np.uint8)
        Image.fromarray(small).resize((shape[1], shape[0])).save(folder / f"{name}.png")
    return ImageFolder(folder)


def probe(photographs, out, encoder, said=None, layers=(0, 1), **options):
    options = {"num_images": 2, "image_size": 16, **options}
    evaluation = Evaluation(
        encoder=encoder,
        dataset=photographs,
        probe=Conditioning(**options),
        layers=layers,
        seed=0,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    say = (lambda _: None) if said is None else said.append
    return evaluation.run(ResultStore(out), say=say, overwrite=True)


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
    image = Image.open(tmp_path / "photos" / "a.png").resize((16, 16), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(c).view(3, 1, 1) for c in (encoder.mean, encoder.std))
    model = copy.deepcopy(encoder.module).double()
    assert isinstance(model, VisionTransformer)
    x = model.embed(((pixels - mean) / std)[None].double())
    attn, norm1, mlp_part, norm2 = (
        model.get_submodule(f"blocks.0.{name}") for name in ("attn", "norm1", "mlp", "norm2")
    )
    update = attn(norm1(x))[0]
    middle = x[0] + update
    mlp = mlp_part(norm2(middle)[None])[0]
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


def test_the_input_of_the_cka_matrix_is_the_patch_embedding_whatever_blocks_are_asked(place):
    words = ["probe", "--task", "conditioning", "--checkpoint", "encoder.safetensors"]
    words += ["--dataset", "folder", "--data-root", "photos"]
    for out, layers in (("all", "all"), ("last", "1")):
        more = ["--layer", layers, "--out", out, "probe.image_size=32"]
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
    assert table.best_layer("silent") is None


def test_a_table_shows_the_ends_of_an_interval_that_is_not_symmetric(photographs, tmp_path):
    (record, *_) = probe(photographs, tmp_path, tiny(), layers=(0,))

    def shown(value, ci95, **changes):
        changed = replace(record, value=value, ci95=ci95, **changes)
        (table,) = depth_tables([changed])
        return table.title, table.entries[0, "tiny"].text()

    title, text = shown(12345.0, (9e3, math.inf))
    assert text == "1.23e+04 [9e+03, ∞]"
    assert title.startswith("conditioning: condition_number on folder all, attention_matrix")
    assert shown(0.5, None)[1] == "0.5"
    title, text = shown(12.34, (11.0, 13.0), unit="%")
    assert title.startswith("conditioning: condition_number (%) on")
    assert text == "12.3 [11.0, 13.0]"
    assert shown(12.0, (11.0, 13.0), unit="%")[1] == "12.0 ± 1.0"


@pytest.mark.slow
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
    for protocol in ("jacobian_exact", "jacobian_lanczos"):
        jacobian = probe(
            photographs, tmp_path, encoder_from_model(model, name="constant"), protocol=protocol
        )
        assert {(r.facet, r.metric) for r in jacobian} == set(CELLS[protocol])
        # Attention that does not move over attention of nothing.
        nan = {r.metric.removesuffix("_estimate") for r in jacobian if math.isnan(r.value)}
        assert nan <= {"norm_over_dominant"}


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


def test_the_weights_before_training_are_those_of_the_seed(photographs, tmp_path):
    model = build_vit(TINY, seed=0)
    fresh = probe(photographs, tmp_path, encoder_from_model(model, name="a"))
    with torch.no_grad():
        model.get_parameter("blocks.0.attn.qkv.weight").mul_(7)
    trained = encoder_from_model(model, name="a")

    changed = probe(photographs, tmp_path, trained)
    again = probe(photographs, tmp_path, trained, at_initialisation=True)

    assert [r.value for r in again] == [r.value for r in fresh]
    assert changed[0].value != fresh[0].value
    assert again[0].settings["at_initialisation"]
    foreign = replace(trained, module=torch.nn.Identity())
    with pytest.raises(ConfigurationError, match="at_initialisation needs a checkpoint"):
        probe(photographs, tmp_path, foreign, at_initialisation=True)


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


@pytest.mark.parametrize(
    "wrong",
    [
        {"protocol": "video"},
        {"num_images": 0},
        {"num_steps": 0},
        {"compare_to": "a"},
    ],
)
def test_a_wrong_hyperparameter_is_named(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        configured(Conditioning, **wrong)


@pytest.mark.parametrize("protocol", CELLS)
def test_every_protocol_can_be_asked_for_on_the_command_line(photographs, protocol):
    overrides = [f"probe.protocol={protocol}"]
    if protocol == "checkpoints":
        with pytest.raises(ConfigurationError, match=r"needs probe\.compare_to"):
            plan_probes(["conditioning"], ["folder"], overrides)[0].probe.split(photographs)
        overrides.append("probe.compare_to=timm:vit_tiny_patch16_224")
    (planned,) = plan_probes(["conditioning"], ["folder"], overrides)
    assert planned.probe.protocol == protocol
    assert planned.probe.split(photographs) is not None


def test_encoders_of_other_tokens_are_not_compared(photographs, tmp_path):
    path = Path(tmp_path / "coarse" / "last.safetensors")
    path.parent.mkdir()
    save_encoder(path, build_vit(replace(TINY, patch_size=16), seed=0), {})
    with pytest.raises(ConfigurationError, match="same tokens: tiny has 5, coarse 2"):
        probe(photographs, tmp_path, tiny(), protocol="checkpoints", compare_to=str(path))
