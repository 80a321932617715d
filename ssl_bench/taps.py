"""Facets from inside of a block: which module gives them, and how they lie on the patches."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ssl_bench.errors import UnfitEncoder
from ssl_bench.layers import INNER_FACETS, Facet, submodule_of
from ssl_bench.models import Encoder

Layout = Literal["tokens", "channels_first", "channels_last"]
TRIAL_GRID = (2, 3)
"""Rows and columns of the patches of the first pass."""
Keep = Callable[[int, Facet, Tensor], None]

# Of timm's blocks the first also takes in LayerScale and, in post-norm blocks, the norm.
_BEFORE_SKIP = {
    "attn_out": ("drop_path1", "drop_path", "attn"),
    "mlp_out": ("drop_path2", "drop_path", "mlp"),
}
_SECOND_LINEAR = ("fc2", "w3", "w2")
_LAYER = {"attn_out": "attn", "attn_skip": "attn", "mlp_hidden": "mlp", "mlp_out": "mlp"}


@dataclass(frozen=True)
class Tap:
    """Where a facet of one block is.

    Attributes:
        name: In messages.
        modules: The first of them that is called gives it.
        side: Whether it goes in there or comes out.
    """

    layer: int
    facet: Facet
    name: str
    modules: tuple[nn.Module, ...]
    side: Literal["input", "output"]
    encoder: Encoder

    def listen(self, keep: Keep) -> list[RemovableHandle]:
        """Hooks for one pass.

        Raises:
            UnfitEncoder: within the pass, where a module is called twice or gives no tensor.
        """
        owners: list[nn.Module] = []

        def hear(module: nn.Module, value: Any) -> None:
            if module in owners:
                raise UnfitEncoder(
                    f"{self.encoder.name} calls {self.name} more than once in a pass, expected "
                    "once; ask for a submodule that is called once"
                )
            owners.append(module)
            if len(owners) == 1:
                keep(self.layer, self.facet, self._tensor(value))

        if self.side == "input":
            return [
                m.register_forward_pre_hook(lambda m, given: hear(m, given[0] if given else None))
                for m in self.modules
            ]
        return [m.register_forward_hook(lambda m, _, output: hear(m, output)) for m in self.modules]

    def _tensor(self, value: object) -> Tensor:
        if not isinstance(value, Tensor):
            raise UnfitEncoder(
                f"{self.name} of {self.encoder.name} gives a {type(value).__name__}, expected one "
                "tensor; ask for a submodule of it"
            )
        return value


@dataclass(frozen=True)
class Taps:
    """All that is asked from inside of the blocks of an encoder.

    Attributes:
        layouts: By layer and facet, as the first pass has shown them.
    """

    encoder: Encoder
    taps: tuple[Tap, ...]
    layouts: dict[tuple[int, Facet], Layout] = field(default_factory=dict)

    @classmethod
    def of(cls, encoder: Encoder, layers: Sequence[int], facets: Sequence[Facet]) -> "Taps":
        """Where the facets from inside of these blocks are; nothing for the others."""
        inner = [f for f in facets if f in INNER_FACETS or submodule_of(f) is not None]
        found = (_tap(encoder, layer, facet) for layer in layers for facet in inner)
        return cls(encoder, tuple(found))

    def __bool__(self) -> bool:
        return bool(self.taps)

    def listen(
        self,
        found: Mapping[int, dict[Facet, Tensor]],
        grids: Mapping[int, tuple[int, int]],
        batch: int,
    ) -> list[RemovableHandle]:
        """Hooks that fill `found` within one pass, which raises an UnfitEncoder where they cannot.

        The first pass has to be of grids that are no squares: it shows what is a row.
        """

        def keep(layer: int, facet: Facet, value: Tensor) -> None:
            grid = grids[layer]
            shape, prefix = tuple(value.shape), self.encoder.num_prefix_tokens
            possible = _layouts(shape, batch, grid, prefix)
            layout = self.layouts.get((layer, facet), next(iter(possible), None))
            if layout is None or layout not in possible:
                raise UnfitEncoder(
                    f"{facet} of block {layer} of {self.encoder.name} has the shape {shape} for "
                    f"{batch} images of {grid[0]} x {grid[1]} patches, expected tokens (batch, "
                    "tokens, channels) or a map of patches; ask for another submodule"
                )
            self.layouts[layer, facet] = layout
            found[layer][facet] = _on_patches(value, layout, grid)

        return [handle for tap in self.taps for handle in tap.listen(keep)]

    def widths(self, found: Mapping[int, Mapping[Facet, Tensor]]) -> dict[Facet, int]:
        """Channels of each facet."""
        widths: dict[Facet, int] = {}
        for tap in self.taps:
            width = found[tap.layer][tap.facet].shape[-1]
            if widths.setdefault(tap.facet, width) != width:
                raise UnfitEncoder(
                    f"{tap.facet} of {self.encoder.name} has {width} channels in block "
                    f"{tap.layer} and {widths[tap.facet]} in others, expected one number; ask for "
                    "blocks that are alike"
                )
        return widths


def _layouts(
    shape: Sequence[int], batch: int, grid: tuple[int, int], num_prefix_tokens: int
) -> list[Layout]:
    """How a tensor may lie on a grid of patches; at most one way where that is no square."""
    patches = grid[0] * grid[1]
    with_prefix = (patches, num_prefix_tokens + patches)
    fits: dict[Layout, bool] = {
        "tokens": len(shape) == 3 and shape[1] in with_prefix,
        "channels_first": len(shape) == 4 and tuple(shape[2:]) == grid,
        "channels_last": len(shape) == 4 and tuple(shape[1:3]) == grid,
    }
    return [layout for layout, is_so in fits.items() if is_so and shape[0] == batch]


def _on_patches(value: Tensor, layout: Layout, grid: tuple[int, int]) -> Tensor:
    """Of shape "batch rows cols dim", a copy, without the tokens before the patches."""
    if layout == "tokens":
        value = value[:, value.shape[1] - grid[0] * grid[1] :].unflatten(1, grid)
    elif layout == "channels_first":
        value = value.permute(0, 2, 3, 1)
    # What comes next in the block may work in place.
    return value.float().clone()


def _tap(encoder: Encoder, layer: int, facet: Facet) -> Tap:
    block = encoder.module.get_submodule("blocks").get_submodule(str(layer))
    parts = dict(block.named_modules())
    path = submodule_of(facet)
    if path is not None:
        if path not in parts:
            raise UnfitEncoder(_no_such(encoder, layer, path, list(parts)))
        return Tap(layer, facet, f"blocks.{layer}.{path}", (parts[path],), "output", encoder)
    found, side = _named(parts, facet)
    if not found:
        raise UnfitEncoder(
            f"block {layer} of {encoder.name} has no {facet}, only {_children(list(parts), '')}; "
            "ask for facet=token, or a submodule as blocks.*.NAME"
        )
    return Tap(layer, facet, f"{facet} of block {layer}", found, side, encoder)


def _named(
    parts: dict[str, nn.Module], facet: Facet
) -> tuple[tuple[nn.Module, ...], Literal["input", "output"]]:
    if _LAYER[facet] not in parts:
        return (), "output"
    if facet in _BEFORE_SKIP:
        return tuple(parts[name] for name in _BEFORE_SKIP[facet] if name in parts)[:1], "output"
    if facet == "mlp_hidden":
        names = [f"mlp.{name}" for name in _SECOND_LINEAR]
        return tuple(parts[name] for name in names if name in parts)[:1], "input"
    # The norm before the MLP; in post-norm blocks the MLP comes first.
    pair = [parts[name] for name in ("norm2", "mlp") if name in parts]
    return (tuple(pair) if len(pair) == 2 else ()), "input"


def _no_such(encoder: Encoder, layer: int, path: str, names: list[str]) -> str:
    near = difflib.get_close_matches(path, [name for name in names if name], n=3)
    parent = path
    while parent not in names:
        parent = parent.rpartition(".")[0]
    where = f"blocks.{layer}.{parent}".rstrip(".")
    hint = f"did you mean {', '.join(near)}? " if near else ""
    return (
        f"{encoder.name} has no blocks.{layer}.{path}; {hint}{where} has {_children(names, parent)}"
    )


def _children(names: list[str], parent: str) -> str:
    start = f"{parent}." if parent else ""
    found = [n.removeprefix(start) for n in names if n.startswith(start) and n != parent]
    return ", ".join(name for name in found if "." not in name) or "no submodules"
