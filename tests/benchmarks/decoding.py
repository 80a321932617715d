"""What decoding at reduced scale would change, and whether threads or processes decode faster.

    python -m tests.benchmarks.decoding FOLDER --json FILE [--table FILE]

FOLDER holds JPEG files. A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size for a fraction of the
work; `worst` is the largest difference, in grey levels, between a picture resized from that and one
resized from the whole, its median over the files, and `within` how many files stay within half a
grey level. Files are taken as they are and enlarged three times, as photographs of a camera are.
"""

import argparse
import io
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image

from probes.features.views import resized
from tests.benchmarks.provenance import provenance

REDUCED = {2: cv2.IMREAD_REDUCED_COLOR_2, 4: cv2.IMREAD_REDUCED_COLOR_4}
SIZES, ENLARGED, WORKERS = (112, 224, 512), (1, 3), 2


def encoded(path: Path, times: int) -> bytes:
    with Image.open(path) as picture:
        image = picture.convert("RGB")
    if times > 1:
        image = image.resize((image.width * times, image.height * times), Image.Resampling.BICUBIC)
    content = io.BytesIO()
    image.save(content, "JPEG", quality=92)
    return content.getvalue()


def decoded(content: bytes, size: int, flag: int = cv2.IMREAD_COLOR) -> torch.Tensor:
    """Grey levels, "3 size size"."""
    image = cv2.imdecode(np.frombuffer(content, np.uint8), flag)
    assert image is not None
    pixels = torch.from_numpy(cv2.cvtColor(image, cv2.COLOR_BGR2RGB)).permute(2, 0, 1)
    return 255 * resized(pixels.float() / 255, size, size)


def differences(files: Sequence[Path]) -> list[dict[str, Any]]:
    rows = []
    for times in ENLARGED:
        contents = [encoded(path, times) for path in files]
        for size in SIZES:
            whole = [decoded(content, size) for content in contents]
            for scale, flag in REDUCED.items():
                worst = [
                    float((decoded(content, size, flag) - one).abs().max())
                    for content, one in zip(contents, whole, strict=True)
                ]
                within = sum(one <= 0.5 for one in worst)
                row = {"enlarged": times, "size": size, "scale": scale, "files": len(worst)}
                rows.append({**row, "worst": median(worst), "within": within})
    return rows


def rate(contents: Sequence[bytes], pool: Callable[[], Executor] | None) -> float:
    """Images a second, once the workers are there."""
    work = partial(decoded, size=512)
    if pool is None:
        start = time.perf_counter()
        for content in contents:
            work(content)
        return len(contents) / (time.perf_counter() - start)
    with pool() as workers:
        list(workers.map(work, contents[:8]))
        start = time.perf_counter()
        for _ in workers.map(work, contents, chunksize=4):
            pass
        return len(contents) / (time.perf_counter() - start)


def rates(files: Sequence[Path]) -> dict[str, float]:
    contents = [encoded(path, 1) for path in files] * 4
    cv2.setNumThreads(1)
    start = partial(ProcessPoolExecutor, WORKERS, initializer=_alone)
    return {
        "alone": rate(contents, None),
        "threads": rate(contents, lambda: ThreadPoolExecutor(WORKERS)),
        "processes": rate(contents, start),
    }


def _alone() -> None:
    cv2.setNumThreads(1)
    torch.set_num_threads(1)


def page(found: dict[str, Any]) -> str:
    lines = [
        "# Decoding",
        "",
        "Made by `tests/benchmarks/decoding.py`. A JPEG decoded at a part of its scale and",
        "resized, beside one decoded whole and resized: largest difference of a picture in grey",
        "levels (median over the files), and how many stay within half a grey level.",
        "",
        found["provenance"],
        "",
        "| enlarged | to pixels | scale | files | worst | within .5 |",
        "|---:|---:|---|---:|---:|---:|",
    ]
    for row in found["differences"]:
        lines.append(
            f"| x {row['enlarged']} | {row['size']} | 1/{row['scale']} | {row['files']} | "
            f"{row['worst']:.1f} | {row['within']} |"
        )
    speeds = ", ".join(f"{name} {value:.0f}" for name, value in found["rates"].items())
    lines += ["", f"Images a second to 512 pixels, {WORKERS} workers: {speeds}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", type=int, default=40)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    files = sorted(options.folder.rglob("*.jpg"))[: options.files]
    found = {
        "provenance": provenance(),
        "differences": differences(files),
        "rates": rates(files),
    }
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.table:
        options.table.write_text(page(found))
    print(page(found))


if __name__ == "__main__":
    main()
