"""timm's models as encoders, with positions resized as in DINO."""

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

import timm
import torch
from jaxtyping import Float
from timm.models.cait import Cait
from timm.models.convnext import ConvNeXt
from timm.models.eva import Eva
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ssl_bench.errors import CheckpointError
from ssl_bench.models.architecture import of_library
from ssl_bench.models.encoder import ASSUMED, Colours, Contents, Encoder
from ssl_bench.models.kinds import state_dict_sha256
from ssl_bench.models.loading.foreign import dinov3_weights
from ssl_bench.models.loading.hub import downloaded_file, hugging_face_file
from ssl_bench.models.loading.identity import unreplaced, verified_sha256
from ssl_bench.models.loading.layouts import dinov3_architecture
from ssl_bench.models.loading.stated_colours import colour_of
from ssl_bench.models.loading.timm_attention import give_queries_keys_values
from ssl_bench.models.loading.timm_stages import Staged, staged_encoder, with_file
from ssl_bench.models.loading.timm_weights import (
    images_of_file,
    patch_of_file,
    require_weights,
    without_register_positions,
    wrong_shapes,
)
from ssl_bench.models.loading.weights import Backbone, backbone_weights, read_weights
from ssl_bench.models.timm_anatomy import resized_positions
from ssl_bench.models.timm_families import family_of
from ssl_bench.system.memory import pass_on_memory
from ssl_bench.system.paths import expanded

# Eva holds timm's ViTs with rotary positions, DINOv3 among them.
PlainViT = VisionTransformer | Eva
Supported = PlainViT | SwinTransformer | PyramidVisionTransformerV2 | ConvNeXt | Cait

_RANDOM_SEED = 0
_SUPPORTED = (
    "supported are timm's plain Vision Transformers, which take dynamic_img_size and images of any "
    "size, for example vit_small_patch16_224, and its Swin, CaiT, PVT v2 and ConvNeXt"
)


