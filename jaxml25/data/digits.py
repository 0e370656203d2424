"""Handwritten digits: 1797 real 8x8 images in ten classes, shipped with scikit-learn.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998,
https://doi.org/10.24432/C50P49 (its test part), as `sklearn.datasets.load_digits` has it. Licence: CC BY 4.0 (the data),
BSD-3-Clause (scikit-learn, which carries them). Nothing is downloaded.

Images are stored as they are, uint8 from 0 to 16. Models take

    x = image / 8 - 1    in [-1, 1].    (`normalise`)

Split: 297 test images evenly spaced through the file, the other 1500 for training, so that both hold every writer and class.
No random stream decides it, and so no version of any library can change it.
"""

from typing import ClassVar

import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Float, Int, Num, UInt8

from jaxml25.data import builders, pipeline

NUM_CLASSES = 10
SIZES = {"train": 1500, "test": 297}


class Digits(builders.ArrayRecordBuilder):
    """Records `{"image": uint8 (8, 8) in 0..16, "label": int in 0..9}`, splits `train` (1500) and `test` (297)."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar = {"1.0.0": "First version."}

    def _info(self) -> tfds.core.DatasetInfo:
        image = tfds.features.Tensor(shape=(8, 8), dtype=np.uint8)
        label = tfds.features.ClassLabel(num_classes=NUM_CLASSES)
        return tfds.core.DatasetInfo(
            builder=self,
            description="Handwritten digits, 8x8 pixels with values 0 to 16.",
            features=tfds.features.FeaturesDict({"image": image, "label": label}),
            homepage="https://doi.org/10.24432/C50P49",
            license="CC BY 4.0",
            citation="E. Alpaydin and C. Kaynak. Optical Recognition of Handwritten Digits. UCI, 1998.",
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        del dl_manager
        return {split: self._generate_examples(split) for split in SIZES}

    def _generate_examples(self, split: str):
        from sklearn import datasets  # seconds to import, and only needed once in the life of a cache

        bunch = datasets.load_digits()
        for index in np.flatnonzero(_is_test(len(bunch.target)) == (split == "test")):
            yield int(index), {"image": bunch.images[index].astype(np.uint8), "label": int(bunch.target[index])}


def _is_test(num: int) -> np.ndarray:
    marks = np.arange(num + 1) * SIZES["test"] // num
    return marks[1:] > marks[:-1]


def splits(data_dir: builders.PathLike | None = None) -> dict:
    """Returns `{"train": source, "test": source}`, TFDS data sources; prepares the data set if need be.

    Args:
      data_dir: folder of prepared data sets; see `builders.cache_dir` for the default.
    """
    return builders.prepared(Digits, data_dir).as_data_source()


def arrays(split: str, data_dir: builders.PathLike | None = None) -> tuple[UInt8[np.ndarray, "n 8 8"], Int[np.ndarray, "n"]]:
    """Returns all images (uint8, 0..16) and labels (int32, 0..9) of `split`, in the order of the file.

    Args:
      split: `"train"` or `"test"`.
      data_dir: as in `splits`.

    Raises:
      ValueError: if there is no such split.
    """
    if split not in SIZES:
        raise ValueError(f"split must be one of {', '.join(SIZES)}, got {split!r}")
    records = pipeline.ArraySource.of(splits(data_dir)[split]).arrays
    return records["image"], records["label"].astype(np.int32)


def normalise(images: Num[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Maps pixels 0..16 to float32 in [-1, 1], exactly invertible."""
    return images.astype(np.float32) / 8 - 1


def denormalise(x: Float[np.ndarray, "*shape"]) -> UInt8[np.ndarray, "*shape"]:
    """Maps [-1, 1] to the nearest pixel in 0..16; what lies outside is clipped."""
    return np.clip(np.round((x + 1) * 8), 0, 16).astype(np.uint8)
