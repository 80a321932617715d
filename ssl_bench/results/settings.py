"""Compare settings by value, whether a record contains 1 or 1.0.

Versions before 0.2 stored a number as the user typed it. Now each setting has one type, so an older
record may contain 1 where a new key of the same result contains 1.0, and the digest in its file
name differs. `ResultStore.load` therefore also searches for the `numeric_digest`. Tables would show
such records as different results, so `ResultStore.records` calls `unify_settings`. A record with
replaced settings keeps the digest that leads to its file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from ssl_bench.results.record import Record, ResultKey, canonical_json, result_digest


def numeric_digest(key: ResultKey) -> str:
    """Return a digest that is equal for keys whose settings are numerically equal."""
    return result_digest(key, {"settings": _numeric_text(key.settings)})


def unify_settings(records: Sequence[Record]) -> list[Record]:
    """Give numerically equal settings the same types, and keep the latest record of each result.

    A number becomes a float if it is a float in any of the records.
    """
    unified: dict[int, Mapping[str, Any]] = {}
    for name in ("settings", "changed"):
        # Records share equal settings, so there are few objects to compare.
        distinct = {id(value): value for value in (getattr(one, name) for one in records)}
        by_text: dict[str, list[Mapping[str, Any]]] = {}
        for value in distinct.values():
            by_text.setdefault(_numeric_text(value), []).append(value)
        for equal in by_text.values():
            if len(equal) > 1:
                unified |= dict.fromkeys(map(id, equal), reduce(_prefer_floats, equal))
    if not unified:
        return list(records)
    latest = {numeric_digest(one): one for one in sorted(records, key=lambda one: one.created)}
    kept = set(map(id, latest.values()))
    return [
        replace_settings(
            record,
            settings=unified.get(id(record.settings), record.settings),
            changed=unified.get(id(record.changed), record.changed),
        )
        for record in records
        if id(record) in kept
    ]


def replace_settings(record: Record, **settings: Any) -> Record:
    """Return a record with other `settings` or `changed`, and with the digest of its file."""
    copy = replace(record, **settings)
    vars(copy)["digest"] = record.digest
    return copy


def _numeric_text(value: Any) -> str:
    return canonical_json(_floats_as_integers(value))


def _floats_as_integers(value: Any) -> Any:
    """Replace whole-number floats, such as 1.0, by integers."""
    if isinstance(value, Mapping):
        return {name: _floats_as_integers(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_floats_as_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _prefer_floats(first: Any, second: Any) -> Any:
    """Merge two numerically equal values. A number becomes a float if either is a float."""
    if isinstance(first, Mapping):
        return {name: _prefer_floats(item, second[name]) for name, item in first.items()}
    if isinstance(first, list):
        return list(map(_prefer_floats, first, second))
    return first if isinstance(first, float) else second
