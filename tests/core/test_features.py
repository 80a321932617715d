"""Test the extraction of features from an encoder."""

import itertools
import re
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from ssl_bench.errors import CheckpointError, ConfigurationError, UnsupportedEncoderError
from ssl_bench.features import Facet, FeatureExtractor
from ssl_bench.layers import FACETS, resolve_layers
from ssl_bench.models import Encoder, ViTConfig, build_vit, encoder_from_model, load_encoder
from ssl_bench.models.timm_model import TimmBackbone
from ssl_bench.models.vit import resize_positions

TINY = ViTConfig(image_size=32, patch_size=8, dim=48, depth=3, num_heads=3)
ALL = (0, 1, 2)


def ours(**changes: Any) -> Encoder:
    return encoder_from_model(
        build_vit(ViTConfig(**{**TINY.to_dict(), **changes}), seed=0), name="x"
    )


def of_timm(dim: int = 48, depth: int = 3, num_heads: int = 3, **changes: Any) -> Encoder:
    model = timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=dim, depth=depth, num_heads=num_heads, num_classes=0,
        dynamic_img_size=True, **changes,
    )  # fmt: skip
    return Encoder(
        module=TimmBackbone(model).eval(), name="timm", uri="memory", sha256="", architecture={},
        patch_size=8, depth=depth, dim=dim, num_heads=num_heads,
        num_prefix_tokens=model.num_prefix_tokens, native_size=(32, 32),
    )  # fmt: skip


def timm_twin(encoder: Encoder) -> Encoder:
    twin = of_timm()
    twin.module.get_submodule("model").load_state_dict(encoder.module.state_dict())
    return twin


def largest_difference(one: dict, other: dict) -> float:
    return max(
        float((one[layer][facet] - other[layer][facet]).abs().max())
        for layer in one
        for facet in one[layer]
    )


def count_hooks(module: nn.Module) -> int:
    return sum(len(part._forward_hooks) for part in module.modules())


@pytest.mark.parametrize("size", [(32, 32), (24, 56)])
def test_every_facet_equals_timm_with_the_same_weights(size):
    encoder = ours()
    images = torch.rand(2, 3, *size)
    one = FeatureExtractor(encoder, layers=ALL, facets=FACETS)(images)
    other = FeatureExtractor(timm_twin(encoder), layers=ALL, facets=FACETS)(images)
    assert largest_difference(one, other) < 1e-5
    assert one[2]["token"].shape == (2, size[0] // 8, size[1] // 8, 48)


def test_tokens_equal_those_of_timm():
    # At the native size, timm does not resample its positions.
    encoder = timm_twin(ours())
    images = torch.rand(2, 3, 32, 32)
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (encoder.mean, encoder.std))
    model: Any = encoder.module.get_submodule("model")
    with torch.no_grad():
        expected = model.get_intermediate_layers((images - mean) / std, n=[0, 1, 2], reshape=True)
    found = FeatureExtractor(encoder, layers=ALL)(images)
    for layer in ALL:
        difference = found[layer]["token"] - expected[layer].permute(0, 2, 3, 1)
        assert difference.abs().max() < 1e-5


def test_positions_of_timm_are_resized_like_ours_and_restored():
    encoder = timm_twin(ours())
    module = encoder.module
    assert isinstance(module, TimmBackbone)
    before = module.model.pos_embed
    assert before is not None
    seen: list[Tensor] = []
    patches = module.model.patch_embed(torch.zeros(1, 3, 24, 56)).flatten(1, 2)
    mean = torch.tensor(encoder.mean).view(1, 3, 1, 1).expand(1, 3, 24, 56)
    with module.model.norm_pre.register_forward_hook(lambda *io: seen.append(io[-1])):
        FeatureExtractor(encoder, layers=[0])(mean)
    resized = resize_positions(before, old_size=(4, 4), new_size=(3, 7))
    torch.testing.assert_close(seen[0][:, 1:], patches + resized[:, 1:], rtol=0, atol=1e-6)
    assert module.model.pos_embed is before
    assert module.model.patch_embed.grid_size == (4, 4)


