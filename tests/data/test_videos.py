"""Test datasets of videos with object masks."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ssl_bench.data.files.file_sets import LabelMap
from ssl_bench.data.files.fingerprints import ReadOptions
from ssl_bench.data.files.images import voc_colours
from ssl_bench.data.layouts.toy_video import NUM_FRAMES, ToyVideo
from ssl_bench.data.layouts.videos import Davis, FrameFolders
from ssl_bench.errors import ConfigurationError, DataError
from tests.support.fingerprints import assert_fingerprint_depends_on

SIZE = (48, 32)  # Width and height.


def write_frame(path: Path, seed: int, size: tuple[int, int] = SIZE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 255, (4, 6, 3), dtype=np.uint8)
    Image.fromarray(noise).resize(size).save(path)


def write_mask(
    path: Path, stripes: Mapping[int, int], size: tuple[int, int] = SIZE, mode: str = "P"
) -> None:
    mask = np.zeros(size[::-1], np.uint8)
    for row, number in stripes.items():
        mask[row:] = number
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(mask)
    if mode == "P":
        image.putpalette(voc_colours().ravel().tolist())
    image.save(path)


def list_videos(root: Path, year: int) -> None:
    (root / f"ImageSets/{year}").mkdir(parents=True)
    (root / f"ImageSets/{year}/val.txt").write_text("cow\nbear\n")


def davis(root: Path, year: int, stripes: Mapping[int, int]) -> Path:
    """Write two small videos in the folder layout of DAVIS."""
    for video, count in (("cow", 4), ("bear", 3)):
        for frame in range(count):
            name = f"480p/{video}/{frame:05d}"
            write_frame(root / f"JPEGImages/{name}.jpg", frame)
            mode = "L" if year == 2016 else "P"
            write_mask(root / f"Annotations/{name}.png", stripes, mode=mode)
    list_videos(root, year)
    return root


ONE, TWO = {8: 255}, {4: 2, 20: 1, 28: 255}


def test_white_is_the_object_of_2016_and_void_in_2017(tmp_path):
    first = Davis(davis(tmp_path / "one", 2016, ONE), year=2016).val()[0].mask
    second = Davis(davis(tmp_path / "two", 2017, TWO)).val()[0].mask

    assert first is not None
    assert second is not None
    assert [first[row, 0] for row in (0, 8, 31)] == [0, 1, 1]
    assert [second[row, 0] for row in (0, 4, 20, 28)] == [0, 2, 1, 255]


def test_frames_are_decoded_when_they_are_accessed(tmp_path):
    root = davis(tmp_path / "DAVIS", 2017, TWO)
    (root / "JPEGImages/480p/cow/00002.jpg").write_bytes(b"damaged")

    videos = Davis(tmp_path).val()

    assert (videos.name, videos.ids, len(videos)) == ("davis2017-2", ("bear", "cow"), 2)
    frames = videos[1].frames
    assert frames is not None
    assert len(frames) == 4
    assert frames[3].image_id == "cow/00003"
    assert frames[3].mask is not None
    with pytest.raises(DataError, match=r"00002\.jpg"):
        frames[2]


def test_a_limit_of_frames_is_part_of_the_name(tmp_path):
    root = davis(tmp_path / "DAVIS", 2017, TWO)
    (root / "Annotations/480p/cow/00003.png").unlink()

    videos = Davis(root, max_frames=2, val_split="val:50-100%").val()

    assert (videos.name, videos.ids) == ("davis2017-2-2frames", ("cow",))
    assert [len(video.frames or ()) for video in (videos[0],)] == [2]


def test_the_fingerprint_depends_on_frames_masks_and_numbers(tmp_path):
    root = davis(tmp_path / "DAVIS", 2017, TWO)
    list_videos(root, 2016)
    first = Davis(root).val().fingerprint()
    assert Davis(root, max_frames=3).val().fingerprint() != first
    videos = Davis(root).val()
    swapped = LabelMap({**videos.labels.classes, 1: 2, 2: 1}, "")
    assert replace(videos, labels=swapped).fingerprint() != first
    options: dict[str, int] = {}
    assert_fingerprint_depends_on(
        lambda: Davis(root, **options).val(),
        lambda: write_frame(root / "JPEGImages/480p/cow/00003.jpg", 9),
        lambda: write_mask(root / "Annotations/480p/cow/00003.png", {4: 1}),
        lambda: options.update(year=2016),
    )
    by_time = replace(Davis(root).val(), options=ReadOptions("stat")).fingerprint()
    assert by_time.startswith("stat-")


def test_masks_of_the_other_year_are_refused(tmp_path):
    first, second = davis(tmp_path / "one", 2016, ONE), davis(tmp_path / "two", 2017, TWO)
    list_videos(first, 2017)
    list_videos(second, 2016)

    with pytest.raises(DataError) as caught:
        Davis(first, year=2017).val()[0]
    assert caught.value.hint == ("--dataset", "davis2016")
    with pytest.raises(DataError, match="--dataset davis2017"):
        Davis(second, year=2016).val()[0]


def test_damaged_copies_of_davis_are_refused(tmp_path):
    root = davis(tmp_path / "DAVIS", 2017, TWO)
    masks, listed = root / "Annotations/480p/cow", root / "ImageSets/2017/val.txt"
    (masks / "00002.png").unlink()
    with pytest.raises(DataError, match=r"1 of 7 masks .*00002\.png"):
        Davis(root).val()
    (masks / "00000.png").unlink()
    with pytest.raises(DataError, match="1 of 2 first masks"):
        Davis(root).val()
    for text, word in (("cow\ncow\n", "twice"), ("dog\n", "dog is not a folder"), ("", "no video")):
        listed.write_text(text)
        with pytest.raises(DataError, match=word):
            Davis(root).val()
    with pytest.raises(DataError, match="no split train"):
        Davis(root, val_split="train").val()
    with pytest.raises(ConfigurationError):
        Davis(root, max_frames=1)


def test_lists_with_first_masks_only_are_read(tmp_path):
    root = davis(tmp_path / "DAVIS", 2017, TWO)
    for path in root.glob("Annotations/480p/*/0000[1-9].png"):
        path.unlink()

    frames = Davis(root).val()[0].frames

    assert frames is not None
    assert [frame.mask is None for frame in frames] == [False, True, True]


def own_videos(root: Path) -> Path:
    for video in ("b", "a"):
        for frame in (1, 2, 10):
            write_frame(root / video / f"frame{frame}.jpg", frame)
        write_mask(root / video / "frame1.png", {8: 1})
    return root


def test_user_frames_are_sorted_by_number_and_one_video_suffices(tmp_path):
    root = own_videos(tmp_path / "videos")
    write_frame(root / ".hidden/1.jpg", 0)
    (root / "empty").mkdir()

    videos = FrameFolders(root).val()

    assert (videos.name, videos.ids) == ("frames", ("a", "b"))
    frames = videos[0].frames
    assert frames is not None
    assert [frame.image_id for frame in frames] == ["a/frame1", "a/frame2", "a/frame10"]
    first = FrameFolders(root, max_frames=2).val()[0].frames
    assert first is not None
    assert [frame.image_id for frame in first] == ["a/frame1", "a/frame2"]
    single = FrameFolders(root / "a").val()
    assert single.ids == ("a",)
    assert single[0].mask is not None
    (root / "b").rename(root / "a10")
    (root / "a").rename(root / "a9")
    assert FrameFolders(root).val().ids == ("a9", "a10")


def test_frames_and_masks_may_both_be_png(tmp_path):
    for frame in range(2):
        write_frame(tmp_path / f"cup/{frame}.png", frame)
    write_mask(tmp_path / "cup/0_mask.png", {8: 255})
    suffixes = {"image_suffix": ".png", "mask_suffix": "_mask.png"}

    videos = FrameFolders(tmp_path, white_is_object=True, **suffixes).val()

    assert len(videos[0].frames or ()) == 2
    assert np.unique(np.asarray(videos[0].mask)).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "numbers", "size", "hint"),
    [
        ("a/frame1.png", {8: 255}, SIZE, ("dataset.white_is_object=true",)),
        ("a/frame1.png", {}, SIZE, ("dataset.white_is_object=true",)),
        ("a/frame1.png", {8: 1}, (24, 16), ()),
        ("a/frame2.png", {8: 1}, (24, 16), ()),
        ("a/frame2.jpg", None, (24, 16), ()),
    ],
)
def test_wrong_masks_and_sizes_are_refused(tmp_path, name, numbers, size, hint):
    path = own_videos(tmp_path) / name
    if numbers is None:
        write_frame(path, 0, size)
    else:
        write_mask(path, numbers, size)

    with pytest.raises(DataError) as caught:
        list(FrameFolders(tmp_path).val()[0].frames or ())

    assert caught.value.hint == hint
    assert str(path) in str(caught.value)


def test_missing_videos_frames_and_masks_are_refused(tmp_path):
    root = own_videos(tmp_path / "videos")
    (root / "a/frame1.png").unlink()
    with pytest.raises(DataError, match="1 of 2 first masks"):
        FrameFolders(root).val()
    for name in ("frame2.jpg", "frame10.jpg"):
        (root / "a" / name).unlink()
    with pytest.raises(DataError, match="1 frames"):
        FrameFolders(root).val()
    with pytest.raises(DataError) as caught:
        FrameFolders(root, image_suffix=".jpeg").val()
    assert "dataset.image_suffix=.png" in caught.value.hint
    with pytest.raises(DataError, match="not a folder"):
        FrameFolders(tmp_path / "nothing").val()
    with pytest.raises(ConfigurationError):
        FrameFolders(root, name="davis2017")


@pytest.mark.slow
def test_the_objects_of_generated_videos_move(tmp_path):
    videos = ToyVideo(num_val=2, cache=tmp_path).val()

    assert (videos.name, len(videos)) == ("toy_video", 2)
    for video in (videos[0], videos[1]):
        frames = video.frames
        assert frames is not None
        assert len(frames) == NUM_FRAMES
        masks = [np.asarray(frame.mask) for frame in frames]
        numbers = set(np.unique(masks[0]).tolist())
        assert numbers == set(range(len(numbers)))
        assert len(numbers) > 1
        assert all(set(np.unique(mask).tolist()) <= numbers for mask in masks)
        # Objects move by at most 2.5 pixels per frame.
        moved = [(one != other).mean() for one, other in itertools.pairwise(masks)]
        assert 0 < max(moved) < 0.15
        assert (masks[0] != masks[-1]).mean() > max(moved)
    again = ToyVideo(num_val=2, cache=tmp_path / "other").val()
    assert again.fingerprint() == videos.fingerprint()
    assert ToyVideo(num_val=2, seed=1, cache=tmp_path).val().fingerprint() != videos.fingerprint()
