"""Test that a finished training run can be extended."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from pretrain.checkpoints import (
    CONFIG,
    ENCODER,
    LOG,
    PREVIOUS,
    STATE,
    prepare_folder,
    save_state,
)
from pretrain.crops.multi import MultiCrop
from pretrain.optimizers.recipes import Soap
from pretrain.plan import Pretraining
from ssl_bench.cli.__main__ import main
from ssl_bench.composition.compose import import_component
from ssl_bench.errors import CheckpointError, ConfigurationError, Preempted
from ssl_bench.models import identify_encoder, load_encoder
from ssl_bench.models.loading.addresses import expand_addresses
from ssl_bench.results import ResultStore
from ssl_bench.system.files import file_sha256, read_digests
from tests.pretrain.plans import TINY, album, plan_of, state_of, stopped_after_a_step
from tests.support.faults import PRETRAIN, unchecked_types
from tests.support.runs import assert_same_run, interrupt_at_micro_batch, log_rows

# A step takes two of thirteen images.
STEPS_PER_EPOCH = 6
PCA = ("probe", "--task", "pca", "dataset.num_train=2", "dataset.num_val=2", "probe.image_size=16")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return album(tmp_path_factory.mktemp("album"))


def plan(root: Path, **train) -> Pretraining:
    return plan_of(root, **{"max_steps": None, "epochs": 3, **train})


@pytest.fixture(scope="module")
def kept(root, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("kept") / "run"
    plan(root, keep_epochs=[1], keep_every=2).run(out, device="cpu")
    return out


@pytest.mark.slow
def test_encoders_of_the_requested_epochs_are_kept_with_digests(kept, root, tmp_path):
    names = sorted(path.name for path in kept.glob("epoch*"))
    assert names == [f"epoch000{n}.safetensors{end}" for n in (1, 2) for end in ("", ".sha256")]
    for path in kept.glob("epoch*.safetensors"):
        digests = [d for d, _ in read_digests(path.with_name(f"{path.name}.sha256"))]
        assert digests == [file_sha256(path)]
    # A run that is stopped after this epoch has the same encoder.
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at_micro_batch(patch, MultiCrop, 2 * STEPS_PER_EPOCH)
        with pytest.raises(Preempted):
            plan(root).run(tmp_path / "early", device="cpu")
    assert state_of(tmp_path / "early")["step"] == 2 * STEPS_PER_EPOCH
    one, other = load_encoder(f"{kept}@2").module, load_encoder(str(tmp_path / "early")).module
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_an_encoder_is_selected_by_its_epoch(kept):
    encoder, names = load_encoder(f"{kept}@2"), [f"epoch000{n}.safetensors" for n in (1, 2)]
    assert encoder.name == "run@2"
    assert encoder.sha256 == file_sha256(kept / names[1]) != load_encoder(str(kept)).sha256
    assert identify_encoder(f"{kept}@2").identity() == encoder.identity()
    assert load_encoder(str(kept / names[0])).name == "run@1"
    with pytest.raises(CheckpointError, match=r"@1, @2"):
        load_encoder(f"{kept}@7")
    assert expand_addresses([f"{kept}/epoch*"]) == [str(kept / name) for name in names]
    by_shell = sorted(map(str, kept.glob("epoch*")))
    assert expand_addresses(by_shell) == [str(kept / name) for name in names]
    assert expand_addresses(by_shell[1:2]) == by_shell[1:2]
    assert expand_addresses([f"{kept.parent}/*@2"]) == [str(kept / names[1])]
    assert expand_addresses([f"{kept}@1,{kept}@2"]) == [f"{kept}@1", f"{kept}@2"]


@pytest.mark.parametrize("epochs", ["*", "1,7"])
def test_malformed_epochs_are_refused_with_a_working_pattern(kept, capsys, epochs):
    assert main([*PCA, "--checkpoint", f"{kept}@{epochs}"]) == 4
    (pattern,) = re.findall(r"'([^']*/epoch\*)'", capsys.readouterr().err)
    assert main([*PCA, "--dry-run", "--checkpoint", pattern.replace("runs/*", str(kept))]) == 0
    output = capsys.readouterr().out
    assert "run@1" in output
    assert "run@2" in output


def test_a_table_shows_scores_over_epochs(kept, tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    assert main([*PCA, *out, "--checkpoint", str(kept)]) == 0
    table = ["table", *out, "--over-epochs"]
    assert main(table) == 3
    assert "train.keep_epochs=[100,200]" in capsys.readouterr().err
    assert main([*PCA, *out, "--checkpoint", f"{kept}@1", f"{kept}@2"]) == 0
    output = capsys.readouterr().out
    assert "run@1" in output
    assert "run@2" in output
    figure = tmp_path / "epochs.png"

    assert main([*table, "--format", "json", "--figure", str(figure)]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert {table["kind"] for table in tables} == {"epochs"}
    assert all(table["title"].endswith(", run") for table in tables)
    cells = {
        (table["metric"], table["facet"], cell["epoch"], cell["column"]): cell["value"]
        for table in tables
        for cell in table["cells"]
    }
    records = {
        (one.metric, one.facet, one.details["epoch"], f"block {one.layer}"): one.value
        for one in ResultStore(tmp_path).records()
    }
    assert cells == records
    assert {epoch for _, _, epoch, _ in cells} == {1.0, 2.0, 3.0}
    assert Image.open(figure).size[0] > 300
    assert main([*table, "--format", "text"]) == 0
    assert "epoch" in capsys.readouterr().out
    assert main([*table, "--pivot"]) == 2
    compare = ["compare", *out, f"{kept}@1"]
    assert main([*compare, f"{kept}@2"]) == 3
    assert main([*compare, f"{kept}@7"]) == 4


def test_overwrite_deletes_the_kept_encoders(kept, root, tmp_path):
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    plan(root, epochs=1, keep_every=1).run(tmp_path, overwrite=True, device="cpu")
    assert [path.name for path in tmp_path.glob("epoch*.safetensors")] == ["epoch0001.safetensors"]


@pytest.mark.parametrize(
    "name", [CONFIG, LOG, ENCODER, STATE, PREVIOUS, "state.new.pt", "epoch0003.safetensors"]
)
def test_every_file_of_a_run_is_kept_until_overwrite(tmp_path, name):
    digests, temporary = f"{STATE}.sha256", f".ssl-bench-{7:032x}.tmp"
    for file in (name, "notes.txt", digests, temporary):
        (tmp_path / file).write_text("content")
    with pytest.raises(ConfigurationError) as caught:
        prepare_folder(tmp_path, resume=False, overwrite=False)
    assert {"--resume", "--overwrite"} <= {*caught.value.hint}
    prepare_folder(tmp_path, resume=True, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {name, "notes.txt", digests}
    prepare_folder(tmp_path, resume=False, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.slow
@unchecked_types()
def test_an_extended_run_continues_and_resumes_bit_for_bit(root, tmp_path):
    out, other = tmp_path / "one", tmp_path / "other"
    short, long = plan(root, epochs=1), plan(root, epochs=2, keep_epochs=[2])
    short.run(out, device="cpu")
    with pytest.raises(ConfigurationError, match=r"train\.epochs: 1 -> 2") as caught:
        long.run(out, resume=True, device="cpu")
    assert caught.value.hint[0] == "--extend"
    shutil.copytree(out, other)

    long.run(out, extend=True, device="cpu")

    rows = log_rows(out)
    assert [row["step"] for row in rows] == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    # From then on, the schedules equal the schedules of a run that had this length from the start.
    long.run(tmp_path / "whole", device="cpu")
    planned = [row["lr"] for row in log_rows(tmp_path / "whole")]
    assert [row["lr"] for row in rows[STEPS_PER_EPOCH:]] == planned[STEPS_PER_EPOCH:]
    assert [row["lr"] for row in rows[:STEPS_PER_EPOCH]] != planned[:STEPS_PER_EPOCH]
    assert (out / "epoch0002.safetensors").is_file()
    config = yaml.safe_load((out / CONFIG).read_text())
    assert config["train"]["epochs"] == 2
    assert config["extensions"] == [{"step": 6, "from_steps": 6, "to_steps": 12}]

    stopped = replace(long, train=replace(long.train, max_minutes=0.0))
    stopped.run(other, extend=True, device="cpu")
    assert state_of(other)["step"] == STEPS_PER_EPOCH + 1
    long.run(other, resume=True, device="cpu")
    assert_same_run(out, other)


def test_an_extension_must_be_longer_and_change_nothing_else(root, tmp_path):
    stopped_after_a_step(plan(root, epochs=2), tmp_path)
    cases = [(1, 3, "12 steps"), (2, 3, "12 steps"), (3, 4, "seed: 3 -> 4")]
    for epochs, seed, reason in cases:
        with pytest.raises(ConfigurationError, match=reason):
            plan(root, epochs=epochs, seed=seed).run(tmp_path, extend=True, device="cpu")
    # A resumed run is told about `--extend` only if this option would help.
    for epochs, seed, helps in ((3, 3, True), (1, 3, False), (3, 4, False)):
        with pytest.raises(ConfigurationError) as caught:
            plan(root, epochs=epochs, seed=seed).run(tmp_path, resume=True, device="cpu")
        assert ("--extend" in caught.value.hint) == helps


def test_only_plain_resume_starts_a_missing_run(workdir, capsys):
    run = ["pretrain", "--data-root", "photos", "--out", "run", *PRETRAIN, "train.max_steps=1"]
    for words in (["--resume=must"], ["--extend"]):
        assert main([*run, *words]) == 2
        assert not Path("run", ENCODER).exists()
    assert main([*run, "--resume"]) == 0
    assert "run contains no run to resume, starting one" in capsys.readouterr().err
    assert main([*run, "--resume=must"]) == 0
    assert main([*run, "--extend", "train.max_steps=2"]) == 0
    assert state_of(Path("run"))["step"] == 2
    assert "Only --resume and --extend need run/state.pt (" in capsys.readouterr().err
    assert not Path("run/state.previous.pt").exists()
    assert main([*run, "--resume=maybe"]) == 2


def change_state(out, removed=(), added=None):
    # Another version may have saved other keys.
    state = state_of(out)
    configuration = state["configuration"]
    for key in removed:
        *path, name = key.split(".")
        part = configuration
        for word in path:
            part = part[word]
        del part[name]
    for key, value in (added or {}).items():
        old = configuration.get(key)
        configuration[key] = old | value if isinstance(old, dict) else value
    save_state(out, state)


NEWER = (
    "objective.crops.hue",
    "optimizer.betas",
    "model.graying",
    "train.max_grad_norm",
    "monitor",
)
# States of older versions lack options, or use former names of options and modules.
OLDER_STATES = [
    (NEWER, {}),
    (("model.mlp_mean",), {"model": {"init_options": {"mlp_mean": 0.5}}}),
    ((), {"_target_": "pretrain.train.Pretraining"}),
    ((), {"objective": {"_target_": "pretrain.former.Dino"}}),
]


@pytest.mark.slow
def test_a_run_of_an_older_version_continues_bit_for_bit(root, tmp_path):
    plan = plan_of(root, model=replace(TINY, mlp_mean=0.5), max_steps=3)
    plan.run(tmp_path / "whole", device="cpu")
    stopped_after_a_step(plan, tmp_path / "stopped")
    for number, (removed, added) in enumerate(OLDER_STATES):
        out = shutil.copytree(tmp_path / "stopped", tmp_path / f"older{number}")
        change_state(out, removed, added)

        plan.run(out, resume=True, device="cpu")

        assert_same_run(tmp_path / "whole", out)


def test_differences_from_an_older_state_are_reported(root, tmp_path):
    out = tmp_path / "stopped"
    stopped_after_a_step(plan_of(root, max_steps=3, max_grad_norm=3.0), out)
    norm = {"max_grad_norm": 1.0}
    cases = [
        ((), {"model": {"lottery": 7}}, {}, "model.lottery: 7 -> None"),
        ((), {"lottery": {"prize": 7}}, {}, "lottery.prize: 7 -> None"),
        # A newer option is not at its default.
        (("train.max_grad_norm", "model.norm"), {}, norm, "train.max_grad_norm: 3.0 -> 1.0"),
        # The defaults of the new class do not apply to the class of the saved run.
        ((), {}, {"optimizer": Soap(lr=0.05)}, "optimizer._target_: .*AdamW -> .*Soap.*"),
    ]
    for number, (removed, added, options, difference) in enumerate(cases):
        older = shutil.copytree(out, tmp_path / str(number))
        change_state(older, removed, added)
        with pytest.raises(ConfigurationError, match=rf"\({difference}\)"):
            plan_of(root, max_steps=3, **options).run(older, resume=True, device="cpu")
    assert import_component("pretrain.train.Pretraining", "_target_") is Pretraining
