"""What embeddings say about sentences: geometry, retrieval, agreement with gold scores.

Every function takes embeddings of any length and precision, normalises them, and computes in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

from simcse_st.errors import InputError
from simcse_st.evaluation.records import GoldBand, Subset, YearScores
from simcse_st.records import Scores

_BLOCK = 2048


def alignment(anchors: Tensor, positives: Tensor) -> float:
    """How far positives are from their anchors: the mean squared distance (Wang & Isola 2020, with alpha = 2).

    Args:
        anchors: Shape ``(pairs, dim)``.
        positives: Shape ``(pairs, dim)``.

    Returns:
        0 to 4; lower is better.
    """
    return float((_unit(anchors) - _unit(positives)).square().sum(dim=1).mean())


def uniformity(embeddings: Tensor, t: float = 2.0) -> float:
    """How evenly embeddings are spread: log of the mean of exp(-t d^2) over all pairs (Wang & Isola 2020).

    Exact over all n (n - 1) / 2 pairs, with memory for a block of them.

    Args:
        embeddings: Those of distinct sentences, shape ``(sentences, dim)``.
        t: The exponent's factor.

    Returns:
        At most 0; lower is better.
    """
    count = len(embeddings)
    if count < 2:
        raise InputError("uniformity needs two sentences")
    total = 0.0
    for begin in range(0, count, _BLOCK):
        rows = _unit(embeddings[begin : begin + _BLOCK])
        for other in range(begin, count, _BLOCK):
            cosines = rows @ _unit(embeddings[other : other + _BLOCK]).T
            potential = cosines.sub_(1).mul_(2 * t).exp_()  # of unit vectors: d^2 = 2 - 2 cos
            total += float(potential.triu_(diagonal=1).sum() if other == begin else potential.sum())
    return math.log(total / (count * (count - 1) / 2))


@dataclass(frozen=True)
class Found:
    """What retrieval found.

    Attributes:
        recall_at_1: The share of queries whose answer comes first, 0 to 1.
        recall_at_5: The share of those whose answer is among the first five.
        mrr: The mean of 1 / rank.
        top1: The number of the sentence that comes first, of each query.
    """

    recall_at_1: float
    recall_at_5: float
    mrr: float
    top1: list[int]


def retrieval(embeddings: Tensor, queries: Sequence[int], answers: Sequence[int]) -> Found:
    """How early the answer to a query is found among all sentences but the query itself.

    Of sentences that are equally similar, the answer is counted last.

    Args:
        embeddings: Those of all distinct sentences, shape ``(sentences, dim)``.
        queries: Their numbers.
        answers: The number of the one right answer to each.
    """
    ranks: list[int] = []
    top1: list[int] = []
    everything = _unit(embeddings)
    for begin in range(0, len(queries), 256):
        query, answer = (torch.tensor(list(part[begin : begin + 256])) for part in (queries, answers))
        similarities = everything[query] @ everything.T
        row = torch.arange(len(query))
        similarities[row, query] = -math.inf
        of_answer = similarities[row, answer]
        # The answer itself is one of those that are at least as similar, so its rank needs no further one.
        ranks += (similarities >= of_answer[:, None]).sum(dim=1).tolist()
        top1 += similarities.argmax(dim=1).tolist()
    found = np.array(ranks)
    return Found(float((found <= 1).mean()), float((found <= 5).mean()), float((1 / found).mean()), top1)


def cosines_of(first: Tensor, second: Tensor) -> list[float]:
    """The cosine of each pair of rows.

    Rounded to 1e-12, so that pairs which are equally similar but for the last digits of the sums are ties.

    Args:
        first: Shape ``(pairs, dim)``.
        second: Shape ``(pairs, dim)``.
    """
    return (_unit(first) * _unit(second)).sum(dim=1).round(decimals=12).tolist()


def correlations(gold: Sequence[float], cosines: Sequence[float]) -> Scores:
    """Spearman and Pearson correlation x100."""
    if len(set(gold)) == 1:
        raise InputError("gold scores must differ for a correlation to exist")
    if max(cosines) - min(cosines) < 1e-6:  # of float32 embeddings, nothing but rounding
        raise InputError("the model gives all pairs the same similarity, so that nothing can be measured")
    return Scores(
        spearman=100 * float(spearmanr(gold, cosines).statistic),
        pearson=100 * float(pearsonr(gold, cosines).statistic),
        n=len(gold),
    )


def sts_year(gold: Sequence[float], cosines: Sequence[float], subsets: Mapping[str, int]) -> YearScores:
    """A year of STS under the three aggregations in use; papers that give one number mean different ones.

    Args:
        gold: The scores of all parts, one after the other.
        cosines: The similarities in the same order.
        subsets: The size of each part, in order; none if they are not known.
    """
    together = correlations(gold, cosines)
    if subsets and sum(subsets.values()) != len(gold):
        raise ValueError(f"subsets of {sum(subsets.values())} pairs in all do not make {len(gold)}")
    year = YearScores(all=together.spearman, pearson_all=together.pearson, n=len(gold))
    if not subsets:
        return year
    parts = {}
    for name, begin, end in _spans(subsets):
        try:
            spearman = correlations(gold[begin:end], cosines[begin:end]).spearman
        except InputError as error:
            raise InputError(f"subset {name}: {error}") from None
        parts[name] = Subset(spearman=spearman, n=end - begin)
    scores, sizes = zip(*((part.spearman, part.n) for part in parts.values()), strict=True)
    mean, weighted = float(np.mean(scores)), float(np.average(scores, weights=sizes))
    return year.model_copy(update={"mean": mean, "wmean": weighted, "subsets": parts})


def by_gold_score(gold_of_5: Sequence[float], cosines: Sequence[float]) -> list[GoldBand]:
    """Cosine similarity for each gold score from 0 to 5, rounded (halves upwards)."""
    rounded = np.floor(np.asarray(gold_of_5) + 0.5).astype(int)
    bands = []
    for gold in range(6):
        of_band = np.asarray(cosines)[rounded == gold]
        known = len(of_band) > 0
        median, mean = (float(np.median(of_band)), float(of_band.mean())) if known else (None, None)
        bands.append(GoldBand(gold=gold, n=len(of_band), median=median, mean=mean))
    return bands


def mistakes(gold_of_5: Sequence[float], cosines: Sequence[float], count: int = 10) -> dict[str, list[int]]:
    """The pairs on which a model is most confidently wrong.

    Args:
        gold_of_5: Gold scores from 0 to 5.
        cosines: Similarities.
        count: How many of each kind.

    Returns:
        Numbers of pairs: ``overrated`` (gold at most 1, most similar first), ``underrated`` (gold at least 4, least
        similar first).
    """
    order = np.argsort(np.asarray(cosines), kind="stable")
    gold = np.asarray(gold_of_5)
    return {
        "overrated": [int(number) for number in order[::-1] if gold[number] <= 1][:count],
        "underrated": [int(number) for number in order if gold[number] >= 4][:count],
    }


def _unit(embeddings: Tensor) -> Tensor:
    return F.normalize(embeddings.double(), dim=1)


def _spans(sizes: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    begin = 0
    for name, size in sizes.items():
        yield name, begin, begin + size
        begin += size
