"""MaskCut and LOST against the code of their authors, run from clones of their repositories.

    git clone --recurse-submodules https://github.com/facebookresearch/CutLER
    git clone https://github.com/valeoai/LOST
    python -m tests.benchmarks.discovery_originals --cutler CutLER --lost LOST --images FOLDER

Every photograph is resized to 30 x 30 patches, since theirs is for square images. MaskCut with tau
.15 and N = 3, masks before their conditional random field, on graphs whose gap lambda_3 - lambda_2
(the spectrum of the normalised cut lies in [0, 2]) exceeds 1e-3 in all rounds. `sign` counts where
their masks change with the sign of the eigenvectors, `LAPACK` where the sign that came gives ours.
LOST: boxes, theirs as it is and with a stable sort. --golden prints the numbers of the tests.
"""

import argparse
import importlib.util
import json
import sys
import types
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from PIL import Image
from torch import Tensor

from probes.tokencut.lost import lost
from probes.tokencut.maskcut import maskcut
from probes.tokencut.options import Cut, PatchGrid
from ssl_bench.features import FeatureExtractor
from ssl_bench.models import load_encoder
from tests.benchmarks.provenance import provenance
from tests.benchmarks.tokencut import print_table, random_encoder
from tests.support.scenes import mosaic

SIDE, TAU, CLEAR_GAP = 30, 0.15, 1e-3
LOST_SEEDS, MASKCUT_SEEDS = (4, 5, 16, 23), (0, 1, 3, 8, 15, 19)
Masks = list[Bool[np.ndarray, "rows cols"]]


@dataclass
class Original:
    """The authors' modules, and what their eigensolver said last."""

    maskcut: Any
    lost: Any

    def __post_init__(self) -> None:
        self.gaps: list[float] = []
        self._eigh, self._sign, self._argsort = self.maskcut.eigh, 0, torch.argsort
        self.maskcut.eigh = self._observed

    def masks(self, features: Tensor, sign: int) -> Masks:
        """Masks with a patch; every eigenvector's peak has this sign, 0 for the one that comes."""
        rows, cols, dim = features.shape
        self.gaps, self._sign = [], sign
        columns = features.reshape(-1, dim).T.contiguous()
        size = [rows, cols], [1, 1], [rows, cols]
        _, found, _ = self.maskcut.maskcut_forward(columns, *size, TAU, N=3, cpu=True)
        return [mask > 0 for mask in found if mask.any()]

    def box(self, features: Tensor, *, num_candidates: int, stable: bool) -> list[float]:
        rows, cols, dim = features.shape
        tokens, size = features.reshape(1, -1, dim), [3, 10 * rows, 10 * cols]
        self.lost.torch.argsort = partial(self._argsort, stable=stable)
        try:
            return self.lost.lost(tokens, [rows, cols], [10, 10], size, num_candidates)[0].tolist()
        finally:
            self.lost.torch.argsort = self._argsort

    def _observed(self, *matrices: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        values, vectors = self._eigh(*matrices, **options)
        self.gaps.append(float(values[1] - values[0]))
        peak = vectors[np.argmax(abs(vectors[:, 0])), 0]
        return values, vectors * (self._sign * np.sign(peak) if self._sign else 1)


@contextmanager
def stand_ins(*names: str):
    """Modules that the authors' files import and these functions do without."""
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = []
        module.__getattr__ = lambda _: None  # type: ignore[method-assign]
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def loaded(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def original(cutler: Path, lost_folder: Path) -> Original:
    sys.path.insert(0, str(cutler / "third_party"))
    with stand_ins("dino", "crf", "pycocotools", "pycocotools.mask", "datasets"):
        masks = loaded(cutler / "maskcut" / "maskcut.py", "original_maskcut")
        return Original(masks, loaded(lost_folder / "object_discovery.py", "original_lost"))


def words(masks: Sequence[Bool[np.ndarray, "rows cols"]]) -> list[str]:
    return [np.packbits(mask).tobytes().hex() for mask in masks]


def golden(theirs: Original) -> dict[str, Any]:
    boxes = {seed: theirs.box(mosaic(seed), num_candidates=20, stable=False) for seed in LOST_SEEDS}
    masks = {seed: words(theirs.masks(mosaic(seed), sign=1)) for seed in MASKCUT_SEEDS}
    return {"lost": boxes, "maskcut": masks}


def compared(features: Tensor, theirs: Original) -> dict[str, bool]:
    """What holds of one graph; `clear` of those alone that have the gap."""
    grid = PatchGrid(10 * SIDE, 10 * SIDE, 10)
    ours = words([one.mask for one in maskcut(features, grid, Cut(tau=TAU))])
    signed = {sign: words(theirs.masks(features, sign)) for sign in (1, -1, 0)}
    clear, box = min(theirs.gaps) > CLEAR_GAP, lost(features, grid)
    stable, unstable = (
        theirs.box(features, num_candidates=100, stable=stable) == box.box.tolist()
        for stable in (True, False)
    )
    return {
        "clear": clear,
        "same masks": clear and signed[1] == ours,
        "LAPACK": clear and signed[0] == ours,
        "sign": signed[1] != signed[-1],
        "LOST, stable": stable,
        "LOST": unstable,
        "differs unflagged": not (unstable or box.degenerate or box.tied_cutoff),
    }


def graphs_of(encoder: Any, layer: int, paths: Sequence[Path]) -> list[Tensor]:
    extractor = FeatureExtractor(encoder, layers=[layer], facets=("key",))
    found = []
    for path in paths:
        with Image.open(path) as file:
            image = file.convert("RGB").resize([SIDE * encoder.patch_size] * 2)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255
        features = extractor(pixels)[layer]["key"][0].float()
        # Centred: of an encoder that learned little all patches are alike.
        found.append(features - features.mean((0, 1)))
    return found


def rows_of(arguments: argparse.Namespace, theirs: Original) -> list[dict[str, Any]]:
    encoders = [random_encoder(16, depth=6), *map(load_encoder, arguments.checkpoint)]
    paths = sorted(arguments.images.rglob("*.jpg"))
    rows = []
    for encoder in encoders:
        for layer in (0, encoder.depth - 1):
            found = [compared(one, theirs) for one in graphs_of(encoder, layer, paths)]
            counts = {key: sum(one[key] for one in found) for key in found[0]}
            rows.append({"encoder": encoder.name, "block": layer, "graphs": len(found), **counts})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--cutler", type=Path, required=True)
    parser.add_argument("--lost", type=Path, required=True)
    parser.add_argument("--images", type=Path, help="a folder of JPEGs")
    parser.add_argument("--checkpoint", action="append", default=[])
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--golden", action="store_true")
    arguments = parser.parse_args()
    theirs = original(arguments.cutler, arguments.lost)
    if arguments.golden:
        print(json.dumps(golden(theirs), indent=1))
        return
    print(provenance())
    rows = rows_of(arguments, theirs)
    print_table("MaskCut and LOST on graphs of photographs, against their authors' code", rows)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"provenance": provenance(), "originals": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
