"""What passed the encoder for one probe, kept for the next one that asks for the same."""

from collections.abc import Iterator, MutableMapping
from typing import Any

from ssl_bench.models import Encoder
from ssl_bench.results import encoder_id

Passed = MutableMapping[Any, Any]
"""Features by everything that they depend on."""


class PassedImages:
    """Of one encoder and of probes that look at the same images; those of others are forgotten.

    So probes that follow each other take what is there, and no memory is held beyond them. Where
    the same images come again after another corruption, what was asked for with the last one is
    held until the next: the images that something is fitted to stay, as long as all fit to them.
    """

    def __init__(self) -> None:
        self._of: tuple[str, ...] = ()
        self._corrupted: str | None = None
        self._found = _Asked()

    def of(self, encoder: Encoder, role: str, corrupted: str | None = None) -> Passed:
        """What probes of that role have left.

        Args:
            encoder: Whose features they are.
            role: What the dataset must support.
            corrupted: What the scored images went through; the others are the same.
        """
        asked = (encoder_id(encoder.identity()), role)
        if asked != self._of:
            self._of, self._found = asked, _Asked()
        elif corrupted != self._corrupted:
            self._found.forget_unasked()
        self._corrupted = corrupted
        return self._found


class _Asked(Passed):
    """A mapping that knows what it was asked for since it forgot the last time."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}
        self._asked: set[Any] = set()

    def forget_unasked(self) -> None:
        self._values = {key: value for key, value in self._values.items() if key in self._asked}
        self._asked = set()

    def __getitem__(self, key: Any) -> Any:
        self._asked.add(key)
        return self._values[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._asked.add(key)
        self._values[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._values[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
