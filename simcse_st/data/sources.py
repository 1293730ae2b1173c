"""Rows out of files and hub data sets, each with the place it came from."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from simcse_st.errors import InputError

FORMATS = (".jsonl", ".csv", ".txt")
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")


@dataclass(frozen=True)
class Row:
    """One row of a source."""

    where: str
    """``file:line``, or the row's number in a hub data set."""
    cells: dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Where rows come from: a file, or one split of a hub data set."""

    name: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    files: str | None = None
    """The files of the data set to read, by name or pattern; by default those its own configuration names."""

    @property
    def path(self) -> Path | None:
        """The file, or None for a hub data set.

        Raises:
            InputError: Neither a file that exists nor the name of a hub data set.
        """
        path = Path(self.name).expanduser()
        if path.is_dir():
            raise InputError(f"{self.name} is a folder: name a file ({', '.join(FORMATS)}) in it")
        looks_like_file = path.suffix in (*FORMATS, ".json", ".tsv", ".gz", ".parquet")
        if path.exists() or looks_like_file or not _HUB_ID.match(self.name):
            if not path.exists():
                raise InputError(f"{self.name}: no such file")
            if path.suffix not in FORMATS:
                raise InputError(f"{self.name}: of no known format: its name must end in {' or '.join(FORMATS)}")
            return path
        return None

    def record(self) -> dict[str, Any]:
        """What identifies this source in a manifest."""
        if self.path:
            return {"file": self.path.name, "sha256": file_sha256(self.path)}
        return {
            "dataset": self.name,
            "config": self.config,
            "split": self.split,
            "revision": self.revision,
            "files": self.files,
        }

    def rows(self, csv_columns: list[str] | None = None) -> Iterator[Row]:
        """Reads all rows.

        Args:
            csv_columns: Names for the columns of a CSV without a header; by default its first line is the header.

        Yields:
            The rows in their order.

        Raises:
            InputError: The source cannot be read, or a row is not of its format.
        """
        if self.path is None:
            return self._hub_rows()
        if self.path.suffix == ".csv":
            return _csv_rows(self.path, self.name, csv_columns)
        if self.path.suffix == ".txt":
            return _text_rows(self.path, self.name)
        return _jsonl_rows(self.path, self.name)

    def _hub_rows(self) -> Iterator[Row]:
        import datasets  # seconds to import, and files do not need it
        from huggingface_hub import is_offline_mode

        label = f"{self.name}[{self.split}]"
        try:
            rows = datasets.load_dataset(
                self.name, self.config, split=self.split, revision=self.revision, data_files=self.files
            )
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            # The libraries raise these for all of: no such data set, config or split; no access; no network.
            offline = " (offline: HF_HUB_OFFLINE is set; give a file instead)" if is_offline_mode() else ""
            reason = " ".join(str(error).split())
            raise InputError(
                f"{label}: cannot be loaded from the Hugging Face Hub, and no such file is here{offline}: {reason}"
            ) from error
        # Class labels are read by their names: not every data set numbers them as SNLI does.
        classes = {name: kind for name, kind in rows.features.items() if isinstance(kind, datasets.ClassLabel)}
        for index, cells in enumerate(rows):
            for name, kind in classes.items():
                if cells[name] is not None and cells[name] >= 0:
                    cells[name] = kind.int2str(cells[name])
            yield Row(f"{label} row {index}", cells)


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal digits."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def is_sentence(value: Any) -> TypeGuard[str]:
    """Whether a value is text that can be encoded: not blank, and without halves of surrogate pairs."""
    return isinstance(value, str) and bool(value.strip()) and not re.search("[\ud800-\udfff]", value)


def excerpt(value: Any, limit: int = 60) -> str:
    """A value as an error shows it: quoted, on one line, not too long."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _lines(path: Path, name: str) -> Iterator[tuple[int, str]]:
    """Numbered lines of a UTF-8 file, with their line ends."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    encoding = "utf-16" if line.startswith((b"\xff\xfe", b"\xfe\xff")) else "latin1"
                    raise InputError(
                        f"{name}:{number}: byte {error.start + 1} of the line ({line[error.start]:#04x}) is not UTF-8; "
                        f"convert the file, e.g. iconv -f {encoding} -t utf-8"
                    ) from None
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror}") from None


def _jsonl_rows(path: Path, name: str) -> Iterator[Row]:
    for number, line in _lines(path, name):
        if not line.strip():
            continue
        try:
            cells = json.loads(line, object_pairs_hook=_without_repetition)
        except (ValueError, RecursionError) as error:
            # Not only of JSON: also numbers of thousands of digits, and brackets nested as deep.
            problem = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            hint = "; is it a CSV? then name it .csv" if number == 1 and "," in line and line[0] not in "{[" else ""
            raise InputError(
                f"{name}:{number}: not a JSON object on one line ({problem}): {excerpt(line.strip())}{hint}"
            ) from None
        if not isinstance(cells, dict):
            raise InputError(f"{name}:{number}: a row must be a JSON object, not {excerpt(cells)}")
        yield Row(f"{name}:{number}", cells)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    cells = dict(pairs)
    if len(cells) < len(pairs):
        raise ValueError("a key stands twice")
    return cells


def _text_rows(path: Path, name: str) -> Iterator[Row]:
    for number, line in _lines(path, name):
        yield Row(f"{name}:{number}", {"text": line.rstrip("\r\n")})


def _csv_rows(path: Path, name: str, columns: list[str] | None) -> Iterator[Row]:
    reader = csv.reader((line for _, line in _lines(path, name)), strict=True)
    begin = 1
    try:
        for fields in reader:
            where, begin = f"{name}:{begin}", reader.line_num + 1
            if not fields:
                continue
            swallowed = next((field for field in fields if "\n" in field or "\r" in field), None)
            if swallowed is not None:
                raise InputError(
                    f"{where}: the quoted field {excerpt(swallowed)} runs on to line {reader.line_num}: close the "
                    "quote, or keep sentences with line breaks in JSON Lines"
                )
            if columns is None:
                columns = fields
                if fields[0].lstrip().startswith("{"):
                    raise InputError(
                        f"{where}: {excerpt(fields[0])} heads no CSV; is it JSON Lines? then name it .jsonl"
                    )
                if len(set(columns)) < len(columns):
                    raise InputError(f"{where}: two columns of the header have the same name: {columns}")
                if len(columns) < 2:
                    hint = "; it is tab-separated" if "\t" in fields[0] else ""
                    raise InputError(f"{where}: a header of one column: {excerpt(fields[0])}{hint}")
                continue
            if len(fields) != len(columns):
                raise InputError(f"{where}: {len(fields)} fields where {len(columns)} ({', '.join(columns)}) belong")
            yield Row(where, dict(zip(columns, fields, strict=True)))
    except csv.Error as error:
        raise InputError(f"{name}:{begin}: not valid CSV: {error}") from None
