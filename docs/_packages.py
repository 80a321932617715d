"""Draw the packages and their layers from the import contracts in pyproject.toml.

python docs/_packages.py
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/packages.svg"
_WIDTH, _GAP, _LINE, _LETTER = 980, 16, 24, 6.7
_STYLE = (
    "text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#1f2933}"
    ".name{font-weight:bold;font-size:14px}.note{fill:#52606d}"
    ".panel{fill:#f5f7fa;stroke:#9aa5b1}.layer{fill:#e4e7eb}.module{fill:#fff;stroke:#627d98}"
)


@dataclass(frozen=True)
class Panel:
    """One package with its layers. Upper layers import lower ones.

    Attributes:
        layers: Names of modules. Modules of one layer do not import each other.
        width: In pixels.
    """

    name: str
    layers: Sequence[Sequence[str]]
    width: int

    def height(self) -> int:
        return 40 + sum(_LINE * len(self._lines(layer)) + 12 for layer in self.layers)

    def drawn(self, left: int, top: int) -> Iterator[str]:
        yield _box("panel", left, top, self.width, self.height())
        yield _text("name", left + 12, top + 22, self.name.replace(".", "/") + "/")
        top += 34
        for layer in self.layers:
            lines = self._lines(layer)
            yield _box("layer", left + 8, top, self.width - 16, _LINE * len(lines) + 6)
            for number, line in enumerate(lines):
                yield from _draw_modules(line, left + 14, top + 4 + _LINE * number)
            top += _LINE * len(lines) + 12

    def _lines(self, layer: Sequence[str]) -> list[list[str]]:
        """Return the modules of a layer, divided into lines that fit the width."""
        lines: list[list[str]] = [[]]
        for module in layer:
            if sum(map(_module_width, [*lines[-1], module])) > self.width - 28:
                lines.append([])
            lines[-1].append(module)
        return lines


def picture() -> str:
    """Return an SVG of all packages: `pretrain` and `probes` above the core and its commands."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = {name: _layers(one) for one in contracts for name in one.get("containers", ())}
    upper, lower = _layers(next(one for one in contracts if "containers" not in one))
    beside = [name for name in layers if name not in {*upper, *lower}]
    width = (_WIDTH - _GAP) // 2
    rows = [
        [Panel(name, layers[name], width) for name in row] for row in (upper, [*lower, *beside])
    ]
    return _svg(list(_stacked(rows)), _GAP + sum(_height(row) + 40 for row in rows) - 24)


def _layers(contract: Any) -> list[list[str]]:
    return [[module.strip() for module in re.split("[|:]", layer)] for layer in contract["layers"]]


def _height(row: Sequence[Panel]) -> int:
    return max(panel.height() for panel in row)


def _stacked(rows: Sequence[Sequence[Panel]]) -> Iterator[str]:
    top = _GAP
    for number, row in enumerate(rows):
        if number:
            note = "Upper layers import lower ones. Neighbours do not import each other."
            yield _text("note", _GAP, top - 14, f"\N{DOWNWARDS ARROW} {note}")
        left = _GAP
        for panel in row:
            yield from panel.drawn(left, top)
            left += panel.width + _GAP
        top += _height(row) + 40


def _draw_modules(modules: Sequence[str], left: float, top: int) -> Iterator[str]:
    for module in modules:
        yield _box("module", left, top, _module_width(module) - 6, _LINE - 4)
        yield _text("", left + 6, top + 14, module)
        left += _module_width(module)


def _module_width(module: str) -> int:
    return round(_LETTER * len(module) * 1.1) + 20


def _box(kind: str, left: float, top: float, width: float, height: float) -> str:
    place = f'x="{left}" y="{top}" width="{width}" height="{height}" rx="4"'
    return f'<rect class="{kind}" {place}/>'


def _text(kind: str, left: float, top: float, text: str) -> str:
    return f'<text class="{kind}" x="{left}" y="{top}">{escape(text)}</text>'


def _svg(shapes: Sequence[str], height: int) -> str:
    size = (_WIDTH + 2 * _GAP, height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" role="img">',
        f"<title>Packages of ssl-bench and the direction of imports</title><style>{_STYLE}</style>",
        f'<rect width="{size[0]}" height="{size[1]}" fill="#fff"/>',
        *shapes,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
