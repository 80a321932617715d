"""Test that scores do not depend on where features are stored."""

import errno
import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from probes.features.tiers import GIB, StoredFeatures, create_array_file
from probes.features.training_images import WholeImage, resize_mask
from probes.segmentation import SegmentationRun
from ssl_bench.errors import CheckpointError, MachineError
from ssl_bench.system import process
from tests.benchmarks.memory import LiveBytes
from tests.support.colours import (
    ColourDataset,
    Counter,
    probe_context,
    quick_probe,
    score_values,
    tiny_encoder,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 2, "views": 2, "crops": "scaled", "holdout": 0.0, "batch_size": 5},
        {"training": "lbfgs", "c_values": [1e-3, 1e-1], "max_iterations": 4, "loss": "majority"},
        {"layers_mode": "multi", "norm": "final", "loss": "histogram", "epochs": 2},
    ],
)
def test_all_kinds_of_feature_storage_give_bitwise_equal_scores(tmp_path, changes):
    def scores(tier):
        probe = quick_probe(**changes, tier=tier, cache=str(tmp_path))
        return list(probe.run(probe_context(tmp_path)))

    in_memory, on_disk, streamed = (scores(tier) for tier in ("memory", "disk", "stream"))
    assert score_values(in_memory) == score_values(on_disk) == score_values(streamed)
    ignored = {"feature_tier": "", "encoder_passes": 0, "train_seconds": 0}
    for one, other in zip(in_memory, streamed, strict=True):
        assert {**one.details, **ignored} == {**other.details, **ignored}
    assert streamed[0].details["feature_tier"] == "stream"


# Size of the features of 18 images in four blocks, and of their labels with 4 x 4 pixels per patch.
_SIZE = 18 * (4 * 16 * 24 * 2 + (4 * 4) ** 2) / GIB


@pytest.mark.parametrize(
    ("memory_gib", "disk_gib", "is_stored", "tier"),
    [
        (_SIZE, 0.0, False, "memory"),
        (0.99 * _SIZE, _SIZE, False, "disk"),
        (0.0, _SIZE, False, "disk"),
        (0.99 * _SIZE, 0.99 * _SIZE, False, "stream"),
        (0.0, 0.0, False, "stream"),
        (0.99 * _SIZE, 0.0, True, "disk"),
    ],
)
def test_auto_selects_the_first_storage_that_fits(tmp_path, memory_gib, disk_gib, is_stored, tier):
    def features(**changes):
        probe = quick_probe(cache=str(tmp_path), **changes)
        return SegmentationRun(probe, probe_context(tmp_path, layers=(0, 1, 2, 3))).features()

    if is_stored:
        features(tier="disk")
    limits = {"memory_gib": memory_gib, "disk_gib": disk_gib}
    found = features(**limits, tier="auto")
    assert found.tier == tier
    assert found.passes == (0 if is_stored or tier == "stream" else 1)
    assert features(**limits, tier="stream").tier == "stream"


def test_stored_features_are_read_without_a_warning(tmp_path):
    run = SegmentationRun(quick_probe(tier="disk", cache=str(tmp_path)), probe_context(tmp_path))
    computed = run.features()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.set_warn_always(True)
        try:
            stored = run.features()
        finally:
            torch.set_warn_always(False)
    assert not [each for each in caught if issubclass(each.category, UserWarning)]
    assert isinstance(computed, StoredFeatures)
    assert isinstance(stored, StoredFeatures)
    assert (computed.passes, stored.passes) == (1, 0)
    assert torch.equal(computed.features, stored.features)
    assert torch.equal(computed.labels, stored.labels)
    assert torch.equal(computed.has_label, stored.has_label)


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_batches_have_the_requested_layers_and_entries_in_this_order(tier):
    generator = torch.Generator().manual_seed(0)
    halves = torch.randn(3, 4, 2, 2, 6, generator=generator).half()
    scales, labels = 2 ** torch.arange(12.0).view(3, 4), torch.arange(16).view(4, 2, 2)
    features = StoredFeatures((2, 5, 7), halves, labels, scales=scales, tier=tier)

    read = features.reader([7, 2], torch.device("cpu"))
    one, other = read([torch.tensor([3, 0]), torch.tensor([1])])

    expected = torch.stack([halves[n].float() * scales[n].view(4, 1, 1, 1) for n in (2, 0)])
    for batch, entries in ((one, [3, 0]), (other, [1])):
        assert torch.equal(batch.features, expected[:, entries])
        assert torch.equal(batch.labels, labels[entries])


