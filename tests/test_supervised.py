"""Supervised training: its images, its loss, its runs."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader

from pretrain.batches import Batches, Share
from pretrain.checkpoint import load_state
from pretrain.folder import LOG
from pretrain.objectives.objective import Classifier, Learner, Objective, ViewMaker
from pretrain.objectives.supervised import Supervised
from pretrain.optimizers import AdamW
from pretrain.options import DataOptions, TrainOptions
from pretrain.schedules import Timeline
from pretrain.single_crop import SingleCrop, squares
from pretrain.train import Pretraining
from ssl_bench.composition import build, compose_config
from ssl_bench.data.class_folders import ClassFolders
from ssl_bench.data.samples import Sample
from ssl_bench.errors import ConfigurationError, Preempted
from ssl_bench.models import IMAGENET_MEAN, IMAGENET_STD, ViTConfig, load_encoder
from tests.faults import end_after_parts

CPU = torch.device("cpu")
TINY = ViTConfig(image_size=16, patch_size=8, dim=24, depth=2, num_heads=2, drop_path=0.1)
PLAIN = SingleCrop(scale=(1.0, 1.0), aspect_ratio=(1.0, 1.0), flip_probability=0.0, num_ops=0)
NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Eleven training and four validation pictures, red or blue with noise."""
    root = tmp_path_factory.mktemp("colours")
    generator = np.random.default_rng(0)
    for split, count in (("train", 11), ("val", 4)):
        for number in range(count):
            folder = root / split / ("red", "blue")[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            colour = np.array([(200, 40, 40), (40, 40, 200)][number % 2])
            pixels = colour + generator.integers(-40, 40, (18, 22, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return root


def plan_of(root, **train) -> Pretraining:
    options: dict[str, Any] = {"batch_size": 2, "max_steps": 8, "num_workers": 0, "seed": 3}
    options |= train
    return Pretraining(
        model=TINY,
        objective=Supervised(crops=SingleCrop(cutout=3, mixup=0.4)),
        optimizer=AdamW(lr=0.05),
        data=DataOptions(root=str(root), labels=True),
        train=TrainOptions(**options),
    )


def rows_of(out):
    timed = ("images_per_second", "data_wait", "mfu")
    rows = [json.loads(line) for line in (out / LOG).read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in timed} for row in rows]


def samples(count, size=12, seed=0):
    generator = np.random.default_rng(seed)
    shape = (count, size, size, 3)
    images = generator.integers(0, 256, shape, dtype=np.uint8)
    return [Sample(str(i), image, label=i % 3) for i, image in enumerate(images)]


def cut(crops, some, *, size=12, seed=0):
    return crops.cut(some, [np.random.default_rng((seed, i)) for i in range(len(some))], [size])


def test_an_image_that_nothing_happens_to_is_only_normalised():
    some = samples(3)

    images, labels, own_share = PLAIN.finish(cut(PLAIN, some), CPU)

    statistics = torch.tensor([IMAGENET_MEAN, IMAGENET_STD])
    pixels = torch.from_numpy(np.stack([s.image for s in some])).float() / 255
    expected = ((pixels - statistics[0]) / statistics[1]).permute(0, 3, 1, 2)
    torch.testing.assert_close(images, expected, atol=1e-6, rtol=1e-6)
    assert (labels.tolist(), own_share.tolist()) == ([0, 1, 2], [1.0, 1.0, 1.0])


def test_half_of_the_images_are_mirrored():
    flipping, some = replace(PLAIN, flip_probability=0.5), samples(1) * 200

    pixels = cut(flipping, some).pixels

    mirrored = pixels[0].flip(-1)
    original = torch.from_numpy(some[0].image).permute(2, 0, 1)
    is_mirrored = [torch.equal(p, original.flip(-1)) for p in pixels]
    assert all(torch.equal(p, original) or m for p, m in zip(pixels, is_mirrored, strict=True))
    assert 70 < sum(is_mirrored) < 130
    assert mirrored.shape == original.shape


def test_cutout_hides_a_square_about_the_centre_and_no_more():
    hidden = squares(torch.tensor([[2, 3], [0, 4]]), 5, 3)

    assert hidden[0].nonzero().tolist() == [[r, c] for r in (1, 2, 3) for c in (2, 3, 4)]
    assert hidden[1].nonzero().tolist() == [[r, c] for r in (0, 1) for c in (3, 4)]
    whole, cutout = PLAIN, replace(PLAIN, cutout=3)
    some = samples(2)
    before, after = (c.finish(cut(c, some), CPU)[0] for c in (whole, cutout))
    masks = squares(cut(cutout, some).centres, 12, 3)[:, None].expand_as(after)
    assert (after[masks] == 0).all()
    assert torch.equal(after[~masks], before[~masks])


def test_mixup_blends_each_image_with_the_next_one_by_its_own_share():
    mixing = replace(PLAIN, mixup=1.0)
    part = cut(mixing, samples(3))

    mixed, _, share = mixing.finish(part, CPU)

    plain, _, _ = PLAIN.finish(part, CPU)
    for i, own in enumerate(share.tolist()):
        torch.testing.assert_close(mixed[i], own * plain[i] + (1 - own) * plain[(i + 1) % 3])
    assert len(set(share.tolist())) == 3
    shares = cut(replace(PLAIN, mixup=0.4), samples(1, size=2) * 2000, size=2).own_share
    assert shares.mean() == pytest.approx(0.5, abs=0.03)
    assert shares.var() == pytest.approx(0.25 / 1.8, abs=0.01)  # of Beta(a, a): 1 / 4 / (2 a + 1)


def test_rand_augment_changes_pixels_by_the_sample_alone():
    augmenting, some = replace(PLAIN, num_ops=2), samples(4)
    state = torch.get_rng_state()

    part = cut(augmenting, some)

    assert torch.equal(state, torch.get_rng_state())
    alone = augmenting.cut(some[2:3], [np.random.default_rng((0, 2))], [12])
    assert torch.equal(part.pixels[2], alone.pixels[0])
    plain = cut(PLAIN, some).pixels
    assert not torch.equal(part.pixels, plain)
    assert torch.equal(cut(augmenting, some).pixels, part.pixels)
    assert not torch.equal(cut(augmenting, some, seed=1).pixels, part.pixels)


def test_batches_do_not_depend_on_the_number_of_workers():
    crops = SingleCrop(mixup=0.5)

    def cut_all(some, generators):
        return crops.cut(some, generators, (16,))

    source = Batches(samples(9), cut_all, Share(4), 3)
    alone, helped = (
        list(DataLoader(source, batch_size=None, sampler=range(3), num_workers=workers))
        for workers in (0, 2)
    )

    for one, other in zip(alone, helped, strict=True):
        for name in ("pixels", "labels", "centres", "own_share"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert isinstance(crops, ViewMaker)


def learner_of(objective=None, names=NAMES):
    return (objective or Supervised()).build(TINY, Timeline(10, 5), seed=1, class_names=names)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_the_loss_is_cross_entropy_with_smoothed_and_mixed_targets(smoothing):
    learner = learner_of(Supervised(label_smoothing=smoothing))
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.4, 0.0]])
    labels, own_share = torch.tensor([0, 1]), torch.tensor([1.0, 0.25])

    images = torch.zeros(2, 3, 16, 16)
    loss, report = learner.loss(lambda _: logits, (images, labels, own_share), 0)

    onehot = torch.eye(3, dtype=torch.float64)[labels]
    share = own_share.double()[:, None]
    mixed = share * onehot + (1 - share) * onehot.roll(-1, 0)
    targets = (1 - smoothing) * mixed + smoothing / 3
    logs = logits.double() - logits.double().exp().sum(1, keepdim=True).log()
    assert loss.item() == pytest.approx(-(targets * logs).sum(1).mean().item(), rel=1e-6)
    assert report["train_top1"].item() == 50.0


