"""`ssl-bench card`: run all probes on encoders, and print scores, times and memory on one page."""

import argparse

from ssl_bench.cli.probing import print_preview, print_results_folder, probe_encoders
from ssl_bench.cli.records import print_tables, resolve_format
from ssl_bench.request import ProbeRequest
from ssl_bench.results import ResultStore
from ssl_bench.system.process import require_single_process
from ssl_bench.tables.card import build_cards


def command(options: argparse.Namespace, request: ProbeRequest) -> int:
    """Run all requested probes that the data support, and print a card for each encoder."""
    style = resolve_format(options.format)
    if print_preview(options, request):
        return 0
    require_single_process("card")
    store = ResultStore(request.out)
    print_tables(build_cards(store, probe_encoders(request, store)), style)
    print_results_folder(store)
    return 0
