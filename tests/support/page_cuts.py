"""The commands of the pages cut down to seconds, on what `page_places` put there."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig

from ssl_bench.composition.choices import choices
from ssl_bench.composition.compose import compose_config, has_key, with_root
from ssl_bench.errors import ConfigurationError
from ssl_bench.reproduce import tables_of

TRAINING: Mapping[str, object] = {
    "model.dim": 24,
    "model.depth": 2,
    "model.num_heads": 2,
    "model.head_width": 8,
    "model.num_states": 4,
    "model.kernel_size": 3,
    "objective.out_dim": 32,
    "objective.hidden_dim": 16,
    "objective.bottleneck_dim": 8,
    "objective.crops.num_locals": 2,
    "objective.freeze_last_layer_epochs": 0.0,
    "objective.teacher_temperature_epochs": 0.0,
    "objective.decoder_dim": 24,
    "objective.decoder_heads": 2,
    "objective.decoder_depth": 1,
    "objective.test_lengths": "[4]",
    "train.batch_size": 2,
    "train.max_steps": 2,
    "train.num_workers": 0,
    "train.warmup_epochs": 0.0,
    "train.repeats": 1,
    "monitor.knn_epochs": "null",
    "data.in_memory": "false",
}
PROBING: Mapping[str, object] = {
    "probe.training.epochs": 1,
    "probe.num_images": 2,
    "probe.panels": 2,
    "probe.num_points": 16,
    "probe.view_images": 2,
    "probe.pool.queries": 4,
    "probe.pool.epochs": 1,
    "dataset.num_train": 4,
    "dataset.num_val": 3,
}
HERE = {"FILE": "FILE.safetensors", "FILE_OR_URI": "FILE.safetensors", "runs/mixer": "mixer"}
RUNS = {"RUN": "runs/skip", "OTHER": "runs/skipless"}
PUBLISHED = re.compile(r"(timm:\w+)\.\w+")


def cut_down(words: Sequence[str], place: Path) -> list[str]:
    """The same command with few steps and small sizes, on what `furnish` put there."""
    found = [re.sub(r"(^|=|,)/(?=data|photos|classes|shared)", rf"\1{place}/", w) for w in words]
    here = HERE | (RUNS if found[0] == "compare" else {})
    found = [PUBLISHED.sub(r"\1", here.get(word, word)) for word in found]
    found = [re.sub(r"^(corrupt=.*):1-5$", r"\1:5", word) for word in found]
    if "--pictures" in found:
        place_of = found.index("--pictures")
        found = [*found[:place_of], *found[place_of + 2 :]]
    if found[0] in ("probe", "sweep"):
        if "--jobs" in found and "--task" not in found:
            found += ["--task", "pca"]
        return [*_without_slurm(found), *_small(found, PROBING, _probing(found))]
    if found[0] == "pretrain":
        return _trained_briefly(found, _pretraining(found))
    if found[0] == "reproduce" and "--run" in found:
        (table,) = tables_of(found[1])
        name = next(iter(table.runs.values()))
        return _trained_briefly(found, compose_config("pretraining", [f"experiment={name}"]))
    if found[:2] == ["data", "check"] and "--subset" not in found and "DIR" not in found:
        return [*found, "--subset"]
    return found


def _trained_briefly(words: Sequence[str], config: DictConfig) -> list[str]:
    changes = dict(_changes(words, TRAINING, [config]))
    if "--batch-size" in words:
        changes["--batch-size"] = changes.pop("train.batch_size")
        place = words.index("--batch-size")
        words = [*words[:place], *words[place + 2 :]]
    kept = [word for word in words if word.partition("=")[0] not in changes]
    return [*kept, *(f"{key}={value}" for key, value in changes.items())]


def _without_slurm(words: Sequence[str]) -> list[str]:
    """`--print` in place of `--slurm` and its flags, each of which takes one word."""
    if "--slurm" not in words:
        return list(words)
    dropped = {n + more for n, w in enumerate(words) for more in (0, 1) if w.startswith("--slurm-")}
    kept = [word for number, word in enumerate(words) if number not in dropped]
    return ["--print" if word == "--slurm" else word for word in kept]


def _pretraining(words: Sequence[str]) -> DictConfig:
    root = next((w for flag, w in itertools.pairwise(words) if flag == "--data-root"), None)
    typed = [word for word in words if "=" in word and not word.startswith("-")]
    return compose_config("pretraining", with_root(typed, root))


def _probing(words: Sequence[str]) -> list[DictConfig]:
    flags = dict(itertools.pairwise(words))
    tasks = flags.get("--task", "all")
    names = choices("probe") if tasks == "all" else tasks.split(",")
    dataset = flags.get("--dataset", "toy").split(",")[0]
    given = [word for word in words if word.startswith("probe.")]
    return [_composed([f"probe={name}", f"dataset={dataset}"], given) for name in names]


def _composed(choice: list[str], given: list[str]) -> DictConfig:
    """With what is given, which decides which keys there are, where this probe takes it."""
    try:
        return compose_config("probing", [*choice, *given])
    except ConfigurationError:
        return compose_config("probing", choice)


def _small(
    words: Sequence[str], sizes: Mapping[str, object], configs: Sequence[DictConfig]
) -> list[str]:
    return [f"{key}={value}" for key, value in _changes(words, sizes, configs)]


def _changes(
    words: Sequence[str], sizes: Mapping[str, object], configs: Sequence[DictConfig]
) -> Iterator[tuple[str, object]]:
    """The sizes that something has; those of the image only where the page says none."""
    if configs and "probe" in configs[0] and not any("image_size" in word for word in words):
        takers = {
            *("segmentation", "retrieval", "clustering", "pca", "conditioning", "correspondence"),
        }
        if any(config.probe._target_.split(".")[1] in takers for config in configs):
            yield "probe.image_size", 32
    for key, value in sizes.items():
        if any(has_key(config, key) for config in configs):
            yield key, value
