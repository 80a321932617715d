"""From what people type to probes and datasets that fit; and the evaluation of one encoder."""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from omegaconf import DictConfig

from ssl_bench.composition.choices import (
    choices,
    files,
    parse_names,
    require_choice,
    unknown_key_error,
    unknown_name_error,
)
from ssl_bench.composition.compose import (
    TARGET,
    add_data_root,
    build,
    changed_settings,
    choice_group,
    component_class,
    compose_config,
    config_to_yaml,
    get_value,
    has_key,
    keys,
    load_protocol_file,
    protocols,
)
from ssl_bench.composition.fields import shown
from ssl_bench.data.corruptions import asked_corruptions
from ssl_bench.data.files.readable import (
    Looked,
    OnBadImage,
    ReadableDataset,
    as_readable,
    shared_files,
    with_a_way_out,
)
from ssl_bench.data.roles import OFFERED
from ssl_bench.data.samples import Dataset
from ssl_bench.data.splits import DType, ListedOnce, OpenedOnce, as_asked, shared_values
from ssl_bench.errors import (
    BrokenFile,
    ConfigurationError,
    DataError,
    MachineError,
    UnreadableImage,
    broken_file_error,
    escape_braces,
    join_alternatives,
)
from ssl_bench.evaluation import Evaluation, PassedImages, Probe, fit_size
from ssl_bench.layers import layers_of
from ssl_bench.models import Encoder, EncoderIdentity
from ssl_bench.results import Record, ResultStore
from ssl_bench.system.files import remove_orphans, remove_orphans_below
from ssl_bench.system.progress import say

PROTOCOL = "probe.protocol"
BATCH_SIZES = ("probe.batch_size", "probe.encoder_batch_size")
"""What --batch-size is short for."""
PICTURES = "probe.panels"
"""What --pictures is short for."""


@dataclass(frozen=True)
class PlannedProbe:
    """A probe and a dataset that fit, built from the configuration.

    Attributes:
        choice: Names of the files of `configs/probe` and `configs/dataset`.
        overrides: Those that reach this probe and this dataset.
        root: Where the dataset lies.
    """

    probe: Probe
    dataset: Dataset
    seed: int
    dtype: DType
    choice: tuple[str, str]
    overrides: tuple[str, ...]
    root: str | None
    allow_overlap: bool

    def require_images(self) -> None:
        """Make sure, before a model is loaded, that all files the probe needs are there.

        Raises:
            DataError: some are not, a split is empty, or an image that is scored is a file that
                something is fitted to.
        """
        scored, fitted = self.probe.split(self.dataset), self.probe.training_images(self.dataset)
        if fitted is not None:
            shared_files(fitted, scored, allowed=self.allow_overlap)

    @property
    def typed(self) -> frozenset[str]:
        """Fields of the probe whose values are no preset's."""
        keys = (override.partition("=")[0] for override in self.overrides)
        return frozenset(key.removeprefix("probe.") for key in keys if key.startswith("probe."))

    def fitted_to(self, encoder: Encoder | EncoderIdentity) -> Probe:
        """The probe with what encoder and images allow where nobody typed a value.

        Raises:
            ConfigurationError: a size that was typed does not fit the encoder.
            UnfitEncoder: the probe has no answer for such blocks.
        """
        probe: Any = self.probe.fitted_to_images(self.dataset, self.typed)
        instead, facet = encoder.instead, probe.facet
        asked = [facet] if isinstance(facet, str) else list(facet or ())
        fitting = list(dict.fromkeys(instead.get(name, name) for name in asked))
        if fitting != asked and "facet" not in self.typed:
            probe = replace(probe, facet=fitting[0] if len(fitting) == 1 else fitting)
        probe.require_fitting(encoder)
        return fit_size(probe, encoder, self.typed)

    def served(
        self, later: Sequence["PlannedProbe"], encoder: Encoder | EncoderIdentity
    ) -> list[Probe]:
        """Return the probes among later plans that this one serves, fitted to an encoder."""
        found = []
        for one in later:
            alike = (one.dataset, one.dtype, one.seed) == (self.dataset, self.dtype, self.seed)
            if alike and self.probe.serves(one.probe):
                # One that does not fit says so when its turn comes.
                with suppress(ConfigurationError):
                    found.append(one.fitted_to(encoder))
        return found

    def in_secondary_protocols(self) -> list["PlannedProbe"]:
        """The same question in the protocols that its probe names to stand beside this one.

        None where a protocol was chosen, or a value that one of them has of its own.
        """
        found: list[PlannedProbe] = []
        for name in self.probe.further_protocols:
            own = load_protocol_file(self.probe, name)
            if self.typed.isdisjoint(own):
                overrides = (*self.overrides, f"{PROTOCOL}={name}")
                config = probing_config(*self.choice, overrides, self.root)
                found.append(replace(self, probe=build(config.probe), overrides=overrides))
        return found


