"""What stands in a batch: which rows, their layout, words and false negatives, and how much the loss saw of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sentence_transformers.base.sampler import DefaultBatchSampler
from sentence_transformers.util import all_gather, all_gather_with_grad
from torch import Tensor, nn
from torch.utils.data import Sampler

from simcse_st.records import BatchFacts


class BySourceSampler(Sampler[int]):
    """Rows in an order of which every so many are of one source, the sources at random, each with its share.

    Every row comes once in an epoch, but for those of a source that fill no batch, which are others each time. An
    epoch's order depends on the seed and its number alone.

    Args:
        source_of: The number of each row's source.
        batch_size: Rows of a batch, over all devices together.
        seed: Of the order.
    """

    def __init__(self, source_of: np.ndarray, batch_size: int, seed: int) -> None:
        self.sources = [np.flatnonzero(source_of == number) for number in np.unique(source_of)]
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The number of the epoch to begin, from 0."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        """The numbers of the rows."""
        random = np.random.default_rng([self.seed, self.epoch])
        whole = [random.permutation(rows)[: self._usable(rows)] for rows in self.sources]
        yield from random.permutation(np.concatenate(whole).reshape(-1, self.batch_size)).flatten().tolist()

    def __len__(self) -> int:
        """The rows of an epoch."""
        return sum(self._usable(rows) for rows in self.sources)

    def _usable(self, rows: np.ndarray) -> int:
        return len(rows) // self.batch_size * self.batch_size


def by_source(
    dataset: Any, *, source_of: np.ndarray, devices: int, batch_size: int, seed: int = 0, **kwargs: Any
) -> DefaultBatchSampler:
    """Batches of one source each, as the trainer's ``batch_sampler``.

    Args:
        dataset: What they are drawn from.
        source_of: The number of each row's source.
        devices: How many share a batch; they take its parts in turn.
        batch_size: Rows of a device.
        seed: Of the order.
        **kwargs: What the trainer hands to any sampler.
    """
    rows = BySourceSampler(source_of, batch_size * devices, seed)
    return DefaultBatchSampler(rows, batch_size=batch_size, seed=seed, **kwargs)


@dataclass
class BatchCounter:
    """What the loss has seen so far in training, on all devices that share their negatives.

    A wrapper such as ``MatryoshkaLoss`` calls the loss once for each dimension, and each call counts as a batch.
    """

    batches: int = 0
    sentences: int = 0
    """Sentences encoded."""
    anchors: int = 0
    negatives: int = 0
    """Summed over anchors: the columns that stand in each one's denominator beside its positive."""
    fewest_negatives: int = 0
    most_negatives: int = 0
    masked_cells: int = 0
    """Cells left out of the denominators as false negatives."""

    def add(self, sentences: int, negatives: Tensor, masked: Tensor, *, all_devices: bool = False) -> None:
        """Counts one batch.

        Args:
            sentences: Sentences that this device encoded for it.
            negatives: For each of this device's anchors the negatives in its denominator, shape ``(N,)``.
            masked: Cells masked as false negatives, a scalar.
            all_devices: Whether to add up all devices' counts, in which case all must call this.
        """
        counts = torch.stack(
            [
                *torch.tensor([sentences, len(negatives)], device=negatives.device),
                negatives.sum(),
                masked,
                negatives.min(),
                negatives.max(),
            ]
        )[None]
        each = (all_gather(counts) if all_devices else counts).tolist()
        sentences, anchors, total, cells = (sum(device[i] for device in each) for i in range(4))
        fewest, most = min(device[4] for device in each), max(device[5] for device in each)
        self.fewest_negatives = min(self.fewest_negatives, fewest) if self.batches else fewest
        self.most_negatives = max(self.most_negatives, most)
        self.batches += 1
        self.sentences += sentences
        self.anchors += anchors
        self.negatives += total
        self.masked_cells += cells

    def facts(self) -> BatchFacts:
        """The counts, with the mean number of negatives that an anchor saw."""
        return BatchFacts(**asdict(self), mean_negatives=self.negatives / self.anchors if self.anchors else None)


def chunk_ranges(lengths: Sequence[int], pass_cost: int) -> list[tuple[int, int]]:
    """Cuts sentences that are sorted by length into chunks, one forward pass each, that cost the least.

    A pass costs the tokens that it computes, padding included, and ``pass_cost`` more. A cut within sentences of one
    length can be moved to their beginning at no cost, so only cuts between lengths are looked at.

    Args:
        lengths: Tokens of each sentence, longest first.
        pass_cost: How many tokens could be computed in the time that one more pass takes.

    Returns:
        Where each chunk begins and ends.
    """
    length = np.asarray(lengths)
    edges = np.concatenate([[0], np.flatnonzero(np.diff(length)) + 1, [len(length)]])
    cost, best_begin = np.zeros(len(edges)), np.zeros(len(edges), dtype=int)
    for end in range(1, len(edges)):  # the least that the sentences before this edge cost, and their last chunk
        begins = edges[:end]
        costs = cost[:end] + length[begins] * (edges[end] - begins) + pass_cost
        best_begin[end] = costs.argmin()
        cost[end] = costs.min()
    ranges, end = [], len(edges) - 1
    while end:
        ranges.append((int(edges[best_begin[end]]), int(edges[end])))
        end = best_begin[end]
    return ranges[::-1]


