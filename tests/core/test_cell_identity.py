"""Test which settings make two results of a probe distinct."""

import json
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import ssl_bench
from probes.knn import KNN
from ssl_bench.cli.__main__ import main
from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import build, compose_config, has_key
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.errors import DataError
from ssl_bench.evaluation import Evaluation
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model
from ssl_bench.models.encoder import describe_config, describe_library_model
from ssl_bench.planning import BATCH_SIZE_KEYS
from ssl_bench.results import OLD_FORMAT, ResultStore, versions
from tests.support.faults import (
    SMALL,
    TINY,
    class_folders,
    encoder_file,
    make_probe_args,
    records,
    voc,
)  # fmt: skip
from tests.support.report_cells import build_record


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    encoder_file(Path("encoder.safetensors"))
    class_folders(tmp_path / "classes")
    voc(tmp_path / "voc")
    return tmp_path


@pytest.mark.parametrize("task", choices("probe"))
def test_batch_sizes_are_no_settings_and_metric_versions_agree(task):
    usual = compose_config("probing", [f"probe={task}"])
    sizes = [f"{key}=3" for key in BATCH_SIZE_KEYS if has_key(usual, key)]
    other = compose_config("probing", [f"probe={task}", *sizes])
    probe = build(usual, "probe")
    assert build(other, "probe").settings() == probe.settings()
    # Tables look up the version without building the probe.
    assert versions.metric_version(task) == probe.metric_version


def swap(one: Path, other: Path) -> None:
    one.rename(one.with_name("aside"))
    other.rename(one)
    one.with_name("aside").rename(other)


def values(out: str = "results") -> dict[str, float]:
    return {record.metric: record.value for record in records(out)}


def test_results_after_swapping_training_classes_are_not_compared(workdir, capsys):
    encoder_file(Path("other.safetensors"), seed=1)
    probe = make_probe_args("knn", "class_folders", workdir / "classes")
    other = [word.replace("encoder.", "other.") for word in probe]
    assert main(probe) == main([*other, "--out", "both"]) == main([*probe, "--out", "both"]) == 0
    assert main(["compare", "encoder", "other", "--out", "both"]) == 0
    assert "trained on train (6 images, " in capsys.readouterr().out
    before = records()

    swap(workdir / "classes/train/cat", workdir / "classes/train/dog")

    # Results of different training images are not compared.
    assert main([*other, "--out", "swapped"]) == main([*probe, "--out", "fresh"]) == 0
    shutil.copytree("results/records", "swapped/records", dirs_exist_ok=True)
    assert main(["compare", "encoder", "other", "--out", "swapped"]) == 3
    assert main(probe) == 0
    after = [record for record in records() if record not in before]
    assert len(after) == len(before)
    assert {record.metric: record.value for record in after} == values("fresh")
    assert {r.trained_on for r in before}.isdisjoint({r.trained_on for r in after})


@dataclass(frozen=True)
class ObservedDataset:
    dataset: Dataset
    opened: list[str]

    def __getattr__(self, name: str):
        return getattr(self.dataset, name)

    def train(self) -> ImageSet:
        self.opened.append("train")
        return self.dataset.train()

    def val(self) -> ImageSet:
        self.opened.append("val")
        return self.dataset.val()


def evaluation(dataset: Any, probe: Any) -> Evaluation:
    encoder = encoder_from_model(build_vit(TINY, seed=0), name="tiny")
    return Evaluation(encoder, dataset, probe, (1,), 0, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("task", sorted(SMALL))
def test_probes_that_read_training_images_record_them(workdir, task):
    kinds = dict.fromkeys(("knn", "classification", "clustering"), "class_folders")
    kind = kinds.get(task, "voc2012")
    overrides = [f"probe={task}", f"dataset={kind}", *SMALL[task]]
    root = workdir / ("voc" if kind == "voc2012" else "classes")
    config = compose_config("probing", [*overrides, f"data.root={root}"])
    probe = build(config, "probe")
    dataset = cast(Any, ObservedDataset(build(config, "dataset"), []))

    new_records = evaluation(dataset, probe).run(ResultStore(Path("here")), say=print)

    assert {record.trained_on is not None for record in new_records} == {"train" in dataset.opened}


def test_training_images_that_change_during_runs_keep_record_keys(workdir):
    config = compose_config("probing", ["probe=knn", *SMALL["knn"], "data.root=classes"])
    folders = ClassFolders("classes")
    dataset = cast(Any, ObservedDataset(folders, []))
    before = folders.train().fingerprint()

    def save_and_swap(self, record, per_image=None):
        path = save(self, record, per_image)
        if len(list(Path("here").rglob("*.json"))) == 2:
            swap(workdir / "classes/train/cat", workdir / "classes/train/dog")
        return path

    save = ResultStore.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResultStore, "save", save_and_swap)
        new_records = evaluation(dataset, build(config, "probe")).run(
            ResultStore(Path("here")), say=print
        )

    assert len(new_records) == 4
    assert {cast(Any, record.trained_on).fingerprint for record in new_records} == {before}
    # Each set is opened once, however many results there are.
    assert sorted(dataset.opened) == ["train", "val"]


