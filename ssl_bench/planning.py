"""Combine the requested tasks with datasets, and evaluate an encoder on each combination."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ssl_bench.composition.choices import choices, unknown_key_error, unknown_name_error
from ssl_bench.composition.compose import (
    TARGET,
    build,
    changed_settings,
    choice_group,
    config_to_yaml,
    has_key,
    import_component,
    list_keys,
    list_protocols,
    load_protocol_file,
)
from ssl_bench.composition.fields import format_value
from ssl_bench.data.corruptions import parse_corruptions
from ssl_bench.data.files.readable import (
    ReadabilityCache,
    ReadableDataset,
    count_shared_files,
    leave_out_unreadable,
    suggest_skipping,
)
from ssl_bench.data.samples import ROLE_ANNOTATIONS, Dataset, find_datasets
from ssl_bench.data.splits import (
    CachedDataset,
    DType,
    ListedDataset,
    apply_shared_values,
    read_shared_values,
)
from ssl_bench.errors import (
    BrokenFileError,
    ConfigurationError,
    DataError,
    UnreadableImageError,
    broken_file_error,
    escape_braces,
    join_alternatives,
)
from ssl_bench.evaluation import SIZE_FIELDS, Evaluation, FeatureCache, Probe, adapt_image_size
from ssl_bench.layers import select_layers
from ssl_bench.models import Encoder, EncoderIdentity
from ssl_bench.request import BATCH_SIZE_KEYS, ProbeRequest, probing_config
from ssl_bench.results import Record, ResultStore
from ssl_bench.system.output import print_message

_PROTOCOL, _PICTURES = "probe.protocol", "probe.panels"
_Pair = tuple[str, str]
"""Names of a task and a dataset."""


@dataclass(frozen=True)
class PlannedProbe:
    """A probe and the dataset that it runs on, both built from the configuration.

    Attributes:
        probe: The probe, not yet adapted to an encoder.
        dataset: The dataset, whose files have not been read yet.
        task_and_dataset: Name of the task, such as "knn", and name of the dataset, such as
            "voc2012".
        overrides: KEY=VALUE settings that apply to this probe and this dataset.
        root: Folder of the dataset.
        allow_overlap: Whether scored images may also be training images.
        seed: Seed of all random number generators.
        dtype: Precision of the encoder's forward pass, such as "float32".
    """

    probe: Probe
    dataset: Dataset
    seed: int
    dtype: DType
    task_and_dataset: _Pair
    overrides: tuple[str, ...]
    root: str | None
    allow_overlap: bool

    @property
    def chosen_fields(self) -> frozenset[str]:
        """Return the names of the probe's fields that the user or the dataset has set."""
        names = (override.partition("=")[0] for override in self.overrides)
        return frozenset(name.removeprefix("probe.") for name in names if name.startswith("probe."))

    def require_images(self) -> None:
        """Open the dataset splits that this probe uses, to report errors before the evaluation.

        Raises:
            DataError: A split is incomplete, or scored images are also training images although
                `allow_overlap` is False.
        """
        scored = self.probe.scored_images(self.dataset)
        training = self.probe.training_images(self.dataset)
        if training is not None:
            count_shared_files(training, scored, allowed=self.allow_overlap)

    def adapt_to(self, encoder: Encoder | EncoderIdentity) -> Probe:
        """Return a copy of the probe that is adapted to the encoder and the dataset.

        For example, the image size becomes a multiple of the patch size, and facets (kinds of
        features) that the encoder lacks are replaced. Fields that the user set are not changed.

        Raises:
            ConfigurationError: The encoder does not accept an image size that the user set.
            UnsupportedEncoderError: The probe cannot score this encoder.
        """
        probe: Any = self.probe.adapt_to_dataset(self.dataset, self.chosen_fields)
        facets = [probe.facet] if isinstance(probe.facet, str) else list(probe.facet or ())
        available = list(dict.fromkeys(encoder.fallback_facets.get(name, name) for name in facets))
        if available != facets and "facet" not in self.chosen_fields:
            probe = replace(probe, facet=available[0] if len(available) == 1 else available)
        probe.check_encoder(encoder)
        return adapt_image_size(probe, encoder, self.chosen_fields)

    def find_precomputable(
        self, later_probes: Sequence["PlannedProbe"], encoder: Encoder | EncoderIdentity
    ) -> list[Probe]:
        """Return the later probes that can reuse encoder outputs of this probe.

        The returned probes have the same dataset, precision and seed as this probe, and
        `can_precompute_for` of this probe returns True for each of them.

        Args:
            later_probes: Planned probes that run after this one.
            encoder: The encoder, to which the returned probes are adapted.
        """
        probes, inputs = list[Probe](), (self.dataset, self.dtype, self.seed)
        for other in later_probes:
            has_same_inputs = (other.dataset, other.dtype, other.seed) == inputs
            if has_same_inputs and self.probe.can_precompute_for(other.probe):
                # If a later probe does not fit, the error is reported when that probe runs.
                with suppress(ConfigurationError):
                    probes.append(other.adapt_to(encoder))
        return probes

    def shares_features_with(self, other: "PlannedProbe") -> bool:
        """Return whether both probes encode the same images in the same way.

        If the result is True, the second probe can reuse the features of the first probe.
        """
        one, another = (
            (x.probe.shares_features, x.probe.role, x.dataset, x.dtype) for x in (self, other)
        )
        return self.probe.shares_features and one == another

    def plan_secondary_protocols(self) -> list["PlannedProbe"]:
        """Return a copy of this planned probe for each secondary protocol of the probe.

        A protocol is a preset of the probe's settings. `--task all` runs the secondary protocols in
        addition to the default protocol. A secondary protocol is left out if it sets a field that
        the user or the dataset has already set.
        """
        plan: list[PlannedProbe] = []
        for name in self.probe.secondary_protocols:
            if self.chosen_fields.isdisjoint(load_protocol_file(self.probe, name)):
                overrides = (*self.overrides, f"{_PROTOCOL}={name}")
                config = probing_config(*self.task_and_dataset, overrides, self.root)
                plan.append(replace(self, probe=build(config, "probe"), overrides=overrides))
        return plan


