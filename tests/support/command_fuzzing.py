"""Run random `ssl-bench` commands to find unexpected errors.

`python -m tests.support.command_fuzzing SEED COUNT` prints the errors and counts the exit codes.
Every second command is valid and must succeed. The other commands have random flags and values. To
save time, most commands are stopped at the first call of an encoder.
"""

import argparse
import contextlib
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch

from ssl_bench import sweep
from ssl_bench.cli import __main__ as cli
from ssl_bench.cli.parser import COMMANDS_WITH_OVERRIDES, build_parser
from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import compose_config, list_keys
from ssl_bench.results import ResultStore
from tests.core.test_results import RECORD
from tests.support.faults import class_folders, encoder_file, photo_folder, voc
from tests.support.fuzzing import TooSlow, confine

CODES = {0, 2, 3, 4, 5, 75, 130}
SECONDS_EACH = 20
MEBIBYTES = 3000
# One command in fifty runs to its end.
COMPLETE_EVERY = 50
# Commands that may print several error lines.
MANY_ERRORS = ("doctor", "models", "sweep", "reproduce")

NUMBERS = (
    *("0", "-1", "1", "2", "3", "8", "0.5", "1.0", "-0.0", "1e30", "-1e30", "1e-30", "nan", "inf"),
    *("-inf", "2147483648", "9223372036854775808", "9" * 30, "9" * 5000, "1_0", "0x10", "1e400"),
)
WORDS = (
    *("", "null", "[]", "{}", "true", "false", "key", "cls", "png", "toy", "all", "a b", "'a b'"),
    *("[1,2]", "[0.5,1]", "[a,b]", "[[1],[2]]", "[nan]", "[null]", "{a:1}", "{_target_:os.getcwd}"),
    *("${seed}", "${dtype}", "${oc.env:HOME}", "${oc.decode:1}", "\\${x}", "???", "[1", "1,2", "'"),
    *("~nosuchuser/x", "~", "/nonexistent/x", "runs/tiny", "photos", "classes", "voc", "/dev/null"),
    *("é漢字", "\u202e", "\udcff", "a\nb", "\x1b[2J", "x" * 300, "y" * 20_000, "%s%n", "../.."),
    *("choice(1,2)", "range(3)", "glob(*)", "os.system", "subprocess.call", "\x00", "[" * 500),
)
STRANGE_KEYS = (
    *("", "_target_", "probe", "probe._target_", "++probe._target_", "+probe.new", "~probe.facet"),
    *("model", "model._target_", "objective.crops._target_", "train", "data", "hydra.run.dir", "x"),
    *("hydra/launcher", "/etc", "../configs", "probe@x", "probe.facet.x", "dataset.root.a"),
    *("model.init_options", "optimizer._partial_", "probe._args_", "é", "a" * 400, ".", "probe..x"),
)
# Relative frequency of each command.
WEIGHTS = {
    **{"probe": 16, "card": 2, "sweep": 6, "pretrain": 16, "features": 5, "table": 3, "compare": 2},
    **{"report": 1, "models": 3, "data": 4, "keys": 2, "reproduce": 1, "doctor": 0.2},
    **{"completion": 0.2, "quickstart": 0.2},
}
ROOTS = {"class_folders": "classes", "voc2012": "voc", "voc2007": "voc", "folder": "photos"}
URIS = [*["runs/tiny"] * 8, "runs/*", "timm:nothing", "conv.pth"]
# Correct values of flags for which the parser has no choices.
CORRECT = {
    "task": [*choices("probe"), "all", "pca,knn"],
    "dataset": [*ROOTS, *choices("dataset"), *["toy"] * 12],
    "data_root": ["photos", "classes", "voc", "toy=x,folder=photos"],
    "layer": ["0", "-1", "0,1", "7", "all"],
    "device": ["cpu", "cuda", "meta", "xla"],
    "facet": ["cls", "token,cls", "key"],
    "format": ["text", "markdown", "latex", "csv", "json", "npz"],
    "on_bad_image": ["skip"],
    "split": ["val"],
    "dtype": ["float16"],
    "paper": ["table2"],
    "name": ["table2"],
    "best_layer": ["oracle"],
    "figure": ["curves.svg"],
    "target": ["photos", *choices("dataset"), "probe.knn"],
    "out": ["results"],
    "into": ["report"],
    **dict.fromkeys(("checkpoint", "checkpoints", "uris", "pair"), URIS),
}
# Tasks, each with the arguments for a dataset that supports it.
FITTING = (
    *(
        ("knn", "class_folders", "--data-root", "classes"),
        ("pca", "folder", "--data-root", "photos"),
    ),
    *(("tokencut,discovery", "voc2012", "--data-root", "voc"), ("classification", "toy_objects")),
    *((task, "toy") for task in ("segmentation", "retrieval", "correspondence", "geometry")),
)
# Flags that are never drawn. `--debug` prints tracebacks.
EXCLUDED = ("help", "debug")
SMALL = ("model.dim=24", "model.depth=1", "model.image_size=32", "train.batch_size=2")
OBJECTIVES = {
    "dino": ("objective.out_dim=16", "objective.hidden_dim=8", "data.root=photos", *SMALL),
    "mae": ("data.root=photos", *SMALL),
    "supervised": ("data.root=classes", "data.labels=true", *SMALL),
    "copying": (
        *("model=mamba1", "model.dim=16", "model.num_states=4", "model.head_width=8"),
        *("train.batch_size=2", "objective.test_lengths=[4]"),
    ),
}


