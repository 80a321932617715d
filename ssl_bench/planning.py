"""Which probe runs on which dataset: composed and built in full before anything is computed."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from omegaconf import DictConfig

from ssl_bench.composition.choices import choices, files, nearest
from ssl_bench.composition.components import TARGET, component_class
from ssl_bench.composition.compose import (
    as_yaml,
    build,
    choice_group,
    compose_config,
    has_key,
    keys,
    value_of,
    with_root,
)
from ssl_bench.composition.fields import Bits, Count, Place, Seed, require, shown
from ssl_bench.composition.presets import changed_settings, preset_values, protocols
from ssl_bench.data.corruptions import KEY as CORRUPT
from ssl_bench.data.corruptions import asked_corruptions
from ssl_bench.data.files.fingerprints import FingerprintKind
from ssl_bench.data.files.overlap import shared_files
from ssl_bench.data.files.readable import Looked, OnBadImage, as_readable
from ssl_bench.data.roles import OFFERED
from ssl_bench.data.samples import Dataset
from ssl_bench.data.views import ListedOnce, OpenedOnce, as_asked
from ssl_bench.errors import BrokenFile, ConfigurationError, DataError
from ssl_bench.evaluation import Evaluation, Probe
from ssl_bench.evaluation.image_size import fit_size, said_size
from ssl_bench.models import Encoder, EncoderIdentity
from ssl_bench.system.progress import say

if TYPE_CHECKING:
    import torch

PROTOCOL = "probe.protocol"
DType = Literal["float32", "float16", "bfloat16"]
"""As torch names them."""
Limit = Count | None
SHARED: Mapping[str, Any] = {
    "data.root": Place,
    "data.fingerprint": FingerprintKind,
    "data.bits": Bits,
    "data.limit": Limit,
    "data.allow_overlap": bool,
    CORRUPT: str | None,
    "seed": Seed,
    "dtype": DType,
}
"""What the keys take that belong to no component."""


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

    def fitted_to(self, encoder: Encoder | EncoderIdentity) -> "PlannedProbe":
        """With images of a size that the encoder takes, see `fit_size`, and a facet that it has.

        Raises:
            ConfigurationError: a size that was typed does not fit the encoder.
            UnfitEncoder: the probe has no answer for such blocks.
        """
        probe: Any = self.probe
        probe.require_fitting(encoder)
        instead, facet = encoder.instead, getattr(probe, "facet", ())
        asked = [facet] if isinstance(facet, str) else list(facet or ())
        fitting = list(dict.fromkeys(instead.get(name, name) for name in asked))
        if fitting != asked and "facet" not in self.typed:
            probe = replace(probe, facet=fitting[0] if len(fitting) == 1 else fitting)
        return replace(self, probe=fit_size(probe, encoder, self.typed))

    def in_further_protocols(self) -> list["PlannedProbe"]:
        """The same question in the protocols that its probe names to stand beside this one.

        None where a protocol was chosen, or a value that one of them has of its own.
        """
        found = []
        for name in self.probe.further_protocols:
            own = preset_values(self.probe, name)
            if self.typed.isdisjoint(own):
                overrides = (*self.overrides, f"{PROTOCOL}={name}")
                config = probing_config(*self.choice, overrides, self.root)
                found.append(replace(self, probe=build(config.probe), overrides=overrides))
        return found

    def evaluation(
        self, encoder: Encoder, layers: tuple[int, ...], device: "torch.device"
    ) -> Evaluation:
        """What computes the pending cells of this probe and one encoder.

        Raises:
            ConfigurationError: a size that was typed does not fit the encoder.
        """
        import torch

        probe = self.fitted_to(encoder).probe
        if said := said_size(self.probe, probe):
            say(f"{probe.task}, {encoder.name}: {said}")
        if (facet := getattr(probe, "facet", None)) != getattr(self.probe, "facet", None):
            lacking = " and ".join(encoder.instead)
            say(f"{probe.task}, {encoder.name}: facet {facet}, as it has no {lacking}")
        changed = changed_settings(probe)
        if "image_size" not in self.typed:
            # The preset's, but for what the encoder takes.
            changed.pop("image_size", None)
        return Evaluation(
            encoder=encoder,
            dataset=self.dataset,
            probe=probe,
            changed=changed,
            layers=layers,
            seed=self.seed,
            device=device,
            dtype=getattr(torch, self.dtype),
            allow_overlap=self.allow_overlap,
        )


def refuse(why: str) -> NoReturn:
    """What `plan_probes` does about tasks that nothing fits.

    Raises:
        ConfigurationError: always.
    """
    raise ConfigurationError(f"{why}; leave the task out or choose another --dataset")


def plan_probes(
    tasks: Sequence[str],
    datasets: Sequence[str],
    overrides: Sequence[str],
    roots: Mapping[str, str] | None = None,
    *,
    unfit: Callable[[str], None] = refuse,
    on_bad_image: OnBadImage | None = None,
) -> list[PlannedProbe]:
    """Pair tasks with the datasets that have what they need; `roots` says where those lie.

    `unfit` is told, in one line, why tasks are left out. `on_bad_image` is "fail", or "skip" for
    what can be read alone; without it each dataset has its own way.

    An override of `probe.` or `dataset.` reaches the tasks and datasets that have such a key; each
    corruption that `corrupt=` names makes a plan of its own.

    Raises:
        ConfigurationError: no task or dataset has the key, a value is wrong, or a task fits none of
            the datasets.
        DataError: nothing fits, such as tokencut on a dataset without boxes.
    """
    corruptions, overrides = asked_corruptions(overrides)
    pairs = [(task, dataset) for dataset in datasets for task in tasks]
    plain = [compose_config("probing", _base(*pair)) for pair in pairs]
    # What is chosen by name comes first, for it decides which keys there are.
    named = [[o for o in overrides if _names(o, p[0])] for p in pairs]
    defaults = [
        compose_config("probing", [*_base(*p), *(o for o in some if _takes(o, p[0], default))])
        for p, some, default in zip(pairs, named, plain, strict=True)
    ]
    for override in overrides:
        _require_taker(override, pairs, defaults)
    taken = [
        [o for o in overrides if _takes(o, pair[0], default)]
        for pair, default in zip(pairs, defaults, strict=True)
    ]
    listed: dict[str, Dataset] = {}
    looked = Looked()
    plan = [
        _build(pair, [*own, *one], (roots or {}).get(pair[1]), listed, looked, on_bad_image)
        for one in corruptions
        for pair, own in zip(pairs, taken, strict=True)
    ]
    fitting = [planned for planned in plan if planned.probe.role in planned.dataset.supports]
    if not fitting:
        raise DataError(f"{_misfit(plan)}; choose another --dataset")
    found = {planned.choice[0] for planned in fitting}
    if without := [planned for planned in plan if planned.choice[0] not in found]:
        unfit(_misfit(without))
    return fitting


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


def dataset_roots(text: str | None, datasets: Sequence[str]) -> dict[str, str]:
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
            f"expected --data-root DIR or DATASET=DIR,DATASET=DIR, got {text!r}; "
            f"datasets: {', '.join(known)}"
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
        f"{' and '.join(datasets)} is generated and takes no --data-root; leave it out, or say "
        "what lies there: --dataset folder for pictures, class_folders, voc2012 and others"
    )


def _base(task: str, dataset: str) -> list[str]:
    return [f"probe={task}", f"dataset={dataset}"]


def probing_config(
    task: str, dataset: str, overrides: Sequence[str], root: str | None = None
) -> DictConfig:
    """What is composed for a task on a dataset; `probe.protocol=NAME` takes all of its values.

    Raises:
        ConfigurationError: unknown choice, key or a value of the wrong type.
    """
    return compose_config("probing", [*_base(task, dataset), *with_root(overrides, root)])


def shared_values(config: DictConfig) -> dict[str, Any]:
    """What the keys of `SHARED` hold that are composed; a command on data alone has only those.

    Raises:
        ConfigurationError: one of them takes no such value.
    """
    values = {key: value_of(config, key) for key in SHARED if key.split(".")[0] in config}
    for key, value in values.items():
        require(key, SHARED[key], value)
    return values


def views_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The forms in which `shared_values` ask for a dataset, but for a corruption."""
    return {name: values[f"data.{name}"] for name in ("fingerprint", "bits", "limit")}


