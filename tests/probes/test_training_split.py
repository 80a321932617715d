import numpy as np
import pytest

from probes.features.split import TrainingSplit


class Names:
    name, split, class_names = "names", "train", ("one", "other")

    def __init__(self, count):
        self.ids = tuple(map(str, range(count)))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        raise AssertionError(f"image {index} was read, though a draw needs only the ids")

    def fingerprint(self):
        return ""


def test_a_sample_of_the_training_images_is_drawn_with_the_seed():
    images = Names(40)
    one, same, other = (
        TrainingSplit.draw(images, at_most=10, holdout=0.2, seed=seed) for seed in (0, 0, 1)
    )
    assert one == same
    assert one.indices != other.indices
    assert len(set(one.indices)) == 10
    assert len(one.held_out) == 2
    entries = one.entries(2).tolist()
    assert len(entries) == 16
    assert {entry // 2 for entry in entries} == set(range(10)) - one.held_out


def test_held_out_images_lie_anywhere_among_the_training_images():
    splits = [
        TrainingSplit.draw(Names(10), at_most=None, holdout=0.2, seed=seed) for seed in range(500)
    ]

    counts = np.bincount([position for split in splits for position in split.held_out])

    # Of a fifth, with a deviation of 9.
    assert counts.tolist() == pytest.approx([100] * 10, abs=5 * 9)
