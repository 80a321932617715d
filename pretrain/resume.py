"""Save and restore the progress of a run, and check what has changed while the run was stopped.

A resumed run gives the same weights as an uninterrupted run, unless the number of processes
changes. On a GPU, the weights are only equal bit by bit with `train.deterministic=true`. With
another number of processes, gradients are summed in another order, and random masks and mixtures of
images may differ. Between stopping and resuming a run, the following may change:

- Settings that do not affect the weights, such as the number of data workers.
  `pretrain.description` lists these settings.
- The content of an image file that no step has used, because the run has not reached the image or
  could not read it. For example, a damaged image may be repaired. The names, the number and the
  classes of the training images must stay the same.
- The length of the run, which `--extend` may increase.
"""

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pretrain.batches import BatchChunks
from pretrain.checkpoints import CONFIG, LOG, unusable_state_error
from pretrain.description import LENGTH_KEYS, describe, find_differences, update_description
from pretrain.distributed import TrainingRanks
from pretrain.plan import Pretraining
from pretrain.schedules import Timeline, count_phase_steps
from pretrain.step import Trainer
from ssl_bench.data.files.fingerprints import file_hashes
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import CheckpointError, ConfigurationError, DataError, join_alternatives
from ssl_bench.system.process import reraise_out_of_memory

# Keys of the state. States of older versions contain all of them except the number of processes.
_USED_FILES, _LEFT_OUT, _NEVER_USED = "learned_files", "left_out", "left_out_unlearned"
_PROCESSES = "processes"
# Keys of the description of a run.
_NAMES, _FILES, _WARMUPS = "images", "image_files", "opening_steps"
_MAX_REASON = 300


@dataclass
class Progress:
    """The progress of a run, which is stored in `state.pt`.

    Attributes:
        step: Number of optimizer steps that the run has completed.
        extensions: One entry for each time that `--extend` has made the run longer. An entry
            contains the step at which the run was extended, and the old and new lengths of the run
            in steps.
        left_out: Indices of the images that could not be read and were replaced by others.
        never_used: Indices of the images in `left_out` that no step has used, because they were
            already unreadable at their first use.
    """

    step: int = 0
    extensions: list[dict[str, int]] = field(default_factory=list)
    left_out: set[int] = field(default_factory=set)
    never_used: set[int] = field(default_factory=set)

    def state(
        self, description: Mapping[str, Any], images: ImageSet, batches: BatchChunks, processes: int
    ) -> dict[str, Any]:
        """Return the content of `state.pt`, except for the networks and the optimizer.

        Args:
            description: Settings of the run, made by `describe_run`.
            images: Training images of the run.
            batches: Batches of the run, which determine the images that the run has used so far.
            processes: Number of processes that train together.
        """
        return {
            "step": self.step,
            "configuration": description,
            "extensions": self.extensions,
            _LEFT_OUT: sorted(self.left_out),
            _NEVER_USED: sorted(self.never_used),
            _USED_FILES: _digest_used_images(images, batches, self.step, self.never_used),
            _PROCESSES: processes,
        }


def describe_run(
    plan: Pretraining, images: ImageSet, fingerprint: str, timeline: Timeline
) -> dict[str, Any]:
    """Return the settings and image hashes that are compared when a run is resumed.

    Args:
        plan: The configuration of the run, whose batch size must be set.
        images: The training images. The description contains a SHA-256 of their ids and class
            names.
        fingerprint: SHA-256 of the contents of the images, or of their sizes and times if
            `data.fingerprint` is "stat".
        timeline: Length of the run.
    """
    names = "\n".join((*images.ids, *images.class_names))
    description = describe(plan)
    description[_NAMES] = hashlib.sha256(os.fsencode(names)).hexdigest()
    description[_FILES] = fingerprint
    description[_WARMUPS] = count_phase_steps(description, timeline)
    return description


