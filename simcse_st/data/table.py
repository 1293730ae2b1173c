"""The rows of a source that can be trained on."""

from __future__ import annotations

import logging
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simcse_st.data.columns import KNOWN_NAMES, ROLES, Columns, Mapped, check_columns, is_negative_name
from simcse_st.data.rows import BAD_LABEL, Problems, Row, RowError, excerpt, progress, sentence
from simcse_st.data.sources import Source
from simcse_st.data.spool import Spool
from simcse_st.errors import InputError

logger = logging.getLogger(__name__)

LABELS = ("entailment", "neutral", "contradiction")
ENTAILMENT, NEUTRAL, CONTRADICTION = range(3)
_LABELS = {**{name: number for number, name in enumerate(LABELS)}, **{str(number): number for number in range(3)}}
_WORDS_FOR_NOTHING = {"nan", "NaN", "None", "none", "NULL", "null", "<NA>"}
_WRITTEN_LIST = re.compile(r"""\[\s*(['"]).*\1\s*\]""")
_NO_CONSENSUS = ("-1", "-", "")


@dataclass(frozen=True)
class Reading:
    """How rows are read.

    Attributes:
        columns: Columns by their roles, where their names do not tell; numbers, from 1, for files without a header.
        strict: Whether a row that cannot be used is an error, or dropped and counted.
        max_characters: Drops rows with a longer text; None keeps all.
        sample_rows: How many to keep of the rows that are left, in their order; None for all.
        sample_seed: Which ones.
    """

    columns: Mapped = field(default_factory=dict)
    strict: bool = True
    max_characters: int | None = None
    sample_rows: int | None = None
    sample_seed: int = 42

    def __post_init__(self) -> None:
        if self.sample_rows is not None and self.sample_rows < 1:
            raise InputError(f"sample_rows must be at least 1, not {self.sample_rows}")
        if self.max_characters is not None and self.max_characters < 1:
            raise InputError(f"max_characters must be at least 1, not {self.max_characters}")


@dataclass(frozen=True)
class Table:
    """The rows that are left to train on.

    Attributes:
        kind: What they are: ``labelled``, ``pairs`` or ``sentences``.
        facts: For the manifest: the source, and what was read and dropped.
    """

    kind: str
    facts: dict[str, Any]
    spool: Spool
    chosen: np.ndarray | None

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        """The label of each row, and its texts: premise and hypothesis, or anchor, positive and negatives, or one."""
        for number, row in enumerate(progress(self.spool, "going through the rows", len(self.spool))):
            if self.chosen is None or self.chosen[number]:
                yield row


def read_table(source: Source, reading: Reading, *, sentences: bool) -> Table:
    """Reads a source, drops the rows that say nothing, and draws a sample.

    Args:
        source: Where the rows are.
        reading: How to read them.
        sentences: Whether every text counts alone. Then blank ones are dropped; otherwise they spoil their row.

    Raises:
        InputError: The source cannot be read, its columns are not known, or it is too small for the sample.
    """
    import pyarrow as pa

    reader = _Reader(source, reading, sentences)
    spool = Spool(pa.schema({"label": pa.int8(), "texts": pa.list_(pa.string())}), reader.rows())
    if reader.kind is None:
        raise InputError(f"{source.name}: there is no row in it that can be used")
    facts = {
        "sources": reader.sources(),
        "columns": reader.roles,
        "columns_left_out": list(reader.left_out),
        "rows_read": reader.rows_read,
        "rows_usable": len(spool),
        "dropped": {**dict(reader.dropped), **dict(reader.problems.counts)},
        "unusable_rows": reader.problems.first,
        "strict": reading.strict,
        "max_characters": reading.max_characters,
        "words_for_nothing": dict(reader.words_for_nothing),
        "sample": None,
    }
    if sentences:
        facts["blank_texts"] = reader.blank_texts
    chosen = None
    if reading.sample_rows is not None:
        if reading.sample_rows > len(spool):
            raise InputError(
                f"data.sample.rows is {reading.sample_rows}, but {source.name} has {len(spool)} usable rows"
            )
        # The standard library's generator: its draws are the same on all platforms and in all versions so far.
        chosen = np.zeros(len(spool), dtype=bool)
        chosen[random.Random(reading.sample_seed).sample(range(len(spool)), reading.sample_rows)] = True
        facts["sample"] = {"rows": reading.sample_rows, "seed": reading.sample_seed}
    if reader.kind == "labelled":
        facts["labels"] = _count_labels(Table(reader.kind, facts, spool, chosen))
    return Table(reader.kind, facts, spool, chosen)


def _count_labels(table: Table) -> dict[str, int]:
    counts = Counter(label for label, _ in table)
    return {name: counts[number] for number, name in enumerate(LABELS)}


