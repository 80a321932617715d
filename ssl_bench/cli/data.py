"""The command `ssl-bench data`: what is published, fetched, complete and unchanged."""

import argparse
import os
import random
import re
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ssl_bench.composition.choices import choices, require_choice
from ssl_bench.data.files.file_sets import first_of
from ssl_bench.data.files.fingerprints import ReadOptions, dataset_read_as, in_threads
from ssl_bench.data.files.readable import faults_of, require_readable
from ssl_bench.data.layouts.ade20k import class_names as ade20k_class_names
from ssl_bench.data.layouts.coco_stuff import read_classes
from ssl_bench.data.layouts.voc import CLASS_NAMES
from ssl_bench.data.samples import Dataset, ImageSet
from ssl_bench.data.sources import SOURCES, Download, Source
from ssl_bench.data.splits import shared_values
from ssl_bench.errors import (
    ConfigurationError,
    DataError,
    MachineError,
    escape_braces,
    join_alternatives,
)
from ssl_bench.network import download, part_of
from ssl_bench.system.escaping import dump_json, escape_lines, escape_unprintable, to_one_line
from ssl_bench.system.files import file_sha256, read_regular, wait_for_lock, write_text_atomically
from ssl_bench.system.paths import expand_path, resolve_links
from ssl_bench.system.progress import format_size, say, show_progress

MANIFEST = "SHA256SUMS"
# As `sha256sum` writes it: between them `*` marks what was read as binary; `find` puts `./` before
# every name.
_LINE = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?(.+)")
_MARKS = ".ssl-bench"
_DONE = "{0.url} {0.digest}\n"
_SAMPLE = 64
_ROLES = (
    *("segmentation", "classification", "correspondence"),
    *("discovery", "saliency", "images"),
)

