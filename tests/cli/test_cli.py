"""Test the command `ssl-bench probe`."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.models import ViTConfig
from ssl_bench.results import ResultStore
from ssl_bench.system.files import file_sha256
from tests.support.faults import encoder_file, expect_error, photo_folder, picture
from tests.support.without_torch import REPOSITORY, stdout_without_torch

CONFIG = ViTConfig(image_size=32, patch_size=8, dim=12, depth=3, num_heads=2)
PROBE = ["probe", "--task", "pca", "--dataset", "folder", "--data-root", "photos"]
SMALL = ["probe.image_size=40", "probe.panels=1"]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(["older", "newer"]):
        weights = tmp_path / "runs" / name / "last.safetensors"
        os.utime(encoder_file(weights, seed=seed, config=CONFIG), (seed * 1000, seed * 1000))
    (tmp_path / "photos").mkdir()
    for number in range(3):
        picture(number, height=24 + 8 * number).save(tmp_path / f"photos/{number}.png")
    return tmp_path


def imported_by(code: str, *modules: str) -> str:
    code = f"import sys; {code}; print([m for m in {modules} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.splitlines()[-1]


def test_help_imports_nothing_heavy():
    code = "import ssl_bench.cli.parser as cli; cli.build_parser().format_help()"
    assert imported_by(code, "torch", "hydra", "numpy") == "[]"


@pytest.mark.slow
def test_an_encoder_of_this_suite_is_probed_without_timm(workplace):
    code = f"import ssl_bench.cli.__main__ as cli; cli.main({[*PROBE, *SMALL]})"
    assert imported_by(code, "timm", "torchvision") == "[]"


@pytest.mark.slow
def test_commands_that_read_records_do_not_import_torch(tmp_path):
    source = ResultStore(REPOSITORY / "results" / "dino_photographs")
    store = ResultStore(tmp_path / "results")
    soap = {"skip_soap", "skipless_soap"}
    for record in source.records():
        if record.model in soap and record.layer in (0, record.depth - 1):
            store.save(record, source.load_per_image(record))
            ids = source.image_ids(record.dataset_fingerprint)
            store.save_image_ids(record.dataset_fingerprint, ids or ())
            run = tmp_path / "runs" / record.model
            run.mkdir(parents=True, exist_ok=True)
            (run / "last.safetensors").touch()
            line = f"{record.checkpoint_sha256}  last.safetensors\n"
            (run / "last.safetensors.sha256").write_text(line)
    store.pack()
    commands = [
        ["table"],
        ["table", "--pivot"],
        ["table", "--paper", "table2", "--as", "skip, soap=skip_soap"],
        ["compare", "runs/skip_soap", "runs/skipless_soap"],
        ["report"],
        ["data", "list", "coco_stuff"],
        ["keys"],
    ]
    stdout_without_torch(tmp_path, commands)


@pytest.mark.parametrize("words", [["--task", "nope"], ["--task", "knn", "--dataset", "vocc"]])
def test_misspelled_names_are_reported_before_torch_is_imported(words):
    code = (
        "import sys; from ssl_bench.cli.__main__ import main\n"
        f"sys.exit(10 * ('torch' in sys.modules) + main(['probe', *{words}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True)
    assert done.returncode == 2, done.stderr


def test_the_newest_checkpoint_is_probed_by_default(workplace, capsys):
    assert main([*PROBE, "--layer", "-1,0", "probe.image_size=40"]) == 0

    out, err = capsys.readouterr()
    assert "runs/newer/last.safetensors" in err
    assert "pca: explained_variance" in out
    records = ResultStore(workplace / "results").records()
    assert sorted(record.layer for record in records) == [0, 2]
    assert {record.model for record in records} == {"newer"}
    assert records[0].num_images == 3
    assert records[0].settings["image_size"] == 40
    assert records[0].changed == {"image_size": 40}
    assert main(["features", "--data-root", "photos", "--layer", "0", "--out", "files"]) == 0
    assert "runs/newer/last.safetensors" in capsys.readouterr().err


def test_finished_results_are_skipped_until_overwrite(workplace, capsys):
    assert main([*PROBE, *SMALL, "--layer", "0"]) == 0
    first = ResultStore(workplace / "results").records()
    capsys.readouterr()

    assert main([*PROBE, *SMALL, "--layer", "0,1"]) == 0
    said = capsys.readouterr().err
    assert "skipping 1 of 2 results" in said
    # Both blocks are drawn, because the overview shows both.
    assert said.count("layers 0, 1\n") == 1
    assert first[0] in ResultStore(workplace / "results").records()

    assert main([*PROBE, *SMALL, "--layer", "0", "--overwrite"]) == 0
    assert "skipping" not in capsys.readouterr().err

    # Results survive a broken image.
    (workplace / "photos" / "1.png").write_bytes(b"<html>404</html>")
    assert "1.png" in expect_error(
        capsys, [*PROBE, *SMALL, "--layer", "2", "--on-bad-image", "fail"], 3
    )
    assert len(ResultStore(workplace / "results").records()) == 2


@pytest.mark.parametrize("number", [1, 2])
def test_refused_image_sizes_are_an_error_before_any_result(workplace, capsys, number):
    other = encoder_file(workplace / "b.safetensors", config=replace(CONFIG, patch_size=16))
    words = ["--checkpoint", "runs/newer", "--checkpoint", str(other)]

    line = expect_error(capsys, [*PROBE, *words[-2 * number :], "probe.image_size=40"], 2)

    assert "40" in line
    assert "16" in line
    assert not Path("results").exists()


def test_tokencut_finds_objects_once_in_a_folder_without_labels(workplace, capsys):
    words = ["probe", "--task", "tokencut", "--dataset", "folder", "--data-root", "photos"]
    words += ["--layer", "0", "probe.panels=1"]

    assert main(words) == 0

    out, err = capsys.readouterr()
    assert "corloc" not in out
    assert "degenerate" in out
    assert "folder has no ground truth" in err
    folder = workplace / "results/pictures/tokencut/folder"
    masks = folder.glob("*/reference_max_side=640/masks/*/*.png")
    assert sorted(path.name for path in masks) == ["0.png.png", "1.png.png", "2.png.png"]
    assert main([*words, "--dry-run"]) == 0
    assert "\n1 job, 1 scores: 1 finished, 0 pending" in capsys.readouterr().out


class _BrokenOutput(io.StringIO):
    def __init__(self, *, write: OSError | None = None, flush: OSError | None = None) -> None:
        super().__init__()
        self.raised = {"write": write, "flush": flush}

    def write(self, text: str) -> int:
        if (error := self.raised["write"]) and text:
            raise error
        return len(text)

    def flush(self) -> None:
        if error := self.raised["flush"]:
            raise error


def test_closed_pipes_are_ignored_but_full_disks_are_errors(monkeypatch, capsys):
    for broken, code in (
        (_BrokenOutput(write=BrokenPipeError()), 0),
        (_BrokenOutput(flush=BrokenPipeError()), 0),
        (_BrokenOutput(flush=OSError(28, "No space left on device")), 5),
    ):
        monkeypatch.setattr(sys, "stdout", broken)
        assert main(["completion", "bash"]) == code
        # Python does not flush this stream at exit, which would fail again.
        assert sys.stdout is None
        assert ("No space left" in capsys.readouterr().err) == (code == 5)


def test_debug_shows_the_traceback(workplace):
    with pytest.raises(ValueError, match="layers must lie"):
        main([*PROBE, "--layer", "9", "--debug"])


def test_json_prints_the_records_and_nothing_else(workplace, capsys):
    assert main([*PROBE, "--layer", "0,2", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    kept = (workplace / "results" / "records").rglob("*.json")
    by_layer = {record["layer"]: record for record in (json.loads(p.read_text()) for p in kept)}
    for record in by_layer.values():
        # Only the file contains these fields.
        assert record.pop("record_sha256")
        record.pop("per_image_sha256", None)
    assert found == [by_layer[0], by_layer[2]]
    assert (found[0]["changed"], len(found[0]["checkpoint_sha256"])) == ({}, 64)
    # Pictures of all blocks are next to the photograph.
    pictures = {path.relative_to(workplace) for path in workplace.rglob("results/**/*.png")}
    assert {"block00", "block02"} <= {path.parent.name for path in pictures}
    assert any(path.name.endswith("blocks-0_2.png") for path in pictures)
    # Results of other blocks that the folder contains are not printed.
    assert main([*PROBE, "--layer", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [by_layer[2]]


def test_changed_missing_and_added_files_of_data_are_found(workplace, capsys):
    verify = ["data", "verify", "photos", "--manifest", "list", "--json"]
    (workplace / "photos/.hidden").touch()
    assert main(verify) == 0
    assert json.loads(capsys.readouterr().out) == {"manifest": "list", "listed": 3}
    assert Path("list").read_text().startswith(f"{file_sha256(Path('photos/0.png'))}  0.png\n")
    (workplace / "photos" / "0.png").write_bytes(b"other")
    (workplace / "photos" / "1.png").rename(workplace / "photos" / "new.png")

    assert main(verify) == 3

    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "manifest": "list", "changed": ["0.png"], "missing": ["1.png"], "added": ["new.png"],
    }  # fmt: skip
    assert "1 changed and 1 missing files (0.png, 1.png)" in err


def test_a_task_that_does_not_fit_is_refused_before_others_run(tmp_path, capsys):
    photo_folder(tmp_path / "photos", 1)
    words = ["probe", "--dataset", "folder", "--data-root", str(tmp_path / "photos")]
    words += ["--checkpoint", "random:timm:test_convnext", "--out", str(tmp_path / "out")]

    line = expect_error(capsys, [*words, "--task", "pca,attention"], 2)

    assert "`--task pca`" in line
    assert not (tmp_path / "out").exists()
