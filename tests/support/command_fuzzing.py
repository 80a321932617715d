"""Commands drawn at random, in a process without type checks; what ended badly is printed.

`python -m tests.support.command_fuzzing SEED COUNT` prints how many ended with each exit code. A
draw that is valid goes on until an encoder computes for the first time, which is where it is
stopped; one in fifty goes on from there to its end.
"""

import contextlib
import io
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from ssl_bench.cli import __main__ as cli
from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import compose_config, keys
from ssl_bench.results import ResultStore
from tests.core.test_results import RECORD
from tests.support.faults import class_folders, encoder_file, photo_folder, voc

CODES = {0, 2, 3, 4, 5, 75, 130}
SECONDS_EACH = 20
MEBIBYTES = 3000
THROUGH = 50

NUMBERS = (
    *("0", "-1", "1", "2", "3", "8", "0.5", "1.0", "-0.0", "1e30", "-1e30", "1e-30", "nan", "inf"),
    *("-inf", "2147483648", "9223372036854775808", "9" * 30, "9" * 5000, "1_0", "0x10", "1e400"),
)
WORDS = (
    *("", "null", "[]", "{}", "true", "false", "key", "cls", "png", "toy", "all", "a b", "'a b'"),
    *("[1,2]", "[0.5,1]", "[a,b]", "[[1],[2]]", "[nan]", "[null]", "{a:1}", "{_target_:os.getcwd}"),
    *("${seed}", "${dtype}", "${oc.env:HOME}", "${oc.decode:1}", "\\${x}", "???", "[1", "1,2", "'"),
    *("~nosuchuser/x", "~", "/nonexistent/x", "runs/tiny", "photos", "classes", "voc", "/dev/null"),
    *(
        "é漢字",
        "\u202e",
        "\udcff",
        "a\nb",
        "\x1b[2J",
        "x" * 300,
        "y" * 20_000,
        "%s%n",
        "../..",
        ".",
    ),
    *("choice(1,2)", "range(3)", "glob(*)", "os.system", "subprocess.call", "\x00", "[" * 500),
)
STRANGE_KEYS = (
    *("", "_target_", "probe", "probe._target_", "++probe._target_", "+probe.new", "~probe.facet"),
    *("model", "model._target_", "objective.crops._target_", "train", "data", "hydra.run.dir", "x"),
    *(
        "hydra/launcher",
        "/etc",
        "../configs",
        "probe@x",
        "probe.facet.x",
        "dataset.root.a",
        "seed.",
    ),
    *("model.init_options", "optimizer._partial_", "probe._args_", "é", "a" * 400, ".", "probe..x"),
)
SUITABLE = {"class_folders": "classes", "voc2012": "voc", "voc2007": "voc", "folder": "photos"}


class _Computing(BaseException):
    pass


class _TooSlow(BaseException):
    pass


