"""`ssl-bench data`: list, download, check, verify and shrink datasets."""

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
from itertools import chain
from pathlib import Path
from typing import Any

from ssl_bench.composition.choices import choices, require_choice
from ssl_bench.data.files.file_sets import FileImageSet, join_names
from ssl_bench.data.files.fingerprints import ReadOptions, dataset_with_read_options, map_in_threads
from ssl_bench.data.files.readable import find_read_errors, require_readable
from ssl_bench.data.layouts.ade20k import class_names as ade20k_class_names
from ssl_bench.data.layouts.coco_stuff import read_classes
from ssl_bench.data.layouts.voc import CLASS_NAMES
from ssl_bench.data.samples import SPLITS_OF_ROLES, Dataset, ImageSet
from ssl_bench.data.shrinking import shrink_images
from ssl_bench.data.sources import DATASET_INFOS, DatasetInfo, Download
from ssl_bench.data.splits import read_shared_values
from ssl_bench.errors import (
    ConfigurationError,
    DataError,
    MachineError,
    escape_braces,
    join_alternatives,
    with_hint,
)
from ssl_bench.network import download, partial_path
from ssl_bench.request import require_dataset
from ssl_bench.system.files import (
    expand_path,
    file_sha256,
    read_regular,
    resolve_links,
    wait_for_lock,
    write_text_atomically,
)
from ssl_bench.system.output import (
    dump_json,
    escape_lines,
    escape_unprintable,
    format_size,
    print_message,
    show_progress,
    to_one_line,
)

