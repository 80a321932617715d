"""Fault 76: a Python file of a probe or objective that cannot be imported."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import probes
from ssl_bench.composition.compose import component_class
from ssl_bench.errors import BrokenFile, ConfigurationError
from ssl_bench.system.endings import run_and_catch
from tests.core.test_extending import FILES, ROOT
from tests.support.faults import encoder_file

RUN = """
import json, sys
from ssl_bench.cli.__main__ import main
for words in json.loads(sys.argv[1]):
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    print(f"exit {code}", file=sys.stderr, flush=True)
"""
SMALL = ["dataset.num_train=3", "dataset.num_val=2", "probe.panels=2", "probe.image_size=32"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("import nopackage", "ModuleNotFoundError: No module named 'nopackage'"),
        ("import nopackage.part", "run: pip install nopackage"),
        ("import torch.nopart", "No module named 'torch.nopart'"),
        ("from ssl_bench.errors import Nothing", "ImportError: cannot import name 'Nothing'"),
        ("def (", "SyntaxError: invalid syntax"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_fault_76_a_broken_file_is_named_with_line_and_error(tmp_path, monkeypatch, line, why):
    monkeypatch.setattr(probes, "__path__", [*probes.__path__, str(tmp_path / "probes")])
    file = tmp_path / "probes" / f"broken{abs(hash(line))}.py"
    file.parent.mkdir()
    file.write_text(f'"""A probe."""\n\n{line}\n')

    with pytest.raises(BrokenFile) as raised:
        component_class(f"probes.{file.stem}.Norms", "probe._target_")

    assert f"{file}, line 3" in str(raised.value)
    assert why in str(raised.value)
    assert ("pip install" in str(raised.value)) == ("nopackage" in line)
    with pytest.raises(ConfigurationError, match=r"probe\._target_"):
        component_class("probes.nothing_here.Norms", "probe._target_")


def test_fault_76_a_late_import_error_ends_only_its_job():
    source = compile("\n\nimport nopackage", "/somewhere/probes/norms/run.py", "exec")

    outcome = run_and_catch(lambda: exec(source), "sweep", debug=False)

    assert outcome.exit_code == 5
    assert "/somewhere/probes/norms/run.py, line 3" in outcome.error


@pytest.mark.slow
def test_fault_76_other_probes_and_objectives_still_run(tmp_path):
    suite, place = tmp_path / "suite", tmp_path / "place"
    for name in ("ssl_bench", "probes", "pretrain", "configs"):
        shutil.copytree(ROOT / name, suite / name)
    for path, text in FILES.items():
        (suite / path).parent.mkdir(exist_ok=True)
        (suite / path).write_text(text)
    for path in ("probes/reconstruction.py", "pretrain/objectives/rotation.py"):
        (suite / path).write_text("import nopackage\n" + (suite / path).read_text())
    encoder_file(place / "runs/x/last.safetensors")
    broken = {
        ("probe", "--task", "reconstruction"): "probes/reconstruction.py",
        ("probe", "--task", "reconstruction,pca", *SMALL): "probes/reconstruction.py",
        ("keys", "probe.reconstruction"): "probes/reconstruction.py",
        ("pretrain", "objective=rotation", "--dry-run"): "pretrain/objectives/rotation.py",
    }
    whole = [["--help"], ["keys"], ["keys", "probe.pca"], ["doctor"], ["completion", "bash"]]
    whole += [["probe", "--task", "pca", *SMALL], ["sweep", "--dry-run", *SMALL]]
    whole += [["probe", "--task", "all", "--layer", "0", *SMALL, "probe.training.epochs=1"]]
    whole += [["pretrain", "--batch-size", "8", "--dry-run"]]

    said = ended(suite, place, [*map(list, broken), *whole])

    for line, file in zip(said, broken.values(), strict=False):
        assert line.count("\n") == 1
        assert f"{suite / file}, line 1" in line
    assert [one.count("left out: reconstruction: ") for one in said[-4:]] == [0, 1, 1, 0]
    assert len(list((place / "results/records").glob("*"))) >= 4


def ended(suite: Path, place: Path, commands: list[list[str]]) -> list[str]:
    """Return stderr of each command; the first four must exit with 5 and the others with 0."""
    run = f"import sys; sys.path.insert(0, {str(suite)!r}){RUN}"
    words = [sys.executable, "-c", run, json.dumps(commands)]
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = done.stderr.split("exit ")
    assert [int(one[0]) for one in said[1:]] == [5] * 4 + [0] * (len(commands) - 4), done.stderr
    return [said[0], *(one[2:] for one in said[1:-1])]