def word_embeddings(module: nn.Module) -> nn.Module | None:
    """Those of the module's encoder, if it has one, and that has any."""
    encoder: Any = getattr(module, "auto_model", None)
    try:
        return encoder.get_input_embeddings() if encoder is not None else None
    except NotImplementedError:
        return None


@contextmanager
def words_looked_up_once(words: nn.Module | None, features: Sequence[dict[str, Tensor]]) -> Iterator[None]:
    """Within this, all passes of an encoder over a batch take their words' vectors from one lookup.

    The gradient of a lookup is as large as the whole vocabulary, and every pass would fill one with zeros and add it to
    the last. The vectors stay the same, and the gradients but for the order in which they are summed.

    Args:
        words: The encoder's word embeddings. Any but a plain table on the CPU that is trained and wholly here is left
            alone.
        features: The batches that the passes are cut from.
    """
    if not (
        type(words) is nn.Embedding  # not a subclass, which may do more than look up
        and type(words.weight) is nn.Parameter
        and words.weight.shape == (words.num_embeddings, words.embedding_dim)  # sharded weights have other shapes
        and words.weight.requires_grad
        and torch.is_grad_enabled()
        and not (words.sparse or words.scale_grad_by_freq or words.max_norm)
        and words.weight.device.type == "cpu"  # a GPU fills and adds them in no time
        and all("input_ids" in feature for feature in features)
    ):
        yield
        return
    ids = torch.cat([feature["input_ids"].flatten() for feature in features]).unique()
    vectors = F.embedding(ids, words.weight, words.padding_idx)

    def look_up(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        # A compiled pass would have to be compiled again for each batch's words.
        if torch.compiler.is_compiling() or not inputs:
            return None
        places = torch.searchsorted(ids, inputs[0].contiguous()).clamp(max=len(ids) - 1)
        return F.embedding(places, vectors) if torch.equal(ids[places], inputs[0]) else None

    handle = words.register_forward_hook(look_up)
    try:
        yield
    finally:
        handle.remove()


def false_negatives(local: Tensor, all_rows: Tensor, target: Tensor) -> Tensor:
    """Which other rows' positives are no negatives of a row, shape ``(N, all N)``.

    Args:
        local: Ids of this device's anchors and positives, shape ``(N, 2)``.
        all_rows: Those of all devices, shape ``(all N, 2)``.
        target: The place of each of this device's rows among all, shape ``(N,)``.
    """
    anchor, positive = local[:, :1], local[:, 1:]
    other_anchor, other_positive = all_rows.T
    same = (other_positive == anchor) | (other_positive == positive) | (other_anchor == anchor)
    return same.scatter(1, target[:, None], value=False)


def columns_layout(reps: list[list[Tensor]]) -> Tensor:
    """Row, role and (no) text id of each sentence, shape ``(sentences, 3)``, for a batch a column."""
    if len(reps) < 2:
        raise ValueError("SimCSELoss needs anchors and positives: two columns, or a batch of SimCSECollator")
    lengths = {sum(len(chunk) for chunk in chunks) for chunks in reps}
    if len(lengths) > 1:
        raise ValueError(f"columns of one batch have different numbers of rows: {sorted(lengths)}")
    row = torch.arange(lengths.pop(), device=reps[0][0].device)
    nothing = torch.zeros_like(row)
    return torch.cat([torch.stack([row, nothing + min(role, 2), nothing], 1) for role in range(len(reps))])


def count_rows(local: Tensor) -> list[int]:
    """How many rows each device has, in order of rank."""
    return all_gather(torch.tensor([len(local)], device=local.device)).tolist()


def gather_rows(local: Tensor, counts: list[int]) -> Tensor:
    """The rows of all devices in order of rank, however many each has, with gradients to all."""
    longest = max(counts)
    if longest == 0:
        return local
    # Collectives need equal shapes: every device sends as many rows as the one that has most.
    padded = F.pad(local, (0, 0) * (local.ndim - 1) + (0, longest - len(local)))
    gathered = (all_gather_with_grad if local.is_floating_point() else all_gather)(padded)
    return torch.cat([part[:count] for part, count in zip(gathered.split(longest), counts, strict=True)])
