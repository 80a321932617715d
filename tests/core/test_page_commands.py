"""Test that every command in the documentation can be parsed."""

import argparse
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from ssl_bench.cli import parser as cli
from ssl_bench.cli.keys import command as print_keys
from ssl_bench.cli.reproduce import command as reproduce
from ssl_bench.cli.table import _check_options
from ssl_bench.composition.choices import choices, parse_names, require_choice
from ssl_bench.composition.compose import add_data_root, build, compose_config
from ssl_bench.data.layouts.hugging_face import HuggingFace
from ssl_bench.planning import plan_request
from ssl_bench.request import require_dataset
from ssl_bench.tables.published import load_published_table
from tests.support.page_commands import COMMANDS, ROOT

STANDS_FOR = {
    "experiment=NAME": "experiment=mae_imagenet",
    "probe.protocol=NAME": "seed=0",
    "PAPER/TABLE": "cutting_the_skip/table2",
}
# Commands in the code blocks of docs/extending.md need the files of that page. test_extending.py
# runs them.
OURS = {
    one.text: one
    for one in COMMANDS
    if one.suite
    and not one.is_name
    and "--help" not in one.suite
    and not (one.page == "docs/extending.md" and one.in_block)
}.values()


@dataclass(frozen=True)
class Parsed:
    command: str
    options: argparse.Namespace
    overrides: Any  # For `probe` and `sweep`, a `ProbeRequest` that contains the overrides.


def parse(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Parsed:
    seen: list[Parsed] = []

    def keep(options: argparse.Namespace, overrides: Any = ()) -> int:
        seen.append(Parsed(options.command, options, overrides))
        return 0

    with monkeypatch.context() as changed:
        changed.setattr(cli, "import_module", lambda _: SimpleNamespace(command=keep))
        cli.run_command([STANDS_FOR.get(word, word) for word in words])
    return seen[0]


def check_probe(parsed: Parsed) -> None:
    with pytest.MonkeyPatch.context() as changed:
        # The roles of a Hugging Face dataset are only known when it is opened.
        changed.setattr(HuggingFace, "supports", HuggingFace().supports)
        assert plan_request(parsed.overrides)


def check_pretrain(parsed: Parsed) -> None:
    words = add_data_root(parsed.overrides, parsed.options.data_root)
    assert build(compose_config("pretraining", words))


def check_reproduce(parsed: Parsed) -> None:
    parsed.options.print |= parsed.options.run
    parsed.options.run = parsed.options.table = False
    assert reproduce(parsed.options, parsed.overrides) == 0


def check_reading(parsed: Parsed) -> None:
    options = parsed.options
    parse_names("task", options.task, [*choices("probe"), "supervised"])
    if parsed.command == "table":
        _check_options(options)
        rows = load_published_table(options.paper).rows if options.paper else []
        for pair in options.encoders or []:
            require_choice("row", pair.partition("=")[0], rows)


def check_data(parsed: Parsed) -> None:
    if parsed.options.action not in ("verify", "shrink") and parsed.options.target:
        name, _ = require_dataset(parsed.options.target)
        compose_config("data", [f"dataset={name}", *parsed.overrides])


def check_features(parsed: Parsed) -> None:
    options = parsed.options
    words = [f"dataset={require_dataset(options.dataset)[0]}"]
    compose_config("data", [*words, *add_data_root(parsed.overrides, options.data_root)])


CHECKS: Mapping[str, Callable[[Parsed], object]] = {
    "probe": check_probe,
    "sweep": check_probe,
    "features": check_features,
    "pretrain": check_pretrain,
    "reproduce": check_reproduce,
    "table": check_reading,
    "compare": check_reading,
    "report": check_reading,
    "data": check_data,
    "keys": lambda parsed: print_keys(parsed.options, parsed.overrides),
}


@pytest.mark.slow
@pytest.mark.parametrize("shown", OURS, ids=lambda one: f"{one.page}: {one.text[:50]}")
def test_the_suite_accepts_each_command_of_a_page(shown, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    parsed = parse(shown.suite, monkeypatch)
    # The arguments of other commands are checked completely by their parser.
    CHECKS.get(parsed.command, lambda _: None)(parsed)


def test_targets_files_and_extras_that_pages_name_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for one in COMMANDS:
        program, *words = one.words
        if program == "make":
            assert set(words) <= set(targets)
        elif program == "pip":
            named = re.findall(r"^(?:ssl-bench|\.)\[(.+)\]$", "\n".join(words), re.MULTILINE)
            assert set(named) <= project["optional-dependencies"].keys()
        elif program == "python" and words[0] != "-m":
            assert (ROOT / words[0]).is_file()
        elif program == "python" and words[1].startswith("tests."):
            assert (ROOT / f"{words[1].replace('.', '/')}.py").is_file()
