"""docs/pretraining.md says of every objective its keys, with the defaults that hold."""

import re
from typing import Any

import pytest
import yaml

from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import as_plain, compose_config
from tests.support.page_commands import ROOT

PAGE = (ROOT / "docs/pretraining.md").read_text()
SECTIONS = {"dino": "DINO", "mae": "MAE", "supervised": "Supervised training", "copying": "Copying"}
PLACES = ("crops", "_target_")


def section(name: str) -> str:
    found = re.search(rf"^## {SECTIONS[name]}\n(.*?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE)
    assert found
    return found[1]


def said(name: str) -> dict[str, Any]:
    """Default by key, from the rows of the section's first table."""
    found = {}
    for keys, defaults in re.findall(r"^\| (`objective\.[^|]*) \| ([^|]*) \|", section(name), re.M):
        names = [key.removeprefix("objective.") for key in re.findall(r"`([^`]+)`", keys)]
        found |= dict(zip(names, yaml.safe_load(f"[{defaults}]"), strict=True))
    return found


def value(config: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        config = config[part]
    return config


def test_every_objective_has_its_section():
    assert set(choices("objective")) == set(SECTIONS)
    assert all(f"objective={name}" in section(name) for name in SECTIONS)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_table_has_every_key_of_its_objective_with_the_default(name):
    config = as_plain(compose_config("pretraining", [f"objective={name}"]))["objective"]

    table = said(name)

    assert {key for key in table if "." not in key} == {k for k in config if k not in PLACES}
    assert table == {key: value(config, key) for key in table}
