"""The SimCSE loss for batches whose rows have any number of hard negatives."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin
from sentence_transformers.base.losses.merged_forward import embed_columns
from torch import Tensor, nn

# Measured: 16 to 64 are equally fast on a CPU, where padding costs more than the calls do.
CPU_CHUNK_SIZE = 32


@dataclass
class BatchFacts:
    """What the loss has seen so far in training."""

    batches: int = 0
    sentences: int = 0
    anchors: int = 0
    negatives: int = 0
    """Summed over anchors: the columns of each one's denominator, less its positive."""
    fewest_negatives: int = 0
    most_negatives: int = 0

    def add(self, anchors: int, positives: int, hard_negatives: int) -> None:
        """Counts one batch."""
        negatives = positives - 1 + hard_negatives
        self.fewest_negatives = min(self.fewest_negatives, negatives) if self.batches else negatives
        self.most_negatives = max(self.most_negatives, negatives)
        self.batches += 1
        self.sentences += anchors + positives + hard_negatives
        self.anchors += anchors
        self.negatives += anchors * negatives

    def summary(self) -> dict[str, Any]:
        """The counts, with the mean number of negatives that an anchor saw."""
        return {**asdict(self), "mean_negatives": self.negatives / self.anchors if self.anchors else None}


class SimCSELoss(CachedLossMixin, nn.Module):
    r"""SimCSE's contrastive loss (Gao, Yao & Chen, EMNLP 2021) with zero or more hard negatives a row.

    For row :math:`i` of a batch of :math:`N`, with unit embeddings :math:`a` (anchor), :math:`p` (positive) and the
    :math:`M` hard negatives :math:`n` that exist in the batch, whichever rows they belong to:

    .. math::
        \ell_i = -\log \frac{e^{a_i \cdot p_i / \tau}}
                 {\sum_j e^{a_i \cdot p_j / \tau} + \sum_m w_{im}\, e^{a_i \cdot n_m / \tau}}

    where :math:`w_{im}` is ``hard_negative_weight`` if :math:`n_m` is row :math:`i`'s own negative, else 1. With
    ``hard_negative_weight=1`` this is the paper's Eq. 5; without hard negatives it is Eq. 1.

    A row without a hard negative adds no column, and nothing is encoded in its place. On rectangular data with
    weight 1 the loss is ``MultipleNegativesRankingLoss(scale=1/temperature)``, whichever collator made the batch.

    Args:
        model: The model to train. Its embeddings are normalised here, whether or not it ends with ``Normalize``.
        temperature: :math:`\tau`; cosine similarities are divided by it.
        hard_negative_weight: :math:`\alpha`, how often a row's own hard negatives are counted in its denominator: 2
            acts as if each stood there twice, and 1 changes nothing. In logits that is
            :math:`+\log\alpha` on own negatives only, e.g. +0.69 for 2. It is not a factor on the loss.
        chunk_size: Sentences of one forward pass of a flat batch. By default 32 on a CPU, where sentences of equal
            length together save padding, and the whole batch elsewhere. The loss is the same, up to dropout's draws.

    Inputs:
        ======================================================  ======
        Texts                                                   Labels
        ======================================================  ======
        rows collated by :class:`SimCSECollator`                none
        (anchor, positive), stock collator                      none
        (anchor, positive, negative_1, ...), stock collator     none
        ======================================================  ======

    Raises:
        ValueError: ``temperature``, ``hard_negative_weight`` or ``chunk_size`` is not positive.

    Example:
        >>> loss = SimCSELoss(model, temperature=0.05)
        >>> trainer = SentenceTransformerTrainer(
        ...     model, args, train_dataset, loss=loss, data_collator=SimCSECollator(model.preprocess, max_length=32)
        ... )
    """

    def __init__(
        self,
        model: SentenceTransformer,
        temperature: float = 0.05,
        hard_negative_weight: float = 1.0,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("temperature", temperature), ("hard_negative_weight", hard_negative_weight)):
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a positive number, not {value!r}")
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1 or None, not {chunk_size!r}")
        self.model = model
        self.temperature = temperature
        self.hard_negative_weight = hard_negative_weight
        self.chunk_size = chunk_size
        self.uses_gradient_cache = False
        self.seen = BatchFacts()

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The mean loss of a batch.

        Args:
            sentence_features: One flat batch of :class:`SimCSECollator`, or one batch a column: anchors, positives,
                then any number of columns of hard negatives, ``N`` sentences each.
            labels: Not used.

        Returns:
            A scalar.
        """
        features = list(sentence_features)
        layout = torch.stack([features[0]["row"], features[0]["role"]], dim=1) if _is_flat(features) else None
        return self.calculate_loss(self._embed(features), layout)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss of a whole batch out of its chunks' embeddings (the hook of ``CachedLossMixin``).

        Args:
            reps: For each feature batch its chunks, each of shape ``(chunk, dim)``.
            labels: The layout of a flat batch, not labels: ``(sentences, 2)``, each sentence's row and role. Without
                it, ``reps`` are columns.
            with_backward: Whether to propagate back to the embeddings and return the detached loss.
        """
        embeddings = torch.cat([chunk for chunks in reps for chunk in chunks])
        layout = _columns_layout(reps) if labels is None else labels
        row, role = layout.unbind(dim=1)
        rows = int((role == 0).sum())
        order = (role * rows + row).argsort(stable=True)
        anchors, positives, negatives = embeddings[order].split([rows, rows, len(order) - 2 * rows])
        loss = self.compute_loss_from_embeddings(anchors, positives, negatives, row[order[2 * rows :]])
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss

    def compute_loss_from_embeddings(
        self,
        anchors: Tensor,
        positives: Tensor,
        negatives: Tensor | None = None,
        negative_rows: Tensor | None = None,
    ) -> Tensor:
        """The formula itself, in float32 (or float64 if the embeddings are).

        Args:
            anchors: Shape ``(N, dim)``.
            positives: Shape ``(N, dim)``; the positive of each anchor.
            negatives: Shape ``(M, dim)``; all hard negatives of the batch, in any order.
            negative_rows: Shape ``(M,)``; the row that each hard negative belongs to.

        Returns:
            The mean of the rows' losses, a scalar.

        Raises:
            ValueError: Shapes that do not fit together.
        """
        if negatives is None or negative_rows is None:
            negatives, negative_rows = anchors[:0], torch.empty(0, dtype=torch.long, device=anchors.device)
        if anchors.shape != positives.shape or len(negatives) != len(negative_rows):
            raise ValueError(
                f"{len(anchors)} anchors need as many positives, not {len(positives)}, and {len(negatives)} hard "
                f"negatives as many rows, not {len(negative_rows)}"
            )
        if torch.is_grad_enabled():
            self.seen.add(len(anchors), len(positives), len(negatives))
        # Half precision cannot hold cosines over a temperature of 0.05: exp(20) overflows fp16, and bf16 has three
        # significant digits. Autocast would round the product again.
        with torch.autocast(anchors.device.type, enabled=False):
            precision = torch.promote_types(anchors.dtype, torch.float32)
            anchor, candidate = (
                F.normalize(vectors.to(precision), dim=-1) for vectors in (anchors, torch.cat([positives, negatives]))
            )
            logits = anchor @ candidate.T / self.temperature
            target = torch.arange(len(anchors), device=logits.device)
            if self.hard_negative_weight != 1.0:
                own = target[:, None] == negative_rows[None, :]
                logits = logits + F.pad(own.to(precision), (len(positives), 0)) * math.log(self.hard_negative_weight)
            return F.cross_entropy(logits, target)

    def get_config_dict(self) -> dict[str, Any]:
        """The arguments that determine the loss, for the model card."""
        return {"temperature": self.temperature, "hard_negative_weight": self.hard_negative_weight}

    @property
    def citation(self) -> str:
        """BibTeX of the paper, for the model card."""
        return """
@inproceedings{gao-etal-2021-simcse,
    title = "{S}im{CSE}: Simple Contrastive Learning of Sentence Embeddings",
    author = "Gao, Tianyu and Yao, Xingcheng and Chen, Danqi",
    booktitle = "Proceedings of the 2021 Conference on Empirical Methods in Natural Language Processing",
    year = "2021",
    publisher = "Association for Computational Linguistics",
    url = "https://aclanthology.org/2021.emnlp-main.552",
    doi = "10.18653/v1/2021.emnlp-main.552",
    pages = "6894--6910",
}
"""

    def _embed(self, features: list[dict[str, Tensor]]) -> list[list[Tensor]]:
        """Embeds a flat batch chunk by chunk, each trimmed to its own longest sentence, or a batch a column."""
        if not _is_flat(features):
            return [[column] for column in embed_columns(self.model, features)]
        sentences = len(features[0]["row"])
        on_cpu = features[0]["row"].device.type == "cpu"
        size = self.chunk_size or (CPU_CHUNK_SIZE if on_cpu else sentences)
        ranges = [(begin, min(begin + size, sentences)) for begin in range(0, sentences, size)]
        chunks = self.embed_minibatch_iter(features[0], with_grad=True, copy_random_state=False, ranges=ranges)
        return [[embeddings for embeddings, _ in chunks]]


def _is_flat(features: list[dict[str, Tensor]]) -> bool:
    return len(features) == 1 and "role" in features[0]


def _columns_layout(reps: list[list[Tensor]]) -> Tensor:
    """Each sentence's row and role, shape ``(sentences, 2)``, for anchors, positives and columns of hard negatives."""
    if len(reps) < 2:
        raise ValueError("SimCSELoss needs anchors and positives: two columns, or a batch of SimCSECollator")
    lengths = {sum(len(chunk) for chunk in chunks) for chunks in reps}
    if len(lengths) > 1:
        raise ValueError(f"columns of one batch have different numbers of rows: {sorted(lengths)}")
    row = torch.arange(lengths.pop(), device=reps[0][0].device)
    return torch.cat([torch.stack([row, row.new_full(row.shape, min(role, 2))], 1) for role in range(len(reps))])
