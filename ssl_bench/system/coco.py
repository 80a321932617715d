"""pycocotools without what it prints."""

import io
from collections.abc import Generator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any


def index_coco(content: Mapping[str, Any]) -> Any:
    """Return pycocotools' index of the content of a COCO file of instances.

    Raises:
        Exception: Whatever pycocotools raises if the content is something else.
    """
    # Here, because few commands need it.
    from pycocotools.coco import COCO

    index: Any = COCO()
    index.dataset = content
    with silenced():
        index.createIndex()
    return index


@contextmanager
def silenced() -> Generator[None]:
    """Keep pycocotools from printing what it does."""
    with redirect_stdout(io.StringIO()):
        yield
