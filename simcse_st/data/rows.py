"""One row of a source, and what happens to rows that cannot be used."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from tqdm.auto import tqdm

from simcse_st.errors import InputError

_SURROGATE = re.compile("[\ud800-\udfff]")

BROKEN, BLANK, NOT_TEXT, BAD_LABEL = "broken", "blank", "not_text", "bad_label"


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


class Problems:
    """Takes the rows that cannot be used: the first one is an error, or each is dropped and counted.

    Args:
        strict: Which of the two.
    """

    SHOWN = 3

    def __init__(self, strict: bool = True) -> None:
        self.strict = strict
        self.counts: Counter[str] = Counter()
        self.first: list[str] = []

    def add(self, error: RowError) -> None:
        """Takes one.

        Raises:
            RowError: In strict mode.
        """
        if self.strict:
            raise error
        self.counts[error.reason] += 1
        if len(self.first) < self.SHOWN:
            self.first.append(str(error))


def is_sentence(value: Any) -> TypeGuard[str]:
    """Whether a value is text that can be encoded: not blank, and without halves of surrogate pairs."""
    return isinstance(value, str) and bool(value.strip()) and (value.isascii() or not _SURROGATE.search(value))


def sentence(row: Row, column: str, value: Any) -> str:
    """A value of a row that must be a sentence.

    Raises:
        RowError: It is missing, blank, or no text.
    """
    if not is_sentence(value):
        what = "is missing" if value is None else f"is {excerpt(value)}"
        blank = value is None or (isinstance(value, str) and not value.strip())
        raise RowError(f"{row.where}: {column} {what}, but must be a sentence", BLANK if blank else NOT_TEXT)
    return value


def excerpt(value: Any, limit: int = 60) -> str:
    """A value as an error shows it: quoted, on one line, not too long."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def listed(names: Iterable[Any], limit: int = 12) -> str:
    """Names as an error shows them: quoted, not too many."""
    shown = [excerpt(name) for name in names]
    return ", ".join(shown[:limit]) + (f" and {len(shown) - limit} more" if len(shown) > limit else "")


def progress(items: Iterable[Any], description: str, total: int | None = None) -> Iterator[Any]:
    """Passes items on, with a bar on a terminal if that takes more than two seconds."""
    return iter(tqdm(items, description, total, delay=2, disable=None, leave=False, dynamic_ncols=True))


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal digits."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
