"""The SimCSE loss for batches whose rows have any number of hard negatives."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin, RandContext, has_static_embedding_input
from sentence_transformers.sentence_transformer.losses.matryoshka import ForwardDecorator
from sentence_transformers.sentence_transformer.modules import Normalize
from sentence_transformers.util.distributed import get_rank, get_world_size
from torch import Tensor, nn

from simcse_st.card import bibtex
from simcse_st.errors import InputError
from simcse_st.recipe import LossSection, checked
from simcse_st.training.batch import (
    BatchCounter,
    chunk_ranges,
    columns_layout,
    count_rows,
    false_negatives,
    gather_rows,
    word_embeddings,
    words_looked_up_once,
)
from simcse_st.training.mlm import MaskedLanguageModel

# What one more forward pass costs on a CPU, in tokens: it goes through all weights and their gradients once more.
# Tried at 32, 48 and 72 on two cores: within that machine's noise, an encoder of BERT-base's size and a small one are
# as fast with either.
CPU_PASS_COST = 48


class SimCSELoss(CachedLossMixin, nn.Module):
    r"""SimCSE's contrastive loss (Gao, Yao & Chen, EMNLP 2021) with zero or more hard negatives a row.

    For row :math:`i` of a batch of :math:`N`, with unit embeddings :math:`a` (anchor), :math:`p` (positive) and the
    :math:`M` hard negatives :math:`n` that exist in the batch, whichever rows they belong to:

    .. math::
        \ell_i = -\log \frac{e^{a_i \cdot p_i / \tau}}
                 {\sum_j e^{a_i \cdot p_j / \tau} + \sum_m w_{im}\, e^{a_i \cdot n_m / \tau}}

    where :math:`w_{im}` is ``hard_negative_weight`` if :math:`n_m` is row :math:`i`'s own negative, else 1. With
    ``hard_negative_weight=1`` this is the paper's Eq. 5; without hard negatives it is Eq. 1, and with two dropout
    views of one sentence as anchor and positive Eq. 4.

    A row without a hard negative adds no column, and nothing is encoded in its place. On rectangular data with
    weight 1 the loss is ``MultipleNegativesRankingLoss(scale=1/temperature)``, whichever collator made the batch.

    Args:
        model: The model to train. Its embeddings are normalised here, whether or not it ends with ``Normalize``.
        temperature: :math:`\tau`; cosine similarities are divided by it.
        hard_negative_weight: :math:`\alpha`, how often a row's own hard negatives are counted in its denominator: 2
            acts as if each stood there twice, and 1 changes nothing. In logits that is
            :math:`+\log\alpha` on own negatives only, e.g. +0.69 for 2. It is not a factor on the loss.
        share_hard_negatives: Whether a row's hard negatives are negatives of all rows, as in the paper, or of their
            own row only.
        mask_false_negatives: Leaves another row's positive out of a row's denominator if its text is that of the
            row's anchor or positive, or if both rows have the same anchor. Texts are compared, never similarities.
            Hard negatives stay: they were chosen. Needs the batches of :class:`SimCSECollator`.
        train_only_head: Puts a linear layer with tanh between pooling and the loss, which is trained but no part of
            the model (paper, table 6, for unsupervised training). It is a module of this loss, ``head``; with a
            :class:`~simcse_st.training.callbacks.LossCallback` it is checkpointed, and in step on several devices.
        matryoshka: Sizes of embeddings. The loss is the sum, over these, of the loss of the first so many numbers of
            each embedding, as ``MatryoshkaLoss`` gives it with weights of 1, and works with a train-only head, too.
        mlm_weight: Adds so many times the loss of predicting masked tokens of the batch (the paper's code suggests
            0.1; it is there for transfer tasks, not for STS). 0 does not compute it.
        mlm_probability: The share of tokens to predict.
        gather_across_devices: Whether anchors see the positives and hard negatives of all devices, with gradients to
            all of them. Without a process group it changes nothing.
        mini_batch_size: Turns gradient caching on: so many sentences are encoded at a time, and their activations
            do not outlive them, so that memory depends on this and not on the batch. Encodes everything twice.
        mini_batch_num_tokens: The same by tokens: as many sentences at a time as have so many together.
        chunk_size: Without gradient caching, the sentences of one forward pass. By default the whole batch on a GPU,
            where calls cost more than padding; on a CPU the passes are cut by length, where they save most padding
            for what they cost. The loss is the same, up to dropout's draws.

    Inputs:
        ======================================================  ======
        Texts                                                   Labels
        ======================================================  ======
        rows collated by :class:`SimCSECollator`                none
        (anchor, positive), stock collator                      none
        (anchor, positive, negative_1, ...), stock collator     none
        ======================================================  ======

    Raises:
        InputError: An argument has no meaning, such as ``temperature=0``, or two do not go together.

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
        *,
        share_hard_negatives: bool = True,
        mask_false_negatives: bool = False,
        train_only_head: bool = False,
        matryoshka: Sequence[int] | None = None,
        mlm_weight: float = 0.0,
        mlm_probability: float = 0.15,
        gather_across_devices: bool = False,
        mini_batch_size: int | None = None,
        mini_batch_num_tokens: int | None = None,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        checked(
            LossSection,
            temperature=temperature,
            hard_negative_weight=hard_negative_weight,
            share_hard_negatives=share_hard_negatives,
            mask_false_negatives=mask_false_negatives,
            matryoshka=None if matryoshka is None else [*matryoshka],
            mlm_weight=mlm_weight,
            mlm_probability=mlm_probability,
            mini_batch_size=mini_batch_size,
            mini_batch_num_tokens=mini_batch_num_tokens,
            chunk_size=chunk_size,
        )
        if has_static_embedding_input(model):
            raise ValueError("a model of static embeddings has no sentences to cut into chunks, nor dropout or [CLS]")
        width = model.get_embedding_dimension() or 0
        if matryoshka and max(matryoshka) > width:
            raise InputError(f"matryoshka: {max(matryoshka)} is more than the model's {width} dimensions")
        self.model = model
        self.temperature = temperature
        self.matryoshka = [*matryoshka] if matryoshka else None
        self.hard_negative_weight = hard_negative_weight
        self.share_hard_negatives = share_hard_negatives
        self.mask_false_negatives = mask_false_negatives
        self.gather_across_devices = gather_across_devices
        self.uses_gradient_cache = mini_batch_size is not None or mini_batch_num_tokens is not None
        self.mini_batch_num_tokens = mini_batch_num_tokens
        # CachedLossMixin cuts batches by these two, whether or not gradients are cached.
        self.mini_batch_size = mini_batch_size or chunk_size or sys.maxsize
        self._saves_padding = model.device.type == "cpu" and chunk_size is None
        # In tuples, since they are modules of the model and not of this loss.
        self._input_module = (model[0],)
        self._before_head = ([module for module in model if not isinstance(module, Normalize)][-1],)
        self.head = _head(self._before_head[0], model.device) if train_only_head else None
        self.mlm_weight = mlm_weight
        self.mlm = MaskedLanguageModel(model, mlm_probability) if mlm_weight else None
        self.seen = BatchCounter()

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained with this loss but belong to no module of the model, by their names."""
        of_model = {id(parameter) for parameter in self.model.parameters()}
        return {name: parameter for name, parameter in self.named_parameters() if id(parameter) not in of_model}

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The mean loss of a batch.

        Args:
            sentence_features: One flat batch of :class:`SimCSECollator`, or one batch a column: anchors, positives,
                then any number of columns of hard negatives, ``N`` sentences each.
            labels: Not used.

        Returns:
            A scalar.

        Raises:
            ValueError: The batch lacks what is asked for: positives, or texts to compare.
        """
        if isinstance(self.model, nn.DataParallel):
            raise ValueError("several GPUs in one process are not supported: start one process a GPU with torchrun")
        if self.head is not None and isinstance(self.model.forward, ForwardDecorator):
            # It truncates what the model returns, and the head takes its input before that.
            raise ValueError("train_only_head does not work inside MatryoshkaLoss without gradient caching")
        features = list(sentence_features)
        layout = None
        if len(features) == 1 and "role" in features[0]:
            layout = torch.stack([features[0][key] for key in ("row", "role", "text_id")], dim=1)
        elif self.mask_false_negatives:
            raise ValueError("mask_false_negatives compares texts: use SimCSECollator as data_collator")
        if self.uses_gradient_cache:
            return self.forward_cached(features, layout)
        with words_looked_up_once(word_embeddings(self._input_module[0]), features):
            reps = [
                [
                    chunk
                    for chunk, _ in self.embed_minibatch_iter(
                        feature, with_grad=True, copy_random_state=False, ranges=self._chunks(feature)
                    )
                ]
                for feature in features
            ]
        loss = self.calculate_loss(reps, layout)
        if self.mlm is not None and torch.is_grad_enabled():  # masks are drawn anew: no term for an evaluation
            terms = [self.mlm(feature) for feature in features]
            loss = loss + self.mlm_weight * torch.stack(terms).mean()
        return loss

    def _chunks(self, feature: dict[str, Tensor]) -> list[tuple[int, int]] | None:
        """Where to cut a batch of :class:`SimCSECollator`, if that saves padding; else chunks of one size."""
        mask = feature.get("attention_mask")
        if not self._saves_padding or "role" not in feature or mask is None or mask.ndim != 2:
            return None
        return chunk_ranges(mask.sum(dim=1).tolist(), CPU_PASS_COST)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss of a whole batch out of its chunks' embeddings (the hook of ``CachedLossMixin``).

        Args:
            reps: For each feature batch its chunks, each of shape ``(chunk, dim)``.
            labels: The layout of a flat batch, not labels: each sentence's row, role and text id, shape
                ``(sentences, 3)``. Without it, ``reps`` are columns.
            with_backward: Whether to propagate back to the embeddings and return the detached loss.
        """
        embeddings = torch.cat([chunk for chunks in reps for chunk in chunks])
        row, role, text_id = (columns_layout(reps) if labels is None else labels).unbind(dim=1)
        rows, positives = (int((role == kind).sum()) for kind in (0, 1))
        order = (role * rows + row).argsort(stable=True)
        parts = [rows, positives, len(order) - rows - positives]
        anchors, other, negatives = embeddings[order].split(parts)
        anchor_ids, positive_ids, _ = text_id[order].split(parts)
        if not positives:  # one dropout mask for both views: each sentence was encoded once
            other, positive_ids = anchors, anchor_ids
        ids = (anchor_ids, positive_ids) if self.mask_false_negatives else (None, None)
        loss = self.compute_loss_from_embeddings(anchors, other, negatives, row[order[rows + positives :]], *ids)
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
        anchor_ids: Tensor | None = None,
        positive_ids: Tensor | None = None,
    ) -> Tensor:
        """The formula itself, in float32 (or float64 if the embeddings are).

        Args:
            anchors: Shape ``(N, dim)``.
            positives: Shape ``(N, dim)``; the positive of each anchor.
            negatives: Shape ``(M, dim)``; all hard negatives of this device, in any order.
            negative_rows: Shape ``(M,)``; the row that each hard negative belongs to.
            anchor_ids: Shape ``(N,)``; equal numbers for equal texts. Given both, false negatives are masked.
            positive_ids: Shape ``(N,)``.

        Returns:
            The mean of the rows' losses, a scalar. Across devices, the mean over the devices is that of all rows.

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
        sentences = len(anchors) + (0 if positives is anchors else len(positives)) + len(negatives)
        target = torch.arange(len(anchors), device=anchors.device)
        ids = None if anchor_ids is None or positive_ids is None else torch.stack([anchor_ids, positive_ids], dim=1)
        all_ids, rows, devices = ids, len(anchors), 1
        if self.gather_across_devices and get_world_size() > 1:
            devices = get_world_size()
            counts, negative_counts = count_rows(anchors), count_rows(negatives)
            begin, rows = sum(counts[: get_rank()]), sum(counts)
            target = target + begin
            negative_rows = gather_rows(negative_rows + begin, negative_counts)
            positives, negatives = gather_rows(positives, counts), gather_rows(negatives, negative_counts)
            all_ids = None if ids is None else gather_rows(ids, counts)

        own = target[:, None] == negative_rows[None, :]
        masked = torch.zeros(len(anchors), rows, dtype=torch.bool, device=anchors.device)
        if ids is not None and all_ids is not None:
            masked = false_negatives(ids, all_ids, target)
        not_shared = torch.zeros_like(own) if self.share_hard_negatives else ~own
        left_out = torch.cat([masked, not_shared], dim=1)
        if torch.is_grad_enabled():
            self.seen.add(sentences, (~left_out).sum(dim=1) - 1, masked.sum(), all_devices=devices > 1)

        # Half precision cannot hold cosines over a temperature of 0.05: exp(20) overflows fp16, and bf16 has three
        # significant digits. Autocast would round the product again.
        with torch.autocast(anchors.device.type, enabled=False):
            precision = torch.promote_types(anchors.dtype, torch.float32)
            vectors = anchors.to(precision), torch.cat([positives, negatives]).to(precision)
            loss = torch.zeros((), dtype=precision, device=anchors.device)
            sizes: Sequence[int | None] = self.matryoshka or [None]
            for size in sizes:
                anchor, candidate = (F.normalize(side[:, :size], dim=-1) for side in vectors)
                logits = anchor @ candidate.T / self.temperature
                if self.hard_negative_weight != 1.0:
                    logits = logits + F.pad(own.to(precision), (rows, 0)) * math.log(self.hard_negative_weight)
                loss = loss + F.cross_entropy(logits.masked_fill(left_out, -math.inf), target)
            # Data-parallel training takes the mean over devices, which is that over rows if each has as many.
            return loss if len(anchors) * devices == rows else loss * (len(anchors) * devices / rows)

    def embed_minibatch(
        self,
        sentence_feature: dict[str, Tensor],
        begin: int,
        end: int,
        with_grad: bool,
        copy_random_state: bool,
        random_state: RandContext | None = None,
    ) -> tuple[Tensor, RandContext | None]:
        """Embeds some sentences of a batch, through the head if there is one (overrides ``CachedLossMixin``)."""
        # The head stands between pooling and normalisation. What the model returns is normalised already, so the
        # pooled vectors are taken on the way.
        pooled: list[Tensor] = []
        hook = self._before_head[0].register_forward_hook(lambda *call: pooled.append(call[2]["sentence_embedding"]))
        try:
            reps, state = super().embed_minibatch(
                sentence_feature, begin, end, with_grad, copy_random_state, random_state
            )
        finally:
            hook.remove()
        if self.head is not None:
            with torch.set_grad_enabled(with_grad and torch.is_grad_enabled()):
                reps = self.head(pooled[0].to(next(self.head.parameters()).dtype))
        return reps, state

    def get_config_dict(self) -> dict[str, Any]:
        """The arguments that determine the loss, for the model card."""
        return {
            "temperature": self.temperature,
            "hard_negative_weight": self.hard_negative_weight,
            "share_hard_negatives": self.share_hard_negatives,
            "mask_false_negatives": self.mask_false_negatives,
            "train_only_head": self.head is not None,
            "matryoshka": self.matryoshka,
            "mlm_weight": self.mlm_weight,
            "gather_across_devices": self.gather_across_devices,
        }

    @property
    def citation(self) -> str:
        """BibTeX of the paper, for the model card."""
        return bibtex()["gao-etal-2021-simcse"]


def _head(before: nn.Module, device: torch.device) -> nn.Sequential:
    """The paper's MLP, as wide as the module before it, and initialised as in its code: like any layer of BERT."""
    width = before.get_embedding_dimension()  # type: ignore[operator]
    linear = nn.Linear(width, width, device=device)
    nn.init.normal_(linear.weight, std=0.02)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(linear, nn.Tanh())
