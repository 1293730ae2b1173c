"""Graded sentence pairs: semantic textual similarity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from simcse_st.data.sources import Row, Source, excerpt, is_sentence
from simcse_st.errors import InputError

_COLUMNS = ["sentence1", "sentence2", "score"]
HIGHEST_SCORE = 5.0


@dataclass(frozen=True)
class GradedPairs:
    """Sentence pairs with gold scores."""

    sentences1: list[str]
    sentences2: list[str]
    scores: list[float]
    facts: dict[str, Any]
    """For the manifest: source and count."""

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self.scores)


def load_graded_pairs(source: Source) -> GradedPairs:
    """Reads graded pairs.

    Args:
        source: A CSV of sentence1, sentence2, score (with or without that header), JSON Lines or a hub data set with
            columns of these names. Scores are 0 to 5, or 0 to 1.

    Raises:
        InputError: A row that cannot be used, with its place; or scores that are all the same.
    """
    sentences1: list[str] = []
    sentences2: list[str] = []
    scores: list[float] = []
    for row in source.rows(csv_columns=_COLUMNS):
        if not scores and [row.cells.get(name) for name in _COLUMNS] == _COLUMNS:
            continue  # the header of a CSV
        first, second, score = _parse(row)
        sentences1.append(first)
        sentences2.append(second)
        scores.append(score)
    if not scores:
        raise InputError(f"{source.name}: there is no graded pair in it")
    if len(set(scores)) == 1:
        raise InputError(f"{source.name}: all {len(scores)} scores are {scores[0]:g}, so nothing can be measured")
    return GradedPairs(sentences1, sentences2, scores, {"source": source.record(), "pairs": len(scores)})


def _parse(row: Row) -> tuple[str, str, float]:
    missing = [name for name in _COLUMNS if name not in row.cells]
    if missing:
        found = ", ".join(map(str, row.cells))
        raise InputError(f"{row.where}: no column {' or '.join(missing)} among {found}")
    first, second, gold = (row.cells[name] for name in _COLUMNS)
    for name, text in (("sentence1", first), ("sentence2", second)):
        if not is_sentence(text):
            raise InputError(f"{row.where}: {name} is {excerpt(text)}, but must be a sentence")
    try:
        score = math.nan if isinstance(gold, bool) else float(gold)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not 0 <= score <= HIGHEST_SCORE:
        raise InputError(f"{row.where}: score is {excerpt(gold)}, but must be a number from 0 to {HIGHEST_SCORE:g}")
    return first, second, score
