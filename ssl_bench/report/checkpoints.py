"""Who is in a report, and how each is drawn: the same colour and line wherever it appears."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ssl_bench.results import Record
from ssl_bench.system.escaping import in_file_names
from ssl_bench.system.naming import encoder_folder, in_order
from ssl_bench.tables.series import model_names

NUM_COLOURS = 8
_NO_SKIP = re.compile(r"skip-?less|no-?skip|without-?skip", re.IGNORECASE)


@dataclass(frozen=True)
class Checkpoint:
    """One encoder.

    Attributes:
        number: From 0, in the order of the names.
        encoder_id: As in records.
        sha256: Of its weights.
        name: Unique in the report.
        model: As recorded; several checkpoints may share it.
        skipless: Its name says that it has no skip connections; drawn dashed.
        colour: Shared by an encoder and the skipless one of otherwise the same name.
        page: File name.
        folders: Names of the folders that may hold its pictures.
    """

    number: int
    encoder_id: str
    sha256: str
    name: str
    model: str
    depth: int
    skipless: bool
    colour: int
    page: str
    folders: tuple[str, ...]

    @property
    def style(self) -> str:
        """Classes of its lines in the style sheet: colour, and dashes for skipless."""
        again = self.colour // NUM_COLOURS
        return f"c{self.colour % NUM_COLOURS} d{min(again, 2)}{'s' if self.skipless else ''}"


def checkpoints_of(records: Sequence[Record]) -> tuple[Checkpoint, ...]:
    """The checkpoints of some records, ordered by name."""
    latest = {record.encoder_id: record for record in records}
    folders: dict[str, set[str]] = defaultdict(set)
    for encoder, model in {(record.encoder_id, record.model) for record in records}:
        folders[encoder].add(encoder_folder(model, encoder))
    named = sorted(
        ((name, encoder) for encoder, name in model_names(records).items()),
        key=lambda pair: in_order(pair[0]),
    )
    colours = _colours([name for name, _ in named])
    return tuple(
        Checkpoint(
            number=number,
            encoder_id=encoder,
            sha256=latest[encoder].checkpoint_sha256,
            name=name,
            model=latest[encoder].model,
            depth=latest[encoder].depth,
            skipless=bool(_NO_SKIP.search(name)),
            colour=colours[name],
            page=f"checkpoint-{in_file_names(name)}-{encoder[:8]}.html",
            folders=tuple(sorted(folders[encoder])),
        )
        for number, (name, encoder) in enumerate(named)
    )


def _colours(names: Sequence[str]) -> dict[str, int]:
    """Numbers by name; a pair that differs in skip and skipless alone shares one."""
    taken: dict[tuple[str, bool], int] = {}
    numbers: dict[str, int] = {}
    families: dict[str, int] = {}
    for name in names:
        family, skipless = _NO_SKIP.sub("skip", name), bool(_NO_SKIP.search(name))
        number = families.setdefault(family, len(families))
        if (family, skipless) in taken:
            number = families.setdefault(name, len(families))
        taken[family, skipless] = numbers[name] = number
    return numbers
