"""Semantic textual similarity, measured as the paper does."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.util import batch_to_device, truncate_embeddings
from torch import Tensor

from simcse_st.data.sts import GradedPairs
from simcse_st.errors import InputError
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
from simcse_st.evaluation.records import (
    GROUPS,
    YEARS,
    Average,
    Geometry,
    GradedPair,
    Mistakes,
    Retrieval,
    Tasks,
    is_stsb,
)

_BLOCK = 1024


class STSEvaluator(BaseEvaluator):
    """Correlation of cosine similarities with gold scores, x100, as papers print it.

    The same as Sentence Transformers' ``EmbeddingSimilarityEvaluator`` on cosine similarity, but each distinct
    sentence is encoded once, and tokenised once for all the scores of a model in training.

    Args:
        sentences1: First sentences.
        sentences2: Second sentences.
        scores: Gold scores, on any scale.
        paraphrases: Which pairs mean the same. With them, the metrics also hold ``alignment`` (over these pairs) and
            ``uniformity`` (over the distinct sentences of all pairs).
        batch_size: Sentences of one forward pass.
        name: Prefix of the metrics' names.

    Raises:
        InputError: Lists of different lengths, fewer than two pairs, or constant gold.
    """

    def __init__(
        self,
        sentences1: Sequence[str],
        sentences2: Sequence[str],
        scores: Sequence[float],
        *,
        paraphrases: Sequence[bool] | None = None,
        batch_size: int = 64,
        name: str = "",
    ) -> None:
        super().__init__()
        if not len(sentences1) == len(sentences2) == len(scores):
            raise InputError(f"{len(sentences1)} and {len(sentences2)} sentences do not make {len(scores)} pairs")
        if len(scores) < 2 or len(set(scores)) == 1:
            raise InputError("gold scores must differ for a correlation to exist")
        self.scores = list(scores)
        self.sentences = list(dict.fromkeys([*sentences1, *sentences2]))
        place = {sentence: index for index, sentence in enumerate(self.sentences)}
        self.first = torch.tensor([place[sentence] for sentence in sentences1])
        self.second = torch.tensor([place[sentence] for sentence in sentences2])
        self.paraphrases = torch.tensor([number for number, same in enumerate(paraphrases or ()) if same])
        self.batch_size = batch_size
        self.name = name
        self._tokens: tuple[Any, Tokenized] | None = None
        self.primary_metric = f"{name}_spearman" if name else "spearman"

    def __call__(  # type: ignore[override]  # as all of its evaluators: of one kind of model
        self, model: SentenceTransformer, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Scores a model.

        Args:
            model: The model.
            output_path: Not used.
            epoch: Not used.
            steps: Not used.

        Returns:
            ``{"spearman": ..., "pearson": ...}``, x100, not rounded; with paraphrases also ``alignment`` and
            ``uniformity``.

        Raises:
            InputError: The model gives an embedding that is not finite, or the same similarity to all pairs.
        """
        # What may change of a model between two scores and makes other tokens; the model itself is not kept alive.
        tokenizer = model.tokenizer
        sides = [getattr(tokenizer, name, None) for name in ("padding_side", "truncation_side", "added_tokens_decoder")]
        key = (weakref.ref(model), sides, model.max_seq_length, model.default_prompt_name, dict(model.prompts))
        if self._tokens is None or self._tokens[0] != key:
            self._tokens = key, tokenize(model, self.sentences, self.batch_size)
        embeddings = embed(model, self._tokens[1])
        first, second = embeddings[self.first], embeddings[self.second]
        found = correlations(self.scores, cosines_of(first, second))
        metrics = {"spearman": found.spearman, "pearson": found.pearson}
        if len(self.paraphrases):
            metrics["alignment"] = alignment(first[self.paraphrases], second[self.paraphrases])
            metrics["uniformity"] = uniformity(embeddings)
        return self.prefix_name_to_metrics(metrics, self.name)


