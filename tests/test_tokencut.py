import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from probes.discovery import PatchGrid, discover
from probes.discovery_log import DiscoveryLog, ImageResult
from probes.discovery_panels import FOUND, GROUND_TRUTH, draw_boxes, highlight
from probes.discovery_scores import corloc_score
from probes.tokencut import TokenCut
from ssl_bench.data.samples import Sample
from ssl_bench.errors import CheckpointError, ConfigurationError, DataError, MachineError
from ssl_bench.evaluation import ProbeContext
from ssl_bench.features import Facet, FeatureExtractor
from ssl_bench.models import ViTConfig, build_vit, encoder_from_vit
from ssl_bench.progress import show_progress

SIZES = {"a": (40, 56), "b": (33, 47), "c": (40, 56), "d": (24, 24)}


@dataclass(frozen=True)
class Pictures:
    """Noise of different sizes, with boxes; counts what is read."""

    boxes: dict[str, list[list[float]]]
    read: list[str] = field(default_factory=list)
    name: str = "noise"
    split: str = "all"
    class_names: tuple[str, ...] = ()
    supports: frozenset[str] = frozenset({"discovery"})

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self.boxes)

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, index: int) -> Sample:
        image_id = self.ids[index]
        self.read.append(image_id)
        generator = np.random.default_rng(ord(image_id))
        image = generator.integers(256, size=(*SIZES[image_id], 3), dtype=np.uint8)
        boxes = np.array(self.boxes[image_id], np.float64).reshape(-1, 4)
        return Sample(image_id, image, boxes=boxes)

    def fingerprint(self) -> str:
        return "f00d"

    def discovery(self) -> "Pictures":
        return self

    def train(self) -> "Pictures":
        raise NotImplementedError

    val = images = train


def tiny_encoder(seed: int = 0):
    config = ViTConfig(image_size=32, patch_size=8, dim=24, depth=3, num_heads=2)
    return encoder_from_vit(build_vit(config, seed=seed), name="tiny")


def context(folder: Path, pictures: Pictures, layers: Sequence[int] = (0, 2), encoder=None):
    return ProbeContext(
        encoder=encoder or tiny_encoder(),
        dataset=pictures,
        layers=tuple(layers),
        device=torch.device("cpu"),
        dtype=torch.float32,
        seed=0,
        artifacts=folder,
        progress=show_progress,
    )


def found_box(image_id: str, layer: int, facet: Facet = "key"):
    """What `discover` alone says of a picture."""
    encoder = tiny_encoder()
    sample = Pictures({image_id: []})[0]
    extractor = FeatureExtractor(encoder, layers=[layer], facets=[facet], pad=True)
    image = torch.from_numpy(sample.image).permute(2, 0, 1)[None] / 255
    grid = PatchGrid(*SIZES[image_id], encoder.patch_size)
    return discover(extractor(image)[layer][facet][0], grid)


FAR_AWAY = [0.0, 0.0, 1.0, 1.0]


def test_corloc_counts_the_images_whose_box_meets_a_true_one(tmp_path):
    box = found_box("a", 2).box.tolist()
    pictures = Pictures({"a": [FAR_AWAY, box], "b": [FAR_AWAY], "c": [FAR_AWAY], "d": []})

    (score,) = TokenCut().run(context(tmp_path, pictures, layers=[2]))

    assert score.value == pytest.approx(100 / 3)
    assert score.ci95 is not None
    assert score.ci95[0] < score.value < score.ci95[1]
    assert (score.layer, score.facet, score.metric, score.num_images) == (2, "key", "corloc", 3)
    assert score.details["images_without_boxes"] == 1
    assert score.details["by_num_objects"]["1"] == {"num_images": 2, "corloc": 0}
    assert score.details["by_num_objects"]["2_to_3"] == {"num_images": 1, "corloc": 100}


def test_all_blocks_and_facets_come_from_one_forward_pass_an_image(tmp_path):
    encoder, calls = tiny_encoder(), []
    encoder.module.register_forward_pre_hook(lambda *_: calls.append(1))
    probe, pictures = TokenCut(facet=["key", "token"]), Pictures({"a": [FAR_AWAY], "b": [FAR_AWAY]})

    scores = list(probe.run(context(tmp_path, pictures, (0, 2), encoder)))

    cells = [(score.layer, score.facet, score.metric) for score in scores]
    assert cells == probe.cells([0, 2])
    assert len(cells) == 4
    assert len(calls) == 2


def test_what_is_kept_of_an_image_is_what_discover_says(tmp_path):
    list(TokenCut(facet=["key", "value"]).run(context(tmp_path, Pictures({"b": [FAR_AWAY]}))))

    (path,) = tmp_path.glob("reference/images_*.jsonl")
    header, line = (json.loads(text) for text in path.read_text().splitlines())
    assert header["key"]["settings"]["tau"] == 0.2
    assert line["largest_box"] == pytest.approx(100 / (33 * 47))
    expected = found_box("b", 2, "value")
    kept = line["cells"]["2/value"]
    assert kept["box"] == expected.box.tolist()
    assert kept["eigenvalue"] == pytest.approx(expected.eigenvalue)
    assert kept["gap"] == pytest.approx(expected.gap)
    assert (kept["hit"], kept["degenerate"]) == (False, expected.degenerate)