class _Reader:
    """Rows of a source -> (label, texts), with the count of what is left out."""

    def __init__(self, source: Source, reading: Reading, sentences: bool) -> None:
        self.source, self.reading, self.sentences = source, reading, sentences
        self.problems = Problems(reading.strict)
        self.kind: str | None = None
        self.rows_read = 0
        self.dropped: Counter[str] = Counter(no_consensus=0, too_long=0)
        self.blank_texts = 0
        self.words_for_nothing: Counter[str] = Counter()
        self.roles: dict[str, list[str]] = {}
        self.rows_of: Counter[str] = Counter()
        self.left_out: dict[str, None] = {}

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        columns: Columns | None = None
        place = names = None
        seen: set[str] = set()
        header = not any(
            isinstance(column, int) for value in self.reading.columns.values() for column in _listed(value)
        )
        for row in self.source.rows(header=header):
            self.rows_read += 1
            if isinstance(row, RowError):
                self.problems.add(row)
                continue
            self.rows_of[row.place] += 1
            if columns is None or row.place != place:
                columns, place = self._columns(row, header), row.place
            if row.cells.keys() != names:
                names = row.cells.keys()
                seen.update(names)
                self._note_columns(row, columns)
            try:
                yield from self._parsed(row, columns)
            except RowError as error:
                self.problems.add(error)

        absent = [name for name in (columns and columns.named_negatives) or () if name not in seen]
        if absent:
            raise InputError(f"data.columns.negative: no column {absent[0]!r} in any row of {self.source.name}")

    def _columns(self, row: Row, header: bool) -> Columns:
        columns = Columns.of(row, self.reading.columns)
        if self.kind not in (None, columns.kind):
            raise InputError(f"{row.where}: {columns.kind}, where {self.kind} rows came before: give one kind of data")
        if columns.kind == "sentences" and not self.sentences:
            raise InputError(
                f"{self.source.name}: single sentences make no pairs: set data.kind=sentences for the unsupervised mode"
            )
        if not header:
            self._check_no_header(row, columns)
        self.kind = columns.kind
        # In the order of their roles; that of the hard negatives follows as they are met.
        names = zip(ROLES[columns.kind], (columns.first, columns.second, columns.label), strict=False)
        self.roles = self.roles or {role: [name] for role, name in names}
        return columns

    def _note_columns(self, row: Row, columns: Columns) -> None:
        """Takes down what the columns of a row are used for, when they are others than those of the row before."""
        if not self.sentences:
            check_columns(row, columns, told=bool(self.reading.columns))
        self.left_out.update(dict.fromkeys(columns.left_out(row.cells)))
        for name in columns.negatives(row.cells):
            if name not in self.roles.setdefault("negative", []):
                self.roles["negative"].append(name)

    def _check_no_header(self, row: Row, columns: Columns) -> None:
        """Says what the first row holds by the numbers of its columns; a header there would become a pair."""
        used = [columns.first, columns.second, columns.label, *columns.negatives(row.cells)]
        cells = {name: row.cells.get(name) for name in used if name}
        if any(cell in KNOWN_NAMES or is_negative_name(cell) for cell in cells.values()):
            raise InputError(f"{row.where}: this is a header: give data.columns by its names, not by numbers")
        shown = ", ".join(f"column {name} is {excerpt(cell, 40)}" for name, cell in cells.items())
        logger.info("columns  without a header; in the first row %s", shown)

    def sources(self) -> list[dict[str, Any]]:
        """What identifies each input, with the number of its rows (of several files, without broken ones)."""
        records, paths = self.source.record(), self.source.paths()
        if paths is None or len(paths) == 1:
            return [{**record, "rows": self.rows_read} for record in records]
        counts = (self.rows_of[f"{path}:"] + self.rows_of[f"{path} row "] for path in paths)
        return [{**record, "rows": count} for record, count in zip(records, counts, strict=True)]

    def _parsed(self, row: Row, columns: Columns) -> Iterator[tuple[int, list[str]]]:
        label = ENTAILMENT
        if columns.kind == "labelled":
            found = _label(row, columns.label)
            if found is None:
                self.dropped["no_consensus"] += 1
                return
            label = found
        texts = self._texts(row, columns, label)
        if self.reading.max_characters and any(len(text) > self.reading.max_characters for text in texts):
            self.dropped["too_long"] += 1
        elif texts or not self.sentences:
            yield label, texts

    def _texts(self, row: Row, columns: Columns, label: int) -> list[str]:
        if label == NEUTRAL and not self.sentences:
            return []  # counts for a sample, and is not trained on
        names = [name for name in (columns.first, columns.second) if name]
        values = [(name, row.cells.get(name)) for name in names]
        for name in columns.negatives(row.cells):
            listed = _listed(row.cells.get(name))
            values += [(name, text) for text in listed if text is not None and text != ""]
        if self.sentences:
            kept = [(name, text) for name, text in values if text is not None and str(text).strip()]
            self.blank_texts += len(values) - len(kept)
            values = kept
        else:
            for name, text in values[len(names) :]:
                self._check_negative(row, name, text)
        return [sentence(row, name, text) for name, text in values]

    def _check_negative(self, row: Row, name: str, text: Any) -> None:
        """Hard negatives that say nothing in so many words are odd; a list written as text is none."""
        if not isinstance(text, str):
            return  # an error in any case, by the check of all texts
        if text in _WORDS_FOR_NOTHING:
            self.words_for_nothing[text] += 1
        elif _WRITTEN_LIST.fullmatch(text):
            raise RowError(
                f"{row.where}: {name} is {excerpt(text)}, a list written as text: use JSON Lines or Parquet for lists"
            )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _label(row: Row, column: str) -> int | None:
    """0 to 2, or None where there is no consensus."""
    value = row.cells.get(column)
    # bool and float compare equal to int, but mean something else here.
    if value is None or (isinstance(value, (str, int)) and str(value) in _NO_CONSENSUS):
        return None
    label = _LABELS.get(str(value).lower()) if isinstance(value, str) or type(value) is int else None
    if label is None:
        hint = ""
        if isinstance(value, float) or (isinstance(value, str) and value in ("0.0", "1.0", "2.0", "-1.0")):
            hint = "; write whole numbers"
        raise RowError(
            f"{row.where}: {column} is {excerpt(value)}, but must be entailment, neutral or contradiction, or 0, 1, 2, "
            f"or -1 for no consensus{hint}",
            BAD_LABEL,
        )
    return label
