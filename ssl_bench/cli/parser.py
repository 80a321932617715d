"""The arguments of `ssl-bench`: flags for what people type daily, Hydra overrides for the rest."""

import argparse
from typing import NoReturn

from ssl_bench import __version__
from ssl_bench.cli.flags import (
    add_filters,
    add_format,
    add_on_bad_image,
    add_probing,
    add_short,
    add_showing,
)
from ssl_bench.errors import ConfigurationError
from ssl_bench.reproduce.arguments import add_arguments

EPILOG = """\
examples:
  ssl-bench quickstart
  ssl-bench pretrain model=vit_small_skipless data.root=/photos --out runs/skipless
  ssl-bench probe --task tokencut --layer 11
  ssl-bench probe --task all --checkpoint runs/skipless --dataset voc2012 --data-root /data
  ssl-bench probe --task segmentation --layer 0,5,-1 probe.protocol=fast probe.training.epochs=10
  ssl-bench features --checkpoint runs/skipless --data-root photos --facet cls,token --out features
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; see `{self.prog} --help`")


def build_parser() -> argparse.ArgumentParser:
    """All commands with their flags; imports nothing heavy, so that help answers at once."""
    parser = _Parser(
        prog="ssl-bench",
        description="What does each block of this encoder know?",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ssl-bench {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_probe(commands)
    _add_features(commands)
    _add_sweep(commands)
    _add_pretrain(commands)
    _add_reproduce(commands)
    _add_table(commands)
    _add_compare(commands)
    _add_report(commands)
    _add_models(commands)
    _add_data(commands)
    _add_quickstart(commands)
    _add_doctor(commands)
    _add_keys(commands)
    _add_completion(commands)
    return parser


def _command(
    commands: "argparse._SubParsersAction[_Parser]", name: str, summary: str
) -> argparse.ArgumentParser:
    example = _EXAMPLES.get(name)
    command = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=_KEY_VALUE.format(*example) if example else None,
    )
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return command


def _add_probe(commands: "argparse._SubParsersAction[_Parser]") -> None:
    probe = _command(commands, "probe", "probe the blocks of frozen encoders")
    add = probe.add_argument
    add(
        "--task",
        required=True,
        help="such as tokencut, segmentation, pca, knn, retrieval; several with commas, or all",
    )
    add_probing(add)
    add("--pictures", type=int, metavar="N", help="draw so many of the images: probe.panels=N")
    add("--overwrite", action="store_true", help="compute again what is finished")
    add_showing(add)
    add("--json", action="store_true", help="print the records as JSON instead of tables")


def _add_features(commands: "argparse._SubParsersAction[_Parser]") -> None:
    summary = "write features of every image of a dataset, of any blocks, as files with an index"
    add = _command(commands, "features", summary).add_argument
    add("--checkpoint", metavar="URI", help="as of probe (default: the newest below runs/)")
    add(
        "--dataset",
        default="folder",
        help="such as folder, class_folders, voc2012 (default folder)",
    )
    add("--data-root", metavar="DIR", help="where the data lies")
    add("--split", help="train, val, images or discovery, with commas (default: what there is)")
    add("--layer", default="all", help="blocks from 0: 11, -1, 0,5,11, 0-3 or all (default all)")
    add("--facet", default="cls", help="token, cls, key and others, with commas (default cls)")
    add("--image-size", type=int, metavar="N", help="side in pixels (default: the encoder's own)")
    add("--format", default="safetensors", help="safetensors or npz (default safetensors)")
    add("--dtype", default="float32", help="float32 or float16, of the files (default float32)")
    add("--out", required=True, metavar="DIR", help="where the files go; what is there is kept")
    add("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    add("--batch-size", type=int, metavar="N", help="images that the encoder takes at once")
    add("--limit", type=int, metavar="N", help="at most N images of each split: data.limit=N")
    add_on_bad_image(add)


def _add_sweep(commands: "argparse._SubParsersAction[_Parser]") -> None:
    summary = "probe many checkpoints on many datasets: here, as commands, or as a SLURM array"
    sweep = _command(commands, "sweep", summary)
    add = sweep.add_argument
    add("--task", default="all", help="several with commas, or all (default all)")
    add_probing(add)
    jobs = "processes at a time (default 1); more than there are jobs share their blocks"
    add("--jobs", type=int, default=1, metavar="N", help=jobs)
    add("--json", action="store_true", help="print plan and outcome as JSON")
    way = sweep.add_mutually_exclusive_group().add_argument
    way("--dry-run", action="store_true", help="only show the plan")
    way("--print", action="store_true", help="print a command for each job that is not finished")
    way("--slurm", action="store_true", help="submit the jobs as a SLURM array (extra: slurm)")
    # The rest goes through sbatch's SBATCH_* variables.
    add("--slurm-partition", metavar="NAME", help="default: the cluster's own")
    add("--slurm-minutes", type=int, default=240, metavar="N", help="for each job (default 240)")
    add("--slurm-gpus", type=int, default=1, choices=(0, 1), help="for each job (default 1)")
    add("--slurm-cpus", type=int, default=8, metavar="N", help="for each job (default 8)")
    add("--slurm-logs", metavar="DIR", help="logs of the jobs (default OUT/slurm)")


def _add_pretrain(commands: "argparse._SubParsersAction[_Parser]") -> None:
    pretrain = _command(commands, "pretrain", "pretrain an encoder")
    add = pretrain.add_argument
    add("--out", metavar="DIR", help="run folder (default runs/MODEL-OPTIMIZER-TIME)")
    add("--data-root", metavar="DIR", help="folder of images (default: the toy scenes)")
    add("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    add("--resume", action="store_true", help="go on from the state in --out, if there is one")
    add("--resume=must", action="store_true", dest="must_resume", help="there has to be one")
    add(
        "--extend",
        action="store_true",
        help="go on for longer: with more train.epochs or train.max_steps than before",
    )
    add("--overwrite", action="store_true", help="begin anew in a folder that holds a run")
    add(
        "--on-bad-image",
        metavar="fail|skip",
        help="skip: take the next one for an image that cannot be read (data.on_bad_image)",
    )
    add_short(add)
    add_showing(add)


def _add_reproduce(commands: "argparse._SubParsersAction[_Parser]") -> None:
    summary = "the runs and probes of a published table, and ours beside it"
    add_arguments(_command(commands, "reproduce", summary))


def _add_table(commands: "argparse._SubParsersAction[_Parser]") -> None:
    table = _command(commands, "table", "print tables over blocks from records")
    add = table.add_argument
    add("--task", default="all", help="several with commas, or all (default all)")
    add_filters(add)
    add("--layer", default="all", help="blocks from 0: 11, -1, 0,5,11, 0-3 or all (default all)")
    add_format(add)
    add("--out", default="results", metavar="DIR", help="where the records are (default results)")
    add("--pivot", action="store_true", help="encoders as rows, datasets and metrics as columns")
    add("--over-epochs", action="store_true", help="a run's epochs as rows, blocks as columns")
    add("--over-severity", action="store_true", help="blocks against severities of a corruption")
    add("--paper", metavar="TABLE", help="ours beside a published table: table2, figure3, mnist")
    add(
        "--as",
        action="append",
        dest="encoders",
        metavar="ROW=CHECKPOINT",
        help="which checkpoint stands for a row of the published table; may be repeated",
    )
    add(
        "--best-layer",
        metavar="holdout|oracle",
        help="of --pivot and --paper: the block that other images choose (default), or the best",
    )
    add("--figure", metavar="FILE", help="draw the curves too (.png, .svg, .pdf)")
    add("--into", metavar="FILE", help="put the Markdown tables between the markers of a document")


def _add_compare(commands: "argparse._SubParsersAction[_Parser]") -> None:
    summary = "compare two checkpoints (A - B), or the blocks of one, over the same images"
    add = _command(commands, "compare", summary).add_argument
    add(
        "checkpoints",
        nargs="+",
        metavar="CHECKPOINT",
        help="name in tables, digits of its id or sha256, or URI",
    )
    add("--over-epochs", action="store_true", help="two runs, at each epoch that both kept")
    add("--task", default="all", help="several with commas, or all (default all)")
    add_filters(add)
    add("--all-metrics", action="store_true", help="all metrics, not the main one of each task")
    add_format(add)
    add("--out", default="results", metavar="DIR", help="where the records are (default results)")


def _add_report(commands: "argparse._SubParsersAction[_Parser]") -> None:
    summary = "write a folder of pages with curves, tables and pictures from records"
    add = _command(commands, "report", summary).add_argument
    add("--task", default="all", help="several with commas, or all (default all)")
    add_filters(add)
    add("--layer", default="all", help="blocks from 0: 11, -1, 0,5,11, 0-3 or all (default all)")
    add("--out", default="results", metavar="DIR", help="where the records are (default results)")
    add("--into", metavar="DIR", help="folder of the report (default OUT/report)")
    add(
        "--pair",
        action="append",
        nargs=2,
        metavar=("A", "B"),
        help="put two checkpoints side by side; may be repeated (default: all pairs of up to 6)",
    )


def _add_models(commands: "argparse._SubParsersAction[_Parser]") -> None:
    summary = "list what can be loaded, or say what a file of weights is"
    add = _command(commands, "models", summary).add_argument
    add("uris", nargs="*", metavar="FILE_OR_URI", help="what --checkpoint takes")
    add("--json", action="store_true", help="print it as JSON")


def _add_data(commands: "argparse._SubParsersAction[_Parser]") -> None:
    summary = "list, download, check or verify datasets"
    data = _command(commands, "data", summary)
    data.description = (
        "list [NAME]: where datasets come from, their licence, size, tree and classes. "
        "download NAME: fetch and unpack one. check NAME: what is missing or unreadable. "
        "verify DIR: list the sha256 of its files, later compare them with that list."
    )
    add = data.add_argument
    add("action", choices=("list", "download", "check", "verify"), help="what to do")
    add("target", nargs="?", metavar="NAME|DIR", help="a dataset, or the folder of verify")
    add("--data-root", metavar="DIR", help="where the data lies or shall lie (download, check)")
    add(
        "--subset",
        action="store_true",
        help="check: these are some of the published images, as many as there are",
    )
    add("--manifest", metavar="FILE", help="list of verify (default DIR/SHA256SUMS)")
    add("--update", action="store_true", help="let verify write its list anew")
    add("--json", action="store_true", help="print what was found as JSON")


def _add_quickstart(commands: "argparse._SubParsersAction[_Parser]") -> None:
    quickstart = _command(
        commands, "quickstart", "a tiny pretraining, then all probes of it and of ours"
    )
    add = quickstart.add_argument
    add("--out", default="runs/quickstart", metavar="DIR", help="default runs/quickstart")
    add("--overwrite", action="store_true", help="begin anew")


def _add_doctor(commands: "argparse._SubParsersAction[_Parser]") -> None:
    summary = "show versions, devices, disk, data and what is missing"
    add = _command(commands, "doctor", summary).add_argument
    add("--data-root", metavar="DIR", help="look for datasets here, or in DATASET=DIR,DATASET=DIR")
    add("--json", action="store_true", help="print the findings as JSON")


def _add_keys(commands: "argparse._SubParsersAction[_Parser]") -> None:
    summary = "list KEY=VALUE arguments: what each takes, and its default"
    add = _command(commands, "keys", summary).add_argument
    add(
        "target",
        nargs="?",
        metavar="WHAT",
        help="pretrain, probe.TASK, dataset.NAME, model.NAME, ...; without it: what there is",
    )


def _add_completion(commands: "argparse._SubParsersAction[_Parser]") -> None:
    summary = 'print a script for the shell: eval "$(ssl-bench completion bash)"'
    add = _command(commands, "completion", summary).add_argument
    add("shell", choices=("bash", "zsh", "fish", "tcsh"), help="the shell that will read it")
