"""Evaluators: semantic textual similarity, measured as the paper does, and retrieval."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.util import dot_score
from torch import Tensor

from simcse_st.data.files import digest_of
from simcse_st.data.held_out import HeldOut, RetrievalSet, parts_of
from simcse_st.data.sts import GradedPairs
from simcse_st.errors import InputError, nearest
from simcse_st.evaluation.embedding import Embedder, embed
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
from simcse_st.records import SPLITS, Record, Scores
from simcse_st.references import GRADED_METRICS, RETRIEVAL_METRICS

_CELLS = 2**22  # similarities that are
_QUERIES = 256  # whose ranked passages are


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
        self.name = name
        self._embed = Embedder(self.sentences, batch_size)
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
        embeddings = self._embed(model)
        first, second = embeddings[self.first], embeddings[self.second]
        found = correlations(self.scores, cosines_of(first, second))
        metrics = {"spearman": found.spearman, "pearson": found.pearson}
        if len(self.paraphrases):
            metrics["alignment"] = alignment(first[self.paraphrases], second[self.paraphrases])
            metrics["uniformity"] = uniformity(embeddings)
        return self.prefix_name_to_metrics(metrics, self.name)


class RetrievalEvaluator(InformationRetrievalEvaluator):
    """Sentence Transformers' evaluator, x100, with each distinct text encoded once and memory for few similarities.

    A passage that is the query itself is not among those ranked, as in BEIR. Of equally similar passages the order is
    that of a hash of their texts, so that it prefers neither the right nor the wrong ones.

    Args:
        retrieval: The set.
        batch_size: Texts of one forward pass.
        name: Prefix of the metrics' names.
    """

    def __init__(self, retrieval: RetrievalSet, *, batch_size: int = 64, name: str = "") -> None:
        ids = [digest_of(passage).hex() for passage in retrieval.passages]
        numbers = [str(number) for number in range(len(retrieval))]
        depths = [1, 3, 5, 10, 100]
        super().__init__(
            dict(zip(numbers, retrieval.queries, strict=True)),
            dict(zip(ids, retrieval.passages, strict=True)),
            {number: {ids[one] for one in found} for number, found in zip(numbers, retrieval.relevant, strict=True)},
            corpus_chunk_size=_CELLS // _QUERIES,
            accuracy_at_k=depths,
            precision_recall_at_k=depths,
            batch_size=batch_size,
            name=name,
            write_csv=False,
            score_functions={"cosine": dot_score},  # of unit vectors
        )
        self.primary_metric = f"{name}_ndcg@10" if name else "ndcg@10"
        self.retrieval = retrieval
        self.texts = retrieval.texts()
        self._place = {text: number for number, text in enumerate(self.texts)}
        self._embed = Embedder(self.texts, batch_size)
        self._of_queries = torch.empty(0)

    def __call__(  # type: ignore[override]
        self, model: SentenceTransformer, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Scores a model.

        Args:
            model: The model.
            output_path: Not used.
            epoch: Not used.
            steps: Not used.

        Returns:
            ``ndcg@10``, ``mrr@10``, ``map@100``, and ``accuracy``, ``recall`` and ``precision`` at 1, 3, 5, 10 and 100,
            x100, not rounded.

        Raises:
            InputError: The model gives an embedding that is not finite.
        """
        return self.prefix_name_to_metrics(self.score(self._embed(model), self._place), self.name)

    def score(self, embeddings: Tensor, place: Mapping[str, int]) -> dict[str, float]:
        """The metrics of embeddings.

        Args:
            embeddings: Unit vectors, shape ``(texts, dim)``.
            place: The row of each text.
        """
        rows = [place[passage] for passage in self.retrieval.passages]
        in_order = rows == list(range(rows[0], rows[0] + len(rows)))  # then they need no second copy
        of_corpus = embeddings[rows[0] : rows[0] + len(rows)] if in_order else embeddings[rows]
        sums: dict[str, float] = {}
        for begin in range(0, len(self.retrieval.queries), _QUERIES):
            block = self.retrieval.queries[begin : begin + _QUERIES]
            self.queries = list(block)
            self.queries_ids = [str(number) for number in range(begin, begin + len(block))]
            self._of_queries = embeddings[[place[query] for query in block]]
            found: Any = self.compute_all_metrics(None, corpus_embeddings=of_corpus)  # type: ignore[arg-type]
            for name, at in found["cosine"].items():
                for k, value in at.items():
                    metric = f"{name.removesuffix('@k')}@{k}"
                    sums[metric] = sums.get(metric, 0.0) + float(value) * len(block)
        return {metric: 100 * total / len(self.retrieval.queries) for metric, total in sums.items()}

    def embed_inputs(self, *_: Any, **__: Any) -> Any:
        """The embeddings of the queries at hand."""
        return self._of_queries

    def compute_metrics(self, queries_result_list: list[Any]) -> Any:
        """The metrics of ranked passages, the query's own text not among them."""
        for query, hits in zip(self.queries, queries_result_list, strict=True):
            own = digest_of(str(query)).hex()
            hits[:] = [hit for hit in hits if hit["corpus_id"] != own]
        return super().compute_metrics(queries_result_list)

    def output_scores(self, scores: Any) -> None:
        """Prints nothing: whoever calls knows what to say."""