class _Computing(BaseException):
    pass


class Draw:
    """A generator of random command lines."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        (commands,) = (
            one for one in build_parser()._actions if isinstance(one, argparse._SubParsersAction)
        )
        self.commands = dict(commands.choices)

    def line(self) -> list[str]:
        (name,) = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
        words = [name]
        for action in self.commands[name]._actions:
            if action.dest not in EXCLUDED and (action.required or self.rng.random() < 0.2):
                words += self.flag(action)
        words += self.overrides(name) if name in COMMANDS_WITH_OVERRIDES else []
        if self.rng.random() < 0.04:
            words.insert(self.rng.randrange(len(words) + 1), self.rng.choice(WORDS))
        # `data download` would use the network.
        return [word if word != "download" else "list" for word in words]

    def valid_line(self) -> list[str]:
        """Return a random valid command."""
        pick, number = self.rng.choice, str(self.rng.randrange(10**9))
        task, *data = pick(FITTING)
        probing = ["--task", task, "--dataset", *data, "--checkpoint", "runs/tiny", "--limit", "2"]
        probing += pick(([], ["--layer", "0"], ["--layer=-1"], ["--layer", "all"]))
        probing += pick(([], ["--seed", "3"], ["seed=2"], ["dtype=float32"]))
        objective = pick(list(OBJECTIVES))
        training = [f"objective={objective}", *OBJECTIVES[objective], "train.max_steps=2"]
        return pick(
            (
                ["probe", *probing, *pick(([], ["--json"], ["--overwrite"], ["--dry-run"]))],
                ["sweep", *probing, pick(("--dry-run", "--print"))],
                ["pretrain", *training, "--out", f"runs/{number}"],
                ["features", "--checkpoint", "runs/tiny", "--data-root", "photos", "--facet",
                 pick(("cls", "token,cls", "key")), "--out", f"features/{number}"],
                ["table", "--format", pick(("text", "markdown", "latex", "csv", "json"))],
                ["table", "--figure", pick(("c.png", "c.svg", "c.pdf"))],
                ["report", "--into", f"report/{number}"],
                ["models", "runs/tiny"],
                ["data", *pick((["list"], ["check", "folder", "--data-root", "photos"]))],
                ["keys", f"probe.{task.split(',')[0]}"],
                ["reproduce", *pick(([], ["cutting_the_skip/table2", "--print", "--gpus", "8"]))],
                ["completion", "bash"],
            )
        )  # fmt: skip

    def flag(self, action: argparse.Action) -> list[str]:
        """Return a command-line flag with random values."""
        flag = list(action.option_strings[:1])
        if action.nargs == 0:
            return flag
        if flag and self.rng.random() < 0.02:
            return [f"{flag[0]}={self.rng.choice(('--', '', '-', '='))}"]
        correct = [str(one) for one in action.choices or CORRECT.get(action.dest, ("0", "1", "2"))]
        many = action.nargs if isinstance(action.nargs, int) else 1
        return [*flag, *(self.word(self.rng.choice(correct)) for _ in range(many))]

    def overrides(self, name: str) -> list[str]:
        """Return random config overrides for a command."""
        chosen, small = [f"probe={self.rng.choice(choices('probe'))}"], list[str]()
        root = "probing"
        if name == "pretrain":
            root, objective = "pretraining", self.rng.choice(list(OBJECTIVES))
            chosen = [f"objective={objective}"]
            optimizer = self.rng.choice(choices("optimizer"))
            small = [*chosen, f"optimizer={self.word(optimizer)}", *OBJECTIVES[objective]]
            small += ["train.max_steps=2", "--out", f"runs/{self.rng.randrange(10**9)}"]
        elif name in ("probe", "card", "sweep"):
            small = ["dataset.num_train=3", "dataset.num_val=2"] * (self.rng.random() < 0.7)
            small += ["probe.image_size=32"] * (self.rng.random() < 0.5)
        keys = [*list_keys(compose_config(root, chosen)), *self.rng.choices(STRANGE_KEYS, k=2)]
        chosen_keys = self.rng.choices(keys, k=self.rng.choice((0, 0, 1, 1, 1, 2, 3)))
        values = self.rng.choices((*NUMBERS, *WORDS), k=len(chosen_keys))
        return [*small, *(f"{key}={value}" for key, value in zip(chosen_keys, values, strict=True))]

    def word(self, correct: str) -> str:
        return correct if self.rng.random() < 0.93 else self.rng.choice(WORDS)


@contextlib.contextmanager
def stop_before_computing(*, to_end: bool) -> Iterator[None]:
    """Interrupt all commands inside a `with` block before they compute anything."""
    call = torch.nn.Module.__call__

    def refuse(*_: object, **__: object) -> None:
        raise _Computing

    torch.nn.Module.__call__ = call if to_end else refuse
    # The exception would not stop the processes that a sweep starts.
    processes = subprocess if to_end else SimpleNamespace(**vars(subprocess) | {"Popen": refuse})
    sweep.subprocess = processes
    try:
        yield
    finally:
        torch.nn.Module.__call__, sweep.subprocess = call, subprocess


def run_command(line: list[str], *, to_end: bool) -> tuple[str, str]:
    """Run a command. Return its outcome and the problem, if there is one."""
    out, err = io.StringIO(), io.StringIO()
    signal.setitimer(signal.ITIMER_PROF, SECONDS_EACH)
    try:
        with (
            stop_before_computing(to_end=to_end),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = cli.main(line)
    except _Computing:
        return "computing", ""
    except TooSlow:
        return ("computing", "") if to_end else ("slow", f"more than {SECONDS_EACH} s")
    except SystemExit as error:
        # argparse exits after --help and --version.
        return "help", "" if error.code == 0 else f"exit {error.code!r}"
    except BaseException as error:
        return "broken", "".join(traceback.format_exception(error)[-4:])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    messages = [text for text in err.getvalue().splitlines() if text.startswith("ssl-bench: ")]
    wrong = "" if code in CODES else f"exit code {code}"
    if code in (2, 3, 4, 5) and len(messages) != 1 and line[0] not in MANY_ERRORS:
        wrong = f"{len(messages)} lines on stderr: {err.getvalue()[-300:]!r}"
    if "Traceback" in err.getvalue() or any(text == "ssl-bench: " for text in messages):
        wrong = err.getvalue()[-600:]
    if any(len(text) > 1100 for text in messages):
        wrong = f"a line of {max(map(len, messages))} characters: {messages[0][:200]}"
    return str(code), wrong


def prepare() -> None:
    """Create the files that the random commands use."""
    encoder_file(Path("runs/tiny/last.safetensors"))
    torch.save({"conv1.weight": torch.zeros(4, 3, 7, 7), "fc.bias": torch.zeros(9)}, "conv.pth")
    photo_folder(Path("photos"))
    class_folders(Path("classes"))
    voc(Path("voc"))
    ResultStore(Path("results")).save(RECORD)


def main(seed: int, count: int) -> int:
    draw, ends, bad = Draw(random.Random(seed)), Counter(), 0
    start, scratch = time.monotonic(), tempfile.mkdtemp()
    # The folder is deep enough for "../.." to be in our temporary folder.
    folder = f"{scratch}/home/user"
    Path(folder).mkdir(parents=True)
    os.environ |= {"XDG_CACHE_HOME": folder, "HOME": folder, "HF_HUB_OFFLINE": "1"}
    os.chdir(folder)
    prepare()
    confine(MEBIBYTES)
    try:
        for number in range(count):
            is_valid = number % 2 == 1
            line = draw.valid_line() if is_valid else draw.line()
            end, wrong = run_command(line, to_end=number % COMPLETE_EVERY == 0)
            if is_valid and end not in ("0", "computing"):
                wrong = wrong or f"a valid line ended with {end}"
            os.chdir(folder)
            ends[end] += 1
            if wrong:
                bad += 1
                print(f"{number}: {[word[:120] for word in line]}\n{wrong[:3000]}", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(dict(sorted(ends.items())), f"{time.monotonic() - start:.0f} s")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
