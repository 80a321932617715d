"""From counts to seconds and tables."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ssl_bench.cli.__main__ import main
from ssl_bench.composition.choices import choices
from ssl_bench.cost.asked import asked_work
from ssl_bench.cost.counting import Count, Operation
from ssl_bench.cost.devices import DEVICES
from ssl_bench.cost.roofline import seconds, seconds_of
from ssl_bench.cost.this_machine import measured_device
from tests.benchmarks.cost_model import check_table, prediction_table

ROOT = Path(__file__).parents[2]
PRODUCT = Operation("mm", 7e12, 4e9, "product", dtype=torch.bfloat16)
H100 = replace(DEVICES["h100"], bfloat16=1e15, bandwidth=2e12, launch=1e-5, wait=1e-3)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (PRODUCT, 7e12 / (0.7 * 1e15)),
        (replace(PRODUCT, flops=7e11), 4e9 / 2e12),
        (replace(PRODUCT, flops=0.0, num_bytes=8.0), 1e-5),
        (Operation("_to_copy", 0.0, 0.0, link_bytes=64e9), 1.0),
    ],
)
def test_an_operation_takes_what_binds_it(one, expected):
    assert seconds_of(one, H100) == pytest.approx(expected)


def test_operations_follow_each_other_and_waits_come_on_top():
    asked = Count({PRODUCT: 3})

    assert seconds(asked, H100, waits=2) == pytest.approx(3 * 0.01 + 2 * 1e-3)


def test_more_bandwidth_is_never_slower():
    one = replace(PRODUCT, flops=1e11)
    taken = [seconds_of(one, replace(H100, bandwidth=b)) for b in (1e11, 1e12, 1e13, 1e14)]

    assert taken == sorted(taken, reverse=True)
    assert taken[0] > taken[-1]


def test_float32_has_the_rate_that_torch_is_set_to(monkeypatch):
    exact = H100.peak(torch.float32)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")

    assert (exact, H100.peak(torch.float32)) == (H100.float32, H100.tf32)


def test_all_work_has_its_real_size():
    works = asked_work("all", [])

    assert list(works) == choices("cost")
    assert works["pretrain_dino"].images == 1_281_167
    assert works["segmentation_ade20k"].images == 22_210
    assert all(unit.times > 0 for work in works.values() for unit in work.units(80e9))


def test_waits_are_those_that_were_counted():
    counted = json.loads((ROOT / "results/benchmarks/device_waits.json").read_text())["after"]
    waits = {name: counts["waits"] for name, counts in counted["counts"].items()}
    works = asked_work("all", [])
    found = {name: [unit.waits for unit in work.units(80e9)] for name, work in works.items()}

    cached, scored = waits["feature cache, batch"], waits["scored segmentation, batch, squash"]
    step = waits["heads' step, upsample4"]
    assert found["segmentation_voc2012"] == [cached, step, 0, scored]
    assert found["retrieval_voc2012"] == [cached, waits["scored retrieval, batch"]]
    assert found["tokencut_voc2007"] == [waits["TokenCut, batch"]]
    assert found["knn_imagenet"][0] == waits["k-NN and classification, batch"]
    assert found["pca"] == [waits["PCA, image"]]
    assert found["pretrain_dino"] == [waits["step of a run, dino"]]


def test_the_command_prints_predictions_and_marks_them(capsys):
    words = ["cost", "--work", "pca", "--device", "h100,a100", "cost.probe.num_images=3"]

    assert main([*words, "cost.model.depth=1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("| work, predicted | H100 SXM | A100 SXM 80GB |\n")
    assert "| pca | image | H100 SXM | 3 |" in out
    assert main(["cost", "--work", "pca", "--device", "h1000"]) == 2


@pytest.mark.parametrize(
    ("name", "page"), [("cost_model", check_table), ("cost_predictions", prediction_table)]
)
def test_pages_are_what_the_code_prints(name, page):
    record = json.loads((ROOT / f"results/benchmarks/{name}.json").read_text())

    assert (ROOT / f"results/tables/{name}.md").read_text() == page(record)


@pytest.mark.slow
def test_rates_of_this_machine_are_those_of_a_processor():
    found = measured_device(torch.device("cpu"), 1e9)

    assert found.float64 < found.float32 < 1e13
    assert 1e8 < found.bandwidth < 1e12
    assert 1e-7 < found.launch < 1e-3
