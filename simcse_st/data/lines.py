"""Text files, plain or gzipped -> numbered lines, each checked for being UTF-8."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm.auto import tqdm

from simcse_st.data.rows import RowError
from simcse_st.errors import InputError

COMPRESSED = ".gz"

Lines = Iterator[tuple[int, "str | RowError"]]

# What a file that is no UTF-8 text begins with, the longer marks first, and what would be right.
_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32 text; convert it to UTF-8, e.g. iconv -f utf-32 -t utf-8",
    b"\x00\x00\xfe\xff": "UTF-32 text; convert it to UTF-8, e.g. iconv -f utf-32 -t utf-8",
    b"\xff\xfe": "UTF-16 text; convert it to UTF-8, e.g. iconv -f utf-16 -t utf-8",
    b"\xfe\xff": "UTF-16 text; convert it to UTF-8, e.g. iconv -f utf-16 -t utf-8",
    b"\x1f\x8b": "gzip-compressed; its name must end in .gz",
    b"PK\x03\x04": "a zip archive or an Excel workbook; unpack it, or export it as CSV in UTF-8",
    b"PAR1": "a Parquet file; its name must end in .parquet",
    b"version https://git-lfs.github.com/spec/": "a Git LFS pointer and not the file; fetch that with git lfs pull",
}


def read_lines(path: Path, name: str, bar: bool = True) -> Lines:
    """Reads the lines of a file with their ends, and in the place of a line that is no text, what is wrong with it.

    Args:
        path: The file.
        name: What to call it in errors.
        bar: Whether to show how far it is, on a terminal, if it takes more than two seconds.

    Raises:
        InputError: The file cannot be read, or is none of lines of text.
    """
    number = 0
    try:
        with path.open("rb") as raw, _bar(path, bar) as shown:
            file: Iterable[bytes] = raw
            if path.name.lower().endswith(COMPRESSED):
                file = gzip.GzipFile(fileobj=raw)
            for number, line in enumerate(file, 1):
                if number == 1:
                    _check_first(name, line)
                elif number % 1000 == 0:
                    shown.update(raw.tell() - shown.n)
                yield number, _decoded(name, number, line)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{name}: damaged gzip after line {number}: {error}") from None
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from None


def first_line(path: Path, name: str) -> str:
    """The first line of a text file, without its end; "" if it is empty.

    Raises:
        InputError: It cannot be read, or is no text.
    """
    for _, line in read_lines(path, name, bar=False):
        if isinstance(line, RowError):
            raise line
        return line.rstrip("\r\n")
    return ""


def _check_first(name: str, line: bytes) -> None:
    found = next((what for mark, what in _MARKS.items() if line.startswith(mark)), None)
    if found:
        raise InputError(f"{name}: is {found}")
    if b"\r" in line.rstrip(b"\r\n"):
        raise InputError(
            f"{name}:1: a carriage return within the line: are these old line ends? convert them, e.g. tr '\\r' '\\n'"
        )


def _decoded(name: str, number: int, line: bytes) -> str | RowError:
    if b"\x00" in line:
        return RowError(f"{name}:{number}: a NUL byte: this is binary, or UTF-16 text; it must be text in UTF-8")
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        return RowError(
            f"{name}:{number}: byte {error.start + 1} of the line ({line[error.start]:#04x}) is not UTF-8; "
            "convert the file, e.g. iconv -f latin1 -t utf-8"
        )


def _bar(path: Path, wanted: bool) -> tqdm:
    return tqdm(
        desc=f"reading {path.name}", total=path.stat().st_size, unit="B", unit_scale=True, dynamic_ncols=True,
        delay=2, leave=False, disable=None if wanted else True,
    )  # fmt: skip
