"""Files -> rows, each checked for being what its name says.

JSON and CSV are read line by line and not by ``datasets``, which pads short rows of a CSV without a word and loses the
line of an error.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from simcse_st.console import progress
from simcse_st.data.columns import KNOWN_NAMES, Row, RowError, Rows
from simcse_st.errors import InputError, RunError, excerpt, listed

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet")
DELIMITED = {".csv": ",", ".tsv": "\t"}
COMPRESSED = ".gz"
Quotes = Literal["csv", "text"] | None

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
# How the types of Parquet columns begin that can hold texts or labels.
_READABLE = ("string", "large_string", "null", "list", "large_list", "int", "uint", "half", "float", "double", "bool")


def file_format(path: Path) -> str | None:
    """The format that a file's name promises, or None. ``.gz`` may follow any but ``.parquet``."""
    stem = path.name.lower()
    compressed = stem.endswith(COMPRESSED)
    suffix = Path(stem.removesuffix(COMPRESSED)).suffix
    return suffix if suffix in FORMATS and not (compressed and suffix == ".parquet") else None


def read_file(path: Path, name: str, *, layout: str | None = None, header: bool = True, quotes: Quotes = None) -> Rows:
    """Reads the rows of a file.

    Args:
        path: The file.
        name: What to call it in errors.
        layout: Its format, where its name promises another.
        header: For CSV and TSV, whether the first line names the columns; if not, they are called "1", "2", ...
        quotes: For TSV, whether the quotes around fields are those of a CSV or belong to the text.

    Yields:
        The rows in their order, and in the place of a row that is broken, what is wrong with it.
    """
    layout = layout or file_format(path)
    if layout in DELIMITED:
        return _delimited_rows(path, name, DELIMITED[layout], "csv" if layout == ".csv" else quotes, header)
    if not header:
        raise InputError(f"{name}: data.columns by numbers is for CSV and TSV; here columns have names")
    if layout == ".parquet":
        return _parquet_rows(path, name)
    return _line_rows(path, name, _text_row if layout == ".txt" else _json_row)


def _line_rows(path: Path, name: str, parse: Callable[[str, int, str], Row | RowError | None]) -> Rows:
    for number, line in read_lines(path, name):
        row = line if isinstance(line, RowError) else parse(name, number, line)
        if row is not None:
            yield row


def _text_row(name: str, number: int, line: str) -> Row:
    text = line.rstrip("\r\n")
    if number == 1:  # is it a sentence, and not the beginning of a table or of JSON Lines?
        if text.startswith("{") and isinstance(_json_row(name, 1, text), Row):
            raise InputError(f"{name}:1: a JSON object and no sentence: then name it .jsonl: {excerpt(text)}")
        for suffix, delimiter in DELIMITED.items():
            fields = text.split(delimiter)
            if len(fields) > 1 and KNOWN_NAMES.intersection(fields) and all(re.fullmatch(r"\w+", f) for f in fields):
                raise InputError(
                    f"{name}:1: the header of a table and no sentence: then name it {suffix}: {excerpt(text)}"
                )
    return Row(f"{name}:", number, {"text": text})


def _json_row(name: str, number: int, line: str) -> Row | RowError | None:
    try:
        cells = _JSON.decode(line)
    except (ValueError, RecursionError) as error:
        if not line.strip():
            return None
        # Not only of JSON: also numbers of thousands of digits, and brackets nested as deep.
        problem = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        hint = ""
        if number == 1 and line.strip() in ("{", "[", "[{"):
            hint = "; it is JSON over several lines, but each object must stand on a line of its own"
        elif number == 1 and "," in line and line[0] not in "{[":
            hint = "; is it a CSV? then name it .csv"
        return RowError(f"{name}:{number}: not a JSON object on one line ({problem}): {excerpt(line.strip())}{hint}")
    if not isinstance(cells, dict):
        hint = "; each object must stand on a line of its own" if isinstance(cells, list) else ""
        return RowError(f"{name}:{number}: a row must be a JSON object, not {excerpt(cells)}{hint}")
    return Row(f"{name}:", number, cells)


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    cells = dict(pairs)
    if len(cells) < len(pairs):
        raise ValueError("a key stands twice")
    return cells


_JSON = json.JSONDecoder(object_pairs_hook=_without_repetition)


def _delimited_rows(path: Path, name: str, delimiter: str, quotes: Quotes, header: bool) -> Rows:
    columns: list[str] | None = None
    header_line: int | None = None
    for number, line in read_lines(path, name):
        try:
            if isinstance(line, RowError):
                raise line
            text = line.rstrip("\r\n")
            if not text:
                continue
            fields = split_quoted(name, number, text, delimiter) if quotes == "csv" else text.split(delimiter)
            if quotes is None and any(len(field) > 1 and field[0] == field[-1] == '"' for field in fields):
                raise InputError(
                    f"{name}:{number}: do the quotes around a field belong to its text? Set data.quotes=text, or "
                    "data.quotes=csv if they do not"
                )
            if columns is None and header:
                _check_header(f"{name}:{number}", fields)
                columns, header_line = fields, number
                continue
            if columns is None:
                if delimiter == "," and "\t" in text:
                    raise InputError(f"{name}:{number}: a tab in the first row: is it tab-separated? then name it .tsv")
                columns = [str(i) for i, _ in enumerate(fields, 1)]
            if len(fields) != len(columns):
                names = f" ({', '.join(columns)})" if header else ""
                raise RowError(f"{name}:{number}: {len(fields)} fields where {len(columns)}{names} belong")
        except RowError as error:
            if columns is None:
                raise
            yield error
        else:
            yield Row(f"{name}:", number, dict(zip(columns, fields, strict=True)), header_line)


