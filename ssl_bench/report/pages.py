"""Collect the contents of a report, and the values that the template of each page needs."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ssl_bench.report.drawing import LARGE, SMALL, Chart, Curve, Point, Size, draw_chart
from ssl_bench.report.overview import (
    build_leaderboard,
    find_tied_checkpoints,
    group_block_tables,
    list_unreadable_images,
    list_winners,
    summarize_checkpoints,
    summarize_leaderboard,
)
from ssl_bench.report.pairs import Pair, PanelComparison, choose_pairs
from ssl_bench.report.panels import (
    PANEL_FIELDS,
    Checkpoint,
    ScoreLine,
    ScorePanel,
    explain_missing_values,
    find_main_metric,
    group_by_split,
    group_by_task,
    group_into_panels,
    list_checkpoints,
    make_point,
    mute_checkpoints,
    rank_checkpoints,
    select_main_panels,
)
from ssl_bench.report.pictures import (
    Gallery,
    PictureFiles,
    build_picture_sections,
    count_hits,
    find_galleries,
    keep_layers,
    label_image_sets,
    pair_galleries,
    select_strips,
)
from ssl_bench.report.runs import TrainingCurves, draw_runs
from ssl_bench.report.trends import PanelTrends, draw_severities, find_epoch_trends
from ssl_bench.results import Record, ResultStore
from ssl_bench.system.output import safe_file_name
from ssl_bench.tables.card import COST_NOTE, list_evaluations
from ssl_bench.tables.comparison import code_warning, difference_footnotes
from ssl_bench.tables.entries import explain_dagger, format_footnote, image_size_note
from ssl_bench.tables.published import PublishedValue, find_published_values
from ssl_bench.tables.run_logs import RunLog
from ssl_bench.tables.severities import SeverityTable
from ssl_bench.tables.styles import PALETTE
from ssl_bench.tables.tasks import task_texts

_MAX_UNFOLDED = 2

Page = dict[str, Any]
"""Values that a template can access under the name `page`."""


@dataclass(frozen=True)
class Report:
    """Contents of all pages of a report.

    Attributes:
        records: All records (stored scores) of the report. Pages refer to a record by its index.
        pairs: Pairs of checkpoints to compare, each on a page of its own.
        epochs: Scores over epochs, for each panel (group of comparable scores) with a run that was
            probed at several epochs.
        severities: Tables and charts of scores on corrupted images.
        galleries: Galleries of pictures, by encoder id.
        pictures: The picture files of the results folder.
        runs: Curves of training logs, or None without runs.
    """

    store: ResultStore
    records: tuple[Record, ...]
    checkpoints: tuple[Checkpoint, ...]
    panels: tuple[ScorePanel, ...]
    pairs: tuple[Pair, ...]
    epochs: tuple[PanelTrends, ...]
    severities: Sequence[tuple[SeverityTable, Chart]]
    galleries: Mapping[str, Sequence[Gallery]]
    pictures: PictureFiles
    runs: TrainingCurves | None = None

    @property
    def clean_panels(self) -> Sequence[ScorePanel]:
        return list_clean_panels(self.panels)

    @cached_property
    def summaries(self) -> Mapping[Checkpoint, Sequence[str]]:
        return summarize_checkpoints(self.store, self.clean_panels, self.checkpoints)

    def picture_paths(self) -> list[str]:
        every = (gallery for shown in self.galleries.values() for gallery in shown)
        return list(dict.fromkeys(path for gallery in every for path in gallery.paths()))


def list_clean_panels(panels: Sequence[ScorePanel]) -> Sequence[ScorePanel]:
    """Return the panels (groups of comparable scores) with scores on uncorrupted images.

    If all scores are on corrupted images, return all panels.
    """
    return [panel for panel in panels if not panel.is_corrupted] or panels


def build_report(
    store: ResultStore,
    records: Sequence[Record],
    id_pairs: Iterable[tuple[str, str]],
    *,
    layers: Set[int] | None = None,
    logs: Sequence[RunLog] = (),
) -> Report:
    """Collect the contents of a report on the given records.

    Args:
        store: Results folder with the records (stored scores) and per-image scores.
        records: The records to report.
        id_pairs: Pairs of encoder ids to compare. If it is empty, `choose_pairs` chooses pairs.
        layers: The blocks whose pictures are shown. None for all blocks.
        logs: Training logs of runs.

    Raises:
        ConfigurationError: A pair contains the same checkpoint twice.
    """
    checkpoints, pictures = list_checkpoints(records), PictureFiles(store.root)
    panels = group_into_panels(records, checkpoints)
    if len(checkpoints) > len(PALETTE):
        main_panels = select_main_panels(list_clean_panels(panels))
        best = rank_checkpoints(main_panels, checkpoints)[: len(PALETTE)]
        checkpoints = mute_checkpoints(checkpoints, best)
        panels = group_into_panels(records, checkpoints)
    galleries = {
        checkpoint.encoder_id: keep_layers(
            find_galleries(pictures, records, checkpoint), layers, checkpoint.depth
        )
        for checkpoint in checkpoints
    }
    return Report(
        store=store,
        records=tuple(records),
        checkpoints=checkpoints,
        panels=panels,
        pairs=tuple(choose_pairs(checkpoints, id_pairs)),
        epochs=find_epoch_trends(panels),
        severities=draw_severities(records),
        galleries=label_image_sets(galleries),
        pictures=pictures,
        runs=draw_runs(logs),
    )


def build_index_page(report: Report) -> Page:
    panels, checkpoints = report.panels, report.checkpoints
    leaderboard = build_leaderboard(report.clean_panels, checkpoints)
    main_panels, rows = leaderboard.panels, leaderboard.checkpoints
    entries = [
        entry
        for panel in main_panels
        for checkpoint in checkpoints
        if (entry := panel.find_main_entry(checkpoint))
    ]
    views = {panel.number: _build_panel_view(panel) for panel in panels}
    hits = count_hits(report.store, main_panels)
    places = Counter((panel.task, panel.split_name) for panel in main_panels)
    return {
        "num_records": len(report.records),
        "num_unreadable": len(report.store.unreadable),
        "checkpoints": checkpoints,
        "pairs": report.pairs,
        "summaries": [(one, report.summaries[one]) for one in rows if one in report.summaries],
        "leaderboard": leaderboard,
        "columns": [
            {
                "panel": panel,
                # If a task has several panels on the same split, the settings must tell them apart.
                "has_variant": places[panel.task, panel.split_name] > 1,
                "chart": _draw_lines(panel, _sort_lines(panel, rows), size=SMALL),
                "best": list_winners(panel),
                "tied": find_tied_checkpoints(report.store, panel),
            }
            for panel in main_panels
        ],
        "verdicts": summarize_leaderboard(main_panels),
        "has_baselines": any(panel.baselines for panel in main_panels),
        "has_degenerate": any(panel.metric == "degenerate" for panel in main_panels),
        "has_crosses": any(e.is_degenerate for panel in main_panels for e in panel.entries),
        "notes": [
            *list_unreadable_images(main_panels),
            explain_missing_values(entries),
            explain_dagger(entry.degenerate_percent for panel in panels for entry in panel.entries),
        ],
        "strips": select_strips(report.pictures, rows, report.galleries, main_panels, hits),
        "has_hits": any(hits.values()),
        "panels_with_epochs": {trends.panel.number for trends in report.epochs},
        "has_severities": bool(report.severities),
        "runs": report.runs,
        # If no score needs labels, the page shows the pictures before the tables.
        "has_labels": any(panel.has_labels for panel in panels),
        "has_skipless": any(checkpoint.is_skipless for checkpoint in checkpoints),
        "filters": _list_filters(panels),
        "sections": [
            {
                "task": task,
                "anchor": f"task-{safe_file_name(task)}",
                "description": task_texts(task).description,
                "groups": _group_views([views[panel.number] for panel in of_task]),
            }
            for task, of_task in group_by_task(panels).items()
        ],
    }


def _sort_lines(panel: ScorePanel, checkpoints: Sequence[Checkpoint]) -> list[ScoreLine]:
    """Return the drawn lines of a panel (a group of comparable scores) in drawing order.

    `checkpoints` is sorted from best to worst. The line of the best checkpoint comes last, so that
    this line is drawn on top.
    """
    return sorted(panel.drawn_lines, key=lambda line: -checkpoints.index(line.checkpoint))


def _draw_lines(
    panel: ScorePanel,
    lines: Sequence[ScoreLine],
    published: Sequence[tuple[str, float]] = (),
    *,
    size: Size = LARGE,
) -> Chart:
    has_labels = size == LARGE and len(lines) > 1
    curves = [
        Curve(
            line.checkpoint.name,
            line.checkpoint.style,
            line.checkpoint.number,
            [
                make_point(entry, entry.layer, f"{line.checkpoint.name}, block {entry.layer}")
                for entry in line.entries
            ],
            line.checkpoint.label if has_labels else "",
        )
        for line in lines
    ]
    return draw_chart(
        curves,
        published,
        panel.unit,
        y_label=panel.metric_label,
        baselines=panel.baselines,
        size=size,
    )


def _build_panel_view(panel: ScorePanel) -> dict[str, Any]:
    """Return the variables of the HTML template for one panel, including its chart.

    A panel is a group of comparable scores. The chart includes baselines, and published values that
    are inside the range of its axis.
    """
    lines = panel.drawn_lines
    # Make one table per source and description of the differences between the experiments.
    published: dict[tuple[str, str], list[PublishedValue]] = defaultdict(list)
    for value in find_published_values(panel.record):
        published[value.source, value.experiment_notes].append(value)
    # Published values refer to full datasets, so they are not drawn for subsets.
    heights = [
        (f"published: {value.row}, {value.column}, {value.value:.1f}", value.value)
        for values in published.values()
        for value in values
        if value.dataset == panel.dataset
    ]
    return {
        "panel": panel,
        "lines": lines,
        "chart": _draw_lines(panel, lines, heights),
        "reasons": explain_missing_values(panel.entries),
        "published": [
            {"source": source, "experiment_notes": notes, "rows": rows}
            for (source, notes), rows in published.items()
        ],
    }


def _group_views(views: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Group the panels of one task by split, and unfold the panels of the task's main metric.

    A panel is a group of comparable scores that is drawn as a chart. If a split has at most
    `_MAX_UNFOLDED` panels, all of them are unfolded. `views` contains the results of
    `_build_panel_view`.
    """
    groups = []
    for split_name, panels in group_by_split([view["panel"] for view in views]).items():
        of_split = [view for view in views if view["panel"].split_name == split_name]
        metric = find_main_metric(panels)
        shown, folded = [], []
        for view in of_split:
            panel = view["panel"]
            is_main = panel.metric == metric and panel.is_ranked
            is_shown = is_main or len(of_split) <= _MAX_UNFOLDED
            (shown if is_shown else folded).append(view)
        groups.append({"split_name": split_name, "views": shown, "folded": folded})
    return groups