def test_the_head_starts_small_and_classifies_what_the_encoder_gives():
    torch.manual_seed(5)
    state = torch.get_rng_state()

    learner = learner_of()

    assert torch.equal(state, torch.get_rng_state())
    assert isinstance(learner, Learner)
    assert isinstance(learner, Classifier)
    assert isinstance(Supervised(), Objective)
    head = learner.student.head
    assert head.weight.std().item() == pytest.approx(0.02, rel=0.3)
    assert not head.bias.any()
    learner.eval()
    images = torch.randn(2, 3, 16, 16)
    expected = F.linear(learner.encoder(images), head.weight)
    torch.testing.assert_close(learner.classify(images), expected)
    torch.testing.assert_close(learner.student(images), expected)


def test_the_number_of_classes_is_that_of_the_images():
    assert learner_of(Supervised(num_classes=3)).student.head.out_features == 3
    with pytest.raises(ConfigurationError, match=r"num_classes is 5 but .* 3 classes"):
        learner_of(Supervised(num_classes=5))
    with pytest.raises(
        ConfigurationError, match=r"two classes or more, got 0; set data.labels=true"
    ):
        learner_of(names=())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stopped_run_goes_on_to_the_very_bits_of_an_uninterrupted_one(
    root, tmp_path, monkeypatch, workers
):
    plan = plan_of(root)
    plan.run(tmp_path / "whole", device="cpu")
    end_after_parts(monkeypatch, SingleCrop, 4)
    with pytest.raises(Preempted):
        plan.run(tmp_path / "stopped", device="cpu")
    monkeypatch.undo()
    assert len(rows_of(tmp_path / "stopped")) == 4
    helped = replace(plan, train=replace(plan.train, num_workers=workers))
    helped.run(tmp_path / "stopped", resume=True, device="cpu")

    one, other = (load_state(tmp_path / n, CPU)[0] for n in ("whole", "stopped"))
    assert one["learner"].keys() == other["learner"].keys()
    assert all(torch.equal(v, other["learner"][k]) for k, v in one["learner"].items())
    for number, moments in one["optimizer"]["state"].items():
        for name, value in moments.items():
            assert torch.equal(value, other["optimizer"]["state"][number][name])
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "stopped")


