"""Test that a built wheel contains all files."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMIT = """
from ssl_bench.system.process import provenance_fields
print(provenance_fields("cpu", 1.0)["git_commit"])
"""
CONFIGURATIONS = """
from ssl_bench.composition.compose import build, compose_config, config_folder
from ssl_bench.tables.published import load_published_tables
build(compose_config('probing', ['probe=pca']), 'probe')
assert load_published_tables()
print(config_folder())
"""


def build_wheel(source: Path, folder: Path, *options: str) -> Path:
    command = [sys.executable, "-m", "build", "-q", "--no-isolation", *options]
    subprocess.run([*command, "--outdir", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def run_installed(code: str, site: Path, folder: Path) -> list[str]:
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.mark.slow
def test_a_wheel_contains_configurations_encoders_and_its_commit(tmp_path):
    source = tmp_path / "source"
    for name in ("ssl_bench", "pretrain", "probes", "configs", "results/demo", "tests/cli"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)

    def git(*words: str) -> str:
        author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        command = ["git", "-C", str(source), *author, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "a")
    commit = git("rev-parse", "HEAD")

    # `python -m build` builds wheels from a source archive, which contains no git folder.
    unpacked = build_wheel(source, tmp_path / "clean")

    for name, original in (("configs", source / "configs"), ("demo", source / "results/demo")):
        inside, outside = (
            {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*.*") if p.is_file()}
            for folder in (unpacked / "ssl_bench" / name, original)
        )
        assert inside == outside
        assert inside
    packages = {p.name for p in unpacked.iterdir() if not p.name.endswith(".dist-info")}
    assert packages == {"ssl_bench", "pretrain", "probes"}
    printed = run_installed(COMMIT + CONFIGURATIONS, unpacked, tmp_path)
    assert printed == [commit, str(unpacked / "ssl_bench" / "configs")]

    (source / "README.md").write_text("changed")
    changed = build_wheel(source, tmp_path / "changed", "--wheel")
    assert run_installed(COMMIT, changed, tmp_path) == [f"{commit}-dirty"]
