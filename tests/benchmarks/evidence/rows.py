"""The rows of the queue: which runs each takes, and how they differ."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ssl_bench.models.loading.addresses import NAMES


@dataclass(frozen=True)
class Kind:
    """What several rows have in common.

    Attributes:
        data: Name in the folder of data; empty where strings are drawn.
        options: Of `pretrain`, for all arms; behind the arm's own, as `model=` and `experiment=`
            name the files whose values they change.
        batch: Images a step.
        chosen_by: What is highest at the chosen rate, on held-out training images; empty where the
            paper's rate is taken.
        scores: What is measured after every epoch, by its name in the log.
        means: What is averaged over the steps of every epoch, by its name in the log.
        tested: Whether the head is tested on all images of test/, image by image.
        choosing: Options of the runs that choose the rate.
        rates: The grid that it is chosen from, as they are at the row's batch.
    """

    data: str
    options: Sequence[str]
    batch: int
    chosen_by: str
    scores: Mapping[str, str]
    means: Sequence[str] = ()
    tested: bool = False
    choosing: Sequence[str] = ()
    rates: Sequence[float] = (2.5e-4, 1e-3, 4e-3)


@dataclass(frozen=True)
class Row:
    """One question: arms that differ in one thing each, and how long each is trained.

    Attributes:
        arms: Options by the name of the arm.
        options: Of all arms of this row.
        epochs: Of the runs with the chosen rate.
        seeds: None where the runs that choose the rate say it all.
        kept: After so many epochs each an encoder stays.
        probed: Whether the encoders are probed, beside random weights.
        compared: Whether the patches of the encoders are compared, of the first runs and of those
            with seeds.
        whole: The arms that are trained with the seeds; None for all.
    """

    arms: Mapping[str, Sequence[str]]
    kind: Kind
    epochs: int
    seeds: Sequence[int]
    options: Sequence[str] = ()
    kept: int = 0
    probed: bool = False
    compared: bool = False
    whole: Sequence[str] | None = None


_SUPERVISED = (
    "objective=supervised",
    "data.image_size=32",
    "data.in_memory=true",
    "data.labels=true",
    "objective.label_smoothing=0.0",
    "objective.crops.scale=[0.75,1.0]",
    "objective.crops.aspect_ratio=[1.0,1.0]",
    "objective.crops.num_ops=0",
    "train.batch_size=128",
    "train.weight_decay=0.05",
    "train.final_weight_decay=0.05",
    "train.max_grad_norm=1.0",
    "train.num_workers=0",
    "monitor.accuracy_epochs=1",
    "monitor.crop_share=1.0",
)
# bfloat16 gives 1.7 times as many images an hour; ConvNeXt's convolutions have none of that.
_SMALL_VIT = (
    "model.dim=96",
    "model.patch_size=4",
    "model.num_heads=3",
    "train.precision=bfloat16",
)
_CIFAR = Kind("cifar10", _SUPERVISED, 128, "top1", {"top1": "val_top1"}, tested=True)
_MNIST = Kind(
    "mnist", ("train.num_workers=0",), 128, "", {"top1": "val_top1"}, ("loss",), tested=True
)
_COPYING = Kind("", (), 32, "", {"letters_16": "letters_16", "letters_32": "letters_32"}, ("loss",))
# Heads of 64 as everywhere; a projection cheaper than the encoder, a constant temperature of
# the teacher and a free last layer, as runs of few epochs need it (results/log.md). bfloat16 and
# batches of 64, for twice as many images an hour and twice as many steps an image.
_DINO = Kind(
    "tiny_imagenet",
    (
        "objective=dino",
        "data.image_size=64",
        "data.in_memory=true",
        "model.dim=128",
        "model.num_heads=2",
        "model.patch_size=8",
        "objective.out_dim=2048",
        "objective.hidden_dim=512",
        "objective.bottleneck_dim=128",
        "objective.momentum=0.99",
        "objective.teacher_temperature=0.04",
        "objective.freeze_last_layer_epochs=0.0",
        "objective.crops.num_locals=4",
        "objective.crops.local_size=112",
        "train.batch_size=64",
        "train.num_workers=0",
        "train.precision=bfloat16",
    ),
    64,
    "knn",
    {"knn": "knn_top1"},
    ("loss", "teacher_entropy"),
    choosing=("data.limit=18000",),
    # The official rate is 1.25e-4 at this batch.
    rates=(6.25e-5, 2.5e-4, 1e-3),
)


UNIFORM = "model.init_options.noise=uniform"
"""How these encoders without skips were drawn, before the default was the paper's normal draw."""


