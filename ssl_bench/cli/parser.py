"""From the words that are typed to the command that they name, or to what may have been meant.

Flags are for what people type daily, Hydra overrides for the rest. Imports nothing heavy, so that
help answers at once.
"""

import argparse
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ssl_bench import __version__
from ssl_bench.errors import ConfigurationError, escape_braces, join_alternatives
from ssl_bench.system.paths import expand_path

if TYPE_CHECKING:
    from ssl_bench.request import ProbeRequest

EPILOG = """\
examples:
  ssl-bench quickstart
  ssl-bench pretrain model=vit_small_skipless data.root=/photos --out runs/skipless
  ssl-bench probe --task tokencut --layer 11
  ssl-bench probe --task all --checkpoint runs/skipless --dataset voc2012 --data-root /data
  ssl-bench probe --task segmentation --layer 0,5,-1 probe.protocol=fast probe.training.epochs=10
  ssl-bench features --checkpoint runs/skipless --data-root photos --facet cls_normed --out features
  ssl-bench sweep --checkpoint 'runs/*' --dataset voc2012,ade20k --data-root /data --dry-run
  ssl-bench table --pivot --metric corloc --best-layer holdout --format latex
  ssl-bench table --paper figure3 --as 'skip, adamw=runs/skip'
  ssl-bench reproduce cutting_the_skip/table2
  ssl-bench compare runs/skip runs/skipless --task tokencut
  ssl-bench report --out results

KEY=VALUE says what has no flag: model=vit_tiny_skip chooses configs/model/vit_tiny_skip.yaml,
probe.tau=0.3 sets a value, probe.neighbours=[10,20] a list, "probe.cache='/a b'" a text with
blanks. `ssl-bench keys` lists what there is, `ssl-bench keys probe.tokencut` what one takes, with
ranges and defaults; a wrong key names the nearest. --seed 3 is short for seed=3, or train.seed=3.
"""
WITH_OVERRIDES = ("probe", "features", "sweep", "pretrain", "reproduce", "data", "keys")
_KEY_VALUE = "KEY=VALUE, such as {}, sets what has no flag; `ssl-bench keys {}` lists every key"
_EXAMPLES = {
    "probe": ("probe.tau=0.3 or probe.neighbours=[10,20]", "probe.TASK"),
    "sweep": ("probe.tau=0.3 or probe.neighbours=[10,20]", "probe.TASK"),
    "pretrain": ("model=vit_tiny_skip or train.epochs=10", "pretrain"),
}
_TASKS = "several with commas, or all (default all)"
_LAYERS = "blocks from 0: 11, -1, 0,5,11, 0-3 or all (default all)"
_DEVICE = "cpu, cuda, cuda:1 (default: a GPU if there is one)"
_RECORDS = "where the records are (default results)"
_LIMIT = "at most N images of each split, spread evenly over it: data.limit=N"
_BATCH = "images that the encoder takes at once"
_TRAINING_BATCH = "images in one optimisation step, over all GPUs: train.batch_size=N"
_SKIP = (
    "skip: leave out images that cannot be read and say so in what is written (default fail; of "
    "folder skip)"
)
_Add = Callable[..., object]

