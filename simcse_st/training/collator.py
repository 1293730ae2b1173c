"""Rows of a batch -> one flat, length-sorted batch of the sentences that exist."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
from torch import Tensor

ANCHOR, POSITIVE, NEGATIVE = 0, 1, 2

# The trainer gathers all tensors whose key begins so into one feature dict.
_PREFIX = "sentence_"


@dataclass
class SimCSECollator(SentenceTransformerDataCollator):
    """Turns rows with any number of hard negatives, none included, into one batch for :class:`SimCSELoss`.

    Every sentence of the batch stands in one flat list, longest first, so that the loss can encode it in chunks that
    hardly need padding. Two tensors tell what each sentence is; they travel with it through the trainer:

    - ``row``: the row it belongs to, shape ``(sentences,)``.
    - ``role``: 0 anchor, 1 positive, 2 hard negative, shape ``(sentences,)``.

    ``text_id``, shape ``(sentences,)``, is a 64-bit hash of each text, so that equal texts can be told on any device.

    A hard negative that is null, ``""`` or absent is not in the batch at all: it is neither tokenised nor encoded.

    Columns are taken by name where there are ``anchor`` and ``positive`` (with ``negative``, ``negative_1``, ...),
    otherwise by position as everywhere in Sentence Transformers: anchor, positive, negatives. A negative column holds
    strings or lists of strings. Label columns are left out.

    Rows of a single text column are for unsupervised training: the sentence is anchor and positive, and encoded twice,
    so that dropout makes two views of it.

    The stock trainer's own model card callback fails on a column that mixes strings and null, before this collator
    sees it. There, write a missing hard negative as ``""``, or hold them as lists, empty where there is none; or use
    :class:`~simcse_st.training.train.SimCSETrainer`, the stock trainer without that callback.

    Args:
        preprocess_fn: ``model.preprocess``.
        max_length: Tokens a sentence may have in training; by default the model's own limit.
        prompts: A prompt to put before every sentence. The training arguments' ``prompts`` do not reach a collator that
            is handed to the trainer.
        shared_dropout_mask: For rows of a single column, the ablation of the paper's table 3: both views have the same
            dropout mask, hence are one vector, and the sentence is encoded once.

    Example:
        >>> trainer = SentenceTransformerTrainer(
        ...     model, args, train_dataset,
        ...     loss=SimCSELoss(model),
        ...     data_collator=SimCSECollator(model.preprocess, max_length=32),
        ... )
    """

    shared_dropout_mask: bool = False

    def __post_init__(self) -> None:
        if self.router_mapping:
            raise ValueError("SimCSECollator does not support router_mapping: all sentences take one route")
        if self.prompts and not isinstance(self.prompts, str):
            raise ValueError("SimCSECollator takes one prompt for all sentences, not a mapping of columns to prompts")

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        """Collates one batch.

        Args:
            features: Rows, as the dataset holds them.

        Returns:
            ``sentence_input_ids`` and its companions, shape ``(sentences, longest)``, with ``sentence_row``,
            ``sentence_role`` and ``sentence_text_id``.

        Raises:
            ValueError: A column that is not text, or an anchor, positive or hard negative that is blank.
        """
        if not features:
            return {}
        # A row may lack a column that others have.
        names = dict.fromkeys(name for row in features for name in row)
        anchor, *others = text_columns(names, self.valid_label_columns)
        if self.shared_dropout_mask and others:
            raise ValueError(f"shared_dropout_mask is for rows of a single text column, not {[anchor, *others]}")
        positive, negatives = (others[0], others[1:]) if others else (anchor, [])
        texts: list[str] = []
        rows: list[int] = []
        roles: list[int] = []
        for index, row in enumerate(features):
            sentences = [(required_text(row.get(anchor), anchor, index), ANCHOR)]
            if not self.shared_dropout_mask:
                sentences.append((required_text(row.get(positive), positive, index), POSITIVE))
            for column in negatives:
                sentences.extend((text, NEGATIVE) for text in present_texts(row.get(column), column, index))
            for text, role in sentences:
                texts.append(text)
                rows.append(index)
                roles.append(role)

        limit = {} if self.max_length is None else {"max_length": self.max_length}
        tokens = dict(self.preprocess_fn(texts, prompt=self.prompts or None, **limit))
        tokens["row"], tokens["role"] = torch.tensor(rows), torch.tensor(roles)
        tokens["text_id"] = torch.tensor([_text_id(text) for text in texts])
        batch = {f"{_PREFIX}{key}": value for key, value in _longest_first(tokens).items()}
        if "dataset_name" in features[0]:
            batch["dataset_name"] = features[0]["dataset_name"]
        return batch


def text_columns(names: Iterable[str], label_columns: Iterable[str] = ()) -> list[str]:
    """The text columns among these in the order anchor, positive, hard negatives; or the only one.

    Raises:
        ValueError: No text column, or names beside ``anchor`` and ``positive`` that mean nothing here.
    """
    columns = [name for name in names if name not in label_columns and name != "dataset_name"]
    if {"anchor", "positive"} <= set(columns):
        negatives = [name for name in columns if re.fullmatch(r"negative(_\d+)?", name)]
        unknown = set(columns) - {"anchor", "positive", *negatives}
        if unknown:
            raise ValueError(f"columns {sorted(unknown)} are no anchor, positive or negative: remove or rename them")
        return ["anchor", "positive", *negatives]
    half = [name for name in columns if re.fullmatch(r"anchor|positive|negative(_\d+)?", name)]
    if half and len(columns) > 1:
        raise ValueError(f"columns {columns}: beside {half} both an anchor and a positive must be there")
    if not columns:
        raise ValueError(f"a row needs a column of text, but its columns are {list(names)}")
    return columns


def required_text(value: Any, column: str, row: int) -> str:
    """An anchor or positive, which must be there."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"row {row} of the batch: {column!r} must be a sentence, not {value!r}")
    return value


def present_texts(value: Any, column: str, row: int) -> list[str]:
    """The hard negatives in one cell: a string, a list of strings, or nothing (null or ``""``)."""
    cell: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
    return [required_text(text, column, row) for text in cell if text is not None and text != ""]


def _text_id(text: str) -> int:
    """The same number for the same text in every process, which Python's own hash does not give."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _longest_first(tokens: dict[str, Any]) -> dict[str, Any]:
    """Sorts a padded batch by its sentences' lengths in tokens.

    Longest first, so that a batch which does not fit into memory fails in its first chunk. A batch that the model has
    flattened (no padding, hence nothing to gain) has no attention mask and stays as it is.
    """
    mask = tokens.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return tokens
    order = mask.sum(dim=1).argsort(descending=True, stable=True)
    return {
        key: value[order] if isinstance(value, Tensor) and value.ndim and len(value) == len(order) else value
        for key, value in tokens.items()
    }
