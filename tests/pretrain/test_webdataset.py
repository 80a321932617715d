"""Test pretraining on images in tar files."""

import os
import signal
import time
from pathlib import Path

import pytest
import yaml

from pretrain.checkpoints import ENCODER, LOG
from pretrain.objectives.supervised import Supervised
from pretrain.options import DataOptions
from ssl_bench.cli.__main__ import main
from ssl_bench.errors import ConfigurationError, UnreadableImageError
from ssl_bench.system.output import print_message_once
from tests.pretrain.plans import SMALL_DINO, album, monitored, plan_of, stopped_after_a_step
from tests.support.faults import exit_code, expect_error, fork, make_pretrain_args, unchecked_types
from tests.support.runs import assert_same_run, log_rows
from tests.support.shards import tars_of, write_tar


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    tars_of(album(root / "album"), root / "shards")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("objective", [SMALL_DINO, Supervised()], ids=["dino", "supervised"])
def test_tar_files_give_the_same_encoder_as_a_folder(root, tmp_path, objective):
    plans = {
        "folder": plan_of(root / "album", objective=objective),
        "tars": plan_of(root / "shards", objective=objective),
        "pattern": plan_of(root / "shards/{000..003}.tar", objective=objective, num_workers=2),
    }
    paths = [plan.run(tmp_path / name, device="cpu") for name, plan in plans.items()]
    folder, tars, pattern = (path.read_bytes() for path in paths)
    assert folder == tars == pattern
    assert log_rows(tmp_path / "folder") == log_rows(tmp_path / "tars")


@pytest.mark.slow
@unchecked_types()
def test_a_killed_process_continues_bit_for_bit(root, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = ("--resume", "train.num_workers=2", "train.checkpoint_minutes=0")
    killed, whole = (
        make_pretrain_args(
            root / "shards/{000..003}.tar", str(folder), *options, "train.max_steps=12"
        )
        for folder in (tmp_path / "killed", tmp_path / "whole")
    )
    log = tmp_path / "killed" / LOG
    # This run comes first, so that the forked processes need not import anything.
    assert main(whole) == 0

    def pretrain_in_own_group() -> int:
        os.setpgid(0, 0)
        return main(killed)

    child = fork(pretrain_in_own_group, stderr=tmp_path / "output")
    deadline = time.monotonic() + 60
    while not log.is_file() or len(log.read_text().splitlines()) < 2:
        assert time.monotonic() < deadline, (tmp_path / "output").read_text()
        time.sleep(0.002)
    # The signal also kills the data workers.
    os.killpg(child, signal.SIGKILL)
    assert exit_code(child) == -signal.SIGKILL
    assert len(log.read_text().splitlines()) < 12
    assert main(killed) == 0

    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_a_run_does_not_continue_with_other_tar_files(root, tmp_path):
    shards = tars_of(root / "album", tmp_path / "shards")
    stopped_after_a_step(plan_of(shards), tmp_path / "run")
    members = {"class0/0.png": (root / "album/class0/10.png").read_bytes()}
    write_tar(shards / "000.tar", {**members, "class0/10.png": members["class0/0.png"]})
    with pytest.raises(ConfigurationError, match="images"):
        plan_of(shards).run(tmp_path / "run", resume=True, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("fingerprint", ["content", "stat"])
def test_a_run_continues_after_its_tar_files_are_moved(root, tmp_path, fingerprint):
    shards = tars_of(root / "album", tmp_path / "shards")
    data = {"fingerprint": fingerprint}
    stopped_after_a_step(plan_of(shards, data=data), tmp_path / "run")
    moved = shards.rename(tmp_path / "moved")
    plan_of(moved / "*.tar", data=data).run(tmp_path / "run", resume=True, device="cpu")
    plan_of(moved, data=data).run(tmp_path / "whole", device="cpu")
    assert (tmp_path / "run" / ENCODER).read_bytes() == (tmp_path / "whole" / ENCODER).read_bytes()


def test_damaged_images_in_tar_files_stop_runs_or_are_omitted(root, tmp_path):
    shards = tars_of(root / "album", tmp_path / "shards")
    write_tar(shards / "004.tar", {"damaged.png": b"\x89PNG\r\n\x1a\n", "damaged.cls": b"0"})
    with pytest.raises(UnreadableImageError, match=r"004\.tar/damaged\.png") as caught:
        plan_of(shards).run(tmp_path / "fails", device="cpu")
    assert caught.value.hint == ("--on-bad-image", "skip")
    plan_of(shards, data={"on_bad_image": "skip"}).run(tmp_path / "skips", device="cpu")
    config = yaml.safe_load((tmp_path / "skips/config.yaml").read_text())
    assert config["left_out"] == ["004.tar/damaged.png"]


def test_the_number_of_images_can_be_limited(root):
    images = DataOptions(root=str(root / "shards"), limit=5, labels=True).find_images()
    assert (len(images), images.name) == (5, "webdataset-limit5")
    assert {images[index].label for index in range(5)} == {0, 1}


def test_the_monitor_reads_tar_files(root, tmp_path):
    for split, seed in (("train", 0), ("val", 1)):
        tars_of(album(tmp_path / "album" / split, 8, seed=seed), tmp_path / "shards" / split)
    rows = {}
    for name in ("album", "shards"):
        plan = plan_of(tmp_path / name, objective=Supervised(), max_steps=2)
        plan = monitored(plan, knn_epochs=1, accuracy_epochs=1, neighbours=2, crop_share=1.0)
        plan.run(tmp_path / f"run_{name}", device="cpu")
        rows[name] = log_rows(tmp_path / f"run_{name}")
    assert "val_top1" in rows["album"][-1]
    assert rows["album"] == rows["shards"]


def test_a_pattern_is_accepted_and_missing_files_are_counted(root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    print_message_once.cache_clear()
    for flag in ("data.root={}", "data.root='{}'"):
        pattern = flag.format("shards/{000..003}.tar")
        words = ["pretrain", pattern, "train.batch_size=2", "--dry-run", "--out", "run"]
        assert main(words) == 0
        assert "13 of webdataset all" in capsys.readouterr().out
    missing = make_pretrain_args(root / "shards/{000..009}.tar", "run")
    assert "6 of 10 tar files are missing" in expect_error(capsys, missing, 3)
    assert not Path("run", LOG).exists()
