"""The suite from Python: an encoder, a task and a folder in; a table over blocks out."""

import argparse
import inspect
import math
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssl_bench.composition.choices import parse_names
from ssl_bench.data.files.readable import OnBadImage
from ssl_bench.errors import ConfigurationError, DataError, SslBenchError
from ssl_bench.features import FeatureExtractor, Features, squashed
from ssl_bench.layers import Facet, resolve_layers
from ssl_bench.models import Encoder, load_encoder
from ssl_bench.models.encoder import OwnModule
from ssl_bench.planning import asked_probes, evaluate, opened_store
from ssl_bench.results import Record, ResultStore, to_pandas
from ssl_bench.system.caller_state import memory_restored, undisturbed
from ssl_bench.system.device import choose_device
from ssl_bench.system.progress import reworded, say_once
from ssl_bench.tables.depth import DepthTable, depth_tables
from ssl_bench.tables.drawing import curves_figure
from ssl_bench.tables.sheets import render_tables

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

Images = str | Path | np.ndarray | Tensor
"""A file, turned as EXIF says; height x width x 3 of numpy.uint8; 3 x height x width in [0, 1]."""
_OVERSHOOT = 0.2
_KEYWORDS = {"checkpoint": "encoder", "format": "style"}
"""What is typed in Python for flags that are called otherwise there."""
_SHORT = {"limit": "data.limit", "pictures": "probe.panels"}
"""Settings of `probe` that are short for a key, as the flags of the command are."""


def _in_words_of_python(line: str) -> str:
    """A line with `panels=9` where the command line has `--pictures 9` or `probe.panels=9`.

    Whole commands stay what they are.
    """

    def keyword(found: re.Match[str]) -> str:
        flag, value = found[1], found[2]
        if flag == "overwrite":
            return "overwrite=True" + (f" {value}" if value else "")
        name = _KEYWORDS.get(flag, flag.replace("-", "_"))
        if value is None:
            return name
        is_text = not value.isdigit() and value != "N"
        return f'{name}="{value}"' if is_text else f"{name}={value}"

    parts = line.split("`")
    for place, part in enumerate(parts):
        if place % 2 and part.startswith("ssl-bench"):
            continue
        words = re.sub(r"(?<![\w-])--([a-z][a-z-]+)(?: ([\w*|:.,/-]*[\w*]))?", keyword, part)
        # Of a key with further dots the whole is typed; a file may be called probe.py.
        parts[place] = re.sub(r"(?<![\w./-])probe\.(?!py\b)([a-z_]+)\b(?!\.\w)", r"\1", words)
    return "`".join(parts)


@contextmanager
def _said_in_python() -> Generator[None]:
    """Lines and errors name what is typed in Python, whoever wrote them for a command."""
    before = reworded.set(_in_words_of_python)
    try:
        yield
    except SslBenchError as error:
        error.reword(_in_words_of_python)
        raise
    finally:
        reworded.reset(before)


@dataclass(frozen=True)
class Results:
    """Records of a probe, as a table, a frame or a figure; a notebook shows the tables.

    Attributes:
        records: One a block, facet and metric.
    """

    records: tuple[Record, ...]

    @_said_in_python()
    def table(
        self,
        style: str = "text",
        *,
        task: str | None = None,
        dataset: str | None = None,
        metric: str | None = None,
        facet: str | None = None,
    ) -> str:
        """Tables over depth as text, markdown, latex, csv or json.

        All, or those of some tasks, datasets, metrics or facets, with commas, as the flags of
        `ssl-bench table` choose.
        """
        tables = self._tables(task=task, dataset=dataset, metric=metric, facet=facet)
        return render_tables(tables, style)

    def to_pandas(self) -> "pandas.DataFrame":
        """A row a record."""
        return to_pandas(self.records)

    @_said_in_python()
    def plot(self, metric: str | None = None) -> "Figure":
        """Curves over blocks with their 95 % bands, a panel a table, as a figure of matplotlib.

        Raises:
            ConfigurationError: There is no such metric.
            DataError: There are no records.
        """
        if not self.records:
            raise DataError("expected records to draw, got none; probe an encoder first")
        return curves_figure(self._tables(metric=metric))

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __repr__(self) -> str:
        return self.table() if self.records else "Results without records"

    def _repr_markdown_(self) -> str:
        return self.table("markdown")

    def _tables(self, **asked: str | None) -> list[DepthTable]:
        records = list(self.records)
        for name, words in asked.items():
            have = sorted({getattr(record, name) for record in records})
            chosen = have if words is None else parse_names(name, words, have)
            records = [record for record in records if getattr(record, name) in chosen]
        tables = depth_tables(records) if records else []
        return [table for table in tables if table.has_values] or tables