def _skipless(optimizer: str) -> dict[str, list[str]]:
    chosen = f"optimizer={optimizer}"
    return {
        f"skip_{optimizer}": ["model=vit_tiny_skip", chosen],
        f"skipless_{optimizer}": ["model=vit_tiny_skipless", UNIFORM, chosen],
        f"skipless_default_{optimizer}": ["model=vit_tiny_skipless", "model.init=default", chosen],
    }


# The side of 2,048 outputs is not preconditioned: it would cost more than all else.
_NARROW_SOAP = "optimizer.max_precond_dim=1024"


def _with_default(arms: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    return {
        name: [*options, *([_NARROW_SOAP] if name.endswith("soap") else [])]
        for name, options in arms.items()
        if "default" not in name
    }


READINGS = {
    "as_written": ["model.init_options.noise=normal"],
    "no_logit_scale": [
        "model.init_options.noise=normal",
        "model.init_options.cancel_logit_scale=true",
    ],
    "no_gain": ["model.init_options.noise=normal", "model.init_options.suo_gain=false"],
    "uniform": [UNIFORM],
}
OPTIMIZERS = ("adamw", "soap")
_UNSCALED, _GAINLESS, _IDENTITY = (
    "model.init_options.cancel_logit_scale=true",
    "model.init_options.suo_gain=false",
    "model.init_options.beta=3.0",
)
# Each undoes one reason for which patches merge where there are no skips: attention that is far
# from the identity, or an MLP that gives all tokens the same mean.
APART = {
    "published": [],
    "no_logit_scale": [_UNSCALED],
    "no_gain": [_GAINLESS],
    "neither": [_UNSCALED, _GAINLESS],
    "identity": [_IDENTITY],
    "graying": ["model.graying=dct", "model.graying_exponent=0.9"],
    "all_three": [_UNSCALED, _GAINLESS, _IDENTITY],
}
_ATTO = ("model=timm", "model.name=convnext_atto", "model.patch_size=2")

ROWS = {
    "skipless": Row(
        {**_skipless("adamw"), **_skipless("soap")},
        _CIFAR,
        epochs=4,
        seeds=(0, 1),
        options=(*_SMALL_VIT, "model.depth=6"),
    ),
    "skipless_deep": Row(
        _skipless("soap"), _CIFAR, epochs=4, seeds=(0,), options=(*_SMALL_VIT, "model.depth=12")
    ),
    "readings": Row(
        {
            f"{reading}_{optimizer}": ["model=vit_tiny_skipless", f"optimizer={optimizer}", *more]
            for optimizer in OPTIMIZERS
            for reading, more in READINGS.items()
        },
        _CIFAR,
        epochs=1,
        seeds=(),
        options=(*_SMALL_VIT, "model.depth=12"),
    ),
    "dino": Row(
        _with_default({**_skipless("adamw"), **_skipless("soap")}),
        _DINO,
        epochs=3,
        seeds=(0,),
        options=("model.depth=12",),
        kept=1,
        probed=True,
    ),
    "apart": Row(
        {name: ["model=vit_tiny_skipless", UNIFORM, *more] for name, more in APART.items()},
        # The rate that the same grid chose for skipless, SOAP.
        replace(_DINO, rates=(1e-3,)),
        epochs=3,
        seeds=(0,),
        options=("model.depth=12", "optimizer=soap", _NARROW_SOAP),
        kept=1,
        probed=True,
        compared=True,
        whole=("graying",),
    ),
    "mimetic": Row(
        {
            "default": ["model=vit_tiny_skip"],
            "sinusoidal": ["model=vit_tiny_skip", "model.position_embedding=sinusoidal"],
            "mimetic": [
                "model=vit_tiny_skip",
                "model.position_embedding=sinusoidal",
                "model.init=mimetic",
            ],
        },
        _CIFAR,
        epochs=8,
        seeds=(0, 1, 2, 3, 4),
        options=(*_SMALL_VIT, "model.depth=6"),
    ),
    "osa": Row(
        {
            name: [f"experiment=osa_mnist_{name}"]
            for name in (
                *("qr", "newton_schulz", "vit", "vit_no_skip", "vit_no_skip_no_norm"),
                *("vit_cosine", "qr_cosine"),
            )
        },
        _MNIST,
        epochs=10,
        seeds=(0, 1),
    ),
    "copying": Row(
        {name: [f"experiment=mimetic_copying_{name}"] for name in ("mimetic", "default")},
        _COPYING,
        epochs=2,
        seeds=(0, 1, 2, 3, 4),
    ),
    "one_skip": Row(
        {
            "both": ["model=vit_tiny_skip"],
            "no_attention_skip": ["model=vit_tiny_skip", "model.skip_attention=false"],
            "no_mlp_skip": ["model=vit_tiny_skip", "model.skip_mlp=false"],
        },
        _CIFAR,
        epochs=4,
        seeds=(0, 1),
        options=(*_SMALL_VIT, "model.depth=6"),
    ),
    "covariance": Row(
        {name: [*_ATTO, f"model.init={name}"] for name in ("uniform", "covariance")},
        _CIFAR,
        epochs=5,
        seeds=(0, 1, 2, 3, 4),
    ),
}
"""In the order of the queue."""


def rate_run(row: str, arm: str, rate: float) -> str:
    """Name of a run that chooses the rate."""
    return f"{row}-{arm}-rate{rate:g}"


def rate_runs(row: str, arm: str) -> list[str]:
    """Names of all runs that choose an arm's rate; none where the paper's is taken."""
    kind = ROWS[row].kind
    return [rate_run(row, arm, rate) for rate in (kind.rates if kind.chosen_by else ())]


def seed_run(row: str, arm: str, seed: int) -> str:
    """Name of a run that is reported."""
    return f"{row}-{arm}-seed{seed}"


def probes_of(run: str) -> str:
    """Name of what the probes found in the encoder of a run."""
    return f"{run}-probes"


def patches_of(run: str) -> str:
    """Name of how close to each other the patches of a reported run's encoder are."""
    return f"{run}-patches"


def demo_of(name: str) -> str:
    """Name of what is known of the file of `demo:NAME`."""
    return f"demo-{name}"


def names_of(row: str, arms: Collection[str] | None = None) -> list[str]:
    """Every finished thing that a whole row, or some of its arms, has in the ledger."""
    reported = reported_of(row, arms)
    probes = [probes_of(run) for run in reported] if ROWS[row].probed else []
    patches = [patches_of(run) for run in reported] if ROWS[row].compared else []
    chosen = [run for arm in _of(row, arms) for run in rate_runs(row, arm)]
    return [*chosen, *reported, *probes, *patches]


def reported_of(row: str, arms: Collection[str] | None = None) -> list[str]:
    """Names of the runs that are reported and chose nothing; none of a row without seeds."""
    trained = ROWS[row].whole
    named = [arm for arm in _of(row, arms) if trained is None or arm in trained]
    return [seed_run(row, arm, seed) for arm in named for seed in ROWS[row].seeds]


def _of(row: str, arms: Collection[str] | None) -> list[str]:
    return [arm for arm in ROWS[row].arms if arms is None or arm in arms]


LEFT_OUT = (rate_run("dino", "skip_adamw", 4e-3),)
"""Runs that moved a grid: kept in the ledger, and no arm chooses among them."""


def known_names() -> set[str]:
    """Of everything that a whole queue leaves in its ledger."""
    runs = {name for row in ROWS for name in names_of(row)}
    return runs | {demo_of(name) for name in NAMES} | set(LEFT_OUT)
