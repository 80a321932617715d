"""The rule by which an encoder's stored positions were resampled is in every record."""

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.models import load_encoder
from ssl_bench.models.vit import resize_positions
from tests.support.faults import class_folders, probing, records

RULE = "bicubic, scale (n + 0.1) / n0, no antialiasing"


@pytest.mark.parametrize(
    ("task", "option", "is_resampled"),
    [
        ("knn", "", False),
        ("geometry", "probe.image_size=48", True),
        ("tokencut", "", True),
        ("pca", "probe.squash=64", True),
    ],
)
def test_a_record_names_the_rule_by_which_positions_were_resampled(
    workdir, monkeypatch, task, option, is_resampled
):
    resampled = []

    def spy(positions, *, old_size, new_size, **options):
        resampled.append(old_size != new_size)
        return resize_positions(positions, old_size=old_size, new_size=new_size, **options)

    monkeypatch.setattr("ssl_bench.models.vit.resize_positions", spy)
    dataset, root = ("folder", "photos")
    if task == "knn":
        dataset, root = ("class_folders", "classes")
        class_folders(workdir / root)

    assert main([*probing(task, dataset, root), *option.split()]) == 0

    rules = {record.details.get("positions") for record in records()}
    assert rules == ({RULE} if is_resampled else {None})
    assert any(resampled) == is_resampled


def test_encoders_without_stored_positions_name_no_rule():
    names = ("vit_tiny_patch16_224", "vit_small_patch16_dinov3")
    rules = [load_encoder(f"random:timm:{name}").position_rule for name in names]

    assert rules == [RULE, None]
