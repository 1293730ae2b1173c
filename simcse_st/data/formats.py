"""Files -> rows, each checked for being what its name says."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from simcse_st.data.rows import Row, RowError, excerpt, progress
from simcse_st.errors import InputError

FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet")
# Two of these in the first line of a text file, split by tabs: it is no text.
TABLE_NAMES = {
    "premise",
    "hypothesis",
    "sentence1",
    "sentence2",
    "sentence_A",
    "sentence_B",
    "gold_label",
    "anchor",
    "positive",
}
DELIMITED = {".csv": ",", ".tsv": "\t"}
_COMPRESSED = ".gz"

Lines = Iterator[tuple[int, "str | RowError"]]


def file_format(path: Path) -> str | None:
    """The format that a file's name promises, or None. ``.gz`` may follow any but ``.parquet``."""
    stem = path.name.lower()
    compressed = stem.endswith(_COMPRESSED)
    suffix = Path(stem.removesuffix(_COMPRESSED)).suffix
    return suffix if suffix in FORMATS and not (compressed and suffix == ".parquet") else None


def read_file(
    path: Path, name: str, *, layout: str | None = None, header: bool = True, quotes: bool | None = None
) -> Iterator[Row | RowError]:
    """Reads the rows of a file.

    Args:
        path: The file.
        name: What to call it in errors.
        layout: Its format, where its name promises another.
        header: For CSV and TSV, whether the first line names the columns; if not, they are called "1", "2", ...
        quotes: For TSV, whether fields may be quoted as in a CSV; by default the file itself shows it.

    Yields:
        The rows in their order, and in the place of a row that is broken, what is wrong with it.

    Raises:
        InputError: The file cannot be read, or is not of its format at all.
    """
    layout = layout or file_format(path)
    if layout == ".parquet":
        return _parquet_rows(path, name)
    if layout == ".txt":
        return _text_rows(path, name)
    if layout in DELIMITED:
        quoted = layout == ".csv" or (quotes if quotes is not None else _is_quoted(path, name, DELIMITED[layout]))
        return _delimited_rows(path, name, DELIMITED[layout], quoted, header)
    return _json_rows(path, name)


def first_line(path: Path, name: str) -> str:
    """The first line of a text file, without its end; "" if it is empty.

    Raises:
        InputError: It cannot be read, or is not UTF-8.
    """
    for _, line in _lines(path, name, bar=False):
        if isinstance(line, RowError):
            raise line
        return line.rstrip("\r\n")
    return ""


def _lines(path: Path, name: str, bar: bool = True) -> Lines:
    """Numbered lines of a UTF-8 file, with their ends."""
    number = 0
    try:
        with path.open("rb") as raw, _bar(path, bar) as shown:
            file: Iterable[bytes] = raw
            if path.name.lower().endswith(_COMPRESSED):
                file = gzip.GzipFile(fileobj=raw)
            for number, line in enumerate(file, 1):
                if number % 1000 == 0:
                    shown.update(raw.tell() - shown.n)
                try:
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    yield number, _not_utf8(name, number, line, error)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{name}: damaged gzip after line {number}: {error}") from None
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from None


def _bar(path: Path, wanted: bool) -> tqdm:
    return tqdm(
        desc=f"reading {path.name}", total=path.stat().st_size, unit="B", unit_scale=True, dynamic_ncols=True,
        delay=2, leave=False, disable=None if wanted else True,
    )  # fmt: skip


def _not_utf8(name: str, number: int, line: bytes, error: UnicodeDecodeError) -> RowError:
    if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{name}: UTF-16 text, but must be UTF-8; convert it: iconv -f utf-16 -t utf-8") from None
    return RowError(
        f"{name}:{number}: byte {error.start + 1} of the line ({line[error.start]:#04x}) is not UTF-8; "
        "convert the file, e.g. iconv -f latin1 -t utf-8"
    )


def _text_rows(path: Path, name: str) -> Iterator[Row | RowError]:
    for number, line in _lines(path, name):
        if isinstance(line, RowError):
            yield line
        else:
            text = line.rstrip("\r\n")
            if number == 1 and len(TABLE_NAMES.intersection(text.split("\t"))) > 1:
                raise InputError(f"{name}:1: it looks like the header of a table: then name it .tsv: {excerpt(text)}")
            yield Row(f"{name}:", number, {"text": text})


def _json_rows(path: Path, name: str) -> Iterator[Row | RowError]:
    for number, line in _lines(path, name):
        if isinstance(line, RowError):
            yield line
        elif line.strip():
            yield _json_row(name, number, line)


def _json_row(name: str, number: int, line: str) -> Row | RowError:
    try:
        cells = _JSON.decode(line)
    except (ValueError, RecursionError) as error:
        # Not only of JSON: also numbers of thousands of digits, and brackets nested as deep.
        problem = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        hint = ""
        if number == 1 and line[0] in "{[" and line.strip() in ("{", "[", "[{"):
            hint = "; it is JSON over several lines, but each object must stand on a line of its own"
        elif number == 1 and "," in line and line[0] not in "{[":
            hint = "; is it a CSV? then name it .csv"
        return RowError(f"{name}:{number}: not a JSON object on one line ({problem}): {excerpt(line.strip())}{hint}")
    if not isinstance(cells, dict):
        return RowError(f"{name}:{number}: a row must be a JSON object, not {excerpt(cells)}")
    return Row(f"{name}:", number, cells)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    cells = dict(pairs)
    if len(cells) < len(pairs):
        raise ValueError("a key stands twice")
    return cells