class HeldOutEvaluator:
    """Everything that a model scores on dev or test, with each distinct text encoded once.

    Args:
        held_out: Graded pairs, a retrieval set, or several sets under names.
        sizes: To which embeddings are cut beside: their metrics are ``SIZE/METRIC``. Of several sets, all metrics are
            ``NAME/METRIC``.
    """

    def __init__(self, held_out: HeldOut, sizes: Iterable[int] = ()) -> None:
        self.sizes = [None, *sizes]
        self._parts = [
            (f"{name}/" if name else "", one, RetrievalEvaluator(one) if isinstance(one, RetrievalSet) else None)
            for name, one in parts_of(held_out).items()
        ]
        self.texts = held_out.texts()
        self._place = {text: number for number, text in enumerate(self.texts)}
        self._embed = Embedder(self.texts, 64)

    def __call__(self, model: SentenceTransformer) -> dict[str, float]:
        """The metrics of a model, x100, and of graded pairs alignment and uniformity.

        Raises:
            InputError: The model gives an embedding that is not finite, or the same similarity to all pairs.
        """
        embeddings = self._embed(model)
        metrics = self.score(embeddings, self._place)
        for prefix, one, _ in self._parts:
            if isinstance(one, GradedPairs) and any(one.paraphrases()):
                metrics |= {f"{prefix}{key}": value for key, value in self._geometry(one, embeddings).items()}
        return metrics

    def score(self, embeddings: Tensor, place: Mapping[str, int]) -> dict[str, float]:
        """The metrics of embeddings.

        Args:
            embeddings: Unit vectors, shape ``(texts, dim)``.
            place: The row of each text.
        """
        metrics: dict[str, float] = {}
        width = embeddings.shape[1]
        for size in self.sizes:
            if size is not None and not 0 < size <= width:
                raise InputError(f"embeddings of {width} dimensions cannot be cut to {size}")
            cut = embeddings if size in (None, width) else F.normalize(embeddings[:, :size], dim=1)
            for prefix, one, evaluator in self._parts:
                found = evaluator.score(cut, place) if evaluator else _correlations(one, cut, place)
                prefix = prefix if size is None else f"{prefix}{size}/"
                metrics |= {f"{prefix}{key}": value for key, value in found.items()}
        return metrics

    def _geometry(self, pairs: GradedPairs, embeddings: Tensor) -> dict[str, float]:
        same = [number for number, is_one in enumerate(pairs.paraphrases()) if is_one]
        first, second = (
            embeddings[[self._place[side[number]] for number in same]] for side in (pairs.sentences1, pairs.sentences2)
        )
        sentences = embeddings[[self._place[text] for text in pairs.texts()]]
        return {"alignment": alignment(first, second), "uniformity": uniformity(sentences)}