def _list_filters(panels: Sequence[ScorePanel]) -> list[tuple[str, list[str]]]:
    """Return the fields by which panels of a page can be filtered, and the values of each field.

    A panel is a group of comparable scores. An example of a field and its values is ("task",
    ["knn", "tokencut"]).
    """
    return [(name, sorted({getattr(panel, name) for panel in panels})) for name in PANEL_FIELDS]


def build_checkpoint_page(report: Report, checkpoint: Checkpoint) -> Page:
    lines = [(p, line) for p in report.panels if (line := p.find_line(checkpoint)) is not None]
    panels = [panel for panel, _ in lines]
    entries = [entry for _, line in lines for entry in line.entries]
    classes = _build_class_tables(lines)
    ranked = {panel.task for panel in panels if panel.is_ranked}
    has_seeds = any(len(entry.records) > 1 for entry in entries)
    galleries = report.galleries[checkpoint.encoder_id]
    return {
        "checkpoint": checkpoint,
        "summary": report.summaries.get(checkpoint, []),
        "pairs": [pair for pair in report.pairs if checkpoint in pair],
        "galleries": build_picture_sections(
            report.pictures, [[(checkpoint.name, gallery)] for gallery in galleries]
        ),
        "has_labels": any(panel.has_labels for panel in panels),
        "scores": group_block_tables([(p, line) for p, line in lines if p.task in ranked]),
        "properties": group_block_tables([(p, line) for p, line in lines if p.task not in ranked]),
        "notes": [
            explain_dagger(entry.degenerate_percent for entry in entries),
            *list_unreadable_images(panels),
            explain_missing_values(entries),
        ],
        "classes_of_one_seed": has_seeds and bool(classes),
        "classes": classes,
        "evaluations": [
            {
                "evaluation": evaluation,
                "cost_texts": evaluation.cost_texts(),
                "footnote": format_footnote(evaluation.records),
                "settings": sorted(evaluation.records[0].settings.items()),
            }
            for evaluation in list_evaluations(
                [r for r in report.records if r.encoder_id == checkpoint.encoder_id]
            )
        ],
        "cost_note": COST_NOTE,
    }


