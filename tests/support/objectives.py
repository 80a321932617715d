"""Create a small pretraining run for each training objective."""

from functools import cache

from pretrain.plan import Pretraining
from pretrain.schedules import Timeline
from ssl_bench.composition.choices import config_names
from ssl_bench.composition.compose import build, compose_config, list_keys
from ssl_bench.errors import ConfigurationError

OBJECTIVES = sorted(config_names("objective"))
REDUCED = {
    "out_dim": 40, "hidden_dim": 32, "bottleneck_dim": 24, "decoder_dim": 24, "decoder_depth": 1,
    "decoder_heads": 2, "length": 5, "letters": 30, "test_lengths": [4], "test_strings": 4,
    "crops.num_locals": 2, "crops.color_jitter": 0.2, "crops.cutout": 3, "crops.mixup": 0.4,
    "crops.cutmix": 1.0, "crops.erasing_probability": 0.5,
}  # fmt: skip
SMALL_MODEL = {
    "image_size": 16, "patch_size": 8, "dim": 24, "depth": 2, "num_heads": 2, "num_states": 16,
    "head_width": 8, "num_tokens": 32,
}  # fmt: skip


def reduced_options(*choices: str) -> list[str]:
    """Return config overrides that make a pretraining run small."""
    keys = list_keys(compose_config("pretraining", choices))
    values = {f"objective.{key}": value for key, value in REDUCED.items()}
    values |= {f"model.{key}": value for key, value in SMALL_MODEL.items()}
    return [*choices, *(f"{key}={value}" for key, value in values.items() if key in keys)]


@cache
def small_run(objective: str) -> tuple[Pretraining, tuple[str, ...]]:
    """Return a small pretraining run and its config overrides."""
    # It uses the first model that the objective can train, trying Vision Transformers first.
    for model in sorted(config_names("model"), key=lambda name: (not name.startswith("vit"), name)):
        options = reduced_options(f"objective={objective}", f"model={model}")
        try:
            plan = build(compose_config("pretraining", options))
            plan.objective.build(plan.encoder, Timeline(4, 2), seed=0, class_names=("a", "b"))
        except ConfigurationError:
            continue
        return plan, tuple(options)
    raise AssertionError(f"{objective} can train no model; add one to configs/model")
