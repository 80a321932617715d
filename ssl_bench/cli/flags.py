"""Flags that several commands share; imports nothing heavy."""

from collections.abc import Callable


def add_probing(add: Callable[..., object]) -> None:
    """What is asked of which encoders and data."""
    add("--layer", default="all", help="blocks from 0: 11, -1, 0,5,11, 0-3 or all (default all)")
    add(
        "--checkpoint",
        action="append",
        metavar="URI",
        help="run folder, RUN@EPOCH, weights file, timm:NAME and others that `ssl-bench models` "
        "lists; several, or patterns such as 'runs/*' (default: the newest below runs/)",
    )
    add(
        "--baselines",
        action="store_true",
        help="probe these encoders with random weights too, and plain colours",
    )
    add(
        "--dataset",
        default="toy",
        help="several with commas (default toy); a part of a "
        "published set is recorded as NAME-COUNT, with --limit N as NAME-limitN",
    )
    add(
        "--data-root",
        metavar="DIR",
        help="where the data lies; DATASET=DIR,DATASET=DIR for several",
    )
    add("--out", default="results", metavar="DIR", help="records and pictures (default results)")
    add("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    add_on_bad_image(add)
    add_short(add)


def add_on_bad_image(add: Callable[..., object]) -> None:
    """What becomes of images that cannot be read."""
    add(
        "--on-bad-image",
        metavar="fail|skip",
        help="skip: leave out images that cannot be read and say so in what is written (default "
        "fail; of folder skip)",
    )


def add_short(add: Callable[..., object]) -> None:
    """Short forms of keys, which are where their defaults stand; see `shorthand`."""
    add("--limit", type=int, metavar="N", help="at most N images of each split: data.limit=N")
    add("--seed", type=int, metavar="N", help="short for seed=N; of pretrain train.seed=N")
    add("--batch-size", type=int, metavar="N", help="images that the encoder takes at once")


def add_showing(add: Callable[..., object]) -> None:
    """What stops before anything is computed."""
    add("--dry-run", action="store_true", help="say what would be done, and stop")
    add("--print-config", action="store_true", help="print all values that hold, and stop")


def add_format(add: Callable[..., object]) -> None:
    """How tables are printed."""
    add(
        "--format",
        help="text, terminal, markdown, latex, csv, json or parquet (default text or terminal)",
    )


def add_filters(add: Callable[..., object]) -> None:
    """Which records are meant."""
    for name in ("dataset", "metric", "facet", "protocol"):
        add(f"--{name}", help=f"only these {name}s, with commas")
