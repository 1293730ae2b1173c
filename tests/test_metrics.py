"""Geometry, retrieval and agreement against plain loops."""

from __future__ import annotations

import math
import random

import pytest
import torch
from scipy.stats import spearmanr

from simcse_st import InputError
from simcse_st.evaluation.metrics import (
    alignment,
    by_gold_score,
    correlations,
    cosines_of,
    mistakes,
    retrieval,
    sts_year,
    uniformity,
)


def embeddings(count: int, dim: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(vector: list[float]) -> list[float]:
    norm = math.sqrt(sum(value * value for value in vector))
    return [value / norm for value in vector]


def squared_distance(first: list[float], second: list[float]) -> float:
    return sum((a - b) ** 2 for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_alignment_and_uniformity_are_those_of_plain_loops(scale: float, monkeypatch: pytest.MonkeyPatch):
    # Blocks smaller than the data, and one that is not full.
    monkeypatch.setattr("simcse_st.evaluation.metrics._BLOCK", 64)
    sentences, partners = embeddings(200), embeddings(200, seed=1)
    rows, others = ([unit(row) for row in part.tolist()] for part in (sentences, partners))
    aligned = sum(map(squared_distance, rows, others)) / 200
    potentials = [math.exp(-2 * squared_distance(rows[i], rows[j])) for i in range(200) for j in range(i)]
    assert alignment(scale * sentences, partners) == pytest.approx(aligned, rel=1e-12)
    assert uniformity(scale * sentences) == pytest.approx(math.log(sum(potentials) / len(potentials)), rel=1e-12)
    # As they come from a model; the difference is that of the embeddings, not of the sum.
    assert uniformity(scale * sentences.float()) == pytest.approx(uniformity(sentences), abs=1e-7)


def test_identical_pairs_are_aligned_and_identical_sentences_not_uniform():
    assert alignment(embeddings(5), 3 * embeddings(5)) == pytest.approx(0, abs=1e-30)
    assert alignment(embeddings(5), embeddings(5)) == 0
    assert uniformity(torch.ones(4, 3)) == pytest.approx(0, abs=1e-12)
    with pytest.raises(InputError, match="two sentences"):
        uniformity(torch.ones(1, 3))


def test_retrieval_is_that_of_a_plain_loop():
    # Small whole numbers on the axes and diagonals, so that ties are exact and frequent.
    draw = random.Random(3)
    vectors = [draw.choice([(1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (-1, 0, 0)]) for _ in range(60)]
    pairs = draw.sample([(i, j) for i in range(60) for j in range(60) if i != j], 40)
    norm = {vector: math.sqrt(sum(value * value for value in vector)) for vector in vectors}

    def similarity(i: int, j: int) -> float:
        dot = sum(a * b for a, b in zip(vectors[i], vectors[j], strict=True))
        return round(dot / (norm[vectors[i]] * norm[vectors[j]]), 9)

    ranks = [
        1 + sum(similarity(query, k) >= similarity(query, answer) for k in range(60) if k not in (query, answer))
        for query, answer in pairs
    ]
    found = retrieval(torch.tensor(vectors, dtype=torch.float64), *zip(*pairs, strict=True))
    assert found.recall_at_1 == sum(rank == 1 for rank in ranks) / 40
    assert found.recall_at_5 == sum(rank <= 5 for rank in ranks) / 40
    assert found.mrr == pytest.approx(sum(1 / rank for rank in ranks) / 40, rel=1e-12)
    assert len(found.top1) == 40
    assert len(set(ranks)) > 5
    for (query, _), best in zip(pairs, found.top1, strict=True):
        assert best != query
        assert similarity(query, best) == max(similarity(query, k) for k in range(60) if k != query)


def test_recall_at_5_ends_with_the_fifth():
    angles = [math.radians(10 * number) for number in range(7)]
    circle = torch.tensor([[math.cos(angle), math.sin(angle)] for angle in angles], dtype=torch.float64)
    found = retrieval(circle, [0] * 6, range(1, 7))  # whose answers come first to sixth
    assert (found.recall_at_1, found.recall_at_5) == (1 / 6, 5 / 6)
    assert found.mrr == pytest.approx(sum(1 / rank for rank in range(1, 7)) / 6, rel=1e-12)


def test_pairs_that_are_alike_but_for_the_last_digits_are_ties():
    first, second = embeddings(2, 64)
    orders = [torch.randperm(64, generator=torch.Generator().manual_seed(seed)) for seed in range(20)]
    sides = [torch.stack([vector[order] for order in orders]) for vector in (first, second)]
    plain = torch.nn.functional.cosine_similarity(*sides)
    assert len(set(plain.tolist())) > 1  # the same sums in other orders
    assert len(set(cosines_of(*sides))) == 1


def test_retrieval_without_ties_agrees_too():
    sentences = embeddings(300, 8)
    queries, answers = list(range(0, 300, 2)), list(range(1, 300, 2))
    rows = [unit(row) for row in sentences.tolist()]
    ranks = []
    for query, answer in zip(queries, answers, strict=True):
        of_answer = squared_distance(rows[query], rows[answer])
        ranks.append(1 + sum(squared_distance(rows[query], rows[k]) < of_answer for k in range(300) if k != query))
    found = retrieval(sentences, queries, answers)
    assert found.mrr == pytest.approx(sum(1 / rank for rank in ranks) / 150, rel=1e-12)


def test_a_year_of_sts_has_three_aggregations_that_differ():
    # In each part the order is right, but the parts' levels of similarity differ.
    gold = [0.0, 1.0, 2.0, 3.0, 5.0, 0.0, 1.0, 4.0]
    cosines = [0.5, 0.6, 0.7, 0.8, 0.9, 0.1, 0.2, 0.15]
    year = sts_year(gold, cosines, {"a": 5, "b": 3})
    assert year.all == pytest.approx(100 * spearmanr(gold, cosines).statistic, abs=1e-9)
    assert {name: part.n for name, part in year.subsets.items()} == {"a": 5, "b": 3}
    assert year.subsets["a"].spearman == pytest.approx(100)
    assert year.subsets["b"].spearman == pytest.approx(50)
    assert year.mean == pytest.approx((100 + 50) / 2)
    assert year.wmean == pytest.approx((100 * 5 + 50 * 3) / 8)
    assert len({round(score, 6) for score in (year.all, year.mean, year.wmean)}) == 3
    assert year.n == 8
    assert sts_year(gold, cosines, {}).mean is None


def test_gold_scores_are_rounded_halves_upwards():
    bands = by_gold_score([0.5, 0.49, 1.0, 2.5, 4.5, 5.0, 4.4], [0.1, 0.0, 0.3, 0.5, 0.9, 0.8, 0.7])
    assert [band.n for band in bands] == [1, 2, 0, 1, 1, 2]
    assert [band.median for band in bands] == [0.0, pytest.approx(0.2), None, 0.5, 0.7, pytest.approx(0.85)]
    assert bands[5].mean == pytest.approx(0.85)


def test_mistakes_are_the_surest_ones():
    gold = [0.0, 1.0, 1.1, 4.0, 5.0, 3.9, 0.5]
    cosines = [0.2, 0.9, 0.95, 0.3, 0.1, 0.0, 0.5]
    assert mistakes(gold, cosines, 2) == {"overrated": [1, 6], "underrated": [4, 3]}


def test_what_has_no_correlation_is_an_error():
    with pytest.raises(InputError, match="gold scores must differ"):
        correlations([1, 1], [0.1, 0.2])
    with pytest.raises(InputError, match="all pairs the same similarity"):
        correlations([1, 2], [0.2, 0.2])
