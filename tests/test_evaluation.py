"""Scores during training: each distinct sentence tokenised once, encoded once, next to those of its length."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

from helpers import sentences
from simcse_st import InputError, build_model
from simcse_st.evaluation import embedding
from simcse_st.evaluation.embedding import embed, tokenize
from simcse_st.evaluation.evaluators import STSEvaluator


def test_each_distinct_sentence_is_encoded_once(tiny_model: SentenceTransformer):
    evaluator = STSEvaluator(["a b", "c d", "a b"], ["c d", "e f", "e f"], [1.0, 2.0, 3.0])
    assert evaluator.sentences == ["a b", "c d", "e f"]
    stock = EmbeddingSimilarityEvaluator(["a b", "c d", "a b"], ["c d", "e f", "e f"], [1.0, 2.0, 3.0])
    assert evaluator(tiny_model)["pearson"] == pytest.approx(100 * stock(tiny_model)["pearson_cosine"], abs=1e-4)
    with pytest.raises(InputError, match="must differ"):
        STSEvaluator(["a", "b"], ["c", "d"], [1.0, 1.0])


def test_an_embedding_that_is_not_finite_names_its_sentence(tiny_model: SentenceTransformer):
    with torch.no_grad():
        embeddings = tiny_model[0].auto_model.embeddings.word_embeddings.weight
        embeddings[tiny_model.tokenizer.convert_tokens_to_ids("z")] = math.nan
    with pytest.raises(InputError, match="embedding of 'z a' is not finite"):
        STSEvaluator(["a b", "z a"], ["c d", "e f"], [1.0, 2.0])(tiny_model)


@pytest.mark.parametrize("block", [7, 1024])
@pytest.mark.parametrize("prompt", [None, "say"])
@pytest.mark.parametrize("dimension", [None, 8])
def test_embeddings_are_those_of_encode(
    block: int, prompt: str | None, dimension: int | None, tiny_model: SentenceTransformer, monkeypatch
):
    monkeypatch.setattr(embedding, "_BLOCK", block)
    tiny_model.prompts, tiny_model.default_prompt_name = {"say": "it is said that "}, prompt
    tiny_model.truncate_dim = dimension
    texts = [*sentences(40), "", "a" * 300, "a   b", *sentences(5)]
    random.Random(0).shuffle(texts)
    expected = F.normalize(tiny_model.encode(texts, convert_to_tensor=True), dim=1)
    tiny_model.train()  # which encoding ends
    torch.testing.assert_close(embed(tiny_model, texts, batch_size=8), expected, atol=1e-6, rtol=0)


def test_no_sentences_have_no_embeddings(tiny_model: SentenceTransformer):
    assert embed(tiny_model, []).shape == (0, 32)


def test_batches_are_of_sentences_of_one_length_in_tokens(tiny_model: SentenceTransformer):
    """Spaces make a text longer in characters, and not in tokens."""
    texts = [f"{' ' * (50 * (number % 2))}{'ab' * (1 + number // 8)}{number}" for number in range(64)]
    lengths = sorted((int(tiny_model.preprocess([text])["attention_mask"].sum()) for text in texts), reverse=True)
    computed = [batch["input_ids"].numel() for batch in tokenize(tiny_model, texts, batch_size=8).batches]
    assert computed == [8 * lengths[begin] for begin in range(0, 64, 8)]


def test_a_model_s_scores_tokenise_once(
    tiny_model: SentenceTransformer, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
):
    texts = sentences(90)
    evaluator = STSEvaluator(texts[:45], texts[45:], [float(number % 6) for number in range(45)])
    tokenised: list[str] = []
    preprocess = tiny_model.preprocess
    monkeypatch.setattr(
        tiny_model, "preprocess", lambda texts, **options: tokenised.extend(texts) or preprocess(texts, **options)
    )
    before = evaluator(tiny_model)
    assert set(tokenised) == set(texts)
    tokenised.clear()
    with torch.no_grad():
        for parameter in tiny_model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    after = evaluator(tiny_model)
    assert tokenised == []
    assert after != before

    tokenised.clear()
    tiny_model.prompts, tiny_model.default_prompt_name = {"say": "it is said that "}, "say"
    assert evaluator(tiny_model) != after
    assert set(tokenised) == set(texts)
    tiny_model.prompts["say"] = "someone says "
    tokenised.clear()
    evaluator(tiny_model)
    assert set(tokenised) == set(texts)
    tiny_model.default_prompt_name = None
    other = build_model(tiny_base, device="cpu", max_length=tiny_model.max_seq_length)
    other.tokenizer.padding_side = "left"  # tells the tokens apart
    evaluator(tiny_model)
    assert evaluator(other) == STSEvaluator(texts[:45], texts[45:], evaluator.scores)(other)
    tokenised.clear()
    evaluator(tiny_model)
    assert set(tokenised) == set(texts)

    tiny_model.max_seq_length = 5  # tokens of another length are other tokens
    tokenised.clear()
    cut = evaluator(tiny_model)
    assert set(tokenised) == set(texts)
    fresh = STSEvaluator(texts[:45], texts[45:], evaluator.scores)(tiny_model)
    assert cut == fresh != after
