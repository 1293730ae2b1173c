"""Where rows come from: files, by name or pattern, or a split of a data set on the Hugging Face Hub."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simcse_st.data.formats import DELIMITED, FORMATS, file_format, read_file
from simcse_st.data.hub import HubSplit
from simcse_st.data.quoting import quotes_of
from simcse_st.data.rows import Row, RowError, file_sha256, listed
from simcse_st.errors import InputError

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_KNOWN = f"{', '.join(FORMATS[:-1])} (also .gz) or {FORMATS[-1]}"


@dataclass(frozen=True)
class Source:
    """Where rows come from.

    Attributes:
        reference: A file, a pattern such as ``data/*.jsonl`` (in the order of the names), a sequence of both, or the id
            of a data set on the hub.
        config: Of a data set: its configuration, where it has several.
        split: Of a data set: the split.
        revision: Of a data set: a commit, tag or branch.
        files: Of a data set: the files to read, by name or pattern; by default those its own configuration names.
        streaming: Of a data set: read it over the network as it goes, and keep no copy.
        quotes: Of a TSV: whether fields may be quoted as in a CSV; by default the file itself shows it.
    """

    reference: str | Path | Sequence[str | Path]
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    files: str | None = None
    streaming: bool = False
    quotes: bool | None = None

    def __post_init__(self) -> None:
        reference = self.reference
        if isinstance(reference, (str, Path)):
            object.__setattr__(self, "reference", str(reference))
        else:
            object.__setattr__(self, "reference", tuple(map(str, reference)))
        if not self.reference:
            raise InputError("no file and no data set is named")

    @property
    def name(self) -> str:
        """What to call it in an error."""
        if isinstance(self.reference, str):
            return self.reference
        first, *more = map(str, self.reference)  # type: ignore[arg-type]
        return f"{first} and {len(more)} more" if more else first

    def paths(self) -> list[Path] | None:
        """The files, or None for a data set on the hub.

        Raises:
            InputError: Neither files that exist nor the name of a data set.
        """
        if isinstance(self.reference, str):
            path = Path(self.reference).expanduser()
            is_id = _HUB_ID.match(self.reference) and file_format(path) is None and path.suffix not in (".gz", ".zip")
            if is_id and not _exists(path):
                return None
        names = [self.reference] if isinstance(self.reference, str) else self.reference
        found = [path for name in names for path in _files(str(name))]  # type: ignore[union-attr]
        seen: set[Path] = set()
        for path in found:
            if path.resolve() in seen:
                raise InputError(f"{path} is named twice: its rows would count twice")
            seen.add(path.resolve())
        return found

    def rows(self, *, header: bool = True) -> Iterator[Row | RowError]:
        """Reads all rows.

        Args:
            header: Whether tables name their columns; if not, they are called "1", "2", ...

        Yields:
            The rows in their order, and in the place of a row that is broken, what is wrong with it.

        Raises:
            InputError: The source cannot be read.
        """
        paths = self.paths()
        if paths is None:
            yield from self._hub().rows(header=header)
            return
        for path in paths:
            if not header and file_format(path) not in DELIMITED:
                raise InputError(f"{path}: data.columns by numbers is for CSV and TSV; here columns have names")
            rows = read_file(path, str(path), header=header, quotes=self.quotes)
            first = next(rows, None)
            if first is None:
                raise InputError(f"{path}: there is no row in it{_after_header(path)}")
            yield first
            yield from rows

    def record(self) -> list[dict[str, Any]]:
        """What identifies each input in a manifest."""
        paths = self.paths()
        if paths is None:
            return [self._hub().record()]
        records = []
        for path in paths:
            records.append(file_record(path))
            quotes = quotes_of(path, str(path), self.quotes) if file_format(path) == ".tsv" else None
            if quotes is not None:
                records[-1]["quotes"] = "csv" if quotes else "text"
        return records

    def _hub(self) -> HubSplit:
        return HubSplit(str(self.reference), self.config, self.split, self.revision, self.files, self.streaming)


def _after_header(path: Path) -> str:
    return " (its first line is the header)" if file_format(path) in DELIMITED else ""


def file_record(path: Path) -> dict[str, Any]:
    """What identifies a file in a manifest. Its folder is this machine's own business."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": file_sha256(path)}


def is_folder(path: Path) -> bool:
    """Whether there is such a folder.

    Raises:
        InputError: That cannot be told: its own folder cannot be read, or its name is too long.
    """
    return _exists(path) and path.is_dir()


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise InputError(f"{str(path)[:200]}: cannot be read: {error.strerror}") from None


def _files(name: str) -> list[Path]:
    try:
        return _files_of(name)
    except OSError as error:
        raise InputError(f"{name[:200]}: cannot be read: {error.strerror}") from None


def _files_of(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_dir():
        known = sorted(file.name for file in path.iterdir() if file_format(file))
        held = f"it holds {listed(known, 5)}" if known else "it holds none"
        raise InputError(f"{name} is a folder: name a file in it, or several as {name.rstrip('/')}/*.jsonl; {held}")
    if path.exists():
        found = [path]
    elif glob.has_magic(name):
        found = sorted(match for match in map(Path, glob.glob(str(path), recursive=True)) if match.is_file())
        if not found:
            raise InputError(f"{name}: no file matches this pattern")
    else:
        hint = ": download it first" if re.match(r"\w+://", name) else ""
        raise InputError(f"{name}: no such file{hint}")
    for file in found:
        if file_format(file) is None:
            raise InputError(f"{file}: of no known format: its name must end in {_KNOWN}")
        if not file.is_file():
            raise InputError(f"{file}: is no regular file")
    return found
