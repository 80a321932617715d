"""The words that refusals recommend: carried in `hint`, and every one of them can be typed."""

import argparse
import ast
import pickle
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import TypeGuard

import pytest

import pretrain
import probes
import ssl_bench
from ssl_bench import errors
from ssl_bench.cli.parser import WITH_OVERRIDES, build_parser
from ssl_bench.cli.parser import run as run_line
from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import (
    TARGET,
    build,
    choice_group,
    component_class,
    compose_config,
    flatten_config,
    list_protocols,
)
from ssl_bench.data.corruptions import asked_corruptions
from ssl_bench.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    MachineError,
    SslBenchError,
    UnreadableImage,
    escape_braces,
    hints_for_python,
    join_alternatives,
    split_alternatives,
)

PACKAGES = [Path(package.__path__[0]) for package in (ssl_bench, probes, pretrain)]
FILES = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]
ERRORS = {
    *(name for name, kind in vars(errors).items() if isinstance(kind, type)
      and issubclass(kind, SslBenchError)),
    "NotFetched",
    "require_choice",
    "unknown_name_error",
    "with_hint",
}  # fmt: skip

# What a user knows: placeholders, by the name between braces, and escaped texts, by the name in
# the code. Several words are separated by a null character.
FILLED: Mapping[str, str] = {
    "blocks": "0-5",
    "checkpoint": "runs/skip",
    "corruption": "gaussian_noise",
    "corruptions": "gaussian_noise:3,fog:2",
    "dataset": "voc2012",
    "file": "my_vit.pth",
    "first": "train",
    "folder": "photos",
    "key": "train.warmup_epochs",
    "larger": "300",
    "lower_rate": "1e-4",
    "mask_folder": "masks",
    "mask_suffix": ".png",
    "model_folder": "dinov2-small",
    "name": "imagenet1k",
    "number": "20",
    "one_name": "train",
    "org": "timm",
    "other_checkpoint": "runs/skipless",
    "other_dataset": "ade20k",
    "other_folder": "/data/ade",
    "other_run": "runs/skipless",
    "parent": "dinov2-small",
    "part": "mlp.fc2",
    "path": "my_vit.pth",
    "root": "results",
    "row": "skip, adamw",
    "run": "runs/skip",
    "share": "0.5",
    "smaller": "1024",
    "table": "table2",
    "task": "knn",
    "tasks": "knn",
    "timm_name": "vit_small_patch16_224",
    "uri": "hf-hub:org/name",
    "value": "3",
    "weights_file": "dino.pth",
    "word": "runs/skip",
}
# Numbers and names of this suite, by the name in the code: what a user types is escaped.
OWN: Mapping[str, str] = {
    "_ALL_TRAIN": "all:0-75%",
    "_ALL_VAL": "all:75-100%",
    "action": "list",
    "address": "demo:skip",
    "architecture": "vit_small_patch16_224",
    "block": "11",
    "close": "overwrite",
    "count": "4",
    "folder_flag": "--data-root",
    "group": "probe",
    "head_width": "12",
    "image_size": "224",
    "key": "train.warmup_epochs",
    "images": "9",
    "kind": "task",
    "late": "200",
    "lower": "32",
    "mean": "[0.5,0.5,0.5]",
    "meant": "pretrain",
    "most": "3",
    "names": "knn",
    "near": "9",
    "nearest": "8",
    "neighbours": "5,10",
    "num_bits": "12",
    "num_tokens": "28",
    "owners": "tokencut,pca",
    "path_name": "voc2012",
    "prog": "ssl-bench\0probe",
    "remedy": "data.bits=12",
    "self_name": "fog",
    "side": "probe.max_side",
    "size": "64",
    "source_name": "voc2012",
    "std": "[0.5,0.5,0.5]",
    "table": "table2",
    "target": "model.vit_tiny_skip",
    "text_key": "probe.facet",
    "timm_name": "vit_small_patch16_224",
    "value": "token",
    "widths": "[24,48,96,192]",
    "words": "probe.training=lbfgs",
}
# A name like the one that was typed, by the words before it.
NEAR: Mapping[str, str] = {
    "": "train.epochs",
    "--as\0": "skip, adamw",
    "--data-root\0": "voc2012",
    "--paper\0": "table2",
    "--task\0": "knn",
    "corrupt=": "fog",
    "model.init_options.": "alpha",
    "ssl-bench\0data\0list\0": "voc2012",
    "ssl-bench\0keys\0": "train",
    "ssl-bench\0keys\0experiment.": "skip",
    "ssl-bench\0keys\0probe.": "knn",
    "ssl-bench\0reproduce\0": "table2",
    "train.warmup_epochs=": "3",
}