def _correlations(pairs: GradedPairs | RetrievalSet, embeddings: Tensor, place: Mapping[str, int]) -> dict[str, float]:
    assert isinstance(pairs, GradedPairs)
    found = correlations(pairs.scores, _cosines(pairs, place, embeddings))
    return {name: found.metrics[name] for name in GRADED_METRICS}


def score_model(
    tasks: Sequence[str],
    data: Mapping[str, HeldOut],
    model: SentenceTransformer,
    metrics: Mapping[str, str] | None = None,
    sizes: Iterable[int] = (),
) -> tuple[Tasks, list[float]]:
    """Runs tasks, with each sentence encoded once.

    Args:
        tasks: Names of :data:`~simcse_st.evaluation.records.TASKS`.
        data: The held-out set of each task that has one; those on dev go by ``dev``.
        model: The model.
        metrics: The metric that counts of some of them, where it is not the default of its kind.
        sizes: To which embeddings are cut for further scores on dev and test.

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
        try:
            if name in YEARS and isinstance(pairs, GradedPairs):
                cosines = _cosines(pairs, place, embeddings)
                scored: Record = sts_year(pairs.scores, cosines, pairs.facts.subsets)
            else:
                found = HeldOutEvaluator(pairs, sizes if name in SPLITS else ()).score(embeddings, place)
                scored = scores_of(pairs, (metrics or {}).get(name), found)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        facts = {"pairs_sha256": pairs.facts.pairs_sha256, "mean_gold": pairs.facts.mean_gold}
        results[name] = scored.model_copy(update=facts)
    dev = data.get("dev")
    if not isinstance(dev, GradedPairs):
        return Tasks(**results), []
    cosines = _cosines(dev, place, embeddings)
    return _with_dev(Tasks(**results), tasks, dev, cosines, place, embeddings), cosines


def scores_of(held_out: HeldOut, metric: str | None, metrics: Mapping[str, float]) -> Scores:
    """What a model scores on a held-out set.

    Args:
        held_out: The set.
        metric: The metric that counts; by default that of the first set's kind.
        metrics: All of them.

    Raises:
        InputError: The metric that counts is not among them, as that of a size which the model does not have.
    """
    name, first = next(iter(parts_of(held_out).items()))
    default = (RETRIEVAL_METRICS if isinstance(first, RetrievalSet) else GRADED_METRICS)[0]
    chosen = metric or (f"{name}/{default}" if name else default)
    if chosen not in metrics:
        raise InputError(f"no {chosen}: {nearest(chosen, metrics)}")
    of_chosen = parts_of(held_out).get(chosen.partition("/")[0]) or held_out
    return Scores(metric=chosen, n=len(of_chosen), pairs_sha256=held_out.facts.pairs_sha256, **metrics)


def with_average(tasks: Tasks) -> Tasks:
    """Adds the mean of the paper's seven sets, if all of them are there, STS-B's test itself among them."""
    scores = [tasks.score(name) for name in GROUPS["sts"]]
    known = [score for score in scores if score is not None]
    if len(known) < len(scores) or not tasks.test or not is_stsb("test", tasks.test.n, tasks.test.mean_gold):
        return tasks
    return tasks.model_copy(update={"average": Average(all=sum(known) / len(known), over=list(GROUPS["sts"]))})


def sentences_of(sets: Iterable[HeldOut]) -> list[str]:
    """All distinct sentences."""
    return list(dict.fromkeys(text for one in sets for text in one.texts()))


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


def _cosines(pairs: GradedPairs, place: Mapping[str, int], embeddings: Tensor) -> list[float]:
    first, second = ([place[text] for text in side] for side in (pairs.sentences1, pairs.sentences2))
    return cosines_of(embeddings[first], embeddings[second])
