"""What the columns of training data mean, by their names or as the user says."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

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
NEGATIVE_NAME = re.compile(r"(?:hard_)?(?:negatives?|neg)_?(\d*)")
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
        chosen = mapped_columns(columns)
        for role, names in chosen.items():
            # A hard negative may be absent from any one row.
            if role != "negative" and names[0] not in row.cells:
                raise InputError(f"data.columns.{role}: no column {names[0]!r} in {row.where_named}; {_found(row)}")
        kind = _kind(row, chosen)
        taken = [name for names in chosen.values() for name in names]
        if len(set(taken)) < len(taken):
            raise InputError(f"data.columns: one column in two roles: {', '.join(taken)}")
        used = {role: name for role, (name, *_) in chosen.items() if role != "negative"}
        for role, names in ROLES[kind].items():
            found = [name for name in names if name in row.cells and name not in taken]
            if role in chosen:
                continue
            if len(found) > 1:
                names_found = " and ".join(found)
                raise InputError(f"{row.where}: {names_found} might both be the {role}: choose by data.columns.{role}")
            if not found:
                raise InputError(
                    f"{row.where_named}: no column for the {role}: {_found(row)}; name it by data.columns.{role}"
                )
            used[role] = found[0]
        return cls(kind, {role: used[role] for role in ROLES[kind]}, chosen.get("negative"), bool(chosen))

    @cached_property
    def texts(self) -> list[str]:
        """The columns that every row has a text in."""
        return [name for role, name in self.used.items() if role != "label"]

    def negatives(self, names: Iterable[str]) -> list[str]:
        """The columns of hard negatives among these, by their numbers."""
        if self.kind != "pairs" or self.mapped_negatives is not None:
            return self.mapped_negatives or []
        numbered = [(int(match[1] or 0), name) for name in names if (match := NEGATIVE_NAME.fullmatch(name))]
        return [name for _, name in sorted(numbered)]

    def left_out(self, names: Iterable[str]) -> list[str]:
        """Those of these columns that hold nothing for training."""
        names = list(names)
        used = {*self.used.values(), *self.negatives(names)}
        return [name for name in names if name not in used]

    def check_left_out(self, row: Row) -> None:
        """Looks for columns of pairs that would change what they mean, if they were no more than left out."""
        if self.kind != "pairs" or self.mapped:
            return
        first, second = self.texts
        pair = f"{{anchor: {first}, positive: {second}"
        for name in self.left_out(row.cells):
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


def mapped_columns(columns: Columns | None) -> dict[str, list[str]]:
    """The columns that the user names, by their roles."""
    named = columns.model_dump(exclude_none=True) if columns else {}
    return {role: [str(name) for name in as_list(value)] for role, value in named.items()}


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
