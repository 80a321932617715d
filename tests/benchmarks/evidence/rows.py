"""Define experiments that compare variants of a training run.

Each result names a Git commit with the exact options of the training run.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Experiment:
    """An experiment that compares variants of a training run."""

    variants: Sequence[str]
    # The metric that chooses a learning rate, or "" if the learning rate is the paper's.
    chosen_by: str
    # If there are no seeds, the runs that try learning rates are reported.
    seeds: Sequence[int]
    rates: Sequence[float] = (2.5e-4, 1e-3, 4e-3)
    probed: bool = False  # Whether the encoders are also compared with random weights.
    # Options of each variant, if the experiment measures how similar patches become.
    model_options: Mapping[str, str] = field(default_factory=dict)
    # Variants that were trained with all seeds. None means all variants.
    whole: Sequence[str] | None = None


OPTIMIZERS = ("adamw", "soap")
READINGS = ("as_written", "no_logit_scale", "no_gain", "uniform")
_UNIFORM, _UNSCALED, _GAINLESS, _IDENTITY = (
    f"model.init_options.{option}"
    for option in ("noise=uniform", "cancel_logit_scale=true", "suo_gain=false", "beta=3.0")
)
# Without skips, the patches become equal if attention is far from the identity, or if the MLP
# gives all tokens the same mean. Each variant removes one of these reasons.
_APART = {
    "published": [],
    "no_logit_scale": [_UNSCALED],
    "no_gain": [_GAINLESS],
    "neither": [_UNSCALED, _GAINLESS],
    "identity": [_IDENTITY],
    "graying": ["model.graying=dct", "model.graying_exponent=0.9"],
    "all_three": [_UNSCALED, _GAINLESS, _IDENTITY],
}


def _with(optimizer: str, *kinds: str) -> list[str]:
    return [f"{kind}_{optimizer}" for kind in kinds]


_KINDS = ("skip", "skipless", "skipless_default")
EXPERIMENTS = {
    "skipless": Experiment(
        [*_with("adamw", *_KINDS), *_with("soap", *_KINDS)], "top1", seeds=(0, 1)
    ),
    "skipless_deep": Experiment(_with("soap", *_KINDS), "top1", seeds=(0,)),
    "readings": Experiment(
        [*_with("adamw", *READINGS), *_with("soap", *READINGS)], "top1", seeds=()
    ),
    "dino": Experiment(
        [*_with("adamw", *_KINDS[:2]), *_with("soap", *_KINDS[:2])], "knn", seeds=(0,),
        rates=(6.25e-5, 2.5e-4, 1e-3), probed=True,
    ),
    "apart": Experiment(
        list(_APART), "knn", seeds=(0,), rates=(1e-3,), probed=True, whole=("graying",),
        model_options={name: " ".join([_UNIFORM, *options]) for name, options in _APART.items()},
    ),
    "mimetic": Experiment(["default", "sinusoidal", "mimetic"], "top1", seeds=range(5)),
    "osa": Experiment(
        ["qr", "newton_schulz", "vit", "vit_no_skip", "vit_no_skip_no_norm", "vit_cosine",
         "qr_cosine"],
        "", seeds=(0, 1),
    ),
    "copying": Experiment(["mimetic", "default"], "", seeds=range(5)),
    "one_skip": Experiment(["both", "no_attention_skip", "no_mlp_skip"], "top1", seeds=(0, 1)),
    "covariance": Experiment(["uniform", "covariance"], "top1", seeds=range(5)),
}  # fmt: skip
"""Experiments by name."""


# These functions return the names under which runs and other results are stored.
def rate_run(experiment: str, variant: str, rate: float) -> str:
    return f"{experiment}-{variant}-rate{rate:g}"


def rate_runs(experiment: str, variant: str) -> list[str]:
    """Return the names of the runs with different learning rates."""
    options = EXPERIMENTS[experiment]
    rates = options.rates if options.chosen_by else ()
    return [rate_run(experiment, variant, rate) for rate in rates]


def seed_run(experiment: str, variant: str, seed: int) -> str:
    return f"{experiment}-{variant}-seed{seed}"


def probes_of(run: str) -> str:
    return f"{run}-probes"


def patches_of(run: str) -> str:
    return f"{run}-patches"


def demo_of(name: str) -> str:
    return f"demo-{name}"


def names_of(experiment: str, variants: Collection[str]) -> list[str]:
    reported = reported_of(experiment, variants)
    probes = [probes_of(run) for run in reported] if EXPERIMENTS[experiment].probed else []
    patches = [patches_of(run) for run in reported] if EXPERIMENTS[experiment].model_options else []
    chosen = [run for variant in variants for run in rate_runs(experiment, variant)]
    return [*chosen, *reported, *probes, *patches]


def reported_of(experiment: str, variants: Collection[str]) -> list[str]:
    """Return the names of the runs whose scores are reported."""
    trained = EXPERIMENTS[experiment].whole
    named = [variant for variant in variants if trained is None or variant in trained]
    return [
        seed_run(experiment, variant, seed)
        for variant in named
        for seed in EXPERIMENTS[experiment].seeds
    ]