MANIFEST = "SHA256SUMS"
# A line of the output of `sha256sum`. A "*" marks a file that was read in binary mode. Paths from
# `find` start with "./".
_MANIFEST_LINE = re.compile(r"\\?([0-9a-f]{64}) [ *](?:\./)?(.+)")
_MARKER_FOLDER = ".ssl-bench"
_SAMPLE_SIZE = 64


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run `ssl-bench data list`, `download`, `check`, `verify` or `shrink`.

    Only `check` and `shrink` accept KEY=VALUE settings.
    """
    if options.action == "check":
        return _check(options, overrides)
    if options.action == "shrink":
        return _shrink(options, overrides)
    if overrides:
        raise ConfigurationError(
            f"`ssl-bench data {options.action}` accepts no KEY=VALUE settings, got {overrides[0]!r}"
        )
    actions = {"list": _list, "download": _download, "verify": _verify}
    return actions[options.action](options)


def _list(options: argparse.Namespace) -> int:
    if options.target is not None:
        info = _find_info(options.action, options.target)
        facts = _as_json(info)
        print(dump_json(facts) if options.json else "\n".join(_format_facts(facts, info)))
        return 0
    if options.json:
        print(dump_json([_as_json(info) for info in DATASET_INFOS.values()]))
        return 0
    for info in DATASET_INFOS.values():
        size = format_size(info.size) if info.downloads else "-"
        way = f"download {info.name}" if info.downloads else "by hand"
        way = "generated" if info.is_generated else way
        print(f"{info.name:<15} {size:>8}  {way:<20} {info.title} ({info.licence})")
    print("Run `ssl-bench data list NAME` to show the folder tree, files and classes of a dataset.")
    return 0


def _find_info(action: str, name: str | None) -> DatasetInfo:
    if name is None:
        raise ConfigurationError(
            f"data {action} expects the name of a dataset, one of {', '.join(DATASET_INFOS)}",
            hint=("ssl-bench", "data", "list"),
        )
    hint = ("ssl-bench", "data", action, "{near}")
    require_choice("dataset", name, choices("dataset"), hint=hint)
    return DATASET_INFOS.get(name) or DatasetInfo(name, title=name, tree=("any folder",))


def _as_json(info: DatasetInfo) -> dict[str, Any]:
    dataset, _ = _build_dataset(info.name, None)
    facts = asdict(info)
    instructions = facts.pop("instructions")
    return {
        **facts,
        "by_hand": instructions,
        "counts": dict(info.counts),
        "size": info.size,
        "roles": [role for role in SPLITS_OF_ROLES if role in dataset.supports],
        "class_names": list(_class_names(info, dataset)),
    }


def _format_facts(facts: Mapping[str, Any], info: DatasetInfo) -> list[str]:
    names = ", ".join(facts["class_names"]) or "listed in the downloaded files"
    files = []
    for file in info.downloads:
        published = file.published
        digest = f"{published.algorithm} {published.digest}" if published.digest else "no digest"
        files.append(f"{published.url} ({format_size(file.size)}, {digest}) into DIR/{file.into}")
    rows = [
        ("title", info.title),
        ("homepage", info.homepage),
        ("licence", info.licence),
        ("roles", ", ".join(facts["roles"])),
        *(("expected", line) for line in info.tree),
        *((split, f"{count:,} images") for split, count in info.counts.items()),
        *(("file", line) for line in files),
        *([("by hand", info.instructions)] if info.instructions else []),
        *([("classes", f"{info.num_classes}: {names}")] if info.num_classes else []),
    ]
    return [info.name, *(f"  {label:<10} {text}" for label, text in rows)]


def _class_names(info: DatasetInfo, dataset: Any) -> Sequence[str]:
    if info.name.startswith("voc"):
        return CLASS_NAMES
    if info.name == "coco_stuff":
        return [name for name, _ in read_classes().values()]
    return getattr(dataset, "class_names", ())


def _build_dataset(
    name: str, root: str | None, overrides: Sequence[str] = ()
) -> tuple[Any, ReadOptions]:
    """Build the dataset `name` without opening its files.

    The second item of the result contains `data.fingerprint` and `data.bits`, which determine how
    images are read.

    Args:
        name: Name of the dataset, such as "voc2012".
        root: Folder of the dataset, or None if no folder is needed or if `overrides` contain it.
        overrides: KEY=VALUE settings.
    """
    # Import it only here, because importing Hydra takes longer than running `data list`.
    from ssl_bench.composition.compose import add_data_root, build, compose_config

    config = compose_config("data", add_data_root([f"dataset={name}", *overrides], root))
    shared = read_shared_values(config)
    return build(config, "dataset"), ReadOptions(shared["data.fingerprint"], shared["data.bits"])


def _download(options: argparse.Namespace) -> int:
    info = _find_info(options.action, options.target)
    if not info.downloads:
        reason = info.instructions or "ssl-bench knows no download address"
        raise ConfigurationError(f"{info.name} cannot be downloaded automatically: {reason}")
    root = _require_root(options)
    pending = [file for file in info.downloads if not _is_finished(file, root)]
    print_message(f"{info.title} ({info.licence}), {info.homepage}")
    # The archives and their unpacked files both need disk space.
    size = sum(file.size for file in pending)
    for file in pending:
        path = _local_path(file, root)
        if not path.is_file():
            part = partial_path(path)
            size += max(0, file.size - (part.stat().st_size if part.is_file() else 0))
    require_space(size, root)
    for file in pending:
        _download_file(file, root)
    if options.json:
        names = [file.name for file in pending]
        result = {"dataset": info.name, "root": str(root), "fetched": names}
        print(dump_json(result, indent=None))
    print_message(f"{info.name} is complete in {root}. You may delete the archives in this folder.")
    print_message(f"run `ssl-bench data check {info.name} --data-root {root}` to check the dataset")
    return 0


def _local_path(file: Download, root: Path) -> Path:
    return (root if file.is_archive else root / file.into) / file.name


def _download_file(file: Download, root: Path) -> None:
    """Download a file to the folder `root` of a dataset, and unpack it if it is an archive.

    After the download, a small file in `root` prevents a second download of the same file.
    """
    print_message(f"downloading {file.published.url} ({format_size(file.size)})")
    path = _local_path(file, root)
    check = _require_archive if file.is_archive else None
    with download(file.published, path, check).open("rb") as opened:
        # Another process may be unpacking the same archive.
        wait_for_lock(opened.fileno())
        if _is_finished(file, root):
            return
        if file.is_archive:
            unpack(path, root / file.into)
            # Flush the files to disk before the marker is written. Otherwise, a power failure could
            # leave a marker without its files.
            if hasattr(os, "sync"):
                os.sync()
        write_text_atomically(root / _MARKER_FOLDER / file.name, _marker_text(file))


def _require_archive(path: Path) -> None:
    if not (zipfile.is_zipfile(path) or tarfile.is_tarfile(path)):
        raise DataError(f"{path} is not a complete zip or tar archive")


def _marker_text(file: Download) -> str:
    return f"{file.published.url} {file.published.digest}\n"


def _is_finished(file: Download, root: Path) -> bool:
    marker = root / _MARKER_FOLDER / file.name
    return marker.is_file() and marker.read_text(errors="replace") == _marker_text(file)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar or zip archive into a folder, replacing existing files."""
    description = f"unpacking {archive.name}"
    try:
        if archive.suffix.lower() == ".zip":
            with zipfile.ZipFile(archive) as zipped:
                names = zipped.namelist()
                require_space(sum(member.file_size for member in zipped.infolist()), folder)
                zipped.extractall(folder, show_progress(names, description, len(names)))
        else:
            with tarfile.open(archive) as tarred:
                members = tarred.getmembers()
                require_space(sum(member.size for member in members), folder)
                shown = show_progress(members, description, len(members))
                tarred.extractall(folder, shown, filter="data")
    except (EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{archive} is damaged ({error}). Delete it and run the command again"
        ) from error
    except MachineError:
        raise
    except OSError as error:
        raise MachineError(
            f"cannot unpack {archive} ({error.strerror or error}). Free some space or choose "
            "another folder",
            hint=("--data-root", "{folder}"),
        ) from error


