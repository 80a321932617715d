"""Test the k-NN classification probe."""

import itertools
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from probes.features.image import ImagePass
from probes.knn import KNN
from probes.top_k import top_k_score
from ssl_bench.cli.__main__ import main
from ssl_bench.data.layouts.class_folders import ClassFolders
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import CheckpointError, ConfigurationError
from ssl_bench.features import FeatureExtractor, central_square
from ssl_bench.models import save_encoder
from ssl_bench.neighbours import LabelledFeatures, knn_ranks, stable_topk, vote_rank
from tests.support.coloured_classes import build_constant_encoder, class_context, run_probe, tiny
from tests.support.faults import class_folders, encoder_file, expect_error, make_probe_args, records


def directions(*degrees):
    angles = torch.tensor(degrees).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], 1)


def ranks(queries, targets, bank, labels, *, num_classes=4, neighbours=(1,), temperature=0.07):
    return knn_ranks(
        LabelledFeatures(queries, torch.tensor(targets)),
        LabelledFeatures(bank, torch.tensor(labels)),
        num_classes=num_classes,
        neighbours=neighbours,
        temperature=temperature,
    ).tolist()


def test_ties_go_to_earlier_neighbours_and_lower_classes():
    bank = directions(10.0, -10.0, 10.0, 10.0, 90.0)

    found = ranks(directions(10.0), [3], bank, [0, 1, 3, 2, 1], neighbours=(1, 2, 3))
    assert found == [[4], [1], [2]]
    values, index = stable_topk(torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 2.0]]), 2)
    assert (values.tolist(), index.tolist()) == ([[2.0, 2.0]], [[1, 3]])
    votes = torch.ones(3, 2, dtype=torch.float64)
    named = torch.tensor([[2, 1]]).expand(3, 2)
    assert vote_rank(votes, named, torch.tensor([1, 2, 0]), 3).tolist() == [0, 1, 3]
    # At a right angle, the weight exp(-1 / 0.0001) is too small for a float. It still counts as a
    # vote.
    far = {"neighbours": (2,), "temperature": 1e-4}
    assert ranks(directions(0.0), [2], directions(0.0, 90.0), [0, 2], **far) == [[1]]


DEVICE = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PATHS = [
    ("torch", "cpu"),
    ("faiss", "cpu"),
    pytest.param("torch", "cuda", marks=[pytest.mark.gpu, DEVICE]),
]


@pytest.mark.parametrize(("engine", "device"), PATHS)
def test_classes_without_votes_are_not_in_the_top_five(engine, device):
    # Two images of class 4 and one of class 2 are close. The others are at least 90 degrees away.
    bank, labels = directions(0.0, 5.0, -5.0, *range(90, 130)), [4, 4, 2, *[0, 1, 3, 5] * 10]
    targets = [4, 2, 0, 1, 3, 5, 4, 2]

    queries = LabelledFeatures(directions(0.0).expand(8, -1), torch.tensor(targets))
    found = knn_ranks(
        queries.to(torch.device(device)),
        LabelledFeatures(bank, torch.tensor(labels)).to(torch.device(device)),
        num_classes=6,
        neighbours=[1, 3],
        temperature=0.07,
        engine=engine,
    ).tolist()

    # Class 4 has the votes 1 and 0.95, class 2 has 0.95, and the others have none.
    assert found == [[0, 6, 6, 6, 6, 6, 0, 6], [0, 1, 6, 6, 6, 6, 0, 1]]


@pytest.mark.parametrize("rows_at_once", [4096, 7])
def test_the_vote_equals_a_loop_in_float64(monkeypatch, rows_at_once):
    monkeypatch.setattr("ssl_bench.neighbours._VOTE_QUERIES", rows_at_once)
    generator = torch.Generator().manual_seed(0)
    bank, queries = (torch.randn(n, 8, generator=generator) for n in (50, 30))
    labels, targets = (torch.randint(7, (n,), generator=generator) for n in (50, 30))

    settings = {"num_classes": 7, "neighbours": (5, 50), "temperature": 0.2}
    ours = ranks(queries, targets.tolist(), bank, labels.tolist(), **settings)

    for k, found in zip((5, 50), ours, strict=True):
        for query, target, rank in zip(queries.double(), targets.tolist(), found, strict=True):
            similarity = torch.cosine_similarity(query[None], bank.double())
            order = similarity.argsort(descending=True)[:k].tolist()
            votes = [0.0] * 7
            for i in order:
                votes[labels[i]] += math.exp(similarity[i].item() / 0.2)
            expected = sorted(range(7), key=lambda c, votes=votes: -votes[c]).index(target)
            assert rank == (expected if votes[target] else 7)


