"""Test the Python API."""

import json
import os
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import timm
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn

import ssl_bench
from ssl_bench.api import Results
from ssl_bench.cli.__main__ import main
from ssl_bench.cli.features import DTYPES
from ssl_bench.errors import CheckpointError, ConfigurationError, DataError, UnsupportedEncoderError
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import TimmConfig, ViTConfig, build_encoder, build_vit, save_encoder
from ssl_bench.models.initialisers import mimetic_, skipless_
from ssl_bench.planning import plan_probes
from ssl_bench.request import ProbeRequest
from ssl_bench.system.output import format_size, print_message_once
from tests.support import own_module
from tests.support.faults import class_folders, expect_error, picture, unchecked_types

ROOT = Path(__file__).parents[2]
FEW: dict[str, Any] = {"image_size": 32, "dataset.num_train": 4, "dataset.num_val": 3}
FILE = str(ROOT / "tests/support/own_module.py")


def test_the_properties_of_a_module_are_found():
    module = own_module.own()

    encoder = ssl_bench.Encoder.from_module(module)

    assert (encoder.patch_size, encoder.depth, encoder.dim) == (8, 3, 16)
    assert (encoder.num_prefix_tokens, encoder.has_cls, encoder.native_size) == (1, True, (32, 32))
    assert (encoder.dynamic_image_size, encoder.num_heads, encoder.name) == (False, 2, "Own")
    again = ssl_bench.Encoder.from_module(own_module.own())
    assert encoder.identity() == again.identity()
    with torch.no_grad():
        module.get_parameter("trunk.0.mlp.0.bias").add_(1)
    assert ssl_bench.Encoder.from_module(module).sha256 != encoder.sha256
    # The number of position embeddings determines the only size that the module accepts.
    module.positions = nn.Parameter(torch.randn(1, 1 + 9**2, 16))
    assert ssl_bench.Encoder.from_module(module).native_size == (72, 72)


def test_a_module_with_registers_but_without_cls_is_pooled():
    encoder = ssl_bench.Encoder.from_module(own_module.own(), num_registers=1, epoch=0)

    assert (encoder.num_registers, encoder.num_prefix_tokens, encoder.has_cls) == (1, 1, False)
    assert encoder.fallback_facets == {"cls": "patch_mean", "key": "token"}
    assert encoder.weights_info.epoch == 0.0
    assert encoder.normalization_source == "assumed, ImageNet's"
    stated = ssl_bench.Encoder.from_module(own_module.own(), mean=0.5, std=(0.1, 0.2, 0.3))
    assert (stated.mean, stated.std) == ((0.5,) * 3, (0.1, 0.2, 0.3))
    assert (stated.normalization_source, stated.weights_info.epoch) == ("from_module", None)
    assert stated.fallback_facets == {"key": "token"}


class _Attention(nn.Module):
    """A convolution with the same Python attributes as an attention layer."""

    def __init__(self, inside: int, outside: int, heads: Any, *, has_qkv: bool = True) -> None:
        super().__init__()
        self.mix = nn.Conv2d(inside, outside, 1)
        self.attn = nn.Module()
        if has_qkv:
            self.attn.qkv = nn.Identity()
        self.attn.heads, self.attn.nhead = nn.Identity(), heads

    def forward(self, maps: Tensor) -> list[Tensor]:
        return [self.mix(maps)]


class _Staged(nn.Module):
    def __init__(self, *blocks: nn.Module, skips: int | None = None) -> None:
        super().__init__()
        self.embed, self.blocks, self.skips = nn.Conv2d(3, 4, 8, 8), nn.ModuleList(blocks), skips

    def forward(self, images: Tensor) -> Tensor:
        maps = self.embed(images)
        for number, block in enumerate(self.blocks):
            (maps,) = (maps,) if number == self.skips else block(maps)
        return maps


def test_blocks_may_return_lists_and_have_different_widths():
    module = _Staged(_Attention(4, 4, 2), _Attention(4, 6, 2))

    encoder = ssl_bench.Encoder.from_module(module)

    assert (encoder.depth, encoder.dim, encoder.num_heads, encoder.patch_size) == (2, 6, 2, 8)
    assert (encoder.dynamic_image_size, encoder.has_cls) == (True, False)
    assert encoder.fallback_facets == {"cls": "patch_mean"}
    # The value True does not count as a number of heads. Keys need `attn.qkv` in every block.
    for heads, expected in ((2, 2), (True, 0)):
        module = _Staged(_Attention(4, 4, heads), _Attention(4, 4, 3, has_qkv=False))
        encoder = ssl_bench.Encoder.from_module(module)
        assert encoder.num_heads == expected
        assert encoder.fallback_facets == {"cls": "patch_mean", "key": "token"}


def test_a_block_that_is_not_called_is_named():
    module = _Staged(*(_Attention(4, 4, 2) for _ in range(3)), skips=1)

    with pytest.raises(UnsupportedEncoderError, match=r"blocks \[1\] are never called"):
        ssl_bench.Encoder.from_module(module)