def require_space(size: int, folder: Path) -> None:
    """Raise MachineError if the disk of a folder has less free space than `size` bytes."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if size > free:
        raise MachineError(
            f"{folder} has {free / 1e9:.1f} GB free, expected {size / 1e9:.1f} GB. Free some space "
            "or choose another folder",
            hint=("--data-root", "{folder}"),
        )


def _require_root(options: argparse.Namespace) -> Path:
    if options.data_root is None:
        raise ConfigurationError(
            f"data {options.action} needs the folder of the dataset",
            hint=("--data-root", "{folder}"),
        )
    return expand_path(options.data_root)


def _check(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Check the files of a dataset, and print the number of images and the problems of each split.

    The number of images in a split is compared with the published number, if it is known. A random
    sample of images in each split is read, or all images in a folder of photographs.

    Raises:
        DataError: The dataset has problems.
    """
    name, own_root = options.target, None
    if name is not None and ":" in name:
        name, own_root = require_dataset(name)
    info = _find_info("check", name)
    if own_root is not None and options.data_root is not None:
        raise ConfigurationError(
            f"{options.target} already contains the folder, so --data-root has no effect. "
            "Remove this flag"
        )
    if info.is_generated and options.data_root is not None:
        raise ConfigurationError(
            f"dataset {info.name} is generated, so --data-root has no effect. Remove this flag"
        )
    root = own_root if info.is_generated or own_root else str(_require_root(options))
    raw_dataset, read_options = _build_dataset(info.name, root, overrides)
    dataset = dataset_with_read_options(raw_dataset, read_options)
    if getattr(raw_dataset, "leaves_out_unreadable", False):
        return _check_photographs(info.name, dataset.images(), as_json=options.json)
    counts = {} if options.subset else info.counts
    # Check images without annotations only if the dataset has no annotated images.
    roles = [role for role in SPLITS_OF_ROLES if role in dataset.supports and role != "images"]
    splits = dict.fromkeys(
        chain.from_iterable(SPLITS_OF_ROLES[role] for role in roles or ["images"])
    )
    states = [_check_split(dataset, split, counts.get(split)) for split in splits]
    if options.json:
        print(dump_json({"dataset": info.name, "splits": states}))
    else:
        for state in states:
            print(escape_lines(_format_state(state)))
        if classes := _format_classes(info, raw_dataset, dataset, states):
            print(escape_unprintable(classes))
    if any(state["problems"] for state in states):
        raise _dataset_error(info, root, states)
    return 0


def _check_photographs(name: str, images: ImageSet, *, as_json: bool) -> int:
    """Decode all images in a folder of photographs, and print which images are unreadable.

    Raises:
        UnreadableImageError: At least one image is unreadable.
    """
    faults = find_read_errors(images, {})
    problems = [to_one_line(str(fault)) for fault in faults if fault is not None]
    if as_json:
        unreadable = [i for i, fault in zip(images.ids, faults, strict=True) if fault is not None]
        taken = len(images) - len(unreadable)
        print(dump_json({"dataset": name, "images": taken, "left_out": unreadable}))
    else:
        verdict = f"{len(problems)} unreadable" if problems else "ok"
        lines = [f"{len(images)} images: {verdict}", *(f"  {problem}" for problem in problems)]
        print(escape_lines(lines))
    require_readable(images, faults)
    return 0


