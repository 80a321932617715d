"""Test that results record how position embeddings were resized."""

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.models.vit import resize_positions
from tests.probes.test_attention import ENCODERS
from tests.support.faults import class_folders, make_probe_args, records

RULE = "bicubic, scale (n + 0.1) / n0, no antialiasing"


@pytest.mark.parametrize(
    ("task", "option", "is_resampled"),
    [
        ("knn", "", False),
        ("geometry", "probe.image_size=48", True),
        ("tokencut", "", True),
    ],
)
def test_a_record_states_how_position_embeddings_were_resampled(
    workdir, monkeypatch, task, option, is_resampled
):
    resampled = []

    def spy(positions, *, old_size, new_size, **options):
        resampled.append(old_size != new_size)
        return resize_positions(positions, old_size=old_size, new_size=new_size, **options)

    monkeypatch.setattr("ssl_bench.models.vit.resize_positions", spy)
    dataset, root = ("class_folders", "classes") if task == "knn" else ("folder", "photos")
    class_folders(workdir / "classes")

    assert main([*make_probe_args(task, dataset, root), *option.split()]) == 0

    rules = {record.details.get("positions") for record in records()}
    assert rules == ({RULE} if is_resampled else {None})
    assert any(resampled) == is_resampled


def test_encoders_have_a_rule_only_with_position_embeddings():
    assert ENCODERS["dino"]().position_rule == RULE
    assert ENCODERS["dinov3"]().position_rule is None