def evaluate(
    plan: Sequence[PlannedProbe],
    encoder: Encoder,
    store: ResultStore,
    *,
    layers: str | int | Sequence[int],
    device: torch.device,
    overwrite: bool = False,
    needs_all: bool = True,
    needs_any: bool = True,
    passed: PassedImages | None = None,
    later: Sequence[PlannedProbe] = (),
) -> list[Record]:
    """Records of an encoder in all planned probes; finished cells are not computed again.

    Args:
        plan: As of `plan_probes`.
        encoder: Its blocks are asked.
        store: Where finished cells are looked up and new ones go.
        layers: As `ssl_bench.layers.resolve_layers` takes them.
        device: Where it computes.
        overwrite: Compute finished cells again.
        needs_all: Else what does not fit the encoder or the data is said and left out.
        needs_any: Nor may all be left out.
        passed: What earlier plans got from the same images.
        later: Plans of the same encoder and blocks that follow in other calls.

    Raises:
        ConfigurationError: A probe that is needed does not fit.
    """
    records, left_out, passed = list[Record](), list[str](), passed or PassedImages()
    for number, planned in enumerate(plan, start=1):
        # So that one sees how much of all tasks is left.
        where = f"{number} of {len(plan)}: " if len(plan) > 1 else ""
        try:
            asked = layers_of(planned.probe.asked_facets, layers, encoder.depth)
            probe = planned.fitted_to(encoder)
            _say_fitted(planned.probe, probe, encoder)
            changed = changed_settings(probe)
            if "image_size" not in planned.typed or not encoder.any_size:
                # The preset's, but for what the encoder takes.
                changed.pop("image_size", None)
            records += Evaluation(
                encoder=encoder,
                dataset=planned.dataset,
                probe=probe,
                changed=changed,
                layers=asked,
                seed=planned.seed,
                device=device,
                dtype=getattr(torch, planned.dtype),
                allow_overlap=planned.allow_overlap,
            ).run(
                store,
                say=lambda line, where=where: say(where + line),
                overwrite=overwrite,
                passed=passed,
                later=planned.served([*plan[number:], *later], encoder),
            )
        except UnreadableImage as error:
            # Of images that were looked through, one was replaced since.
            if isinstance(planned.dataset, ReadableDataset):
                raise
            raise with_a_way_out(error) from error
        except (ConfigurationError, ImportError, SyntaxError) as error:
            if needs_all and needs_any:
                raise
            why = error if isinstance(error, ConfigurationError) else broken_file_error(error)
            left_out.append(f"{planned.probe.task} on {planned.dataset.name}: {why}")
            say(f"left out: {left_out[-1]}")
    if len(left_out) == len(plan) and needs_any:
        raise ConfigurationError(f"no task was left for {encoder.name}: {left_out[0]}")
    return records


