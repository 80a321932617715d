"""Lines of the rooms that keep numbers, broken one at a time: which ones does no test notice?

    python -m tests.benchmarks.mutants --json FILE
    python -m tests.benchmarks.mutants --json FILE --only 7 12

Places are drawn by chance in a copy of the committed files: a comparison turned round, `and` for
`or`, a `not` left out, a truth value exchanged, a call or a `raise` dropped, `None` returned. Then
the tests of that room are run until the first that fails; slow ones are left out. The seed and the
commit give the same mutants again; with numbers, those alone are tried anew. From number 60 on they
are planted: what no such change stands for, as a fact that a key leaves out.
"""

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.provenance import provenance

REPOSITORY = Path(__file__).parents[2]
SECONDS = 600

# How many lines of each file, and the tests that guard it.
ROOMS = {
    "ssl_bench/results/store.py": (
        10,
        "results cell_identity faults_records faults_results faults_bombs",
    ),
    "ssl_bench/results/ranges.py": (3, "results faults_records"),
    "ssl_bench/system/files.py": (
        8,
        "files faults_files regular_files digests faults_strangers_pictures",
    ),
    "ssl_bench/evaluation/evaluate.py": (
        5,
        "cell_identity cli faults_data faults_pictures",
    ),
    "ssl_bench/evaluation/pending.py": (4, "cli faults_pictures"),
    "probes/features/tiers/file.py": (5, "feature_cache faults_cache"),
    "probes/features/tiers/training.py": (4, "feature_cache faults_cache"),
    "ssl_bench/models/loading/checkpoint.py": (2, "checkpoint digests load_encoder faults_models"),
    "ssl_bench/models/loading/identity.py": (
        3,
        "checkpoint digests load_encoder faults_models sweep",
    ),
    "pretrain/runtime/state.py": (4, "checkpoint digests faults_runs"),
    "ssl_bench/data/files/inflating.py": (3, "archives faults_bombs"),
    "ssl_bench/data/files/archive_index.py": (
        5,
        "archives faults_data faults_bombs",
    ),
    "ssl_bench/report/pictures/files.py": (4, "report faults_strangers_pictures"),
}
_KEPT = "faults_kept"
# A file, a line of it or a part, what stands in its place, the tests that guard it, and which.
PLANTED = [
    *(
        ("probes/tokencut/run.py", f'            "{fact}": {value},\n', "", _KEPT, "log")
        for fact, value in {
            "encoder": "encoder_id(self.context.encoder.identity())",
            "dataset_fingerprint": "images.fingerprint()",
            "dtype": "str(self.context.dtype)",
            "settings": "self.probe.settings()",
            "version": "__version__",
        }.items()
    ),
    ("probes/tokencut/log.py", ', "format": _FORMAT', "", _KEPT, "log"),
    *(
        ("probes/features/tiers/cache.py", f"            {fact},\n", "", _KEPT, "features-")
        for fact in (
            '"version": VERSION',
            "**encoder.identity()",
            '"layers": self.sharing.own',
            '"facet": self.facet',
            '"encoder_dtype": str(self.extractor.dtype)',
            '"transform": f"{self.views} at {self.image_size}, bilinear with antialias"',
            '"dataset": f"{self.images.name} {self.images.split}"',
            '"dataset_fingerprint": self.images.fingerprint()',
            '"ids_sha256": sha256(ids.encode(errors="surrogateescape")).hexdigest()',
        )
    ),
    *(
        ("probes/segmentation/run.py", text, new, _KEPT, cache)
        for cache, text, new in (
            ("heads-", "[repr(self.training), *facts]", "[*facts]"),
            ("heads-", '"heads", header, ', '"heads", '),
            ("heads-", ", self.sources[self._own], entries", ", entries"),
            ("heads-", ", entries.tolist())", ")"),
            ("counts-", "(self.val_images.fingerprint(), *", '("", *'),
            ("counts-", ", *(self.val_images.ids[index] for index in share)", ","),
            ("counts-", "self.sources, split, images", "self.sources, images"),
            ("counts-", "sorted(self.split.held_out), self.refit)", "self.refit)"),
            ("counts-", "held_out), self.refit)", "held_out))"),
            ("counts-", '"counts", self.training_pass.header(), ', '"counts", '),
            ("counts-", "header(), self.sources, split", "header(), split"),
            ("counts-", ", images, repr(self.scoring)", ", images"),
        )
    ),
    *(
        ("probes/features/image.py", text, new, _KEPT, "passed")
        for text, new in (
            ("(encoder, self.context.dtype, *seen)", "(self.context.dtype, *seen)"),
            ("(encoder, self.context.dtype, *seen)", "(encoder, *seen)"),
            ("(images.fingerprint(), tuple(indices), ", "(tuple(indices), "),
            ("(images.fingerprint(), tuple(indices), ", "(images.fingerprint(), "),
            (", self._size, self.crop_share)", ", self.crop_share)"),
            (", self._size, self.crop_share)", ", self._size)"),
        )
    ),
    *(
        ("ssl_bench/data/layouts/toy.py", text, "", _KEPT, "toy")
        for text in ("{VERSION}", "{self.num_train}", "{self.num_val}", "{self.seed}", "{kind}-")
    ),
    *(
        ("ssl_bench/data/files/digest_cache.py", text, new, _KEPT, "digests")
        for text, new in (
            ("(repr(tuple(state)), _STATE) + digest", "(repr(state[1:]), _STATE) + digest"),
            ("(repr(tuple(state)), _STATE) + digest", "(repr(state[:1]), _STATE) + digest"),
            ("self._new[_hashed(name, _KEY)]", 'self._new[_hashed("", _KEY)]'),
            ("_place(str(subject.absolute()))", '_place("")'),
        )
    ),
    ("ssl_bench/data/layouts/coco20k.py", "{digest[:16]}", "", _KEPT, "COCO"),
    (
        "probes/features/split.py",
        "torch.randperm(len(indices), generator=generator)[:held_out]",
        "torch.arange(held_out)",
        "training_split",
        "",
    ),
    ("probes/features/split.py", "sorted(order[:at_most])", "range(at_most)", "training_split", ""),
    (
        "pretrain/crops/multi.py",
        "(image_sizes + 1 - box_sizes)",
        "(image_sizes - box_sizes)",
        "multi_crop",
        "",
    ),
    (
        "pretrain/crops/multi.py",
        "np.floor(numbers[..., -2:] * (image_sizes + 1 - box_sizes))",
        "np.floor(1 + numbers[..., -2:] * (image_sizes - box_sizes))",
        "multi_crop",
        "",
    ),
    ("probes/features/views.py", "length - part + 1", "max(1, length - part)", "views", ""),
    ("pretrain/crops/erasing.py", "size - height + 1", "size - height", "erasing", ""),
    ("ssl_bench/neighbours.py", "farthest + rounding", "farthest", "neighbours knn", ""),
]
TURNED = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """`file` with `new` in place of what stands at `line`, from `start` to `stop` in its bytes."""

    file: str
    line: int
    start: int
    stop: int
    new: str
    text: str
    tests: str
    which: str = ""

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.stop :]


