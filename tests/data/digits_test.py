import numpy as np
import pytest
from sklearn import datasets

from jaxml25.data import digits


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def test_the_two_splits_together_are_scikit_learns_digits_and_share_none(cache):
    bunch = datasets.load_digits()
    ours = {split: digits.arrays(split, cache) for split in digits.SIZES}
    assert {split: len(images) for split, (images, _) in ours.items()} == {"train": 1500, "test": 297}
    rows = np.concatenate([np.c_[images.reshape(-1, 64), labels] for images, labels in ours.values()])
    theirs = np.c_[bunch.data, bunch.target]
    assert sorted(map(bytes, rows.astype(np.uint8))) == sorted(map(bytes, theirs.astype(np.uint8)))


def test_every_class_has_its_share_in_both_splits(cache):
    for split, size in digits.SIZES.items():
        counts = np.bincount(digits.arrays(split, cache)[1], minlength=10)
        assert counts.min() > 0.08 * size and counts.max() < 0.12 * size


def test_records_are_read_as_they_are_stored(cache):
    record = digits.splits(cache)["train"][3]
    images, labels = digits.arrays("train", cache)
    assert record["image"].dtype == np.uint8 and labels.dtype == np.int32
    np.testing.assert_array_equal(record["image"], images[3])
    assert record["label"] == labels[3]


def test_normalise_maps_the_pixel_range_onto_plus_minus_one_and_back():
    pixels = np.arange(17, dtype=np.uint8)
    x = digits.normalise(pixels)
    assert x.dtype == np.float32 and x[0] == -1 and x[8] == 0 and x[16] == 1
    np.testing.assert_array_equal(digits.denormalise(x), pixels)
    np.testing.assert_array_equal(digits.denormalise(np.array([-7.0, 7.0])), [0, 16])


def test_an_unknown_split_names_the_valid_ones(cache):
    with pytest.raises(ValueError, match="split must be one of train, test, got 'valid'"):
        digits.arrays("valid", cache)