def _build(
    choice: tuple[str, str],
    overrides: Sequence[str],
    root: str | None,
    listed: dict[str, Dataset],
    looked: Looked,
    on_bad_image: OnBadImage | None,
) -> PlannedProbe:
    config = probing_config(*choice, overrides, root)
    if fitting := _chosen_by_data(config, overrides):
        overrides = [*overrides, *fitting]
        config = probing_config(*choice, overrides, root)
    values = shared_values(config)
    views = views_of(values)
    # Whatever is asked of it, alike in all tasks and before and after a corruption.
    built = build(config.dataset)
    dataset = listed.setdefault(as_yaml(config.dataset), ListedOnce(built))
    whole = f"{as_yaml(config.dataset)} {views} {values[CORRUPT]}"
    view = listed.setdefault(whole, as_asked(dataset, **views, corrupt=values[CORRUPT]))
    probe = build(config.probe)
    if not isinstance(probe, Probe):
        address = config.probe[TARGET]
        raise ConfigurationError(f"{address} must be a subclass of ssl_bench.evaluation.Probe")
    return PlannedProbe(
        probe=probe,
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
    typed = {override.partition("=")[0] for override in overrides}
    chosen = []
    for field in ("protocol", "truth", "max_side"):
        by_role: Mapping[str, Any] = getattr(kind, f"{field}s_by_role", {})
        if not by_role or f"probe.{field}" in typed:
            continue
        dataset: Dataset = build(config.dataset)
        fitting = [value for role, value in by_role.items() if role in dataset.supports]
        usual = value_of(config, f"probe.{field}")
        if fitting and usual not in fitting:
            chosen.append(f"probe.{field}={fitting[0]}")
    return chosen


def _names(override: str, task: str) -> list[str]:
    """What the key of an override can be for a task, where that is the name of a file."""
    group = choice_group(override.partition("=")[0], {"probe": task})
    return choices(group) if group else []


def _takes(override: str, task: str, default: DictConfig) -> bool:
    key, _, value = override.partition("=")
    known = _protocols(task, default) if key == PROTOCOL else _names(override, task)
    if known:
        return value in known
    if key.startswith(("probe.", "dataset.")):
        return has_key(default, key)
    return True


def _protocols(task: str, default: DictConfig) -> list[str]:
    """Those that a task has; none where its probe takes any."""
    return protocols(task, component_class(default.probe[TARGET], f"probe.{TARGET}"))


def _require_taker(
    override: str, pairs: Sequence[tuple[str, str]], defaults: Sequence[DictConfig]
) -> None:
    tasks = [task for task, _ in pairs]
    takers = zip(tasks, defaults, strict=True)
    if any(_takes(override, task, default) for task, default in takers):
        return
    key, _, value = override.partition("=")
    known = {name for task in tasks for name in _names(override, task)}
    if key == PROTOCOL:
        known |= {p for t, d in zip(tasks, defaults, strict=True) for p in _protocols(t, d)}
    if known:
        raise ConfigurationError(
            f"unknown {key.removeprefix('probe.')} {shown(value)}; {nearest(value, known)}"
        )
    _refuse_key(key, {name for default in defaults for name in keys(default)}, tasks, pairs[0][1])


def _refuse_key(key: str, known: set[str], tasks: Sequence[str], dataset: str) -> NoReturn:
    owners = [task for task in choices("probe") if _has_key(task, dataset, key)]
    if named := _having(key, tasks, dataset):
        raise ConfigurationError(f"{key} is a setting of {' or '.join(named)} alone")
    if owners:
        raise ConfigurationError(f"{key} is a setting of --task {', '.join(owners)} alone")
    raise ConfigurationError(f"unknown key {shown(key)}; {nearest(key, known)}")


def _has_key(task: str, dataset: str, key: str) -> bool:
    """Whether a task takes a key; what cannot be imported takes none."""
    try:
        return has_key(compose_config("probing", _base(task, dataset)), key)
    except BrokenFile:
        return False


def _having(key: str, tasks: Sequence[str], dataset: str) -> list[str]:
    """Choices by name under which a key exists, such as "probe.training=lbfgs"."""
    part = key.rpartition(".")[0]
    found = []
    for task in tasks:
        for name in _names(f"{part}=", task):
            chosen = f"{part}={name}"
            if has_key(compose_config("probing", [*_base(task, dataset), chosen]), key):
                found.append(chosen)
    return list(dict.fromkeys(found))