def _check_header(where: str, fields: list[str]) -> None:
    first = fields[0]
    if first.lstrip().startswith("{"):
        raise InputError(f"{where}: {excerpt(first)} heads no table; is it JSON Lines? then name it .jsonl")
    if len(set(fields)) < len(fields):
        raise InputError(f"{where}: two columns of the header have the same name: {listed(fields)}")
    hints = {
        "\t": "it is tab-separated: then name it .tsv",
        ";": _BY_SEMICOLONS,
        "|": "it is separated by bars, but must be by commas",
        ",": "it is a CSV: then name it .csv",
    }
    hint = next((hint for mark, hint in hints.items() if mark in first), None)
    if len(fields) < 2 and hint:
        raise InputError(f"{where}: a header of one column: {excerpt(first)}; {hint}")


def _parquet_rows(path: Path, name: str) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Without buffering ahead: memory for a batch, not for all columns of a row group.
        with pq.ParquetFile(path, pre_buffer=False) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise InputError(f"{name}: two columns have the same name: {listed(names)}")
            classes = _classes(file.schema_arrow.metadata)
            tables = (zip(*map(_cells, batch.columns), strict=True) for batch in file.iter_batches(batch_size=1000))
            rows = progress(f"reading {path.name}", file.metadata.num_rows, chain.from_iterable(tables))
            for number, values in enumerate(rows):
                cells = dict(zip(names, values, strict=True))
                name_classes(cells, classes)
                yield Row(f"{name} row ", number, cells)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{name}: not a Parquet file that can be read: {' '.join(str(error).split())}") from None


def _cells(column: pa.Array) -> list[Any]:
    """The values of a column; of one that can hold neither texts nor labels, its type in their place."""
    import pyarrow as pa

    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    return column.to_pylist() if str(kind).startswith(_READABLE) else [kind] * len(column)


def _classes(metadata: dict[bytes, bytes] | None) -> dict[str, list[str]]:
    """The names of class labels that `datasets` leaves in the files it writes."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        kinds = {column: kind for column, kind in features.items() if isinstance(kind, dict)}
        return {column: kind["names"] for column, kind in kinds.items() if kind.get("_type") == "ClassLabel"}
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}  # written by something else, or by a release with another layout


def name_classes(cells: dict[str, object], classes: Mapping[str, list[str]]) -> None:
    """Replaces numbered class labels by their names: not every data set numbers them as SNLI does."""
    for column, names in classes.items():
        value = cells.get(column)
        if isinstance(value, int) and 0 <= value < len(names):
            cells[column] = names[value]


_BY_SEMICOLONS = "it is separated by semicolons, but must be by commas, and numbers have points: save it so"


def split_quoted(name: str, number: int, text: str, delimiter: str) -> list[str]:
    """The fields of a line that is quoted as a CSV is.

    Line by line: a quote that is not closed on its line is a fault of that line, and swallows no other.
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
        hint = f"; {_BY_SEMICOLONS}" if delimiter == "," and '";"' in text else hint
        raise RowError(f"{name}:{number}: not valid CSV: {error}: {excerpt(text)}{hint}") from None


def read_lines(path: Path, name: str) -> Iterator[tuple[int, str | RowError]]:
    """Reads the lines of a file with their ends, and in the place of a line that is no text, what is wrong with it.

    Args:
        path: The file.
        name: What to call it in errors.
    """
    number = 0
    try:
        with path.open("rb") as raw, progress(f"reading {path.name}", path.stat().st_size, unit="B") as bar:
            file: Iterable[bytes] = gzip.GzipFile(fileobj=raw) if path.name.lower().endswith(COMPRESSED) else raw
            for number, line in enumerate(file, 1):
                if number == 1:
                    _check_first(name, line)
                elif number % 1000 == 0:
                    bar.update(raw.tell() - bar.n)
                yield number, _decoded(name, number, line)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{name}: damaged gzip after line {number}: {error}") from None
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from None


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


def digest_of(*texts: str) -> bytes:
    """16 bytes for a text, or for several together: that two of ten million share one has a chance of 1e-25."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def count_distinct(digests: bytearray) -> int:
    """How many different ones there are among digests of 16 bytes, one behind another."""
    array = np.frombuffer(digests, dtype="S16")
    first = np.frombuffer(digests, dtype=np.uint8)[::16] >> 4
    # Part by part, by the first four bits, since sorting makes copies.
    return sum(len(np.unique(array[first == part])) for part in range(16))


_folders: list[tempfile.TemporaryDirectory[str]] = []  # which stay until the process ends: data are mapped from them


def write_arrow(rows: Iterable[tuple[Any, ...]], schema: pa.Schema) -> Path:
    """Writes rows into an Arrow file of their own; memory holds a batch of them."""
    import pyarrow as pa

    iterator = iter(rows)
    try:
        folder = tempfile.TemporaryDirectory(prefix="simcse-st-", ignore_cleanup_errors=True)
        _folders.append(folder)
        path = Path(folder.name) / "rows.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            while batch := list(islice(iterator, 10_000)):
                columns = list(map(list, zip(*batch, strict=True)))
                writer.write_batch(pa.record_batch(columns, schema=schema))
    except OSError as error:
        raise RunError(
            f"cannot write to the temporary folder {tempfile.gettempdir()}: {error.strerror or error}; set TMPDIR to "
            "another"
        ) from error
    return path
