"""Any PyTorch module with a list of blocks as an encoder; what can be found out is not asked."""

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from ssl_bench.errors import CheckpointError, UnfitEncoder
from ssl_bench.models.encoder import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Contents,
    Encoder,
    ModuleFacts,
)
from ssl_bench.models.kinds import of_library, state_dict_sha256
from ssl_bench.system.imports import broken_file
from ssl_bench.system.paths import expanded, real

_SEED = 0
_NORMS = ("norm", "layernorm", "ln_f", "ln_post", "final_norm", "norm_final", "post_layernorm")
_USUAL_SIZE = 224


class OwnModule(nn.Module):
    """Somebody's module under the names that the extractor asks for: `blocks` and `norm`."""

    def __init__(self, module: nn.Module, blocks: str, norm: nn.Module) -> None:
        super().__init__()
        self.module, self.norm = module, norm
        self.blocks = module.get_submodule(blocks)

    def forward(self, images: Tensor) -> Any:
        """Whatever the module gives; blocks are heard while it runs."""
        return self.module(images)


class _NoNorm(nn.Module):
    def forward(self, _tokens: Tensor) -> Tensor:
        """Raise: there is none."""
        raise UnfitEncoder(
            "this module has no final norm that is known; name it: "
            "ssl_bench.Encoder.from_module(module, norm='NAME') is what to probe then"
        )


