"""SPair-71k: its pairs and points, and invalid files."""

from pathlib import Path

import pytest

from ssl_bench.data.layouts.spair71k import Spair71k
from ssl_bench.data.splits import limit_dataset
from ssl_bench.errors import DataError
from tests.support.spair import PAIRS, SOURCE_SIZE, TARGET_SIZE, spair, write_annotation


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return spair(tmp_path)


def test_a_line_names_both_images_and_their_points(base):
    pairs = Spair71k(base.parent).val()

    sample = pairs[1]

    assert (pairs.name, pairs.split, len(pairs)) == ("spair71k-3", "test", 3)
    assert sample.image_id == "000002-2008_000003-2008_000002:cat"
    assert sample.image.shape == (*SOURCE_SIZE[::-1], 3)
    assert sample.pair is not None
    assert sample.pair.image.shape == (*TARGET_SIZE[::-1], 3)
    assert sample.pair.image_ids == ("cat/2008_000003", "cat/2008_000002")
    # The middles of the pixels (6, 6) and (30, 20); the other image is 5/6 as wide, 15/8 as high.
    assert sample.pair.source.tolist() == [[6.5, 6.5], [30.5, 20.5]]
    assert sample.pair.target.tolist() == [[5.5, 11.5], [25.5, 38.5]]
    # The box is 25 wide and 50 high.
    assert (sample.pair.extent, sample.pair.category) == (50.0, "cat")


def test_a_share_of_the_pairs_is_named_after_all_and_pictures_need_no_pairs(base):
    pairs, images = Spair71k(base, val_split="test:0-67%").val(), Spair71k(base).images()

    assert (len(pairs), pairs.name, pairs.split) == (2, "spair71k-3", "test:0-67%")
    assert len(limit_dataset(Spair71k(base), 1).val()) == 1
    assert (images.name, images.ids[0]) == ("spair71k-5", "bird/2009_000004")
    assert images[0].image.shape == (*SOURCE_SIZE[::-1], 3)


def test_the_fingerprint_follows_points_and_pictures(base):
    found = [Spair71k(base).val().fingerprint() for _ in range(2)]
    write_annotation(base, PAIRS[2], trg_kps=[[17, 20]])
    found.append(Spair71k(base).val().fingerprint())
    cats = base / "JPEGImages/cat"
    (cats / "2008_000002.jpg").write_bytes((cats / "2008_000001.jpg").read_bytes())
    found.append(Spair71k(base).val().fingerprint())

    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_missing_files_and_wrong_lines_are_named(base):
    listed, picture = base / "Layout/large/test.txt", base / "JPEGImages/bird/2009_000005.jpg"
    with pytest.raises(DataError, match=r"no split trn\. .* test"):
        Spair71k(base, val_split="trn").val()
    picture.rename(base / "away.jpg")
    with pytest.raises(DataError, match=r"1 of 5 images .*2009_000005"):
        Spair71k(base).val()
    (base / "away.jpg").rename(picture)
    (base / f"PairAnnotation/test/{PAIRS[0].line}.json").unlink()
    with pytest.raises(DataError, match="1 of 3 pairs"):
        Spair71k(base).val()
    line = PAIRS[1].line
    for text, word in (
        (f"{line}\n{line}", "twice"),
        (line[7:], "expected NUMBER"),
        ("", "no pair"),
    ):
        listed.write_text(text)
        with pytest.raises(DataError, match=word):
            Spair71k(base).val()
