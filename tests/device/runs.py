"""Define small probing and pretraining runs for GPU tests."""

from collections.abc import Mapping
from pathlib import Path

from pretrain.objectives.objective import GeneratingObjective
from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore
from tests.support.objectives import reduced_options, small_run

TRAIN = ("train.batch_size=2", "train.max_steps=3", "train.num_workers=0")
SEGMENTATION = ("probe.image_size=32", "probe.training.epochs=2", "probe.training.batch_size=3")
RETRIEVAL = ("probe.image_size=32", "probe.neighbours=5")
POINTS = ("probe.image_size=32", "probe.num_points=16")
HEADS = ("probe.training.batch_size=4", "probe.training.epochs=2")
WALKS = {
    "segmentation": ("segmentation", "voc2012", *SEGMENTATION),
    "segmentation, multi": ("segmentation", "voc2012", *SEGMENTATION, "probe.layers_mode=multi"),
    "segmentation, fast": ("segmentation", "voc2012", *SEGMENTATION, "probe.protocol=fast"),
    "segmentation, fast from disk": (
        "segmentation", "voc2012", *SEGMENTATION, "probe.protocol=fast", "probe.tier=disk",
        "probe.cache=cache",
    ),
    "segmentation, streamed": (
        "segmentation", "voc2012", *SEGMENTATION, "probe.tier=stream", "probe.cache=cache",
        "probe.keep_minutes=0.0",
    ),
    "segmentation, capi": (
        "segmentation", "voc2012", "probe.protocol=capi", "probe.image_size=32",
        "probe.training.batch_size=2", "probe.training.max_iterations=4",
        "probe.training.c_values=[0.01,1.0]",
        "probe.holdout=0.4", "probe.inference.score_size=32",
    ),
    "segmentation, cutting_the_skip": (
        "segmentation", "voc2012", *SEGMENTATION, "probe.protocol=cutting_the_skip",
    ),
    "segmentation, dinov2": ("segmentation", "voc2012", *SEGMENTATION, "probe.protocol=dinov2"),
    "segmentation, neco": ("segmentation", "voc2012", *SEGMENTATION, "probe.protocol=neco"),
    "segmentation, normed": ("segmentation", "voc2012", *SEGMENTATION, "probe.norm=final"),
    "conditioning, lanczos": (
        "conditioning", "folder", "probe.protocol=jacobian_lanczos", "probe.num_images=1",
        "probe.image_size=16", "probe.num_steps=4",
    ),
    "tokencut": ("tokencut", "voc2012", "probe.facet=[key,token,mlp_hidden]"),
    "tokencut, weighted": ("tokencut", "voc2012", "probe.weighted=true", "probe.centred=true"),
    "tokencut, lost": ("tokencut", "voc2012", "probe.method=lost"),
    "tokencut, maskcut": ("tokencut", "voc2012", "probe.method=maskcut"),
    "discovery": ("discovery", "voc2012"),
    "discovery, lost": ("discovery", "voc2012", "probe.method=lost"),
    "pca": ("pca", "folder", "probe.image_size=32"),
    "correspondence": ("correspondence", "folder", *POINTS, "probe.facet=[token,key]"),
    "correspondence, soft": ("correspondence", "folder", *POINTS, "probe.prediction=soft"),
    "correspondence, spair": ("correspondence", "spair71k", "probe.protocol=spair"),
    "pca, dataset": ("pca", "folder", "probe.image_size=32", "probe.protocol=dataset"),
    "pca, foreground": (
        "pca", "folder", "probe.image_size=32", "probe.background=first_component",
    ),
    "conditioning": ("conditioning", "folder", "probe.image_size=16", "probe.num_images=1"),
    "geometry": ("geometry", "folder", "probe.views=2", "probe.facet=[cls,patch_mean,mlp_out]"),
    "knn": ("knn", "class_folders", "probe.neighbours=[1,2]", "probe.facet=[cls,patch_mean]"),
    "clustering": (
        "clustering", "class_folders", "probe.clusters_per_class=[1,2]", "probe.num_restarts=1",
    ),
    "clustering, patches": (
        "clustering", "voc2012", "probe.image_size=32", "probe.facet=[token,key]",
    ),
    "classification": ("classification", "class_folders", "probe.training.c_values=[0.01,1.0]"),
    "knn, shots": ("knn", "class_folders", "probe.shots=[1,2]", "probe.draws=2"),
    "classification, attentive": (
        "classification", "class_folders", "probe.pool=attentive", "probe.pool.queries=4",
        "probe.pool.epochs=2",
    ),
    "classification, dino": ("classification", "class_folders", "probe.protocol=dino", *HEADS),
    "classification, dinov2": (
        "classification", "class_folders", "probe.protocol=dinov2", *HEADS,
    ),
    "retrieval": ("retrieval", "voc2012", *RETRIEVAL),
    "retrieval, hbird": ("retrieval", "voc2012", *RETRIEVAL, "probe.protocol=hbird"),
}  # fmt: skip
# These are not run on MPS, because other runs use the same operators.
NOT_ON_MPS = frozenset(
    {
        *("segmentation, multi", "segmentation, fast from disk", "segmentation, streamed"),
        *("segmentation, cutting_the_skip", "segmentation, neco", "segmentation, normed"),
        *("tokencut, weighted", "pca, dataset", "pca, foreground", "knn, shots"),
        *("classification, dinov2", "retrieval, hbird"),
    }
)


def scores(
    data: Mapping[str, Path], task: str, dataset: str, *more: str, device: str
) -> dict[tuple[int, str, str], float]:
    arguments = ["probe", "--task", task, "--dataset", dataset, "--data-root", str(data[dataset])]
    arguments += ["--checkpoint", "encoder.safetensors", "--device", device, "--out", device]
    assert main([*arguments, *more]) == 0
    return {(r.layer, r.facet, r.metric): r.value for r in ResultStore(Path(device)).records()}


def pretraining(
    objective: str, root: Path | str, *more: str, model: str | None = None
) -> list[str]:
    """Return the command-line arguments of a pretraining run of three steps."""
    plan, options = small_run(objective)
    if model is not None:
        options = reduced_options(f"objective={objective}", f"model={model}")
    images = [] if isinstance(plan.objective, GeneratingObjective) else ["--data-root", str(root)]
    return ["pretrain", *images, *options, *TRAIN, *more]
