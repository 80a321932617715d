"""The page docs/recipes.md states the hyperparameters that the experiments use."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import compose_config
from ssl_bench.models.initialisers import fill_options

PAGE = (Path(__file__).parents[2] / "docs/recipes.md").read_text()
# The table under each experiment; its fourth and fifth column are a key and our value.
TABLES = {
    name: re.findall(r"^\|(?:[^|]*\|){3} `([\w.]+)` \| `([^`]*)`", section, re.MULTILINE)
    for name, section in re.findall(r"`experiment=(\w+)`(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
}


def composed(name: str) -> dict[str, Any]:
    found = compose_config("pretraining", [f"experiment={name}"])
    model = found["model"]
    return found | {
        "model": model | {"init_options": fill_options(model["init"], model["init_options"])}
    }


@pytest.mark.parametrize("name", TABLES)
def test_a_table_states_the_values_that_its_experiment_uses(name):
    config = composed(name)
    assert name in choices("experiment")
    assert len(TABLES[name]) >= 5
    for key, stated in TABLES[name]:
        value = config
        for part in key.split("."):
            value = value[part]
        assert repr(yaml.safe_load(stated)) == repr(value), key
