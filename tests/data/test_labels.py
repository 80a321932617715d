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

    classes = LABELS.apply(stored, FILE)

    assert classes.dtype == np.uint8
    assert classes.tolist() == [[255, 0], [1, 2], [255, 0]]


def test_classes_come_out_the_same_from_wider_files():
    stored = np.array([[0, 5]], np.int32)

    assert LABELS.apply(stored, FILE).tolist() == [[255, 2]]


@pytest.mark.parametrize(
    ("stored", "value"),
    [
        (np.array([[1, 3]], np.uint8), 3),
        (np.array([[1, 257]], np.uint16), 257),
        (np.array([[1, -1]], np.int32), -1),
    ],
)
def test_an_unknown_number_is_named_with_its_file(stored, value):
    with pytest.raises(DataError) as caught:
        LABELS.apply(stored, FILE)

    expected = f"mask.png holds label {value}, expected 0-2, 5, 255; look again"
    assert str(caught.value) == expected


def test_the_palette_is_that_of_voc():
    # As published: aeroplane, tvmonitor, and the rim.
    assert voc_colours()[[1, 20, 255]].tolist() == [[128, 0, 0], [0, 64, 128], [224, 224, 192]]
