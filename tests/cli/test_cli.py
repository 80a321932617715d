import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from ssl_bench.cli.__main__ import main
from ssl_bench.models import ViTConfig
from ssl_bench.results import ResultStore
from ssl_bench.system.files import file_sha256
from tests.support.faults import encoder_file, picture
from tests.support.without_torch import REPOSITORY, said_without_torch

CONFIG = ViTConfig(image_size=32, patch_size=8, dim=12, depth=3, num_heads=2)


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty folder with two checkpoints below runs/ and three photographs."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(["older", "newer"]):
        weights = tmp_path / "runs" / name / "last.safetensors"
        os.utime(encoder_file(weights, seed=seed, config=CONFIG), (seed * 1000, seed * 1000))
    (tmp_path / "photos").mkdir()
    for number in range(3):
        picture(number, height=24 + 8 * number).save(tmp_path / f"photos/{number}.png")
    return tmp_path


PROBE = ["probe", "--task", "pca", "--dataset", "folder", "--data-root", "photos"]
SMALL = ["probe.image_size=40", "probe.panels=1"]


def test_help_imports_nothing_heavy():
    code = (
        "import sys, ssl_bench.cli.parser as cli; cli.build_parser().format_help();"
        "print([m for m in ('torch', 'hydra', 'numpy') if m in sys.modules])"
    )

    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == "[]"


def test_an_encoder_of_this_suite_is_probed_without_timm(workplace):
    code = (
        f"import sys, ssl_bench.cli.__main__ as cli; cli.main({[*PROBE, *SMALL]});"
        "print([m for m in ('timm', 'torchvision') if m in sys.modules])"
    )

    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_what_reads_records_takes_no_torch(tmp_path):
    source = ResultStore(REPOSITORY / "results" / "dino_photographs")
    store = ResultStore(tmp_path / "results")
    soap = {"skip_soap", "skipless_soap"}
    for record in source.records():
        if record.model in soap and record.layer in (0, record.depth - 1):
            store.save(record, source.per_image(record))
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
        ["compare", "skip_soap", "skipless_soap"],
        ["compare", "runs/skip_soap", "runs/skipless_soap"],
        ["report"],
        ["data", "list"],
        ["data", "list", "coco_stuff"],
    ]
    said_without_torch(tmp_path, commands)


def test_the_newest_checkpoint_is_taken_and_said(workplace, capsys):
    assert main([*PROBE, "--layer", "-1,0", "probe.image_size=40"]) == 0

    out, err = capsys.readouterr()
    assert "the newest checkpoint below runs/: runs/newer/last.safetensors, writ" in err
    assert "encoder newer: 3 blocks" in err
    assert "pca: explained_variance" in out
    records = ResultStore(workplace / "results").records()
    assert sorted(record.layer for record in records) == [0, 2]
    assert {record.model for record in records} == {"newer"}
    assert records[0].num_images == 3
    assert records[0].settings["image_size"] == 40
    assert records[0].changed == {"image_size": 40}


def test_finished_cells_are_skipped_until_overwrite(workplace, capsys):
    assert main([*PROBE, *SMALL, "--layer", "0"]) == 0
    first = ResultStore(workplace / "results").records()
    capsys.readouterr()

    assert main([*PROBE, *SMALL, "--layer", "0,1"]) == 0
    said = capsys.readouterr().err
    assert "skipping 1 of 2 results" in said
    # Both, for the overview that shows both.
    assert said.count("layers 0, 1\n") == 1
    again = ResultStore(workplace / "results").records()
    assert first[0] in again

    assert main([*PROBE, *SMALL, "--layer", "0", "--overwrite"]) == 0
    assert "skipping" not in capsys.readouterr().err

    # A broken image loses none of them.
    (workplace / "photos" / "1.png").write_bytes(b"<html>404</html>")
    assert main([*PROBE, *SMALL, "--layer", "2", "--on-bad-image", "fail"]) == 3
    assert "1.png" in capsys.readouterr().err
    assert len(ResultStore(workplace / "results").records()) == 2


