"""Stored numbers become classes by a table; what the table lacks is an error."""

from pathlib import Path

import numpy as np
import pytest

from ssl_bench.data.labels import LabelMap, voc_colours
from ssl_bench.data.samples import IGNORED
from ssl_bench.errors import DataError

LABELS = LabelMap({0: IGNORED, 1: 0, 2: 1, 5: 2, 255: IGNORED}, hint="look again")
FILE = Path("mask.png")


def test_each_number_gets_its_class():
    stored = np.array([[0, 1], [2, 5], [255, 1]], np.uint8)

    for kind in (np.uint8, np.int32):
        classes = LABELS.apply(stored.astype(kind), FILE)
        assert classes.dtype == np.uint8
        assert classes.tolist() == [[255, 0], [1, 2], [255, 0]]


@pytest.mark.parametrize(("value", "kind"), [(3, np.uint8), (257, np.uint16), (-1, np.int32)])
def test_an_unknown_number_is_named_with_its_file(value, kind):
    with pytest.raises(DataError) as caught:
        LABELS.apply(np.array([[1, value]], kind), FILE)

    expected = f"mask.png holds label {value}, expected 0-2, 5, 255; look again"
    assert str(caught.value) == expected


def test_the_palette_is_that_of_voc():
    # As published: aeroplane, tvmonitor, and the rim.
    assert voc_colours()[[1, 20, 255]].tolist() == [[128, 0, 0], [0, 64, 128], [224, 224, 192]]
