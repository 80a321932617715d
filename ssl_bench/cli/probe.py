"""`ssl-bench probe`: probe the blocks of frozen encoders."""

import argparse

from ssl_bench.cli.probing import print_preview, print_results_folder, probe_encoders
from ssl_bench.request import ProbeRequest
from ssl_bench.results import ResultStore
from ssl_bench.system.output import dump_json
from ssl_bench.system.process import require_single_process
from ssl_bench.tables.depth import depth_tables, print_main_tables


def command(options: argparse.Namespace, request: ProbeRequest) -> int:
    """Probe the requested blocks of each encoder, and print tables of the results."""
    if print_preview(options, request):
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
