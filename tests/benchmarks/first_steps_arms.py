"""The arms of `first_steps`, as words behind `ssl-bench pretrain`.

All but a few are an experiment of a paper made small: the experiment says what an arm is, shared
words say its size and how it is trained. An arm takes about half a minute of a quiet core.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from string import Template

STEPS, BATCH = 200, 64

# Shared words by a name that the page prints as a variable of a shell.
SHARED: Mapping[str, str] = {
    "steps": f"data.limit={STEPS * BATCH} data.fingerprint=stat train.epochs=1 "
    f"train.batch_size={BATCH} train.num_workers=0 "
    "train.max_grad_norm=1.0",
    "rate": "optimizer.lr=4e-3 train.schedule=cosine train.warmup_epochs=0.1",
    "test": "monitor.accuracy_epochs=1 monitor.val_split=test monitor.val_images=1000",
    "crops": "objective.label_smoothing=0.0 objective.crops.scale=[0.75,1.0] "
    "objective.crops.num_ops=0 objective.crops.cutout=0 objective.crops.erasing_probability=0.0 "
    "objective.crops.mixup=0.0 objective.crops.cutmix=0.0",
    "deit": "train.repeats=1 model.drop_path=0.0",
    "vit": "model.dim=48 model.depth=3 model.patch_size=4",
    "swin": "model.image_size=32 model.patch_size=2 model.window_size=4 "
    "model.widths=[24,48,96,192] model.depths=[1,1,1,2] model.heads=[1,2,4,8]",
    "cait": "model.image_size=32 model.patch_size=4 model.widths=[48] model.depths=[2] "
    "model.heads=[3]",
    "pvt": "model.image_size=64 model.widths=[16,32,64,128] model.depths=[1,1,1,2] "
    "model.heads=[1,2,4,8]",
    "atto": "model.image_size=32 model.widths=[16,32,64,128] model.depths=[1,1,1,2]",
    "convnext": "model.dim=48 model.depth=3 model.patch_size=4",
    "mae": "model.image_size=32 model.num_heads=3 objective.decoder_dim=48 "
    "objective.decoder_depth=2 objective.decoder_heads=3",
}
_SUPERVISED = ("$steps", "$rate", "$test", "$crops")


@dataclass(frozen=True)
class Arm:
    """A run and what is asked of it.

    Attributes:
        own: Its words; `$NAME` stands for one of `SHARED`, `$after` for the folder of `after`.
        data: Folder of its images below DATA; empty for strings that are drawn.
        layers: Blocks that k-NN looks at; empty for what is no encoder. Where an encoder has
            stages they are those of the last one, whose width its final norm has.
        after: Arm whose weights it begins with.
    """

    name: str
    own: tuple[str, ...]
    data: str = "cifar10"
    layers: str = "0,-1"
    after: str = ""

    def words(self, after: str | None) -> list[str]:
        """As they are typed, `after` being the folder of the arm of that name."""
        return Template(" ".join(self.own)).substitute(SHARED, after=after or "").split()

    @property
    def run(self) -> str:
        """Its experiment, whose published row stands beside it if there is one."""
        (experiment,) = (word for word in self.own if word.startswith("experiment="))
        return experiment.partition("=")[2]


def _timm(name: str, experiment: str, sizes: str, *own: str, layers: str = "-2,-1") -> Arm:
    words = (f"experiment=graying_imagenet_{experiment}", *own, sizes, "$deit", *_SUPERVISED)
    return Arm(name, words, layers=layers)


def _of_paper(name: str, experiment: str, *own: str, layers: str = "0,-1") -> Arm:
    return Arm(name, (f"experiment={experiment}", *own, *_SUPERVISED), layers=layers)


def _mae(name: str, experiment: str) -> Arm:
    words = (f"experiment={experiment}", "$vit", "$mae", "$steps", "$rate")
    return Arm(name, words, data="cifar10/train")


def _fine_tuned(name: str, experiment: str, after: str) -> Arm:
    sizes = ("$vit", "model.image_size=32", "model.num_heads=3", "$deit")
    words = (f"experiment={experiment}", "init_from=$after", *sizes, *_SUPERVISED)
    return Arm(name, words, after=after)


def _copying(name: str, experiment: str) -> Arm:
    words = (f"experiment={experiment}", f"train.max_steps={STEPS}")
    return Arm(name, words, data="", layers="")


_ONE_STAGE = ("experiment=convmixer_cifar10", "model=convnext_256_8", "$convnext", *_SUPERVISED)
SECTIONS: Mapping[str, tuple[Arm, ...]] = {
    "Always Skip Attention: token graying in Swin": (
        _timm("swin_plain", "swin_s_plain", "$swin"),
        _timm("swin_dct_map", "swin_s_dct", "$swin"),
        _timm("swin_dct_window", "swin_s_dct", "$swin", "model.graying_scope=window"),
    ),
    "Always Skip Attention: token graying in CaiT": (
        _timm("cait_plain", "cait_s_plain", "$cait", layers="0,-1"),
        _timm("cait_dct", "cait_s_dct", "$cait", layers="0,-1"),
        _timm(
            "cait_dct_class_blocks",
            "cait_s_dct",
            "$cait",
            "model.graying_class_blocks=true",
            layers="0,-1",
        ),
    ),
    "Always Skip Attention: token graying in PVT v2": (
        _timm("pvt_plain", "pvt_v2_b3_plain", "$pvt"),
        _timm("pvt_dct", "pvt_v2_b3_dct", "$pvt"),
    ),
    "Always Skip Attention: MAE, and fine-tuned": (
        _mae("mae_plain", "mae_imagenet"),
        _mae("mae_dct", "mae_imagenet_dct"),
        _mae("mae_dct_decoder", "mae_imagenet_dct_decoder"),
        _fine_tuned("mae_finetuned", "mae_imagenet_finetune", "mae_plain"),
        _fine_tuned("mae_dct_finetuned", "mae_imagenet_finetune_dct", "mae_dct"),
    ),
    "Always Skip Attention: one skip without the other": (
        _of_paper("both_skips", "one_skip_cifar10_both", "$vit"),
        _of_paper("no_skip_mlp", "one_skip_cifar10_no_mlp", "$vit"),
        _of_paper("no_skip_attention", "one_skip_cifar10_no_attention", "$vit"),
    ),
    "Mimetic initialization: ConvNeXt-Atto": (
        _of_paper("atto_uniform", "convnext_cifar10_uniform", "$atto", layers="-2,-1"),
        _of_paper("atto_covariance", "convnext_cifar10_covariance", "$atto", layers="-2,-1"),
    ),
    "Mimetic initialization: ConvNeXt of one stage": (
        Arm("convnext_256_8_uniform", (*_ONE_STAGE, "model.init=uniform")),
        Arm("convnext_256_8_covariance", (*_ONE_STAGE, "model.init=covariance")),
    ),
    "Mimetic initialization: pieces of attention": (
        _of_paper("mimetic_attention", "mimetic_cifar10_192_12_6_mimetic", "$vit"),
        _of_paper("mimetic_qk", "mimetic_cifar10_192_12_6_qk", "$vit"),
        _of_paper("mimetic_vo", "mimetic_cifar10_192_12_6_vo", "$vit"),
    ),
    "Mimetic initialization: length of positions": (
        _of_paper("position_scale_1", "mimetic_cifar10_mimetic", "$vit"),
        _of_paper("position_scale_2", "mimetic_cifar10_position_scale_2", "$vit"),
    ),
    "Mimetic initialization: MLP": (
        _of_paper("mlp_default", "mimetic_mlp_cifar10_default", "$vit"),
        _of_paper("mlp_mean", "mimetic_mlp_cifar10_mlp", "$vit"),
    ),
    "Mimetic initialization: Mamba 2 that copies": (
        _copying("mamba2_default", "mimetic_copying_default"),
        _copying("mamba2_mimetic", "mimetic_copying_mimetic"),
    ),
    "Mimetic initialization: Mamba 1 that copies": (
        _copying("mamba1_default", "mimetic_copying_mamba1_default"),
        _copying("mamba1_mimetic", "mimetic_copying_mamba1_mimetic"),
    ),
    "Orthogonal Self-Attention: MNIST": (
        Arm(
            "osa_qr",
            ("experiment=osa_mnist_qr", "model.depth=2", "optimizer.lr=1.2e-3", "$steps", "$test"),
            data="mnist",
        ),
    ),
}
# The first of every section comes first: a list that is stopped has something of each.
ARMS = tuple(arm for arms in zip_longest(*SECTIONS.values()) for arm in arms if arm)
