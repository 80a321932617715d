"""Measure the speed and memory use of ssl-bench on a GPU, in about nine minutes.

Run `make gpu-report`, `make gpu-report ONLY=heads` or this command:

    python -m tests.benchmarks.gpu_report [--out results/devices] [--only training,heads]

Each section runs in a separate process, so a crash does not affect other sections. Each measurement
or error is saved immediately. The results are written to `results/devices/GPU.json` and to a page
in the same folder. Without a GPU, tiny inputs are used to test the program. The program needs no
network and no dataset.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from ssl_bench.system.device import choose_device
from tests.benchmarks.provenance import provenance

CUDA = torch.cuda.is_available()
CORES = len(os.sched_getaffinity(0))
DEVICE = torch.device("cuda" if CUDA else "cpu")
ROOT = Path(__file__).parents[2]
FOUND: dict[str, Any] = {}
OUT = Path(os.environ.get("GPU_REPORT_SECTION", os.devnull))
SECONDS = float(os.environ.get("GPU_REPORT_SECONDS", "600"))


def save_entry(name: str, /, **values: Any) -> None:
    """Add measured values to the report and print them."""
    FOUND[name] = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
    OUT.write_text(json.dumps(FOUND, indent=1))
    print(f"  {name}: {json.dumps(FOUND[name])[:300]}", flush=True)


@contextmanager
def save_errors(name: str) -> Any:
    """Save an exception of the `with` block in the report instead of raising it."""
    try:
        if CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        yield
    except Exception as error:
        message = f"{type(error).__name__}: {error}"[:300]
        save_entry(name, error=message, trace=traceback.format_exc()[-900:])


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def milliseconds(work: Callable[[], Any], times: int = 10, warm_up: int = 2) -> float:
    """Return the median duration of a call in milliseconds, including the work on the GPU."""
    durations = []
    for turn in range(warm_up + times):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        durations += [1e3 * (time.perf_counter() - start)] * (turn >= warm_up)
    return median(durations)


def kernels(work: Callable[[], Any], count: int) -> list[list[Any]]:
    """List the slowest kernels with their time (ms), number of launches and name."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if CUDA else activity.CPU]) as profile:
        work()
        synchronize()
    time_of = attrgetter(f"self_{'device' if CUDA else 'cpu'}_time_total")
    rows = [r for r in profile.key_averages() if time_of(r) > 0 and "#" not in r.key]
    rows = [r for r in rows if not CUDA or str(r.device_type).endswith("CUDA")]
    rows.sort(key=time_of, reverse=True)
    total = sum(map(time_of, rows)), sum(r.count for r in rows), "all"
    table = [total, *((time_of(r), r.count, r.key[:70]) for r in rows[:count])]
    return [[round(float(t) / 1e3, 3), launches, name] for t, launches, name in table]


def environment() -> None:
    name = torch.cuda.get_device_name() if CUDA else "no GPU"
    save_entry("device", name=name, cuda=torch.version.cuda, cores=CORES)
    side = 8192 if CUDA else 256
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        a = torch.randn(side, side, device=DEVICE).to(dtype)
        duration = milliseconds(lambda a=a: a @ a, 5)
        save_entry(f"product in {str(dtype)[6:]}", tflops=2 * side**3 / duration / 1e9)
    x = torch.randn(side**2 * 4, device=DEVICE)
    duration = milliseconds(lambda: x.clone(), 5)
    save_entry("copy on the device", tb_per_s=2 * x.nbytes / duration / 1e9)
    pinned = torch.empty(side**2 * 4, dtype=torch.uint8, pin_memory=CUDA)
    duration = milliseconds(lambda: pinned.to(DEVICE), 5)
    save_entry("copy to the device", gb_per_s=pinned.nbytes / duration / 1e6)


