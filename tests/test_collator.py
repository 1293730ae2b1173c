"""What stands in a batch, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer

from helpers import sentences
from simcse_st import SimCSECollator


def texts_of(batch: dict[str, Any], model: SentenceTransformer) -> list[tuple[int, int, str]]:
    """Each sentence of a batch with its row and role, read back out of the tokens."""
    decoded = model.tokenizer.batch_decode(batch["sentence_input_ids"], skip_special_tokens=True)
    plain = ["".join(text.split()) for text in decoded]
    return sorted(zip(batch["sentence_row"].tolist(), batch["sentence_role"].tolist(), plain, strict=True))


def test_every_sentence_stands_once_with_its_row_and_role(tiny_model: SentenceTransformer):
    rows = [
        {"anchor": "aa", "positive": "bb bb bb", "negative": "cc", "negative_1": None, "negative_10": ["dd", "ee ee"]},
        {"anchor": "ff", "positive": "gg", "negative": "", "negative_1": "hh", "negative_10": []},
    ]
    batch = SimCSECollator(tiny_model.preprocess)(rows)
    assert texts_of(batch, tiny_model) == [
        (0, 0, "aa"), (0, 1, "bbbbbb"), (0, 2, "cc"), (0, 2, "dd"), (0, 2, "eeee"),
        (1, 0, "ff"), (1, 1, "gg"), (1, 2, "hh"),
    ]  # fmt: skip


def test_a_column_of_empty_lists_is_no_column(tiny_model: SentenceTransformer):
    rows = [{"anchor": "aa", "positive": "bb", "negative": []}, {"anchor": "cc", "positive": "dd", "negative": []}]
    assert len(texts_of(SimCSECollator(tiny_model.preprocess)(rows), tiny_model)) == 4


def test_longest_sentences_come_first(tiny_model: SentenceTransformer):
    texts = sentences(20)
    rows = [{"anchor": texts[i], "positive": texts[i + 10]} for i in range(10)]
    lengths = SimCSECollator(tiny_model.preprocess)(rows)["sentence_attention_mask"].sum(1)
    assert torch.equal(lengths, lengths.sort(descending=True).values)
    assert lengths[0] > lengths[-1]


def test_max_length_cuts_training_sentences_only(tiny_model: SentenceTransformer):
    rows = [{"anchor": "abcdefghijklmnopq", "positive": "ab"}]
    assert SimCSECollator(tiny_model.preprocess, max_length=8)(rows)["sentence_input_ids"].shape == (2, 8)
    assert SimCSECollator(tiny_model.preprocess)(rows)["sentence_input_ids"].shape == (2, 19)
    assert tiny_model.max_seq_length == 128


def test_columns_of_other_names_go_by_position_and_labels_are_left_out(tiny_model: SentenceTransformer):
    rows = [{"sent0": "aa", "sent1": "bb", "hard_neg": "cc", "label": 1}]
    assert texts_of(SimCSECollator(tiny_model.preprocess)(rows), tiny_model) == [
        (0, 0, "aa"),
        (0, 1, "bb"),
        (0, 2, "cc"),
    ]


def test_named_columns_may_stand_in_any_order(tiny_model: SentenceTransformer):
    rows = [{"negative": "cc", "positive": "bb", "anchor": "aa"}]
    assert texts_of(SimCSECollator(tiny_model.preprocess)(rows), tiny_model) == [
        (0, 0, "aa"),
        (0, 1, "bb"),
        (0, 2, "cc"),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"anchor": None, "positive": "b"}, "row 1 of the batch: 'anchor' must be a sentence, not None"),
        ({"anchor": "a", "positive": "  "}, "row 1 of the batch: 'positive' must be a sentence"),
        ({"anchor": "a", "positive": 3}, "row 1 of the batch: 'positive' must be a sentence, not 3"),
        ({"anchor": "a", "positive": "b", "negative": " "}, "row 1 of the batch: 'negative' must be a sentence"),
        ({"anchor": "a", "positive": "b", "negative": ["c", 4]}, "'negative' must be a sentence, not 4"),
    ],
)
def test_what_is_no_sentence_is_refused(row: dict, message: str, tiny_model: SentenceTransformer):
    good = {"anchor": "a", "positive": "b", "negative": None}
    with pytest.raises(ValueError, match=message):
        SimCSECollator(tiny_model.preprocess)([good, row])


def test_columns_without_a_meaning_are_refused(tiny_model: SentenceTransformer):
    with pytest.raises(ValueError, match=r"columns \['source'\]"):
        SimCSECollator(tiny_model.preprocess)([{"anchor": "a", "positive": "b", "source": "web"}])
    with pytest.raises(ValueError, match="needs a column of text"):
        SimCSECollator(tiny_model.preprocess)([{"label": 1}])


@pytest.mark.parametrize("names", [("anchor", "negative"), ("negative", "positive", "query"), ("positive", "text")])
def test_names_that_only_half_match_are_refused(names: tuple[str, ...], tiny_model: SentenceTransformer):
    with pytest.raises(ValueError, match="both an anchor and a positive must be there"):
        SimCSECollator(tiny_model.preprocess)([dict.fromkeys(names, "a")])


def test_equal_texts_and_no_others_have_equal_ids(tiny_model: SentenceTransformer):
    texts = ["a b", "a b ", "A b", "a  b", "a b"]
    rows = [{"anchor": text, "positive": "c"} for text in texts]
    batch = SimCSECollator(tiny_model.preprocess)(rows)
    anchors = batch["sentence_role"] == 0
    ids = batch["sentence_text_id"][anchors][batch["sentence_row"][anchors].argsort()].tolist()
    assert ids[0] == ids[4]
    assert len(set(ids)) == 4
    assert max(abs(number) for number in ids) > 2**48  # all 64 bits are used


def test_a_prompt_stands_before_every_sentence_and_the_data_set_s_name_is_kept(tiny_model: SentenceTransformer):
    rows = [{"anchor": "aa", "positive": "bb", "dataset_name": "first"}]
    batch = SimCSECollator(tiny_model.preprocess, prompts="zz ")(rows)
    assert texts_of(batch, tiny_model) == [(0, 0, "zzaa"), (0, 1, "zzbb")]
    assert batch["dataset_name"] == "first"
    with pytest.raises(ValueError, match="router_mapping"):
        SimCSECollator(tiny_model.preprocess, router_mapping={"anchor": "query"})


def test_prompts_by_column_are_refused(tiny_model: SentenceTransformer):
    with pytest.raises(ValueError, match="one prompt for all"):
        SimCSECollator(tiny_model.preprocess, prompts={"anchor": "query: "})
