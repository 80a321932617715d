"""Define the Python API: probe an encoder, read results, extract features, show tables and plots.

Error messages of these functions suggest keyword arguments instead of command-line flags.
"""

import inspect
import math
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssl_bench import models
from ssl_bench.composition.choices import parse_names
from ssl_bench.data.files.readable import OnBadImage
from ssl_bench.errors import ConfigurationError, DataError, hints_for_python
from ssl_bench.features import FeatureExtractor, Features, resize_image
from ssl_bench.layers import Facet, resolve_layers
from ssl_bench.models import Encoder
from ssl_bench.models.loading.own_module import UserModule
from ssl_bench.planning import evaluate, plan_request, require_images
from ssl_bench.request import ProbeRequest
from ssl_bench.results import Record, ResultStore, to_pandas
from ssl_bench.system.device import choose_device, preserve_process_state, restore_tensor_storage
from ssl_bench.system.output import print_message_once
from ssl_bench.tables.depth import ScoreTable, depth_tables
from ssl_bench.tables.drawing import curves_figure
from ssl_bench.tables.sheets import render_tables

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

ImageLike = str | Path | np.ndarray | Tensor
"""One image: a file, a numpy.uint8 array (height x width x 3), or a tensor in [0, 1] (3 x height x
width). Image files are rotated according to their EXIF orientation."""
_OVERSHOOT = 0.2
"""How far image values may lie outside [0, 1], because bicubic resizing can produce such values."""
_SHORT_FORMS: Mapping[str, str] = {
    "limit": "data.limit",
    "pictures": "probe.panels",
    "dataset_name": "dataset.name",
    "class_names": "dataset.class_names",
    "box_format": "dataset.box_format",
}
"""Config keys of some arguments of `probe`. By default, an argument NAME sets `probe.NAME`."""
_PLAIN_TEXT = re.compile(r"[A-Za-z_][\w.-]*")
_TOP_LEVEL_KEYS = ("seed", "dtype", "corrupt")
_PROBE_KEYWORDS = {"--checkpoint": "encoder", **{key: name for name, key in _SHORT_FORMS.items()}}
_FEATURES_KEYWORDS = {
    "--checkpoint": "encoder",
    "--layer": "layers",
    **dict.fromkeys(("--facet", "probe.facet"), "facets"),
}
_TABLE_KEYWORDS = {"--format": "style"}


