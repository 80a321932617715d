"""Who is in a report, and how each is drawn: the same colour and line wherever it appears."""

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssl_bench.report.drawing.labels import short_names
from ssl_bench.report.pictures.files import Place
from ssl_bench.results import Record
from ssl_bench.system.escaping import in_file_names
from ssl_bench.system.naming import encoder_folder, in_order
from ssl_bench.tables.series import model_names

NUM_COLOURS = 8
_NO_SKIP = re.compile(r"skip-?less|no-?skip|without-?skip", re.IGNORECASE)
_SKIPS = ("skip", "skip_attention", "skip_mlp")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FOLDER = re.compile(r"(.+)-([0-9a-f]{8})", re.DOTALL)


@dataclass(frozen=True)
class Checkpoint:
    """One encoder.

    Attributes:
        number: From 0, in the order of the names.
        encoder_id: As in records; its first digits alone where only pictures are known.
        sha256: Of its weights; empty where only pictures are known.
        name: Unique in the report.
        label: What its name has that others lack, for the end of its curves.
        model: As recorded; several checkpoints may share it.
        depth: Number of blocks; None where only pictures are known.
        facts: What is recorded of the encoder, by name.
        skipless: Its architecture lacks a skip connection, or its name says so; drawn dashed.
        colour: Its own.
        page: File name.
        folders: How the names of the folders of its pictures begin: each `encoder_folder`.
    """

    number: int
    encoder_id: str
    sha256: str
    name: str
    label: str
    model: str
    depth: int | None
    facts: tuple[tuple[str, str], ...]
    skipless: bool
    colour: int
    page: str
    folders: tuple[str, ...]

    @property
    def style(self) -> str:
        """Classes of its lines in the style sheet: colour, and dashes for skipless."""
        again = self.colour // NUM_COLOURS
        return f"c{self.colour % NUM_COLOURS} d{min(again, 2)}{'s' if self.skipless else ''}"


@dataclass(frozen=True)
class _Known:
    """What records, or the name of a folder of pictures, tell of an encoder."""

    encoder_id: str
    name: str
    model: str
    sha256: str = ""
    depth: int | None = None
    facts: tuple[tuple[str, str], ...] = ()
    skipless: bool = False


def checkpoints_of(
    records: Sequence[Record], unscored: Iterable[Place] = ()
) -> tuple[Checkpoint, ...]:
    """The checkpoints of some records, and of pictures without records, ordered by name."""
    folders: dict[str, set[str]] = defaultdict(set)
    for encoder, model in {(record.encoder_id, record.model) for record in records}:
        folders[encoder].add(encoder_folder(model, encoder))
    known = _recorded(records)
    scored = {name for names in folders.values() for name in names}
    for folder in dict.fromkeys(p.encoder for p in unscored if p.encoder not in scored):
        one = _pictured(folder, {other.name for other in known})
        same = [other for other in known if other.encoder_id.startswith(one.encoder_id)]
        known += [] if same else [one]
        folders[(same or [one])[0].encoder_id].add(folder)
    known.sort(key=lambda one: in_order(one.name))
    labels = short_names([one.name for one in known])
    return tuple(
        Checkpoint(
            number=number,
            encoder_id=one.encoder_id,
            sha256=one.sha256,
            name=one.name,
            label=labels[number],
            model=one.model,
            depth=one.depth,
            facts=one.facts,
            skipless=one.skipless or bool(_NO_SKIP.search(one.name)),
            colour=number,
            page=f"checkpoint-{in_file_names(one.name)}-{one.encoder_id[:8]}.html",
            folders=tuple(sorted(folders[one.encoder_id])),
        )
        for number, one in enumerate(known)
    )


def _recorded(records: Sequence[Record]) -> list[_Known]:
    latest = {record.encoder_id: record for record in records}
    return [
        _Known(
            encoder,
            name,
            record.model,
            record.checkpoint_sha256,
            record.depth,
            _facts(record),
            any(record.architecture.get(skip) is False for skip in _SKIPS),
        )
        for encoder, name in model_names(records).items()
        if (record := latest[encoder])
    ]


def _facts(record: Record) -> tuple[tuple[str, str], ...]:
    own = record.architecture
    facts: dict[str, Any] = {"skips": _skips(own), "depth": record.depth}
    facts |= {name: value for name, value in sorted(own.items()) if name not in _SKIPS}
    epoch = record.details.get("epoch")
    if isinstance(epoch, (int, float)):
        facts["epoch"] = f"{epoch:g}"
    return tuple((name.replace("_", " "), _brief(str(value))) for name, value in facts.items())


def _brief(value: str) -> str:
    """A digest by its first digits, as elsewhere."""
    return value[:12] if _DIGEST.fullmatch(value) else value


def _skips(architecture: Mapping[str, Any]) -> str:
    """Such as "attention" where only that has one; what is not recorded is the usual thing."""
    lacking = {name for name in _SKIPS if architecture.get(name) is False}
    if lacking in ({"skip_attention"}, {"skip_mlp"}):
        return "mlp" if "skip_attention" in lacking else "attention"
    return "no" if lacking else "yes"


def _pictured(folder: str, taken: set[str]) -> _Known:
    """From the name of a folder, which is that of the encoder and the first digits of its id."""
    found = _FOLDER.fullmatch(folder)
    name = found[1] if found else folder
    digits = found[2] if found else hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]
    return _Known(digits, name if name not in taken else f"{name} {digits}", name)