_CHECKED: Mapping[str, tuple[str, ...]] = {
    "train": ("segmentation", "classification"),
    "val": ("segmentation", "classification", "correspondence", "saliency"),
    "discovery": ("discovery",),
}


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Do one of list, download, check and verify; only check takes overrides."""
    if options.action == "check":
        return _check(options, overrides)
    if overrides:
        raise ConfigurationError(f"`ssl-bench data {options.action}` takes no {overrides[0]!r}")
    actions = {"list": _list, "download": _download, "verify": _verify}
    return actions[options.action](options)


def _list(options: argparse.Namespace) -> int:
    """Print a line for each dataset, or all about one."""
    if options.target is not None:
        source = _source(options.action, options.target)
        row = _as_json(source)
        print(dump_json(row) if options.json else "\n".join(_about(row, source)))
        return 0
    if options.json:
        print(dump_json([_as_json(source) for source in SOURCES.values()]))
        return 0
    for source in SOURCES.values():
        size = format_size(source.size) if source.downloads else "-"
        way = f"download {source.name}" if source.downloads else "by hand"
        way = "made at first use" if source.is_generated else way
        print(f"{source.name:<15} {size:>8}  {way:<20} {source.title}; {source.licence}")
    print("`ssl-bench data list NAME` shows one with its tree, files and classes")
    return 0


def _source(action: str, name: str | None) -> Source:
    if name is None:
        raise ConfigurationError(f"name a dataset: {', '.join(SOURCES)}")
    hint = ("ssl-bench", "data", action, "{near}")
    return SOURCES[require_choice("dataset", name, list(SOURCES), hint=hint)]


def _as_json(source: Source) -> dict[str, Any]:
    """All that is known of a dataset, as JSON types."""
    dataset, _ = _built(source.name, None)
    roles = [role for role in _ROLES if role in dataset.supports]
    classes = list(_class_names(source, dataset))
    return {**asdict(source), "counts": dict(source.counts), "size": source.size, "roles": roles,
            "class_names": classes}  # fmt: skip


def _about(told: dict[str, Any], source: Source) -> list[str]:
    names = ", ".join(told["class_names"]) or "named in the download"
    files = []
    for one in source.downloads:
        published = one.published
        digest = f"{published.algorithm} {published.digest}" if published.digest else "no digest"
        files.append(f"{published.url} ({format_size(one.size)}, {digest}) into DIR/{one.into}")
    rows = [
        ("title", source.title),
        ("homepage", source.homepage),
        ("licence", source.licence),
        ("roles", ", ".join(told["roles"])),
        *(("expected", line) for line in source.tree),
        *((role, f"{count:,} images") for role, count in source.counts.items()),
        *(("file", line) for line in files),
        *([("by hand", source.by_hand)] if source.by_hand else []),
        *([("classes", f"{source.num_classes}: {names}")] if source.num_classes else []),
    ]
    return [source.name, *(f"  {label:<10} {text}" for label, text in rows)]


def _class_names(source: Source, dataset: Any) -> Sequence[str]:
    if source.name.startswith("voc"):
        return CLASS_NAMES
    if source.name == "coco_stuff":
        return [name for name, _ in read_classes().values()]
    return getattr(dataset, "class_names", ())


def _built(name: str, root: str | None, overrides: Sequence[str] = ()) -> tuple[Any, ReadOptions]:
    """The dataset of a configuration, not opened, and how it asks for the files to be read."""
    # Here, because Hydra takes longer than all that `data list` says.
    from ssl_bench.composition.compose import add_data_root, build, compose_config

    config = compose_config("data", add_data_root([f"dataset={name}", *overrides], root))
    return build(config, "dataset"), ReadOptions(bits=shared_values(config)["data.bits"])


def _download(options: argparse.Namespace) -> int:
    """Fetch and unpack the files of a dataset, going on where an earlier call ended."""
    source = _source(options.action, options.target)
    if not source.downloads:
        raise ConfigurationError(f"{source.name} has no free address: {source.by_hand}")
    root = _root(options)
    pending = [one for one in source.downloads if not _is_done(one, root)]
    say(f"{source.title}: {source.licence}; {source.homepage}")
    # Archive and files are on the disk at the same time; earlier calls may have fetched a part.
    needed = sum(one.size for one in pending)
    for one in (one for one in pending if not _target(one, root).is_file()):
        part = part_of(_target(one, root))
        needed += max(0, one.size - (part.stat().st_size if part.is_file() else 0))
    require_space(needed, root)
    for one in pending:
        _fetch(one, root)
    state = {"dataset": source.name, "root": str(root), "fetched": [one.name for one in pending]}
    if options.json:
        print(dump_json(state, indent=None))
    say(
        f"{source.name} is complete in {root}; `ssl-bench data check {source.name} --data-root "
        f"{root}` reads it; the archives in {root} may be deleted"
    )
    return 0


def _target(one: Download, root: Path) -> Path:
    return (root if one.is_archive else root / one.into) / one.name


def _fetch(one: Download, root: Path) -> None:
    say(f"{one.published.url}, {format_size(one.size)}")
    target = _target(one, root)

    def require_archive(found: Path) -> None:
        if not (zipfile.is_zipfile(found) or tarfile.is_tarfile(found)):
            raise DataError(f"{found} is no whole zip or tar")

    check = require_archive if one.is_archive else None
    with download(one.published, target, check).open("rb") as file:
        # Another process may unpack it.
        wait_for_lock(file.fileno())
        if _is_done(one, root):
            return
        if one.is_archive:
            unpack(target, root / one.into)
            # Before the mark: it must not survive a loss of power that the files do not.
            if hasattr(os, "sync"):
                os.sync()
        # A file that says which download is in its place.
        write_text_atomically(root / _MARKS / one.name, _DONE.format(one.published))


def _is_done(one: Download, root: Path) -> bool:
    mark = root / _MARKS / one.name
    return mark.is_file() and mark.read_text(errors="replace") == _DONE.format(one.published)


def unpack(archive: Path, folder: Path) -> None:
    """Write the files of a tar or zip archive below a folder; files that are there are replaced.

    Raises:
        DataError: it is damaged, or holds what leads out of the folder.
        MachineError: the disk is too small or cannot be written.
    """
    title = f"unpacking {archive.name}"
    try:
        if archive.suffix.lower() == ".zip":
            with zipfile.ZipFile(archive) as zipped:
                names = zipped.namelist()
                require_space(sum(one.file_size for one in zipped.infolist()), folder)
                zipped.extractall(folder, show_progress(names, title, len(names)))
        else:
            with tarfile.open(archive) as tarred:
                members = tarred.getmembers()
                require_space(sum(one.size for one in members), folder)
                shown = show_progress(members, title, len(members))
                tarred.extractall(folder, shown, filter="data")
    except (EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{archive} is damaged ({error}); delete it and type the command again"
        ) from error
    except MachineError:
        raise
    except OSError as error:
        raise MachineError(
            f"cannot unpack {archive}: {error.strerror or error}; free space or choose another "
            "folder",
            hint=("--data-root", "{folder}"),
        ) from error


def require_space(size: int, folder: Path) -> None:
    """Refuse before hours of work what does not fit below a folder, in bytes."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if size > free:
        raise MachineError(
            f"{folder} needs {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; free space or "
            "choose another folder",
            hint=("--data-root", "{folder}"),
        )


