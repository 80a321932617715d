"""Maps that others are aligned with, kept beside the pictures of a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch

from probes.pca.components import Map
from probes.pca.probe import FILE
from ssl_bench.errors import ConfigurationError, DataError
from ssl_bench.system.files import open_regular, write_atomically
from ssl_bench.system.memory import pass_on_memory
from ssl_bench.system.naming import encoder_name
from ssl_bench.system.paths import expanded


@dataclass(frozen=True)
class MapReference:
    """Aligned maps of some images of a dataset.

    Attributes:
        source: Name of the checkpoint.
        maps: By image.
    """

    source: str
    maps: Mapping[str, Map]

    def save(self, folder: Path) -> None:
        """Write the maps into a folder of pictures, whole or not at all."""
        arrays: dict[str, Any] = {
            "source": np.array(self.source),
            "images": np.array(list(self.maps)),
            **{f"map{i}": m.float().numpy() for i, m in enumerate(self.maps.values())},
        }
        write_atomically(folder / FILE, lambda file: np.savez_compressed(file, **arrays))

    def of(self, images: Sequence[str]) -> list[Map]:
        """The maps of some images.

        Raises:
            DataError: there is none of one of them.
        """
        missing = [image for image in images if image not in self.maps]
        if missing:
            raise DataError(
                f"the maps of {self.source} to align with lack the images {', '.join(missing[:3])}"
                f"{', ...' if len(missing) > 3 else ''}; probe that checkpoint on the same images "
                "with at least as many --pictures first"
            )
        return [self.maps[image] for image in images]


def load_reference(folder: Path) -> MapReference:
    """The maps that `MapReference.save` wrote.

    Raises:
        DataError: the file is missing or damaged.
    """
    path = folder / FILE
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
            maps = {
                str(image): torch.from_numpy(arrays[f"map{i}"]).double()
                for i, image in enumerate(arrays["images"])
            }
            return MapReference(str(arrays["source"]), maps)
    # A damaged file makes the readers of zip and npy fail in any way.
    except Exception as error:
        pass_on_memory(error)
        raise DataError(
            f"cannot read {path}; probe the checkpoint to align with first, with --overwrite"
        ) from error


def reference_folder(align_to: str, own: Path, kind: str) -> Path:
    """Where the maps to align with are.

    Args:
        align_to: A folder, or the beginning of NAME-SHA256 of a checkpoint that was probed before.
        own: Folder of the pictures of these images, beside those of other checkpoints.
        kind: Name of the folder in it, which tells protocol and facet.

    Raises:
        ConfigurationError: there is no such folder, or there are several.
    """
    given = expanded(align_to)
    if (given / FILE).is_file():
        return given
    # Maps of other images, or from before one was replaced, have no colours to give.
    _, dash, images = own.name.rpartition("-")
    pattern = f"*{dash}{images}/{escape(kind)}/{FILE}"
    known = sorted(path.parent.parent for path in own.parent.glob(pattern))
    name = given.parent.name if given.name == "last.safetensors" else given.name
    found = [folder for folder in known if folder.name.rsplit("-", 2)[0] == encoder_name(name)]
    found = found or [folder for folder in known if folder.name.startswith(name)]
    if len(found) != 1:
        have = ", ".join(folder.name for folder in known) or "none"
        raise ConfigurationError(
            f"expected probe.align_to to be a folder with {FILE} or one checkpoint with maps of "
            f"{kind!r} of the same images in {own.parent}, got {align_to!r}; there are: {have}"
        )
    return found[0] / kind
