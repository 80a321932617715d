"""Write a report as a folder of HTML pages, replacing an older report in this folder."""

import json
import math
import shutil
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ssl_bench import __version__
from ssl_bench.errors import ConfigurationError, MachineError
from ssl_bench.report.pages import (
    Page,
    Report,
    build_checkpoint_page,
    build_epochs_page,
    build_index_page,
    build_pair_page,
    build_runs_page,
)
from ssl_bench.report.pairs import compare_pairs
from ssl_bench.results import Record, ResultStore
from ssl_bench.results.record import INFINITY_AS_JSON
from ssl_bench.system.files import REPORT_MARK, resolve_links
from ssl_bench.system.output import (
    dump_json,
    escape_in_template,
    escape_unprintable,
    show_progress,
    to_plain_json,
)
from ssl_bench.tables.styles import DASHES, PALETTE

_STATIC = ("style.css", "report.js")
# CSS rules for the colours and dashes of encoders. On a dark page, the colours are lighter.
_LINE_RULES = "".join(
    [
        f".c{number} {{ --ink: light-dark({colour}, color-mix(in oklab, {colour} 55%, white)); }}\n"
        for number, colour in enumerate(PALETTE)
    ]
    + [
        f".d{number}{end} .line {{ stroke-dasharray: {' '.join(map(str, lengths)) or 'none'}; }}\n"
        for number, pair in enumerate(DASHES)
        for end, lengths in zip(("", "s"), pair, strict=True)
    ]
)
# Fields of a record, and their names in the dialog that shows the provenance of a score.
_FIELDS = {
    "model": "checkpoint",
    "checkpoint_sha256": "sha256 of the weights",
    "architecture": "architecture",
    "mean": "mean of the images",
    "std": "standard deviation of the images",
    "task": "task",
    "dataset": "dataset",
    "split": "split",
    "num_images": "images",
    "dataset_fingerprint": "dataset fingerprint",
    "layer": "block",
    "facet": "facet",
    "protocol": "protocol",
    "metric": "metric",
    "value": "value",
    "unit": "unit",
    "ci95": "95 % interval",
    "seed": "seed",
    "version": "ssl-bench",
    "git_commit": "commit",
    "torch": "torch",
    "device": "device",
    "seconds": "seconds",
    "created": "date",
}


