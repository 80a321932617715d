"""Compressed bytes, and never more of them than is claimed or likely."""

import gzip
import io
import os
import zlib
from pathlib import Path

from ssl_bench.system.files import open_regular

_CHUNK = 2**20
# Of deflate: a bit or two stand for 258 bytes at best, and what does not shrink is stored as it is
# behind a few bytes for each of its blocks.
_MOST_BY_BYTE, _FEW = 1032, 64
# Pictures hardly shrink any more; what shrinks like this is a bomb, or no data to keep in memory.
_LIKELY_RATIO, _ALWAYS = 20, 2**28


def is_possible(packed: int, size: int) -> bool:
    """Whether so many bytes can be the deflated form of so many."""
    return size <= _MOST_BY_BYTE * packed and packed <= size + size // 1000 + _FEW


def inflate(packed: bytes, size: int) -> bytes:
    """The deflated bytes as they were.

    Raises:
        zlib.error: they are damaged, or not as many as `size` says.
    """
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    # One more, which tells a claim that is too small. Zero would be no limit.
    content = inflater.decompress(packed, size + 1)
    if len(content) != size or not inflater.eof:
        raise zlib.error(f"it holds {'fewer' if len(content) < size else 'more'} than {size} bytes")
    return content


def gunzip(path: Path) -> bytes:
    """All that a file holds, which says nothing of its size before.

    Raises:
        OSError, EOFError, zlib.error: it is damaged, or grows more than pictures could.
    """
    content = io.BytesIO()
    with open_regular(path) as packed, gzip.open(packed) as file:
        most = _ALWAYS + _LIKELY_RATIO * os.fstat(packed.fileno()).st_size
        while chunk := file.read(_CHUNK):
            content.write(chunk)
            if content.tell() > most:
                raise zlib.error(f"it inflates to more than {_LIKELY_RATIO} times its size")
    return content.getvalue()
