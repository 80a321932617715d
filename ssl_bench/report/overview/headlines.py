"""The one metric that stands for a task where there is room for one."""

from collections import defaultdict
from collections.abc import Sequence

from ssl_bench.layers import INNER_FACETS
from ssl_bench.report.model import Panel

FIRST_TASKS = ("segmentation", "tokencut")
"""The tasks that readers come for stand first."""

_METRICS = (
    "miou_holdout",
    "ap50",
    "corloc",
    "max_f_beta",
    "miou",
    "top1_holdout",
    "top1_k20",
    "top1",
    "pck_0.1",
    "ami",
    "nmi",
    "explained_variance",
    "condition_number",
    "rankme",
)


def headline_metric(panels: Sequence[Panel]) -> str:
    """The metric that stands for a task: of the known ones, or the first in which more is better.

    Args:
        panels: Of one task.
    """
    return chosen_metric([(panel.metric, panel.is_ranked) for panel in panels])


def chosen_metric(known: Sequence[tuple[str, bool]]) -> str:
    """As `headline_metric`, of names of metrics and whether more of them is better."""
    metrics = [metric for metric, _ in sorted(known, key=lambda one: not one[1])]
    return next((metric for metric in _METRICS if metric in metrics), metrics[0])


def headline_panels(panels: Sequence[Panel]) -> tuple[Panel, ...]:
    """Of each task and split of a dataset the panel of its metric with the most checkpoints.

    Then, of checkpoints that it lacks, as those that were seen in another protocol, the next one,
    so that none is without its number. Of equals it is that with the most blocks, so a look at one
    does not take the place of a run over all; then that of the protocol as it is; then by its
    facet's name, one from inside of a block last, so that a run again changes nothing; then, as
    before and after an image was replaced, the newer one.
    """

    def weight(panel: Panel) -> tuple[int, int, int, bool, str, str]:
        size = -len(panel.lines), -len(panel.layers), panel.num_changed
        return *size, panel.facet in INNER_FACETS, panel.facet, panel.protocol

    chosen = []
    for those in by_task(panels).values():
        # Boxes and masks of one task have metrics of their own.
        for rivals in by_place(those).values():
            metric, shown = headline_metric(rivals), set[int]()
            newest_first = sorted(rivals, key=lambda panel: panel.newest, reverse=True)
            for panel in sorted(newest_first, key=weight):
                there = {line.checkpoint.number for line in panel.lines}
                if panel.metric == metric and not there <= shown:
                    chosen.append(panel)
                    shown |= there
    return tuple(chosen)


def by_place(panels: Sequence[Panel]) -> dict[str, list[Panel]]:
    """Panels of a task by split of a dataset."""
    places: dict[str, list[Panel]] = defaultdict(list)
    for panel in panels:
        places[panel.where].append(panel)
    return places


def by_task(panels: Sequence[Panel]) -> dict[str, list[Panel]]:
    """Panels by task: the first ones, those in which more is better, others with few panels."""
    tasks: dict[str, list[Panel]] = defaultdict(list)
    for panel in panels:
        tasks[panel.task].append(panel)

    def place(task: str) -> tuple[int, int]:
        first = FIRST_TASKS.index(task) if task in FIRST_TASKS else len(FIRST_TASKS)
        is_ranked = any(panel.is_ranked for panel in tasks[task])
        return first, 0 if is_ranked else len(tasks[task])

    return {task: tasks[task] for task in sorted(tasks, key=place)}