def shared_texts() -> dict[str, ast.AST]:
    """Return the constants of all files, and their functions that give texts, by name."""
    found: dict[str, ast.AST] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.isupper():
                    found[name] = value
                case ast.FunctionDef(name=name, returns=ast.Name(id="str")):
                    found[name] = ast.Module(node.body[ast.get_docstring(node) is not None :], [])
                case _:
                    continue
    return found


TEXTS = shared_texts()


def hints_of(path: Path) -> list[tuple[int, tuple[str, ...]]]:
    """All ways that the hints in a file name, with the line; what code knows is a placeholder."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = []
    for function in functions:
        if function.name == "unknown_name_error":
            # Fills in the hints of its callers.
            continue
        reader = HintReader(tree, function)
        for call in filter(is_error, ast.walk(function)):
            for keyword in call.keywords:
                if keyword.arg == "hint":
                    ways = [
                        way
                        for one in reader.hints(keyword.value)
                        for way in split_alternatives(one)
                    ]
                    found += [(call.lineno, way) for way in ways]
    return list(dict.fromkeys(found))


def is_error(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether a piece of code makes an error of this suite."""
    function = node.func if isinstance(node, ast.Call) else None
    return isinstance(function, ast.Name) and function.id in ERRORS


class HintReader:
    """Reads the words of hints in the source of a function."""

    def __init__(self, tree: ast.Module, function: ast.FunctionDef) -> None:
        self.tree = tree
        self.assigned: dict[str, list[ast.expr]] = {}
        inner = [one for one in ast.walk(function) if isinstance(one, ast.arguments)]
        self.parameters = {arg.arg for one in inner for arg in [*one.args, *one.kwonlyargs]}
        for node in [*tree.body, *ast.walk(function)]:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    names, values = [target], [node.value]
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                        names, values = target.elts, node.value.elts
                    for name, value in zip(names, values, strict=True):
                        if isinstance(name, ast.Name):
                            self.assigned.setdefault(name.id, []).append(value)

    def hints(self, node: ast.expr) -> Iterator[tuple[str, ...]]:
        """All values that an expression of words can have."""
        match node:
            case ast.Tuple(elts=elts) | ast.List(elts=elts):
                parts = [[*self._words(element)] for element in elts]
                yield from (sum(some, ()) for some in product(*parts))
            case ast.IfExp(body=body, orelse=other):
                yield from (*self.hints(body), *self.hints(other))
            case ast.BoolOp(values=values):
                for value in values:
                    yield from self.hints(value)
            case ast.Call(func=ast.Name(id="join_alternatives"), args=args):
                for arg in args:
                    inner = arg.value if isinstance(arg, ast.Starred) else arg
                    yield from self.hints(inner)
            case ast.ListComp(generators=[ast.comprehension(iter=ast.Attribute(attr="hint"))]):
                return
            case ast.ListComp(elt=element):
                yield from self.hints(element)
            case ast.Name(id=name) if name in self.assigned:
                for value in self.assigned[name]:
                    yield from self.hints(value)
            case ast.Name(id=name) if name in TEXTS:
                yield from self.hints(TEXTS[name])
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                methods = (one for one in ast.walk(self.tree) if isinstance(one, ast.FunctionDef))
                method = next(one for one in methods if one.name == name)
                for one in ast.walk(method):
                    if isinstance(one, ast.Return) and one.value is not None:
                        yield from HintReader(self.tree, method).hints(one.value)
            case ast.Name(id="hint") if "hint" in self.parameters:
                # Of the callers, whose own lines are looked at.
                return
            case ast.Attribute(attr="hint"):
                # Passed on from another error, whose own line is looked at.
                return
            case _:
                raise AssertionError(f"no words of a hint: {ast.unparse(node)}")

    def _words(self, node: ast.expr) -> Iterator[tuple[str, ...]]:
        if isinstance(node, ast.Starred):
            try:
                yield from [*self.hints(node.value)]
            except AssertionError:
                yield (f"{{{known_as(node.value)}}}",)
            return
        if isinstance(node, ast.Constant):
            yield (str(node.value),)
        elif isinstance(node, ast.JoinedStr):
            texts = (
                part.value if isinstance(part, ast.Constant) else f"{{{known_as(part.value)}}}"
                for part in node.values
                if isinstance(part, ast.Constant | ast.FormattedValue)
            )
            yield ("".join(map(str, texts)),)
        else:
            yield (f"{{{known_as(node)}}}",)


