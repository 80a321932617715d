"""Probe the blocks of frozen image encoders."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from ssl_bench.api import Results, extract_features, load_encoder, probe, read_results
    from ssl_bench.models import Encoder

__all__ = [
    "Encoder",
    "Results",
    "__version__",
    "extract_features",
    "load_encoder",
    "probe",
    "read_results",
]


def __getattr__(name: str) -> Any:
    """Import a public object, such as `probe`, when it is first used.

    PyTorch is only imported when it is needed, so that `import ssl_bench` and `ssl-bench --help`
    are fast.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "models" if name == "Encoder" else "api"
    return getattr(import_module(f"{__name__}.{module}"), name)
