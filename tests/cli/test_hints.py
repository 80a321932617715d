"""Test that the arguments recommended by error messages are valid.

In the source code, a hint is a tuple of recommended arguments such as ("--out", "{folder}").
"""

import argparse
import ast
import pickle
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

import pretrain
import probes
import ssl_bench
from ssl_bench import errors
from ssl_bench.cli.parser import COMMANDS_WITH_OVERRIDES, build_parser, run_command
from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import (
    TARGET,
    build,
    choice_group,
    compose_config,
    import_component,
    list_keys,
    list_protocols,
)
from ssl_bench.data.corruptions import parse_corruptions
from ssl_bench.data.splits import read_shared_values
from ssl_bench.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    MachineError,
    SslBenchError,
    UnreadableImageError,
    broken_file_error,
    escape_braces,
    fill_placeholders,
    hints_for_python,
    join_alternatives,
    split_alternatives,
)

FOLDERS = [Path(package.__path__[0]) for package in (ssl_bench, probes, pretrain)]
FILES = [path for folder in FOLDERS for path in sorted(folder.rglob("*.py"))]

PLACEHOLDERS = {
    "blocks": "0-3", "checkpoint": "runs/skip", "corruption": "gaussian_noise",
    "dataset": "voc2012", "file": "my_vit.pth", "folder": "photos", "larger": "300",
    "lower_rate": "1e-4", "mask_folder": "masks", "mask_suffix": ".png",
    "model_folder": "dinov2-small", "name": "imagenet1k", "number": "20", "org": "timm",
    "other_checkpoint": "runs/skipless", "other_dataset": "ade20k", "other_folder": "/data/ade",
    "other_run": "runs/skipless", "row": "skip, adamw", "run": "runs/skip", "share": "0.5",
    "smaller": "1024", "table": "table2", "timm_name": "vit_small_patch16_224", "value": "3",
    "weights_file": "dino.pth",
}  # fmt: skip
"""Example of what a user types for a placeholder such as {folder}."""

NEAREST = {
    "": "train.epochs", "--as ": "skip, adamw", "--data-root ": "voc2012", "--paper ": "table2",
    "corrupt=": "fog", "model.init=": "skipless", "model.init_options.": "alpha",
    "ssl-bench data list ": "voc2012", "ssl-bench keys ": "train",
    "ssl-bench keys experiment.": "skip", "ssl-bench keys probe.": "knn",
    "ssl-bench reproduce ": "table2", "train.warmup_epochs=": "3",
}  # fmt: skip
"""Example of an existing name for the placeholder {near}, by the text before it."""

EXPRESSIONS = {
    "','.join(fit)": "0,2", "','.join(owners)": "tokencut,pca", "*_TOKENS": "probe.facet=token",
    "*command": "ssl-bench probe --task all --checkpoint runs/skip", "*out": "--out results",
    "*precision": "train.precision=float32", "*probe": "ssl-bench probe --task knn",
    "*self.prog.split()": "ssl-bench probe",
    "*words": "ssl-bench probe --task all --checkpoint demo:skip", "DEMO": "demo",
    "_ALL_TRAIN": "all:0-75%", "_ALL_VAL": "all:75-100%", "accumulation": "4", "action": "list",
    "address": "demo:skip", "architecture": "vit_small_patch16_224", "block_list": "10,11",
    "close[0]": "overwrite", "command": "probe", "count": "4", "encoder": "demo:skip",
    "escape_braces(a.name)": "train", "escape_braces(corruptions)": "gaussian_noise:3,fog:2",
    "escape_braces(first)": "train", "escape_braces(key)": "train.warmup_epochs",
    "escape_braces(label)": "label", "escape_braces(mask)": "mask",
    "escape_braces(match[3])": "my_vit.pth", "escape_braces(name)": "imagenet1k",
    "escape_braces(options.task)": "knn", "escape_braces(part)": "mlp.fc2",
    "escape_braces(str(folder))": "photos", "escape_braces(str(joined))": "my_vit.pth",
    "escape_braces(str(path))": "my_vit.pth", "escape_braces(str(path.parent))": "dinov2-small",
    "escape_braces(str(root))": "photos", "escape_braces(str(self._root / first))": "photos",
    "escape_braces(str(self.root))": "results", "escape_braces(str(store.root))": "results",
    "escape_braces(uri)": "hf-hub:org/name", "escape_braces(word)": "runs/skip",
    "folder_flag": "--data-root", "full": "cutting_the_skip/figure1", "group": "probe",
    "head_width": "12", "image_size": "224", "item.name": "mlp_mean", "key": "train.warmup_epochs",
    "known": "skip", "len(train)": "3", "lower": "32", "lower + patch": "64", "max(late)": "200",
    "mean": "[0.5,0.5,0.5]", "min_heads": "2", "name": "graying_layers", "names[0]": "knn",
    "near": "9", "near_command": "pretrain", "near_flags[0]": "overwrite", "nearest": "8",
    "neighbours": "5,10", "next_multiple": "8", "num_tokens": "28", "path.name.lower()": "voc2012",
    "remedy": "data.bits=12", "self.key": "train.warmup_epochs", "self.name": "fog",
    "side": "probe.max_side", "size": "64", "info.name": "voc2012", "std": "[0.5,0.5,0.5]",
    "str(block)": "11", "str(len(images))": "4", "str(world_size)": "4", "table": "table2",
    "target": "model.vit_tiny_skip", "text_key": "probe.facet",
    "timm_name": "vit_small_patch16_224", "value": "token", "width": "384",
    "widths": "[24,48,96,192]",
}  # fmt: skip
"""Example value of each expression in a hint. Text from a user must be in `escape_braces`."""

