"""Exact search: the sentences nearest to a query, by any models side by side, with the embeddings kept on the disk."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from simcse_st.console import Table, progress
from simcse_st.data.files import digest_of
from simcse_st.data.held_out import load_held_out
from simcse_st.data.training import load_training_data
from simcse_st.errors import InputError, RunError
from simcse_st.models import Located, load_model, locate_here, locate_model
from simcse_st.recipe import DataSection, checked
from simcse_st.records import SPLITS, Record
from simcse_st.references import Given
from simcse_st.run import INDEX

logger = logging.getLogger(__name__)

_BLOCK = 4096  # sentences whose embeddings are made at a time


class Answer(Record):
    """A sentence that was found."""

    text: str
    score: float
    """Cosine."""


class Answers(Record):
    """What was found for a query, by each model."""

    query: str
    by_model: dict[str, list[Answer]]


@dataclass(frozen=True)
class Index:
    """Sentences with their embeddings by one model.

    Attributes:
        name: What to call the model.
        model: It.
        sentences: The sentences.
        embeddings: Unit vectors, shape ``(sentences, dim)``; they lie in a file, and memory holds little of them.
    """

    name: str
    model: Any
    sentences: list[str]
    embeddings: np.ndarray

    def search(self, query: str, top: int) -> list[Answer]:
        """The sentences nearest to a query; of equally near ones the first comes first."""
        (vector,) = self.model.encode_query([query], normalize_embeddings=True, show_progress_bar=False)
        blocks = range(0, len(self.sentences), _BLOCK)
        # Rounded, since single precision has no more digits: what is equal but for these is equally near.
        scores = np.concatenate([self.embeddings[begin : begin + _BLOCK] @ vector for begin in blocks]).round(6)
        top = min(top, len(scores))
        least = np.partition(scores, len(scores) - top)[len(scores) - top]
        candidates = np.flatnonzero(scores >= least)  # also those that are as near as the last one
        order = candidates[np.argsort(-scores[candidates], kind="stable")][:top]
        return [Answer(text=self.sentences[number], score=float(scores[number])) for number in order]


def search(
    models: str | Path | Sequence[str | Path],
    sentences: Any,
    queries: Sequence[str],
    *,
    top: int = 5,
    device: str | None = None,
) -> list[Answers]:
    """Finds the sentences nearest to queries.

    Args:
        models: Run folders, folders and Hub ids, as :func:`~simcse_st.evaluation.evaluate.evaluate` takes them.
        sentences: Where to look: data in any form of ``data.train``, a list of sentences, or ``"dev"`` or ``"test"`` of
            the run that the first model is.
        queries: What to look for.
        top: How many of each.
        device: Where to compute.

    Raises:
        InputError: A model or the data cannot be used.

    Example:
        >>> (found,) = search("runs/quickstart", "sentences.txt", ["A man is eating."], top=1)
        >>> found.by_model["runs/quickstart"][0].text
        'Someone is having a meal.'
    """
    check_asked(queries, top)
    indexes = open_indexes(models, sentences, device=device)
    return [answer(indexes, query, top) for query in queries]


def check_asked(queries: Sequence[str], top: int) -> None:
    """Makes sure, before anything is embedded, that there can be answers.

    Raises:
        InputError: A query is blank, or fewer than one answer is asked for.
    """
    if top < 1:
        raise InputError(f"--top {top}: ask for one answer at least")
    if not all(query.strip() for query in queries):
        raise InputError("a query must be a sentence, not blank")


def answer(indexes: Sequence[Index], query: str, top: int) -> Answers:
    """What each index has for a query."""
    return Answers(query=query, by_model={index.name: index.search(query, top) for index in indexes})


def open_indexes(
    models: str | Path | Sequence[str | Path], sentences: Any, *, device: str | None = None
) -> list[Index]:
    """The sentences as each model embeds them; see :func:`search`.

    What was embedded once is kept by the checksums of model and sentences: in the folder of a run, or in this user's
    cache folder.
    """
    names = [models] if isinstance(models, (str, Path)) else list(models)
    if not names:
        raise InputError("no model to search with")
    for name in names:
        locate_here(name)
    found = [locate_model(name) for name in names]
    texts = _sentences(found[0], sentences)
    digest = hashlib.sha256(b"".join(map(digest_of, texts))).hexdigest()
    indexes: list[Index] = []
    for located in found:
        same = sum(located.name == other.name for other in found[: len(indexes)])
        name = f"{located.name} ({same + 1})" if same else located.name
        indexes.append(replace(_index(located, texts, digest, device), name=name))
    return indexes


def answers_table(found: Answers) -> Table:
    """The answers to a query, those of each model in a column."""
    columns = [[f"{one.score:.3f}  {one.text}" for one in answers] for answers in found.by_model.values()]
    rows = [[str(number), *row] for number, row in enumerate(zip(*columns, strict=True), 1)]
    return Table(found.query, ["", *found.by_model], rows)


def _sentences(first: Located, sentences: Any) -> list[str]:
    if isinstance(sentences, str) and sentences in SPLITS and not Path(sentences).exists():
        if not first.run:
            raise InputError(f"--in {sentences}: {first.name} is no run, which alone has a {sentences}: name a file")
        return load_held_out(first.run.held_out(sentences), sentences, first.run.recipe.data).texts()
    if isinstance(sentences, list) and all(isinstance(text, str) for text in sentences):
        sentences = Given([{"text": text} for text in sentences])
    section = checked(DataSection, train=str(sentences) if isinstance(sentences, Path) else sentences, kind="sentences")
    return [text for (text,) in load_training_data(section).rows()]


def _index(located: Located, texts: list[str], digest: str, device: str | None) -> Index:
    from simcse_st.identity import describe_model  # and with it torch

    model = load_model(located, device)
    sha256 = describe_model(model).model_sha256
    folder = located.run.folder / INDEX if located.run else _cache()
    path = folder / f"{sha256[:16]}-{digest[:16]}.npy"
    if not path.is_file():
        logger.info("index    embedding %d sentences with %s", len(texts), located.name)
        _embed(model, texts, path)
    embeddings = np.load(path, mmap_mode="r")
    if embeddings.shape != (len(texts), model.get_embedding_dimension()):
        raise InputError(f"{path}: is not the index that its name says: delete it")
    return Index(located.name, model, texts, embeddings)


def _embed(model: Any, texts: list[str], path: Path) -> None:
    """Writes the embeddings, all of them or nothing."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (len(texts), model.get_embedding_dimension())
        embeddings = np.lib.format.open_memmap(unfinished, "w+", np.float32, shape)
        for begin, block in progress("embedding", -(-len(texts) // _BLOCK), _blocks(texts)):
            vectors = model.encode_document(block, normalize_embeddings=True, show_progress_bar=False)
            if not np.isfinite(vectors).all():
                broken = block[int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])]
                raise InputError(f"the model's embedding of {broken!r} is not finite")
            embeddings[begin : begin + len(block)] = vectors
        embeddings.flush()
        unfinished.replace(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _blocks(texts: list[str]) -> Iterator[tuple[int, list[str]]]:
    return ((begin, texts[begin : begin + _BLOCK]) for begin in range(0, len(texts), _BLOCK))


def _cache() -> Path:
    """Where the indexes of models that are no runs lie."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "simcse-st" / INDEX
