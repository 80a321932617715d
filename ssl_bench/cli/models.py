"""The command `ssl-bench models`: what can be loaded, and what a file is."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ssl_bench.errors import CheckpointError, SslBenchError
from ssl_bench.models import Encoder, load_encoder
from ssl_bench.models.loading.hub import HUB_WEIGHTS
from ssl_bench.models.loading.layouts import LAYOUTS
from ssl_bench.system.escaping import dump_json, escape_lines, to_one_line
from ssl_bench.system.files import open_regular

_SHOWN = 3
_NO_KEYS = (
    "no queries, keys and values known (attn.qkv in each block); probes look at tokens instead"
)


class Address(NamedTuple):
    """A way to name an encoder."""

    form: str
    example: str
    meaning: str


ADDRESSES = (
    Address("FOLDER", "runs/skip", "a run of this suite, its last.safetensors"),
    Address("FOLDER@EPOCH", "runs/skip@200", "the encoder a run kept after an epoch"),
    Address("FILE.safetensors", "runs/skip/last.safetensors", "a checkpoint of this suite"),
    Address("FILE", "dinov2_vits14_pretrain.pth", "weights in one of the layouts below"),
    Address("FILE.py:NAME", "my_model.py:encoder", "a module of one's own; its file is run"),
    Address("timm:NAME.TAG", "timm:vit_small_patch16_224.dino", "published with timm"),
    Address("timm:NAME@FILE", "timm:vit_small_patch16_224@mine.pth", "timm's architecture, a file"),
    Address("timm:NAME", "timm:vit_small_patch16_224", "timm's architecture, random weights"),
    Address("hf-hub:ORG/NAME@REVISION", "hf-hub:facebook/dinov2-small", "timm or transformers"),
    Address(
        "local-dir:FOLDER", "local-dir:/models/dinov2-small", "config.json + model.safetensors"
    ),
    Address(
        "torchhub:REPOSITORY:NAME",
        "torchhub:facebookresearch/dino:dino_vits16",
        "weights of a hub, whose code is not run",
    ),
    Address("demo:NAME", "demo:skip", "skip or skipless: ours, for demonstration"),
    Address(
        "mean=0.5,std=0.5:URI",
        "mean=0.5,std=0.5:my.pth",
        "a file that does not say what it was trained with",
    ),
    Address("random:URI", "random:runs/skip", "any of these before it was trained (--baselines)"),
    Address("colours:PATCH", "colours:16", "no encoder: the colours of each patch (--baselines)"),
)
TIMM_PATTERNS = (
    *("vit_*", "deit*", "flexivit_*", "eva*", "beit3_*", "aimv2_*", "vitamin_*"),
    *("vit_*dinov2", "vit_*dinov3", "vit_*siglip*", "vit_*clip*", "vit_*rope*", "vit_pe_*"),
)
"""Families of timm with blocks that take images of any size; the rest is refused by name."""


def command(options: argparse.Namespace) -> int:
    """List what can be loaded; with files, say what each is.

    Files that cannot be loaded are told in a line each, and the exit code is that of the first.
    """
    if not options.uris:
        print(dump_json(_listing(), indent=2) if options.json else "\n".join(_listing_lines()))
        return 0
    code, found = 0, []
    for uri in options.uris:
        try:
            report = file_report(load_encoder(uri))
        except SslBenchError as error:
            code = code or error.exit_code
            found.append({"uri": uri, "error": to_one_line(error)})
            print(f"ssl-bench: {found[-1]['error']}", file=sys.stderr)
            continue
        found.append(report)
        if not options.json:
            print(escape_lines([*([""] if len(found) > 1 else []), *_lines(report)]))
    if options.json:
        print(dump_json(found, indent=2))
    return code


def file_report(encoder: Encoder) -> dict[str, Any]:
    """What is known of an encoder, as JSON types; its weights stay where they are.

    `size` in bytes, `largest_patch` and `image_size` in pixels; `used` tensors of `total` in their
    container; `ignored` those that are not, and why; `colours_from` who says what mean and
    deviation are.
    """
    contents = encoder.contents
    return {
        "uri": encoder.uri,
        "name": encoder.name,
        "format": _format(contents.file),
        "size": contents.file.stat().st_size if contents.file else 0,
        "layout": contents.layout,
        "source": contents.source,
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
        "colours_from": encoder.colours_from,
        "parameters": sum(value.numel() for value in encoder.module.parameters()),
        "used": encoder.loaded_keys,
        "total": encoder.total_keys,
        "ignored": dict(contents.ignored),
        "note": contents.note or _NO_KEYS * ("key" in encoder.instead),
        "sha256": encoder.sha256,
    }


def _format(file: Path | None) -> str:
    if file is None:
        return "no file"
    if named := {".safetensors": "safetensors", ".onnx": "ONNX", ".py": "Python"}.get(file.suffix):
        return named
    try:
        with open_regular(file) as opened:
            return "PyTorch zip" if opened.read(2) == b"PK" else "PyTorch pickle"
    except OSError as error:
        raise CheckpointError(f"cannot read {file} ({error.strerror})") from error


def _lines(report: Mapping[str, Any]) -> list[str]:
    megabytes = f", {report['size'] / 1e6:.1f} MB" if report["size"] else ""
    source = f"({report['source']})" if report["source"] else ""
    is_own = report["layout"] == "module"
    without = ", heads not known" if is_own else ", no attention"
    heads = f", {report['heads']} heads" if report["heads"] else without
    first, last = report["patch_size"], report["largest_patch"]
    patches = f"{first} to {last}" if first != last else f"{first}"
    mean, std = ("/".join(f"{one:g}" for one in report[name]) for name in ("mean", "std"))
    height, width = report["image_size"]
    by_reason: dict[str, list[str]] = {}
    for name, why in sorted(report["ignored"].items()):
        by_reason.setdefault(why, []).append(name)
    tensors = f"{report['used']} of {report['total']} used" if report["total"] else ""
    rows = [
        ("file", f"{report['format']}{megabytes}"),
        ("layout", f"{report['layout']} {source}".strip()),
        ("encoder", f"{report['depth']} blocks, width {report['width']}{heads}"),
        (
            "tokens",
            f"patches of {patches} pixels, {report['class_tokens']} [CLS], "
            f"{report['registers']} registers",
        ),
        ("images", f"{height} x {width}, mean {mean}, deviation {std} ({report['colours_from']})"),
        ("parameters", f"{report['parameters']:,}"),
        ("tensors", tensors or ("as the module made them" if is_own else "random")),
        *([("note", report["note"])] if report["note"] else []),
        *(("left out", f"{_some(names)}: {why}") for why, names in by_reason.items()),
        ("sha256", report["sha256"]),
    ]
    return [report["uri"], *(f"  {label:<11} {text}" for label, text in rows)]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _listing() -> dict[str, object]:
    return {
        "addresses": [address._asdict() for address in ADDRESSES],
        "layouts": [{"name": layout.name, "source": layout.source} for layout in LAYOUTS],
        "torchhub": {repository: dict(names) for repository, names in HUB_WEIGHTS.items()},
        "timm": list(TIMM_PATTERNS),
    }


def _listing_lines() -> list[str]:
    return [
        "What --checkpoint takes:",
        *(f"  {a.form:<25} {a.meaning:<42} {a.example}" for a in ADDRESSES),
        "",
        "Layouts that are recognised in a FILE:",
        *(f"  {layout.name:<25} {layout.source}" for layout in reversed(LAYOUTS)),
        "",
        "Weights with a torchhub: address, fetched once:",
        *(f"  {repository:<25} {', '.join(names)}" for repository, names in HUB_WEIGHTS.items()),
        "",
        f"Architectures of timm: {', '.join(TIMM_PATTERNS)}",
        "",
        "`ssl-bench models FILE` says what a file is; docs/models.md has the rest.",
    ]
