"""What is trained on, once it is read: rows on disk with the facts about them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simcse_st.data.rows import progress
from simcse_st.data.spool import Digests, Spool, batches

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class TrainingData:
    """Training data on disk.

    Attributes:
        facts: For the manifest: sources, counts and the rule in words.
    """

    spool: Spool
    facts: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.spool)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """The rows: anchor, positive and the list of hard negatives; or the sentence alone."""
        return iter(self.spool)

    def texts(self) -> Iterator[str]:
        """All texts, with repetitions."""
        for row in self:
            for cell in row:
                if isinstance(cell, str):
                    yield cell
                else:
                    yield from cell

    def dataset(self) -> Dataset:
        """The rows as a data set: columns ``anchor``, ``positive`` and ``negative`` (a list), or ``sentence``."""
        return self.spool.dataset()

    def lines(self) -> Iterator[str]:
        """The rows as JSON Lines, which read back as the same rows."""
        for row in self:
            yield json.dumps(dict(zip(self.spool.names, row, strict=True)), ensure_ascii=False) + "\n"

    def write(self, path: str | Path) -> None:
        """Writes those lines to a file."""
        with Path(path).open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(self.lines())


def describe_pairs(rows: Iterable[tuple[str, str, list[str]]]) -> dict[str, Any]:
    """Counts pairs and their hard negatives."""
    negatives: Counter[int] = Counter()
    anchors, texts = Digests(), Digests()
    for anchor, positive, of_row in rows:
        negatives[len(of_row)] += 1
        anchors.add(anchor)
        for text in (anchor, positive, *of_row):
            texts.add(text)
    pairs = sum(negatives.values())
    return {
        "pairs": pairs,
        "pairs_with_hard_negative": pairs - negatives[0],
        "share_with_hard_negative": (pairs - negatives[0]) / pairs,
        "hard_negatives": sum(number * count for number, count in negatives.items()),
        "hard_negatives_per_row": {str(number): negatives[number] for number in sorted(negatives)},
        "unique_anchors": anchors.distinct(),
        "unique_sentences": texts.distinct(),
    }


def sha256_of_lines(lines: Iterable[str]) -> str:
    """The SHA-256 of a file of these lines."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode())
    return digest.hexdigest()


def truncation(tokenizer: Callable[..., Any], texts: Iterable[str], max_length: int) -> dict[str, Any]:
    """How many texts a limit cuts, and how much of them.

    Args:
        tokenizer: The model's tokenizer.
        texts: The texts of the training data.
        max_length: Tokens that are kept, special tokens included.
    """
    number = texts_cut = tokens_cut = tokens = 0
    for batch in batches(progress(texts, "counting tokens"), 1000):
        number += len(batch)
        for ids in tokenizer(batch, truncation=False, verbose=False)["input_ids"]:
            tokens += len(ids)
            texts_cut += len(ids) > max_length
            tokens_cut += max(0, len(ids) - max_length)
    return {
        "max_length": max_length,
        "texts": number,
        "texts_truncated": texts_cut,
        "tokens": tokens,
        "tokens_truncated": tokens_cut,
    }
