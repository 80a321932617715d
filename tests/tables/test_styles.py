"""Test that an encoder has the same colour in all figures."""

from dataclasses import replace
from itertools import pairwise

import pytest

from ssl_bench.report.panels import list_checkpoints
from ssl_bench.results import Baseline
from ssl_bench.tables.depth import depth_tables, epoch_tables
from ssl_bench.tables.drawing import curves_figure
from ssl_bench.tables.styles import DASHES, PALETTE, choose_styles
from tests.core.test_results import RECORD

NAMES = [f"vit{number}" for number in range(4 * len(PALETTE))]
NUM_STYLES = len(PALETTE) * len(DASHES)


def test_an_encoder_keeps_its_colour_next_to_others():
    single = {name: choose_styles({name: False})[name] for name in NAMES}
    for first, second in pairwise(NAMES):
        both = choose_styles({second: False, first: False})
        assert both[first] == single[first]
        assert (both[second] == single[second]) == (single[first].colour != single[second].colour)
    assert len({style.colour for style in single.values()}) > len(PALETTE) / 2


@pytest.mark.parametrize("count", [2, len(PALETTE), NUM_STYLES, len(NAMES)])
def test_encoders_of_a_figure_differ_in_any_order(count):
    names = NAMES[:count]

    styles = choose_styles(dict.fromkeys(names, False))

    assert styles == choose_styles(dict.fromkeys(reversed(names), False))
    # More encoders than pairs of a colour and dashes share their styles.
    assert len({style.css for style in styles.values()}) == min(count, NUM_STYLES)
    assert len({str(style.line) for style in styles.values()}) == min(count, NUM_STYLES)
    assert len({style.colour for style in styles.values()}) == min(count, len(PALETTE))


def make_records(*names: str):
    details = Baseline("centre box", 31.04).as_details()
    encoders = [
        replace(RECORD, model=name, checkpoint_sha256=f"{number}" * 64, details=details)
        for number, name in enumerate(names)
    ]
    return [replace(encoder, layer=layer) for encoder in encoders for layer in (0, 3, 11)]


def test_a_figure_has_the_colours_and_dashes_of_the_report():
    records = make_records("net", "skipless", "vit")

    (axis,) = curves_figure(depth_tables(records)).axes

    assert [line.get_linestyle() for line in axis.lines[:3]] == ["-", "--", "-"]
    for line, checkpoint in zip(axis.lines[:3], list_checkpoints(records), strict=True):
        assert f"c{PALETTE.index(line.get_color())} " in checkpoint.style


def test_a_legend_has_the_order_of_the_names():
    both = make_records("vit2", "vit10")
    # The first panel has only the encoder with the last name.
    single = [replace(record, dataset="first") for record in both if record.model == "vit10"]

    figure = curves_figure(depth_tables([*single, *both]))

    assert [len(axis.get_lines()) for axis in figure.axes] == [2, 3]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["vit2", "vit10"]


def test_ticks_are_probed_blocks_or_epochs_and_baselines_are_labelled():
    (axis,) = curves_figure(depth_tables(make_records("vit"))).axes
    assert list(axis.get_xticks()) == [0, 3, 11]
    assert [text.get_text() for text in axis.texts] == ["centre box 31.0"]

    many = [replace(make_records("vit")[0], layer=layer) for layer in range(32)]
    (axis,) = curves_figure(depth_tables(many)).axes
    assert list(axis.get_xticks()) == [*range(0, 32, 3)]

    epochs = {f"run@{epoch:g}": {"epoch": epoch} for epoch in (0.5, 1.0, 3.0)}
    first_blocks = make_records(*epochs)[::3]
    (axis,) = curves_figure(
        epoch_tables([replace(one, details=epochs[one.model]) for one in first_blocks])
    ).axes
    assert list(axis.get_xticks()) == [1.0, 3.0]
