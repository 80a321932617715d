"""A record of a block is the same whichever other blocks were requested in the same run.

The contract tests check the default of every probe. These are settings with code of their own.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore
from tests.support.faults import SMALL, TINY, data_of_every_role, encoder_file

DATASETS = {
    "classification": "class_folders",
    "conditioning": "folder",
    "correspondence": "spair71k",
}
# Heads that end before they have converged, so that there is something to count.
CASES = {
    "correspondence": [*SMALL["correspondence"], "probe.protocol=spair"],
    "conditioning": ["probe.num_images=2", "probe.image_size=16", "probe.protocol=mean_log"],
    "conditioning spectra": ["probe.num_images=2", "probe.image_size=16"],
    "classification": [*SMALL["classification"], "probe.training.max_iterations=3"],
    "segmentation lbfgs": [
        "probe.image_size=32",
        "probe.training=lbfgs",
        "probe.training.max_iterations=3",
    ],
}
# How the run went, which is no part of a result.
OF_THE_RUN = ("created", "seconds")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A folder with an encoder of three blocks and images of every kind."""
    folder = tmp_path_factory.mktemp("blocks")
    data_of_every_role(folder / "data")
    encoder_file(folder / "encoder.safetensors", config=replace(TINY, depth=3))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def of_block_1(out: str) -> dict:
    store, found = ResultStore(Path(out)), {}
    for record in store.records():
        if record.layer == 1:
            content = {n: one for n, one in record.as_json().items() if n not in OF_THE_RUN}
            details = content["details"]
            content["details"] = {n: one for n, one in details.items() if n != "train_seconds"}
            per_image = store.per_image(record)
            images = None if per_image is None else np.asarray(per_image).tolist()
            found[record.facet, record.metric] = content, images
    return found


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * case.endswith("spectra")) for case in CASES],
)
def test_a_record_is_the_same_whichever_other_blocks_are_requested(workdir, case):
    task = case.partition(" ")[0]
    dataset = DATASETS.get(task, "voc2012")
    words = ["probe", "--task", task, "--dataset", dataset, "--data-root", f"data/{dataset}"]
    words += ["--checkpoint", "encoder.safetensors", *CASES[case]]
    alone, among = (f"{case} {name}" for name in ("alone", "among others"))

    assert main([*words, "--layer", "1", "--out", alone]) == 0
    assert main([*words, "--layer", "0,1,2", "--out", among]) == 0

    assert of_block_1(alone)
    assert of_block_1(among) == of_block_1(alone)
