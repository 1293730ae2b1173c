"""Single sentences for unsupervised training, out of plain text or of any other training data."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simcse_st.data.pairs import Columns, draw_sample, label_of, negatives_of, text_of
from simcse_st.data.sources import Source
from simcse_st.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset

SENTENCE_RULE = (
    "every distinct text of the rows (exact string, first occurrence first, row by row in the order of the columns); "
    "rows without consensus and blank lines are dropped"
)
_SENTENCE_COLUMNS = ("text", "sentence")


@dataclass(frozen=True)
class Sentences:
    """What is trained on without supervision."""

    texts: list[str]
    facts: dict[str, Any] = field(default_factory=dict)
    """For the manifest: source, counts and the rule in words."""

    def __len__(self) -> int:
        """The number of sentences."""
        return len(self.texts)

    def dataset(self) -> Dataset:
        """The sentences as a data set with the one column ``sentence``."""
        from datasets import Dataset

        return Dataset.from_dict({"sentence": self.texts})


def load_sentences(source: Source, *, sample_rows: int | None = None, sample_seed: int = 42) -> Sentences:
    """Reads the distinct sentences of any training data.

    Args:
        source: Plain text, one sentence a line; rows with a column ``text`` or ``sentence``; or what
            :func:`load_pairs` reads, of which all texts are taken.
        sample_rows: Use only so many rows (of labelled rows, those with consensus), drawn by seed, in file order.
        sample_seed: The seed of the sample.

    Raises:
        InputError: A row that cannot be used, with its place; or no sentence at all.
    """
    rows = iter(source.rows())
    first = next(rows, None)
    if first is None:
        raise InputError(f"{source.name}: there is no row in it")
    counts: Counter[str] = Counter(rows_read=0, rows_without_consensus=0, blank_lines=0)
    kept: list[list[str]] = []
    single = next((name for name in _SENTENCE_COLUMNS if name in first.cells), None)
    columns = Columns.of(first) if single is None else Columns(False, single, single, "", [*{*first.cells} - {single}])
    for row in itertools.chain([first], rows):
        counts["rows_read"] += 1
        if single is not None:
            text = row.cells.get(single)
            if isinstance(text, str) and not text.strip():
                counts["blank_lines"] += 1
            else:
                kept.append([text_of(row, single)])
        elif not columns.labelled:
            kept.append([text_of(row, columns.first), text_of(row, columns.second), *negatives_of(row, columns)])
        elif label_of(row, columns.third) is None:
            counts["rows_without_consensus"] += 1
        else:
            kept.append([text_of(row, columns.first), text_of(row, columns.second)])
    kept = draw_sample(kept, source, sample_rows, sample_seed)
    texts = list(dict.fromkeys(text for row_texts in kept for text in row_texts))
    if not texts:
        raise InputError(f"{source.name}: none of its {counts['rows_read']} rows holds a sentence to train on")
    facts = {
        "source": source.record(),
        "rule": SENTENCE_RULE,
        **counts,
        "sample": None if sample_rows is None else {"rows": sample_rows, "seed": sample_seed},
        "sentences": len(texts),
        "duplicates": sum(map(len, kept)) - len(texts),
        "columns_left_out": columns.left_out,
    }
    return Sentences(texts, facts)
