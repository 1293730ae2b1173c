"""What is left out of a row's denominator: false negatives by text, and other rows' hard negatives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

from helpers import collect, sentences
from simcse_st import SimCSECollator, SimCSELoss


def loss_of(
    rows: list[dict[str, Any]], model: SentenceTransformer, **arguments: Any
) -> tuple[torch.Tensor, SimCSELoss]:
    loss = SimCSELoss(model, **arguments)
    return loss(collect(SimCSECollator(model.preprocess)(rows))), loss


def by_hand(rows: list[dict[str, Any]], model: SentenceTransformer, *, share: bool = True) -> float:
    """The masked loss, row by row and column by column, from the texts."""
    vector = {text: model.encode(text, convert_to_tensor=True).double() for row in rows for text in flat(row)}
    total = 0.0
    for i, row in enumerate(rows):
        terms = []
        for j, other in enumerate(rows):
            same = other["positive"] in (row["anchor"], row["positive"]) or other["anchor"] == row["anchor"]
            if i == j or not same:
                terms.append(math.exp(vector[row["anchor"]] @ vector[other["positive"]] / 0.05))
            if i == j or share:
                for negative in other.get("negative") or []:
                    terms.append(math.exp(vector[row["anchor"]] @ vector[negative] / 0.05))
        total -= math.log(math.exp(vector[row["anchor"]] @ vector[row["positive"]] / 0.05) / sum(terms))
    return total / len(rows)


def flat(row: dict[str, Any]) -> list[str]:
    return [row["anchor"], row["positive"], *(row.get("negative") or [])]


def duplicated() -> list[dict[str, Any]]:
    """Six rows: 0 and 1 share an anchor, 2's positive is 3's anchor, 4 and 5 share a positive."""
    t = sentences(14)
    return [
        {"anchor": t[0], "positive": t[1], "negative": [t[10]]},
        {"anchor": t[0], "positive": t[2], "negative": []},
        {"anchor": t[3], "positive": t[4], "negative": [t[11], t[12]]},
        {"anchor": t[4], "positive": t[5], "negative": None},
        {"anchor": t[6], "positive": t[8], "negative": [t[13]]},
        {"anchor": t[7], "positive": t[8], "negative": None},
    ]


def test_masked_loss_is_the_sum_over_what_is_left(tiny_model: SentenceTransformer):
    rows = duplicated()
    value, loss = loss_of(rows, tiny_model, mask_false_negatives=True)
    assert value.item() == pytest.approx(by_hand(rows, tiny_model), abs=1e-5)
    # Rows 0 and 1 each leave the other's positive out, 3 leaves out 2's, 4 and 5 each other's.
    assert loss.seen.masked_cells == 5
    assert loss_of(rows, tiny_model)[0].item() > value.item()
    # 5 other positives and 4 hard negatives, less one for five of the six rows.
    facts = loss.seen.facts()
    assert (facts.negatives, facts.fewest_negatives, facts.most_negatives) == (6 * 9 - 5, 8, 9)


def test_a_masked_positive_gets_no_weight_and_no_gradient(tiny_model: SentenceTransformer):
    generator = torch.Generator().manual_seed(0)
    anchor = torch.randn(1, 8, generator=generator).expand(2, 8)
    positives = torch.randn(2, 8, generator=generator, requires_grad=True)
    ids = torch.tensor([7, 7]), torch.tensor([1, 2])
    value = SimCSELoss(tiny_model).compute_loss_from_embeddings(anchor, positives, None, None, *ids)
    assert value.item() == 0.0  # each row's denominator holds its own positive alone
    value.backward()
    assert torch.equal(positives.grad, torch.zeros(2, 8))


def test_texts_that_differ_by_a_space_are_different(tiny_model: SentenceTransformer):
    rows = [{"anchor": "aa bb", "positive": "cc"}, {"anchor": "aa  bb", "positive": "dd"}]
    plain, masked = (loss_of(rows, tiny_model, mask_false_negatives=mask) for mask in (False, True))
    # To the tokenizer they are one text, which is why texts are compared.
    assert tiny_model.tokenizer.tokenize("aa bb") == tiny_model.tokenizer.tokenize("aa  bb")
    assert masked[1].seen.masked_cells == 0
    assert torch.equal(plain[0], masked[0])


def test_without_duplicates_masking_changes_no_bit(tiny_model: SentenceTransformer):
    texts = sentences(30)
    rows = [
        {"anchor": texts[i], "positive": texts[i + 10], "negative": texts[20 + i : 20 + i + i % 3]} for i in range(10)
    ]
    plain, masked = (loss_of(rows, tiny_model, mask_false_negatives=mask)[0] for mask in (False, True))
    assert torch.equal(plain, masked)


def test_repeated_sentences_of_an_unsupervised_batch_are_masked(tiny_model: SentenceTransformer):
    rows = [{"sentence": text} for text in ("aa", "bb", "aa", "cc")]
    value, loss = loss_of(rows, tiny_model, mask_false_negatives=True)
    assert loss.seen.masked_cells == 2
    pairs = [{"anchor": row["sentence"], "positive": row["sentence"]} for row in rows]
    assert value.item() == pytest.approx(by_hand(pairs, tiny_model), abs=1e-5)


@pytest.mark.parametrize("mask", [False, True])
def test_hard_negatives_can_be_kept_to_their_own_row(mask: bool, tiny_model: SentenceTransformer):
    texts = sentences(30)
    rows = [
        {"anchor": texts[i], "positive": texts[i + 10], "negative": texts[20 + i : 20 + i + i % 3]} for i in range(8)
    ]
    value, loss = loss_of(rows, tiny_model, share_hard_negatives=False, mask_false_negatives=mask)
    assert value.item() == pytest.approx(by_hand(rows, tiny_model, share=False), abs=1e-5)
    assert (loss.seen.fewest_negatives, loss.seen.most_negatives) == (7, 9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.05, 0.001])
def test_half_precision_with_masked_columns_is_the_float32_loss(
    temperature: float, dtype: torch.dtype, tiny_model: SentenceTransformer
):
    generator = torch.Generator().manual_seed(1)
    anchors, positives, negatives = (torch.randn(n, 16, generator=generator).to(dtype) for n in (32, 32, 20))
    owners = torch.arange(20)
    ids = torch.arange(32) // 2, torch.arange(32) + 100
    loss = SimCSELoss(tiny_model, temperature=temperature, hard_negative_weight=2.0)
    leaf = anchors.clone().requires_grad_()
    value = loss.compute_loss_from_embeddings(leaf, positives, negatives, owners, *ids)
    expected = loss.compute_loss_from_embeddings(anchors.float(), positives.float(), negatives.float(), owners, *ids)
    assert value.dtype == torch.float32
    assert math.isfinite(value.item())
    assert value.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    value.backward()
    assert torch.isfinite(leaf.grad).all()


def test_masking_needs_the_texts(tiny_model: SentenceTransformer):
    rows = [{"anchor": "aa", "positive": "bb"}, {"anchor": "cc", "positive": "dd"}]
    features = collect(SentenceTransformerDataCollator(tiny_model.preprocess)(rows))
    with pytest.raises(ValueError, match="use SimCSECollator as data_collator"):
        SimCSELoss(tiny_model, mask_false_negatives=True)(features)


def test_the_paper_s_formula_for_triplets(tiny_model: SentenceTransformer):
    """As published: a logit matrix of anchors against positives, then negatives, plus a diagonal of log alpha."""
    alpha, temperature, n = 3.0, 0.05, 6
    generator = torch.Generator().manual_seed(2)
    z1, z2, z3 = (torch.randn(n, 16, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3))
    cosine = torch.nn.CosineSimilarity(dim=-1)
    positive_part = cosine(z1.unsqueeze(1), z2.unsqueeze(0)) / temperature
    negative_part = cosine(z1.unsqueeze(1), z3.unsqueeze(0)) / temperature
    weights = math.log(alpha) * torch.cat([torch.zeros(n, n), torch.eye(n)], dim=1).double()
    logits = torch.cat([positive_part, negative_part], dim=1) + weights
    expected = torch.nn.functional.cross_entropy(logits, torch.arange(n))

    loss = SimCSELoss(tiny_model, temperature=temperature, hard_negative_weight=alpha)
    value = loss.compute_loss_from_embeddings(z1, z2, z3, torch.arange(n))
    assert value.item() == pytest.approx(expected.item(), abs=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(value, [z1, z2, z3]), torch.autograd.grad(expected, [z1, z2, z3]), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)
