"""Versions of the code behind a number, known without importing the code.

`ssl-bench table` takes half a second; importing torch for a class attribute would take three more.
So the classes of probes are read, not imported.
"""

import ast
import re
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path

import yaml

from ssl_bench.composition.choices import config_folder, entry_points, files

PIPELINE_VERSION = 1
"""Of decoding, transforms and extraction, which all probes share. Raise it when a change there
changes numbers: all results are computed again."""

_ATTRIBUTE = "metric_version"
# The class that every probe inherits from, and what it says.
_ROOT, _ROOT_VERSION = "ssl_bench.evaluation", 1
_IMPORT = re.compile(r"^from\s+(\S+)\s+import\s+(\([^)]*\)|[^\n]*)", re.MULTILINE)


def installed_metric_version(task: str) -> int | None:
    """Return `Probe.metric_version` of an installed probe.

    None for a task that is not installed here, and for a class that cannot be read, such as one
    that computes its version.
    """
    try:
        if task in files("probe"):
            text = (config_folder() / "probe" / f"{task}.yaml").read_text(encoding="utf-8")
            module, _, name = yaml.load(text, yaml.CSafeLoader)["_target_"].rpartition(".")
        else:
            point = entry_points("probe")[task]
            module, name = point.module, point.attr
        # A class that this process has imported knows best.
        loaded = getattr(sys.modules.get(module), name, None)
        if isinstance(version := getattr(loaded, _ATTRIBUTE, None), int):
            return version
        stated = _stated_version(module, name)
    # Files of other packages may hold anything.
    except (OSError, ValueError, KeyError, TypeError, SyntaxError, AttributeError, yaml.YAMLError):
        return None
    return _ROOT_VERSION if stated is None else stated


def _stated_version(module: str, name: str) -> int | None:
    """Return what a class, or the nearest of its bases, states; None where none does.

    Raises:
        ValueError: It is no whole number in the source.
        LookupError: The source of a class cannot be found.
    """
    if module == _ROOT:
        return None
    source = _source(module)
    header = re.search(rf"^class\s+{re.escape(name)}\b\s*(\([^)]*\))?\s*:", source, re.MULTILINE)
    if header is None:
        imported = _imported_from(source, module, name)
        if imported is None:
            raise KeyError(f"{module}.{name}")
        return _stated_version(imported, name)
    # Parsing takes some milliseconds a file, so only where there is something to find.
    body = ast.parse(source).body if _ATTRIBUTE in source else []
    for one in (one for one in body if isinstance(one, ast.ClassDef) and one.name == name):
        for line in one.body:
            if isinstance(line, ast.Assign | ast.AnnAssign) and line.value is not None:
                targets = line.targets if isinstance(line, ast.Assign) else [line.target]
                if any(isinstance(t, ast.Name) and t.id == _ATTRIBUTE for t in targets):
                    return int(ast.literal_eval(line.value))
    for base in re.findall(r"[\w.]+(?=\s*[,)])", header[1] or ""):
        if re.search(rf"^class\s+{re.escape(base)}\b", source, re.MULTILINE):
            stated = _stated_version(module, base)
        elif imported := _imported_from(source, module, base):
            stated = _stated_version(imported, base)
        else:
            continue
        if stated is not None:
            return stated
    return None


def _imported_from(source: str, module: str, name: str) -> str | None:
    """Return the full name of the module that a source imports a name from."""
    for found in _IMPORT.finditer(source):
        if name in re.findall(r"\w+", found[2]):
            dots = len(found[1]) - len(found[1].lstrip("."))
            parts = module.split(".")[:-dots] if dots else []
            return ".".join([*parts, found[1][dots:]])
    return None


@cache
def _source(module: str) -> str:
    """Return the source of a module; neither it nor its packages are imported."""
    parts, path = module.split("."), None
    spec: ModuleSpec | None = None
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        specs = (finder.find_spec(name, path) for finder in sys.meta_path)
        spec = next(filter(None, specs), None)
        if spec is None:
            raise KeyError(module)
        path = spec.submodule_search_locations
    return Path(str(spec and spec.origin)).read_text(encoding="utf-8")