def _say_fitted(asked: Probe, fitted: Probe, encoder: Encoder) -> None:
    """Tell what the encoder is asked that nobody typed and that is not the preset's."""
    where = f"{fitted.task}, {encoder.name}"
    if fitted.squash != asked.squash:
        side = f"{fitted.squash} x {fitted.squash} pixels"
        say(f"{where}: images are squashed to {side}, the only size the encoder takes")
    elif not encoder.any_size and fitted.settings().get("image_size", 0) is None:
        side = "{} x {} pixels".format(*encoder.native_size)
        say(f"{where}: images of {side}, the only size the encoder takes")
    elif asked.image_size is not None and fitted.image_size not in (None, asked.image_size):
        side = f"{fitted.image_size} x {fitted.image_size} pixels"
        say(f"{where}: images of {side} instead of {asked.image_size}, as the encoder takes them")
    if fitted.facet != asked.facet:
        say(f"{where}: facet {fitted.facet}, as it has no {' and '.join(encoder.instead)}")
    if (some := getattr(fitted, "neighbours", None)) != getattr(asked, "neighbours", None):
        say(f"{fitted.task}: probe.neighbours={shown(some)}, as there are no more images")


def asked_probes(options: argparse.Namespace, overrides: Sequence[str]) -> list[PlannedProbe]:
    """The probes and datasets of the flags that `probe` and `sweep` share; all files are there.

    Raises:
        ConfigurationError: a task, a dataset, a key or a value is wrong.
        DataError: nothing fits, or files are missing.
    """
    plan = planned_probes(options, overrides)
    for planned in sharing_datasets(plan):
        planned.require_images()
    return plan


def require_on_bad_image(options: argparse.Namespace) -> None:
    """Refuse what --on-bad-image does not take; without it each dataset has its own way."""
    if options.on_bad_image is not None:
        require_choice("--on-bad-image", options.on_bad_image, get_args(OnBadImage))


def planned_probes(options: argparse.Namespace, overrides: Sequence[str]) -> list[PlannedProbe]:
    """As `asked_probes`, before any file is looked for."""
    tasks = parse_names("task", options.task, choices("probe"))
    if options.task == "all":
        tasks = _importable(tasks)
    datasets = parse_names("dataset", options.dataset, choices("dataset"))
    require_on_bad_image(options)
    roots = parse_data_roots(options.data_root, datasets)
    sizes = [] if options.batch_size is None else _batch_sizes(tasks, options.batch_size)
    plan = plan_probes(
        tasks,
        datasets,
        [*sizes, *overrides],
        roots,
        leaves_out=options.task == "all",
        on_bad_image=options.on_bad_image,
    )
    if options.task == "all":
        plan = [one for planned in plan for one in (planned, *planned.in_secondary_protocols())]
        if slow := sorted({one.probe.task for one in plan if one.probe.takes_long}):
            say(f"last: {', '.join(slow)}, where an image passes the encoder many times")

    def order(one: PlannedProbe) -> tuple[int, bool, str]:
        # Those of a dataset that look at the same images follow each other, so that what passed
        # the encoder for one need not be held for long.
        return datasets.index(one.choice[1]), one.probe.takes_long, one.probe.role

    return sorted(plan, key=order)


def _importable(tasks: Sequence[str]) -> list[str]:
    """The tasks whose files can be imported; a mistake in one is said, and the others go on."""
    found = []
    for task in tasks:
        try:
            compose_config("probing", [f"probe={task}"])
            found.append(task)
        except BrokenFile as error:
            say(f"left out: {task}: {error}")
    return found


def _batch_sizes(tasks: Sequence[str], size: int) -> list[str]:
    """What --batch-size is short for: no score hangs on how many images the encoder takes."""
    configs = [compose_config("probing", [f"probe={task}"]) for task in tasks]
    taken = [key for key in BATCH_SIZES if any(has_key(config, key) for config in configs)]
    if not taken:
        training = [c for c in configs if has_key(c, "probe.training.batch_size")]
        raise ConfigurationError(
            f"--batch-size is not for {', '.join(tasks)}, which choose how many images the "
            "encoder takes at once themselves",
            hint=(f"probe.training.batch_size={size}",) if training else (),
        )
    return [f"{key}={size}" for key in taken]


