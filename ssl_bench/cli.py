"""The command `ssl-bench`: flags for what people type daily, Hydra overrides for the rest."""

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from ssl_bench import __version__
from ssl_bench.errors import INTERRUPTED, ConfigurationError, SslBenchError

EPILOG = """\
examples:
  ssl-bench quickstart
  ssl-bench pretrain model=vit_small_skipless data.root=/photos --out runs/skipless
  ssl-bench probe --task tokencut --layer 11
  ssl-bench probe --task all --checkpoint runs/skipless --dataset voc2012 --data-root /data
  ssl-bench probe --task segmentation --layer 0,5,-1 probe.protocol=fast probe.epochs=10
  ssl-bench table --task segmentation --format latex
  ssl-bench compare runs/skip runs/skipless --task tokencut

KEY=VALUE arguments are Hydra overrides of the files in configs/; a wrong key names the nearest.
"""


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
    _add_pretrain(commands)
    _add_table(commands)
    _add_compare(commands)
    _add_data(commands)
    _add_quickstart(commands)
    _command(commands, "doctor", "show versions, devices, disk and what is missing")
    return parser


def _command(
    commands: "argparse._SubParsersAction[_Parser]", name: str, summary: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=summary, description=summary)
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return command


def _add_probe(commands: "argparse._SubParsersAction[_Parser]") -> None:
    probe = _command(commands, "probe", "probe the blocks of frozen encoders")
    add = probe.add_argument
    add("--task", required=True, help="tokencut, segmentation, pca; several with commas, or all")
    add("--layer", default="all", help="block index from 0: 11, -1, 0,5,11 or all (default all)")
    add(
        "--checkpoint",
        action="append",
        metavar="URI",
        help="run folder, .safetensors, DINO .pth, timm:NAME, torchhub:REPO:NAME; may be repeated "
        "(default: the newest below runs/)",
    )
    add("--dataset", default="toy", help="several with commas (default toy)")
    add("--data-root", metavar="DIR", help="where the dataset lies")
    add("--out", default="results", metavar="DIR", help="records and pictures (default results)")
    add("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    add(
        "--on-bad-image",
        default="fail",
        metavar="fail|skip",
        help="skip: leave out images that cannot be read and say so in the records (default fail)",
    )
    add("--overwrite", action="store_true", help="compute finished cells again")


def _add_pretrain(commands: "argparse._SubParsersAction[_Parser]") -> None:
    pretrain = _command(commands, "pretrain", "pretrain an encoder with DINO")
    add = pretrain.add_argument
    add("--out", metavar="DIR", help="run folder (default runs/MODEL-OPTIMIZER-TIME)")
    add("--data-root", metavar="DIR", help="folder of images (default: the toy scenes)")
    add("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    add("--resume", action="store_true", help="go on from the state in --out")
    add("--overwrite", action="store_true", help="begin anew in a folder that holds a run")


def _add_table(commands: "argparse._SubParsersAction[_Parser]") -> None:
    table = _command(commands, "table", "print tables over blocks from records")
    add = table.add_argument
    add("--task", default="all", help="several with commas, or all (default all)")
    _add_filters(add)
    add("--format", default="text", help="text, markdown, csv or latex (default text)")
    add("--out", default="results", metavar="DIR", help="where the records are (default results)")
    add("--figure", metavar="FILE", help="draw the curves too (.png, .svg, .pdf)")
    add("--into", metavar="FILE", help="put the Markdown tables between the markers of a document")


def _add_compare(commands: "argparse._SubParsersAction[_Parser]") -> None:
    summary = "compare two checkpoints, or the blocks of one, over the same images"
    add = _command(commands, "compare", summary).add_argument
    add("checkpoints", nargs="+", metavar="CHECKPOINT", help="name in tables, sha256, or URI")
    add("--task", default="all", help="several with commas, or all (default all)")
    _add_filters(add)
    add("--format", default="text", help="text, markdown or latex (default text)")
    add("--out", default="results", metavar="DIR", help="where the records are (default results)")


def _add_data(commands: "argparse._SubParsersAction[_Parser]") -> None:
    summary = "verify: find files of a dataset that were damaged since their sha256 was listed"
    add = _command(commands, "data", summary).add_argument
    add("action", choices=("verify",), help="the first time lists the files, later compares them")
    add("root", metavar="DIR", help="folder of the dataset")
    add("--manifest", metavar="FILE", help="the list (default DIR/SHA256SUMS)")
    add("--update", action="store_true", help="write the list anew")


def _add_filters(add: Callable[..., object]) -> None:
    for name in ("dataset", "metric", "facet", "protocol"):
        add(f"--{name}", help=f"only these {name}s, with commas")


def _add_quickstart(commands: "argparse._SubParsersAction[_Parser]") -> None:
    quickstart = _command(commands, "quickstart", "pretrain two tiny encoders and probe them all")
    add = quickstart.add_argument
    add("--out", default="runs/quickstart", metavar="DIR", help="default runs/quickstart")
    add("--overwrite", action="store_true", help="begin anew")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit codes are those of `ssl_bench.errors`."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return _dispatch(arguments)
    except SslBenchError as error:
        if "--debug" in arguments:
            raise
        print(f"ssl-bench: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("ssl-bench: interrupted; what was finished is saved", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (such as `head`) has seen enough; Python would complain while closing stdout.
        sys.stdout = None
        return 0


def _dispatch(arguments: Sequence[str]) -> int:
    parser = build_parser()
    options, rest = parser.parse_known_args(_with_layers_joined(arguments))
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    unknown = [word for word in rest if word not in overrides]
    if unknown:
        flags = [flag for flag in _flags(parser, options.command) if flag != "-h"]
        close = difflib.get_close_matches(unknown[0], flags, n=2)
        hint = f"did you mean {' or '.join(close)}?" if close else f"flags: {', '.join(flags)}"
        raise ConfigurationError(f"unknown argument {unknown[0]!r}; {hint}")
    if overrides and options.command not in ("probe", "pretrain"):
        raise ConfigurationError(f"`ssl-bench {options.command}` takes no {overrides[0]!r}")
    return _runner(options.command)(options, overrides)


def _with_layers_joined(arguments: Sequence[str]) -> list[str]:
    """`--layer -1,0` as one word, because argparse takes -1,0 for a flag."""
    joined: list[str] = []
    for word in arguments:
        if joined and joined[-1] == "--layer":
            joined[-1] = f"--layer={word}"
        else:
            joined.append(word)
    return joined


def _flags(parser: argparse.ArgumentParser, command: str) -> list[str]:
    subparsers = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return [flag for a in subparsers.choices[command]._actions for flag in a.option_strings]


def _runner(command: str) -> Callable[[argparse.Namespace, list[str]], int]:
    # Imported here because torch alone takes seconds and `--help` needs none of it.
    from ssl_bench import commands, doctor, quickstart

    return {
        "probe": commands.probe,
        "pretrain": commands.pretrain,
        "table": commands.table,
        "compare": commands.compare,
        "data": commands.data,
        "quickstart": quickstart.command,
        "doctor": doctor.command,
    }[command]


if __name__ == "__main__":
    sys.exit(main())
