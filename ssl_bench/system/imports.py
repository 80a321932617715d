"""Files of Python that cannot be imported: which, in which line, and why."""

import traceback
from collections.abc import Sequence
from pathlib import Path

from ssl_bench.errors import BrokenFile

PACKAGES = ("ssl_bench", "probes", "pretrain")
"""Those of this suite."""


def broken_file(error: Exception, packages: Sequence[str] = PACKAGES) -> BrokenFile:
    """What was raised while a file was imported, in one line: file, line and what is wrong there.

    Args:
        error: As it was raised.
        packages: Of several files on the way, the last one in their folders is named.
    """
    path, line = _where(error, packages)
    what = error.msg if isinstance(error, SyntaxError) else str(error)
    return BrokenFile(
        f"{path}, line {line}, cannot be imported: {type(error).__name__}: {what}; mend that file"
    )


def _where(error: Exception, packages: Sequence[str]) -> tuple[str, int]:
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno or 0
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame for frame in frames if not frame.filename.startswith("<frozen ")]
    own = [one for one in files if {*packages} & {*Path(one.filename).parent.parts}]
    last = (own or files)[-1]
    return last.filename, last.lineno or 0