def test_blocks_with_names_have_numbers():
    module = torchvision.models.VisionTransformer(32, 8, 3, 2, 16, 32).eval()
    encoder = ssl_bench.Encoder.from_module(module, mean=0, std=1)
    images, outputs = torch.rand(2, 3, 32, 32), list[Tensor]()
    (block,) = list(module.encoder.layers)[1:2]
    handle = block.register_forward_hook(lambda *found: outputs.append(found[-1]))
    with torch.no_grad():
        module(images)
    handle.remove()

    found = ssl_bench.extract_features(encoder, images, layers=[1])

    torch.testing.assert_close(found[1]["token"].flatten(1, 2), outputs[0][:, 1:])


def test_hierarchical_modules_have_the_block_stride_as_patch_size():
    resnet = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 3, 2])
    swin = torchvision.models.SwinTransformer([4, 4], 12, [1, 1, 3, 1], [1, 1, 1, 1], [7, 7])
    for module, blocks, expected in (
        (resnet, None, (16, 3, 256)), (resnet, "layer4", (32, 2, 512)), (swin, None, (16, 3, 48)),
    ):  # fmt: skip
        encoder = ssl_bench.Encoder.from_module(module, blocks=blocks)
        assert (encoder.patch_size, encoder.depth, encoder.dim) == expected
    with pytest.raises(CheckpointError, match=r"blocks='NAME'"):
        ssl_bench.Encoder.from_module(torchvision.models.mobilenet_v3_small(), blocks="features")