def plan_probes(
    tasks: Sequence[str],
    datasets: Sequence[str],
    overrides: Sequence[str] = (),
    roots: Mapping[str, str] | None = None,
) -> list[PlannedProbe]:
    """Build the probe of each task for each dataset, without reading any image.

    Args:
        tasks: Names of probes, such as "tokencut".
        datasets: Names of datasets, such as "voc2012".
        overrides: KEY=VALUE settings.
        roots: Folders of datasets, by the name of the dataset.
    """
    return plan_request(ProbeRequest(tasks, datasets, overrides, roots or {}))


def plan_request(request: ProbeRequest) -> list[PlannedProbe]:
    """Combine tasks with the datasets that support them, and build each probe and dataset.

    No image is read. A setting such as `probe.tau=0.3` applies to all tasks that have this key. If
    `corrupt=` lists several corruptions, each pair of a task and a dataset is planned once for each
    corruption.

    Returns:
        The planned probes, ordered by dataset. For each dataset, slow probes come last. Probes of
        the same role, such as "segmentation", follow each other, because they can share features.

    Raises:
        ConfigurationError: A key does not exist, a value is invalid, or no dataset supports some of
            the tasks.
        DataError: No dataset supports any of the tasks. For example, the task tokencut needs boxes.
    """
    corruptions, overrides = parse_corruptions(request.overrides)
    pairs = [(task, dataset) for dataset in request.datasets for task in request.tasks]
    settings, ignored_by = _assign_overrides(overrides, pairs)
    datasets, views = dict[str, ListedDataset](), dict[str, Dataset]()
    checked_images = ReadabilityCache()
    plan = [
        _build_pair(pair, [*settings[pair], *corruption], request, datasets, views, checked_images)
        for corruption in corruptions
        for pair in pairs
    ]
    plan = _select_supported(plan, request)
    planned_tasks = {planned.task_and_dataset[0] for planned in plan}
    for override, tasks in ignored_by.items():
        if ignoring := sorted(tasks & planned_tasks):
            print_message(f"{override} is ignored by {', '.join(ignoring)}")
    if request.all_tasks:
        plan = [one for planned in plan for one in (planned, *planned.plan_secondary_protocols())]
        if slow := sorted({planned.probe.task for planned in plan if planned.probe.is_slow}):
            print_message(f"slow tasks run last: {', '.join(slow)}")

    def order(planned: PlannedProbe) -> tuple[int, bool, str]:
        dataset = request.datasets.index(planned.task_and_dataset[1])
        return dataset, planned.probe.is_slow, planned.probe.role

    return sorted(plan, key=order)


def require_images(plan: Sequence[PlannedProbe]) -> None:
    """Open all dataset splits that planned probes use, to report errors before the evaluation.

    Args:
        plan: Planned probes, as `plan_request` returns them.

    Raises:
        DataError: A split is incomplete, or scored images are also training images although this
            is not allowed.
    """
    for planned in share_datasets(plan):
        planned.require_images()


