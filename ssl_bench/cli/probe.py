"""`ssl-bench probe`: frozen encoders, block by block."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch

from ssl_bench.asked import (
    announced_encoder,
    asked_encoders,
    asked_probes,
    opened_store,
    planned_probes,
)
from ssl_bench.cli.plans import plan_table
from ssl_bench.composition.compose import as_yaml
from ssl_bench.errors import ConfigurationError, UnfitEncoder
from ssl_bench.evaluation.passed import PassedImages
from ssl_bench.layers import layers_of
from ssl_bench.models import Encoder, EncoderIdentity, identify_encoder
from ssl_bench.models.loading.addresses import expand, is_baseline, layers_asked
from ssl_bench.planning import PlannedProbe, probing_config
from ssl_bench.report.overview.headlines import chosen_metric
from ssl_bench.results import Record, ResultStore
from ssl_bench.sweep.plan import plan_sweep
from ssl_bench.system.device import choose_device
from ssl_bench.system.escaping import json_text
from ssl_bench.system.imports import broken_file
from ssl_bench.system.progress import say
from ssl_bench.system.ranks import Ranks, joined
from ssl_bench.tables.depth import DepthTable, depth_tables
from ssl_bench.tables.printing.sheets import default_format, render_tables

MOST_TABLES = 4
"""Of a task that was asked for alone; of more, or of several tasks, those of one metric."""


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Probe every asked layer of every asked checkpoint; print the tables."""
    if options.print_config:
        _print_configs(planned_probes(options, overrides))
        return 0
    if options.dry_run:
        print(plan_table(plan_sweep(options, overrides)))
        return 0
    device = choose_device(options.device)
    with joined(on_cuda=device.type == "cuda") as ranks, ranks.together():
        # First, so that a wrong word leaves no folder.
        plan = ranks.after_first(lambda: asked_probes(options, overrides))
        store = ranks.from_first(lambda: opened_store(options.out))
        records = _probed(options, plan, store, device, ranks)
    if not ranks.is_first:
        return 0
    if options.json:
        print(json_text([record.as_json() for record in records]))
    elif records:
        _print_tables(depth_tables(records), store)
    left = "records and pictures" if records else "no ground truth, so no scores; pictures"
    say(f"{left} in {store.root}; to look at them: ssl-bench report --out {store.root}")
    return 0


def _print_tables(tables: Sequence[DepthTable], store: ResultStore) -> None:
    """All of a task that has a few, of others those of the metric that stands for it."""
    by_task: dict[str, list[DepthTable]] = {}
    metrics: dict[tuple[str, str], list[tuple[str, bool]]] = {}
    for table in tables:
        one = table.record
        by_task.setdefault(one.task, []).append(table)
        metrics.setdefault((one.task, one.dataset), []).append((one.metric, one.is_ranked))
    main = {where: chosen_metric(known) for where, known in metrics.items()}
    most = MOST_TABLES if len(by_task) == 1 else 1
    for task, those in by_task.items():
        few = len(those) <= most
        asked = [t for t in those if few or main[task, t.record.dataset] == t.record.metric]
        shown = [table for table in asked if table.has_values] or asked[:1]
        print(render_tables(shown, default_format()))
        if len(shown) < len(those):
            more = f"ssl-bench table --task {task} --out {store.root}"
            say(f"{len(those) - len(shown)} more tables of {task}: {more}")


def _probed(
    options: argparse.Namespace,
    plan: Sequence[PlannedProbe],
    store: ResultStore,
    device: torch.device,
    ranks: Ranks,
) -> list[Record]:
    """Records of all asked checkpoints; of several processes the first gets them."""
    records, passed = list[Record](), PassedImages()
    left_out: list[str] = []
    among_all = options.task == "all" and len(plan) > 1
    named = expand(options.checkpoint or [])
    uris = ranks.after_first(partial(asked_encoders, options))
    if len(uris) > 1 and any(planned.has_typed_size for planned in plan):
        for uri in uris:
            _require_fitting_sizes(plan, ranks.after_first(partial(identify_encoder, uri)))
    for uri in uris:
        # The first leaves what it downloads where the others find it.
        encoder = ranks.after_first(partial(announced_encoder, uri))
        _require_fitting_sizes(plan, encoder)
        added = is_baseline(uri) and uri not in named
        for planned in plan:
            with _left_out_of_all(planned, left_out, fails=not (among_all or added)):
                layers = layers_of(planned.probe, layers_asked(uri, options.layer), encoder.depth)
                evaluation = planned.evaluation(encoder, layers, device)
                records += evaluation.run(
                    store, say=say, overwrite=options.overwrite, ranks=ranks, passed=passed
                )
        if len(left_out) == len(plan) and not added:
            raise ConfigurationError(f"no task was left for {encoder.name}: {left_out[0]}")
        left_out.clear()
    return records


def _require_fitting_sizes(
    plan: Sequence[PlannedProbe], encoder: Encoder | EncoderIdentity
) -> None:
    """Refuse, before anything is computed, sizes that were typed and that no patch divides.

    Whatever else a task lacks of the encoder is said when its turn comes.
    """
    for planned in plan:
        with suppress(UnfitEncoder):
            planned.fitted_to(encoder)


@contextmanager
def _left_out_of_all(planned: PlannedProbe, left_out: list[str], *, fails: bool) -> Iterator[None]:
    """Go on with the other tasks of `--task all` where one does not fit the encoder or the data.

    And with other encoders where a baseline that nobody named does not fit. What is left out joins
    `left_out`. Of several processes all meet the same, and go on.
    """
    try:
        yield
    except (ConfigurationError, ImportError, SyntaxError) as error:
        if fails:
            raise
        why = error if isinstance(error, ConfigurationError) else broken_file(error)
        left_out.append(f"{planned.probe.task} on {planned.dataset.name}: {why}")
        say(f"left out: {left_out[-1]}")


def _print_configs(plan: Sequence[PlannedProbe]) -> None:
    for planned in plan:
        config = probing_config(*planned.choice, planned.overrides, planned.root)
        print(f"# {planned.choice[0]} on {planned.choice[1]}\n{as_yaml(config)}", end="")
