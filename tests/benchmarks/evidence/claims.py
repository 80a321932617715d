"""What each row of the queue may claim and what would refute it, written down before any run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ssl_bench.tables.published import load_published_table

TOP1 = "top1"
MOST_BYTES = 6_000_000
"""Of a demonstration encoder."""


@dataclass(frozen=True)
class Contrast:
    """A sum of arms that the claim says is above 0.

    Attributes:
        weights: By the name of the arm; they sum to 0.
        metric: In the ledger.
    """

    text: str
    weights: Mapping[str, float]
    metric: str = TOP1


@dataclass(frozen=True)
class Above:
    """Every contrast is above 0: supported where all intervals are, refuted where one is below.

    Attributes:
        over: Whether the interval is over seeds, or over the images of the only seed.
        zero_refutes: An interval that holds 0 refutes as well; else it leaves the claim undecided.
    """

    contrasts: Sequence[Contrast]
    over: Literal["seeds", "images"] = "seeds"
    zero_refutes: bool = False


@dataclass(frozen=True)
class Outside:
    """The last of each group is below all others and below their intervals over seeds.

    Refuted by a last arm that is not last, or lies within the interval of `near`.

    Attributes:
        groups: (others, near, last) each; `near` is one of the others.
    """

    groups: Sequence[tuple[Sequence[str], str, str]]


@dataclass(frozen=True)
class SameBest:
    """One of several has the highest score in each group, whatever it is; else undecided.

    Attributes:
        groups: Names of arms by what is chosen, such as a reading.
    """

    groups: Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class AboveRandom:
    """k-NN of every arm is above random weights from a block on; intervals over images.

    Attributes:
        first: Block, counted from 0.
    """

    first: int


@dataclass(frozen=True)
class Small:
    """Every demonstration encoder was written, was loaded again and is below a size.

    Attributes:
        bytes: That none may have.
    """

    bytes: int


@dataclass(frozen=True)
class Apart:
    """Some arm keeps its patches apart and learns no worse than the first.

    The arm that is trained whole is, of those whose loss is not above that of `plain`, the one
    whose patches have the lowest cosine with the mean patch of their image, mean over the blocks.

    Attributes:
        plain: Arm whose loss is the bound.
        merged: Percent of the patches that may be one token, in no block as many.
    """

    plain: str
    merged: float


Rule = Above | Outside | SameBest | AboveRandom | Small | Apart


@dataclass(frozen=True)
class Claim:
    """A line of the queue.

    Attributes:
        name: Of the line; letters where one row of runs bears several claims.
        row: Of runs.
        asks: What is compared.
        published: Table, row and column of the published values; empty where there are none.
        said: What is published where it is no value of a table.
        says: What may be claimed.
        refuted: What refutes it.
        limits: What it does not say; empty for nothing.
        beside: Arms of the row that are shown and not compared.
    """

    name: str
    row: str
    asks: str
    published: Sequence[tuple[str, str, str]]
    says: str
    refuted: str
    rule: Rule
    said: str = ""
    limits: str = ""
    beside: Sequence[str] = ()

    def published_text(self) -> str:
        """The values in their order, and where they stand."""
        tables = {name: load_published_table(name) for name, _, _ in self.published}
        values = (f"{tables[name].values[row, column]:g}" for name, row, column in self.published)
        places = dict.fromkeys(
            f"{one.paper.replace('_', ' ')}, {one.where}" for one in tables.values()
        )
        return f"{' / '.join(values)} ({'; '.join(places)})" if tables else self.said


def minus(one: str, other: str, metric: str = TOP1) -> Contrast:
    """That an arm is above another."""
    text = f"{one} - {other}" + ("" if metric == TOP1 else f", {metric}")
    return Contrast(text, {one: 1.0, other: -1.0}, metric)


_OPTIMIZERS = ("adamw", "soap")
_READINGS = ("as_written", "no_logit_scale", "no_gain", "uniform")
_TABLE1 = [
    ("table1", f"{kind}, {optimizer}", "top-1")
    for optimizer in _OPTIMIZERS
    for kind in ("skip", "skipless, proposed init", "skipless, default init")
]
_LIMIT = "6 blocks ask less of skipless training than the published 12"

CLAIMS = (
    Claim(
        "V4a",
        "skipless",
        "skip, skipless proposed, skipless default; AdamW, then SOAP",
        _TABLE1,
        "the default initialisation is last without skips, under both optimizers",
        "a default within the interval of the proposed one, or not last",
        Outside(
            [
                (
                    (f"skip_{optimizer}", f"skipless_{optimizer}"),
                    f"skipless_{optimizer}",
                    f"skipless_default_{optimizer}",
                )
                for optimizer in _OPTIMIZERS
            ]
        ),
        limits=_LIMIT,
    ),
    Claim(
        "V4b",
        "skipless",
        "how far the default is behind the proposed initialisation under AdamW and under SOAP",
        [one for one in _TABLE1 if not one[1].startswith("skip,")],
        "SOAP closes more than half of the gap",
        "an interval over seeds that says less than half",
        Above(
            [
                Contrast(
                    "half the gap under adamw - the gap under soap",
                    {
                        "skipless_adamw": 0.5,
                        "skipless_default_adamw": -0.5,
                        "skipless_soap": -1.0,
                        "skipless_default_soap": 1.0,
                    },
                )
            ]
        ),
        limits=_LIMIT,
    ),
    Claim(
        "V4c",
        "skipless_deep",
        "skip, skipless proposed, skipless default under SOAP at 12 blocks",
        _TABLE1[3:],
        "the default initialisation is last",
        "an interval over images that says it is not",
        Above(
            [
                minus("skip_soap", "skipless_default_soap"),
                minus("skipless_soap", "skipless_default_soap"),
            ],
            over="images",
        ),
        limits="one seed: nothing is said of others",
    ),
    Claim(
        "V11",
        "readings",
        "four readings of the skipless initialisation, after an epoch on held-out images",
        (),
        "one reading is the best at its best rate under both optimizers",
        "nothing; another one best under each optimizer leaves it undecided",
        SameBest([{name: f"{name}_{one}" for name in _READINGS} for one in _OPTIMIZERS]),
        said="the formulas leave it open",
        limits="one seed; chosen and scored on the same held-out images",
    ),
    Claim(
        "V6",
        "dino",
        "DINO, skip and skipless, AdamW and SOAP, 12 blocks: k-NN on CIFAR-10 of every block",
        (),
        "k-NN of every arm is above random weights from block 3 on",
        "a block from 3 on whose interval over images is below them",
        AboveRandom(3),
        said="tables 2 to 4 of Cutting the Skip, on ImageNet-1k",
        limits="one seed: no claim on skip against skipless",
    ),
    Claim(
        "V13",
        "apart",
        "seven starts without skips, DINO, SOAP, 18,000 images: cosine of a patch with the mean "
        "patch of its image after a block, mean over the blocks, 200 held-out images",
        (),
        "a start keeps patches apart and learns no worse than the published one: in no block half "
        "of them are one token, and the loss is not above its",
        "every one of them",
        Apart("published", 50.0),
        said="none",
        limits="one seed, one rate",
    ),
    Claim(
        "V12",
        "dino",
        "demonstration encoders with and without skips: megabytes in bfloat16",
        (),
        "both load and are below 6 MB",
        "a larger file, or one that does not load",
        Small(MOST_BYTES),
        said="none",
    ),
    Claim(
        "V1",
        "mimetic",
        "default, default with sinusoidal positions, mimetic initialisation",
        [
            ("cifar10", f"width 96, 6 blocks, 3 heads, {init} init", "top-1")
            for init in ("default", "mimetic")
        ],
        "mimetic is above both",
        "an interval over seeds that includes 0",
        Above(
            [minus("mimetic", "default"), minus("mimetic", "sinusoidal")],
            zero_refutes=True,
        ),
        limits="patch 4 and 8 epochs, published are patch 2 and 100",
    ),
    Claim(
        "V9",
        "osa",
        "orthogonal attention by QR and Newton-Schulz, ViT, without skips, without norms too",
        [
            ("mnist", row, "accuracy")
            for row in (
                "OSA (QR)",
                "OSA (Newton-Schulz)",
                "ViT",
                "ViT, no skip",
                "ViT, no skip, no layer norm",
            )
        ],
        "both orthogonal rows are above both bare rows",
        "an interval over seeds that says one is below",
        Above(
            [
                minus(one, other)
                for one in ("qr", "newton_schulz")
                for other in ("vit_no_skip", "vit_no_skip_no_norm")
            ]
        ),
        beside=("vit",),
    ),
    Claim(
        "V9b",
        "osa",
        "ViT, then orthogonal attention by QR: a constant rate, and a cosine to 0",
        (),
        "a constant rate costs accuracy in both",
        "an interval over seeds that says the cosine is below",
        Above([minus(f"{name}_cosine", name) for name in ("vit", "qr")]),
        said="the paper names no schedule",
    ),
    Claim(
        "V10",
        "copying",
        "Mamba 2 that copies strings, mimetic and default initialisation",
        (),
        "mimetic copies more letters at the trained length and at twice it",
        "an interval over seeds that says it copies fewer",
        Above([minus("mimetic", "default", f"letters_{length}") for length in (16, 32)]),
        said="section 3.3 of the thesis has curves alone",
    ),
    Claim(
        "V5",
        "one_skip",
        "ViT with both skips, without attention's, without the MLP's",
        [
            ("one_skip", "no skip around attention", "points lost"),
            ("one_skip", "no skip around the MLP", "points lost"),
        ],
        "without attention's skip far worse than without the MLP's: more than twice as much lost",
        "an interval over seeds that says it is better, or less than twice as much is lost",
        Above(
            [
                minus("no_mlp_skip", "no_attention_skip"),
                Contrast(
                    "loss without attention's skip - twice the loss without the MLP's",
                    {"both": -1.0, "no_attention_skip": -1.0, "no_mlp_skip": 2.0},
                ),
            ]
        ),
        limits=_LIMIT,
    ),
    Claim(
        "V2",
        "covariance",
        "ConvNeXt-Atto of patch 2, filters uniform and drawn from the covariance",
        [
            ("convnext_cifar10", f"7 x 7, 20 epochs, {init} init", "top-1")
            for init in ("uniform", "covariance")
        ],
        "covariance is above",
        "an interval over seeds that says it is below",
        Above([minus("covariance", "uniform")]),
        limits="5 epochs, published are 20",
    ),
)
"""In the order of the queue."""
