"""Where each number is from, as data that the pages show when a number is pressed."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ssl_bench.results import Record
from ssl_bench.results.reading import place_of
from ssl_bench.results.record import INFINITE
from ssl_bench.system.escaping import json_text, plain_json, printable

_SHOWN = {
    "model": "checkpoint",
    "checkpoint_sha256": "sha256 of the weights",
    "architecture": "architecture",
    "mean": "mean of the images",
    "std": "deviation of the images",
    "task": "task",
    "dataset": "dataset",
    "split": "split",
    "num_images": "images",
    "dataset_fingerprint": "dataset fingerprint",
    "layer": "block",
    "facet": "facet",
    "protocol": "protocol",
    "metric": "metric",
    "value": "value",
    "unit": "unit",
    "ci95": "95 % interval",
    "seed": "seed",
    "version": "ssl-bench",
    "git_commit": "commit",
    "torch": "torch",
    "device": "device",
    "seconds": "seconds of the pass",
    "created": "date",
}
"""Fields of a record and what the pages call them."""


def as_script(records: Sequence[Record]) -> str:
    """JavaScript that defines the constant `RECORDS`: names, values by record, and settings.

    What many records share is written once.
    """
    words = _Words()
    rows = [words.places(record) for record in records]
    names = [*_SHOWN.values(), "record", "settings", "details"]
    content = {"names": names, "words": [json.loads(word) for word in words.shared]}
    start = json_text(content, indent=None, text=printable).removesuffix("}")
    text = f'{start},"rows":{json.dumps(rows, separators=(",", ":"))}}}'
    # Parsed, because in a literal of the language the name __proto__ means something.
    return f"const RECORDS = JSON.parse({json.dumps(text)});\n"


class _Words:
    """What is said of records, each word once.

    Attributes:
        shared: Place of every word by its JSON.
    """

    def __init__(self) -> None:
        self.shared: dict[str, int] = {}
        # Written before: texts by themselves, the mappings that many records share by identity.
        self._texts: dict[str, int] = {}
        self._mappings: dict[int, int] = {}
        self._numbers: dict[int, int] = {}

    def places(self, record: Record) -> list[int]:
        """Where the fields of a record are, its file, its settings and its details."""
        shown = _rounded if record.unit else _short
        changed = {
            "value": shown(_plain(record.value)),
            "ci95": shown(_plain(record.ci95)),
            "unit": record.unit or "plain number",
        }
        fields = [changed[n] if n in changed else getattr(record, n) for n in _SHOWN]
        file = "/".join(("records", *place_of(record, record.digest)))
        return [*map(self._place, [*fields, file, record.settings]), self._new(_small(record))]

    def _place(self, value: Any) -> int:
        if type(value) is str:
            found = self._texts.get(value)
            if found is None:
                found = self._texts[value] = self._new(value)
            return found
        if isinstance(value, Mapping):
            found = self._mappings.get(id(value))
            if found is None:
                found = self._mappings[id(value)] = self._new(_plain(value))
            return found
        if type(value) is int:
            return self._numbers.get(value) or self._numbered(value)
        return self._new(_plain(value))

    def _numbered(self, value: int) -> int:
        found = self._numbers[value] = self._new(value)
        return found

    def _new(self, value: Any) -> int:
        word = json.dumps(value, sort_keys=True, default=str)
        return self.shared.setdefault(word, len(self.shared))


def _plain(value: Any) -> Any:
    return plain_json(value, infinity=INFINITE)


def _rounded(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def _short(value: Any) -> Any:
    """Six digits, because plain numbers may be of any magnitude."""
    if isinstance(value, (list, tuple)):
        return [_short(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _small(record: Record) -> dict[str, Any]:
    """The details that fit on a line; the record has all."""
    plain = {n: _plain(v) for n, v in record.details.items() if not isinstance(v, Mapping)}
    return {name: _rounded(value) for name, value in plain.items() if len(str(value)) <= 200}
