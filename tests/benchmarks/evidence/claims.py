"""Claims that the experiments test and their refuting outcomes, as fixed before any run.

Later commits changed the wording only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ssl_bench.tables.published import load_published_table

TOP1 = "top1"
MOST_BYTES = 6_000_000
"""Size limit of the file of a demonstration encoder."""


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of variants' scores that a claim says is above 0.

    Attributes:
        weights: Weights by the name of the variant; they sum to 0.
        metric: Name of the score in the records.
    """

    text: str
    weights: Mapping[str, float]
    metric: str = TOP1


@dataclass(frozen=True)
class Above:
    """Supported if all contrasts' intervals are above 0, refuted if one is below 0.

    Attributes:
        over: Whether intervals are over seeds, or over the images of the only seed.
        zero_refutes: Whether an interval that contains 0 refutes the claim, or leaves it undecided.
    """

    contrasts: Sequence[Contrast]
    over: Literal["seeds", "images"] = "seeds"
    zero_refutes: bool = False


@dataclass(frozen=True)
class Outside:
    """Supported if `last` of each group is below all others and below the interval of `near`.

    Refuted if its mean is not the lowest, or not below that interval over seeds.

    Attributes:
        groups: (others, near, last) for each group; `near` is one of the others.
    """

    groups: Sequence[tuple[Sequence[str], str, str]]


@dataclass(frozen=True)
class SameBest:
    """Supported if the same choice has the highest score in each group, else undecided.

    Attributes:
        groups: For each group, the variant of each choice, such as a reading.
    """

    groups: Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class AboveRandom:
    """Supported if all k-NN accuracies exceed those of random weights, over images.

    Attributes:
        first: First compared block, counted from 0.
    """

    first: int


@dataclass(frozen=True)
class Small:
    """Supported if the file of every demonstration encoder is below a size.

    Attributes:
        bytes: Upper limit of the size.
    """

    bytes: int


@dataclass(frozen=True)
class Apart:
    """Supported if a variant keeps its patches apart and its loss is at most that of `plain`.

    Of the variants that meet the bound on the loss, the longer run uses the one whose patches have
    the lowest cosine with the mean patch of their image, averaged over the blocks.

    Attributes:
        plain: Variant whose loss is the bound.
        merged: In every block, less than this percentage of patches may be nearly equal.
    """

    plain: str
    merged: float


Rule = Above | Outside | SameBest | AboveRandom | Small | Apart


