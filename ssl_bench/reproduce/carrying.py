"""The steps of a plan carried out here; one that fails stops those alone that need it."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ssl_bench.errors import Preempted
from ssl_bench.reproduce.plan import Plan, Step
from ssl_bench.reproduce.state import run_state
from ssl_bench.system.endings import failure
from ssl_bench.system.escaping import shell_words
from ssl_bench.system.progress import say

Execute = Callable[[Sequence[str]], int]


@dataclass(frozen=True)
class Outcome:
    """What became of a step.

    Attributes:
        exit_code: As its command ends; 1 for a run whose time was up before its end.
        error: One line, empty where the step finished.
    """

    step: Step
    seconds: float
    exit_code: int = 0
    error: str = ""

    @property
    def state(self) -> Literal["finished", "failed"]:
        return "failed" if self.exit_code else "finished"


def carry_out(plan: Plan, execute: Execute, *, debug: bool) -> Iterator[Outcome]:
    """Run the steps one after the other in this process; `debug` raises the first error.

    `execute` runs `ssl-bench` with words and gives its exit code.

    Raises:
        Preempted, KeyboardInterrupt: a run was asked to stop, and everything is saved.
    """
    failed: set[str] = set()
    for number, step in enumerate(plan.steps, 1):
        say("")
        say(f"step {number} of {len(plan.steps)}: {step.title}")
        if step.needs in failed:
            outcome = Outcome(step, 0.0, 1, f"{step.needs}, which it needs, is not finished")
        else:
            say(f"$ ssl-bench {shell_words(step.words)}")
            outcome = _attempted(plan, step, execute, debug=debug)
        if outcome.exit_code and step.is_run and step.run:
            failed.add(step.run)
        yield outcome


def _attempted(plan: Plan, step: Step, execute: Execute, *, debug: bool) -> Outcome:
    start = time.monotonic()
    code, text = 0, ""
    try:
        code = execute(step.words)
    except Preempted:
        raise
    # Whatever it is, memory that does not suffice included: the other steps may fare better.
    except Exception as error:
        if debug:
            raise
        code, text = failure(error, step.words[0])
    if step.is_run and step.run and not code:
        state = run_state(plan.asked.folder(step.run))
        if state is None or not state.is_finished:
            code, text = 1, "its time was up before its end; the same command goes on with it"
    return Outcome(step, time.monotonic() - start, code, text)
