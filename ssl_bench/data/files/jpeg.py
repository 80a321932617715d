"""Whether a JPEG holds all its pixels: decoders fill in what is missing and say nothing.

A file whose pixels end early, but that has an end marker, is whole for PIL and OpenCV: libjpeg
takes zeros for the bits that are missing, warns where nobody listens, and goes on.
"""

import re
import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

_START_OF_SCAN, _END_OF_IMAGE, _RESTART_INTERVAL = 0xDA, 0xD9, 0xDD
# Start of frame: all but the tables of Huffman, an extension, and the tables of arithmetic codes.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SEQUENTIAL, _PROGRESSIVE = frozenset({0xC0, 0xC1}), 0xC2
_ARITHMETIC = frozenset(range(0xC9, 0xD0))
# A private use, restarts, another start: they have no length.
_BARE = frozenset({0x01, *range(0xD0, 0xD9)})
# Tables, restarts, applications and comments.
_HARMLESS = frozenset({0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE})
_ALL = frozenset(range(64))
# In the bits of pixels a byte of ones is followed by a zero. Patterns that begin with two plain
# bytes are searched twenty times as fast as those that allow for filling.
_MARKER = re.compile(rb"\xff[^\x00]")
_MARKER_BUT_RESTART = re.compile(rb"\xff[^\x00\xd0-\xd7]")
# libjpeg reads up to 64 bits ahead. Sixteen ones are no code of any table.
_AHEAD = b"\xff\x00" * 8
# The last block is 6 % of so many pixels.
_SMALL = 64 * 64
# Different from the first bit on. libjpeg takes zeros where there are no bits.
_ZERO_FIRST = bytes(range(37, 237, 3))
_ONE_FIRST = _ZERO_FIRST[::-1]
_NOISE = _ONE_FIRST + b"".join(bytes((0xFF, 0xD0 + n % 8)) + _ONE_FIRST for n in range(16))


class Scan(NamedTuple):
    """A pass over the pixels.

    Attributes:
        end: Behind its last bit, where a marker begins.
        components: Identifiers of the colours in it.
        coefficients: Those that are complete, down to the lowest bit, once it is over.
    """

    end: int
    components: bytes
    coefficients: frozenset[int]


class Jpeg(NamedTuple):
    """The layout of a file from its start to its end marker; what follows is of no interest.

    Attributes:
        kind: Marker of its frame.
        precision: Bits of a value.
        components: Identifiers of its colours.
        is_plain: Whether it holds nothing that is unusual.
    """

    kind: int
    precision: int
    height: int
    width: int
    components: bytes
    scans: tuple[Scan, ...]
    is_plain: bool

    @property
    def is_usual(self) -> bool:
        """Grey or colour with 8 bits, and one pass from top to bottom, as cameras write it."""
        is_sequential = self.kind in _SEQUENTIAL and self.precision == 8 and self.is_plain
        of_all = [scan.components == self.components for scan in self.scans]
        return is_sequential and of_all == [True] and len(self.components) in (1, 3)

    def fault(self) -> str | None:
        """Why it cannot hold all pixels, as far as its headers tell; None if it can."""
        if self.kind in _ARITHMETIC:
            return "arithmetic codes, of which nobody can tell whether they are whole"
        for component in self.components:
            seen = (scan.coefficients for scan in self.scans if component in scan.components)
            if frozenset().union(*seen) != _ALL:
                return "a scan is missing"
        return None


def parse_jpeg(data: bytes) -> Jpeg | None:
    """The layout of a JPEG; None for anything else, and where its end marker is missing."""
    frame, scans, is_plain = None, [], True
    for marker, body, end in _segments(data):
        if marker == _END_OF_IMAGE:
            return _with_scans(frame, scans, is_plain=is_plain) if frame and scans else None
        if marker == _START_OF_SCAN:
            scans.append((body, end))
        elif marker in _FRAMES and frame is None:
            frame = bytes([marker]) + body
        else:
            is_plain = is_plain and marker in _HARMLESS
    return None


def _with_scans(frame: bytes, scans: list[tuple[bytes, int]], *, is_plain: bool) -> Jpeg | None:
    try:
        kind, precision, height, width, count = struct.unpack_from(">BBHHB", frame)
        read = tuple(_scan(body, end, is_progressive=kind == _PROGRESSIVE) for body, end in scans)
    except (struct.error, IndexError):
        return None
    return Jpeg(kind, precision, height, width, frame[7 : 7 + 3 * count : 3], read, is_plain)


def _scan(body: bytes, end: int, *, is_progressive: bool) -> Scan:
    components = body[1 : 1 + 2 * body[0] : 2]
    if not is_progressive:
        return Scan(end, components, _ALL)
    first, last, bits = body[1 + 2 * body[0] : 4 + 2 * body[0]].ljust(3, b"\xff")
    is_complete = bits & 15 == 0
    done = frozenset(range(first, last + 1)) if is_complete else frozenset()
    return Scan(end, components, done)


def open_ended(data: bytes, jpeg: Jpeg) -> list[bytes]:
    """A usual JPEG, so changed that OpenCV fails, or finds other pixels, where some are missing.

    In place of the end marker come the few bits that libjpeg may read ahead. If it needs more, it
    meets the end of the file instead of a marker, and that is an error. Costs 5 % of decoding, but
    a block or two at the end may be missing unseen. That is too much of a small image: it is given
    twice, with bits of two kinds there.
    """
    start = memoryview(data)[: jpeg.scans[0].end]
    is_small = jpeg.height * jpeg.width <= _SMALL
    endings = (_ONE_FIRST, _ZERO_FIRST) if is_small else (_AHEAD,)
    return [b"".join((start, bits)) for bits in endings]


def with_noise(data: bytes, jpeg: Jpeg) -> bytes:
    """The same JPEG with other bits where the pixels of each scan should have ended.

    Whoever decodes both and finds the same pixels knows that none had been missing.
    """
    ends = [0, *(scan.end for scan in jpeg.scans), len(data)]
    return _NOISE.join(data[one:other] for one, other in pairwise(ends))


def _segments(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Marker, body, and where it ends; behind a scan's header come its bits."""
    at, restarts = 2, _MARKER
    while data[:2] == b"\xff\xd8" and (code := _next_marker(data, at, _MARKER)):
        marker, at = data[code], code + 1
        if marker in _BARE:
            continue
        if marker == _END_OF_IMAGE:
            yield marker, b"", at
            return
        behind = at + max(int.from_bytes(data[at : at + 2]), 2)
        body, at = data[at + 2 : behind], behind
        if marker == _RESTART_INTERVAL:
            restarts = _MARKER_BUT_RESTART if any(body) else _MARKER
        if marker == _START_OF_SCAN:
            at = _end_of_bits(data, at, restarts)
        yield marker, body, at


def _end_of_bits(data: bytes, at: int, markers: re.Pattern[bytes]) -> int:
    end = (_next_marker(data, at, markers) or len(data) + 1) - 1
    while data[end - 1] == 0xFF:
        end -= 1
    return end


def _next_marker(data: bytes, at: int, markers: re.Pattern[bytes]) -> int | None:
    """Where the second byte of the next marker is."""
    while found := markers.search(data, at):
        at = found.end() - 1
        # Before a marker there may be any number of bytes of ones.
        if data[at] != 0xFF:
            return at
    return None
