"""The one metric that stands for a task where there is room for one."""

from collections import defaultdict
from collections.abc import Sequence

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
    """One a task and split of a dataset: of its metric, with the most checkpoints and blocks.

    One with boxes and one with masks of the same task have different metrics. A look at one block
    does not take the place of a run over all of them; nor, of two such runs, one with a changed
    option that of the protocol as it is. Of two that are alike in this, as before and after an
    image was replaced, it is the newer one.
    """

    def weight(panel: Panel) -> tuple[int, int, int, str]:
        return len(panel.lines), len(panel.layers), -panel.num_changed, panel.newest

    chosen = []
    for those in by_task(panels).values():
        for rivals in by_place(those).values():
            metric = headline_metric(rivals)
            chosen.append(max((one for one in rivals if one.metric == metric), key=weight))
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
