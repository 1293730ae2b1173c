"""The passages nearest to each anchor, found block by block, so that an interrupted search goes on."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from simcse_st.console import progress
from simcse_st.errors import InputError
from simcse_st.run import write_text

logger = logging.getLogger(__name__)

_PASSAGES = 20_000  # whose embeddings are in memory at a time
_ANCHORS = 512  # whose similarities to them are
_STATE = "state.json"


@dataclass(frozen=True)
class Nearest:
    """What a search has found, in files that memory holds little of.

    Attributes:
        scores: Cosine of each anchor with its nearest passages, highest first, shape ``(anchors, k)``.
        passages: Their numbers; -1 where there are fewer.
        positive: The cosine of each anchor with its least similar positive.
    """

    scores: np.ndarray
    passages: np.ndarray
    positive: np.ndarray


def find_nearest(
    model: SentenceTransformer,
    anchors: Sequence[str],
    passages: Sequence[str],
    positives: Sequence[Sequence[int]],
    k: int,
    folder: Path,
    key: Mapping[str, Any],
) -> Nearest:
    """Finds the passages nearest to each anchor.

    Args:
        model: Embeds both, by ``encode_query`` and ``encode_document``.
        anchors: The anchors.
        passages: The passages.
        positives: Of each anchor the numbers of its positives among the passages.
        k: How many to find.
        folder: Holds what was found so far; a search of the same key goes on from there.
        key: What a search depends on.

    Raises:
        InputError: The folder holds a search of another key, or an embedding is not finite.
    """
    k = min(k, len(passages))
    files = {
        "anchors": (np.float32, (len(anchors), model.get_embedding_dimension() or 0)),
        "scores": (np.float32, (len(anchors), k)),
        "passages": (np.int64, (len(anchors), k)),
        "positive": (np.float32, (len(anchors),)),
    }
    done = _begun(folder, dict(key))
    opened = {name: _open(folder / f"{name}.npy", *form, fresh=done is None) for name, form in files.items()}
    embedded, scores, found, positive = opened.values()
    if done is None:
        scores[:], found[:], positive[:] = -np.inf, -1, np.inf
        for begin in progress("embedding anchors", None, range(0, len(anchors), _PASSAGES)):
            block = anchors[begin : begin + _PASSAGES]
            embedded[begin : begin + len(block)] = _finite(_encode(model.encode_query, block), block).cpu().numpy()
        done = _save(folder, key, opened, 0)
    # Each pair of an anchor and a positive, in the order of the passages.
    pairs = np.array([(passage, anchor) for anchor, each in enumerate(positives) for passage in each], dtype=np.int64)
    pairs = pairs[pairs[:, 0].argsort(kind="stable")]
    for begin in progress("searching passages", None, range(done, len(passages), _PASSAGES)):
        block = passages[begin : begin + _PASSAGES]
        vectors = _finite(_encode(model.encode_document, block), block)
        first, last = np.searchsorted(pairs[:, 0], [begin, begin + len(block)])
        for start in range(first, last, _PASSAGES):
            passage, anchor = pairs[start : min(start + _PASSAGES, last)].T
            cosines = (torch.from_numpy(embedded[anchor]).to(vectors) * vectors[passage - begin]).sum(dim=1)
            np.minimum.at(positive, anchor, cosines.cpu().numpy())
        for start in range(0, len(anchors), _ANCHORS):
            rows = slice(start, start + _ANCHORS)
            cosines = torch.from_numpy(embedded[rows]).to(vectors) @ vectors.T
            best, where = cosines.topk(min(k, len(block)), dim=1)
            _merge(scores, found, rows, best.cpu().numpy(), where.cpu().numpy() + begin, begin)
        _save(folder, key, opened, begin + len(block))
    return Nearest(scores, found, positive)


def _open(path: Path, kind: type, shape: tuple[int, ...], *, fresh: bool) -> np.memmap:
    """An array of a file."""
    if fresh:
        return np.lib.format.open_memmap(path, "w+", kind, shape)
    return np.lib.format.open_memmap(path, "r+")


def _merge(scores: np.ndarray, found: np.ndarray, rows: slice, best: np.ndarray, where: np.ndarray, begin: int) -> None:
    """Puts a block's nearest among those so far; of equal ones the first passage comes first."""
    before = np.where(found[rows] >= begin, -np.inf, scores[rows])  # merged already, when a search was cut short here
    every_score = np.concatenate([before, best], axis=1)
    every_passage = np.concatenate([np.where(np.isinf(before), -1, found[rows]), where], axis=1)
    order = np.lexsort((every_passage, -every_score), axis=1)[:, : scores.shape[1]]
    scores[rows] = np.take_along_axis(every_score, order, axis=1)
    found[rows] = np.take_along_axis(every_passage, order, axis=1)


def _encode(encode: Any, texts: Sequence[str]) -> Tensor:
    return encode(list(texts), normalize_embeddings=True, convert_to_tensor=True, show_progress_bar=False).float()


def _finite(vectors: Tensor, texts: Sequence[str]) -> Tensor:
    broken = (~torch.isfinite(vectors).all(dim=1)).nonzero()
    if len(broken):
        raise InputError(f"the model's embedding of {texts[int(broken[0])]!r} is not finite")
    return vectors


def _begun(folder: Path, key: dict[str, Any]) -> int | None:
    """How many passages a search was through; None if there is none."""
    state = folder / _STATE
    if not state.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return None
    try:
        told = json.loads(state.read_text("utf-8"))
        before, done = told["key"], int(told["passages"])
    except (OSError, ValueError, LookupError, TypeError):
        raise InputError(f"--resume: {state} cannot be read: begin again with --overwrite") from None
    if changed := [name for name, value in key.items() if before.get(name) != value]:
        raise InputError(f"--resume: {', '.join(changed)} is not what it was: begin again with --overwrite")
    logger.info("resume   from passage %d", done)
    return done


def _save(folder: Path, key: Mapping[str, Any], arrays: Mapping[str, np.memmap], passages: int) -> int:
    for array in arrays.values():
        array.flush()
    write_text(folder / _STATE, json.dumps({"key": dict(key), "passages": passages}))
    return passages