NOT_HINTS = (
    "--data-root --out",
    "--facet probe.facet",
    "--layer --checkpoint",
    "--task all --limit 8 --pictures 4",
    "model.dim=128 model.num_heads=2 model.image_size=64",
)
"""First words of those tuples in the source code that look like hints but are not."""

HINT_START = re.compile(r"--[a-z]|ssl-bench$|(<[^<> ]+>|\{\w+\}|[a-z][\w.]*)=[^ ]*$")


def find_hints(path: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    arguments = [
        node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == "hint"
    ]
    for node in nodes:
        if isinstance(node, ast.Tuple) and node.elts and isinstance(node.ctx, ast.Load):
            words = [read_word(word) for word in node.elts]
            is_other = " ".join(words).startswith(NOT_HINTS)
            looks_like_hint = HINT_START.match(words[0]) and not is_other
            if node in arguments or looks_like_hint:
                yield from ((node.lineno, way) for way in split_alternatives(words))


def read_word(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (
            part.value if isinstance(part, ast.FormattedValue) else part for part in node.values
        )
        return "".join(map(read_word, parts))
    return f"<{ast.unparse(node)}>"


def complete(words: Sequence[str]) -> list[str]:
    """Replace each placeholder in a command by an example value."""
    completed = list[str]()
    for word in words:
        if word.startswith("<*"):
            completed += EXPRESSIONS[word[1:-1]].split()
        else:
            # After a KeyError, add the expression to the table or use `escape_braces` in the hint.
            completed.append(re.sub("<([^<>]+)>", lambda match: EXPRESSIONS[match[1]], word))
    before_near = " ".join(completed).partition("{near}")[0]
    examples = PLACEHOLDERS | {"near": NEAREST.get(before_near, "")}
    return [fill_placeholders(word, examples.__getitem__) for word in completed]


PARSER = build_parser()
COMMANDS: dict[str, argparse.ArgumentParser] = next(
    dict(action.choices)
    for action in PARSER._actions
    if isinstance(action, argparse._SubParsersAction)
)
REQUIRED = {
    "probe": ("--task", "pca"), "features": ("--out", "features"), "compare": ("one", "other"),
    "data": ("check", "toy"), "reproduce": ("table2",), "keys": ("probe.knn",),
    "completion": ("bash",),
}  # fmt: skip


def can_be_typed(words: Sequence[str]) -> bool:
    if words[0] == "ssl-bench":
        return is_accepted(words[1:])
    has_settings = any(re.match(r"[a-z][\w.]*=", word) for word in words)
    commands = COMMANDS_WITH_OVERRIDES if has_settings else COMMANDS
    return any(is_accepted((name, *REQUIRED.get(name, ()), *words)) for name in commands)


def is_accepted(words: Sequence[str]) -> bool:
    try:
        options, settings = PARSER.parse_known_args(list(words))
    except SystemExit as ended:
        return ended.code == 0
    except ConfigurationError:
        return False
    tasks = (getattr(options, "task", None) or "all").split(",")
    if not {*tasks} <= {*choices("probe"), "all"}:
        return False
    if not all("=" in word and not word.startswith("-") for word in settings):
        return False
    if not settings:
        return True
    root = "pretraining" if options.command == "pretrain" else "probing"
    return options.command in COMMANDS_WITH_OVERRIDES and is_composed(root, tuple(settings))


@cache
def is_composed(root: str, settings: tuple[str, ...]) -> bool:
    keys = {setting.partition("=")[0] for setting in settings}
    groups = {key.partition(".")[0] for key in keys}
    # Choices in the groups of the keys come first, because they usually suffice.
    bases = sorted(
        component_choices(root), key=lambda base: base[-1].partition("=")[0] not in groups
    )
    return any(is_legal(root, base, settings) for base in bases if keys <= known_keys(root, base))


@cache
def component_choices(root: str) -> list[tuple[str, ...]]:
    # Together, the configurations of these choices contain every config key.
    if root == "pretraining":
        groups = ("model", "objective", "optimizer")
        return [(f"{group}={name}",) for group in groups for name in choices(group)]
    bases = list[tuple[str, ...]]()
    bases += [("probe=pca", f"dataset={name}") for name in choices("dataset")]
    for task in choices("probe"):
        base = (f"probe={task}", "dataset=toy")
        probe = compose_config("probing", base)["probe"]
        groups = {f"probe.{name}": choice_group(f"probe.{name}", {"probe": task}) for name in probe}
        parts = {part: choices(group) for part, group in groups.items() if group}
        parts["probe.protocol"] = list_protocols(task, import_component(probe[TARGET], "probe"))
        bases += [base, *((*base, f"{part}={name}") for part in parts for name in parts[part])]
    return bases


@cache
def known_keys(root: str, base: tuple[str, ...]) -> frozenset[str]:
    keys = list_keys(compose_config(root, base))
    owners = (key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1))
    return frozenset([*keys, *owners])


def is_legal(root: str, base: Sequence[str], settings: Sequence[str]) -> bool:
    keys = {setting.partition("=")[0] for setting in settings}
    chosen = [choice for choice in base if choice.partition("=")[0] not in keys]
    try:
        corruptions, others = parse_corruptions(settings)
        for corruption in corruptions:
            config = compose_config(root, [*chosen, *others, *corruption])
            if root == "probing":
                read_shared_values(config)
            for part in {key.partition(".")[0] for key in keys}:
                if TARGET in (config[part] if isinstance(config[part], dict) else ()):
                    build(config, part)
    except SslBenchError:
        return False
    return True


HINTS = [
    pytest.param(words, id=f"{path.parent.name}/{path.name}:{line} {' '.join(words)}")
    for path in FILES
    for line, words in dict.fromkeys(find_hints(path))
]


@pytest.mark.parametrize("words", HINTS)
def test_the_arguments_of_a_hint_are_accepted(words):
    assert can_be_typed(complete(words))


def test_wrong_arguments_and_unescaped_text_are_found(tmp_path):
    for words in (
        "--chekpoint x", "train.nothing=1", "train.epochs=-1", "model=vit_nothing",
        "ssl-bench table seed=3", "--task nothing", "--device", "corrupt=fog:9",
    ):  # fmt: skip
        assert not can_be_typed(words.split())
    code = "def f(checkpoint): raise DataError('no', hint=('--checkpoint', checkpoint))"
    (tmp_path / "code.py").write_text(code)
    ((_, words),) = find_hints(tmp_path / "code.py")
    with pytest.raises(KeyError):
        complete(words)


ERRORS = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
ADVICE = re.compile(
    r"`ssl-bench [a-z]|--[a-z]|\b[a-z_]+(\.[a-z_]+)+=|"
    r"\b(corrupt|dataset|dtype|experiment|model|objective|optimizer|probe|seed)=|"
    r"\.py:\w|\bmean=\w|\b(timm|hf-hub|local-dir|torchhub):[\w<]"
)


def find_advice(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ERRORS
        ):
            has_hint = any(keyword.arg == "hint" for keyword in node.keywords)
            message = "".join(map(read_word, node.args))
            if not has_hint and ADVICE.search(message.partition(";")[2]):
                yield f"{path}:{node.lineno}"


def test_advice_is_in_the_hint_and_not_in_the_message(tmp_path):
    assert [line for path in FILES for line in find_advice(path)] == []
    for code, is_advice in (
        ('DataError("--data-root lacks images; leave it out")', False),
        ('DataError(f"no images in {x}; set " f"dataset.root={y}")', True),
        ('DataError("no images; take it", hint=("--data-root", "x"))', False),
        ('CheckpointError(f"no ViT; name it timm:{x}@FILE")', True),
    ):
        (tmp_path / "code.py").write_text(code)
        assert bool([*find_advice(tmp_path / "code.py")]) == is_advice


def test_an_error_appends_its_hint_unless_the_message_contains_it():
    hint = ("--checkpoint", "demo:skip", "or", "ssl-bench", "pretrain", "--out", "{folder}")
    shown = "`--checkpoint demo:skip` or `ssl-bench pretrain --out FOLDER`"
    assert str(CheckpointError("no checkpoint", hint=hint)) == f"no checkpoint; use {shown}"
    assert str(DataError("take --out x", hint=("--out", "x"))) == "take --out x"
    assert str(DataError("no", hint=("probe.facet='3'",))) == """no; use `"probe.facet='3'"`"""
    assert str(DataError("unknown --outs", hint=("--out",))) == "unknown --outs; use `--out`"
    assert str(DataError("--jobs 16", hint=("--jobs", "1"))) == "--jobs 16; use `--jobs 1`"
    assert join_alternatives(("--a",), (), ("--b", "1")) == ("--a", "or", "--b", "1")


def test_python_users_see_hints_as_keywords():
    names = {"--checkpoint": "encoder", "data.limit": "limit"}
    for hint, shown in (
        (("--dtype", "float32"), 'dtype="float32"'),
        (("--overwrite", "probe.facet=patch_mean"), 'overwrite=True, facet="patch_mean"'),
        (("--data-root", "{folder}"), 'data_root="FOLDER"'),
        (("--checkpoint", escape_braces("{x}.pth")), 'encoder="{x}.pth"'),
        (("--layer", "0,5"), 'layer="0,5"'),
        (("data.limit=null", "probe.centre=false"), "limit=None, centre=False"),
        (("probe.neighbours=[5,10]", "probe.tau={value}"), "neighbours=[5, 10], tau=VALUE"),
        (("dataset.num_val=4",), '**{"dataset.num_val": 4}'),
        (("ssl-bench", "keys", "probe.knn"), "ssl-bench keys probe.knn"),
        (("probe.facet=token", "or", "--facet", "token"), 'facet="token"'),
    ):
        with pytest.raises(DataError) as raised, hints_for_python(names):
            raise DataError("no", hint=hint)
        assert str(raised.value) == f"no; use `{shown}`"
        assert raised.value.hint == hint
    assert str(DataError("no", hint=("--dtype", "x"))) == "no; use `--dtype x`"


def test_braces_of_the_user_are_no_placeholders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "{x}-{{y}").mkdir()
    with pytest.raises(ConfigurationError) as refused:
        run_command(["probe", "--task", "pca", "--dataset", "{x}-{{y}"])

    assert "`--dataset folder --data-root '{x}-{{y}'`" in str(refused.value)
    hint = ("--out", escape_braces("{x}"), "{folder}")
    assert str(DataError("no", hint=hint)) == "no; use `--out '{x}' FOLDER`"
    assert [word.format(folder="y") for word in hint] == ["--out", "{x}", "y"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("def parse(): json.loads('{')\nparse()", r"own/mine\.py, line 2, fails with JSONDecode"),
        ("import json.nothing", r"line 2, [^;]*'json\.nothing'(?!.*pip install)"),
        ("import nothing_of_this.name", "pip install nothing_of_this$"),
    ],
)
def test_a_broken_file_is_named_with_its_last_own_line(tmp_path, line, named):
    code = compile(f"import json\n{line}\n", str(tmp_path / "own/mine.py"), "exec")
    with pytest.raises((ValueError, ImportError)) as caught:
        exec(code, {})
    assert re.search(named, str(broken_file_error(caught.value, ["own"])))


@pytest.mark.parametrize("kind", [ConfigurationError, MachineError, UnreadableImageError])
def test_a_hint_survives_an_outer_error_and_pickling(kind):
    try:
        try:
            raise kind("no space", hint=("--out", "{folder}"))
        except kind as inner:
            raise CheckpointError(f"saving failed: {inner}") from inner
    except CheckpointError as error:
        for one in (error, pickle.loads(pickle.dumps(error))):
            assert one.hint == ("--out", "{folder}")
            assert str(one) == "saving failed: no space; use `--out FOLDER`"