def plan_probes(
    tasks: Sequence[str],
    datasets: Sequence[str],
    overrides: Sequence[str],
    roots: Mapping[str, str] | None = None,
    *,
    leaves_out: bool = False,
    on_bad_image: OnBadImage | None = None,
) -> list[PlannedProbe]:
    """Pair tasks with the datasets that have what they need; `roots` says where those lie.

    With `leaves_out` tasks that nothing fits are said and left out. `on_bad_image` is "fail", or
    "skip" for what can be read alone; without it each dataset has its own way.

    An override of `probe.` or `dataset.` reaches the tasks and datasets that have such a key; each
    corruption that `corrupt=` names makes a plan of its own.

    Raises:
        ConfigurationError: no task or dataset has the key, a value is wrong, or a task fits none of
            the datasets.
        DataError: nothing fits, such as tokencut on a dataset without boxes.
    """
    corruptions, overrides = asked_corruptions(overrides)
    pairs = [_Pair(task, dataset, overrides) for dataset in datasets for task in tasks]
    unconcerned = dict[str, set[str]]()
    for override in overrides:
        takers = {pair.task for pair in pairs if override in pair.taken}
        others = {pair.task for pair in pairs} - takers
        if override == f"{PICTURES}=0":
            if not takers:
                # A task without pictures draws none already.
                continue
            scoring = [
                pair for pair in pairs if override in pair.taken and not pair.builds(override)
            ]
            drawing = {pair.task for pair in scoring}
            if drawing < takers | others:
                # What scores the images that it draws keeps its number beside other tasks.
                for pair in scoring:
                    pair.taken.remove(override)
                unconcerned[override] = drawing
        if not takers:
            raise _refused(override, pairs)
        # What --batch-size and --pictures are short for reaches whom it may.
        if others and override.partition("=")[0] not in (*BATCH_SIZES, PICTURES):
            unconcerned[override] = others
    listed, looked = dict[str, Dataset](), Looked()
    plan = [
        _build(pair, one, (roots or {}).get(pair.dataset), listed, looked, on_bad_image)
        for one in corruptions
        for pair in pairs
    ]
    fitting = [planned for planned in plan if planned.probe.role in planned.dataset.supports]
    if not fitting:
        raise DataError(f"{_misfit(plan)}; choose another dataset", hint=("--dataset", "{dataset}"))
    found = {planned.choice[0] for planned in fitting}
    if without := [planned for planned in plan if planned.choice[0] not in found]:
        if not leaves_out:
            raise ConfigurationError(
                f"{_misfit(without)}; leave the task out or choose another dataset",
                hint=("--dataset", "{dataset}"),
            )
        say(f"left out: {_misfit(without)}")
    # Of a task that is not run there is nothing to say.
    lines = [
        f"{override} does not concern {', '.join(sorted(others & found))}"
        for override, others in unconcerned.items()
        if others & found
    ]
    if lines:
        say("; ".join(lines))
    return fitting


class _Pair:
    """A task and a dataset by their names, and which overrides reach them.

    Attributes:
        default: What is composed with the choices by name among the overrides, which decide what
            other keys there are.
        taken: The overrides that it takes.
    """

    def __init__(self, task: str, dataset: str, overrides: Sequence[str]) -> None:
        self.task, self.dataset = task, dataset
        self.default = self.composed()
        self.default = self.composed(*(o for o in overrides if self.names(o) and self._takes(o)))
        self.taken = [override for override in overrides if self._takes(override)]

    def composed(self, *overrides: str) -> DictConfig:
        return probing_config(self.task, self.dataset, overrides)

    def builds(self, override: str) -> bool:
        """Return whether its probe takes the value of an override."""
        try:
            build(self.composed(override).probe)
        except ConfigurationError:
            return False
        return True

    def names(self, override: str) -> list[str]:
        """What its key can be, where that is the name of a file or a protocol."""
        key = override.partition("=")[0]
        if key == PROTOCOL:
            kind = component_class(self.default.probe[TARGET], f"probe.{TARGET}")
            return protocols(self.task, kind)
        group = choice_group(key, {"probe": self.task})
        return choices(group) if group else []

    def _takes(self, override: str) -> bool:
        key, _, value = override.partition("=")
        if names := self.names(override):
            return value in names
        return not key.startswith(("probe.", "dataset.")) or has_key(self.default, key)


