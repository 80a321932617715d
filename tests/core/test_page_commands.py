"""Every command that a page shows is one that the real parsers and compositions take."""

import argparse
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace

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
from tests.core.test_extending import commands as copied_commands
from tests.support.page_commands import COMMANDS, ROOT, PageCommand

NOT_OURS: Mapping[str, str] = {
    "git show 010040d4:tests/benchmarks/evidence/__main__.py": "names a file of an earlier commit",
    "pre-commit install": "changes the checkout",
    "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pth": (
        "a program of torch"
    ),
    "sha256sum --binary": "another system's, named for the format of its lists",
    "sha256sum --check": "another system's, named for the format of its lists",
}
"""What is of other programs, and why it is only shown; all else must be taken by its parser."""
STANDS_FOR = {"experiment=NAME": "experiment=mae_imagenet", "probe.protocol=NAME": "seed=0"}
# Commands in the blocks of this page are run by test_extending.py and test_loader_contract.py.
EXTENDING = [one for one in COMMANDS if one.page == "docs/extending.md" and one.in_block]
# What several pages show is tried once.
OURS = {
    one.text: one for one in COMMANDS if one.text not in NOT_OURS and one not in EXTENDING
}.values()


@dataclass(frozen=True)
class Typed:
    """What the command line makes of its words."""

    command: str
    options: argparse.Namespace
    overrides: list[str]


class Parsed(Exception):
    """A parser took its words."""


def typed(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Typed:
    """By the parser and the checks of the command line itself; nothing is carried out."""
    seen: list[Typed] = []

    def keep(options: argparse.Namespace, overrides: Sequence[str] = ()) -> int:
        seen.append(Typed(options.command, options, list(overrides)))
        return 0

    with monkeypatch.context() as changed:
        changed.setattr(cli, "import_module", lambda _: SimpleNamespace(command=keep))
        cli.run([STANDS_FOR.get(word, word) for word in words])
    return seen[0]


def probed(asked: Typed) -> None:
    asked.options.task = getattr(asked.options, "task", "all")
    with pytest.MonkeyPatch.context() as changed:
        # The roles of a dataset of Hugging Face are only known when it is opened.
        changed.setattr(HuggingFace, "supports", HuggingFace().supports)
        assert plan_request(cli.probe_request(asked.options, asked.overrides))


def pretrained(asked: Typed) -> None:
    assert build(
        compose_config("pretraining", add_data_root(asked.overrides, asked.options.data_root))
    )


def reproduced(asked: Typed) -> None:
    asked.options.print |= asked.options.run
    asked.options.run = asked.options.table = False
    assert reproduce(asked.options, asked.overrides) == 0


def read(asked: Typed) -> None:
    options = asked.options
    parse_names("task", options.task, [*choices("probe"), "supervised"])
    if asked.command == "table":
        _check_options(options)
        rows = load_published_table(options.paper).rows if options.paper else []
        for pair in options.encoders or []:
            require_choice("row", pair.partition("=")[0], rows)


def data_named(asked: Typed) -> None:
    if asked.options.action != "verify" and asked.options.target:
        name, _ = require_dataset(asked.options.target)
        compose_config("data", [f"dataset={name}", *asked.overrides])


def extracted(asked: Typed) -> None:
    options = asked.options
    words = [f"dataset={require_dataset(options.dataset)[0]}"]
    compose_config("data", [*words, *add_data_root(asked.overrides, options.data_root)])


def nothing_more(asked: Typed) -> None:
    """The words are all that there is."""


CHECKS: Mapping[str, Callable[[Typed], object]] = {
    "probe": probed,
    "features": extracted,
    "sweep": probed,
    "pretrain": pretrained,
    "reproduce": reproduced,
    "table": read,
    "compare": read,
    "report": read,
    "data": data_named,
    "keys": lambda asked: print_keys(asked.options, asked.overrides),
    "models": nothing_more,
    "doctor": nothing_more,
    "quickstart": nothing_more,
    "completion": nothing_more,
}


def made(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(words[1:]) <= set(targets)


def run_by_python(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is there, or a module whose parser takes the words."""
    if words[1] != "-m":
        assert (ROOT / words[1]).is_file()
        return
    if len(words) == 3:
        assert "\ndef main(" in (ROOT / f"{words[2].replace('.', '/')}.py").read_text()
        return
    parse = argparse.ArgumentParser.parse_known_args

    def stop(*given: object) -> None:
        _, rest = parse(*given)  # pyrefly: ignore[no-matching-overload]
        assert all("=" in word for word in rest), rest
        raise Parsed

    monkeypatch.setattr(sys, "argv", list(words[2:]))
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
    program = import_module(words[2])
    if hasattr(program, "__path__"):
        program = import_module(f"{words[2]}.__main__")
    with pytest.raises(Parsed):
        program.main()


def started_by_torchrun(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import get_args_parser

    launched = get_args_parser().parse_args(words[1:])
    assert (launched.module, launched.training_script) == (True, "ssl_bench")


def chosen_tests(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert words[1] == "-k"
    assert any(words[2] in path.read_text() for path in ROOT.glob("tests/*/test_*.py"))


def installed_by_pip(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours by the names of its extras, or another's by its version; nothing is fetched."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    name = next(word for word in words[2:] if not word.startswith("-"))
    ours = re.fullmatch(r"(?:ssl-bench|\.)(?:\[(.+)\])?", name)
    assert ours is not None or "==" in name
    assert ours is None or set((ours[1] or "dev").split(",")) <= extras


PROGRAMS: Mapping[str, Callable[[tuple[str, ...], pytest.MonkeyPatch], None]] = {
    "make": made,
    "pip": installed_by_pip,
    "python": run_by_python,
    "torchrun": started_by_torchrun,
    "pytest": chosen_tests,
}


@pytest.mark.parametrize("shown", OURS, ids=lambda one: f"{one.page}: {one.text[:50]}")
def test_a_command_of_a_page_is_taken_as_it_stands(shown: PageCommand, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if shown.words[0] != "ssl-bench":
        assert shown.words[0] in PROGRAMS, "nobody said how this is tried; see NOT_OURS"
        PROGRAMS[shown.words[0]](shown.words, monkeypatch)
    if shown.suite and shown.is_name:
        assert shown.suite[0] in CHECKS
    elif shown.suite:
        asked = typed(shown.suite, monkeypatch)
        CHECKS[asked.command](asked)


def test_what_is_not_tried_here_is_shown_or_run_elsewhere():
    assert set(NOT_OURS) <= {one.text for one in COMMANDS}
    copied = [one for one in EXTENDING if one.suite and "toyvit:" not in one.text]
    assert [list(one.suite) for one in copied] == copied_commands()