_PATHS = ("out", "runs", "into", "figure", "manifest", "slurm_logs")
_PROBING = {"limit": "data.limit", "seed": "seed"}
_SHORT: Mapping[str, Mapping[str, str]] = {
    "features": {"limit": "data.limit"},
    "probe": _PROBING | {"pictures": "probe.panels"},
    "sweep": _PROBING,
    "pretrain": {
        "limit": "data.limit",
        "seed": "train.seed",
        "batch_size": "train.batch_size",
        "on_bad_image": "data.on_bad_image",
    },
}
"""What a flag is short for, by command; --batch-size of probes depends on the tasks."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message, hint=(*self.prog.split(), "--help"))


def build_parser() -> argparse.ArgumentParser:
    """All commands with their flags."""
    parser = _Parser(
        prog="ssl-bench",
        description="What does each block of this encoder know?",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ssl-bench {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (summary, add_flags) in _COMMANDS.items():
        example = _EXAMPLES.get(name)
        epilog = _KEY_VALUE.format(*example) if example else None
        command = commands.add_parser(name, help=summary, description=summary, epilog=epilog)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        add_flags(command)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Read the arguments and run their command; returns its exit code.

    Raises:
        SslBenchError: the arguments or what they ask for are wrong.
    """
    parser = build_parser()
    commands = dict(
        next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    )
    _require_known_words(parser, commands, arguments)
    words = _with_values_joined(arguments)
    # argparse takes this value for the end of all flags, and then has none to convert.
    if valueless := next((word for word in words if re.fullmatch(r"--.+=--", word)), None):
        raise ConfigurationError(f"{valueless.removesuffix('=--')} expects a value, got '--'")
    options, rest = parser.parse_known_args(words)
    for name in _PATHS:
        if (text := getattr(options, name, None)) is not None:
            setattr(options, name, str(expand_path(text)))
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    unknown = [word for word in rest if word not in overrides]
    if unknown:
        raise _unknown_argument(options.command, _flags(commands[options.command]), unknown[0])
    if overrides and options.command not in WITH_OVERRIDES:
        raise ConfigurationError(f"`ssl-bench {options.command}` takes no {overrides[0]!r}")
    overrides = _with_short_forms(options, overrides)
    # Imported here because torch alone takes seconds and `--help` needs none of it.
    command = import_module(f"ssl_bench.cli.{options.command}").command
    return command(options, overrides) if options.command in WITH_OVERRIDES else command(options)


def _require_known_words(
    parser: argparse.ArgumentParser,
    commands: Mapping[str, argparse.ArgumentParser],
    words: Sequence[str],
) -> None:
    """Refuse a command or a flag that there is not, before something else is found missing."""
    command = next((word for word in words if not word.startswith("-")), None)
    if command is None:
        return
    if words[0].startswith("-") and any(word in commands for word in words):
        meant = next(word for word in words if word in commands)
        raise ConfigurationError(
            f"the command comes first, got {words[0]!r} before it",
            hint=("ssl-bench", meant, "--help"),
        )
    if command not in commands:
        close = difflib.get_close_matches(command[:100], commands, n=1)
        listed = "" if close else f"; commands: {', '.join(commands)}"
        meant = close[0] if close else "--help"
        raise ConfigurationError(f"unknown command {command!r}{listed}", hint=("ssl-bench", meant))
    known = [*_flags(commands[command]), *_flags(parser)]
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("--") and not any(one.startswith(flag) for one in known):
            raise _unknown_argument(command, _flags(commands[command]), word)


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings if flag != "-h"]


def _unknown_argument(command: str, flags: Sequence[str], word: str) -> ConfigurationError:
    """Return the error on a word that is no flag of a command, with what may have been meant."""
    unknown, flag = f"unknown argument {word!r}", word.partition("=")[0]
    folder_flag = next((one for one in ("--data-root", "--out") if one in flags), None)
    if folder_flag and not word.startswith("-") and Path(word).is_dir():
        return ConfigurationError(
            f"{unknown}, which is a folder", hint=(folder_flag, escape_braces(word))
        )
    name, names = flag[:100].lstrip("-").replace("_", "-"), [flag.lstrip("-") for flag in flags]
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.65):
        return ConfigurationError(unknown, hint=(f"--{close[0]}",))
    if flag.startswith("--") and (keys := _keys_called(flag[2:].replace("-", "_"), command)):
        ways = [(f"{key}={{value}}",) for key in keys]
        return ConfigurationError(
            f"{unknown}, what has no flag is KEY=VALUE", hint=join_alternatives(*ways)
        )
    return ConfigurationError(
        f"{unknown}; flags: {', '.join(flags)}; what has none is KEY=VALUE",
        hint=("ssl-bench", "keys"),
    )


def _keys_called(name: str, command: str) -> list[str]:
    """Such as probe.facet of facet; takes seconds."""
    if command not in _EXAMPLES:
        return []
    from ssl_bench.composition.choices import choices
    from ssl_bench.composition.compose import compose_config, list_keys
    from ssl_bench.request import probing_config

    configs = [compose_config("pretraining", [])]
    if command != "pretrain":
        configs = [probing_config(task, "toy", []) for task in choices("probe")]
    found = (key for config in configs for key in list_keys(config))
    return list(dict.fromkeys(key for key in found if key.rpartition(".")[2] == name))


