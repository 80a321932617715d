"""Test that a long-running process does not leak memory or open files."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pretrain.checkpoints import save_state
from probes.pca import PCA
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.evaluation import Evaluation
from ssl_bench.models import build_vit, load_encoder, save_encoder
from ssl_bench.results import ResultStore
from tests.support.faults import TINY, encoder_file, photo_folder, unchecked_types

ROUNDS = 150
# A quarter of what a leak of 107 KB or of one open file in each round would add.
GROWTH_MIB, MORE_FILES = 3.6, 2


def measure_resources() -> tuple[float, int]:
    """Return the memory use (MiB) and the number of open files of this process."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return resident / 1024, len(list(Path("/proc/self/fd").iterdir()))


def assert_constant_resources(work: Callable[[int], object]) -> None:
    before = measure_resources()
    with unchecked_types():
        for number in range(ROUNDS):
            work(number)
            if number == ROUNDS // 10:
                before = measure_resources()
    after = measure_resources()
    assert after[0] - before[0] < GROWTH_MIB
    assert after[1] - before[1] < MORE_FILES


@pytest.mark.slow
def test_hundreds_of_results_leave_memory_and_open_files_flat(tmp_path):
    encoder = load_encoder(str(encoder_file(tmp_path / "encoder.safetensors")))
    dataset = ImageFolder(photo_folder(tmp_path / "photos", 1))
    store = ResultStore(tmp_path / "results")

    def evaluate(seed: int) -> None:
        evaluation = Evaluation(
            encoder=encoder, dataset=dataset, probe=PCA(panels=1, image_size=16),
            layers=(0,), seed=seed, device=torch.device("cpu"), dtype=torch.float32,
        )  # fmt: skip
        evaluation.run(store, say=lambda _: None)

    assert_constant_resources(evaluate)
    assert len(store.records()) == ROUNDS


@pytest.mark.slow
def test_hundreds_of_saves_leave_memory_and_open_files_flat(tmp_path):
    model = build_vit(TINY, seed=0)

    def save(step: int) -> None:
        with torch.no_grad():
            model.get_parameter("cls_token").add_(1)
        save_encoder(tmp_path / "last.safetensors", model, {"step": str(step)})
        save_state(tmp_path, {"step": step, "learner": model.state_dict()})
        load_encoder(str(tmp_path / "last.safetensors"))

    assert_constant_resources(save)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "last.safetensors", "last.safetensors.sha256",
        "state.previous.pt", "state.pt", "state.pt.sha256",
    ]  # fmt: skip