@_said_in_python()
@undisturbed()
def probe(
    encoder: "str | Encoder | nn.Module",
    *,
    task: str,
    dataset: str = "toy",
    data_root: str | Path | None = None,
    layer: str | int | Sequence[int] = "all",
    out: str | Path = "results",
    device: str | None = None,
    overwrite: bool = False,
    on_bad_image: OnBadImage | None = None,
    **settings: Any,
) -> Results:
    """Probe blocks of an encoder, as `ssl-bench probe` does; finished cells are not computed again.

    Args:
        encoder: An address as of `--checkpoint`, an `Encoder`, or any module with a list of
            blocks, of which `Encoder.from_module` finds out the rest.
        task: Such as "tokencut", several with commas, or "all" that fit; `ssl-bench keys task`
            lists them.
        dataset: Such as "voc2012".
        data_root: Its folder.
        layer: "all", 11, -1, "0,5,11" or a list.
        out: Folder of records and pictures.
        device: As torch names it; else that of the module, or a GPU where there is one.
        overwrite: Compute finished cells again.
        on_bad_image: "skip" leaves out images that cannot be read, "fail" ends there; else each
            dataset has its own way.
        settings: Keys of the probe, `image_size=224` for `probe.image_size=224`; `limit`,
            `pictures` and `seed` as the flags; others by their whole names,
            `**{"dataset.num_val": 4}`.

    Raises:
        SslBenchError: In one line what was expected, what came and what to do.
    """
    options = argparse.Namespace(
        task=task,
        dataset=dataset,
        data_root=None if data_root is None else str(data_root),
        on_bad_image=on_bad_image,
        batch_size=None,
    )
    plan = asked_probes(options, _overrides(settings))
    store, needs_all = opened_store(str(out)), task != "all" or len(plan) == 1
    with _as_encoder(encoder, device) as (found, where):
        records = evaluate(
            plan,
            found,
            store,
            layers=layer,
            device=where,
            overwrite=overwrite,
            needs_all=needs_all,
        )
        return Results(tuple(records))


def read_results(folder: str | Path = "results") -> Results:
    """Read all records below a folder of results; a message says which ones cannot be shown.

    Raises:
        DataError: There are none.
    """
    store = ResultStore(Path(folder))
    records = store.records()
    for line in store.notes():
        say_once(line)
    return Results(tuple(records))


@_said_in_python()
@undisturbed()
def extract_features(
    encoder: "str | Encoder | nn.Module",
    images: Sequence[Images] | Float[Tensor, "batch 3 height width"],
    *,
    layers: str | int | Sequence[int] = "all",
    facets: Sequence[Facet] = ("token",),
    image_size: int | None = None,
    batch_size: int = 16,
    device: str | None = None,
) -> Features:
    """Features of blocks, all from one forward pass, on the CPU.

    Args:
        encoder: As of `probe`.
        images: A batch, RGB in [0, 1], of a size that the patch divides; or a list of files and
            arrays, each squashed to a square.
        layers: As `layer` of `probe`.
        facets: See `ssl_bench.features.FeatureExtractor`. "cls" and "token" are what a block gives.
            "cls_normed" and "token_normed" are the same after the encoder's final norm; k-NN and
            classification take these, where `probe.facet` is "cls" or "patch_mean".
        image_size: Side of the square; else the encoder's own size.
        batch_size: How many images pass at once.
        device: As of `probe`.

    Returns:
        By block and facet: batch x rows x cols x dim, or batch x dim for "cls" and "cls_normed".

    Raises:
        SslBenchError: In one line what was expected, what came and what to do.
    """
    with _as_encoder(encoder, device) as (found, where):
        extractor = FeatureExtractor(
            found, layers=resolve_layers(layers, found.depth), facets=facets, device=where
        )
        if isinstance(images, Tensor):
            batch = _in_range(images, 4)
        else:
            if isinstance(images, str | Path) or (
                isinstance(images, np.ndarray) and images.ndim < 4
            ):
                raise ConfigurationError("expected a list of images, got one: put it into a list")
            sides = (image_size, image_size) if image_size else found.native_size
            batch = torch.stack([_pixels(image, sides) for image in images])
        parts = [extractor(part) for part in batch.split(batch_size)]
    return {
        layer: {facet: torch.cat([part[layer][facet].cpu() for part in parts]) for facet in facets}
        for layer in extractor.layers
    }


