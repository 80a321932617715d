"""Test how configuration files and overrides are combined."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import yaml

from pretrain.description import describe
from pretrain.objectives.dino import Dino
from pretrain.optimizers.recipes import Soap
from pretrain.papers.copying import Copying
from ssl_bench.composition.choices import (
    choices,
    config_folder,
    entry_points,
    load_entry_point,
)
from ssl_bench.composition.compose import (
    build,
    compose_config,
    fill_defaults,
    import_component,
    instantiate,
    list_keys,
)
from ssl_bench.errors import BrokenFileError, ConfigurationError, split_alternatives
from ssl_bench.models.initialisers import FILTER_INITIALISERS, INITIALISERS


def build_both(config: dict[str, Any]) -> None:
    build(config, "probe")
    build(config, "dataset")


NO_HINT = "no hint"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("probe.panel=3", "probe.panels={value}"), ("probe.panels=many", NO_HINT),
        ("probe.facet=3", "probe.facet='3'"), ("probe.limit=3", "data.limit={value}"),
        ("dataset=VOC", "dataset=voc2007"), ("dataset=zzz", NO_HINT),
        ("probe.panels", "ssl-bench keys"), ("probe.panels=[1", NO_HINT),
        ("dataset.root=[1]", NO_HINT), ("dataset.root='~nosuchuser/x'", NO_HINT),
        ("dataset.root=${oc.env:HOME}", NO_HINT), ("data=3", "ssl-bench keys"),
        ("data.root=???", NO_HINT), (f"probe.panels={'[' * 2000}", NO_HINT),
        ("probe.panels=choice(1,2)", NO_HINT), ("probe.panels=0", NO_HINT),
        ("probe.panels={a: 1}", NO_HINT),
    ],
)  # fmt: skip
def test_a_wrong_override_is_refused_with_a_hint(override, hint):
    with pytest.raises(ConfigurationError) as refused:
        build_both(compose_config("probing", ["probe=pca", "dataset=voc2012", override]))

    error = refused.value
    ways = [" ".join(words) for words in split_alternatives(error.hint)] or [NO_HINT]
    assert hint in ways
    assert len(str(error)) < 400


def components(value: object, key: str = "") -> Iterator[tuple[str, type]]:
    if isinstance(value, dict):
        if "_target_" in value:
            yield key, import_component(value["_target_"], key)
        for name, item in value.items():
            yield from components(item, f"{key}.{name}" if key else name)


@pytest.mark.parametrize("group", ["probe", "dataset", "model", "optimizer", "objective"])
def test_every_field_of_every_class_can_be_overridden(group):
    root = "probing" if group in ("probe", "dataset") else "pretraining"
    base = ["probe=pca"] if root == "probing" else []
    for name in choices(group):
        config = compose_config(root, [*base, f"{group}={name}"])
        known = list_keys(config)
        known += [key.rsplit(".", n)[0] for key in known for n in range(1, key.count(".") + 1)]
        assert build(config, group) is not None
        for key, kind in components(config):
            names = [f"{key}.{item.name}".lstrip(".") for item in fields(kind) if item.init]
            assert set(names) <= set(known)


def test_a_reference_gets_the_value_of_its_key_and_no_other_kind_is_accepted(tmp_path, monkeypatch):
    assert compose_config("data", ["dataset=folder", "data.root=a"])["dataset"]["root"] == "a"
    # A path may contain characters that are reserved in other values.
    for key in ("data.root", "dataset.root"):
        own = compose_config("data", ["dataset=folder", f"{key}=photos[1]{{2}}"])
        assert own["dataset"]["root"] == "photos[1]{2}"
    folder = tmp_path / "configs"
    shutil.copytree(config_folder(), folder)
    monkeypatch.setattr("ssl_bench.composition.compose.config_folder", lambda: folder)
    file = folder / "dataset/folder.yaml"
    file.write_text(file.read_text().replace("${data.root}", "${data.root}/images"))

    with pytest.raises(ConfigurationError, match="images"):
        compose_config("data", ["dataset=folder"])


def test_keys_missing_in_a_file_get_the_default_value():
    config = compose_config("pretraining", ["optimizer=soap", "optimizer.max_precond_dim=7"])

    assert "max_precond_dim" not in (config_folder() / "optimizer/soap.yaml").read_text()
    assert build(config, "optimizer") == replace(Soap(betas=[0.95, 0.95]), max_precond_dim=7)
    with pytest.raises(ConfigurationError, match=r"optimizer\.eps expects a number"):
        build(compose_config("pretraining", ["optimizer.eps=x"]), "optimizer")


def test_a_field_without_a_default_needs_a_value():
    with pytest.raises(ConfigurationError, match=r"part\.value"):
        instantiate({"_target_": "ssl_bench.results.record.Baseline", "answer": "x"}, "part")


def test_no_configuration_file_repeats_a_default():
    for path in sorted(config_folder().rglob("*.yaml")):
        for call in calls(yaml.safe_load(path.read_text())):
            defaults = fill_defaults({"_target_": call["_target_"]}, "")
            repeated = [name for name in call if call[name] == defaults.get(name, NO_HINT)]
            assert repeated == ["_target_"], path


def calls(content: object) -> Iterator[dict[str, object]]:
    if isinstance(content, dict):
        yield from [content] if "_target_" in content else []
        for item in content.values():
            yield from calls(item)


def test_a_class_without_keys_is_completed_with_nested_defaults():
    call = fill_defaults({"_target_": "pretrain.objectives.dino.Dino", "out_dim": 9}, "objective")

    assert call["crops"]["_target_"] == "pretrain.crops.multi.MultiCrop"
    assert call["crops"]["global_scale"] == [0.4, 1.0]
    assert describe(instantiate(call, "objective")) == describe(Dino(out_dim=9))
    # Older configurations contain the module in which a class was before it moved.
    older = {"_target_": "pretrain.copying.objective.Copying", "letters": 3}
    assert instantiate(older, "objective") == Copying(letters=3)


@pytest.mark.parametrize(
    ("model", "kinds"), [("vit_tiny_skip", INITIALISERS), ("conv_mixer", FILTER_INITIALISERS)]
)
def test_every_option_of_every_initialiser_can_be_overridden(model, kinds):
    options = compose_config("pretraining", [f"model={model}"])["model"]["init_options"]

    older = {"mlp_mean", "mlp_input_std"} if model.startswith("vit") else set()
    assert set(options) == older | {item.name for kind in kinds.values() for item in fields(kind)}


OWN_MODULES = {
    "own_part/__init__.py": "def build(): return 3\n",
    "own_part/broken.py": "import json\n\njson.loads('x')\n",
    "own_part/lacking.py": "import no_such_package_at_all\n",
    "own_part/late.py": "import own_part\nown_part.missing\n",
    "own_part-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: own-part\nVersion: 1.0\n",
    "own_part-1.0.dist-info/entry_points.txt": "[ssl_bench.probe]\n"
    "good = own_part:build\nnamed = own_part:missing\nbad = own_part.broken:build\n"
    "lacks = own_part.lacking:build\nlate = own_part.late:build\nnone = own_part.nothing:build\n",
}


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("named", ["module 'own_part' has no attribute 'missing'"]),
        ("bad", ["broken.py, line 3, fails with JSONDecodeError"]),
        ("lacks", ["lacking.py, line 1, ", "pip install no_such_package_at_all"]),
        ("late", ["late.py, line 2, fails with AttributeError", "no attribute 'missing'"]),
        ("none", ["fails with ModuleNotFoundError: No module named 'own_part.nothing'"]),
    ],
)
def test_errors_for_broken_entry_points_name_package_and_line(tmp_path, monkeypatch, name, reasons):
    for path, text in OWN_MODULES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    points = entry_points("probe")
    # Another case of this test has imported a package of the same name.
    for module in [module for module in sys.modules if module.startswith("own_part")]:
        monkeypatch.delitem(sys.modules, module)

    with pytest.raises(BrokenFileError) as caught:
        load_entry_point(points[name])

    error = str(caught.value)
    assert f"entry point {name} = {points[name].value} of the package own-part: " in error
    assert all(reason in error for reason in reasons), error
    assert ("line" in error) == (name != "named")
    assert load_entry_point(points["good"])() == 3
    assert "good" in choices("probe")