def operations() -> None:
    """Measure the speed of single operations, such as a k-NN search."""
    from pretrain.optimizers import soap
    from ssl_bench.models.graying import gray_by_cholesky, gray_by_svd
    from ssl_bench.neighbours import nearest_vectors

    generator = torch.Generator().manual_seed(0)
    for members, size in ((12, 384), (12, 1152), (12, 1536), (1, 2048)) if CUDA else ((2, 24),):
        with save_errors(name := f"SOAP basis {members} x {size}"):
            g = torch.randn(members, size, 2 * size, generator=generator).to(DEVICE)
            statistics = (g * torch.logspace(0, -3, 2 * size, device=DEVICE)) @ g.mT
            basis = torch.linalg.qr(torch.randn(members, size, size, device=DEVICE)).Q
            for _ in range(3):
                basis = torch.linalg.qr(statistics @ basis).Q
            power = statistics @ basis
            q, exact = soap._compute_q(power, basis), torch.linalg.qr(power).Q
            save_entry(
                name,
                ms=milliseconds(lambda p=power, b=basis: soap._compute_q(p, b), 5),
                qr_ms=milliseconds(lambda p=power: torch.linalg.qr(p), 3, 1),
                eigh_ms=milliseconds(lambda s=statistics: torch.linalg.eigh(s), 1, 1),
                error=float((q.mT @ q - torch.eye(size, device=DEVICE)).abs().max()),
                columns_as_qr=float(((q * exact).sum(-2).abs() > 0.99).float().mean()),
            )
    with save_errors(name := "graying by SVD, 512 images"):
        x = torch.randn(512 if CUDA else 4, 197, 384, generator=generator).to(DEVICE)
        gray, exact = gray_by_cholesky(x, 0.8), gray_by_svd(x[:4].double().cpu(), 0.8)
        error = float((gray[:4].double().cpu() - exact).norm() / exact.norm())
        duration = milliseconds(lambda: gray_by_cholesky(x, 0.8), 3)
        save_entry(name, error=error, gib=peak_gib(), ms=duration)
    with save_errors(name := "k-NN of ImageNet"):
        memory, queries = (
            torch.nn.functional.normalize(torch.randn(n, 384, device=DEVICE), dim=1)
            for n in ((1_281_167, 2048) if CUDA else (4000, 64))
        )
        duration = milliseconds(lambda: nearest_vectors(queries, memory, 200), 2, 1)
        save_entry(name, seconds_for_50k=50 * duration / len(queries), gib=peak_gib())