def test_query_key_and_value_are_consecutive_thirds_of_qkv():
    encoder = ours()
    seen: list[Tensor] = []
    facets = ("query", "key", "value")
    qkv = encoder.module.get_submodule("blocks.1.attn.qkv")
    with qkv.register_forward_hook(lambda *io: seen.append(io[-1])):
        found = FeatureExtractor(encoder, layers=[1], facets=facets)(torch.rand(2, 3, 16, 24))[1]
    for third, facet in enumerate(facets):
        expected = seen[0][:, 1:, third * 48 : (third + 1) * 48].reshape(2, 2, 3, 48)
        assert torch.equal(found[facet], expected)


def test_normed_facets_apply_the_final_norm_as_in_the_output():
    encoder = ours()
    images = torch.rand(2, 3, 32, 32)
    facets = ["token", "token_normed", "cls", "cls_normed"]
    found = FeatureExtractor(encoder, layers=ALL, facets=facets)(images)
    norm = encoder.module.get_submodule("norm")
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (encoder.mean, encoder.std))
    output = encoder.module((images - mean) / std)
    for layer in ALL:
        for facet in ("token", "cls"):
            normed = found[layer][f"{facet}_normed"]
            torch.testing.assert_close(normed, norm(found[layer][facet]), rtol=0, atol=1e-6)
    torch.testing.assert_close(found[2]["cls_normed"], output)


def test_a_changed_patch_changes_the_feature_at_its_position():
    encoder = ours()
    extractor = FeatureExtractor(encoder, layers=[0], facets=["value"])
    image = torch.full((1, 3, 24, 40), 0.5)
    changed = image.clone()
    # The changed patch is in row 1 and column 4. The values of block 0 do not mix patches.
    changed[..., 8:16, 32:40] = 0.9
    difference = extractor(image)[0]["value"] - extractor(changed)[0]["value"]
    moved = difference.abs().amax(-1)[0] > 1e-6
    assert moved.nonzero().tolist() == [[1, 4]]


@pytest.mark.parametrize(
    "kwargs", [{"class_token": False, "global_pool": "avg"}, {"reg_tokens": 2}]
)
def test_timm_models_without_class_token_and_with_registers_work(kwargs):
    encoder = of_timm(**kwargs)
    images = torch.rand(1, 3, 24, 40)
    found = FeatureExtractor(encoder, layers=[2], facets=["token", "key"])(images)[2]
    seen: list[Tensor] = []
    block = encoder.module.get_submodule("blocks.2")
    with block.register_forward_hook(lambda *io: seen.append(io[-1])):
        FeatureExtractor(encoder, layers=[2])(images)
    assert torch.equal(found["token"].flatten(1, 2), seen[0][:, -15:])
    if "class_token" in kwargs:
        lacking: list[Facet] = ["cls", "cls_normed", "registers"]
        for facet in lacking:
            with pytest.raises(UnsupportedEncoderError) as caught:
                FeatureExtractor(encoder, layers=[0], facets=[facet])
            assert caught.value.hint == ("probe.facet=token", "or", "--facet", "token")


def test_one_pass_computes_the_blocks_up_to_the_deepest_layer():
    encoder, images = ours(), torch.rand(2, 3, 16, 24)
    calls: list[str] = []
    for name in ("patch_embed", "blocks.0", "blocks.1", "blocks.2"):
        part = encoder.module.get_submodule(name)
        part.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    extractor = FeatureExtractor(encoder, layers=ALL, facets=FACETS)
    calls.clear()
    everything = extractor(images)
    assert calls == ["patch_embed", "blocks.0", "blocks.1", "blocks.2"]
    extractor = FeatureExtractor(encoder, layers=[1, 0, 1], facets=[*FACETS, *FACETS])
    calls.clear()
    shallow = extractor(images)
    assert calls == ["patch_embed", "blocks.0", "blocks.1"]
    assert list(shallow) == [1, 0]
    assert largest_difference(shallow, everything) == 0


def test_no_hook_stays_after_a_pass_or_an_error():
    encoder = ours()
    extractor = FeatureExtractor(encoder, layers=[2], facets=FACETS)
    extractor(torch.rand(1, 3, 16, 16))
    assert count_hooks(encoder.module) == 0
    extractor._module = encoder.module.double()
    with pytest.raises(RuntimeError):
        extractor(torch.rand(1, 3, 16, 16))
    assert count_hooks(encoder.module) == 0