class Draw:
    """Command lines by chance; about half of what is drawn is right."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        one = chance.choice
        self.commands = {
            "probe": lambda: ["--task", self.task(), *self.probing()],
            "sweep": lambda: [
                *("--task", self.task(), *self.probing()),
                one(["--print", "--dry-run", "--json"]),
                *self.some("--jobs", one(["0", "1", "-1", "x"])),
            ],
            "pretrain": self.pretraining,
            "table": lambda: [*self.filters(), *self.format(), *self.table()],
            "compare": lambda: [
                *(self.uri(), self.uri(), *self.filters(), *self.format()),
                *self.some("--over-epochs"),
            ],
            "report": lambda: [*self.filters(), *self.some("--into", self.word("report"))],
            "models": lambda: [self.uri(), *self.some("--json")],
            "data": self.data,
            "doctor": lambda: [*self.some("--json"), *self.some("--data-root", self.root())],
            "completion": lambda: [one(["bash", "zsh", "tcsh", "fish", ""])],
            "quickstart": lambda: ["--out", self.word("quick"), *self.some("--overwrite")],
            "features": self.features,
        }
        weights = [16, 6, 16, 3, 2, 1, 3, 4, 0.2, 0.2, 0.2, 5]
        self.names = chance.choices(list(self.commands), weights, k=10_000)

    def line(self) -> list[str]:
        name = self.chance.choice(self.names)
        words = [name, *self.commands[name]()]
        if self.chance.random() < 0.04:
            words.insert(self.chance.randrange(len(words) + 1), self.chance.choice(WORDS))
        if self.chance.random() < 0.03:
            words.append(f"{self.chance.choice(STRANGE_KEYS)}={self.value()}")
        return words

    def some(self, *words: str, share: float = 0.3) -> list[str]:
        return list(words) if self.chance.random() < share else []

    def word(self, right: str) -> str:
        return right if self.chance.random() < 0.88 else self.chance.choice(WORDS)

    def value(self) -> str:
        return self.chance.choice(self.chance.choice((NUMBERS, WORDS)))

    def task(self) -> str:
        return self.word(self.chance.choice([*choices("probe"), "all", "pca,knn"]))

    def uri(self) -> str:
        known = ["runs/tiny", "runs/tiny/last.safetensors", "runs/*", "timm:nothing", "conv.pth"]
        return self.word(self.chance.choice([*known[:2] * 4, *known]))

    def root(self) -> str:
        return self.word(self.chance.choice(["photos", "classes", "voc", "toy=x,folder=photos"]))

    def probing(self) -> list[str]:
        dataset = self.word(self.chance.choice([*choices("dataset"), *["toy"] * 12]))
        small = ["dataset.num_train=3", "dataset.num_val=2"] if dataset == "toy" else []
        root = ["--data-root", self.word(SUITABLE[dataset])] if dataset in SUITABLE else []
        return [
            *("--dataset", dataset, "--checkpoint", self.uri(), "--out", self.word("results")),
            *(*root, *small, *self.some("probe.image_size=32", share=0.5)),
            *self.some("--layer", self.word(self.chance.choice(["0", "-1", "0,1", "7", "all"]))),
            *self.some("--device", self.word(self.chance.choice(["cpu", "cuda", "meta", "xla"]))),
            *self.some("--on-bad-image", self.word("skip"), share=0.1),
            *self.overrides("probing", [f"probe={task}" for task in choices("probe")]),
        ]

    def features(self) -> list[str]:
        dataset = self.word(self.chance.choice([*choices("dataset"), *["toy"] * 6]))
        root = ["--data-root", self.word(SUITABLE[dataset])] if dataset in SUITABLE else []
        return [
            *("--dataset", dataset, "--checkpoint", self.uri(), "--out", self.word("features")),
            *(*root, *self.some("--split", self.word("val"))),
            *self.some("--layer", self.word(self.chance.choice(["0", "-1", "0,1", "7", "all"]))),
            *self.some("--facet", self.word(self.chance.choice(["cls", "token,cls", "key"]))),
            *self.some("--image-size", self.value()),
            *self.some("--dtype", self.word("float16")),
            *self.some("--format", self.word("npz")),
            *self.some("--batch-size", self.value(), share=0.2),
            *self.some("--on-bad-image", self.word("skip"), share=0.1),
            *self.some(f"{self.chance.choice(['dataset.num_val', 'data.limit'])}={self.value()}"),
        ]

    def pretraining(self) -> list[str]:
        objective = self.chance.choice(choices("objective"))
        if objective == "copying":
            return self.copying()
        labelled = objective == "supervised"
        return [
            *("--out", self.word(f"runs/{self.chance.randrange(10**9)}")),
            *(f"model={self.word('vit_tiny_skip')}", f"objective={objective}"),
            *(f"optimizer={self.word(self.chance.choice(choices('optimizer')))}",),
            *("model.dim=24", "model.depth=1", "model.image_size=32", "train.batch_size=2"),
            *("train.epochs=1", f"data.root={self.word('classes' if labelled else 'photos')}"),
            *(["data.labels=true"] if labelled else []),
            *(["objective.out_dim=16", "objective.hidden_dim=8"] if objective == "dino" else []),
            *(self.some("--resume", share=0.1) + self.some("--overwrite", share=0.2)),
            *self.overrides("pretraining", [f"objective={objective}"]),
        ]

    def copying(self) -> list[str]:
        model = self.word(self.chance.choice(["mamba1", "mamba2"]))
        return [
            *("--out", self.word(f"runs/{self.chance.randrange(10**9)}"), "objective=copying"),
            *(f"model={model}", "model.dim=16", "model.num_states=4", "model.head_width=8"),
            *("train.batch_size=2", "train.max_steps=2", "objective.test_lengths=[4]"),
            *self.overrides("pretraining", ["objective=copying"]),
        ]

    def overrides(self, root: str, groups: list[str]) -> list[str]:
        config = compose_config(root, [self.chance.choice(groups)])
        known = keys(config)
        names = self.chance.choices([*known, *self.chance.choices(STRANGE_KEYS, k=2)], k=3)
        return [
            f"{name}={self.value()}" for name in names[: self.chance.choice((0, 1, 1, 1, 2, 3))]
        ]

    def filters(self) -> list[str]:
        names = ("--task", "--dataset", "--metric", "--facet", "--protocol")
        flags = [word for name in names for word in self.some(name, self.word("pca"), share=0.15)]
        return [*flags, "--out", self.word("results")]

    def format(self) -> list[str]:
        kinds = ["text", "markdown", "latex", "csv", "json", "terminal"]
        return self.some("--format", self.word(self.chance.choice(kinds)))

    def table(self) -> list[str]:
        return [
            *(*self.some("--pivot"), *self.some("--paper", self.word("table2"), share=0.2)),
            *self.some("--as", self.word("a=b"), share=0.1),
            *self.some("--best-layer", self.word("oracle"), share=0.2),
            *self.some("--figure", self.word("curves.svg"), share=0.1),
            *self.some("--layer", self.word("0"), share=0.2),
        ]

    def data(self) -> list[str]:
        # Not download: the network is no part of this.
        action = self.word(self.chance.choice(["list", "check", "verify"]))
        target = {"verify": "photos"}.get(action) or self.chance.choice(choices("dataset"))
        return [
            "list" if action == "download" else action,
            *self.some(self.word(target), share=0.8),
            *self.some("--data-root", self.root(), share=0.6),
            *self.some("--manifest", self.word("sums"), share=0.2),
            *(*self.some("--update", share=0.1), *self.some("--json")),
            *self.some(f"dataset.{self.chance.choice(['root', 'seed', 'x'])}={self.value()}"),
        ]


@contextlib.contextmanager
def stopped_before_computing(*, through: bool) -> Iterator[None]:
    """Raise where a network is called, unless it shall go through."""
    call = torch.nn.Module.__call__

    def refuse(*_: object, **__: object) -> None:
        raise _Computing

    torch.nn.Module.__call__ = call if through else refuse
    try:
        yield
    finally:
        torch.nn.Module.__call__ = call


def _too_slow(*_: object) -> None:
    raise _TooSlow


def ended(line: list[str], *, through: bool) -> tuple[str, str]:
    """How a command ended, and what is wrong with that."""
    out, err = io.StringIO(), io.StringIO()
    signal.setitimer(signal.ITIMER_PROF, SECONDS_EACH)
    try:
        with (
            stopped_before_computing(through=through),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = cli.main(line)
    except _Computing:
        return "computing", ""
    except _TooSlow:
        return ("computing", "") if through else ("slow", f"more than {SECONDS_EACH} s")
    except SystemExit as error:
        # --help and --version are argparse's.
        return "help", "" if error.code == 0 else f"exit {error.code!r}"
    except BaseException as error:
        return "broken", "".join(traceback.format_exception(error)[-4:])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    said = [text for text in err.getvalue().splitlines() if text.startswith("ssl-bench: ")]
    wrong = "" if code in CODES else f"exit code {code}"
    if code in (2, 3, 4, 5) and len(said) != 1 and line[0] not in ("doctor", "models", "sweep"):
        wrong = f"{len(said)} lines on stderr: {err.getvalue()[-300:]!r}"
    if "Traceback" in err.getvalue() or any(text == "ssl-bench: " for text in said):
        wrong = err.getvalue()[-600:]
    if any(len(text) > 1100 for text in said):
        wrong = f"a line of {max(map(len, said))} characters: {said[0][:200]}"
    return str(code), wrong


def prepare() -> None:
    """What commands find in the folder they run in."""
    encoder_file(Path("runs/tiny/last.safetensors"))
    torch.save({"conv1.weight": torch.zeros(4, 3, 7, 7), "fc.bias": torch.zeros(9)}, "conv.pth")
    photo_folder(Path("photos"))
    class_folders(Path("classes"))
    voc(Path("voc"))
    ResultStore(Path("results")).save(RECORD)


def main() -> int:
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, _too_slow)
    draw, ends, bad = Draw(random.Random(seed)), Counter(), 0
    start, scratch = time.monotonic(), tempfile.mkdtemp()
    # Deep enough that "../.." is still ours, and not all files of the machine.
    place = f"{scratch}/home/user"
    Path(place).mkdir(parents=True)
    os.environ |= {"XDG_CACHE_HOME": place, "HOME": place, "HF_HUB_OFFLINE": "1"}
    os.chdir(place)
    prepare()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + MEBIBYTES * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        for number in range(count):
            line = draw.line()
            end, wrong = ended(line, through=number % THROUGH == 0)
            os.chdir(place)
            ends[end] += 1
            if wrong:
                bad += 1
                print(f"{number}: {[word[:120] for word in line]}\n{wrong[:3000]}", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(dict(sorted(ends.items())), f"{time.monotonic() - start:.0f} s")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
