"""Generate the reference of commands, keys and records from the code.

    python docs/_reference.py commands|keys|records

The site replaces a line such as `<!-- generated: commands -->` in a page by this output, so that
the reference is never out of date.
"""

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields

from ssl_bench.cli import parser as cli
from ssl_bench.cli.key_descriptions import Key, list_described_keys
from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import compose_config
from ssl_bench.request import BATCH_SIZE_KEYS, probing_config
from ssl_bench.results.record import Record, ResultKey

_DEFAULT = re.compile(r" \(default: (.*)\)$|(?:\. )Default: (.*)$")
_SHORT_FOR = re.compile(r" \(short for ([\w.]+)=N\)| \(short for ([\w.]+)\)")
_SHARED = ("data", "seed", "corrupt", "dtype")
"""Keys that all probes have."""
_ADDED_COLUMNS = {
    "ci95": "columns `low_95` and `high_95`",
    "mean": "columns `mean_r`, `mean_g`, `mean_b`",
    "std": "columns `std_r`, `std_g`, `std_b`",
}
"""Fields of a record that become several columns of `to_pandas`."""


def commands() -> str:
    """Return a section for each command with a table of its arguments and flags."""
    sections = []
    for name, parser in cli.command_parsers(cli.build_parser()).items():
        summary = _summary(parser)
        actions = [one for one in parser._actions if one.dest not in ("help", "debug")]
        rows = [_flag_row(name, action) for action in actions]
        takes_keys = name in cli.COMMANDS_WITH_OVERRIDES
        note = "\nAccepts [keys](keys.md) as `KEY=VALUE`.\n" if takes_keys else ""
        table = _table(("argument or flag", "meaning", "default"), rows)
        sections.append(f"## {name}\n\n{summary}\n{note}\n{table}")
    return "\n".join(sections)


def keys() -> str:
    """Return a table of keys for each probe, dataset and part of a pretraining run."""
    return "\n".join(_key_sections())


def records() -> str:
    """Return a table of the fields of a record and their columns in `to_pandas`."""
    meanings = {**_attributes(ResultKey), **_attributes(Record)}
    rows = []
    for item in fields(Record):
        column = _ADDED_COLUMNS.get(item.name, "")
        is_mapping = "Mapping" in str(item.type)
        column = column or ("JSON text" if is_mapping else "the same")
        rows.append((f"`{item.name}`", meanings[item.name], column))
    rows.append(("", "Identity of the encoder: a digest of its weights and input.", "`encoder_id`"))
    return _table(("field", "meaning", "in `to_pandas()`"), rows)


PAGES: Mapping[str, Callable[[], str]] = {"commands": commands, "keys": keys, "records": records}
"""Programs for the lines `<!-- generated: NAME -->` of pages."""


def _summary(parser: argparse.ArgumentParser) -> str:
    """Return the description of a command. A line for each action becomes a list."""
    text = (parser.description or "").strip()
    if "\n" not in text:
        return text.replace(
            'eval "$(ssl-bench completion bash)"', '`eval "$(ssl-bench completion bash)"`'
        )
    lines = [re.split(r"  +", line.strip(), maxsplit=1) for line in text.splitlines()]
    return "\n".join(f"- `{action}`: {meaning}." for action, meaning in lines)


def _flag_row(command: str, action: argparse.Action) -> tuple[str, str, str]:
    """Return the flag with its value, its meaning and its default."""
    flags = [flag for flag in action.option_strings if flag.startswith("--")]
    metavar = action.metavar
    value = " ".join(metavar) if isinstance(metavar, tuple) else metavar or ""
    if not value and action.choices:
        value = "|".join(map(str, action.choices))
    elif not value and flags and action.nargs != 0:
        value = action.dest.upper()
    name = " ".join(filter(None, (flags[0] if flags else "", value)))
    text, default = (action.help or "").replace("%%", "%"), ""
    if found := _DEFAULT.search(text):
        text, default = text[: found.start()], found[1] or found[2]
    text = _SHORT_FOR.sub("", text)
    key = cli.KEY_OF_FLAG.get(command, {}).get(action.dest)
    if action.dest == "batch_size" and command in ("probe", "sweep"):
        key = "` or `".join(BATCH_SIZE_KEYS)
    if key:
        text = f"{text}. Sets `{key}`"
    default = "required" if action.required and not default else default
    return f"`{_escape(name)}`", _sentence(text), _escape(default)


def _key_sections() -> Iterator[str]:
    shared = list_described_keys(probing_config("tokencut", "toy", []), _SHARED)
    yield "## All probes\n"
    yield _key_table(shared)
    for task in choices("probe"):
        yield f"## probe.{task}\n"
        yield _key_table(list_described_keys(probing_config(task, "toy", []), ["probe"]))
    for name in choices("dataset"):
        found = list_described_keys(compose_config("data", [f"dataset={name}"]), ["dataset"])
        yield f"## dataset.{name}\n"
        yield _key_table(found) if found else "This dataset has no keys of its own.\n"
    yield "## Pretraining\n"
    yield "Keys of the run itself:\n"
    yield _key_table(
        [
            key
            for key in list_described_keys(compose_config("pretraining", []), ())
            if key.name.partition(".")[0] not in ("model", "objective", "optimizer")
        ]
    )
    for group in ("model", "objective", "optimizer"):
        yield from _component_sections(group)


def _component_sections(group: str) -> Iterator[str]:
    """Yield one section for all names of a group that have the same keys."""
    by_keys: dict[tuple[str, ...], list[tuple[str, Sequence[Key]]]] = {}
    for name in choices(group):
        config = compose_config("pretraining", [f"{group}={name}"])
        found = list_described_keys(config, [group])
        by_keys.setdefault(tuple(sorted(key.name for key in found)), []).append((name, found))
    for same in by_keys.values():
        (first, found), *others = same
        yield f"## {group}.{first}\n"
        if others:
            names = ", ".join(f"`{name}`" for name, _ in others)
            verb = "have" if len(others) > 1 else "has"
            command = f"ssl-bench keys {group}.NAME"
            yield f"{names} {verb} the same keys. Run `{command}` to print other defaults.\n"
        yield _key_table(found)


def _key_table(found: Iterable[Key]) -> str:
    rows = []
    for key in found:
        text = f"{_sentence(key.meaning)} {_legal_values(key.type)}".strip()
        rows.append((f"`{_escape(key.name)}`", f"`{_escape(key.default)}`", _escape(text)))
    return _table(("key", "default", "meaning and legal values"), rows)


def _legal_values(text: str) -> str:
    """Return a sentence about the legal values, without limits that nobody reaches."""
    if text == "true or false":
        return ""
    if re.fullmatch(r"(?!text)[\w.]+( or [\w.]+)*", text):
        names = [f"`{name}`" for name in text.split(" or ")]
        return f"One of {', '.join(names)}." if len(names) > 1 else f"Only {names[0]}."
    text = re.sub(r"in \[([^,\]]+), 1000000000\]", r"of at least \1", text)
    return _sentence(re.sub(r"in \(0, 1000000000\]", "above 0", text))


def _attributes(kind: type) -> dict[str, str]:
    """Return the descriptions below "Attributes:" in the docstring of a class."""
    text = inspect.getdoc(kind) or ""
    block = text.partition("Attributes:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", block, re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in found}


def _sentence(text: str) -> str:
    text = re.sub(r"(?<!`)(--[a-z]+(?:-[a-z]+)*)", r"`\1`", text.strip())
    if not text:
        return ""
    start = text[:1].upper() + text[1:]
    return start if start.endswith(".") else f"{start}."


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(PAGES[sys.argv[1]]())
