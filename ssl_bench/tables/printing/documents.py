"""Tables inside documents, between two markers."""

from pathlib import Path

from ssl_bench.errors import DataError
from ssl_bench.system.files import write_text_atomically

MARKERS = ("<!-- ssl-bench table -->", "<!-- end of ssl-bench table -->")


def insert_between_markers(document: Path, text: str) -> None:
    """Replace what stands between the two `MARKERS` of a document.

    Raises:
        DataError: the document does not hold each marker once, in order.
    """
    begin, end = MARKERS
    try:
        text_before = document.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {document} ({error}); name a text file") from error
    before, found, rest = text_before.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise DataError(f"{document} has no lines {begin!r} and {end!r} to put the table between")
    write_text_atomically(document, f"{before}{begin}\n{text}{end}{after}")
