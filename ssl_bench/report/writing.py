"""From records to a folder of pages."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined

from ssl_bench.report.checkpoint_page import CheckpointPage, ShownExtremes, class_tables, runs_of
from ssl_bench.report.checkpoints import Checkpoint, checkpoints_of
from ssl_bench.report.comparing import (
    Pair,
    PanelPair,
    gallery_pairs,
    pairs_of,
    scored_by_panel,
)
from ssl_bench.report.epochs import EpochsPage, PanelCourses, followed_panels
from ssl_bench.report.folder import replacing
from ssl_bench.report.model import Panel, panels_of
from ssl_bench.report.outcomes import Extremes, extremes_of, outcomes_of
from ssl_bench.report.overview.board import board_of
from ssl_bench.report.overview.headlines import by_task
from ssl_bench.report.overview.profiles import Profile, profiles_of
from ssl_bench.report.pages import IndexPage, PairPage, Site, pair_view, panel_view
from ssl_bench.report.pictures.files import PictureFiles
from ssl_bench.report.pictures.panels import Gallery, galleries_of, of_layers, told_apart
from ssl_bench.report.pictures.strips import strips_of
from ssl_bench.report.pictures.viewers import address_of, sections_of
from ssl_bench.report.provenance import as_script
from ssl_bench.report.severities import CorruptedScores, SeveritiesPage, corrupted_scores
from ssl_bench.results import Record, ResultStore
from ssl_bench.system.escaping import in_page
from ssl_bench.system.naming import image_digits, image_name
from ssl_bench.system.paths import real
from ssl_bench.system.progress import show_progress
from ssl_bench.version import __version__

T = TypeVar("T")
STATIC = ("style.css", "report.js")


@dataclass(frozen=True)
class Report:
    """Everything that goes into the pages.

    Attributes:
        records: Others refer to them by their place here.
        followed: Panels with runs of several epochs.
        corrupted: Scores of corrupted images.
        by_encoder: Its records by id of an encoder.
        galleries: By id of the encoder.
        pictures: Those of the folder of results.
        num_unreadable: Files that are no complete records.
    """

    store: ResultStore
    records: tuple[Record, ...]
    checkpoints: tuple[Checkpoint, ...]
    panels: tuple[Panel, ...]
    pairs: tuple[Pair, ...]
    followed: tuple[PanelCourses, ...]
    corrupted: tuple[CorruptedScores, ...]
    by_encoder: Mapping[str, Sequence[Record]]
    galleries: Mapping[str, Sequence[Gallery]]
    pictures: PictureFiles
    num_unreadable: int

    @property
    def plain(self) -> Sequence[Panel]:
        """One number a task: of images as they are, where there are any."""
        return [panel for panel in self.panels if not panel.is_corrupted] or self.panels

    @cached_property
    def profiles(self) -> Mapping[Checkpoint, Profile]:
        found = profiles_of(self.store, self.records, self.plain, self.checkpoints)
        return {profile.checkpoint: profile for profile in found}

    def index_page(self) -> IndexPage:
        board = board_of(self.plain, self.checkpoints)
        return IndexPage(
            num_records=len(self.records),
            num_unreadable=self.num_unreadable,
            checkpoints=self.checkpoints,
            pairs=self.pairs,
            profiles=tuple(self.profiles.values()),
            board=board,
            strips=strips_of(
                self.checkpoints, self.galleries, [one.panel.record for one in board.columns]
            ),
            views=tuple(panel_view(panel, self.records) for panel in self.panels),
            followed=frozenset(one.panel.number for one in self.followed),
            has_corrupted=bool(self.corrupted),
        )

    def checkpoint_page(self, checkpoint: Checkpoint) -> CheckpointPage:
        lines = [(p, line) for p in self.panels if (line := p.line(checkpoint)) is not None]
        galleries = self.galleries[checkpoint.encoder_id]
        outcomes = [
            outcomes_of(self.store.root, self.records, panel, checkpoint) for panel, _ in lines
        ]
        extremes = [extremes_of(self.store, self.records, panel, line) for panel, line in lines]
        return CheckpointPage(
            checkpoint=checkpoint,
            profile=self.profiles.get(checkpoint),
            lines=tuple(lines),
            pairs=tuple(p for p in self.pairs if checkpoint in (p.first, p.second)),
            galleries=sections_of([[(checkpoint.name, gallery)] for gallery in galleries]),
            outcomes=tuple(found for found in outcomes if found),
            extremes=tuple(_shown(found, galleries) for found in extremes if found),
            classes=class_tables(lines, self.records),
            runs=runs_of(self.by_encoder[checkpoint.encoder_id]),
        )

    def pair_page(self, pair: Pair, compared: Sequence[PanelPair]) -> PairPage:
        shared = gallery_pairs(
            self.galleries[pair.first.encoder_id], self.galleries[pair.second.encoder_id]
        )
        order = [panel.number for those in by_task(self.panels).values() for panel in those]
        compared = sorted(compared, key=lambda one: order.index(one.panel.number))
        sides = [[(pair.first.name, g.first), (pair.second.name, g.second)] for g in shared]
        return PairPage(
            pair=pair,
            views=tuple(pair_view(one, pair.first) for one in compared),
            galleries=sections_of(sides),
        )

    def picture_paths(self) -> list[str]:
        """Paths relative to the store, each once."""
        found = (p for galleries in self.galleries.values() for g in galleries for p in g.paths())
        return list(dict.fromkeys(found))


def build_report(
    store: ResultStore,
    records: Sequence[Record],
    asked_pairs: Iterable[tuple[str, str]],
    *,
    layers: Set[int] | None = None,
) -> Report:
    """Gather what is known of some records.

    Of pictures of single blocks those of `layers` alone, below 0 from the last block on.

    Raises:
        ConfigurationError: a pair names a checkpoint that is not there.
    """
    checkpoints, pictures = checkpoints_of(records), PictureFiles(store.root)
    by_encoder: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_encoder[record.encoder_id].append(record)
    panels = panels_of(records, checkpoints)
    return Report(
        store=store,
        records=tuple(records),
        checkpoints=checkpoints,
        panels=panels,
        pairs=tuple(pairs_of(checkpoints, asked_pairs)),
        followed=followed_panels(panels, records),
        corrupted=corrupted_scores(records),
        by_encoder=by_encoder,
        galleries=told_apart(
            {
                c.encoder_id: of_layers(
                    galleries_of(pictures, by_encoder[c.encoder_id], c), layers, c.depth
                )
                for c in checkpoints
            }
        ),
        pictures=pictures,
        num_unreadable=len(store.unreadable),
    )


def write_report(report: Report, folder: Path) -> None:
    """Write all pages and copy the pictures; an older report is replaced when all is done.

    Raises:
        ConfigurationError: the folder holds something else.
        MachineError: it cannot be written.
    """
    site = Site(
        source=real(report.store.root).name,
        version=__version__,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    render = _renderer(site)
    with replacing(folder) as new:
        for path in show_progress(report.picture_paths(), "pictures"):
            report.pictures.copy(path, new)
        static = files("ssl_bench.report").joinpath("static")
        for name in STATIC:
            _write(new / name, static.joinpath(name).read_text(encoding="utf-8"))
        _write(new / "records.js", as_script(report.records))
        for checkpoint in show_progress(report.checkpoints, "checkpoints"):
            page = report.checkpoint_page(checkpoint)
            _write(new / checkpoint.page, render("checkpoint.html", page))
        compared = scored_by_panel(
            report.store,
            report.records,
            report.panels,
            report.pairs,
            lambda panels: show_progress(panels, "comparisons", len(panels)),
        )
        for pair in report.pairs:
            page = report.pair_page(pair, compared.get(pair, []))
            _write(new / pair.page, render("pair.html", page))
        if report.followed:
            _write(new / "epochs.html", render("epochs.html", EpochsPage(report.followed)))
        if report.corrupted:
            page = SeveritiesPage(report.corrupted)
            _write(new / "severities.html", render("severities.html", page))
        _write(new / "index.html", render("index.html", report.index_page()))


def _renderer(site: Site) -> Callable[[str, object], str]:
    environment = Environment(
        loader=PackageLoader("ssl_bench.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=in_page,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return lambda name, page: environment.get_template(name).render(page=page, site=site)


def _write(path: Path, text: str) -> None:
    # Names of files may hold bytes that are no UTF-8; a page shows them as question marks.
    path.write_bytes(text.encode(errors="replace"))


def _shown(extremes: Extremes, galleries: Sequence[Gallery]) -> ShownExtremes:
    panel, digits = extremes.panel, image_digits(extremes.panel.record.dataset_fingerprint)
    shown = (panel.task, panel.dataset, digits, f"{panel.protocol} {panel.facet}")
    found = {
        PurePosixPath(gallery.files[image]).name: address_of(gallery, image)
        for gallery in galleries
        if (gallery.task, gallery.dataset, gallery.images, gallery.variant) == shown
        for image in gallery.files
    }
    starts = ("", f"{panel.protocol}-{panel.facet}-")

    def address(image: str) -> str:
        names = (image_name(image, before=start) for start in starts)
        return next((found[name] for name in names if name in found), "")

    return ShownExtremes(
        extremes,
        tuple(
            (kind, tuple((s, address(s.image)) for s in scores))
            for kind, scores in (("worst", extremes.worst), ("best", extremes.best))
        ),
    )