# With 3, the last batch of the four images is smaller than the others.
@pytest.mark.parametrize("batch_size", [3, 2])
def test_features_of_a_module_equal_the_outputs_of_its_blocks(batch_size):
    module, images = own_module.own().eval(), torch.rand(4, 3, 32, 32)
    mean, std = (torch.tensor(colour).view(3, 1, 1) for colour in ([0.5] * 3, [0.25] * 3))

    encoder = ssl_bench.Encoder.from_module(module, mean=[0.5] * 3, std=0.25)
    found = ssl_bench.extract_features(
        encoder, images, layers=[0, 2], facets=("token", "cls", "cls_normed"), batch_size=batch_size
    )

    tokens = module.embed((images - mean) / std).flatten(2).transpose(1, 2)
    tokens = torch.cat([module.first.expand(4, -1, -1), tokens], 1) + module.positions
    for layer, block in enumerate(module.trunk):
        tokens = block(tokens)[0]
        if layer in found:
            patches = tokens[:, 1:].unflatten(1, (4, 4))
            torch.testing.assert_close(found[layer]["token"], patches, rtol=0, atol=1e-5)
            torch.testing.assert_close(found[layer]["cls"], tokens[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[2]["cls_normed"], module.ln_f(tokens)[:, 0], rtol=0, atol=1e-5)


def test_python_and_the_command_line_leave_the_same_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    found = ssl_bench.probe(own_module.own(), task="geometry", out=tmp_path / "python", **FEW)
    words = [f"{key if '.' in key else f'probe.{key}'}={value}" for key, value in FEW.items()]
    command = ["probe", "--task", "geometry", "--checkpoint", f"{FILE}:own", "--out", "typed"]
    assert main([*command, *words]) == 0

    typed = ssl_bench.read_results("typed")
    values = [
        sorted((r.layer, r.facet, r.metric, repr(r.value)) for r in results)
        for results in (found, typed)
    ]
    assert values[0] == values[1]
    assert len(values[0]) > 9
    assert {r.model for r in typed} == {"own_module.own"}


def test_python_and_the_command_line_build_the_same_request(tmp_path, monkeypatch):
    requests: list[ProbeRequest] = []

    def keep(request: ProbeRequest) -> None:
        requests.append(request)
        raise DataError("kept")

    for module in ("ssl_bench.api", "ssl_bench.cli.probing"):
        monkeypatch.setattr(f"{module}.plan_request", keep)
    words = ["--task", "pca,knn", "--dataset", "folder,toy", "--data-root", f"folder={tmp_path}"]
    words += ["--layer", "0,-1", "--out", "there", "--device", "cpu", "--on-bad-image", "skip"]
    words += ["--overwrite", "--limit", "3", "--pictures", "2", "probe.tau=0.5", "seed=4"]
    words += ["dtype=bfloat16", "corrupt=fog:1", "probe.facet=null", "data.fingerprint=stat"]
    words += ["dataset.class_names=['it\\'s',b]", "probe.centre=true"]
    given: dict[str, Any] = {"task": "pca,knn", "dataset": "folder,toy", "layer": "0,-1"}
    given |= {"data_root": f"folder={tmp_path}", "out": "there", "device": "cpu"}
    given |= {"on_bad_image": "skip", "overwrite": True, "limit": 3, "pictures": 2}
    given |= {"dtype": "bfloat16", "corrupt": "fog:1", "facet": None, "data.fingerprint": "stat"}
    given |= {"class_names": ["it's", "b"], "centre": True}

    assert main(["probe", *words, "--checkpoint", "demo:skip"]) == 3
    with pytest.raises(DataError):
        ssl_bench.probe("demo:skip", **given, tau=0.5, seed=4)

    typed, called = (
        replace(request, checkpoints=(), overrides=sorted(request.overrides))
        for request in requests
    )
    assert typed == called
    assert typed.tasks == ["pca", "knn"]


@pytest.mark.slow
def test_all_tasks_that_fit_a_folder_run_in_one_call(tmp_path, capsys):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(2):
        picture(number, 48, 64).save(photos / f"{number}.png")

    given: dict[str, Any] = {"task": "all", "dataset": "folder", "data_root": photos}
    with pytest.raises(ConfigurationError, match=r"^no requested task supports Own: .*layers"):
        ssl_bench.probe(own_module.own(), layer="9", out=tmp_path / "none", **given)

    found = ssl_bench.probe(own_module.own(), layer="1", out=tmp_path / "results", **given)

    tasks = {"attention", "pca", "tokencut", "geometry", "conditioning", "correspondence"}
    assert {record.task for record in found} == tasks
    (tile,) = (tmp_path / "results/pictures/pca").glob("*/*/*/block01/0.png.png")
    with Image.open(tile) as file:
        # The photograph and its map, each resized from 64 x 48 to 192 x 144 pixels.
        assert file.width == 2 * 192 + 3 * 4
    assert "no class labels for classification and clustering and knn" in capsys.readouterr().err


def test_messages_and_hints_name_the_keywords_of_python(tmp_path, capsys):
    given: dict[str, Any] = {"task": "pca", "layer": "1", "out": tmp_path / "r", **FEW}
    given |= {"pictures": 1, "limit": 3}
    print_message_once.cache_clear()
    ssl_bench.probe(own_module.own(), **given)
    found = ssl_bench.probe(own_module.own(), **given)
    err = capsys.readouterr().err
    assert "`pictures=3`" in err
    assert err.count("mean and standard deviation of ImageNet") == 1
    assert "`overwrite=True`" in err
    assert {record.dataset for record in found} == {"toy-limit3"}

    with pytest.raises(DataError, match=r"; use `data_root=\"FOLDER\"`$") as raised:
        ssl_bench.probe("demo:skip", task="pca", dataset="folder", out=tmp_path / "r")
    assert raised.value.hint == ("--data-root", "{folder}")
    with pytest.raises(ConfigurationError, match=r"use `layer=1`$"):
        ssl_bench.probe("demo:skip", facet="blocks.1.mlp.act", **{**given, "layer": 0})
    with pytest.raises(ConfigurationError, match=r'use `style="text"`$'):
        found.table("word")
    for words in ({"task": "geometri"}, {"nothing": 3}, {"layers": [3]}):
        with pytest.raises(ConfigurationError):
            ssl_bench.probe(own_module.own(), **{**given, **words})


def test_an_empty_list_of_images_is_refused(tmp_path):
    with pytest.raises((ConfigurationError, DataError)):
        ssl_bench.probe(own_module.own(), task="pca", images=[], out=tmp_path)


def test_unreadable_images_are_left_out_with_on_bad_image(tmp_path):
    picture(0).save(tmp_path / "a.png")
    (tmp_path / "b.png").touch()
    given: dict[str, Any] = {"task": "pca", "dataset": "folder", "data_root": tmp_path}
    given |= {"layer": "1", "out": tmp_path / "r"}

    with pytest.raises(DataError):
        ssl_bench.probe(own_module.own(), on_bad_image="fail", **given)
    found = ssl_bench.probe(own_module.own(), on_bad_image="skip", **given)
    assert {record.num_images for record in found} == {1}


def test_results_are_a_table_a_frame_and_a_figure(tmp_path, capsys):
    found = ssl_bench.probe(own_module.own(), task="geometry", out=tmp_path, layer="0,-1", **FEW)

    assert found._repr_markdown_().startswith("**geometry")
    assert set(found.to_pandas()["layer"]) == {0, 2}
    figure = found.plot("rankme")
    assert [np.asarray(line.get_xdata()).tolist() for line in figure.axes[0].lines] == [[0, 2]]
    assert ssl_bench.read_results(tmp_path).table() == found.table()
    other = ssl_bench.probe(own_module.own(), task="pca", out=tmp_path, layer="0,-1", **FEW)
    (next(tmp_path.rglob("records/**/*.json")).parent / "damaged.json").write_text("{")
    both, given = ssl_bench.read_results(tmp_path), {"task": "pca", "dataset": "toy"}
    assert "records cannot be shown" in capsys.readouterr().err
    assert both.table(task="geometry") == found.table()
    assert both.table("markdown", **given) == other.table("markdown")
    chosen = found.table(metric="rankme,lidar", facet="cls").splitlines()
    titles = [line.split()[1] for line in chosen if line.startswith("geometry: ")]
    assert titles == ["lidar", "rankme"]
    titles_drawn = [
        axis.get_title().split()[1] for axis in found.plot("rankme,lidar").axes if axis.lines
    ]
    assert titles_drawn == ["lidar", "lidar", "rankme", "rankme"]
    for call in (lambda: found.table(metric="rank"), lambda: found.plot("rank")):
        with pytest.raises(ConfigurationError, match='use `metric="rankme"`'):
            call()


def test_a_missing_facet_is_replaced_unless_the_user_set_it():
    encoder = ssl_bench.Encoder.from_module(own_module.own())
    (default,), (chosen,) = (
        plan_probes(["tokencut"], ["toy"], words, {}) for words in ([], ["probe.facet=key"])
    )

    assert (default.probe.facet, default.adapt_to(encoder).facet) == ("key", "token")
    assert chosen.adapt_to(encoder).facet == "key"


def test_results_without_records_are_empty_tables():
    empty = Results(())

    assert (len(empty), list(empty), repr(empty)) == (0, [], "Results without records")
    assert (empty.table(), empty._repr_markdown_(), len(empty.to_pandas())) == ("", "", 0)
    with pytest.raises(DataError):
        empty.plot()


def test_module_identity_ignores_the_import_name_of_the_file():
    makers = [runpy.run_path(FILE, run_name=name)["own"] for name in ("__main__", "mine")]

    one, other = (ssl_bench.Encoder.from_module(make()) for make in makers)

    assert one.architecture == other.architecture
    assert one.sha256 == other.sha256


class _Reordered(own_module.Own):
    def __init__(self, order: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.order = order

    def forward(self, images: Tensor) -> Tensor:
        patches = self.embed(images).flatten(2).transpose(1, 2) + self.positions[:, 1:]
        tokens = self.order(torch.cat([self.first.expand(len(patches), -1, -1), patches], 1))
        for layer in self.trunk:
            tokens, _ = layer(tokens)
        return self.ln_f(tokens).mean(1)


def _by_columns(tokens: Tensor) -> Tensor:
    """Reorder the patch tokens from row-major to column-major order."""
    grid = tokens[:, 1:].unflatten(1, (4, 4)).transpose(1, 2)
    return torch.cat([tokens[:, :1], grid.flatten(1, 2)], 1)


def _with_fewer_tokens() -> nn.Module:
    """Return an encoder whose last block drops a token."""
    module = own_module.Own()
    module.trunk[2].register_forward_hook(lambda _block, _inputs, output: (output[0][:, 1:], None))
    return module


def _without_any_size() -> nn.Module:
    """Return a module that fails on images of every size."""
    module = own_module.Own()
    module.img_size, module.positions = 48, nn.Parameter(torch.zeros(1, 18, 16))
    return module


@pytest.mark.parametrize(
    ("module", "settings", "named"),
    [
        # The reason is that of the stated size, with 37 tokens.
        (_without_any_size(), {}, r"\(37\).*image_size="),
        (_with_fewer_tokens(), {}, "2 x 16 x 16.*blocks='NAME'"),
        (_Reordered(lambda x: x.roll(-1, 1)), {}, "row 0, column 1 is token 1 of 17, expected 2"),
        (_Reordered(_by_columns), {}, "row 0, column 1 is token 5 of 17, expected 2"),
        (_Reordered(lambda x: x.flip(1)), {}, r"\[CLS\], registers, patches row"),
        (_Reordered(lambda x: x.transpose(0, 1)), {}, "got 17 x 2 x 16"),
        (own_module.own().bfloat16(), {}, r"Pass module.float\(\)"),
        (torch.jit.script(nn.Linear(3, 3)), {}, "TorchScript"),
        (nn.Linear(3, 3), {}, "longest list of blocks"),
        (own_module.Own(), {"blocks": "nothing"}, "such as trunk"),
        (own_module.Own(), {"image_size": 48}, "48 x 48"),
        (own_module.Own(), {"norm": "nothing"}, "no module 'nothing'"),
        (torchvision.models.resnet18(), {"blocks": "layer3", "patch_size": 4}, "patch_size=16"),
        (own_module.Own(), {"mean": [0.5]}, r"got \[0.5\]"),
        *((own_module.Own(), {"std": std}, "expected std above 0") for std in (0.0, [0.5, 0, 0.5])),
    ],
)
def test_a_module_that_is_no_encoder_is_refused(module, settings, named):
    with pytest.raises(CheckpointError, match=named):
        ssl_bench.Encoder.from_module(module, **settings)


def test_overlapping_patches_in_order_are_accepted():
    module = _Reordered(lambda tokens: tokens)
    module.embed = nn.Conv2d(3, 16, 12, 8, padding=2)

    encoder = ssl_bench.Encoder.from_module(module, patch_size=8, image_size=32)

    assert encoder.num_prefix_tokens == 1


def test_a_convolution_of_single_pixels_does_not_embed_patches():
    module = own_module.own()
    module.embed = nn.Sequential(nn.Conv2d(3, 3, 1), module.embed)

    encoder = ssl_bench.Encoder.from_module(module)

    assert (encoder.patch_size, encoder.native_size) == (8, (32, 32))


def test_a_missing_norm_is_refused_when_it_is_needed():
    module = own_module.own()
    del module.ln_f
    module.forward = lambda images: nn.Sequential(module.embed)(images)
    with pytest.raises(UnsupportedEncoderError, match=r"never called$"):
        ssl_bench.Encoder.from_module(module)
    blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 1)) for _ in range(4)))
    plain = nn.Sequential(nn.Conv2d(3, 8, 8, 8), blocks)
    encoder = ssl_bench.Encoder.from_module(plain, blocks="1")
    assert (encoder.dynamic_image_size, encoder.num_prefix_tokens, encoder.depth) == (True, 0, 4)
    with pytest.raises(UnsupportedEncoderError, match="no final norm"):
        ssl_bench.extract_features(encoder, torch.rand(1, 3, 16, 16), facets=["token_normed"])


