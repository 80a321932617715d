"""Where features are kept: the same scores from every tier, and never those of another run."""

from dataclasses import replace

import pytest
import torch

from probes.features.views import WholeImage, nearest_labels
from probes.segmentation import Steps
from ssl_bench.errors import CheckpointError, MachineError
from tests.benchmarks.memory import LiveBytes
from tests.support.colours import (
    ColourDataset,
    Counter,
    probe_context,
    quick_probe,
    score_values,
    tiny_encoder,
)


def test_features_on_disk_give_the_same_scores_and_are_used_again(tmp_path):
    in_memory = score_values(quick_probe().run(probe_context(tmp_path)))
    on_disk = quick_probe(tier="disk", cache=str(tmp_path))
    encoder = tiny_encoder()
    counter = Counter(encoder)
    first = list(on_disk.run(probe_context(tmp_path, encoder)))
    assert counter.images == 18 + 7
    second = list(on_disk.run(probe_context(tmp_path, encoder)))
    assert counter.images == 18 + 7 + 7
    assert score_values(first) == in_memory == score_values(second)
    assert [s.details["encoder_passes"] for s in (first[0], second[0])] == [1, 0]
    assert first[0].details["feature_tier"] == "disk"


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["disk", "stream"])
def test_training_beyond_memory_holds_a_few_batches_of_features(tmp_path, tier):
    entry_bytes = 4 * 64 * 24 * 2
    changes = {"image_size": 64, "epochs": 1, "batch_size": 4, "holdout": 0.0, "loss": "histogram"}
    probe = quick_probe(**changes, tier=tier, cache=str(tmp_path))
    context = probe_context(tmp_path, dataset=ColourDataset(num_train=200), layers=(0, 1, 2, 3))
    run = probe.prepared(context)
    features = run.features()
    assert features.tier == tier
    with LiveBytes() as held:
        run.train(features)
    assert held.peak < 40 * 4 * entry_bytes < 200 * entry_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tier", ["memory", "disk", "stream"])
def test_a_gpu_gives_the_scores_of_the_cpu_from_every_tier(tmp_path, tier):
    probe = quick_probe(tier=tier, cache=str(tmp_path))
    context = probe_context(tmp_path)
    on_cpu = score_values(probe.run(context))
    on_gpu = score_values(probe.run(replace(context, device=torch.device("cuda"))))
    assert on_gpu == pytest.approx(on_cpu, abs=0.05)


def test_features_are_found_again_by_a_run_that_asks_the_same(tmp_path):
    probe = quick_probe(tier="disk", cache=str(tmp_path), epochs=1, train_images=16)
    list(probe.run(probe_context(tmp_path)))
    # What has no part in the features.
    other = replace(probe, training=Steps(epochs=2, batch_size=3), num_workers=1)
    score = next(iter(other.run(probe_context(tmp_path))))
    assert score.details["encoder_passes"] == 0


def test_the_cache_holds_every_view_of_every_image_and_its_labels(tmp_path):
    run = quick_probe(views=2, loss="histogram").prepared(probe_context(tmp_path))
    features, training_pass = run.features(), run.training_pass
    for image, number in ((0, 0), (5, 1), (17, 1)):
        view, mask = WholeImage(2).view(training_pass.images[image], number, 32)
        expected = training_pass.extractor(view[None])[1]["token"][0].half()
        entry = 2 * image + number
        read = features.of_layers([1], torch.device("cpu"))
        (batch,) = read([torch.tensor([entry])])
        assert torch.equal(batch.features[0, 0], expected)
        assert torch.equal(batch.labels[0], nearest_labels(mask, 32, 32))


def test_a_pass_that_fails_leaves_no_file_that_counts_as_complete(tmp_path):
    probe = quick_probe(tier="disk", cache=str(tmp_path))
    encoder = tiny_encoder()
    with torch.no_grad():
        encoder.module.get_parameter("blocks.1.mlp.fc2.bias").fill_(1e6)
    with pytest.raises(CheckpointError, match=r"layer 1 .* beyond float16 .* image train/0"):
        list(probe.run(probe_context(tmp_path, encoder)))
    assert list((tmp_path / "features").iterdir()) == []


def test_a_disk_without_room_is_named(tmp_path):
    (tmp_path / "features").write_text("not a folder")
    with pytest.raises(MachineError, match=r"cannot keep labels in .*probe.cache=DIR"):
        list(quick_probe(tier="disk", cache=str(tmp_path)).run(probe_context(tmp_path)))