def changes(node: ast.AST, source: str) -> Iterator[str]:
    """What may stand in the place of a node."""

    def text(part: ast.AST) -> str:
        return f"({ast.get_source_segment(source, part)})"

    match node:
        case ast.Compare(left=left, ops=[one], comparators=[right]):
            yield f"{text(left)} {TURNED[type(one)]} {text(right)}"
        case ast.BoolOp(op=kind, values=[left, right]):
            yield f"{text(left)} {'or' if isinstance(kind, ast.And) else 'and'} {text(right)}"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield text(operand)
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Expr(value=ast.Call()) | ast.Raise(exc=ast.AST()):
            yield "pass"
        case ast.Return(value=ast.AST() as value) if not isinstance(value, ast.Constant):
            yield "return None"


def mutants_of(file: str) -> list[Mutant]:
    source = (REPOSITORY / file).read_text()
    lines = source.splitlines(keepends=True)
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line.encode()))

    def mutant(node: ast.expr | ast.stmt, new: str) -> Mutant:
        start = begins[node.lineno - 1] + node.col_offset
        stop = begins[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        text, tests = lines[node.lineno - 1].strip(), ROOMS[file][1]
        return Mutant(file, node.lineno, start, stop, new, text, tests)

    return [
        mutant(node, new)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.expr | ast.stmt)
        for new in changes(node, source)
    ]