def test_a_module_for_square_images_only_has_a_single_size():
    def require_square(_module: nn.Module, inputs: tuple[Tensor]) -> None:
        assert inputs[0].shape[2] == inputs[0].shape[3]

    blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 1)) for _ in range(2)))
    module = nn.Sequential(nn.Conv2d(3, 8, 8, 8), blocks)
    assert ssl_bench.Encoder.from_module(module, blocks="1", image_size=32).dynamic_image_size
    module.register_forward_pre_hook(require_square)

    encoder = ssl_bench.Encoder.from_module(module, blocks="1", image_size=32)

    assert (encoder.dynamic_image_size, encoder.native_size) == (False, (32, 32))


class Renamed(own_module.Own):
    def __init__(self) -> None:
        super().__init__()
        self.out_norm = self.ln_f
        delattr(self, "ln_f")

    @property
    def ln_f(self):
        return self.out_norm


def test_the_only_norm_after_the_blocks_is_the_final_norm():
    module, images = Renamed().eval(), torch.rand(2, 3, 32, 32)

    found = ssl_bench.extract_features(module, images, layers=[2], facets=("cls", "cls_normed"))

    expected = module.out_norm(found[2]["cls"])
    torch.testing.assert_close(found[2]["cls_normed"], expected, rtol=0, atol=1e-5)
    module.other_norm = nn.LayerNorm(16)
    with pytest.raises(
        UnsupportedEncoderError, match=r"ssl_bench\.Encoder\.from_module\(module, norm="
    ):
        ssl_bench.extract_features(module, images, layers=[2], facets=("cls_normed",))
    with pytest.raises(CheckpointError, match="final_layer"):
        ssl_bench.Encoder.from_module(module, norm="final_layer")