def restore_progress(
    state: Mapping[str, Any],
    path: Path,
    *,
    plan: Pretraining,
    description: Mapping[str, Any],
    timeline: Timeline,
    images: ImageSet,
    batches: BatchChunks,
    ranks: TrainingRanks,
    extend: bool,
) -> tuple[Progress, list[str]]:
    """Check that a saved run can be resumed, and return its progress and messages for the user.

    All processes must call this function together.

    Args:
        state: The saved state.
        path: File of the state.
        plan: The current configuration of the run.
        description: Description of this run, made by `describe_run`.
        timeline: Planned length of the resumed run.
        images: Training images of this run.
        batches: Batches of this run.
        ranks: Processes that train together.
        extend: Whether the run may be longer than the saved run.

    Raises:
        CheckpointError: The saved step number is not an integer, is negative, or exceeds the length
            of the saved run.
        ConfigurationError: A setting that affects the weights, or an image that a step has used,
            has changed. The error is also raised if `extend` is true, but the run is not longer
            than the saved run.
    """
    messages, step = list[str](), state["step"]
    if not isinstance(step, int) or step < 0:
        raise unusable_state_error(path, f"has step {step!r}, expected a non-negative integer")

    before = update_description(state["configuration"], plan)
    saved_lengths = {name: before["train"][name] for name in ("epochs", "max_steps")}
    # `keep_epochs` may contain epochs that only the extended run reaches.
    saved_options = replace(plan.train, keep_epochs=None, **saved_lengths)
    saved_steps, steps = saved_options.timeline(len(images)).total_steps, timeline.total_steps

    changes = find_differences(before, description)
    length_changes = [c for c in changes if c.startswith((*LENGTH_KEYS, f"{_WARMUPS}."))]
    if extend:
        changes = [change for change in changes if change not in length_changes]
    if len(changes) == 1 and changes[0].startswith(f"{_FILES}:"):
        digest = partial(_digest_used_images, images, batches, step, state[_NEVER_USED])
        if ranks.compute_on_main(digest) == state[_USED_FILES]:
            changes = []
            messages.append("some images have changed, but this run has not used them yet")
    if changes:
        can_extend = not extend and steps > saved_steps and changes == length_changes
        raise _changed_error(path, changes, can_extend)
    if step > saved_steps:
        raise unusable_state_error(
            path, f"was saved at step {step}, but its run has only {saved_steps} steps"
        )

    left_out = ranks.compute_on_main(partial(_find_unreadable, images, state[_LEFT_OUT]))
    extensions, message = [*state["extensions"]], f"continuing after step {step} of {steps}"
    # If an extended run was stopped, the same command continues it and does not extend it again.
    if extend and (length_changes or not extensions):
        if steps <= saved_steps:
            raise ConfigurationError(
                f"the run in {path.parent} already has {saved_steps} steps, so --extend expects "
                f"more, got {steps}",
                hint=("train.epochs={larger}", "or", "train.max_steps={larger}"),
            )
        extensions.append({"step": step, "from_steps": saved_steps, "to_steps": steps})
        message += f" instead of {saved_steps}"
    messages.append(message)
    if step > 0 and not (path.parent / LOG).is_file():
        messages.append(f"{path.parent / LOG} is missing, so the log begins with step {step + 1}")
    # States of older versions do not contain the number of processes.
    saved_processes = state.get(_PROCESSES, ranks.world_size)
    if saved_processes != ranks.world_size:
        messages.append(
            f"the run was saved with {saved_processes} processes and continues with "
            f"{ranks.world_size}. Sums are rounded differently, and random masks and mixtures of "
            "images may differ, so the weights will not equal those of an uninterrupted run"
        )
    return Progress(step, extensions, left_out, left_out & {*state[_NEVER_USED]}), messages


def load_trainer_state(trainer: Trainer, state: Mapping[str, Any], path: Path) -> None:
    """Load the weights of the networks and the optimizer's moments from a saved training state.

    Raises:
        CheckpointError: A key or tensor is missing, or a tensor has the wrong shape.
    """
    try:
        trainer.load_state_dict(state)
    except CheckpointError:
        raise
    except (KeyError, RuntimeError, ValueError) as error:
        reraise_out_of_memory(error)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_REASON]
        raise unusable_state_error(
            path, f"has weights or optimizer values that do not fit this run ({reason})"
        ) from error


def _digest_used_images(
    images: ImageSet, batches: BatchChunks, step: int, never_used: Iterable[int]
) -> str:
    """Return a SHA-256 of the files of all images that the first `step` steps have used.

    Images whose indices are in `never_used` are left out, because they could not be read and were
    replaced by other images.
    """
    is_used = batches.mark_used_images(step)
    is_used[[*never_used]] = False
    return hashlib.sha256(file_hashes(images)[is_used].tobytes()).hexdigest()


def _find_unreadable(images: ImageSet, indices: Collection[int]) -> set[int]:
    """Try to read some images again, and return the indices of the unreadable images."""
    unreadable = set[int]()
    for index in indices:
        try:
            images[index]
        except DataError:
            unreadable.add(index)
    return unreadable


def _changed_error(path: Path, changes: list[str], can_extend: bool) -> ConfigurationError:
    # Digests and the lengths of warm-ups depend on settings. If a setting has changed, the message
    # names only the setting.
    derived = (f"{_NAMES}:", f"{_FILES}:", f"{_WARMUPS}.")
    settings = [change for change in changes if not change.startswith(derived)]
    return ConfigurationError(
        f"{path} belongs to a run with another configuration ({'; '.join(settings or changes)}). "
        f"Use the settings of the first command, which {path.parent / CONFIG} contains",
        hint=join_alternatives(
            ("--extend",) if can_extend else (), ("--resume",), ("--out", "{folder}")
        ),
    )
