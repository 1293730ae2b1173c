"""The rows of a source that can be trained on, and what their columns mean."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any, Literal

from simcse_st.data.sources import Row, Source, excerpt, is_sentence
from simcse_st.errors import InputError

# The names that public data gives to (premise, hypothesis, label), (anchor, positive, negatives) and single sentences.
_LABELLED = (("premise", "hypothesis", "label"), ("sentence1", "sentence2", "gold_label"))
_PAIRS = (("anchor", "positive", r"negative(_\d+)?"), ("sent0", "sent1", "hard_neg"))
_SENTENCES = ("text", "sentence")

ENTAILMENT, NEUTRAL, CONTRADICTION = range(3)
_LABELS = {
    **{"entailment": ENTAILMENT, "neutral": NEUTRAL, "contradiction": CONTRADICTION},
    **{str(label): label for label in range(3)},
}
_NO_CONSENSUS = ("-1", "-", "")


@dataclass(frozen=True)
class Columns:
    """Which columns hold what, found by their names."""

    kind: Literal["labelled", "pairs", "sentences"]
    first: str
    second: str = ""
    label: str = ""
    negatives: str = ""
    """A pattern of the hard negatives' names."""

    @classmethod
    def of(cls, row: Row) -> Columns:
        """Recognises the columns of a row.

        Raises:
            InputError: Their names are not known.
        """
        names = set(row.cells)
        for first, second, label in _LABELLED:
            if {first, second, label} <= names:
                return cls("labelled", first, second, label=label)
        for first, second, negatives in _PAIRS:
            if {first, second} <= names:
                return cls("pairs", first, second, negatives=negatives)
        for name in _SENTENCES:
            if name in names:
                return cls("sentences", name)
        raise InputError(
            f"{row.where}: found the columns {', '.join(map(str, row.cells))}, but need premise, hypothesis and label, "
            "or anchor and positive (with negative, negative_1, ...), or text"
        )

    def use(self, name: str) -> bool:
        """Whether a column holds anything for training."""
        return name in (self.first, self.second, self.label) or bool(re.fullmatch(self.negatives, name))


@dataclass(frozen=True)
class Table:
    """The rows that are left to train on."""

    columns: Columns
    rows: list[Row]
    facts: dict[str, Any]
    """For the manifest: the source, and what was read and dropped."""

    def text(self, row: Row, column: str) -> str:
        """A sentence that must be there.

        Raises:
            InputError: It is missing, blank, or no text.
        """
        value = row.cells.get(column)
        if not is_sentence(value):
            what = "is missing" if value is None else f"is {excerpt(value)}"
            raise InputError(f"{row.where}: {column} {what}, but must be a sentence")
        return value

    def label(self, row: Row) -> int | None:
        """The label of a row."""
        return _label(row, self.columns.label)

    def negatives(self, row: Row) -> list[str]:
        """All hard negatives of a row, out of any number of columns with a sentence, a list of them, or nothing.

        Raises:
            InputError: One is blank, or no text.
        """
        found = []
        for name, value in row.cells.items():
            if not self.columns.negatives or not re.fullmatch(self.columns.negatives, name):
                continue
            for text in value if isinstance(value, list) else [value]:
                if text is None or text == "":
                    continue
                if not is_sentence(text):
                    raise InputError(
                        f"{row.where}: {name} is {excerpt(text)}, but must be a sentence, or null where there is none"
                    )
                found.append(text)
        return found


def read_table(source: Source, sample_rows: int | None, sample_seed: int) -> Table:
    """Reads a source, drops the rows that say nothing, and draws a sample.

    Args:
        source: Where the rows are.
        sample_rows: How many to keep of the rows that are left, in their order; None for all.
        sample_seed: Which ones.

    Raises:
        InputError: The source cannot be read, its columns are not known, or it is too small for the sample.
    """
    columns: Columns | None = None
    names: dict[str, None] = {}
    rows: list[Row] = []
    rows_read = without_consensus = blank = 0
    for row in source.rows():
        columns = columns or Columns.of(row)
        names.update(dict.fromkeys(row.cells))
        rows_read += 1
        text = row.cells.get(columns.first)
        if columns.kind == "labelled" and _label(row, columns.label) is None:
            without_consensus += 1
        elif columns.kind == "sentences" and isinstance(text, str) and not text.strip():
            blank += 1
        else:
            rows.append(row)
    if columns is None:
        raise InputError(f"{source.name}: there is no row in it (the first line of a CSV is its header)")
    facts = {
        "source": source.record(),
        "rows_read": rows_read,
        "rows_without_consensus": without_consensus,
        "blank_lines": blank,
        "columns_left_out": [name for name in names if not columns.use(name)],
        "sample": None,
    }
    if sample_rows is not None:
        if sample_rows > len(rows):
            raise InputError(f"data.sample.rows is {sample_rows}, but {source.name} has {len(rows)} usable rows")
        rows = [rows[index] for index in sorted(random.Random(sample_seed).sample(range(len(rows)), sample_rows))]
        facts["sample"] = {"rows": sample_rows, "seed": sample_seed}
    return Table(columns, rows, facts)


def _label(row: Row, column: str) -> int | None:
    """0 to 2, or None where there is no consensus."""
    value = row.cells.get(column)
    # bool and float compare equal to int, but mean something else here.
    if value is None or (isinstance(value, (str, int)) and str(value) in _NO_CONSENSUS):
        return None
    label = _LABELS.get(str(value)) if isinstance(value, str) or type(value) is int else None
    if label is None:
        raise InputError(
            f"{row.where}: {column} is {excerpt(value)}, but must be entailment, neutral or contradiction, or 0, 1, 2, "
            "or -1 for no consensus"
        )
    return label