def test_a_module_without_cls_is_probed_with_its_mean_patch(tmp_path, capsys):
    encoder = ssl_bench.Encoder.from_module(own_module.own(), num_registers=1, epoch=0)

    found = ssl_bench.probe(encoder, task="geometry", out=tmp_path, layer=-1, **FEW)

    images = ("rankme", "alignment", "uniformity")
    assert {r.facet for r in found if r.metric in images} == {"patch_mean"}
    assert {record.details["epoch"] for record in found} == {0}
    assert "geometry uses facet=patch_mean to fit" in capsys.readouterr().err
    with pytest.raises(UnsupportedEncoderError, match=r"no \[CLS\] token"):
        ssl_bench.probe(encoder, task="geometry", out=tmp_path, layer=-1, facet="cls", **FEW)


def test_a_module_without_parameters_is_an_encoder():
    module = own_module.own()
    for part in module.modules():
        for name, value in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            part.register_buffer(name, value.data)

    features = ssl_bench.extract_features(module, torch.rand(1, 3, 32, 32), layers=[0])

    assert features[0]["token"].shape == (1, 4, 4, 16)


def photographs(folder: Path, count: int) -> None:
    folder.mkdir()
    for number in range(count):
        picture(number).save(folder / f"{number:03}.png")


def features(folder: Path, *words: str) -> list[str]:
    return [
        *("features", "--checkpoint", f"{FILE}:own", "--data-root", "photos"),
        *("--layer", "0,2", "--facet", "cls,token", "--out", str(folder), *words),
    ]


@pytest.mark.parametrize("form", ["safetensors", "npz"])
def test_features_on_disk_are_those_of_python(tmp_path, monkeypatch, capsys, form):
    pandas = pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    photographs(tmp_path / "photos", 3)
    names = ["000.png", "001.png", os.fsdecode(b"\xff\xfe.png")]
    Path("photos/002.png").rename(Path("photos") / names[2])
    words = features(tmp_path / "out", "--format", form, "--batch-size", "2")

    assert main(words) == 0
    assert " 0.1 MB of features to " in capsys.readouterr().err
    assert main(words) == 0
    assert "all: 1 of 1 files exist" in capsys.readouterr().err

    index = pandas.read_parquet("out/index.parquet")
    assert list(index["image_id"]) == [*names[:2], r"\udcff\udcfe.png"]
    assert index[["label", "class"]].isna().all(axis=None)
    file = tmp_path / "out" / index["file"][0]
    stored = safetensors.numpy.load_file(file) if form == "safetensors" else np.load(file)
    files = [tmp_path / "photos" / name for name in names]
    expected = ssl_bench.extract_features(f"{FILE}:own", files, facets=("cls", "token"))
    for layer in (0, 2):
        for facet in ("cls", "token"):
            value = expected[layer][facet].numpy()
            np.testing.assert_allclose(stored[f"block{layer:02}.{facet}"], value, atol=1e-5)

    # Damaged files are written again.
    whole = file.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"\0" * len(whole)):
        file.write_bytes(damaged)
        assert main(words) == 0
        assert len(file.read_bytes()) == len(whole)
    (tmp_path / "out/about.json").write_text("[]")
    assert main(words) == 2


