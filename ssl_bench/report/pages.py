"""What is known of some records, and what of it stands on each page, ready for the templates."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from ssl_bench.report.comparing import (
    Extremes,
    Pair,
    PanelPair,
    extremes_of,
    outcomes_of,
    pairs_of,
)
from ssl_bench.report.courses import (
    PanelCourses,
    corrupted_scores,
    followed_panels,
)
from ssl_bench.report.drawing import Chart, Curve, Spot, draw
from ssl_bench.report.model import (
    PANEL_FIELDS,
    Checkpoint,
    Line,
    Panel,
    by_place,
    by_task,
    group_into_panels,
    headline_metric,
    list_checkpoints,
    said_reasons,
    said_units,
    spot_of,
)
from ssl_bench.report.overview import (
    MEANINGS,
    Profile,
    block_groups,
    board_of,
    differing,
    profiles_of,
)
from ssl_bench.report.pictures import (
    Gallery,
    PictureFiles,
    galleries_of,
    gallery_pairs,
    of_layers,
    sections_of,
    strips_of,
    told_apart,
)
from ssl_bench.results import Record, ResultStore
from ssl_bench.system.escaping import safe_file_name
from ssl_bench.system.paths import figure_file_name, short_fingerprint
from ssl_bench.tables.comparison import difference_footnotes
from ssl_bench.tables.entries import dagger_meaning, footnote, image_size_note
from ssl_bench.tables.published import PublishedValue, find_published_values
from ssl_bench.tables.severities import SeverityTable

MOST_UNFOLDED = 2
"""Of more panels on one split of a dataset only those of the headline metric stand open."""

Page = dict[str, Any]
"""The names that a template knows under `page`."""


@dataclass(frozen=True)
class Report:
    """Everything that goes into the pages.

    Attributes:
        records: Others refer to them by their place here.
        followed: Panels with runs of several epochs.
        corrupted: Scores of corrupted images.
        galleries: By id of the encoder.
        pictures: Those of the folder of results.
    """

    store: ResultStore
    records: tuple[Record, ...]
    checkpoints: tuple[Checkpoint, ...]
    panels: tuple[Panel, ...]
    pairs: tuple[Pair, ...]
    followed: tuple[PanelCourses, ...]
    corrupted: Sequence[tuple[SeverityTable, Chart]]
    galleries: Mapping[str, Sequence[Gallery]]
    pictures: PictureFiles

    @property
    def plain(self) -> Sequence[Panel]:
        """One number a task: of images as they are, where there are any."""
        return [panel for panel in self.panels if not panel.is_corrupted] or self.panels

    @cached_property
    def profiles(self) -> Mapping[Checkpoint, Profile]:
        found = profiles_of(self.store, self.plain, self.checkpoints)
        return {profile.checkpoint: profile for profile in found}

    def picture_paths(self) -> list[str]:
        """Paths relative to the store, each once."""
        found = (p for galleries in self.galleries.values() for g in galleries for p in g.paths())
        return list(dict.fromkeys(found))


def build_report(
    store: ResultStore,
    records: Sequence[Record],
    asked_pairs: Iterable[tuple[str, str]],
    *,
    layers: Set[int] | None = None,
) -> Report:
    """Gather what is known of some records.

    Of pictures of single blocks those of `layers` alone, below 0 from the last block on.

    Raises:
        ConfigurationError: a pair names a checkpoint that is not there.
    """
    checkpoints, pictures = list_checkpoints(records), PictureFiles(store.root)
    panels = group_into_panels(records, checkpoints)
    galleries = {
        one.encoder_id: of_layers(galleries_of(pictures, records, one), layers, one.depth)
        for one in checkpoints
    }
    return Report(
        store=store,
        records=tuple(records),
        checkpoints=checkpoints,
        panels=panels,
        pairs=tuple(pairs_of(checkpoints, asked_pairs)),
        followed=followed_panels(panels),
        corrupted=corrupted_scores(records),
        galleries=told_apart(galleries),
        pictures=pictures,
    )


def index_page(report: Report) -> Page:
    """The overview: one number a task, a few pictures, all curves and all numbers."""
    panels, board = report.panels, board_of(report.plain, report.checkpoints)
    shown = [
        point for p, _ in board["columns"] for c in report.checkpoints if (point := p.shown(c))
    ]
    views = {panel.number: _panel_view(panel) for panel in panels}
    ranked = by_task([panel for panel in panels if panel.is_ranked])
    return {
        "num_records": len(report.records),
        "num_unreadable": len(report.store.unreadable),
        "checkpoints": report.checkpoints,
        "pairs": report.pairs,
        "profiles": list(report.profiles.values()),
        "board": board,
        "has_baselines": any(panel.baselines for panel, _ in board["columns"]),
        "reasons": said_reasons(shown),
        "has_degenerate": any(p.metric == "degenerate" for p, _ in board["columns"]),
        "strips": strips_of(
            report.checkpoints, report.galleries, [panel.record for panel, _ in board["columns"]]
        ),
        # Numbers of the panels that the page on epochs follows runs in.
        "followed": {one.panel.number for one in report.followed},
        "has_corrupted": bool(report.corrupted),
        # Whether there is more to read than to look at.
        "has_labels": any(panel.has_labels for panel in panels),
        "has_skipless": any(checkpoint.skipless for checkpoint in report.checkpoints),
        "dagger": dagger_meaning(
            point.degenerate_percent for panel in panels for point in panel.points
        ),
        "filters": _filters(panels),
        "sections": [
            {
                "task": task,
                "anchor": f"task-{safe_file_name(task)}",
                "meaning": MEANINGS.get(task, ""),
                "groups": _groups([views[panel.number] for panel in those]),
            }
            for task, those in by_task(panels).items()
        ],
        # Scores of which more is better, a table a task.
        "measured": [
            {"task": task, "panels": those, "facts": differing([p.facts for p in those])}
            for task, those in ranked.items()
        ],
    }


def _panel_view(panel: Panel) -> dict[str, Any]:
    """Draw a panel with the published values of its dataset that its axes hold."""
    curves = [
        Curve(
            line.checkpoint.name,
            line.checkpoint.style,
            line.checkpoint.number,
            tuple(
                spot_of(point, point.layer, f"{line.checkpoint.name}, block {point.layer}")
                for point in line.points
            ),
            line.checkpoint.label if len(panel.drawn) > 1 else "",
        )
        for line in panel.drawn
    ]
    # By the table of a paper that they are of, and what differs there.
    published: dict[tuple[str, str], list[PublishedValue]] = defaultdict(list)
    for beside in find_published_values(panel.record):
        published[beside.source, beside.differs].append(beside)
    levels = [
        (f"published: {value.row}, {value.column}, {value.value:.1f}", value.value)
        for those in published.values()
        for value in those
        # Not beside a part of the dataset.
        if value.dataset == panel.dataset
    ]
    floors = panel.baselines
    chart = draw(curves, levels, panel.unit, measured=panel.measured, floors=floors)
    return {
        "panel": panel,
        "lines": panel.drawn,
        "chart": chart,
        "reasons": said_reasons(panel.points),
        "published": [
            {"source": source, "differs": differs, "rows": rows}
            for (source, differs), rows in published.items()
        ],
    }


def _groups(views: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By split of a dataset; folded is what is not of the metric, and what more is not better of.

    But for the panels of a task that has a few of them.
    """
    groups = []
    for where, panels in by_place([view["panel"] for view in views]).items():
        those = [view for view in views if view["panel"].where == where]
        metric = headline_metric(panels)
        shown = [v for v in those if v["panel"].metric == metric and v["panel"].is_ranked]
        if len(those) <= MOST_UNFOLDED:
            shown = those
        folded = [view for view in those if not any(view is other for other in shown)]
        groups.append({"where": where, "views": shown, "folded": folded})
    return groups


