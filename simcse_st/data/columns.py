"""A row, and what the columns of training data mean, by their names or as the user says."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from simcse_st.errors import InputError, excerpt, listed
from simcse_st.recipe import DataSection
from simcse_st.references import Columns

logger = logging.getLogger(__name__)

Kind = Literal["labelled", "pairs", "sentences"]

# The roles of each kind, and the names that public data gives to them.
ROLES: dict[Kind, dict[str, tuple[str, ...]]] = {
    "labelled": {
        "premise": ("premise", "sentence1"),
        "hypothesis": ("hypothesis", "sentence2"),
        "label": ("label", "gold_label"),
    },
    "pairs": {
        "anchor": ("anchor", "sent0", "query", "question"),
        "positive": ("positive", "pos", "sent1", "document", "passage", "answer"),
    },
    "sentences": {"text": ("text", "sentence")},
}
LABELLED: Kind = "labelled"
KNOWN_NAMES = {name for roles in ROLES.values() for names in roles.values() for name in names}
_NEGATIVE = re.compile(r"(?:hard_)?(?:negatives?|neg)_?(\d*)")
# (sentence1, sentence2, label) is not among these: in other data sets the label 0 or 1 means something else.
_NLI = (
    ("premise", "hypothesis", "label"),
    ("premise", "hypothesis", "gold_label"),
    ("sentence1", "sentence2", "gold_label"),
)

LABELS = ("entailment", "neutral", "contradiction")
ENTAILMENT, NEUTRAL, CONTRADICTION = range(3)
_LABELS = {**{name: number for number, name in enumerate(LABELS)}, **{str(number): number for number in range(3)}}
_NO_CONSENSUS = ("-1", "-", "")
_SURROGATE = re.compile("[\ud800-\udfff]")
_WRITTEN_LIST = re.compile(r"""\[\s*(['"]).*\1\s*\]""")
BROKEN, BLANK, NOT_TEXT, BAD_LABEL = "broken", "blank", "not_text", "bad_label"
BLANK_TEXTS = "blank_texts"

Pair = tuple[str, str, list[str]]  # anchor, positive, hard negatives
SourcedPair = tuple[int, str, str, list[str]]  # with the number of its source before it
Texts = tuple[int, int, list[str]]
"""A usable row: the number of its source, its label, and premise and hypothesis; anchor, positive and hard negatives;
or every text of it."""
LabelledTexts = tuple[int, list[str]]  # the same without the first


class Row(NamedTuple):
    """One row."""

    place: str
    """What it stands in, up to the number: ``file:`` or ``name row``."""
    number: int
    """Its line, from 1; or its index in a table without lines, from 0."""
    cells: dict[str, Any]
    header: int | None = None
    """The line that names the columns, where there is one."""

    @property
    def where(self) -> str:
        """What an error says of its place."""
        return f"{self.place}{self.number}"

    @property
    def where_named(self) -> str:
        """The place that names its columns: that of the header, or its own."""
        return f"{self.place}{self.number if self.header is None else self.header}"


class RowError(InputError):
    """One row that cannot be used; the rows after it could be.

    Attributes:
        reason: Which kind of fault, as the manifest counts it.
    """

    def __init__(self, message: str, reason: str = BROKEN) -> None:
        super().__init__(message)
        self.reason = reason


Rows = Iterator[Row | RowError]
"""Rows in their order, and in the place of a row that is broken, what is wrong with it."""


def sentence(row: Row, column: str, value: Any) -> str:
    """A value of a row that must be a sentence: text that can be encoded, and is not blank."""
    if isinstance(value, str) and value.strip() and (value.isascii() or not _SURROGATE.search(value)):
        return value
    what = "is missing" if value is None else f"is {excerpt(value)}"
    blank = value is None or (isinstance(value, str) and not value.strip())
    raise RowError(f"{row.where}: {column} {what}, but must be a sentence", BLANK if blank else NOT_TEXT)


@dataclass(frozen=True)
class Roles:
    """Which columns hold what.

    Attributes:
        kind: What the rows are.
        used: The column of each role: premise, hypothesis and label; anchor and positive; or text.
        mapped_negatives: The columns of the hard negatives, where the user names them.
        mapped: Whether the user has said which columns count.
    """

    kind: Kind
    used: dict[str, str]
    mapped_negatives: list[str] | None
    mapped: bool

    @classmethod
    def of(cls, row: Row, columns: Columns | None) -> Roles:
        """Recognises the columns of a row.

        Args:
            row: The row.
            columns: Those whose names do not tell their roles.
        """
        told = columns.model_dump(exclude_none=True) if columns else {}
        chosen = {role: [str(name) for name in as_list(value)] for role, value in told.items()}
        for role, names in chosen.items():
            # A hard negative may be absent from any one row.
            if role != "negative" and names[0] not in row.cells:
                raise InputError(f"data.columns.{role}: no column {names[0]!r} in {row.where_named}; {_found(row)}")
        kind = _kind(row, chosen)
        taken = [name for names in chosen.values() for name in names]
        if len(set(taken)) < len(taken):
            raise InputError(f"data.columns: one column in two roles: {', '.join(taken)}")
        used: dict[str, str] = {}
        for role, known in ROLES[kind].items():
            found = chosen.get(role) or [name for name in known if name in row.cells and name not in taken]
            if len(found) > 1:
                both = " and ".join(found)
                raise InputError(f"{row.where}: {both} might both be the {role}: choose by data.columns.{role}")
            if not found:
                raise InputError(
                    f"{row.where_named}: no column for the {role}: {_found(row)}; name it by data.columns.{role}"
                )
            used[role] = found[0]
        roles = cls(kind, used, chosen.get("negative"), bool(chosen))
        if by_number(columns):
            cells = {name: row.cells.get(name) for name in (*used.values(), *roles.negatives(row.cells))}
            if any(cell in KNOWN_NAMES or _NEGATIVE.fullmatch(cell or "") for cell in cells.values()):
                raise InputError(f"{row.where}: this is a header: give data.columns by its names, not by numbers")
            shown = ", ".join(f"column {name} is {excerpt(cell, 40)}" for name, cell in cells.items())
            logger.info("columns  without a header; in the first row %s", shown)
        return roles

    @cached_property
    def texts(self) -> list[str]:
        """The columns that every row has a text in."""
        return [name for role, name in self.used.items() if role != "label"]

    def negatives(self, names: Iterable[str]) -> list[str]:
        """The columns of hard negatives among these, by their numbers."""
        if self.kind != "pairs" or self.mapped_negatives is not None:
            return self.mapped_negatives or []
        numbered = [(int(match[1] or 0), name) for name in names if (match := _NEGATIVE.fullmatch(name))]
        return [name for _, name in sorted(numbered)]

    def left_out(self, row: Row, sentences: bool) -> list[str]:
        """The columns that hold nothing for training.

        Args:
            row: A row.
            sentences: Whether single sentences are trained on. If not, columns that would change what pairs mean are an
                error, unless the user has said which columns count.
        """
        used = {*self.used.values(), *self.negatives(row.cells)}
        names = [name for name in row.cells if name not in used]
        if self.kind != "pairs" or self.mapped or sentences:
            return names
        first, second = self.texts
        pair = f"{{anchor: {first}, positive: {second}"
        for name in names:
            if name in ROLES["labelled"]["label"]:
                raise InputError(
                    f"{row.where_named}: a {name} beside {first} and {second}: if it tells the positive pairs, keep "
                    f"those only; if not, set data.columns={pair}}}"
                )
            if "neg" in name.lower() and any(isinstance(text, str) for text in as_list(row.cells[name])):
                raise InputError(
                    f"{row.where_named}: is {excerpt(name)} a hard negative? then name it negative, or set "
                    f"data.columns={pair}, negative: {name}}}; if not, the same without negative"
                )
        return names

    def parse(self, row: Row, negatives: list[str], data: DataSection, dropped: Counter[str]) -> list[LabelledTexts]:
        """The label and the texts of a row; of one with a list of positives, once for each of these.

        Args:
            row: The row.
            negatives: Its columns of hard negatives.
            data: What the texts are for.
            dropped: Counts rows that are left out, and the blank texts of sentences.

        Returns:
            Its label and texts; nothing where it is left out.
        """
        positive = self.used.get("positive", "")
        if isinstance(row.cells.get(positive), list) and data.kind != "sentences":
            each = [row._replace(cells={**row.cells, positive: text}) for text in row.cells[positive] or [None]]
            return [texts for one in each for texts in self.parse(one, negatives, data, dropped)]
        label, sentences = ENTAILMENT, data.kind == "sentences"
        if self.kind == "labelled":
            found = _label(row, self.used["label"])
            if found is None:
                dropped["no_consensus"] += 1
                return []
            label = found
        if label == NEUTRAL and not sentences:
            return [(label, [])]  # counts for a sample, and is not trained on
        values = [(name, row.cells.get(name)) for name in self.texts if name != positive]
        values += [(positive, text) for text in as_list(row.cells.get(positive)) if positive]
        for name in negatives:
            values += [(name, text) for text in as_list(row.cells.get(name)) if text is not None and text != ""]
        if sentences:
            kept = [(name, text) for name, text in values if text is not None and str(text).strip()]
            dropped[BLANK_TEXTS] += len(values) - len(kept)
            values = kept
        for name, text in values:
            if name in negatives and not sentences and isinstance(text, str) and _WRITTEN_LIST.fullmatch(text):
                raise RowError(
                    f"{row.where}: {name} is {excerpt(text)}, a list written as text: use JSON Lines or Parquet for "
                    "lists"
                )
        texts = [sentence(row, name, text) for name, text in values]
        if data.max_characters and any(len(text) > data.max_characters for text in texts):
            dropped["too_long"] += 1
            return []
        return [(label, texts)] if texts else []


def by_number(columns: Columns | None) -> bool:
    """Whether the user gives columns by their numbers, as of tables without a header."""
    told = columns.model_dump(exclude_none=True).values() if columns else ()
    return any(isinstance(name, int) for value in told for name in as_list(value))


def as_list(value: Any) -> list[Any]:
    """A list as it is, or a list of the one value."""
    return value if isinstance(value, list) else [value]


def _kind(row: Row, chosen: dict[str, list[str]]) -> Kind:
    if chosen:
        of_role: dict[str, Kind] = {role: kind for kind, roles in ROLES.items() for role in roles}
        kinds = {of_role.get(role, "pairs") for role in chosen}
        if len(kinds) > 1:
            raise InputError(f"data.columns: {', '.join(chosen)} are not the roles of one kind of data")
        return kinds.pop()
    names = row.cells.keys()
    if any(names >= set(triple) for triple in _NLI):
        return "labelled"
    if all(names & set(known) for known in ROLES["pairs"].values()):
        return "pairs"
    if names & set(ROLES["sentences"]["text"]):
        return "sentences"
    raise InputError(
        f"{row.where_named}: {_found(row)}, but need premise, hypothesis and label, or anchor and positive (with "
        "negative, negative_1, ...), or text; for other names set data.columns, e.g. {anchor: title, positive: body}, "
        "and for a table without a header their numbers, e.g. {anchor: 1, positive: 2}"
    )


def _found(row: Row) -> str:
    return f"found the columns {listed(row.cells)}"


def _label(row: Row, column: str) -> int | None:
    """0 to 2, or None where there is no consensus."""
    value = row.cells.get(column)
    # bool and float compare equal to int, but mean something else here.
    if value is None or (isinstance(value, (str, int)) and str(value) in _NO_CONSENSUS):
        return None
    label = _LABELS.get(str(value).lower()) if isinstance(value, str) or type(value) is int else None
    if label is None:
        hint = "; write whole numbers" if str(value) in ("0.0", "1.0", "2.0", "-1.0") else ""
        raise RowError(
            f"{row.where}: {column} is {excerpt(value)}, but must be entailment, neutral or contradiction, or 0, 1, 2, "
            f"or -1 for no consensus{hint}",
            BAD_LABEL,
        )
    return label
