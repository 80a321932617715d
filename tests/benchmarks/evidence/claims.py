"""List the claims of papers that our experiments test.

The claims were written before any training run. Only their wording was changed later.
"""

from tests.benchmarks.evidence.rows import OPTIMIZERS, READINGS
from tests.benchmarks.evidence.verdicts import (
    AboveRandom,
    Claim,
    Contrast,
    DistinctPatches,
    LowestScore,
    MaxFileSize,
    PositiveDifferences,
    SameBest,
    minus,
)

_TABLE1 = [
    ("table1", f"{kind}, {optimizer}", "top-1")
    for optimizer in OPTIMIZERS
    for kind in ("skip", "skipless, proposed init", "skipless, default init")
]
_LIMIT = "6 blocks instead of the published 12, which are harder to train without skips"
_BELOW = "Refuted if an interval over seeds is below 0."
_LOWEST = [
    ((f"skip_{name}", f"skipless_{name}"), f"skipless_{name}", f"skipless_default_{name}")
    for name in OPTIMIZERS
]
_GAPS = {
    "skipless_adamw": 0.5,
    "skipless_default_adamw": -0.5,
    "skipless_soap": -1.0,
    "skipless_default_soap": 1.0,
}

CLAIMS = (
    Claim(
        "V4a", "skipless",
        "ViT with skips, skipless with the proposed and with the default initialisation, each "
        "with AdamW and with SOAP",
        _TABLE1,
        "the default initialisation has the lowest accuracy with both optimizers",
        "Refuted if it is not the lowest, or lies within the interval over seeds of the proposed "
        "one.",
        LowestScore(_LOWEST), limits=_LIMIT,
    ),
    Claim(
        "V4b", "skipless",
        "accuracy gap between the proposed and the default initialisation without skips",
        [one for one in _TABLE1 if not one[1].startswith("skip,")],
        "the gap with SOAP is less than half of the gap with AdamW",
        _BELOW,
        PositiveDifferences([Contrast("half the gap with AdamW - the gap with SOAP", _GAPS)]),
        limits=_LIMIT,
    ),
    Claim(
        "V4c", "skipless_deep",
        "ViT with skips, skipless with the proposed and with the default initialisation, with "
        "SOAP and 12 blocks",
        _TABLE1[3:],
        "the default initialisation has the lowest accuracy",
        "Refuted if an interval over images is below 0.",
        PositiveDifferences(
            [minus(name, "skipless_default_soap") for name in ("skip_soap", "skipless_soap")],
            over="images",
        ),
        limits="one seed",
    ),
    Claim(
        "V11", "readings",
        "four readings of the formulas of the skipless initialisation, scored on held-out images "
        "after one epoch",
        (),
        "the same reading has the highest accuracy with both optimizers, each at its best rate",
        "Nothing refutes it. It is undecided if the optimizers have different best readings.",
        SameBest([{name: f"{name}_{one}" for name in READINGS} for one in OPTIMIZERS]),
        published_statement="the formulas leave it open",
        limits="one seed, and the rates were chosen on the same held-out images",
    ),
    Claim(
        "V6", "dino",
        "DINO with and without skips, with AdamW and SOAP, 12 blocks: k-NN accuracy of each block "
        "on CIFAR-10",
        (),
        "from block 3 on, each encoder is above its random weights",
        "Refuted if the difference has an interval over images below 0 in one of these blocks.",
        AboveRandom(3),
        published_statement="tables 2 to 4 of Cutting the Skip, on ImageNet-1k",
        limits="one seed, so that encoders with and without skips are not compared",
    ),
    Claim(
        "V13", "apart",
        "seven variants of the skipless initialisation, trained by DINO with SOAP on 18,000 "
        "images: cosine of a patch with the mean patch of its image, averaged over the blocks and "
        "200 held-out images",
        (),
        "in at least one variant, less than half of the patches of each block are nearly equal "
        "(cosine above 0.99) and the loss is not above that of `published`",
        "Refuted if this holds for no variant.",
        DistinctPatches("published", 50.0), published_statement="none",
        limits="one seed and one rate",
    ),
    Claim(
        "V12", "dino",
        "size of the demonstration encoders in bfloat16, in MB",
        (),
        "both can be loaded and are below 6 MB",
        "Refuted if one is larger or cannot be loaded.",
        MaxFileSize(6_000_000), published_statement="none",
    ),
    Claim(
        "V1", "mimetic",
        "ViT with the default initialisation, with sinusoidal positions too, and with the mimetic "
        "initialisation",
        [("cifar10", f"width 96, 6 blocks, 3 heads, {init} init", "top-1")
         for init in ("default", "mimetic")],
        "the mimetic initialisation has the highest accuracy",
        "Refuted if an interval over seeds includes 0 or is below 0.",
        PositiveDifferences(
            [minus("mimetic", "default"), minus("mimetic", "sinusoidal")], zero_refutes=True
        ),
        limits="patch 4 and 8 epochs instead of the published 2 and 100",
    ),
    Claim(
        "V9", "osa",
        "orthogonal attention with QR and with Newton-Schulz, a ViT, a ViT without skips, and one "
        "without skips and norms",
        [("mnist", name, "accuracy")
         for name in ("OSA (QR)", "OSA (Newton-Schulz)", "ViT", "ViT, no skip",
                      "ViT, no skip, no layer norm")],
        "both kinds of orthogonal attention are above both ViTs without skips",
        _BELOW,
        PositiveDifferences([minus(one, other) for one in ("qr", "newton_schulz")
                             for other in ("vit_no_skip", "vit_no_skip_no_norm")]),
        also_shown=("vit",),
    ),
    Claim(
        "V9b", "osa",
        "ViT and orthogonal attention with QR, each with a constant learning rate and with a "
        "cosine to 0",
        (),
        "both have a lower accuracy with the constant rate",
        _BELOW,
        PositiveDifferences([minus(f"{name}_cosine", name) for name in ("vit", "qr")]),
        published_statement="the paper states no schedule",
    ),
    Claim(
        "V10", "copying",
        "Mamba 2 that copies strings, with the mimetic and the default initialisation",
        (),
        "the mimetic one copies more letters at the trained length of 16 and at 32",
        _BELOW,
        PositiveDifferences(
            [minus("mimetic", "default", f"letters_{length}") for length in (16, 32)]
        ),
        published_statement="only curves, in section 3.3 of the thesis",
    ),
    Claim(
        "V5", "one_skip",
        "ViT with both skips, without the skip of attention, and without the skip of the MLP "
        "(published are the points lost)",
        [("one_skip", f"no skip around {name}", "points lost")
         for name in ("attention", "the MLP")],
        "leaving out the skip of attention costs more than twice as much accuracy as leaving out "
        "that of the MLP",
        _BELOW,
        PositiveDifferences([
            minus("no_mlp_skip", "no_attention_skip"),
            Contrast("points lost without the skip of attention - twice those without the MLP's",
                     {"both": -1.0, "no_attention_skip": -1.0, "no_mlp_skip": 2.0}),
        ]),
        limits=_LIMIT,
    ),
    Claim(
        "V2", "covariance",
        "ConvNeXt-Atto of patch 2, with uniform filters and with filters from a covariance",
        [("convnext_cifar10", f"7 x 7, 20 epochs, {init} init", "top-1")
         for init in ("uniform", "covariance")],
        "filters from a covariance have the higher accuracy",
        _BELOW,
        PositiveDifferences([minus("covariance", "uniform")]),
        limits="5 epochs instead of the published 20",
    ),
)  # fmt: skip
"""Claims in the order of the experiments."""
