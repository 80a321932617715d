"""The picture of the rooms, drawn from the contracts of imports in pyproject.toml.

python docs/_rooms.py
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/rooms.svg"
_WIDTH, _GAP, _LINE, _LETTER = 980, 16, 24, 6.7
_STYLE = (
    "text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#1f2933}"
    ".name{font-weight:bold;font-size:14px}.note{fill:#52606d}"
    ".panel{fill:#f5f7fa;stroke:#9aa5b1}.floor{fill:#e4e7eb}.room{fill:#fff;stroke:#627d98}"
)


@dataclass(frozen=True)
class Panel:
    """One package with its floors, the upper ones import the lower ones.

    Attributes:
        floors: Names of rooms; those of one floor do not import each other.
        width: In pixels.
    """

    name: str
    floors: Sequence[Sequence[str]]
    width: int

    def height(self) -> int:
        return 40 + sum(_LINE * len(self._lines(floor)) + 12 for floor in self.floors)

    def drawn(self, left: int, top: int) -> Iterator[str]:
        yield _box("panel", left, top, self.width, self.height())
        yield _text("name", left + 12, top + 22, self.name.replace(".", "/") + "/")
        top += 34
        for floor in self.floors:
            lines = self._lines(floor)
            yield _box("floor", left + 8, top, self.width - 16, _LINE * len(lines) + 6)
            for number, line in enumerate(lines):
                yield from _rooms(line, left + 14, top + 4 + _LINE * number)
            top += _LINE * len(lines) + 12

    def _lines(self, floor: Sequence[str]) -> list[list[str]]:
        """Rooms of a floor, as many a line as there is space for."""
        lines: list[list[str]] = [[]]
        for room in floor:
            if sum(map(_room_width, [*lines[-1], room])) > self.width - 28:
                lines.append([])
            lines[-1].append(room)
        return lines


def picture() -> str:
    """An SVG of all packages: the wings above, the core and its commands below."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    floors = {name: _floors(one) for one in contracts for name in one.get("containers", ())}
    upper, lower = _floors(next(one for one in contracts if "containers" not in one))
    beside = [name for name in floors if name not in {*upper, *lower}]
    width = (_WIDTH - _GAP) // 2
    rows = [
        [Panel(name, floors[name], width) for name in row] for row in (upper, [*lower, *beside])
    ]
    return _svg(list(_stacked(rows)), _GAP + sum(_height(row) + 40 for row in rows) - 24)


def _floors(contract: Any) -> list[list[str]]:
    return [[room.strip() for room in re.split("[|:]", layer)] for layer in contract["layers"]]


def _height(row: Sequence[Panel]) -> int:
    return max(panel.height() for panel in row)


def _stacked(rows: Sequence[Sequence[Panel]]) -> Iterator[str]:
    top = _GAP
    for number, row in enumerate(rows):
        if number:
            note = "imports go down, never up; what stands side by side does not import each other"
            yield _text("note", _GAP, top - 14, f"\N{DOWNWARDS ARROW} {note}")
        left = _GAP
        for panel in row:
            yield from panel.drawn(left, top)
            left += panel.width + _GAP
        top += _height(row) + 40


def _rooms(rooms: Sequence[str], left: float, top: int) -> Iterator[str]:
    for room in rooms:
        yield _box("room", left, top, _room_width(room) - 6, _LINE - 4)
        yield _text("", left + 6, top + 14, room)
        left += _room_width(room)


def _room_width(room: str) -> int:
    return round(_LETTER * len(room) * 1.1) + 20


def _box(kind: str, left: float, top: float, width: float, height: float) -> str:
    place = f'x="{left}" y="{top}" width="{width}" height="{height}" rx="4"'
    return f'<rect class="{kind}" {place}/>'


def _text(kind: str, left: float, top: float, text: str) -> str:
    return f'<text class="{kind}" x="{left}" y="{top}">{escape(text)}</text>'


def _svg(shapes: Sequence[str], height: int) -> str:
    size = (_WIDTH + 2 * _GAP, height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" role="img">',
        f"<title>Rooms of ssl-bench and the direction of imports</title><style>{_STYLE}</style>",
        f'<rect width="{size[0]}" height="{size[1]}" fill="#fff"/>',
        *shapes,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
