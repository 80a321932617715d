"""Test the datasets for image retrieval, such as Holidays and Copydays."""

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssl_bench.data import samples
from ssl_bench.data.layouts.instances import (
    Copydays,
    Holidays,
    Landmarks,
    RetrievalImages,
    read_ground_truth,
)
from ssl_bench.data.layouts.toy import ToyInstances
from ssl_bench.data.samples import Dataset, RetrievalTarget
from ssl_bench.data.splits import limit_dataset
from ssl_bench.errors import DataError
from tests.support.faults import picture
from tests.support.fingerprints import assert_fingerprint_depends_on

NAMES = ("100000", "100001", "100002", "100100", "100101", "100201")
EASY, HARD, JUNK = [1, 2], [0], [3]


def save_pictures(folder: Path, names: Any) -> None:
    for number, name in enumerate(names):
        path = folder / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path)


@pytest.fixture
def holidays(tmp_path: Path) -> Path:
    save_pictures(tmp_path / "holidays/jpg", NAMES)
    return tmp_path / "holidays"


def ground_truth(**changes: Any) -> dict[str, Any]:
    """Return the content of a ground-truth file of the revisited Oxford dataset."""
    found = {"easy": EASY, "hard": np.array(HARD), "junk": JUNK, "bbx": [0.0, 1.0, 2.0, 3.0]}
    return {"imlist": [*"abcd"], "qimlist": ["q"], "gnd": [{**found, **changes}]}


def write_ground_truth(root: Path, content: Any, protocol: int = 4) -> Path:
    path = root / "gnd_roxford5k.pkl"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


@pytest.fixture
def oxford(tmp_path: Path) -> Path:
    save_pictures(tmp_path / "jpg", "abcdq")
    write_ground_truth(tmp_path, ground_truth())
    return tmp_path


@pytest.fixture
def copydays(tmp_path: Path) -> Path:
    save_pictures(tmp_path / "original", ("200000", "200100"))
    save_pictures(tmp_path / "strong", ("200001", "200002", "200101"))
    for share in (10, 15, 20, 30, 40, 50, 60, 70, 80):
        save_pictures(tmp_path / f"crops/{share}", ("200000", "200100"))
    return tmp_path


def test_the_first_image_of_a_group_searches_the_others(holidays):
    for root in (holidays, holidays.parent):
        images = Holidays(root).val()

        assert isinstance(Holidays(root), Dataset)
        assert (images.name, images.split, images.ids) == ("holidays-6", "all", NAMES)
        targets = [images[index].retrieval_target for index in range(6)]
        assert targets[0] == RetrievalTarget(frozenset({"100001", "100002"}))
        assert targets[3] == RetrievalTarget(frozenset({"100101"}))
        # A group without its first image has no query.
        assert [target is None for target in targets] == [False, True, True, False, True, True]


def test_queries_of_landmarks_search_the_database(oxford):
    images = Landmarks(oxford).val()

    assert (images.name, images.ids) == ("roxford5k-5", ("q", *"abcd"))
    assert images[0].retrieval_target == RetrievalTarget(
        frozenset("bc"), frozenset("a"), frozenset("d"), excluded_ids=frozenset("q")
    )
    assert all(images[index].retrieval_target is None for index in range(1, 5))
    assert Landmarks(oxford).images().ids == images.ids


def test_every_kind_of_pickle_is_read(oxford):
    content = ground_truth(easy=np.array([1, 2], np.int32), junk=[np.int64(3)])
    for protocol in (2, 3, 4, 5):
        path = write_ground_truth(oxford, content, protocol)
        assert read_ground_truth(path)["gnd"] == [{"easy": EASY, "hard": HARD, "junk": JUNK}]
        write_ground_truth(oxford, ground_truth(junk=np.array([])), protocol)
        assert read_ground_truth(path)["gnd"][0]["junk"] == []


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("attacked",)


def test_a_pickle_runs_no_code(oxford, monkeypatch):
    monkeypatch.chdir(oxford)
    path = write_ground_truth(oxford, ground_truth(bbx=Attack()))

    with pytest.raises(DataError, match="could run code"):
        read_ground_truth(path)
    for name in ("os.system", "builtins.eval", "numpy.load", "numpy.core.multiarray.fromfile"):
        module, _, function = name.rpartition(".")
        path.write_bytes(f"c{module}\n{function}\n.".encode())
        with pytest.raises(DataError, match="could run code"):
            read_ground_truth(path)
    assert not Path("attacked").exists()


def test_an_invalid_ground_truth_is_refused(oxford):
    path, whole = oxford / "gnd_roxford5k.pkl", ground_truth()
    contents: list[Any] = [
        *(b"", b"no pickle", [], {"imlist": ["a"]}, {**whole, "imlist": "abcd"}),
        {**whole, "imlist": ["../a", "b", "c", "d"]},
        {**whole, "imlist": ["a", "b", "c", 4]},
        *({**whole, "qimlist": []}, {**whole, "qimlist": ["a"]}, {**whole, "gnd": []}),
        {**whole, "gnd": [{"easy": [], "hard": []}]},
        *(ground_truth(easy=[4]), ground_truth(hard=[-1]), ground_truth(junk=[0.5])),
        *(ground_truth(junk=["a"]), ground_truth(junk=None)),
    ]
    for content in contents:
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            write_ground_truth(oxford, content)
        with pytest.raises(DataError, match=r"gnd_roxford5k\.pkl"):
            Landmarks(oxford).val()