def test_heads_can_be_trained_on_features_which_have_no_graph():
    encoder = ours()
    encoder.module.requires_grad_(True)
    features = FeatureExtractor(encoder, layers=[0])(torch.rand(1, 3, 16, 16))[0]["token"]
    head = nn.Linear(48, 2)
    head(features).sum().backward()
    assert not features.requires_grad
    assert not features.is_inference()
    assert head.weight.grad is not None


def test_normalised_images_are_padded_with_zeros_right_and_bottom():
    encoder = ours()
    images = torch.rand(1, 3, 13, 30)
    with pytest.raises(ConfigurationError, match=r"13 x 30 .*16 x 32"):
        FeatureExtractor(encoder, layers=[2])(images)
    padded = FeatureExtractor(encoder, layers=[2], pad=True)(images)[2]["token"]
    # The mean becomes zero by normalisation.
    by_hand = torch.tensor(encoder.mean).view(1, 3, 1, 1).repeat(1, 1, 16, 32)
    by_hand[..., :13, :30] = images
    expected = FeatureExtractor(encoder, layers=[2])(by_hand)[2]["token"]
    torch.testing.assert_close(padded, expected, rtol=0, atol=1e-6)


def test_bfloat16_features_are_close_and_returned_as_float32():
    images = torch.rand(1, 3, 16, 24)
    exact, lower = (
        FeatureExtractor(ours(), layers=[2], facets=FACETS, dtype=dtype)(images)[2]
        for dtype in (torch.float32, torch.bfloat16)
    )
    for facet in FACETS:
        assert lower[facet].dtype == torch.float32
        assert not torch.equal(lower[facet], exact[facet])
        torch.testing.assert_close(lower[facet], exact[facet], rtol=0.1, atol=0.1)


def test_images_beyond_the_range_of_float16_are_computed_in_float32(capsys):
    encoder = ours()
    # Products with these weights exceed 65504, except for an image of the mean colour.
    weight: Any = encoder.module.get_submodule("patch_embed.proj").weight
    weight.data *= 2e5
    mean = torch.tensor(encoder.mean).view(1, 3, 1, 1).expand(1, 3, 16, 24)
    bright = torch.rand(2, 3, 16, 24)
    options: dict[str, Any] = {"layers": ALL, "facets": ("token", "cls", "key")}
    half = FeatureExtractor(encoder, dtype=torch.float16, **options)
    exact = FeatureExtractor(encoder, **options)

    found, sums = half.extract_unchecked(torch.cat([bright[:1], mean, bright[1:]]))

    assert not half.extract_in_one_precision(bright)[1].isfinite().any()
    expected, expected_sums = exact.extract_unchecked(bright)
    of_mean, _ = half.extract_unchecked(mean)
    for layer, by_facet in found.items():
        for facet, values in by_facet.items():
            assert torch.equal(values[[0, 2]], expected[layer][facet])
            torch.testing.assert_close(values[[1]], of_mean[layer][facet], rtol=2e-3, atol=2e-3)
    assert torch.equal(sums[:, [0, 2]], expected_sums)
    assert not torch.equal(of_mean[2]["key"], exact(mean)[2]["key"])
    # A message gives the number of images after 1, 2, 4, 8, ... of them.
    for _ in range(3):
        half(bright[:1])
    lines = capsys.readouterr().err.splitlines()
    assert [re.findall(r"\d+", line) for line in lines] == [["32", "16", "2"], ["32", "16", "4"]]