def known_as(node: ast.expr) -> str:
    """Return the name in the code of what a hint shows, after "=" unless it is escaped."""
    match node:
        case ast.Attribute(value=owner, attr="name"):
            return f"{known_as(owner)}_name"
        case ast.Call(func=ast.Name(id="escape_braces"), args=[value]):
            return known_as(value).removeprefix("=")
        case ast.Call(func=ast.Name(id="_joined"), args=[_, ast.Constant(value=str(name))]):
            return name.strip("{}")
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return f"={name}"
        case ast.Call(func=ast.Attribute(value=value, attr="split" | "lower" | "lstrip")):
            return known_as(value)
        case ast.Call(func=ast.Name(), args=[value, *_]) | ast.Subscript(value=value):
            return known_as(value)
        case ast.Call(func=ast.Attribute(attr="join"), args=[value]):
            return known_as(value)
        case ast.BinOp(left=left):
            return known_as(left)
        case _:
            raise AssertionError(f"name what a hint shows: {ast.unparse(node)}")


COMMANDS: dict[str, argparse.ArgumentParser] = next(
    dict(action.choices)
    for action in build_parser()._actions
    if isinstance(action, argparse._SubParsersAction)
)
REQUIRED = {
    "probe": ("--task", "pca"),
    "features": ("--out", "features"),
    "compare": ("one", "other"),
    "data": ("check", "toy"),
    "reproduce": ("table2",),
    "keys": ("probe.knn",),
    "completion": ("bash",),
}
GROUPS = ("probe", "dataset", "model", "objective", "optimizer")


def is_right(words: Sequence[str]) -> bool:
    """Whether the parser takes a command, and a configuration its overrides."""
    try:
        options, rest = build_parser().parse_known_args(list(words))
    except SystemExit as ended:
        return ended.code == 0
    except ConfigurationError:
        return False
    tasks = {*(getattr(options, "task", None) or "all").split(",")}
    if not tasks <= {*choices("probe"), "all"}:
        return False
    if not all("=" in word and not word.startswith("-") for word in rest):
        return False
    takes_none = options.command not in WITH_OVERRIDES
    root = "pretraining" if options.command == "pretrain" else "probing"
    return not rest or not (takes_none or not is_composed(root, tuple(rest)))