def _filters(panels: Sequence[Panel]) -> list[tuple[str, list[str]]]:
    """The fields that readers choose panels by, and their values."""
    return [(name, sorted({getattr(panel, name) for panel in panels})) for name in PANEL_FIELDS]


def checkpoint_page(report: Report, checkpoint: Checkpoint) -> Page:
    """Everything about one checkpoint: its scores, pictures, single images and settings."""
    store = report.store
    lines = [(p, line) for p in report.panels if (line := p.line(checkpoint)) is not None]
    points = [point for _, line in lines for point in line.points]
    galleries = report.galleries[checkpoint.encoder_id]
    outcomes = [
        (panel, found) for panel, line in lines if (found := outcomes_of(store, panel, line))
    ]
    extremes = [
        _shown(found, galleries)
        for panel, line in lines
        if (found := extremes_of(store, panel, line))
    ]
    classes = _class_tables(lines)
    ranked = {panel.task for panel, _ in lines if panel.is_ranked}
    several = any(len(point.records) > 1 for point in points)
    return {
        "checkpoint": checkpoint,
        "profile": report.profiles.get(checkpoint),
        "pairs": [p for p in report.pairs if checkpoint in (p.first, p.second)],
        "galleries": sections_of([[(checkpoint.name, gallery)] for gallery in galleries]),
        "has_labels": any(panel.has_labels for panel, _ in lines),
        # Of tasks in which more is better, and of all others.
        "scores": block_groups([one for one in lines if one[0].task in ranked]),
        "properties": block_groups([one for one in lines if one[0].task not in ranked]),
        "units": said_units([panel for panel, _ in lines]),
        "reasons": said_reasons(points),
        "dagger": dagger_meaning(point.degenerate_percent for point in points),
        "has_one_seed_of_several": several and bool(outcomes or extremes or classes),
        "outcomes": outcomes,
        "extremes": extremes,
        "classes": classes,
        "runs": _runs([one for one in report.records if one.encoder_id == checkpoint.encoder_id]),
    }


