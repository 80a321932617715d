"""The folder of a run: what lies in it, and that no other run is overwritten."""

from pathlib import Path

from pretrain.runtime.state import has_state, remove_states
from ssl_bench.errors import ConfigurationError
from ssl_bench.models.loading.addresses import LAST, kept_epoch
from ssl_bench.system.files import remove_orphans

ENCODER, CONFIG, LOG, BOARD = LAST, "config.yaml", "log.jsonl", "tensorboard"


def claim(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Make sure that only this run writes into a folder.

    Raises:
        ConfigurationError: another run is there, and neither of the options says what to do.
    """
    kept = [path for path in out.glob("*") if kept_epoch(path) is not None]
    encoders = [out / ENCODER, *kept]
    files = [out / CONFIG, out / LOG, *encoders, *(_digest_of(path) for path in encoders)]
    is_taken = has_state(out) or any(path.exists() for path in files)
    if is_taken and not (resume or overwrite):
        raise ConfigurationError(
            f"{out} already holds a run; go on with --resume, forget it with --overwrite, or "
            "choose another --out"
        )
    remove_orphans(out, idle_seconds=0.0)
    if overwrite and not resume:
        remove_states(out)
        for path in files:
            path.unlink(missing_ok=True)


def _digest_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")
