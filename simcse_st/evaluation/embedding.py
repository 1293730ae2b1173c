"""Sentences -> unit embeddings: each tokenised once, in batches of nearly one length."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import batch_to_device, truncate_embeddings
from torch import Tensor

from simcse_st.errors import InputError

_BLOCK = 1024
_MANY = 4096  # sentences whose tokens are in memory at a time


class Embedder:
    """Embeds the same sentences again and again, tokenised once where their tokens fit into memory.

    Args:
        sentences: The sentences.
        batch_size: Sentences of one forward pass.
    """

    def __init__(self, sentences: list[str], batch_size: int) -> None:
        self.sentences, self.batch_size = sentences, batch_size
        self._tokens: tuple[Any, Tokenized] | None = None

    def __call__(self, model: SentenceTransformer) -> Tensor:
        """Unit embeddings, see :func:`embed`."""
        if len(self.sentences) > _MANY:
            return embed(model, self.sentences, self.batch_size)
        # What may change of a model between two scores and makes other tokens; the model itself is not kept alive.
        tokenizer = model.tokenizer
        sides = [getattr(tokenizer, name, None) for name in ("padding_side", "truncation_side", "added_tokens_decoder")]
        key = (weakref.ref(model), sides, model.max_seq_length, model.default_prompt_name, dict(model.prompts))
        if self._tokens is None or self._tokens[0] != key:
            self._tokens = key, tokenize(model, self.sentences, self.batch_size)
        return embed(model, self._tokens[1])


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
    if isinstance(sentences, Tokenized):
        count, parts = len(sentences.sentences), iter([sentences])
    else:  # those of about one length together
        count, order = len(sentences), sorted(range(len(sentences)), key=lambda number: -len(sentences[number]))
        blocks = (order[begin : begin + _MANY] for begin in range(0, count, _MANY))
        parts = (_tokenized_part(model, sentences, block, batch_size) for block in blocks)
    embeddings = torch.empty(count, model.get_embedding_dimension() or 0)
    model.eval()
    for part in parts:
        with torch.inference_mode():
            vectors = truncate_embeddings(_encode(model, part), model.truncate_dim).float().cpu()
        broken = (~torch.isfinite(vectors).all(dim=1)).nonzero()
        if len(broken):
            first = min(int(part.order[int(row)]) for row in broken)
            text = (sentences.sentences if isinstance(sentences, Tokenized) else sentences)[first]
            raise InputError(f"the model's embedding of {text!r} is not finite")
        embeddings[part.order] = F.normalize(vectors, dim=1)
    return embeddings


def _encode(model: SentenceTransformer, tokens: Tokenized) -> Tensor:
    """The embeddings in the order of the batches."""
    # Into one tensor as they come: small ones that stay, between activations that go, would pin half a gigabyte of
    # heap (100,000 passages).
    found = torch.empty(0)
    begin = 0
    for batch in tokens.batches:
        vectors = model(batch_to_device(dict(batch), model.device))["sentence_embedding"]
        if begin == 0:
            found = vectors.new_empty(len(tokens.order), vectors.shape[1])
        found[begin : begin + len(vectors)] = vectors
        begin += len(vectors)
    return found


def _tokenized_part(
    model: SentenceTransformer, sentences: Sequence[str], numbers: list[int], batch_size: int
) -> Tokenized:
    """Some of the sentences, with the numbers that they have among all."""
    part = tokenize(model, [sentences[number] for number in numbers], batch_size)
    return replace(part, order=torch.tensor(numbers)[part.order])
