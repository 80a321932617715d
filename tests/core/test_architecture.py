"""The call that docs/architecture.md follows enters what the page says, in its order."""

import re
import sys
from types import FrameType
from typing import Any

from ssl_bench.cli.__main__ import main
from ssl_bench.models import ViTConfig, build_vit, save_encoder
from tests.support.page_commands import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text()
HOPS = re.findall(r"^\| \d+ \| `([\w/.]+)` \| `([\w.]+)` \|", PAGE, re.MULTILINE)
SMALL = (
    *("--checkpoint", "skip.safetensors", "--dataset", "toy", "dataset.num_train=4"),
    *("dataset.num_val=3", "probe.training.epochs=1", "probe.image_size=32", "probe.panels=0"),
)


def test_one_call_enters_what_the_page_says_in_its_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = ViTConfig(image_size=32, patch_size=8, dim=12, depth=2, num_heads=2)
    save_encoder(tmp_path / "skip.safetensors", build_vit(config, seed=0), {})
    shown = re.search(r"^`ssl-bench (probe .*?)` enters", PAGE, re.MULTILINE)
    assert shown
    entered: dict[tuple[str, str], None] = {}

    def enter(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{ROOT}/"):
            file = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
            entered.setdefault((file, frame.f_code.co_qualname))

    sys.setprofile(enter)
    try:
        code = main([*shown[1].split(), *SMALL])
    finally:
        sys.setprofile(None)

    assert code == 0
    assert [hop for hop in entered if hop in HOPS] == HOPS


def test_every_room_of_the_page_is_there():
    rooms = PAGE.partition("| room |")[2].partition("\n\n")[0]
    paths = re.findall(r"^\| (.*?) \|", rooms, re.MULTILINE)
    for names in (re.findall(r"`([\w/.]+)`", row) for row in paths):
        folder = "ssl_bench/" if names and names[0].startswith("ssl_bench/") else ""
        for name in names:
            assert (ROOT / name).exists() or (ROOT / folder / name).exists(), name