def test_a_second_run_reads_only_what_the_first_did_not_finish(tmp_path):
    boxes = {"a": [FAR_AWAY], "b": [FAR_AWAY], "c": [FAR_AWAY]}
    first = [replace(score) for score in TokenCut().run(context(tmp_path, Pictures(boxes)))]
    (path,) = tmp_path.glob("reference/images_*.jsonl")
    path.write_bytes(path.read_bytes()[:-20])

    again = Pictures(boxes)
    second = list(TokenCut().run(context(tmp_path, again)))
    third = Pictures(boxes)
    list(TokenCut().run(context(tmp_path, third)))

    assert again.read == ["c"]
    assert third.read == []
    assert second == first


def test_further_blocks_are_added_and_other_settings_and_weights_kept_apart(tmp_path):
    boxes = {"a": [FAR_AWAY]}
    list(TokenCut().run(context(tmp_path, Pictures(boxes), [0])))

    more, both, other, another = (Pictures(boxes) for _ in range(4))
    list(TokenCut().run(context(tmp_path, more, [1])))
    list(TokenCut().run(context(tmp_path, both, [0, 1])))
    list(TokenCut(tau=0.1).run(context(tmp_path, other, [0])))
    list(TokenCut().run(context(tmp_path, another, [0], tiny_encoder(seed=1))))

    assert more.read == other.read == another.read == ["a"]
    assert both.read == []
    assert len(list(tmp_path.glob("*/images_*.jsonl"))) == 3


def test_without_any_box_the_run_ends_and_says_where_the_found_ones_are(tmp_path):
    with pytest.raises(DataError, match=r"none of the 2 images of noise .*images_"):
        list(TokenCut().run(context(tmp_path, Pictures({"a": [], "b": []}))))

    (path,) = tmp_path.glob("reference/images_*.jsonl")
    assert len(path.read_text().splitlines()) == 3


def test_a_diverged_encoder_is_reported_with_layer_and_image(tmp_path):
    encoder = tiny_encoder()
    encoder.module.get_parameter("blocks.1.attn.qkv.weight").data.fill_(torch.nan)

    with pytest.raises(CheckpointError, match=r"^a: layer 1 of tiny"):
        list(TokenCut().run(context(tmp_path, Pictures({"a": [FAR_AWAY]}), [0, 1], encoder)))


def test_the_bootstrap_breakdown_and_share_of_degenerate_images_are_counted():
    sizes, counts = [5.0, 20.0, 60.0, 30.0, 0.0], [1, 2, 7, 3, 0]
    hits, degenerate = [True, False, True, True, False], [True, False, False, False, True]
    results = [
        ImageResult(c, s, {"1/key": {"hit": h, "degenerate": d}})
        for c, s, h, d in zip(counts, sizes, hits, degenerate, strict=True)
    ]

    score = corloc_score(1, "key", results, seed=0)

    assert score.value == 75
    assert score.details["degenerate_percent"] == 40
    assert score.details["by_object_size"] == {
        "below_10_percent": {"num_images": 1, "corloc": 100},
        "10_to_40_percent": {"num_images": 2, "corloc": 50},
        "from_40_percent": {"num_images": 1, "corloc": 100},
    }
    assert score.details["by_num_objects"]["from_4"] == {"num_images": 1, "corloc": 100}


@pytest.mark.parametrize("method", ["tokencut", "lost", "maskcut"])
def test_panels_are_drawn_for_the_first_images(tmp_path, method):
    pictures = Pictures({"a": [FAR_AWAY], "b": [FAR_AWAY], "c": [FAR_AWAY]})

    list(TokenCut(method=method, panels=2).run(context(tmp_path, pictures)))

    drawn = {str(path.relative_to(path.parents[1])) for path in tmp_path.glob("*/*/*.png")}
    blocks = "block00_key", "block02_key"
    assert drawn == {f"{block}/{name}.png" for block in blocks for name in "ab"}


def test_boxes_are_outlined_inside_their_edges():
    image = np.zeros((20, 30, 3), np.uint8)

    drawn = draw_boxes(image, np.array([[2.0, 3, 12, 13]]), np.array([15.0, 5, 30, 20]))

    assert tuple(drawn[3, 2]) == tuple(drawn[12, 11]) == GROUND_TRUTH
    assert tuple(drawn[5, 15]) == tuple(drawn[19, 29]) == FOUND
    assert not drawn[13, 12].any()
    assert not drawn[4, 15].any()


def test_what_lies_outside_of_a_mask_is_darkened():
    image, mask = np.full((1, 2, 3), 200, np.uint8), np.array([[True, False]])

    assert highlight(image, mask)[0, :, 0].tolist() == [200, 50]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"facet": "keys"}, "facet must be among key, .* got keys"),
        ({"facet": []}, "got none"),
        ({"facet": ["key", "cls"]}, "got cls"),
        ({"tau": 1.0}, "tau must lie"),
        ({"eps": 0.0}, "eps must lie"),
        ({"panels": -1}, "panels must"),
        ({"protocol": "mine"}, "protocol must be reference"),
    ],
)
def test_wrong_options_are_refused(options, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        TokenCut(**options)


def test_a_changed_option_does_not_pass_for_the_reference():
    assert TokenCut().protocol == "reference"
    assert TokenCut(facet="token", panels=0).protocol == "reference"
    assert TokenCut(tau=0.3, method="lost").protocol == "reference, tau=0.3, method=lost"
    assert replace(TokenCut(tau=0.3), tau=0.1).protocol == "reference, tau=0.1"
    assert TokenCut(tau=0.3).settings()["tau"] == 0.3


def test_the_configuration_file_is_the_reference():
    config = Path(__file__).parents[1] / "configs" / "probe" / "tokencut.yaml"

    assert instantiate(OmegaConf.load(config), _convert_="all") == TokenCut()


def test_a_folder_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(MachineError, match="cannot write"):
        DiscoveryLog(tmp_path / "file", {})