_JSON = json.JSONDecoder(object_pairs_hook=_without_repetition)


def _delimited_rows(path: Path, name: str, delimiter: str, quoted: bool, header: bool) -> Iterator[Row | RowError]:
    columns: list[str] | None = None
    for number, line in _lines(path, name):
        try:
            if isinstance(line, RowError):
                raise line
            text = line.rstrip("\r\n")
            if not text:
                continue
            fields = _quoted_fields(name, number, text, delimiter) if quoted else text.split(delimiter)
            if columns is None:
                columns = _header(name, number, fields) if header else [str(i) for i, _ in enumerate(fields, 1)]
                if header:
                    continue
            if len(fields) != len(columns):
                names = f" ({', '.join(columns)})" if header else ""
                raise RowError(f"{name}:{number}: {len(fields)} fields where {len(columns)}{names} belong")
        except RowError as error:
            if columns is None:
                raise
            yield error
        else:
            yield Row(f"{name}:", number, dict(zip(columns, fields, strict=True)))


def _quoted_fields(name: str, number: int, text: str, delimiter: str) -> list[str]:
    # Line by line: a quote that is not closed on its line is a fault of that line, and swallows no other.
    try:
        return next(csv.reader([text], delimiter=delimiter, strict=True))
    except csv.Error as error:
        if "unexpected end of data" in str(error):
            raise InputError(
                f"{name}:{number}: a quote opens and is not closed on this line: {excerpt(text)}; close it, or keep "
                "sentences with line breaks in JSON Lines"
            ) from None
        raise RowError(f"{name}:{number}: not valid CSV: {error}: {excerpt(text)}") from None


def _header(name: str, number: int, fields: list[str]) -> list[str]:
    where = f"{name}:{number}"
    if fields[0].lstrip().startswith("{"):
        raise InputError(f"{where}: {excerpt(fields[0])} heads no table; is it JSON Lines? then name it .jsonl")
    if len(set(fields)) < len(fields):
        raise InputError(f"{where}: two columns of the header have the same name: {excerpt(fields)}")
    if len(fields) < 2:
        hints = {"\t": "; it is tab-separated: then name it .tsv", ";": "; it is separated by semicolons, not commas"}
        hint = next((hint for mark, hint in {**hints, ",": "; it is a CSV"}.items() if mark in fields[0]), "")
        raise InputError(f"{where}: a header of one column: {excerpt(fields[0])}{hint}")
    return fields


def _is_quoted(path: Path, name: str, delimiter: str) -> bool:
    """Whether a table is quoted as a CSV is, or its quotes are characters like any other; both are in use for TSV.

    A line is evidence for the first if a CSV writer would have written it so, with quotes where they are needed or
    around all fields; and for the second if it holds quotes that no such writer leaves.

    Raises:
        InputError: Some lines say this, some that.
    """
    quoted = bare = 0
    for number, line in _lines(path, name, bar=False):
        if isinstance(line, RowError) or '"' not in line:
            continue
        text = line.rstrip("\r\n")
        try:
            fields = next(csv.reader([text], delimiter=delimiter, strict=True))
        except csv.Error:
            bare = bare or number
            continue
        if text == _written(fields, delimiter, csv.QUOTE_ALL):
            return True
        if text == _written(fields, delimiter, csv.QUOTE_MINIMAL):
            quoted = quoted or number
        else:
            bare = bare or number
    if quoted and bare:
        raise InputError(
            f"{name}:{max(quoted, bare)}: quotes are used in two ways: line {quoted} is quoted as in a CSV, in line "
            f"{bare} a quote is a character like any other; use JSON Lines, or one way"
        )
    return bool(quoted)


def _written(fields: list[str], delimiter: str, quoting: Any) -> str:
    line = io.StringIO()
    csv.writer(line, delimiter=delimiter, quoting=quoting, lineterminator="").writerow(fields)
    return line.getvalue()


def _parquet_rows(path: Path, name: str) -> Iterator[Row | RowError]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Without buffering ahead: memory for a batch, not for all columns of a row group.
        with pq.ParquetFile(path, pre_buffer=False) as file:
            named = class_namer(_classes(file.schema_arrow.metadata))
            rows = (cells for batch in file.iter_batches(batch_size=1000) for cells in batch.to_pylist())
            for number, cells in enumerate(progress(rows, f"reading {path.name}", file.metadata.num_rows)):
                yield Row(f"{name} row ", number, named(cells))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{name}: not a Parquet file that can be read: {' '.join(str(error).split())}") from None


def _classes(metadata: dict[bytes, bytes] | None) -> dict[str, list[str]]:
    """The names of class labels that `datasets` leaves in the files it writes."""
    features = json.loads((metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    return {name: kind["names"] for name, kind in features.items() if kind.get("_type") == "ClassLabel"}


def class_namer(classes: dict[str, list[str]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Replaces numbered class labels by their names: not every data set numbers them as SNLI does."""

    def named(cells: dict[str, Any]) -> dict[str, Any]:
        for column, names in classes.items():
            value = cells.get(column)
            if isinstance(value, int) and 0 <= value < len(names):
                cells[column] = names[value]
        return cells

    return named