def test_the_central_square_equals_that_of_torchvision():
    cases = (375, 224, 0.875), (500, 224, 0.875), (64, 96, 1.0), (1201, 96, 1.0), (375, 30, 0.9)
    for height, size, share in cases:
        image = np.random.default_rng(0).integers(0, 256, (height, 443, 3), dtype=np.uint8)
        bicubic = transforms.InterpolationMode.BICUBIC
        resized = transforms.Resize(round(size / share), bicubic)(Image.fromarray(image))
        expected = np.array(transforms.CenterCrop(size)(resized)).astype(int)

        found = central_square(image, size, crop_share=share).permute(1, 2, 0).numpy()

        assert np.abs(found - expected).max() <= 1


def test_every_score_equals_that_of_features_extracted_one_by_one(root):
    facets = ("cls", "patch_mean")
    probe = KNN(neighbours=(3, 10), facet=facets, crop_share=0.5, batch_size=5, engine="torch")
    dataset = ClassFolders(root)

    found = run_probe(probe, dataset)

    for layer, facet in itertools.product((0, 2), facets):
        queries, bank = (
            extract_one_by_one(layer, facet, images, crop_share=0.5)
            for images in (dataset.val(), dataset.train())
        )
        by_k = knn_ranks(queries, bank, num_classes=6, neighbours=[3, 10], temperature=0.07)
        for (class_ranks, k), top in itertools.product(zip(by_k, (3, 10), strict=True), (1, 5)):
            score = found[layer, facet, f"top{top}_k{k}"]
            right = class_ranks < top
            assert score.value == pytest.approx(100 * right.double().mean().item())
            assert score.ci95 is not None
            assert score.ci95[0] <= score.value <= score.ci95[1]
            assert score.num_images == 12
            assert score.per_image is not None
            assert score.per_image.tolist() == right.tolist()


@pytest.mark.parametrize("facet", ["cls", "patch_mean"])
def test_features_come_from_the_central_squares(root, facet):
    images, context = ClassFolders(root).val(), class_context(ClassFolders(root))
    image_pass = ImagePass(KNN(facet=facet, crop_share=0.5), context, batch_size=5)

    found = image_pass.run(images, range(len(images)), [2]).select(2, facet)

    expected = extract_one_by_one(2, facet, images, crop_share=0.5).features
    torch.testing.assert_close(found.features, expected)


def extract_one_by_one(layer: int, facet: str, images: ImageSet, *, crop_share: float):
    """Extract the features of one image at a time."""
    encoder = tiny()
    extractor = FeatureExtractor(encoder, layers=[layer], facets=["cls", "token"])
    norm, vectors = encoder.module.get_submodule("norm"), []
    for index in range(len(images)):
        pixels = central_square(images[index].image, 16, crop_share=crop_share)
        found = extractor(pixels[None].float() / 255)[layer]
        vector = norm(found["cls"]) if facet == "cls" else norm(found["token"]).mean((1, 2))
        vectors.append(vector.detach())
    labels = [images[index].label for index in range(len(images))]
    return LabelledFeatures(torch.cat(vectors), torch.tensor(labels))


@pytest.mark.parametrize(
    ("words", "size", "changed"),
    [
        ((), None, {}),
        (("probe.protocol=dinov2", "probe.image_size=48"), 48, {"image_size": 48}),
    ],
)
def test_a_record_states_the_image_size_of_its_protocol(workdir, words, size, changed):
    class_folders(workdir)

    assert main(make_probe_args("knn", "class_folders", workdir, *words)) == 0

    for record in records():
        assert record.settings["image_size"] == size
        assert record.changed == {"neighbours": [1, 2], **changed}
        *first, _ = record.details["guesses"]
        assert first == ([] if size else ["squares of 32 pixels where theirs are 224"])