def share_datasets(plan: Sequence[PlannedProbe]) -> list[PlannedProbe]:
    """Return copies of planned probes in which each dataset caches the splits that it opens."""
    cached = {id(planned.dataset): CachedDataset(planned.dataset) for planned in plan}
    return [replace(planned, dataset=cached[id(planned.dataset)]) for planned in plan]


def evaluate(
    plan: Sequence[PlannedProbe],
    encoder: Encoder,
    store: ResultStore,
    *,
    layers: str | int | Sequence[int],
    device: torch.device,
    overwrite: bool = False,
    skip_unsupported: bool = False,
    allow_none: bool = False,
    features: FeatureCache | None = None,
    later_probes: Sequence[PlannedProbe] = (),
) -> list[Record]:
    """Evaluate an encoder with all planned probes, and return one record for each result.

    Results that are already in the results folder `store` are not computed again.

    Args:
        plan: Planned probes, as `plan_request` returns them.
        encoder: The encoder, with its weights loaded.
        store: Results folder with finished results, to which new results are added.
        layers: Block indices, 0-based, such as "all", "0,5,11" or -1.
        device: Device of the computation.
        overwrite: Compute finished results again.
        skip_unsupported: Leave out probes that cannot score this encoder or dataset, or whose code
            cannot be imported. A message is printed for each probe that is left out.
        allow_none: Return an empty list if all probes are left out, instead of raising an error.
        features: Cache of features that earlier calls computed.
        later_probes: Planned probes of later calls with the same encoder and blocks. To save
            forward passes, probes of this call may also compute the encoder outputs that later
            probes need.
    """
    records, left_out = list[Record](), list[str]()
    features = FeatureCache() if features is None else features
    for number, planned in enumerate(plan, start=1):
        count = f"{number} of {len(plan)}: " if len(plan) > 1 else ""
        following = [*plan[number:], *later_probes]
        try:
            indices = select_layers(planned.probe.facet_spec, layers, encoder.depth)
            probe = planned.adapt_to(encoder)
            _log_adaptations(planned, probe, encoder)
            changed = changed_settings(probe)
            if "image_size" not in planned.chosen_fields or not encoder.dynamic_image_size:
                # The encoder determined the image size, not the user.
                changed.pop("image_size", None)
            records += Evaluation(
                encoder=encoder,
                dataset=planned.dataset,
                probe=probe,
                changed=changed,
                layers=indices,
                seed=planned.seed,
                device=device,
                dtype=getattr(torch, planned.dtype),
                allow_overlap=planned.allow_overlap,
            ).run(
                store,
                say=lambda line, count=count: print_message(count + line),
                overwrite=overwrite,
                features=features,
                keep_features=any(map(planned.shares_features_with, following)),
                later_probes=planned.find_precomputable(following, encoder),
            )
        except UnreadableImageError as error:
            # A `ReadableDataset` checked its images before the run, so the file has changed since.
            if isinstance(planned.dataset, ReadableDataset):
                raise
            raise suggest_skipping(error) from error
        except (ConfigurationError, ImportError, SyntaxError) as error:
            if not skip_unsupported:
                raise
            reason = error if isinstance(error, ConfigurationError) else broken_file_error(error)
            left_out.append(f"{planned.probe.task} on {planned.dataset.name}: {reason}")
            print_message(f"left out: {left_out[-1]}")
    if len(left_out) == len(plan) and not allow_none:
        raise ConfigurationError(f"no requested task supports {encoder.name}: {left_out[0]}")
    return records


def _assign_overrides(
    overrides: Sequence[str], pairs: Sequence[_Pair]
) -> tuple[dict[_Pair, list[str]], dict[str, set[str]]]:
    """Decide which overrides (KEY=VALUE settings) apply to which pairs of a task and a dataset.

    Returns:
        The overrides that apply to each pair, and the names of the tasks that ignore each override.

    Raises:
        ConfigurationError: An override applies to no pair.
    """
    configs = {pair: _compose_with_choices(pair, overrides) for pair in pairs}
    settings: dict[_Pair, list[str]] = {pair: [] for pair in pairs}
    ignored_by: dict[str, set[str]] = {}
    tasks = {task for task, _ in pairs}
    for override in overrides:
        matches = [pair for pair in pairs if _override_applies(pair[0], configs[pair], override)]
        if override == f"{_PICTURES}=0":
            # Some probes score the figures that they draw, so 0 is not valid for them. They ignore
            # it if other tasks accept it. If no task accepts it, they raise an error.
            valid = [pair for pair in matches if _is_valid(pair, override)]
            invalid_tasks = {task for task, _ in matches} - {task for task, _ in valid}
            if invalid_tasks != tasks:
                matches, ignored_by[override] = valid, invalid_tasks
        elif not matches:
            raise _unknown_override_error(override, configs)
        elif override.partition("=")[0] not in (*BATCH_SIZE_KEYS, _PICTURES):
            ignored_by[override] = tasks - {task for task, _ in matches}
        for pair in matches:
            settings[pair].append(override)
    return settings, ignored_by


