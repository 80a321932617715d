"""Words of the smallest runs of pretraining."""

SMALL = (
    "model.image_size=16", "model.patch_size=8", "model.dim=24", "model.depth=2",
    "model.num_heads=2", "train.batch_size=2", "train.max_steps=3", "train.num_workers=0",
)  # fmt: skip
OBJECTIVES = {
    "dino": (
        "objective.out_dim=32", "objective.hidden_dim=16", "objective.bottleneck_dim=8",
        "objective.crops.num_locals=2", "objective.crops.local_size=8",
    ),
    "mae": ("objective.decoder_dim=16", "objective.decoder_depth=1", "objective.decoder_heads=2"),
    "supervised": ("data.labels=true", "objective.crops.mixup=0.8", "objective.crops.cutmix=1.0"),
}  # fmt: skip
