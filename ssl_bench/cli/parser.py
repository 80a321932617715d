"""Parse the command line, run the command, and suggest corrections for misspelled names.

Flags exist for common options. KEY=VALUE settings (Hydra overrides) can set all other options. This
module imports no large library, so `--help` takes only 0.1 s.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ssl_bench import __version__
from ssl_bench.errors import ConfigurationError
from ssl_bench.system.endings import (
    STOP_SIGNALS,
    handle_signals,
    raise_stop_signal,
    repair_standard_streams,
    report_error,
    report_interruption,
)
from ssl_bench.system.files import expand_path
from ssl_bench.system.process import keep_freed_memory, use_passive_openmp_waiting

if TYPE_CHECKING:
    from ssl_bench.request import ProbeRequest

EPILOG = """\
examples:
  ssl-bench quickstart
  ssl-bench pretrain model=vit_small_skipless data.root=/photos --out runs/skipless
  ssl-bench probe --task tokencut --layer 11
  ssl-bench probe --task all --checkpoint runs/skipless --dataset voc2012 --data-root /data
  ssl-bench card --checkpoint runs/skipless --dataset voc2012 --data-root /data
  ssl-bench probe --task segmentation --layer 0,5,-1 probe.protocol=fast probe.training.epochs=10
  ssl-bench features --checkpoint runs/skipless --data-root photos --facet cls_normed --out features
  ssl-bench sweep --checkpoint 'runs/*' --dataset voc2012,ade20k --data-root /data --dry-run
  ssl-bench table --pivot --metric corloc --best-layer holdout --format latex
  ssl-bench table --paper figure3 --as 'skip, adamw=runs/skip'
  ssl-bench reproduce cutting_the_skip/table2
  ssl-bench compare runs/skip runs/skipless --task tokencut
  ssl-bench report --out results

Use KEY=VALUE for options without a flag:
  model=vit_tiny_skip          select configs/model/vit_tiny_skip.yaml
  probe.tau=0.3                set a value
  probe.neighbours=[10,20]     set a list
  "probe.cache='/a b'"         set a text with spaces

Run `ssl-bench keys` to list all keys, or `ssl-bench keys probe.tokencut` to list the keys of one
probe with their ranges and defaults.
"""
COMMANDS_WITH_OVERRIDES = (
    "probe", "card", "features", "sweep", "pretrain", "reproduce", "data", "keys",
)  # fmt: skip
_KEY_VALUE = """\
Use KEY=VALUE (e.g. {}) for options without a flag.
Run `ssl-bench keys {}` to list all keys.
"""
_EXAMPLES = {
    "probe": ("probe.tau=0.3 or probe.neighbours=[10,20]", "probe.TASK"),
    "sweep": ("probe.tau=0.3 or probe.neighbours=[10,20]", "probe.TASK"),
    "pretrain": ("model=vit_tiny_skip or train.epochs=10", "pretrain"),
}
"""Example settings of each command, and the `ssl-bench keys` argument that lists all settings."""

_PATH_OPTIONS = ("out", "runs", "into", "figure", "manifest", "slurm_logs")
_PROBING_KEYS = {"limit": "data.limit", "seed": "seed"}
_DRAWING_KEYS = _PROBING_KEYS | {"pictures": "probe.panels"}
KEY_OF_FLAG: Mapping[str, Mapping[str, str]] = {
    "features": {"limit": "data.limit"},
    "probe": _DRAWING_KEYS,
    "card": _DRAWING_KEYS,
    "sweep": _PROBING_KEYS,
    "pretrain": {
        "limit": "data.limit",
        "seed": "train.seed",
        "batch_size": "train.batch_size",
        "on_bad_image": "data.on_bad_image",
    },
}
"""Configuration keys that flags set, by command and name of the flag.

