import numpy as np
import pytest

from jaxml25.data import topics


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def test_the_vocabulary_is_fixed():
    assert topics.VOCAB_SIZE == topics.MASK_INDEX == 97
    np.testing.assert_array_equal(topics.encode(" !A~\n\u2603"), [0, 1, 33, 94, 95, 96])
    assert topics.encode("").shape == (0,)


def test_printable_ascii_and_newlines_survive_a_round_trip():
    text = "".join(map(chr, range(32, 127))) + "\n"
    tokens = topics.encode(text)
    np.testing.assert_array_equal(tokens, np.arange(96))
    assert topics.decode(tokens) == text


def test_typography_is_read_as_the_nearest_character_and_the_rest_is_unknown():
    assert topics.decode(topics.encode("“it’s”\t–…ß")) == '"it\'s" -.\ufffd'
    assert topics.decode(np.array([40, topics.MASK_INDEX])) == "H\u25a1"
    with pytest.raises(ValueError, match=r"tokens must be in 0\.\.97, got 3 to 98"):
        topics.decode(np.array([3, 98]))


def test_no_long_paragraph_is_in_both_splits_or_twice_in_one(cache):
    paragraphs = {}
    for split in topics.SPLITS:
        text = "\n\n".join(topics.texts(split, cache).values())
        words = [" ".join(p.split()) for p in text.split("\n\n")]
        paragraphs[split] = [w for w in words if len(w) >= 64]
        assert len(paragraphs[split]) == len(set(paragraphs[split])) > 50
    assert not set(paragraphs["train"]) & set(paragraphs["test"])


def test_both_splits_are_prose_of_a_useful_size(cache):
    sizes = {split: sum(map(len, topics.texts(split, cache).values())) for split in topics.SPLITS}
    assert sizes["train"] > 250_000 and 0.03 < sizes["test"] / sizes["train"] < 0.3
    tokens = topics.windows("train", data_dir=cache)
    assert np.mean(tokens == topics.UNKNOWN) < 1e-3
    assert "statement" in topics.texts("train", cache)["compound"]


def test_windows_are_cut_from_single_topics_with_the_given_stride(cache):
    stored = [text for text in topics.texts("test", cache).values() if len(text) >= 64]
    tokens = topics.windows("test", length=64, stride=16, data_dir=cache)
    assert tokens.dtype == np.int32 and tokens.shape == (sum((len(text) - 64) // 16 + 1 for text in stored), 64)
    first = topics.encode(stored[0])
    np.testing.assert_array_equal(tokens[1], first[16:80])
    assert len(topics.windows("test", data_dir=cache)) == sum(len(text) // 64 for text in stored)
    assert topics.windows("test", length=10**7, data_dir=cache).shape == (0, 10**7)


def test_a_topic_that_a_new_python_adds_moves_no_other(monkeypatch):
    before = topics._texts()
    source = topics._source()
    monkeypatch.setattr(topics, "_source", lambda: source | {"aaa": "A new topic.\n"})
    after = topics._texts()
    for split in topics.SPLITS:
        assert {name: text for name, text in after[split].items() if name != "aaa"} == before[split]


def test_bad_arguments_are_named(cache):
    with pytest.raises(ValueError, match="split must be one of train, test, got 'valid'"):
        topics.texts("valid", cache)
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        topics.windows("train", length=0, data_dir=cache)
    with pytest.raises(ValueError, match="stride must be at least 1, got 0"):
        topics.windows("train", stride=0, data_dir=cache)
