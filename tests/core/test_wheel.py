import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ssl_bench.system.process import source_commit

ROOT = Path(__file__).parents[2]


def built(source: Path, folder: Path, *options: str) -> Path:
    """Build and unpack a wheel; return its folder."""
    command = [sys.executable, "-m", "build", "-q", "--no-isolation", *options]
    subprocess.run([*command, "--outdir", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def printed(code: str, site: Path, folder: Path) -> str:
    """Return the output of code that imports the packages of an unpacked wheel."""
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.slow
def test_the_wheel_contains_its_configurations_and_encoders_and_finds_them(tmp_path):
    unpacked = built(ROOT, tmp_path / "wheel", "--wheel")
    for name, source in (("configs", ROOT / "configs"), ("demo", ROOT / "results/demo")):
        inside, outside = (
            {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*.*") if p.is_file()}
            for folder in (unpacked / "ssl_bench" / name, source)
        )
        assert inside == outside
        assert inside
    packages = {p.name for p in unpacked.iterdir() if not p.name.endswith(".dist-info")}
    assert packages == {"ssl_bench", "pretrain", "probes"}

    code = (
        "from ssl_bench.composition.compose import build, compose_config, config_folder\n"
        "from ssl_bench.tables.published import load_published_tables\n"
        "from ssl_bench.system.process import source_commit\n"
        "build(compose_config('probing', ['probe=pca']), 'probe')\n"
        "assert load_published_tables()\n"
        "print(config_folder(), source_commit())"
    )
    found = printed(code, unpacked, tmp_path).split()
    assert found == [str(unpacked / "ssl_bench" / "configs"), str(source_commit())]


PROVENANCE = """
import json
from ssl_bench.system.process import provenance_fields
print(json.dumps(provenance_fields("cpu", 1.0)))
"""


@pytest.mark.slow
def test_records_of_an_installed_copy_say_the_commit_and_changes(tmp_path):
    source = tmp_path / "source"
    for name in ("ssl_bench", "pretrain", "probes", "configs", "results/demo"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)

    def git(*words: str) -> str:
        author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        command = ["git", "-C", str(source), *author, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def recorded(site: Path) -> Any:
        return json.loads(printed(PROVENANCE, site, tmp_path))["git_commit"]

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "a")
    commit = git("rev-parse", "HEAD")

    # `python -m build` builds wheels from a source archive, which contains no git folder.
    assert recorded(built(source, tmp_path / "clean")) == commit
    (source / "README.md").write_text("changed")
    assert recorded(built(source, tmp_path / "dirty", "--wheel")) == f"{commit}-dirty"
