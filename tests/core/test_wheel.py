import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "-q", "--wheel", "--no-isolation"]
    subprocess.run([*command, "--outdir", str(folder), str(ROOT)], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_the_wheel_carries_every_configuration_file(unpacked):
    folder = unpacked / "ssl_bench" / "configs"
    inside = {p.relative_to(folder) for p in folder.rglob("*.yaml")}

    assert inside == {p.relative_to(ROOT / "configs") for p in (ROOT / "configs").rglob("*.yaml")}
    packages = {p.name for p in unpacked.iterdir() if not p.name.endswith(".dist-info")}
    assert packages == {"ssl_bench", "pretrain", "probes"}


def test_the_wheel_carries_the_folder_of_demonstration_encoders(unpacked):
    inside, outside = (
        {p.name: p.read_bytes() for p in folder.iterdir()}
        for folder in (unpacked / "ssl_bench" / "demo", ROOT / "results" / "demo")
    )

    assert inside == outside
    assert "README.md" in inside


@pytest.mark.slow
def test_the_unpacked_wheel_finds_its_own_configuration_from_another_folder(unpacked, tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(unpacked)!r})\n"
        "from ssl_bench.composition.compose import build, compose_config, config_folder\n"
        "from ssl_bench.tables.published import published_tables\n"
        "from ssl_bench.system.device import source_commit\n"
        "build(compose_config('probing', ['probe=pca']).probe)\n"
        "assert published_tables()\n"
        "print(config_folder(), source_commit())"
    )

    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert run.stdout.split() == [str(unpacked / "ssl_bench" / "configs"), "None"]