def test_a_run_learns_to_tell_two_colours_and_leaves_its_encoder(root, tmp_path):
    plan = plan_of(root, max_steps=30, batch_size=8, weight_decay=0.0, final_weight_decay=0.0)
    plan = replace(plan, objective=Supervised(crops=PLAIN), optimizer=AdamW(lr=0.1))

    path = plan.run(tmp_path, device="cpu")

    rows = rows_of(tmp_path)
    assert rows[-1]["train_top1"] == 100
    assert rows[-1]["loss"] < 0.4 < rows[0]["loss"]
    weights = load_state(tmp_path, CPU)[0]["learner"]
    for name, value in load_encoder(str(path)).module.state_dict().items():
        assert torch.equal(value, weights[f"student.backbone.{name}"])


def test_other_classes_of_the_same_images_are_another_run(root, tmp_path, monkeypatch):
    plan = plan_of(root, max_minutes=0.0)
    plan.run(tmp_path, device="cpu")
    images = ClassFolders(root).train()
    renamed = replace(images, class_names=("azure", "red"))
    monkeypatch.setattr(DataOptions, "open", lambda _: renamed)

    with pytest.raises(ConfigurationError, match="images:"):
        plan.run(tmp_path, resume=True, device="cpu")


def test_the_yaml_file_says_what_the_dataclasses_default_to():
    built = build(compose_config("pretraining", ["objective=supervised"])).objective

    assert built == replace(Supervised(), crops=built.crops)
    for name, value in vars(SingleCrop()).items():
        ours = getattr(built.crops, name)
        assert ours == (list(value) if isinstance(value, tuple) else value), name


@pytest.mark.parametrize(
    ("field", "value"),
    [("scale", (0.5, 0.4)), ("num_ops", -1), ("magnitude", 31), ("cutout", -1), ("mixup", -0.1)],
)
def test_a_recipe_without_meaning_is_refused(field, value):
    with pytest.raises(ConfigurationError, match=rf"crops\.{field}"):
        SingleCrop(**{field: value})
    with pytest.raises(ConfigurationError, match=r"label_smoothing expects a number in \[0, 1\)"):
        Supervised(label_smoothing=1.0)
