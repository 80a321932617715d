"""The folder of a run: what lies in it, how it comes there, and that no other is overwritten."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pretrain.runtime.lock import Hold
from pretrain.runtime.state import STATE, has_state, remove_states, save_state
from pretrain.runtime.writer import Writer, copied
from ssl_bench.errors import ConfigurationError
from ssl_bench.models import EncoderModule, save_encoder
from ssl_bench.models.loading.addresses import LAST, kept_epoch, kept_name
from ssl_bench.system.files import remove_orphans

ENCODER, CONFIG, LOG = LAST, "config.yaml", "log.jsonl"
BOARD, WANDB = "tensorboard", "wandb"


@dataclass(frozen=True)
class SavedEncoder:
    """An encoder that the run does not change, and what its file says of it."""

    model: EncoderModule
    metadata: Mapping[str, str]


class Saver(Writer):
    """Leaves states and encoders in a folder while the run goes on.

    Before it writes it looks whether the folder still belongs to this process.
    """

    def __init__(self, out: Path, hold: Hold) -> None:
        super().__init__()
        self._out, self._hold = out, hold

    def save(
        self, state: Mapping[str, Any], encoder: SavedEncoder, say: Callable[[str], None]
    ) -> None:
        """Let a copy of a state and an encoder take the places of the last ones."""
        self.write(STATE, partial(self._save, copied(state), encoder, say))

    def keep(self, epoch: int, encoder: SavedEncoder, say: Callable[[str], None]) -> None:
        """Let the encoder of an epoch be written, and say so then."""
        name = kept_name(epoch)

        def write() -> None:
            self._write_encoder(name, encoder)
            say(f"epoch {epoch}: kept {name}")

        self.write(name, write)

    def _save(
        self, state: Mapping[str, Any], encoder: SavedEncoder, say: Callable[[str], None]
    ) -> None:
        self._hold.require()
        # A broken one would push out the last good one.
        if not all(bool(value.isfinite().all()) for value in state["learner"].values()):
            say(f"step {state['step']}: weights are not finite and are not saved")
            return
        save_state(self._out, state)
        self._write_encoder(ENCODER, encoder)

    def _write_encoder(self, name: str, encoder: SavedEncoder) -> None:
        self._hold.require()
        save_encoder(self._out / name, encoder.model, encoder.metadata)


def claim(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Make sure that only this run writes into a folder.

    Raises:
        ConfigurationError: another run is there, and neither of the options says what to do.
    """
    if not (resume or overwrite):
        require_free(out)
    remove_orphans(out, idle_seconds=0.0)
    if overwrite and not resume:
        remove_states(out)
        for path in _files_of_a_run(out):
            path.unlink(missing_ok=True)


def require_free(out: Path) -> None:
    """Refuse a folder that holds a run.

    Raises:
        ConfigurationError: it does.
    """
    if has_state(out) or any(path.exists() for path in _files_of_a_run(out)):
        raise ConfigurationError(
            f"{out} already holds a run; go on with --resume, forget it with --overwrite, or "
            "choose another --out"
        )


def _files_of_a_run(out: Path) -> list[Path]:
    kept = [path for path in out.glob("*") if kept_epoch(path) is not None]
    encoders = [out / ENCODER, *kept]
    return [out / CONFIG, out / LOG, *encoders, *(_digest_of(path) for path in encoders)]


def _digest_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")
