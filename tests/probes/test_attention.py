"""Test the attention maps of the [CLS] token."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from probes.attention.probe import (
    Attention,
    AttentionScores,
    entropy_share,
    mask_counts,
    mass_masks,
    score_block,
    score_image,
    to_colours,
)
from probes.attention.recording import AttentionRecorder, attention_weights
from ssl_bench.cli.__main__ import main
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.data.layouts.image_mask_folders import ImageMaskFolders
from ssl_bench.data.samples import Sample
from ssl_bench.errors import CheckpointError, DataError, UnsupportedEncoderError
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import Encoder, ViTConfig, build_vit, encoder_from_model, save_encoder
from ssl_bench.models.loading.timm_encoder import timm_encoder
from ssl_bench.results import ResultStore
from ssl_bench.system.files import TILES
from tests.support.faults import expect_error, paired_folders
from tests.support.own_module import Own
from tests.support.photographs import evaluate_probe

TINY = ViTConfig(image_size=32, patch_size=8, dim=24, depth=2, num_heads=3)
ALL = slice(None)


def vit(seed: int = 0, **changes: Any) -> Any:
    return build_vit(replace(TINY, **changes), seed=seed)


def small_timm(name: str, **changes: Any) -> Encoder:
    torch.manual_seed(0)
    model = timm.create_model(
        name, num_classes=0, depth=2, embed_dim=24, num_heads=3, dynamic_img_size=True, **changes
    )
    return timm_encoder(perturb(model.eval()), uri="memory", name=name, sha256="")


def perturb(model: Any) -> Any:
    # No parameter may stay 0 or 1.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


ENCODERS = {
    "vit": lambda: encoder_from_model(perturb(vit(num_registers=2)), name="vit"),
    "vit without skips": lambda: encoder_from_model(
        perturb(vit(skip_attention=False, skip_mlp=False, num_registers=2)), name="skipless"
    ),
    "dino": lambda: small_timm("vit_small_patch16_224"),
    "dinov2": lambda: small_timm("vit_small_patch14_reg4_dinov2"),
    "norms of queries and keys": lambda: small_timm("vit_small_patch16_224", qk_norm=True),
    "eva": lambda: small_timm("eva02_tiny_patch14_224"),
    "dinov3": lambda: small_timm("vit_small_patch16_dinov3"),
}


@pytest.mark.parametrize("kind", ENCODERS)
def test_recorded_weights_reproduce_the_output_of_attention(kind):
    encoder = ENCODERS[kind]()
    extractor = FeatureExtractor(encoder, layers=[0, 1], facets=["attn_out"])
    images = torch.rand(2, 3, 2 * encoder.patch_size, 3 * encoder.patch_size)
    blocks = encoder.module.get_submodule("blocks")
    values: dict[int, torch.Tensor] = {}
    for layer in (0, 1):
        qkv = blocks.get_submodule(f"{layer}.attn.qkv")
        qkv.register_forward_hook(
            lambda _, __, out, layer=layer: values.update({layer: out.chunk(3, -1)[2]})
        )

    weights = AttentionRecorder(extractor, ALL)(images)

    expected, of_cls = extractor(images), AttentionRecorder(extractor)(images)
    for layer, block_weights in weights.items():
        block: Any = blocks.get_submodule(str(layer))
        torch.testing.assert_close(block_weights.sum(-1), torch.ones(2, 3, block_weights.shape[2]))
        torch.testing.assert_close(of_cls[layer], block_weights[:, :, :1])
        heads = block_weights @ values[layer].unflatten(2, (3, -1)).transpose(1, 2)
        mixing_encoder = heads.transpose(1, 2).flatten(2)
        output = block.attn.proj(getattr(block.attn, "norm", nn.Identity())(mixing_encoder))
        scale = getattr(block, "ls1", None) or getattr(block, "gamma_1", None)
        if scale is not None:
            output = scale(output) if isinstance(scale, nn.Module) else scale * output
        patches = output[:, encoder.num_prefix_tokens :].unflatten(1, (2, 3))
        torch.testing.assert_close(patches, expected[layer]["attn_out"], rtol=1e-4, atol=1e-6)


def test_scale_bias_mask_and_shared_keys_work_as_in_torch():
    generator = torch.Generator().manual_seed(0)
    q, v = torch.randn(2, 1, 4, 5, 3, generator=generator)
    k, bias = torch.randn(1, 4, 5, 3, generator=generator), torch.randn(1, 4, 5, 5)
    allowed = torch.ones(1, 1, 1, 5, dtype=torch.bool)
    allowed[..., 2] = False
    cases: list[dict[str, Any]] = [
        {}, {"scale": 0.3}, {"attn_mask": bias}, {"attn_mask": allowed}, {"is_causal": True},
    ]  # fmt: skip
    for options in cases:
        expected = F.scaled_dot_product_attention(q, k, v, **options)
        torch.testing.assert_close(attention_weights(q, k, ALL, **options) @ v, expected)
    shared = {"enable_gqa": True}
    expected = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], **shared)
    weights = attention_weights(q, k[:, :2], ALL, **shared)
    torch.testing.assert_close(weights @ v[:, :2].repeat_interleave(2, 1), expected)


class TwoBlocks(nn.Module):
    """A ViT with two blocks. The function `mix` computes the attention."""

    def __init__(self, mix: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.cls = nn.Conv2d(3, 16, 8, 8), nn.Parameter(torch.randn(1, 1, 16))
        self.blocks = nn.ModuleList(MixingBlock(mix) for _ in range(2))

    def forward(self, images):
        patches = self.embed(images).flatten(2).mT
        x = torch.cat([self.cls.expand(len(images), -1, -1), patches], 1)
        for block in self.blocks:
            x = block(x)
        return x


class MixingBlock(nn.Module):
    def __init__(self, mix: Any) -> None:
        super().__init__()
        self.qkv, self.mix = nn.Linear(16, 48), mix

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + self.mix(q, k, v).transpose(1, 2).flatten(2)


def mixing_encoder(mix: Any) -> Encoder:
    return Encoder.from_module(
        TwoBlocks(mix).eval(), patch_size=8, image_size=32, mean=0.5, std=0.5, blocks="blocks"
    )


def fused_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def explicit_attention(q, k, v):
    return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1) @ v


def record_weights(encoder: Encoder) -> dict[int, torch.Tensor]:
    images = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return AttentionRecorder(FeatureExtractor(encoder, layers=[0, 1]))(images)


def test_fused_and_explicit_attention_give_the_same_map():
    fused, explicit = (
        record_weights(mixing_encoder(mix)) for mix in (fused_attention, explicit_attention)
    )
    for layer, weights in fused.items():
        torch.testing.assert_close(weights, explicit[layer])
        assert weights.shape == (1, 2, 1, 17)


def test_multihead_attention_of_torch_gives_maps_and_unchanged_outputs():
    torch.manual_seed(0)
    encoder = Encoder.from_module(Own().eval(), patch_size=8, image_size=32, mean=0.5, std=0.5)
    extractor = FeatureExtractor(encoder, layers=[0, 1])
    images = torch.rand(1, 3, 32, 32)
    before = extractor(images)
    layer: Any = encoder.module.get_submodule("blocks.1")

    weights = AttentionRecorder(extractor, ALL)(images)

    assert torch.equal(extractor(images)[1]["token"], before[1]["token"])
    outputs = {}
    layer.ln_1.register_forward_hook(lambda _, __, out: outputs.update(x=out))
    extractor(images)
    x, attention = outputs["x"], layer.attention
    expected = attention(x, x, x, average_attn_weights=False)[1]
    torch.testing.assert_close(weights[1], expected)


def test_attention_beyond_the_range_of_float16_is_refused():
    # Features would be computed again in float32, but each block must compute attention once.
    encoder = mixing_encoder(fused_attention)
    weights = dict(encoder.module.named_parameters())
    next(w for name, w in weights.items() if name.endswith("embed.weight")).data *= 2e5
    extractor = FeatureExtractor(encoder, layers=[0, 1], dtype=torch.float16)
    with pytest.raises(CheckpointError) as caught:
        AttentionRecorder(extractor)(torch.rand(1, 3, 32, 32))
    assert caught.value.hint == ("dtype=float32",)


def windowed_attention(q, k, v):
    return torch.cat([fused_attention(*(x[:, :, :9] for x in (q, k, v))), v[:, :, 9:]], 2)


def class_attention(q, k, v):
    return torch.cat([fused_attention(q[:, :, :1], k, v), v[:, :, 1:]], 2)


def nested_attention(q, k, v):
    return fused_attention(q, k, fused_attention(q, k, v))


@pytest.mark.parametrize(
    ("mix", "problem"),
    [
        (windowed_attention, "9 to 9 tokens"),
        (class_attention, "1 to 17 tokens"),
        (nested_attention, "2 times"),
    ],
)
def test_partial_and_repeated_attention_are_refused(mix, problem):
    with pytest.raises(UnsupportedEncoderError, match=problem) as caught:
        record_weights(mixing_encoder(mix))
    assert caught.value.exit_code == 2
    assert caught.value.hint == ("--task", "pca")


@pytest.mark.parametrize("attention", ["linear", "osa_qr"])
def test_a_command_refuses_attention_without_softmax(tmp_path, monkeypatch, capsys, attention):
    monkeypatch.chdir(tmp_path)
    options = {"attention": attention, "qkv_bias": attention == "linear"}
    save_encoder(tmp_path / "other.safetensors", vit(**options), {})
    paired_folders(tmp_path / "images", {"all": ["a"]}, images="x", masks="y")
    words = ["probe", "--task", "attention", "--checkpoint", "other.safetensors"]
    words += ["--dataset", "folder", "--data-root", "images/x"]

    line = expect_error(capsys, words, 2)

    assert "block 0" in line
    assert "`--task pca`" in line
    assert not list(Path("head_results/records").rglob("*.json"))


def test_an_encoder_without_cls_is_refused_before_images_are_read(encoder_without_cls):
    with pytest.raises(UnsupportedEncoderError) as caught:
        Attention().check_encoder(encoder_without_cls)
    assert caught.value.hint == ("--task", "pca")


def test_the_mask_of_equal_patches_contains_the_first_60_percent():
    for shape in ((1, 1), (2, 5), (3, 7), (5, 5), (37, 37)):
        patches = math.prod(shape)

        mask = mass_masks(torch.full(shape, 0.013, dtype=torch.float64), 0.6).flatten()

        first = math.ceil(round(0.6 * patches, 9))
        assert mask.tolist() == [True] * first + [False] * (patches - first)


def test_the_mask_of_one_dominant_logit_is_its_patch():
    q, k = torch.ones(1, 1, 10, 1), torch.zeros(1, 1, 10, 1)
    k[0, 0, 4] = torch.finfo(torch.float32).max

    maps = attention_weights(q, k)[0, :, 0, 1:].double().unflatten(1, (3, 3))

    assert mass_masks(maps, 0.6).flatten().nonzero().tolist() == [[3]]
    assert entropy_share(maps).tolist() == [0]


def test_masks_equal_those_of_the_dino_script():
    generator = np.random.default_rng(0)
    for _ in range(50):
        values = generator.exponential(size=(4, 5)) ** 3
        ascending = np.argsort(values.ravel())
        cumulative = np.cumsum(values.ravel()[ascending]) / values.sum()
        expected = np.zeros(20, bool)
        expected[ascending[cumulative > 1 - 0.6]] = True

        mask = mass_masks(torch.from_numpy(values), 0.6).numpy().ravel()

        assert (mask == expected).all()
        shares = values.ravel() / values.sum()
        assert shares[mask].sum() > 0.6 >= shares[mask].sum() - shares[mask].min()


def test_pixels_are_counted_as_in_an_enlarged_mask():
    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(3, 4, 5, generator=generator) < 0.5
    truth = np.random.default_rng(0).choice(np.array([0, 1, 255], np.uint8), size=(33, 41))

    found = mask_counts(masks, truth)

    large = F.interpolate(masks[None].float(), truth.shape, mode="nearest-exact")[0].bool().numpy()
    scored = truth != 255
    for mask, counts in zip(large, found, strict=True):
        true = truth == 1
        expected = [(mask & true).sum(), (mask & scored).sum(), true.sum(), scored.sum()]
        assert counts.tolist() == expected


def test_an_image_is_scored_by_its_heads_and_their_mean():
    truth = np.zeros((4, 4), np.uint8)
    truth[:2] = 1
    truth[0, 0] = 255
    top, left, flat = torch.zeros(3, 2, 2, dtype=torch.float64)
    top[0], left[:, 0] = 0.5, 0.25
    flat += 0.25

    result = score_image(torch.stack([top, left, flat]), truth, 0.6)

    # The left half contains three of the object's seven pixels, and four other pixels.
    assert result.jaccard is not None
    assert result.jaccard.tolist() == pytest.approx([100, 100 * 3 / 11, 100 * 7 / 11])
    # The mean map is proportional to 1, 0.75, 0.5 and 0.25: the first two patches have 70 %.
    assert result.jaccard_mean_map == pytest.approx(100)
    assert result.entropy.tolist() == pytest.approx([0.5, 0.5, 1])
    assert result.patch_share.tolist() == pytest.approx([1, 0.5, 1])
    assert not result.is_degenerate
    assert score_image(flat[None], None, 0.6).is_degenerate
    assert score_image(torch.zeros(1, 2, 2).double(), truth, 0.6).entropy.tolist() == [1]


def head_results(by_head: np.ndarray) -> list[AttentionScores]:
    same = np.full(by_head.shape[1], 0.9)
    return [
        AttentionScores(row, float(row.min()), {"centre box": 10.0}, True, same, same, False)
        for row in by_head
    ]


def test_the_head_of_an_image_is_chosen_on_other_images():
    by_head = np.random.default_rng(3).uniform(0, 100, (11, 3))
    # Two heads are nearly equal, so that different folds choose different heads.
    by_head[:, 2] += by_head[:, 0].mean() - by_head[:, 2].mean()
    by_head = by_head.clip(0, 100)
    results = head_results(by_head)
    without_object = {"has_object": False, "entropy": np.array([0.2, 0.35, 0.35])}
    results[0] = replace(results[0], baseline_jaccard={"centre box": 21.0}, **without_object)

    scores = {s.metric: s for s in score_block(4, results, has_truth=True)}

    order = np.random.default_rng(0).permutation(11)
    expected = np.empty(11)
    for fold in np.array_split(order, 5):
        others = [image for image in range(11) if image not in fold]
        expected[fold] = by_head[fold, by_head[others].mean(0).argmax()]
    assert len({*scores["jaccard_holdout"].details["heads"]}) > 1
    assert np.array_equal(np.asarray(scores["jaccard_holdout"].per_image), expected)
    assert np.array_equal(np.asarray(scores["jaccard_best_head"].per_image), by_head.max(1))
    assert np.array_equal(np.asarray(scores["jaccard"].per_image), by_head.mean(1))
    assert np.array_equal(np.asarray(scores["jaccard_mean_map"].per_image), by_head.min(1))
    assert scores["jaccard"].details["best_head"] == by_head.mean(0).argmax()
    assert scores["jaccard"].details["baseline"] == {"answer": "centre box", "value": 11}
    assert {score.details.get("images_without_object", 1) for score in scores.values()} == {1}
    entropy = scores["entropy"]
    assert (entropy.value, entropy.unit) == (pytest.approx((30 * 0.9 + 0.9) / 33), "")


def test_the_interval_of_entropy_stays_below_1():
    (result,) = head_results(np.zeros((1, 1)))
    images = [
        replace(result, entropy=np.array([value]), patch_share=np.array([value / 2]))
        for value in (0.8, 1.0)
    ]

    (score,) = score_block(0, [images[0], replace(images[1], is_degenerate=True)], has_truth=False)

    assert score.value == pytest.approx(0.9)
    assert score.ci95 is not None
    assert 0 <= score.ci95[0] < 0.9 < score.ci95[1] <= 1
    assert score.details["degenerate_percent"] == 50
    assert score.details["by_head"] == pytest.approx([0.9])
    assert score.details["patch_share_by_head"] == pytest.approx([0.45])
    assert score.details["patch_share_by_head"] == pytest.approx([0.45])


def test_the_baseline_is_the_best_constant_mask_over_all_images():
    first, second = head_results(np.array([[20.0, 40.0], [30.0, 10.0]]))
    first = replace(first, baseline_jaccard={"centre": 10.0, "whole": 40.0}, jaccard_mean_map=70.0)
    second = replace(second, baseline_jaccard={"centre": 25.0, "whole": 0.0}, has_object=False)

    scores = {s.metric: s for s in score_block(0, [first, second], has_truth=True)}

    details = scores["jaccard_mean_map"].details
    assert details["baseline"] == {"answer": "whole", "value": 20}
    assert (details["images_without_object"], details["degenerate_percent"]) == (1, 0)
    assert np.array_equal(np.asarray(scores["jaccard_mean_map"].per_image), [70, 10])
    assert scores["jaccard"].details["by_head"] == [25, 25]
    assert scores["jaccard_best_head"].value == 35


def test_sides_are_reduced_to_multiples_of_the_patch():
    sample = Sample("x", np.zeros((39, 63, 3), np.uint8))
    sizes = {(): (32, 56), ("max_side", 40): (24, 40), ("image_size", 48): (48, 48)}
    for option, size in sizes.items():
        options = dict([option] if option else [])
        assert Attention(**options).prepare(sample, 8).shape == (3, *size)


def test_only_settings_that_change_scores_identify_a_result():
    # Without masks, only the images in figures are scored.
    truths: tuple[Literal["classes", "object", "none"], ...] = ("classes", "object", "none")
    numbers = [Attention(truth=truth, panels=3).settings().get("panels") for truth in truths]
    assert numbers == [None, None, 3]
    assert "max_side" not in Attention(image_size=48).settings()


def test_class_0_is_background_only_if_it_is_called_so(tmp_path):
    root = paired_folders(tmp_path / "folders", {"train": ["a"], "val": ["b"]})
    more = [f"class {number}" for number in range(1, 21)]
    stuff = ImageMaskFolders(root, class_names=["wall", *more[1:], "background"])
    objects = ImageMaskFolders(root, class_names=["background", *more])

    assert Attention().adapt_to_dataset(stuff, ()).truth == "none"
    assert Attention().adapt_to_dataset(stuff, ("truth",)).truth == "classes"
    assert Attention().adapt_to_dataset(objects, ()).truth == "classes"
    with pytest.raises(DataError) as caught:
        Attention()._object_mask(Sample("x", np.zeros((8, 8, 3), np.uint8)))
    assert caught.value.hint == ("probe.truth=none",)


def test_all_classes_except_the_background_are_the_object(tmp_path):
    root = paired_folders(tmp_path / "folders", {"train": ["a"], "val": ["b"]})
    names = ["background", *(f"class {number}" for number in range(1, 21))]
    dataset, store = ImageMaskFolders(root, class_names=names), ResultStore(tmp_path / "out")
    encoder = encoder_from_model(vit(), name="tiny")

    # The predicted masks contain all patches.
    records = evaluate_probe(Attention(mass=0.999, panels=0), dataset, store, encoder, [0])

    # A square of 16 x 16 pixels has class 8. Of 32 rows of 40 pixels, one is ignored.
    scores = {record.metric: record.value for record in records}
    assert scores["jaccard"] == pytest.approx(100 * 16 * 16 / (31 * 40))


def test_photographs_without_masks_get_maps_of_all_heads(photographs: ImageFolder, tmp_path):
    store = ResultStore(tmp_path / "out")
    encoder = encoder_from_model(vit(num_registers=2), name="tiny")

    records = evaluate_probe(Attention(truth="none", panels=2), photographs, store, encoder, (0, 1))

    assert {(r.metric, r.unit, r.num_images) for r in records} == {("entropy", "", 2)}
    assert all(0 < record.value <= 1 for record in records)
    paths = sorted(path.relative_to(store.root).as_posix() for path in store.root.rglob("*.png"))
    folders = ("block00", "block01", "blocks-0-1")
    expected = [f"dino/{folder}/{name}.png.png" for folder in folders for name in "bc"]
    assert ["/".join(path.split("/")[-3:]) for path in paths] == expected
    (path,) = store.root.rglob("block01/b.png.png")
    tiles = json.loads(Image.open(path).info[TILES])
    # The tiles are the image, the mean of the heads, and the three heads.
    assert [height for *_, height in tiles] == [192] * 5
    assert tiles[0][2] == 128


def test_one_bright_patch_does_not_darken_the_others():
    values = torch.arange(400, dtype=torch.float64).view(20, 20)
    values[-1, -1] = 1e6

    colours = to_colours(values)

    # These are the ends and the middle of viridis.
    assert colours[0, 0].tolist() == [68, 1, 84]
    assert colours[10, 0].tolist() == pytest.approx([33, 144, 141], abs=6)
    assert colours[-1, -1].tolist() == [253, 231, 37]
    assert (to_colours(values + 1000) == colours).all()
    constant = to_colours(torch.ones(2, 2, dtype=torch.float64))
    assert (constant == constant[0, 0]).all()


@pytest.mark.data
def test_a_published_encoder_has_the_expected_jaccard(shared_data, published_encoder, tmp_path):
    words = ["probe", "--task", "attention", "--checkpoint", str(published_encoder)]
    words += ["--dataset", "voc2012"]
    words += ["--data-root", str(shared_data / "real/voc2012_real100"), "--out", str(tmp_path)]
    words += ["dataset.val_split=trainval:0-10%", "dataset.train_split=trainval:10-100%"]

    assert main([*words, "--layer", "8", "--pictures", "0", "probe.image_size=518"]) == 0

    records = {record.metric: record for record in ResultStore(tmp_path).records()}
    # Another program computed these values from the queries and keys in the ONNX file.
    by_head = [17.1205850, 12.2389689, 17.6963541, 17.2414667, 24.2412605, 16.6038634]
    assert records["jaccard"].details["by_head"] == pytest.approx(by_head, abs=1e-5)
    assert records["jaccard"].details["best_head"] == 4
    assert records["jaccard_best_head"].value == pytest.approx(27.1582312, abs=1e-5)
    assert records["jaccard_holdout"].value == pytest.approx(24.2412605, abs=1e-5)