def test_a_photograph_is_rotated_by_its_exif_orientation(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (24, 40, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 3
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    upright = np.ascontiguousarray(pixels[::-1, ::-1])

    found = ssl_bench.extract_features(own_module.own(), [tmp_path / "turned.png", upright])

    assert torch.equal(*found[2]["token"])


def test_files_arrays_and_tensors_are_resized_alike(tmp_path):
    picture(0, 96, 64).save(tmp_path / "0.png")
    pixels = np.asarray(picture(0, 96, 64))
    images = [tmp_path / "0.png", pixels, torch.tensor(pixels).permute(2, 0, 1) / 255]

    found = ssl_bench.extract_features("demo:skip", images, layers=[0], image_size=32)[0]["token"]

    assert found.shape[1:3] == (4, 4)
    torch.testing.assert_close(found[1:], found[:1].expand(2, -1, -1, -1), rtol=0, atol=0.05)


def test_the_index_of_features_names_the_class_of_each_image(tmp_path, monkeypatch, capsys):
    pandas = pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    class_folders(tmp_path / "classes", count=1)

    for splits, more in (
        (("train", "val"), []),
        (("val",), ["--split", "val"]),
        (("val", "train"), ["--split", "val, train,val", "--limit", "1"]),
    ):
        data = ["--dataset", "class_folders", "--data-root", "classes", *more]
        assert main(features(tmp_path / "".join(more), *data)) == 0

        index = pandas.read_parquet(tmp_path / "".join(more) / "index.parquet")
        rows = index[["split", "label", "class"]].to_numpy().tolist()
        names = [(0, "cat"), (1, "dog")][: 1 if "--limit" in more else 2]
        assert rows == [[split, *name] for split in splits for name in names]
    Path("classes/val/dog/0.jpg").write_bytes(b"cut")
    assert "`--on-bad-image skip`" in expect_error(capsys, features(tmp_path / "cut", *data[:4]), 3)


def test_features_continue_after_an_interruption(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photographs(tmp_path / "photos", 6)
    monkeypatch.setattr("ssl_bench.cli.features._MAX_IMAGES", 2)
    # Two npz files are bitwise identical. The order in a safetensors header is random.
    npz = ("--format", "npz")
    assert main(features(tmp_path / "whole", *npz)) == 0
    call, files = FeatureExtractor.__call__, tmp_path / "stopped"

    def interrupt(*given: Any) -> Any:
        if len(list(files.glob("all-*"))) == 2:
            raise KeyboardInterrupt
        return call(*given)

    with monkeypatch.context() as patch:
        patch.setattr(FeatureExtractor, "__call__", interrupt)
        assert main(features(files, *npz)) == 130
    kept = {path: path.stat().st_mtime_ns for path in files.glob("all-*")}
    assert len(kept) == 2
    orphan = files / f".ssl-bench-{7:032x}.tmp"
    orphan.touch()
    os.utime(orphan, (0, 0))

    assert main(features(files, *npz)) == 0

    names = sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert sorted(p.name for p in files.iterdir()) == names
    for name in names:
        assert (files / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert all(path.stat().st_mtime_ns == at for path, at in kept.items())


def test_features_accept_the_keys_of_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    Image.fromarray(np.full((32, 32), 4095, np.uint16)).save("photos/0.png")

    assert main(features(tmp_path / "dark", "data.bits=16")) == 0
    assert main(features(tmp_path / "bright", "data.bits=12")) == 0

    files = (next((tmp_path / out).glob("all-*")) for out in ("dark", "bright"))
    dark, bright = (safetensors.numpy.load_file(file)["block02.cls"] for file in files)
    assert not np.array_equal(dark, bright)
    for word in ("data.bits=7", "data.limit=-1", "data.fingerprint=size", "--batch-size=0"):
        assert main(features(tmp_path / "none", word)) == 2
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("power", [-26, 20])
def test_features_outside_the_range_of_float16_are_refused(tmp_path, monkeypatch, capsys, power):
    monkeypatch.chdir(tmp_path)
    photographs(tmp_path / "photos", 2)
    model = build_vit(ViTConfig(image_size=32, patch_size=8, dim=12, depth=1, num_heads=2), seed=0)
    torch.nn.init.constant_(model.get_parameter("norm.weight"), 2.0**power)
    save_encoder(tmp_path / "scaled.safetensors", model, {})
    words = ["features", "--checkpoint", "scaled.safetensors", "--data-root", "photos"]
    words += ["--facet", "cls_normed", "--out", "out"]
    assert main([*words, "--dtype", "float16"]) == 4
    assert "--dtype float32" in capsys.readouterr().err
    assert main(words) == 0


def test_features_with_other_settings_are_never_mixed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    photographs(tmp_path / "photos", 3)
    assert main(features(tmp_path / "out")) == 0
    assert main([*features(tmp_path / "out"), "--dtype", "float16"]) == 2
    line = expect_error(capsys, features(tmp_path / "out", "--layer", "0"), 2)
    assert re.search("layers.* use `--out FOLDER`", line)
    sized = features(tmp_path / "sized")
    sized[sized.index("--checkpoint") + 1] = "demo:skip"
    assert main([*sized, "--layer", "0", "--image-size", "48"]) == 0
    line = expect_error(capsys, [*sized, "--layer", "0", "--image-size", "32"], 2)
    assert "image_size. Choose another folder; use `--out FOLDER`" in line
    photographs(tmp_path / "more", 1)
    (tmp_path / "more/000.png").rename(tmp_path / "photos/new.png")
    assert main(features(tmp_path / "out")) == 2
    (tmp_path / "photos/001.png").write_bytes(b"damaged")
    assert main(features(tmp_path / "other", "--on-bad-image", "fail")) == 3
    assert main(features(tmp_path / "other")) == 0  # Nothing was written before.
    about = json.loads((tmp_path / "other/about.json").read_text())["dataset"]
    assert about["left_out"] == {"all": {"count": 1, "first": ["001.png"]}}


@pytest.mark.parametrize(
    ("name", "function", "options"),
    [("skipless", skipless_, {"alpha": 2.0}), ("mimetic", mimetic_, {})],
)
def test_initialisers_draw_the_same_weights_for_user_models(name, function, options):
    config = TimmConfig("vit_tiny_patch16_224", depths=[2], init=name, init_options=options)
    ours = build_encoder(config, seed=5)
    own = timm.create_model("vit_tiny_patch16_224", num_classes=0, depth=2)
    state = torch.get_rng_state()

    assert function(own, seed=5, **options) is own

    assert torch.equal(torch.get_rng_state(), state)
    actual, expected = (
        {n: v for n, v in one.state_dict().items() if n.startswith("blocks.")}
        for one in (own, ours.get_submodule("model"))
    )
    assert actual.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in actual.items())
    with pytest.raises(ConfigurationError, match="expected a ViT"):
        function(nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="nothing"):
        function(own, nothing=1)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("mine.py", "encoder = 3\n", 'uri="mine.py:NAME"'),
        ("mine.py:own", "", "only nothing"),
        ("mine.py:own", "own = 3", "got int"),
        (
            "mine.py:owm",
            "import functools\nfrom torch import nn\nfrom torch.nn import Linear\n"
            "own, size = nn.Linear(2, 2), 3\nmake = functools.partial(Linear, 2, 2)\n",
            "has no owm, only own, make",
        ),
        ("mine.py:own", "import nothing_of_this_name", "pip install nothing_of_this_name"),
        ("mine.py:own", "def own():\n    return 1 / 0", "line 2, "),
        ("mine.py:own", "own = (", "line 1, "),
        ("mine.py:own", "def own(dim): return dim", "without arguments"),
        ("notes.pth", "milk, bread and a longer line\n", "begins with text"),
    ],
)
def test_a_file_without_an_encoder_is_refused(tmp_path, monkeypatch, name, content, named):
    monkeypatch.chdir(tmp_path)
    Path(name.partition(":")[0]).write_text(content)

    with pytest.raises(CheckpointError, match=re.escape(named)):
        ssl_bench.load_encoder(name)


def test_modules_in_files_use_the_normalisation_of_their_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    Path("mine.py").write_text("from tests.support.own_module import own\n")

    assumed, stated = map(ssl_bench.load_encoder, ("mine.py:own", "mean=0.5,std=0.25:mine.py:own"))

    assert assumed.normalization_source == "assumed, ImageNet's"
    assert stated.normalization_source == "the address"
    assert (stated.mean, stated.std) == ((0.5,) * 3, (0.25,) * 3)


SCALED = """
import functools
import torch
from dataclasses import dataclass
import helper
from helper import halved
from tests.support.own_module import Own

FACTORS = {"first": [2.0, 3.0]}
SHIFT = torch.zeros(1)
UNUSED = 1

def enlarged(tokens, by=FACTORS["first"][0], *, more=FACTORS["first"][1]):
    return by * tokens + more

def with_offset(offset):
    return lambda tokens: tokens + offset

def plain(tokens, by):
    return tokens * by * 7

def aloud(function):
    @functools.wraps(function)
    def louder(*words):
        return function(*words) * 11
    return louder

@dataclass
class Config:
    slope: float

CONFIG = Config(slope=13.0)
ACTS = {"plain": functools.partial(plain, by=2.5), "half": [torch.ones(2, dtype=torch.bfloat16)]}
size = 1

class Scaled(Own):
    power = 1
    _root = 31
    kinds = (Own, 17)
    join = staticmethod(with_offset(0.5))

    @functools.cached_property
    def gain(self):
        return 19.0

    @property
    def bias(self):
        return 43.0

    @torch.no_grad()
    @aloud
    def enlarge(self, tokens):
        return tokens * self.gain * 23 + self.bias

    def forward(self, images):
        tokens = enlarged(super().forward(images)) ** self.power + SHIFT
        tokens = ACTS["plain"](self.enlarge(tokens)) * CONFIG.slope / images.size(0)
        return self.join(halved(tokens)) + helper.constant()

class Further(Scaled):
    more = 29

def own():
    torch.manual_seed(3)
    module = Further()
    norm = module.ln_f.forward
    module.ln_f.forward = lambda tokens: norm(tokens) * 37
    return module
"""
HELPER = """
VALUE = 4

def halved(tokens):
    return tokens / 2

def constant():
    return [VALUE for _ in range(1)][0]

def unused():
    return 0
"""


CHANGES = {
    "unused": [
        ("UNUSED = 1", "UNUSED = 2"), ("    return 0", "    return 1"), ("size = 1", "size = 2"),
    ],
    "used": [
        ("[2.0, 3.0]", "[5.0, 3.0]"), ("zeros(1)", "ones(1)"), ("by * tokens", "by * tokens * 2"),
        ("power = 1", "power = 2"), ("with_offset(0.5)", "with_offset(0.25)"),
        ("tokens / 2", "tokens / 3"), ("VALUE = 4", "VALUE = 5"), ("* 7", "* 8"), ("* 11", "* 12"),
        ("slope=13.0", "slope=14.0"), ("by=2.5", "by=2.25"), ("ones(2", "zeros(2"),
        ("Own, 17", "Own, 18"), ("return 19.0", "return 20.0"), ("* 23", "* 24"),
        ("[2.0, 3.0]", "[2.0, 5.0]"), ("return 43.0", "return 44.0"),
        ("more = 29", "more = 30"), ("_root = 31", "_root = 32"), ("* 37", "* 38"),
    ],
}  # fmt: skip
"""Replacements in SCALED or HELPER, in code that the module does not use or uses."""


@pytest.mark.slow
def test_code_that_a_module_runs_is_in_its_identity(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)

    def load(name: str, old: str = "", new: str = "") -> ssl_bench.Encoder:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "mine.py").write_text(SCALED.replace(old, new))
        (folder / "helper.py").write_text(HELPER.replace(old, new))
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder)
            patch.delitem(sys.modules, "helper", raising=False)
            return ssl_bench.load_encoder(f"{folder}/mine.py:own")

    original = load("original")
    for kind, changes in CHANGES.items():
        for number, (old, new) in enumerate(changes):
            changed = load(f"{kind}{number}", old, new)
            assert changed.sha256 == original.sha256, new
            assert (changed.identity() != original.identity()) == (kind == "used"), new