@cache
def is_composed(root: str, overrides: tuple[str, ...]) -> bool:
    """Whether some choice of components takes all overrides."""
    try:
        corruptions, overrides = asked_corruptions(overrides)
    except ConfigurationError:
        return False
    keys = [override.partition("=")[0] for override in overrides]
    usual = {"probe": ["pca"], "dataset": ["toy"]} if root == "probing" else {}
    groups = {key.partition(".")[0] for key in keys if "." in key}.intersection(GROUPS)
    varied = usual | {group: choices(group) for group in groups if group not in keys}
    bases = [
        tuple(f"{group}={name}" for group, name in zip(varied, names, strict=True))
        for names in product(*varied.values())
    ]
    # Such as a kind of training with other keys, where the usual one does not do.
    further = ((*base, more) for base in bases for more in inner_choices(base))
    return any(
        {*keys} <= {*known_keys(root, base), *GROUPS}
        and all(is_built(root, (*base, *overrides, *one), keys) for one in corruptions)
        for base in chain(bases, further)
    )


def inner_choices(base: Sequence[str]) -> list[str]:
    """Choices by name within a probe, such as "probe.training=lbfgs"; none for other bases."""
    task = dict(one.split("=") for one in base).get("probe")
    if task is None:
        return []
    probe = compose_config("probing", [f"probe={task}"])["probe"]
    groups = {f"probe.{name}": choices(choice_group(f"probe.{name}", {"probe": task}) or "")
              for name in probe if choice_group(f"probe.{name}", {"probe": task})}  # fmt: skip
    kind = component_class(probe[TARGET], "probe")
    groups["probe.protocol"] = list_protocols(task, kind)
    return [f"{key}={name}" for key, names in groups.items() for name in names]


@cache
def known_keys(root: str, base: tuple[str, ...]) -> frozenset[str]:
    """All keys of a choice of components, and the components themselves."""
    try:
        flat = flatten_config(compose_config(root, base))
    except SslBenchError:
        return frozenset()
    names = (key.rsplit(".", depth)[0] for key in flat for depth in range(key.count(".") + 1))
    return frozenset(names)


def is_built(root: str, overrides: Sequence[str], keys: Sequence[str]) -> bool:
    try:
        config = compose_config(root, overrides)
        for part in {key.partition(".")[0] for key in keys} & {*GROUPS, "train", "monitor"}:
            build(config, part)
    except SslBenchError:
        return False
    return True


def can_be_typed(words: Sequence[str]) -> bool:
    """Whether a whole command is right, or a part of one in some command."""
    if words[0] == "ssl-bench":
        return is_right(words[1:])
    sets_keys = any(re.match(r"[a-z][\w.]*=", word) for word in words)
    commands = WITH_OVERRIDES if sets_keys else COMMANDS
    return any(is_right((name, *REQUIRED.get(name, ()), *words)) for name in commands)


def filled(way: Sequence[str]) -> list[str]:
    def value(name: re.Match[str]) -> str:
        kinds = OWN if name[1] else FILLED
        return kinds.get(name[2], name[0]) if name[2] == "near" else kinds[name[2]]

    text = "\0".join(re.sub(r"\{(=?)(\w+)\}", value, word) for word in way)
    text = text.replace("{{", "{").replace("}}", "}")
    before, near, after = text.partition("{near}")
    # Some stand for several words.
    return (before + (NEAR[before] + after if near else "")).split("\0")


HINTS = [
    pytest.param(way, id=f"{path.parent.name}/{path.name}:{line} {' '.join(way)}")
    for path in FILES
    for line, way in hints_of(path)
]


@pytest.mark.parametrize("way", HINTS)
def test_a_hint_can_be_typed(way):
    assert can_be_typed(filled(way))


@pytest.mark.parametrize(
    "words",
    ["--chekpoint x", "train.nothing=1", "train.epochs=-1", "model=vit_nothing", "ssl-bench prob",
     "ssl-bench table seed=3", "--task nothing", "--device", "corrupt=fog:9"],
)  # fmt: skip
def test_wrong_words_cannot_be_typed(words):
    assert not can_be_typed(words.split())