def _root(options: argparse.Namespace) -> Path:
    if options.data_root is None:
        raise ConfigurationError(
            f"data {options.action} expects a folder",
            hint=("--data-root", "{folder}"),
        )
    return expand_path(options.data_root)


def _check(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Open, count and sample every split of a dataset; exit code 3 if anything is wrong."""
    name = options.target
    if name is not None and name not in SOURCES and name in choices("dataset"):
        # One's own, of which nothing is published.
        source = Source(name, name, tree=("any folder",))
    else:
        source = _source("check", name)
    if source.is_generated and options.data_root is not None:
        raise ConfigurationError(
            f"{source.name} is generated and takes no --data-root; leave it out"
        )
    root = None if source.is_generated else str(_root(options))
    plain, reading = _built(source.name, root, overrides)
    dataset = dataset_read_as(plain, reading)
    if getattr(plain, "leaves_out_unreadable", False):
        # Pictures of one's own: a probe takes what can be read.
        images = dataset.images()
        faults = faults_of(images, {})
        gone = [i for i, fault in zip(images.ids, faults, strict=True) if fault is not None]
        if options.json:
            taken = len(images) - len(gone)
            print(dump_json({"dataset": source.name, "images": taken, "left_out": gone}))
        else:
            problems = [f"  {to_one_line(str(fault))}" for fault in faults if fault is not None]
            verdict = f"{len(gone)} cannot be read" if gone else "ok"
            print(escape_lines([f"{len(images)} files of images: {verdict}", *problems]))
        require_readable(images, faults)
        return 0
    counts = {} if options.subset else source.counts
    roles = [role for role, kinds in _CHECKED.items() if dataset.supports.intersection(kinds)]
    states = [_checked(dataset, role, counts.get(role)) for role in roles or ["images"]]
    if options.json:
        print(dump_json({"dataset": source.name, "splits": states}))
    else:
        for state in states:
            counted = state["published"]
            expected = f" of {counted:,} published" if counted is not None else ""
            problems = [f"  {to_one_line(problem)}" for problem in state["problems"]]
            verdict = f"{len(problems)} problem(s)" if problems else "ok"
            first = (
                f"{state['role']:<10} {state['images']:,} images{expected}, {state['read']} read "
                f"as a sample: {verdict}"
            )
            print(escape_lines([first, *problems]))
        names = _class_names(source, plain)
        if source.name == "ade20k" and root is not None:
            inside = Path(root) / "ADEChallengeData2016"
            names = ade20k_class_names(inside if inside.is_dir() else Path(root))
        if names:
            print(escape_unprintable(f"classes    {len(names)}: {', '.join(names)}"))
        elif "classification" in dataset.supports and not any(s["problems"] for s in states):
            found = dataset.train().class_names
            print(escape_unprintable(f"classes    {len(found)}: {first_of(found)}"))
    broken = [state for state in states if state["problems"]]
    if broken:
        count = sum(len(state["problems"]) for state in broken)
        first = f"first {broken[0]['role']}: {broken[0]['problems'][0]}"
        by_hand, remedy = f"; {source.by_hand}" if source.by_hand else "", ()
        if source.downloads:
            by_hand = ""
            remedy = (
                "ssl-bench",
                "data",
                "download",
                source.name,
                "--data-root",
                escape_braces(str(root)),
            )
        fewer = all(
            0 < one["images"] < (one["published"] or 0) and len(one["problems"]) == 1
            for one in broken
        )
        if fewer:
            raise DataError(
                f"{source.name} in {root} is a part of what is published, {first}{by_hand}",
                hint=join_alternatives(("--subset",), remedy),
            )
        if not source.counts or source.is_generated:
            many = "fault" if count == 1 else "faults"
            raise DataError(f"{source.name} in {root} has {count} {many}, {first}")
        raise DataError(
            f"{source.name} in {root} is not as published, {count} in all, {first}{by_hand}",
            hint=join_alternatives(("ssl-bench", "data", "list", source.name), remedy),
        )
    return 0


def _checked(dataset: Dataset, role: str, published: int | None) -> dict[str, Any]:
    """Open a split, count it, and decode a random sample of it, always the same one.

    Images are 0 where it cannot be opened, and None published where nobody says how many.
    """
    told = {"role": role, "split": "", "images": 0, "published": published, "read": 0}
    try:
        images: ImageSet = getattr(dataset, role)()
    except DataError as error:
        return {**told, "problems": [str(error)]}
    problems = []
    if published is not None and published != len(images):
        problems.append(f"{len(images):,} images, published are {published:,}")
    chosen = sorted(random.Random(0).sample(range(len(images)), min(_SAMPLE, len(images))))
    read = 0
    for index in show_progress(chosen, f"reading {images.split}"):
        try:
            images[index]
            read += 1
        except DataError as error:
            problems.append(str(error))
    told |= {"split": images.split, "images": len(images), "read": read}
    return {**told, "problems": problems}


def _verify(options: argparse.Namespace) -> int:
    """Compare the files below a folder with the list of their sha256, or write that list."""
    if options.target is None:
        raise ConfigurationError("data verify needs the folder of a dataset")
    root = expand_path(options.target)
    manifest = expand_path(options.manifest) if options.manifest else root / MANIFEST
    if options.update or not manifest.exists():
        count = write_manifest(root, manifest)
        say(f"{count} files listed in {manifest}; `ssl-bench data verify {root}` compares them")
        if options.json:
            print(dump_json({"manifest": str(manifest), "listed": count}, indent=None))
        return 0
    expected, names = read_manifest(manifest), _files(root, manifest)
    digests = _digests(root, [name for name in names if name in expected])
    changed = [name for name, digest in digests if digest != expected[name]]
    missing = sorted(expected.keys() - set(names))
    added = [name for name in names if name not in expected]
    if options.json:
        told = {"changed": changed, "missing": missing, "added": added}
        print(dump_json({"manifest": str(manifest), **told}))
    for what, some in (("new, not in the list", added), ("missing", missing)):
        if some:
            say(f"{len(some)} {what}: {first_of(some)}")
    # Files that came later are no damage.
    if changed or missing:
        raise DataError(
            f"{len(changed)} files below {root} differ from {manifest} and {len(missing)} are "
            f"missing: {first_of([*changed, *missing])}; fetch them again, or accept the changes",
            hint=("--update",),
        )
    say(f"all files below {root} are as {manifest} lists them")
    return 0


def write_manifest(root: Path, manifest: Path) -> int:
    """List the sha256 of every file below a folder, and count them.

    Hidden files and the list itself are left out.
    """
    names = _files(root, manifest)
    if not names:
        raise DataError(f"{root} holds no file; name the folder of a dataset")
    lines = []
    for name, digest in _digests(root, names):
        escaped = name.replace("\\", "\\\\").replace("\n", "\\n")
        lines.append(f"{digest}  {escaped}\n")
    write_text_atomically(manifest, "".join(lines))
    return len(names)


def read_manifest(manifest: Path) -> Mapping[str, str]:
    """Path to sha256, of lines `DIGEST  PATH`."""
    try:
        lines = read_regular(manifest).decode(errors="surrogateescape").split("\n")
    except OSError as error:
        raise DataError(f"cannot read {manifest} ({error.strerror}); write it anew") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None and line:
            raise DataError(
                f"{manifest} line {number} is not `SHA256  PATH`; write it anew", hint=("--update",)
            )
        if match is not None:
            name = re.sub(r"\\(.)", lambda one: "\n" if one[1] == "n" else one[1], match[2])
            found[name] = match[1]
    if not found:
        raise DataError(f"{manifest} lists no file; write it anew")
    return found


def _files(root: Path, manifest: Path) -> list[str]:
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; name the folder of a dataset")
    own = resolve_links(manifest)
    found = []
    for folder, children, names in os.walk(root):
        children[:] = [child for child in children if child[0] != "."]
        paths = (Path(folder) / name for name in names if name[0] != ".")
        found += [p.relative_to(root).as_posix() for p in paths if resolve_links(p) != own]
    return sorted(found)


def _digests(root: Path, names: list[str]) -> Iterator[tuple[str, str]]:
    def digest(name: str) -> str:
        try:
            return file_sha256(root / name)
        except OSError as error:
            raise DataError(f"{root / name} cannot be read ({error.strerror})") from error

    return in_threads(digest, show_progress(names, f"reading {root.name}"))
