"""Test training on the task of copying a random string."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pretrain.monitor import Monitor
from pretrain.objectives.supervised import Supervised
from pretrain.optimizers.recipes import AdamW
from pretrain.options import DataOptions, TrainOptions
from pretrain.papers.copying import (
    STRINGS_PER_EPOCH,
    Copying,
    CopyingTest,
    GeneratedStrings,
    StringMaker,
    compute_accuracies,
    draw_test_strings,
    find_correct_letters,
    make_rows,
)
from pretrain.plan import Pretraining
from pretrain.schedules import Timeline
from ssl_bench.cli.__main__ import main
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import StateSpaceConfig, StateSpaceModel
from tests.support.runs import log_rows

TINY = StateSpaceConfig(dim=8, depth=1, num_states=4, head_width=8, num_tokens=6)
TASK = Copying(length=3, letters=4, test_lengths=[3, 5], test_strings=6)
TRAIN = TrainOptions(batch_size=8, max_steps=6, warmup_epochs=0.0, num_workers=0)
PLAN = Pretraining(model=TINY, objective=TASK, optimizer=AdamW(lr=0.3), train=TRAIN)


def test_rows_contain_string_separator_string_and_stop():
    rows = make_rows(torch.tensor([[2, 0, 3], [1, 1, 1]]), 4)
    assert rows.tolist() == [[2, 0, 3, 4, 2, 0, 3, 5], [1, 1, 1, 4, 1, 1, 1, 5]]


def test_a_string_depends_on_its_generator_and_letters_are_uniform():
    maker = StringMaker(length=50, letters=5)
    samples = [GeneratedStrings()[index] for index in range(200)]

    def cut(*seeds: int) -> torch.Tensor:
        return maker.cut(samples, map(np.random.default_rng, seeds), ())

    whole = cut(*range(200))
    assert torch.equal(cut(*range(120, 200)), whole[120:])
    # The expected count is 2,000, and the tolerance five standard deviations.
    assert whole.flatten().bincount().tolist() == pytest.approx([2000] * 5, abs=5 * 40)


def logits_of(answers: torch.Tensor, tokens: int) -> torch.Tensor:
    return 50 * F.one_hot(answers, tokens).float()


def test_the_loss_is_computed_over_the_copy_and_the_stop():
    rows = make_rows(torch.tensor([[2, 0, 3], [1, 1, 1]]), 4)
    learner = TASK.build(TINY, Timeline(6, 6), seed=0)
    answers = rows[:, 1:].clone()
    answers[:, :3] = 5
    loss, report = learner.loss(lambda _: logits_of(answers, 6), (rows,), 0)
    assert (float(loss), float(report["train_letters"])) == (pytest.approx(0, abs=1e-6), 100)
    # One of eight answers is wrong by 50. It is the stop, which does not count as a letter.
    answers[0, -1] = 0
    loss, report = learner.loss(lambda _: logits_of(answers, 6), (rows,), 0)
    assert (float(loss), float(report["train_letters"])) == (pytest.approx(50 / 8), 100)

    # Two of the six letters are wrong, too.
    answers[1, 3:5] = 0
    loss, report = learner.loss(lambda _: logits_of(answers, 6), (rows,), 0)
    assert float(loss) == pytest.approx(3 * 50 / 8)
    assert float(report["train_letters"]) == pytest.approx(100 * 4 / 6)


def test_accuracies_count_letters_and_strings_without_a_mistake():
    is_correct = torch.tensor([[True, True], [True, False], [True, True], [False, False]])
    assert compute_accuracies(is_correct) == (62.5, 50.0)


class Copier(StateSpaceModel):
    def __init__(self, back: int) -> None:
        super().__init__(TINY)
        self.back = back

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return logits_of(tokens.roll(self.back, 1), 6)


def test_test_strings_are_copied_after_every_epoch():
    # In strings of length 3, the right letter is 3 tokens earlier.
    test = CopyingTest(replace(TASK, test_strings=40), Copier(3), Timeline(10, 4))
    due = {step: test.measure_if_due(step) for step in range(1, 11)}
    assert {step for step, measures in due.items() if measures} == {4, 8, 10}
    assert due[10] == due[4]
    assert (due[10]["letters_3"], due[10]["strings_3"]) == (100, 100)
    assert due[10]["letters_5"] < 60
    assert due[10]["strings_5"] < 10
    # From `|` on, these models predict "| 2 0" and "| 1 2", or "0 3 |" and "2 1 |".
    strings = torch.tensor([[2, 0, 3], [1, 2, 1]])
    for back in (0, 2):
        assert find_correct_letters(Copier(back), strings, 4).tolist() == [[False] * 3] * 2


def test_test_strings_depend_only_on_their_length():
    assert torch.equal(draw_test_strings(5, 4, 6), draw_test_strings(5, 4, 9)[:6])
    one, other = draw_test_strings(5, 4, 6), draw_test_strings(6, 4, 5)
    assert not torch.equal(one.flatten(), other.flatten())


@pytest.mark.slow
def test_a_run_logs_its_test_accuracies(tmp_path):
    PLAN.run(tmp_path, device="cpu")
    rows = log_rows(tmp_path)
    assert {"letters_3", "strings_3", "letters_5", "strings_5"} <= rows[-1].keys()
    assert not any("letters_3" in row for row in rows[:-1])
    assert rows[0]["loss"] == pytest.approx(np.log(6), rel=0.1)


def test_last_rows_of_runs_without_records_are_shown(tmp_path, capsys):
    folder = tmp_path / "copied"
    replace(PLAN, train=replace(TRAIN, max_steps=2)).run(folder, device="cpu")
    last = log_rows(folder)[-1]
    for command in ("report", "table"):
        assert main([command, "--out", str(folder)]) == 3
        message = capsys.readouterr().err
        for name in ("letters_5", "strings_5"):
            assert f"{name} {last[name]:.4g}" in message
        assert str(folder / "log.jsonl") in message


def test_a_dry_run_counts_strings(tmp_path):
    outline = PLAN.outline(tmp_path / "run")
    assert f"strings    {STRINGS_PER_EPOCH:,} of copying train" in outline
    assert "of 8 strings" in outline[-1]
    assert "run/log.jsonl" in PLAN.describe_next_step(Path("run"))
    assert "probe" in Pretraining().describe_next_step(Path("run"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": DataOptions(limit=8)}, r"data\.\*"),
        ({"monitor": Monitor(knn_epochs=1)}, r"monitor\.\*"),
        ({"objective": Supervised()}, "reads tokens"),
    ],
)
def test_options_for_images_are_refused(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        replace(Pretraining(model=TINY, objective=TASK), **changes)


def test_another_number_of_tokens_is_refused():
    with pytest.raises(ConfigurationError) as caught:
        TASK.build(replace(TINY, num_tokens=7), Timeline(6, 6), seed=0)
    assert caught.value.hint == ("model.num_tokens=6",)
