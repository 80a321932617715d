"""What a real shell offers when Tab is pressed."""

import subprocess
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.composition.choices import choices

# What readline does: it sets COMP_WORDS and COMP_CWORD, calls the function that `complete -F`
# named for the command, and reads COMPREPLY.
ASK = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${#COMP_LINE}
[[ "$(complete -p ssl-bench)" =~ -F\\ ([^ ]+) ]]
"${BASH_REMATCH[1]}" ssl-bench "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def script(tmp_path, monkeypatch, capsys) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["completion", "bash"]) == 0
    path = tmp_path / "script.bash"
    path.write_text(capsys.readouterr().out)
    return path


def offered(script: Path, *typed: str) -> list[str]:
    words = ["bash", "--norc", "-c", ASK, "bash", str(script), "ssl-bench", *typed]
    run = subprocess.run(words, capture_output=True, text=True, check=True)
    assert run.stderr == ""
    return run.stdout.split()


TYPED = {
    "pro": ["probe"],
    "swe": ["sweep"],
    "probe --che": ["--checkpoint"],
    "probe --task token": ["tokencut"],
    "sweep --task tokencut,seg": ["tokencut,segmentation"],
    "table --dataset toy,voc": ["toy,voc2007", "toy,voc2012"],
    "completion ": ["bash", "zsh", "fish", "tcsh"],
    "data ver": ["verify"],
    "data check voc2012": ["voc2012"],
    "probe --on-bad-image ": ["fail", "skip"],
}


@pytest.mark.parametrize(("typed", "wanted"), TYPED.items())
def test_tab_offers_commands_flags_and_names(script, typed, wanted):
    assert offered(script, *typed.split(" ")) == wanted


def test_tab_offers_every_probe_and_dataset_there_is(script):
    assert offered(script, "probe", "--task", "") == [*choices("probe"), "all"]
    assert offered(script, "probe", "--dataset", "") == choices("dataset")


def test_tab_offers_files_for_a_checkpoint_and_only_folders_for_data(script):
    Path("runs").mkdir()
    Path("rust.pth").touch()

    assert sorted(offered(script, "probe", "--checkpoint", "ru")) == ["runs", "rust.pth"]
    assert offered(script, "probe", "--data-root", "ru") == ["runs"]


@pytest.mark.parametrize("shell", ["zsh", "tcsh", "fish"])
def test_other_shells_get_a_script_with_the_names_too(capsys, shell):
    assert main(["completion", shell]) == 0

    written = capsys.readouterr().out
    assert all(name in written for name in ("sweep", "segmentation", "ade20k"))