_SIDES = ("image_size", "max_side", "longer_side", "squash")
"""How settings end that say how large an image is when an encoder sees it."""


def _refused(override: str, pairs: Sequence[_Pair]) -> ConfigurationError:
    """Why nothing takes an override, with the nearest name or who would take it."""
    key, _, value = override.partition("=")
    if known := {name for pair in pairs for name in pair.names(override)}:
        what = key.removeprefix("probe.")
        message, hint = f"unknown {what} {shown(value)}", (f"{escape_braces(key)}={{near}}",)
        return unknown_name_error(message, value, known, hint=hint)
    part = key.rpartition(".")[0]
    # Such as "probe.training=lbfgs".
    chosen = [(p, f"{part}={name}") for p in pairs for name in p.names(part)]
    named = [words for pair, words in chosen if has_key(pair.composed(words), key)]
    if named:
        ways = [(words,) for words in dict.fromkeys(named)]
        return ConfigurationError(
            f"{key} is not a setting of this choice", hint=join_alternatives(*ways)
        )
    owners = []
    for task in choices("probe"):
        # What cannot be imported takes none.
        with suppress(BrokenFile):
            if has_key(probing_config(task, pairs[0].dataset, ()), key):
                owners.append(task)
    if owners:
        own = sorted(
            {name for pair in pairs for name in keys(pair.default) if name.endswith(_SIDES)}
        )
        instead = [(f"{side}={{value}}",) for side in own] if key.endswith(_SIDES) else []
        typed = f"--pictures ({key})" if key == PICTURES else key
        return ConfigurationError(
            f"{typed} is a setting of {', '.join(owners)} alone",
            hint=join_alternatives(*instead) or ("--task", ",".join(owners)),
        )
    return unknown_key_error(key, {name for pair in pairs for name in keys(pair.default)})


def sharing_datasets(plan: Sequence[PlannedProbe]) -> list[PlannedProbe]:
    """The same questions, each dataset opened and its files known once for all of them."""
    opened: list[OpenedOnce] = []
    for planned in plan:
        if not any(planned.dataset == one.dataset for one in opened):
            opened.append(OpenedOnce(planned.dataset))
    return [
        replace(planned, dataset=next(one for one in opened if one.dataset == planned.dataset))
        for planned in plan
    ]


def _misfit(plan: Sequence[PlannedProbe]) -> str:
    tasks = defaultdict[tuple[str, str], set[str]](set)
    for one in plan:
        others = {} if "truth" in one.typed else one.probe.truths_by_role
        wanted = " or ".join(dict.fromkeys(OFFERED[role] for role in others or [one.probe.role]))
        tasks[one.dataset.name, wanted].add(one.probe.task)
    return "; ".join(
        f"{dataset} has no {what} for {' and '.join(sorted(asked))}"
        for (dataset, what), asked in sorted(tasks.items())
    )


def parse_data_roots(text: str | None, datasets: Sequence[str]) -> dict[str, str]:
    """Where each dataset lies, from `DIR` for all of them or `NAME=DIR,NAME=DIR`.

    Raises:
        ConfigurationError: some parts begin with the name of a dataset and others do not, or what
            is named lies nowhere.
    """
    if text is None:
        return {}
    pairs = [part.partition("=") for part in text.split(",")]
    known = choices("dataset")
    named = [bool(equals) and name.strip() in known for name, equals, _ in pairs]
    if not any(named):
        if not any(map(_lies_somewhere, datasets)):
            raise _takes_no_root(datasets)
        return dict.fromkeys(datasets, text)
    if not all(named):
        raise ConfigurationError(
            f"expected one folder or one for each dataset, got {text!r}; "
            f"datasets: {', '.join(known)}",
            hint=("--data-root", "{dataset}={folder},{other_dataset}={other_folder}"),
        )
    roots = {name.strip(): root for name, _, root in pairs}
    if nowhere := [name for name in roots if not _lies_somewhere(name)]:
        raise _takes_no_root(nowhere)
    return roots


