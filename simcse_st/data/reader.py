"""Rows of a source -> (label, texts), with the count of what is left out."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from simcse_st.data.columns import KNOWN_NAMES, ROLES, Kind, Roles, check_columns, is_negative_name
from simcse_st.data.files import BAD_LABEL, Row, RowError, sentence
from simcse_st.data.sources import FileSource, HubSource
from simcse_st.errors import InputError, excerpt
from simcse_st.recipe import Columns, DataSection
from simcse_st.records import Source

logger = logging.getLogger(__name__)

LABELS = ("entailment", "neutral", "contradiction")
ENTAILMENT, NEUTRAL, CONTRADICTION = range(3)
_LABELS = {**{name: number for number, name in enumerate(LABELS)}, **{str(number): number for number in range(3)}}
_NO_CONSENSUS = ("-1", "-", "")
_WRITTEN_LIST = re.compile(r"""\[\s*(['"]).*\1\s*\]""")
_SHOWN = 3  # errors of rows that cannot be used


class Reader:
    """Reads the rows that can be used, once, and counts the others.

    The texts of a row are premise and hypothesis; anchor, positive and hard negatives; or each text that is to be a
    sentence.
    """

    def __init__(self, source: FileSource | HubSource, data: DataSection) -> None:
        self.source, self.data, self.sentences = source, data, data.kind == "sentences"
        self.kind: Kind | None = None
        self.rows_read = self.rows_usable = self.blank_texts = 0
        self.dropped: Counter[str] = Counter(no_consensus=0, too_long=0)
        self.unusable: list[str] = []
        self.roles: dict[str, list[str]] = {}
        self.left_out: dict[str, None] = {}
        self._rows_of: Counter[str] = Counter()

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Every row that can be used."""
        columns: Roles | None = None
        place = names = None
        seen: set[str] = set()
        mapped = self.data.columns.model_dump(exclude_none=True) if self.data.columns else {}
        header = not any(isinstance(column, int) for value in mapped.values() for column in _listed(value))
        for row in self.source.rows(header=header):
            self.rows_read += 1
            try:
                if isinstance(row, RowError):
                    raise row
                self._rows_of[row.place] += 1
                if columns is None or row.place != place:
                    columns, place = self._columns(row, header), row.place
                if row.cells.keys() != names:
                    names = row.cells.keys()
                    seen.update(names)
                    self._note_columns(row, columns)
                texts = self._parsed(row, columns)
            except RowError as error:
                if self.data.strict:
                    raise
                self.dropped[error.reason] += 1
                self.unusable += [str(error)][: _SHOWN - len(self.unusable)]
                continue
            if texts is not None:
                self.rows_usable += 1
                yield texts
        absent = [name for name in (columns and columns.named_negatives) or () if name not in seen]
        if absent:
            raise InputError(f"data.columns.negative: no column {absent[0]!r} in any row of {self.source.name}")

    def sources(self) -> list[Source]:
        """What identifies each input, with the number of its rows (of several files, without broken ones)."""
        records = self.source.records()
        if len(records) == 1 or isinstance(self.source, HubSource):
            return [record.model_copy(update={"rows": self.rows_read}) for record in records]
        counts = (self._rows_of[f"{path}:"] + self._rows_of[f"{path} row "] for path in self.source.paths)
        return [record.model_copy(update={"rows": n}) for record, n in zip(records, counts, strict=True)]

    def _columns(self, row: Row, header: bool) -> Roles:
        columns = Roles.of(row, self.data.columns)
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

    def _note_columns(self, row: Row, columns: Roles) -> None:
        """Takes down what the columns of a row are used for, when they are others than those of the row before."""
        if not self.sentences:
            check_columns(row, columns, told=self.data.columns not in (None, Columns()))
        self.left_out.update(dict.fromkeys(columns.left_out(row.cells)))
        for name in columns.negatives(row.cells):
            if name not in self.roles.setdefault("negative", []):
                self.roles["negative"].append(name)

    def _check_no_header(self, row: Row, columns: Roles) -> None:
        """Says what the first row holds by the numbers of its columns; a header there would become a pair."""
        used = [columns.first, columns.second, columns.label, *columns.negatives(row.cells)]
        cells = {name: row.cells.get(name) for name in used if name}
        if any(cell in KNOWN_NAMES or is_negative_name(cell) for cell in cells.values()):
            raise InputError(f"{row.where}: this is a header: give data.columns by its names, not by numbers")
        shown = ", ".join(f"column {name} is {excerpt(cell, 40)}" for name, cell in cells.items())
        logger.info("columns  without a header; in the first row %s", shown)

    def _parsed(self, row: Row, columns: Roles) -> tuple[int, list[str]] | None:
        label = ENTAILMENT
        if columns.kind == "labelled":
            found = _label(row, columns.label)
            if found is None:
                self.dropped["no_consensus"] += 1
                return None
            label = found
        texts = self._texts(row, columns, label)
        if self.data.max_characters and any(len(text) > self.data.max_characters for text in texts):
            self.dropped["too_long"] += 1
            return None
        return (label, texts) if texts or not self.sentences else None

    def _texts(self, row: Row, columns: Roles, label: int) -> list[str]:
        if label == NEUTRAL and not self.sentences:
            return []  # counts for a sample, and is not trained on
        names = [name for name in (columns.first, columns.second) if name]
        values = [(name, row.cells.get(name)) for name in names]
        for name in columns.negatives(row.cells):
            values += [(name, text) for text in _listed(row.cells.get(name)) if text is not None and text != ""]
        if self.sentences:
            kept = [(name, text) for name, text in values if text is not None and str(text).strip()]
            self.blank_texts += len(values) - len(kept)
            return [sentence(row, name, text) for name, text in kept]
        for name, text in values[len(names) :]:
            if isinstance(text, str) and _WRITTEN_LIST.fullmatch(text):
                raise RowError(
                    f"{row.where}: {name} is {excerpt(text)}, a list written as text: use JSON Lines or Parquet for "
                    "lists"
                )
        return [sentence(row, name, text) for name, text in values]


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