def test_half_of_the_free_space_is_used_by_default(tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr("probes.features.tiers.free_host_memory", lambda: 6 * GIB)
    context = replace(probe_context(tmp_path), say=messages.append)
    probe = quick_probe(tier="auto", cache=str(tmp_path / "not there" / "yet"))
    assert SegmentationRun(probe, context).features().tier == "memory"
    (line,) = [line for line in messages if "limits" in line]
    assert "3.0 GiB of memory" in line
    free = shutil.disk_usage(tmp_path).free / 2 / GIB
    assert float(line.split("memory, ")[1].split()[0]) == pytest.approx(free, rel=0.1)


def test_free_memory_is_the_smallest_remainder_of_all_cgroups(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_CGROUPS", tmp_path)
    inner = tmp_path / "job" / "step"
    inner.mkdir(parents=True)
    for folder, limit, use in ((inner, "max", "1"), (inner.parent, "1000", "400")):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(use)
    read, groups = Path.read_text, "3:cpu:/old\n2:memory:/old\n0::/job/step\n"
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda self: groups if str(self) == "/proc/self/cgroup" else read(self),
    )
    assert process.free_host_memory() == 600
    # The system can free the cache of files.
    (inner.parent / "memory.stat").write_text("anon 300\nactive_file 30\ninactive_file 60\n")
    assert process.free_host_memory() == 690
    # Version 1 has one tree of groups for each resource.
    for kind, limit in (("memory", "900"), ("cpu", "500")):
        folder = tmp_path / kind / "old"
        folder.mkdir(parents=True)
        (folder / "memory.limit_in_bytes").write_text(limit)
        (folder / "memory.usage_in_bytes").write_text("400")
    assert process.free_host_memory() == 500


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="needs posix_fallocate")
@pytest.mark.parametrize("name", ["EOPNOTSUPP", "ENOSYS", "EINVAL", "ENOSPC"])
def test_disks_must_have_space_but_need_not_reserve_it(tmp_path, monkeypatch, name):
    def refuse(descriptor, start, size):
        assert (start, size) == (0, 3 * 5 * 2)
        raise OSError(getattr(errno, name), "refused")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    if name == "ENOSPC":
        with pytest.raises(MachineError) as caught:
            create_array_file(tmp_path, (3, 5), np.float16)
        assert caught.value.hint == ("probe.cache={folder}",)
    else:
        array = create_array_file(tmp_path, (3, 5), np.float16)
        assert (array.shape, array.dtype) == ((3, 5), torch.float16)
    assert not list(tmp_path.iterdir())


class KilledError(Exception):
    pass


def killed_after(steps):
    """Return a progress bar that raises an error after the given number of steps."""
    pending = [steps]

    def progress(items, description, total=None):
        for item in items:
            yield item
            if description.startswith(("mean", "heads", "scored")):
                pending[0] -= 1
                if pending[0] == 0:
                    raise KilledError

    return progress


@pytest.mark.slow
def test_a_killed_stream_continues_from_its_journal(tmp_path):
    encoder, messages = tiny_encoder(), []
    probe = quick_probe(tier="stream", cache=str(tmp_path), epochs=3, keep_minutes=0.0)
    context = replace(probe_context(tmp_path, encoder), say=messages.append)
    expected = score_values(probe.run(context))
    assert not list((tmp_path / "heads").iterdir())
    counter = Counter(encoder)

    # An epoch has four batches. The steps are during and at the end of the pass for the mean of the
    # channels, and in the first epoch of training.
    for steps in (2, 4, 7):
        with pytest.raises(KilledError):
            list(probe.run(replace(context, progress=killed_after(steps))))
        messages.clear()
        counter.passes.clear()

        assert score_values(probe.run(context)) == expected

        assert counter.images == 16 * (1 + 3) - 4 * steps + 2 + 7
        assert sum("continuing from" in line for line in messages) == 1
        assert not list((tmp_path / "heads").iterdir())


