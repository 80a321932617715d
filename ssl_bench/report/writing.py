"""From a report to a folder of pages, which takes its place when it is whole."""

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
from ssl_bench.report.comparing import scored_by_panel
from ssl_bench.report.pages import Page, Report, checkpoint_page, epochs_page, index_page, pair_page
from ssl_bench.results import Record, ResultStore
from ssl_bench.results.record import INFINITY_AS_JSON
from ssl_bench.system.escaping import (
    dump_json,
    escape_in_template,
    escape_unprintable,
    to_plain_json,
)
from ssl_bench.system.files import REPORT_MARK
from ssl_bench.system.paths import resolve_links
from ssl_bench.system.progress import show_progress

STATIC = ("style.css", "report.js")
_SHOWN = {
    "model": "checkpoint",
    "checkpoint_sha256": "sha256 of the weights",
    "architecture": "architecture",
    "mean": "mean of the images",
    "std": "deviation of the images",
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
    "seconds": "seconds of the pass",
    "created": "date",
}
"""Fields of a record and what the pages call them."""


def write_report(report: Report, folder: Path) -> None:
    """Write all pages and copy the pictures; an older report is replaced when all is done.

    Raises:
        ConfigurationError: the folder holds something else.
        MachineError: it cannot be written.
    """
    environment = Environment(
        loader=PackageLoader("ssl_bench.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=escape_in_template,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    numbers = {id(record): str(number) for number, record in enumerate(report.records)}

    def numbers_of(some: Iterable[Record]) -> str:
        return " ".join(numbers[id(record)] for record in some)

    environment.filters["numbers"] = numbers_of
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    site = {
        "source": resolve_links(report.store.root).name,
        "version": __version__,
        "written": written,
    }
    with replacing(folder) as new:

        def write(name: str, text: str) -> None:
            # Names of files may hold bytes that are no UTF-8; a page shows them as question marks.
            (new / name).write_bytes(text.encode(errors="replace"))

        def render(name: str, template: str, page: Page) -> None:
            write(name, environment.get_template(template).render(page=page, site=site))

        for path in show_progress(report.picture_paths(), "pictures"):
            report.pictures.copy(path, new)
        for name in STATIC:
            static = files("ssl_bench.report").joinpath("static", name)
            write(name, static.read_text(encoding="utf-8"))
        write("records.js", as_script(report.store, report.records))
        for checkpoint in show_progress(report.checkpoints, "checkpoints"):
            render(checkpoint.page, "checkpoint.html", checkpoint_page(report, checkpoint))
        compared = scored_by_panel(report.store, report.panels, report.pairs)
        for pair in report.pairs:
            render(pair.page, "pair.html", pair_page(report, pair, compared.get(pair, [])))
        if report.followed:
            render("epochs.html", "epochs.html", epochs_page(report.followed))
        if report.corrupted:
            render("severities.html", "severities.html", {"followed": report.corrupted})
        render("index.html", "index.html", index_page(report))


def require_replaceable(folder: Path) -> None:
    """Nothing but a report may be replaced.

    Raises:
        ConfigurationError: something else lies there.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigurationError(
            f"{folder} is no folder; name another one for the report", hint=("--into", "{folder}")
        )
    if folder.is_dir() and any(folder.iterdir()) and not (folder / REPORT_MARK).is_file():
        raise ConfigurationError(
            f"{folder} holds files and is no report of ssl-bench; name a new or empty folder",
            hint=("--into", "{folder}"),
        )


@contextmanager
def replacing(folder: Path) -> Generator[Path]:
    """A new folder that takes the place of `folder` when the block ends without an error.

    Raises:
        ConfigurationError: `folder` is something else than a report.
        MachineError: the disk is full or the folder cannot be written; an older report stays.
    """
    require_replaceable(folder)
    # So that "." has a name.
    folder = resolve_links(folder)
    mark = uuid.uuid4().hex
    new, old = (folder.with_name(f".{mark}.{word}") for word in ("new", "old"))
    try:
        new.mkdir(parents=True)
        yield new
        (new / REPORT_MARK).write_text(json.dumps({"report": 1}) + "\n")
        # Again, because somebody may have put files there in the meantime.
        require_replaceable(folder)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    except OSError as error:
        raise MachineError(
            f"cannot write {folder}: {error.strerror or error}; free space or choose another folder"
        ) from error
    finally:
        # Whatever came between the two names, an interrupt too: the older report goes back.
        if old.exists() and not folder.exists():
            with suppress(OSError):
                old.rename(folder)
        shutil.rmtree(new, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)


def as_script(store: ResultStore, records: Sequence[Record]) -> str:
    """JavaScript that defines the constant `RECORDS`: names, values by record, and settings.

    What many records share is written once.
    """
    # Places of words by their JSON, and of mappings, which many records share, by identity.
    words, mappings = dict[str, int](), dict[int, int]()

    def new(value: Any) -> int:
        word = json.dumps(
            to_plain_json(value, infinity=INFINITY_AS_JSON), sort_keys=True, default=str
        )
        return words.setdefault(word, len(words))

    def place(value: Any) -> int:
        if not isinstance(value, Mapping):
            return new(value)
        if id(value) not in mappings:
            mappings[id(value)] = new(value)
        return mappings[id(value)]

    rows = []
    for record in records:
        digits = ".4f" if record.unit else ".6g"
        changed = {
            "value": _rounded(record.value, digits),
            "ci95": _rounded(record.ci95, digits),
            "unit": record.unit or "plain number",
        }
        fields = [changed[n] if n in changed else getattr(record, n) for n in _SHOWN]
        # The details that fit on a line; the record has all.
        plain = {n: v for n, v in record.details.items() if not isinstance(v, Mapping)}
        small = {name: _rounded(v, ".4f") for name, v in plain.items() if len(str(v)) <= 200}
        rows.append([*map(place, [*fields, store.place(record), record.settings]), new(small)])
    names = [*_SHOWN.values(), "record", "settings", "details"]
    content = {"names": names, "words": [json.loads(word) for word in words], "rows": rows}
    text = dump_json(content, indent=None, text=escape_unprintable)
    # Parsed, because in a literal of the language the name __proto__ means something.
    return f"const RECORDS = JSON.parse({json.dumps(text)});\n"


def _rounded(value: Any, digits: str) -> Any:
    """Numbers with so many digits: plain ones may be of any magnitude."""
    if isinstance(value, (list, tuple)):
        return [_rounded(item, digits) for item in value]
    is_number = isinstance(value, float) and math.isfinite(value)
    return float(f"{value:{digits}}") if is_number else value
