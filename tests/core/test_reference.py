"""Test that the reference pages of the documentation are complete."""

import argparse
import re
import runpy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ssl_bench import errors
from ssl_bench.cli import parser as cli
from ssl_bench.composition.compose import compose_config, has_key
from ssl_bench.errors import SslBenchError
from ssl_bench.request import BATCH_SIZE_KEYS, probing_config
from ssl_bench.results import ResultStore, to_pandas
from tests.support.page_commands import ROOT

PAGES = ROOT / "docs/reference"
GENERATED = runpy.run_path(str(ROOT / "docs/_reference.py"))["PAGES"]
SHORT_FOR = re.compile(r"short for ([\w.]+?)(?:=N)?\)")
# Variables that torchrun, CUDA and libraries read, but no code of this project.
READ_BY_LIBRARIES = {"HF_HOME", "HF_HUB_CACHE", "TORCH_HOME", "SBATCH_"}


def flags() -> Iterator[tuple[str, argparse.Action]]:
    for name, parser in cli.command_parsers(cli.build_parser()).items():
        for action in parser._actions:
            if action.option_strings and action.dest != "help":
                yield name, action


def keys_of_flags() -> Iterator[tuple[str, str, str]]:
    for command, keys in cli.KEY_OF_FLAG.items():
        for flag, key in keys.items():
            yield command, flag, key


def test_flag_help_names_the_key_that_the_flag_sets():
    named = {
        (command, action.dest, found[1])
        for command, action in flags()
        if (found := SHORT_FOR.search(action.help or ""))
    }

    assert named == set(keys_of_flags())


def test_the_help_of_a_flag_states_its_default():
    stated = {
        (command, action.dest): (found[1], str(action.default))
        for command, action in flags()
        if action.default is not None
        if (found := re.search(r"\(default: ([^\s,)]+)\)", action.help or ""))
    }

    assert len(stated) > 25
    assert stated["data", "side"] == ("256", "256")
    assert [flag for flag, (text, default) in stated.items() if text != default] == []


@pytest.mark.parametrize(("command", "flag", "key"), list(keys_of_flags()))
def test_a_flag_sets_its_key(command, flag, key, monkeypatch):
    value = "skip" if flag == "on_bad_image" else "3"
    seen: list[str] = []

    def keep(_: argparse.Namespace, inputs: Any) -> int:
        seen.extend(getattr(inputs, "overrides", inputs))
        return 0

    monkeypatch.setattr(cli, "import_module", lambda _: SimpleNamespace(command=keep))
    required = {"probe": ["--task", "knn"], "features": ["--out", "features"]}
    words = [*required.get(command, []), f"--{flag.replace('_', '-')}", value]

    cli.run_command([command, *words])

    assert seen == [f"{key}={value}"]
    config = (
        compose_config("pretraining", [])
        if command == "pretrain"
        else probing_config("tokencut", "toy", [])
    )
    assert has_key(config, key)


def test_probes_have_a_batch_size_key_from_the_reference():
    config = probing_config("knn", "toy", [])

    assert any(has_key(config, key) for key in BATCH_SIZE_KEYS)
    assert " or ".join(f"`{key}`" for key in BATCH_SIZE_KEYS) in GENERATED["commands"]()


def test_the_reference_has_every_command_and_flag():
    text = GENERATED["commands"]()

    for command, action in flags():
        section = text.partition(f"## {command}\n")[2].partition("\n## ")[0]
        assert action.dest == "debug" or f"`{action.option_strings[0]}" in section


def test_the_reference_has_the_columns_of_a_data_frame():
    frame = to_pandas(ResultStore(ROOT / "results/osa_mnist").records())
    listed = set()
    for field, _, columns in re.findall(
        r"^\| (.*?) \| (.*?) \| (.*?) \|$", GENERATED["records"](), re.M
    ):
        names = columns if "`" in columns else field
        listed |= set(re.findall(r"`(\w+)`", names))

    assert listed - {"to_pandas"} == set(frame.columns)


def test_the_page_of_exit_codes_lists_those_of_the_errors():
    page = (PAGES / "exit_codes.md").read_text()
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.exit_code for kind in kinds if issubclass(kind, SslBenchError)}

    listed = set(map(int, re.findall(r"^\| (\d+) \|", page, re.MULTILINE)))

    assert listed == {0, errors.INTERRUPTED, *codes}


def test_the_environment_page_lists_variables_that_the_code_reads():
    page = set(re.findall(r"`([A-Z][A-Z_]+)", (PAGES / "environment.md").read_text()))
    sources = [
        file.read_text() for package in errors.PACKAGES for file in (ROOT / package).rglob("*.py")
    ]
    code = "\n".join(sources)
    pattern = r"environ(?:\.get\(|\.setdefault\(|\[)\s*['\"](\w+)"
    read = set(re.findall(pattern, code)) | set(re.findall(r"_read_number\(\"(\w+)\"", code))

    assert read <= page
    assert {name for name in page - READ_BY_LIBRARIES if f'"{name}"' not in code} == set()


def test_the_python_api_page_has_all_names_in_examples():
    text = (ROOT / "docs/python.md").read_text()
    listed = re.findall(r"^::: ([\w.]+)$", (PAGES / "python_api.md").read_text(), re.MULTILINE)
    imported = re.findall(
        r"^\s*from (?:ssl_bench|probes|pretrain)[\w.]* import (.+)$", text, re.MULTILINE
    )
    used = {name.strip() for names in imported for name in names.split(",")}
    used |= set(re.findall(r"ssl_bench\.(\w+)\(", text)) - {"from_module"}

    assert used <= {name.rpartition(".")[2] for name in listed}