def encoder_of_module(
    module: nn.Module, *, uri: str = "memory", **facts: Unpack[ModuleFacts]
) -> Encoder:
    """See `ssl_bench.Encoder.from_module`."""
    called = facts.get("name") or type(module).__name__
    mean, std = facts.get("mean", IMAGENET_MEAN), facts.get("std", IMAGENET_STD)
    epoch = facts.get("epoch")
    parts = dict(module.named_modules())
    blocks = facts.get("blocks") or _longest_list(module, called)
    if blocks not in parts or not list(parts[blocks].children()):
        raise CheckpointError(
            f"{called} has no list of blocks called {blocks!r}; expected the name of a ModuleList "
            f"or Sequential, such as {', '.join(_lists(module)) or 'blocks'}"
        )
    patch = facts.get("patch_size") or _patch_kernel(module, called)
    own = OwnModule(module, blocks, _final_norm(parts, facts.get("norm"), blocks, called)).eval()
    size, outputs = _first_pass(own, _sizes(module, facts.get("image_size"), patch), called)
    try:
        _heard(own, (size[0] + patch, size[1] + 2 * patch))
        any_size = True
    except Exception:  # Somebody's forward may refuse a size in any way.
        any_size = False
    widths, prefix, channels_last = _anatomy(outputs, (size[0] // patch, size[1] // patch), called)
    first = own.blocks.get_submodule("0")
    heads = (getattr(part, "num_heads", None) for part in first.modules())
    # The layer that keys are taken from.
    has_keys = all("attn.qkv" in dict(one.named_modules()) for one in own.blocks.children())
    return Encoder(
        module=own,
        name=called,
        uri=uri,
        sha256=state_dict_sha256(module),
        architecture={
            **of_library(module, "module", type(module).__qualname__),
            "code_sha256": _code_sha256(module),
            "blocks": blocks,
            "patch_size": patch,
        },
        patch_size=patch,
        depth=len(outputs),
        dim=widths[-1],
        num_heads=next((n for n in heads if isinstance(n, int) and not isinstance(n, bool)), 0),
        num_prefix_tokens=prefix,
        native_size=size,
        mean=(mean[0], mean[1], mean[2]),
        std=(std[0], std[1], std[2]),
        colours_from="from_module" if "mean" in facts else "assumed, ImageNet's",
        num_registers=facts.get("num_registers", 0),
        contents=Contents("module", epoch=None if epoch is None else float(epoch)),
        channels_last=channels_last,
        any_size=any_size,
        instead={
            **({} if prefix > facts.get("num_registers", 0) else {"cls": "patch_mean"}),
            **({} if has_keys else {"key": "token"}),
        },
    )


def _lists(module: nn.Module) -> dict[str, int]:
    """Lists of modules of one kind, with how many there are."""
    return {
        name: len(children)
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential)
        and (children := list(part.children()))
        and len({type(child) for child in children}) == 1
        and any(True for _ in children[0].children())
    }


def _longest_list(module: nn.Module, called: str) -> str:
    lists = _lists(module)
    longest = [name for name, count in lists.items() if count == max(lists.values())]
    if len(longest) != 1:
        came = ", ".join(lists) or "no list of modules of one kind"
        raise CheckpointError(
            f"{called}: expected one longest list of blocks, came {came}; name it: "
            "Encoder.from_module(module, blocks='NAME')"
        )
    return longest[0]


def _patch_kernel(module: nn.Module, called: str) -> int:
    """The kernel of the first convolution that takes colours and steps as far as it sees."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d) and part.in_channels == 3:
            rows, cols = part.kernel_size
            if rows == cols and part.stride == part.kernel_size and rows > 1:
                return rows
    raise CheckpointError(
        f"{called} has no convolution of three channels into patches, so the size of a patch is "
        "not known; say it: Encoder.from_module(module, patch_size=16)"
    )


def _final_norm(
    parts: Mapping[str, nn.Module], norm: str | None, blocks: str, called: str
) -> nn.Module:
    if norm is not None:
        if norm not in parts:
            raise CheckpointError(f"{called} has no module {norm!r} for its final norm")
        return parts[norm]
    beside = blocks.rpartition(".")[0]
    paths = [f"{place}{'.' if place else ''}{name}" for place in (beside, "") for name in _NORMS]
    found = [parts[path] for path in paths if path in parts]
    # Else the only one that is written down behind the blocks.
    behind = [
        part
        for path, part in list(parts.items())[list(parts).index(blocks) :]
        if not path.startswith(f"{blocks}.") and type(part).__name__.lower().endswith("norm")
    ]
    return found[0] if found else behind[0] if len(behind) == 1 else _NoNorm()


def _sizes(
    module: nn.Module, asked: int | tuple[int, int] | None, patch: int
) -> list[tuple[int, int]]:
    """Heights and widths that are tried, the likeliest first."""
    if asked is not None:
        return [(asked, asked) if isinstance(asked, int) else asked]
    said = [
        getattr(part, name, None)
        for part in (module, getattr(module, "patch_embed", None), getattr(module, "config", None))
        for name in ("img_size", "image_size")
    ]
    sizes = [(one, one) if isinstance(one, int) else one for one in said]
    usual = max(1, round(_USUAL_SIZE / patch)) * patch
    stated = [(int(s[0]), int(s[1])) for s in sizes if isinstance(s, tuple | list) and len(s) == 2]
    return [*stated, (usual, usual), *((side * patch, side * patch) for side in (14, 16, 8, 4, 2))]


def _heard(own: OwnModule, size: tuple[int, int]) -> list[Tensor]:
    """What the blocks give for two black images, in their order."""
    device = next((p.device for p in own.parameters()), torch.device("cpu"))
    found: dict[int, Tensor] = {}

    def keep(layer: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        found[layer] = output[0] if isinstance(output, tuple | list) else output

    children = list(own.blocks.children())
    handles = [
        child.register_forward_hook(partial(keep, layer)) for layer, child in enumerate(children)
    ]
    try:
        with torch.no_grad():
            own(torch.zeros(2, 3, *size, device=device))
    finally:
        for handle in handles:
            handle.remove()
    if len(found) < len(children):
        raise UnfitEncoder(f"blocks {sorted(set(range(len(children))) - found.keys())} never run")
    return [found[layer] for layer in range(len(children))]


def _first_pass(
    own: OwnModule, sizes: Sequence[tuple[int, int]], called: str
) -> tuple[tuple[int, int], list[Tensor]]:
    """The first of several sizes that the module takes, and what its blocks give."""
    why = ""
    for size in dict.fromkeys(sizes):
        try:
            return size, _heard(own, size)
        except Exception as error:  # Somebody's forward may fail in any way.
            why = why or " ".join(f"{type(error).__name__}: {error}".split())[:200]
    tried = ", ".join(f"{h} x {w}" for h, w in dict.fromkeys(sizes))
    raise CheckpointError(
        f"{called} takes no images (batch x 3 x height x width) of {tried}: {why}; say which with "
        "Encoder.from_module(module, image_size=...)"
    )


def _anatomy(
    outputs: list[Tensor], grid: tuple[int, int], called: str
) -> tuple[list[int], int, bool]:
    """Widths of the blocks, tokens before the patches, and whether maps have channels last."""
    patches, shapes = grid[0] * grid[1], {tuple(output.shape[:-1]) for output in outputs}
    first = outputs[0]
    if len(shapes) == 1 and first.ndim == 3 and first.shape[0] == 2 and first.shape[1] >= patches:
        return [output.shape[-1] for output in outputs], first.shape[1] - patches, False
    if all(output.ndim == 4 and tuple(output.shape[2:]) == grid for output in outputs):
        return [output.shape[1] for output in outputs], 0, False
    if all(output.ndim == 4 and tuple(output.shape[1:3]) == grid for output in outputs):
        return [output.shape[-1] for output in outputs], 0, True
    came = " x ".join(map(str, first.shape))
    raise CheckpointError(
        f"{called}: expected blocks that give tokens (batch x tokens x dim) or maps of "
        f"{grid[0]} x {grid[1]} patches for two images, came {came}; name another list of blocks, "
        "or the true patch_size"
    )


def _code_sha256(module: nn.Module) -> str:
    """Of the source of all classes that are not PyTorch's: another forward is another encoder."""
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    digest = hashlib.sha256()
    for kind in sorted(kinds, key=lambda one: f"{one.__module__}.{one.__qualname__}"):
        if kind.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        try:
            source = inspect.getsource(kind)
        except (OSError, TypeError):
            source = kind.__qualname__
        digest.update(source.encode())
    return digest.hexdigest()


def load_own(uri: str, file: str, name: str) -> Encoder:
    """Load `FILE.py:NAME`: a module, an `Encoder`, or a function without arguments that gives one.

    The file is run, as `python FILE.py` would run it, with its folder among those of imports.
    What it draws at random is always the same.
    """
    path = real(expanded(file))
    if not path.is_file():
        raise CheckpointError(f"no file {path}; expected FILE.py:NAME, such as model.py:encoder")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        given = _named(path, name)
    if isinstance(given, Encoder):
        return replace(given, uri=uri)
    if not isinstance(given, nn.Module):
        raise CheckpointError(
            f"{name} of {path} gives a {type(given).__name__}; expected a torch.nn.Module, an "
            "ssl_bench.Encoder, or a function without arguments that returns one"
        )
    encoder = encoder_of_module(given, name=f"{path.stem}.{name}", uri=uri)
    return replace(encoder, contents=Contents("module", file=path))


def _named(path: Path, name: str) -> Any:
    """What a name of a file stands for; called, where it is a function or a class."""
    spec = importlib.util.spec_from_file_location(f"ssl_bench_own_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its classes are asked for their source, which is found by the name of their module.
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
        found = getattr(module, name, None)
        if found is None:
            known = [
                key
                for key, value in vars(module).items()
                if not key.startswith("_")
                # Not what it imports.
                and not inspect.ismodule(value)
                and getattr(value, "__module__", spec.name) == spec.name
            ]
            raise CheckpointError(f"{path} has no {name}; it has {', '.join(known) or 'nothing'}")
        if isinstance(found, nn.Module) or not callable(found):
            return found
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            raise CheckpointError(
                f"{path}:{name} cannot be called without arguments ({error}); name a function that "
                "makes the module"
            ) from error
        return found()
    except CheckpointError:
        raise
    except Exception as error:  # Somebody's file may fail in any way.
        raise CheckpointError(str(broken_file(error, ()))) from error
    finally:
        sys.path.remove(str(path.parent))