def _with_values_joined(arguments: Sequence[str]) -> list[str]:
    """`--layer -1,0` as one word, because argparse takes -1,0 for a flag.

    And `--checkpoint A B C` as three, as a shell leaves `--checkpoint runs/x/epoch*`.
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


def _with_short_forms(options: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """The overrides behind those that flags are short for."""
    given = {override.partition("=")[0]: override for override in overrides}
    said = []
    for flag, key in _SHORT.get(options.command, {}).items():
        value = getattr(options, flag)
        if value is not None and key in given:
            word = flag.replace("_", "-")
            raise ConfigurationError(
                f"--{word} {value} is short for {key}={value}; leave it or {given[key]} out"
            )
        if value is not None:
            said.append(f"{key}={value}")
    return [*said, *overrides]


def probe_request(options: argparse.Namespace, overrides: Sequence[str]) -> "ProbeRequest":
    """Build the request of `probe` or `sweep` from its flags and KEY=VALUE settings.

    Raises:
        ConfigurationError: A task, dataset, folder or device is wrong.
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


def _add_probe(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--task",
        required=True,
        help="such as tokencut, segmentation, pca, knn, retrieval; several with commas, or all",
    )
    _add_probing(add)
    add(
        "--pictures",
        type=int,
        metavar="N",
        help="draw N images, of hits and misses N each (0: none): probe.panels=N",
    )
    add("--overwrite", action="store_true", help="compute again what is finished")
    _add_showing(add)
    add("--json", action="store_true", help="print the records as JSON instead of tables")