RECOMMENDED = re.compile(
    r"`ssl-bench [a-z]|--[a-z]|\b[a-z_]+(\.[a-z_]+)+=|"
    r"\b(corrupt|dataset|dtype|experiment|model|objective|optimizer|probe|seed)=|"
    r"\.py:\w|\bmean=\w|\b(timm|hf-hub|local-dir|torchhub):\w"
)


def sentences_without_hint(path: Path) -> Iterator[str]:
    """Errors whose advice, the text after the first semicolon, names flags, keys or commands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if is_error(node) and not any(one.arg == "hint" for one in node.keywords):
            text = "".join(text_of(arg, frozenset()) for arg in node.args)
            if "did you mean" in text or RECOMMENDED.search(text.partition(";")[2]):
                yield f"{path}:{node.lineno}"


def text_of(node: ast.AST, within: frozenset[str]) -> str:
    """Return the text in a piece of code, with that of the constants and functions it names."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name) if name in TEXTS and name not in within:
            return text_of(TEXTS[name], within | {name})
        case ast.Call(func=ast.Name(id=name), args=args) if name in TEXTS and name not in within:
            inner = (text_of(one, within) for one in args)
            return "".join([text_of(TEXTS[name], within | {name}), *inner])
        case _:
            text = "".join(text_of(one, within) for one in ast.iter_child_nodes(node))
            return text or ("X" if isinstance(node, ast.FormattedValue) else "")


def test_advice_is_in_the_hint_and_not_in_the_sentence():
    assert not [line for path in FILES for line in sentences_without_hint(path)]


def test_advice_in_a_sentence_is_found(tmp_path, monkeypatch):
    lines = {
        'DataError("no images; give --data-root DIR")': True,
        'DataError("--data-root lacks images; leave it out")': False,
        'DataError(f"no images in {x}; take " f"dataset.root={y}")': True,
        'DataError("no images; run `ssl-bench data list`")': True,
        'DataError("no images; take it", hint=("--data-root", "x"))': False,
        'CheckpointError(f"no ViT; take timm:{x}@FILE")': True,
        'CheckpointError(f"no ViT; {_WAY}")': True,
        'CheckpointError(f"no ViT; {_way(x)}")': True,
        'ConfigurationError(f"no {x}; did you mean {y}?")': True,
    }
    monkeypatch.setitem(TEXTS, "_WAY", ast.parse('"name it as FILE.py:NAME"'))
    monkeypatch.setitem(TEXTS, "_way", ast.parse('return "take local-dir:FOLDER"'))
    for line, is_found in lines.items():
        (tmp_path / "code.py").write_text(line)
        assert bool([*sentences_without_hint(tmp_path / "code.py")]) == is_found, line


def test_an_error_shows_what_its_sentence_does_not_name():
    hint = ("--checkpoint", "demo:skip", "or", "ssl-bench", "pretrain", "--out", "{folder}")
    shown = "`--checkpoint demo:skip` or `ssl-bench pretrain --out FOLDER`"
    assert str(CheckpointError("no checkpoint", hint=hint)) == f"no checkpoint; use {shown}"
    assert str(DataError("take --out x", hint=("--out", "x"))) == "take --out x"
    assert str(DataError("unknown --outs", hint=("--out",))) == "unknown --outs; use `--out`"
    assert join_alternatives(("--a",), (), ("--b", "1")) == ("--a", "or", "--b", "1")