def test_copies_search_their_original(copydays, monkeypatch):
    images = Copydays(copydays).val()

    copies = ("strong/200001", "strong/200002", "strong/200101")
    assert images.ids == (*copies, "original/200000", "original/200100")
    assert (images.name, images.split) == ("copydays-5", "strong")
    found = [images[index].retrieval_target for index in range(5)]
    first = RetrievalTarget(frozenset({"original/200000"}), excluded_ids=frozenset(copies))
    assert found[:2] == [first, first]
    assert found[2] is not None
    assert found[2].matches == {"original/200100"}
    assert found[3:] == [None, None]
    crops = Copydays(copydays, copies="crops").val()
    assert (len(crops), crops.split) == (20, "crops")
    assert Copydays(copydays).images().ids == images.ids[3:]
    # Only the strong copies have a published number.
    counts = {"copydays": {"val": 5, "images": 2}}
    monkeypatch.setattr(samples, "PUBLISHED_COUNTS", counts)
    names = {Copydays(copydays, copies=copies).val().name for copies in ("strong", "crops")}
    assert names == {Copydays(copydays).images().name} == {"copydays"}


def test_missing_and_foreign_files_are_named(holidays, tmp_path):
    (holidays / "jpg/beach.jpg").touch()
    with pytest.raises(DataError, match="beach"):
        Holidays(holidays).val()
    with pytest.raises(DataError, match="jpg"):
        Landmarks(tmp_path / "nowhere").val()
    save_pictures(tmp_path / "oxford/jpg", "abc")
    with pytest.raises(DataError, match="does not exist"):
        Landmarks(tmp_path / "oxford").val()
    write_ground_truth(tmp_path / "oxford", ground_truth())
    with pytest.raises(DataError, match="2 of 5 images"):
        Landmarks(tmp_path / "oxford").val()
    save_pictures(tmp_path / "copies/original", ("200000",))
    with pytest.raises(DataError, match="strong"):
        Copydays(tmp_path / "copies").val()
    save_pictures(tmp_path / "copies/strong", ("200001", "300000"))
    with pytest.raises(DataError, match="300000"):
        Copydays(tmp_path / "copies").val()


def test_the_fingerprint_depends_on_images_and_matches(holidays):
    images = Holidays(holidays).val()
    matches, other = frozenset(NAMES[1:3]), frozenset({"100201"})
    targets = (
        *(RetrievalTarget(frozenset({"100001"})), RetrievalTarget(matches, other)),
        *(RetrievalTarget(matches, ignored=other), RetrievalTarget(matches, excluded_ids=other)),
    )
    changed = [
        replace(images, retrieval_targets={**images.retrieval_targets, NAMES[0]: one})
        for one in targets
    ]
    found = {one.fingerprint() for one in (images, *changed)}
    assert len(found) == 5
    assert_fingerprint_depends_on(
        lambda: Holidays(holidays).val(), lambda: picture(99).save(holidays / "jpg/100201.jpg")
    )
    assert Holidays(holidays.parent).val().fingerprint() not in found


def test_a_limit_keeps_the_queries_of_its_images(holidays):
    part = limit_dataset(Holidays(holidays), 3, first=True).val()

    assert isinstance(part, RetrievalImages)
    assert (part.name, part.ids) == ("holidays-6-first3", NAMES[:3])
    assert part[0].retrieval_target == Holidays(holidays).val()[0].retrieval_target


def test_toy_queries_have_easy_and_hard_views(tmp_path):
    images = ToyInstances(num_val=3, cache=tmp_path).val()

    assert (images.name, len(images)) == ("toy_instances", 12)
    queries = [name for name in images.ids if name in images.retrieval_targets]
    assert queries == ["00000_0", "00001_0", "00002_0"]
    first = images[0]
    assert first.retrieval_target == RetrievalTarget(
        frozenset({"00000_1", "00000_2"}), frozenset({"00000_3"})
    )
    assert (images[3].image == images[3].image[..., :1]).all()
    assert all(images[index].image.shape == first.image.shape for index in range(4))
    again = ToyInstances(num_val=3, cache=tmp_path / "other").val()
    assert again.fingerprint() == images.fingerprint()
    assert ToyInstances(num_val=3, seed=1, cache=tmp_path).val().fingerprint() != (
        images.fingerprint()
    )


@pytest.mark.data
def test_the_groups_of_holidays_are_found(shared_data):
    images = Holidays(shared_data / "real/holidays").val()

    assert (images.name, len(images)) == ("holidays-421", 421)
    assert all(len(one.matches) > 0 for one in images.retrieval_targets.values())
    covered = {name for one in images.retrieval_targets.values() for name in one.matches}
    # This part of the dataset lacks the first image of one group.
    assert {*images.ids} - covered - images.retrieval_targets.keys() == {"123601", "123602"}
