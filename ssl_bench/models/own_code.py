"""Compute a SHA-256 of the code of a user's module.

The SHA-256 distinguishes modules with equal weights but different code.
"""

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

_STANDARD_LIBRARY = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
_CONSTANTS = (bool, int, float, complex, str, bytes, range, torch.dtype, np.dtype, np.generic, Enum)


def code_sha256(module: nn.Module) -> str:
    """Return the SHA-256 of the code that a module runs.

    The hash includes the source of all classes and functions that the user wrote. The hash also
    includes the globals, closure variables and default arguments that these functions use,
    including values inside containers, partial functions and objects. Code of installed packages is
    only included if it defines the class of the module or of a submodule.
    """
    code = _CodeLines()
    for part in module.modules():
        for kind in type(part).__mro__:
            if _is_user_code(kind):
                code.add_value(kind.__qualname__, kind)
            elif kind.__module__.partition(".")[0] not in ("torch", "builtins"):
                code.lines.add(_source(kind))
        # Functions that are assigned to an instance, such as a patched forward.
        for name, value in vars(part).items():
            if callable(value) and not isinstance(value, nn.Module):
                code.add_value(name, value)
    return sha256("\n".join(sorted(code.lines)).encode()).hexdigest()


class _CodeLines:
    """Text lines that describe a module's code and the values that the code uses.

    The SHA-256 of the sorted lines does not depend on the order of submodules.
    """

    def __init__(self) -> None:
        self.lines: set[str] = set()
        # Visited objects by id. These references keep the objects alive, so that no id is reused.
        self._seen: dict[int, Any] = {}

    def add_value(self, name: str, value: Any) -> None:
        """Add lines that describe the value with this name, and all values inside it."""
        if value is None or isinstance(value, _CONSTANTS):
            self.lines.add(f"{name} = {value!r}")
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor | np.ndarray):
            self.lines.add(f"{name} = {_tensor_digest(value)}")
        elif isinstance(value, Mapping):
            for key, inside in list(value.items()):
                self.add_value(f"{name}[{key}]" if isinstance(key, _CONSTANTS) else name, inside)
        elif isinstance(value, (list, tuple, set, frozenset)):
            for place, inside in enumerate(value):
                # Items of a set have no index, because sets have no order.
                self.add_value(
                    f"{name}[{place}]" if isinstance(value, (list, tuple)) else name, inside
                )
        elif isinstance(value, functools.partial):
            self.add_value(name, [value.func, value.args, value.keywords])
        elif isinstance(value, (staticmethod, classmethod)) or inspect.ismethod(value):
            self.add_value(name, value.__func__)
        elif isinstance(value, property):
            self.add_value(name, [value.fget])
        elif isinstance(value, functools.cached_property):
            self.add_value(name, value.func)
        elif isinstance(value, FunctionType):
            self._add_function(name, value)
        elif isinstance(value, type):
            self._add_class(name, value)
        elif _is_user_code(type(value)) or isinstance(value, nn.Module):
            self.add_value(name, type(value))
            for key, inside in getattr(value, "__dict__", {}).items():
                if key != "training":
                    self.add_value(f"{name}.{key}", inside)
        else:
            self.lines.add(f"{name} is a {type(value).__qualname__}")

    def _add_function(self, name: str, function: FunctionType) -> None:
        if not _is_user_code(function):
            self.lines.add(f"{name} is {function.__qualname__}")
        else:
            self.lines.add(_source(function.__code__))
            for key, value in _used_values(function):
                self.add_value(key, value)
        # A decorator from a package may store the user's function in `__wrapped__`.
        self.add_value(name, getattr(function, "__wrapped__", None))

    def _add_class(self, name: str, kind: type) -> None:
        if not _is_user_code(kind):
            self.lines.add(f"{name} is {kind.__qualname__}")
            return
        self.lines.add(f"class {kind.__qualname__}")
        for base in kind.__bases__:
            self.add_value(f"base of {kind.__qualname__}", base)
        for key, value in list(vars(kind).items()):
            if isinstance(value, FunctionType) or not key.startswith("__"):
                self.add_value(f"{kind.__qualname__}.{key}", value)


def _tensor_digest(value: Tensor | np.ndarray) -> str:
    if isinstance(value, np.ndarray):
        plain = not value.dtype.hasobject
        content = np.ascontiguousarray(value).tobytes() if plain else b""
    else:
        plain = value.layout == torch.strided and not value.is_meta
        flat = value.detach().cpu().contiguous().flatten() if plain else torch.zeros(0)
        content = flat.view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {tuple(value.shape)} {sha256(content).hexdigest()}"


def _used_values(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each global, closure variable and default that a function uses.

    A global that is a Python module of the user is replaced by those of its attributes that the
    function uses.
    """
    codes, names, attributes = [function.__code__], set[str](), set[str]()
    for code in codes:
        for instruction in dis.get_instructions(code):
            is_global = instruction.opname == "LOAD_GLOBAL"
            (names if is_global else attributes).add(str(instruction.argval))
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    values = {name: function.__globals__[name] for name in names & function.__globals__.keys()}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        # The variable of a closure may have no value yet.
        with suppress(ValueError):
            values[name] = cell.cell_contents
    values["defaults"] = [function.__defaults__, function.__kwdefaults__]
    for name, value in sorted(values.items()):
        if not isinstance(value, ModuleType):
            yield name, value
        elif _is_user_code(value):
            for inside in sorted(attributes & vars(value).keys()):
                yield inside, vars(value)[inside]


def _source(value: type | CodeType) -> str:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        # The source is not available, for example for functions created by exec.
        if isinstance(value, CodeType):
            return f"{value.co_qualname} {value.co_code.hex()}"
        return value.__qualname__


def _is_user_code(value: type | FunctionType | ModuleType) -> bool:
    """Return whether an object is code of the user, not of Python, a package or this suite."""
    name = (value.__name__ if isinstance(value, ModuleType) else value.__module__) or "__main__"
    if name.partition(".")[0] in (*PACKAGES, "builtins", "torch"):
        return False
    if name == "__main__" or name not in sys.modules:
        return True
    file = getattr(sys.modules[name], "__file__", None)
    if file is None or {"site-packages", "dist-packages"}.intersection(Path(file).parts):
        return False
    return not any(map(Path(file).is_relative_to, _STANDARD_LIBRARY))
