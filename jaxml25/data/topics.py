"""English prose, character by character: the documentation topics that CPython's own `help()` shows.

Source: `pydoc_data.topics`, part of every Python, about half a megabyte. Licence: PSF-2.0. Nothing is downloaded.

The text differs a little between Python versions, so numbers measured on it belong to one version; each version's text has
its own place in the cache. The vocabulary does not differ:

    0..94  printable ASCII, chr(32 + i)     95  newline     96  unknown     97  the mask of masked diffusion (`MASK_INDEX`)

Typographic quotes, dashes, ellipses and tabs are read as the nearest of these; anything else is unknown.

Split: a topic is wholly in `test` or wholly in `train`, by a hash of its name, so that new topics in a new Python move no
old one. Topics quote each other at length (a fifth of all text is a repetition), so a paragraph of 64 characters or more is
kept only where it comes first, test topics before training topics: none is in both splits, or twice in one.
"""

import hashlib
import sys
from typing import ClassVar

import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Int

from jaxml25.data import builders

NEWLINE = 95
UNKNOWN = 96
MASK_INDEX = 97
VOCAB_SIZE = 97  # without the mask
SPLITS = ("train", "test")

_ALIKE = dict(zip("\t\u00a0“”„‘’‐‑‒–—−…×", '  """\'\'------.x', strict=True))
_CHARACTERS = [chr(32 + i) for i in range(95)] + ["\n", "\ufffd", "\u25a1"]
_INDEX = {c: i for i, c in enumerate(_CHARACTERS[:UNKNOWN])} | {c: ord(like) - 32 for c, like in _ALIKE.items()}
_TEST_SHARE = 10  # one topic in ten is held out
_SHORTEST_UNIQUE = 64  # shorter paragraphs are headings and phrases any text repeats


class Topics(builders.ArrayRecordBuilder):
    """Records `{"topic": str, "text": str}`, one a topic, splits `train` and `test`."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar = {"1.0.0": "First version."}

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=f"The documentation topics of Python {sys.version.split()[0]}.",
            features=tfds.features.FeaturesDict({"topic": tfds.features.Text(), "text": tfds.features.Text()}),
            homepage="https://docs.python.org/3/reference/",
            license="PSF-2.0",
            citation="Python Software Foundation. The Python Language Reference. https://docs.python.org/3/reference/",
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        del dl_manager
        texts = _texts()
        return {split: self._generate_examples(texts[split]) for split in SPLITS}

    def _generate_examples(self, texts: dict[str, str]):
        for number, (topic, text) in enumerate(texts.items()):
            yield number, {"topic": topic, "text": text}


def _source() -> dict[str, str]:
    try:
        from pydoc_data import topics
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("this Python was built without pydoc_data, which holds the topics") from error
    return dict(sorted(topics.topics.items()))


def _is_test(topic: str) -> bool:
    return hashlib.sha256(topic.encode()).digest()[-1] % _TEST_SHARE == 0


def _texts() -> dict[str, dict[str, str]]:
    """The text of every topic of both splits, without the long paragraphs that came before."""
    source, seen = _source(), set()
    texts = {split: {} for split in SPLITS}
    for topic in sorted(source, key=lambda name: (not _is_test(name), name)):
        kept = [paragraph for paragraph in source[topic].split("\n\n") if _is_new(paragraph, seen)]
        if kept:
            texts["test" if _is_test(topic) else "train"][topic] = "\n\n".join(kept).strip("\n") + "\n"
    return texts


def _is_new(paragraph: str, seen: set[str]) -> bool:
    words = " ".join(paragraph.split())  # a quotation may be indented or wrapped otherwise
    if len(words) < _SHORTEST_UNIQUE:
        return True
    new = words not in seen
    seen.add(words)
    return new


def content_name() -> str:
    """Names this Python's text: its version and the start of a hash."""
    text = "\0".join(part for item in _source().items() for part in item)
    return f"python{sys.version_info.major}.{sys.version_info.minor}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def splits(data_dir: builders.PathLike | None = None) -> dict:
    """Returns `{"train": source, "test": source}`, TFDS data sources of whole topics; prepares the data set if need be.

    Args:
      data_dir: folder of prepared data sets; see `builders.cache_dir` for the default.
    """
    return builders.prepared(Topics, data_dir, content_name()).as_data_source()


def texts(split: str, data_dir: builders.PathLike | None = None) -> dict[str, str]:
    """Returns topic -> text of `split`, in the order of the file.

    Raises:
      ValueError: if there is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    return {record["topic"].decode(): record["text"].decode() for record in splits(data_dir)[split]}


def windows(
    split: str, *, length: int = 64, stride: int | None = None, data_dir: builders.PathLike | None = None
) -> Int[np.ndarray, "windows length"]:
    """Cuts every topic of `split` into windows of `length` characters; none crosses from one topic into the next.

    Args:
      split: `"train"` or `"test"`.
      length: characters in a window, at least 1.
      stride: characters from one window's start to the next's, at least 1; `length` (no overlap) if not given.
      data_dir: as in `splits`.

    Returns:
      int32 tokens in 0..96. What is left at the end of a topic and shorter than `length` is dropped.

    Raises:
      ValueError: if there is no such split, or `length` or `stride` is below 1.
    """
    stride = length if stride is None else stride
    for name, value in (("length", length), ("stride", stride)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    tokens = [encode(text) for text in texts(split, data_dir).values()]
    views = [np.lib.stride_tricks.sliding_window_view(t, length)[::stride] for t in tokens if len(t) >= length]
    return np.concatenate(views) if views else np.zeros((0, length), np.int32)


def encode(text: str) -> Int[np.ndarray, "length"]:
    """Returns one int32 token in 0..96 per character of `text`."""
    return np.fromiter((_INDEX.get(character, UNKNOWN) for character in text), np.int32, len(text))


def decode(tokens: Int[np.ndarray, "length"]) -> str:
    """Returns one character per token; unknown is shown as U+FFFD, the mask as U+25A1.

    Raises:
      ValueError: if a token is outside 0..97.
    """
    tokens = np.asarray(tokens)
    if tokens.size and not 0 <= tokens.min() <= tokens.max() <= MASK_INDEX:
        raise ValueError(f"tokens must be in 0..{MASK_INDEX}, got {tokens.min()} to {tokens.max()}")
    return "".join(_CHARACTERS[token] for token in tokens)
