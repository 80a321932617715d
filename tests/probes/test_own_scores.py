"""Test the scores of user-defined probes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.errors import ConfigurationError
from ssl_bench.evaluation import Probe, ProbeContext, Score
from ssl_bench.intervals import mean_estimate
from ssl_bench.models import ViTConfig, build_vit, encoder_from_model
from ssl_bench.results import ResultStore
from tests.support.photographs import evaluate_probe, noise_photographs

INTERVAL = (60.0, 70.0)


@dataclass(frozen=True)
class Brightness(Probe):
    """A user-defined probe that measures the brightness of images."""

    protocol: str = "plain"

    # Commands must know the name of the task.
    task, role = "correspondence", "images"
    has_per_image_values = True

    def list_score_keys(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [(n, "token", metric) for n in layers for metric in ("percent", "level", "odd")]

    def scored_images(self, dataset: Dataset) -> ImageSet:
        return dataset.images()

    def run(self, context: ProbeContext) -> Iterator[Score]:
        images = self.scored_images(context.dataset)
        levels = np.array([images[n].image.mean() for n in range(len(images))], np.float32)
        for layer in context.layers:
            percent = levels / 2.55 + layer
            found, mean = mean_estimate(percent), float(levels.mean())
            cell, count = (layer, "token"), len(images)
            yield Score(*cell, "percent", found.value, found.ci95(), count, per_image=percent)
            yield Score(*cell, "level", mean, None, count, per_image=levels, unit="")
            # The interval does not contain the value.
            values = {"details": {"note": "even"}, "per_image": 0 * levels + 50}
            yield Score(*cell, "odd", 50.0, INTERVAL, count, **values)


@pytest.fixture
def run_probe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photographs = noise_photographs(tmp_path / "photos")
    config = ViTConfig(image_size=32, patch_size=8, dim=12, depth=2, num_heads=2)

    def run(name: str = "a", seed: int = 0, probe: Probe | None = None) -> list[str]:
        encoder = encoder_from_model(build_vit(config, seed=seed), name=name)
        messages, store = [], ResultStore(Path("results"))
        evaluate_probe(
            probe or Brightness(), photographs, store, encoder, (0, 1),
            say=messages.append, overwrite=False,
        )  # fmt: skip
        return messages

    return run


def test_percentages_of_images_are_stored_and_compared(run_probe, capsys):
    (line,) = [line for line in run_probe() if "layers" in line]
    assert line.endswith(": layers 0, 1")
    words = ["compare", "a", "--metric", "percent"]

    assert main(words) == 0

    shown = capsys.readouterr()
    assert "-1.0" in shown.out
    assert "ignored" not in shown.err
    store = ResultStore(Path("results"))
    for record in store.records():
        kept = store.load_per_image(record)
        assert (kept is None) == (record.unit == "")
        assert kept is None or kept.mean() == pytest.approx(record.value)
    assert not store.damaged_files
    # A number without per-image values is also a finished result.
    (line,) = run_probe()
    assert "skipping 6 of 6" in line
    assert "computed by version" not in line


def test_the_report_does_not_treat_percentages_as_right_or_wrong(run_probe):
    for seed, name in enumerate("ab"):
        run_probe(name, seed)

    assert main(["report"]) == 0

    pages = [page.read_text() for page in Path("results/report").rglob("*.html")]
    assert any("first - second" in page for page in pages)
    assert not any("Images right" in page for page in pages)


def test_intervals_that_exclude_their_value_are_dropped_with_a_message(run_probe, capsys):
    assert len([line for line in run_probe() if "interval" in line]) == 2
    records = ResultStore(Path("results")).records()
    odd = [record for record in records if record.metric == "odd"]
    assert {(r.value, r.ci95, r.details["note"]) for r in odd} == {(50.0, None, "even")}
    assert main(["table", "--metric", "odd"]) == 0
    assert "no interval" in capsys.readouterr().out


@dataclass(frozen=True)
class Hits(Brightness):
    """A user-defined probe that scores each image as right or wrong."""

    metric: str = "accuracy"

    def list_score_keys(self, layers: Sequence[int]) -> list[tuple[int, str, str]]:
        return [(n, "token", self.metric) for n in layers]

    def run(self, context: ProbeContext) -> Iterator[Score]:
        count = len(self.scored_images(context.dataset))
        for layer in context.layers:
            hits = np.arange(count) % (layer + 2) == 0
            value = 100.0 * float(hits.mean())
            yield Score(layer, "token", self.metric, value, None, count, per_image=hits)


@pytest.mark.parametrize("metric", ["rightness", "accuracy", "ap", "miou"])
def test_hits_are_compared_for_any_name_of_the_metric(run_probe, capsys, metric):
    run_probe(probe=Hits(metric=metric))

    assert main(["compare", "a", "--metric", metric]) == 0

    printed = capsys.readouterr()
    assert "ignored" not in printed.err
    assert [line for line in printed.out.splitlines() if line.split()[:1] == ["1"]]
    assert {record.per_image_kind for record in ResultStore(Path("results")).records()} == {"hits"}


def test_per_image_counts_need_a_kind():
    counts = np.ones((4, 3, 2), np.int64)
    Score(0, "token", "iou", 50.0, None, 4, per_image=counts, per_image_kind="mean_iou")

    # Counts behind a plain number are not stored, so they need no kind.
    Score(0, "token", "rank", 5.0, None, 4, per_image=counts, unit="")
    with pytest.raises(ConfigurationError, match="per_image_kind"):
        Score(0, "token", "iou", 50.0, None, 4, per_image=counts)


def test_attributes_of_earlier_versions_are_refused_with_their_new_names():
    with pytest.raises(ConfigurationError, match="with_native_size"):
        type("Older", (Brightness,), {"shown_to": ()})


@dataclass(frozen=True)
class Undefined(Hits):
    def run(self, context: ProbeContext) -> Iterator[Score]:
        for layer in context.layers:
            why = {"undefined": "no image has a value"}
            yield Score(layer, "token", self.metric, float("nan"), None, 1, details=why)


def test_an_undefined_percentage_is_not_computed_again(run_probe):
    run_probe(probe=Undefined())

    (line,) = run_probe(probe=Undefined())

    assert "skipping 2 of 2 results" in line