def planted(file: str, text: str, new: str, tests: str, which: str) -> Mutant:
    """What stands at one place alone becomes something else."""
    before, after = (REPOSITORY / file).read_text().split(text)
    del after
    start, line = len(before.encode()), before.count("\n") + 1
    return Mutant(file, line, start, start + len(text.encode()), new, text.strip(), tests, which)


def drawn(seed: int) -> list[Mutant]:
    chance = random.Random(seed)
    return [
        one for file, (count, _) in ROOMS.items() for one in chance.sample(mutants_of(file), count)
    ]


def first_failure(mutant: Mutant, copy: Path) -> str | None:
    """The first test of its room that fails with it; None where none does."""
    path = copy / mutant.file
    source = path.read_bytes()
    path.write_bytes(mutant.applied(source))
    tests = [
        str(path)
        for name in mutant.tests.split()
        for path in (copy / "tests").glob(f"*/test_{name}.py")
    ]
    tests += ["-k", mutant.which] if mutant.which else []
    options = ["-x", "-n0", "-p", "no:cacheprovider", "-m", "not slow and not gpu and not browser"]
    try:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=copy, capture_output=True, text=True, errors="replace", timeout=SECONDS,
            env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end in {SECONDS} s"
    finally:
        path.write_bytes(source)
    outcomes = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (
        (outcomes or [run.stderr[-200:] or "not said"])[0].split(" - ")[0]
        if run.returncode
        else None
    )


def tried(mutants: list[Mutant], workers: int) -> Iterator[str | None]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        free = [Path(folder) / str(number) for number in range(workers)]
        for copy in free:
            subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(copy)], check=True)

        def one(mutant: Mutant) -> str | None:
            copy = free.pop()
            try:
                return first_failure(mutant, copy)
            finally:
                free.append(copy)

        yield from pool.map(one, mutants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=20261122)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of mutants")
    parser.add_argument("--json", type=Path, help="write what became of each to this file")
    options = parser.parse_args()
    mutants = [*drawn(options.seed), *(planted(*one) for one in PLANTED)]
    chosen = options.only or range(len(mutants))
    start, rows = time.monotonic(), known(options.json) if options.only else {}
    found = tried([mutants[number] for number in chosen], options.workers)
    for number, by in zip(chosen, found, strict=True):
        mutant = mutants[number]
        rows[number] = {"number": number, **asdict(mutant), "killed_by": by, "when": provenance()}
        what = f"{mutant.file}:{mutant.line} {mutant.text!r} -> {mutant.new!r}"
        print(f"{number} {what}: {by or 'SURVIVED'}", flush=True)
    count = Counter("killed" if row["killed_by"] else "survived" for row in rows.values())
    print(f"{dict(count)} after {time.monotonic() - start:.0f} s; {provenance()}")
    if options.json:
        ordered = [rows[number] for number in sorted(rows)]
        options.json.write_text(json.dumps(ordered, indent=1) + "\n")


def known(path: Path | None) -> dict[int, dict[str, Any]]:
    """What an earlier round found, by number."""
    if path is None or not path.exists():
        return {}
    return {row["number"]: row for row in json.loads(path.read_text())}


if __name__ == "__main__":
    main()