def _lies_somewhere(dataset: str) -> bool:
    """Whether --data-root can say where; of other packages' datasets nobody knows."""
    ours = dataset in files("dataset")
    return not ours or has_key(compose_config("data", [f"dataset={dataset}"]), "dataset.root")


def _takes_no_root(datasets: Sequence[str]) -> ConfigurationError:
    return ConfigurationError(
        f"{' and '.join(datasets)} is generated and lies in no folder; leave --data-root out, or "
        "name the dataset in it",
        hint=("--dataset", "folder", "--data-root", "{folder}"),
    )


def probing_config(
    task: str, dataset: str, overrides: Sequence[str], root: str | None = None
) -> DictConfig:
    """What is composed for a task on a dataset; `probe.protocol=NAME` takes all of its values.

    Raises:
        ConfigurationError: unknown choice, key or a value of the wrong type.
    """
    base = [f"probe={task}", f"dataset={dataset}"]
    return compose_config("probing", [*base, *add_data_root(overrides, root)])


def _build(
    pair: _Pair,
    corruption: Sequence[str],
    root: str | None,
    listed: dict[str, Dataset],
    looked: Looked,
    on_bad_image: OnBadImage | None,
) -> PlannedProbe:
    choice, overrides = (pair.task, pair.dataset), [*pair.taken, *corruption]
    config = probing_config(*choice, overrides, root)
    if fitting := _chosen_by_data(config, overrides):
        overrides = [*overrides, *fitting]
        config = probing_config(*choice, overrides, root)
    values = shared_values(config)
    # Whatever is asked of it, alike in all tasks and before and after a corruption.
    built = build(config.dataset)
    dataset = listed.setdefault(config_to_yaml(config.dataset), ListedOnce(built))
    view = listed.setdefault(
        f"{config_to_yaml(config.dataset)} {values}", as_asked(dataset, values)
    )
    return PlannedProbe(
        probe=build(config.probe),
        dataset=as_readable(view, built, on_bad_image, looked),
        seed=values["seed"],
        dtype=values["dtype"],
        choice=choice,
        overrides=tuple(overrides),
        root=root,
        allow_overlap=values["data.allow_overlap"],
    )


def _chosen_by_data(config: DictConfig, overrides: Sequence[str]) -> list[str]:
    """The protocol, ground truth or size that fits a dataset, of a probe that takes several.

    Nothing where one is named, the usual one fits, or none does.
    """
    kind = component_class(config.probe[TARGET], f"probe.{TARGET}")
    if not issubclass(kind, Probe):
        address = config.probe[TARGET]
        raise ConfigurationError(f"{address} must be a subclass of ssl_bench.evaluation.Probe")
    typed = {override.partition("=")[0] for override in overrides}
    chosen = []
    by_field: dict[str, Mapping[str, Any]] = {
        "protocol": kind.protocols_by_role,
        "truth": kind.truths_by_role,
        "max_side": kind.max_sides_by_role,
    }
    for field, by_role in by_field.items():
        if not by_role or f"probe.{field}" in typed:
            continue
        dataset: Dataset = build(config.dataset)
        fitting = [value for role, value in by_role.items() if role in dataset.supports]
        usual = get_value(config, f"probe.{field}")
        if fitting and usual not in fitting:
            chosen.append(f"probe.{field}={fitting[0]}")
    return chosen


def require_writable(folder: Path) -> None:
    """Find out before hours of work whether results can be saved, without making their folder.

    Raises:
        MachineError: they cannot.
    """
    try:
        places = (folder, *folder.absolute().parents)
        with tempfile.TemporaryFile(dir=next(place for place in places if place.exists())):
            pass
    except OSError as error:
        raise MachineError(
            f"cannot write into {folder}: {error.strerror}; choose another folder",
            hint=("--out", "{folder}"),
        ) from error


def opened_store(folder: str) -> ResultStore:
    """A store that can be written, without what killed writers left there."""
    store = ResultStore(Path(folder))
    require_writable(store.root)
    store.root.mkdir(parents=True, exist_ok=True)
    for name in ("records", "images", "pictures"):
        remove_orphans_below(store.root / name)
    remove_orphans(store.root)
    return store
