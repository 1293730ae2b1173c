"""Quotes in tables: those of a CSV, which belong to the format, or characters of the text; both are in use for TSV."""

from __future__ import annotations

import csv
import re
from functools import lru_cache
from pathlib import Path

from simcse_st.data.lines import read_lines
from simcse_st.data.rows import RowError, excerpt
from simcse_st.errors import InputError

_ENCLOSED = re.compile(r'"((?:[^"]|"")*)"')


def split_quoted(name: str, number: int, text: str, delimiter: str) -> list[str]:
    """The fields of a line that is quoted as a CSV is.

    Line by line: a quote that is not closed on its line is a fault of that line, and swallows no other.

    Raises:
        InputError: A quote is not closed.
        RowError: The line is no CSV otherwise.
    """
    try:
        return next(csv.reader([text], delimiter=delimiter, strict=True))
    except csv.Error as error:
        if "unexpected end of data" in str(error):
            raise InputError(
                f"{name}:{number}: a quote opens and is not closed on this line: {excerpt(text)}; close it, or keep "
                "sentences with line breaks in JSON Lines"
            ) from None
        hint = "; JSON Lines has no such limit" if "field limit" in str(error) else ""
        raise RowError(f"{name}:{number}: not valid CSV: {error}: {excerpt(text)}{hint}") from None


def quotes_of(path: Path, name: str, wanted: bool | None = None) -> bool | None:
    """How a TSV uses quotes.

    A field that is all in quotes, with others inside it doubled, was written as a CSV is; one with quotes in any other
    place was not.

    Args:
        path: The file.
        name: What to call it in errors.
        wanted: What the user says.

    Returns:
        True for quotes as in a CSV, False for characters of the text, None for a file without quotes.

    Raises:
        InputError: Some lines say this, some that; or only fields in quotes without further ones inside, which may be
            either.
    """
    if wanted is not None:
        return wanted
    status = path.stat()
    return _found(path, name, (status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=64)
def _found(path: Path, name: str, state: tuple[int, int]) -> bool | None:
    """What the file itself says; asked twice of the same state of a file, it is read once."""
    quoted = bare = either = 0
    for number, line in read_lines(path, name, bar=False):
        if isinstance(line, RowError) or '"' not in line:
            continue
        text = line.rstrip("\r\n")
        fields = [field for field in text.split("\t") if '"' in field]
        enclosed = [match for field in fields if (match := _ENCLOSED.fullmatch(field))]
        if number == 1 and len(enclosed) == text.count("\t") + 1:
            quoted = quoted or number  # a header of names in quotes
        elif len(enclosed) < len(fields):
            if _is_written_with_tabs(text):
                quoted = quoted or number
            else:
                bare = bare or number
        elif any('""' in match[1] for match in enclosed):
            quoted = quoted or number
        else:
            either = either or number
    if quoted and bare:
        raise InputError(
            f"{name}:{max(quoted, bare)}: quotes are used in two ways: line {quoted} is quoted as in a CSV, in line "
            f"{bare} a quote is a character like any other; use one way, or set data.quotes"
        )
    if either and not quoted and not bare:
        raise InputError(
            f"{name}:{either}: do the quotes around a field belong to its text? nothing in the file tells: set "
            "data.quotes=text or data.quotes=csv"
        )
    return bool(quoted) if quoted or bare else None


def _is_written_with_tabs(text: str) -> bool:
    """Whether a quoted field of the line holds the tab that it would otherwise be split at."""
    try:
        fields = next(csv.reader([text], delimiter="\t", strict=True))
    except csv.Error:
        return False
    return any("\t" in field for field in fields)
