"""One model, all tasks: graded pairs -> results, each sentence encoded once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from simcse_st.data import GradedPairs
from simcse_st.errors import InputError
from simcse_st.evaluation.evaluators import embed
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
from simcse_st.evaluation.tables import GROUPS, ON_DEV, YEARS, is_stsb

Known = Mapping[str, Mapping[str, Any]]


def score_model(
    tasks: Sequence[str], data: Mapping[str, GradedPairs], model: SentenceTransformer, known: Known
) -> tuple[dict[str, Any], list[float]]:
    """Runs tasks.

    Args:
        tasks: See :func:`~simcse_st.evaluation.tables.task_names`.
        data: The graded pairs of each task that has some; those on dev go by ``dev``.
        model: The model.
        known: Scores that a record holds of this very model, by the checksum of the pairs; they are not taken again.

    Returns:
        The results by task, and the cosines of the dev pairs where they were computed.

    Raises:
        InputError: A task is empty or its gold constant, or the model gives what cannot be measured.
    """
    of_record = {name: known[sha] for name, sha in _checksums(tasks, data).items() if _fits(known.get(sha), name)}
    on_dev = bool(set(ON_DEV) & set(tasks))
    needed = [name for name in data if (name in tasks and name not in of_record) or (name == "dev" and on_dev)]
    place = {text: number for number, text in enumerate(sentences_of(data[name] for name in needed))}
    embeddings = embed(model, list(place)) if place else torch.empty(0)
    results: dict[str, Any] = {}
    for name, sha in _checksums(tasks, data).items():
        if name in of_record:
            results[name] = dict(of_record[name])
            continue
        pairs, cosines = data[name], _cosines(data[name], place, embeddings)
        try:
            if name in YEARS:
                scores = sts_year(pairs.scores, cosines, pairs.subsets)
            else:
                scores = correlations(pairs.scores, cosines)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        results[name] = {**scores, "pairs_sha256": sha, "mean_gold": pairs.facts["mean_gold"]}
    if on_dev:
        results.update(_on_dev(tasks, data["dev"], place, embeddings))
    return results, _cosines(data["dev"], place, embeddings) if "dev" in needed else []


def average(results: Mapping[str, Any]) -> dict[str, Any]:
    """The mean of the paper's seven sets, as ``average``, if all of them are there, STS-B's test itself among them."""
    tasks = GROUPS["sts"]
    if not set(tasks) <= results.keys() or not is_stsb("test", results["test"]):
        return {}
    scores = [results[task].get("all", results[task].get("spearman")) for task in tasks]
    return {"average": {"all": sum(scores) / len(scores), "over": list(tasks)}}


def sentences_of(sets: Iterable[GradedPairs]) -> list[str]:
    """All distinct sentences."""
    return list(dict.fromkeys(text for pairs in sets for text in (*pairs.sentences1, *pairs.sentences2)))


def _checksums(tasks: Sequence[str], data: Mapping[str, GradedPairs]) -> dict[str, str]:
    return {name: pairs.facts["pairs_sha256"] for name, pairs in data.items() if name in tasks}


def _fits(scores: Mapping[str, Any] | None, task: str) -> bool:
    """Whether a known score is one of this kind of task."""
    return scores is not None and ("all" if task in YEARS else "spearman") in scores


def _on_dev(tasks: Sequence[str], dev: GradedPairs, place: dict[str, int], embeddings: Tensor) -> dict[str, Any]:
    results: dict[str, Any] = {}
    numbers = [number for number, same in enumerate(dev.paraphrases()) if same]
    pairs = [(place[dev.sentences1[number]], place[dev.sentences2[number]]) for number in numbers]
    sentences = [place[text] for text in sentences_of([dev])]
    if {"geometry", "retrieval"} & set(tasks) and not pairs:
        raise InputError("geometry and retrieval need dev pairs with gold >= 4 of 5: there is none")
    if "geometry" in tasks:
        first, second = (list(side) for side in zip(*pairs, strict=True))
        results["geometry"] = {
            "alignment": alignment(embeddings[first], embeddings[second]),
            "pairs": len(pairs),
            "uniformity": uniformity(embeddings[sentences]),
            "sentences": len(sentences),
        }
    if "retrieval" in tasks:
        results["retrieval"] = _retrieval(dev, pairs, sentences, embeddings)
    cosines, gold = _cosines(dev, place, embeddings), dev.gold_of_5()
    if "gold-scores" in tasks:
        results["gold-scores"] = by_gold_score(gold, cosines)
    if "mistakes" in tasks:
        results["mistakes"] = {
            kind: [_pair(dev, gold, cosines, number) for number in found]
            for kind, found in mistakes(gold, cosines).items()
        }
    return results


def _retrieval(
    dev: GradedPairs, pairs: list[tuple[int, int]], sentences: list[int], embeddings: Tensor
) -> dict[str, Any]:
    """Retrieval over the dev sentences, with what annotators said of the answers that came first."""
    number = {place: index for index, place in enumerate(sentences)}
    asked = [(number[first], number[second]) for first, second in pairs if first != second]
    if not asked:
        raise InputError("retrieval needs dev pairs with gold >= 4 of 5 whose sentences differ: there is none")
    queries, answers = (list(side) for side in zip(*asked, strict=True))
    found = retrieval(embeddings[sentences], queries, answers)
    texts = sentences_of([dev])
    graded: dict[frozenset[str], float] = {}
    for first, second, gold in zip(dev.sentences1, dev.sentences2, dev.gold_of_5(), strict=True):
        pair = frozenset((first, second))
        graded[pair] = max(gold, graded.get(pair, 0.0))  # graded twice, the better grade counts
    tops = [graded.get(frozenset((texts[q], texts[top]))) for q, top in zip(queries, found.pop("top1"), strict=True)]
    judged = [gold for gold in tops if gold is not None]
    return {**found, "top1_judged": len(judged), "top1_judged_at_most_1": sum(gold <= 1 for gold in judged)}


def _pair(dev: GradedPairs, gold: list[float], cosines: list[float], number: int) -> dict[str, Any]:
    return {
        "sentence1": dev.sentences1[number],
        "sentence2": dev.sentences2[number],
        "gold": gold[number],
        "cosine": cosines[number],
    }


def _cosines(pairs: GradedPairs, place: dict[str, int], embeddings: Tensor) -> list[float]:
    first, second = ([place[text] for text in side] for side in (pairs.sentences1, pairs.sentences2))
    return cosines_of(embeddings[first], embeddings[second])
