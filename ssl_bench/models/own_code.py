"""What the code of somebody's own module says, so that another forward is another encoder."""

import dis
import functools
import inspect
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from hashlib import sha256
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ssl_bench.errors import PACKAGES

_STANDARD = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
_CONSTANTS = (bool, int, float, complex, str, bytes, range, torch.dtype, np.dtype, np.generic, Enum)


def code_sha256(module: nn.Module) -> str:
    """Of the code of its classes, and of what that takes from around it, as hexadecimal digits.

    Of classes and functions of one's own that is their source, the globals that it names, closures
    and defaults, and so on from there through containers, partial functions and objects; of those
    of packages that are installed the source of the module's classes alone.
    """
    code = _Code()
    for part in module.modules():
        for kind in type(part).__mro__:
            if _is_own(kind):
                code.see(kind.__qualname__, kind)
            elif kind.__module__.partition(".")[0] not in ("torch", "builtins"):
                code.add(_source(kind))
        # A forward that was put in the place of another.
        for name, value in vars(part).items():
            if callable(value) and not isinstance(value, nn.Module):
                code.see(name, value)
    return sha256("\n".join(sorted(code.lines)).encode()).hexdigest()


class _Code:
    """Lines on everything that was seen; sorted, as the order of modules hangs on their names."""

    def __init__(self) -> None:
        self.lines: set[str] = set()
        # Held, so that no other object gets the number of one that is gone.
        self._seen: dict[int, Any] = {}

    def add(self, line: str) -> None:
        self.lines.add(line)

    def see(self, name: str, value: Any) -> None:
        """A value under a name, and what it is made of."""
        if value is None or isinstance(value, _CONSTANTS):
            self.add(f"{name} = {value!r}")
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor | np.ndarray):
            self.add(f"{name} = {_numbers(value)}")
        elif isinstance(value, Mapping):
            for key, inside in list(value.items()):
                self.see(f"{name}[{key}]" if isinstance(key, _CONSTANTS) else name, inside)
        elif isinstance(value, (list, tuple, set, frozenset)):
            for place, inside in enumerate(value):
                # Sets have no order.
                self.see(f"{name}[{place}]" if isinstance(value, (list, tuple)) else name, inside)
        elif isinstance(value, functools.partial):
            self.see(name, [value.func, value.args, value.keywords])
        elif isinstance(value, (staticmethod, classmethod)) or inspect.ismethod(value):
            self.see(name, value.__func__)
        elif isinstance(value, property):
            self.see(name, [value.fget])
        elif isinstance(value, functools.cached_property):
            self.see(name, value.func)
        elif isinstance(value, FunctionType):
            self._see_function(name, value)
        elif isinstance(value, type):
            self._see_class(name, value)
        elif _is_own(type(value)) or isinstance(value, nn.Module):
            self.see(name, type(value))
            for key, inside in getattr(value, "__dict__", {}).items():
                if key != "training":
                    self.see(f"{name}.{key}", inside)
        else:
            self.add(f"{name} is a {type(value).__qualname__}")

    def _see_function(self, name: str, function: FunctionType) -> None:
        if not _is_own(function):
            self.add(f"{name} is {function.__qualname__}")
        else:
            self.add(_source(function.__code__))
            for known, value in _around(function):
                self.see(known, value)
        # What a decorator of a package was put around.
        self.see(name, getattr(function, "__wrapped__", None))

    def _see_class(self, name: str, kind: type) -> None:
        if not _is_own(kind):
            self.add(f"{name} is {kind.__qualname__}")
            return
        self.add(f"class {kind.__qualname__}")
        for base in kind.__bases__:
            self.see(f"base of {kind.__qualname__}", base)
        for key, value in list(vars(kind).items()):
            if isinstance(value, FunctionType) or not key.startswith("__"):
                self.see(f"{kind.__qualname__}.{key}", value)


def _numbers(value: Tensor | np.ndarray) -> str:
    if isinstance(value, np.ndarray):
        plain = not value.dtype.hasobject
        content = np.ascontiguousarray(value).tobytes() if plain else b""
    else:
        plain = value.layout == torch.strided and not value.is_meta
        flat = value.detach().cpu().contiguous().flatten() if plain else torch.zeros(0)
        content = flat.view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {tuple(value.shape)} {sha256(content).hexdigest()}"


def _around(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function takes from around it, by name; of modules of one's own what it names."""
    codes, names, attributes = [function.__code__], set[str](), set[str]()
    for code in codes:
        for one in dis.get_instructions(code):
            (names if one.opname == "LOAD_GLOBAL" else attributes).add(str(one.argval))
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    around = {name: function.__globals__[name] for name in names & function.__globals__.keys()}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        # One that is not filled yet has no contents.
        with suppress(ValueError):
            around[name] = cell.cell_contents
    around["defaults"] = [function.__defaults__, function.__kwdefaults__]
    for name, value in sorted(around.items()):
        if not isinstance(value, ModuleType):
            yield name, value
        elif _is_own(value):
            for inside in sorted(attributes & vars(value).keys()):
                yield inside, vars(value)[inside]


def _source(value: type | CodeType) -> str:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        # Of a notebook's cell that is gone, or made by a program.
        name = value.co_qualname if isinstance(value, CodeType) else value.__qualname__
        return f"{name} {value.co_code.hex()}" if isinstance(value, CodeType) else name


def _is_own(value: type | FunctionType | ModuleType) -> bool:
    """Whether that is in no package that is installed, nor of Python, nor of this suite."""
    name = (value.__name__ if isinstance(value, ModuleType) else value.__module__) or "__main__"
    if name.partition(".")[0] in (*PACKAGES, "builtins", "torch"):
        return False
    if name == "__main__" or name not in sys.modules:
        return True
    file = getattr(sys.modules[name], "__file__", None)
    if file is None or {"site-packages", "dist-packages"}.intersection(Path(file).parts):
        return False
    return not any(map(Path(file).is_relative_to, _STANDARD))
