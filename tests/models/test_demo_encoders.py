"""`demo:NAME`, the demonstration encoders that come with this suite."""

import json

import pytest

from ssl_bench.errors import CheckpointError
from ssl_bench.models import identify_encoder, load_encoder
from ssl_bench.models.loading import addresses
from ssl_bench.models.loading.addresses import NAMES
from tests.benchmarks.evidence.rows import demo_of
from tests.benchmarks.generated import LEDGER, ROOT


@pytest.mark.parametrize("ask", [load_encoder, identify_encoder])
def test_an_encoder_that_is_not_there_is_refused_in_one_line(tmp_path, monkeypatch, ask):
    with pytest.raises(CheckpointError, match="unknown demo encoder 'demo:x'"):
        ask("demo:x")
    monkeypatch.setattr(addresses, "PACKAGE", tmp_path / "package")
    with pytest.raises(CheckpointError, match="demo:skip is missing") as raised:
        ask("demo:skip")
    assert "\n" not in str(raised.value)


def test_those_that_come_with_this_suite_are_those_of_the_ledger():
    """What lies in results/demo is what the queue wrote last."""
    runs = json.loads((ROOT / LEDGER).read_text())
    known = {name: runs[demo_of(name)] for name in NAMES}
    files = {path.name for path in addresses.demo_folder().glob("*.safetensors")}
    assert files == {f"demo_{name}.safetensors" for name in known}
    for name, run in known.items():
        encoder = load_encoder(f"demo:{name}")
        assert encoder.sha256 == identify_encoder(f"demo:{name}").sha256 == run["sha256"]
        assert encoder.name == f"demo_{name}"
        assert load_encoder(f"random:demo:{name}").sha256 != encoder.sha256
