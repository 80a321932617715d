"""Words that people bring from other programs, and what they are called here."""

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ssl_bench.errors import ConfigurationError

_COMMANDS = {
    "train fit": "pretrain",
    "eval evaluate test run extract": "probe",
    "list ls": "models` or `ssl-bench data list",
    "plot figure": "table --figure FILE` or `ssl-bench report",
    "html show": "report",
    "diff": "compare",
    "datasets": "data list",
    "download": "data download",
    "check": "doctor` or `ssl-bench data check",
    "demo": "quickstart",
    "help": "--help",
    "config options": "keys",
    "version": "--version",
}
_FLAGS = {
    "--checkpoint": "model ckpt weights encoder backbone pretrained run c m",
    "--task": "tasks probe metric-task t",
    "--layer": "layers block blocks depth l",
    "--dataset": "datasets dataset-name",
    "--data-root": "data root data-dir data-path images image-folder",
    "--out": "output output-dir out-dir results save-dir outdir o",
    "--device": "gpu gpus cuda cpu",
    "--overwrite": "force rerun no-cache",
    "--resume": "continue",
    "--jobs": "workers parallel n-jobs",
    "--format": "output-format style",
    "--print-config": "config show-config cfg",
    "--limit": "max-images num-images num-samples subset limit-images n",
    "--dry-run": "dryrun plan dry",
    "--batch-size": "batch bs batchsize",
}
# What is no flag but a value of the configuration, by command.
_VALUES = {
    "probe": {
        "dtype": "dtype=bfloat16",
        "epochs": "probe.training.epochs=10",
        "lr": "probe.training.learning_rates=[1e-3]",
        "image-size": "probe.image_size=224",
        "img-size": "probe.image_size=224",
        "k": "probe.neighbours=[20]",
        "nb-knn": "probe.neighbours=[20]",
        "tau": "probe.tau=0.2",
        "protocol": "probe.protocol=NAME",
        "facet": "probe.facet=attn_out",
        "which-features": "probe.facet=attn_out",
        "num-workers": "probe.num_workers=4",
    },
    "pretrain": {
        "model": "model=vit_small_skip",
        "arch": "model=vit_small_skip",
        "epochs": "train.epochs=100",
        "lr": "optimizer.lr=5e-4",
        "num-workers": "train.num_workers=8",
        "optimizer": "optimizer=soap",
        "patch-size": "model.patch_size=16",
        "config": "experiment=NAME",
        "dataset": "data.root=FOLDER",
    },
}
_VALUES["sweep"] = _VALUES["probe"]
_NEEDLESS = {("report", "format"): "a report is a folder of pages; leave it out"}
_HELP = ("-h", "--help")


Commands = Mapping[str, argparse.ArgumentParser]


def require_known_words(
    parser: argparse.ArgumentParser, commands: Commands, words: Sequence[str]
) -> None:
    """Refuse a command or a flag that there is not, before something else is found missing.

    Raises:
        ConfigurationError: names the word and what it is called here.
    """
    command = next((word for word in words if not word.startswith("-")), None)
    if command is None:
        return
    if words[0].startswith("-") and any(word in commands for word in words):
        raise ConfigurationError(f"the command comes first: ssl-bench COMMAND {words[0]} ...")
    if command not in commands:
        raise ConfigurationError(f"unknown command {command!r}; {_near_command(command, commands)}")
    flags = [flag for a in commands[command]._actions for flag in a.option_strings]
    known = [*flags, *(flag for a in parser._actions for flag in a.option_strings)]
    for word, after in zip(words, [*words[1:], ""], strict=True):
        flag, _, value = word.partition("=")
        if flag.startswith("--") and not any(one.startswith(flag) for one in known):
            hint = near_flag(command, flags, flag, value or after)
            raise ConfigurationError(f"unknown argument {word!r}; {hint}")
    if command != "probe" or any(word.startswith("--t") or word in _HELP for word in words):
        return
    from ssl_bench.composition.choices import choices

    tasks = choices("probe")
    if meant := [word for word in words if set(word.split(",")) <= {*tasks, "all"}]:
        raise ConfigurationError(f"did you mean --task {meant[0]}?")
    raise ConfigurationError(f"say what to ask: --task {', '.join(tasks)}, several or all")


def near_flag(command: str, flags: Sequence[str], word: str, value: str = "") -> str:
    """What may have been meant by a word that is no flag of a command.

    Args:
        command: Such as "probe".
        flags: Of that command.
        word: The one that is none of them.
        value: What stood behind it.
    """
    name = word.lstrip("-").replace("_", "-")
    if (command, name) in _NEEDLESS:
        return _NEEDLESS[command, name]
    if example := _VALUES.get(command, {}).get(name):
        if re.fullmatch(r"\d+(\.\d*)?(e-?\d+)?", value):
            example = re.sub(r"=(\[?)[^\[\]]*(\]?)$", rf"=\g<1>{value}\2", example)
        return f"write it without dashes, as KEY=VALUE: {example}"
    if "--data-root" in flags and not word.startswith("-") and Path(word).is_dir():
        return f"a folder is given as --data-root {word}"
    if "--out" in flags and not word.startswith("-") and Path(word).is_dir():
        return f"a folder is given as --out {word}"
    meant = [flag for flag in flags if flag == f"--{name}" or name in _FLAGS.get(flag, "").split()]
    close = meant or difflib.get_close_matches(word, flags, n=2)
    others = [flag for flag in flags if flag != "-h"]
    return f"did you mean {' or '.join(close)}?" if close else f"flags: {', '.join(others)}"


def _near_command(word: str, commands: Commands) -> str:
    meant = next((name for words, name in _COMMANDS.items() if word.lower() in words.split()), None)
    close = [meant] if meant else difflib.get_close_matches(word, commands, n=1)
    if close:
        return f"did you mean `ssl-bench {close[0]}`?"
    return f"commands: {', '.join(commands)}; `ssl-bench --help` has examples"
