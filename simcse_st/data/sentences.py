"""Single sentences for unsupervised training, out of plain text or of any other training data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simcse_st.data.sources import Source
from simcse_st.data.table import read_table
from simcse_st.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset

SENTENCE_RULE = (
    "every distinct text of the rows (exact string, first occurrence first, row by row in the order of the columns); "
    "rows without consensus and blank lines are dropped"
)


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
            :func:`~simcse_st.data.load_pairs` reads, of which all texts are taken.
        sample_rows: Use only so many rows (of labelled rows, those with consensus), drawn by seed, in file order.
        sample_seed: The seed of the sample.

    Raises:
        InputError: A row that cannot be used, with its place; or no sentence at all.
    """
    table = read_table(source, sample_rows, sample_seed)
    columns = [name for name in (table.columns.first, table.columns.second) if name]
    texts: dict[str, None] = {}
    found = 0
    for row in table.rows:
        of_row = [*(table.text(row, column) for column in columns), *table.negatives(row)]
        texts.update(dict.fromkeys(of_row))
        found += len(of_row)
    if not texts:
        raise InputError(f"{source.name}: none of its {table.facts['rows_read']} rows holds a sentence to train on")
    facts = {**table.facts, "rule": SENTENCE_RULE, "sentences": len(texts), "duplicates": found - len(texts)}
    return Sentences(list(texts), facts)