@dataclass(frozen=True)
class Tokenized:
    """Sentences as a model takes them, in batches of nearly one length.

    Sentence Transformers' ``encode`` sorts by characters, which leaves nearly a third of what it computes to padding.

    Attributes:
        sentences: The sentences.
        batches: The features of each batch, longest sentences first.
        order: The numbers of the sentences in the order of the batches.
    """

    sentences: list[str]
    batches: list[dict[str, Any]]
    order: Tensor


def tokenize(model: SentenceTransformer, sentences: Sequence[str], batch_size: int = 64) -> Tokenized:
    """Tokenises sentences for :func:`embed`, with the model's default prompt.

    Args:
        model: The model, or one with the same tokenizer.
        sentences: The sentences.
        batch_size: Sentences of one forward pass.
    """
    prompt = model.prompts.get(model.default_prompt_name) if model.default_prompt_name else None

    def features(texts: list[str]) -> dict[str, Any]:
        return model.preprocess(texts, prompt=prompt)

    # Characters tell lengths well enough for blocks that are not all padding, and tokens then for the batches.
    rough = sorted(range(len(sentences)), key=lambda number: -len(sentences[number]))
    lengths: dict[int, float] = {}
    for begin in range(0, len(rough), _BLOCK):
        block = rough[begin : begin + _BLOCK]
        mask = features([sentences[number] for number in block]).get("attention_mask")
        if mask is None or mask.ndim != 2:  # a model without padding
            mask = torch.ones(len(block), 1)
        lengths.update(zip(block, mask.sum(dim=1).tolist(), strict=True))
    order = sorted(rough, key=lambda number: -lengths[number])
    batches = [
        features([sentences[number] for number in order[begin : begin + batch_size]])
        for begin in range(0, len(order), batch_size)
    ]
    return Tokenized(list(sentences), batches, torch.tensor(order))


def embed(model: SentenceTransformer, sentences: Sequence[str] | Tokenized, batch_size: int = 64) -> Tensor:
    """Unit embeddings of sentences, shape ``(sentences, dim)``, float32 on the CPU.

    Args:
        model: The model.
        sentences: The sentences, or what :func:`tokenize` made of them.
        batch_size: Sentences of one forward pass.

    Raises:
        InputError: An embedding is not finite; names the first sentence that has one.
    """
    tokens = sentences if isinstance(sentences, Tokenized) else tokenize(model, sentences, batch_size)
    if not tokens.sentences:
        return torch.empty(0, model.get_embedding_dimension() or 0)
    model.eval()
    with torch.inference_mode():
        found = [model(batch_to_device(dict(batch), model.device))["sentence_embedding"] for batch in tokens.batches]
        in_order = truncate_embeddings(torch.cat(found), model.truncate_dim).float().cpu()
    embeddings = torch.empty_like(in_order)
    embeddings[tokens.order] = in_order
    broken = (~torch.isfinite(embeddings).all(dim=1)).nonzero()
    if len(broken):
        raise InputError(f"the model's embedding of {tokens.sentences[int(broken[0])]!r} is not finite")
    return F.normalize(embeddings, dim=1)


def score_model(
    tasks: Sequence[str], data: Mapping[str, GradedPairs], model: SentenceTransformer
) -> tuple[Tasks, list[float]]:
    """Runs tasks, with each sentence encoded once.

    Args:
        tasks: Names of :data:`~simcse_st.evaluation.records.TASKS`.
        data: The graded pairs of each task that has some; those on dev go by ``dev``.
        model: The model.

    Returns:
        The results, and the cosines of the dev pairs where they were computed.

    Raises:
        InputError: A task is empty or its gold constant, or the model gives what cannot be measured.
    """
    place = {text: number for number, text in enumerate(sentences_of(data.values()))}
    embeddings = embed(model, list(place))
    results: dict[str, Any] = {}
    for name, pairs in data.items():
        if name not in tasks:
            continue
        cosines = _cosines(pairs, place, embeddings)
        try:
            scored = (
                sts_year(pairs.scores, cosines, pairs.facts.subsets)
                if name in YEARS
                else correlations(pairs.scores, cosines)
            )
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        facts = {"pairs_sha256": pairs.facts.pairs_sha256, "mean_gold": pairs.facts.mean_gold}
        results[name] = scored.model_copy(update=facts)
    if "dev" not in data:
        return Tasks(**results), []
    cosines = _cosines(data["dev"], place, embeddings)
    return _with_dev(Tasks(**results), tasks, data["dev"], cosines, place, embeddings), cosines


