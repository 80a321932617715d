"""Where each number is from, as data that the pages show when a number is pressed."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ssl_bench.results import Record, ResultStore
from ssl_bench.system.escaping import json_text, printable

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


def as_script(store: ResultStore, records: Sequence[Record]) -> str:
    """JavaScript that defines the constant `RECORDS`: names, values by record, and settings.

    What many records share is written once.
    """
    shared: dict[str, int] = {}
    rows = [[_place(shared, value) for value in _values(store, record)] for record in records]
    names = [*_SHOWN.values(), "record", "settings", "details"]
    content = {"names": names, "words": [json.loads(word) for word in shared], "rows": rows}
    # Parsed, because in a literal of the language the name __proto__ means something.
    text = json_text(content, indent=None, text=printable)
    return f"const RECORDS = JSON.parse({json.dumps(text)});\n"


def _values(store: ResultStore, record: Record) -> list[Any]:
    whole = record.as_json()
    path = store.path(record.key()).relative_to(store.root)
    shown = _rounded if record.unit else _short
    changed = {
        "value": shown(whole["value"]),
        "ci95": shown(whole["ci95"]),
        "unit": record.unit or "plain number",
    }
    plain = [changed.get(name, whole[name]) for name in _SHOWN]
    return [*plain, path.as_posix(), whole["settings"], _small(whole["details"])]


def _place(shared: dict[str, int], value: Any) -> int:
    return shared.setdefault(json.dumps(value, sort_keys=True, default=str), len(shared))


def _rounded(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def _short(value: Any) -> Any:
    """Six digits, because plain numbers may be of any magnitude."""
    if isinstance(value, (list, tuple)):
        return [_short(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _small(details: Mapping[str, Any]) -> dict[str, Any]:
    """The details that fit on a line; the record has all."""
    return {
        name: _rounded(value)
        for name, value in details.items()
        if not isinstance(value, Mapping) and len(str(value)) <= 200
    }
