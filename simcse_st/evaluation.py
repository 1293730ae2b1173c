"""Semantic textual similarity, measured as the paper does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator
from torch import Tensor

from simcse_st.errors import InputError
from simcse_st.metrics import alignment, correlations, cosines_of, uniformity


class STSEvaluator(BaseEvaluator):
    """Correlation of cosine similarities with gold scores, x100, as papers print it.

    The same as Sentence Transformers' ``EmbeddingSimilarityEvaluator`` on cosine similarity, but each distinct
    sentence is encoded once.

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
        embeddings = embed(model, self.sentences, self.batch_size)
        first, second = embeddings[self.first], embeddings[self.second]
        found = correlations(self.scores, cosines_of(first, second))
        metrics = {"spearman": found["spearman"], "pearson": found["pearson"]}
        if len(self.paraphrases):
            metrics["alignment"] = alignment(first[self.paraphrases], second[self.paraphrases])
            metrics["uniformity"] = uniformity(embeddings)
        return self.prefix_name_to_metrics(metrics, self.name)


def embed(model: SentenceTransformer, sentences: Sequence[str], batch_size: int = 64) -> Tensor:
    """Unit embeddings of sentences, shape ``(sentences, dim)``, float32 on the CPU.

    Raises:
        InputError: An embedding is not finite; names the first sentence that has one.
    """
    embeddings = model.encode(
        list(sentences), batch_size=batch_size, convert_to_tensor=True, show_progress_bar=False
    ).cpu()
    broken = (~torch.isfinite(embeddings).all(dim=1)).nonzero()
    if len(broken):
        raise InputError(f"the model's embedding of {sentences[int(broken[0])]!r} is not finite")
    return F.normalize(embeddings.float(), dim=1)
