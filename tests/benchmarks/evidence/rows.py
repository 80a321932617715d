"""The experiments (also called rows) that compare variants of a training run, and their run names.

The record of a run names a commit. The repository at this commit contains the options of the run.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """An experiment: variants ("arms") of a training run that are compared to answer one question.

    The variants differ in a few options.

    Attributes:
        arms: Names of the variants.
        chosen_by: Metric on held-out images by which the learning rate is chosen, or "" if the
            learning rate is the paper's.
        seeds: Seeds of the reported runs. If there are none, the runs with different learning rates
            are reported instead.
        rates: Learning rates to choose from.
        probed: Whether the trained encoders were also probed and compared with random weights.
        starts: Model options of each variant, as text for a table. Only for experiments on how
            similar the patches of an image become. Otherwise empty.
        whole: Variants that have runs with `seeds`. The others only have runs with the learning
            rates in `rates`. None if all variants have runs with `seeds`.
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

    The run belongs to the variant `arm` of the experiment `row`.
    """
    return f"{row}-{arm}-rate{rate:g}"


def rate_runs(row: str, arm: str) -> list[str]:
    """Return the names of the runs from which the learning rate of a variant is chosen.

    The list is empty if the variant uses the paper's learning rate.

    Args:
        row: Name of the experiment.
        arm: Name of the variant.
    """
    return [rate_run(row, arm, rate) for rate in (ROWS[row].rates if ROWS[row].chosen_by else ())]


def seed_run(row: str, arm: str, seed: int) -> str:
    """Return the name of the run that is reported for a seed.

    The run belongs to the variant `arm` of the experiment `row`.
    """
    return f"{row}-{arm}-seed{seed}"


def probes_of(run: str) -> str:
    """Return the name of the record that contains the probe results of a run's encoder."""
    return f"{run}-probes"


def patches_of(run: str) -> str:
    """Return the name of the record that contains the patch similarities of a run's encoder."""
    return f"{run}-patches"


def demo_of(name: str) -> str:
    """Return the name of the record that contains the file size of the encoder `demo:NAME`."""
    return f"demo-{name}"


def names_of(row: str, arms: Collection[str]) -> list[str]:
    """Return the names of all records of the variants `arms` of the experiment `row`.

    These are records of training runs, of probe results and of patch similarities.
    """
    reported = reported_of(row, arms)
    probes = [probes_of(run) for run in reported] if ROWS[row].probed else []
    patches = [patches_of(run) for run in reported] if ROWS[row].starts else []
    chosen = [run for arm in arms for run in rate_runs(row, arm)]
    return [*chosen, *reported, *probes, *patches]


def reported_of(row: str, arms: Collection[str]) -> list[str]:
    """Return the names of the reported runs of the variants `arms` of the experiment `row`.

    Runs that only serve to choose a learning rate are left out.
    """
    trained = ROWS[row].whole
    named = [arm for arm in arms if trained is None or arm in trained]
    return [seed_run(row, arm, seed) for arm in named for seed in ROWS[row].seeds]