def with_average(tasks: Tasks) -> Tasks:
    """Adds the mean of the paper's seven sets, if all of them are there, STS-B's test itself among them."""
    scores = [tasks.score(name) for name in GROUPS["sts"]]
    known = [score for score in scores if score is not None]
    if len(known) < len(scores) or not tasks.test or not is_stsb("test", tasks.test.n, tasks.test.mean_gold):
        return tasks
    return tasks.model_copy(update={"average": Average(all=sum(known) / len(known), over=list(GROUPS["sts"]))})


def sentences_of(sets: Iterable[GradedPairs]) -> list[str]:
    """All distinct sentences."""
    return list(dict.fromkeys(text for pairs in sets for text in (*pairs.sentences1, *pairs.sentences2)))


def _with_dev(
    results: Tasks,
    tasks: Sequence[str],
    dev: GradedPairs,
    cosines: list[float],
    place: dict[str, int],
    embeddings: Tensor,
) -> Tasks:
    """Adds what is measured on the dev pairs and their sentences beside their own score."""
    added: dict[str, object] = {}
    numbers = [number for number, same in enumerate(dev.paraphrases()) if same]
    pairs = [(place[dev.sentences1[number]], place[dev.sentences2[number]]) for number in numbers]
    sentences = [place[text] for text in sentences_of([dev])]
    if {"geometry", "retrieval"} & set(tasks) and not pairs:
        raise InputError("geometry and retrieval need dev pairs with gold >= 4 of 5: there is none")
    if "geometry" in tasks:
        first, second = (list(side) for side in zip(*pairs, strict=True))
        added["geometry"] = Geometry(
            alignment=alignment(embeddings[first], embeddings[second]),
            pairs=len(pairs),
            uniformity=uniformity(embeddings[sentences]),
            sentences=len(sentences),
        )
    if "retrieval" in tasks:
        added["retrieval"] = _retrieval(dev, pairs, sentences, embeddings)
    gold = dev.gold_of_5()
    if "gold-scores" in tasks:
        added["gold_scores"] = by_gold_score(gold, cosines)
    if "mistakes" in tasks:
        texts = zip(dev.sentences1, dev.sentences2, gold, cosines, strict=True)
        graded = [GradedPair(sentence1=a, sentence2=b, gold=score, cosine=cosine) for a, b, score, cosine in texts]
        found = mistakes(gold, cosines).items()
        added["mistakes"] = Mistakes(**{kind: [graded[number] for number in numbers] for kind, numbers in found})
    return results.model_copy(update=added)


def _retrieval(dev: GradedPairs, pairs: list[tuple[int, int]], sentences: list[int], embeddings: Tensor) -> Retrieval:
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
    tops = [graded.get(frozenset((texts[query], texts[top]))) for query, top in zip(queries, found.top1, strict=True)]
    judged = [gold for gold in tops if gold is not None]
    return Retrieval(
        recall_at_1=found.recall_at_1,
        recall_at_5=found.recall_at_5,
        mrr=found.mrr,
        n=len(queries),
        sentences=len(sentences),
        top1_judged=len(judged),
        top1_judged_at_most_1=sum(gold <= 1 for gold in judged),
    )


def _cosines(pairs: GradedPairs, place: dict[str, int], embeddings: Tensor) -> list[float]:
    first, second = ([place[text] for text in side] for side in (pairs.sentences1, pairs.sentences2))
    return cosines_of(embeddings[first], embeddings[second])