def _compose_with_choices(pair: _Pair, overrides: Sequence[str]) -> dict[str, Any]:
    """Compose the configuration of a task and a dataset, with only some overrides applied.

    Only overrides that select a config file, such as `probe.training=lbfgs`, or a protocol (a
    preset of settings) are applied. The selected files determine which other keys exist. An
    override such as `probe.tau=0.3` selects no file and is therefore ignored.
    """
    config = probing_config(*pair, ())
    chosen = [
        override
        for override in overrides
        if _selectable_names(override, pair[0], config)
        and _override_applies(pair[0], config, override)
    ]
    return probing_config(*pair, chosen)


def _selectable_names(override: str, task: str, config: dict[str, Any]) -> list[str]:
    """Return the names that an override such as `probe.protocol=dino` can select.

    An override can select a config file, or a protocol, which is a preset of a probe's settings.
    The list is empty for an override of an ordinary value, such as `probe.tau=0.3`. `config` is the
    configuration of the task.
    """
    key = override.partition("=")[0]
    if key == _PROTOCOL:
        return list_protocols(task, import_component(config["probe"][TARGET], f"probe.{TARGET}"))
    group = choice_group(key, {"probe": task})
    return choices(group) if group else []


def _override_applies(task: str, config: dict[str, Any], override: str) -> bool:
    """Return whether an override (a KEY=VALUE setting) applies to a task.

    Keys that do not begin with `probe.` or `dataset.`, such as `seed`, apply to every task.
    `config` is the configuration of the task with all of its keys.
    """
    key, _, value = override.partition("=")
    if names := _selectable_names(override, task, config):
        return value in names
    return not key.startswith(("probe.", "dataset.")) or has_key(config, key)


def _is_valid(pair: _Pair, override: str) -> bool:
    try:
        build(probing_config(*pair, [override]), "probe")
    except ConfigurationError:
        return False
    return True


def _unknown_override_error(
    override: str, configs: Mapping[_Pair, dict[str, Any]]
) -> ConfigurationError:
    key, _, value = override.partition("=")
    names = {
        name
        for (task, _), config in configs.items()
        for name in _selectable_names(override, task, config)
    }
    if names:
        message = f"unknown {key.removeprefix('probe.')} {format_value(value)}"
        return unknown_name_error(message, value, names, hint=(f"{escape_braces(key)}={{near}}",))
    # Some keys exist only for one choice. `probe.training.c_values` needs `probe.training=lbfgs`.
    parent = key.rpartition(".")[0]
    with_key = dict.fromkeys(
        f"{parent}={name}"
        for pair, config in configs.items()
        for name in _selectable_names(parent, pair[0], config)
        if has_key(probing_config(*pair, [f"{parent}={name}"]), key)
    )
    if with_key:
        ways = [(words,) for words in with_key]
        return ConfigurationError(
            f"{key} does not exist for the selected {parent}", hint=join_alternatives(*ways)
        )
    known = {name for config in configs.values() for name in list_keys(config)}
    owners = _find_tasks_with_key(key, dataset=next(iter(configs))[1])
    if not owners:
        return unknown_key_error(key, known)
    # A task without probe.image_size may have another key for the size of images.
    sides = sorted(name for name in known if name.endswith(SIZE_FIELDS))
    instead = [(f"{side}={{value}}",) for side in sides] if key.endswith(SIZE_FIELDS) else []
    return ConfigurationError(
        f"only {', '.join(owners)} {'has' if len(owners) == 1 else 'have'} the key {key}",
        hint=join_alternatives(*instead) or ("--task", ",".join(owners)),
    )


def _find_tasks_with_key(key: str, dataset: str) -> list[str]:
    tasks = []
    for task in choices("probe"):
        with suppress(BrokenFileError):
            if has_key(probing_config(task, dataset, ()), key):
                tasks.append(task)
    return tasks