def training(timed: int = 40) -> None:
    """Measure the speed of DINO training with several models, optimizers and batch sizes."""
    from pretrain.distributed import TrainingRanks
    from pretrain.objectives.dino import Dino
    from pretrain.optimizers.recipes import AdamW, Soap
    from pretrain.options import TrainOptions
    from pretrain.schedules import Timeline
    from pretrain.step import Trainer
    from ssl_bench.models import ViTConfig
    from tests.benchmarks.pretrain import Setting

    tiny: dict[str, Any] = (
        {} if CUDA else {"image_size": 32, "patch_size": 8, "dim": 24, "depth": 2, "num_heads": 2}
    )
    heads: dict[str, Any] = {} if CUDA else {"out_dim": 64, "hidden_dim": 32, "bottleneck_dim": 16}
    objective, timeline, usual = Dino(**heads), Timeline(100_000, 1_000), 256 if CUDA else 4
    bare: dict[str, Any] = {"skip_attention": False, "skip_mlp": False, "init": "skipless"}
    for name, model, recipe, compiled, batch in (
        ("skip, AdamW", ViTConfig(**tiny), AdamW(), CUDA, usual),
        ("skip, SOAP", ViTConfig(**tiny), Soap(), CUDA, usual),
        ("skip, AdamW, batch 320", ViTConfig(**tiny), AdamW(), CUDA, usual * 5 // 4),
        ("skip, AdamW, not compiled", ViTConfig(**tiny), AdamW(), False, usual),
        ("skipless, SOAP", ViTConfig(**tiny, **bare), Soap(), CUDA, usual),
        ("skipless, AdamW", ViTConfig(**tiny, **bare), AdamW(), CUDA, usual),
    ):
        with save_errors(name):
            torch._dynamo.reset()
            groups = Setting(DEVICE, model, objective, batch).groups()
            options = TrainOptions(batch_size=batch, compile=compiled, precision="bfloat16")
            learner, ranks = objective.build(model, timeline, seed=0), TrainingRanks(device=DEVICE)
            trainer = Trainer(learner, recipe, options, timeline, ranks)

            def augment(groups: Any = groups) -> Any:
                return objective.crops.augment_on_device(groups, DEVICE)

            def step(number: int, trainer: Any = trainer, augment: Any = augment) -> float:
                return trainer.take_step(number, (augment() for _ in range(1)))["loss"]

            start = time.perf_counter()
            losses = [float(step(number)) for number in range(50_000, 50_003)]
            first = time.perf_counter() - start
            for number in range(3):
                step(50_003 + number)
            turn = milliseconds(lambda step=step: [step(50_006 + n) for n in range(timed)], 1, 0)
            duration = turn / timed
            table = kernels(lambda step=step: [step(70_000 + n) for n in range(10)], 60)
            save_entry(
                name, images_per_s=1e3 * batch / duration, ms=duration,
                mfu=trainer.utilisation(duration / 1e3), gib=peak_gib(), first_three_s=first,
                augmentation_ms=milliseconds(augment, 5), losses=losses,
                # The time outside of kernels, divided by the number of kernels.
                gap_us=1e3 * (10 * duration - table[0][0]) / table[0][1],
                kernels=table, augmentation=kernels(augment, 40),
            )  # fmt: skip
            del trainer, learner, step


def extraction() -> None:
    """Measure how fast a ViT-S/16 extracts tokens in several dtypes."""
    from ssl_bench.features import FeatureExtractor
    from ssl_bench.models import ViTConfig, build_vit, encoder_from_model

    encoder = encoder_from_model(build_vit(ViTConfig(), seed=0), name="random")
    for size, batch in ((224, 128), (512, 32)) if CUDA else ((32, 2),):
        images, exact = torch.rand(batch, 3, size, size, pin_memory=CUDA), None
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            with save_errors(name := f"{size} pixels, {str(dtype)[6:]}"):
                extractor = FeatureExtractor(
                    encoder, layers=range(12), facets=["token"], device=DEVICE, dtype=dtype
                )
                last = extractor(images)[11]["token"].double()
                exact = last if exact is None else exact
                extract = partial(extractor.extract_unchecked, images)
                save_entry(
                    name, images_per_s=1e3 * batch / milliseconds(extract, 5),
                    difference=float((last - exact).norm() / exact.norm()), gib=peak_gib(),
                    kernels=kernels(extract, 20),
                )  # fmt: skip


def heads() -> None:
    """Measure the duration of one training step for 96 linear heads."""
    from probes.heads.losses import HistogramLoss, UpsampledLoss
    from probes.heads.sgd import LinearHeads, Standardization, update_heads
    from probes.segmentation import Segmentation

    for classes, side, batch in ((21, 28, 16), (150, 32, 4)) if CUDA else ((5, 4, 2),):
        x = torch.randn(12, batch, side, side, 384, device=DEVICE).half()
        labels = torch.randint(classes, (batch, 4 * side, 4 * side), device=DEVICE).byte()
        for name, loss in (("pixels", UpsampledLoss(4)), ("histograms", HistogramLoss())):
            with save_errors(title := f"{classes} classes, {name}"):
                training: Any = Segmentation().training
                ones = torch.ones(12, 384, device=DEVICE)
                optimizer, _ = training.optimizer_and_schedule()
                rates = torch.tensor(training.values, device=DEVICE)
                heads = LinearHeads.initialize(
                    Standardization(torch.zeros_like(ones), ones),
                    num_values=len(rates), classes=classes, seed=0,
                )  # fmt: skip
                targets = loss.targets(labels, classes, (side, side))
                inputs: Any = (heads, x, loss, targets, optimizer, rates, [{}, {}])

                def step(inputs: Any = inputs) -> None:
                    heads, x, loss, targets, optimizer, rates, states = inputs
                    _, gradients = heads.loss_and_gradients(x, loss, targets)
                    update_heads(optimizer, heads.parameters, gradients, states, rates, step=1)

                save_entry(
                    title, ms=milliseconds(step, 5), heads=12 * len(training.values),
                    gib=peak_gib(), kernels=kernels(step, 12),
                )  # fmt: skip


def commands() -> None:
    """Measure the run time of the commands `pretrain` and `probe`."""
    from PIL import Image

    folder, rng = Path(tempfile.mkdtemp()), np.random.default_rng(0)
    for number in range(1536 if CUDA else 24):
        low = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        path = folder / ("train" if number % 8 else "val") / f"c{number % 3}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        low.resize((500, 375), Image.Resampling.BICUBIC).save(path, quality=90)
    small = [] if CUDA else ["model=vit_tiny_skip", "model.depth=2", "objective.out_dim=64"]
    run = ["pretrain", "--data-root", f"{folder}/train", "--out", f"{folder}/run", *small]
    run += [f"train.batch_size={256 if CUDA else 4}", "train.max_steps=16", "train.epochs=100"]
    probe = ["probe", "--task", "knn", "--dataset", "class_folders", "--data-root", str(folder)]
    probe += ["--checkpoint", f"{folder}/run", "--layer", "all", "--out", f"{folder}/results"]
    for words, share in ((run, 0.7), ([*probe, "probe.neighbours=[5]", "probe.engine=torch"], 0.2)):
        with save_errors(words[0]):
            start = time.perf_counter()
            code, text = run_command(["ssl_bench", *words], share * SECONDS)
            values: dict[str, Any] = {"exit": code, "seconds": time.perf_counter() - start}
            log = folder / "run/log.jsonl"
            if words[0] == "pretrain" and log.exists():
                last = json.loads(log.read_text().splitlines()[-1])
                values |= {k: last[k] for k in ("images_per_second", "data_wait", "mfu")}
            save_entry(words[0], **values, last=text[-600:])


def run_command(words: Sequence[str], seconds: float) -> tuple[int | str, str]:
    """Run a Python module for at most `seconds`. Return the exit code and the output."""
    with tempfile.TemporaryFile("w+") as output:
        try:
            code: int | str = subprocess.run(
                [sys.executable, "-m", *words],
                stdout=output, stderr=output, check=False, cwd=ROOT, timeout=seconds,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = f"cut off after {seconds:.0f} s"
        output.seek(0)
        return code, output.read()


def gpu_tests() -> None:
    # Print a line for each test, although pyproject.toml sets a shorter format.
    words = ["-m", "gpu", "-vv", "-n", str(min(16, CORES)), "-p", "no:cacheprovider", "tests"]
    code, text = run_command(["pytest", *words], 0.95 * SECONDS)
    ends = re.findall(r"^\[gw\d+\].* (PASSED|FAILED|ERROR|SKIPPED) (\S+)", text, re.MULTILINE)
    counts = Counter(end.lower() for end, _ in ends)
    bad = [test for end, test in ends if end in ("FAILED", "ERROR")]
    save_entry("gpu tests", exit=code, **counts, bad=", ".join(bad)[:600], last=text[-600:])


SECTIONS: dict[str, tuple[Callable[[], None], int]] = {
    "environment": (environment, 20),
    "training": (training, 220),
    "commands": (commands, 125),
    "gpu tests": (gpu_tests, 100),
    "operations": (operations, 25),
    "extraction": (extraction, 25),
    "heads": (heads, 25),
}
"""Sections by decreasing importance, with their shares of the remaining time."""


def page(folder: Path) -> str:
    """Return a Markdown page about all measured GPUs."""
    text = (
        "# GPUs that were measured\n\nCompare your GPU with these. `make gpu-report` makes this "
        "page. The JSON files in the same folder contain all figures.\n"
    )
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text())
        text += f"\n## {file.stem}\n\n{content['said']}\n"
        for section, entries in content["sections"].items():
            rows = [
                f"| {name} | {', '.join(f'{k} {v}' for k, v in values.items() if _is_short(v))} |"
                for name, values in entries.items()
                if any(map(_is_short, values.values()))
            ]
            text += "\n".join(["", f"| {section} | |", "|---|---|", *rows, ""])
    return text


def _is_short(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and 0 < len(value) < 60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "results/devices")
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--commit", help="the commit, if .git is absent or has another one")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section:
        choose_device(None)
        SECTIONS[options.section][0]()
        return
    start, scratch = time.monotonic(), Path(tempfile.mkdtemp())
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name().replace(" ", "_") if CUDA else "no_GPU"
    text = provenance()
    if options.commit:
        text = re.sub(r"commit \S+(?=,)", f"commit {options.commit}", text, count=1)
    content: dict[str, Any] = {"said": text, "sections": {}}
    names = options.only.split(",")
    for number, name in enumerate(names):
        left = options.seconds - (time.monotonic() - start)
        if left < 15:
            continue
        print(f"{name}: {left:.0f} s left", flush=True)
        file = scratch / f"{name}.json"
        words = [sys.executable, "-m", "tests.benchmarks.gpu_report", "--section", name]
        share = SECTIONS[name][1] / sum(SECTIONS[n][1] for n in names[number:])
        limit = left * share if CUDA else left
        variables = {"GPU_REPORT_SECTION": str(file), "GPU_REPORT_SECONDS": str(limit)}
        try:
            code = subprocess.run(
                words, check=False, env=os.environ | variables, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"cut off after {limit:.0f} s"
        entries = json.loads(file.read_text()) if file.exists() else {}
        content["sections"][name] = entries | ({"ended": {"exit": code}} if code else {})
        (options.out / f"{device}.json").write_text(json.dumps(content, indent=1) + "\n")
        (options.out / "README.md").write_text(page(options.out))
    print(f"{options.out}/README.md, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
