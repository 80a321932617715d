"""`ssl-bench probe`: frozen encoders, block by block."""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ssl_bench.cli.records import print_main_tables
from ssl_bench.composition.compose import config_to_yaml
from ssl_bench.errors import UnfitEncoder
from ssl_bench.evaluation import PassedImages
from ssl_bench.layers import resolve_layers
from ssl_bench.models import Encoder, EncoderIdentity, identify_encoder
from ssl_bench.models.loading.addresses import expand, is_baseline, layers_asked
from ssl_bench.models.loading.asked import announced_encoder, asked_encoders, require_layers
from ssl_bench.planning import (
    PlannedProbe,
    asked_probes,
    evaluate,
    opened_store,
    planned_probes,
    probing_config,
    require_writable,
)
from ssl_bench.results import Record, ResultStore
from ssl_bench.system.device import choose_device
from ssl_bench.system.escaping import json_text
from ssl_bench.system.launch import require_single_process
from ssl_bench.system.progress import say
from ssl_bench.tables.depth import depth_tables


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Probe every asked layer of every asked checkpoint; print the tables."""
    if options.print_config:
        for planned in planned_probes(options, overrides):
            config = probing_config(*planned.choice, planned.overrides, planned.root)
            print(f"# {planned.choice[0]} on {planned.choice[1]}\n{config_to_yaml(config)}", end="")
        return 0
    if options.dry_run:
        from ssl_bench.sweep import plan_sweep, plan_table

        print(plan_table(plan_sweep(options, overrides, needs_all=options.task != "all")))
        return 0
    require_single_process("probe")
    device = choose_device(options.device)
    require_layers(options.layer, options.checkpoint)
    plan = asked_probes(options, overrides)
    require_writable(Path(options.out))
    records, passed = list[Record](), PassedImages()
    named, uris = expand(options.checkpoint or []), asked_encoders(options)
    # What is wrong with the last one is known before the first is probed.
    for uri in uris if len(uris) > 1 else []:
        encoder = identify_encoder(uri)
        resolve_layers(layers_asked(uri, options.layer), encoder.depth)
        _require_fitting_sizes(plan, encoder)
    store: ResultStore | None = None
    for uri in uris:
        encoder = announced_encoder(uri)
        _require_fitting_sizes(plan, encoder)
        # Only now, so that no mistyped word leaves an empty folder behind.
        store = store or opened_store(options.out)
        records += evaluate(
            plan,
            encoder,
            store,
            layers=layers_asked(uri, options.layer),
            device=device,
            overwrite=options.overwrite,
            needs_all=options.task != "all" or len(plan) == 1,
            # A baseline that nobody named may fit nothing.
            needs_any=uri in named or not is_baseline(uri),
            passed=passed,
        )
    assert store is not None
    if options.json:
        print(json_text([record.as_json() for record in records]))
    elif records:
        print_main_tables(depth_tables(records), store)
    look = f"ssl-bench report --out {store.root}"
    say(f"records and pictures in {store.root}; to look at them: {look}")
    return 0


def _require_fitting_sizes(
    plan: Sequence[PlannedProbe], encoder: Encoder | EncoderIdentity
) -> None:
    """Refuse, before anything is computed, sizes that were typed and that no patch divides.

    Whatever else a task lacks of the encoder is said when its turn comes.
    """
    for planned in plan:
        with suppress(UnfitEncoder):
            planned.fitted_to(encoder)
