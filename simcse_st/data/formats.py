"""Files -> rows, each checked for being what its name says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simcse_st.data.columns import KNOWN_NAMES
from simcse_st.data.lines import COMPRESSED, read_lines
from simcse_st.data.quoting import quotes_of, split_quoted
from simcse_st.data.rows import Row, RowError, excerpt, listed, progress
from simcse_st.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet")
DELIMITED = {".csv": ",", ".tsv": "\t"}


def file_format(path: Path) -> str | None:
    """The format that a file's name promises, or None. ``.gz`` may follow any but ``.parquet``."""
    stem = path.name.lower()
    compressed = stem.endswith(COMPRESSED)
    suffix = Path(stem.removesuffix(COMPRESSED)).suffix
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
        quoted = layout == ".csv" or bool(quotes_of(path, name, quotes))
        return _delimited_rows(path, name, DELIMITED[layout], quoted, header)
    return _json_rows(path, name)


def _text_rows(path: Path, name: str) -> Iterator[Row | RowError]:
    for number, line in read_lines(path, name):
        if isinstance(line, RowError):
            yield line
        else:
            text = line.rstrip("\r\n")
            if number == 1:
                _check_is_text(name, text)
            yield Row(f"{name}:", number, {"text": text})


def _check_is_text(name: str, line: str) -> None:
    """Looks for a first line that is no sentence: that of a table, or of JSON Lines.

    Raises:
        InputError: It is such a line.
    """
    if line.startswith("{") and isinstance(_json_row(name, 1, line), Row):
        raise InputError(f"{name}:1: a JSON object and no sentence: then name it .jsonl: {excerpt(line)}")
    for delimiter, suffix in (("\t", ".tsv"), (",", ".csv")):
        fields = line.split(delimiter)
        if len(fields) > 1 and all(map(re.compile(r"\w+").fullmatch, fields)) and KNOWN_NAMES.intersection(fields):
            raise InputError(f"{name}:1: the header of a table and no sentence: then name it {suffix}: {excerpt(line)}")


def _json_rows(path: Path, name: str) -> Iterator[Row | RowError]:
    for number, line in read_lines(path, name):
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
        hint = "; each object must stand on a line of its own" if isinstance(cells, list) else ""
        return RowError(f"{name}:{number}: a row must be a JSON object, not {excerpt(cells)}{hint}")
    return Row(f"{name}:", number, cells)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    cells = dict(pairs)
    if len(cells) < len(pairs):
        raise ValueError("a key stands twice")
    return cells


_JSON = json.JSONDecoder(object_pairs_hook=_without_repetition)


def _delimited_rows(path: Path, name: str, delimiter: str, quoted: bool, header: bool) -> Iterator[Row | RowError]:
    columns: list[str] | None = None
    header_line: int | None = None
    for number, line in read_lines(path, name):
        try:
            if isinstance(line, RowError):
                raise line
            text = line.rstrip("\r\n")
            if not text:
                continue
            fields = split_quoted(name, number, text, delimiter) if quoted else text.split(delimiter)
            if columns is None and header:
                columns, header_line = _header(name, number, fields), number
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


def _header(name: str, number: int, fields: list[str]) -> list[str]:
    where = f"{name}:{number}"
    if fields[0].lstrip().startswith("{"):
        raise InputError(f"{where}: {excerpt(fields[0])} heads no table; is it JSON Lines? then name it .jsonl")
    if len(set(fields)) < len(fields):
        raise InputError(f"{where}: two columns of the header have the same name: {listed(fields)}")
    if len(fields) < 2:
        hints = {
            "\t": "it is tab-separated: then name it .tsv",
            ";": "it is separated by semicolons, but must be by commas",
            "|": "it is separated by bars, but must be by commas",
            ",": "it is a CSV: then name it .csv",
        }
        hint = next((hint for mark, hint in hints.items() if mark in fields[0]), None)
        if hint:
            raise InputError(f"{where}: a header of one column: {excerpt(fields[0])}; {hint}")
    return fields


def _parquet_rows(path: Path, name: str) -> Iterator[Row | RowError]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Without buffering ahead: memory for a batch, not for all columns of a row group.
        with pq.ParquetFile(path, pre_buffer=False) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise InputError(f"{name}: two columns have the same name: {listed(names)}")
            named = class_namer(_classes(file.schema_arrow.metadata))
            tables = (zip(*map(_cells, batch.columns), strict=True) for batch in file.iter_batches(batch_size=1000))
            rows = progress(chain.from_iterable(tables), f"reading {path.name}", file.metadata.num_rows)
            for number, cells in enumerate(rows):
                yield Row(f"{name} row ", number, named(dict(zip(names, cells, strict=True))))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{name}: not a Parquet file that can be read: {' '.join(str(error).split())}") from None


def _cells(column: pa.Array) -> list[Any]:
    """The values of a column; of one that can hold neither texts nor labels, its type in their place."""
    import pyarrow as pa

    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    of_texts = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_null,
        pa.types.is_list,
    )
    of_labels = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_large_list)
    if any(is_kind(kind) for is_kind in (*of_texts, *of_labels)):
        return list(column.to_pylist())
    return [kind] * len(column)


def _classes(metadata: dict[bytes, bytes] | None) -> dict[str, list[str]]:
    """The names of class labels that `datasets` leaves in the files it writes."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        kinds = {name: kind for name, kind in features.items() if isinstance(kind, dict)}
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}  # written by something else, or by a release with another layout
    return {
        name: kind["names"] for name, kind in kinds.items() if kind.get("_type") == "ClassLabel" and "names" in kind
    }


def class_namer(classes: dict[str, list[str]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Replaces numbered class labels by their names: not every data set numbers them as SNLI does."""

    def named(cells: dict[str, Any]) -> dict[str, Any]:
        for column, names in classes.items():
            value = cells.get(column)
            if isinstance(value, int) and 0 <= value < len(names):
                cells[column] = names[value]
        return cells

    return named
