"""What the code of somebody's own module says, so that another forward is another encoder."""

import hashlib
import inspect
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from ssl_bench.errors import PACKAGES

# Where packages lie, those of Python among them.
_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}


def code_sha256(module: nn.Module) -> str:
    """Of the code of its classes, and of what that names: another one is another encoder.

    That is the source of all methods that are not PyTorch's and, of one's own, what they and the
    functions that they call take from around them: functions, classes, numbers, texts and arrays.
    """
    seen: set[int] = set()
    # Sorted at the end: modules are called after who imports them, and so is their order.
    sources: set[str] = set()

    def see(name: str, value: Any) -> None:
        if isinstance(value, Tensor | np.ndarray):
            content = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
            sources.add(f"{name} = {content.dtype} {content.shape} {content.tobytes().hex()}")
        elif _is_constant(value):
            sources.add(f"{name} = {value!r}")
        elif inspect.isclass(value):
            see_class(value)
        elif (function := _function(value)) is not None and _is_own(function):
            see_function(function)

    def see_class(kind: type) -> None:
        functions = [f for held in vars(kind).values() if (f := _function(held)) is not None]
        for function in functions:
            see_function(function)
        if any(map(_is_own, functions)):
            for name, value in vars(kind).items():
                if not name.startswith("__"):
                    see(name, value)

    def see_function(function: FunctionType) -> None:
        if id(function) in seen:
            return
        seen.add(id(function))
        try:
            sources.add(inspect.getsource(function))
        except (OSError, TypeError):
            sources.add(function.__qualname__)
        for name, value in _named(function) if _is_own(function) else ():
            see(name, value)

    for part in module.modules():
        for kind in type(part).__mro__:
            if kind.__module__.partition(".")[0] not in ("torch", "builtins"):
                see_class(kind)
        # A forward that was put in the place of another.
        for name, value in vars(part).items():
            if _function(value) is not None:
                see(name, value)
    return hashlib.sha256("\n".join(sorted(sources)).encode()).hexdigest()


def _function(value: Any) -> FunctionType | None:
    """What is behind a method, a property or a decorated function."""
    inner = getattr(value, "fget", None) or getattr(value, "__func__", value)
    if callable(inner) and inspect.isfunction(function := inspect.unwrap(inner)):
        return function
    return None


def _is_own(value: FunctionType | ModuleType) -> bool:
    """Whether a function or module is in no package that is installed, nor in this suite."""
    is_function = isinstance(value, FunctionType)
    package = (value.__module__ if is_function else value.__name__) or ""
    file = value.__code__.co_filename if is_function else getattr(value, "__file__", None)
    if package.partition(".")[0] in PACKAGES or file is None or file.startswith("<frozen"):
        return False
    return not any(map(Path(file).is_relative_to, _LIBRARIES))


def _named(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function takes from around it, by name; of modules of one's own what they hold."""
    codes, names = [function.__code__], set[str]()
    for code in codes:
        names |= {*code.co_names}
        codes += [const for const in code.co_consts if inspect.iscode(const)]
    around = {name: function.__globals__[name] for name in names & function.__globals__.keys()}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        # One that is not filled yet has no contents.
        with suppress(ValueError):
            around[name] = cell.cell_contents
    around["defaults"] = [*(function.__defaults__ or ()), function.__kwdefaults__]
    for name, value in sorted(around.items()):
        if isinstance(value, ModuleType) and _is_own(value):
            for inside in sorted(names & vars(value).keys()):
                yield inside, vars(value)[inside]
        else:
            yield name, value


def _is_constant(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_constant, (*value.keys(), *value.values())))
    if isinstance(value, tuple | list):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, bool | int | float | complex | str | bytes)
