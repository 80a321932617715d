"""Test the shell completion of commands and flags."""

import subprocess
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.composition.choices import choices

# Imitate readline: it sets COMP_WORDS and COMP_CWORD, calls the function that `complete -F`
# named for the command, and reads COMPREPLY. Each line of the input is one command.
ASK = """
source "$1"
[[ "$(complete -p ssl-bench)" =~ -F\\ ([^ ]+) ]] && complete=${BASH_REMATCH[1]}
while IFS= read -r line; do
  mapfile -td ' ' COMP_WORDS < <(printf '%s' "$line")
  [[ "$line" == *' ' ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE="$line" COMP_POINT=${#line} COMPREPLY=()
  "$complete" ssl-bench "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
  echo "${COMPREPLY[@]}"
done
"""
OFFERED = {
    "pro": ["probe"],
    "probe --che": ["--checkpoint"],
    "probe --task token": ["tokencut"],
    "probe --task ": [*choices("probe"), "all"],
    "probe --dataset ": choices("dataset"),
    "sweep --task tokencut,seg": ["tokencut,segmentation"],
    "table --dataset toy,voc": ["toy,voc2007", "toy,voc2012"],
    "completion ": ["bash", "zsh", "fish", "tcsh"],
    "data ver": ["verify"],
    "data check voc2012": ["voc2012"],
    "probe --on-bad-image ": ["fail", "skip"],
    # Files for a checkpoint, and only folders for data.
    "probe --checkpoint ru": ["runs", "rust.pth"],
    "probe --data-root ru": ["runs"],
}


def test_tab_offers_commands_flags_names_and_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["completion", "bash"]) == 0
    Path("script.bash").write_text(capsys.readouterr().out)
    Path("runs").mkdir()
    Path("rust.pth").touch()

    typed = "".join(f"ssl-bench {words}\n" for words in OFFERED)
    words = ["bash", "--norc", "-c", ASK, "bash", "script.bash"]
    run = subprocess.run(words, input=typed, capture_output=True, text=True, check=True)

    assert run.stderr == ""
    found = dict(zip(OFFERED, map(str.split, run.stdout.splitlines()), strict=True))
    assert {typed: sorted(names) for typed, names in found.items()} == {
        typed: sorted(names) for typed, names in OFFERED.items()
    }


@pytest.mark.parametrize("shell", ["zsh", "tcsh", "fish"])
def test_other_shells_get_a_script_with_the_names_too(capsys, shell):
    assert main(["completion", shell]) == 0

    written = capsys.readouterr().out
    assert all(name in written for name in ("sweep", "segmentation", "ade20k"))
