"""Define and check the request of `ssl-bench probe`, `ssl-bench sweep` and `ssl_bench.probe`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

from ssl_bench.composition.choices import choices, config_names, parse_names, require_choice
from ssl_bench.composition.compose import add_data_root, compose_config, has_key
from ssl_bench.data.files.readable import OnBadImage
from ssl_bench.errors import BrokenFileError, ConfigurationError, escape_braces
from ssl_bench.system.output import print_message

BATCH_SIZE_KEYS = ("probe.batch_size", "probe.encoder_batch_size")
"""Config keys that `--batch-size` sets, for the tasks that have these keys."""


@dataclass(frozen=True)
class ProbeRequest:
    """A request to run probes on datasets, for selected blocks of encoders.

    Attributes:
        tasks: Names of probes, such as "tokencut".
        datasets: Datasets, each as a name such as "voc2012" or as NAME:FOLDER.
        overrides: KEY=VALUE settings. A setting applies to all tasks and datasets that have its
            key.
        data_roots: Folders of datasets, by the name of the dataset.
        all_tasks: Whether the user requested all tasks. If `all_tasks` is True, tasks that a
            dataset or an encoder does not support are left out, and probes also run in their
            secondary protocols, which are presets of settings.
        on_bad_image: "fail", "skip", or None for the default of each dataset.
        layers: Block indices, 0-based, such as "all", "0,5,11" or -1.
        checkpoints: Addresses of encoders, such as "demo:skip". Without any address, the newest
            pretraining run in `runs/` is used.
        baselines: Whether to also probe each encoder with random weights, and an encoder that
            returns raw colours.
        out: Folder of results.
        device: Name of a torch device (default: a GPU if there is one).
        overwrite: Whether to compute finished results again.
        sets: Image sets that the user passed to `ssl_bench.probe`, by the name of the argument:
            "train", "val" or "images". These image sets form the dataset "python".
    """

    tasks: Sequence[str]
    datasets: Sequence[str]
    overrides: Sequence[str] = ()
    data_roots: Mapping[str, str] = field(default_factory=dict)
    all_tasks: bool = False
    on_bad_image: OnBadImage | None = None
    layers: str | int | Sequence[int] = "all"
    checkpoints: Sequence[str] = ()
    baselines: bool = False
    out: Path = Path("results")
    device: str | None = None
    overwrite: bool = False
    sets: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(
        cls,
        *,
        task: str,
        dataset: str,
        overrides: Sequence[str],
        data_root: str | None = None,
        batch_size: int | None = None,
        on_bad_image: str | None = None,
        device: str | None = None,
        **others: Any,
    ) -> "ProbeRequest":
        """Create a request from the text that a user entered, and check all names in it.

        Args:
            task: Names of tasks separated by commas, or "all".
            dataset: Names of datasets separated by commas, or "all". NAME:FOLDER stands for the
                dataset NAME in the given folder.
            overrides: KEY=VALUE settings.
            data_root: One folder for all datasets, or NAME=FOLDER,NAME=FOLDER, or None.
            batch_size: Number of images in a forward pass of the encoder.
            on_bad_image: "fail", "skip" or None.
            device: Name of a torch device, or None.
            others: Attributes of `ProbeRequest` that are not checked here, such as `layers`.
        """
        if device is not None:
            # `data list` imports this module, and is faster without torch.
            from ssl_bench.system.device import parse_device

            parse_device(device)
        task, dataset = task.strip(), dataset.strip()
        tasks = parse_names("task", task, choices("probe"))
        if task == "all":
            tasks = _drop_broken_tasks(tasks)
        datasets = parse_datasets(dataset)
        if "python" in datasets and not others.get("sets") and dataset != "all":
            raise ConfigurationError(
                "dataset python can only be used in Python: ssl_bench.probe(encoder, task=TASK, "
                "train=DATASET, val=DATASET)",
                hint=("--dataset", "class_folders", "--data-root", "{folder}"),
            )
        sizes = [] if batch_size is None else _batch_size_overrides(tasks, batch_size)
        return cls(
            tasks=tasks,
            datasets=datasets,
            overrides=[*sizes, *overrides],
            data_roots=parse_data_roots(data_root, datasets),
            all_tasks=task == "all",
            on_bad_image=parse_on_bad_image(on_bad_image),
            device=device,
            **others,
        )


def parse_datasets(text: str) -> list[str]:
    """Split a comma-separated list of datasets, such as "voc2012,folder:photos".

    The names are checked. The text "all" stands for all datasets.

    Returns:
        Each dataset as NAME or NAME:FOLDER.
    """
    if text == "all":
        return choices("dataset")
    names = [part.strip() for part in text.split(",")]
    for name in names:
        require_dataset(name)
    return names


def require_dataset(text: str) -> tuple[str, str | None]:
    """Check the name of a dataset in the text NAME or NAME:FOLDER.

    Returns:
        The name of the dataset, and its folder or None.

    Raises:
        ConfigurationError: The name is unknown, or the text contains a folder although this
            dataset is not read from a folder.
    """
    name, root = split_dataset(text)
    require_choice("dataset", name, choices("dataset"))
    if root is not None and not _has_folder(name):
        raise _synthetic_error([name])
    return name, root


def split_dataset(text: str) -> tuple[str, str | None]:
    """Split the text NAME:FOLDER into the name and the folder of a dataset.

    If the text is only a name, the folder is None.
    """
    name, colon, root = text.partition(":")
    if colon and not root:
        raise ConfigurationError(
            f"expected a folder or an address after the colon of dataset {text}",
            hint=("--dataset", f"{escape_braces(name)}:{{folder}}"),
        )
    return name, root or None


def parse_on_bad_image(text: str | None) -> OnBadImage | None:
    """Return the value of `--on-bad-image` if it is valid, or else raise ConfigurationError.

    Valid values are "fail", "skip", and None, which stands for the default of the dataset.
    """
    if text is not None:
        require_choice("on-bad-image", text, get_args(OnBadImage))
    return cast("OnBadImage | None", text)


def parse_data_roots(text: str | None, datasets: Sequence[str]) -> dict[str, str]:
    """Parse the value of `--data-root`, and return the folder of each dataset by its name.

    Args:
        text: One folder for all datasets, or NAME=FOLDER,NAME=FOLDER, or None.
        datasets: Requested datasets, each as NAME or NAME:FOLDER. `text` does not apply to datasets
            that state their own folder.
    """
    if text is None:
        return {}
    datasets = [name for name in datasets if ":" not in name]
    if not datasets:
        raise ConfigurationError(
            f"--data-root {text} has no effect, because --dataset already contains the folder. "
            "Remove --data-root"
        )
    parts = [part.partition("=") for part in text.split(",")]
    known = choices("dataset")
    is_named = [bool(equals) and name.strip() in known for name, equals, _ in parts]
    if all(is_named):
        roots = {name.strip(): root for name, _, root in parts}
        generated = [name for name in roots if not _has_folder(name)]
    elif not any(is_named):
        roots = dict.fromkeys(datasets, text)
        # With several datasets, a single folder may be meant for only some of them.
        generated = [] if any(map(_has_folder, datasets)) else list(datasets)
    else:
        raise ConfigurationError(
            f"expected one data folder, or NAME=FOLDER for each dataset, got {text!r}",
            hint=("--data-root", "{dataset}={folder},{other_dataset}={other_folder}"),
        )
    if generated:
        raise _synthetic_error(generated)
    return roots


def _synthetic_error(datasets: Sequence[str]) -> ConfigurationError:
    return ConfigurationError(
        f"dataset {' and '.join(datasets)} is not read from a folder, so a data folder has no "
        "effect",
        hint=("--dataset", "folder", "--data-root", "{folder}"),
    )


def probing_config(
    task: str, dataset: str, overrides: Sequence[str], root: str | None = None
) -> dict[str, Any]:
    """Compose the configuration of a task on a dataset.

    Args:
        task: Name of the task.
        dataset: The dataset, as NAME or NAME:FOLDER.
        overrides: KEY=VALUE settings.
        root: Folder of the dataset, which is ignored if `dataset` is NAME:FOLDER.
    """
    name, own_root = split_dataset(dataset)
    base = [f"probe={task}", f"dataset={name}"]
    return compose_config("probing", [*base, *add_data_root(overrides, own_root or root)])


def _has_folder(dataset: str) -> bool:
    """Return whether a dataset is read from a folder.

    Datasets that another package registers are assumed to be read from a folder.
    """
    is_ours = dataset in config_names("dataset")
    return not is_ours or has_key(compose_config("data", [f"dataset={dataset}"]), "dataset.root")


def _drop_broken_tasks(tasks: Sequence[str]) -> list[str]:
    """Return the tasks whose code can be imported, and print a message about each other task."""
    importable = []
    for task in tasks:
        try:
            compose_config("probing", [f"probe={task}"])
            importable.append(task)
        except BrokenFileError as error:
            print_message(f"left out: {task}: {error}")
    return importable


def _batch_size_overrides(tasks: Sequence[str], size: int) -> list[str]:
    """Return the settings KEY=VALUE that set the number of images in a forward pass of the encoder.

    The batch size for training heads is not changed, because it affects scores.

    Args:
        tasks: Names of the tasks. The result contains each key that at least one of the tasks has.
        size: Number of images in a forward pass.

    Raises:
        ConfigurationError: No task has a key for the batch size of the encoder.
    """
    configs = [compose_config("probing", [f"probe={task}"]) for task in tasks]
    keys = [key for key in BATCH_SIZE_KEYS if any(has_key(config, key) for config in configs)]
    if not keys:
        is_trained = any(has_key(config, "probe.training.batch_size") for config in configs)
        raise ConfigurationError(
            "leave out --batch-size, because the encoder's batch size is chosen automatically for "
            f"{', '.join(tasks)}",
            hint=(f"probe.training.batch_size={size}",) if is_trained else (),
        )
    return [f"{key}={size}" for key in keys]