def _add_features(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--checkpoint", metavar="URI", help="as of probe (default: the newest below runs/)")
    datasets = "such as folder, class_folders, voc2012 (default folder)"
    add("--dataset", default="folder", help=datasets)
    add("--data-root", metavar="DIR", help="where the data lies")
    add("--split", help="train, val, images or discovery, with commas (default: what there is)")
    add("--layer", default="all", help=_LAYERS)
    add("--facet", default="cls", help="token, cls, key and others, with commas (default cls)")
    add("--image-size", type=int, metavar="N", help="side in pixels (default: the encoder's own)")
    add("--format", default="safetensors", help="safetensors or npz (default safetensors)")
    add("--dtype", default="float32", help="float32 or float16, of the files (default float32)")
    add("--out", required=True, metavar="DIR", help="where the files go; what is there is kept")
    add("--device", help=_DEVICE)
    add("--batch-size", type=int, metavar="N", help=_BATCH)
    add("--limit", type=int, metavar="N", help=_LIMIT)
    add("--on-bad-image", metavar="fail|skip", help=_SKIP)


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--task", default="all", help=_TASKS)
    _add_probing(add)
    jobs = "processes at a time (default 1); more than there are jobs share their blocks"
    add("--jobs", type=int, default=1, metavar="N", help=jobs)
    add("--json", action="store_true", help="print plan and outcome as JSON")
    add("--dry-run", action="store_true", help="only show the plan (with --slurm: of the array)")
    way = parser.add_mutually_exclusive_group().add_argument
    way("--print", action="store_true", help="print a command for each job that is not finished")
    way("--slurm", action="store_true", help="submit the jobs as a SLURM array (extra: slurm)")
    # The rest goes through sbatch's SBATCH_* variables.
    add("--slurm-partition", metavar="NAME", help="default: the cluster's own")
    add("--slurm-minutes", type=int, default=240, metavar="N", help="for each job (default 240)")
    add("--slurm-gpus", type=int, default=1, choices=(0, 1), help="for each job (default 1)")
    add("--slurm-cpus", type=int, default=8, metavar="N", help="for each job (default 8)")
    add("--slurm-logs", metavar="DIR", help="logs of the jobs (default OUT/slurm)")


def _add_pretrain(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", metavar="DIR", help="run folder (default runs/MODEL-OPTIMIZER-TIME)")
    add("--data-root", metavar="DIR", help="folder of images (default: the toy scenes)")
    add("--device", help=_DEVICE)
    add("--resume", action="store_true", help="go on from the state in --out, if there is one")
    add("--resume=must", action="store_true", dest="must_resume", help="there has to be one")
    longer = "go on for longer: with more train.epochs or train.max_steps than before"
    add("--extend", action="store_true", help=longer)
    add("--overwrite", action="store_true", help="begin anew in a folder that holds a run")
    skip = "skip: take the next one for an image that cannot be read (data.on_bad_image)"
    add("--on-bad-image", metavar="fail|skip", help=skip)
    _add_short(add, batch=_TRAINING_BATCH)
    _add_showing(add)


def _add_reproduce(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", nargs="?", metavar="PAPER/TABLE", help="without one all tables are listed")
    add("--row", action="append", metavar="ROW", help="only this row; may be repeated")
    add("--dataset", metavar="NAME", help="only the columns on these datasets, with commas")
    add("--data-root", metavar="NAME=DIR", help="where images lie; several with commas")
    add("--runs", default="runs", metavar="DIR", help="where run folders are (default runs)")
    add("--out", default="results", metavar="DIR", help="records and pictures (default results)")
    add("--device", help=_DEVICE)
    gpus = "with --print: trainings by torchrun on N GPUs, probes one a GPU in turn"
    add("--gpus", type=int, metavar="N", help=gpus)
    way = parser.add_mutually_exclusive_group().add_argument
    way("--run", action="store_true", help="run it here; what is finished is skipped")
    way("--print", action="store_true", help="print its commands in order")
    way("--table", action="store_true", help="only print ours beside the published values")


def _add_table(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--task", default="all", help=_TASKS)
    _add_filters(add)
    add("--layer", default="all", help=_LAYERS)
    _add_format(add)
    add("--out", default="results", metavar="DIR", help=_RECORDS)
    add("--pivot", action="store_true", help="encoders as rows, datasets and metrics as columns")
    add("--over-epochs", action="store_true", help="a run's epochs as rows, blocks as columns")
    add("--over-severity", action="store_true", help="blocks against severities of a corruption")
    add("--paper", metavar="TABLE", help="ours beside a published table: table2, figure3, mnist")
    row = "which checkpoint stands for a row of the published table; may be repeated"
    add("--as", action="append", dest="encoders", metavar="ROW=CHECKPOINT", help=row)
    best = (
        "of --pivot and --paper: the block that other images choose, or the best (default: "
        "holdout; of --paper as the paper chose it)"
    )
    add("--best-layer", metavar="holdout|oracle", help=best)
    add("--figure", metavar="FILE", help="draw the curves too (.png, .svg, .pdf)")
    add(
        "--pack",
        action="store_true",
        help="only move all records, and what images gave, to OUT/records.parquet",
    )


def _add_compare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    name = "name in tables, digits of its id or sha256, or URI"
    add("checkpoints", nargs="+", metavar="CHECKPOINT", help=name)
    add("--over-epochs", action="store_true", help="two runs, at each epoch that both kept")
    add("--task", default="all", help=_TASKS)
    _add_filters(add)
    add("--all-metrics", action="store_true", help="all metrics, not the main one of each task")
    _add_format(add)
    add("--out", default="results", metavar="DIR", help=_RECORDS)


def _add_report(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--task", default="all", help=_TASKS)
    _add_filters(add)
    add("--layer", default="all", help=_LAYERS)
    add("--out", default="results", metavar="DIR", help=_RECORDS)
    add("--into", metavar="DIR", help="folder of the report (default OUT/report)")
    pair = "put two checkpoints side by side; may be repeated (default: all pairs of up to 6)"
    add("--pair", action="append", nargs=2, metavar=("A", "B"), help=pair)


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "list [NAME]: where datasets come from, their licence, size, tree and classes. "
        "download NAME: fetch and unpack one. check NAME: what is missing or unreadable. "
        "verify DIR: list the sha256 of its files, later compare them with that list."
    )
    add = parser.add_argument
    add("action", choices=("list", "download", "check", "verify"), help="what to do")
    add("target", nargs="?", metavar="NAME|DIR", help="a dataset, or the folder of verify")
    add("--data-root", metavar="DIR", help="where the data lies or shall lie (download, check)")
    subset = "check: these are some of the published images, as many as there are"
    add("--subset", action="store_true", help=subset)
    add("--manifest", metavar="FILE", help="list of verify (default DIR/SHA256SUMS)")
    add("--update", action="store_true", help="let verify write its list anew")
    add("--json", action="store_true", help="print what was found as JSON")


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("uris", nargs="*", metavar="FILE_OR_URI", help="what --checkpoint takes")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def _add_quickstart(parser: argparse.ArgumentParser) -> None:
    place = "runs/quickstart"
    parser.add_argument("--out", default=place, metavar="DIR", help=f"default {place}")
    parser.add_argument("--overwrite", action="store_true", help="begin anew")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    place = "look for datasets here, or in DATASET=DIR,DATASET=DIR"
    parser.add_argument("--data-root", metavar="DIR", help=place)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def _add_keys(parser: argparse.ArgumentParser) -> None:
    what = "pretrain, probe.TASK, dataset.NAME, model.NAME, ...; without it: what there is"
    parser.add_argument("target", nargs="?", metavar="WHAT", help=what)


def _add_completion(parser: argparse.ArgumentParser) -> None:
    shells, what = ("bash", "zsh", "fish", "tcsh"), "the shell that will read it"
    parser.add_argument("shell", choices=shells, help=what)


def _add_probing(add: _Add) -> None:
    """What is asked of which encoders and data."""
    add("--layer", default="all", help=_LAYERS)
    uris = (
        "run folder, RUN@EPOCH, weights file, timm:NAME and others that `ssl-bench models` lists; "
        "several, or patterns such as 'runs/*' (default: the newest below runs/)"
    )
    add("--checkpoint", action="append", metavar="URI", help=uris)
    random = "probe these encoders with random weights too, and plain colours"
    add("--baselines", action="store_true", help=random)
    datasets = (
        "several with commas (default toy); a part of a published set is recorded as NAME-COUNT, "
        "with --limit N as NAME-limitN"
    )
    add("--dataset", default="toy", help=datasets)
    several = "where the data lies; DATASET=DIR,DATASET=DIR for several"
    add("--data-root", metavar="DIR", help=several)
    add("--out", default="results", metavar="DIR", help="records and pictures (default results)")
    add("--device", help=_DEVICE)
    add("--on-bad-image", metavar="fail|skip", help=_SKIP)
    _add_short(add)


def _add_short(add: _Add, batch: str = _BATCH) -> None:
    """Short forms of keys, which are where their defaults stand; see `_SHORT`."""
    add("--limit", type=int, metavar="N", help=_LIMIT)
    add("--seed", type=int, metavar="N", help="short for seed=N; of pretrain train.seed=N")
    add("--batch-size", type=int, metavar="N", help=batch)


def _add_showing(add: _Add) -> None:
    add("--dry-run", action="store_true", help="say what would be done, and stop")
    add("--print-config", action="store_true", help="print all values that hold, and stop")


def _add_format(add: _Add) -> None:
    formats = "text, terminal, markdown, latex, csv, json or parquet (default text or terminal)"
    add("--format", help=formats)


def _add_filters(add: _Add) -> None:
    for name in ("dataset", "metric", "facet", "protocol"):
        add(f"--{name}", help=f"only these {name}s, with commas")


_COMMANDS = {
    "probe": ("probe the blocks of frozen encoders", _add_probe),
    "features": (
        "write features of every image of a dataset, of any blocks, as files with an index",
        _add_features,
    ),
    "sweep": (
        "probe many checkpoints on many datasets: here, as commands, or as a SLURM array",
        _add_sweep,
    ),
    "pretrain": ("pretrain an encoder", _add_pretrain),
    "reproduce": ("the runs and probes of a published table, and ours beside it", _add_reproduce),
    "table": ("print tables over blocks from records", _add_table),
    "compare": (
        "compare two checkpoints (A - B), or the blocks of one, over the same images",
        _add_compare,
    ),
    "report": (
        "write a folder of pages with curves, tables and pictures from records",
        _add_report,
    ),
    "models": ("list what can be loaded, or say what a file of weights is", _add_models),
    "data": ("list, download, check or verify datasets", _add_data),
    "quickstart": ("a tiny pretraining, then all probes of it and of ours", _add_quickstart),
    "doctor": ("show versions, devices, disk, data and what is missing", _add_doctor),
    "keys": ("list KEY=VALUE arguments: what each takes, and its default", _add_keys),
    "completion": (
        'print a script for the shell: eval "$(ssl-bench completion bash)"',
        _add_completion,
    ),
}
