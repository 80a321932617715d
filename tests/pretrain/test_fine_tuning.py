"""Test that a training run can start with the weights of another run."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pretrain.checkpoints import CONFIG
from pretrain.fine_tuning import load_initial_weights
from pretrain.objectives.mae import Mae
from pretrain.objectives.supervised import Supervised
from pretrain.optimizers.recipes import AdamW, Soap
from pretrain.plan import Pretraining
from ssl_bench.errors import CheckpointError, ConfigurationError
from ssl_bench.models import (
    ConvMixerConfig,
    EncoderConfig,
    build_encoder,
    build_vit,
    save_encoder,
)
from ssl_bench.system.files import file_sha256
from tests.pretrain import plans
from tests.pretrain.plans import SMALL_DINO, album, state_of, stopped_after_a_step
from tests.support.faults import expect_error, make_pretrain_args
from tests.support.runs import log_rows

TINY = replace(plans.TINY, num_registers=1)
SUPERVISED, MAE = Supervised(), Mae(decoder_dim=12, decoder_depth=1, decoder_heads=3)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return album(tmp_path_factory.mktemp("classes"), 9, folders=("train/a", "train/b"))


def save_initial(path: Path, config: EncoderConfig = TINY, *, seed=7) -> Path:
    save_encoder(path, build_encoder(config, seed=seed), {})
    return path


def plan_of(root, start=None, *, objective=SUPERVISED, **parts) -> Pretraining:
    parts = {"model": TINY, "objective": objective, "batch_size": 4, "max_steps": 3, **parts}
    address = None if start is None else str(start)
    return plans.plan_of(root, data={"labels": True}, init_from=address, **parts)


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    return state_of(out)["learner"]


def assert_equal_weights(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    "objective", [SUPERVISED, SMALL_DINO, MAE], ids=["supervised", "dino", "mae"]
)
def test_all_encoders_get_the_weights_but_heads_are_new(root, tmp_path, objective):
    start = save_initial(tmp_path / "start.safetensors")
    weights = build_vit(TINY, seed=7).state_dict()
    # The learning rate of the only step is 0, because of the warm-up.
    plan_of(root, start, objective=objective, max_steps=1).run(tmp_path / "tuned", device="cpu")
    plan_of(root, objective=objective, max_steps=1).run(tmp_path / "new", device="cpu")

    configuration = state_of(tmp_path / "tuned")["configuration"]
    assert configuration["init_from_sha256"] == file_sha256(start)
    assert f"init_from: {start}" in (tmp_path / "tuned" / CONFIG).read_text()
    tuned, new = weights_of(tmp_path / "tuned"), weights_of(tmp_path / "new")
    copies = [name.split("backbone.")[0] for name in tuned if name.endswith("backbone.cls_token")]
    assert copies == (["student.", "teacher."] if objective is SMALL_DINO else ["student."])
    for name, value in tuned.items():
        if "backbone." in name:
            assert torch.equal(value, weights[name.split("backbone.")[1]]), name
        elif name != "center":
            assert torch.equal(value, new[name]), name
    assert len(tuned) > len(copies) * len(weights)


def test_positions_are_resized_to_another_image_size(tmp_path):
    start = save_initial(tmp_path / "start.safetensors")
    encoder = build_vit(replace(TINY, image_size=32, drop_path=0.1), seed=0).eval()
    load_initial_weights(str(start), [encoder])
    images = torch.randn(2, 3, 32, 32)
    old = build_vit(TINY, seed=7).eval()
    assert encoder.pos_embed.shape == (1, 17, 24)
    torch.testing.assert_close(encoder.forward_features(images), old.forward_features(images))


def test_fixed_positions_can_become_learned_but_not_the_reverse(tmp_path):
    fixed = replace(TINY, position_embedding="sinusoidal", position_scale=2.0)
    start = save_initial(tmp_path / "start.safetensors", fixed)
    larger = build_vit(replace(fixed, image_size=32), seed=0)
    positions = larger.pos_embed.clone()
    learned = build_vit(TINY, seed=0)
    load_initial_weights(str(start), [larger, learned])

    assert torch.equal(larger.pos_embed, positions)
    assert torch.equal(learned.pos_embed, build_vit(fixed, seed=0).pos_embed)
    assert learned.pos_embed.requires_grad
    refused = {
        save_initial(tmp_path / "learned.safetensors"): (larger, "position_embedding=learned"),
        start: (build_vit(replace(fixed, position_scale=1.0), seed=0), r"position_scale=2\.0"),
    }
    for path, (encoder, option) in refused.items():
        with pytest.raises(ConfigurationError, match=option):
            load_initial_weights(str(path), [encoder])


def test_missing_weights_and_other_architectures_are_refused(workdir, capsys):
    missing = make_pretrain_args(workdir / "photos", "other", "init_from=runs/nothing")
    assert "no checkpoint at runs/nothing" in expect_error(capsys, missing, 4)
    config = ConvMixerConfig(image_size=16, patch_size=4, dim=8, depth=1)
    start = save_initial(workdir / "mixer.safetensors", config)
    with pytest.raises(ConfigurationError, match=r"ConvMixer.*VisionTransformer"):
        load_initial_weights(str(start), [build_vit(TINY, seed=0)])
    encoder = build_encoder(config, seed=0)
    load_initial_weights(str(start), [encoder])
    assert_equal_weights(build_encoder(config, seed=7).state_dict(), encoder.state_dict())


def train_whole_and_stopped(root, tmp_path, **options) -> Pretraining:
    start = save_initial(tmp_path / "start.safetensors")
    plan = plan_of(root, start, **options)
    plan.run(tmp_path / "whole", device="cpu")
    stopped_after_a_step(plan, tmp_path / "stopped")
    return plan


@pytest.mark.parametrize("is_moved", [False, True])
def test_runs_continue_if_the_initial_checkpoint_is_moved_or_deleted(root, tmp_path, is_moved):
    plan = train_whole_and_stopped(root, tmp_path)
    names = ("start.safetensors", "start.safetensors.sha256")
    if is_moved:
        (tmp_path / "elsewhere").mkdir()
        for name in names:
            shutil.move(tmp_path / name, tmp_path / "elsewhere" / name)
        plan = replace(plan, init_from=str(tmp_path / "elsewhere" / names[0]))
    else:
        for name in names:
            (tmp_path / name).unlink()
    plan.run(tmp_path / "stopped", resume=True, device="cpu")
    assert_equal_weights(weights_of(tmp_path / "whole"), weights_of(tmp_path / "stopped"))


def test_a_run_does_not_continue_from_another_initial_checkpoint(root, tmp_path):
    plan = plan_of(root, save_initial(tmp_path / "start.safetensors"))
    stopped_after_a_step(plan, tmp_path / "stopped")
    before, path = weights_of(tmp_path / "stopped"), tmp_path / "start.safetensors"
    first = file_sha256(path)
    save_initial(path, seed=8)

    changed = f"init_from_sha256: {first} -> {file_sha256(path)}"
    with pytest.raises(ConfigurationError, match=changed):
        plan.run(tmp_path / "stopped", resume=True, device="cpu")
    with pytest.raises(ConfigurationError, match=f"init_from_sha256: {first} -> None"):
        replace(plan, init_from=None).run(tmp_path / "stopped", resume=True, device="cpu")
    nowhere = replace(plan, init_from=str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        nowhere.run(tmp_path / "stopped", resume=True, device="cpu")
    assert_equal_weights(before, weights_of(tmp_path / "stopped"))


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("last.safetensors", "{folder}"),
        ("last.safetensors", "{folder}/last.safetensors"),
        ("epoch0001.safetensors", "{folder}@1"),
        ("epoch0001.safetensors", "{folder}/epoch0001.safetensors"),
    ],
)
def test_a_run_never_overwrites_its_initial_checkpoint(root, tmp_path, name, address):
    file = save_initial(tmp_path / name)
    plan = plan_of(root, address.format(folder=tmp_path))
    with pytest.raises(ConfigurationError) as caught:
        plan.run(tmp_path, overwrite=True, device="cpu")
    assert caught.value.hint == ("--out", "{folder}")
    assert file.is_file()


@pytest.mark.parametrize("optimizer", [AdamW(lr=0.05), Soap(lr=0.05, precondition_frequency=2)])
def test_a_run_with_layer_decay_continues_bit_for_bit(root, tmp_path, optimizer):
    plan = train_whole_and_stopped(root, tmp_path, optimizer=optimizer, layer_decay=0.5)
    plan.run(tmp_path / "stopped", resume=True, device="cpu")
    assert_equal_weights(weights_of(tmp_path / "whole"), weights_of(tmp_path / "stopped"))
    groups = state_of(tmp_path / "stopped")["optimizer"]["param_groups"]
    last = log_rows(tmp_path / "stopped")[-1]
    for layer, (decayed, exempt) in enumerate(zip(groups[::2], groups[1::2], strict=True)):
        rate = pytest.approx(last["lr"] * 0.5 ** (3 - layer))
        assert (decayed["lr"], exempt["lr"]) == (rate, rate)
        assert (decayed["weight_decay"], exempt["weight_decay"]) == (last["weight_decay"], 0)