@dataclass(frozen=True)
class Results:
    """Results of probes, which can be shown as tables, a data frame or a figure.

    A notebook displays this object as tables.

    Attributes:
        records: One record for each score. A record stores the block, facet (kind of feature),
            metric, value and settings.
    """

    records: tuple[Record, ...]

    @hints_for_python(_TABLE_KEYWORDS)
    def table(
        self,
        style: str = "text",
        *,
        task: str | None = None,
        dataset: str | None = None,
        metric: str | None = None,
        facet: str | None = None,
    ) -> str:
        """Return tables as text, with a row for each block and a column for each encoder.

        Args:
            style: "text", "markdown", "latex", "csv" or "json".
            task: Tasks to show, separated by commas (default: all).
            dataset: Datasets to show, separated by commas (default: all).
            metric: Metrics to show, separated by commas (default: all).
            facet: Facets (kinds of features) to show, separated by commas (default: all).
        """
        tables = self._tables(task=task, dataset=dataset, metric=metric, facet=facet)
        return render_tables(tables, style)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a pandas data frame with one row for each record (a score with its settings)."""
        return to_pandas(self.records)

    @hints_for_python(_TABLE_KEYWORDS)
    def plot(self, metric: str | None = None) -> "Figure":
        """Plot the score of every block, and return the matplotlib figure.

        The figure has one chart for each table that the method `table` returns. Bands around the
        curves show 95 % confidence intervals.

        Args:
            metric: Metrics to show, separated by commas (default: all).

        Raises:
            ConfigurationError: A metric does not occur in the records.
            DataError: There are no results to plot.
        """
        if not self.records:
            raise DataError("these results contain no records, expected at least one to plot")
        return curves_figure(self._tables(metric=metric))

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __repr__(self) -> str:
        return self.table() if self.records else "Results without records"

    def _repr_markdown_(self) -> str:
        return self.table("markdown")

    def _tables(self, **filters: str | None) -> list[ScoreTable]:
        records = list(self.records)
        for column, text in filters.items():
            if text is not None:
                present = sorted({getattr(record, column) for record in records})
                names = parse_names(column, text, present)
                records = [record for record in records if getattr(record, column) in names]
        tables = depth_tables(records) if records else []
        return [table for table in tables if table.has_values] or tables


@hints_for_python(_PROBE_KEYWORDS)
@preserve_process_state()
def probe(
    encoder: "str | Encoder | nn.Module",
    *,
    task: str,
    dataset: str | None = None,
    data_root: str | Path | None = None,
    train: Any = None,
    val: Any = None,
    images: Any = None,
    layer: str | int | Sequence[int] = "all",
    out: str | Path = "results",
    device: str | None = None,
    overwrite: bool = False,
    on_bad_image: OnBadImage | None = None,
    **settings: Any,
) -> Results:
    """Probe blocks of an encoder and return the results, like the command `ssl-bench probe`.

    Results that already exist in `out` are not computed again. To measure peak memory, this
    function resets PyTorch's statistics of peak memory on a GPU, or the peak resident memory of the
    process (VmHWM) on a CPU.

    Args:
        encoder: An address in the format of `--checkpoint`, such as "demo:skip", an `Encoder`, or
            a torch module with a list of blocks. `Encoder.from_module` converts such a module.
        task: A task such as "tokencut", several tasks separated by commas, or "all" for all tasks
            that the dataset and the encoder support. `ssl-bench keys` lists the tasks.
        dataset: Name of a dataset, such as "voc2012". By default, the images in the arguments
            `train`, `val` and `images` are used, or "toy" if these arguments are missing.
        data_root: Folder of the dataset.
        train: Your own training images: a dataset of torchvision or Hugging Face, or any sequence
            of pairs (image, target). `ssl_bench.data.layouts.python_dataset` describes the targets.
        val: Your own images to score.
        images: Your own images for tasks without training, such as "pca" or "tokencut".
        layer: Block indices, 0-based: "all", 11, -1, "0,5,11" or a list.
        out: Folder to which results and figures are written.
        device: Name of a torch device. By default, a torch module stays on its device, and other
            encoders use a GPU if there is one.
        overwrite: Compute finished results again.
        on_bad_image: "skip" leaves out images that cannot be read, and "fail" raises an error for
            them. The default depends on the dataset.
        settings: Settings of the probe, such as `image_size=224` for `probe.image_size=224`. The
            setting `limit` is the maximum number of images of a split, `pictures` is the number of
            example figures, and `seed` is the random seed. `dataset_name`, `class_names` and
            `box_format` describe your own datasets. Write all other keys in full:
            `**{"dataset.num_val": 4}`.

    Raises:
        SslBenchError: An argument, the encoder or the data is invalid.
    """
    sets = {"train": train, "val": val, "images": images}
    sets = {usage: one for usage, one in sets.items() if one is not None}
    if sets and (dataset or data_root):
        raise ConfigurationError(
            f"{' and '.join(sets)} cannot be combined with dataset or data_root. Pass either your "
            "own images or a dataset name"
        )
    request = ProbeRequest.parse(
        task=task,
        dataset=dataset or ("python" if sets else "toy"),
        sets=sets,
        data_root=None if data_root is None else str(data_root),
        overrides=_settings_as_overrides(settings),
        layers=layer,
        out=Path(out),
        device=device,
        on_bad_image=on_bad_image,
        overwrite=overwrite,
    )
    plan = plan_request(request)
    require_images(plan)
    store = ResultStore.create(request.out)
    with _prepare_encoder(encoder, device) as (prepared, used_device):
        records = evaluate(
            plan,
            prepared,
            store,
            layers=request.layers,
            device=used_device,
            overwrite=request.overwrite,
            skip_unsupported=request.all_tasks and len(plan) > 1,
        )
        return Results(tuple(records))


@hints_for_python({"--out": "folder"})
def read_results(folder: str | Path = "results") -> Results:
    """Read all results in a folder to which `probe` or `ssl-bench probe` has written results.

    Results that cannot be read, or that an older version of a probe computed, are left out with a
    message.

    Raises:
        DataError: The folder contains no valid result.
    """
    store = ResultStore(Path(folder))
    records = store.records()
    for line in store.describe_left_out():
        print_message_once(line)
    return Results(tuple(records))


@hints_for_python({"--checkpoint": "uri"})
def load_encoder(uri: str) -> Encoder:
    """Load an encoder from an address in the format of the flag `--checkpoint`.

    Args:
        uri: The address, such as "demo:skip", "timm:NAME" or the path of a checkpoint.

    Raises:
        CheckpointError: The address or its file is invalid, or the model is not supported.
    """
    return models.load_encoder(uri)


@hints_for_python(_FEATURES_KEYWORDS)
@preserve_process_state()
def extract_features(
    encoder: "str | Encoder | nn.Module",
    images: Sequence[ImageLike] | Float[Tensor, "batch 3 height width"],
    *,
    layers: str | int | Sequence[int] = "all",
    facets: Facet | Sequence[Facet] = ("token",),
    image_size: int | None = None,
    batch_size: int = 16,
    device: str | None = None,
) -> Features:
    """Extract features of blocks in one forward pass per image, and return them on the CPU.

    Args:
        encoder: An address such as "demo:skip", an `Encoder`, or a torch module with a list of
            blocks.
        images: A batch of RGB images, or a list of files, arrays and tensors. A batch has values in
            [0, 1], and its height and width are multiples of the patch size. The images in a list
            are resized to squares.
        layers: Block indices, 0-based: "all", 11, -1, "0,5,11" or a list.
        facets: Names of facets (kinds of features), such as "token" for patch tokens or "key".
            `ssl_bench.features.FeatureExtractor` lists all facets. "cls" and "token" are outputs of
            the block itself, while "cls_normed" and "token_normed" are these outputs after the
            encoder's final norm. The k-NN and classification probes use features after the final
            norm.
        image_size: Side of the resized square images in pixels (default: the encoder's native
            size).
        batch_size: Number of images in a forward pass.
        device: Name of a torch device. By default, a torch module stays on its device, and other
            encoders use a GPU if there is one.

    Returns:
        Features by block index and facet. The features have the shape batch x dim for "cls" and
        "cls_normed", batch x registers x dim for "registers", and batch x rows x cols x dim for all
        other facets.

    Raises:
        SslBenchError: An argument, the encoder or an image is invalid.
    """
    names = [facets] if isinstance(facets, str) else list(facets)
    with _prepare_encoder(encoder, device) as (prepared, used_device):
        extractor = FeatureExtractor(
            prepared,
            layers=resolve_layers(layers, prepared.depth),
            facets=names,
            device=used_device,
        )
        if isinstance(images, Tensor):
            batch = _require_unit_range(images, 4)
        elif isinstance(images, str | Path) or getattr(images, "ndim", 4) < 4:
            raise ConfigurationError("expected a list of images such as [image], got one image")
        else:
            if not len(images):
                raise ConfigurationError("expected at least one image, got an empty list")
            size = (image_size, image_size) if image_size else prepared.native_size
            batch = torch.stack([_resize_to_square(image, size) for image in images])
        parts = [extractor(part) for part in batch.split(batch_size)]
    return {
        layer: {name: torch.cat([part[layer][name].cpu() for part in parts]) for name in names}
        for layer in extractor.layers
    }


def _settings_as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Convert keyword arguments of `probe` to KEY=VALUE overrides of the configuration.

    For example, `image_size=224` becomes `probe.image_size=224`, and `limit=8` becomes
    `data.limit=8`. Top-level keys such as `seed`, and names that contain a dot, are not changed.
    """
    overrides = []
    for name, value in settings.items():
        if name.removesuffix("s") in inspect.signature(probe).parameters:
            raise ConfigurationError(f"unknown setting {name}, expected {name[:-1]}")
        is_full_key = "." in name or name in _TOP_LEVEL_KEYS
        key = _SHORT_FORMS.get(name, name if is_full_key else f"probe.{name}")
        overrides.append(f"{key}={_override_value(value)}")
    return overrides


