"""`ssl-bench models`: list the supported kinds of checkpoints, or describe given checkpoints."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssl_bench.errors import CheckpointError, SslBenchError
from ssl_bench.models import Encoder, load_encoder
from ssl_bench.models.loading.hub import HUB_WEIGHTS
from ssl_bench.models.loading.layouts import LAYOUTS
from ssl_bench.models.loading.load import list_addresses
from ssl_bench.system.files import open_regular
from ssl_bench.system.output import dump_json, escape_lines, to_one_line

_MAX_NAMES = 3
_NO_KEYS = (
    "queries, keys and values are unknown (not every block has attn.qkv), so probes use tokens"
)


TIMM_PATTERNS = (
    *("vit_*", "deit*", "flexivit_*", "eva*", "beit3_*", "aimv2_*", "vitamin_*"),
    *("vit_*dinov2", "vit_*dinov3", "vit_*siglip*", "vit_*clip*", "vit_*rope*", "vit_pe_*"),
)
"""Name patterns of timm models that accept images of any size."""


def command(options: argparse.Namespace) -> int:
    """List the supported kinds of checkpoints, or describe the given checkpoints.

    If a checkpoint cannot be loaded, the command prints an error and continues with the next one.
    The result is the exit code of the first error, or 0.
    """
    if not options.uris:
        if options.json:
            print(dump_json(_list_as_json(), indent=2))
        else:
            print("\n".join(_format_list()))
        return 0
    exit_code, descriptions = 0, []
    for uri in options.uris:
        try:
            description = describe_encoder(load_encoder(uri))
        except SslBenchError as error:
            exit_code = exit_code or error.exit_code
            descriptions.append({"uri": uri, "error": to_one_line(error)})
            print(f"ssl-bench: {to_one_line(error)}", file=sys.stderr)
            continue
        if not options.json:
            separator = [""] if descriptions else []
            print(escape_lines([*separator, *_format_description(description)]))
        descriptions.append(description)
    if options.json:
        print(dump_json(descriptions, indent=2))
    return exit_code


def describe_encoder(encoder: Encoder) -> dict[str, Any]:
    """Return the properties of an encoder and of its file, as JSON types.

    `size` is in bytes. `patch_size`, `largest_patch` and `image_size` are in pixels. `used` and
    `total` are numbers of tensors in the file. `ignored` maps the names of unused tensors to the
    reason why they are unused. `colours_from` states where `mean` and `std` come from.
    """
    weights_info = encoder.weights_info
    return {
        "uri": encoder.uri,
        "name": encoder.name,
        "format": _file_format(weights_info.file),
        "size": weights_info.file.stat().st_size if weights_info.file else 0,
        "layout": weights_info.layout,
        "source": weights_info.source,
        "depth": encoder.depth,
        "width": encoder.dim,
        "heads": encoder.num_heads,
        "patch_size": encoder.patch_size,
        "largest_patch": max((encoder.patch_size, *encoder.strides)),
        "class_tokens": encoder.num_prefix_tokens - encoder.num_registers,
        "registers": encoder.num_registers,
        "image_size": encoder.native_size,
        "mean": encoder.mean,
        "std": encoder.std,
        "colours_from": encoder.normalization_source,
        "parameters": sum(value.numel() for value in encoder.module.parameters()),
        "used": encoder.loaded_keys,
        "total": encoder.total_keys,
        "ignored": dict(weights_info.ignored),
        "note": weights_info.note or _NO_KEYS * ("key" in encoder.fallback_facets),
        "sha256": encoder.sha256,
    }


def _file_format(file: Path | None) -> str:
    if file is None:
        return "none"
    formats = {".safetensors": "safetensors", ".onnx": "ONNX", ".py": "Python"}
    if file.suffix in formats:
        return formats[file.suffix]
    try:
        with open_regular(file) as opened:
            return "PyTorch zip" if opened.read(2) == b"PK" else "PyTorch pickle"
    except OSError as error:
        raise CheckpointError(f"cannot read {file} ({error.strerror})") from error


def _format_description(encoder: Mapping[str, Any]) -> list[str]:
    is_own_module = encoder["layout"] == "module"
    size = f", {encoder['size'] / 1e6:.1f} MB" if encoder["size"] else ""
    source = f" ({encoder['source']})" if encoder["source"] else ""
    no_heads = "heads not known" if is_own_module else "no attention"
    heads = f"{encoder['heads']} heads" if encoder["heads"] else no_heads
    first, last = encoder["patch_size"], encoder["largest_patch"]
    patches = f"{first} to {last}" if first != last else f"{first}"
    mean, std = ("/".join(f"{value:g}" for value in encoder[name]) for name in ("mean", "std"))
    height, width = encoder["image_size"]
    if encoder["total"]:
        tensors = f"{encoder['used']} of {encoder['total']} used"
    else:
        tensors = "as the module initialised them" if is_own_module else "random"
    ignored: dict[str, list[str]] = {}
    for name, reason in sorted(encoder["ignored"].items()):
        ignored.setdefault(reason, []).append(name)
    rows = [
        ("file", f"{encoder['format']}{size}"),
        ("layout", f"{encoder['layout']}{source}"),
        ("encoder", f"{encoder['depth']} blocks, width {encoder['width']}, {heads}"),
        (
            "tokens",
            f"patches of {patches} pixels, {encoder['class_tokens']} [CLS], "
            f"{encoder['registers']} registers",
        ),
        ("images", f"{height} x {width}, mean {mean}, std {std} ({encoder['colours_from']})"),
        ("parameters", f"{encoder['parameters']:,}"),
        ("tensors", tensors),
        *([("note", encoder["note"])] if encoder["note"] else []),
        *(("ignored", f"{_shorten(names)}: {reason}") for reason, names in ignored.items()),
        ("sha256", encoder["sha256"]),
    ]
    return [encoder["uri"], *(f"  {label:<11} {text}" for label, text in rows)]


def _shorten(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{', '.join(names[:_MAX_NAMES])}{more}"


def _list_as_json() -> dict[str, object]:
    return {
        "addresses": [
            {"form": a.form, "example": a.example, "meaning": a.meaning} for a in list_addresses()
        ],
        "layouts": [{"name": layout.name, "source": layout.source} for layout in LAYOUTS],
        "torchhub": {repository: dict(names) for repository, names in HUB_WEIGHTS.items()},
        "timm": list(TIMM_PATTERNS),
    }


def _format_list() -> list[str]:
    return [
        "Values of --checkpoint:",
        *(f"  {a.form:<25} {a.meaning:<42} {a.example}" for a in list_addresses()),
        "",
        "Layouts that are recognised in FILE:",
        *(f"  {layout.name:<25} {layout.source}" for layout in reversed(LAYOUTS)),
        "",
        "Weights for torchhub:REPOSITORY:NAME, downloaded once:",
        *(f"  {repository:<25} {', '.join(names)}" for repository, names in HUB_WEIGHTS.items()),
        "",
        f"timm architectures: {', '.join(TIMM_PATTERNS)}",
        "",
        "Run `ssl-bench models FILE` to describe a file. See docs/models.md for details.",
    ]