def test_only_blocks_beyond_float16_range_are_computed_in_float32():
    encoder = ours()
    weight: Any = encoder.module.get_submodule("blocks.2.mlp.fc2").weight
    weight.data *= 1e7
    images = torch.rand(2, 3, 16, 24)
    # The block computes its keys before its tokens.
    options: dict[str, Any] = {"facets": ("token", "key"), "dtype": torch.float16}

    found = FeatureExtractor(encoder, layers=ALL, **options)(images)

    earlier = FeatureExtractor(encoder, layers=[0, 1], **options)(images)
    keys = FeatureExtractor(encoder, layers=[2], facets=("key",), dtype=torch.float16)(images)
    exact = FeatureExtractor(encoder, layers=[2], facets=("token", "key"))(images)
    for layer, facet in itertools.product((0, 1), ("token", "key")):
        assert torch.equal(found[layer][facet], earlier[layer][facet])
    assert torch.equal(found[2]["key"], keys[2]["key"])
    assert not torch.equal(found[2]["key"], exact[2]["key"])
    assert torch.equal(found[2]["token"], exact[2]["token"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_features_on_a_gpu_equal_those_on_a_cpu():
    images = torch.rand(2, 3, 32, 48)
    cpu = FeatureExtractor(ours(), layers=ALL, facets=FACETS)(images)
    gpu = FeatureExtractor(ours(), layers=ALL, facets=FACETS, device="cuda")(images)
    moved = {layer: {f: v.cpu() for f, v in item.items()} for layer, item in gpu.items()}
    assert largest_difference(cpu, moved) < 5e-3


def test_a_model_without_a_qkv_layer_has_only_tokens():
    encoder = load_encoder("timm:vit_pwee_patch16_reg1_gap_256")
    images = torch.rand(1, 3, 32, 32)
    assert FeatureExtractor(encoder, layers=[0])(images)[0]["token"].shape == (1, 2, 2, 256)
    with pytest.raises(UnsupportedEncoderError, match="key") as caught:
        FeatureExtractor(encoder, layers=[0], facets=["key"])(images)
    assert caught.value.hint == ("probe.facet=token", "or", "--facet", "token")


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("-1", (11,)), ("all", tuple(range(12))), (" 3, 1 ,3,-11", (3, 1)), (7, (7,)),
        ([5, -12, 5], (5, 0)),
        # A range includes both of its ends.
        ("3-5", (3, 4, 5)), ("9..-1", (9, 10, 11)), ("-3..-2,0-0", (9, 10, 0)),
    ],
)  # fmt: skip
def test_layers_are_resolved_in_their_order_without_duplicates(layers, expected):
    assert resolve_layers(layers, 12) == expected


@pytest.mark.parametrize("layers", ["12", "0,-13", [], "last", "1,,2", "1.5", "3-1"])
def test_invalid_layers_are_refused(layers):
    with pytest.raises(ConfigurationError):
        resolve_layers(layers, 12)
    with pytest.raises(ConfigurationError):
        FeatureExtractor(ours(), layers=[3])


@pytest.fixture
def limited_encoder():
    encoder, batch_sizes = ours(), []

    def refuse(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        batch_sizes.append(len(arguments[0]))
        if batch_sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with encoder.module.register_forward_pre_hook(refuse):
        yield encoder, batch_sizes


def test_too_large_batches_are_halved_and_give_the_same_features(limited_encoder, capsys):
    encoder, batch_sizes = limited_encoder
    images = torch.rand(7, 3, 32, 32)
    whole = FeatureExtractor(ours(), layers=ALL, facets=["token", "cls"])(images)
    extractor = FeatureExtractor(encoder, layers=ALL, facets=["token", "cls"])

    parts = extractor(images)

    assert batch_sizes == [7, 3, 1, 1, 1, 1, 1, 1, 1]
    assert largest_difference(parts, whole) < 1e-6
    lines = capsys.readouterr().err.splitlines()
    assert [re.findall(r"\d+", line) for line in lines] == [["7", "3"], ["3", "1"]]
    batch_sizes.clear()
    extractor(images[:3])
    assert batch_sizes == [1, 1, 1]
    assert not capsys.readouterr().err


def test_non_finite_values_are_found_anywhere_in_a_batch(limited_encoder):
    encoder, _ = limited_encoder
    images = torch.rand(5, 3, 32, 32)
    images[3] = torch.nan

    with pytest.raises(CheckpointError, match=r"block 0 .* for d:"):
        FeatureExtractor(encoder, layers=ALL)(images, ids="abcde")
    with pytest.raises(CheckpointError, match=r"block 1 .* image 3 "):
        FeatureExtractor(encoder, layers=[1, 2])(images)


def test_the_first_block_with_non_finite_values_is_named():
    encoder = ours()
    last = list(encoder.module.get_submodule("blocks").children())[2]
    with last.register_forward_hook(lambda _module, _inputs, output: output * torch.nan):
        extractor = FeatureExtractor(encoder, layers=ALL, facets=["cls", "token"])
        with pytest.raises(CheckpointError, match="block 2 "):
            extractor(torch.rand(2, 3, 32, 32))


def test_single_images_that_are_too_large_raise_the_device_error():
    encoder = ours()

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with encoder.module.register_forward_pre_hook(refuse), pytest.raises(torch.OutOfMemoryError):
        FeatureExtractor(encoder, layers=ALL)(torch.rand(2, 3, 32, 32))