def _override_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_quoted_override_value, value))}]"
    return str(value)


def _quoted_override_value(value: Any) -> str:
    text = _override_value(value)
    if not isinstance(value, str) or _PLAIN_TEXT.fullmatch(text):
        return text
    return "'" + text.replace("'", "\\'") + "'"


@contextmanager
def _prepare_encoder(
    encoder: "str | Encoder | nn.Module", device: str | None
) -> Generator[tuple[Encoder, torch.device]]:
    """Load or convert the encoder that a user passed, and yield it with the device to use.

    On exit, a torch module or `Encoder` is moved back to its original device.

    Args:
        encoder: An address such as "demo:skip", an `Encoder`, or a torch module.
        device: Name of a torch device, or None for the default device.
    """
    if isinstance(encoder, str):
        yield models.load_encoder(encoder), choose_device(device)
        return
    if isinstance(encoder, nn.Module):
        encoder = Encoder.from_module(encoder)
        print_message_once(
            "images are normalised with the mean and standard deviation of ImageNet. To change "
            "this, pass Encoder.from_module(module, mean=..., std=...)"
        )
    elif not isinstance(encoder, Encoder):
        raise ConfigurationError(
            "expected an encoder: an address such as 'timm:NAME', an Encoder or a torch.nn.Module, "
            f"got {type(encoder).__name__}"
        )
    module = encoder.module
    if device is None and isinstance(module, UserModule):
        device = next((str(p.device) for p in module.parameters()), "cpu")
    with restore_tensor_storage(module):
        yield encoder, choose_device(device)


