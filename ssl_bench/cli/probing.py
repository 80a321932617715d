"""Run the probes of a request, or print what would be run."""

import argparse
from collections.abc import Sequence

from ssl_bench.composition.compose import config_to_yaml
from ssl_bench.errors import UnsupportedEncoderError, escape_braces, with_hint
from ssl_bench.evaluation import FeatureCache
from ssl_bench.layers import resolve_layers
from ssl_bench.models import Encoder, EncoderIdentity, identify_encoder
from ssl_bench.models.loading.addresses import expand_addresses, is_baseline, layers_of_encoder
from ssl_bench.models.loading.load import encoder_addresses, load_and_log, require_layers
from ssl_bench.planning import PlannedProbe, evaluate, plan_request, require_images
from ssl_bench.request import ProbeRequest, probing_config
from ssl_bench.results import Record, ResultStore
from ssl_bench.system.device import choose_device
from ssl_bench.system.files import require_writable
from ssl_bench.system.output import print_message


def print_preview(options: argparse.Namespace, request: ProbeRequest) -> bool:
    """Print what `--print-config` or `--dry-run` requests. Return False without these flags."""
    if options.print_config:
        for planned in plan_request(request):
            task, dataset = planned.task_and_dataset
            config = probing_config(task, dataset, planned.overrides, planned.root)
            print(f"# {task} on {dataset}\n{config_to_yaml(config)}", end="")
    elif options.dry_run:
        from ssl_bench.estimates import estimate_seconds
        from ssl_bench.sweep import format_plan, plan_sweep

        jobs = plan_sweep(request, skip_unsupported=request.all_tasks)
        print(format_plan(jobs, estimate_seconds(jobs, ResultStore(request.out))))
    return options.print_config or options.dry_run


def print_results_folder(store: ResultStore) -> None:
    """Print where records and figures are, and the command that writes a report."""
    report = ("ssl-bench", "report", "--out", escape_braces(str(store.root)))
    print_message(with_hint(f"records and figures are in {store.root}", hint=report))


def probe_encoders(request: ProbeRequest, store: ResultStore) -> list[Record]:
    """Check settings, datasets and encoders, then probe one encoder after the other.

    If there are several encoders, all are checked before the first one is probed. Return the
    records (stored scores) of all encoders.
    """
    device = choose_device(request.device)
    require_layers(request.layers, request.checkpoints)
    plan = plan_request(request)
    require_images(plan)
    require_writable(store.root)
    uris = encoder_addresses(request.checkpoints, baselines=request.baselines)
    named = expand_addresses(request.checkpoints)
    can_skip_task = request.all_tasks and len(plan) > 1
    can_skip = {uri: can_skip_task or (is_baseline(uri) and uri not in named) for uri in uris}
    # Check all encoders before the first one is probed.
    for uri in uris if len(uris) > 1 else []:
        encoder = identify_encoder(uri)
        resolve_layers(layers_of_encoder(uri, request.layers), encoder.depth)
        _check_encoder(plan, encoder, skip_unsupported=can_skip[uri])
    records, features = list[Record](), FeatureCache()
    for uri in uris:
        encoder = load_and_log(uri)
        _check_encoder(plan, encoder, skip_unsupported=can_skip[uri])
        # Create the folder after all checks, so that a wrong command leaves no empty folder.
        ResultStore.create(store.root)
        records += evaluate(
            plan,
            encoder,
            store,
            layers=layers_of_encoder(uri, request.layers),
            device=device,
            overwrite=request.overwrite,
            skip_unsupported=can_skip[uri],
            allow_none=is_baseline(uri) and uri not in named,
            features=features,
        )
    return records


def _check_encoder(
    plan: Sequence[PlannedProbe], encoder: Encoder | EncoderIdentity, *, skip_unsupported: bool
) -> None:
    """Check that all probes can score an encoder, before the first one runs.

    Args:
        plan: The probes.
        encoder: The encoder.
        skip_unsupported: Whether to check only the image sizes that the user set, because
            unsupported probes are left out later.

    Raises:
        ConfigurationError: The encoder does not accept an image size that the user set.
        UnsupportedEncoderError: A probe cannot score the encoder, and `skip_unsupported` is False.
    """
    for planned in plan:
        try:
            planned.adapt_to(encoder)
        except UnsupportedEncoderError:
            if not skip_unsupported:
                raise
