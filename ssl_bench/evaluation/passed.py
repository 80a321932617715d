"""What passed the encoder for one probe, kept for the next one that asks for the same."""

from collections.abc import MutableMapping
from typing import Any

from ssl_bench.models import Encoder
from ssl_bench.results import encoder_id

Passed = MutableMapping[Any, Any]
"""Features by everything that they depend on."""


class PassedImages:
    """Of one encoder and of probes that look at the same images; those of others are forgotten.

    So probes that follow each other take what is there, and no memory is held beyond them.
    """

    def __init__(self) -> None:
        self._of: tuple[str, ...] = ()
        self._found: Passed = {}

    def of(self, encoder: Encoder, role: str) -> Passed:
        """What probes of that role have left."""
        asked = (encoder_id(encoder.identity()), role)
        if asked != self._of:
            self._of, self._found = asked, {}
        return self._found