@pytest.mark.parametrize(
    ("changes", "fitting"), [({}, "[10,20]"), ({"neighbours": [9], "train_images": 8}, "[8]")]
)
def test_more_neighbours_than_images_are_refused(root, changes, fitting):
    with pytest.raises(ConfigurationError) as error:
        run_probe(KNN(**changes), ClassFolders(root))

    assert error.value.hint == ("--task", "knn", f"probe.neighbours={fitting}")


def test_default_neighbours_are_limited_to_the_number_of_images(workdir, capsys):
    class_folders(workdir, count=6)
    words = make_probe_args("knn", "class_folders", workdir)
    words = [word for word in words if not word.startswith("probe.")]

    assert main(words) == 0
    assert "knn uses neighbours=[10] to fit" in capsys.readouterr().err
    assert main([*words, "--dry-run"]) == 0
    assert "2 finished, 0 pending" in capsys.readouterr().out
    assert main([*words, "probe.train_images=4"]) == 0
    assert main([*words, "probe.neighbours=13"]) == 2

    assert {(r.metric, *r.changed["neighbours"]) for r in records()} == {
        (f"top{top}_k{k}", k) for top in (1, 5) for k in (4, 10)
    }


def test_an_encoder_without_cls_is_refused_or_left_out(workdir, encoder_without_cls, capsys):
    encoder_file(workdir / "vit.safetensors")
    save_encoder(workdir / "encoder.safetensors", encoder_without_cls.module, {})
    class_folders(workdir)
    tasks = ("knn", "geometry", "classification", "clustering")

    for task in tasks:
        line = expect_error(capsys, make_probe_args(task, "class_folders", workdir), 2)
        assert "`probe.facet=patch_mean`" in line
    expect_error(capsys, make_probe_args("knn", "class_folders", workdir, "--dry-run"), 2)
    words = [*make_probe_args("knn", "class_folders", workdir)[1:], "--task", ",".join(tasks)]
    words = [word for word in words if not word.startswith("probe.")]
    assert main(["sweep", *words, "--checkpoint", "vit.safetensors", "--dry-run"]) == 0
    messages = capsys.readouterr().err
    assert all(f"left out: {task} on class_folders: encoder" in messages for task in tasks)
    words = make_probe_args("geometry", "class_folders", workdir, "probe.facet=patch_mean")
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, "--dry-run"]) == 0
    assert ", 0 pending" in capsys.readouterr().out


def test_top5_accuracy_is_undefined_with_fewer_than_five_classes(workdir, capsys):
    class_folders(workdir)
    assert main(make_probe_args("knn", "class_folders", workdir)) == 0
    for record in records():
        is_top5 = record.metric.startswith("top5")
        assert (math.isnan(record.value), record.ci95 is None) == (is_top5, is_top5)
    capsys.readouterr()
    assert main(["table", "--metric", "top5_k1"]) == 0
    assert "no value for block 1: fewer than 5 classes" in capsys.readouterr().out


@pytest.mark.parametrize("num_classes", [4, 5])
def test_top_k_accuracy_is_defined_with_k_classes(num_classes):
    hits, labels = torch.tensor([True, False]), torch.tensor([0, num_classes - 1])
    score = top_k_score(0, "cls", "top5", hits, labels, top=5, num_classes=num_classes, details={})
    assert math.isnan(score.value) if num_classes == 4 else score.value == 50


def test_equal_features_are_flagged_and_nan_is_refused(root):
    found = run_probe(KNN(neighbours=[3]), ClassFolders(root), encoder=build_constant_encoder())

    assert all(score.details["constant_features"] for score in found.values())
    # All training images are equally close, so the first three vote, which have the same class.
    assert found[0, "cls", "top1_k3"].value == pytest.approx(100 / 6)
    with pytest.raises(CheckpointError, match="block 0"):
        run_probe(KNN(neighbours=[3]), ClassFolders(root), encoder=build_constant_encoder(math.nan))
