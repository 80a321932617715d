"""From places of the true class to accuracies: the chosen rates, how sure, what to be wary of."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxtyping import Int64
from torch import Tensor

from probes.features.shots import TOPS, top_score
from ssl_bench.evaluation import Score


def metrics(*, holdout: bool) -> list[str]:
    """Names of what is scored, in the order in which `choice_scores` does it."""
    choices = ["holdout", "oracle"] if holdout else ["oracle"]
    return [f"top{top}_{choice}" for choice in choices for top in TOPS]


def choice_scores(
    cell: tuple[int, str],
    *,
    hyperparameter: str,
    values: Sequence[float],
    num_classes: int,
    ranks: Int64[Tensor, "values images"],
    labels: Int64[Tensor, " images"],
    held_out: Int64[Tensor, "values held_out_images"] | None,
    constant: float,
    missing: int,
    shared: Mapping[str, Any],
) -> Iterator[Score]:
    """Top-1 and top-5 of one source at the value chosen without and with a look at scored images.

    Always the best by top-1, of equally good ones the first.

    Args:
        cell: Layer and facet.
        hyperparameter: What the values are of: the learning rate, or another one that is chosen.
        values: One for each head.
        num_classes: How many there are.
        ranks: How many classes each head puts before the true one, over the scored images; all
            where it diverged.
        labels: Of the scored images.
        held_out: As `ranks`, over the images held out of training; None where all were used.
        constant: Share of the channels, from 0 to 1, that are the same for all training images.
        missing: How many classes no training image has.
        shared: Details that are the same for all sources.
    """
    details: dict[str, Any] = {
        f"{hyperparameter}s": list(values),
        "top1_by_rate": _top1(ranks),
        "top1_by_rate_held_out": None if held_out is None else _top1(held_out),
        "num_classes": num_classes,
        "constant_features": constant == 1,
        "constant_channels_percent": round(100 * constant, 1),
        **shared,
    }
    name, wary = hyperparameter.replace("_", " "), list[str]()
    diverged = (ranks == num_classes).any(1).tolist()
    if any(diverged):
        names = (f"{value:g}" for value, gone in zip(values, diverged, strict=True) if gone)
        wary.append(f"heads diverged: {name} {', '.join(names)}")
    if missing:
        wary.append(f"{missing} of {num_classes} classes have no training image")
    if constant == 1:
        wary.append("degenerate: all training images have the same features")
    choices = [] if held_out is None else [("holdout", _best(held_out))]
    for choice, best in (*choices, ("oracle", _best(ranks))):
        warnings = list(wary)
        if len(values) > 1 and best in (0, len(values) - 1):
            edge = f"the chosen {name} {values[best]:g} is at the edge of its grid"
            warnings.insert(0, edge)
        for top in TOPS:
            yield top_score(
                cell,
                f"top{top}_{choice}",
                ranks[best] < top,
                labels,
                top=top,
                num_classes=num_classes,
                details={**details, hyperparameter: values[best], "warnings": warnings},
            )


def _best(ranks: Int64[Tensor, "values images"]) -> int:
    right = (ranks == 0).sum(1).tolist()
    return right.index(max(right))


def _top1(ranks: Int64[Tensor, "values images"]) -> list[float]:
    return (100 * (ranks == 0).double().mean(1)).tolist()
