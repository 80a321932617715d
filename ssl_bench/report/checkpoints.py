"""Who is in a report, and how each is drawn: the same colour and line wherever it appears."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssl_bench.results import Record
from ssl_bench.system.escaping import in_file_names
from ssl_bench.system.paths import encoder_folder, in_order
from ssl_bench.tables.series import model_names

NUM_COLOURS = 8
_LONGEST_LABEL = 20
_NO_SKIP = re.compile(r"skip-?less|no-?skip|without-?skip", re.IGNORECASE)
_SKIPS = ("skip", "skip_attention", "skip_mlp")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Checkpoint:
    """One encoder.

    Attributes:
        number: From 0, in the order of the names.
        encoder_id: As in records.
        sha256: Of its weights.
        name: Unique in the report.
        apart: What sets it apart from others of its model, such as "image size 224"; else empty.
        label: Its name, for the end of its curves; of a long one both ends.
        model: As recorded; several checkpoints may share it.
        depth: Number of blocks.
        facts: What is recorded of the encoder, by name.
        skipless: Its architecture lacks a skip connection, or its name says so; drawn dashed.
        page: File name.
        folders: How the names of the folders of its pictures begin: each `encoder_folder`.
    """

    number: int
    encoder_id: str
    sha256: str
    name: str
    apart: str
    label: str
    model: str
    depth: int
    facts: tuple[tuple[str, str], ...]
    skipless: bool
    page: str
    folders: tuple[str, ...]

    @property
    def style(self) -> str:
        """Classes of its lines in the style sheet: colour, and dashes for skipless."""
        again = self.number // NUM_COLOURS
        return f"c{self.number % NUM_COLOURS} d{min(again, 2)}{'s' if self.skipless else ''}"


def checkpoints_of(records: Sequence[Record]) -> tuple[Checkpoint, ...]:
    """The checkpoints of some records, ordered by name."""
    folders: dict[str, set[str]] = defaultdict(set)
    for encoder, model in {(record.encoder_id, record.model) for record in records}:
        folders[encoder].add(encoder_folder(model, encoder))
    latest = {record.encoder_id: record for record in records}
    known = sorted(model_names(records).items(), key=lambda one: in_order(one[1]))
    return tuple(
        Checkpoint(
            number=number,
            encoder_id=encoder,
            sha256=record.checkpoint_sha256,
            name=name,
            apart=_apart(record, [one for one in latest.values() if one.model == record.model]),
            label=name if len(name) <= _LONGEST_LABEL else f"{name[:9]}…{name[-10:]}",
            model=record.model,
            depth=record.depth,
            facts=_facts(record),
            skipless=any(record.architecture.get(skip) is False for skip in _SKIPS)
            or bool(_NO_SKIP.search(name)),
            page=f"checkpoint-{in_file_names(name)}-{encoder[:8]}.html",
            folders=tuple(sorted(folders[encoder])),
        )
        for number, (encoder, name) in enumerate(known)
        if (record := latest[encoder])
    )


def _apart(record: Record, namesakes: Sequence[Record]) -> str:
    """What is recorded of an encoder and differs among those of its name."""

    def known(one: Record) -> dict[str, str]:
        used = {"mean": list(one.mean), "std": list(one.std), "weights": one.checkpoint_sha256[:12]}
        return dict(_facts(one)) | {name: str(value) for name, value in used.items()}

    own, others = known(record), [known(one) for one in namesakes]
    names = dict.fromkeys(name for one in (own, *others) for name in one)
    differing = [n for n in names if any(other.get(n) != own.get(n) for other in others)]
    return ", ".join(f"{name} {own.get(name, 'not set')}" for name in differing)


def _facts(record: Record) -> tuple[tuple[str, str], ...]:
    own = record.architecture
    # Of somebody's own module nobody said.
    known = {} if own.get("kind") == "module" else {"skips": _skips(own)}
    facts: dict[str, Any] = {**known, "depth": record.depth}
    facts |= {name: value for name, value in sorted(own.items()) if name not in _SKIPS}
    epoch = record.details.get("epoch")
    if isinstance(epoch, (int, float)):
        facts["epoch"] = f"{epoch:g}"
    # A digest by its first digits, as elsewhere.
    return tuple(
        (name.replace("_", " "), text[:12] if _DIGEST.fullmatch(text) else text)
        for name, text in ((n, "not set" if v is None else str(v)) for n, v in facts.items())
    )


def _skips(architecture: Mapping[str, Any]) -> str:
    """Such as "attention" where only that has one; what is not recorded is the usual thing."""
    lacking = {name for name in _SKIPS if architecture.get(name) is False}
    if lacking in ({"skip_attention"}, {"skip_mlp"}):
        return "mlp" if "skip_attention" in lacking else "attention"
    return "no" if lacking else "yes"
