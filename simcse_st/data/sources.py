"""Where rows come from: files, by name or pattern, or a split of a data set on the Hugging Face Hub."""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simcse_st.data.formats import DELIMITED, FORMATS, file_format, read_file
from simcse_st.data.hub import HubSplit
from simcse_st.data.rows import Row, RowError
from simcse_st.errors import InputError

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_KNOWN = f"{', '.join(FORMATS[:-1])} (also .gz) or {FORMATS[-1]}"


@dataclass(frozen=True)
class Source:
    """Where rows come from.

    Args:
        name: A file, a pattern such as ``data/*.jsonl`` (in the order of the names), a sequence of both, or the id of
            a data set on the hub.
        config: Of a data set: its configuration, where it has several.
        split: Of a data set: the split.
        revision: Of a data set: a commit, tag or branch.
        files: Of a data set: the files to read, by name or pattern; by default those its own configuration names.
        streaming: Of a data set: read it over the network as it goes, and keep no copy.
    """

    reference: str | tuple[str, ...]
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    files: str | None = None
    streaming: bool = False

    @property
    def name(self) -> str:
        """What to call it in an error."""
        if isinstance(self.reference, str):
            return self.reference
        more = f" and {len(self.reference) - 1} more" if len(self.reference) > 1 else ""
        return f"{self.reference[0]}{more}"

    def paths(self) -> list[Path] | None:
        """The files, or None for a data set on the hub.

        Raises:
            InputError: Neither files that exist nor the name of a data set.
        """
        if not isinstance(self.reference, str):
            return [path for name in self.reference for path in _files(name)]
        path = Path(self.reference).expanduser()
        is_id = _HUB_ID.match(self.reference) and file_format(path) is None and path.suffix not in (".gz", ".zip")
        return None if is_id and not path.exists() else _files(self.reference)

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
            yield from self._hub().rows()
            return
        for path in paths:
            if not header and file_format(path) not in DELIMITED:
                raise InputError(f"{path}: data.columns by numbers is for CSV and TSV; here columns have names")
            rows = read_file(path, str(path), header=header)
            first = next(rows, None)
            if first is None:
                raise InputError(f"{path}: there is no row in it (the first line of a CSV or TSV is its header)")
            yield first
            yield from rows

    def record(self) -> list[dict[str, Any]]:
        """What identifies each input in a manifest."""
        paths = self.paths()
        return [self._hub().record()] if paths is None else [file_record(path) for path in paths]

    def _hub(self) -> HubSplit:
        assert isinstance(self.reference, str)
        return HubSplit(self.reference, self.config, self.split, self.revision, self.files, self.streaming)


def file_record(path: Path) -> dict[str, Any]:
    """What identifies a file in a manifest. Its folder is this machine's own business."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": file_sha256(path)}


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal digits."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _files(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_dir():
        known = sorted(file.name for file in path.iterdir() if file_format(file))
        held = f"it holds {', '.join(known[:5])}{', ...' if len(known) > 5 else ''}" if known else "it holds none"
        raise InputError(f"{name} is a folder: name a file in it, or several as {name.rstrip('/')}/*.jsonl; {held}")
    if path.exists():
        found = [path]
    elif glob.has_magic(name):
        found = sorted(match for match in map(Path, glob.glob(str(path), recursive=True)) if match.is_file())
        if not found:
            raise InputError(f"{name}: no file matches this pattern")
    else:
        raise InputError(f"{name}: no such file")
    for file in found:
        if file_format(file) is None:
            raise InputError(f"{file}: of no known format: its name must end in {_KNOWN}")
    return found