The key of `--batch-size` is not listed for probes, because it depends on the task."""

_TASKS_HELP = "tasks, separated by commas, or all (default: all)"
_LAYERS_HELP = "block indices starting at 0 (e.g. 11, -1, 0,5,11 or 0-3), or all (default: all)"
_DEVICE = "device: cpu, cuda or cuda:N (default: a GPU if there is one)"
_RECORDS = "results folder, as written by `ssl-bench probe` (default: results)"
_RESULTS = "results folder, for scores and figures (default: results)"
_LIMIT = "use at most N images of each split, evenly spaced (short for data.limit=N)"
_BATCH = "number of images that the encoder processes at once"
_TRAINING_BATCH = (
    "number of images per optimisation step, on all GPUs together (short for train.batch_size=N)"
)
_FORMATS = (
    "output format: text, terminal, markdown, latex, csv, json or parquet (default: terminal, or "
    "text if the output is redirected)"
)
_BAD_IMAGE = (
    "reaction to an unreadable image: fail stops the command, skip leaves out the image "
    "(default: fail, but skip with `--dataset folder`)"
)


class _Parser(argparse.ArgumentParser):
    def add_switch(self, flag: str, meaning: str) -> None:
        self.add_argument(flag, action="store_true", help=meaning)

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message, hint=(*self.prog.split(), "--help"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `ssl_bench.errors` lists the exit codes.

    `arguments` contains the words after `ssl-bench`. By default, the arguments are read from
    `sys.argv`.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    repair_standard_streams()
    use_passive_openmp_waiting()
    keep_freed_memory()
    try:
        with handle_signals(STOP_SIGNALS, raise_stop_signal):
            code = run_command(arguments)
        # Flush now, because an error such as a full disk cannot be reported while Python exits.
        print(end="", flush=True)
        return code
    except KeyboardInterrupt as reason:
        return report_interruption(reason, arguments)
    except BrokenPipeError:
        # A program that reads the output, such as `head`, closed the pipe. With stdout set to None,
        # Python does not flush it at exit, and therefore prints no error.
        sys.stdout = None
        return 0
    except Exception as error:
        code = None if "--debug" in arguments else report_error(error, arguments)
        if code is None:
            raise
        return code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their flags."""
    parser = _Parser(
        prog="ssl-bench",
        description="Evaluate every block of a frozen image encoder.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ssl-bench {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (summary, add_flags) in _COMMANDS.items():
        example = _EXAMPLES.get(name)
        epilog = _KEY_VALUE.format(*example) if example else None
        description = f"{summary[0].upper()}{summary[1:]}."
        command = commands.add_parser(
            name,
            help=summary,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_switch("--debug", "show the traceback of an error")
        add_flags(command)
    return parser


def command_parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, by the name of the command."""
    return dict(
        next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    )


def run_command(arguments: Sequence[str]) -> int:
    """Parse the arguments, run the command that they name and return its exit code."""
    options, overrides = _parse(arguments)
    name, inputs = options.command, list[Any]()
    # Report misspelled names before torch is imported, which takes seconds.
    if name in ("probe", "card", "sweep"):
        inputs = [probe_request(options, overrides)]
    elif name in COMMANDS_WITH_OVERRIDES:
        inputs = [overrides]
    return import_module(f"ssl_bench.cli.{name}").command(options, *inputs)


def probe_request(options: argparse.Namespace, overrides: Sequence[str]) -> "ProbeRequest":
    """Build the request of `ssl-bench probe`, `card` or `sweep` from the command line.

    A request states which encoders, probes, datasets and blocks to evaluate.
    """
    from ssl_bench.request import ProbeRequest

    return ProbeRequest.parse(
        task=options.task,
        dataset=options.dataset,
        data_root=options.data_root,
        overrides=overrides,
        batch_size=options.batch_size,
        layers=options.layer,
        checkpoints=options.checkpoint or (),
        baselines=options.baselines,
        out=Path(options.out),
        device=options.device,
        on_bad_image=options.on_bad_image,
        overwrite=getattr(options, "overwrite", False),
    )


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line and return its flags and its KEY=VALUE settings."""
    parser = build_parser()
    commands = command_parsers(parser)
    # Check names before argparse does. For a misspelled flag, argparse may only report a missing
    # argument.
    _check_names(commands, arguments)
    words = _join_values(arguments)
    # argparse crashes on the value "--", because it removes "--" and then has no value to convert.
    if valueless := next((word for word in words if re.fullmatch(r"--.+=--", word)), None):
        raise ConfigurationError(f"{valueless.removesuffix('=--')} expects a value, got '--'")
    options, rest = parser.parse_known_args(words)
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    if unknown := [word for word in rest if word not in overrides]:
        raise _unknown_argument(options.command, commands[options.command], unknown[0])
    if overrides and options.command not in COMMANDS_WITH_OVERRIDES:
        raise ConfigurationError(
            f"`ssl-bench {options.command}` accepts no KEY=VALUE settings, got {overrides[0]!r}"
        )
    for name in _PATH_OPTIONS:
        if (text := getattr(options, name, None)) is not None:
            setattr(options, name, str(expand_path(text)))
    return options, [*_overrides_of_flags(options, overrides), *overrides]


def _check_names(commands: Mapping[str, argparse.ArgumentParser], arguments: Sequence[str]) -> None:
    """Raise ConfigurationError if the command line contains an unknown command or flag.

    `commands` contains the parser of each command, by name.
    """
    command = arguments[0] if arguments else "-"
    if command.startswith("-"):
        return
    if command not in commands:
        close = difflib.get_close_matches(command[:100], commands, n=1)
        expected = "" if close else f", expected one of {', '.join(commands)}"
        near_command = close[0] if close else "--help"
        raise ConfigurationError(
            f"unknown command {command!r}{expected}", hint=("ssl-bench", near_command)
        )
    flags = [*_flags(commands[command]), "--version"]
    for word in arguments[1:]:
        flag = word.partition("=")[0]
        if flag.startswith("--") and not any(known.startswith(flag) for known in flags):
            raise _unknown_argument(command, commands[command], word)


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings if flag != "-h"]


def _unknown_argument(
    command: str, parser: argparse.ArgumentParser, word: str
) -> ConfigurationError:
    """Return the error for the unknown argument `word`, with the most similar flag as a hint."""
    flags = _flags(parser)
    flag = word.partition("=")[0][:100].replace("_", "-")
    names = [name.lstrip("-") for name in flags]
    message = f"unknown argument {word!r}"
    if near_flags := difflib.get_close_matches(flag.lstrip("-"), names, n=1, cutoff=0.65):
        return ConfigurationError(message, hint=(f"--{near_flags[0]}",))
    if command in COMMANDS_WITH_OVERRIDES:
        return ConfigurationError(
            f"{message}. Options without a flag are set as KEY=VALUE", hint=("ssl-bench", "keys")
        )
    return ConfigurationError(message, hint=("ssl-bench", command, "--help"))


def _join_values(arguments: Sequence[str]) -> list[str]:
    """Join the flags `--layer` and `--checkpoint` with their values, as FLAG=VALUE.

    Without FLAG=VALUE, argparse would read the value of `--layer -1,0` as a flag. For `--checkpoint
    runs/*`, a shell passes several words such as `--checkpoint A B C`, which become `--checkpoint=A
    --checkpoint=B --checkpoint=C`.
    """
    joined: list[str] = []
    for word in arguments:
        last = joined[-1] if joined else ""
        if last in ("--layer", "--checkpoint"):
            joined[-1] = f"{last}={word}"
        elif last.startswith("--checkpoint=") and not ("=" in word or word.startswith("-")):
            joined.append(f"--checkpoint={word}")
        else:
            joined.append(word)
    return joined


def _overrides_of_flags(options: argparse.Namespace, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the KEY=VALUE setting that each flag abbreviates, such as `seed=3` for `--seed 3`.

    Raises:
        ConfigurationError: A flag and `overrides` set the same key.
    """
    typed = {override.partition("=")[0]: override for override in overrides}
    for name, key in KEY_OF_FLAG.get(options.command, {}).items():
        value = getattr(options, name)
        if value is None:
            continue
        if key in typed:
            flag = name.replace("_", "-")
            raise ConfigurationError(
                f"--{flag} {value} and {typed[key]} both set {key}. Remove one of them"
            )
        yield f"{key}={value}"


def _add_probe(parser: _Parser) -> None:
    add = parser.add_argument
    task = "tasks such as tokencut, segmentation or knn, separated by commas, or all"
    add("--task", required=True, help=task)
    _add_probing(parser)
    _add_run(parser)
    parser.add_switch("--json", "print the records as JSON instead of tables")


def _add_card(parser: _Parser) -> None:
    parser.add_argument("--task", default="all", help=_TASKS_HELP)
    _add_probing(parser)
    _add_run(parser)
    parser.add_argument("--format", help=_FORMATS)


def _add_features(parser: _Parser) -> None:
    add = parser.add_argument
    uri = "encoder, as for `ssl-bench probe` (default: the newest checkpoint in runs/)"
    add("--checkpoint", metavar="URI", help=uri)
    add(
        "--dataset",
        default="folder",
        help="dataset such as folder, class_folders or voc2012 (default: folder)",
    )
    add("--data-root", metavar="DIR", help="folder of the dataset")
    split = "splits (train, val, images, discovery), separated by commas (default: all)"
    add("--split", help=split)
    add("--layer", default="all", help=_LAYERS_HELP)
    facet = "kinds of features (token, cls, key, ...), separated by commas (default: cls)"
    add("--facet", default="cls", help=facet)
    size = "height and width of the images in pixels (default: the encoder's native size)"
    add("--image-size", type=int, metavar="N", help=size)
    add(
        "--format",
        default="safetensors",
        help="file format, safetensors or npz (default: safetensors)",
    )
    dtype = "number format of the files, float32 or float16 (default: float32)"
    add("--dtype", default="float32", help=dtype)
    out = "folder for the files. Complete files in this folder are kept"
    add("--out", required=True, metavar="DIR", help=out)
    add("--device", help=_DEVICE)
    add("--batch-size", type=int, metavar="N", help=_BATCH)
    add("--limit", type=int, metavar="N", help=_LIMIT)
    add("--on-bad-image", metavar="fail|skip", help=_BAD_IMAGE)


def _add_sweep(parser: _Parser) -> None:
    add = parser.add_argument
    add("--task", default="all", help=_TASKS_HELP)
    _add_probing(parser)
    jobs = (
        "run N processes at a time. If there are fewer than N jobs, the blocks of an encoder are "
        "divided among several jobs (default: 1)"
    )
    add("--jobs", type=int, default=1, metavar="N", help=jobs)
    parser.add_switch("--json", "print the jobs and their outcomes as JSON")
    parser.add_switch(
        "--dry-run",
        "print a table of the jobs, with times estimated from results of fewer images, and stop",
    )
    add_exclusive = parser.add_mutually_exclusive_group().add_argument
    add_exclusive("--print", action="store_true", help="print the command of each unfinished job")
    add_exclusive(
        "--slurm",
        action="store_true",
        help="submit the unfinished jobs as a SLURM array (needs ssl-bench[slurm])",
    )
    # Users set other SLURM options with the environment variables SBATCH_* of sbatch.
    add(
        "--slurm-partition", metavar="NAME", help="SLURM partition (default: the cluster's default)"
    )
    minutes = "time limit per job in minutes (default: 240)"
    add("--slurm-minutes", type=int, default=240, metavar="N", help=minutes)
    add("--slurm-gpus", type=int, default=1, choices=(0, 1), help="GPUs per job (default: 1)")
    add("--slurm-cpus", type=int, default=8, metavar="N", help="CPU cores per job (default: 8)")
    add("--slurm-logs", metavar="DIR", help="folder for the logs (default: OUT/slurm)")


def _add_pretrain(parser: _Parser) -> None:
    add = parser.add_argument
    add("--out", metavar="DIR", help="run folder (default: runs/MODEL-OPTIMIZER-TIME)")
    add("--data-root", metavar="DIR", help="folder of images, or tar files (default: toy scenes)")
    add("--device", help=_DEVICE)
    parser.add_switch("--resume", "continue the run in --out if there is one")
    must = "continue the run in --out, or fail if there is none"
    add("--resume=must", action="store_true", dest="must_resume", help=must)
    extend = "continue a finished run with a larger train.epochs or train.max_steps"
    parser.add_switch("--extend", extend)
    parser.add_switch("--overwrite", "delete the run in --out and start again")
    bad_image = (
        "reaction to an unreadable image: fail stops the run, skip uses the next image (short for "
        "data.on_bad_image)"
    )
    add("--on-bad-image", metavar="fail|skip", help=bad_image)
    _add_short_forms(parser, seed="train.seed", batch=_TRAINING_BATCH)
    _add_previews(parser)


def _add_reproduce(parser: _Parser) -> None:
    add = parser.add_argument
    add("name", nargs="?", metavar="PAPER/TABLE", help="table to show (default: list all tables)")
    add("--row", action="append", metavar="ROW", help="reproduce only this row. May be repeated")
    add("--dataset", metavar="NAME", help="probe only these datasets, separated by commas")
    add("--data-root", metavar="NAME=DIR", help="folders of the datasets, separated by commas")
    add("--runs", default="runs", metavar="DIR", help="folder of the runs (default: runs)")
    add("--out", default="results", metavar="DIR", help=_RESULTS)
    add("--device", help=_DEVICE)
    gpus = "with --print: train on N GPUs with torchrun, and run each probe on one GPU"
    add("--gpus", type=int, metavar="N", help=gpus)
    add_exclusive = parser.add_mutually_exclusive_group().add_argument
    add_exclusive("--run", action="store_true", help="run the unfinished steps on this machine")
    add_exclusive("--print", action="store_true", help="print the commands of all steps in order")
    add_exclusive(
        "--table", action="store_true", help="print our values next to the published ones"
    )


def _add_table(parser: _Parser) -> None:
    add = parser.add_argument
    _add_filters(parser)
    add("--layer", default="all", help=_LAYERS_HELP)
    add("--format", help=_FORMATS)
    add("--out", default="results", metavar="DIR", help=_RECORDS)
    parser.add_switch("--pivot", "print encoders as rows, and datasets and metrics as columns")
    parser.add_switch("--over-epochs", "print the epochs of a run as rows, and blocks as columns")
    steps = (
        "print the training logs of runs, with steps as rows, and runs and measures as columns. "
        "RUN is a run folder or a folder of runs"
    )
    add("--over-steps", nargs="+", metavar="RUN", help=steps)
    severity = "print blocks as rows, and the severities of a corruption as columns"
    parser.add_switch("--over-severity", severity)
    paper = "print our values next to a published table (table2, figure3, mnist, ...)"
    add("--paper", metavar="TABLE", help=paper)
    row = "show the scores of this checkpoint in a row of the published table. May be repeated"
    add("--as", action="append", dest="encoders", metavar="ROW=CHECKPOINT", help=row)
    best = (
        "how --pivot and --paper choose a block: on held-out images (holdout) or by the best score "
        "(oracle). Default: holdout, but with --paper the choice of the paper"
    )
    add("--best-layer", metavar="holdout|oracle", help=best)
    add("--figure", metavar="FILE", help="also draw the curves (.png, .svg or .pdf)")
    pack = "move all records and per-image values to OUT/records.parquet and stop"
    parser.add_switch("--pack", pack)


def _add_compare(parser: _Parser) -> None:
    add = parser.add_argument
    name = "encoder: its name in tables, the first digits of its id or sha256, or its URI"
    add("checkpoints", nargs="+", metavar="CHECKPOINT", help=name)
    epochs = "compare two runs at each epoch that was probed in both runs"
    parser.add_switch("--over-epochs", epochs)
    _add_filters(parser)
    parser.add_switch("--all-metrics", "compare all metrics, not only the main metric of each task")
    add("--format", help=_FORMATS)
    add("--out", default="results", metavar="DIR", help=_RECORDS)


def _add_report(parser: _Parser) -> None:
    add = parser.add_argument
    _add_filters(parser)
    add("--layer", default="all", help=_LAYERS_HELP)
    add("--out", default="results", metavar="DIR", help=_RECORDS)
    add("--into", metavar="DIR", help="folder for the report (default: OUT/report)")
    runs = (
        "draw the training logs of these run folders or folders of runs (default: the runs in "
        "runs/ and next to --out whose checkpoints have records)"
    )
    add("--runs", nargs="+", dest="run_folders", metavar="RUN", help=runs)
    pair = (
        "compare two checkpoints. May be repeated (default: all pairs if the report has at most 6 "
        "checkpoints)"
    )
    add("--pair", action="append", nargs=2, metavar=("A", "B"), help=pair)


def _add_data(parser: _Parser) -> None:
    parser.description = """\
  list [NAME]     show source, licence, size, folder tree and classes of datasets
  download NAME   download and unpack a dataset
  check NAME      count the images of each split and read a sample
  verify DIR      list the sha256 of all files, or compare the files with an existing list
  shrink DIR      write smaller copies of images for pretraining
"""
    add = parser.add_argument
    add("action", choices=("list", "download", "check", "verify", "shrink"), help="action to run")
    target = "name of a dataset (for verify and shrink: a folder)"
    add("target", nargs="?", metavar="NAME|DIR", help=target)
    add("--data-root", metavar="DIR", help="for download and check: folder of the dataset")
    parser.add_switch("--subset", "for check: accept a dataset with fewer images than published")
    add("--manifest", metavar="FILE", help="for verify: list of files (default: DIR/SHA256SUMS)")
    parser.add_switch("--update", "for verify: write a new list of the present files")
    side = "for shrink: shorter side of the copies in pixels (default: 256)"
    add("--side", type=int, default=256, metavar="N", help=side)
    add("--out", metavar="DIR", help="for shrink: folder for the copies")
    parser.add_switch("--json", "print the result as JSON")


def _add_models(parser: _Parser) -> None:
    uris = "checkpoints to describe (default: list the supported kinds of checkpoints)"
    parser.add_argument("uris", nargs="*", metavar="URI", help=uris)
    parser.add_switch("--json", "print the result as JSON")


def _add_quickstart(parser: _Parser) -> None:
    out = "folder for the run, the results and the report (default: runs/quickstart)"
    parser.add_argument("--out", default="runs/quickstart", metavar="DIR", help=out)
    parser.add_switch("--overwrite", "compute everything again")


def _add_doctor(parser: _Parser) -> None:
    root = "also look for datasets in this folder, or in the folders DATASET=DIR,DATASET=DIR"
    parser.add_argument("--data-root", metavar="DIR", help=root)
    parser.add_switch("--json", "print the result as JSON")


def _add_keys(parser: _Parser) -> None:
    target = "target such as pretrain, probe.TASK or dataset.NAME (default: list all targets)"
    parser.add_argument("target", nargs="?", metavar="TARGET", help=target)


def _add_completion(parser: _Parser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish", "tcsh"), help="your shell")


def _add_probing(parser: _Parser) -> None:
    """Add the flags that `probe`, `card` and `sweep` share."""
    add = parser.add_argument
    add("--layer", default="all", help=_LAYERS_HELP)
    uris = (
        "run folder, RUN@EPOCH, weights file, timm:NAME, pattern such as 'runs/*', or another URI "
        "listed by `ssl-bench models`. May be repeated (default: the newest checkpoint in runs/)"
    )
    add("--checkpoint", action="append", metavar="URI", help=uris)
    baselines = "also probe each encoder with random weights, and the raw colours of patches"
    parser.add_switch("--baselines", baselines)
    add("--dataset", default="toy", help="datasets, separated by commas (default: toy)")
    root = "folder of the dataset (for several datasets: DATASET=DIR,DATASET=DIR)"
    add("--data-root", metavar="DIR", help=root)
    add("--out", default="results", metavar="DIR", help=_RESULTS)
    add("--device", help=_DEVICE)
    add("--on-bad-image", metavar="fail|skip", help=_BAD_IMAGE)
    _add_short_forms(parser)


def _add_run(parser: _Parser) -> None:
    """Add the flags that `probe` and `card` share."""
    pictures = "number of example figures to draw, 0 for none (short for probe.panels=N)"
    parser.add_argument("--pictures", type=int, metavar="N", help=pictures)
    parser.add_switch("--overwrite", "compute results again that are already stored")
    _add_previews(parser)


def _add_short_forms(parser: _Parser, *, seed: str = "seed", batch: str = _BATCH) -> None:
    """Add flags that are short forms of configuration keys, such as `--seed`.

    The flags have no defaults of their own, because the configuration defines the defaults.

    Args:
        parser: Parser of the command.
        seed: The key that `--seed` sets.
        batch: Help text of `--batch-size`.
    """
    add = parser.add_argument
    add("--limit", type=int, metavar="N", help=_LIMIT)
    add("--seed", type=int, metavar="N", help=f"random seed (short for {seed}=N)")
    add("--batch-size", type=int, metavar="N", help=batch)


def _add_previews(parser: _Parser) -> None:
    parser.add_switch("--dry-run", "print what would be done and stop")
    parser.add_switch("--print-config", "print the resolved configuration and stop")


def _add_filters(parser: _Parser) -> None:
    parser.add_argument("--task", default="all", help=_TASKS_HELP)
    for name in ("dataset", "metric", "facet", "protocol"):
        parser.add_argument(
            f"--{name}", help=f"only use scores of these {name}s, separated by commas"
        )


_COMMANDS = {
    "probe": ("evaluate the blocks of frozen encoders", _add_probe),
    "card": ("run all probes and print the score, time and memory of each", _add_card),
    "features": ("write the features of images to files", _add_features),
    "sweep": ("probe many checkpoints on many datasets", _add_sweep),
    "pretrain": ("pretrain an encoder", _add_pretrain),
    "reproduce": ("reproduce a published table", _add_reproduce),
    "table": ("print tables of results", _add_table),
    "compare": (
        "compare two checkpoints, or the blocks of one checkpoint, on the same images",
        _add_compare,
    ),
    "report": ("write an HTML report of results", _add_report),
    "models": ("list the supported kinds of checkpoints, or describe checkpoints", _add_models),
    "data": ("list, download, check, verify or shrink datasets", _add_data),
    "quickstart": ("pretrain a tiny encoder and run all probes on it", _add_quickstart),
    "doctor": ("show versions, devices and caches", _add_doctor),
    "keys": ("list KEY=VALUE options with their values and defaults", _add_keys),
    "completion": (
        'print a completion script for a shell: eval "$(ssl-bench completion bash)"',
        _add_completion,
    ),
}
