"""What does each block of this encoder know?"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from ssl_bench.api import Results, extract_features, probe, read_results
    from ssl_bench.models import Encoder, load_encoder

__all__ = [
    "Encoder",
    "Results",
    "__version__",
    "extract_features",
    "load_encoder",
    "probe",
    "read_results",
]

# Imported when they are asked for, so that `import ssl_bench` and `--help` stay light.
_HOMES = {"Encoder": "models", "load_encoder": "models"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'api')}"), name)