def _build_pair(
    pair: _Pair,
    overrides: Sequence[str],
    request: ProbeRequest,
    datasets: dict[str, ListedDataset],
    views: dict[str, Dataset],
    checked_images: ReadabilityCache,
) -> PlannedProbe:
    """Build a dataset, and a probe with settings that suit the dataset.

    All calls for one request share the caches `datasets`, `views` and `checked_images`, and add new
    entries to these caches.

    Args:
        pair: Names of the task and the dataset.
        overrides: KEY=VALUE settings that apply to this task and dataset.
        request: The user's request.
        datasets: Cache of complete datasets, by their configuration.
        views: Cache of datasets with a selection or a corruption of images, by their configuration.
        checked_images: Cache that states which images can be read.
    """
    root = request.data_roots.get(pair[1])
    config = probing_config(*pair, overrides, root)
    kind = import_component(config["probe"][TARGET], f"probe.{TARGET}")
    if not issubclass(kind, Probe):
        address = config["probe"][TARGET]
        raise ConfigurationError(f"{address} must be a subclass of ssl_bench.evaluation.Probe")
    # Pairs with equal configurations share a dataset, so that its files are listed only once.
    key = config_to_yaml(config["dataset"])
    if key not in datasets:
        built = build(config, "dataset")
        built = built.with_sets(request.sets) if request.sets else built
        # What a dataset supports may depend on its files. This line then reads them, so that
        # errors are raised here.
        _ = built.supports
        datasets[key] = ListedDataset(built)
    full = datasets[key]
    dataset = full.dataset
    typed = {override.partition("=")[0] for override in overrides}
    adapted = [
        f"probe.{name}={value}"
        for name, value in kind.settings_for(dataset.supports).items()
        if f"probe.{name}" not in typed
    ]
    overrides = [*overrides, *adapted]
    config = probing_config(*pair, overrides, root) if adapted else config
    values = read_shared_values(config)
    # Keys such as `data.limit` and `corrupt` select or change images of the full dataset.
    requested = views.setdefault(f"{key} {values}", apply_shared_values(full, values))
    return PlannedProbe(
        probe=build(config, "probe"),
        dataset=leave_out_unreadable(requested, dataset, request.on_bad_image, checked_images),
        seed=values["seed"],
        dtype=values["dtype"],
        task_and_dataset=pair,
        overrides=tuple(overrides),
        root=root,
        allow_overlap=values["data.allow_overlap"],
    )


def _select_supported(plan: Sequence[PlannedProbe], request: ProbeRequest) -> list[PlannedProbe]:
    """Return the planned probes whose dataset has the annotations that the probe needs.

    If no requested dataset supports a task, an error is raised. With `--task all`, an unsupported
    task is left out with a message, and an error is only raised if no task at all is supported.

    Raises:
        ConfigurationError: No dataset supports some of the tasks.
        DataError: No requested dataset supports any of the tasks.
    """
    supported = [planned for planned in plan if planned.probe.role in planned.dataset.supports]
    tasks = {planned.task_and_dataset[0] for planned in supported}
    unsupported = [planned for planned in plan if planned.task_and_dataset[0] not in tasks]
    if supported and request.all_tasks and unsupported:
        print_message(f"left out: {_describe_missing(unsupported)}")
    elif unsupported:
        kind = ConfigurationError if supported else DataError
        fitting = ". ".join(
            f"Datasets with {ROLE_ANNOTATIONS[role]}: {', '.join(find_datasets(role))}"
            for role in dict.fromkeys(planned.probe.role for planned in unsupported)
        )
        raise kind(
            f"{_describe_missing(unsupported)}. {fitting}",
            hint=("--dataset", "{dataset}"),
        )
    return supported


def _describe_missing(plan: Sequence[PlannedProbe]) -> str:
    """Return a text about missing annotations, such as "folder has no boxes for tokencut"."""
    tasks = defaultdict[tuple[str, str], set[str]](set)
    for planned in plan:
        tasks[planned.dataset.name, ROLE_ANNOTATIONS[planned.probe.role]].add(planned.probe.task)
    return ", ".join(
        f"{dataset} has no {content} for {' and '.join(sorted(names))}"
        for (dataset, content), names in sorted(tasks.items())
    )


def _log_adaptations(planned: PlannedProbe, adapted: Any, encoder: Encoder) -> None:
    """Print the fields of a probe that were changed to fit the encoder or the dataset.

    `planned` contains the probe before these changes, and `adapted` is the probe after them.
    """
    changes = []
    for name in (item.name for item in fields(adapted)):
        old, new = getattr(planned.probe, name), getattr(adapted, name)
        # An image size of None stands for the encoder's native size, so it is not a change.
        if new != old and not (name == "image_size" and None in (old, new)):
            changes.append(f"{name}={new if isinstance(new, str) else format_value(new)}")
    if changes:
        fit = f"to fit encoder {encoder.name} and dataset {planned.dataset.name}"
        print_message(f"{adapted.task} uses {', '.join(changes)} {fit}")
