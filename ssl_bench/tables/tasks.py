"""Texts that describe tasks in tables and reports, read from `configs/report`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import yaml

from ssl_bench.composition.choices import config_folder


@dataclass(frozen=True)
class TaskTexts:
    """Texts for a task in tables and reports. Tasks of plugins have the default values.

    Attributes:
        title: Name of the task as written at the start of a sentence. If empty, the name on the
            command line is used.
        description: What the task measures, and whether a higher score is better.
        caption: What the pictures of the task show.
        metrics: Text for each main metric, by metric name. The first metric that was measured
            represents the task in overviews.
        strip_tile: For pictures that consist of several tiles (images), the index of the tile that
            a strip shows. A strip is a row of small pictures in a report.
        finds_objects: Whether the score of each image states how well an object was found in it.
        rank: Sort key for the pictures of tasks in a report. Tasks of equal rank are sorted by
            name.
    """

    title: str = ""
    description: str = ""
    caption: str = ""
    metrics: Mapping[str, str] = field(default_factory=dict)
    strip_tile: int | None = None
    finds_objects: bool = False
    rank: int = 0


@cache
def task_texts(task: str) -> TaskTexts:
    path = config_folder() / "report" / f"{task}.yaml"
    if "/" in task or not path.is_file():
        return TaskTexts()
    return TaskTexts(**yaml.safe_load(path.read_text(encoding="utf-8")))