def test_scored_images_that_were_counted_are_not_encoded_again(tmp_path):
    encoder = tiny_encoder()
    probe = quick_probe(cache=str(tmp_path), epochs=1, keep_minutes=0.0, panels=2, batch_size=2)
    context = probe_context(tmp_path, encoder)
    expected = list(probe.run(context))
    panels = {path.name: path.read_bytes() for path in context.artifacts.iterdir()}
    # The run is killed after the mean and deviation, one epoch, and three of seven scored images.
    # One batch of two scored images is complete.
    with pytest.raises(KilledError):
        list(probe.run(replace(context, progress=killed_after(8 + 8 + 3))))
    for path in context.artifacts.iterdir():
        path.unlink()
    counter = Counter(encoder)
    again = list(probe.run(context))
    assert score_values(again) == score_values(expected)
    assert [one.ci95 for one in again] == [one.ci95 for one in expected]
    # The training images, one scored image for its figure, and the five pending images are encoded.
    assert counter.images == 18 + 1 + 5
    assert {path.name: path.read_bytes() for path in context.artifacts.iterdir()} == panels
    assert not list((tmp_path / "heads").iterdir())


def test_streaming_encodes_images_once_per_epoch_and_reuses_finished_heads(tmp_path):
    encoder = tiny_encoder()
    counter = Counter(encoder)
    probe = quick_probe(tier="stream", cache=str(tmp_path), epochs=3, keep_minutes=0.0)
    context = probe_context(tmp_path, encoder)
    first = next(probe.run(context))
    # 16 of 18 images train the heads, in one pass for the mean and deviation of the channels and in
    # three epochs. Two images select the rate, and 7 images are scored.
    assert counter.images == 16 * (1 + 3) + 2 + 7
    assert first.details["encoder_passes"] == 4
    assert not list(tmp_path.rglob("*.npy"))
    counter.passes.clear()

    again = list(probe.run(context))

    # Only the held-out images are encoded again.
    assert counter.images == 2
    assert again[0].value == first.value
    assert again[0].details["train_seconds"] == first.details["train_seconds"]


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["disk", "stream"])
def test_training_beyond_memory_holds_a_few_batches_of_features(tmp_path, tier):
    entry_bytes = 4 * 64 * 24 * 2
    changes = {"image_size": 64, "epochs": 1, "batch_size": 4, "holdout": 0.0, "loss": "histogram"}
    probe = quick_probe(**changes, tier=tier, cache=str(tmp_path))
    context = probe_context(tmp_path, dataset=ColourDataset(num_train=170), layers=(0, 1, 2, 3))
    run = SegmentationRun(probe, context)
    features = run.features()
    assert features.tier == tier
    with LiveBytes() as memory:
        run.train(features)
    assert memory.peak < 40 * 4 * entry_bytes < 170 * entry_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tier", ["memory", "disk", "stream"])
def test_gpu_and_cpu_scores_agree_for_every_feature_storage(tmp_path, tier):
    probe = quick_probe(tier=tier, cache=str(tmp_path))
    context = probe_context(tmp_path)
    on_cpu = score_values(probe.run(context))
    on_gpu = score_values(probe.run(replace(context, device=torch.device("cuda"))))
    assert on_gpu == pytest.approx(on_cpu, abs=0.05)


def test_features_contain_every_view_of_every_image_and_its_labels(tmp_path):
    run = SegmentationRun(quick_probe(views=2, loss="histogram"), probe_context(tmp_path))
    features, training_pass = run.features(), run.training_pass
    for image, number in ((0, 0), (5, 1), (17, 1)):
        view, mask = WholeImage(2).make_view(training_pass.images[image], number, 32)
        expected = training_pass.extractor(view[None])[1]["token"][0].half()
        entry = 2 * image + number
        read = features.reader([1], torch.device("cpu"))
        (batch,) = read([torch.tensor([entry])])
        assert torch.equal(batch.features[0, 0], expected)
        assert torch.equal(batch.labels[0], resize_mask(mask, 32, 32))


def test_errors_of_a_pass_name_the_image_or_the_folder(tmp_path):
    encoder, probe = tiny_encoder(), quick_probe(tier="disk", cache=str(tmp_path))
    with torch.no_grad():
        encoder.module.get_parameter("blocks.1.mlp.fc2.bias").fill_(float("inf"))
    with pytest.raises(CheckpointError, match="train/0"):
        list(probe.run(probe_context(tmp_path, encoder)))
    assert list((tmp_path / "features").iterdir()) == []
    (tmp_path / "features").rmdir()
    (tmp_path / "features").write_text("not a folder")
    with pytest.raises(MachineError) as caught:
        list(probe.run(probe_context(tmp_path)))
    assert caught.value.hint == ("probe.cache={folder}",)