def _build_class_tables(lines: Sequence[tuple[ScorePanel, ScoreLine]]) -> list[dict[str, Any]]:
    """Return tables with the IoU of each class (rows) at each block (columns) for one checkpoint.

    There is one table for each task, split, facet (kind of feature), protocol (preset of settings)
    and combination of other settings. If there are several mean IoU metrics, such as `miou_holdout`
    and `miou_oracle`, only the first metric has a table. Classes whose IoU is undefined at all
    blocks are counted but not shown. `lines` contains pairs of a panel (group of comparable scores)
    and the scores of the checkpoint in this panel.
    """
    tables: dict[tuple[str, ...], dict[str, Any]] = {}
    for panel, line in lines:
        key = (panel.task, panel.split_name, panel.facet, panel.protocol, panel.settings_text)
        by_entry = {
            entry: iou
            for entry in line.entries
            if isinstance(iou := entry.records[0].details.get("iou_by_class"), dict)
        }
        if key in tables or not panel.metric.startswith("miou") or not by_entry:
            continue
        names = dict.fromkeys(name for iou in by_entry.values() for name in iou)
        # The IoU of a class that is absent from the images is None.
        rows = [(name, [iou.get(name) for iou in by_entry.values()]) for name in names]
        present = [row for row in rows if any(value is not None for value in row[1])]
        tables[key] = {
            "panel": panel,
            "entries": list(by_entry),
            "rows": present,
            "num_absent": len(rows) - len(present),
        }
    return list(tables.values())


