"""`ssl-bench pretrain`: pretrain an encoder and save it in a run folder."""

import argparse
from collections.abc import Sequence
from copy import deepcopy
from datetime import datetime
from pathlib import Path

from ssl_bench.composition.compose import add_data_root, build, compose_config, config_to_yaml
from ssl_bench.errors import ConfigurationError
from ssl_bench.models.initialisers import fill_options
from ssl_bench.system.output import escape_lines, print_message
from ssl_bench.system.process import is_main_process


def command(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Pretrain an encoder, and save it in a run folder.

    With `--print-config` or `--dry-run`, only print the configuration or an outline of the run.
    """
    overrides = add_data_root(overrides, options.data_root)
    config = compose_config("pretraining", overrides)
    full = deepcopy(config)
    model = full["model"]
    if "init_options" in model:
        # Also store the defaults of omitted options, because later versions may change them.
        model["init_options"] = fill_options(model["init"], model["init_options"])
    if options.print_config:
        print(config_to_yaml(full), end="")
        return 0
    continues = options.resume or options.must_resume or options.extend
    if continues and options.out is None:
        raise ConfigurationError(
            "resuming or extending a run needs its folder", hint=("--out", "{run}")
        )
    out = Path(options.out or _default_run(overrides))
    plan = build(config)
    if options.dry_run:
        may_exist = continues or options.overwrite
        print(escape_lines(plan.outline(out, may_exist=may_exist, device=options.device)))
        return 0
    plan.run(
        out,
        resume=options.resume,
        must_resume=options.must_resume,
        extend=options.extend,
        overwrite=options.overwrite,
        device=options.device,
        config=full,
    )
    if is_main_process():
        print_message(plan.describe_next_step(out))
    return 0


def _default_run(overrides: Sequence[str]) -> str:
    """Return a new run folder such as "runs/vit_small_skip-adamw-20260131-120000".

    The name of the folder states the model, the optimizer and the time. If `overrides` (KEY=VALUE
    settings) select an experiment, the name of the experiment replaces the model and the optimizer.
    """
    choices = {key: value for key, _, value in (o.partition("=") for o in overrides)}
    recipe = f"{choices.get('model', 'vit_small_skip')}-{choices.get('optimizer', 'adamw')}"
    return f"runs/{choices.get('experiment', recipe)}-{datetime.now():%Y%m%d-%H%M%S}"