def test_objects_are_looked_for_in_a_plain_folder_and_found_once(workplace, capsys):
    arguments = ["probe", "--task", "tokencut", "--dataset", "folder", "--data-root", "photos"]

    assert main([*arguments, "--layer", "0", "probe.panels=1"]) == 0

    out, err = capsys.readouterr()
    assert "corloc" not in out
    assert "degenerate" in out
    assert "folder has no ground truth" in err
    masks = (workplace / "results/pictures/tokencut/folder").glob(
        "*/reference_max_side=640/masks/*/*.png"
    )
    assert sorted(path.name for path in masks) == ["0.png.png", "1.png.png", "2.png.png"]
    assert main([*arguments, "--layer", "0", "probe.panels=1", "--dry-run"]) == 0
    assert "1 scores: 1 finished, 0 pending" in capsys.readouterr().out


def test_debug_shows_the_traceback(workplace):
    with pytest.raises(ValueError, match="layers must lie"):
        main([*PROBE, "--layer", "9", "--debug"])


def test_json_is_all_that_stdout_gets_and_holds_the_records_beside_pictures(workplace, capsys):
    assert main([*PROBE, "--layer", "0,2", "--json"]) == 0

    out, err = capsys.readouterr()
    found = json.loads(out)
    kept = (workplace / "results" / "records").rglob("*.json")
    by_layer = {record["layer"]: record for record in (json.loads(p.read_text()) for p in kept)}
    for record in by_layer.values():
        # Only the file says these of itself.
        assert record.pop("record_sha256")
        record.pop("per_image_sha256", None)
    assert found == [by_layer[0], by_layer[2]]
    assert "use `ssl-bench report --out results`" in err
    promised = (
        "task dataset split layer depth facet protocol metric value ci95 num_images model "
        "checkpoint_sha256 dataset_fingerprint seed settings version git_commit torch device "
        "seconds created changed"
    )
    assert set(promised.split()) <= set(found[0])
    assert found[0]["created"].endswith("+00:00")
    assert found[0]["changed"] == {}
    assert len(found[0]["checkpoint_sha256"]) == 64
    # Every block beside the photograph.
    pictures = {p.relative_to(workplace).as_posix() for p in workplace.rglob("results/**/*.png")}
    names = {Path(p).parent.name for p in pictures}
    assert {"block00", "block02"} <= names
    assert any(p.endswith("blocks-0_2.png") for p in pictures)


def test_differences_of_data_are_json_too(workplace, capsys):
    verify = ["data", "verify", "photos", "--manifest", "list", "--json"]
    assert main(verify) == 0
    assert json.loads(capsys.readouterr().out) == {"manifest": "list", "listed": 3}
    assert Path("list").read_text().startswith(f"{file_sha256(Path('photos/0.png'))}  0.png\n")
    (workplace / "photos" / "0.png").write_bytes(b"other")
    (workplace / "photos" / "1.png").rename(workplace / "photos" / "new.png")

    assert main(verify) == 3

    found = json.loads(capsys.readouterr().out)
    assert found == {
        "manifest": "list", "changed": ["0.png"], "missing": ["1.png"], "added": ["new.png"],
    }  # fmt: skip


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_keeps_what_was_finished(workplace):
    command = [sys.executable, "-m", "ssl_bench", *PROBE, "--layer", "0"]
    Image.new("RGB", (640, 480), (9, 0, 0)).save("photos/many0.png")
    for i in range(1, 400):
        shutil.copy("photos/many0.png", f"photos/many{i}.png")

    options = ["probe.panels=403", "probe.image_size=640"]
    # A test run that was started in the background would hand down an ignored SIGINT.
    with subprocess.Popen(
        [*command, *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "layers 0" in line:
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()

    assert process.returncode == 130
    assert "interrupted" in rest
