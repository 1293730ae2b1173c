"""The two errors that users see as one line: input that cannot be used, and a run that cannot end well."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Input that cannot be used, described in one line.

    The message says what was found, where (``file:line`` or the recipe key) and what would be right. The command line
    prints it without a traceback and exits with code 2. Anything else that is raised is a fault of the program.
    """


class RunError(RuntimeError):
    """A run that began and cannot end well, described in one line; the command line exits with code 1."""


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Names the alternatives to a name that is not known, closest first.

    Args:
        name: What the user wrote.
        known: What would have been accepted.
        prefix: What to print before each, e.g. the section of a key.

    Returns:
        ``"did you mean 'a' or 'b'?"`` when something is close, else ``"known: 'a', 'b', ..."``.
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(prefix + candidate) for candidate in close) + "?"
    return "known: " + ", ".join(repr(prefix + candidate) for candidate in known)


def excerpt(value: object, limit: int = 60) -> str:
    """A value as an error shows it: quoted, on one line, not too long."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def listed(names: Iterable[object], limit: int = 12) -> str:
    """Names as an error shows them: quoted, not too many."""
    shown = [excerpt(name) for name in names]
    return ", ".join(shown[:limit]) + (f" and {len(shown) - limit} more" if len(shown) > limit else "")


def one_line(error: BaseException) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or this machine had no more memory: a class of its own on a GPU only, elsewhere words alone."""
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    )
