from dataclasses import replace

import pytest

from ssl_bench.composition.compose import as_plain, compose_config
from ssl_bench.results import Record
from ssl_bench.tables.depth import depth_tables
from ssl_bench.tables.deviations import changed_settings, named_protocol
from tests.core.test_results import RECORD


def scored(task: str, protocol: str, **settings) -> Record:
    """A record with the settings of its protocol's file, but for the given ones."""
    group = [f"probe/{task}_protocol={protocol}"] if task == "segmentation" else []
    preset = as_plain(compose_config("probing", [f"probe={task}", *group]))["probe"]
    kept = {name: preset[name] for name in preset if name not in ("_target_", "protocol")}
    return replace(RECORD, task=task, protocol=protocol, settings={**kept, **settings})


@pytest.mark.parametrize("protocol", ["ssl_bench", "cutting_the_skip", "dinov2", "neco", "capi"])
def test_a_protocol_that_was_kept_is_named_alone(protocol):
    assert changed_settings(scored("segmentation", protocol, dtype="float32")) == {}
    assert named_protocol(scored("segmentation", protocol)) == protocol


def test_what_was_changed_stands_behind_the_name_of_the_protocol():
    record = scored("segmentation", "cutting_the_skip", epochs=2, image_size=128)

    assert changed_settings(record) == {"epochs": 2, "image_size": 128}
    assert named_protocol(record) == "cutting_the_skip, epochs=2, image_size=128"
    (table,) = depth_tables([record])
    assert "protocol cutting_the_skip, epochs=2, image_size=128" in table.title


def test_a_setting_of_the_dataclass_that_a_protocol_sets_is_no_change():
    # 224 pixels are CAPI's own, 512 those of the others.
    assert named_protocol(scored("segmentation", "capi", image_size=224)) == "capi"
    changed = named_protocol(scored("segmentation", "capi", image_size=512))
    assert changed == "capi, image_size=512"


def test_lists_are_compared_by_their_values_and_long_ones_are_shortened():
    assert named_protocol(scored("knn", "dino", neighbours=(10, 20, 100, 200))) == "dino"
    assert named_protocol(scored("knn", "dino", neighbours=[20])) == "dino, neighbours=[20]"
    rates = [10.0**-n for n in range(9)]
    changed = named_protocol(scored("segmentation", "ssl_bench", learning_rates=rates))
    assert changed == "ssl_bench, learning_rates=[1.0,0.1,0.01,0.001,0..."


def test_options_that_the_protocol_names_itself_are_named_once():
    record = scored("tokencut", "reference", tau=0.3)
    assert named_protocol(replace(record, protocol="reference, tau=0.3")) == "reference, tau=0.3"


def test_an_unknown_task_or_protocol_keeps_its_name():
    record = scored("segmentation", "cutting_the_skip", epochs=2)
    assert named_protocol(replace(record, protocol="theirs")) == "theirs"
    assert named_protocol(replace(record, task="norms")) == "cutting_the_skip"