def _check_split(dataset: Dataset, split: str, published: int | None) -> dict[str, Any]:
    """Open a split, count its images and read a fixed random sample.

    Args:
        dataset: The dataset.
        split: Name of the method that opens the split, such as "val".
        published: Published number of images, or None if it is unknown.

    Returns:
        A dictionary of JSON types. The entry "role" is the argument `split`, and "split" is the
        name of the opened split, which may differ. "images" and "published" are numbers of images.
        "read" is the number of readable images in the sample. "problems" is a list of error
        messages.
    """
    state = {"role": split, "split": "", "images": 0, "published": published, "read": 0}
    try:
        images: ImageSet = getattr(dataset, split)()
    except DataError as error:
        return {**state, "problems": [str(error)]}
    problems = []
    if published is not None and published != len(images):
        problems.append(f"{len(images):,} images, expected {published:,}")
    sample = random.Random(0).sample(range(len(images)), min(_SAMPLE_SIZE, len(images)))
    for index in show_progress(sorted(sample), f"reading {images.split}"):
        try:
            images[index]
            state["read"] += 1
        except DataError as error:
            problems.append(str(error))
    return {**state, "split": images.split, "images": len(images), "problems": problems}


def _format_state(state: Mapping[str, Any]) -> list[str]:
    published = state["published"]
    expected = f" of {published:,} published" if published is not None else ""
    problems = [f"  {to_one_line(problem)}" for problem in state["problems"]]
    verdict = f"{len(problems)} problem{'s' * (len(problems) > 1)}" if problems else "ok"
    counts = f"{state['images']:,} images{expected}, sample of {state['read']} read"
    return [f"{state['role']:<10} {counts}: {verdict}", *problems]


def _format_classes(
    info: DatasetInfo, raw_dataset: Any, dataset: Dataset, states: Sequence[Mapping[str, Any]]
) -> str:
    names = _class_names(info, raw_dataset)
    if info.name == "ade20k":
        root = Path(raw_dataset.root)
        inside = root / "ADEChallengeData2016"
        names = ade20k_class_names(inside if inside.is_dir() else root)
    if names:
        return f"classes    {len(names)}: {', '.join(names)}"
    if "classification" in dataset.supports and not any(state["problems"] for state in states):
        names = dataset.train().class_names
        return f"classes    {len(names)}: {join_names(names)}"
    return ""


def _dataset_error(
    info: DatasetInfo, root: str | None, states: Sequence[Mapping[str, Any]]
) -> DataError:
    """Return the error for a dataset with problems, with a hint on how to get a complete dataset.

    `states` describes the images and the problems of each split, as `_check_split` returns them.
    """
    faulty = [state for state in states if state["problems"]]
    count = sum(len(state["problems"]) for state in faulty)
    message = (
        f"{info.name} in {root} has {count} problem{'s' * (count > 1)}. The first is in "
        f"{faulty[0]['role']}: {faulty[0]['problems'][0]}"
    )
    # If the dataset is only a subset, all existing images are readable, but some are missing.
    is_subset = all(
        0 < state["images"] < (state["published"] or 0) and len(state["problems"]) == 1
        for state in faulty
    )
    subset = ("--subset",) if is_subset else ()
    fetch = ()
    if info.downloads:
        fetch = (
            *("ssl-bench", "data", "download", info.name),
            *("--data-root", escape_braces(str(root))),
        )
    elif info.instructions and info.counts:
        message += f". To get it: {info.instructions}"
    return DataError(message, hint=join_alternatives(subset, fetch))