def build_pair_page(report: Report, pair: Pair, compared: Sequence[PanelComparison]) -> Page:
    first, second = pair
    order = [panel.number for of_task in group_by_task(report.panels).values() for panel in of_task]
    compared = sorted(compared, key=lambda comparison: order.index(comparison.panel.number))
    rows = [row for comparison in compared for row in (*comparison.blocks, *comparison.summary)]
    galleries = pair_galleries(
        report.galleries[first.encoder_id], report.galleries[second.encoder_id]
    )
    return {
        "pair": pair,
        "views": [_draw_comparison(pair, comparison) for comparison in compared],
        "warning": code_warning(comparison.table for comparison in compared),
        "galleries": build_picture_sections(
            report.pictures,
            [[(first.name, left), (second.name, right)] for left, right in galleries],
        ),
        "dagger": explain_dagger(
            percent for row in rows for percent in row.difference.degenerate_percents
        ),
    }


def _draw_comparison(pair: Pair, comparison: PanelComparison) -> dict[str, Any]:
    differences = [row.difference for row in comparison.blocks]
    points = [
        Point(
            int(row.name), row.value, row.low, row.high, f"block {row.name}: {row.text}",
            row.is_degenerate,
        )
        for row in differences
        if row.name.isdigit()
    ]  # fmt: skip
    curve = Curve(pair.first.name, pair.first.style, pair.first.number, points)
    y_label = f"difference in {comparison.panel.metric} (points)"
    records = [r for row in comparison.blocks for r in (*row.first, *row.second)]
    return {
        "comparison": comparison,
        "chart": draw_chart([curve], y_label=y_label) if points else None,
        "sizes": image_size_note(records),
        "notes": [*difference_footnotes([differences]), comparison.panel.footnote],
    }


def build_runs_page(runs: TrainingCurves) -> Page:
    every = (*runs.panels, *runs.folded)
    filters = [("metric", [panel.measure for panel in every])]
    return {"runs": runs, "filters": filters}


def build_epochs_page(epochs: Sequence[PanelTrends]) -> Page:
    panels = [trends.panel for trends in epochs]
    drawn = sorted(
        (run for trends in epochs for run in trends.drawn_trends), key=lambda run: run.depth
    )
    # The legend shows the style that each block has in the deepest encoder.
    blocks = {curve.number: curve for run in drawn for curve in run.make_curves()}
    return {
        "panels": epochs,
        "blocks": [curve for _, curve in sorted(blocks.items())],
        "filters": _list_filters(panels),
    }
