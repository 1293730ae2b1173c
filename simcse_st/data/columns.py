"""What the columns of training data mean, by their names or as the user says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from simcse_st.errors import InputError, excerpt, listed
from simcse_st.recipe import Columns

if TYPE_CHECKING:
    from simcse_st.data.files import Row

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
        "positive": ("positive", "sent1", "document", "passage", "answer"),
    },
    "sentences": {"text": ("text", "sentence")},
}
KNOWN_NAMES = {name for roles in ROLES.values() for names in roles.values() for name in names}
_NEGATIVE = re.compile(r"(?:hard_)?(?:negatives?|neg)_?(\d*)")
# (sentence1, sentence2, label) is not among these: in other data sets the label 0 or 1 means something else.
_NLI = (
    ("premise", "hypothesis", "label"),
    ("premise", "hypothesis", "gold_label"),
    ("sentence1", "sentence2", "gold_label"),
)


@dataclass(frozen=True)
class Roles:
    """Which columns hold what.

    Attributes:
        kind: What the rows are.
        first: The column of the premise, the anchor or the text.
        second: That of the hypothesis or the positive.
        label: That of the label.
        named_negatives: Those of the hard negatives, if the user named them; by default their names show it.
    """

    kind: Kind
    first: str
    second: str = ""
    label: str = ""
    named_negatives: tuple[str, ...] | None = None

    @classmethod
    def of(cls, row: Row, mapped: Columns | None) -> Roles:
        """Recognises the columns of a row.

        Args:
            row: The row.
            mapped: Columns by their roles, for those roles that their names do not tell.
        """
        told = mapped.model_dump(exclude_none=True) if mapped else {}
        chosen = {
            role: [str(name) for name in (value if isinstance(value, list) else [value])]
            for role, value in told.items()
        }
        for role, columns in chosen.items():
            # A hard negative may be absent from any one row.
            if role != "negative" and columns[0] not in row.cells:
                raise InputError(f"data.columns.{role}: no column {columns[0]!r} in {row.where_named}; {_found(row)}")
        kind = _kind(row, chosen)
        taken = [column for columns in chosen.values() for column in columns]
        if len(set(taken)) < len(taken):
            raise InputError(f"data.columns: one column in two roles: {', '.join(taken)}")
        roles = {role: chosen[role][0] if role in chosen else _by_name(row, kind, role, taken) for role in ROLES[kind]}
        first, second, *_ = *roles.values(), ""
        negatives = tuple(chosen["negative"]) if "negative" in chosen else None
        return cls(kind, first, second, roles.get("label", ""), negatives)

    def negatives(self, names: Iterable[str]) -> tuple[str, ...]:
        """The columns of hard negatives among these, by their numbers."""
        if self.kind != "pairs":
            return ()
        return self.named_negatives if self.named_negatives is not None else _negatives(tuple(names))

    def left_out(self, names: Iterable[str]) -> list[str]:
        """Those of these columns that hold nothing for training."""
        names = list(names)
        used = {self.first, *filter(None, (self.second, self.label)), *self.negatives(names)}
        return [name for name in names if name not in used]


def check_columns(row: Row, columns: Roles, told: bool) -> None:
    """Looks for columns of pairs that would change what they mean, if they were no more than left out.

    Args:
        row: A row.
        columns: Its columns.
        told: Whether the user has said which columns count.
    """
    if columns.kind != "pairs" or told:
        return
    pair = f"{{anchor: {columns.first}, positive: {columns.second}"
    for name in columns.left_out(row.cells):
        if name in ROLES["labelled"]["label"]:
            raise InputError(
                f"{row.where_named}: a {name} beside {columns.first} and {columns.second}: if it tells the positive "
                f"pairs, keep those only; if not, set data.columns={pair}}}"
            )
        cell = row.cells[name]
        texts = cell if isinstance(cell, list) else [cell]
        if "neg" in name.lower() and any(isinstance(text, str) for text in texts):
            raise InputError(
                f"{row.where_named}: is {excerpt(name)} a hard negative? then name it negative, or set "
                f"data.columns={pair}, negative: {name}}}; if not, the same without negative"
            )


def is_negative_name(value: object) -> bool:
    """Whether this is a name that hard negatives go by."""
    return isinstance(value, str) and bool(_NEGATIVE.fullmatch(value))


@lru_cache(maxsize=1024)
def _negatives(names: tuple[str, ...]) -> tuple[str, ...]:
    numbered = [(int(match[1] or 0), name) for name in names if (match := _NEGATIVE.fullmatch(name))]
    return tuple(name for _, name in sorted(numbered))


def _kind(row: Row, chosen: Mapping[str, list[str]]) -> Kind:
    if chosen:
        kinds = [kind for kind, roles in ROLES.items() if chosen.keys() & roles.keys()]
        kinds += ["pairs"] if "negative" in chosen and "pairs" not in kinds else []
        if len(kinds) > 1:
            raise InputError(f"data.columns: {', '.join(chosen)} are not the roles of one kind of data")
        return kinds[0]
    names = row.cells.keys()
    if any(names >= set(triple) for triple in _NLI):
        return "labelled"
    pairs = ROLES["pairs"]
    if names & set(pairs["anchor"]) and names & set(pairs["positive"]):
        return "pairs"
    if names & set(ROLES["sentences"]["text"]):
        return "sentences"
    raise InputError(
        f"{row.where_named}: {_found(row)}, but need premise, hypothesis and label, or anchor and positive (with "
        "negative, negative_1, ...), or text; for other names set data.columns, e.g. {anchor: title, positive: body}, "
        "and for a table without a header their numbers, e.g. {anchor: 1, positive: 2}"
    )


def _by_name(row: Row, kind: Kind, role: str, taken: list[str]) -> str:
    found = [name for name in ROLES[kind][role] if name in row.cells and name not in taken]
    if len(found) > 1:
        raise InputError(f"{row.where}: {' and '.join(found)} might both be the {role}: choose by data.columns.{role}")
    if not found:
        raise InputError(f"{row.where_named}: no column for the {role}: {_found(row)}; name it by data.columns.{role}")
    return found[0]


def _found(row: Row) -> str:
    return f"found the columns {listed(row.cells)}"