class TimmViT(nn.Module):
    """A Vision Transformer of timm that resizes its positions as DINO does.

    timm's own resampler antialiases and scales without margin, so its features differ at every
    size but the native one.
    """

    def __init__(self, model: PlainViT) -> None:
        super().__init__()
        self.model = model

    @property
    def blocks(self) -> nn.Module:
        return self.model.blocks

    @property
    def norm(self) -> nn.Module:
        return self.model.norm

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch dim"]:
        """The pooled output of timm."""
        patch_embed: Any = self.model.patch_embed
        patch_size = patch_embed.feat_ratio()
        size = (images.shape[-2] // patch_size, images.shape[-1] // patch_size)
        with resized_positions(self.model, size) as positions:
            return torch.func.functional_call(self.model, positions, (images,))


def load_timm(uri: str) -> Encoder:
    """Load `timm:NAME`, `timm:NAME.TAG` or `timm:NAME@FILE`.

    Without tag and file the weights are random, always the same, and the name says so.

    Raises:
        CheckpointError: An unknown or unsupported name, a file that does not fit, no network.
    """
    name, _, file = uri.removeprefix("timm:").partition("@")
    _check_name(name)
    if file:
        return _from_file(uri, name, expanded(file), label=f"{name}@{Path(file).stem}")
    if "." in name:
        return _from_file(uri, name, _published_file(name), label=name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_RANDOM_SEED)
        model = _create(name, None, {}, {})
    return timm_encoder(model, uri=uri, name=f"{name} (random)", sha256=state_dict_sha256(model))


def load_timm_folder(config: Mapping[str, Any], path: Path, *, uri: str, label: str) -> Encoder:
    """Load weights that timm wrote, with what the config.json beside them says.

    Args:
        config: With `architecture`, and `pretrained_cfg` and `model_args` where they matter.
        path: The weights.
        uri: What was asked for.
        label: How tables call it.

    Raises:
        CheckpointError: An unknown or unsupported architecture, or a file that does not fit.
    """
    name = str(config["architecture"]).partition(".")[0]
    _check_name(name)
    arguments = _mapping(config, "model_args", path)
    # Such as checkpoint_path, which would put other weights in place of these.
    strange = [name for name in signature(timm.create_model).parameters if name in arguments]
    if strange:
        raise CheckpointError(
            f"config.json beside {path} has {', '.join(strange)} among model_args, expected the "
            "architecture's arguments alone; take it out"
        )
    return _from_file(uri, name, path, label=label, config=config)


def load_dinov3_folder(path: Path, *, uri: str, label: str, colours: Colours) -> Encoder:
    """Load a DINOv3 that transformers wrote, as the architecture of timm that is the same.

    Raises:
        CheckpointError: the weights are of no published size, or do not fit.
    """
    with unreplaced(path):
        digest = verified_sha256(path)
        backbone = dinov3_weights(backbone_weights(read_weights(path), path), path)
    name = dinov3_architecture(backbone.weights)
    if name is None:
        raise CheckpointError(f"{path} is no DINOv3 of a published size; use timm:NAME@FILE")
    config = {"pretrained_cfg": {"mean": colours[0], "std": colours[1]}}
    return _of_backbone(uri, name, path, digest, backbone, label=label, config=config)


def _from_file(
    uri: str, name: str, path: Path, *, label: str, config: Mapping[str, Any] | None = None
) -> Encoder:
    with unreplaced(path):
        digest = verified_sha256(path)
        backbone = backbone_weights(read_weights(path), path)
    return _of_backbone(uri, name, path, digest, backbone, label=label, config=config)


def _of_backbone(
    uri: str,
    name: str,
    path: Path,
    digest: str,
    backbone: Backbone,
    *,
    label: str,
    config: Mapping[str, Any] | None,
) -> Encoder:
    if not backbone.weights:
        # timm would take "no weights" for "none given" and ask the network.
        raise CheckpointError(f"{path} holds no tensors; save model.state_dict() into it")
    config = config or {}
    model, note = _with_weights(name, path, backbone, config)
    keys = (len(model.state_dict()), backbone.total)
    source = f"timm {timm.__version__}, {name}"
    note = (backbone.note + note).strip(" ;")
    contents = Contents("timm", source, backbone.ignored, note, path)
    encoder = timm_encoder(model, uri=uri, name=label, sha256=digest, keys=keys, contents=contents)
    if {"mean", "std"} <= _mapping(config, "pretrained_cfg", path).keys():
        return encoder
    return replace(encoder, colours_from=f"{ASSUMED}: timm's {name}")


def _check_name(name: str) -> None:
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        near = get_close_matches(architecture, timm.list_models("*vit*"), n=3)
        raise CheckpointError(
            f"timm {timm.__version__} has no model {architecture!r}; "
            f"did you mean: {', '.join(near) or 'vit_small_patch16_224'}?"
        )
    tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{architecture}.*")]
    if tag and tag not in tags:
        raise CheckpointError(
            f"timm {timm.__version__} has no weights {tag!r} for {architecture}; "
            f"it has: {', '.join(tags) or 'none'}"
        )


def _with_weights(
    name: str, path: Path, backbone: Backbone, config: Mapping[str, Any]
) -> tuple[Supported, str]:
    """The model with the very tensors of the file, and what was assumed of their shapes."""
    pretrained = _mapping(config, "pretrained_cfg", path)
    arguments = dict(_mapping(config, "model_args", path))
    overlay: dict[str, Any] = {}
    if "input_size" in pretrained:
        overlay["input_size"] = _input_size(pretrained["input_size"], path)
    weights, note = without_register_positions(backbone.weights), ""
    plan = _create(name, path, arguments, overlay, device="meta")
    if "patch_size" not in arguments and (patch := patch_of_file(plan, weights)):
        arguments |= patch
        note = f"patches of {patch['patch_size']} pixels as in the file"
        plan = _create(name, path, arguments, overlay, device="meta")
    if "img_size" not in arguments and "input_size" not in overlay:
        size, assumed = images_of_file(plan, weights)
        if size:
            arguments |= size
            note = "; ".join(filter(None, [note, assumed]))
            plan = _create(name, path, arguments, overlay, device="meta")
    for key in ("mean", "std"):
        if key in pretrained:
            overlay[key] = colour_of(pretrained, key, path.with_name("config.json"))
    if size := getattr(getattr(plan, "patch_embed", None), "img_size", None):
        # Else timm would take positions of equally many patches for those of another grid.
        overlay["input_size"] = (3, *size)
    # With its heads dropped and 0 classes on both sides timm loads strictly; else it would skip
    # missing keys without a word.
    overlay |= {"state_dict": dict(weights), "num_classes": 0, "label_offset": 0}
    try:
        with torch.random.fork_rng(devices=[]):
            model = _create(name, path, arguments, overlay, pretrained=True)
    except CheckpointError as error:
        raise CheckpointError(wrong_shapes(plan, weights, path, name) or str(error)) from error
    require_weights(model, weights, path, name)
    return model, note


def _mapping(config: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    found = config.get(key) or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"config.json beside {path} has {key}={found!r}, expected an object; fetch it again"
        )
    return found


def _input_size(value: Any, path: Path) -> tuple[int, ...]:
    sizes = value if isinstance(value, list | tuple) else ()
    if len(sizes) != 3 or any(type(size) is not int or size < 1 for size in sizes):
        raise CheckpointError(
            f"config.json beside {path} has input_size={value!r}, expected [3, HEIGHT, WIDTH]; "
            "fetch it again"
        )
    return tuple(sizes)


def _create(
    name: str,
    path: Path | None,
    arguments: Mapping[str, Any],
    overlay: Mapping[str, Any],
    *,
    pretrained: bool = False,
    device: str | None = None,
) -> Supported:
    try:
        model = timm.create_model(
            name,
            pretrained=pretrained,
            pretrained_cfg_overlay=dict(overlay) or None,
            **{**arguments, "num_classes": 0, "device": device, **_any_size(name)},
        )
    except TypeError as error:
        raise CheckpointError(f"timm:{name} is not supported; {_SUPPORTED}") from error
    except Exception as error:  # timm converts the keys of many libraries, and fails in any way.
        pass_on_memory(error)
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        file = path or "its random weights"
        raise CheckpointError(f"timm:{name} does not fit {file}: {reason}") from error
    return _check_supported(model, name, path)


def _any_size(name: str) -> dict[str, bool]:
    """What lets a model take images of any size; convolutions need nothing, CaiT gets it later."""
    family = family_of(name)
    knows_it = family is None or family.windows or family.name in ("ViT", "DeiT")
    return {"dynamic_img_size": True} if knows_it else {}


def _check_supported(model: nn.Module, name: str, path: Path | None) -> Supported:
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    channels = next((convolution.in_channels for convolution in convolutions), 3)
    if channels != 3:
        raise CheckpointError(
            f"{path or f'timm:{name}'} is a {name} for images of {channels} channels, expected 3 "
            "(RGB); take another encoder"
        )
    if isinstance(model, Staged):
        return model
    if not isinstance(model, PlainViT):
        raise CheckpointError(f"timm:{name} is not supported; {_SUPPORTED}")
    patch_embed: Any = model.patch_embed
    rows, cols = patch_embed.feat_ratio(as_scalar=False)
    if rows != cols:
        raise CheckpointError(
            f"timm:{name} has patches of {rows} x {cols} pixels, expected squares; {_SUPPORTED}"
        )
    return model


def _published_file(name: str) -> Path:
    published = timm.get_pretrained_cfg(name)
    if published is not None and published.hf_hub_id:
        return hugging_face_file(str(published.hf_hub_id))
    if published is not None and published.url:
        return downloaded_file(str(published.url))
    raise CheckpointError(f"timm publishes no weights for {name}; use timm:NAME@FILE")


def timm_encoder(
    model: Supported,
    *,
    uri: str,
    name: str,
    sha256: str,
    keys: tuple[int, int] = (0, 0),
    contents: Contents | None = None,
) -> Encoder:
    """Freeze a model of timm; a Vision Transformer's attention gets one layer for q, k and v."""
    if isinstance(model, Staged):
        found = staged_encoder(model, uri=uri, name=name, sha256=sha256)
        return with_file(found, keys, contents)
    assert isinstance(model, PlainViT)
    # Any: what timm declares for these is wider than what they are.
    published: Any = model.pretrained_cfg
    patch_embed: Any = model.patch_embed
    published.pop("state_dict", None)
    architecture = published.get("architecture", type(model).__name__)
    num_heads = give_queries_keys_values(model.blocks)
    registers = model.reg_token
    return Encoder(
        module=TimmViT(model).eval().requires_grad_(False),
        name=name,
        uri=uri,
        sha256=sha256,
        architecture=of_library(model, "timm", architecture),
        patch_size=patch_embed.feat_ratio(),
        depth=len(model.blocks),
        dim=model.embed_dim,
        num_heads=num_heads,
        num_prefix_tokens=model.num_prefix_tokens,
        native_size=patch_embed.img_size,
        mean=tuple(published["mean"]),
        std=tuple(published["std"]),
        colours_from=f"timm's {architecture}",
        loaded_keys=keys[0],
        total_keys=keys[1],
        num_registers=0 if registers is None else registers.shape[1],
        contents=contents or Contents("timm", f"timm {timm.__version__}"),
    )
