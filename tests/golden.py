"""Check that an edit of the code does not change any score.

    python -m tests.golden write FILE       # takes minutes on one core
    python -m tests.golden compare FILE     # prints each value that differs, and exits with 1

The program trains six small encoders and runs all probes on these encoders. The numbers are
bitwise identical only on the same machine with the same version of PyTorch.
"""

import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors.numpy import load_file
from sklearn.datasets import load_sample_images

from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore
from tests.support.runs import log_rows

TINY = (
    *("model.dim=32", "model.depth=3", "model.num_heads=2", "model.image_size=32"),
    *("model.patch_size=8", "train.batch_size=4", "optimizer.lr=1e-3"),
)
OBJECTIVES = {
    "dino": ("objective.out_dim=64", "objective.hidden_dim=32", "objective.crops.num_locals=2"),
    "mae": ("objective=mae",),
    "supervised": ("objective=supervised", "--data-root", "photographs"),
}
FEW = (
    *("--limit", "12", "probe.protocol=fast", "probe.training.epochs=2", "probe.image_size=64"),
    *("probe.memory_patches=500", "probe.view_images=4", "probe.num_images=2"),
)


def compute_values(folder: Path) -> dict[str, Any]:
    """Train and probe small encoders, and return all computed numbers."""
    values: dict[str, Any] = {}
    photographs, runs = _save_photographs(folder / "photographs"), list[str]()
    for objective, options in OBJECTIVES.items():
        for model in ("skip", "skipless"):
            run = folder / f"{objective}_{model}"
            words = [f"model=vit_tiny_{model}", *TINY, *options, "--out", str(run)]
            for steps, more in ((5, []), (10, ["--resume", "--extend"])):
                _run("pretrain", *words, f"train.max_steps={steps}", *more)
            values |= {f"{run.name} {row.get('step')}": row for row in log_rows(run)}
            values[f"{run.name} weights"] = {
                name: hashlib.sha256(tensor.tobytes()).hexdigest()[:16]
                for name, tensor in load_file(run / "last.safetensors").items()
            }
            runs += ["--checkpoint", str(run)]
    encoders = [*runs, "--checkpoint", "demo:skip,demo:skipless", "--out", str(folder / "results")]
    _run("probe", "--task", "all", "--dataset", "toy", *FEW, *encoders)
    _run("probe", "--task", "all", "--dataset", "toy_objects", "--limit", "24", *encoders)
    root = ["--dataset", "folder", "--data-root", str(photographs)]
    _run("probe", "--task", "all", *root, "probe.num_images=2", *encoders)
    for record in ResultStore(folder / "results").records():
        name = f"{record.model} {record.task} {record.dataset} {record.protocol} {record.seed}"
        name += f" {record.layer} {record.facet} {record.metric}"
        values[name] = [record.value, record.ci95]
    return values


def _run(*words: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(list(words))
    if code:
        sys.exit(f"exit code {code} of ssl-bench {' '.join(words)}")


def _save_photographs(folder: Path) -> Path:
    """Save crops of two photographs from scikit-learn as a dataset with two classes."""
    for number, pixels in enumerate(load_sample_images().images):
        parent = folder / f"class{number}"
        parent.mkdir(parents=True)
        for part in range(4):
            top, left = 150 * (part // 2), 240 * (part % 2)
            image = Image.fromarray(pixels[top : top + 160, left : left + 240])
            image.save(parent / f"{part}.png")
    return folder


def _compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    lines = [f"gone: {name}" for name in before.keys() - after.keys()]
    lines += [f"new: {name}" for name in after.keys() - before.keys()]
    lines += [
        f"{name}: {before[name]} -> {after[name]}"
        for name in before.keys() & after.keys()
        if before[name] != after[name]
    ]
    print("\n".join([*sorted(lines), f"{len(before)} values, {len(lines)} differ"]))
    return 1 if lines else 0


if __name__ == "__main__":
    mode, file = sys.argv[1], Path(sys.argv[2]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        # JSON changes tuples to lists, so that values equal those that are read from a file.
        values = json.loads(json.dumps(compute_values(Path(folder))))
    if mode == "write":
        file.write_text(json.dumps(values, indent=1) + "\n")
        print(f"{len(values)} values in {file}")
    else:
        sys.exit(_compare(json.loads(file.read_text()), values))