def _shrink(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if options.target is None or options.out is None:
        raise ConfigurationError(
            "data shrink needs a folder of images and a folder for the copies",
            hint=("ssl-bench", "data", "shrink", "{folder}", "--out", "{folder}"),
        )
    root = Path(options.out)
    dataset = dataset_with_read_options(*_build_dataset("folder", options.target, overrides))
    images = dataset.images()
    assert isinstance(images, FileImageSet)
    about = shrink_images(images, root, options.side)
    if options.json:
        print(dump_json({"out": str(root), **about}, indent=None))
    sizes = f"{format_size(about['bytes_before'])} -> {format_size(about['bytes_after'])}"
    hint = (f"data.root={escape_braces(str(root))}",)
    print_message(with_hint(f"{about['images']:,} images: {sizes}", hint=hint))
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Compare the files in a folder with their SHA-256 digests in a manifest file.

    If there is no manifest or `--update` is given, write the manifest instead.
    """
    if options.target is None:
        raise ConfigurationError(
            "data verify needs a folder", hint=("ssl-bench", "data", "verify", "{folder}")
        )
    root = expand_path(options.target)
    manifest = Path(options.manifest) if options.manifest else root / MANIFEST
    if options.update or not manifest.exists():
        count = write_manifest(root, manifest)
        print_message(
            f"wrote the sha256 of {count} files to {manifest}. Run the command again to compare "
            "the files with this list."
        )
        if options.json:
            print(dump_json({"manifest": str(manifest), "listed": count}, indent=None))
        return 0
    expected, names = read_manifest(manifest), _find_files(root, manifest)
    digests = _digests(root, [name for name in names if name in expected])
    changed = [name for name, digest in digests if digest != expected[name]]
    missing = sorted(expected.keys() - set(names))
    added = [name for name in names if name not in expected]
    if options.json:
        lists = {"changed": changed, "missing": missing, "added": added}
        print(dump_json({"manifest": str(manifest), **lists}))
    if added:
        print_message(f"{len(added)} files are not listed in {manifest}: {join_names(added)}")
    # Added files are not an error.
    if changed or missing:
        raise DataError(
            f"{root} differs from {manifest}: {len(changed)} changed and {len(missing)} missing "
            f"files ({join_names([*changed, *missing])}). Restore them, or update the manifest",
            hint=("--update",),
        )
    print_message(f"{root} agrees with {manifest}")
    return 0


def write_manifest(root: Path, manifest: Path) -> int:
    """Write the SHA-256 of each file below the folder `root` to the file `manifest`.

    Return the number of files.
    """
    names = _find_files(root, manifest)
    if not names:
        raise DataError(f"{root} has no files, expected the folder of a dataset")
    lines = []
    for name, digest in _digests(root, names):
        escaped = name.replace("\\", "\\\\").replace("\n", "\\n")
        # sha256sum marks a line with an escaped name by a backslash.
        mark = "\\" if escaped != name else ""
        lines.append(f"{mark}{digest}  {escaped}\n")
    write_text_atomically(manifest, "".join(lines))
    return len(names)


def read_manifest(manifest: Path) -> Mapping[str, str]:
    """Read a manifest file with lines `SHA256  PATH`, and return the SHA-256 of each path."""
    try:
        lines = read_regular(manifest).decode(errors="surrogateescape").split("\n")
    except OSError as error:
        raise DataError(
            f"cannot read {manifest} ({error.strerror}). Write it again", hint=("--update",)
        ) from error
    digests: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        match = _MANIFEST_LINE.fullmatch(line)
        if match is not None:
            name = re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], match[2])
            digests[name] = match[1]
        elif line:
            raise DataError(
                f"{manifest} line {number} is invalid, expected `SHA256  PATH`. Write it again",
                hint=("--update",),
            )
    if not digests:
        raise DataError(f"{manifest} lists no files. Write it again", hint=("--update",))
    return digests


def _find_files(root: Path, manifest: Path) -> list[str]:
    """Return the sorted paths of all files below the folder `root`, relative to this folder.

    Hidden files, files in hidden folders, and the manifest itself are left out.
    """
    if not root.is_dir():
        raise DataError(f"{root} is not a folder, expected the folder of a dataset")
    excluded = resolve_links(manifest)
    found = []
    for folder, children, names in os.walk(root):
        children[:] = [child for child in children if child[0] != "."]
        paths = (Path(folder) / name for name in names if name[0] != ".")
        found += [p.relative_to(root).as_posix() for p in paths if resolve_links(p) != excluded]
    return sorted(found)


def _digests(root: Path, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the path and the SHA-256 of each file. Threads compute the digests in parallel.

    `names` contains the paths of the files, relative to the folder `root`.
    """

    def digest(name: str) -> str:
        try:
            return file_sha256(root / name)
        except OSError as error:
            raise DataError(f"cannot read {root / name} ({error.strerror})") from error

    return map_in_threads(digest, show_progress(names, f"reading {root.name}"))
