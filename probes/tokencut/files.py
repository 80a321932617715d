"""Where pictures and masks of what discovery found are."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ssl_bench.system.naming import image_name


@dataclass(frozen=True)
class DiscoveryFiles:
    """Paths below a folder; cells are named as "LAYER/FACET"."""

    folder: Path

    def sheet(self, cell: str) -> Path:
        """All images of a cell."""
        return self.folder / f"{_block_name(cell)}.png"

    def panel(self, cell: str, image_id: str) -> Path:
        return self.folder / _block_name(cell) / image_name(image_id)

    def mask(self, cell: str, image_id: str) -> Path:
        """Of an image without ground truth."""
        *below, last = PurePosixPath(image_id).parts
        return self.folder.joinpath("masks", _block_name(cell), *below, image_name(last))

    def has_all(
        self, image_id: str, cells: Sequence[str], drawn: Set[str], *, has_masks: bool
    ) -> bool:
        """Whether everything of an image is there; only those of `drawn` have panels."""
        masks = [self.mask(cell, image_id) for cell in cells if has_masks]
        panels = [self.panel(cell, image_id) for cell in cells if image_id in drawn]
        return all(path.is_file() for path in (*masks, *panels))


def _block_name(cell: str) -> str:
    layer, facet = cell.split("/")
    return f"block{int(layer):02d}_{facet}"


def cell_name(layer: int, facet: str) -> str:
    return f"{layer}/{facet}"