def test_random_weights_of_a_file_are_always_the_same(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    (tmp_path / "mine.py").write_text("from tests.support.own_module import Own")
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(ssl_bench.load_encoder(f"{tmp_path}/mine.py:Own").sha256)
        assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1]


@pytest.mark.slow
def test_settings_of_a_module_are_in_its_identity():
    module = timm.create_model("test_vit", dynamic_img_size=True)
    settings: list[dict[str, Any]] = [
        {}, {}, {"image_size": 96}, {"norm": "blocks.0.norm1"}, {"num_registers": 1}
    ]  # fmt: skip
    encoders = [
        ssl_bench.Encoder.from_module(module, **{"image_size": 64} | one) for one in settings
    ]
    assert len({str(encoder.identity()) for encoder in encoders}) == 4


PIXELS = np.zeros((8, 8, 3), np.uint8)


@pytest.mark.parametrize(
    ("images", "named"),
    [
        (torch.rand(1, 3, 8, 8) * 255, "divide by 255"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "got uint8: divide by 255"),
        (torch.linspace(-2, 2, 192).view(1, 3, 8, 8), "got -2 to 2: .*not normalised"),
        (torch.full((1, 3, 8, 8), torch.nan), "not finite"),
        (torch.rand(3, 8, 8), r"images\[None\]"),
        (torch.rand(1, 8, 8, 3), "got 1 x 8 x 8 x 3"),
        ([torch.rand(3, 8, 8) * 255], "divide by 255"),
        ([torch.rand(1, 3, 8, 8)], "got 1 x 3 x 8 x 8"),
        (PIXELS, "list of images"),
        ("photograph.jpg", "list of images"),
        ([PIXELS / 255], "got an array of 8 x 8 x 3 with dtype float64"),
        ([PIXELS[..., 0]], "got an array of 8 x 8 with dtype uint8"),
    ],
)
def test_images_of_a_wrong_shape_type_or_range_are_refused(images, named):
    with unchecked_types(), pytest.raises(ConfigurationError, match=named):
        ssl_bench.extract_features(own_module.own(), images)


def test_images_slightly_outside_the_range_after_bicubic_resizing_are_accepted():
    images = torch.linspace(-0.1, 1.1, 3072).view(1, 3, 32, 32)
    found = ssl_bench.extract_features(own_module.own(), images, layers=[0])
    assert found[0]["token"].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_features_have_the_announced_size_and_number_format(workdir, capsys, dtype):
    words = ["features", "--checkpoint", "encoder.safetensors", "--data-root", "photos"]
    words += ["--facet", "token,mlp_hidden,cls", "--format", "npz", "--out", "features"]
    # Smaller features would be announced as 0.1 MB.
    assert main([*words, "--image-size", "256", "--dtype", dtype]) == 0
    (file,) = Path("features").glob("*.npz")
    with np.load(file) as stored:
        arrays = [stored[name] for name in stored.files if name.startswith("block")]
    assert {array.dtype.name for array in arrays} == {dtype}
    size = sum(array.nbytes for array in arrays)
    assert f"writing {format_size(size)} of features" in capsys.readouterr().err