def _shown(extremes: Extremes, galleries: Sequence[Gallery]) -> dict[str, Any]:
    """Extremes with the addresses of those images that are drawn."""
    panel, digits = extremes.panel, short_fingerprint(extremes.panel.record.dataset_fingerprint)
    shown = (panel.task, panel.dataset, digits, f"{panel.protocol} {panel.facet}")
    found = {
        PurePosixPath(gallery.files[image]).name: gallery.address_of(image)
        for gallery in galleries
        if (gallery.task, gallery.dataset, gallery.images, gallery.variant) == shown
        for image in gallery.files
    }
    starts = ("", f"{panel.protocol}-{panel.facet}-")

    def address(image: str) -> str:
        names = (figure_file_name(image, before=start) for start in starts)
        return next((found[name] for name in names if name in found), "")

    sides = (("worst", extremes.worst), ("best", extremes.best))
    return {
        "extremes": extremes,
        "sides": [
            (kind, [(image, value, address(image)) for image, value in scores])
            for kind, scores in sides
        ],
    }


def _class_tables(lines: Sequence[tuple[Panel, Line]]) -> list[dict[str, Any]]:
    """One table a dataset, protocol and facet: the first mean IoU of them, which is held out.

    Classes that are absent at every block are counted only.
    """
    tables: dict[tuple[str, ...], dict[str, Any]] = {}
    for panel, line in lines:
        where = (panel.task, panel.where, panel.facet, panel.protocol, panel.difference)
        found = {
            point: iou
            for point in line.points
            if isinstance(iou := point.records[0].details.get("iou_by_class"), dict)
        }
        if where in tables or not panel.metric.startswith("miou") or not found:
            continue
        names = dict.fromkeys(name for iou in found.values() for name in iou)
        # None where a class is absent.
        rows = [(name, [iou.get(name) for iou in found.values()]) for name in names]
        present = [row for row in rows if any(value is not None for value in row[1])]
        tables[where] = {
            "panel": panel,
            "points": list(found),
            "rows": present,
            "num_absent": len(rows) - len(present),
        }
    return list(tables.values())


def _runs(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Settings of some records, each once."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        title = (
            f"{record.task} on {record.dataset} {record.split}, protocol {record.protocol_label}"
        )
        same = (record.dataset_fingerprint, sorted(record.settings.items()))
        groups[title, repr(same)].append(record)
    return [
        {
            "title": title,
            "footnote": footnote(members),
            "fingerprint": members[0].dataset_fingerprint,
            "settings": [(n, str(value)) for n, value in sorted(members[0].settings.items())],
        }
        for (title, _), members in sorted(groups.items())
    ]


def pair_page(report: Report, pair: Pair, compared: Sequence[PanelPair]) -> Page:
    """Two checkpoints side by side, their differences drawn block by block."""
    first, second = pair.first, pair.second
    shared = gallery_pairs(report.galleries[first.encoder_id], report.galleries[second.encoder_id])
    order = [panel.number for those in by_task(report.panels).values() for panel in those]
    views = []
    for one in sorted(compared, key=lambda one: order.index(one.panel.number)):
        differences = [row.difference for row in one.rows]
        spots = tuple(
            Spot(int(d.name), d.value, d.low, d.high, f"block {d.name}: {d.text}", d.is_degenerate)
            for d in differences
            if d.name.isdigit()
        )
        curve = Curve(first.name, first.style, first.number, spots)
        measured = f"difference in {one.panel.metric} (points)"
        chart = draw([curve], measured=measured) if spots else None
        seen = image_size_note([record for row in one.rows for record in (*row.first, *row.second)])
        marks = difference_footnotes([differences])
        views.append({"compared": one, "chart": chart, "seen": seen, "marks": marks})
    sides = [[(first.name, one), (second.name, other)] for one, other in shared]
    rows = [row.difference for one in compared for row in (*one.rows, *one.summary)]
    return {
        "pair": pair,
        "views": views,
        "galleries": sections_of(sides),
        "dagger": dagger_meaning(percent for row in rows for percent in row.degenerate),
    }


def epochs_page(followed: Sequence[PanelCourses]) -> Page:
    """Scores over epochs, panel by panel."""
    panels = [one.panel for one in followed]
    courses = sorted((course for one in followed for course in one.shown), key=lambda c: c.depth)
    # A curve of each block, of the deepest encoder that has it.
    blocks = {curve.number: curve for course in courses for curve in course.curves()}
    return {
        "followed": followed,
        "blocks": [curve for _, curve in sorted(blocks.items())],
        "filters": _filters(panels),
        "units": said_units(panels),
    }
