"""Test supervised training."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from pretrain.crops.single import SingleCrop
from pretrain.objectives.supervised import Supervised
from pretrain.optimizers.recipes import AdamW
from pretrain.options import DataOptions
from pretrain.plan import Pretraining
from pretrain.schedules import Timeline
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.errors import ConfigurationError
from tests.pretrain import plans
from tests.pretrain.plans import stopped_after_a_step
from tests.support.runs import log_rows

TINY = replace(plans.TINY, drop_path=0.1)
PLAIN = SingleCrop(scale=(1.0, 1.0), aspect_ratio=(1.0, 1.0), flip_probability=0.0, num_ops=0)
NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
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


def plan_of(root, **parts) -> Pretraining:
    return plans.plan_of(root, model=TINY, objective=Supervised(crops=PLAIN), **parts)


def learner_of(objective=None, names=NAMES):
    return (objective or Supervised()).build(TINY, Timeline(10, 5), seed=1, class_names=names)


def test_predicted_classes_count_by_their_share_of_the_image():
    # The own class is predicted for two of five images, and the mixed-in class for three.
    predicted, labels = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 2, 2, 1, 0])
    for lam, top1 in [(1.0, 40.0), (0.75, 45.0), (0.25, 55.0), (0.0, 60.0)]:
        views = (torch.zeros(5, 3, 16, 16), labels, torch.tensor(lam))
        _, report = learner_of().loss(lambda _: torch.eye(3)[predicted], views, 0)
        assert report["train_top1"].item() == pytest.approx(top1)


def test_the_head_starts_small_and_is_linear_in_the_features():
    learner = learner_of()
    head = learner.student.head
    assert head.weight.std().item() == pytest.approx(0.02, rel=0.3)
    assert not head.bias.any()
    learner.eval()
    images = torch.randn(2, 3, 16, 16)
    expected = F.linear(learner.encoder(images), head.weight)
    torch.testing.assert_close(learner.classify(images), expected)
    torch.testing.assert_close(learner.student(images), expected)


def test_the_number_of_classes_must_be_that_of_the_images():
    assert learner_of(Supervised(num_classes=3)).student.head.out_features == 3
    with pytest.raises(ConfigurationError) as caught:
        learner_of(Supervised(num_classes=5))
    assert caught.value.hint == ("objective.num_classes=3",)
    with pytest.raises(ConfigurationError) as caught:
        learner_of(names=())
    assert "data.labels=true" in caught.value.hint


def test_a_batch_contains_each_image_as_often_as_repeats_states(root, tmp_path, monkeypatch):
    shown, usual = [], SingleCrop.cut

    def cut(self, samples, generators, sizes):
        shown.append([sample.image_id for sample in samples])
        return usual(self, samples, generators, sizes)

    monkeypatch.setattr(SingleCrop, "cut", cut)
    plan_of(root, batch_size=4, repeats=2, max_steps=2).run(tmp_path, device="cpu")
    assert [len(set(names)) for names in shown] == [2, 2]
    assert all(names[0] == names[1] and names[2] == names[3] for names in shown)


@pytest.mark.slow
def test_a_run_learns_to_distinguish_two_colours(root, tmp_path):
    undecayed = {"weight_decay": 0.0, "final_weight_decay": 0.0}
    plan = plan_of(root, optimizer=AdamW(lr=0.1), max_steps=30, batch_size=8, **undecayed)
    plan.run(tmp_path, device="cpu")
    rows = log_rows(tmp_path)
    assert rows[-1]["train_top1"] == 100
    assert rows[-1]["loss"] < 0.4 < rows[0]["loss"]


def test_a_run_does_not_continue_with_renamed_classes(root, tmp_path, monkeypatch):
    plan = plan_of(root)
    stopped_after_a_step(plan, tmp_path)
    images = ClassFolders(root).train()
    renamed = replace(images, class_names=("azure", "red"))
    monkeypatch.setattr(DataOptions, "find_images", lambda _: renamed)
    with pytest.raises(ConfigurationError, match="images:"):
        plan.run(tmp_path, resume=True, device="cpu")
