"""Semantic textual similarity, measured as the paper does."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.util import batch_to_device, truncate_embeddings
from torch import Tensor

from simcse_st.errors import InputError
from simcse_st.evaluation.metrics import alignment, correlations, cosines_of, uniformity

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
        metrics = {"spearman": found["spearman"], "pearson": found["pearson"]}
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
