"""Write the notebook docs/python.ipynb from the page docs/python.md.

    python docs/_notebook.py

The notebook contains the code of the page, and all text and figures that the code outputs.
"""

import base64
import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/python.md"
NOTEBOOK = ROOT / "docs/python.ipynb"
_DPI = 72
_CODE = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def cells() -> list[tuple[str, str]]:
    """Return the parts of the page in order, each as "markdown" or "code" and its text."""
    found, end = [], 0
    text = PAGE.read_text(encoding="utf-8")
    for block in _CODE.finditer(text):
        found += [("markdown", text[end : block.start()].strip()), ("code", block[1].rstrip())]
        end = block.end()
    return [(kind, part) for kind, part in [*found, ("markdown", text[end:].strip())] if part]


def outputs() -> Iterator[list[dict[str, Any]]]:
    """Run each code cell in the current folder, and yield the text and figures that it outputs."""
    import matplotlib as mpl

    mpl.use("agg")
    names: dict[str, Any] = {}
    for kind, text in cells():
        if kind == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(text, "python.ipynb", "exec"), names)
            yield [*_stream(printed.getvalue()), *_pictures()]


def _stream(text: str) -> list[dict[str, Any]]:
    lines = text.splitlines(keepends=True)
    return [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []


def _pictures() -> Iterator[dict[str, Any]]:
    import matplotlib.pyplot as plt

    for number in plt.get_fignums():
        memory = io.BytesIO()
        plt.figure(number).savefig(memory, format="png", dpi=_DPI, metadata={"Software": None})
        content = base64.b64encode(memory.getvalue()).decode()
        yield {"data": {"image/png": content}, "metadata": {}, "output_type": "display_data"}
    plt.close("all")


def notebook() -> dict[str, Any]:
    """Run all cells from top to bottom. Return the notebook in version 4.5 of its format."""
    results, count, written = outputs(), 0, []
    for number, (kind, text) in enumerate(cells()):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell{number}", "metadata": {}}
        if kind == "code":
            count += 1
            cell |= {"execution_count": count, "outputs": next(results)}
        written.append(cell | {"source": text.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": written, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        NOTEBOOK.write_text(json.dumps(notebook(), indent=1) + "\n", encoding="utf-8")