def write_report(report: Report, folder: Path) -> None:
    """Write all pages of a report and copy its pictures to the folder `folder`.

    An older report is replaced after all pages have been written.

    Raises:
        ConfigurationError: The folder is not empty and contains no report, or it contains a file
            that is not part of its report.
        MachineError: The folder cannot be written. An older report is kept.
    """
    environment = Environment(
        loader=PackageLoader("ssl_bench.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=escape_in_template,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    indices = {id(record): str(index) for index, record in enumerate(report.records)}

    def list_indices(records: Iterable[Record]) -> str:
        return " ".join(indices[id(record)] for record in records)

    environment.filters["indices"] = list_indices
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    site = {"source": resolve_links(report.store.root).name, "version": __version__, "date": date}
    with replace_report(folder) as new:

        def write(name: str, text: str) -> None:
            # Names may contain bytes that are not valid UTF-8. Pages show them as question marks.
            (new / name).write_bytes(text.encode(errors="replace"))

        def render(name: str, template: str, page: Page) -> None:
            write(name, environment.get_template(template).render(page=page, site=site))

        for path in show_progress(report.picture_paths(), "pictures"):
            report.pictures.copy(path, new)
        for name in _STATIC:
            static = files("ssl_bench.report").joinpath("static", name)
            write(name, static.read_text(encoding="utf-8") + _LINE_RULES * (name == "style.css"))
        write("records.js", make_records_script(report.store, report.records))
        for checkpoint in show_progress(report.checkpoints, "checkpoints"):
            page = build_checkpoint_page(report, checkpoint)
            render(checkpoint.page, "checkpoint.html", page)
        compared = compare_pairs(report.store, report.panels, report.pairs)
        for pair in report.pairs:
            page = build_pair_page(report, pair, compared.get(pair, []))
            render(pair.page, "pair.html", page)
        if report.epochs:
            render("epochs.html", "epochs.html", build_epochs_page(report.epochs))
        if report.severities:
            render("severities.html", "severities.html", {"drawn": report.severities})
        if report.runs:
            render("runs.html", "runs.html", build_runs_page(report.runs))
        render("index.html", "index.html", build_index_page(report))


def require_replaceable(folder: Path) -> None:
    """Raise ConfigurationError unless a folder is missing, empty, or contains only a report."""
    hint = ("--into", "{folder}")
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigurationError(
            f"cannot write the report to {folder}, which is not a folder", hint=hint
        )
    if folder.is_dir() and any(folder.iterdir()) and not (folder / REPORT_MARK).is_file():
        raise ConfigurationError(
            f"cannot write the report to {folder}, which is not empty but contains no report",
            hint=hint,
        )
    if other := _find_other_file(folder):
        raise ConfigurationError(
            f"cannot replace the report in {folder}, because {other} is not part of it. Move this "
            "file, or write the report to another folder",
            hint=hint,
        )


def _find_other_file(folder: Path) -> str | None:
    """Return the name of a file in a report's folder that does not belong to the report.

    Return None if there is no such file. Hidden files are ignored, because file managers create
    them. Files in hidden folders, such as .git, are not ignored.
    """
    try:
        known = json.loads((folder / REPORT_MARK).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):  # Older versions did not store the names.
        return None
    others = set(_list_files(folder)) - {*known}
    return min((name for name in others if not Path(name).name.startswith(".")), default=None)


def _list_files(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in paths)


@contextmanager
def replace_report(folder: Path) -> Generator[Path]:
    """Create a temporary folder for a new report, and yield it to a `with` block.

    At the end of the `with` block, the temporary folder replaces `folder`. If the `with` block
    raises an error, `folder` is not changed.

    Raises:
        ConfigurationError: `folder` contains files that are not part of a report.
        MachineError: The folder cannot be written.
    """
    require_replaceable(folder)
    # Resolve the path, because the path "." has no name.
    folder = resolve_links(folder)
    mark = uuid.uuid4().hex
    new, old = (folder.with_name(f".{mark}.{word}") for word in ("new", "old"))
    try:
        new.mkdir(parents=True)
        yield new
        (new / REPORT_MARK).write_text(json.dumps({"report": 1, "files": _list_files(new)}) + "\n")
        # Check again, because other files may have been written to the folder in the meantime.
        require_replaceable(folder)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    except OSError as error:
        raise MachineError(
            f"cannot write the report to {folder}: {error.strerror or error}",
            hint=("--into", "{folder}"),
        ) from error
    finally:
        # If an interrupt came between the two calls of `rename`, move the older report back.
        if old.exists() and not folder.exists():
            with suppress(OSError):
                old.rename(folder)
        shutil.rmtree(new, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)


def make_records_script(store: ResultStore, records: Sequence[Record]) -> str:
    """Return JavaScript code that defines the constant `RECORDS`.

    The constant contains the names of the fields, a list of all distinct values, and one row per
    record (a stored score). A row consists of indices into the list of values.
    """
    # Indices of values, by their JSON text. Mappings are also looked up by object identity, because
    # many records share them.
    values, mappings = dict[str, int](), dict[int, int]()

    def add(value: Any) -> int:
        text = json.dumps(
            to_plain_json(value, infinity=INFINITY_AS_JSON), sort_keys=True, default=str
        )
        return values.setdefault(text, len(values))

    def find_or_add(value: Any) -> int:
        if not isinstance(value, Mapping):
            return add(value)
        if id(value) not in mappings:
            mappings[id(value)] = add(value)
        return mappings[id(value)]

    rows = []
    for record in records:
        digits = ".4f" if record.unit else ".6g"
        rewritten = {
            "value": _round(record.value, digits),
            "ci95": _round(record.ci95, digits),
            "unit": record.unit or "plain number",
        }
        fields = [rewritten[n] if n in rewritten else getattr(record, n) for n in _FIELDS]
        # Leave out long details, which readers find in the record's file.
        details = {
            name: _round(value, ".4f")
            for name, value in record.details.items()
            if not isinstance(value, Mapping) and len(str(value)) <= 200
        }
        place = store.describe_path(record)
        rows.append([*map(find_or_add, [*fields, place, record.settings]), add(details)])
    content = {
        "names": [*_FIELDS.values(), "record", "settings", "details"],
        "values": [json.loads(text) for text in values],
        "rows": rows,
    }
    text = dump_json(content, indent=None, text=escape_unprintable)
    # Parse a JSON text, because a JavaScript literal would treat the name __proto__ specially.
    return f"const RECORDS = JSON.parse({json.dumps(text)});\n"


def _round(value: Any, digits: str) -> Any:
    """Round a number, or all numbers in a list, to a precision such as ".4f"."""
    if isinstance(value, (list, tuple)):
        return [_round(item, digits) for item in value]
    is_number = isinstance(value, float) and math.isfinite(value)
    return float(f"{value:{digits}}") if is_number else value
