"""`ssl-bench probe`: probe the blocks of frozen encoders."""

import argparse

from ssl_bench.cli.probing import print_plan, print_results_folder, probe_encoders
from ssl_bench.composition.compose import config_to_yaml
from ssl_bench.planning import plan_request
from ssl_bench.request import ProbeRequest, probing_config
from ssl_bench.results import ResultStore
from ssl_bench.system.output import dump_json
from ssl_bench.system.process import require_single_process
from ssl_bench.tables.depth import depth_tables, print_main_tables


def command(options: argparse.Namespace, request: ProbeRequest) -> int:
    """Probe the requested blocks of each encoder, and print tables of the results."""
    if options.print_config:
        _print_configs(request)
        return 0
    if options.dry_run:
        print_plan(request)
        return 0
    require_single_process("probe")
    store = ResultStore(request.out)
    records = probe_encoders(request, store)
    if options.json:
        print(dump_json([record.as_json() for record in records]))
    elif records:
        print_main_tables(depth_tables(records), store)
    print_results_folder(store)
    return 0


def _print_configs(request: ProbeRequest) -> None:
    for planned in plan_request(request):
        task, dataset = planned.task_and_dataset
        config = probing_config(task, dataset, planned.overrides, planned.root)
        print(f"# {task} on {dataset}\n{config_to_yaml(config)}", end="")