@dataclass(frozen=True)
class Claim:
    """A claim about one row of runs, and its published values.

    Attributes:
        name: Name of the claim, with a letter if a row has several claims.
        row: Name of the row of runs.
        asks: The comparison, as a phrase.
        published: Table, row and column of each published value, if there are any.
        said: The published statement, if it is not a value of a table.
        says: The claim, as a clause.
        refuted: The outcome that refutes it, as a sentence.
        limits: Differences from the paper and open points, as a phrase, or empty.
        beside: Variants that are shown but not compared.
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
        """Return the published values and their sources."""
        tables = {name: load_published_table(name) for name, _, _ in self.published}
        values = (f"{tables[name].values[row, column]:g}" for name, row, column in self.published)
        places = dict.fromkeys(
            f"{one.paper.replace('_', ' ')}, {one.where}" for one in tables.values()
        )
        return f"{' / '.join(values)} ({'; '.join(places)})" if tables else self.said


def minus(one: str, other: str, metric: str = TOP1) -> Contrast:
    """Return the contrast of two variants."""
    text = f"{one} - {other}" + ("" if metric == TOP1 else f", {metric}")
    return Contrast(text, {one: 1.0, other: -1.0}, metric)


_OPTIMIZERS = ("adamw", "soap")
_READINGS = ("as_written", "no_logit_scale", "no_gain", "uniform")
_TABLE1 = [
    ("table1", f"{kind}, {optimizer}", "top-1")
    for optimizer in _OPTIMIZERS
    for kind in ("skip", "skipless, proposed init", "skipless, default init")
]
_LIMIT = "6 blocks instead of the published 12, which are harder to train without skips"
_BELOW = "Refuted if an interval over seeds is below 0."

CLAIMS = (
    Claim(
        "V4a",
        "skipless",
        "ViT with skips, skipless with the proposed and with the default initialisation, each "
        "with AdamW and with SOAP",
        _TABLE1,
        "the default initialisation has the lowest accuracy with both optimizers",
        "Refuted if it is not the lowest, or lies within the interval over seeds of the proposed "
        "one.",
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
        "accuracy gap between the proposed and the default initialisation without skips",
        [one for one in _TABLE1 if not one[1].startswith("skip,")],
        "the gap with SOAP is less than half of the gap with AdamW",
        _BELOW,
        Above(
            [
                Contrast(
                    "half the gap with AdamW - the gap with SOAP",
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
        "ViT with skips, skipless with the proposed and with the default initialisation, with "
        "SOAP and 12 blocks",
        _TABLE1[3:],
        "the default initialisation has the lowest accuracy",
        "Refuted if an interval over images is below 0.",
        Above(
            [
                minus("skip_soap", "skipless_default_soap"),
                minus("skipless_soap", "skipless_default_soap"),
            ],
            over="images",
        ),
        limits="one seed",
    ),
    Claim(
        "V11",
        "readings",
        "four readings of the formulas of the skipless initialisation, scored on held-out images "
        "after one epoch",
        (),
        "the same reading has the highest accuracy with both optimizers, each at its best rate",
        "Nothing refutes it. It is undecided if the optimizers have different best readings.",
        SameBest([{name: f"{name}_{one}" for name in _READINGS} for one in _OPTIMIZERS]),
        said="the formulas leave it open",
        limits="one seed, and the rates were chosen on the same held-out images",
    ),
    Claim(
        "V6",
        "dino",
        "DINO with and without skips, with AdamW and SOAP, 12 blocks: k-NN accuracy of each block "
        "on CIFAR-10",
        (),
        "from block 3 on, each encoder is above its random weights",
        "Refuted if the difference has an interval over images below 0 in one of these blocks.",
        AboveRandom(3),
        said="tables 2 to 4 of Cutting the Skip, on ImageNet-1k",
        limits="one seed, so that encoders with and without skips are not compared",
    ),
    Claim(
        "V13",
        "apart",
        "seven variants of the skipless initialisation, trained by DINO with SOAP on 18,000 "
        "images: cosine of a patch with the mean patch of its image, averaged over the blocks and "
        "200 held-out images",
        (),
        "in at least one variant, less than half of the patches of each block are nearly equal "
        "(cosine above 0.99) and the loss is not above that of `published`",
        "Refuted if this holds for no variant.",
        Apart("published", 50.0),
        said="none",
        limits="one seed and one rate",
    ),
    Claim(
        "V12",
        "dino",
        "size of the demonstration encoders in bfloat16, in MB",
        (),
        "both can be loaded and are below 6 MB",
        "Refuted if one is larger or cannot be loaded.",
        Small(MOST_BYTES),
        said="none",
    ),
    Claim(
        "V1",
        "mimetic",
        "ViT with the default initialisation, with sinusoidal positions too, and with the mimetic "
        "initialisation",
        [
            ("cifar10", f"width 96, 6 blocks, 3 heads, {init} init", "top-1")
            for init in ("default", "mimetic")
        ],
        "the mimetic initialisation has the highest accuracy",
        "Refuted if an interval over seeds includes 0 or is below 0.",
        Above(
            [minus("mimetic", "default"), minus("mimetic", "sinusoidal")],
            zero_refutes=True,
        ),
        limits="patch 4 and 8 epochs instead of the published 2 and 100",
    ),
    Claim(
        "V9",
        "osa",
        "orthogonal attention with QR and with Newton-Schulz, a ViT, a ViT without skips, and one "
        "without skips and norms",
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
        "both kinds of orthogonal attention are above both ViTs without skips",
        _BELOW,
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
        "ViT and orthogonal attention with QR, each with a constant learning rate and with a "
        "cosine to 0",
        (),
        "both have a lower accuracy with the constant rate",
        _BELOW,
        Above([minus(f"{name}_cosine", name) for name in ("vit", "qr")]),
        said="the paper states no schedule",
    ),
    Claim(
        "V10",
        "copying",
        "Mamba 2 that copies strings, with the mimetic and the default initialisation",
        (),
        "the mimetic one copies more letters at the trained length of 16 and at 32",
        _BELOW,
        Above([minus("mimetic", "default", f"letters_{length}") for length in (16, 32)]),
        said="only curves, in section 3.3 of the thesis",
    ),
    Claim(
        "V5",
        "one_skip",
        "ViT with both skips, without the skip of attention, and without the skip of the MLP "
        "(published are the points lost)",
        [
            ("one_skip", "no skip around attention", "points lost"),
            ("one_skip", "no skip around the MLP", "points lost"),
        ],
        "leaving out the skip of attention costs more than twice as much accuracy as leaving out "
        "that of the MLP",
        _BELOW,
        Above(
            [
                minus("no_mlp_skip", "no_attention_skip"),
                Contrast(
                    "points lost without the skip of attention - twice those without the MLP's",
                    {"both": -1.0, "no_attention_skip": -1.0, "no_mlp_skip": 2.0},
                ),
            ]
        ),
        limits=_LIMIT,
    ),
    Claim(
        "V2",
        "covariance",
        "ConvNeXt-Atto of patch 2, with uniform filters and with filters from a covariance",
        [
            ("convnext_cifar10", f"7 x 7, 20 epochs, {init} init", "top-1")
            for init in ("uniform", "covariance")
        ],
        "filters from a covariance have the higher accuracy",
        _BELOW,
        Above([minus("covariance", "uniform")]),
        limits="5 epochs instead of the published 20",
    ),
)
"""Claims in the order of the experiments."""