def _resize_to_square(image: ImageLike, size: tuple[int, int]) -> Float[Tensor, "3 height width"]:
    from ssl_bench.data.files.images import read_image

    if isinstance(image, Tensor):
        batch = _require_unit_range(image, 3)[None]
        return nn.functional.interpolate(batch, size=size, mode="bilinear", antialias=True)[0]
    if not isinstance(image, np.ndarray):
        image = read_image(Path(image), apply_exif_orientation=True)
    elif image.dtype != np.uint8 or image.shape[2:] != (3,):
        raise ConfigurationError(
            "expected a numpy.uint8 array of height x width x 3 with values from 0 to 255, got an "
            f"array of {' x '.join(map(str, image.shape))} with dtype {image.dtype}"
        )
    return resize_image(image, size)


def _require_unit_range(images: Tensor, dimensions: int) -> Tensor:
    """Return the images unchanged if they are floats in [0, 1] with 3 channels.

    Otherwise, raise ConfigurationError. Normalised images are rejected, because `FeatureExtractor`
    normalises images itself. Values slightly outside [0, 1] are accepted, because bicubic resizing
    can produce them.

    Args:
        images: One image (3 x height x width) or a batch (N x 3 x height x width).
        dimensions: Expected number of axes: 3 for one image, 4 for a batch.
    """
    if images.ndim != dimensions or images.shape[-3] != 3:
        expected = "3 x height x width" if dimensions == 3 else "a batch of N x 3 x height x width"
        is_single = images.ndim == 3 and dimensions == 4
        raise ConfigurationError(
            f"expected {expected}, got {' x '.join(map(str, images.shape))}"
            + (". Pass images[None]" if is_single else "")
        )
    if not images.is_floating_point():
        dtype = str(images.dtype).removeprefix("torch.")
        raise ConfigurationError(f"expected floats in [0, 1], got {dtype}: divide by 255")
    low, high = map(float, torch.aminmax(images)) if images.numel() else (0.0, 0.0)
    if not (low >= -_OVERSHOOT and high <= 1 + _OVERSHOOT):
        remedy = "pass images that are not normalised yet" if low < 0 else "divide by 255"
        remedy = remedy if math.isfinite(low + high) else "some values are not finite"
        raise ConfigurationError(
            f"expected values in [0, 1], got {low:.3g} to {high:.3g}: {remedy}"
        )
    return images
