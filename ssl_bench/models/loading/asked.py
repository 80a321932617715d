"""The encoders of a command: their addresses, the newest run, and a message on each of them."""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ssl_bench.errors import CheckpointError, escape_braces, with_hint
from ssl_bench.layers import parse_layer_numbers, resolve_layers
from ssl_bench.models.encoder import ASSUMED, DINO_NAMES, Encoder
from ssl_bench.models.loading.addresses import OWN, expand, kept_epoch, with_baselines
from ssl_bench.models.loading.checkpoint import read_metadata
from ssl_bench.models.loading.load import identify_encoder, load_encoder, stated_identity
from ssl_bench.system.progress import format_duration, say

# By width and depth; timm has all of them for patches and images of these sizes.
_SIZES_IN_TIMM = {(192, 12): "tiny", (384, 12): "small", (768, 12): "base", (1024, 24): "large"}
_PATCH_IN_TIMM, _SIDES_IN_TIMM = 16, (224, 384)
# Of any encoder; only to know whether what was typed are numbers.
_DEEPEST = 9999


def encoder_addresses(checkpoints: Sequence[str], *, baselines: bool) -> list[str]:
    """Return the addresses of all encoders to probe.

    Args:
        checkpoints: Addresses and patterns. If there are none, the newest run below `runs/`
            is used.
        baselines: Add untrained encoders and raw colours.
    """
    uris = expand(checkpoints or [newest_checkpoint(Path("runs"))])
    if not baselines:
        return uris
    if own := ", ".join(filter(OWN.fullmatch, uris)):
        say(f"without random weights of {own}: name a function of the file that draws them too")
    return with_baselines(uris, [identify_encoder(uri).patch_size for uri in uris])


def require_layers(layers: str | int | Sequence[int], checkpoints: Sequence[str]) -> None:
    """Refuse blocks that an encoder lacks before images are looked for, where its file says it.

    Raises:
        ConfigurationError: no numbers, or blocks outside of an encoder.
    """
    if layers != "all":
        parse_layer_numbers(layers, _DEEPEST)
    newest = None if checkpoints else _newest(Path("runs"))
    for uri in expand(checkpoints or ([str(newest)] if newest else [])):
        # What else is wrong with it is said when its turn comes.
        with suppress(CheckpointError):
            if (encoder := stated_identity(uri)) is not None:
                resolve_layers(layers, encoder.depth)


def announced_encoder(uri: str) -> Encoder:
    """Load an encoder and say what it is."""
    encoder = load_encoder(uri)
    loaded = f"{encoder.loaded_keys} of {encoder.total_keys} tensors of the file loaded"
    mean, std = (" ".join(f"{one:g}" for one in colour) for colour in (encoder.mean, encoder.std))
    say(
        f"encoder {encoder.name}: {encoder.depth} blocks, sha256 {encoder.sha256[:12]}, "
        f"{loaded if encoder.total_keys else 'no file'}, mean {mean}, deviation {std} "
        f"({encoder.colours_from})"
    )
    if encoder.contents.note:
        say(encoder.contents.note)
    file = encoder.contents.file
    # The names of timm are those of DINO.
    is_unnamed = encoder.contents.layout == DINO_NAMES and file and "dino" not in file.name.lower()
    if encoder.colours_from == ASSUMED and is_unnamed:
        size, side = _SIZES_IN_TIMM.get((encoder.dim, encoder.depth)), encoder.native_size[0]
        address = f"mean=0.5,std=0.5:{escape_braces(str(file))}"
        if size and encoder.patch_size == _PATCH_IN_TIMM and side in _SIDES_IN_TIMM:
            address = f"timm:vit_{size}_patch{_PATCH_IN_TIMM}_{side}@{escape_braces(str(file))}"
        line = "if it was trained with timm, its normalisation may differ"
        say(with_hint(line, hint=("--checkpoint", address)))
    return encoder


def newest_checkpoint(folder: Path) -> str:
    """Path of the encoder weights below a folder that were written last; says which it is.

    Raises:
        CheckpointError: there are none.
    """
    newest = _newest(folder)
    if newest is None:
        raise CheckpointError(
            f"no checkpoint below {folder}/",
            hint=("--checkpoint", "demo:skip", "or", "ssl-bench", "pretrain"),
        )
    ago = format_duration(max(0.0, time.time() - newest.stat().st_mtime))
    steps = ""
    with suppress(CheckpointError):
        if "step" in (told := read_metadata(newest)):
            steps = f"trained for {told['step']} steps, "
    say(f"using the newest checkpoint below {folder}/: {newest}, {steps}written {ago} ago")
    return str(newest)


def _newest(folder: Path) -> Path | None:
    files = [path for path in folder.glob("**/*.safetensors") if path.is_file()]
    found = [path for path in files if kept_epoch(path) is None]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)
