"""The experiments, each of which compares variants of a training run, and the names of the runs.

The stored results of a run name a commit. The repository at this commit contains its options.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """An experiment: several variants of a training run that are compared to answer one question.

    The variants ("arms") differ in a few options, such as the optimizer.

    Attributes:
        arms: Names of the variants.
        chosen_by: Metric on held-out images by which the learning rate of each variant is chosen,
            or "" if the learning rate is the paper's.
        seeds: Seeds of the reported runs. If empty, the runs that try learning rates are reported.
        rates: Learning rates to choose from.
        probed: Whether the trained encoders were also probed and compared with random weights.
        starts: Model options of each variant, as text for a table. Empty unless the experiment
            measures how similar the patches of an image become.
        whole: Variants that were trained with all `seeds`. The remaining variants only have runs
            that try learning rates. None if all variants were trained with all seeds.
    """

    arms: Sequence[str]
    chosen_by: str
    seeds: Sequence[int]
    rates: Sequence[float] = (2.5e-4, 1e-3, 4e-3)
    probed: bool = False
    starts: Mapping[str, str] = field(default_factory=dict)
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
ROWS = {
    "skipless": Row([*_with("adamw", *_KINDS), *_with("soap", *_KINDS)], "top1", seeds=(0, 1)),
    "skipless_deep": Row(_with("soap", *_KINDS), "top1", seeds=(0,)),
    "readings": Row([*_with("adamw", *READINGS), *_with("soap", *READINGS)], "top1", seeds=()),
    "dino": Row(
        [*_with("adamw", *_KINDS[:2]), *_with("soap", *_KINDS[:2])], "knn", seeds=(0,),
        rates=(6.25e-5, 2.5e-4, 1e-3), probed=True,
    ),
    "apart": Row(
        list(_APART), "knn", seeds=(0,), rates=(1e-3,), probed=True, whole=("graying",),
        starts={name: " ".join([_UNIFORM, *options]) for name, options in _APART.items()},
    ),
    "mimetic": Row(["default", "sinusoidal", "mimetic"], "top1", seeds=range(5)),
    "osa": Row(
        ["qr", "newton_schulz", "vit", "vit_no_skip", "vit_no_skip_no_norm", "vit_cosine",
         "qr_cosine"],
        "", seeds=(0, 1),
    ),
    "copying": Row(["mimetic", "default"], "", seeds=range(5)),
    "one_skip": Row(["both", "no_attention_skip", "no_mlp_skip"], "top1", seeds=(0, 1)),
    "covariance": Row(["uniform", "covariance"], "top1", seeds=range(5)),
}  # fmt: skip
"""Rows in the order of the experiments."""


def rate_run(row: str, arm: str, rate: float) -> str:
    """Return the name of the run that tries a learning rate.

    Args:
        row: Name of the experiment.
        arm: Name of the variant that the run trains.
        rate: The learning rate.
    """
    return f"{row}-{arm}-rate{rate:g}"


def rate_runs(row: str, arm: str) -> list[str]:
    """Return the names of the runs from which the learning rate of a variant is chosen.

    The list is empty if the paper's learning rate is used. `row` is the name of the experiment, and
    `arm` the name of the variant.
    """
    return [rate_run(row, arm, rate) for rate in (ROWS[row].rates if ROWS[row].chosen_by else ())]


def seed_run(row: str, arm: str, seed: int) -> str:
    """Return the name of the run whose score is reported for a seed.

    Args:
        row: Name of the experiment.
        arm: Name of the variant that the run trains.
        seed: Seed of the run.
    """
    return f"{row}-{arm}-seed{seed}"


def probes_of(run: str) -> str:
    """Return the name under which the probe results of a run's encoder are stored."""
    return f"{run}-probes"


def patches_of(run: str) -> str:
    """Return the name under which the patch similarities of a run's encoder are stored."""
    return f"{run}-patches"


def demo_of(name: str) -> str:
    """Return the name under which the file size of the encoder `demo:NAME` is stored."""
    return f"demo-{name}"


def names_of(row: str, arms: Collection[str]) -> list[str]:
    """Return the names of all stored results about some variants of a training run.

    These are results of training runs, of probes and of patch similarities. `row` is the name of
    the experiment that compares the variants, and `arms` has the names of the variants.
    """
    reported = reported_of(row, arms)
    probes = [probes_of(run) for run in reported] if ROWS[row].probed else []
    patches = [patches_of(run) for run in reported] if ROWS[row].starts else []
    chosen = [run for arm in arms for run in rate_runs(row, arm)]
    return [*chosen, *reported, *probes, *patches]


def reported_of(row: str, arms: Collection[str]) -> list[str]:
    """Return the names of the runs whose scores are reported for some training variants.

    Runs that only serve to choose a learning rate are left out. `row` is the name of the
    experiment, and `arms` has the names of the variants.
    """
    trained = ROWS[row].whole
    named = [arm for arm in arms if trained is None or arm in trained]
    return [seed_run(row, arm, seed) for arm in named for seed in ROWS[row].seeds]
