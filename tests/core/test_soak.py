"""One process that works for long: memory and open files stay where they were."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pretrain.checkpoints import save_state
from ssl_bench.data.layouts.folder import ImageFolder
from ssl_bench.evaluation import Evaluation
from ssl_bench.models import build_vit, load_encoder, save_encoder
from ssl_bench.results import ResultStore
from tests.support.faults import TINY, encoder_file, photo_folder, unchecked_types

CELLS, SAVES = 300, 300
# A quarter of what a leak of one small image or one file handle a cell would add.
GROWTH_MIB, MORE_FILES = 7.2, 2


def _held() -> tuple[float, int]:
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return resident / 1024, len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    with unchecked_types():
        yield


@pytest.mark.slow
def test_hundreds_of_cells_leave_memory_and_open_files_flat(tmp_path):
    from probes.pca import PCA

    encoder = load_encoder(str(encoder_file(tmp_path / "encoder.safetensors")))
    dataset = ImageFolder(photo_folder(tmp_path / "photos", 1))
    store, done, before = ResultStore(tmp_path / "results"), 0, (0.0, 0)

    def cells(seed: int) -> int:
        evaluation = Evaluation(
            encoder=encoder, dataset=dataset, probe=PCA(panels=1, image_size=16),
            layers=(0, 1), seed=seed, device=torch.device("cpu"), dtype=torch.float32,
        )  # fmt: skip
        return len(evaluation.run(store, say=lambda _: None))

    while done < CELLS:
        done += cells(seed=done)
        if done == CELLS // 10:
            before = _held()

    after = _held()
    assert len(store.records()) == CELLS
    assert after[0] - before[0] < GROWTH_MIB
    assert after[1] - before[1] < MORE_FILES


@pytest.mark.slow
def test_hundreds_of_saves_leave_memory_and_open_files_flat(tmp_path):
    model, before = build_vit(TINY, seed=0), (0.0, 0)
    for step in range(SAVES):
        with torch.no_grad():
            model.get_parameter("cls_token").add_(1)
        save_encoder(tmp_path / "last.safetensors", model, {"step": str(step)})
        save_state(tmp_path, {"step": step, "learner": model.state_dict()})
        load_encoder(str(tmp_path / "last.safetensors"))
        if step == SAVES // 10:
            before = _held()

    after = _held()
    assert after[0] - before[0] < GROWTH_MIB
    assert after[1] - before[1] < MORE_FILES
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "last.safetensors", "last.safetensors.sha256",
        "state.previous.pt", "state.pt", "state.pt.sha256",
    ]  # fmt: skip
