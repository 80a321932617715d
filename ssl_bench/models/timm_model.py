"""Models of timm as encoders of this suite: all blocks in one row, whatever their stages.

timm, which is slow to import, is imported when one of them is made.
"""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from ssl_bench.models.graying_hooks import gray_inputs
from ssl_bench.models.timm_config import TimmConfig

Images = Float[Tensor, "batch 3 height width"]


class TimmBackbone(nn.Module):
    """A model of timm as probes take it: all blocks in turn, and a norm for tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def blocks(self) -> nn.ModuleList:
        """Those of all stages in turn; CaiT's blocks of [CLS] alone are none of them."""
        return nn.ModuleList(blocks_of(self.model))

    @property
    def norm(self) -> nn.Module:
        """The final norm, for tokens of the last block."""
        from ssl_bench.models.timm_anatomy import final_norm

        return final_norm(self.model)

    def forward(self, images: Images) -> Float[Tensor, "batch dim"]:
        """What timm's head would take: [CLS] or the mean over all patches."""
        from ssl_bench.models.timm_anatomy import pooled

        return pooled(self.model, images)


class TimmEncoder(TimmBackbone):
    """A model of timm; `build_encoder` makes one with initialised weights.

    Its weights have timm's names behind "model.".
    """

    def __init__(self, config: TimmConfig) -> None:
        from ssl_bench.models.timm_anatomy import check_sizes, create

        super().__init__(create(config))
        self.config = config
        check_sizes(config, self.model)
        gray_inputs(config, blocks_of(self.model), getattr(self.model, "blocks_token_only", ()))
        for filters in depthwise_filters(self.model) if config.frozen_filters else ():
            filters.weight.requires_grad_(False)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of all stages in turn."""
    stages: Any = getattr(model, "layers", getattr(model, "stages", None))
    found: Any = getattr(model, "blocks", None)
    return list(found) if stages is None else [b for stage in stages for b in stage.blocks]


def depthwise_filters(model: nn.Module) -> list[nn.Conv2d]:
    """ConvNeXt's convolutions of one channel each, in the order of its blocks."""
    found = (module for block in blocks_of(model) for module in block.modules())
    return [m for m in found if isinstance(m, nn.Conv2d) and m.weight.shape[1] == 1]