def _pixels(image: Images, size: tuple[int, int]) -> Float[Tensor, "3 height width"]:
    from ssl_bench.data.files.images import read_image

    if isinstance(image, Tensor):
        batch = _in_range(image, 3)[None]
        return nn.functional.interpolate(batch, size=size, mode="bilinear", antialias=True)[0]
    if isinstance(image, np.ndarray) and (image.dtype != np.uint8 or image.shape[2:] != (3,)):
        raise ConfigurationError(
            "expected an array of height x width x 3 of numpy.uint8, 0 to 255, got one of "
            f"{' x '.join(map(str, image.shape))} of {image.dtype}"
        )
    return squashed(
        image if isinstance(image, np.ndarray) else read_image(Path(image), upright=True), size
    )


def _in_range(images: Tensor, dimensions: int) -> Tensor:
    """Images as encoders of this suite take them, which normalise for themselves."""
    shape = " x ".join(map(str, images.shape))
    if images.ndim != dimensions or images.shape[-3] != 3:
        wanted = "a batch of N x 3 x height x width" if dimensions == 4 else "3 x height x width"
        raise ConfigurationError(
            f"expected {wanted}, got {shape}"
            + ("; images[None] is a batch of one" * (images.ndim == 3 and dimensions == 4))
        )
    if not images.is_floating_point():
        raise ConfigurationError(
            f"expected floats in [0, 1], got {str(images.dtype).removeprefix('torch.')}: "
            "divide by 255"
        )
    low, high = (float(one) for one in torch.aminmax(images)) if images.numel() else (0.0, 0.0)
    # Bicubic resizing leaves the range by some percent.
    if not (low >= -_OVERSHOOT and high <= 1 + _OVERSHOOT):
        remedy = "leave the normalisation to the encoder" if low < 0 else "divide by 255"
        remedy = remedy if math.isfinite(low + high) else "they are not finite"
        raise ConfigurationError(
            f"expected values in [0, 1], got {low:.3g} to {high:.3g}: {remedy}"
        )
    return images


@contextmanager
def _as_encoder(
    given: "str | Encoder | nn.Module", device: str | None
) -> Generator[tuple[Encoder, torch.device]]:
    """Return an encoder and where it computes; a module gets its memory back."""
    if isinstance(given, str):
        yield load_encoder(given), choose_device(device)
        return
    if isinstance(given, Encoder):
        encoder = given
    elif isinstance(given, nn.Module):
        encoder = Encoder.from_module(given)
        say_once(
            "ImageNet's mean and deviation are assumed; Encoder.from_module(module, mean=..., "
            "std=...) takes others"
        )
    else:
        raise ConfigurationError(
            f"expected an address, an Encoder or a torch.nn.Module, got {type(given).__name__}"
        )
    module = encoder.module
    if device is None and isinstance(module, OwnModule):
        device = next((str(p.device) for p in module.parameters()), "cpu")
    with memory_restored(module):
        yield encoder, choose_device(device)


def _overrides(settings: dict[str, Any]) -> list[str]:
    """Keywords as the words of a command; those without a dot are keys of the probe."""
    words = []
    for key, value in settings.items():
        if key.removesuffix("s") in inspect.signature(probe).parameters:
            raise ConfigurationError(f"unknown setting {key}; expected {key[:-1]}")
        whole = "." in key or key in ("seed", "dtype", "corrupt")
        name = _SHORT.get(key, key if whole else f"probe.{key}")
        words.append(f"{name}={_as_word(value)}")
    return words


def _as_word(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_as_word, value))}]"
    return str(value)
