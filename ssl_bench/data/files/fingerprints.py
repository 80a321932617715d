"""Fingerprints: one sha256 that stands for all that a split of a dataset holds."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

FingerprintKind = Literal["content", "stat"]
"""Of the bytes of all files, or of their sizes and times alone."""

FINGERPRINT_KINDS: list[str] = list(get_args(FingerprintKind))
# No character that a name of a file cannot hold everywhere, because files are named so.
_STAT = "stat-"


def fingerprint_of(rows: Iterable[Sequence[object]], kind: FingerprintKind = "content") -> str:
    """Hexadecimal sha256 over rows of plain JSON types, marked where the bytes were not read."""
    digest = hashlib.sha256()
    for row in rows:
        # JSON, because a name may hold whatever else would stand between two names.
        digest.update(json.dumps(row).encode() + b"\n")
    return (_STAT if kind == "stat" else "") + digest.hexdigest()


def extended(fingerprint: str, *more: Sequence[object]) -> str:
    """The fingerprint of what adds something to the data of another; of the same kind."""
    return fingerprint_of([[fingerprint], *more], kind_of(fingerprint))


def kind_of(fingerprint: str) -> FingerprintKind:
    return "stat" if fingerprint.startswith(_STAT) else "content"


def shortened(fingerprint: str) -> str:
    """Its first six digits, and its mark."""
    mark = _STAT if kind_of(fingerprint) == "stat" else ""
    return fingerprint[: len(mark) + 6]