def test_equal_weights_of_another_architecture_are_another_encoder():
    from timm.models.vision_transformer import VisionTransformer

    shape: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 12, "depth": 2}
    shape |= {"num_heads": 2}

    def describe(**change: Any) -> object:
        return describe_library_model(VisionTransformer(**{**shape, **change}), "timm", "x")

    changes: list[dict[str, Any]] = [
        {"act_layer": torch.nn.ReLU},
        {"norm_layer": partial(torch.nn.LayerNorm, eps=1e-5)},
        {"num_heads": 3},
        {"global_pool": "avg"},
    ]
    assert describe() == describe()
    assert all(describe(**change) != describe() for change in changes)
    changes = [{"num_heads": 3}, {"skip_mlp": False}, {"graying": "dct"}, {"attention": "linear"}]
    for change in changes:
        assert describe_config(replace(TINY, **change)) != describe_config(TINY)
    # Integers stay in the description if they are defaults. The initialisation is not part of it.
    assert describe_config(ViTConfig()).items() >= {"kind": "vit", "depth": 12}.items()
    assert describe_config(replace(TINY, init="mimetic", drop_path=0.1)) == describe_config(TINY)


def test_a_replaced_checkpoint_is_compared_again(workdir):
    encoder_file(Path("other.safetensors"), seed=1)
    words = ["probe", "--task", "conditioning", "--dataset", "folder", "--layer", "1"]
    words += ["--data-root", "classes/val/cat", "--checkpoint", "encoder.safetensors"]
    words += ["probe.protocol=checkpoints", "probe.compare_to=other.safetensors"]
    words += ["probe.image_size=32", "probe.num_images=2"]
    assert main(words) == 0
    (before,) = records()

    encoder_file(Path("other.safetensors"), seed=2)
    assert main(words) == 0

    (after,) = (record for record in records() if record != before)
    assert after.value != before.value


def test_dtype_is_part_of_the_key(workdir):
    probe = make_probe_args("knn", "class_folders", workdir / "classes")

    assert main(probe) == main([*probe, "dtype=bfloat16"]) == 0

    kinds = [record.settings["dtype"] for record in records()]
    assert kinds.count("bfloat16") == kinds.count("float32") == len(kinds) // 2 > 0


def test_records_in_the_old_format_are_ignored_and_reported(workdir, capsys):
    probe = make_probe_args("knn", "class_folders", workdir / "classes")
    assert main(probe) == 0
    paths = sorted(Path("results/records").rglob("*.json"))
    for path in paths:
        record = json.loads(path.read_text())
        for name in ("architecture", "mean", "std"):
            del record[name]
        del record["settings"]["trained_on"]
        path.write_text(json.dumps(record))
        path.rename(path.with_name(path.name[:-21] + "0123456789abcdef.json"))
    old = sorted(Path("results/records").rglob("*.json"))

    assert main(probe) == 0

    assert set(Path("results/records").rglob("*.json")) == {*paths, *old}
    capsys.readouterr()
    assert main(["table"]) == 0
    (line,) = (n for n in capsys.readouterr().err.splitlines() if OLD_FORMAT in n)
    assert line.startswith(f"{len(old)} of {len(old) + len(paths)} records ")
    for path in paths:
        path.unlink()
    assert main(["table"]) == 3


def outdated_lines(capsys) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "outdated" in line]


@pytest.mark.parametrize("version", ["metric", "pipeline"])
def test_outdated_results_are_ignored_and_computed_again(workdir, capsys, monkeypatch, version):
    probe = make_probe_args("knn", "class_folders", workdir / "classes")
    assert main(probe) == 0
    before = records()
    assert main(["table", "--pack"]) == 0
    capsys.readouterr()
    if version == "metric":
        monkeypatch.setattr(KNN, "metric_version", 2)
        monkeypatch.setattr(versions, "metric_version", lambda task: 1 + (task == "knn"))
    else:
        monkeypatch.setattr(versions, "PIPELINE_VERSION", 2)

    for words in (["table"], ["report"], ["compare", "encoder"]):
        assert main(words) == 3
        assert len(outdated_lines(capsys)) == 1
    with pytest.raises(DataError) as caught:
        records()
    typed = [word.replace("{checkpoint}", "encoder.safetensors") for word in caught.value.hint]
    flags = ["--dataset", "class_folders", "--data-root", "classes", "--layer", "1"]
    assert main([*typed[1:], *flags, *SMALL["knn"]]) == 0
    after = records()
    assert [record.value for record in after] == [record.value for record in before]
    assert {(r.metric_version, r.pipeline_version) for r in after} == {
        (2, 1) if version == "metric" else (1, 2)
    }
    # Finished results name the release that computed them.
    capsys.readouterr()
    computed_by = ssl_bench.__version__
    monkeypatch.setattr(ssl_bench, "__version__", "99.0")
    assert main(probe) == 0
    err = capsys.readouterr().err
    assert f"by version {computed_by}" in err
    assert "outdated" not in err
    assert main(["table"]) == 0
    (line,) = outdated_lines(capsys)
    assert f" {len(before)} " in line
    assert "ssl-bench probe" not in line


@pytest.mark.parametrize("task", ["knn", "elsewhere"])
def test_a_table_leaves_out_results_of_versions_below_the_newest(tmp_path, task):
    store = ResultStore(tmp_path)
    for layer, version in ((0, 1), (1, 3), (2, 3), (1, 1)):
        store.save(build_record(layer=layer, task=task, metric_version=version))

    assert [record.layer for record in store.records()] == [1, 2]
    assert [record.layer for record in store.outdated] == [0, 1]
    # The command is shown only as long as newer results are missing.
    (line,) = store.describe_left_out()
    assert f"`ssl-bench probe --task {task} --checkpoint" in line
    assert f"--out {tmp_path}`" in line
    store.save(build_record(layer=0, task=task, metric_version=3))
    assert [record.layer for record in store.records()] == [0, 1, 2]
    (line,) = store.describe_left_out()
    assert "2 outdated" in line
    assert "ssl-bench probe" not in line