@pytest.mark.parametrize(
    ("hint", "shown"),
    [
        (("--dtype", "float32"), 'dtype="float32"'),
        (("--overwrite", "probe.facet=patch_mean"), 'overwrite=True, facet="patch_mean"'),
        (("--data-root", "{folder}"), 'data_root="FOLDER"'),
        (("--checkpoint", escape_braces("{x}.pth")), 'encoder="{x}.pth"'),
        (("--layer", "0,5"), 'layer="0,5"'),
        (("data.limit=null",), "limit=None"),
        (("probe.neighbours=[5,10]", "probe.tau={value}"), "neighbours=[5, 10], tau=VALUE"),
        (("dataset.num_val=4",), '**{"dataset.num_val": 4}'),
        (("probe.training.epochs=3",), '**{"probe.training.epochs": 3}'),
        (("ssl-bench", "keys", "probe.knn"), "ssl-bench keys probe.knn"),
        (("probe.facet=token", "or", "--facet", "token"), 'facet="token"'),
    ],
)
def test_python_users_see_hints_as_keywords(hint, shown):
    names = {"--checkpoint": "encoder", "data.limit": "limit"}
    with pytest.raises(DataError) as raised, hints_for_python(names):
        raise DataError("no", hint=hint)

    assert str(raised.value) == f"no; use `{shown}`"
    assert raised.value.hint == hint
    assert str(DataError("no", hint=("--dtype", "x"))) == "no; use `--dtype x`"


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("probe --task tokencutt", "--task tokencut"),
        ("probe --task pca --dataset vocc2012", "--dataset voc2012"),
        ("probe --task pca --on-bad-image skp", "--on-bad-image skip"),
        ("probe --task segmentation probe.protocol=fastt", "probe.protocol=fast"),
        ("probe --task pca --dataset toy corrupt=fogg:3", "corrupt=fog:3"),
        ("pretrain model=vit_tiny_skp", "model=vit_tiny_skip"),
        ("pretrain model.dept=8", "model.depth={value}"),
        ("data list vocc2012", "ssl-bench data list voc2012"),
        ("keys probe.tokencat", "ssl-bench keys probe.tokencut"),
        ("keys trian", "ssl-bench keys train"),
        ("reproduce cutting_the_skip/tabel2", "ssl-bench reproduce cutting_the_skip/table2"),
        ("reproduce table2 --row 'skp, adamw'", "--row 'skip, adamw'"),
        ("reproduce table2 --data-root imagenet1=x", "--data-root imagenet1k={folder}"),
    ],
)
def test_a_wrong_name_gets_the_nearest_in_its_hint(line, hint):
    with pytest.raises(ConfigurationError) as refused:
        run_line(shlex.split(line))

    words = tuple(shlex.split(hint))
    assert words in split_alternatives(refused.value.hint)
    assert can_be_typed(filled(words))


def test_a_text_of_the_user_holds_no_placeholder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "{x}-{{y}").mkdir()
    with pytest.raises(ConfigurationError) as refused:
        run_line(["probe", "--task", "pca", "--dataset", "{x}-{{y}"])

    assert "`--dataset folder --data-root '{x}-{{y}'`" in str(refused.value)
    hint = ("--out", escape_braces("{x}"), "{folder}")
    assert str(DataError("no", hint=hint)) == "no; use `--out '{x}' FOLDER`"
    assert [word.format(folder="y") for word in hint] == ["--out", "{x}", "y"]


def test_a_text_in_a_hint_is_literal_or_of_this_suite(tmp_path):
    code = "def f(checkpoint): raise DataError('no', hint=('--checkpoint', {}))"
    for text, is_right in (("escape_braces(checkpoint)", True), ("checkpoint", False)):
        (tmp_path / "code.py").write_text(code.format(text))
        ((_, way),) = hints_of(tmp_path / "code.py")
        with nullcontext() if is_right else pytest.raises(KeyError):
            assert can_be_typed(filled(way))


@pytest.mark.parametrize("kind", [ConfigurationError, MachineError, UnreadableImage])
def test_a_hint_survives_another_sentence_and_a_process(kind):
    try:
        try:
            raise kind("no space", hint=("--out", "{folder}"))
        except kind as inner:
            raise CheckpointError(f"saving failed: {inner}") from inner
    except CheckpointError as error:
        for one in (error, pickle.loads(pickle.dumps(error))):
            assert one.hint == ("--out", "{folder}")
            assert str(one) == "saving failed: no space; use `--out FOLDER`"
